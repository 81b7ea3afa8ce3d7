"""What an operation's values say of the fault: its cause in words, and what to change."""

from __future__ import annotations

import re
from dataclasses import dataclass

import torch

from ampctl.doctor.watch import Event

_PRODUCTS = ("mm", "addmm", "bmm", "baddbmm", "addmv", "mv", "dot", "matmul", "linear")
_DIVISIONS = ("div", "reciprocal", "rsqrt")
_LOGARITHMS = ("log", "log2", "log10", "log1p", "logit", "xlogy")
_ROOTS = ("sqrt", "rsqrt", "pow")
_EXPONENTIALS = ("exp", "exp2", "expm1", "pow", "cosh", "sinh")
_SOFTMAX = ("softmax", "_softmax", "log_softmax", "_log_softmax")
_LOSSES = ("_log_softmax", "binary_cross_entropy_with_logits", "nll_loss_forward")
_NAMES = {
    "_to_copy": "cast",
    "_softmax": "softmax",
    "_log_softmax": "log_softmax",
    "convolution": "convolution",
    "native_layer_norm": "layer_norm",
} | dict.fromkeys(_PRODUCTS, "matrix product")


@dataclass(frozen=True)
class Reason:
    """A cause in words; ``advice`` is "" where only another dtype or smaller values help."""

    cause: str
    advice: str = ""


def reason(event: Event, then: Event | None = None) -> Reason:
    """Describe what went wrong at ``event``; ``then`` is where its infinity became NaN."""
    if event.kind != "operation":
        return _given(event)
    found = _by_values(event, then)
    if then is not None and then.operation in _LOSSES and event.node is None:
        return Reason(f"logits contain {event.holds} before the loss: {found.cause}", found.advice)
    return found


def hidden(event: Event) -> str:
    """Describe that the final result does not show an operation's infinity."""
    return (
        f"{event.holds} in an intermediate result in {event.place}: {operation(event)} of values "
        f"up to {short(event.largest)} in {dtype(event.dtype)}; the final result hides it"
    )


def operation(event: Event) -> str:
    """Return the name of an operation as its user knows it."""
    name = _plain(event)
    return _NAMES.get(name, name)


def dtype(value: torch.dtype) -> str:
    """Return the name of a dtype in a recipe."""
    return str(value).removeprefix("torch.")


def short(value: float) -> str:
    """Write a number with four digits, 1e-12 rather than 1.000e-012."""
    return f"{value:.4g}".replace("e-0", "e-").replace("e+0", "e").replace("e+", "e")


def place(event: Event) -> str:
    """Describe an event's place, and the pass if it is the backward one."""
    return (
        f"the backward pass of {event.place}"
        if event.node and event.place.source
        else (f"{event.place}")
    )


def _by_values(event: Event, then: Event | None) -> Reason:
    return (
        _constant(event, then)
        or _masked_row(event)
        or _indefinite(event)
        or _undefined(event)
        or _too_large(event)
    )


def _given(event: Event) -> Reason:
    if event.kind == "buffer":
        return Reason(
            f"buffer {event.operation} holds {event.holds}, and the loss or a gradient follows",
            "start from a checkpoint in which it is finite, and look for what writes it",
        )
    return Reason(
        f"a constant {event.holds} in {event.place} reaches the loss or a gradient",
        "a mask's infinity must not be chosen by the loss: check labels and mask against "
        "each other",
    )


def _constant(event: Event, then: Event | None) -> Reason | None:
    """A number that the dtype cannot hold, as masks of -1e9 have."""
    if not event.dtype.is_floating_point:
        return None
    limit = torch.finfo(event.dtype).max
    too_large = [number for number in event.numbers if limit < abs(number) < float("inf")]
    mask_cast = event.operation == "_to_copy" and event.holds.minus and not event.holds.plus
    is_mask = mask_cast and then is not None and _is_softmax(then)
    is_added = event.operation in ("add", "sub") and event.largest > limit
    if not (too_large or is_mask or is_added):
        return None
    number = too_large[0] if too_large else -event.largest
    row = (
        f"; the softmax in {then.place} finds a whole row masked and gives NaN"
        if then is not None and _is_softmax(then)
        else ""
    )
    name = dtype(event.dtype)
    return Reason(
        f"a constant in {event.place} does not fit {name}: {short(number)} becomes "
        f"{event.holds}{row}",
        "use torch.finfo(x.dtype).min for the constant"
        + (", and leave no row masked throughout" if row else ""),
    )


def _masked_row(event: Event) -> Reason | None:
    if not (_is_softmax(event) and event.from_inf and event.holds.nan):
        return None
    return Reason(
        f"softmax in {event.place} gives NaN: a whole row of its input is -inf (masked), or it "
        "holds inf",
        "leave at least one entry of each row unmasked, or mask with torch.finfo(x.dtype).min",
    )


def _indefinite(event: Event) -> Reason | None:
    """NaN out of infinities, or of a division by zero."""
    name, where = _plain(event), place(event)
    if event.from_inf and event.holds.nan:
        if event.operation in _LOSSES:
            return Reason(
                f"logits contain inf before the loss, and {operation(event)} in {where} gives NaN",
                "keep logits finite: mask with torch.finfo(x.dtype).min rather than -inf",
            )
        what = {"mul": "0 * inf", "add": "inf - inf", "sub": "inf - inf", "div": "inf / inf"}
        return Reason(
            f"{what.get(name, operation(event) + ' of inf')} in {where} gives NaN",
            "keep the infinity from there: choose with torch.where before it is made, not after",
        )
    by_zero = event.zeros or (name == "div" and 0.0 in event.numbers)
    is_division = name in _DIVISIONS or (name == "pow" and min(event.numbers, default=0.0) < 0)
    if not (is_division and by_zero):
        return None
    zero = "0 / 0" if event.holds.nan else "division by zero"
    forward = _forward_name(event)
    if forward and forward not in (*_DIVISIONS, "log", "sqrt", "pow"):
        return Reason(
            f"the derivative of {forward} is not finite in {where}: {zero}",
            f"keep the argument of {forward} away from where that is so: add an eps to it, or "
            "clamp it",
        )
    if forward in ("log", "sqrt", "pow", "rsqrt"):
        return Reason(
            f"the derivative of {forward} at 0 is not finite: {zero} in {where}",
            f"keep the argument of {forward} above 0: add an eps to it, or clamp it",
        )
    if event.eps is not None:
        return Reason(
            f"{zero} in {where}: eps {short(event.eps)} is 0 in {dtype(event.dtype)} "
            f"(below {_smallest(event.dtype)})",
            "compute this in float32 (x.float()), or give it an eps that the dtype can hold "
            "(1e-4, say)",
        )
    return Reason(f"{zero} in {where}", "add an eps to the divisor, or clamp it away from 0")


def _undefined(event: Event) -> Reason | None:
    """The argument of a logarithm or a root is outside of what it is defined for."""
    name, where = _plain(event), place(event)
    if name in _LOGARITHMS and (event.zeros or event.negatives or event.holds.nan):
        what = "a negative number" if event.holds.nan else "zero"
        eps = _eps(event)
        return Reason(
            f"the logarithm of {what} in {where}{eps}",
            "clamp its argument to a small positive number that the dtype can hold, or use "
            "log_softmax or logsigmoid",
        )
    if name in _ROOTS and (event.negatives or event.zeros) and event.holds.nan:
        return Reason(
            f"the root of a negative number in {where}", "clamp the argument to zero or above"
        )
    if name in _EXPONENTIALS and not event.holds.nan:
        return Reason(
            f"{name} in {where} overflows {dtype(event.dtype)}: its argument reaches "
            f"{short(event.largest)}",
            "subtract the largest argument first (torch.logsumexp, softmax), or clamp the argument",
        )
    return None


def _too_large(event: Event) -> Reason:
    name, kind = dtype(event.dtype), operation(event)
    limit = f"{name} ends at {torch.finfo(event.dtype).max:.5g}"
    shown = f"{kind} in {place(event)} gives {event.holds} from finite inputs"
    if event.holds.nan:
        return Reason(f"{shown} (up to {short(event.largest)})")
    if event.parameter is not None and _plain(event) == "_to_copy":
        return Reason(
            f"parameter {event.parameter} has grown to {short(event.largest)}, and {limit}"
        )
    return Reason(f"{shown} (up to {short(event.largest)}); {limit}")


def _is_softmax(event: Event) -> bool:
    return event.operation in _SOFTMAX


def _plain(event: Event) -> str:
    name = event.operation
    return name.removesuffix("_") if not name.startswith("_") else name


def _forward_name(event: Event) -> str:
    """Return the forward operation that a node of torch's is of: LogBackward0 is of log.

    "" for none, and for the backward of a Function of the user's own, which is named by its lines.
    """
    node = re.fullmatch(r"(\w+)Backward\d+", event.node or "")
    return node[1].lower() if node else ""


def _eps(event: Event) -> str:
    if event.eps is None:
        return ""
    return f": eps {short(event.eps)} is 0 in {dtype(event.dtype)}"


def _smallest(value: torch.dtype) -> str:
    info = torch.finfo(value)
    return short(float(f"{info.tiny * info.eps:.0e}"))
