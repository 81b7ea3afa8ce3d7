"""Constants that float16 cannot hold, found among the operations of a traced pass.

A number below 3e-8 becomes 0 in it and one above 65504 infinity, whatever Python holds.
"""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import dataclass

import torch
from torch import nn

from ampctl.doctor.finding import LARGEST, Finding, vanishes
from ampctl.doctor.trace import Operation, Place, place

# Operations that turn a constant into an element, and raise if it does not fit;
_STORING = {"masked_fill", "fill", "full", "full_like", "new_full", "index_fill", "constant_pad_nd"}
# on a CPU these too, where a GPU compares in float32;
_STORING_ON_CPU = {"clamp", "clamp_min", "clamp_max"}
# and those that make it infinite.
_COMPUTING = {"add", "sub", "rsub", "mul", "scalar_tensor"}
# A small constant is a guard where it is added or takes the place of a value.
_GUARDS = {"add", "sub", "rsub", "clamp", "clamp_min", "masked_fill", "fill", "full", "full_like"}
_GUARDS |= {"new_full", "scalar_tensor"}
_CALLED = {"scalar_tensor": "where"}  # what it comes from
_WATCHED = _GUARDS | _STORING | _STORING_ON_CPU | _COMPUTING


@dataclass(frozen=True)
class _Use:
    """A constant in an operation at one line; the modules that run the line share it."""

    operation: str
    constant: float
    source: str
    kind: str


class Constants:
    """Gather the constants of a pass that do not fit; ``observe`` is for ``Trace``."""

    def __init__(self, model: nn.Module, device_type: str) -> None:
        self._model = model
        self._storing = _STORING | (_STORING_ON_CPU if device_type == "cpu" else set())
        self._uses: dict[_Use, list[Place]] = {}

    def observe(self, operation: Operation) -> None:
        """Look at one operation."""
        name = operation.name.rstrip("_")
        if name not in _WATCHED:
            return
        if not any(output.dtype == torch.float16 for output in operation.outputs()):
            return
        for constant in operation.args:
            if isinstance(constant, int | float) and self._does_not_fit(name, constant):
                here = place(self._model)
                use = _Use(name, float(constant), here.source, here.kind)
                places = self._uses.setdefault(use, [])
                if here not in places:
                    places.append(here)

    def _does_not_fit(self, name: str, constant: float) -> bool:
        if name in _GUARDS and vanishes(constant):
            return True
        too_large = math.isfinite(constant) and abs(constant) > LARGEST
        return too_large and (name in self._storing or name in _COMPUTING)

    def findings(self) -> Iterator[Finding]:
        """Return a finding for each constant and line, in the order in which they ran."""
        for use, places in self._uses.items():
            more = f", and {len(places) - 1} more modules" if len(places) > 1 else ""
            where = f"{places[0]}{more}"
            name = places[0].module
            module = f", or amp.modules={{{name}: float32}}" if name else ""
            called = _CALLED.get(use.operation, use.operation)
            if abs(use.constant) < 1:
                yield Finding(
                    "vanishing-eps",
                    where,
                    f"{use.constant:g} in `{called}` is 0 in float16 (as all below 3e-8 is), "
                    "so it guards nothing",
                    f"Take 1e-6 or more, or compute this in float32 (`x.float()`{module}).",
                )
                continue
            stored = use.operation in self._storing
            infinite = math.copysign(math.inf, use.constant)
            yield Finding(
                "constant-out-of-range",
                where,
                f"{use.constant:g} in `{called}` does not fit float16, which ends at 65504: "
                + ("it raises" if stored else f"it becomes {infinite}"),
                f"Take torch.finfo(x.dtype).min or .max, or compute this in float32 (`x.float()`"
                f"{module}), or set amp.dtype=bfloat16.",
                "error" if stored else "warning",
            )
