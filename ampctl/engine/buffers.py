"""A model's buffers (BatchNorm statistics and the like), kept whole when a step is skipped.

The scaler protects parameters only; the forward pass of a bad batch has already written into the
running statistics. Those of all normalisation layers become views of one flat tensor for each
dtype, so that a snapshot and a restore are one kernel each, however many layers there are, and
need no host read. Any other buffer stays the model's own tensor, which may be aliased or resized.
"""

from __future__ import annotations

from dataclasses import dataclass

import torch
from torch import Tensor, nn

from ampctl.distributed.ranks import Ranks
from ampctl.torch_private import NormBase, own_buffers, passing_buffers

_STATISTICS = ("running_mean", "running_var", "num_batches_tracked")


@dataclass(frozen=True)
class _Flat:
    """The statistics of one dtype on one device, and what they were before the step."""

    values: Tensor
    snapshot: Tensor
    slots: tuple[tuple[nn.Module, str, Tensor], ...]


@dataclass(frozen=True)
class _Own:
    """A buffer that stays the model's own; ``snapshot`` is None for what no kernel can copy."""

    module: nn.Module
    name: str
    tensor: Tensor | None
    snapshot: Tensor | None


class BufferGuard:
    """Take back what a bad forward pass wrote into buffers.

    :meth:`snapshot` before the forward, :meth:`restore` with ``found_inf`` after the step. All
    dense buffers are kept, whether written or not: BatchNorm's kernels write into theirs without
    torch's version counter telling. A buffer that the model replaces by a new tensor, rather than
    writing into it, is followed; where one changes its shape or dtype, the host has to look.
    """

    def __init__(self, model: nn.Module) -> None:
        self._model = model
        self.is_kept = False
        self._start_over()

    def snapshot(self) -> None:
        """Remember the buffers as they are: :attr:`is_kept`, until whoever asked resets it."""
        self.is_kept = True
        if any(own_buffers(m).get(n) is not t for f in self._flats for m, n, t in f.slots) or any(
            own_buffers(own.module).get(own.name) is not own.tensor
            or (own.snapshot is not None and not _alike(own.tensor, own.snapshot))
            for own in self._own
        ):
            self._start_over()
            return
        for flat in self._flats:
            flat.snapshot.copy_(flat.values)
        for own in self._own:
            if own.snapshot is not None and own.tensor is not None:
                own.snapshot.copy_(own.tensor)

    def restore(self, found_inf: Tensor) -> None:
        """Put back the snapshot where ``found_inf`` (a float scalar on the device) is not 0.

        Through ``.data``, which the version counter of a buffer does not see: a graph that is
        still to be used (a generator's, in the critic's turn) may have saved the buffer, and where
        the step is made its values stay as they are.
        """
        for flat in self._flats:
            for module, name, view in flat.slots:
                current = own_buffers(module).get(name)
                if current is not view and current is not None and _alike(current, view):
                    view.data.copy_(current.detach())
                    own_buffers(module)[name] = view
            bad = found_inf.to(flat.values.device).bool()
            torch.where(bad, flat.snapshot, flat.values, out=flat.values.data)
        for own in self._own:
            current = own_buffers(own.module).get(own.name)
            if current is not None and _alike(current, own.snapshot):
                assert own.snapshot is not None, "what is alike is there"
                bad = found_inf.to(current.device).bool()
                torch.where(bad, own.snapshot, current.detach(), out=current.data)
            elif (current is not own.tensor or own.snapshot is not None) and found_inf.item():
                _put_back(own)  # sync: no kernel chooses between tensors of two shapes

    def kept(self) -> dict[str, Tensor]:
        """Return what was remembered by the names of the buffers in the model."""
        held: dict[tuple[int, str], Tensor] = {}
        for flat in self._flats:
            parts = torch.split(flat.snapshot, [view.numel() for _, _, view in flat.slots])
            for (module, name, view), part in zip(flat.slots, parts, strict=True):
                held[id(module), name] = part.view(view.shape)
        for own in self._own:
            if own.snapshot is not None:
                held[id(own.module), own.name] = own.snapshot
        return {
            f"{prefix}.{name}" if prefix else name: held[id(module), name]
            for prefix, module in self._model.named_modules(remove_duplicate=False)
            for name in own_buffers(module)
            if (id(module), name) in held
        }

    def follow_first(self, ranks: Ranks) -> None:
        """Take over the buffers of rank 0, those that a checkpoint holds, as DDP does."""
        ranks.follow_first_([flat.values for flat in self._flats])
        for own in self._own:
            passing = own.name in passing_buffers(own.module)
            if own.snapshot is not None and own.tensor is not None and not passing:
                ranks.follow_first_([own.tensor.data])

    def _start_over(self) -> None:
        """Take the model's buffers as they are now; the snapshot too is of now."""
        statistics: list[tuple[nn.Module, str, Tensor | None]] = []
        others: list[tuple[nn.Module, str, Tensor | None]] = []
        seen: dict[int, int] = {}
        for module in self._model.modules():
            for name, buffer in own_buffers(module).items():
                seen[id(buffer)] = seen.get(id(buffer), 0) + 1
                is_statistic = isinstance(module, NormBase) and name in _STATISTICS
                (statistics if is_statistic else others).append((module, name, buffer))
        flat = [s for s in statistics if s[2] is not None and seen[id(s[2])] == 1]
        others += [s for s in statistics if s[2] is None or seen[id(s[2])] > 1]
        self._flats = _flatten(flat)
        self._own = [
            _Own(module, name, buffer, _copy(buffer) if _is_dense(buffer) else None)
            for module, name, buffer in others
        ]


def _put_back(own: _Own) -> None:
    if own.tensor is not None and own.snapshot is not None:
        with torch.no_grad():
            if not _alike(own.tensor, own.snapshot):
                own.tensor.resize_(own.snapshot.shape)
            own.tensor.copy_(own.snapshot)
    own_buffers(own.module)[own.name] = own.tensor


def _is_dense(buffer: Tensor | None) -> bool:
    return buffer is not None and buffer.layout is torch.strided


def _copy(buffer: Tensor | None) -> Tensor | None:
    return None if buffer is None else buffer.detach().clone()


def _alike(a: Tensor | None, b: Tensor | None) -> bool:
    if a is None or b is None:
        return False
    return a.shape == b.shape and a.dtype == b.dtype and a.device == b.device


def _flatten(buffers: list[tuple[nn.Module, str, Tensor | None]]) -> list[_Flat]:
    """Move statistics into flat tensors, one for each device and dtype."""
    groups: dict[tuple[torch.device, torch.dtype], list[tuple[nn.Module, str, Tensor]]] = {}
    for module, name, buffer in buffers:
        assert buffer is not None, "statistics that are not there are not flattened"
        groups.setdefault((buffer.device, buffer.dtype), []).append((module, name, buffer))
    flats = []
    for group in groups.values():
        values = torch.cat([buffer.detach().reshape(-1) for _, _, buffer in group])
        parts = torch.split(values, [buffer.numel() for _, _, buffer in group])
        slots = []
        for (module, name, buffer), part in zip(group, parts, strict=True):
            view = part.view(buffer.shape)
            own_buffers(module)[name] = view
            slots.append((module, name, view))
        flats.append(_Flat(values, values.clone(), tuple(slots)))
    return flats
