"""Options of an optimizer that its schedule sets by itself, so that the recipe's are not used.

Nothing here knows a class of schedule: it is built over groups of other values, and what comes out
the same is its own.
"""

from __future__ import annotations

import warnings
from collections.abc import Iterator, Mapping
from typing import Any

from torch import Tensor
from torch.optim.lr_scheduler import LRScheduler

from ampctl import rng
from ampctl.build import Job
from ampctl.groups import Values, group_values, stand_in
from ampctl.lr import follows_metric
from ampctl.recipe.arguments import parameters_of
from ampctl.recipe.fault import failure
from ampctl.recipe.keys import child
from ampctl.recipe.schema import TARGET, block_key, by_name
from ampctl.recipe.target import locate
from ampctl.updater import Updater, build_schedule


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

    def course(values: Values) -> list[dict[str, float]]:
        on = stand_in(updater.optimizer, values)
        schedule = build_schedule(job.loaded, at, block, on, job.total_steps)
        built = group_values(on)
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, that no optimizer was stepped before it
            try:
                schedule.step()
            except Exception as error:
                where = job.loaded.place(at)
                raise failure(error, f"{kind}, stepped once, failed", where, at) from error
        return [dict(_numbers(group)) for group in (*built, *group_values(on))]

    bare = updater.learning_rate.bare
    one, other = course(bare), course([_halved(group) for group in bare])
    fixed = {
        option
        for option in one[0]
        if all(a.get(option) == b.get(option) for a, b in zip(one, other, strict=True))
    }
    parameters = parameters_of(locate(block[TARGET]))
    for key in job.loaded.explicit:
        if not key.startswith(f"{block_key('optimizer', updater.name)}."):
            continue
        option = key.rpartition(".")[2]
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


def _halved(group: Mapping[str, Any]) -> dict[str, Any]:
    """Return a group of other numbers, all of them of a kind that was there."""
    return {name: _half(value) for name, value in group.items()}


def _half(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(map(_half, value))
    if isinstance(value, bool) or not isinstance(value, float | int | Tensor):
        return value
    return value / 2 if value else value + 0.5
