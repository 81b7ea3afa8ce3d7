"""What several ranks find out together: whose batch was bad, and which parameters are unused."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from ampctl.build import Job
from ampctl.data.loader import unwrapped
from ampctl.distributed.ranks import ALONE
from ampctl.doctor.nonfinite import Diagnosis, examine
from ampctl.errors import UsageError, first_of
from ampctl.state import TrainState


def diagnose(state: TrainState, window: list[Any], *, step: int) -> Diagnosis:
    """Examine a bad window; of several ranks each its own, and the first that is bad is told."""
    alone = replace(state, ranks=ALONE)
    every = state.ranks.gather(examine(alone, unwrapped(window), step=step))
    rank = next((rank for rank, found in enumerate(every) if found.is_reproduced), 0)
    found = every[rank]
    if state.ranks.size == 1:
        return found
    return replace(found, facts=(f"on rank {rank}", *found.facts))


def require_all_used(job: Job) -> None:
    """After the first step on several ranks, raise UsageError for parameters without a gradient.

    DDP waits for the gradient of each parameter, and says at the next step that one did not come.
    """
    state = job.state
    if state.ranks.size == 1 or job.recipe.distributed.find_unused_parameters:
        return
    trained = set(map(id, state.parameters))
    unused = [n for n, p in state.bare.named_parameters() if id(p) in trained and p.grad is None]
    if unused:
        raise UsageError(
            f"distributed: {len(unused)} parameters take no part in the loss of the first step: "
            f"{first_of(unused)}. Several ranks wait for the gradient of each parameter: freeze "
            "these (requires_grad=False), or set distributed.find_unused_parameters=true"
        )
