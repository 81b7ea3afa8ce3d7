"""Data of a user's own, for recipes of tests that train in a moment."""

from __future__ import annotations

from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import IterableDataset, TensorDataset


def pairs(size: int) -> TensorDataset:
    """Return inputs of two features and targets of one, the same each time."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, 2, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """The same, of a length that nobody knows."""

    def __init__(self, size: int) -> None:
        self.size = size

    def __iter__(self) -> Any:
        yield from (pairs(self.size)[i] for i in range(self.size))


def short(value: float) -> np.float32:
    """Return a NumPy number that is no float of Python."""
    return np.float32(value)


def long(value: float) -> np.float64:
    """Return a NumPy number that is one."""
    return np.float64(value)
