"""Parts of a user's own that misbehave, or write down what is done with them."""

from __future__ import annotations

import os
import signal
import time
import weakref
from collections.abc import Iterator
from pathlib import Path
from typing import Any, ClassVar

import numpy as np
import torch
from own_parts import Augmented, NoisyTask
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset


def note(file: str, text: str) -> None:
    """Append to a file of the current folder, from whatever process."""
    with Path(file).open("a") as out:
        out.write(text)


class Hangs(Dataset[tuple[Tensor, int]]):
    """Its samples never come, but for the first ``good``."""

    def __init__(self, good: int = 0) -> None:
        self.good = good

    def __len__(self) -> int:
        return 12

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index < self.good:
            return torch.zeros(8), 0
        note("hanging", "x")
        time.sleep(600)
        raise AssertionError("a test waited for a sample that never comes")


class HangingStream(IterableDataset[tuple[Tensor, int]]):
    """The same as a stream."""

    def __init__(self, good: int) -> None:
        self.items = Hangs(good)

    def __iter__(self) -> Iterator[tuple[Tensor, int]]:
        return (self.items[index] for index in range(12))


class Kills(Augmented):
    """Item ``deadly`` ends the process that reads it, as the kernel does when memory runs out."""

    def __init__(self, deadly: int, size: int = 40) -> None:
        super().__init__(size)
        self.deadly = deadly

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.deadly and not Path("repaired").exists():
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


class Indexed(Dataset[tuple[Tensor, int]]):
    """A sample is a NumPy draw; its label is its index."""

    def __len__(self) -> int:
        return 10

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return torch.from_numpy(np.random.randn(8)).float(), index


class Spoiled(Dataset[tuple[Tensor, Tensor]]):
    """A line to be learned; the first ``bad`` samples are NaN, or the one at ``corrupt`` is."""

    def __init__(self, size: int = 100, bad: int = 0, corrupt: int = -1) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = self.x.sum(dim=1, keepdim=True)
        self.x[:bad] = float("nan")
        if corrupt >= 0:
            self.x[corrupt, 3] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


class Raises(nn.Module):
    """A fault of the user's own, in ``forward``."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        raise KeyError("my own mistake")


class WrongShape(Raises):
    """A layer that does not fit the data."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(9, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Frozen(Raises):
    """Nothing to train."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Watched(NoisyTask):
    """Mark each batch in a file, ``trained`` or ``evaluated``, and be slow or hold still.

    ``slow_s`` is slept at each batch; at the ``hold_at``-th training batch of a process, the file
    ``held`` is made and the process goes no further until there is a file ``go``.
    """

    def __init__(self, slow_s: float = 0.0, hold_at: int = 0) -> None:
        self.slow_s = slow_s
        self.hold_at = hold_at
        self.count = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        note("trained" if model.training else "evaluated", "x")
        time.sleep(self.slow_s)
        self.count += model.training
        if model.training and self.count == self.hold_at:
            note("held", "x")
            while not Path("go").exists():
                time.sleep(0.005)
        return super().loss(model, batch)


class Writing(NoisyTask):
    """Write down the labels and the first input of each batch, a line a batch."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        if model.training:
            note("seen", f"{y.tolist()};{[round(v, 6) for v in x[:, 0].tolist()]}\n")
        return super().loss(model, (x, y % 4))


class Token:
    """Lives as long as the piece of an autograd graph that holds it."""

    alive: ClassVar[weakref.WeakSet[Token]] = weakref.WeakSet()


class _Marked(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor) -> Tensor:
        ctx.token = Token()
        Token.alive.add(ctx.token)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> Tensor:
        return grad


class Attached:
    """A task that hands out its metrics with their graph; it counts the graphs that live."""

    most_alive = 0

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        logits = _Marked.apply(model(x).float())
        Attached.most_alive = max(Attached.most_alive, len(Token.alive))
        return F.cross_entropy(logits, y), logits

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        with torch.enable_grad():
            return {"height": nn.Parameter(output).mean()}
