"""Float32 masters of parameters that a model brings in half precision, so that they can be trained.

A half-precision weight loses every update below some thousandth of it, and float16 gradients cannot
be unscaled; autocast casts the masters where the forward pass wants it.
"""

from __future__ import annotations

import torch
from torch import nn

HALF = (torch.float16, torch.bfloat16)


def trainable_half(model: nn.Module) -> list[str]:
    """Return the names of the trainable parameters that are in half precision themselves."""
    return [n for n, p in model.named_parameters() if p.requires_grad and p.dtype in HALF]


@torch.no_grad()
def upcast_(model: nn.Module) -> list[str]:
    """Bring trainable half-precision parameters to float32 in place; return their names.

    What else their own module holds in half precision goes along, so that it computes in one dtype;
    frozen modules stay as they are.
    """
    names = trainable_half(model)
    for module in model.modules():
        own = list(module.parameters(recurse=False))
        if not any(parameter.requires_grad and parameter.dtype in HALF for parameter in own):
            continue
        for tensor in [*own, *module.buffers(recurse=False)]:
            if tensor.dtype in HALF:
                tensor.data = tensor.data.float()
    return names
