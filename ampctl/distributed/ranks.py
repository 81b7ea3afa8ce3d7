"""What the processes of a job must agree on, said by collectives; alone, none is made."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass

import torch
from torch import Tensor
from torch import distributed as dist

from ampctl.errors import NumericsError


@dataclass(frozen=True)
class Ranks:
    """The processes of one job.

    ``shares_verdict``: whether gradients can differ between ranks, so that they must agree on
    whether one is non-finite. DDP's own reduction makes them equal, but for parameters that it is
    told to ignore and for models that are called past it.
    """

    rank: int = 0
    size: int = 1
    shares_verdict: bool = False

    def any_(self, found_inf: Tensor) -> None:
        """Make a verdict (1 or 0) in place that of every rank: 1 where one of them has 1."""
        if self.size > 1 and self.shares_verdict:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)  # all ranks: each optimizer step

    def follow_first_(self, values: Sequence[Tensor]) -> None:
        """Make tensors in place those of rank 0."""
        for value in values if self.size > 1 else ():
            dist.broadcast(value, src=0)  # all ranks: at the start, and on resuming

    def require_equal(self, what: str, value: float, device: torch.device) -> None:
        """Raise NumericsError on every rank, naming ranks and values, if a value differs."""
        if self.size == 1:
            return
        own = torch.tensor([value], dtype=torch.float32, device=device)
        every = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(every, own)  # all ranks: at log intervals and saves
        values = [each.item() for each in every]  # sync: where figures are read anyway
        if any(each != values[0] for each in values):
            told = ", ".join(f"{each:g} on rank {rank}" for rank, each in enumerate(values))
            raise NumericsError(
                f"{what} differs between ranks: {told}. They no longer train one model: a rank "
                "skipped a step that another took. Is there a parameter that DDP does not reduce, "
                "or a collective of your own? Resume from the newest checkpoint."
            )


ALONE = Ranks()
"""A job of one process."""
