"""Schedulers of a user's own, that keep their place where no scheduler of torch does."""

from __future__ import annotations

import math
from typing import Any

import torch
from torch.optim import Optimizer
from torch.optim.lr_scheduler import LambdaLR, LRScheduler


class Countdown(LRScheduler):
    """Counts its own argument down, and grows a list."""

    def __init__(self, optimizer: Optimizer, left: int = 5, floor: float = 0.0) -> None:
        self.left = left
        self.floor = floor
        self.seen: list[float] = []
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        self.left -= 1
        share = max(self.left, 0) / 5
        self.seen.append(share)
        return [max(base * share, self.floor) for base in self.base_lrs]


class Around(LRScheduler):
    """Holds another one, and halves what that says after each third step."""

    def __init__(self, optimizer: Optimizer, inner: LRScheduler, power: int = 1) -> None:
        self.optimizer = optimizer
        self.inner = inner
        self.power = power
        self.steps = 0

    def step(self, epoch: int | None = None) -> None:
        self.steps += 1
        self.inner.step()
        for group, rate in zip(self.optimizer.param_groups, self.inner.get_last_lr(), strict=True):
            group["lr"] = rate / 2 ** (self.power * (self.steps // 3))

    def get_last_lr(self) -> Any:
        return [group["lr"] for group in self.optimizer.param_groups]

    def state_dict(self) -> dict[str, Any]:
        return {"steps": self.steps, "power": self.power, "inner": self.inner.state_dict()}

    def load_state_dict(self, state: dict[str, Any]) -> None:
        self.steps, self.power = state["steps"], state["power"]
        self.inner.load_state_dict(state["inner"])


class WorstOf(LRScheduler):
    """Follows a metric: halves the rates whenever it is worse than the best one."""

    def __init__(self, optimizer: Optimizer, factor: float = 0.5) -> None:
        self.factor = factor
        self.best = math.inf
        self.drops = 0
        super().__init__(optimizer)

    def step(self, metric: float | None = None) -> None:
        if metric is not None and metric > self.best:
            self.drops += 1
        self.best = self.best if metric is None else min(self.best, metric)
        rates = [base * self.factor**self.drops for base in self.base_lrs]
        for group, rate in zip(self.optimizer.param_groups, rates, strict=True):
            group["lr"] = rate


class Ramp:
    """A factor with a place of its own, as `LambdaLR` may hold one."""

    def __init__(self, by: float = 0.1, until: int = 10**9) -> None:
        self.by = by
        self.until = until

    def __call__(self, update: int) -> float:
        return 1 / (1 + self.by * update) if update < self.until else 0.0


class Listed(LRScheduler):
    """Takes its factors from a list."""

    def __init__(self, optimizer: Optimizer, rates: list[float]) -> None:
        self.rates = rates
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        return [base * self.rates[self.last_epoch] for base in self.base_lrs]


class Drawing(LRScheduler):
    """Draws from the training's random numbers, as no schedule should."""

    def __init__(self, optimizer: Optimizer) -> None:
        self.share = float(torch.rand(()))
        self.steps = 0
        super().__init__(optimizer)

    def get_lr(self) -> Any:
        self.steps += 1
        return [base * self.share * float(torch.rand(())) for base in self.base_lrs]


def warm_cosine(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int
) -> LRScheduler:
    """Return what `transformers.get_cosine_schedule_with_warmup` does."""

    def factor(update: int) -> float:
        if update < num_warmup_steps:
            return update / num_warmup_steps
        done = (update - num_warmup_steps) / (num_training_steps - num_warmup_steps)
        return max(0.0, 0.5 * (1 + math.cos(math.pi * done)))

    return LambdaLR(optimizer, factor)


def squared(update: int) -> float:
    return 1 / (1 + update) ** 2


def ninetieth(update: int) -> float:
    return 0.9


def warm_linear(
    optimizer: Optimizer, num_warmup_steps: int, num_training_steps: int
) -> LRScheduler:
    """Climb, then fall to 0 in a line, as the one of transformers does."""

    def factor(update: int) -> float:
        if update < num_warmup_steps:
            return update / num_warmup_steps
        left = num_training_steps - update
        return max(0.0, left / max(1, num_training_steps - num_warmup_steps))

    return LambdaLR(optimizer, factor)


def in_epochs(optimizer: Optimizer, epochs: int, steps_per_epoch: int) -> LambdaLR:
    """Fall to 0 over a length in epochs; it has no other argument for one."""
    length = epochs * steps_per_epoch
    return LambdaLR(optimizer, lambda step: max(0.0, 1 - step / length))
