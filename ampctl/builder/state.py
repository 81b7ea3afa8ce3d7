"""From a recipe to a TrainState: model, task, optimizers, schedules and loss scaler."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any

import torch
from torch import nn

from ampctl import torch_private
from ampctl.amp.masters import upcast_
from ampctl.amp.modules import set_module_dtypes
from ampctl.amp.precision import Precision, choose_precision, set_accuracy
from ampctl.amp.scaler import LossScaler
from ampctl.builder.initial_weights import InitialWeights
from ampctl.builder.parallel import in_ddp, shard
from ampctl.builder.parts import build_model, build_task, wrong
from ampctl.distributed.env import choose_device, use_device
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.engine.buffers import BufferGuard
from ampctl.engine.ema import Average, OptimizerAverage, WeightAverage, keeps_average
from ampctl.engine.modes import set_to_train
from ampctl.engine.state import TrainState
from ampctl.engine.updater import Updater, build_updaters
from ampctl.errors import RecipeError
from ampctl.recipe.load import LoadedRecipe
from ampctl.recipe.schema import Recipe
from ampctl.state_dict import optimizers
from ampctl.state_dict.copies import masks
from ampctl.tasks import Transformers
from ampctl.tasks.task import Task, asks_for, has_own, why_not_called


def settle_device(recipe: Recipe, ranks: Ranks = ALONE) -> tuple[torch.device, Precision]:
    """Choose device and dtype, and let torch know of them. Raises MachineError, UsageError."""
    device = choose_device(recipe.train.device, ranks)
    precision = choose_precision(recipe.amp.dtype, device, cache_enabled=recipe.amp.cache_enabled)
    use_device(device)
    if recipe.train.deterministic:
        # cuBLAS reads this when it is first used; without it torch refuses matrix products.
        os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
        torch.backends.cudnn.benchmark = False
    torch.use_deterministic_algorithms(recipe.train.deterministic)
    return device, precision


def build_state(
    loaded: LoadedRecipe,
    device: torch.device,
    precision: Precision,
    ranks: Ranks = ALONE,
    *,
    total_steps: int | None = None,
    initial_weights: InitialWeights | None = None,
    to_train: bool = True,
) -> TrainState:
    """Build model, task, optimizer, schedule and scaler, in the order in which state is loaded.

    ``to_train=False``: for evaluations alone, with the whole model on each rank and no optimizer.
    """
    recipe = loaded.recipe
    shards = to_train and ranks.size > 1 and recipe.distributed.strategy == "fsdp"
    bare = build_model(loaded, device, spread_later=shards)
    if to_train:
        set_to_train(bare)
    if initial_weights is not None:
        initial_weights.fill(bare)
    upcast = upcast_(bare) if recipe.amp.upcast else []
    modules = set_module_dtypes(
        bare, recipe.amp.modules, device_type=device.type, origins=loaded.origins
    )
    scaling = precision.needs_scaling or "float16" in modules.values()
    by_design = masks(bare)
    blocks: Sequence[str] = ()
    if shards:
        ranks, blocks = shard(loaded, bare, device, ranks)
    updaters = build_updaters(loaded, bare, device, total_steps) if to_train else ()
    for updater in updaters if scaling else ():
        optimizers.refuse_closure(updater.optimizer)
    task = build_task(loaded)
    if to_train:
        _refuse_unfit(loaded, task, updaters, ranks)
    if torch_private.left_out_by_ddp(bare):
        ranks = replace(ranks, shares_verdict=True)  # these gradients are not averaged
    local: Any = bare
    if recipe.train.compile is not False:
        local = _compiled(loaded, bare, task)
    set_accuracy(recipe.amp)
    return TrainState(
        model=in_ddp(loaded, local, task, ranks) if to_train else local,
        local=local,
        bare=bare,
        ranks=ranks,
        task=task,
        updaters=updaters,
        scaler=LossScaler(recipe.amp, enabled=scaling, device=device),
        precision=precision,
        amp=recipe.amp,
        device=device,
        buffers=BufferGuard(bare),
        ema=_average(loaded, bare, updaters) if to_train else None,
        channels_last=recipe.train.channels_last,
        nonfinite_by_design=by_design,
        module_dtypes=modules,
        allows_unused=recipe.distributed.find_unused_parameters,
        upcast=upcast,
        blocks=blocks,
        compiled=recipe.train.compile is not False,
    )


def _average(loaded: LoadedRecipe, model: nn.Module, updaters: Sequence[Updater]) -> Average | None:
    """Return what keeps the weights for evaluations, where they are others than those trained."""
    decay = loaded.recipe.train.ema_decay
    own = [each.optimizer for each in updaters if keeps_average(each.optimizer)]
    if own and decay:
        message = f"{type(own[0]).__name__} keeps an average of the weights itself"
        raise wrong(loaded, "train.ema_decay", message, "leave it out")
    if own:
        return OptimizerAverage(model, own)
    return WeightAverage(model, decay) if decay else None


def _refuse_unfit(
    loaded: LoadedRecipe, task: Task, updaters: Sequence[Updater], ranks: Ranks
) -> None:
    """Raise RecipeError for a task that wants what the other parts of the recipe cannot give."""
    recipe, problems = loaded.recipe, []
    if has_own(task, "losses"):
        if not updaters[0].name:
            problems.append(
                loaded.problem(
                    "optimizer",
                    f"{task.name}.losses gives each loss to an optimizer by its name; this one has "
                    "none",
                    'write optimizer: {NAME: {_target_: ..., params: "GLOB"}, ...}',
                )
            )
        if recipe.data.eval is not None and not has_own(task, "loss"):
            message = f"{task.name} has losses, and no method loss, which an evaluation needs"
            problems.append(loaded.problem("data.eval", message, "write one, or leave this out"))
    for name in ("loss", "losses"):
        why = why_not_called(getattr(task, name))
        if why:
            message = f"{task.name}.{name} cannot be called with a model and a batch: {why}"
            advice = "beside these two it may have grad and step, and others with defaults"
            problems.append(loaded.problem("task", message, advice))
    penalized = any("grad" in asks_for(getattr(task, name)) for name in ("loss", "losses"))
    if penalized and recipe.train.compile is not False:
        message = f"{task.name} differentiates a gradient, which a compiled model cannot"
        problems.append(loaded.problem("train.compile", message, "set train.compile=false"))
    if ranks.shards and (penalized or has_own(task, "losses")):
        what = "differentiates a gradient" if penalized else "has losses that take turns"
        message = f"{task.name} {what}, which a model sharded by fsdp cannot"
        problems.append(loaded.problem("distributed.strategy", message, "use ddp"))
    if ranks.shards and isinstance(task, Transformers) and not task.is_known:
        message = "a model sharded by fsdp cannot be asked which labels its loss counts"
        advice = "give Transformers shift (true for causal models) and ignore_index (-100 in most)"
        problems.append(loaded.problem("task", message, advice))
    for updater in updaters if ranks.shards else ():
        if updater.closure:
            kind = type(updater.optimizer).__name__
            message = f"{kind} compares whole gradients, which a model sharded by fsdp has not"
            problems.append(loaded.problem("distributed.strategy", message, "use ddp"))
    for updater in updaters if len(updaters) > 1 else ():
        if updater.closure:
            kind = type(updater.optimizer).__name__
            message = f"{kind} calls the model itself, several times a step, and must be alone"
            problems.append(loaded.problem(f"optimizer.{updater.name}", message))
    if problems:
        raise RecipeError(problems)


def _compiled(loaded: LoadedRecipe, model: nn.Module, task: Task) -> Any:
    """Compile a model; where the task calls its parts by themselves, compile each of them."""
    wanted = loaded.recipe.train.compile
    options = wanted if isinstance(wanted, Mapping) else {}
    try:
        if not has_own(task, "losses"):
            return torch.compile(model, **options)
        for part in model.children():
            part.compile(**options)
    except (RuntimeError, TypeError, ValueError) as error:
        message = f"torch.compile refused its arguments: {error}"
        raise wrong(loaded, "train.compile", message) from error
    return model
