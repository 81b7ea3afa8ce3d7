"""Parts of a user's own that are not the same on every rank; ``fault`` says how."""

from __future__ import annotations

import logging
import os
import signal
import time
import warnings
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import Dataset, IterableDataset

RANK = int(os.environ.get("RANK", "0"))
ODD_ONE = 1  # the rank that is at fault


def is_here(fault: str, wanted: str) -> bool:
    return fault == wanted and RANK == ODD_ONE


class Net(nn.Module):
    """Two layers; the fault comes in the fourth forward pass."""

    def __init__(self, fault: str = "") -> None:
        super().__init__()
        self.fault, self.passes = fault, 0
        if is_here(fault, "raise while built"):
            raise KeyError("my own mistake")
        if is_here(fault, "hang while built"):
            time.sleep(600)
        self.first = nn.Linear(8, 4)
        self.head = nn.Linear(4, 5 if is_here(fault, "another shape") else 4)
        self.spare = nn.Linear(8, 4) if "spare" in fault else None

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        if self.passes == 4:
            self.misbehave()
        y = self.head(self.first(x))
        if self.spare is not None and (self.passes < 3 or RANK != ODD_ONE):
            y = y + self.spare(x)
        return y

    def misbehave(self) -> None:
        if is_here(self.fault, "raise"):
            raise KeyError("my own mistake")
        if is_here(self.fault, "hang"):
            time.sleep(600)
        if is_here(self.fault, "freeze"):
            os.kill(os.getpid(), signal.SIGSTOP)
        if is_here(self.fault, "vanish"):
            os._exit(0)
        if self.fault == "warn":
            warnings.warn("all ranks say this", stacklevel=1)
            logging.getLogger("mine").info("not worth a line")
        if is_here(self.fault, "warn"):
            warnings.warn("only one says this", stacklevel=1)
            logging.getLogger("mine").warning("a line of the log")


class Samples(Dataset[tuple[Tensor, Tensor]]):
    """``more``: samples that only the odd rank has; sample 22 is read by it."""

    def __init__(self, size: int = 40, fault: str = "", more: int = 0, bad: int = -1) -> None:
        generator = torch.Generator().manual_seed(1)
        size += more if RANK == ODD_ONE else 0
        # Cut from one draw: a draw of another size has other values from its beginning on.
        self.x = torch.randn(100, 8, generator=generator)[:size]
        self.y = torch.randint(0, 4, (100,), generator=generator)[:size]
        self.fault = fault
        if bad >= 0:
            self.x[bad] = float("nan")

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        if index == 22 and self.fault == "raise":
            raise KeyError("my own mistake")
        if index == 22 and self.fault == "hang":
            time.sleep(600)
        if index == 22 and self.fault == "killed":
            os.kill(os.getpid(), signal.SIGKILL)
        return self.x[index], self.y[index]


class Stream(IterableDataset[tuple[Tensor, Tensor]]):
    """``more``: samples that only the odd rank has at its end; ``shards``: each has its own."""

    def __init__(self, size: int = 16, more: int = 0, shards: bool = False) -> None:
        self.samples = Samples(size, more=more)
        self.shards = shards

    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        first, by = (RANK, 2) if self.shards else (0, 1)
        return (self.samples[index] for index in range(first, len(self.samples), by))


class Task:
    """Cross entropy; what it tells of an evaluation may be another thing on each rank."""

    def __init__(self, fault: str = "") -> None:
        self.fault = fault

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        if is_here(self.fault, "raise in loss"):
            raise KeyError("my own mistake")
        if is_here(self.fault, "raise in evaluation") and not model.training:
            raise KeyError("my own mistake")
        if is_here(self.fault, "hang in evaluation") and not model.training:
            time.sleep(600)
        x, y = batch
        return nn.functional.cross_entropy(model(x).float(), y), y

    def metrics(self, y: Tensor, batch: Any) -> dict[str, Tensor]:
        if is_here(self.fault, "raise in a metric"):
            raise KeyError("my own mistake")
        return {"label": y.float().mean()}

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        if self.fault == "its own opinion":
            # Of rank 1 it gets better for ever, of rank 0 worse.
            means["loss"] = time.monotonic() * (-1 if RANK == ODD_ONE else 1)
        return means
