"""Whether a schedule is as long as its run: it is tried on a stand-in that trains nothing.

Nothing here knows a class of schedule: what is wrong is seen in the rates, and the argument that is
to blame is the one with which, made as long as the run, it is right.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, pairwise
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ampctl import rng
from ampctl.build import Job
from ampctl.doctor.finding import Finding
from ampctl.errors import RecipeError
from ampctl.groups import stand_in
from ampctl.lr import follows_metric
from ampctl.recipe.fault import failure
from ampctl.recipe.keys import child
from ampctl.recipe.schema import TARGET, Block, block_key, by_name
from ampctl.updater import Updater, build_schedule

_MOST_TRIED = 1_000_000
"""So many rates are computed, which takes ten seconds; of a longer run they are the first ones."""

_NOTHING = 1e-15
"""A rate of this part of the largest one trains nothing."""

_LENGTH = re.compile(r"T_max|(max|num|total)_(\w+_)?(steps|iters|epochs|updates)")
"""Names of arguments that say how long a schedule is, so that what comes after it is not meant.

Without them a schedule that falls and climbs may be a cyclic one.
"""


@dataclass(frozen=True)
class _Course:
    """The largest rate of each update; ``end`` is what was raised after them, or ""."""

    rates: list[float]
    end: str = ""


def not_compared(job: Job) -> str:
    """Return why the schedules of a job cannot be compared with its length, or ""."""
    if job.recipe.scheduler is None:
        return ""
    if job.state.takes_turns:
        return "how many turns each optimizer will have is not known"
    return "how many steps there will be is not known" if job.total_steps is None else ""


def schedule_findings(job: Job) -> list[Finding]:
    """Return what is wrong with the lengths of a job's schedules.

    Raises RecipeError for one that cannot be stepped to the end of the run.
    """
    if not_compared(job):
        return []
    before = rng.get_state(job.state.device)
    try:
        return [finding for updater in job.state.updaters for finding in _of(job, updater)]
    finally:
        rng.set_state(before, job.state.device)


def _of(job: Job, updater: Updater) -> Iterator[Finding]:
    blocks, source = by_name(job.recipe.scheduler), updater.learning_rate.source
    name = updater.name if updater.name in blocks else ""
    block, total = blocks.get(name), job.total_steps or 0
    if block is None or (isinstance(source, LRScheduler) and follows_metric(source)):
        return
    key, kind = block_key("scheduler", name), f"{block[TARGET]}".rpartition(".")[2]
    tried = min(total, _MOST_TRIED // len(updater.optimizer.param_groups))

    def course(block: Block) -> _Course:
        on = stand_in(updater.optimizer, updater.learning_rate.bare)
        schedule = build_schedule(job.loaded, key, block, on, total)
        try:
            return _course(schedule, on, tried)
        except Exception as error:
            where = job.loaded.place(key)
            raise failure(error, f"{kind}, stepped without training, failed", where, key) from error

    found = course(block)
    if found.end:
        at = _to_blame(block, key, total, course, lambda other: not other.end)
        raise RecipeError(
            [
                job.loaded.problem(
                    at,
                    f"{kind} ends after {len(found.rates) - 1} updates ({found.end}), and the run "
                    f"has {total} steps",
                    f"{_longer(at, key, total)}, or shorten the run",
                )
            ]
        )
    tail = _tail(found.rates)
    if tail > 1 and tail * 100 >= total and tried == total:
        at = _to_blame(block, key, total, course, lambda other: _tail(other.rates) < tail)
        yield _finding(at, key, total, f"{kind} leaves a rate of 0 for the last {tail} of {total}")
        return
    climb = _climb(found.rates)
    for at, value, longer in _lengths(block, key, total) if len(climb) > 1 else ():
        if not _LENGTH.fullmatch(re.split(r"[.\[]", at)[-1]):
            continue
        other = _tried(course, longer)
        gone = climb - _climb(other.rates)
        if len(gone) > 1 and not other.end and _peak(other.rates) == _peak(found.rates):
            what = f"{kind} ends at {value}, and its rate climbs again from update {min(gone)} of"
            yield _finding(at, key, total, f"{what} {total}")
            return


def _finding(at: str, key: str, total: int, reason: str) -> Finding:
    return Finding("schedule-too-short", at, reason, f"{_longer(at, key, total)}.")


def _longer(at: str, key: str, total: int) -> str:
    """Return what to do about an argument, or about a schedule none of whose arguments will do."""
    if at == key:
        return "Make it as long as the run"
    return f"Set {at}={total}, or what is left of the run where it begins later"


def _course(schedule: Any, optimizer: Optimizer, updates: int) -> _Course:
    """Return the rates of so many updates."""
    base = max((float(group["lr"]) for group in optimizer.param_groups), default=0.0)
    rates: list[float] = []
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # torch's own, that no optimizer was stepped before it
            for update in range(updates):
                if not isinstance(schedule, LRScheduler):
                    rates.append(base * float(schedule(update)))
                    continue
                rates.append(max(float(group["lr"]) for group in optimizer.param_groups))
                schedule.step()
    except (ValueError, LookupError, ArithmeticError) as error:
        return _Course(rates, f"{error}")
    return _Course(rates)


def _tried(course: Callable[[Block], _Course], block: Block) -> _Course:
    """Return the course of another block, if it is one that can be built."""
    try:
        return course(block)
    except RecipeError as error:
        return _Course([], f"{error}")


def _to_blame(
    block: Block,
    key: str,
    total: int,
    course: Callable[[Block], _Course],
    is_right: Callable[[_Course], bool],
) -> str:
    """Return the key of the argument with which, made as long as the run, a schedule is right."""
    for at, _, longer in _lengths(block, key, total):
        other = _tried(course, longer)
        if not other.end and is_right(other):
            return at
    return key


def _lengths(value: Any, key: str, total: int) -> Iterator[tuple[str, int, Any]]:
    """Yield the key and value of each count below a run's, and what holds it with the run's."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = [*value.items()]
    elif isinstance(value, list):
        items = [*enumerate(value)]
    for place, item in items:
        changed = value.copy()
        if type(item) is int and 0 < item < total:
            changed[place] = total
            yield child(key, place), item, changed
        for at, inner, other in _lengths(item, child(key, place), total):
            yield (
                at,
                inner,
                {**value, place: other}
                if isinstance(value, dict)
                else [other if i == place else each for i, each in enumerate(value)],
            )


def _tail(rates: list[float]) -> int:
    """Return how many of the last rates are as good as 0, if not all are."""
    least = max(rates, default=0.0) * _NOTHING
    last = max((update for update, rate in enumerate(rates) if rate > least), default=-1)
    return len(rates) - 1 - last if last >= 0 else 0


def _peak(rates: list[float]) -> int:
    """Return the first update with the largest rate, where a warm-up ends."""
    largest = max(rates)
    return next(update for update, rate in enumerate(rates) if rate >= largest * (1 - 1e-9))


def _climb(rates: list[float]) -> set[int]:
    """Return the updates whose rate is above that of the one before, once it has fallen."""
    largest = accumulate(rates, max)
    pairs = enumerate(zip(largest, pairwise(rates), strict=False), start=1)
    return {u for u, (most, (old, new)) in pairs if new > old * (1 + 1e-9) and old < most}
