"""Which samples form which optimizer step: a pure function of (seed, epoch, position).

Nothing here knows the global generators, the number of workers or what a sample is, so a run can
go on from any step, at any depth of an epoch, at no cost.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np
import torch
from torch import Tensor

from ampctl.errors import MachineError
from ampctl.rng import mix

_ORDER_STREAM = 1


@dataclass(frozen=True)
class Request:
    """The samples of one micro-batch: their indices, int64 [n], and the place of the first.

    ``position`` is the first sample's place in the epoch's order; the others follow it.
    ``is_padding``: it is another rank's, and does not count.
    """

    epoch: int
    position: int
    indices: Tensor
    is_padding: bool = False

    def __reduce__(self) -> tuple[Any, ...]:
        # As a tensor, the whole order that the indices are a part of would go to each worker.
        return _request, (self.epoch, self.position, self.indices.numpy().copy(), self.is_padding)


def _request(epoch: int, position: int, indices: np.ndarray[Any, Any], is_padding: bool) -> Request:
    return Request(epoch, position, torch.from_numpy(indices), is_padding)


def deal(
    num_samples: int, micro_batch_size: int, rank: int, world_size: int
) -> list[tuple[int, int, bool]]:
    """Return a rank's part of each run of micro-batches of a step: from, to, whether it is padding.

    A run has a micro-batch for each rank; the last one may be short, and is dealt as evenly as can
    be. Where that leaves a rank nothing, it borrows the first sample of the run.
    """
    parts = []
    stride = micro_batch_size * world_size
    for start in range(0, num_samples, stride):
        share, rest = divmod(min(stride, num_samples - start), world_size)
        low = start + rank * share + min(rank, rest)
        high = low + share + (rank < rest)
        parts.append((low, high, False) if low < high else (start, start + 1, True))
    return parts


@dataclass(frozen=True)
class Order:
    """How ``num_samples`` are dealt to optimizer steps, ranks and micro-batches.

    Each step takes the next ``batch_size`` samples of the epoch's order; they are dealt in runs
    of ``micro_batch_size`` to the ranks in turn, a short last run in shares as even as can be.
    """

    num_samples: int
    batch_size: int
    micro_batch_size: int
    seed: int
    shuffle: bool = True
    drop_last: bool = False
    rank: int = 0
    world_size: int = 1

    @property
    def steps_per_epoch(self) -> int:
        """Optimizer steps in one epoch; a short last batch counts unless it is dropped."""
        if self.drop_last:
            return self.num_samples // self.batch_size
        return -(-self.num_samples // self.batch_size)

    def permutation(self, epoch: int) -> Tensor:
        """Return the epoch's order of the samples, int64 [num_samples]."""
        generator = torch.Generator().manual_seed(mix(self.seed, _ORDER_STREAM, epoch))
        try:
            if not self.shuffle:
                return torch.arange(self.num_samples)
            return torch.randperm(self.num_samples, generator=generator)
        except RuntimeError as error:  # no memory for it
            raise MachineError(
                f"data.train: the order of its {self.num_samples:,} samples, 8 bytes each, does "
                f"not fit into memory: {error}"
            ) from error

    def windows(self, epoch: int, first_step: int = 0) -> Iterator[list[Request]]:
        """Yield the micro-batches of each optimizer step of an epoch, from ``first_step`` on.

        A rank that gets none of a run's samples borrows the first of them, so that all ranks take
        the same number of forward passes.
        """
        order = self.permutation(epoch)
        for step in range(first_step, self.steps_per_epoch):
            begin = step * self.batch_size
            end = min(begin + self.batch_size, self.num_samples)
            shares = deal(end - begin, self.micro_batch_size, self.rank, self.world_size)
            yield [
                Request(epoch, begin + low, order[begin + low : begin + high], is_padding)
                for low, high, is_padding in shares
            ]

    def samples_of_step(self, step: int) -> int:
        """Count the samples of a step of an epoch, over all ranks."""
        return min(self.batch_size, self.num_samples - step * self.batch_size)
