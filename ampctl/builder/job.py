"""From a recipe to a Job: the state that is trained, and the data that it is trained on."""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch.utils.data import IterableDataset

from ampctl import rng
from ampctl.builder.initial_weights import InitialWeights
from ampctl.builder.parts import build_part, length_of, wrong
from ampctl.builder.refusals import refuse_odd_numbers, refuse_unknown_targets, refuse_unsupported
from ampctl.builder.state import build_state, settle_device
from ampctl.data.collate import build_collate_fn
from ampctl.data.loader import EvalData, MapData, TrainData
from ampctl.data.order import Order
from ampctl.data.stream import StreamData
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.engine.state import TrainState
from ampctl.errors import RecipeError, first_of
from ampctl.recipe.load import LoadedRecipe
from ampctl.recipe.schema import Recipe
from ampctl.state_dict.layout import Layout, layout

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
    state = build_state(
        loaded,
        device,
        precision,
        ranks,
        total_steps=total_steps,
        initial_weights=initial_weights,
    )
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
