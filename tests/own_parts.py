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


class Freezable(Net):
    """Its head can be left out of training, or be kept in float16 itself."""

    def __init__(self, freeze: bool = False, half: bool = False) -> None:
        super().__init__()
        self.head.requires_grad_(not freeze)
        if half:
            self.head.half()


class OtherOrder(Net):
    """The same network; its first layer is registered last."""

    def __init__(self) -> None:
        super().__init__()
        first = self.first
        del self.first
        self.first = first


class Poisons(Net):
    """Writes a NaN into a buffer in its fourth training pass; outputs and gradients stay finite.

    ``lasting``: in all that follow, too.
    """

    def __init__(self, lasting: bool = False) -> None:
        super().__init__()
        self.last = 10**9 if lasting else 4
        self.register_buffer("passes", torch.zeros((), dtype=torch.int64))
        self.register_buffer("largest", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.passes += 1
            self.largest.fill_(
                float("nan") if 4 <= self.passes <= self.last else float(x.abs().max())
            )
        return super().forward(x)


class Masked(nn.Module):
    """Attention over the eight features in turn, with a causal mask of -inf as a buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.q, self.k, self.v = nn.Linear(1, 4), nn.Linear(1, 4), nn.Linear(1, 4)
        self.head = nn.Linear(4, 4)
        self.register_buffer("mask", torch.full((8, 8), float("-inf")).triu(1))

    def forward(self, x: Tensor) -> Tensor:
        x = x.unsqueeze(-1)
        scores = self.q(x) @ self.k(x).transpose(1, 2) / 2
        return self.head((scores + self.mask).softmax(-1) @ self.v(x)).mean(1)


class Bag(nn.Module):
    """Logits as the mean of sparse embeddings."""

    def __init__(self) -> None:
        super().__init__()
        self.embedding = nn.Embedding(12, 4, sparse=True)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.embedding(tokens).mean(1)


class Tokens(Dataset[tuple[Tensor, int]]):
    """Five token numbers that tell the label."""

    def __len__(self) -> int:
        return 24

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return (torch.arange(5) % 3) * 4 + index % 4, index % 4


class Images(Dataset[tuple[Tensor, int]]):
    """Images whose brightness tells the label."""

    def __init__(self, channels: int = 1, size: int = 8, count: int = 24) -> None:
        generator = torch.Generator().manual_seed(3)
        self.y = torch.arange(count) % 4
        self.x = torch.randn(count, channels, size, size, generator=generator)
        self.x += self.y.view(-1, 1, 1, 1)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], int(self.y[index])


class Series:
    """A task whose metric takes the given values, one an evaluation, as NumPy numbers."""

    def __init__(self, values: list[float]) -> None:
        self.values = list(values)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.cross_entropy(model(x).float(), y)

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        return {"score": np.float64(self.values.pop(0)), "count": np.int64(3)}


class Once(IterableDataset[tuple[Tensor, int]]):
    """A stream whose iterator can be read a single time."""

    def __init__(self, size: int = 12) -> None:
        self.samples = iter([(torch.zeros(8) + i, i % 4) for i in range(size)])

    def __iter__(self) -> Any:
        return self.samples


class Rewinding(IterableDataset[tuple[Tensor, int]]):
    """A stream that goes on at its saved place, which is its end when an epoch is over."""

    def __init__(self, size: int = 18) -> None:
        self.size = size
        self.position = self.start = 0

    def __iter__(self) -> Any:
        start, self.start = self.start, 0
        for i in range(start, self.size):
            self.position = i + 1
            yield torch.randn(8) + i % 4, i % 4

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.position = self.start = state["position"]


class HalfNet(Net):
    """Its weights are bfloat16 themselves."""

    def __init__(self) -> None:
        super().__init__()
        self.to(torch.bfloat16)


class Renormed(nn.Module):
    """Its forward keeps a weight's norm in bounds, as EEGNet's does."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        self.layer.weight.data = torch.renorm(self.layer.weight.data, p=2, dim=0, maxnorm=0.3)
        return self.layer(x)


class Double(Net):
    """Its weights are float64."""

    def __init__(self) -> None:
        super().__init__()
        self.double()


class DoubleTask:
    """A loss in float64."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0].double()), batch[1])


class Counting(nn.Module):
    """Counts its forward passes, those of an evaluation too."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("count", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        return self.layer(x)


class Wordy:
    """A metric that is no number."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, None]:
        return F.cross_entropy(model(batch[0]).float(), batch[1]), None

    def metrics(self, output: Any, batch: Any) -> dict[str, Any]:
        return {"word": "high"}
