"""The tensors of a batch, whatever its nesting, and moving them to the device that trains."""

from __future__ import annotations

import copy
from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch import Tensor


def pinned(batch: Any) -> Any:
    """Return the batch with its tensors in page-locked memory, whose copies to CUDA overlap."""
    from torch.utils.data._utils.pin_memory import pin_memory

    return pin_memory(batch)  # type: ignore[no-untyped-call]


def to_device(batch: Any, device: torch.device, *, channels_last: bool = False) -> Any:
    """Return the batch with every tensor on ``device``, in channels-last order if 4-d and asked.

    Tuples, lists, mappings and objects with a ``to`` method are followed; other values pass.
    """
    if isinstance(batch, Tensor):
        if channels_last and batch.ndim == 4:
            return batch.to(device, non_blocking=True, memory_format=torch.channels_last)
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
        return batch.to(device)
    if isinstance(batch, dict):
        subclass: Any = copy.copy(batch)
        for name, part in batch.items():
            subclass[name] = to_device(part, device, channels_last=channels_last)
        return subclass
    return batch


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
