"""Whether a schedule is as long as its run: it is tried on a stand-in that trains nothing.

Nothing here knows a class of schedule: what is wrong is seen in the rates, and the argument that is
to blame is the one with which, made as long as the run, it is right.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from itertools import accumulate, chain, pairwise
from typing import Any

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler

from ampctl import rng
from ampctl.builder.job import Job
from ampctl.doctor.finding import Finding
from ampctl.engine.learning_rate import follows_metric
from ampctl.engine.updater import Updater, build_schedule
from ampctl.errors import RecipeError
from ampctl.recipe.keys import child
from ampctl.recipe.schema import TARGET, Block, block_key, by_name
from ampctl.recipe.target import failure_of
from ampctl.state_dict.group_options import stand_in

_MOST_TRIED = 1_000_000
"""So many rates are computed, which takes ten seconds; of a longer run they are the first ones."""

_NOTHING = 1e-15
"""A rate of this part of the largest one trains nothing."""

_NAME = "schedule-too-short"

_LENGTH = re.compile(r"T_max|(max|num|total)_(\w+_)?(steps|iters|epochs|updates)")
"""Names of arguments that say how long a schedule is, so that what comes after it is not meant.

Without them a schedule that falls and climbs may be a cyclic one.
"""


@dataclass(frozen=True)
class _Course:
    """The largest rate of each update; ``end`` is what was raised after them, or ""."""

    rates: list[float]
    end: str = ""


@dataclass(frozen=True)
class _Remedy:
    """The key to blame, what to do about it, and what it was and gives, where it is a count."""

    at: str
    advice: str
    value: int = 0
    course: _Course | None = None


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
            doing = f"{kind}, stepped without training, failed"
            raise failure_of(block, error, doing, key=key, origins=job.loaded.origins) from error

    found = course(block)
    if found.end:
        best = _remedy(block, key, total, course, lambda at, other: True)
        raise RecipeError(
            [
                job.loaded.problem(
                    best.at,
                    f"{kind} ends after {len(found.rates) - 1} updates ({found.end}), and the run "
                    f"has {total} steps",
                    f"{best.advice}, or shorten the run",
                )
            ]
        )
    tail = _tail(found.rates)
    if tail > 1 and tail * 100 >= total and tried == total:
        best = _remedy(block, key, total, course, lambda at, other: _tail(other.rates) <= 1)
        if best.at == key:
            best = _zero_to_blame(block, key, course) or best
        reason = f"{kind} leaves a rate of 0 for the last {tail} of {total}"
        yield Finding(_NAME, best.at, reason, f"{best.advice}.")
        return
    climb = _climb(found.rates)
    if len(climb) <= 1:
        return

    def ends_the_climb(at: str, other: _Course) -> bool:
        return _says_length(at) and len(climb - _climb(other.rates)) > 1

    best = _remedy(block, key, total, course, ends_the_climb)
    if best.course is not None:
        first = min(climb - _climb(best.course.rates))
        reason = f"{kind} ends at {best.value}, and its rate climbs again from update {first} of"
        yield Finding(_NAME, best.at, f"{reason} {total}", f"{best.advice}.")


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


def _remedy(
    block: Block,
    key: str,
    total: int,
    course: Callable[[Block], _Course],
    is_right: Callable[[str, _Course], bool],
) -> _Remedy:
    """Return the count that makes a schedule right and lets it fall until the run ends.

    Of several it is one whose name says a length, then one that leaves the lowest last rate.
    """
    right = []
    for at, value, longer, other in _lengths(block, key, total):
        made = _tried(course, other)
        if made.end or not is_right(at, made) or not _falls_to_its_end(made.rates):
            continue
        advice = f"Set {at}={longer}, or what is left of the run where it begins later"
        found = _Remedy(at, advice, value, made)
        right.append((not _says_length(at), made.rates[-1] / max(made.rates), found))
    best = min(right, key=lambda each: each[:2], default=None)
    return best[-1] if best else _Remedy(key, "Make it as long as the run")


def _zero_to_blame(block: Block, key: str, course: Callable[[Block], _Course]) -> _Remedy | None:
    """Return the argument that is 0 and sets the rate to 0, as a ``gamma`` does; None without."""
    for at, value, _, other in _numbers(block, key, lambda *_: 0.1):
        made = _tried(course, other) if value == 0 else _Course([], "not tried")
        if not made.end and _tail(made.rates) <= 1:
            return _Remedy(at, f"Set {at} above 0")
    return None


def _lengths(block: Block, key: str, total: int) -> Iterator[tuple[str, int, int, Block]]:
    """Yield the key and value of each count below a run's, the run's, and the block with that."""

    def longer(place: Any, holder: Any) -> int:
        steps = holder.get("steps_per_epoch") if place == "epochs" else None
        return -(-total // steps) if isinstance(steps, int) and steps > 0 else total

    for at, value, made, other in _numbers(block, key, longer):
        if type(value) is int and 0 < value < made:
            yield at, value, made, other


def _numbers(
    value: Any, key: str, new: Callable[[Any, Any], Any]
) -> Iterator[tuple[str, Any, Any, Any]]:
    """Yield each number's key and value, the ``new`` one, and what holds it with the new one."""
    items: list[tuple[Any, Any]] = []
    if isinstance(value, dict):
        items = [*value.items()]
    elif isinstance(value, list):
        items = [*enumerate(value)]
    for place, item in items:
        at = child(key, place)
        is_number = type(item) in (int, float)
        put = new(place, value) if is_number else None
        changes = [(at, item, put, put)] if is_number else []
        for inner, found, made, other in chain(changes, _numbers(item, at, new)):
            changed = value.copy()
            changed[place] = other
            yield inner, found, made, changed


def _says_length(at: str) -> bool:
    return bool(_LENGTH.fullmatch(re.split(r"[.\[]", at)[-1]))


def _falls_to_its_end(rates: list[float]) -> bool:
    """Return whether the last rate is below the largest one: not so where all is warm-up."""
    return bool(rates) and rates[-1] < max(rates) * (1 - 1e-9)


def _tail(rates: list[float]) -> int:
    """Return how many of the last rates are as good as 0, if not all are."""
    least = max(rates, default=0.0) * _NOTHING
    last = max((update for update, rate in enumerate(rates) if rate > least), default=-1)
    return len(rates) - 1 - last if last >= 0 else 0


def _climb(rates: list[float]) -> set[int]:
    """Return the updates whose rate is above that of the one before, once it has fallen."""
    largest = accumulate(rates, max)
    pairs = enumerate(zip(largest, pairwise(rates), strict=False), start=1)
    return {u for u, (most, (old, new)) in pairs if new > old * (1 + 1e-9) and old < most}
