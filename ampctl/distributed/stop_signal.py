"""When a run stops for a signal: at a step boundary, and on all ranks at the same one."""

from __future__ import annotations

import signal
import time

from ampctl.distributed.env import StopSignals
from ampctl.distributed.ranks import Ranks

EVERY_SECONDS = 0.5
MOST_LOOKS = 256
"""What bounds the delay where looks become slow at once."""


class StopSignal:
    """Look at signals, and at the clock, together: what one rank has seen counts for all.

    One process looks at its own at once. Several agree by a collective about every half a second,
    after a number of looks that all of them know: every rank looks equally often, at each step and
    each batch of an evaluation.
    """

    def __init__(self, signals: StopSignals, ranks: Ranks) -> None:
        self.signals = signals
        self._agreed: signal.Signals | None = None
        self._ranks = ranks
        self._looks_left = 1
        self._looks = 1
        self._since = time.monotonic()

    @property
    def received(self) -> signal.Signals | None:
        """The signal that the run stops for, once all ranks know of it."""
        return self.signals.received if self._ranks.size == 1 else self._agreed

    def look(self, *, is_time: bool = False) -> bool:
        """Take note of a signal in :attr:`received`; return whether ``is_time`` for rank 0.

        ``is_time``: whether something is due by the clock, which differs between ranks. It may be
        told a few looks later.
        """
        if self._ranks.size == 1:
            return is_time
        self._looks_left -= 1
        if self._looks_left:
            return False
        seconds = max(time.monotonic() - self._since, 1e-6)
        own = float(self.signals.received or 0)
        wanted = self._looks * EVERY_SECONDS / seconds if self._ranks.is_first else 0.0
        due = float(is_time and self._ranks.is_first)
        number, due, looks = self._ranks.largest(own, due, wanted)
        if number and self._agreed is None:
            self._agreed = signal.Signals(int(number))
        self._looks = self._looks_left = max(1, min(int(looks), 2 * self._looks, MOST_LOOKS))
        self._since = time.monotonic()
        return bool(due)

    def begin(self) -> None:
        """Agree at the next look: an evaluation's are further apart than those of the training."""
        self._looks = self._looks_left = 1
        self._since = time.monotonic()
