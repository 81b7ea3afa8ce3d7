"""Random number generators: seeding all of them, and taking and restoring their states."""

from __future__ import annotations

import ctypes
import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1


def mix(*parts: int) -> int:
    """Hash integers to one seed of 63 bits; neighbouring inputs give unrelated seeds.

    Source: the SplitMix64 finalizer (Steele, Lea, Flood 2014).
    """
    state = 0
    for part in parts:
        state = (state ^ (part & _MASK)) + 0x9E3779B97F4A7C15 & _MASK
        state = (state ^ state >> 30) * 0xBF58476D1CE4E5B9 & _MASK
        state = (state ^ state >> 27) * 0x94D049BB133111EB & _MASK
        state ^= state >> 31
    return state >> 1


def seed_everything(seed: int) -> None:
    """Seed Python's, NumPy's and torch's generators, those of the devices included."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.manual_seed(seed)


def seed_host(seed: int) -> None:
    """Seed the generators that data loading draws from: Python's, NumPy's, torch's on the CPU."""
    random.seed(seed)
    np.random.seed(seed & 0xFFFFFFFF)
    torch.default_generator.manual_seed(seed)


def get_state(device: torch.device | None = None) -> dict[str, Any]:
    """Return the state of every generator as plain types and tensors.

    ``device`` adds the generator of that accelerator. Loads with ``weights_only=True``.
    """
    name, keys, position, has_gauss, cached = np.random.get_state(legacy=True)
    state: dict[str, Any] = {
        "python": random.getstate(),
        "numpy": {
            "name": str(name),
            "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
            "position": int(position),
            "has_gauss": int(has_gauss),
            "cached_gaussian": float(cached),
        },
        "torch": torch.default_generator.get_state(),
        "device": None,
    }
    if device is not None and device.type != "cpu":
        state["device"] = torch.get_device_module(device).get_rng_state()
    return state


def set_state(state: Mapping[str, Any], device: torch.device | None = None) -> None:
    """Restore what :func:`get_state` returned."""
    version, internal, gauss = state["python"]
    random.setstate((version, tuple(internal), gauss))
    numpy = state["numpy"]
    np.random.set_state(
        (
            numpy["name"],
            numpy["keys"].numpy().astype(np.uint32),
            numpy["position"],
            numpy["has_gauss"],
            numpy["cached_gaussian"],
        )
    )
    torch.default_generator.set_state(state["torch"])
    if device is not None and device.type != "cpu" and state["device"] is not None:
        torch.get_device_module(device).set_rng_state(state["device"])


@contextmanager
def preserved(device: torch.device | None = None) -> Iterator[None]:
    """Leave every generator as it was, whatever is drawn inside."""
    state = get_state(device)
    try:
        yield
    finally:
        set_state(state, device)


class DrawProbe:
    """Tell, cheaply, whether anything was drawn from the host's generators since it was made.

    Taking three whole states costs more than a small training step (NumPy's alone 60 us), so
    NumPy's is read through the address that its bit generator publishes. The half of a normal
    pair that NumPy keeps elsewhere is taken out of it until :meth:`rewind`.
    """

    __slots__ = ("_moved", "_numpy", "_numpy_half", "_python", "_torch")

    def __init__(self) -> None:
        self._moved = True  # until it is known
        self._python = random.getstate()
        self._numpy_half = _take_numpy_half()
        self._numpy = _numpy_words()
        self._torch = torch.default_generator.get_state()

    def drew(self) -> bool:
        """Return whether a generator has moved; asked once, after the last draw."""
        self._moved = (
            not torch.equal(torch.default_generator.get_state(), self._torch)
            or _numpy_words() != self._numpy
            or random.getstate() != self._python
        )
        return self._moved

    def rewind(self) -> None:
        """Put the generators back to where they were when the probe was made; call it always."""
        if self._moved:
            torch.default_generator.set_state(self._torch)
            random.setstate(self._python)
            _take_numpy_half()
            _set_numpy_words(self._numpy)
        if self._numpy_half is not None:
            state: dict[str, Any] = np.random.get_state(legacy=False)
            np.random.set_state({**state, "has_gauss": 1, "gauss": self._numpy_half})


# MT19937's state as NumPy lays it out: 624 words of 32 bits and the position among them.
_NUMPY_STATE_BYTES = 624 * 4 + 4


def _numpy_address() -> int:
    generator = np.random.mtrand._rand._bit_generator
    return int(generator.ctypes.state_address)


def _numpy_words() -> bytes:
    return ctypes.string_at(_numpy_address(), _NUMPY_STATE_BYTES)


def _set_numpy_words(words: bytes) -> None:
    ctypes.memmove(_numpy_address(), words, len(words))


def _take_numpy_half() -> float | None:
    """Leave no half of a normal pair in NumPy's generator; return the one that was there.

    A normal that moves no word of the state was the waiting half of a pair.
    """
    words = _numpy_words()
    normal = float(np.random.standard_normal())
    if _numpy_words() == words:
        return normal
    np.random.standard_normal()
    _set_numpy_words(words)
    return None
