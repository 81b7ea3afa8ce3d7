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
    writing into it, is followed; where one changes its shape or dtype, the host has to look.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self._flats = _flatten(model)
        self._loose = _loose(model)

    def snapshot(self) -> None:
        """Remember the buffers as they are."""
        if self._take_over_replaced():
            self._start_over()
        for flat in self._flats:
            flat.snapshot.copy_(flat.values)

    def restore(self, found_inf: Tensor) -> None:
        """Put back the snapshot where ``found_inf`` (a float scalar on the device) is not 0."""
        if self._take_over_replaced():
            if found_inf.item():  # sync: no kernel chooses between tensors of two shapes
                self._put_back_views()
            else:
                self._start_over()
        for flat in self._flats:
            bad = found_inf.to(flat.values.device).bool()
            torch.where(bad, flat.snapshot, flat.values, out=flat.values)

    def _take_over_replaced(self) -> bool:
        """Copy tensors that replaced a view into it; return whether one does not fit its view."""
        unfit = False
        for flat in self._flats:
            for slot in flat.slots:
                for module, name in slot.owners:
                    current = module._buffers.get(name)
                    if current is slot.view:
                        continue
                    # A shared view would hand the new values to its other owners, too.
                    if current is None or len(slot.owners) > 1 or not _alike(current, slot.view):
                        unfit = True
                        continue
                    slot.view.copy_(current.detach())
                    module._buffers[name] = slot.view
        return unfit or any(module._buffers.get(name) is not b for module, name, b in self._loose)

    def _start_over(self) -> None:
        self._flats = _flatten(self._model)
        self._loose = _loose(self._model)

    def _put_back_views(self) -> None:
        for flat in self._flats:
            for slot in flat.slots:
                for module, name in slot.owners:
                    module._buffers[name] = slot.view
        for module, name, buffer in self._loose:
            module._buffers[name] = buffer


def _alike(a: Tensor, b: Tensor) -> bool:
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _loose(model: nn.Module) -> list[tuple[nn.Module, str, Tensor | None]]:
    """List the buffers that no flat tensor holds: those not filled yet, and sparse ones."""
    return [
        (module, name, buffer)
        for module in model.modules()
        for name, buffer in module._buffers.items()
        if buffer is None or buffer.layout is not torch.strided
    ]


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
