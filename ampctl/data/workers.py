"""The processes that read data: how they start and end, and what is said when one of them dies."""

from __future__ import annotations

import signal
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from multiprocessing.connection import wait
from multiprocessing.reduction import ForkingPickler
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import DataLoader

from ampctl import torch_private
from ampctl.distributed.launched import STOPPING
from ampctl.environment import usable_cores
from ampctl.errors import AmpctlError, UsageError
from ampctl.recipe.own_code import InWorker, carried, frames_as_text

_MOST_PER_CORE, _ALWAYS_ALLOWED = 16, 64


class WorkerError(AmpctlError):
    """A data worker died; the message has its signal and the samples it was reading."""

    exit_code = 1


@dataclass(frozen=True)
class Raised:
    """An error on its way from a worker in the place of a batch, with its traceback there."""

    error: Exception
    traceback: str

    @classmethod
    def of(cls, error: Exception, doing: str) -> Raised:
        """Take an error that was raised while doing something, which a note then says."""
        text = frames_as_text(error)
        error = carried(error)
        if not isinstance(error, AmpctlError):
            error.add_note(f"in {doing}")
        return cls(error, text)


def require_sendable(batch: Any, key: str) -> Any:
    """Return a batch, or raise UsageError if it holds what no worker can send.

    The thread that sends it would drop it, and the training process wait for it for ever.
    """
    for value in _leaves(batch):
        if isinstance(value, Tensor):
            if value.requires_grad and not value.is_leaf:
                why = "a tensor that gradients flow through: detach() it, or use torch.no_grad()"
                break
        elif isinstance(value, np.ndarray) and not value.dtype.hasobject:
            continue
        elif not isinstance(value, str | bytes | int | float | None):
            try:
                ForkingPickler.dumps(value)
            except Exception as error:  # its class is somebody's own: anything can go wrong
                why = f"a {type(value).__name__} that cannot be pickled: {error}"
                break
    else:
        return batch
    raise UsageError(
        f"{key}: a data worker cannot send its batch, which holds {why}\n"
        "    Let the data set give tensors, NumPy arrays, numbers and texts, or set "
        "data.num_workers=0"
    )


def _leaves(value: Any) -> Iterator[Any]:
    if type(value) is dict:
        value = [*value.keys(), *value.values()]
    if type(value) in (list, tuple):
        for part in value:
            yield from _leaves(part)
    else:
        yield value


def require_reasonable(num_workers: int) -> None:
    """Raise UsageError for a number of processes that would take the machine down."""
    cores = usable_cores()
    most = max(_ALWAYS_ALLOWED, _MOST_PER_CORE * cores)
    if num_workers > most:
        raise UsageError(
            f"data.num_workers is {f'{num_workers:,}':.30}, and each is a process on each rank; "
            f"of this machine {cores} cores can be used: allowed are up to {most}\n"
            f"    give about as many as there are cores: data.num_workers={cores}"
        )


def start_worker(_: int) -> None:
    """Prepare a worker process."""
    # Ctrl-C and a terminal that closes reach the whole process group, and a scheduler may signal
    # every process of a job; the training process decides when workers end. (SIG_IGN would go on to
    # programs that they start.)
    for number in (signal.SIGINT, *STOPPING):
        signal.signal(number, lambda *_: None)
    torch.set_num_threads(1)


def start_workers(loader: DataLoader[Any]) -> Any:
    """Return an iterator over a loader with workers; that one of them died, ``next`` tells.

    torch's handler of SIGCHLD would raise in the midst of whatever the training process does.
    """
    if threading.current_thread() is not threading.main_thread():
        return iter(loader)
    before = signal.getsignal(signal.SIGCHLD)
    try:
        return iter(loader)
    finally:
        signal.signal(signal.SIGCHLD, signal.SIG_DFL if before is None else before)


def next_batch(iterator: Any, reading: Callable[[int, int], str]) -> Any:
    """Return the next batch, or raise WorkerError if a worker died, and what a worker has raised.

    ``reading(worker, num_workers)`` says in words what a worker had been given to read.
    """
    try:
        batch = next(iterator)
    # A worker that dies while a batch is on its way breaks the connection instead.
    except (RuntimeError, EOFError, OSError) as error:
        fault = _death(error, iterator, reading)
        if fault is None:
            raise
        raise fault from error
    if isinstance(batch, Raised):
        raise batch.error from InWorker(batch.traceback)
    return batch


def end_workers(iterator: Any) -> None:
    """End the workers of a loader's iterator, those too that hang in a sample."""
    torch_private.shut_down_workers(iterator)
    for worker in torch_private.workers(iterator):
        if worker.is_alive():
            worker.kill()
            worker.join()


def _death(
    error: Exception, iterator: Any, reading: Callable[[int, int], str]
) -> WorkerError | None:
    """Describe which worker died, of what, and what it had to read; None if none died."""
    if isinstance(error, EOFError | ConnectionError):
        # The connection ends a moment before the process does, and the sentinel before its code
        # can be asked for.
        ended = wait([worker.sentinel for worker in torch_private.workers(iterator)], timeout=5.0)
        for worker in torch_private.workers(iterator):
            if worker.sentinel in ended:
                worker.join()
    codes = [worker.exitcode for worker in torch_private.workers(iterator)]
    number, code = next(((n, code) for n, code in enumerate(codes) if code), (0, 0))
    if not code:
        return None
    memory = " (shared memory: try a smaller data.num_workers)" if code == -signal.SIGBUS else ""
    return WorkerError(
        f"data worker {number} {_how(code)}{memory} while reading {reading(number, len(codes))}. "
        "Read them one by one with data.num_workers=0 to see the fault; if the machine ran out of "
        "memory, lower data.num_workers or data.micro_batch_size."
    )


def _how(code: int) -> str:
    if code > 0:
        return f"exited with code {code}"
    try:
        return f"was ended by {signal.Signals(-code).name}"
    except ValueError:
        return f"was ended by signal {-code}"
