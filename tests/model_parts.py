"""Models, tasks and optimizers of a user's own that do more than compute: modes, weights, state."""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F


class Frozen(nn.Module):
    """A frozen backbone in eval mode under a head that trains; ``whole``: all in eval mode."""

    def __init__(self, whole: bool = False) -> None:
        super().__init__()
        self.backbone = nn.Sequential(nn.Linear(8, 8), nn.BatchNorm1d(8), nn.Dropout(0.5))
        self.backbone.requires_grad_(False).eval()
        self.dropout = nn.Dropout(0.1)
        self.head = nn.Linear(8, 4)
        if whole:
            self.eval()

    def forward(self, x: Tensor) -> Tensor:
        modes = (self.training, self.dropout.training, any(m.training for m in self.backbone))
        if torch.is_grad_enabled():
            assert modes == (True, True, False), modes
        return self.head(self.dropout(self.backbone(x)))


class Keeps(Frozen):
    """Sees to its backbone's mode itself, and counts how often it is told."""

    def __init__(self) -> None:
        super().__init__()
        self.told: list[bool] = []
        self.backbone.train()

    def train(self, mode: bool = True) -> Keeps:
        super().train(mode)
        self.backbone.eval()
        self.told.append(mode)
        return self


class Both:
    """One turn for the only optimizer, by name; the task of ``losses``."""

    def losses(self, model: nn.Module, batch: Any) -> Any:
        yield "all", self.loss(model, batch)

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])


class Complex(nn.Module):
    """A layer with complex weights between two of another dtype, and an empty parameter.

    torch leaves the gradient of a conjugated one conjugated.
    """

    def __init__(self, dtype: str = "float32", conjugates: bool = True) -> None:
        super().__init__()
        self.conjugates = conjugates
        self.first = nn.Linear(8, 6, dtype=getattr(torch, dtype))
        self.head = nn.Linear(6, 4)
        self.filter = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.shift = nn.Parameter(torch.randn(4, dtype=torch.complex64))
        self.nothing = nn.Parameter(torch.zeros(0))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x.to(self.first.weight.dtype)).float()
        shift = self.shift.conj() if self.conjugates else self.shift
        spectrum = torch.fft.rfft(first) * self.filter + shift
        return self.head(torch.fft.irfft(spectrum, n=6) + self.nothing.sum())


class FunctionalBag(nn.Module):
    """Sparse gradients that no module announces."""

    def __init__(self) -> None:
        super().__init__()
        self.table = nn.Parameter(torch.randn(12, 4))

    def forward(self, tokens: Tensor) -> Tensor:
        return F.embedding(tokens, self.table, sparse=True).mean(1)


class Island(nn.Module):
    """A float32 island whose gradient no half precision can hold."""

    def __init__(self, factor: float = 2.0**21) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.factor = factor

    def forward(self, x: Tensor) -> Tensor:
        y = self.first(x)
        with torch.autocast(x.device.type, enabled=False):
            return self.head(y.float() * self.factor) / self.factor


class Bounded(torch.optim.SGD):
    """An optimizer whose argument is infinite where nobody gives it."""

    def __init__(self, params: Any, lr: float, most: float = float("inf")) -> None:
        super().__init__(params, lr=lr)


class Spoils(torch.optim.SGD):
    """An optimizer that leaves infinities in the weights."""

    @torch.no_grad()
    def step(self, closure: Any = None) -> None:
        for group in self.param_groups:
            for parameter in group["params"]:
                parameter.fill_(float("inf"))
