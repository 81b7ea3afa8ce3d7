"""What is found before a run: the names that users rely on, and what it is held against.

Who looks, and how, is for ``precision_preflight`` (what was built) and ``dry_run`` (a pass on fake
tensors).
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass
from types import MappingProxyType
from typing import Literal

from ampctl.engine.state import TrainState

MEANINGS: Mapping[str, str] = MappingProxyType(
    {
        "half-parameters": "trainable parameters are in half precision themselves",
        "vanishing-eps": "a small constant is 0 in float16, so that it guards nothing",
        "constant-out-of-range": "a constant is larger than float16 can hold",
        "refused-by-autocast": "autocast of the target device raises at this loss",
        "dtype-not-in-hardware": "the device emulates the dtype: right, and slow",
        "no-parameters": "an optimizer has nothing to train",
        "no-gradient": "the loss does not depend on parameters that an optimizer has",
        "schedule-too-short": "the learning rate is 0, or climbs again, before the run ends",
        "not-traced": "the pass on fake tensors ended early; the rest was not examined",
    }
)
"""Every name that a finding can have, and what it means."""

REFUSING = ("cuda", "xpu")
"""Types of device whose autocast raises at binary cross entropy of probabilities."""

REFUSED_REMEDY = (
    "Let the model return logits, without a sigmoid at its end, and take BCEWithLogitsLoss; or "
    "call the loss on float32 tensors under `with torch.autocast(device_type, enabled=False):`."
)

SMALLEST = 2.0**-24
LARGEST = 65504.0
"""The smallest and the largest number of float16."""


def vanishes(value: float) -> bool:
    """Return whether a number that is not 0 is 0 in float16: half of the smallest rounds to 0."""
    return 0.0 < abs(value) <= SMALLEST / 2


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or may be; ``name`` is a key of :data:`MEANINGS`.

    An ``error`` would end or spoil the run; a ``warning`` is worth knowing.
    """

    name: str
    place: str
    reason: str
    remedy: str
    severity: Literal["error", "warning"] = "warning"

    def __post_init__(self) -> None:
        assert self.name in MEANINGS, f"{self.name} is promised nowhere"

    def __str__(self) -> str:
        """Describe it in two lines: what and where; what to do."""
        return f"{self.name}: {self.place}: {self.reason}\n    {self.remedy}"


@dataclass(frozen=True)
class Target:
    """What a run is for: the type of its device, and the dtype of autocast there.

    ``here``: whether such a device is in this machine; of one that is not, nothing is said about
    its hardware. ``chosen``: whether the device was settled by ``auto``, so that another machine
    may take another one.
    """

    device_type: str
    dtype: str
    here: bool = True
    chosen: bool = False

    @classmethod
    def of(cls, state: TrainState, *, chosen: bool = False) -> Target:
        """Return the target of a run on the device that it was built for."""
        return cls(state.device.type, state.precision.name, chosen=chosen)
