"""Parts of a user's own, of which one is wrong, in one way, from one sample on.

A sample's first feature is its number in hundredths; those of the evaluation are from 100 on.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset, IterableDataset, default_collate

RANK = os.environ.get("RANK", "0")


def number(value: Any) -> int:
    """Return the number of a sample, or of the first one of a batch."""
    x = value[0] if isinstance(value, tuple | list) else value
    return round(float(x.reshape(-1)[0]) * 100)


def wrong(kind: str, right: Any) -> Any:
    """Return what is given in the place of what is right, or raise."""
    if kind == "raise":
        raise LookupError("my own mistake")
    if kind == "exit":
        sys.exit(3)
    if kind == "shape":
        return reshaped(right)
    others: dict[str, Any] = {
        "none": None,
        "text": "a text",
        "list": [right],
        "dict": {"it": right},
        "yes": True,
    }
    others |= {"object": object(), "empty": (), "number": 3.5, "nan": float("nan"), "minus": -1}
    return others[kind]


def reshaped(value: Any) -> Any:
    if isinstance(value, tuple | list):
        return type(value)(map(reshaped, value))
    if isinstance(value, dict):
        return {name: reshaped(part) for name, part in value.items()}
    return torch.zeros(*torch.as_tensor(value).shape, 3)


class Part:
    """Goes wrong in ``point``, in the way of ``fault``, from the sample ``since`` on."""

    def __init__(
        self, point: str = "", fault: str = "", since: int = 0, rank: str | None = None
    ) -> None:
        super().__init__()
        self.point, self.fault, self.since, self.rank = point, fault, since, rank

    def given(self, point: str, first: int, right: Any) -> Any:
        here = self.point == point and first >= self.since and self.rank in (None, RANK)
        return wrong(self.fault, right) if here else right


class Samples(Part, Dataset[Any]):
    def __init__(self, size: int = 12, first: int = 0, **fault: Any) -> None:
        super().__init__(**fault)
        generator = torch.Generator().manual_seed(first)
        self.x = torch.randn(size, 8, generator=generator)
        self.x[:, 0] = torch.arange(first, first + size) / 100
        self.y = torch.arange(size) % 4

    def __len__(self) -> int:
        return self.given("__len__", self.since, len(self.x))

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        right = self.x[index], self.y[index]
        return self.given("__getitem__", number(right), right)


class Batches(Samples):
    def __getitems__(self, indices: list[int]) -> tuple[Tensor, Tensor]:
        right = self.x[indices], self.y[indices]
        return self.given("__getitems__", number(right), right)


class Stream(Samples, IterableDataset[Any]):
    def __iter__(self) -> Iterator[tuple[Tensor, Tensor]]:
        for right in zip(self.x, self.y, strict=True):
            yield self.given("__iter__", number(right), right)


class Collate(Part):
    def __call__(self, samples: list[Any]) -> Any:
        right = default_collate(samples)
        return self.given("__call__", number(right), right)


def collate(samples: list[Any], **fault: Any) -> Any:
    right = default_collate(samples)
    return Part(**fault).given("collate", number(right), right)


class Net(Part, nn.Module):
    def __init__(self, **fault: Any) -> None:
        super().__init__(**fault)
        self.first, self.head = nn.Linear(8, 4), nn.Linear(4, 4)

    def forward(self, x: Tensor) -> Tensor:
        right = self.head(self.first(x).relu())
        return self.given("forward", number(x), right)


class Task(Part):
    """Cross entropy, and its accuracy."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y = batch
        logits = model(x)
        right = F.cross_entropy(logits, y)
        if self.point == "loss":  # of all that it returns
            return self.given("loss", number(batch), right)
        return right, logits

    def metrics(self, logits: Tensor, batch: Any) -> dict[str, Tensor]:
        right = {"accuracy": (logits.argmax(1) == batch[1]).float().mean()}
        right["accuracy"] = self.given("a metric", number(batch), right["accuracy"])
        return self.given("metrics", number(batch), right)

    def num_items(self, batch: Any) -> float:
        return self.given("num_items", number(batch), float(len(batch[1])))

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        means["twice"] = self.given("a summary", self.since, 2 * means["loss"])
        return self.given("summary", self.since, means)
