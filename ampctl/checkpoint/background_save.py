"""One save at a time beside the training, or in its place."""

from __future__ import annotations

import threading
from collections.abc import Callable
from concurrent.futures import Future, ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import torch

from ampctl.distributed.env import use_device


@dataclass(frozen=True)
class Saved:
    """A finished save: the file, its step, its size in bytes and how long it took to write.

    ``gone`` names older files of the run that were no longer there.
    """

    path: Path
    step: int
    size: int
    seconds: float
    gone: tuple[str, ...] = ()


class Flight:
    """At most one piece of work at a time, in a thread where it is ``asynchronous``.

    ``worker`` is the thread that is at it, None where none is. ``device``: the one that the work
    may use, if it uses any.
    """

    def __init__(self, asynchronous: bool, device: torch.device | None = None) -> None:
        self._thread = None
        if asynchronous:
            begin = partial(use_device, device) if device is not None else None
            self._thread = ThreadPoolExecutor(1, "checkpoint", begin)
        self._in_flight: Future[None] | None = None
        self.worker: threading.Thread | None = None

    def start(self, work: Callable[..., None], *arguments: Any) -> None:
        """Begin, once what was begun before is done; raise the error of that."""
        self.land()
        if self._thread is None:
            self._do(work, *arguments)
        else:
            self._in_flight = self._thread.submit(self._do, work, *arguments)

    def _do(self, work: Callable[..., None], *arguments: Any) -> None:
        self.worker = threading.current_thread()
        try:
            work(*arguments)
        finally:
            self.worker = None

    def look(self) -> None:
        """Raise the error of what was begun, once, if it has failed by now."""
        if self._in_flight is not None and self._in_flight.done():
            self.land()

    def linger(self, seconds: float) -> None:
        """Wait for what was begun, for so long at most."""
        if self._in_flight is not None:
            wait([self._in_flight], seconds)

    def land(self) -> None:
        """Wait for what was begun, and raise its error, once.

        Another thread may wait for it at the same time, and gets the error too.
        """
        in_flight = self._in_flight
        if in_flight is None:
            return
        try:
            in_flight.result()
        finally:
            if self._in_flight is in_flight:
                self._in_flight = None

    def close(self) -> None:
        """Wait, end the thread, and raise the error of what was begun."""
        if self._thread is not None:
            self._thread.shutdown()
        self.land()
