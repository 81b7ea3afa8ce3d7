"""Options of an optimizer that its schedule sets by itself, so that the recipe's are not used.

Nothing here knows a class of schedule: it is built over groups of another value, and where groups
and schedule come out the same, nothing of that value is left for any update.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ampctl import rng
from ampctl.builder.job import Job
from ampctl.engine.learning_rate import follows_metric
from ampctl.engine.updater import Updater, build_schedule
from ampctl.recipe.arguments import parameters_of
from ampctl.recipe.keys import child
from ampctl.recipe.schema import TARGET, block_key, by_name
from ampctl.recipe.target import locate
from ampctl.state_dict import copies
from ampctl.state_dict.checks import are_same
from ampctl.state_dict.group_options import Values, group_values, stand_in


def set_by_schedule(job: Job) -> dict[str, str]:
    """Return the keys under ``optimizer`` that have no effect, and of each why.

    They are leaves of the recipe, as ``optimizer.betas[0]`` is.
    """
    before = rng.get_state(job.state.device)
    try:
        return {key: why for updater in job.state.updaters for key, why in _of(job, updater)}
    finally:
        rng.set_state(before, job.state.device)


def _of(job: Job, updater: Updater) -> Iterator[tuple[str, str]]:
    blocks, source = by_name(job.recipe.scheduler), updater.learning_rate.source
    if not isinstance(source, LRScheduler) or follows_metric(source):
        return  # a function is a factor on the rate, and a metric can change it at any time
    name = updater.name if updater.name in blocks else ""
    block, at = blocks[name], block_key("scheduler", name)
    kind = f"{block[TARGET]}".rpartition(".")[2]

    def made(values: Values) -> Any:
        """Return what the groups and the schedule hold of such values: all that comes of them."""
        on = stand_in(updater.optimizer, values)
        schedule = build_schedule(job.loaded, at, block, on, job.total_steps)
        return [group_values(on), copies.snapshot(dict(schedule.state_dict()))]

    bare = updater.learning_rate.bare
    under = f"{block_key('optimizer', updater.name)}."
    given = {k: k.rpartition(".")[2] for k in job.loaded.explicit if k.startswith(under)}
    options = {name for group in bare for name, _ in _numbers(group)} & {*given.values()}
    as_it_is = made(bare) if options else None
    fixed = {
        option
        for option in options
        if are_same(as_it_is, made([_other(group, option) for group in bare]))
    }
    parameters = parameters_of(locate(block[TARGET]))
    for key, option in given.items():
        if option in fixed:
            names = [n for n, p in parameters.items() if not isinstance(p.default, bool)]
            own = [child(at, n) for n in names if option in n.split("_")]
            yield key, f"{kind} sets it, from {', '.join(own) or f'its own arguments, under {at}'}"


def _numbers(group: Mapping[str, Any]) -> Iterator[tuple[str, float]]:
    """Yield each number of a group by its name, and those of a list by their places."""
    for name, value in group.items():
        items = value if isinstance(value, list | tuple) else [value]
        for index, item in enumerate(items):
            if isinstance(item, int | float | Tensor) and not isinstance(item, bool):
                yield name if items is not value else child(name, index), float(item)


def _other(group: Mapping[str, Any], option: str) -> dict[str, Any]:
    """Return a group with another number in one place."""

    def changed(name: str, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(changed(child(name, i), item) for i, item in enumerate(value))
        return (value / 2 if value else value + 0.5) if name == option else value

    return {name: changed(name, value) for name, value in group.items()}
