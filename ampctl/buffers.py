"""A model's buffers (BatchNorm statistics and the like), kept whole when a step is skipped.

The scaler protects parameters only; the forward pass of a bad batch has already written into the
running statistics. All buffers of one dtype become views of one flat tensor, so that a snapshot
and a restore are one kernel each, however many layers there are, and need no host read.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn


@dataclass(frozen=True)
class _Slot:
    """One buffer: the modules that hold it (a shared one has several), and its flat view."""

    owners: tuple[tuple[nn.Module, str], ...]
    view: Tensor


@dataclass(frozen=True)
class _Flat:
    """The buffers of one dtype on one device, and what they were before the step."""

    values: Tensor
    snapshot: Tensor
    slots: tuple[_Slot, ...]


class BufferGuard:
    """Take back what a bad forward pass wrote into buffers.

    :meth:`snapshot` before the forward, :meth:`restore` with ``found_inf`` after the step. All
    dense buffers are kept, whether written or not: BatchNorm's kernels write into theirs without
    torch's version counter telling. A buffer that the model replaces by a new tensor, rather than
    writing into it, is followed; one that changes its shape or dtype is taken as it is.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._flats = _flatten(model)

    def snapshot(self) -> None:
        """Remember the buffers as they are."""
        for flat in self._flats:
            flat.snapshot.copy_(flat.values)

    def restore(self, found_inf: Tensor) -> None:
        """Put back the snapshot where ``found_inf`` (a float scalar on the device) is not 0."""
        if self._flats and self._take_over_replaced():
            self._flats = _flatten(self._model)
        for flat in self._flats:
            bad = found_inf.to(flat.values.device).bool()
            torch.where(bad, flat.snapshot, flat.values, out=flat.values)

    def _take_over_replaced(self) -> bool:
        """Copy tensors that replaced a view into it; return whether one no longer fits its view."""
        reshaped = False
        for flat in self._flats:
            for slot in flat.slots:
                for module, name in slot.owners:
                    current = module._buffers.get(name)
                    if current is slot.view:
                        continue
                    if current is None or not _alike(current, slot.view):
                        reshaped = True
                        continue
                    slot.view.copy_(current.detach())
                    module._buffers[name] = slot.view
        return reshaped


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _flatten(model: nn.Module) -> list[_Flat]:
    """Move the model's dense buffers into flat tensors, one for each device and dtype."""
    owners: dict[int, list[tuple[nn.Module, str]]] = {}
    groups: dict[tuple[torch.device, torch.dtype], dict[int, Tensor]] = {}
    for module in model.modules():
        for name, buffer in module._buffers.items():
            if buffer is not None and buffer.layout is torch.strided:
                owners.setdefault(id(buffer), []).append((module, name))
                groups.setdefault((buffer.device, buffer.dtype), {})[id(buffer)] = buffer
    flats = []
    for buffers in groups.values():
        values = torch.cat([buffer.detach().reshape(-1) for buffer in buffers.values()])
        parts = torch.split(values, [buffer.numel() for buffer in buffers.values()])
        slots = []
        for (key, buffer), part in zip(buffers.items(), parts, strict=True):
            view = part.view(buffer.shape)
            for module, name in owners[key]:
                module._buffers[name] = view
            slots.append(_Slot(tuple(owners[key]), view))
        flats.append(_Flat(values, values.clone(), tuple(slots)))
    return flats
