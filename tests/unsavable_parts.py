"""Parts of a user's own whose state no checkpoint can hold."""

from __future__ import annotations

from typing import Any

import torch
from own_parts import Net, Stream


class NoState(torch.optim.SGD):
    def state_dict(self) -> Any:
        raise NotImplementedError("no state")


class EmptyState(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {}


class HoldsFunction(torch.optim.SGD):
    def state_dict(self) -> Any:
        return {**super().state_dict(), "warm_up": lambda step: step}


class HoldsFunctionLater(torch.optim.SGD):
    """What it keeps of a parameter is made by its first step."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            for parameter in group["params"]:
                self.state[parameter]["rule"] = lambda step: step
        return super().step(closure)


class NoSchedule(torch.optim.lr_scheduler.StepLR):
    def state_dict(self) -> Any:
        raise KeyError("step_size")


class ExtraFunction(Net):
    def get_extra_state(self) -> Any:
        return {"rule": print}

    def set_extra_state(self, state: Any) -> None:
        """Restore nothing."""


class StreamOfObjects(Stream):
    """Its place is known once it is read, and then it is no plain value."""

    def __iter__(self) -> Any:
        self.place = object()
        return super().__iter__()

    def state_dict(self) -> Any:
        return {"place": self.place}

    def load_state_dict(self, state: Any) -> None:
        """Restore nothing."""
