"""The processes of one job, and what they tell each other; alone, no collective is made.

Everything that reaches the host goes by way of the CPU (gloo), so that no device waits for it.
"""

from __future__ import annotations

import os
import sys
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from datetime import timedelta
from typing import Any, TypeVar

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch.distributed.rendezvous import rendezvous

from ampctl.distributed.address import interface_of, towards
from ampctl.distributed.rendezvous import Rendezvous, meet
from ampctl.errors import MachineError, NumericsError

T = TypeVar("T")


_BUCKET_ELEMENTS = 2**23
_GLOO = "GLOO_SOCKET_IFNAME"
_WATCHDOG_LATER = timedelta(seconds=30)
_PLACE = ("RANK", "LOCAL_RANK", "MASTER_ADDR", "MASTER_PORT")


@dataclass(frozen=True)
class Ranks:
    """The processes of one job.

    ``local_rank`` is the place among those of this machine, which chooses the device.
    ``shares_verdict``: whether gradients can differ between ranks, so that they must agree on
    whether one is non-finite. DDP's own reduction makes them equal, but for parameters that it is
    told to ignore and for models that are called past it. ``shards``: whether each rank has a part
    of every parameter, and of its gradient, rather than the whole.
    """

    rank: int = 0
    size: int = 1
    local_rank: int = 0
    shares_verdict: bool = False
    shards: bool = False

    @property
    def is_first(self) -> bool:
        """Whether this is the rank that writes files and speaks to the user."""
        return self.rank == 0

    @property
    def option(self) -> str:
        """What a command needs behind it to start as many ranks again; of several nodes dots."""
        if self.size == 1:
            return ""
        is_one_node = self.num_on_machine >= self.size
        return f" --nproc-per-node {self.size}" if is_one_node else " ..."

    @property
    def num_on_machine(self) -> int:
        """How many of them this machine has; all, where the launcher does not say."""
        return _number("LOCAL_WORLD_SIZE", self.size) if self.size > 1 else 1

    def any_(self, found_inf: Tensor) -> None:
        """Make a verdict (1 or 0) in place that of every rank: 1 where one of them has 1."""
        if self.size > 1 and self.shares_verdict:
            dist.all_reduce(found_inf, op=dist.ReduceOp.MAX)  # all ranks: each optimizer step

    def norm_(self, norm: Tensor) -> None:
        """Make the 2-norm of this rank's gradients in place that of all, where each has a part."""
        if self.shards:
            square = norm.double().square()
            dist.all_reduce(square)  # all ranks: each optimizer step that is measured or clipped
            norm.copy_(square.sqrt())

    def share_and_largest_(self, share: Tensor, count: int, largest: Tensor) -> None:
        """Make a share of ``count`` values, and the largest of them, in place those of all ranks.

        Where each rank has a part of the gradients; elsewhere they are the same on all.
        """
        if self.shards:
            counts = torch.stack([share * count, torch.full_like(share, count)])
            dist.all_reduce(counts)  # all ranks: the steps that are logged
            share.copy_(counts[0] / counts[1])
            dist.all_reduce(largest, op=dist.ReduceOp.MAX)  # all ranks: the steps that are logged

    def mean_(self, value: Tensor, *, alike: Tensor) -> Tensor | None:
        """Make a scalar in place the mean of every rank's.

        Returns 1 where ``alike``, which all ranks should have in common, differs, else 0, as a
        scalar on the device, the same on every rank; None where there is one rank.
        """
        if self.size == 1:
            return None
        wide = torch.stack([value, alike, alike]).double()  # in which the sums below are exact
        wide[2].square_()
        dist.all_reduce(wide)  # all ranks: the steps that are logged
        mean, common, squares = wide.div_(self.size).unbind()
        value.copy_(mean)
        return (squares - common.square()).gt(1e-9 * squares).float()

    def mean_gradients_(self, parameters: Sequence[nn.Parameter]) -> None:
        """Make gradients in place the mean of every rank's; one that is not there counts as 0.

        What no rank has a gradient of keeps none.
        """
        held = torch.tensor([parameter.grad is not None for parameter in parameters])
        held = held.to(torch.uint8)
        dist.all_reduce(held, op=dist.ReduceOp.MAX)  # all ranks: each turn of an optimizer
        found = []
        for parameter, is_held in zip(parameters, held.tolist(), strict=True):
            if is_held and parameter.grad is None:
                parameter.grad = torch.zeros_like(parameter)
            if parameter.grad is not None:
                found.append(parameter.grad)
        for bucket in _buckets(found):
            flat = torch.cat([gradient.reshape(-1) for gradient in bucket]).div_(self.size)
            dist.all_reduce(flat)  # all ranks: each turn of an optimizer
            means = torch.split(flat, [gradient.numel() for gradient in bucket])
            for gradient, mean in zip(bucket, means, strict=True):
                gradient.copy_(mean.view(gradient.shape))

    def total(self, value: float) -> float:
        """Return the sum of a number of the host over all ranks."""
        if self.size == 1:
            return value
        summed = torch.tensor(value, dtype=torch.float64)
        dist.all_reduce(summed)  # all ranks: steps whose items are counted by the task
        return float(summed)

    def total_later(self, value: float) -> Callable[[], float]:
        """Begin the sum of a number of the host over all ranks; return what waits for it."""
        if self.size == 1:
            return lambda: value
        summed = torch.tensor(value, dtype=torch.float64)
        work: Any = dist.all_reduce(summed, async_op=True)  # all ranks: steps that may give no loss

        def wait() -> float:
            work.wait()
            return float(summed)

        return wait

    def every(self, *values: float) -> list[list[float]]:
        """Return some numbers of the host of each rank, on every rank."""
        own = torch.tensor(values, dtype=torch.float64)
        if self.size == 1:
            return [own.tolist()]
        each = [torch.empty_like(own) for _ in range(self.size)]
        dist.all_gather(each, own)  # all ranks: each turn of an optimizer
        return [one.tolist() for one in each]

    def largest(self, *values: float) -> list[float]:
        """Return the largest of each of some numbers of the host over all ranks."""
        if self.size == 1:
            return list(values)
        every = torch.tensor(values, dtype=torch.float64)
        dist.all_reduce(every, op=dist.ReduceOp.MAX)  # all ranks: where they heed signals
        return [float(value) for value in every]

    def gather(self, value: T) -> list[T]:
        """Return a picklable value of each rank, on every rank."""
        if self.size == 1:
            return [value]
        every: list[Any] = [None] * self.size
        dist.all_gather_object(every, value)  # all ranks: at saves and after evaluations
        return every

    def of_first(self, value: T) -> T:
        """Return rank 0's value of something picklable."""
        if self.size == 1:
            return value
        held = [value]
        dist.broadcast_object_list(held, src=0)  # all ranks: at the start
        return held[0]

    def follow_first_(self, values: Sequence[Tensor]) -> None:
        """Make tensors in place those of rank 0."""
        for value in values if self.size > 1 else ():
            dist.broadcast(value, src=0)  # all ranks: at the start, and on resuming

    def wait(self) -> None:
        """Return when every rank is here."""
        self.largest(0.0)

    def require_equal(self, what: str, value: float) -> None:
        """Raise NumericsError on every rank, naming ranks and values, if a value differs."""
        largest, negative = self.largest(value, -value)
        if largest != -negative:
            values = self.gather(value)
            told = ", ".join(f"{each:g} on rank {rank}" for rank, each in enumerate(values))
            raise NumericsError(
                f"{what} differs between ranks: {told}. They no longer train one model: a rank "
                "skipped a step that another took. Is there a parameter that DDP does not reduce, "
                "or a collective of your own? Resume from the newest checkpoint."
            )


class Writers:
    """The ranks of a job as those who write a checkpoint together, while the training goes on.

    In a group of their own: what a thread sends must not come between what the step sends.
    ``device``: what holds this rank's part of the state.
    """

    def __init__(self, ranks: Ranks, minutes: float, device: torch.device) -> None:
        self.rank = ranks.rank
        self.device = device
        self._size = ranks.size
        self.group: Any = dist.new_group(backend="gloo", timeout=timedelta(minutes=minutes))

    def of_first(self, value: T) -> T:
        """Return rank 0's value of something picklable."""
        held = [value]
        dist.broadcast_object_list(held, src=0, group=self.group)  # all ranks: saving
        return held[0]

    def gather(self, value: T) -> list[T]:
        """Return a picklable value of each rank, on every rank."""
        every: list[Any] = [None] * self._size
        dist.all_gather_object(every, value, group=self.group)  # all ranks: saving
        return every


ALONE = Ranks()
"""A job of one process."""


def from_environment() -> Ranks:
    """Return this process's place in the job that a launcher (torchrun) has started, if it has."""
    size = _number("WORLD_SIZE", 1)
    if size <= 1:
        return ALONE
    lacking = [name for name in _PLACE if not os.environ.get(name)]
    if lacking:
        raise MachineError(
            f"WORLD_SIZE is {size} in the environment, and {', '.join(lacking)} not set: start "
            "several processes by --nproc-per-node or torchrun, or unset WORLD_SIZE"
        )
    return Ranks(_number("RANK", 0), size, _number("LOCAL_RANK", 0))


@contextmanager
def joined(
    ranks: Ranks, *, backend: str, device: torch.device, minutes: float
) -> Iterator[Rendezvous | None]:
    """Join the processes of a job while the context is open.

    ``backend``: nccl, gloo, or auto for what the device takes; ``minutes``: how long a rank waits
    for the others. Gives what they have met in; None where one process has no launcher that may
    start it anew. Raises MachineError if the others cannot be reached.
    """
    if ranks.size == 1 and os.environ.get("TORCHELASTIC_USE_AGENT_STORE") != "True":
        yield None
        return
    if backend == "auto":
        backend = {"cuda": "nccl", "xpu": "xccl"}.get(device.type, "gloo")
    wanted = backend if backend == "gloo" else f"cpu:gloo,{device.type}:{backend}"
    store: Any = None
    try:
        timeout = timedelta(minutes=minutes)
        store, _, _ = next(rendezvous("env://", ranks.rank, ranks.size, timeout=timeout))
        meeting = meet(store, ranks.rank, ranks.size, seconds=minutes * 60)
        if ranks.size > 1:
            _choose_interface(ranks.size)
            with _native_words_to_stderr():
                dist.init_process_group(
                    wanted,
                    store=meeting.store,
                    rank=ranks.rank,
                    world_size=ranks.size,
                    # Else NCCL's watchdog would end the process before it can say why.
                    timeout=timeout if backend == "gloo" else timeout + _WATCHDOG_LATER,
                    device_id=device if backend != "gloo" else None,
                )
    except (RuntimeError, ValueError) as error:  # DistError and its kin are RuntimeErrors
        where = f"{os.environ.get('MASTER_ADDR')}:{os.environ.get('MASTER_PORT')}"
        raise MachineError(
            f"rank {ranks.rank} of {ranks.size} cannot join the others at {where}. "
            f"distributed.timeout_minutes, {minutes:g}, is how long it waits ({error})"
        ) from error
    try:
        yield meeting
    finally:
        if ranks.size > 1:
            dist.destroy_process_group()


@contextmanager
def _native_words_to_stderr() -> Iterator[None]:
    """Keep what native code prints out of the output: gloo of torch 2.10 tells its connections."""
    sys.stdout.flush()
    output = os.dup(1)
    os.dup2(2, 1)
    try:
        yield
    finally:
        os.dup2(output, 1)
        os.close(output)


def _choose_interface(size: int) -> None:
    """Make gloo use the interface that leads to the other nodes, unless the user has named one.

    By itself it takes that of the host name's address, which on many machines is the loopback.
    """
    if _GLOO in os.environ or _number("LOCAL_WORLD_SIZE", size) >= size:
        return
    address = towards(os.environ["MASTER_ADDR"], _number("MASTER_PORT", 0))
    name = address and interface_of(address)
    if name:
        os.environ[_GLOO] = name


def _buckets(gradients: Sequence[Tensor]) -> Iterator[list[Tensor]]:
    """Deal gradients out to lists of one device and dtype, large enough to be worth sending."""
    open_: dict[tuple[torch.device, torch.dtype], list[Tensor]] = {}
    for gradient in gradients:
        kind = (gradient.device, gradient.dtype)
        bucket = open_.setdefault(kind, [])
        bucket.append(gradient)
        if sum(each.numel() for each in bucket) >= _BUCKET_ELEMENTS:
            yield open_.pop(kind)
    yield from open_.values()


def _number(name: str, otherwise: int) -> int:
    text = os.environ.get(name) or f"{otherwise}"
    if not text.isdecimal():
        raise MachineError(f"{name} is {text!r} in the environment; torchrun sets it to a number")
    return int(text)
