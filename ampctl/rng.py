"""Random number generators: seeding all of them, and taking and restoring their states."""

from __future__ import annotations

import random
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import numpy as np
import torch

_MASK = (1 << 64) - 1
_MARKS_COMPARED = 4
"""So many marks of a run are taken whole, to see whether its steps draw."""


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
    numpy = _plain_numpy(np.random.get_state(legacy=True))
    return {"python": random.getstate(), "numpy": numpy, **torch_state(device)}


def _plain_numpy(state: Any) -> dict[str, Any]:
    name, keys, position, has_gauss, cached = state
    return {
        "name": str(name),
        "keys": torch.from_numpy(np.asarray(keys).astype(np.int64)),
        "position": int(position),
        "has_gauss": int(has_gauss),
        "cached_gaussian": float(cached),
    }


def torch_state(device: torch.device | None = None) -> dict[str, Any]:
    """Return torch's part of `get_state`, which costs a few microseconds."""
    state: dict[str, Any] = {
        "torch": torch.default_generator.get_state(),
        "device": None,
        "device_type": None,
    }
    if device is not None and device.type != "cpu":
        module = torch.get_device_module(device)
        state["device"] = (
            module.get_rng_state() if device.type == "mps" else module.get_rng_state(device)
        )
        state["device_type"] = device.type
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
    if device is not None and state.get("device_type") == device.type:
        module = torch.get_device_module(device)
        if device.type == "mps":
            module.set_rng_state(state["device"])
        else:
            module.set_rng_state(state["device"], device)


@contextmanager
def preserved(device: torch.device | None = None) -> Iterator[None]:
    """Leave every generator as it was, whatever is drawn inside."""
    state = get_state(device)
    try:
        yield
    finally:
        set_state(state, device)


class DrawProbe:
    """Return whether reading data draws from the host's generators, and undo it if so.

    To take and compare whole states costs more than a small training step (NumPy's alone 60 us).
    So a mirror of Python's generator and one of NumPy's follow the real ones: as long as both give
    the same next number, nobody else has drawn. :meth:`begin` and :meth:`end` draw one each from
    the real ones, whatever happens between, so that a run and its resumed twin stay in step.

    So it can also say where these two stood at the last :meth:`mark`, by a second pair of mirrors
    that follow one mark behind. Where somebody else draws too, a mark takes the whole states.
    """

    def __init__(self) -> None:
        self._marked_python = random.Random(0)
        self._marked_numpy = np.random.RandomState(0)
        self._draws_since = 0
        self._marks = 0
        self._has_begun = False
        self._others_draw = False
        self._python = random.Random(0)
        self._numpy = np.random.RandomState(0)
        self._torch = torch.default_generator.get_state()

    def begin(self) -> None:
        """Take note of where the generators stand."""
        self._draws_since += 1
        if random.random() != self._python.random():
            self._others_draw |= self._has_begun
            version, words, _ = random.getstate()
            # A spare number of `gauss` could be used up without the generator moving: none is left.
            random.setstate((version, words, None))
            self._python.setstate((version, words, None))
        if np.random.random_sample() != self._numpy.random_sample():
            self._others_draw |= self._has_begun
            state = {**np.random.get_state(legacy=False), "has_gauss": 0, "gauss": 0.0}
            np.random.set_state(state)
            self._numpy.set_state(state)
        self._torch = torch.default_generator.get_state()
        self._has_begun = True

    def end(self) -> bool:
        """Return whether anything was drawn since :meth:`begin`."""
        self._draws_since += 1
        moved = [
            random.random() != self._python.random(),
            np.random.random_sample() != self._numpy.random_sample(),
            not torch.equal(torch.default_generator.get_state(), self._torch),
        ]
        return any(moved)

    def mark(self) -> None:
        """Take note of where Python's generator and NumPy's stand, without drawing from them."""
        for _ in range(self._draws_since):
            self._marked_python.random()
            self._marked_numpy.random_sample()
        self._draws_since = 0
        if self._marks >= _MARKS_COMPARED and not self._others_draw:
            return
        python = random.getstate()
        numpy: Any = np.random.get_state(legacy=True)
        followed: Any = self._marked_numpy.get_state(legacy=True)
        is_followed = python == self._marked_python.getstate() and all(
            np.array_equal(now, then) for now, then in zip(numpy, followed, strict=True)
        )
        self._others_draw = self._others_draw or (self._marks > 0 and not is_followed)
        self._marks += 1
        self._marked_python.setstate(python)
        self._marked_numpy.set_state(numpy)

    def marked(self) -> dict[str, Any]:
        """Return their states at the last mark, as `get_state` does."""
        numpy = _plain_numpy(self._marked_numpy.get_state(legacy=True))
        return {"python": self._marked_python.getstate(), "numpy": numpy}

    def rewind(self) -> None:
        """After :meth:`end`: put the generators to where they would stand without those draws."""
        random.setstate(self._python.getstate())
        np.random.set_state(self._numpy.get_state(legacy=True))
        torch.default_generator.set_state(self._torch)
