"""How the learning rate follows applied updates, by a pure function or a torch scheduler.

The place in a schedule is how many updates were applied. A scheduler of torch is restored from its
own state where it is the one that was saved, and makes these updates again where it is another one,
so that nothing here knows how a class keeps its place.
"""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Collection, Mapping, Sequence
from itertools import pairwise
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ampctl.errors import CheckpointError
from ampctl.state_dict import copies
from ampctl.state_dict.checks import are_same, fitted, moved_on, rates
from ampctl.state_dict.group_options import (
    Values,
    copied,
    differing,
    give_back,
    group_values,
    set_rate,
)

FUNCTION = "function"
"""The kind of a schedule that is a pure function of updates, in a checkpoint."""

_RATES = frozenset({"lr", "initial_lr"})
_MOST_REPEATED = 100_000_000  # minutes; a forged count is not to take for ever


class LearningRate(Protocol):
    """What the step asks of a schedule."""

    @property
    def source(self) -> Any:
        """What the recipe names: a scheduler of torch or a function of updates; None for none."""

    @property
    def bare(self) -> Values:
        """What the optimizer's groups held before the schedule was built."""

    def before_update(self) -> None:
        """Set each group's rate for the update that comes next."""

    def updated(self) -> None:
        """Take note that an update was applied; never called for a skipped step."""

    def evaluated(self, value: float) -> None:
        """Take note of the monitored metric of an evaluation."""

    def forget_evaluations(self) -> None:
        """Take the next evaluation for the first: its metric is another one."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(
        self, state: Mapping[str, Any], *, updates: int, new_base: bool, new_plan: bool
    ) -> None:
        """Restore a state after ``updates`` updates, with the optimizer's state already loaded.

        ``new_base``: the optimizer's block is another one, ``new_plan``: the schedule's is. Then
        the rates are those of the new recipe after as many updates. Raises CheckpointError for a
        state that cannot be gone on from.
        """


class FunctionSchedule:
    """Base rates times ``factor(update)``; without a function the rates stay as the recipe says."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float] | None) -> None:
        self._optimizer = optimizer
        self.bare = group_values(optimizer)
        self._base = [float(group["lr"]) for group in optimizer.param_groups]
        self._factor = factor
        self._updates = 0

    @property
    def source(self) -> Callable[[int], float] | None:
        """The function."""
        return self._factor

    def before_update(self) -> None:
        """Set each group's rate for the update that comes next."""
        if self._factor is None:
            return
        factor = self._factor(self._updates)
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            set_rate(group, base * factor)

    def updated(self) -> None:
        """Take note that an update was applied."""
        self._updates += 1

    def evaluated(self, value: float) -> None:
        """A pure function of updates looks at no metric."""

    def forget_evaluations(self) -> None:
        """It has none."""

    def state_dict(self) -> dict[str, Any]:
        """Return the update count and the base rates."""
        return {"kind": FUNCTION, "updates": self._updates, "base_lrs": list(self._base)}

    def load_state_dict(
        self, state: Mapping[str, Any], *, updates: int, new_base: bool, new_plan: bool
    ) -> None:
        """Go on after ``updates`` updates; a pure function needs nothing else."""
        self._updates = updates
        saved = rates(state["base_lrs"], "scheduler.base_lrs")
        if not new_base and state["kind"] == FUNCTION and len(saved) == len(self._base):
            self._base = saved
        if not (new_base or new_plan or state["kind"] != FUNCTION):
            return
        give_back(self._optimizer, self.bare, _RATES.union(_written(state)))
        for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
            set_rate(group, base)
        self.before_update()  # what is told of the groups is of the rates that come


class TorchSchedule:
    """A scheduler of ``torch.optim.lr_scheduler``, stepped once for each applied update.

    One whose ``step`` takes a metric, as that of ``ReduceLROnPlateau`` does, is stepped by
    evaluations instead. ``bare``: what the groups held before it was built, if that is known.
    """

    def __init__(
        self, optimizer: Optimizer, scheduler: LRScheduler, bare: Values | None = None
    ) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._follows_metric = follows_metric(scheduler)
        self._fresh = group_values(optimizer)
        self.bare = bare if bare is not None else self._fresh
        name = "lr" if bare is not None else "initial_lr"
        self._base = [float(group[name if name in group else "lr"]) for group in self.bare]
        self._built: dict[str, Any] | None = None
        self._writes = _RATES | differing(self.bare, self._fresh)
        self._is_new = True

    @property
    def source(self) -> LRScheduler:
        """The scheduler."""
        return self._scheduler

    def before_update(self) -> None:
        """The scheduler has set the rates when it was last stepped."""

    def updated(self) -> None:
        """Step the scheduler."""
        if self._follows_metric:
            return
        if self._is_new:
            self._as_built()
            before, self._is_new = group_values(self._optimizer), False
            self._scheduler.step()
            self._writes |= differing(before, group_values(self._optimizer))
        else:
            self._scheduler.step()

    def evaluated(self, value: float) -> None:
        """Step a scheduler that follows a metric."""
        if self._follows_metric:
            self._as_built()
            self._scheduler.step(value)  # type: ignore[arg-type]

    def forget_evaluations(self) -> None:
        """Reset the best value and the counters of a plateau scheduler."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.best = self._scheduler.mode_worse
            self._scheduler.num_bad_epochs = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state, and by what it is known: kind, rates, first state.

        ``built`` is its state before the first step, ``groups`` names what it writes into groups.
        """
        return {
            "kind": type(self._scheduler).__name__,
            "base_lrs": list(self._base),
            "state": dict(self._scheduler.state_dict()),
            "built": self._as_built(),
            "groups": sorted(self._writes),
        }

    def load_state_dict(
        self, state: Mapping[str, Any], *, updates: int, new_base: bool, new_plan: bool
    ) -> None:
        """Restore the state of the same scheduler, or make its updates again with another one."""
        kind = type(self._scheduler).__name__
        base = rates(state["base_lrs"], "scheduler.base_lrs")
        was, built = state.get("built"), self._as_built()
        is_same = state["kind"] == kind and not new_plan and self._is_as_built(was, state)
        if self._follows_metric:
            if state["kind"] != kind:
                raise CheckpointError(
                    f"the checkpoint does not fit the recipe: its scheduler is "
                    f"{'a function of updates' if state['kind'] == FUNCTION else state['kind']}, "
                    f"and {kind} cannot go on from that, because it follows evaluations that it "
                    "has not seen. Resume with the scheduler that it was saved with, or with one "
                    "that follows updates."
                )
            if was is None and not is_same:
                raise CheckpointError(
                    f"the checkpoint does not fit the recipe: {kind} has other settings than when "
                    "it was saved, by a version of ampctl that did not keep what they were. "
                    "Resume with the settings that it was saved with."
                )
            self._load(state["state"], built if was is None else was)
            self._scale(base)
        elif is_same and not new_base:
            self._load(state["state"], built)
            self._writes |= {*_written(state)}
        else:
            self._repeat(updates, _written(state))

    def _as_built(self) -> dict[str, Any]:
        """Return a copy of the scheduler's state before its first step."""
        if self._built is None:
            self._built = copies.snapshot(dict(self._scheduler.state_dict()), "scheduler.state")
        assert self._built is not None, "it was just made"
        return self._built

    def _is_as_built(self, was: Any, state: Mapping[str, Any]) -> bool:
        """Return whether a saved scheduler was built as this one is.

        One of an earlier version of ampctl is known by its settings alone.
        """
        built = self._as_built()
        if was is None:
            was, names = state["state"], _settings(self._scheduler)
            built = {name: value for name, value in built.items() if name in names}
        return isinstance(was, Mapping) and all(
            are_same(was[name], value) for name, value in built.items() if name in was
        )

    def _load(self, state: Any, was: Any) -> None:
        """Load a saved state; what is built otherwise than it ``was`` stays as it is built."""
        built, own = self._as_built(), dict(self._scheduler.state_dict())
        is_torchs = type(self._scheduler).__module__.startswith("torch.")
        if not isinstance(state, Mapping) or not isinstance(was, Mapping):
            raise TypeError(f"scheduler.state is a {type(state).__name__}")
        for name in _settings(self._scheduler) & state.keys() & was.keys() if is_torchs else ():
            if not are_same(state[name], was[name]):  # no scheduler of torch moves its own
                raise TypeError(f"scheduler.state.{name} is not what it was built with")
        taken = {n: v for n, v in state.items() if n in own or not hasattr(self._scheduler, n)}
        moved = moved_on(taken, was, built)
        own |= {
            name: fitted(value, own.get(name), f"scheduler.state.{name}", may_grow=not is_torchs)
            for name, value in moved.items()
            if name not in own or not are_same(value, built.get(name))
        }
        self._scheduler.load_state_dict(own)

    def _scale(self, base: Sequence[float]) -> None:
        """Make the rates that evaluations have led to relative to the present base."""
        if len(base) != len(self._base) or list(base) == self._base:
            self._base = list(base)
            return
        groups = self._optimizer.param_groups
        reached = [float(group["lr"]) for group in groups]
        give_back(self._optimizer, self._fresh, self._writes)
        for group, rate, new, old in zip(groups, reached, self._base, base, strict=True):
            set_rate(group, rate * new / old if old else new)

    def _repeat(self, updates: int, written: Collection[str]) -> None:
        """Bring the scheduler, as it is built, to where it is after so many updates.

        ``written`` names what the saved one wrote into the groups. All else in them is of the
        optimizer, and stays.
        """
        now = group_values(self._optimizer)
        give_back(self._optimizer, self._fresh, {name for g in (*now, *self._fresh) for name in g})
        seen = [self._fresh]
        for times in (min(updates, 1), updates - min(updates, 1)):
            _step(self._scheduler, times)
            seen.append(group_values(self._optimizer))
        for before, after in pairwise(seen):
            self._writes |= differing(before, after)
        for group, old, bare in zip(self._optimizer.param_groups, now, self.bare, strict=True):
            for name in (old.keys() | group.keys()) - self._writes - {"params"}:
                source = bare if name in written else old
                group.pop(name, None)
                if name in source:
                    group[name] = copied(source[name])


def follows_metric(scheduler: LRScheduler) -> bool:
    """Return whether a scheduler is stepped by evaluations: its ``step`` takes their metric."""
    return not {"metric", "metrics"}.isdisjoint(inspect.signature(type(scheduler).step).parameters)


def _step(scheduler: LRScheduler, times: int) -> None:
    """Step a scheduler so often. Raises CheckpointError if it cannot be."""
    kind = type(scheduler).__name__
    if times > _MOST_REPEATED:
        raise CheckpointError(
            f"the checkpoint does not fit the recipe: {kind} would have to make {times} updates "
            f"again, and {_MOST_REPEATED:,} is the most. Resume with the schedule that it was "
            "saved with, or with one of ampctl.schedules, which need none."
        )
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")  # torch's own, that no optimizer was stepped before it
        try:
            for _ in range(times):
                scheduler.step()
        except (ValueError, LookupError, ArithmeticError) as error:
            raise CheckpointError(
                f"the checkpoint does not fit the recipe: {kind} ends before the updates that were "
                f"made ({error}). Resume with a schedule that is as long as the run, or with the "
                "one that it was saved with."
            ) from error


def _settings(scheduler: LRScheduler) -> set[str]:
    """Return the names of a scheduler's own arguments; ``last_epoch`` moves."""
    return {*inspect.signature(type(scheduler)).parameters} - {"optimizer", "last_epoch"}


def _written(state: Mapping[str, Any]) -> list[str]:
    """Return what the schedule of a checkpoint wrote into the groups of its optimizer."""
    names = state.get("groups", [])
    if not isinstance(names, list | tuple) or not all(isinstance(name, str) for name in names):
        raise TypeError("scheduler.groups is no list of names")
    return [name for name in names if name != "params"]
