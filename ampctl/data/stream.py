"""Training data of an IterableDataset: an epoch lasts as long as its iterator."""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from typing import Any

import torch
from torch.utils.data import DataLoader, IterableDataset

from ampctl import rng
from ampctl.data.collate import Collate, Function
from ampctl.data.dealt import Dealt, Fingerprint, Opening, Openings
from ampctl.data.faults import FAULTS, raise_told
from ampctl.data.fetch import identity
from ampctl.data.loader import Padding, Window
from ampctl.data.order import deal
from ampctl.data.workers import (
    end_workers,
    next_batch,
    require_reasonable,
    start_worker,
    start_workers,
)
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.errors import UsageError

_STREAM = 3


class StreamData:
    """Deal the samples of an IterableDataset to optimizer steps, in the order they come.

    Every rank reads all of them and takes its part; for its workers see ``dealt``.

    What the dataset draws from the global generators comes from a stream of its own, a function
    of (seed, epoch), so that it never mixes with the training's. To go on in the middle of an
    epoch, the dataset's ``state_dict`` and ``load_state_dict`` are used if it has them and no
    workers read it; else the samples already seen are read again and dropped.
    """

    steps_per_epoch: int | None = None

    def __init__(
        self,
        dataset: IterableDataset[Any],
        *,
        batch_size: int,
        micro_batch_size: int,
        seed: int,
        drop_last: bool = False,
        num_workers: int = 0,
        ranks: Ranks = ALONE,
        collate_fn: Function | None = None,
    ) -> None:
        require_reasonable(num_workers)
        self._ranks = ranks
        self.dataset = dataset
        self._batch_size = batch_size
        self._micro_batch_size = micro_batch_size
        self._seed = seed
        self._drop_last = drop_last
        self._num_workers = num_workers
        self._collate = Collate(dataset, collate_fn, "data.train")
        self.keeps_state = (
            hasattr(dataset, "state_dict")
            and hasattr(dataset, "load_state_dict")
            and not num_workers
        )
        self._generators: dict[str, Any] | None = None
        self._ended = False
        self._restored = False
        self._workers: Any = None
        self._openings = Openings(num_workers)
        self._is_compared = False
        self._before: dict[str, Any] | None = None
        self._is_begun = False
        self._probe = rng.DrawProbe()  # which follows nothing: a stream has its own generators

    @property
    def probe(self) -> rng.DrawProbe:
        """What follows the generators of Python and NumPy while data is read."""
        return self._probe

    def windows(self, epoch: int, first_step: int) -> Iterator[tuple[Window, int]]:
        """Yield each step's micro-batches and its samples, from ``first_step`` of the epoch on."""
        skipped = 0 if self._restored else first_step
        # Saved between two epochs: a dataset that goes on where it was may be at its end.
        at_an_end = self._restored and self._generators is None
        if not self._restored:
            self._generators = None
        self._restored = False
        if self._ended and first_step:
            self._ended = False
            return  # saved after the epoch's last step: the dataset has begun anew already
        size, ranks = self._micro_batch_size, self._ranks
        for step, samples in enumerate(self._batches(epoch, at_an_end=at_an_end)):
            self._require_the_same(samples)
            if step < skipped or (self._drop_last and len(samples) < self._batch_size):
                continue
            begin = (step + first_step - skipped) * self._batch_size
            batches, places = [], []
            for low, high, is_padding in deal(len(samples), size, ranks.rank, ranks.size):
                batch = self._collate(samples[low:high], range(begin + low, begin + high))
                batches.append(Padding(batch) if is_padding else batch)
                places.append(range(begin + low, begin + high))
            yield Window(batches, places, in_order=self._collate.keeps_order), len(samples)

    def _require_the_same(self, samples: list[Any]) -> None:
        """Raise UsageError if other ranks read other samples, in the first step that is read."""
        if self._is_compared or self._ranks.size == 1:
            return
        self._is_compared = True
        every = self._ranks.gather(Fingerprint.of(samples).digest)
        other = next((rank for rank, each in enumerate(every) if each != every[0]), None)
        if other is not None:
            raise UsageError(
                f"data.train gives other samples on rank {other} than on rank 0. Every rank must "
                "read the same ones, of which ampctl deals it its part: do not split the data set "
                "by rank, and shuffle by the global generators (they are seeded alike) or a seed."
            )

    def _batches(self, epoch: int, *, at_an_end: bool) -> Iterator[list[Any]]:
        """Yield the samples of each step, drawn with the stream's generators in place.

        ``at_an_end``: the first iterator may be at its end already, and another one is then begun.
        """
        samples: Iterator[Any] | None = None
        ended = False
        while not ended:
            batch: list[Any] = []
            # Before its first sample a data set need not know where it stands.
            self._before = self._state() if self._is_begun else {}
            with rng.preserved():
                if self._generators is None:
                    rng.seed_host(rng.mix(self._seed, _STREAM, epoch))
                else:
                    rng.set_state(self._generators)
                if samples is None:
                    samples = self._open(epoch)
                while len(batch) < self._batch_size and not ended:
                    try:
                        batch.append(self._next(samples))
                    except StopIteration:
                        ended = not at_an_end
                        if at_an_end:
                            samples = self._open(epoch)
                    at_an_end = False
                self._generators = rng.get_state()
            self._ended, self._is_begun = ended, True
            self._before = None
            if batch:
                yield batch
        self._generators = None
        self._ended = False

    def _next(self, samples: Iterator[Any]) -> Any:
        if not self._num_workers:
            try:
                return next(samples)
            except StopIteration:
                raise
            except FAULTS as error:
                raise_told(error, "a sample", "data.train")
        while True:
            sample = next_batch(samples, lambda *_: "its part of the stream")
            if not isinstance(sample, Opening):
                return sample
            self._openings.take(sample)

    def _open(self, epoch: int) -> Iterator[Any]:
        if not self._num_workers:
            try:
                return iter(self.dataset)
            except FAULTS as error:
                raise_told(error, "a sample", "data.train")
        seed = rng.mix(self._seed, _STREAM, epoch)
        loader = DataLoader(
            Dealt(self.dataset, seed),
            batch_size=None,
            num_workers=self._num_workers,
            collate_fn=identity,
            worker_init_fn=start_worker,
            generator=torch.Generator().manual_seed(seed),
        )
        self._openings = Openings(self._num_workers)
        workers: Iterator[Any] = start_workers(loader)
        self._workers = workers
        return workers

    def state_dict(self) -> dict[str, Any]:
        """Return the dataset's own state and its generators', if they can be taken here.

        While samples are read, another thread gets what they were before that.
        """
        return self._state() if self._before is None else self._before

    def _state(self) -> dict[str, Any]:
        if not self.keeps_state:
            return {}
        return {
            "dataset": self.dataset.state_dict(),  # type: ignore[attr-defined]
            "rng": self._generators,
            "ended": self._ended,
        }

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore the dataset's own state, so that nothing needs to be read again."""
        if self.keeps_state and "dataset" in state:
            self.dataset.load_state_dict(state["dataset"])  # type: ignore[attr-defined]
            self._generators = state["rng"]
            self._ended = bool(state["ended"])
            self._restored = self._is_begun = True

    def close(self) -> None:
        """End worker processes."""
        if self._workers is not None:
            end_workers(self._workers)
            self._workers = None
