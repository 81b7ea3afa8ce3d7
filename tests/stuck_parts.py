"""Parts that get stuck for good, in many ways, unless there is a file ``healthy``."""

from __future__ import annotations

import os
import threading
import time
from pathlib import Path
from typing import Any

import torch
from own_parts import Augmented, Net, NoisyTask, StatefulStream
from torch import Tensor, nn


def stick(how: str) -> None:
    """Wait for good; the file ``stuck`` says that it has come to that."""
    if Path("healthy").exists():
        return
    Path("stuck").touch()
    if how == "lock":
        threading.Event().wait()
    elif how == "sleep":
        time.sleep(10000)
    elif how == "slow":
        time.sleep(5)
    elif how == "busy":
        while True:
            pass
    elif how == "fifo":
        Path("silent").exists() or os.mkfifo("silent")
        os.read(os.open("silent", os.O_RDWR), 1)
    elif how == "native":
        from torch.distributed import HashStore

        HashStore().wait(["never"], __import__("datetime").timedelta(hours=1))


class Samples(Augmented):
    """Reading sample ``at`` for the ``nth`` time gets stuck."""

    def __init__(self, size: int = 22, at: int = -1, nth: int = 1, how: str = "lock") -> None:
        super().__init__(size)
        self.at, self.nth, self.how = at, nth, how

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        if index == self.at:
            self.nth -= 1
            if self.nth == 0:
                stick(self.how)
        return super().__getitem__(index)


class Stream(StatefulStream):
    """A stream that gets stuck at its ``at``-th sample."""

    def __init__(self, size: int = 22, at: int = -1) -> None:
        super().__init__(size)
        self.at = at

    def __iter__(self) -> Any:
        for sample in super().__iter__():
            if self.position == self.at:
                stick("lock")
            yield sample


class Task(NoisyTask):
    """Gets stuck in the ``at``-th call of its loss, in training or in evaluation, or its metrics.

    ``disk``: from that call on whoever saves does.
    ``rank``: the only one that does.
    """

    def __init__(self, at: int = -1, where: str = "train", how: str = "lock", rank: int = 0):
        self.at, self.where, self.how = at, where, how
        if int(os.environ.get("RANK", "0")) != rank:
            self.at = -1

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = super().loss(model, batch)
        if (self.where == "eval") is not model.training:
            self.at -= 1
            if self.at == 0 and self.where == "disk":
                os.fsync = lambda _: stick(self.how)
            elif self.at == 0:
                stick(self.how)
        return loss

    def metrics(self, output: Any, batch: Any) -> dict[str, Tensor]:
        if self.where == "metrics":
            stick(self.how)
        return {"one": torch.ones(())}


__all__ = ["Net", "Samples", "Stream", "Task"]
