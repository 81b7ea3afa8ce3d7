"""What it means that a task or a model changes weights that an optimizer trains."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import torch

from ampctl.distributed.ranks import ALONE
from ampctl.doctor.replay import replay, unchanged
from ampctl.engine.passes import NoGradientError
from ampctl.engine.state import StepReport, TrainState
from ampctl.errors import UsageError

_ADVICE = (
    "Only the optimizer's step may train it: leave out a step or an update of your own, and freeze "
    "what the model moves by itself, as an average or a teacher (requires_grad_(False))"
)


def moved_too_early(error: Exception, state: TrainState) -> UsageError | None:
    """Return an error in words that comes of weights which were changed before ampctl's step.

    torch can no longer go back through them, or the task or model has used up their gradients
    itself. None for any other error, and where nobody looked at the step.
    """
    used_up = isinstance(error, NoGradientError)
    moved = state.untouched.end()
    if moved is None or not (used_up or "modified by an inplace operation" in f"{error}"):
        return None
    name = state.untouched.name(float(moved))  # sync: the step has failed
    if name is None:
        return None
    how = "and leaves it no gradient" if used_up else "before the backward pass"
    return UsageError(f"task: in step {state.progress.step + 1} {_who(name)}, {how}. {_ADVICE}")


def what_is_moved(state: TrainState, window: Sequence[Any], report: StepReport) -> str:
    """Return a warning if a step's passes have brought weights into bounds; "" if nothing moved.

    A bound (a clamp, a largest norm) changes nothing when it is applied again; the window's passes
    are run twice more to see it. Raises UsageError where weights go on moving.
    """
    name = report.moved
    if name is None:
        return ""
    who = _who(name)
    if state.ranks.shards:  # no rank can run a pass alone
        return f"{who}. A skipped step does not take this back"
    progress = replace(state.progress, step=report.step - 1)
    alone = replace(state, ranks=ALONE, model=state.bare, progress=progress)
    with unchanged(alone):
        replay(alone, window)
        once = [parameter.detach().clone() for parameter in alone.parameters]
        replay(alone, window)
        moves = any(
            not torch.allclose(parameter, was, rtol=1e-5, equal_nan=True)
            for parameter, was in zip(alone.parameters, once, strict=True)
        )
    if not moves:
        return (
            f"{who}; run again it changes no more, so it is taken for a bound (a clamp, a largest "
            "norm). A skipped step does not take this back"
        )
    raise UsageError(
        f"task: in step {report.step} {who}, and again when it is run again. {_ADVICE}"
    )


def _who(name: str) -> str:
    return f"the task or the model itself changes {name}, which an optimizer trains"
