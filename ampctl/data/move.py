"""The tensors of a batch, whatever its nesting, and moving them to the device that trains."""

from __future__ import annotations

import copy
import inspect
from collections.abc import Callable, Iterator, Mapping
from functools import cache
from types import MappingProxyType
from typing import Any

import torch
from torch import Tensor, nn

CHANNELS_LAST: Mapping[int, torch.memory_format] = MappingProxyType(
    {4: torch.channels_last, 5: torch.channels_last_3d}
)
"""The memory format of a tensor by its number of dimensions; others have none."""


def to_channels_last_(model: nn.Module) -> None:
    """Lay out a model's weights and buffers with the channels last, those of images and volumes."""
    for tensor in (*model.parameters(), *model.buffers()):
        if tensor.ndim in CHANNELS_LAST:
            tensor.data = tensor.data.contiguous(memory_format=CHANNELS_LAST[tensor.ndim])


def to_device(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Return the batch with every tensor on ``device``, in channels-last order if asked.

    Tuples, lists, mappings and objects with a ``to`` method are followed; other values pass.
    """
    if isinstance(batch, Tensor):
        if channels_last and batch.ndim in CHANNELS_LAST:
            layout = CHANNELS_LAST[batch.ndim]
            return batch.to(device, non_blocking=True, memory_format=layout)
        return batch.to(device, non_blocking=True)
    if isinstance(batch, tuple | list):
        moved = [to_device(part, device, channels_last=channels_last) for part in batch]
        if hasattr(batch, "_fields"):
            return type(batch)(*moved)
        return type(batch)(moved)
    if type(batch) is dict:
        return {
            name: to_device(part, device, channels_last=channels_last)
            for name, part in batch.items()
        }
    if hasattr(batch, "to"):  # BatchEncoding and the like
        return batch.to(device, **_without_waiting(getattr(type(batch), "to", None)))
    if isinstance(batch, dict):
        subclass: Any = copy.copy(batch)
        for name, part in batch.items():
            subclass[name] = to_device(part, device, channels_last=channels_last)
        return subclass
    return batch


@cache
def _without_waiting(to: Callable[..., Any] | None) -> dict[str, bool]:
    """Return the argument that keeps the host from waiting for a copy, where ``to`` takes it."""
    try:
        parameters = inspect.signature(to).parameters  # type: ignore[arg-type]
    except (TypeError, ValueError):  # not of the class, or of an extension that does not tell
        return {}
    takes_any = any(each.kind is each.VAR_KEYWORD for each in parameters.values())
    return {"non_blocking": True} if takes_any or "non_blocking" in parameters else {}


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)
