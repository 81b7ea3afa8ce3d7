"""Gradients as lists that one kernel takes: gathered, measured, clipped."""

from __future__ import annotations

from collections.abc import Sequence

import torch
from torch import Tensor, nn


def gather(parameters: Sequence[nn.Parameter]) -> list[list[Tensor]]:
    """Collect the gradients that exist, in one list for each device and dtype.

    A sparse gradient is coalesced (in place on the parameter) and stands with its values.
    """
    groups: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for parameter in parameters:
        gradient = parameter.grad
        if gradient is None:
            continue
        if gradient.is_sparse:
            # Uncoalesced entries of one row would be measured and clipped one by one.
            parameter.grad = gradient = gradient.coalesce()
            gradient = gradient._values()
        if gradient.numel():  # some kernels refuse a tensor without elements
            groups.setdefault((gradient.device, gradient.dtype), []).append(gradient)
    return list(groups.values())


def values(gradient: Tensor) -> Tensor:
    """Return the stored elements of a gradient, dense or sparse."""
    return gradient.coalesce()._values() if gradient.is_sparse else gradient


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
        norms.extend(torch._foreach_norm(list(group), 2.0, dtype=dtype))
    first = norms[0].device
    if len(groups) > 1:
        norms = [norm.to(first) for norm in norms]
    norm: Tensor = torch.linalg.vector_norm(torch.stack(norms))
    return norm


def float16_range(groups: Sequence[Sequence[Tensor]]) -> tuple[Tensor, Tensor]:
    """Return how gradients, still scaled, lie in the range of float16: two float32 scalars.

    The share of values that are zero or below the smallest number of float16 (2**-24), and the
    largest absolute value. Reads every gradient twice, so it is for the steps that are logged.
    """
    tiny = 2.0**-24
    lost = torch.stack([(g.abs() < tiny).sum() for group in groups for g in group]).sum()
    count = sum(g.numel() for group in groups for g in group)
    largest = [torch.stack(torch._foreach_norm(list(group), float("inf"))) for group in groups]
    return lost.float() / count, torch.cat([part.float() for part in largest]).max()


def clip_norm_(groups: Sequence[Sequence[Tensor]], norm: Tensor, max_norm: float) -> None:
    """Scale all gradients in place so that their common 2-norm is at most ``max_norm``.

    Source: ``torch.nn.utils.clip_grads_with_norm_``, whose operations these are.
    """
    coefficient = torch.clamp(max_norm / (norm + 1e-6), max=1.0)
    for group in groups:
        torch._foreach_mul_(list(group), coefficient.to(group[0].device))


def clip_value_(groups: Sequence[Sequence[Tensor]], limit: float) -> None:
    """Clamp each gradient element in place to ``[-limit, limit]``."""
    for group in groups:
        torch._foreach_clamp_min_(list(group), -limit)
        torch._foreach_clamp_max_(list(group), limit)
