"""A job's state out of a checkpoint: what must fit is checked, what was changed is taken over."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ampctl.build import Job
from ampctl.checkpoint import parts
from ampctl.checkpoint.index import Entry
from ampctl.checkpoint.store import Loaded, load
from ampctl.errors import CheckpointError
from ampctl.optim import make_skippable
from ampctl.recipe import trust
from ampctl.recipe.load import LoadedRecipe, parse_recipe
from ampctl.recipe.schema import Block, by_name

_NOT_OURS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run goes on from, and the recipe text that was saved in it.

    ``entry`` is its place in the run's own index, where the run may have to go back to it.
    """

    path: Path
    payload: dict[str, Any]
    saved_recipe: LoadedRecipe
    entry: Entry | None = None


def read(
    source: Path,
    overrides: Sequence[str],
    *,
    trusted: bool,
    notify: Callable[[str], None],
    in_parts: bool = False,
) -> tuple[Loaded, LoadedRecipe, LoadedRecipe]:
    """Read a checkpoint, the recipe in it, and that recipe with overrides.

    Raises CheckpointError if it cannot be used or trusted, RecipeError for an override.
    """
    found = load(source, notify=notify, in_parts=in_parts)
    text, name = found.payload["recipe"], f"recipe of {found.path.name}"
    saved = parse_recipe(text, where=name)
    for line in trust.require_trusted(saved, trust=trusted):
        notify(f"trusted: {line}")
    return found, saved, parse_recipe(text, where=name, overrides=overrides)


def restore(job: Job, origin: Origin, notify: Callable[[str], None]) -> None:
    """Load the checkpoint into the job. Raises CheckpointError for what does not fit."""
    payload = origin.payload
    saved_recipe = origin.saved_recipe.recipe
    saved_data = payload["data"] or {}
    length = job.train_data.state_dict().get("num_samples")
    saved_length = saved_data.get("num_samples")
    if length is not None and saved_length is not None and length != saved_length:
        raise CheckpointError(
            f"the checkpoint does not fit the data: data.train had {saved_length} samples when it "
            f"was saved and has {length} now, so the order of the samples cannot be continued. "
            "Bring the data back, or start a new run."
        )
    size, saved_size = job.recipe.data.batch_size, saved_recipe.data.batch_size
    if size != saved_size:
        raise CheckpointError(
            f"the checkpoint does not fit the recipe: data.batch_size was {saved_size} when it was "
            f"saved and is {size} now, and progress and schedule are counted in steps of that many "
            "samples. Change data.micro_batch_size instead, or start a new run."
        )
    if payload["dtype"] != job.state.precision.name:
        notify(f"resuming in {job.state.precision.name}; it was saved in {payload['dtype']}")
    names = [updater.name for updater in job.state.updaters]
    with as_damage(origin.path):
        own = _like(job, payload)
        parts.fill(payload, origin.path, own.get if own else None)
        job.state.load_state_dict(
            payload,
            notify=notify,
            changed_optimizers=_changed(saved_recipe.optimizer, job.recipe.optimizer, names),
            changed_schedulers=_changed(saved_recipe.scheduler, job.recipe.scheduler, names),
        )
        job.train_data.load_state_dict(saved_data)
    for updater in job.state.updaters:
        make_skippable(updater.optimizer)
    progress, steps = job.state.progress, job.train_data.steps_per_epoch
    if steps is not None and progress.batch_in_epoch >= steps:  # data.drop_last, say
        progress.epoch, progress.batch_in_epoch = progress.epoch + 1, 0
    payload.clear()  # or a second copy of the state would stay in memory for the whole run


def _like(job: Job, payload: dict[str, Any]) -> dict[str, Tensor]:
    """Return the sharded tensors that take those of a checkpoint, by dotted key."""
    if not job.state.ranks.shards:
        return {}
    own = {
        f"{part}.{name}": value
        for part in ("model", "ema")
        for name, value in job.state.bare.state_dict().items()
    }
    for updater in job.state.updaters:
        saved, key = payload["optimizer"], "optimizer"
        if updater.name:
            saved, key = saved[updater.name], f"{key}.{updater.name}"
        indices = [index for group in saved["param_groups"] for index in group["params"]]
        for index, parameter in zip(indices, updater.parameters, strict=False):  # refused later
            for name in saved["state"].get(index, {}):
                own[f"{key}.state.{index}.{name}"] = parameter
    return own


@contextmanager
def as_damage(path: Path) -> Iterator[None]:
    """Raise CheckpointError for content of the right keys that is not what ampctl saves there."""
    try:
        yield
    except _NOT_OURS as error:
        raise CheckpointError(
            f"checkpoint {path} cannot be used: its content is not what ampctl saves "
            f"({type(error).__name__}: {error}); name another one"
        ) from error


def _changed(old: Block | None, new: Block | None, names: Sequence[str]) -> list[str]:
    """Return the optimizers whose block, or whose schedule's, is another than it was."""
    before, after = by_name(old), by_name(new)
    return [n for n in names if before.get(n, before.get("")) != after.get(n, after.get(""))]
