"""The state as the last whole step left it, for a thread that saves it while the training is stuck.

Between two steps all of it is there. While a batch is read, in a forward and a backward pass and in
an evaluation it still is, but for what such a pass moves: buffers, of which the guard has a copy,
and generators, of which this has one. Only while a step is made is there none.
"""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch

from ampctl import rng


class Boundary:
    """Says whether the state is whole, and keeps it so for whoever has taken it over.

    The training calls :meth:`begin` before it changes the state, and :meth:`end` once it is whole
    again; each costs less than a microsecond. After :meth:`take_over` the training gets no further.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._is_changing = False
        self._rng: dict[str, Any] = {}
        self._probe = rng.DrawProbe()

    def begin(self) -> None:
        """Change the state from here on."""
        if not self._is_changing:
            self._lock.acquire()
            self._is_changing = True

    def end(self) -> None:
        """Leave the state whole."""
        if self._is_changing:
            self._is_changing = False
            self._lock.release()

    @contextmanager
    def changing(self) -> Iterator[None]:
        """Change the state while the context is open."""
        was_changing = self._is_changing
        self.begin()
        try:
            yield
        finally:
            if not was_changing:
                self.end()

    def mark(self, device: torch.device, probe: rng.DrawProbe) -> None:
        """Take note of the generators between two steps; ``probe`` is that of the training data."""
        probe.mark()
        self._probe = probe
        self._rng = rng.torch_state(device)

    def rng_state(self) -> dict[str, Any]:
        """Return the generators' states as they were at the last mark."""
        return {**self._probe.marked(), **self._rng}

    def take_over(self, seconds: float) -> bool:
        """Keep the training from going on, for good; return whether the state is whole."""
        return self._lock.acquire(timeout=seconds)
