"""An iterable data set read by worker processes: each sample once, whoever deals them out."""

from __future__ import annotations

import random
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from torch.utils.data import ChainDataset, IterableDataset, get_worker_info

from ampctl.data.dealt import Fingerprint
from ampctl.data.loader import MapData
from ampctl.data.order import Order, deal
from ampctl.data.stream import StreamData
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.errors import UsageError
from ampctl.recipe.own_code import as_text

pytestmark = pytest.mark.filterwarnings("ignore:This DataLoader will create")
SIZE = 23


class Whole(IterableDataset[Any]):
    """Knows nothing of workers; shuffles and draws by all three global generators."""

    def __init__(self, size: int = SIZE) -> None:
        self.size = size

    def __iter__(self) -> Iterator[Any]:
        order = torch.randperm(self.size).tolist()
        random.shuffle(order)
        for i in np.random.permutation(order).tolist():
            yield torch.randn(2), i


class Interleaved(Whole):
    """Splits itself as most do: every n-th sample; shuffled before."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        first, step = (info.id, info.num_workers) if info else (0, 1)
        for i in islice(torch.randperm(self.size).tolist(), first, None, step):
            yield torch.randn(2), i


class Contiguous(Whole):
    """Splits itself as the documentation of torch has it, in parts of other lengths."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        low, high = 0, self.size
        if info is not None:
            share = -(-self.size // info.num_workers)
            low = info.id * share
            high = min(low + share, self.size)
        for i in range(low, high):
            yield torch.randn(2), i


class Within(Whole):
    """One that splits itself, inside one that knows nothing of it."""

    def __iter__(self) -> Iterator[Any]:
        yield from Interleaved(self.size)


class CountsWorkers(Whole):
    """Looks how many workers there are, and at their seed, to no end."""

    def __iter__(self) -> Iterator[Any]:
        info = get_worker_info()
        assert info is None or (info.num_workers and isinstance(info.dataset, CountsWorkers))
        order = list(range(self.size))
        random.Random(info.seed if info else 0).shuffle(order)
        for i in order:
            yield torch.zeros(2), i


class Restless(Whole):
    """Another order whenever it is read, on which nothing that ampctl seeds has an influence."""

    def __iter__(self) -> Iterator[Any]:
        for i in np.random.default_rng().permutation(10_000).tolist():
            yield torch.zeros(2), i


class Asks(Whole):
    """Reads of its worker info what it is told, and splits nothing; ``late``: after a sample."""

    def __init__(self, names: str, *, late: bool = False) -> None:
        super().__init__()
        self.names = names.split()
        self.late = late

    def __iter__(self) -> Iterator[Any]:
        for i in range(self.size):
            if i == (5 if self.late else 0):
                for name in self.names:
                    getattr(get_worker_info(), name)
            yield torch.zeros(2), i


class Ends(Whole):
    def __iter__(self) -> Iterator[Any]:
        yield from zip(torch.zeros(7, 2), range(7), strict=True)
        raise KeyError("no such column")


def stream(dataset: IterableDataset[Any], workers: int, ranks: Ranks = ALONE) -> StreamData:
    return StreamData(
        dataset, batch_size=6, micro_batch_size=4, seed=5, num_workers=workers, ranks=ranks
    )


def steps(data: StreamData, epoch: int = 0, first: int = 0) -> list[list[Any]]:
    """The samples of each step, noise and number."""
    try:
        return [
            [
                (tuple(x), y)
                for batch in window
                for x, y in zip(batch[0].tolist(), batch[1].tolist(), strict=True)
            ]
            for window, _ in data.windows(epoch, first)
        ]
    finally:
        data.close()


def numbers(found: list[list[Any]]) -> list[int]:
    return [y for step in found for _, y in step]


def mixed() -> IterableDataset[Any]:
    """Return a chain of data sets that split themselves and others, in both orders."""
    return Whole(3) + (Interleaved(5) + Contiguous(2)) + Whole(1) + ChainDataset([Within(6)])


@pytest.mark.parametrize("workers", range(5))
@pytest.mark.parametrize("kind", [Whole, Interleaved, Contiguous, Within, mixed])
def test_a5_each_sample_comes_once_an_epoch_and_in_the_same_order_after_a_resume(
    kind: Any, workers: int
) -> None:
    expected = sorted(numbers(steps(stream(kind(), 0))))
    whole = steps(stream(kind(), workers))
    assert sorted(numbers(whole)) == expected
    assert all(len(step) == 6 for step in whole[:-1])
    stop = len(whole) // 2
    assert steps(stream(kind(), workers), first=stop) == whole[stop:]


@pytest.mark.parametrize("workers", [1, 2, 4])
@pytest.mark.parametrize("kind", [Whole, lambda: Whole(9) + Whole(5), lambda: Whole(2)])
def test_a5_what_is_dealt_out_comes_in_the_order_of_one_process_noise_and_all(
    kind: Any, workers: int
) -> None:
    for epoch in (0, 1):
        assert steps(stream(kind(), workers), epoch) == steps(stream(kind(), 0), epoch)
    assert steps(stream(kind(), workers), 0) != steps(stream(kind(), workers), 1)


def test_a5_a_data_set_that_does_not_ask_which_worker_it_is_in_is_dealt_out() -> None:
    found = numbers(steps(stream(CountsWorkers(), 3)))
    assert sorted(found) == list(range(SIZE))


def test_a5_an_endless_stream_is_dealt_out() -> None:
    class Endless(IterableDataset[Any]):
        def __iter__(self) -> Iterator[Any]:
            i = 0
            while True:
                yield torch.zeros(2), i
                i += 1

    data = stream(Endless(), 2)
    found = [batch[1].tolist() for window, _ in islice(data.windows(0, 0), 3) for batch in window]
    data.close()
    assert [i for part in found for i in part] == list(range(18))


@pytest.mark.parametrize(
    ("dataset", "said"),
    [
        (Asks("id"), "it reads id alone"),
        (Asks("id num_workers"), "each sample would come 2 times"),
        (Asks("id num_workers", late=True), "only after its first sample"),
        (Restless(), "gives other samples in some of the 2 data workers"),
    ],
    ids=["id", "both", "late", "restless"],
)
def test_a5_what_would_lose_or_double_samples_is_refused(dataset: Whole, said: str) -> None:
    with pytest.raises(UsageError, match=said) as found:
        steps(stream(dataset, 2))
    assert "data.num_workers=1" in f"{found.value}"
    if isinstance(dataset, Asks):
        assert numbers(steps(stream(dataset, 1))) == list(range(SIZE))


def test_a5_ranks_and_workers_together_count_each_sample_once() -> None:
    """Each rank reads with workers of its own, and takes its part of what they give."""

    class Apart(Ranks):
        def gather(self, value: Any) -> list[Any]:
            return [value]

    for size in (2, 3):
        for kind in (Whole, Interleaved):
            every = [
                steps(stream(kind(), 2, Apart(rank=rank, size=size)), 0) for rank in range(size)
            ]
            alone = steps(stream(kind(), 2))
            for place, step in enumerate(alone):
                parts = [part for rank in every for part in rank[place]]
                assert set(parts) == set(step)
                is_padding = sum(b for r in range(size) for _, _, b in deal(len(step), 4, r, size))
                assert len(parts) == len(step) + is_padding


@pytest.mark.parametrize("workers", [0, 1, 2])
def test_a_fault_of_a_stream_names_its_line_and_its_worker(workers: int) -> None:
    with pytest.raises(KeyError, match="no such column") as found:
        steps(stream(Ends(), workers))
    text = as_text(found.value)
    assert 'raise KeyError("no such column")' in text
    assert "in __iter__" in text
    assert ("in data worker" in text) == (workers > 0)
    assert workers == 0 or "torch/utils/data" not in text


@pytest.mark.parametrize("workers", [0, 1])
def test_a_fault_of_a_data_set_names_its_line_and_its_sample(workers: int) -> None:
    class Broken:
        def __len__(self) -> int:
            return 9

        def __getitem__(self, index: int) -> Any:
            if index == 7:
                raise StopIteration("stop") if workers else KeyError("no such column")
            return torch.zeros(2)

    data = MapData(Broken(), Order(9, 3, 3, seed=0), num_workers=workers)
    with pytest.raises((KeyError, RuntimeError)) as found:
        list(data.windows(0, 0))
    data.close()
    text = as_text(found.value)
    assert "in __getitem__" in text
    assert "reading sample 7 of data.train" in text


def test_a_fingerprint_tells_samples_apart_and_whether_it_saw_all_of_them() -> None:
    same = Fingerprint.of([(torch.ones(2), {"y": np.ones(2)}, "a", None)])
    assert same == Fingerprint.of([(torch.ones(2), {"y": np.ones(2)}, "a", None)])
    assert same.whole
    assert same != Fingerprint.of([(torch.ones(2), {"y": np.zeros(2)}, "a", None)])
    assert not Fingerprint.of([object()]).whole
    assert not Fingerprint.of([np.array([None])]).whole
    assert not Fingerprint.of([]).whole
