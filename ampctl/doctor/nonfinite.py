"""Why a step's gradients are not finite: the same micro-batches once more, with questions asked."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ampctl import rng
from ampctl.amp import gradients
from ampctl.amp.scaler import LossScaler
from ampctl.errors import first_of
from ampctl.state import TrainState
from ampctl.step import forward_backward


@dataclass(frozen=True)
class Diagnosis:
    """What is at fault, in words; ``module`` and ``tensor`` name it where one can be named."""

    cause: str
    advice: str
    module: str | None = None
    tensor: str | None = None
    facts: tuple[str, ...] = ()


@dataclass(frozen=True)
class _Replay:
    """One more forward and backward pass of a window: its loss, and the bad gradients' names."""

    loss: float
    bad_gradients: tuple[str, ...]


def examine(state: TrainState, window: Sequence[Any]) -> Diagnosis:
    """Run a bad window again, in its dtype and in float32, and say which of four faults it has.

    In the order in which one hides the others: weights that are not finite, inputs that are not
    finite, a fault of the low precision alone, a fault in float32 as well. The scale is the present
    one, and dropout draws anew. Weights, buffers and generators are left as they were; gradients
    are dropped.
    """
    state.buffers.snapshot()
    low = _replay(state, window)
    full = _replay(_in_float32(state), window)
    gradients.drop(state.parameters)
    state.buffers.restore(torch.ones_like(state.scaler.found_inf))
    facts = (
        f"loss {low.loss:.4g} in {state.precision.name}, {full.loss:.4g} in float32",
        f"non-finite gradients: {first_of(low.bad_gradients) or 'none'}",
        _largest_weight(state),
    )
    return replace(_verdict(state, window, low, full), facts=facts)


def _verdict(state: TrainState, window: Sequence[Any], low: _Replay, full: _Replay) -> Diagnosis:
    weights = [
        name for name, p in state.bare.named_parameters() if not bool(torch.isfinite(p).all())
    ]
    if weights:
        return Diagnosis(
            f"weights are not finite: {first_of(weights)}",
            "the weights were lost before this step: lower optimizer.lr or set amp.clip_norm, and "
            "start from an earlier checkpoint",
            module=weights[0].rpartition(".")[0],
            tensor=weights[0],
        )
    inputs = [place for batch in window for place in _nonfinite_inputs(batch)]
    if inputs:
        return Diagnosis(
            f"the batch holds values that are not finite: {first_of(inputs)}",
            "repair or leave out these samples in the data set",
            tensor=inputs[0],
        )
    first = (low.bad_gradients or (None,))[0]
    module = first.rpartition(".")[0] if first else None
    if full.bad_gradients:
        return Diagnosis(
            "the step is not finite in float32 either: the model or the learning rate is at "
            "fault, not the precision",
            "lower optimizer.lr, set amp.clip_norm (1.0, say), or look for a division by zero or "
            "the logarithm of zero in the loss",
            module=module,
            tensor=first,
        )
    if not low.bad_gradients:
        return Diagnosis(
            "run again, the step is finite: the fault depends on random numbers, or on the scale "
            "that was in force",
            "resume from the newest checkpoint; if it stops again, lower amp.init_scale",
        )
    other = "bfloat16" if state.precision.name == "float16" else "float32"
    return Diagnosis(
        f"the step overflows in {state.precision.name} and is finite in float32",
        f"set amp.dtype={other}, or lower optimizer.lr if the loss had been rising",
        module=module,
        tensor=first,
    )


def _in_float32(state: TrainState) -> TrainState:
    """The same run without autocast and without a loss scale."""
    precision = replace(state.precision, name="float32")
    scaler = LossScaler(state.amp, enabled=False, device=state.device)
    return replace(state, precision=precision, scaler=scaler)


def _replay(state: TrainState, window: Sequence[Any]) -> _Replay:
    gradients.drop(state.parameters)
    with rng.preserved(state.device):
        loss = forward_backward(state, window)
    bad = tuple(
        name
        for name, parameter in state.bare.named_parameters()
        if parameter.grad is not None
        and not bool(torch.isfinite(gradients.values(parameter.grad)).all())
    )
    return _Replay(float(loss), bad)


def _largest_weight(state: TrainState) -> str:
    largest, name = max(
        (
            (float(p.detach().abs().max()), name)
            for name, p in state.bare.named_parameters()
            if p.numel()
        ),
        default=(0.0, ""),
    )
    return f"largest weight: {largest:.3g} in {name}"


def _nonfinite_inputs(batch: Any, place: str = "batch") -> Iterator[str]:
    if isinstance(batch, Tensor):
        if batch.is_floating_point() and not bool(torch.isfinite(batch).all()):
            rows = ~torch.isfinite(batch).reshape(batch.shape[0] if batch.ndim else 1, -1).all(1)
            listed = first_of([str(i) for i in rows.nonzero().flatten().tolist()])
            yield f"{place} (its samples {listed})"
        return
    parts: Any = ()
    if isinstance(batch, Mapping):
        parts = batch.items()
    elif isinstance(batch, tuple | list):
        parts = enumerate(batch)
    for name, part in parts:
        yield from _nonfinite_inputs(part, f"{place}[{name!r}]")
