"""The one rule by which metrics are compared, and the patience of early stopping built on it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Literal

Mode = Literal["min", "max"]

LOSS = "eval/loss"


def is_better(value: float, best: float | None, mode: Mode) -> bool:
    """Return whether ``value`` beats ``best``; what is not finite beats nothing, a tie does not."""
    if not math.isfinite(value):
        return False
    if best is None or not math.isfinite(best):
        return True
    return value < best if mode == "min" else value > best


def monitored(metrics: Mapping[str, float], name: str) -> float:
    """Return what an evaluation is judged by: its metric ``name``, but NaN where its loss is bad.

    A metric of outputs that are NaN can be any number (an accuracy is 0.0), and so the best one.
    What is not finite itself is NaN too, whichever way is up.
    """
    value = metrics.get(name, math.nan)
    return value if math.isfinite(value) and math.isfinite(metrics.get(LOSS, 0.0)) else math.nan


@dataclass
class Patience:
    """Counts evaluations in a row that were not the best so far; NaN is never an improvement."""

    mode: Mode
    patience: int
    best: float | None = None
    bad: int = 0

    def update(self, value: float) -> bool:
        """Take one evaluation in; True when patience has run out."""
        if is_better(value, self.best, self.mode):
            self.best, self.bad = value, 0
        else:
            self.bad += 1
        return self.bad >= self.patience
