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

from ampctl.rng import mix

_ORDER_STREAM = 1


@dataclass(frozen=True)
class Request:
    """The samples of one micro-batch: their indices, int64 [n], and the place of the first.

    ``position`` is the first sample's place in the epoch's order; the others follow it.
    """

    epoch: int
    position: int
    indices: Tensor

    def __reduce__(self) -> tuple[Any, ...]:
        # As a tensor, the whole order that the indices are a part of would go to each worker.
        return _request, (self.epoch, self.position, self.indices.numpy().copy())


def _request(epoch: int, position: int, indices: np.ndarray[Any, Any]) -> Request:
    return Request(epoch, position, torch.from_numpy(indices))


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
        if not self.shuffle:
            return torch.arange(self.num_samples)
        generator = torch.Generator().manual_seed(mix(self.seed, _ORDER_STREAM, epoch))
        return torch.randperm(self.num_samples, generator=generator)

    def windows(self, epoch: int, first_step: int = 0) -> Iterator[list[Request]]:
        """Yield the micro-batches of each optimizer step of an epoch, from ``first_step`` on.

        A rank that gets none of a run's samples has a request of no indices in its place, so that
        all ranks take the same number of forward passes.
        """
        order = self.permutation(epoch)
        stride = self.micro_batch_size * self.world_size
        for step in range(first_step, self.steps_per_epoch):
            begin = step * self.batch_size
            end = min(begin + self.batch_size, self.num_samples)
            window = []
            for start in range(begin, end, stride):
                share, rest = divmod(min(start + stride, end) - start, self.world_size)
                low = start + self.rank * share + min(self.rank, rest)
                high = low + share + (self.rank < rest)
                window.append(Request(epoch, low, order[low:high]))
            yield window

    def samples_of_step(self, step: int) -> int:
        """Count the samples of a step of an epoch, over all ranks."""
        return min(self.batch_size, self.num_samples - step * self.batch_size)
