"""The figures of a step on their way from the device to the host."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn


class Pending:
    """A step's figures on their way to the host, by name: ``found_inf``, ``loss``, ``scale`` ...

    On an accelerator the copy is asynchronous; by the time the next optimizer step is about to be
    queued it has long arrived, so that reading it holds nothing up. ``rates`` are the learning
    rates of the optimizers that took part, by name; ``modules``: see ``amp.activations``.
    """

    def __init__(
        self,
        step: int,
        rates: Mapping[str, float],
        figures: Mapping[str, Tensor],
        modules: Sequence[nn.Module],
    ) -> None:
        self.step = step
        self.modules = modules
        self.rates = rates
        self._names = tuple(figures)
        self._event: Any = None
        values = torch.stack(list(figures.values()))
        if values.device.type not in ("cuda", "xpu"):
            self._values = values
        else:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            module = torch.get_device_module(values.device)
            self._event = module.Event()
            self._event.record(module.current_stream(values.device))

    def read(self) -> dict[str, float]:
        """Return the figures; waits for the copy if it is still under way."""
        if self._event is not None:
            self._event.synchronize()  # sync: with the step before the one being queued
        return dict(zip(self._names, self._values.tolist(), strict=True))
