"""Reading the samples of one micro-batch, with random augmentation that is exact to repeat.

A dataset may draw from the global generators (Python's, NumPy's, torch's). Each of its samples is
then drawn from a seed of its own, a function of (seed, epoch, position), so that workers, ranks,
micro-batches and stops change nothing, and the generators of the training itself are left alone.
"""

from __future__ import annotations

from typing import Any

from torch.utils.data import TensorDataset, get_worker_info

from ampctl import rng
from ampctl.data.collate import Collate, Function, listed
from ampctl.data.faults import FAULTS, raise_told
from ampctl.data.order import Request
from ampctl.data.workers import Raised, require_sendable
from ampctl.errors import UsageError

_SAMPLE_STREAM = 2


class Fetcher:
    """Read micro-batches of a map-style dataset.

    A ``TensorDataset`` gives a batch by one gather a tensor. A dataset with ``__getitems__`` is
    asked for all indices at once: a list it returns is collated, anything else is the batch. How
    see ``collate``. ``key`` is what the dataset is called in messages.

    Seeding each sample costs more than reading a cheap one, so a batch is first read plainly; if
    that drew from a generator, it is undone and the batch is read again, sample by sample from
    seeds of their own, and so are all batches from then on. What a ``__getitems__`` that makes the
    batch itself draws (mixing samples, say) follows from the micro-batch's place.
    """

    def __init__(
        self,
        dataset: Any,
        seed: int,
        collate_fn: Function | None = None,
        key: str = "data.train",
    ) -> None:
        self.dataset = dataset
        self.key = key
        self.seed = seed
        self.draws = False
        self._makes_batches = False
        self.probe = rng.DrawProbe()
        self._tensors = dataset.tensors if type(dataset) is TensorDataset else None
        self._getitems = getattr(dataset, "__getitems__", None)
        self._collate = Collate(dataset, collate_fn, key)

    def __getitem__(self, request: Request) -> Any:
        """Return the batch of a request, on the host."""
        if self._tensors is not None:
            return tuple(tensor.index_select(0, request.indices) for tensor in self._tensors)
        self.probe.begin()
        if not self.draws:
            batch = self._read(request)
            if not self.probe.end():
                return batch
            self.draws = True
            batch = self._read_seeded(request)
        else:
            batch = self._read_seeded(request)
            self.probe.end()
        self.probe.rewind()
        return batch

    def pass_over(self) -> None:
        """Move the training's generators on as if a batch had been read in this process."""
        if self._tensors is None:
            self.probe.begin()
            self.probe.end()

    def _read(self, request: Request) -> Any:
        indices = request.indices.tolist()
        if self._getitems is None:
            return self._collate(self._samples(request, seeded=False), indices)
        try:
            samples = self._getitems(indices)
        except FAULTS as error:
            raise_told(error, self._failing(indices), self.key)
        self._makes_batches = not isinstance(samples, list)
        if samples is None:
            kind = type(self.dataset).__name__
            raise UsageError(
                f"{self.key}: {kind}.__getitems__ returned None for samples {listed(indices)}; it "
                "must return the list of samples, or the batch"
            )
        return samples if self._makes_batches else self._collate(samples, indices)

    def _read_seeded(self, request: Request) -> Any:
        if self._makes_batches:
            rng.seed_host(rng.mix(self.seed, _SAMPLE_STREAM, request.epoch, request.position))
            return self._read(request)
        samples = self._samples(request, seeded=True)
        rng.seed_host(rng.mix(self.seed, _SAMPLE_STREAM, request.epoch, request.position, 1))
        return self._collate(samples, request.indices.tolist())

    def _samples(self, request: Request, *, seeded: bool) -> list[Any]:
        samples: list[Any] = []
        index = 0
        try:
            for place, index in enumerate(request.indices.tolist(), start=request.position):
                if seeded:
                    rng.seed_host(rng.mix(self.seed, _SAMPLE_STREAM, request.epoch, place))
                samples.append(self.dataset[index])
        except FAULTS as error:
            raise_told(error, f"sample {index}", self.key)
        return samples

    def _failing(self, indices: list[int]) -> str:
        """Return which of the samples cannot be read alone either; all, where each can."""
        assert self._getitems is not None, "it has just failed"
        with rng.preserved():
            for index in indices:
                try:
                    self._getitems([index])
                except FAULTS:
                    return f"sample {index}"
        return f"samples {listed(indices)}"


class InWorkers:
    """A fetcher as worker processes use it: what is raised there comes in the place of a batch."""

    def __init__(self, fetcher: Fetcher) -> None:
        self._fetcher = fetcher

    def __getitem__(self, request: Request) -> Any:
        """Return the batch of a request, or what was raised over it."""
        try:
            return require_sendable(self._fetcher[request], self._fetcher.key)
        except Exception as error:
            info = get_worker_info()
            return Raised.of(error, f"data worker {info.id if info else 0}")


def identity(batch: Any) -> Any:
    """Return the batch as it is: a worker has collated it already."""
    return batch
