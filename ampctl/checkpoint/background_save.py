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
class FinishedSave:
    """A finished save: the file, its step, its size in bytes and how long it took to write.

    ``gone`` names older files of the run that were no longer there.
    """

    path: Path
    step: int
    size: int
    seconds: float
    gone: tuple[str, ...] = ()


class BackgroundSave:
    """At most one piece of work at a time, in a thread where it is ``asynchronous``.

    ``worker`` is the thread that is at it, None where none is. ``device``: the one that the work
    may use, if it uses any.
    """

    def __init__(self, asynchronous: bool, device: torch.device | None = None) -> None:
        self._thread = None
        if asynchronous:
            begin = partial(use_device, device) if device is not None else None
            self._thread = ThreadPoolExecutor(1, "checkpoint", begin)
        self._running: Future[None] | None = None
        self.worker: threading.Thread | None = None

    def start(self, work: Callable[..., None], *arguments: Any) -> None:
        """Begin, once what was begun before is done; raise the error of that."""
        self.wait()
        if self._thread is None:
            self._do(work, *arguments)
        else:
            self._running = self._thread.submit(self._do, work, *arguments)

    def _do(self, work: Callable[..., None], *arguments: Any) -> None:
        self.worker = threading.current_thread()
        try:
            work(*arguments)
        finally:
            self.worker = None

    def look(self) -> None:
        """Raise the error of what was begun, once, if it has failed by now."""
        if self._running is not None and self._running.done():
            self.wait()

    def wait_at_most(self, seconds: float) -> None:
        """Wait for what was begun, for so long at most."""
        if self._running is not None:
            wait([self._running], seconds)

    def wait(self) -> None:
        """Wait for what was begun, and raise its error, once.

        Another thread may wait for it at the same time, and gets the error too.
        """
        running = self._running
        if running is None:
            return
        try:
            running.result()
        finally:
            if self._running is running:
                self._running = None

    def close(self) -> None:
        """Wait, end the thread, and raise the error of what was begun."""
        if self._thread is not None:
            self._thread.shutdown()
        self.wait()
