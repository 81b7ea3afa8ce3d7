"""A model, data sets and tasks of a user's own, with all that makes exact resuming hard."""

from __future__ import annotations

import random
import time
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset


class Net(nn.Module):
    """BatchNorm and dropout; dropout draws from the training's generators."""

    def __init__(self, width: int = 16, dropout: float = 0.2) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(F.relu(self.norm(self.first(x)))))


class Augmented(Dataset[tuple[Tensor, int]]):
    """Draws from each of the three global generators; ``bad`` samples are infinite."""

    def __init__(self, size: int = 22, bad: tuple[int, ...] = (), delay_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(7)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = torch.randint(0, 4, (size,), generator=generator).tolist()
        self.bad = tuple(bad)
        self.delay_s = delay_s

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if self.delay_s:
            time.sleep(self.delay_s)
        x = self.x[index] + 0.1 * torch.randn(8) + 0.1 * random.random()
        x = x + torch.from_numpy(np.random.randn(8)).float() * 0.1
        return (x * float("inf") if index in self.bad else x), self.y[index]


class Stream(IterableDataset[tuple[Tensor, int]]):
    """An iterable data set without a state; it draws too."""

    def __init__(self, size: int = 22) -> None:
        self.size = size

    def __iter__(self) -> Any:
        for i in range(self.size):
            yield torch.randn(8) + i % 4, i % 4


class StatefulStream(Stream):
    """The same with a state, as torchdata's are."""

    def __init__(self, size: int = 22) -> None:
        super().__init__(size)
        self.position = 0
        self.opened = 0

    def __iter__(self) -> Any:
        self.opened += 1
        while self.position < self.size:
            i, self.position = self.position, self.position + 1
            yield torch.randn(8) + i % 4, i % 4
        self.position = 0

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = state["position"]


class NoisyTask:
    """A task that draws in evaluation and in training, from all generators."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        mixed = x + 0.01 * torch.rand(()) + 0.01 * float(np.random.rand()) + 0.01 * random.random()
        return F.cross_entropy(model(mixed).float(), y)
