"""The place a process has: its device, and the signals that ask it to stop."""

from __future__ import annotations

import os
import signal
from collections.abc import Callable, Iterator
from contextlib import contextmanager, suppress
from types import FrameType

import torch

from ampctl.distributed import failure, launched, startup_signal
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.distributed.signal_listener import SignalListener
from ampctl.errors import (
    AmpctlError,
    InterruptedRunError,
    MachineError,
    PreemptedError,
    UsageError,
)

_KINDS = ("cuda", "xpu", "mps", "cpu")
_CHOICE = {"cuda": "CUDA_VISIBLE_DEVICES", "xpu": "ZE_AFFINITY_MASK"}


def choose_device(wanted: str, ranks: Ranks = ALONE) -> torch.device:
    """Settle ``train.device``: the device itself, or the best one that is there for ``auto``.

    Of several processes on a machine each gets an accelerator of its own, by its local rank. Raises
    UsageError for a name that is no device, and for one accelerator that several are to share;
    MachineError for one that is not here.
    """
    if wanted == "auto":
        wanted = next(kind for kind in _KINDS if _count(kind))
    if ranks.size > 1 and wanted in ("cuda", "xpu"):
        # A scheduler may show each rank its own device alone; torchrun shows all to all of them.
        is_own = _count(wanted) == 1 and not launched.is_of_torchrun()
        wanted = f"{wanted}:{0 if is_own else ranks.local_rank}"
    elif ranks.num_on_machine > 1 and is_one_accelerator(wanted):
        raise one_for_several(wanted, f"{ranks.num_on_machine} ranks are on this machine")
    try:
        device = torch.device(wanted)
    except RuntimeError as error:
        raise UsageError(
            f"train.device: {wanted!r} is no device; allowed: auto, cpu, cuda, cuda:N, mps, xpu"
        ) from error
    if device.type not in _KINDS:
        raise UsageError(
            f"train.device: {wanted!r} is not supported; allowed: auto, cpu, cuda, cuda:N, mps, xpu"
        )
    if device.type == "cpu" and not device.index:
        return torch.device("cpu")  # which any number of processes share
    count = _count(device.type)
    if count <= (device.index or 0):
        here = ", ".join(kind for kind in _KINDS if _count(kind))
        found = f"{count} of that kind are here" if count else "none is here"
        raise MachineError(
            f"train.device: {wanted} was asked for and {found} (devices: {here}). "
            "Use train.device=auto, or check the driver and the torch build with `ampctl env`."
        )
    return device


def is_one_accelerator(wanted: str) -> bool:
    """Return whether ``train.device`` names one accelerator of its kind, as ``cuda:1`` does."""
    kind, _, index = wanted.partition(":")
    return kind in ("cuda", "xpu", "mps") and index.isdecimal()


def one_for_several(wanted: str, found: str) -> UsageError:
    """Return the error over one accelerator for several processes; ``found`` says how many."""
    kind = wanted.partition(":")[0]
    return UsageError(
        f"train.device: {wanted} is one device, and {found}. Use train.device={kind}: each takes "
        f"one of its own. Which of them the job may use, {_CHOICE.get(kind, _CHOICE['cuda'])} says."
    )


def use_device(device: torch.device) -> None:
    """Make an accelerator the current one of this thread.

    Events, generators, page-locked memory and kernels of libraries go to the current device unless
    told otherwise. A new thread has device 0, and what it does there opens a context of some
    hundred megabytes on a GPU that belongs to another rank.
    """
    if device.type in ("cuda", "xpu"):
        torch.get_device_module(device).set_device(device.index or 0)


def has_work(device: torch.device) -> bool:
    """Return whether an accelerator has not yet done what this process has asked of it."""
    if device.type not in ("cuda", "xpu"):
        return False
    module = torch.get_device_module(device)
    try:
        return module.is_initialized() and not module.current_stream(device).query()
    except RuntimeError:  # a kernel has failed, which the training finds out itself
        return False


def _count(kind: str) -> int:
    if kind == "cuda":
        return torch.cuda.device_count() if torch.cuda.is_available() else 0
    if kind == "xpu":
        return torch.xpu.device_count() if torch.xpu.is_available() else 0
    if kind == "mps":
        return int(torch.backends.mps.is_available())
    return 1


class StopSignals:
    """Turn SIGTERM, SIGUSR1, SIGHUP and Ctrl-C into a flag that the loops look at between batches.

    Until :attr:`training` is set there is nothing to save, and a signal raises KeyboardInterrupt
    where it is. A second Ctrl-C ends the process at once. Handlers that stood before are put back
    on leaving, and called as well, so that another tool's handler is not lost.

    Where the main thread does not come to heed a signal, another one ends the process: with what
    ``rescue`` makes of it, given the signal and the time since when, or with :attr:`outcome` if the
    run is on its way out. ``when`` is the rest of the words where there is nothing to rescue.
    """

    def __init__(self, when: str = "") -> None:
        self.when = when
        self.outcome: AmpctlError | None = None
        self.rescue: Callable[[signal.Signals, float], AmpctlError] | None = None
        self.lost: Callable[[], str] = str
        self.is_urgent: Callable[[], bool] = bool
        self.is_done = False
        self._listener = SignalListener(self._overdue, self._again, lambda: self.is_urgent())
        self.received: signal.Signals | None = None
        self.training = False
        self._previous: dict[signal.Signals, object] = {}

    def __enter__(self) -> StopSignals:
        for number in (*launched.handled_signals(), signal.SIGINT):
            self._previous[number] = startup_signal.replaced(signal.signal(number, self._receive))
        self._listener.open(self._previous.keys())
        return self

    def __exit__(self, *_: object) -> None:
        self._listener.close()
        for number, handler in self._previous.items():
            signal.signal(number, handler)  # type: ignore[arg-type]

    def _receive(self, number: int, frame: FrameType | None) -> None:
        self.received = signal.Signals(number)
        if self.training and launched.speaks_on_terminal() and os.isatty(2):
            with suppress(OSError):  # the terminal may be gone
                os.write(2, b"\nstopping after this step; press Ctrl-C to leave at once\n")
        previous = self._previous.get(self.received)
        if callable(previous) and previous is not signal.default_int_handler:
            previous(number, frame)
        if not self.training:
            raise KeyboardInterrupt

    def _overdue(self, number: signal.Signals, since: float) -> None:
        """End the process in the place of the main thread, which is somewhere else."""
        if self.is_done:
            return
        error: BaseException = self.outcome or self.error(self.when, number)
        if self.rescue:
            try:
                error = self.rescue(number, since)
            except Exception as fault:  # the main thread may wait for this one by now
                error = fault
        failure.leave(error)

    def hear(self, number: int) -> None:
        """Take note of a signal that another rank has had, unless this one has had one too."""
        if not self._listener.has_heard:
            os.kill(os.getpid(), number)

    def _again(self) -> None:
        failure.leave(InterruptedRunError(f"interrupted twice: ended at once{self.lost()}"))

    def error(
        self, saved: str, received: signal.Signals | None = None
    ) -> PreemptedError | InterruptedRunError:
        """Return the error that ends the run; ``saved`` says when, and where its state is.

        ``received``: the signal, if another rank had it.
        """
        number = received or self.received
        assert number is not None
        if number is signal.SIGINT:
            return InterruptedRunError(f"interrupted {saved}")
        return PreemptedError(f"{number.name} received {saved}")


@contextmanager
def ended_at_once(when: str) -> Iterator[StopSignals]:
    """Listen to signals where there is nothing to save: one of them ends at once what runs inside.

    ``when`` is the rest of the error's words, as in :meth:`StopSignals.error`.
    """
    with StopSignals(when) as signals:
        try:
            yield signals
        except KeyboardInterrupt:
            if signals.received is None:
                raise
            raise signals.error(when) from None
