"""Feeding the loop: the windows of micro-batches of an epoch, from any step on, with or without
worker processes; and the batches of an evaluation. Order is ``order``'s, reading is ``fetch``'s,
the processes are ``workers``', iterable datasets are ``stream``'s.
"""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from itertools import chain
from typing import Any, Protocol

import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ampctl import rng, torch_private
from ampctl.data.collate import Function, difference
from ampctl.data.fetch import Fetcher, InWorkers, identity
from ampctl.data.order import Order, Request
from ampctl.data.workers import (
    end_workers,
    next_batch,
    require_reasonable,
    start_worker,
    start_workers,
)
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.rng import DrawProbe

INDICES_SHOWN = 64


class Window(list[Any]):
    """The micro-batches of one optimizer step, on the host.

    ``samples`` has for each the indices of its samples in the data set, or their places in a
    stream, in order. ``in_order``: the rows of a batch are these; a data set's own ``collate_fn``
    may sort or drop some.
    """

    def __init__(
        self, batches: Iterable[Any], samples: Sequence[Sequence[int] | Tensor], *, in_order: bool
    ) -> None:
        super().__init__(batches)
        self.samples = samples
        self.in_order = in_order


@dataclass(frozen=True)
class Padding:
    """A micro-batch that another rank counts: where there are fewer samples than ranks.

    It is run, so that all ranks take the same passes, and weighs nothing.
    """

    batch: Any


def unwrapped(window: Sequence[Any]) -> list[Any]:
    """Return the micro-batches themselves, those that are padding too."""
    batches = [each.batch if isinstance(each, Padding) else each for each in window]
    if isinstance(window, Window):
        return Window(batches, window.samples, in_order=window.in_order)
    return batches


class TrainData(Protocol):
    """What the loop asks of training data."""

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch; None if only its end tells."""

    def windows(self, epoch: int, first_step: int) -> Iterator[tuple[Window, int]]:
        """Yield each step's micro-batches and its samples over all ranks."""

    @property
    def probe(self) -> DrawProbe:
        """What follows the generators of Python and NumPy while data is read."""

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the data, as the last step that was given left it."""

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""

    def close(self) -> None:
        """End worker processes."""


class MapData:
    """Training data of a map-style dataset."""

    def __init__(
        self,
        dataset: Any,
        order: Order,
        *,
        num_workers: int = 0,
        pin_memory: bool = False,
        collate_fn: Function | None = None,
    ) -> None:
        self.dataset = dataset
        self.order = order
        self._in_order = (collate_fn or getattr(dataset, "collate_fn", None)) is None
        self._fetcher = Fetcher(dataset, order.seed, collate_fn)
        self._reader = _Reader(self._fetcher, num_workers=num_workers, pin_memory=pin_memory)

    @property
    def probe(self) -> DrawProbe:
        """What follows the generators of Python and NumPy while data is read."""
        return self._reader.probe

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch."""
        return self.order.steps_per_epoch

    def windows(self, epoch: int, first_step: int) -> Iterator[tuple[Window, int]]:
        """Yield each step's micro-batches and its samples over all ranks."""
        asked: deque[list[Request]] = deque()

        def requests() -> Iterator[list[Request]]:
            for window in self.order.windows(epoch, first_step):
                asked.append(window)
                yield window

        batches = self._reader.read(chain.from_iterable(requests()))
        for step in range(first_step, self.order.steps_per_epoch):
            first = next(batches)
            parts = asked.popleft()
            more = (next(batches) for _ in parts[1:])
            samples = [part.indices for part in parts]
            window = Window((first, *more), samples, in_order=self._in_order)
            yield window, self.order.samples_of_step(step)

    def alone(self) -> Any:
        """Return a micro-batch of one sample, read in this process."""
        request = Request(0, 0, self.order.permutation(0)[:1])
        return self._fetcher[request]

    def difference(self, window: Window) -> str:
        """Return in words where a step's samples, read anew, first differ in form; "" if nowhere.

        torch makes a batch of some that do: of float32 and float64, say.
        """
        indices = [index for part in window.samples for index in torch.as_tensor(part).tolist()]
        with rng.preserved():
            return difference([self.dataset[index] for index in indices], indices)

    def state_dict(self) -> dict[str, Any]:
        """Return the length: the order follows from it, the seed and the progress."""
        return {"num_samples": self.order.num_samples}

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Nothing moves; that the length is still the same is checked when a run is resumed."""

    def close(self) -> None:
        """End worker processes."""
        self._reader.close()


class EvalData:
    """The batches of a split, in order, each sample once."""

    def __init__(
        self,
        dataset: Any,
        batch_size: int,
        *,
        seed: int,
        num_workers: int,
        pin_memory: bool,
        ranks: Ranks = ALONE,
        collate_fn: Function | None = None,
    ) -> None:
        self.num_samples = len(dataset)
        self._order = Order(
            self.num_samples,
            batch_size * ranks.size,
            batch_size,
            seed=seed,
            shuffle=False,
            rank=ranks.rank,
            world_size=ranks.size,
        )
        fetcher = Fetcher(dataset, seed, collate_fn, "data.eval")
        self._reader = _Reader(fetcher, num_workers=num_workers, pin_memory=pin_memory)

    def __len__(self) -> int:
        """Count the batches of a rank, which all ranks have alike."""
        return self._order.steps_per_epoch

    def __iter__(self) -> Iterator[Any]:
        """Yield the batches, on the host; random augmentation draws the same each time."""
        windows = self._order.windows(epoch=0)
        return self._reader.read(chain.from_iterable(windows))

    def close(self) -> None:
        """End worker processes."""
        self._reader.close()


class _Reader:
    """Turn requests into batches, in this process or in workers that live as long as this does."""

    def __init__(self, fetcher: Fetcher, *, num_workers: int, pin_memory: bool) -> None:
        require_reasonable(num_workers)
        self._fetcher = fetcher
        self.probe = fetcher.probe
        self._requests = _Requests()
        self._loader: DataLoader[Any] | None = None
        self._pin_memory = pin_memory
        if num_workers:
            self._loader = DataLoader(
                InWorkers(fetcher),  # type: ignore[arg-type]
                batch_size=None,
                sampler=self._requests,
                num_workers=num_workers,
                collate_fn=identity,
                pin_memory=pin_memory,
                persistent_workers=True,
                worker_init_fn=start_worker,
                # Without one of its own, making an iterator draws from the global generator.
                generator=torch.Generator(),
            )

    def read(self, requests: Iterator[Request]) -> Iterator[Any]:
        if self._loader is None:
            for request in requests:
                batch = self._fetcher[request]
                batch = torch_private.pin_memory(batch) if self._pin_memory else batch
                yield Padding(batch) if request.is_padding else batch
            return
        self._requests.start(requests)
        iterator = start_workers(self._loader)
        sent, received = self._requests.sent, 0

        def reading(worker: int, num_workers: int) -> str:
            indices = [
                index
                for place, request in enumerate(sent, start=received)
                if place % num_workers == worker
                for index in request.indices.tolist()
            ]
            more = ", ..." if len(indices) > INDICES_SHOWN else ""
            return f"among the samples {', '.join(map(str, indices[:INDICES_SHOWN]))}{more}"

        while True:
            try:
                batch = next_batch(iterator, reading)
            except StopIteration:
                return
            request = sent.popleft()
            received += 1
            self._fetcher.pass_over()
            yield Padding(batch) if request.is_padding else batch

    def close(self) -> None:
        if self._loader is not None:
            iterator = torch_private.take_iterator(self._loader)
            if iterator is not None:
                end_workers(iterator)


class _Requests:
    """The sampler of a DataLoader: the requests of the current pass; ``sent``: those under way."""

    def __init__(self) -> None:
        self.sent: deque[Request] = deque()
        self._source: Iterator[Request] = iter(())

    def start(self, source: Iterator[Request]) -> None:
        self.sent = deque()
        self._source = source

    def __iter__(self) -> Iterator[Request]:
        for request in self._source:
            self.sent.append(request)
            yield request
