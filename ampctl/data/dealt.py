"""A stream that several data workers read: each of its samples comes from one of them.

A data set that splits itself among the workers by ``torch.utils.data.get_worker_info()`` is left to
do so. Any other one is read whole by each worker, which passes on every n-th sample, so that the
samples come in the data set's own order. Which of the two it is follows from what the data set asks
of its worker info; what the first samples of the workers show must agree with it.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator, Mapping, Sequence, Set
from dataclasses import dataclass
from itertools import chain, islice
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from ampctl import rng
from ampctl.data.faults import FAULTS, raise_told
from ampctl.data.workers import Raised, require_sendable
from ampctl.errors import UsageError, first_of

_WAYS = (
    "A data set that gives each worker a part of its own reads id and num_workers of "
    "torch.utils.data.get_worker_info() in __iter__, before its first sample; one that reads "
    "neither is dealt out by ampctl. data.num_workers=1 needs neither"
)


@dataclass(frozen=True)
class Opening:
    """What a worker says before the samples of a data set, or of one ``part`` of a chain.

    ``asked``: what the data set has read of its worker info. ``shown``: of its first samples.
    """

    part: int
    asked: frozenset[str]
    shown: Fingerprint

    @property
    def splits(self) -> bool:
        """Whether the data set gives this worker a part of its own."""
        return {"id", "num_workers"} <= self.asked


@dataclass(frozen=True)
class Fingerprint:
    """A digest of the numbers and texts in samples; not ``whole`` if they hold other things."""

    digest: str
    whole: bool

    @classmethod
    def of(cls, samples: Sequence[Any]) -> Fingerprint:
        """Take it of samples; of none it is not whole."""
        digest, others = hashlib.sha256(), not samples

        def take(value: Any) -> None:
            nonlocal others
            if isinstance(value, Tensor):
                data = value.detach().reshape(-1).contiguous().view(torch.uint8)
                digest.update(data.numpy().data)
            elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
                digest.update(np.ascontiguousarray(value).tobytes())
            elif isinstance(value, str | bytes | int | float | np.generic):
                digest.update(f"{value!r}".encode())
            elif isinstance(value, Mapping):
                take(list(value.values()))
            elif isinstance(value, list | tuple):
                for part in value:
                    take(part)
            elif value is not None:
                others = True

        take(list(samples))
        return cls(digest.hexdigest(), not others)


class Dealt(IterableDataset[Any]):
    """A data set as its workers read it: :class:`Opening` and samples; :class:`Raised` at a fault.

    All workers draw the same from the global generators, and find the same ``seed`` in their worker
    info, so that a data set that shuffles gives them one order.
    """

    def __init__(self, dataset: IterableDataset[Any], seed: int) -> None:
        self.dataset = dataset
        self.seed = seed

    def __iter__(self) -> Iterator[Any]:
        """Yield this worker's part, in a worker process alone."""
        info = get_worker_info()
        assert info is not None, "it is opened in a worker"
        worker, num_workers = info.id, info.num_workers
        # Past the class, which is read-only: torch gives each worker another seed.
        object.__setattr__(info, "seed", self.seed % 2**63)
        object.__setattr__(info, "dataset", self.dataset)
        asked = _listening(info)
        rng.seed_host(self.seed)
        try:
            yield from self._part(worker, num_workers, asked)
        except Exception as error:
            yield Raised.of(error, f"data worker {worker}")

    def _part(self, worker: int, num_workers: int, asked: set[str]) -> Iterator[Any]:
        place, split = 0, False
        try:
            for number, part in enumerate(_parts(self.dataset)):
                if split:  # the workers have drawn as often as their parts are long
                    rng.seed_host(rng.mix(self.seed, number))
                asked.clear()
                samples = iter(part)
                first = list(islice(samples, 1))
                said = frozenset(asked)
                split = {"id", "num_workers"} <= said
                first += islice(samples, num_workers - 1)
                if num_workers > 1:
                    _require_nothing_late(asked - said)
                yield Opening(number, said, Fingerprint.of(first))
                for sample in chain(first, samples):
                    if num_workers > 1:
                        _require_nothing_late(asked - said)
                    if split or place % num_workers == worker:
                        yield require_sendable(sample, "data.train")
                    place += not split
        except FAULTS as error:
            raise_told(error, "a sample", "data.train")


class Openings:
    """What the workers have said so far; raises UsageError where it does not go together."""

    def __init__(self, num_workers: int) -> None:
        self._num_workers = num_workers
        self._said: dict[int, list[Opening]] = {}

    def take(self, said: Opening) -> None:
        """Take what one worker says; once all have said it of a part, compare."""
        every = self._said.setdefault(said.part, [])
        every.append(said)
        if len(every) == self._num_workers > 1:
            self._compare(every)

    def _compare(self, every: Sequence[Opening]) -> None:
        workers = f"the {self._num_workers} data workers"
        same = len({each.shown for each in every}) == 1
        if len({(each.splits, "id" in each.asked) for each in every}) > 1 or any(
            "id" in each.asked and not each.splits for each in every
        ):
            asked = sorted({*chain(*(each.asked for each in every))} & {"id", "num_workers"})
            raise UsageError(
                "data.train does not say whether it splits itself among "
                f"{workers}: of torch.utils.data.get_worker_info() it reads {first_of(asked)}"
                f"{' in some of them' if len(asked) > 1 else ' alone'}. {_WAYS}."
            )
        if every[0].splits and same and every[0].shown.whole:
            raise UsageError(
                "data.train reads id and num_workers of torch.utils.data.get_worker_info(), and "
                f"gives the same first samples in all of {workers}: each sample would come "
                f"{self._num_workers} times. What it draws itself must follow from the id too "
                "(the workers' generators are seeded alike). Or set data.num_workers=1."
            )
        if not every[0].splits and not same:
            raise UsageError(
                f"data.train gives other samples in some of {workers} than in others, and does not "
                "split itself among them: each must read the same, of which ampctl deals it a "
                "part. Shuffle by the global generators, which are seeded alike, or by a seed. "
                f"{_WAYS}."
            )


def _require_nothing_late(asked: Set[str]) -> None:
    """Raise UsageError if a data set asks only now which worker it is in."""
    if "id" in asked:
        raise UsageError(
            "data.train reads id of torch.utils.data.get_worker_info() only after its first "
            f"sample, when every data worker has read that already. {_WAYS}."
        )


def _parts(dataset: IterableDataset[Any]) -> Iterator[IterableDataset[Any]]:
    """Yield the data sets of a chain, of which each may split itself or not."""
    if type(dataset) is ChainDataset:
        for part in dataset.datasets:
            yield from _parts(part)  # type: ignore[arg-type]
    else:
        yield dataset


def _listening(info: Any) -> set[str]:
    """Return a set that gets the name of everything that is read of a worker info from now on."""
    asked: set[str] = set()
    kind: Any = type(info)

    class Listening(kind):  # type: ignore[misc]
        __slots__ = ()

        def __getattribute__(self, name: str) -> Any:
            asked.add(name)
            return super().__getattribute__(name)

    object.__setattr__(info, "__class__", Listening)
    return asked
