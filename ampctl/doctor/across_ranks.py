"""What several ranks find out: whose batch or values are bad, which parameters DDP waits for."""

from __future__ import annotations

import copy
import re
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from torch import Tensor

from ampctl import rng
from ampctl.amp.masters import upcast_
from ampctl.amp.modules import set_module_dtypes
from ampctl.builder.job import Job
from ampctl.builder.parts import build_model
from ampctl.data.loader import unwrapped
from ampctl.distributed.ranks import ALONE
from ampctl.distributed.shard import whole
from ampctl.doctor.nonfinite import Diagnosis, examine
from ampctl.engine.buffers import BufferGuard
from ampctl.engine.losses import unused
from ampctl.engine.state import TrainState
from ampctl.errors import UsageError


def diagnose(job: Job, window: list[Any], *, step: int) -> Diagnosis:
    """Examine a bad window; of several ranks each its own, and the first that is bad is told."""
    state = job.state
    alone = _gathered(job) if state.ranks.shards else replace(state, ranks=ALONE)
    if alone is None:
        return Diagnosis(
            "not known: to run the step again, watched, each rank needs room for the whole model",
            "run the same recipe with a smaller model, or on larger devices, for a diagnosis",
        )
    every = state.ranks.gather(examine(alone, unwrapped(window), step=step))
    rank = next((rank for rank, found in enumerate(every) if found.is_reproduced), 0)
    found = every[rank]
    if state.ranks.size == 1:
        return found
    return replace(found, facts=(f"on rank {rank}", *found.facts))


def _gathered(job: Job) -> TrainState | None:
    """Return the state of a sharded job with the whole model on each rank; None without room.

    What a rank runs again would else make the others wait for its part in gathering parameters.
    """
    state, model = job.state, None
    with rng.preserved(state.device), suppress(torch.OutOfMemoryError):
        model = build_model(job.loaded, state.device)
    if not all(state.ranks.gather(model is not None)) or model is None:
        return None
    if state.upcast:
        upcast_(model)
    set_module_dtypes(model, job.recipe.amp.modules, device_type=state.device.type)
    for module, own in zip(model.modules(), state.bare.modules(), strict=True):
        module.training = own.training
    with torch.no_grad():
        values = state.bare.state_dict()
        for name, value in model.state_dict().items():
            if isinstance(value, Tensor):
                value.copy_(whole(values[name]))
    named = dict(model.named_parameters())
    names = {id(parameter): name for name, parameter in state.bare.named_parameters()}
    updaters = []
    for updater in state.updaters:
        updater = copy.copy(updater)
        updater.parameters = [named[names[id(each)]] for each in updater.parameters]
        updaters.append(updater)
    return replace(
        state,
        model=model,
        local=model,
        bare=model,
        updaters=updaters,
        buffers=BufferGuard(model),
        ema=None,
        ranks=ALONE,
    )


def unused_later(error: Exception, state: TrainState) -> UsageError | None:
    """Return DDP's error over a later step in words; None for any other error."""
    if "finished reduction in the prior iteration" not in f"{error}":
        return None
    found = re.search(r"did not receive grad for rank \d+: ([\d ]+)", f"{error}")
    numbers = list(map(int, found[1].split())) if found else []
    names = [name for name, p in state.bare.named_parameters() if p.requires_grad]
    return unused([names[n] for n in numbers if n < len(names)], state, state.progress.step)
