"""Why a step's gradients are not finite: the same micro-batches once more, watched.

What the first bad operation shows is put into words by ``reasons``; what would help is tried here.
"""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import Tensor

from ampctl.data.loader import Window
from ampctl.doctor import reasons, remedy
from ampctl.doctor.replay import (
    Replay,
    at_scale,
    half_modules,
    in_dtype,
    in_float32,
    module_in_float32,
    replay,
    tried,
    unchanged,
    without_scale,
)
from ampctl.engine.state import TrainState
from ampctl.errors import first_of

# Trained weights hardly ever pass this; those of a run that diverges do so within a few steps.
_GROWN = 1e3
_LARGE_INPUT = 1e4
_HIDDEN_SHOWN = 3


@dataclass(frozen=True)
class Diagnosis:
    """What is at fault, in words; ``module`` and ``tensor`` name it where one can be named.

    ``override`` is a ``KEY=VALUE`` to go on with, where one helps. ``is_reproduced``: whether the
    step was bad again when it was run again.
    """

    cause: str
    advice: str
    module: str | None = None
    tensor: str | None = None
    facts: tuple[str, ...] = ()
    override: str | None = None
    is_reproduced: bool = True


def examine(state: TrainState, window: Sequence[Any], *, step: int | None = None) -> Diagnosis:
    """Run a bad window again, in its dtype and in float32, and name the first bad operation.

    Verdicts come in the order in which one hides the others: weights that are not finite, inputs
    that are not finite, a fault in float32 as well, a fault of the low precision alone. ``step`` is
    the number that the task was given (from 0), whose turns follow from it; by default the next.
    The scale is the present one; dropout draws anew, the same in each replay. Weights, buffers,
    generators and the mode of modules are left as they were, gradients dropped. Raises what the
    user's code raises, but for want of memory.
    """
    if step is not None:
        state = replace(state, progress=replace(state.progress, step=step))
    bad = _bad_weights(state) or _bad_inputs(window)
    try:
        return _examined(state, window, bad)
    except torch.OutOfMemoryError:
        return bad or Diagnosis(
            "not known: to run the step again, watched, took more memory than there is",
            "lower data.micro_batch_size, which leaves the step as it is, for a diagnosis",
        )


def _examined(state: TrainState, window: Sequence[Any], bad: Diagnosis | None) -> Diagnosis:
    with unchanged(state):
        low = replay(state, window)
        apart = half_modules(state)
        is_full = state.precision.name == "float32" and not apart
        full = low if is_full else in_float32(state, window)
        verdict = bad or _verdict(state, window, low, full)
    facts = (
        f"loss {low.loss:.4g} in {state.precision.name}{' with amp.modules' if apart else ''}, "
        + _in_float32(full),
        f"non-finite gradients: {first_of(low.bad_gradients) or 'none'}",
        *_largest_words("weight", _largest_weight(state)),
        *_largest_words("input", _largest_input(window)),
        *(reasons.hidden(event) for event in low.hidden[:_HIDDEN_SHOWN]),
    )
    return replace(verdict, facts=facts)


def _verdict(
    state: TrainState, window: Sequence[Any], low: Replay, full: Replay | RuntimeError
) -> Diagnosis:
    if isinstance(full, Replay) and not full.is_finite:
        return _in_any_precision(state, window, full)
    if low.is_finite:
        return _not_again(state, low)
    in_backward = low.first is not None and low.first.node is not None
    if in_backward and remedy.scale_can_fall(state) and _is_finite(without_scale(state), window):
        return _scale_too_large(state, window, low)
    return _of_low_precision(state, window, low)


def _not_again(state: TrainState, low: Replay) -> Diagnosis:
    """Describe how this pass, which is finite, differs from that of the run."""
    differs, advice, override = [], "", None
    if low.drew:
        differs.append("random numbers are drawn anew (dropout)")
        advice = "go on: another draw may be finite"
    if remedy.scale_can_fall(state) and not state.amp.static:
        differs.append(f"the loss scale is {state.scale_on_host:g} by now")
        for scale in remedy.lower_scales(state, 2)[:1]:
            override = f"amp.init_scale={scale:g}"
            advice = f"go on at a lower scale: set {override}"
    if state.compiled:
        differs.append("the model runs as it is written, not compiled")
        override = "train.compile=false"
        advice = f"set {override} (tried on this batch: finite)"
    what = "; ".join(differs) or "nothing that is known differs, so the step does not repeat"
    if not advice and not torch.are_deterministic_algorithms_enabled():
        advice = "set train.deterministic=true, which makes most operations repeat"
    return Diagnosis(
        f"not found: run again, the step is finite; {what}",
        advice or "look at what else the step reads: a file, the time, another process",
        module=low.hidden[0].place.module if low.hidden else None,
        override=override,
        is_reproduced=False,
    )


def _in_any_precision(state: TrainState, window: Sequence[Any], full: Replay) -> Diagnosis:
    tensor = (full.bad_gradients or (None,))[0]
    cause, advice = "the cause was not seen", ""
    if full.first is not None:
        found = reasons.reason(full.first, full.then)
        cause, advice = found.cause + _hidden_words(full), found.advice
    large, grown = _too_large(state, window), _grown(state)
    return Diagnosis(
        f"the step is not finite in float32 either: {cause}",
        "; ".join(filter(None, (advice, large)))
        or f"the values are too large for any precision: lower {remedy.rate(state)}, "
        f"{remedy.clip(state)}, or look at what the model multiplies",
        module=full.first.place.module if full.first is not None else _owner(tensor),
        tensor=tensor,
        override=remedy.lower_rate(state, grown) if grown or not (advice or large) else None,
    )


def _scale_too_large(state: TrainState, window: Sequence[Any], low: Replay) -> Diagnosis:
    """The gradients are finite but for the loss scale."""
    event = low.first
    assert event is not None, "an operation of the backward pass was bad"
    scale = f"{state.scale_on_host:g}"
    fix = "amp.static=false" if state.amp.static else "amp.min_scale=1"
    if not state.amp.static and state.amp.min_scale <= 1:
        scales = remedy.lower_scales(state, 2**4)
        helps = (each for each in scales if _is_finite(at_scale(state, each), window))
        fix = f"amp.init_scale={next(helps, 1):g}"
    return Diagnosis(
        f"the gradient times the loss scale {scale} overflows {reasons.dtype(event.dtype)} in "
        f"{reasons.place(event)} ({reasons.operation(event)}); without the scale it is finite",
        f"set {fix}; a loss that the task returns in float32 (loss.float()) leaves more room",
        module=event.place.module,
        tensor=(low.bad_gradients or (None,))[0],
        override=fix,
    )


def _is_finite(state: TrainState, window: Sequence[Any]) -> bool:
    found = tried(state, window)
    return isinstance(found, Replay) and found.is_finite


def _of_low_precision(state: TrainState, window: Sequence[Any], low: Replay) -> Diagnosis:
    name = state.precision.name
    tensor = (low.bad_gradients or (None,))[0]
    if low.first is None:
        module = _owner(tensor)
        cause, advice = f"the step overflows in {name}", ""
    else:
        module = low.first.place.module
        found = reasons.reason(low.first, low.then)
        cause, advice = found.cause + _hidden_words(low), found.advice
    large = _too_large(state, window)
    grown = _grown(state)
    if grown:  # another dtype would only put off the end
        helps, override = "", remedy.lower_rate(state, grown)
    else:
        helps, override = _what_helps(state, window, module)
    return Diagnosis(
        f"{cause}; in float32 the step is finite",
        "; or ".join(filter(None, (advice, large, helps))),
        module=module,
        tensor=tensor,
        override=override,
    )


def _hidden_words(seen: Replay) -> str:
    if seen.first is None or seen.first.node is not None or not math.isfinite(seen.loss):
        return ""
    return "; the loss does not show it, the gradient does"


def _too_large(state: TrainState, window: Sequence[Any]) -> str:
    """Describe what to do about weights or inputs that are large in any precision, or ""."""
    name, weight = _largest_weight(state)
    if _grown(state):
        return (
            f"the weights have grown to {reasons.short(weight)} ({name}): lower "
            f"{remedy.rate(state, name)} or {remedy.clip(state)}, and start from before they grew"
        )
    place, value = _largest_input(window)
    if value > _LARGE_INPUT:
        return f"the batch holds values up to {reasons.short(value)} ({place}): normalise the data"
    return ""


def _what_helps(
    state: TrainState, window: Sequence[Any], module: str | None
) -> tuple[str, str | None]:
    """Try bfloat16, and float32 for one module; say what was finite, and how to choose it."""
    found: list[tuple[str, str]] = []
    if state.precision.name == "float16" and _is_finite(in_dtype(state, "bfloat16"), window):
        found.append(("amp.dtype=bfloat16", "amp.dtype=bfloat16"))
    if module and not set(module) & set("*?["):  # a name that is no glob of another
        with module_in_float32(state, module):
            helps = _is_finite(state, window)
        if helps:
            found.append((f'amp.modules: {{"{module}": float32}}', ""))
    if not found and half_modules(state):
        other_dtype = "" if state.precision.name == "float32" else "set amp.dtype=float32 and "
        return f"{other_dtype}leave {first_of(half_modules(state))} out of amp.modules", None
    if not found:
        return "set amp.dtype=float32", "amp.dtype=float32"
    choice = " or ".join(words for words, _ in found)
    override = found[0][1] or f'amp.modules={{"{module}": float32}}'
    return f"set {choice} (tried on this batch: finite)", override


def _bad_weights(state: TrainState) -> Diagnosis | None:
    given = state.nonfinite_by_design
    bad = {n: p for n, p in state.bare.named_parameters() if not bool(torch.isfinite(p).all())}
    # A frozen infinity that was there from the start is a mask.
    weights = [n for n, p in bad.items() if p.requires_grad or n not in given or p.isnan().any()]
    if not weights:
        return None
    return Diagnosis(
        f"weights are not finite: {first_of(weights)}",
        f"the weights were lost before this step: lower {remedy.rate(state, weights[0])} or "
        f"{remedy.clip(state)}, and start from before that",
        module=_owner(weights[0]),
        tensor=weights[0],
        override=remedy.lower_rate(state, weights[0]),
    )


def _bad_inputs(window: Sequence[Any]) -> Diagnosis | None:
    inputs = [*_nonfinite_inputs(window)]
    if not inputs:
        return None
    return Diagnosis(
        f"the batch holds values that are not finite: {first_of(inputs)}",
        "repair or leave out these samples in the data set",
        tensor=inputs[0],
    )


def _grown(state: TrainState) -> str | None:
    """Return the name of the largest weight if it is larger than trained ones are."""
    name, size = _largest_weight(state)
    return name if size > _GROWN else None


def _largest_weight(state: TrainState) -> tuple[str, float]:
    return _largest((n, p) for n, p in state.bare.named_parameters() if p.requires_grad)


def _largest_input(window: Sequence[Any]) -> tuple[str, float]:
    return _largest(part for batch in window for part in _named_tensors(batch))


def _largest(named: Iterable[tuple[str, Tensor]]) -> tuple[str, float]:
    sizes = ((n, float(t.detach().abs().max())) for n, t in named if t.numel() and _is_float(t))
    return max(sizes, key=lambda each: each[1], default=("", 0.0))


def _largest_words(what: str, found: tuple[str, float]) -> list[str]:
    name, value = found
    return [f"largest {what}: {reasons.short(value)} in {name}"] if name else []


def _in_float32(full: Replay | RuntimeError) -> str:
    if isinstance(full, RuntimeError):
        return f"does not run in float32 ({type(full).__name__}: {str(full).splitlines()[0]})"
    finite = "finite" if full.is_finite else "not finite"
    return f"{full.loss:.4g} in float32, where the same batch is {finite}"


def _owner(tensor: str | None) -> str | None:
    return tensor.rpartition(".")[0] if tensor else None


def _is_float(value: Tensor) -> bool:
    return value.is_floating_point() and value.layout is torch.strided


def _nonfinite_inputs(window: Sequence[Any]) -> Iterator[str]:
    for number, batch in enumerate(window):
        for place, value in _named_tensors(batch):
            if not _is_float(value) or bool(torch.isfinite(value).all()):
                continue
            rows = ~torch.isfinite(value).reshape(value.shape[0] if value.ndim else 1, -1).all(1)
            yield f"{place} ({_samples(window, number, rows)})"


def _samples(window: Sequence[Any], number: int, rows: Tensor) -> str:
    """Return which samples the bad rows of a micro-batch are, as the data set counts them."""
    bad = rows.nonzero().flatten().tolist()
    if not isinstance(window, Window):
        return f"its samples {_listed(bad)}"
    indices = torch.as_tensor(window.samples[number]).tolist()
    if window.in_order and len(rows) == len(indices):
        return f"counted from 0 in data.train, its samples {_listed([indices[i] for i in bad])}"
    return f"counted from 0 in data.train, among its samples {_listed(indices)}"


def _listed(numbers: Sequence[int]) -> str:
    return first_of([str(number) for number in numbers])


def _named_tensors(batch: Any, place: str = "batch") -> Iterator[tuple[str, Tensor]]:
    if isinstance(batch, Tensor):
        yield place, batch
    parts: Any = ()
    if isinstance(batch, Mapping):
        parts = batch.items()
    elif isinstance(batch, tuple | list):
        parts = enumerate(batch)
    for name, part in parts:
        yield from _named_tensors(part, f"{place}[{name!r}]")
