"""What a checkpoint holds, as plain facts; nothing is built, and nothing is taken on trust.

The content may be a stranger's: it may hold itself, claim tensors that are larger than its
file, or spell names that would steer a terminal.
"""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from functools import cache
from itertools import islice
from typing import Any, TypeVar

import torch
from torch import Tensor

from ampctl.checkpoint import sharded as parts
from ampctl.checkpoint.store import Loaded
from ampctl.errors import RecipeError, printable
from ampctl.recipe.load import parse_recipe
from ampctl.state_dict.checks import place
from ampctl.state_dict.copies import nonfinite

PARTS = ("model", "ema", "optimizer")
"""The keys of a checkpoint that are counted by themselves; what else there is, is the rest."""

_LONGEST_TEXT = 500
_LONGEST_NAME = 200
_MOST_FACTS = 5000
_NAMED = (Tensor, dict, list, tuple)

Facts = dict[str, Any]
_T = TypeVar("_T")


def describe(found: Loaded) -> Facts:
    """Return what is in a checkpoint as facts that JSON can hold; a non-finite float is a text.

    ``parts`` has, for the model, the EMA, the optimizer and the rest, how many ``tensors`` they
    have, their ``values`` by dtype, and the ``bytes`` of the file that they take. What two names
    share (tied weights) counts once, for the first. ``nonfinite`` names the tensors with a NaN or
    an infinity.
    """
    payload, path = found.payload, found.path
    tensors = list(named_tensors(payload))
    text, progress = payload["recipe"], payload["progress"]
    return {
        "path": printable(f"{path}"),
        "bytes": found.entry.size if found.entry else parts.size(path),
        "sha256": found.entry.sha256 if found.entry else parts.digest(path),
        "version": fact(payload["version"]),
        "recipe": {**_of_recipe(text), "digest": recipe_digest(text)},
        "progress": fact(progress),
        "dtype": fact(payload["dtype"]),
        "world_size": fact(payload["world_size"]),
        "scaler": fact(payload["scaler"]),
        "environment": fact(payload["environment"]),
        "parts": _parts(tensors),
        "nonfinite": _nonfinite(tensors),
        "strange": [name for name, tensor in tensors if not is_whole(tensor)],
    }


def recipe_digest(text: str) -> str:
    """Return the digest of a recipe's text, as `metrics.jsonl` has it."""
    return hashlib.sha256(text.encode("utf-8", "surrogatepass")).hexdigest()


def recipe_text(found: Loaded) -> str:
    """Return the recipe inside, line by line in letters that can be shown."""
    return "\n".join(printable(line) for line in found.payload["recipe"].splitlines())


def is_whole(tensor: Tensor) -> bool:
    """Return whether a tensor is a plain one that holds as many values as its shape says.

    A file may hold others: without memory, of a subclass, or with one value spread over many
    places, which would fill the memory when they are written out.
    """
    if type(tensor) not in (Tensor, torch.nn.Parameter) or tensor.is_meta or tensor.is_nested:
        return False
    if tensor.layout != torch.strided or not _has_arithmetic(tensor.dtype):
        return False
    return tensor.numel() * tensor.element_size() <= tensor.untyped_storage().nbytes()


@cache
def _has_arithmetic(dtype: torch.dtype) -> bool:
    """Return whether torch computes with a dtype at all: not with quantized and packed ones."""
    try:
        values = torch.zeros(1, dtype=dtype)
        (values if dtype.is_complex else values.float()).sum()
    except (RuntimeError, NotImplementedError, TypeError):
        return False
    return True


def nonfinite_by_design(payload: dict[str, Any]) -> frozenset[str]:
    """Return the names of tensors that were not finite from the start, as masks are."""
    names = payload["environment"].get("nonfinite_by_design")
    is_list = isinstance(names, list | tuple)
    return frozenset(name for name in names if isinstance(name, str)) if is_list else frozenset()


def fact(value: Any) -> Any:
    """Return a value as JSON can hold it and a screen can show it, whatever it was.

    A few thousand values are shown: lists that hold each other are endless when written out.
    """
    return _fact(value, 0, [_MOST_FACTS])


def _fact(value: Any, depth: int, left: list[int]) -> Any:
    left[0] -= 1
    if value is None or isinstance(value, bool):
        return value
    if isinstance(value, int):
        return value if abs(value) < 1 << 63 else "a number out of range"
    if isinstance(value, float):
        return value if math.isfinite(value) else f"{value}"
    if isinstance(value, str):
        return word(value)
    if depth > 5 or left[0] < 0:
        return "..."
    if isinstance(value, dict):
        return {word(key): _fact(item, depth + 1, left) for key, item in _few(value.items())}
    if isinstance(value, list | tuple):
        return [_fact(item, depth + 1, left) for item in _few(value)]
    return f"({type(value).__name__})"


def _few(items: Iterable[_T]) -> Iterable[_T]:
    return islice(items, _MOST_FACTS)


def word(value: Any) -> str:
    """Return a name or a short text in letters that can be shown."""
    if isinstance(value, str):
        text = printable(value[:_LONGEST_TEXT])
        return text if len(value) <= _LONGEST_TEXT else f"{text}..."
    is_short = isinstance(value, bool | float) or (isinstance(value, int) and abs(value) < 1 << 63)
    return f"{value}" if is_short else f"({type(value).__name__})"


def named_tensors(payload: dict[str, Any]) -> Iterator[tuple[str, Tensor]]:
    """Yield every tensor with its name; a container that is held twice is looked into once."""
    stack = [(word(key), value) for key, value in reversed(payload.items())]
    seen: set[int] = set()
    while stack:
        name, value = stack.pop()
        if isinstance(value, Tensor):
            yield name, value
            continue
        if not isinstance(value, dict | list | tuple) or id(value) in seen:
            continue
        seen.add(id(value))
        items = value.items() if isinstance(value, dict) else _once(value)
        inside = [
            (f"{name}.{word(key)}"[:_LONGEST_NAME], item)
            for key, item in items
            if isinstance(item, _NAMED)
        ]
        stack.extend(reversed(inside))


def _once(items: Iterable[Any]) -> Iterator[tuple[int, Any]]:
    """Yield the items of a list with their places, each object at its first one alone."""
    seen: set[int] = set()
    for index, item in enumerate(items):
        if id(item) not in seen:
            seen.add(id(item))
            yield index, item


def _parts(tensors: list[tuple[str, Tensor]]) -> dict[str, Facts]:
    parts: dict[str, Facts] = {
        name: {"tensors": 0, "values": {}, "bytes": 0} for name in (*PARTS, "rest")
    }
    # The EMA holds the model's own buffers, and a tensor has its storage from the first that came.
    ordered = sorted(tensors, key=lambda each: _rank(each[0]))
    storages: set[int] = set()
    places: set[tuple[Any, ...]] = set()
    for name, tensor in ordered:
        key = name.partition(".")[0]
        part = parts[key if key in PARTS else "rest"]
        part["tensors"] += 1
        if not is_whole(tensor):
            continue
        if place(tensor) not in places:
            places.add(place(tensor))
            dtype = f"{tensor.dtype}".removeprefix("torch.")
            part["values"][dtype] = part["values"].get(dtype, 0) + tensor.numel()
        storage = tensor.untyped_storage()
        if storage.nbytes() and storage.data_ptr() not in storages:
            storages.add(storage.data_ptr())
            part["bytes"] += storage.nbytes()
    return parts


def _rank(name: str) -> int:
    key = name.partition(".")[0]
    return PARTS.index(key) if key in PARTS else len(PARTS)


def _nonfinite(tensors: list[tuple[str, Tensor]]) -> list[str]:
    return nonfinite({name: tensor for name, tensor in tensors if is_whole(tensor)})


def _of_recipe(text: str) -> Facts:
    """Return name and monitor of a recipe; None if it is none that this version reads."""
    try:
        recipe = parse_recipe(text, where="recipe").recipe
    except RecipeError:
        return {"name": None, "monitor": None}
    return {"name": word(recipe.name), "monitor": word(recipe.checkpoint.monitor)}
