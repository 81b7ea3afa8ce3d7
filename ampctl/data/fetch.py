"""Reading the samples of one micro-batch, with random augmentation that is exact to repeat.

A dataset may draw from the global generators (Python's, NumPy's, torch's). Each of its samples is
then drawn from a seed of its own, a function of (seed, epoch, position), so that workers, ranks,
micro-batches and stops change nothing, and the generators of the training itself are left alone.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import TensorDataset, default_collate

from ampctl import rng
from ampctl.data.order import Request

_SAMPLE_STREAM = 2


class Fetcher:
    """Read micro-batches of a map-style dataset.

    A ``TensorDataset`` gives a batch by one gather a tensor. A dataset with ``__getitems__`` is
    asked for all indices at once: a list it returns is collated, anything else is the batch. A
    dataset's own ``collate_fn`` attribute is used where there is one.

    Seeding each sample costs more than reading a cheap one, so a batch is first read plainly; if
    that drew from a generator, it is undone and the batch is read again, sample by sample from
    seeds of their own, and so are all batches from then on. What a ``__getitems__`` that makes the
    batch itself draws (mixing samples, say) follows from the micro-batch's place.
    """

    def __init__(self, dataset: Any, seed: int) -> None:
        self.dataset = dataset
        self.seed = seed
        self.draws = False
        self._makes_batches = False
        self._probe = rng.DrawProbe()
        self._tensors = dataset.tensors if type(dataset) is TensorDataset else None
        self._getitems = getattr(dataset, "__getitems__", None)
        self._collate = getattr(dataset, "collate_fn", None) or default_collate

    def __getitem__(self, request: Request) -> Any:
        """Return the batch of a request, on the host."""
        if self._tensors is not None:
            return tuple(tensor.index_select(0, request.indices) for tensor in self._tensors)
        self._probe.begin()
        if not self.draws:
            batch = self._read(request)
            if not self._probe.end():
                return batch
            self.draws = True
            batch = self._read_seeded(request)
        else:
            batch = self._read_seeded(request)
            self._probe.end()
        self._probe.rewind()
        return batch

    def pass_over(self) -> None:
        """Move the training's generators on as if a batch had been read in this process."""
        if self._tensors is None:
            self._probe.begin()
            self._probe.end()

    def _read(self, request: Request) -> Any:
        indices = request.indices.tolist()
        if self._getitems is None:
            return self._collate([self.dataset[index] for index in indices])
        samples = self._getitems(indices)
        self._makes_batches = not isinstance(samples, list)
        return samples if self._makes_batches else self._collate(samples)

    def _read_seeded(self, request: Request) -> Any:
        if self._makes_batches:
            rng.seed_host(rng.mix(self.seed, _SAMPLE_STREAM, request.epoch, request.position))
            return self._read(request)
        samples = []
        for place, index in enumerate(request.indices.tolist(), start=request.position):
            rng.seed_host(rng.mix(self.seed, _SAMPLE_STREAM, request.epoch, place))
            samples.append(self.dataset[index])
        rng.seed_host(rng.mix(self.seed, _SAMPLE_STREAM, request.epoch, request.position, 1))
        return self._collate(samples)


def identity(batch: Any) -> Any:
    """Return the batch as it is: a worker has collated it already."""
    return batch
