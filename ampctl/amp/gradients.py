"""Gradients as lists that one kernel takes: gathered, measured, clipped."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

import torch
from torch import Tensor, nn

from ampctl import torch_private
from ampctl.distributed.shard import local

_CACHED_ELEMENTS = 2**18  # a block that is read several times while a core's cache holds it
_QUEUED_ELEMENTS = 2**24  # on an accelerator: few kernels, whose temporary memory is still small


def gather(
    parameters: Sequence[nn.Parameter], on_sparse: Callable[[], None] | None = None
) -> list[list[Tensor]]:
    """Collect the gradients that exist, in one list for each device and dtype.

    A sparse gradient is coalesced (in place on the parameter) and stands with its values, a complex
    one with its real and imaginary parts, one that is spread over ranks with this rank's part.
    ``on_sparse`` is called for each that is sparse.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        gradient = local(gradient)
        if gradient.is_sparse:
            # Uncoalesced entries of one row would be measured and clipped one by one.
            parameter.grad = gradient = gradient.coalesce()
            gradient = torch_private.stored_values(gradient)
            if on_sparse is not None:
                on_sparse()
        elif gradient.is_conj():
            parameter.grad = gradient = gradient.resolve_conj()
        if gradient.is_complex():
            gradient = torch.view_as_real(gradient)
        if gradient.numel():  # some kernels refuse a tensor without elements
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(groups.values())


def values(gradient: Tensor) -> Tensor:
    """Return the stored elements of a gradient, dense or sparse."""
    return torch_private.stored_values(gradient.coalesce()) if gradient.is_sparse else gradient


def drop(parameters: Sequence[nn.Parameter]) -> None:
    """Forget all gradients, so that none of this window reaches the next."""
    for parameter in parameters:
        parameter.grad = None


def total_norm(groups: Sequence[Sequence[Tensor]]) -> Tensor:
    """Return the 2-norm of all gradients together, a scalar.

    The same operations as ``torch.nn.utils.get_total_norm``, so the same bits; half-precision
    gradients are accumulated in float32, where their squares fit.
    """
    norms: list[Tensor] = []
    for group in groups:
        half = group[0].dtype in (torch.float16, torch.bfloat16)
        dtype = torch.float32 if half else None
        norms.extend(torch_private.foreach_norm(list(group), 2.0, dtype=dtype))
    first = norms[0].device
    if len(groups) > 1:
        norms = [norm.to(first) for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def float16_range(groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """Return how gradients, still scaled, lie in the range of float16: two float32 scalars.

    The share of values that are zero or below the smallest number of float16 (2**-24), and the
    largest absolute value. Copies every gradient, so it is for the steps that are logged.
    """
    tiny = 2.0**-24
    lost: list[Tensor] = []
    largest: list[Tensor] = []
    for group in groups:
        limit = _CACHED_ELEMENTS if group[0].device.type == "cpu" else _QUEUED_ELEMENTS
        elements = min(limit, sum(gradient.numel() for gradient in group))
        room = group[0].new_empty(elements)
        for block in _blocks(group, elements):
            held = sum(piece.numel() for piece in block)
            absolute = torch.cat(block, out=room[:held]).abs_()
            largest.append(absolute.amax().float())
            # In place and summed as numbers: on a CPU, booleans would take five times as long.
            lost.append(absolute.lt_(tiny).sum(dtype=torch.float32))
    count = sum(gradient.numel() for group in groups for gradient in group)
    device = lost[0].device
    share = torch.stack([part.to(device) for part in lost]).sum() / count
    return share, torch.stack([part.to(device) for part in largest]).max()


def _blocks(group: Sequence[Tensor], elements: int) -> Iterator[list[Tensor]]:
    """Deal the elements of a group out to lists of flat pieces, of at most so many each."""
    block: list[Tensor] = []
    held = 0
    for gradient in group:
        for piece in torch.split(gradient.reshape(-1), elements):
            if held + piece.numel() > elements:
                yield block
                block, held = [], 0
            block.append(piece)
            held += piece.numel()
    yield block


def clip_norm_(groups: Sequence[Sequence[Tensor]], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place so that their common 2-norm is at most ``max_norm``.

    Source: ``torch.nn.utils.clip_grads_with_norm_``, whose operations these are.
    """
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for group in groups:
        torch_private.foreach_mul_(list(group), coefficient.to(group[0].device))


def clip_value_(groups: Sequence[Sequence[Tensor]], limit: float) -> None:
    """Clamp each gradient element in place to ``[-limit, limit]``."""
    for group in groups:
        torch_private.foreach_clamp_min_(list(group), -limit)
        torch_private.foreach_clamp_max_(list(group), limit)
