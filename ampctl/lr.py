"""How the learning rate follows applied updates, by a pure function or a torch scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau

from ampctl.errors import CheckpointError
from ampctl.saved import is_like, rates

FUNCTION = "function"
"""The kind of a schedule that is a pure function of updates, in a checkpoint."""

_PLAN = ("total_steps", "_schedule_phases")
# What a torch scheduler has counted, apart from what it was told.
_COUNTERS = ("last_epoch", "_step_count", "_last_lr", "best", "num_bad_epochs", "cooldown_counter")


class LearningRate(Protocol):
    """What the step asks of a schedule."""

    @property
    def source(self) -> Any:
        """What the recipe names: a scheduler of torch or a function of updates; None for none."""

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

        ``new_base``: the base rates of the recipe win over the saved ones; ``new_plan``: so do the
        schedule's own constants. Raises CheckpointError for the state of another schedule.
        """


class FunctionSchedule:
    """Base rates times ``factor(update)``; without a function the rates stay as the recipe says."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float] | None) -> None:
        self._optimizer = optimizer
        self._base = [group["lr"] for group in optimizer.param_groups]
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
            group["lr"] = base * factor

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
            self._base = list(saved)
        if self._factor is None:
            for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
                group["lr"] = base
        elif new_base or new_plan:  # what is told of the groups is of the rates that come
            self.before_update()


class TorchSchedule:
    """A scheduler of ``torch.optim.lr_scheduler``, stepped once for each applied update.

    ``ReduceLROnPlateau`` is stepped by evaluations instead, with the monitored metric.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._plateau = isinstance(scheduler, ReduceLROnPlateau)
        rates = [group["lr"] for group in optimizer.param_groups]
        self._base = [float(rate) for rate in getattr(scheduler, "base_lrs", rates)]

    @property
    def source(self) -> LRScheduler:
        """The scheduler."""
        return self._scheduler

    def before_update(self) -> None:
        """The scheduler has set the rates when it was last stepped."""

    def updated(self) -> None:
        """Step the scheduler."""
        if not self._plateau:
            self._scheduler.step()

    def evaluated(self, value: float) -> None:
        """Step a plateau scheduler with the metric."""
        if self._plateau:
            self._scheduler.step(value)  # type: ignore[arg-type]

    def forget_evaluations(self) -> None:
        """Let a plateau scheduler know no best, and count no evaluations that were not."""
        if isinstance(self._scheduler, ReduceLROnPlateau):
            self._scheduler.best = self._scheduler.mode_worse
            self._scheduler.num_bad_epochs = 0

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state, its kind and the base rates."""
        kind = type(self._scheduler).__name__
        return {"kind": kind, "base_lrs": self._base, "state": dict(self._scheduler.state_dict())}

    def load_state_dict(
        self, state: Mapping[str, Any], *, updates: int, new_base: bool, new_plan: bool
    ) -> None:
        """Restore the scheduler's state; a new base rate scales the present one."""
        kind = type(self._scheduler).__name__
        if state["kind"] != kind:
            raise CheckpointError(
                "the checkpoint does not fit the recipe: its scheduler is "
                f"{'a function of updates' if state['kind'] == FUNCTION else state['kind']}, and "
                f"{kind} cannot go on from that. Resume with the scheduler that it was saved with, "
                "or with one of ampctl.schedules, which follow from the number of updates."
            )
        own: dict[str, Any] = dict(self._scheduler.state_dict())
        # A run that is made longer follows OneCycleLR's new plan, from the same update on.
        kept = [name for name in own if name not in _COUNTERS] if new_plan else _PLAN
        saved = {name: value for name, value in state["state"].items() if name in own}
        for name, value in saved.items():  # torch makes each an attribute, whatever it is
            is_fit = type(value) in (int, float) if name == "best" else is_like(value, own[name])
            if name not in (*_COUNTERS, "base_lrs") and isinstance(value, int | float):
                is_fit &= value > 0 or not own[name] > 0  # a period of 0 steps, say
            if not is_fit:
                raise TypeError(f"scheduler.state.{name} is no {type(own[name]).__name__}")
        base = rates(state["base_lrs"], "scheduler.base_lrs")
        self._scheduler.load_state_dict(saved | {n: own[n] for n in kept if n in own})
        if new_base and len(base) == len(self._base):
            groups = self._optimizer.param_groups
            for group, new, old in zip(groups, self._base, base, strict=True):
                group["lr"] = group["lr"] * new / old if old else new
            if hasattr(self._scheduler, "base_lrs"):
                self._scheduler.base_lrs = list(self._base)
        else:
            self._base = base
