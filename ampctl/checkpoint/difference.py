"""What differs between two checkpoints: which weights moved and how far, and what else changed."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor

from ampctl.checkpoint.contents import Facts, fact, is_whole, word
from ampctl.checkpoint.store import Loaded
from ampctl.errors import RecipeError
from ampctl.recipe.load import parse_recipe, recipe_changes

_BLOCK = 1 << 20


def difference(first: Loaded, second: Loaded) -> Facts:
    """Return how to get from one checkpoint to another, as facts that JSON can hold.

    ``moved``: the weights whose values differ, the largest ``relative`` change first: the 2-norm
    of the change over that of the weight before. A weight that was all 0 has infinity there, one
    that is not finite in either has NaN and comes first. ``same`` is how many did not move.
    """
    before, after = first.payload, second.payload
    a, b = before["model"], after["model"]
    common = [name for name in a if name in b]
    moved, same, other = _moved(a, b, common)
    return {
        "moved": moved,
        "same": same,
        "appeared": [word(name) for name in b if name not in a],
        "vanished": [word(name) for name in a if name not in b],
        "other": other,
        "progress": _changes(before["progress"], after["progress"]),
        "scaler": _changes(before["scaler"], after["scaler"]),
        "training": _changes(*({k: p[k] for k in _TRAINING} for p in (before, after))),
        "recipe": _recipe(before["recipe"], after["recipe"]),
    }


_TRAINING = ("dtype", "world_size")


def _moved(
    a: Mapping[Any, Any], b: Mapping[Any, Any], names: list[Any]
) -> tuple[list[Facts], int, list[str]]:
    """Return the weights that moved, how many did not, and in words what cannot be compared."""
    moved, same, other = [], 0, []
    for name in names:
        old, new = a[name], b[name]
        if not isinstance(old, Tensor) or not isinstance(new, Tensor):
            if fact(old) != fact(new) or type(old) is not type(new):
                other.append(f"{word(name)}: another value")
            continue
        if old.shape != new.shape:
            other.append(f"{word(name)}: shape {list(old.shape)} -> {list(new.shape)}")
            continue
        if not is_whole(old) or not is_whole(new):
            other.append(f"{word(name)}: not compared, as it is no plain tensor")
            continue
        if old.dtype != new.dtype:
            other.append(f"{word(name)}: dtype {_dtype(old)} -> {_dtype(new)}")
        change, norm = _norms(old, new)
        if change == 0:
            same += 1
            continue
        relative = change / norm if norm else math.inf
        moved.append((math.nan if math.isnan(change) else relative, word(name), change))
    moved.sort(key=lambda each: (not math.isnan(each[0]), -each[0], each[1]))
    rows = [
        {"weight": name, "relative": fact(relative), "change": fact(change)}
        for relative, name, change in moved
    ]
    return rows, same, other


def _norms(old: Tensor, new: Tensor) -> tuple[float, float]:
    """Return the 2-norm of ``new - old`` and that of ``old``, added up in float64."""
    change = norm = 0.0
    for before, after in zip(_blocks(old), _blocks(new), strict=True):
        if not torch.equal(before, after):
            stays = (before == after) | (before.isnan() & after.isnan())  # infinities too
            change += float(torch.where(stays, 0.0, after - before).square().sum())
        norm += float(before.nan_to_num(0.0, 0.0, 0.0).square().sum())
    return math.sqrt(change), math.sqrt(norm)


def _blocks(tensor: Tensor) -> Iterator[Tensor]:
    """Yield the values in float64, a part at a time: a copy of all would double the memory."""
    values = torch.view_as_real(tensor) if tensor.is_complex() else tensor
    values = values.detach().reshape(-1)
    for start in range(0, len(values), _BLOCK):
        block = values[start : start + _BLOCK]
        is_tiny = block.is_floating_point() and block.element_size() == 1
        yield (block.float() if is_tiny else block).double()  # float8 goes by way of float32


def _changes(old: Mapping[Any, Any], new: Mapping[Any, Any]) -> dict[str, list[Any]]:
    """Return what differs as ``key: [before, after]``; what is not there is None."""
    a, b = fact(dict(old)), fact(dict(new))
    return {
        key: [a.get(key), b.get(key)]
        for key in [*a, *(key for key in b if key not in a)]
        if a.get(key) != b.get(key)
    }


def _recipe(old: str, new: str) -> list[str]:
    """Describe each key that changed."""
    if old == new:
        return []
    try:
        a, b = (parse_recipe(text, where="recipe") for text in (old, new))
    except RecipeError:
        return ["one of the recipes cannot be read, and their texts differ"]
    return [word(line) for line in recipe_changes(a, b)]


def _dtype(tensor: Tensor) -> str:
    return f"{tensor.dtype}".removeprefix("torch.")
