"""How the learning rate follows applied updates, by a pure function or a torch scheduler."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any, Protocol

from torch.optim import Optimizer
from torch.optim.lr_scheduler import LRScheduler, ReduceLROnPlateau


class LearningRate(Protocol):
    """What the step asks of a schedule."""

    def before_update(self) -> None:
        """Set each group's rate for the update that comes next."""

    def updated(self) -> None:
        """Take note that an update was applied; never called for a skipped step."""

    def evaluated(self, value: float) -> None:
        """Take note of the monitored metric of an evaluation."""

    def state_dict(self) -> dict[str, Any]:
        """Return the state."""

    def load_state_dict(self, state: Mapping[str, Any], *, keep_base: bool) -> None:
        """Restore a state; with ``keep_base`` the base rates of the recipe win over its own."""


class FunctionSchedule:
    """Base rates times ``factor(update)``; without a function the rates stay as the recipe says."""

    def __init__(self, optimizer: Optimizer, factor: Callable[[int], float] | None) -> None:
        self._optimizer = optimizer
        self._base = [group["lr"] for group in optimizer.param_groups]
        self._factor = factor
        self._updates = 0

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

    def state_dict(self) -> dict[str, Any]:
        """Return the update count and the base rates."""
        return {"updates": self._updates, "base_lrs": list(self._base)}

    def load_state_dict(self, state: Mapping[str, Any], *, keep_base: bool) -> None:
        """Restore the update count, and the base rates unless the recipe's win."""
        self._updates = int(state["updates"])
        if not keep_base and len(state["base_lrs"]) == len(self._base):
            self._base = list(state["base_lrs"])
        if self._factor is None:
            for group, base in zip(self._optimizer.param_groups, self._base, strict=True):
                group["lr"] = base


class TorchSchedule:
    """A scheduler of ``torch.optim.lr_scheduler``, stepped once for each applied update.

    ``ReduceLROnPlateau`` is stepped by evaluations instead, with the monitored metric.
    """

    def __init__(self, optimizer: Optimizer, scheduler: LRScheduler) -> None:
        self._optimizer = optimizer
        self._scheduler = scheduler
        self._plateau = isinstance(scheduler, ReduceLROnPlateau)

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

    def state_dict(self) -> dict[str, Any]:
        """Return the scheduler's own state."""
        return dict(self._scheduler.state_dict())

    def load_state_dict(self, state: Mapping[str, Any], *, keep_base: bool) -> None:
        """Restore the scheduler's state; with ``keep_base`` rates are scaled to the recipe's."""
        base = list(getattr(self._scheduler, "base_lrs", ()))
        own: dict[str, Any] = dict(self._scheduler.state_dict())
        # OneCycleLR: a run that is made longer follows the new plan, from the same update on.
        plan: dict[str, Any] = {
            name: own[name] for name in ("total_steps", "_schedule_phases") if name in own
        }
        self._scheduler.load_state_dict(dict(state) | plan)
        saved = list(getattr(self._scheduler, "base_lrs", ()))
        if keep_base and base and len(base) == len(saved):
            self._scheduler.base_lrs = base
            for group, new, old in zip(self._optimizer.param_groups, base, saved, strict=True):
                group["lr"] = group["lr"] * new / old if old else new


def current_rates(optimizer: Optimizer) -> Sequence[float]:
    """Return the learning rate of each group as a float."""
    return [float(group["lr"]) for group in optimizer.param_groups]
