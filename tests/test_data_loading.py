"""Which samples form which step, and how they are read: the same for ranks, workers and stops."""

from __future__ import annotations

import os
import random
import signal
import time
from collections.abc import Iterator
from itertools import islice
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st
from own_parts import Augmented, StatefulStream, Stream
from test_resume_exact import assert_same
from torch import Tensor
from torch.utils.data import Dataset, IterableDataset, TensorDataset, default_collate

from ampctl import rng
from ampctl.data.fetch import Fetcher
from ampctl.data.loader import EvalData, MapData
from ampctl.data.order import Order, Request
from ampctl.data.stream import StreamData
from ampctl.data.workers import WorkerError
from ampctl.errors import UsageError

# ---------------------------------------------------------------- order

orders = st.fixed_dictionaries(
    {
        "num_samples": st.integers(1, 70),
        "batch_size": st.integers(1, 20),
        "micro_batch_size": st.integers(1, 24),
        "seed": st.integers(0, 2**63 - 1),
        "shuffle": st.booleans(),
        "drop_last": st.booleans(),
    }
)


def steps(order: Order, epoch: int, first_step: int = 0) -> list[list[int]]:
    """The samples of each step on this rank, in the order they are read."""
    return [
        [i for request in window for i in request.indices.tolist()]
        for window in order.windows(epoch, first_step)
    ]


@given(orders, st.integers(1, 5), st.integers(0, 5))
@example(
    {
        "num_samples": 7,
        "batch_size": 7,
        "micro_batch_size": 2,
        "seed": 0,
        "shuffle": True,
        "drop_last": False,
    },
    3,
    1,
)
def test_dl4_every_sample_once_an_epoch_in_the_same_steps_for_any_split(
    arguments: dict[str, Any], world_size: int, epoch: int
) -> None:
    whole = Order(**{**arguments, "micro_batch_size": arguments["batch_size"]})
    expected = steps(whole, epoch)
    seen = [index for step in expected for index in step]
    kept = len(expected) * whole.batch_size if whole.drop_last else whole.num_samples
    assert len(expected) == whole.steps_per_epoch
    assert sorted(set(seen)) == sorted(seen)
    assert len(seen) == kept
    assert [whole.samples_of_step(i) for i in range(len(expected))] == [len(s) for s in expected]

    ranks = [Order(**arguments, rank=r, world_size=world_size) for r in range(world_size)]
    for place, windows in enumerate(zip(*(order.windows(epoch) for order in ranks), strict=True)):
        requests = [request for window in windows for request in window]
        assert len({len(window) for window in windows}) == 1  # as many forward passes on each rank
        assert all(len(request.indices) <= arguments["micro_batch_size"] for request in requests)
        own = [request for request in requests if not request.is_padding]
        indices = [index for request in own for index in request.indices.tolist()]
        assert sorted(indices) == sorted(expected[place])
        order = whole.permutation(epoch)
        for (
            request
        ) in requests:  # a sample's place in the epoch, which its augmentation is drawn by
            low, count = request.position, len(request.indices)
            assert torch.equal(request.indices, order[low : low + count])
        for run in zip(*windows, strict=True):  # no rank has more than one sample more than another
            sizes = [0 if request.is_padding else len(request.indices) for request in run]
            assert all(len(request.indices) == 1 for request in run if request.is_padding)
            assert max(sizes) - min(sizes) <= 1


@given(orders, st.integers(0, 3), st.data())
def test_rs7_starting_at_any_step_gives_the_rest_of_the_epoch(
    arguments: dict[str, Any], epoch: int, data: st.DataObject
) -> None:
    order = Order(**arguments)
    first = data.draw(st.integers(0, order.steps_per_epoch))
    assert steps(order, epoch, first) == steps(order, epoch)[first:]


def test_dl4_each_epoch_and_each_seed_has_an_order_of_its_own() -> None:
    def order(seed: int, epoch: int, **options: Any) -> tuple[int, ...]:
        return tuple(Order(40, 8, 8, seed, **options).permutation(epoch).tolist())

    found = {order(seed, epoch) for seed in range(4) for epoch in range(4)}
    assert len(found) == 16
    assert order(0, 0, shuffle=False) == order(1, 3, shuffle=False) == tuple(range(40))
    state = torch.get_rng_state()
    assert order(2, 3) in found
    assert torch.equal(torch.get_rng_state(), state)


# ---------------------------------------------------------------- reading


class Plain(Dataset[tuple[Tensor, int]]):
    def __init__(self, size: int = 22) -> None:
        self.x = torch.arange(size * 3.0).view(size, 3)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> Any:
        return self.x[index], index


class ListOfItems(Plain):
    """`__getitems__` as torch has it: a list of samples, still to be collated."""

    def __getitems__(self, indices: list[int]) -> list[Any]:
        return [super(ListOfItems, self).__getitem__(index) for index in indices]

    def __getitem__(self, index: int) -> Any:
        raise AssertionError("asked item by item")


class WholeBatch(ListOfItems):
    """One that gives the batch itself."""

    def __getitems__(self, indices: list[int]) -> Any:
        return self.x[indices], torch.tensor(indices)


class OwnCollate(Plain):
    def collate_fn(self, samples: list[Any]) -> dict[str, Any]:
        return {"x": torch.stack([x for x, _ in samples]), "names": [f"n{i}" for _, i in samples]}


class SometimesDraws(Plain):
    """Draws for some of the samples only, from one generator; the first batch need not draw."""

    def __init__(self, source: str, size: int = 22) -> None:
        super().__init__(size)
        self.source = source

    def __getitem__(self, index: int) -> Any:
        x = self.x[index]
        if index % 11 == 7:
            x = (
                x
                + {
                    "torch": lambda: torch.randn(3),
                    "numpy": lambda: float(np.random.rand()),
                    "numpy-normal": lambda: float(np.random.randn()),
                    "python": lambda: random.gauss(0, 1),
                }[self.source]()
            )
        return x, index


def request(*indices: int, position: int = 0, epoch: int = 0) -> Request:
    return Request(epoch, position, torch.tensor(indices))


def epoch_of(
    dataset: Any,
    *,
    workers: int = 0,
    micro: int = 6,
    epoch: int = 1,
    states: list[Any] | None = None,
) -> list[Any]:
    """The samples of each step, joined over micro-batches.

    ``states`` takes the state of every generator at the moment that a step gets its batches.
    """
    data = MapData(dataset, Order(len(dataset), 6, micro, seed=5), num_workers=workers)
    try:
        joined = []
        for window, samples in data.windows(epoch, 0):
            assert sum(len(batch[1]) for batch in window) == samples
            if states is not None:
                states.append(rng.get_state())
            joined.append([torch.cat(parts) for parts in zip(*window, strict=True)])
        return joined
    finally:
        data.close()


@pytest.mark.parametrize("kind", [Plain, ListOfItems, WholeBatch])
def test_a_batch_is_the_same_however_the_data_set_gives_it(kind: type[Plain]) -> None:
    batch = Fetcher(kind(), seed=0)[request(4, 0, 9)]
    assert isinstance(batch, tuple | list)
    assert_same(list(batch), list(default_collate([Plain()[i] for i in (4, 0, 9)])))


@given(st.lists(st.integers(0, 21), min_size=1, max_size=9))
def test_the_gather_of_a_tensor_data_set_equals_item_by_item(indices: list[int]) -> None:
    plain = Plain()
    tensors = TensorDataset(plain.x, torch.arange(22), torch.randn(22, 2, 3).transpose(1, 2))
    batch = Fetcher(tensors, seed=0)[request(*indices)]
    assert_same(list(batch), list(default_collate([tensors[i] for i in indices])))


def test_a_subclass_of_tensor_data_set_is_asked_for_its_own_items() -> None:
    class Doubled(TensorDataset):
        def __getitem__(self, index: Any) -> Any:
            return tuple(2 * tensor for tensor in super().__getitem__(index))

    (x,) = Fetcher(Doubled(torch.arange(9.0)), seed=0)[request(3, 4)]
    assert x.tolist() == [6.0, 8.0]


def test_a_data_sets_own_collate_function_is_used() -> None:
    batch = Fetcher(OwnCollate(), seed=0)[request(2, 1)]
    assert batch["names"] == ["n2", "n1"]
    assert batch["x"].shape == (2, 3)


# ---------------------------------------------------------------- augmentation


@pytest.mark.parametrize("warm", [False, True])
@pytest.mark.parametrize("source", ["torch", "numpy", "numpy-normal", "python", "all"])
def test_dl2_augmentation_is_the_same_for_any_workers_and_micro_batches(
    source: str, warm: bool
) -> None:
    dataset = Augmented() if source == "all" else SometimesDraws(source)
    rng.seed_everything(3)
    expected = epoch_of(dataset)
    for micro in (6, 4, 1):
        states: dict[int, list[Any]] = {}
        for workers in (0, 1, 2):
            rng.seed_everything(7)
            if warm:  # half of a normal pair waits in each generator
                np.random.randn()
                random.gauss(0, 1)
                torch.randn(())
            before = torch.get_rng_state()
            found = epoch_of(
                dataset, workers=workers, micro=micro, states=states.setdefault(workers, [])
            )
            assert_same(found, expected)
            # torch's generator never moves; Python's and NumPy's move alike, drawn from or not.
            assert all(torch.equal(state.pop("torch"), before) for state in states[workers])
        assert_same([states[1], states[2]], [states[0], states[0]])
        assert len({state["python"] for state in states[0]}) == len(expected)
    again = epoch_of(dataset, epoch=2)
    assert not torch.equal(torch.cat([x for x, _ in again]), torch.cat([x for x, _ in expected]))


def test_dl2_no_two_samples_are_augmented_alike() -> None:
    class Draws(Plain):
        def __getitem__(self, index: int) -> Any:
            return torch.stack([torch.rand(()), torch.tensor(np.random.rand())]), index

    rows = [
        tuple(row)
        for workers in (0, 2)
        for epoch in (0, 1)
        for x, _ in epoch_of(Draws(), workers=workers, epoch=epoch)
        for row in x.tolist()
    ]
    assert len(rows) == 88
    assert len({torch_part for torch_part, _ in rows}) == 44
    assert len({numpy_part for _, numpy_part in rows}) == 44


def test_an_evaluation_draws_the_same_each_time() -> None:
    for workers in (0, 2):
        data = EvalData(Augmented(9), 4, seed=1, num_workers=workers, pin_memory=False)
        before = torch.get_rng_state()
        assert len(data) == 3
        first, second = list(data), list(data)
        data.close()
        assert_same(first, second)
        assert torch.equal(torch.get_rng_state(), before)
        assert torch.cat([y for _, y in first]).tolist() == Augmented(9).y


def test_a_pass_that_is_left_in_the_middle_does_not_disturb_the_next() -> None:
    for workers in (0, 2):
        data = MapData(Augmented(), Order(22, 6, 4, seed=5), num_workers=workers)
        expected = list(data.windows(0, 0))
        assert_same(list(islice(data.windows(0, 0), 2)), expected[:2])
        assert_same(list(data.windows(0, 1)), expected[1:])
        data.close()


# ---------------------------------------------------------------- faults


class Dies(Plain):
    def __getitem__(self, index: int) -> Any:
        if index == 5:
            time.sleep(0.3)  # the reader is waiting by now
            os.kill(os.getpid(), signal.SIGKILL)
        return super().__getitem__(index)


def dying() -> MapData:
    return MapData(Dies(), Order(22, 3, 3, seed=0, shuffle=False), num_workers=1)


@pytest.mark.parametrize("error", [EOFError, ConnectionResetError])
def test_dl1_a_connection_that_breaks_before_its_worker_is_dead_is_told_as_that(
    error: type[Exception], monkeypatch: pytest.MonkeyPatch
) -> None:
    """A batch that is on its way when the worker dies ends in such an error, now and then."""
    data = dying()
    windows = data.windows(0, 0)
    next(windows)
    loader = data._reader._loader
    assert loader is not None

    def broken() -> Any:
        raise error

    monkeypatch.setattr(loader._iterator, "_next_data", broken)
    with pytest.raises(WorkerError, match=r"SIGKILL.*3, 4, 5"):
        next(windows)
    data.close()


def test_a_fault_of_the_data_set_is_shown_as_it_is() -> None:
    class Broken(Plain):
        def __getitem__(self, index: int) -> Any:
            raise KeyError("no such column")

    for workers in (0, 1):
        data = MapData(Broken(), Order(22, 3, 3, seed=0), num_workers=workers)
        with pytest.raises(KeyError, match="no such column"):
            next(data.windows(0, 0))
        data.close()


# ---------------------------------------------------------------- streams


def stream(dataset: IterableDataset[Any], micro: int = 6, **options: Any) -> StreamData:
    return StreamData(dataset, batch_size=6, micro_batch_size=micro, seed=5, **options)


def joined(windows: Iterator[tuple[list[Any], int]]) -> list[Any]:
    found = []
    for window, samples in windows:
        parts = [torch.cat(parts) for parts in zip(*window, strict=True)]
        assert len(parts[1]) == samples
        found.append(parts)
    return found


@pytest.mark.parametrize("micro", [1, 4, 6, 9])
def test_a_stream_gives_its_samples_once_in_their_order(micro: int) -> None:
    before = rng.get_state()
    windows = list(stream(Stream(), micro).windows(0, 0))
    assert [samples for _, samples in windows] == [6, 6, 6, 4]
    assert all(len(batch[1]) <= micro for window, _ in windows for batch in window)
    whole = joined(iter(windows))
    assert torch.cat([y for _, y in whole]).tolist() == [i % 4 for i in range(22)]
    assert_same(whole, joined(stream(Stream()).windows(0, 0)))
    assert_same(rng.get_state(), before)
    dropped = stream(Stream(), micro, drop_last=True)
    assert [samples for _, samples in dropped.windows(0, 0)] == [6, 6, 6]


def test_what_the_training_draws_between_steps_does_not_reach_the_stream() -> None:
    expected = joined(stream(Stream()).windows(0, 0))
    found = []
    for window, samples in stream(Stream()).windows(0, 0):
        found += joined(iter([(window, samples)]))
        rng.seed_host(len(found))
    assert_same(found, expected)


@pytest.mark.parametrize("kind", [Stream, StatefulStream])
def test_a_stream_goes_on_where_it_was(kind: type[Stream]) -> None:
    whole = stream(kind())
    expected = [joined(whole.windows(epoch, 0)) for epoch in (0, 1)]
    assert not torch.equal(expected[0][0][0], expected[1][0][0])  # another epoch draws otherwise
    for stop in range(1, 4):
        first = stream(kind())
        windows = first.windows(0, 0)
        begun = joined(islice(windows, stop))
        state = first.state_dict()
        second = stream(kind())
        second.load_state_dict(state)
        assert_same([*begun, *joined(second.windows(0, stop))], expected[0])
        assert_same(joined(second.windows(1, 0)), expected[1])


def test_a_stateful_stream_is_not_read_again() -> None:
    first = stream(StatefulStream())
    joined(islice(first.windows(0, 0), 2))
    dataset = StatefulStream()
    second = stream(dataset)
    second.load_state_dict(first.state_dict())
    next(second.windows(0, 2))
    assert dataset.position == 18


@pytest.mark.filterwarnings("ignore:This DataLoader will create")
@pytest.mark.parametrize("workers", [100_000, 10**4000], ids=["many", "endless"])
def test_more_workers_than_a_machine_can_bear_are_not_started(workers: int) -> None:
    order = Order(22, 6, 4, seed=5)
    for make in (
        lambda n: MapData(Augmented(), order, num_workers=n),
        lambda n: EvalData(Augmented(9), 4, seed=1, num_workers=n, pin_memory=False),
        lambda n: stream(Stream(), num_workers=n),
    ):
        make(64)
        with pytest.raises(UsageError, match=r"data\.num_workers is 1.* cores can be used"):
            make(workers)


def test_an_empty_stream_has_no_steps() -> None:
    assert list(stream(Stream(0)).windows(0, 0)) == []


def test_a_stream_with_workers_leaves_the_trainings_generators_alone() -> None:
    before = rng.get_state()
    first = joined(stream(Stream(), num_workers=1).windows(0, 0))
    assert_same(rng.get_state(), before)
    assert_same(joined(stream(Stream(), num_workers=1).windows(0, 0)), first)
    assert torch.cat([y for _, y in first]).tolist() == [i % 4 for i in range(22)]
