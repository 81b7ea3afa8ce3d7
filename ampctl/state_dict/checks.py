"""What a saved state must look like before any of it is loaded; it may be damaged or a forgery.

Shapes are a matter of safety, too: a fused kernel writes where its state's shape is not what it
takes it for, past the end of its memory. What fits which model is left to ``load_state``.
"""

from __future__ import annotations

import copy
import math
import types
from collections.abc import Mapping, Sequence
from enum import Enum
from pathlib import PurePath
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampctl.distributed.shard import is_sharded
from ampctl.errors import CheckpointError, printable
from ampctl.state_dict.optimizers import is_torchs_own

_LARGEST = 1 << 62
_COUNTS = ("step", "updates", "skipped", "consecutive_skips", "epoch", "batch_in_epoch", "samples")
_BY_NAME = ("optimizer_updates", "optimizer_skips", "optimizer_skips_in_a_row")
# Those of torch.optim whose state has other shapes than the parameter's: none has a fused kernel.
_FREE = (torch.optim.LBFGS, torch.optim.Adafactor)
_NUMBERS = ("step", "mu_product", "mu", "eta", "ax")
_ADAM = ("step", "exp_avg", "exp_avg_sq")
_NEEDED: Mapping[type, tuple[str, ...]] = types.MappingProxyType(
    {torch.optim.Adam: _ADAM, torch.optim.AdamW: _ADAM, torch.optim.Adagrad: ("step", "sum")}
)


def require_counts(progress: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a ``progress`` that no run can have made."""
    for name in _COUNTS:
        _require(_is_count(progress.get(name, 0)), f"progress.{name}", progress.get(name))
    step = progress["step"]
    for name in ("updates", "skipped", "epoch", "batch_in_epoch"):
        _require(progress[name] <= step, f"progress.{name}", progress[name])
    for name in ("evaluated_step", "followed_step"):
        at = progress.get(name, -1)
        _require(at == -1 or _is_count(at), f"progress.{name}", at)
    _require(_is_count(progress.get("early_stop_bad", 0)), "progress.early_stop_bad", "it")
    best_step = progress.get("best_step")
    _require(best_step is None or _is_count(best_step), "progress.best_step", best_step)
    for name in ("best", "early_stop_best"):
        best = progress.get(name)
        _require(best is None or _is_number(best), f"progress.{name}", best)
    metrics = progress.get("metrics", {})
    is_fit = isinstance(metrics, Mapping) and all(
        isinstance(name, str) and type(value) in (int, float) for name, value in metrics.items()
    )
    _require(is_fit, "progress.metrics", metrics)
    for name in _BY_NAME:
        counts = progress.get(name, {})
        is_fit = isinstance(counts, Mapping) and all(
            isinstance(key, str) and _is_count(count) for key, count in counts.items()
        )
        _require(is_fit, f"progress.{name}", counts)


def require_scale(scaler: Mapping[str, Any]) -> None:
    """Raise CheckpointError for a loss scale that none can be; an empty state is one switched off.

    A state of a stock ``GradScaler`` has no counters of ampctl.
    """
    if not scaler or scaler.get("enabled") is False:
        return
    scale = scaler.get("scale")
    is_fit = scale is not None and _is_number(scale) and 0 < scale <= torch.finfo(torch.float32).max
    _require(is_fit, "scaler.scale", scale)
    _require(scaler.get("enabled", True) is True, "scaler.enabled", scaler.get("enabled"))
    for name in ("_growth_tracker", "hysteresis_tracker"):
        count = scaler.get(name, 0)
        _require(_is_count(count), f"scaler.{name}", count)


def fitting_groups(
    groups: Sequence[Mapping[str, Any]], own: Sequence[Mapping[str, Any]]
) -> list[dict[str, Any]]:
    """Return saved parameter groups with each value as the kind of thing that it is in ``own``.

    Raises CheckpointError for what it cannot have become.
    """
    indices = [index for group in groups for index in group["params"]]
    is_fit = all(type(index) is int for index in indices) and len({*indices}) == len(indices)
    _require(is_fit, "optimizer.param_groups.params", indices[:20])
    fitting = []
    for group, fresh in zip(groups, own, strict=True):
        where = "optimizer.param_groups"
        for name in ("lr", "initial_lr"):
            rate = group.get(name, 0.0)
            is_fit = _is_number(rate) or (isinstance(rate, Tensor) and is_like(rate, 0.0))
            _require(is_fit and float(rate) >= 0, f"{where}.{name}", rate)
        own_kinds = {
            name: fitted(group[name], value, f"{where}.{name}")
            for name, value in fresh.items()
            if name in group
        }
        fitting.append({**group, **own_kinds})
    return fitting


def fitting_state(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], weights: Mapping[str, Any]
) -> dict[Any, Any]:
    """Return a saved optimizer's state with each tensor in the strides of its parameter.

    ``weights`` were saved with it, by name. Raises CheckpointError for what has another shape or
    dtype than its parameter, or is missing. A counter is one number; the states of optimizers that
    torch does not bring are their own business.
    """
    held = state["state"]
    rows = [
        (index, parameter, {"momentum_buffer": None, **saved}, name)
        for saved, group in zip(state["param_groups"], optimizer.param_groups, strict=True)
        for index, parameter, name in zip(
            saved["params"],
            group["params"],
            saved.get("param_names", [None] * len(saved["params"])),
            strict=True,
        )
    ]
    _require(isinstance(held, Mapping), "optimizer.state", held)
    unknown = [index for index in held if index not in {row[0] for row in rows}]
    _require(not unknown, "optimizer.state", unknown)
    if not is_torchs_own(optimizer) or isinstance(optimizer, _FREE):
        return dict(held)
    fitting = {}
    for index, parameter, group, name in rows:
        if index in held:
            was = getattr(weights.get(name), "dtype", parameter.dtype)
            where = f"optimizer.state.{index}"
            fitting[index] = _fitting(held[index], parameter, {was, parameter.dtype}, where)
            needed = _NEEDED.get(type(optimizer), ())
            needed += ("max_exp_avg_sq",) if group.get("amsgrad") else ()
            missing = [each for each in needed if fitting[index] and each not in fitting[index]]
            _require(not missing, where, missing)
    return fitting


def _fitting(held: Any, parameter: Tensor, dtypes: set[torch.dtype], where: str) -> dict[str, Any]:
    _require(isinstance(held, Mapping), where, held)
    fitting = {}
    for name, value in held.items():
        place = f"{where}.{name}"
        if name in _NUMBERS and (not isinstance(value, Tensor) or value.numel() == 1):
            is_fit = is_like(value, 0.0) and not isinstance(value, bool)
            is_fit &= not isinstance(value, Tensor) or value.is_floating_point()
            _require(is_fit, place, value)
            fitting[name] = value
            continue
        if value is None and name == "momentum_buffer":
            fitting[name] = value
            continue
        is_fit = isinstance(value, Tensor) and value.shape == parameter.shape
        is_fit = is_fit and value.layout == torch.strided and not value.is_meta
        _require(is_fit and value.dtype in dtypes, place, value)
        if not is_sharded(value) and value.stride() != parameter.stride():
            value = torch.empty_like(parameter.detach(), dtype=value.dtype, device="cpu").copy_(
                value
            )
        fitting[name] = value
    return fitting


def place(tensor: Tensor) -> tuple[Any, ...]:
    """Return what two names of one tensor (tied weights) have in common."""
    storage = tensor.untyped_storage()
    own = id(tensor) if not tensor.numel() else storage.data_ptr()
    return own, tensor.storage_offset(), tensor.dtype, tensor.shape, tensor.stride()


def is_like(value: Any, fresh: Any) -> bool:
    """Return whether a saved setting is of the kind that a fresh one is.

    Numbers must be finite, but for an infinity that stands in the fresh one too.
    """
    if type(value) is type(fresh) is float and value == fresh:
        return True
    if isinstance(fresh, Mapping):
        return isinstance(value, Mapping)
    if isinstance(fresh, bool) or isinstance(value, bool):
        return isinstance(value, bool) and (isinstance(fresh, bool) or fresh is None)
    if isinstance(value, Tensor):
        return value.numel() == 1 and not value.is_meta and bool(torch.isfinite(value).all())
    if isinstance(fresh, int | float | Tensor):
        return _is_number(value)
    if isinstance(fresh, list | tuple):
        return (
            isinstance(value, list | tuple)
            and len(value) == len(fresh)
            and all(map(is_like, value, fresh))
        )
    if fresh is None:
        return value is None or _is_number(value) or isinstance(value, str)
    return isinstance(value, type(fresh))


def fitted(value: Any, fresh: Any, where: str, *, may_grow: bool = False) -> Any:
    """Return a saved value as the kind of thing that a fresh one is.

    ``may_grow``: a list may have another length than the fresh one. In a mapping of names others
    than the fresh one's are dropped: they may be attributes, and hide methods. Raises
    CheckpointError for what the fresh one cannot have become.
    """
    if isinstance(fresh, Mapping):
        _require(isinstance(value, Mapping), where, value)
        known = {
            key: fitted(item, fresh[key], f"{where}.{key}", may_grow=may_grow)
            if key in fresh
            else item
            for key, item in value.items()
            if key in fresh or not fresh or not isinstance(key, str)
        }
        if type(fresh) is dict:
            return known
        as_fresh: Any = copy.copy(fresh)  # a Counter, a defaultdict
        as_fresh.clear()
        as_fresh.update(known)
        return as_fresh
    if isinstance(fresh, set | frozenset):
        _require(isinstance(value, list), where, value)
        return type(fresh)(value)
    if isinstance(fresh, list | tuple):
        _require(isinstance(value, list | tuple), where, value)
        if len(value) == len(fresh):
            items = [
                fitted(item, own, f"{where}.{place}", may_grow=may_grow)
                for place, (item, own) in enumerate(zip(value, fresh, strict=True))
            ]
            return tuple(items) if isinstance(fresh, tuple) else items
        _require(may_grow and not any(isinstance(item, Mapping) for item in fresh), where, value)
        return value
    if isinstance(fresh, np.ndarray):
        _require(isinstance(value, Tensor), where, value)
        return value.numpy()
    if isinstance(fresh, np.generic):
        _require(is_like(value, fresh.item()), where, value)
        return type(fresh)(value)
    if isinstance(fresh, Enum | PurePath):
        return type(fresh)(value)
    if isinstance(fresh, Tensor) and isinstance(value, Tensor):
        is_fit = value.shape == fresh.shape and not value.is_meta
        _require(is_fit and bool(torch.isfinite(value).all()), where, value)
        return value.to(fresh.device)
    if fresh is None and isinstance(value, list | tuple | Mapping):
        return value
    _require(is_like(value, fresh), where, value)
    return value


def are_same(one: Any, other: Any) -> bool:
    """Return whether two nests of plain values are of the same kinds and values."""
    if isinstance(one, Tensor) or isinstance(other, Tensor):
        return (
            isinstance(one, Tensor)
            and isinstance(other, Tensor)
            and (one.dtype, one.shape, one.is_meta) == (other.dtype, other.shape, False)
            and torch.equal(one.cpu(), other.cpu())
        )
    if isinstance(one, Mapping) and isinstance(other, Mapping):
        return one.keys() == other.keys() and all(are_same(one[key], other[key]) for key in one)
    if isinstance(one, list | tuple) and isinstance(other, list | tuple):
        return len(one) == len(other) and all(map(are_same, one, other))
    return type(one) is type(other) and bool(one == other or (one != one and other != other))


def moved_on(saved: Any, was: Any, fresh: Any) -> Any:
    """Return a saved state with those of its settings that are other ones in a ``fresh`` one.

    ``was``: what the saved one was when it was fresh; what differs from that is what has moved.
    """
    if all(isinstance(each, Mapping) for each in (saved, was, fresh)):
        return {
            key: moved_on(value, was[key], fresh[key]) if key in was and key in fresh else value
            for key, value in saved.items()
        }
    are_lists = all(isinstance(each, list | tuple) for each in (saved, was, fresh))
    if are_lists and len(saved) == len(was) == len(fresh):
        return [*map(moved_on, saved, was, fresh)]
    return saved if are_same(was, fresh) else fresh


def rates(value: Any, where: str) -> list[float]:
    """Return saved learning rates; raise CheckpointError if they are none."""
    is_fit = isinstance(value, list | tuple) and all(_is_number(v) and v >= 0 for v in value)
    _require(is_fit, where, value)
    return list(value)


def _is_count(value: Any) -> bool:
    return type(value) is int and 0 <= value < _LARGEST


def _is_number(value: Any) -> bool:
    return type(value) in (int, float) and abs(value) < 1e300 and math.isfinite(value)


def _require(is_fit: bool, where: str, found: Any) -> None:
    if not is_fit:
        raise _fault(where, found)


def _fault(where: str, found: Any) -> CheckpointError:
    shape = f" of shape {[*found.shape]}" if isinstance(found, Tensor) else ""
    is_short = isinstance(found, str | bool | float) or (isinstance(found, int) and found < 1 << 64)
    shown = f"{found!r}"[:60] if is_short else f"a {type(found).__name__}{shape}"
    return CheckpointError(
        printable(
            f"the checkpoint cannot be used: its {where} is {shown}, which no run saves there"
        )
        + "; name another one, or the run folder for its newest intact one"
    )
