"""What some of torch's errors mean in a mixed precision run, and what to change."""

from __future__ import annotations

import re
from collections.abc import Sequence
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import nn

from ampctl.doctor.trace import source_of
from ampctl.recipe.fault import error_in_words

Steps = Sequence[tuple[FrameType, int]]
"""The frames of a traceback from the outermost, each with its line."""

_TORCH = Path(torch.__file__).parent
_AMP = _TORCH / "amp"
_OVERFLOW = re.compile(r"cannot be converted to type (?:c10|at)::(\w+) without overflow")
LONE_SAMPLE = "Expected more than 1 value per channel"
_HALVES = {"Half": "float16", "BFloat16": "bfloat16"}


def meaning(error: Exception, steps: Steps, model: nn.Module) -> str | None:
    """Return what an error means and what to do, or None if it is not one of those known here."""
    said = str(error)
    if isinstance(error, ValueError) and LONE_SAMPLE in said:
        return _lone_sample(steps, model)
    if not isinstance(error, RuntimeError):
        return None
    return (
        _constant(said, steps, model)
        or _autograd_function(said, steps, model)
        or _sharded(said)
        or _anomaly_mode(said)
        or _old_graph(said)
    )


def of_compiler(error: Exception) -> str | None:
    """Return what torch.compile has failed over, and what to do; None if it is no error of its own.

    Whose lines it was compiling says little: it is torch that could not.
    """
    kinds = {f"{kind.__module__}.{kind.__name__}" for kind in type(error).__mro__}
    if not any(kind.startswith(("torch._dynamo.", "torch._inductor.")) for kind in kinds):
        return None
    said = error_in_words(error)
    if "InvalidCxxCompiler" in said:
        return (
            "torch.compile needs a C++ compiler, and none was found. Install one (g++), or set "
            "train.compile=false"
        )
    return f"torch.compile failed; train.compile=false trains without it. torch says:\n    {said}"


def _lone_sample(steps: Steps, model: nn.Module) -> str:
    layer = innermost_module(steps, model)
    where = f" model.{layer[0]} ({layer[1]})" if layer else ""
    return (
        f"a micro-batch holds one sample, and the BatchNorm{where} takes the variance of more than "
        "one value a channel. Set data.drop_last=true, or a data.batch_size (and "
        "data.micro_batch_size) that leaves no single sample over."
    )


def _constant(said: str, steps: Steps, model: nn.Module) -> str | None:
    found = _OVERFLOW.search(said)
    if found is None or found[1] not in _HALVES:
        return None
    name = _HALVES[found[1]]
    return (
        f"a constant in {_place(steps, model)} does not fit {name}. Use "
        f"torch.finfo(x.dtype).min in its place"
        + (", or set amp.dtype=bfloat16." if name == "float16" else ".")
    )


def _autograd_function(said: str, steps: Steps, model: nn.Module) -> str | None:
    """A function of the user's own whose forward alone ran under autocast."""
    function = next(
        (
            owner
            for frame, _ in reversed(steps)
            if isinstance(
                owner := frame.f_locals.get("self"), torch.autograd.function.BackwardCFunction
            )
        ),
        None,
    )
    if function is None or not _two_dtypes(said):
        return None
    if any(Path(frame.f_code.co_filename).is_relative_to(_AMP) for frame, _ in steps):
        return None  # it is decorated already
    name = type(function).__name__.removesuffix("Backward")
    device = next((p.device.type for p in model.parameters()), "cpu")
    return (
        f"the backward of the torch.autograd.Function {name} ({_source(steps)}) mixes dtypes: its "
        "forward ran under autocast, its backward does not. Decorate forward with "
        f'@torch.amp.custom_fwd(device_type="{device}") and backward with '
        f'@torch.amp.custom_bwd(device_type="{device}"), below @staticmethod; if the function '
        "needs one dtype, add cast_inputs=torch.float32 to custom_fwd."
    )


def _sharded(said: str) -> str | None:
    """A parameter that FSDP had not gathered: the loss went past the model to get at it."""
    if "mixed torch.Tensor and DTensor" not in said and "FSDP state has already been" not in said:
        return None
    return (
        "under distributed.strategy=fsdp parameters are whole only while the model runs. The loss "
        "must call the model itself, not its parts (model.encoder(x)), and use no parameter of it "
        "(a penalty on weights): let forward return what the loss needs, or set "
        "distributed.strategy=ddp."
    )


def _anomaly_mode(said: str) -> str | None:
    if not torch.is_anomaly_enabled() or "returned nan values in its" not in said:
        return None
    return (
        "anomaly mode is on, and stops at the first NaN in a gradient. In float16 an overflow now "
        "and then is normal: the loss scale goes down, and the step is skipped. Switch it off: "
        "torch.autograd.set_detect_anomaly(False). If such steps last, ampctl stops by itself and "
        "names the module; amp.nonfinite=stop stops it at the first."
    )


def _old_graph(said: str) -> str | None:
    """A backward pass through a graph that a step, or an earlier backward pass, has used up."""
    again = "backward through the graph a second time" in said
    if not again and "modified by an inplace operation" not in said:
        return None
    other = (
        "a tensor that is kept from one step to the next (a hidden state) needs .detach() as well. "
        "A task that calls backward() itself must not: ampctl does."
        if again
        else "With one optimizer, an operation in place (x += y, relu_) has overwritten what the "
        "backward pass needs: write x = x + y."
    )
    return (
        "a loss was computed from a forward pass that is out of date. With several optimizers, "
        "compute a loss that is yielded after an earlier optimizer stepped after that yield, or "
        f"detach what it takes over from before: {other}"
    )


def _two_dtypes(said: str) -> bool:
    half = re.search(r"\b(Half|BFloat16|half|bfloat16)\b", said)
    return half is not None and re.search(r"\b[Ff]loat(32)?\b", said) is not None


def _place(steps: Steps, model: nn.Module) -> str:
    layer = innermost_module(steps, model)
    source = _source(steps)
    if layer is None:
        return source
    name, kind = layer
    return f"model{'.' if name else ''}{name} ({kind}, {source})"


def innermost_module(
    steps: Steps, model: nn.Module, kind: type[nn.Module] = nn.Module
) -> tuple[str, str] | None:
    """Return name and class of the innermost module of a kind that was running."""
    names = {id(module): name for name, module in model.named_modules()}
    for frame, _ in reversed(steps):
        owner: Any = frame.f_locals.get("self")
        if isinstance(owner, kind) and id(owner) in names:
            return names[id(owner)], type(owner).__name__
    return None


def _source(steps: Steps) -> str:
    """Return the innermost line outside of torch."""
    for frame, line in reversed(steps):
        file = frame.f_code.co_filename
        if not file.startswith("<") and not Path(file).is_relative_to(_TORCH):
            return source_of(frame, line)
    return "torch"
