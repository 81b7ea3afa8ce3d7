"""A GAN of a user's own: two networks, two optimizers, a critic with a gradient penalty."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import Dataset


class Pair(nn.Module):
    def __init__(self, width: int = 8) -> None:
        super().__init__()
        self.generator = nn.Sequential(
            nn.Linear(4, width), nn.BatchNorm1d(width), nn.ReLU(), nn.Linear(width, 2)
        )
        self.critic = nn.Sequential(nn.Linear(2, width), nn.Tanh(), nn.Linear(width, 1))


class Points(Dataset[tuple[Tensor, Tensor]]):
    """Real points and noise; those of ``bad`` have infinite noise, of ``bad_real`` a bad point."""

    def __init__(
        self, size: int = 24, bad: tuple[int, ...] = (), bad_real: tuple[int, ...] = ()
    ) -> None:
        generator = torch.Generator().manual_seed(1)
        self.real = torch.randn(size, 2, generator=generator) + 2
        self.noise = torch.randn(size, 4, generator=generator)
        self.real[list(bad_real)] = float("inf")
        self.noise[list(bad)] = float("inf")

    def __len__(self) -> int:
        return len(self.real)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.real[index], self.noise[index]


class Gan:
    """The critic learns at each step, the generator at every ``every``-th."""

    def __init__(self, every: int = 1, penalty: float = 0.0) -> None:
        self.every = every
        self.penalty = penalty

    def losses(self, model: Any, batch: Any, step: int, grad: Any) -> Iterator[tuple[str, Tensor]]:
        real, noise = batch
        with torch.no_grad():
            fake = model.generator(noise)
        real_score, fake_score = model.critic(real).float(), model.critic(fake).float()
        loss = F.softplus(-real_score).mean() + F.softplus(fake_score).mean()
        if self.penalty:
            between = (real + fake.float()).div(2).requires_grad_()
            slope = grad(model.critic(between), between)
            loss = loss + self.penalty * (slope.norm(dim=1) - 1).square().mean()
        yield "critic", loss
        if step % self.every == 0:
            yield "generator", F.softplus(-model.critic(model.generator(noise)).float()).mean()

    def loss(self, model: Any, batch: Any) -> Tensor:
        real, noise = batch
        distance = model.generator(noise).float().mean(0) - real.mean(0)
        return distance.square().sum()
