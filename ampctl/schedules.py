"""Learning-rate schedules as pure functions of the optimizer updates applied so far.

``schedule(update)`` is the factor on each parameter group's own rate; ``update`` is 0 for the first
one. A skipped step is no update, so it moves no schedule. Nothing here knows of torch.
"""

from __future__ import annotations

import math
from dataclasses import dataclass


@dataclass(frozen=True)
class Constant:
    """The rate as it is, after a linear warm-up of ``warmup_steps`` updates.

    The factor is min((u + 1) / warmup_steps, 1) at update u, from 0.
    """

    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_count("warmup_steps", self.warmup_steps, at_least=0)

    def __call__(self, update: int) -> float:
        """Return the factor for this update."""
        return _warmup(update, self.warmup_steps)


@dataclass(frozen=True)
class Cosine:
    """Half a cosine from 1 down to ``final_ratio`` at ``total_steps``, after a linear warm-up.

    The warm-up takes ``warmup_steps`` updates. The factor is
    final_ratio + (1 - final_ratio) * (1 + cos(pi * t)) / 2; t goes from 0 at the end of the warm-up
    to 1 at ``total_steps`` and stays there. A warm-up that is as long as the run, or longer, leaves
    no room for the decay. Source: Loshchilov and Hutter, "SGDR: Stochastic Gradient Descent with
    Warm Restarts", 2017, equation 5, without restarts.
    """

    total_steps: int
    warmup_steps: int = 0
    final_ratio: float = 0.0

    def __post_init__(self) -> None:
        _check_decay(self.total_steps, self.warmup_steps, self.final_ratio)

    def __call__(self, update: int) -> float:
        """Return the factor for this update."""
        done = _decay_done(update, self.warmup_steps, self.total_steps)
        curve = self.final_ratio + (1 - self.final_ratio) * (1 + math.cos(math.pi * done)) / 2
        return _warmup(update, self.warmup_steps) * curve


@dataclass(frozen=True)
class Linear:
    """A straight line from 1 down to ``final_ratio`` at ``total_steps``, after a linear warm-up.

    The warm-up takes ``warmup_steps`` updates. The factor is 1 - (1 - final_ratio) * t; t goes from
    0 at the end of the warm-up to 1 at ``total_steps`` and stays there. A warm-up that is as long
    as the run, or longer, leaves no room for the decay.
    """

    total_steps: int
    warmup_steps: int = 0
    final_ratio: float = 0.0

    def __post_init__(self) -> None:
        _check_decay(self.total_steps, self.warmup_steps, self.final_ratio)

    def __call__(self, update: int) -> float:
        """Return the factor for this update."""
        done = _decay_done(update, self.warmup_steps, self.total_steps)
        curve = self.final_ratio + (1 - self.final_ratio) * (1 - done)
        return _warmup(update, self.warmup_steps) * curve


@dataclass(frozen=True)
class Step:
    """A factor ``gamma`` more at each ``every`` updates, times a linear warm-up.

    The factor is gamma ** (u // every) at update u, from 0; u counts from the run's first update,
    not from the end of the warm-up of ``warmup_steps`` updates.
    """

    every: int
    gamma: float = 0.1
    warmup_steps: int = 0

    def __post_init__(self) -> None:
        _check_count("every", self.every, at_least=1)
        _check_count("warmup_steps", self.warmup_steps, at_least=0)
        if not 0 < self.gamma <= 1:
            raise ValueError(f"gamma is {self.gamma!r}; it must be above 0 and at most 1")

    def __call__(self, update: int) -> float:
        """Return the factor for this update."""
        curve: float = self.gamma ** (update // self.every)
        return _warmup(update, self.warmup_steps) * curve


def _warmup(update: int, warmup_steps: int) -> float:
    """Rise by equal steps to 1, which the last update of the warm-up gets; the first is never 0."""
    return (update + 1) / warmup_steps if update < warmup_steps else 1.0


def _decay_done(update: int, warmup_steps: int, total_steps: int) -> float:
    """Return how much of the decay is behind, from 0 to 1."""
    if update >= total_steps:
        return 1.0
    if update < warmup_steps:
        return 0.0
    return (update - warmup_steps) / (total_steps - warmup_steps)


def _check_decay(total_steps: int, warmup_steps: int, final_ratio: float) -> None:
    _check_count("total_steps", total_steps, at_least=1)
    _check_count("warmup_steps", warmup_steps, at_least=0)
    if not 0 <= final_ratio <= 1:
        raise ValueError(f"final_ratio is {final_ratio!r}; it must be from 0 to 1")


def _check_count(name: str, value: int, *, at_least: int) -> None:
    if not isinstance(value, int) or isinstance(value, bool) or value < at_least:
        raise ValueError(
            f"{name} is {value!r}; it must be a whole number of updates, {at_least} or more"
        )
