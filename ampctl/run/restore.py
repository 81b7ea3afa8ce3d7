"""A job's state out of a checkpoint: what must fit is checked, what was changed is taken over."""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ampctl import commands, files
from ampctl.builder.job import Job
from ampctl.checkpoint import identity, sharded
from ampctl.checkpoint.file import NAME_ANOTHER, UnusableCheckpointError
from ampctl.checkpoint.index import Entry
from ampctl.checkpoint.store import Loaded, load
from ampctl.environment import collect
from ampctl.errors import CheckpointError, RecipeError, as_argument, first_of
from ampctl.recipe import current_folder, trust
from ampctl.recipe.load import LoadedRecipe, parse_recipe, recipe_changes
from ampctl.recipe.schema import Block, Recipe, by_name
from ampctl.recipe.yaml_source import MAX_BYTES
from ampctl.run.folder import RECIPE
from ampctl.state_dict.load import MismatchError, in_present_order
from ampctl.state_dict.optimizers import make_skippable

_NOT_OURS = (LookupError, TypeError, ValueError, AttributeError, RuntimeError, OverflowError)


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run goes on from, and the recipe text that was saved in it.

    ``entry`` is its place in the run's own index, where the run may have to go back to it;
    ``passed_over`` names those after it that cannot be used.
    """

    path: Path
    payload: dict[str, Any]
    saved_recipe: LoadedRecipe
    entry: Entry | None = None
    passed_over: tuple[str, ...] = ()


def read(
    source: Path,
    overrides: Sequence[str],
    *,
    trusted: bool,
    notify: Callable[[str], None],
    in_parts: bool = False,
) -> tuple[Loaded, LoadedRecipe, LoadedRecipe]:
    """Read a checkpoint, the recipe in it, and that recipe with overrides.

    The current folder is opened to imports where `trust.wants_current_folder` says so. Raises
    CheckpointError if the checkpoint cannot be used or trusted, RecipeError for an override.
    """
    found = load(source, notify=notify, in_parts=in_parts)
    text, name = found.payload["recipe"], f"recipe of {found.path.name}"
    saved = saved_recipe(found)
    for line in trust.require_trusted(saved, trust=trusted):
        notify(f"trusted: {line}")
    loaded = parse_recipe(text, where=name, overrides=overrides)
    if trust.wants_current_folder(saved, loaded, trust=trusted):
        current_folder.open_current_folder()
    return found, saved, loaded


def saved_recipe(found: Loaded) -> LoadedRecipe:
    """Return the recipe in a checkpoint; raise CheckpointError if it is none of this version."""
    try:
        return parse_recipe(found.payload["recipe"], where=f"recipe of {found.path.name}")
    except RecipeError as error:
        first = f"{error.problems[0]}".splitlines()[0]
        reason = f"its recipe cannot be read ({first[:200]})"
        raise UnusableCheckpointError(found.path, reason, NAME_ANOTHER) from error


def run_id(run_dir: Path, origin: Origin | None) -> str:
    """Return the identity of the run in a folder: a new one, if none has begun there."""
    found = identity.of_folder(run_dir)
    if found is None and origin is not None:
        home = origin.path.parent.parent
        if os.path.realpath(home) == os.path.realpath(run_dir):
            found = identity.of_facts(origin.payload["environment"])
    return found or identity.new()


def restore(job: Job, origin: Origin, notify: Callable[[str], None]) -> None:
    """Load the checkpoint into the job. Raises CheckpointError for what does not fit."""
    payload = origin.payload
    saved_recipe = origin.saved_recipe.recipe
    saved_data = {} if payload["data"] is None else payload["data"]
    with as_damage(origin.path):
        _require_data(saved_data)
    length = job.train_data.state_dict().get("num_samples")
    saved_length = saved_data.get("num_samples")
    if length is not None and saved_length is not None and length != saved_length:
        changes = _changes_under(["data.train"], origin.saved_recipe, job.loaded)
        cause = f" ({', '.join(changes)})" if changes else ""
        raise CheckpointError(
            f"the checkpoint does not fit the data: data.train had {saved_length} samples when it "
            f"was saved and has {length} now{cause}, so the order of the samples cannot be "
            "continued. Bring the data back, or start a new run."
        )
    size, saved_size = job.recipe.data.batch_size, saved_recipe.data.batch_size
    if size != saved_size:
        raise CheckpointError(
            f"the checkpoint does not fit the recipe: data.batch_size was {saved_size} when it was "
            f"saved and is {size} now, and progress and schedule are counted in steps of that many "
            "samples. Change data.micro_batch_size instead, or start a new run."
        )
    if payload["dtype"] != job.state.precision.name:
        notify(
            f"resuming in {job.state.precision.name} (amp.dtype); it was saved in "
            f"{payload['dtype']}"
        )
    names = [updater.name for updater in job.state.updaters]
    with (
        as_damage(origin.path),
        mismatches_explained(
            origin.path, payload, origin.saved_recipe, job.loaded, job.state.ranks.option
        ),
    ):
        own = _like(job, payload)
        sharded.fill(payload, origin.path, own.get if own else None)
        job.state.load_state_dict(
            payload,
            notify=notify,
            changed_optimizers=_changed(saved_recipe.optimizer, job.recipe.optimizer, names),
            changed_schedulers=_changed(saved_recipe.scheduler, job.recipe.scheduler, names),
        )
        job.train_data.load_state_dict(saved_data)
    if bad := job.state.nonfinite(job.state.parts()):
        reason = f"it holds NaN or infinity in {first_of(bad)}"
        raise UnusableCheckpointError(origin.path, reason, NAME_ANOTHER)
    for updater in job.state.updaters:
        make_skippable(updater.optimizer)
    _forget_what_changed(job, saved_recipe, notify)
    progress, steps = job.state.progress, job.train_data.steps_per_epoch
    if steps is not None and progress.batch_in_epoch >= steps:  # data.drop_last, say
        progress.epoch, progress.batch_in_epoch = progress.epoch + 1, 0
    payload.clear()  # or a second copy of the state would stay in memory for the whole run


def _forget_what_changed(job: Job, saved: Recipe, notify: Callable[[str], None]) -> None:
    """Forget what another setting has left in the state: it cannot be compared."""
    progress, recipe = job.state.progress, job.recipe
    before, after = saved.checkpoint, recipe.checkpoint
    if (before.monitor, before.mode) != (after.monitor, after.mode):
        progress.best, progress.best_step = None, None
        for updater in job.state.updaters:
            updater.learning_rate.forget_evaluations()
        notify(
            f"checkpoint.monitor was {before.monitor} ({before.mode}) and is {after.monitor} "
            f"({after.mode}): the best so far is found anew"
        )
    was, now = saved.train.early_stop, recipe.train.early_stop
    if was and now and (was.monitor, was.mode) != (now.monitor, now.mode):
        progress.early_stop_best, progress.early_stop_bad = None, 0
        notify(
            f"train.early_stop watched {was.monitor} ({was.mode}) and watches {now.monitor} "
            f"({now.mode}) now: patience starts anew"
        )
    names = ("seed", "data.shuffle")
    order = [(saved.seed, recipe.seed), (saved.data.shuffle, recipe.data.shuffle)]
    changed = [name for name, (old, new) in zip(names, order, strict=True) if old != new]
    if changed and progress.batch_in_epoch:
        notify(
            f"{' and '.join(changed)} changed within epoch {progress.epoch}: the rest of it is of "
            "another order, so that some of its samples come twice and others not at all"
        )


@contextmanager
def mismatches_explained(
    path: Path,
    payload: Mapping[str, Any],
    saved: LoadedRecipe,
    loaded: LoadedRecipe,
    ranks: str = "",
) -> Iterator[None]:
    """Add to a misfit what has changed since the checkpoint was saved, and what can be done.

    ``ranks``: the option that starts as many processes.
    """
    # Before it is loaded, which may empty the payload.
    was, text = payload["environment"], payload["recipe"]
    try:
        yield
    except MismatchError as error:
        changes = _changes_under(error.keys, saved, loaded)
        if not changes:
            keys = " and ".join(error.keys)
            code = ", ".join(_other_versions(was)) or "no version either, so the code behind it"
            changes = [f"nothing under {keys} in the recipe; {code}"]
        way_on = "Go on with what it was saved with, or start a new run"
        if error.allowances is not None:
            some = " that fit" if error.allowances else ""
            lines = _start_anew(path, text, loaded, f"{ranks} {error.allowances}".rstrip())
            way_on += f" from its weights{some}:\n    " + "\n    ".join(lines)
        else:
            way_on += ": none of its weights fits"
        changed = ", ".join(changes)
        raise CheckpointError(
            f"{error}\nchanged since it was saved: {changed}\n{way_on}"
        ) from error


def _start_anew(path: Path, text: str, loaded: LoadedRecipe, options: str) -> list[str]:
    """Return the commands that train a recipe anew, from the weights of a checkpoint.

    The recipe is the file that the user has named, or that of the run if it is the one that was
    saved in the checkpoint, or is written to a file first.
    """
    needed, recipe = [], loaded.source
    if not recipe:
        of_run = path.parent.parent / RECIPE
        with suppress(OSError, UnicodeError):  # of half a surrogate pair, which no file holds
            is_same = files.read(of_run, most=MAX_BYTES) == text.encode()
            recipe = f"{of_run}" if is_same else ""
    if not recipe:
        recipe = f"{path.stem}.yaml"
        needed.append(f"ampctl inspect {as_argument(path)} --recipe > {as_argument(recipe)}")
    anew = commands.train(recipe, loaded.overrides, init_from=path, ranks=options)
    return [*needed, anew]


def _changes_under(keys: Sequence[str], saved: LoadedRecipe, loaded: LoadedRecipe) -> list[str]:
    """Describe each change of the recipe within some parts of it."""
    every = recipe_changes(saved, loaded)
    return [c for c in every if any(re.match(rf"{re.escape(key)}[.\[ ]", c) for key in keys)]


def _other_versions(was: Mapping[str, Any]) -> list[str]:
    """Describe which versions, and which commit of the user's folder, are others than they were."""
    now = collect(with_git=current_folder.is_open())
    names = ("ampctl", "torch", "numpy", "python")
    found: list[tuple[str, Any, Any]] = [(name, was.get(name), now[name]) for name in names]
    old_git, new_git = was.get("git"), now["git"]
    if isinstance(old_git, dict) and isinstance(new_git, dict):
        found.append(("git commit", old_git.get("commit"), new_git.get("commit")))
    return [f"{name} {old} -> {new}" for name, old, new in found if old and new and old != new]


def _require_data(state: Any) -> None:
    """Raise TypeError for a state of the data that none can be."""
    if not isinstance(state, dict):
        raise TypeError(f"`data` is a {type(state).__name__}")
    for name in state.keys() & {"num_samples", "seed"}:
        if type(state[name]) is not int:
            raise TypeError(f"`data.{name}` is a {type(state[name]).__name__}")


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
        saved = in_present_order(saved, updater.optimizer)
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
