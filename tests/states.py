"""A TrainState made by hand, for tests of the step without a recipe."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.amp.precision import Precision
from ampctl.amp.scaler import LossScaler
from ampctl.engine.buffers import BufferGuard
from ampctl.engine.ema import WeightAverage
from ampctl.engine.learning_rate import FunctionSchedule, LearningRate
from ampctl.engine.state import StepReport, TrainState
from ampctl.engine.step import settle, train_step
from ampctl.engine.updater import Updater
from ampctl.recipe.schema import AmpConfig
from ampctl.state_dict.optimizers import make_skippable
from ampctl.tasks import Classification, Task

CPU = torch.device("cpu")
DTYPES = ("float32", "bfloat16", "float16")


class Net(nn.Module):
    """A small network with everything that a skip could spoil: BatchNorm, and dropout if asked."""

    def __init__(self, width: int = 16, classes: int = 4, dropout: float = 0.0) -> None:
        super().__init__()
        self.first = nn.Linear(8, width)
        self.norm = nn.BatchNorm1d(width)
        self.dropout = nn.Dropout(dropout)
        self.head = nn.Linear(width, classes)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.dropout(F.relu(self.norm(self.first(x)))))


def batches(
    count: int, size: int = 6, seed: int = 0, features: int = 8
) -> list[tuple[Tensor, Tensor]]:
    generator = torch.Generator().manual_seed(seed)
    return [
        (
            torch.randn(size, features, generator=generator),
            torch.randint(0, 4, (size,), generator=generator),
        )
        for _ in range(count)
    ]


def spoil(batch: tuple[Tensor, Tensor], value: float = float("inf")) -> tuple[Tensor, Tensor]:
    x = batch[0].clone()
    x[0, 0] = value
    return x, batch[1]


def make_state(
    model: nn.Module,
    optimizer: torch.optim.Optimizer | Mapping[str, torch.optim.Optimizer],
    dtype: str,
    *,
    amp: AmpConfig | None = None,
    factor: Callable[[int], float] | None = None,
    learning_rate: LearningRate | None = None,
    ema_decay: float | None = None,
    task: Task | None = None,
) -> TrainState:
    """Make a state; ``optimizer``: one, or several by name."""
    amp = amp or AmpConfig()
    optimizers = optimizer if isinstance(optimizer, Mapping) else {"": optimizer}
    for each in optimizers.values():
        make_skippable(each)
    return TrainState(
        model=model,
        local=model,
        bare=model,
        task=task or Classification(),
        updaters=[
            Updater(name, each, learning_rate or FunctionSchedule(each, factor))
            for name, each in optimizers.items()
        ],
        scaler=LossScaler(amp, enabled=dtype == "float16", device=CPU),
        precision=Precision("cpu", dtype, "test"),
        amp=amp,
        device=CPU,
        buffers=BufferGuard(model),
        ema=WeightAverage(model, ema_decay) if ema_decay else None,
    )


def run(state: TrainState, windows: Iterable[Sequence[Any]]) -> list[StepReport]:
    """Train on the windows and return every step's report."""
    reports = [train_step(state, window, measure=True) for window in windows]
    return [report for report in [*reports, settle(state)] if report is not None]
