"""Models and data sets of a user's own that do not come back from a checkpoint as they were."""

from __future__ import annotations

import random
from typing import Any

import torch
from own_parts import Augmented, Net, Stream
from torch import Tensor
from torch.utils.data import IterableDataset


class CountsInPython(Net):
    """Anneals by a number that is no buffer."""

    def __init__(self) -> None:
        super().__init__()
        self.calls = 0

    def forward(self, x: Tensor) -> Tensor:
        self.calls += self.training
        return super().forward(x) / (1 + self.calls)


class KeepsOutside(Net):
    """Its statistics are a buffer that is not saved."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", torch.zeros(8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        if self.training:
            self.mean.lerp_(x.detach().mean(0), 0.5)
        return super().forward(x - self.mean)


class LoadsOtherwise(Net):
    """Spoils a weight as it is loaded."""

    def load_state_dict(self, state: Any, *args: Any, **kwargs: Any) -> Any:
        return super().load_state_dict({**state, "head.bias": state["head.bias"] + 1}, *args)


class OwnGenerator(Augmented):
    """Draws from a generator that it keeps, seeded but saved nowhere."""

    def __init__(self, seed: int | None = 0, **others: Any) -> None:
        super().__init__(**others)
        self.generator = random.Random(seed)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        x, y = super().__getitem__(index)
        return x + self.generator.random(), y


class GoesOnStream(IterableDataset[tuple[Tensor, int]]):
    """Gives other samples in each epoch, by a number that only this process knows."""

    def __init__(self, size: int = 12) -> None:
        self.size = size
        self.passes = 0

    def __iter__(self) -> Any:
        self.passes += 1
        for i in range(self.size):
            yield torch.zeros(8) + i + 100 * self.passes, i % 4


class ForgetsState(Stream):
    """Its state_dict says nothing, and it begins anew."""

    def state_dict(self) -> dict[str, int]:
        return {}

    def load_state_dict(self, state: dict[str, int]) -> None:
        """Restore nothing."""


CALLS = [0]


class CountsOutside(Net):
    """Anneals by a global of its module and by a number that its class holds."""

    calls = 0

    def forward(self, x: Tensor) -> Tensor:
        CALLS[0] += self.training
        CountsOutside.calls += self.training
        return super().forward(x) / (CALLS[0] + self.calls)


class CountsItsSteps(torch.optim.SGD):
    """Its rate falls with a number that no state_dict() returns."""

    def __init__(self, params: Any, lr: float, fused: bool | None = None) -> None:
        super().__init__(params, lr=lr, fused=fused)
        self.steps = 0

    def step(self, closure: Any = None) -> Any:
        self.steps += 1
        for group in self.param_groups:
            group["weight_decay"] = 0.1 / self.steps
        return super().step(closure)


class CountsItsCalls(torch.optim.lr_scheduler.LRScheduler):
    """A schedule whose state_dict() leaves out what it counts."""

    def __init__(self, optimizer: Any) -> None:
        self.calls = 0
        super().__init__(optimizer)

    def get_lr(self) -> list[float | Tensor]:
        self.calls += 1
        return [0.1 / self.calls for _ in self.base_lrs]

    def state_dict(self) -> dict[str, Any]:
        return {"last_epoch": self.last_epoch}


class CountsItsLosses:
    """A task, no subclass of ampctl's, that weighs a loss by a number of its own."""

    def __init__(self) -> None:
        self.losses_taken = 0

    def loss(self, model: Any, batch: Any) -> Tensor:
        self.losses_taken += model.training
        x, y = batch
        return torch.nn.functional.cross_entropy(model(x).float(), y) / self.losses_taken


class Unseeded:
    """A task that draws from a generator that nobody seeds."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        noise = random.SystemRandom().random()
        return torch.nn.functional.cross_entropy(model(x + noise).float(), y)


class Dies:
    """A task whose loss fails in the fourth step, as a user's own code may."""

    def __init__(self, how: str) -> None:
        self.how = how
        self.calls = 0

    def loss(self, model: Any, batch: Any) -> Tensor:
        self.calls += 1
        if self.calls > 3:
            raise KeyError(self.how)
        return model(batch[0]).float().mean()
