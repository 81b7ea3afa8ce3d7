"""Which dtype autocast runs in on which device, and why; and how matrix products are computed."""

from __future__ import annotations

from contextlib import AbstractContextManager
from dataclasses import dataclass, field
from functools import cache

import torch
from torch.nn import functional as F

from ampctl.environment import bfloat16_is_native, float16_is_native
from ampctl.recipe.schema import AmpConfig

DTYPES = {
    "float32": torch.float32,
    "bfloat16": torch.bfloat16,
    "float16": torch.float16,
}


@dataclass(frozen=True)
class Precision:
    """The dtype of the forward pass, settled once; ``reason`` says in words why it is that one."""

    device_type: str
    name: str
    reason: str
    cache_enabled: bool = True
    _context: torch.autocast = field(init=False, repr=False, compare=False)

    def __post_init__(self) -> None:
        context = torch.autocast(
            self.device_type,
            dtype=self.dtype if self.name != "float32" else None,
            enabled=self.name != "float32",
            cache_enabled=self.caches,
        )
        object.__setattr__(self, "_context", context)

    @property
    def dtype(self) -> torch.dtype:
        """The torch dtype of :attr:`name`."""
        return DTYPES[self.name]

    @property
    def caches(self) -> bool:
        """Whether autocast keeps its casts of weights: if the recipe lets it, and it is right."""
        return self.cache_enabled and cache_keeps_gradients()

    @property
    def needs_scaling(self) -> bool:
        """Whether gradients can underflow: float16 alone has too small a range for them."""
        return self.name == "float16"

    def autocast(self) -> AbstractContextManager[object]:
        """Return the autocast context of the forward pass; one object, entered again each time."""
        return self._context


@cache
def cache_keeps_gradients() -> bool:
    """Return whether autocast's cache knows a cast made without gradients from one with them.

    In torch 2.10 it does not: a forward pass under ``no_grad`` takes the gradients from the next
    one. Source: https://github.com/pytorch/pytorch/pull/165068
    """
    x, weight = torch.ones(1, 1), torch.ones(1, 1, requires_grad=True)
    with torch.autocast("cpu", dtype=torch.bfloat16, cache_enabled=True):
        with torch.no_grad():
            F.linear(x, weight)
        return F.linear(x, weight).requires_grad


def has_float64(device: torch.device) -> bool:
    """Return whether a device computes in float64."""
    if device.type == "xpu":
        return bool(torch.xpu.get_device_properties(device).has_fp64)
    return device.type != "mps"


def choose_precision(wanted: str, device: torch.device, *, cache_enabled: bool = True) -> Precision:
    """Settle the dtype for a device.

    ``auto`` is bfloat16 where the hardware has it, else float16 on an accelerator that has that,
    else float32. A dtype that was asked for by name is taken, and the reason says when the
    hardware only emulates it.
    """
    kind = device.type
    bf16, bf16_reason = bfloat16_is_native(kind)
    fp16, fp16_reason = float16_is_native(kind)
    if wanted == "auto":
        if bf16:
            name, reason = "bfloat16", bf16_reason
        elif fp16 and kind != "cpu":
            name, reason = "float16", f"{fp16_reason}; {bf16_reason}"
        else:
            name, reason = "float32", bf16_reason
    else:
        name, reason = wanted, "asked for by the recipe"
        if name == "bfloat16" and not bf16:
            reason += f", though slow here: {bf16_reason}"
        if name == "float16" and not fp16:
            reason += f", though slow here: {fp16_reason}"
    if name != "float32" and cache_enabled and not cache_keeps_gradients():
        reason += "; without autocast's cache, which loses gradients in this version of torch"
    return Precision(kind, name, reason, cache_enabled)


def set_accuracy(amp: AmpConfig) -> None:
    """Settle how matrix products are computed, whatever a user's module has set on import."""
    torch.set_float32_matmul_precision(amp.matmul_precision)
    # cuDNN has a switch of its own for convolutions, which torch leaves on.
    torch.backends.cudnn.allow_tf32 = amp.matmul_precision != "highest"
    matmul = torch.backends.cuda.matmul
    matmul.allow_fp16_reduced_precision_reduction = amp.reduced_precision_reduction
    matmul.allow_bf16_reduced_precision_reduction = amp.reduced_precision_reduction
