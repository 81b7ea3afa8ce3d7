"""Errors that torch raises over parts of a recipe that do not fit each other, put into words."""

from __future__ import annotations

import logging
import traceback
from collections.abc import Iterator, Mapping, Sequence
from contextlib import suppress
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ampctl.data.faults import FAULTS
from ampctl.data.loader import MapData, TrainData, Window
from ampctl.data.move import tensors
from ampctl.distributed.failure import comes_of_others
from ampctl.doctor import half_precision, torch_errors
from ampctl.engine.state import TrainState
from ampctl.errors import AmpctlError, MachineError, UsageError
from ampctl.recipe.fault import is_out_of_memory, own_place
from ampctl.recipe.own_code import own_frames
from ampctl.tasks.task import Task

# Parts that a recipe names; an error raised anywhere else in ampctl is a fault of ampctl.
_NAMED = (nn.Module, torch.optim.Optimizer, LRScheduler, Task)
_PARTS = tuple(Path(__file__).parents[1] / name for name in ("models", "tasks.py", "data"))


def in_words(
    error: Exception,
    model: nn.Module,
    batches: Sequence[Any],
    *,
    doing: str,
    state: TrainState | None = None,
    data: TrainData | None = None,
) -> AmpctlError | None:
    """Return an error in words, or None if it is to be raised as it is.

    As it is: an error that is in words, one that another rank causes, and a fault of ampctl or of
    the user's own code (a file of theirs is among its frames) whose meaning is not known here: its
    author needs the traceback, below which a note says what was going on. ``doing`` says that
    (``step 12``), ``batches`` what it was about; with ``state`` a cure is tried on them,
    with ``data`` a sample that differs from the others is looked for. The traceback of an error
    that is put into words goes to the run's log file.
    """
    if isinstance(error, AmpctlError) or comes_of_others(error):
        return None
    if is_out_of_memory(error):
        return MachineError(f"{doing}: out of memory: {error}\n    {_with_less(doing, batches)}")
    if isinstance(error, torch.AcceleratorError):
        return MachineError(f"{doing}: the device failed: {error}")
    steps = list(traceback.walk_tb(error.__traceback__))
    frames = [frame for frame, _ in steps]
    if compiler := torch_errors.of_compiler(error):
        _to_log(error, doing)
        return UsageError(f"{doing}: {compiler}")
    known = torch_errors.meaning(error, steps, model)
    kind: type[UsageError] = UsageError
    if known is None and state is not None:
        known = half_precision.explained(error, steps, state, batches)
        kind = half_precision.HalfPrecisionError
    if known is None and (own_frames(error) or not _in_a_part(error, frames)):
        error.add_note(f"in {doing}{_odd_sample(batches, data)}")
        return None
    _to_log(error, doing)
    if known is not None:
        line = own_place(error)
        is_new = bool(line) and line.partition(",")[0] not in known
        at = f"\n    in your own code: {line}" if is_new else ""
        return kind(f"{doing}: {known}{at}\n    torch says: {str(error).splitlines()[0]}")
    shapes = "; ".join(_shapes(batch) for batch in batches[:1]) or "none"
    return UsageError(
        f"{doing} failed in {_place(steps, model)}: {type(error).__name__}: {error}\n"
        f"    The batch is {shapes}{_odd_sample(batches, data)}. Parts of the recipe do not fit "
        "each other: compare model, task, data and optimizer."
    )


def _odd_sample(batches: Sequence[Any], data: TrainData | None) -> str:
    """Describe which samples of a step differ in form from the others, if they can be read anew."""
    if not isinstance(data, MapData) or not isinstance(batches, Window):
        return ""
    with suppress(*FAULTS):
        if found := data.difference(batches):
            return f"; of data.train, {found}"
    return ""


def _to_log(error: Exception, doing: str) -> None:
    log = logging.getLogger("ampctl")
    if log.hasHandlers():  # else Python would print it
        log.error("%s failed", doing, exc_info=error)


def _with_less(doing: str, batches: Sequence[Any]) -> str:
    """Describe how the same can be done with less memory."""
    if "evaluation" in doing:
        return "Lower data.eval_batch_size, which is data.micro_batch_size where it is not set."
    if batches and all(len(each) == 1 for batch in batches for each in tensors(batch) if each.ndim):
        more = "or spread it over several devices (distributed.strategy=fsdp)"
        return f"Each pass takes one sample already: take a smaller model, {more}."
    return "Lower data.micro_batch_size: gradients accumulate, and the step stays the same."


def _in_a_part(error: Exception, frames: Sequence[FrameType]) -> bool:
    """Return whether an error was raised in what a recipe names, not in ampctl's own work."""
    named = any(isinstance(frame.f_locals.get("self"), _NAMED) for frame in frames)
    if not named or isinstance(error, AssertionError):
        return False
    innermost = Path(frames[-1].f_code.co_filename)
    is_ours = innermost.is_relative_to(Path(__file__).parents[1])
    return not is_ours or any(innermost.is_relative_to(part) for part in _PARTS)


def _place(steps: torch_errors.Steps, model: nn.Module) -> str:
    """Return the innermost module of the model that was running, or else the function."""
    found = torch_errors.innermost_module(steps, model)
    if found is not None:
        name, kind = found
        return f"model.{name} ({kind})" if name else f"model ({kind})"
    for frame, _ in reversed(steps):
        owner = frame.f_locals.get("self")
        if owner is not None:
            return f"{type(owner).__name__}.{frame.f_code.co_name}"
    return steps[-1][0].f_code.co_name


def _shapes(batch: Any) -> str:
    return f"({', '.join(_leaves(batch))})"


def _leaves(value: Any) -> Iterator[str]:
    if isinstance(value, Tensor):
        yield f"{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield f"{name}: {', '.join(_leaves(part))}"
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _leaves(part)
    else:
        yield type(value).__name__
