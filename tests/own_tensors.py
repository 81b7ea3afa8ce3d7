"""Data of a user's own, for recipes of tests that train in a moment."""

from __future__ import annotations

import numpy as np
import torch
from torch.utils.data import TensorDataset


def pairs(size: int) -> TensorDataset:
    """Return inputs of two features and targets of one, the same each time."""
    generator = torch.Generator().manual_seed(3)
    x = torch.randn(size, 2, generator=generator)
    return TensorDataset(x, x.sum(1, keepdim=True))


def short(value: float) -> np.float32:
    """Return a NumPy number that is no float of Python."""
    return np.float32(value)


def long(value: float) -> np.float64:
    """Return a NumPy number that is one."""
    return np.float64(value)
