"""The metrics of a split: each sample once, averaged in float64, training left untouched."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping
from numbers import Real
from typing import Any

import torch
from torch import Tensor

from ampctl import rng
from ampctl.amp.precision import has_float64
from ampctl.data.loader import Padding, unwrapped
from ampctl.data.move import to_device
from ampctl.engine.modes import in_eval_mode
from ampctl.engine.passes import items_in
from ampctl.engine.state import TrainState
from ampctl.errors import UsageError

_MEAN = ", the mean over the batch"


class NoItemsError(UsageError):
    """There was nothing to average over."""


def evaluate(
    state: TrainState, batches: Iterable[Any], *, proceed: Callable[[], bool] = lambda: True
) -> dict[str, float] | None:
    """Return the task's metrics over all batches, as ``eval/NAME``; the EMA's, if there is one.

    ``proceed`` is asked before each batch; once it says no, the evaluation is given up and None
    is returned. Random numbers drawn here do not move the training's. The model goes back to the
    mode that each of its modules was in, and its buffers to what they were.

    Several ranks have a part of the batches each, the same number of them; ``proceed`` must say the
    same on all. The metrics are those of all parts, on every rank. A batch without items, or that
    the task gives no loss for, takes no part; raises NoItemsError if none does.
    """
    # Each rank's statistics are of its own batches: all evaluate what a checkpoint holds.
    state.buffers.follow_first(state.ranks)
    with state.boundary.changing():
        state.buffers.snapshot()
    try:
        with in_eval_mode(state.bare), torch.no_grad(), rng.preserved(state.device):
            if state.ema is None:
                return _means(state, batches, proceed)
            with state.ema.applied(state.boundary):
                return _means(state, batches, proceed)
    finally:
        with state.boundary.changing():
            state.buffers.restore(torch.ones((), device=state.device))
            state.buffers.is_kept = False


def _means(
    state: TrainState, batches: Iterable[Any], proceed: Callable[[], bool]
) -> dict[str, float] | None:
    sums: dict[str, Tensor | float] = {}
    items = 0.0
    for batch in batches:
        if not proceed():
            return None
        is_padding = isinstance(batch, Padding)  # another rank counts it
        if is_padding and not state.ranks.shards:
            continue
        (batch,) = unwrapped([batch])
        count = 0.0 if is_padding else items_in(state, batch)  # while it is on the host
        batch = to_device(batch, state.device, channels_last=state.channels_last)
        extras = state.extras("loss")
        with state.precision.autocast(), torch.set_grad_enabled("grad" in extras):
            output = state.task.loss(state.local, batch, **extras)
        loss, extra = (
            (*output, None)[:2] if isinstance(output, tuple) and output else (output, None)
        )
        if loss is None:
            continue
        _require_number(loss, f"{state.task.name}.loss gave", _MEAN)
        values = {"loss": loss, **_named(state, "metrics", state.task.metrics(extra, batch), _MEAN)}
        for name, value in values.items():
            sums[name] = sums.get(name, 0.0) + _weighted(value, count, state.device)
        items += count
    of_this_rank = {name: float(value) for name, value in sums.items()}  # sync: once
    parts = state.ranks.gather((of_this_rank, items))
    total = sum(part for _, part in parts)
    if not total:
        raise NoItemsError(
            "data.eval: there is nothing to average over: no batch has an item that counts and a "
            "loss (are all labels ignored?)"
        )
    names = dict.fromkeys(name for part, _ in parts for name in part)
    means = {name: sum(part.get(name, 0.0) for part, _ in parts) / total for name in names}
    given = _named(state, "summary", state.task.summary(means))
    summary = {f"eval/{name}": float(value) for name, value in given.items()}
    return state.ranks.of_first(summary)  # they decide by it, and a task may be told its rank


def _named(state: TrainState, method: str, given: Any, what: str = "") -> Mapping[str, Any]:
    """Return what a method of the task gave; raise UsageError if it is no numbers by name."""
    method = f"{state.task.name}.{method}"
    if not isinstance(given, Mapping):
        raise UsageError(
            f"task: {method} gave {type(given).__name__}; it must return a dictionary of numbers "
            "by name"
        )
    for name, value in given.items():
        _require_number(value, f"{method}: the metric {name!r} is", what)
    return given


def _require_number(value: Any, found: str, what: str) -> None:
    is_number = isinstance(value, Real) or (
        getattr(value, "size", None) == 1 and hasattr(value, "dtype")  # of NumPy
    )
    if isinstance(value, Tensor):
        is_number = value.numel() == 1 and not value.is_complex()
    if not is_number:
        shape = getattr(value, "shape", None)
        kind = type(value).__name__ if shape is None else f"of shape {list(shape)}"
        raise UsageError(f"task: {found} {kind}; it must be one number{what}")


def _weighted(value: Any, count: float, device: torch.device) -> Tensor | float:
    if not count:
        return 0.0  # a batch without items has no mean: 0 x nan would poison the rest
    return _double(value, device) * count


def _double(value: Tensor | float, device: torch.device) -> Tensor | float:
    """Return a detached float64; on a device without float64 the host keeps the sums."""
    if not isinstance(value, Tensor):
        return float(value)
    value = value.detach().reshape(())
    if not has_float64(device):
        return float(value)  # sync: no float64 on this device
    return value.double()
