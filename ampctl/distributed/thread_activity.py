"""Whether threads get on with their work, by what the kernel says of them."""

from __future__ import annotations

import threading
from collections.abc import Sequence
from contextlib import suppress
from pathlib import Path

LOOK_S = 0.1
"""How long to wait between two looks."""

_STILL_LOOKS = 50
_DISK_LOOKS = 600
"""A wait for a disk cannot be interrupted ("D"): it is one that goes on, up to about a minute."""

_TICKS = 2
"""Hundredths of a second; what only looks at a clock now and then takes less in a few seconds."""


class ThreadActivity:
    """Looks at threads time and again, and says when they have stood still for too long.

    Looks are counted, not seconds: on a busy machine whoever looks is as slow as what is looked at.
    """

    def __init__(self) -> None:
        self._threads: list[threading.Thread] = []
        self._ran = 0
        self._still = 0

    def has_stopped(self, threads: Sequence[threading.Thread]) -> bool:
        """Look once; return whether these threads have neither run nor changed for long."""
        fields = [_fields(each) for each in threads]
        states = [each[0] for each in fields]
        ran = sum(int(each[11]) + int(each[12]) for each in fields)
        if list(threads) != self._threads or "R" in states or ran >= self._ran + _TICKS:
            self._threads, self._ran, self._still = list(threads), ran, 0
            return False
        self._still += 1
        return self._still > (_DISK_LOOKS if "D" in states else _STILL_LOOKS)


def _fields(thread: threading.Thread) -> list[str]:
    """Return what the kernel says of a thread, from its state on; see proc_pid_stat(5)."""
    with suppress(OSError):
        text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        return text.rpartition(")")[2].split()
    return ["Z", *["0"] * 12]  # it has ended
