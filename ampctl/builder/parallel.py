"""How several ranks share one model: a copy on each (DDP), or a part of it (FSDP2)."""

from __future__ import annotations

from dataclasses import replace

import torch
from torch import nn
from torch.nn.parallel import DistributedDataParallel

from ampctl.distributed.ranks import Ranks
from ampctl.distributed.shard import await_unused, shard_
from ampctl.errors import RecipeError, first_of
from ampctl.recipe.load import LoadedRecipe
from ampctl.tasks.task import Task, has_own


def shard(
    loaded: LoadedRecipe, model: nn.Module, device: torch.device, ranks: Ranks
) -> tuple[Ranks, list[str]]:
    """Shard a model in place; return the ranks as those that have a part each, and its blocks."""
    _require_same_model(loaded, model, ranks)
    globs = loaded.recipe.distributed.blocks or ()
    try:
        blocks = shard_(model, ranks, device, (globs,) if isinstance(globs, str) else globs)
    except (ValueError, NotImplementedError, RuntimeError) as error:
        key = "distributed.blocks" if globs else "distributed.strategy"
        message = f"fsdp cannot shard this model: {error}"
        raise RecipeError([loaded.problem(key, message)]) from error
    if loaded.recipe.distributed.find_unused_parameters:
        await_unused(model)
    return replace(ranks, shards=True, shares_verdict=True), blocks


def in_ddp(loaded: LoadedRecipe, model: nn.Module, task: Task, ranks: Ranks) -> nn.Module:
    """Wrap a model in DDP on several ranks; a sharded model averages gradients itself."""
    if ranks.size == 1 or ranks.shards:
        return model
    _require_same_model(loaded, model, ranks)
    if has_own(task, "losses"):  # which calls parts of the model, past DDP: see `losses`
        ranks.follow_first_([each.data for each in (*model.parameters(), *model.buffers())])
        return model
    return DistributedDataParallel(
        model,
        # Not device_ids, for which DDP would walk each batch: it is on the device already.
        find_unused_parameters=loaded.recipe.distributed.find_unused_parameters,
        gradient_as_bucket_view=False,  # gradients are dropped and read as tensors of their own
    )


def _require_same_model(loaded: LoadedRecipe, model: nn.Module, ranks: Ranks) -> None:
    """Raise RecipeError on every rank if the model has other parameters or buffers on one."""
    named = (*model.named_parameters(), *model.named_buffers())
    own = [f"{name} {list(tensor.shape)} {tensor.dtype}" for name, tensor in named]
    every = ranks.gather(own)
    rank = next((rank for rank, each in enumerate(every) if each != every[0]), None)
    if rank is None:
        return
    told = " and ".join(
        f"{first_of([line for line in every[r] if line not in every[other]]) or 'nothing'} only on "
        f"rank {r}"
        for r, other in ((0, rank), (rank, 0))
    )
    message = f"the model is another one on another rank: {told}"
    advice = "it must be built alike on all: does it depend on the rank, the host or chance?"
    raise RecipeError([loaded.problem("model", message, advice)])
