"""How fast a run trains: over a window that is long enough to say so, without its pauses."""

from __future__ import annotations

import time
from collections import deque
from collections.abc import Callable
from typing import NamedTuple

SHORTEST_SECONDS = 1.0


class Moment(NamedTuple):
    """How far a run has come after ``seconds`` of training."""

    seconds: float
    step: int
    samples: int


class Speed:
    """The rate at which samples were taken lately, evaluations and saves left out.

    It is of the last ``steps`` steps at least, and of a second of training at least: a window of a
    step or two after a pause says nothing. Of the run so far (since it was resumed) while that is
    shorter.
    """

    def __init__(self, steps: int, clock: Callable[[], float] = time.perf_counter) -> None:
        self._steps = steps
        self._clock = clock
        self._seconds = 0.0  # of training, up to the last pause
        self._since: float | None = None
        self._past: deque[Moment] = deque()

    def go(self, step: int, samples: int) -> None:
        """Start the clock: training begins, or resumes after a pause."""
        self._since = self._clock()
        if not self._past:
            self._past.append(Moment(self._seconds, step, samples))

    def pause(self) -> None:
        """Stop the clock."""
        self._seconds, self._since = self._trained(), None

    def now(self, step: int, samples: int) -> Moment:
        """Return the present moment."""
        return Moment(self._trained(), step, samples)

    def rates(self, now: Moment) -> tuple[float | None, float | None]:
        """Return samples a second and seconds a step up to a moment, which is remembered."""
        while len(self._past) > 1 and self._is_enough(self._past[1], now):
            self._past.popleft()
        first = self._past[0] if self._past else now
        self._past.append(now)
        seconds, steps = now.seconds - first.seconds, now.step - first.step
        if seconds <= 0 or not steps:
            return None, None
        return (now.samples - first.samples) / seconds, seconds / steps

    def _is_enough(self, first: Moment, now: Moment) -> bool:
        return (
            now.step - first.step >= self._steps and now.seconds - first.seconds >= SHORTEST_SECONDS
        )

    def _trained(self) -> float:
        return self._seconds + (self._clock() - self._since if self._since is not None else 0.0)
