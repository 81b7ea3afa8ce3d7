"""Whether a checkpoint can hold what a recipe names, asked before there is anything to lose."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from typing import Any

from ampctl.builder.job import Job
from ampctl.errors import CheckpointError, Problem, RecipeError, first_of
from ampctl.recipe.schema import block_key, by_name
from ampctl.state_dict import copies
from ampctl.state_dict.layout import changes

_ADVICE = (
    "give it a state_dict() and a load_state_dict() that bring it back, or take a class that has "
    "them"
)


_IN_INIT = (
    "make parameters and buffers in __init__, in their final shape; a buffer that need not be "
    "saved can be registered with persistent=False"
)


def refuse_unsavable(job: Job, *, begun: bool) -> None:
    """Raise RecipeError for parts whose state cannot be taken, or that no checkpoint can hold.

    ``begun``: a step was taken, from which on a data set must say where it stands, and the model
    must be made of what it was built with.
    """
    if begun and (changed := changed_by_a_pass(job)):
        raise changed
    every = _parts(job, begun=begun)
    problems = [_problem(job, key, part, path, take) for key, part, path, take in every]
    found = [problem for problem in problems if problem is not None]
    if found:
        raise RecipeError(found)


def changed_by_a_pass(job: Job) -> RecipeError | None:
    """Return the error that a model is no longer made of what it was built with, if it is not."""
    made = changes(job.built, job.state.bare)
    if not made:
        return None
    message = (
        f"a pass has changed what the model is made of: {first_of(made)}. No optimizer trains "
        "what is new, and no checkpoint of it can be resumed"
    )
    return RecipeError([job.loaded.problem("model", message, _IN_INIT)])


def _parts(job: Job, *, begun: bool) -> Iterator[tuple[str, Any, str, Callable[[], Any]]]:
    """Yield each part's key in the recipe, the part, its key in a checkpoint, and its state."""
    yield "model", job.state.bare, "model", job.state.bare.state_dict
    schedules = by_name(job.recipe.scheduler)
    for updater in job.state.updaters:
        key = block_key("optimizer", updater.name)
        yield key, updater.optimizer, key, updater.optimizer.state_dict
        schedule, path = updater.learning_rate, block_key("scheduler", updater.name)
        if schedule.source is not None:
            key = block_key("scheduler", updater.name if updater.name in schedules else "")
            yield key, schedule.source, path, schedule.state_dict
    if begun:
        data = job.train_data
        yield "data.train", getattr(data, "dataset", data), "data", data.state_dict


def _problem(job: Job, key: str, part: Any, path: str, take: Callable[[], Any]) -> Problem | None:
    """Return what keeps a part out of a checkpoint, if anything does."""
    kind = type(part).__name__
    try:
        state = take()
    except Exception as error:
        why = f"{type(error).__name__}: {error}".strip().removesuffix(":")
        message = f"{kind}.state_dict() fails ({why}), and a checkpoint is made of what it returns"
        return job.loaded.problem(key, message, _ADVICE)
    if key.startswith("optimizer"):
        groups = state.get("param_groups") if isinstance(state, dict) else None
        if not isinstance(groups, list) or not isinstance(state.get("state"), dict):
            message = f"{kind}.state_dict() gives no `state` and `param_groups`, as torch's do"
            return job.loaded.problem(key, message, _ADVICE)
    try:
        copies.copied_tensors(state, path)
    except CheckpointError as error:
        return job.loaded.problem(key, f"{kind}: {error}")
    return None
