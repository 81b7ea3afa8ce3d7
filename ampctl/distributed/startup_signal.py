"""A signal in the first seconds, while libraries are imported: there is nothing to save yet."""

from __future__ import annotations

import signal
from collections.abc import Callable
from types import FrameType
from typing import Any

from ampctl.distributed import failure, launched
from ampctl.errors import PreemptedError


def handle() -> None:
    """End with the code of a preempted run at what stops one, until others heed it."""
    for number in launched.handled_signals():
        if signal.getsignal(number) is signal.SIG_DFL:
            signal.signal(number, _leave)


def replaced(previous: Any) -> Callable[..., Any] | int | None:
    """Return what to do with a handler that stood before: this module's has had its time."""
    return signal.SIG_DFL if previous is _leave else previous


def _leave(number: int, _: FrameType | None) -> None:
    """End at once: whatever is being imported cannot be ended in another way."""
    error = PreemptedError(
        f"{signal.Signals(number).name} received before the run had begun: nothing is lost"
    )
    failure.leave(error)
