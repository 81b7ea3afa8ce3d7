"""From a recipe to what training runs on: data, model, optimizer, schedule, as one TrainState."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn
from torch.utils.data import IterableDataset

from ampctl import rng, torch_private
from ampctl.amp.masters import upcast_
from ampctl.amp.modules import set_module_dtypes
from ampctl.amp.precision import Precision, choose_precision, set_accuracy
from ampctl.amp.scaler import LossScaler
from ampctl.builder.initial_weights import InitialWeights
from ampctl.builder.parallel import in_ddp, shard
from ampctl.builder.parts import build_model, build_part, build_task, length_of, wrong
from ampctl.builder.refusals import refuse_odd_numbers, refuse_unknown_targets, refuse_unsupported
from ampctl.data.collate import build_collate_fn
from ampctl.data.loader import EvalData, MapData, TrainData
from ampctl.data.order import Order
from ampctl.data.stream import StreamData
from ampctl.distributed.env import choose_device, use_device
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.engine.buffers import BufferGuard
from ampctl.engine.ema import Average, OptimizerAverage, WeightAverage, keeps_average
from ampctl.engine.modes import set_to_train
from ampctl.engine.state import TrainState
from ampctl.engine.updater import Updater, build_updaters
from ampctl.errors import RecipeError, first_of
from ampctl.recipe.load import LoadedRecipe
from ampctl.recipe.schema import Recipe
from ampctl.state_dict import optimizers
from ampctl.state_dict.copies import masks
from ampctl.state_dict.layout import Layout, layout
from ampctl.tasks import Transformers
from ampctl.tasks.task import Task, asks_for, has_own, why_not_called

_RANK_STREAM = 4


@dataclass(frozen=True)
class Job:
    """A recipe made real. ``total_steps`` is None where only the data's end tells.

    ``built`` is what the model was made of before anything ran.
    """

    loaded: LoadedRecipe
    state: TrainState
    train_data: TrainData
    eval_data: EvalData | None
    total_steps: int | None
    built: Layout

    @property
    def num_parameters(self) -> int:
        """The model's parameters, frozen ones too."""
        return sum(parameter.numel() for parameter in self.state.bare.parameters())

    @property
    def recipe(self) -> Recipe:
        """The recipe itself."""
        return self.loaded.recipe


def build_job(
    loaded: LoadedRecipe, ranks: Ranks = ALONE, initial_weights: InitialWeights | None = None
) -> Job:
    """Build everything a recipe names, from its seed; of several processes each its part.

    ``initial_weights``: what the model starts from, if not from what it is built with.

    Raises RecipeError for what cannot be built or is not supported, UsageError for parts that do
    not go together, MachineError for a device that is not here.
    """
    refuse_unsupported(loaded)
    refuse_unknown_targets(loaded)
    refuse_odd_numbers(loaded)
    recipe = loaded.recipe
    device, precision = settle_device(recipe, ranks)
    rng.seed_everything(recipe.seed)
    train_data = _build_train_data(loaded, device, ranks)
    eval_data = build_eval_data(loaded, device, ranks)
    if recipe.train.early_stop is not None and eval_data is None:
        raise wrong(loaded, "train.early_stop", "there is no data.eval to watch a metric of")
    total_steps = _total_steps(loaded, train_data.steps_per_epoch)
    # The weights depend on the seed alone, not on what building the data drew.
    rng.seed_everything(recipe.seed)
    state = build_state(loaded, device, precision, total_steps, ranks, initial_weights)
    if not ranks.is_first:
        # The same weights, but other random numbers: dropout is not to be the same on all ranks.
        rng.seed_everything(rng.mix(recipe.seed, _RANK_STREAM, ranks.rank))
    return Job(loaded, state, train_data, eval_data, total_steps, layout(state.bare))


def build_new(
    loaded: LoadedRecipe, ranks: Ranks = ALONE, initial_weights: InitialWeights | None = None
) -> Job:
    """Build the job of a new run.

    Raises as :func:`build_job`, and RecipeError for a model with weights that are not finite, but
    for masks: no training mends them.
    """
    job = build_job(loaded, ranks, initial_weights)
    weights = {"model": job.state.bare.state_dict(), "optimizer": None, "ema": None}
    if bad := job.state.nonfinite(weights):
        names = first_of([name.removeprefix("model.") for name in bad])
        message = f"its weights are not finite from the start: {names}"
        advice = "look at how the model makes them (torch.empty holds anything), or what it loads"
        raise RecipeError([loaded.problem("model", message, advice)])
    return job


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
    total_steps: int | None,
    ranks: Ranks = ALONE,
    initial_weights: InitialWeights | None = None,
) -> TrainState:
    """Build model, task, optimizer, schedule and scaler, in the order in which state is loaded."""
    recipe = loaded.recipe
    shards = ranks.size > 1 and recipe.distributed.strategy == "fsdp"
    bare = build_model(loaded, device, spread_later=shards)
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
    updaters = build_updaters(loaded, bare, device, total_steps)
    for updater in updaters if scaling else ():
        optimizers.refuse_closure(updater.optimizer)
    task = build_task(loaded)
    _refuse_unfit(loaded, task, updaters, ranks)
    if torch_private.left_out_by_ddp(bare):
        ranks = replace(ranks, shares_verdict=True)  # these gradients are not averaged
    local: Any = bare
    if recipe.train.compile is not False:
        local = compiled(loaded, bare, task)
    set_accuracy(recipe.amp)
    return TrainState(
        model=in_ddp(loaded, local, task, ranks),
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
        ema=_average(loaded, bare, updaters),
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


def compiled(loaded: LoadedRecipe, model: nn.Module, task: Task) -> Any:
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


def micro_batch_size(recipe: Recipe, ranks: Ranks) -> int:
    """Return the samples of one forward pass on one rank."""
    given = recipe.data.micro_batch_size
    return given if isinstance(given, int) else -(-recipe.data.batch_size // ranks.size)


def _build_train_data(loaded: LoadedRecipe, device: torch.device, ranks: Ranks) -> TrainData:
    recipe = loaded.recipe
    data = recipe.data
    dataset = build_part(loaded, "data.train", data.train)
    micro = micro_batch_size(recipe, ranks)
    collate_fn = build_collate_fn(loaded)
    if isinstance(dataset, IterableDataset):
        return StreamData(
            dataset,
            batch_size=data.batch_size,
            micro_batch_size=micro,
            seed=recipe.seed,
            drop_last=data.drop_last,
            num_workers=data.num_workers,
            ranks=ranks,
            collate_fn=collate_fn,
        )
    order = Order(
        num_samples=length_of(loaded, "data.train", dataset),
        batch_size=data.batch_size,
        micro_batch_size=micro,
        seed=recipe.seed,
        shuffle=data.shuffle,
        drop_last=data.drop_last,
        rank=ranks.rank,
        world_size=ranks.size,
    )
    if order.steps_per_epoch == 0:
        raise wrong(
            loaded,
            "data.batch_size",
            f"{data.batch_size} samples a step, and the data set has {order.num_samples}: with "
            "drop_last no step is left",
            "lower data.batch_size, or set data.drop_last=false",
        )
    pin, workers = device.type == "cuda", data.num_workers
    return MapData(dataset, order, num_workers=workers, pin_memory=pin, collate_fn=collate_fn)


def build_eval_data(
    loaded: LoadedRecipe, device: torch.device, ranks: Ranks = ALONE
) -> EvalData | None:
    """Build the evaluation split, if the recipe has one."""
    recipe = loaded.recipe
    if recipe.data.eval is None:
        return None
    dataset = build_part(loaded, "data.eval", recipe.data.eval)
    length_of(loaded, "data.eval", dataset)
    size = recipe.data.eval_batch_size or micro_batch_size(recipe, ranks)
    return EvalData(
        dataset,
        size,
        seed=recipe.seed,
        num_workers=recipe.data.num_workers,
        pin_memory=device.type == "cuda",
        ranks=ranks,
        collate_fn=build_collate_fn(loaded),
    )


def _total_steps(loaded: LoadedRecipe, steps_per_epoch: int | None) -> int | None:
    train = loaded.recipe.train
    limits = []
    if train.max_steps is not None:
        limits.append(train.max_steps)
    if train.max_epochs is not None and steps_per_epoch is not None:
        limits.append(train.max_epochs * steps_per_epoch)
    return min(limits, default=None)  # the data may end sooner
