"""Hears signals in a thread, while the main thread waits in native code or in another's.

Python's own handlers run in the main thread alone, and only once it is back in Python. The number
of a signal is written to a pipe before that, by `signal.set_wakeup_fd`, and read here.
"""

from __future__ import annotations

import functools
import os
import select
import signal
import threading
import time
from collections.abc import Callable, Collection

GRACE_S = 3.0
"""How long the main thread has to come to a place where it heeds a signal."""

_LOOK_S = 0.1
_END = 0


@functools.cache
def _deafen_children() -> None:
    """Keep what is forked off from writing its own signals to the same pipe."""
    os.register_at_fork(after_in_child=lambda: signal.set_wakeup_fd(-1))


class SignalListener:
    """While it listens, call ``overdue`` with a signal that the main thread has not heeded in time.

    That is after `GRACE_S`, or as soon as ``is_urgent``; it is called once, in a thread of its own,
    with the time since when. ``again`` is called for a second SIGINT, at once.
    """

    def __init__(
        self,
        overdue: Callable[[signal.Signals, float], None],
        again: Callable[[], None],
        is_urgent: Callable[[], bool],
    ) -> None:
        self._overdue, self._again, self._is_urgent = overdue, again, is_urgent
        self._reader, self._writer = -1, -1
        self._before = -1
        self._thread = threading.Thread(target=self._listen, name="ear", daemon=True)
        self._watched: Collection[int] = ()
        self.has_heard = False

    def open(self, watched: Collection[int]) -> None:
        """Listen to signals from here on; in the main thread."""
        self._watched = watched
        self._reader, self._writer = os.pipe()
        os.set_blocking(self._writer, False)
        self._before = signal.set_wakeup_fd(self._writer, warn_on_full_buffer=False)
        _deafen_children()
        self._thread.start()

    def close(self) -> None:
        """Listen no more."""
        signal.set_wakeup_fd(self._before)
        os.write(self._writer, bytes([_END]))
        self._thread.join()
        os.close(self._reader)
        os.close(self._writer)

    def _listen(self) -> None:
        heard: signal.Signals | None = None
        since, is_waiting = 0.0, True
        while True:
            timeout = None if heard is None else _LOOK_S
            ready, _, _ = select.select([self._reader], [], [], timeout)
            for number in os.read(self._reader, 256) if ready else b"":
                if number == _END:
                    return
                if number not in self._watched:
                    continue
                if heard is signal.SIGINT and number == signal.SIGINT:
                    self._again()
                since = since if heard else time.monotonic()
                heard, self.has_heard = signal.Signals(number), True
            late = heard is not None and time.monotonic() > since + GRACE_S
            if heard is not None and is_waiting and (late or self._is_urgent()):
                is_waiting = False
                threading.Thread(
                    target=self._overdue, args=(heard, since), name="rescue", daemon=True
                ).start()
