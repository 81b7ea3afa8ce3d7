"""Which rank is missing when others wait: each tells through the store where it is.

A thread of each rank does so every few seconds, beside the training, which it costs nothing. What a
rank finds out when it has waited for too long, or when a connection breaks, ends it in words.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import json
import logging
import os
import sys
import threading
import time
import traceback
from collections.abc import Callable, Iterator, Mapping
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch.distributed import Store  # type: ignore[attr-defined]

from ampctl.distributed import failure
from ampctl.distributed.env import has_work, use_device
from ampctl.distributed.ranks import Ranks
from ampctl.errors import AmpctlError, MachineError, UsageError
from ampctl.recipe.fault import is_users_own_file

LONGEST_PERIOD_S = 2.0
_WAITING = ("torch/distributed/", "torch/nn/parallel/")
_CPU = torch.device("cpu")
_ENDED, _VERDICT, _STOP = "ended", "verdict", "stop"
_HOME = Path(__file__).parents[1]
_OUTERMOST = f"{_HOME / 'cli'}/"


class Watchdog:
    """Where this rank is, and where the others are; alone, nothing is told.

    ``doing`` says in words what is going on, and ``step`` which step has been begun; the training
    sets them. ``minutes``: how long a rank waits for the others; ``device``: what it trains on.
    """

    def __init__(
        self, ranks: Ranks, store: Store | None, minutes: float, device: torch.device = _CPU
    ) -> None:
        self.doing = "the start"
        self.step = 0
        self.is_stopped = False
        self.hear: Callable[[int], None] = functools.partial(os.kill, os.getpid())
        self._ranks, self._store, self._minutes = ranks, store, minutes
        self._device = device
        self._period_s = min(LONGEST_PERIOD_S, minutes * 60 / 4)
        self._training = threading.main_thread().ident
        self._over = threading.Event()
        self._beats = 0
        self._thread: threading.Thread | None = None
        self._since: tuple[float, object] = (time.monotonic(), None)
        self._at, self._waited = "its start", False
        self._unsaid: list[tuple[int, str, Callable[[str], None]]] = []

    @contextlib.contextmanager
    def open(self) -> Iterator[None]:
        """Publish where this rank is while the context is open; put what others did into words."""
        if self._store is None:
            yield
            return
        self._beat()
        self._thread = threading.Thread(target=self._watch, name="watchdog", daemon=True)
        self._thread.start()
        try:
            with self.explaining():
                yield
        except BaseException as error:
            with contextlib.suppress(RuntimeError):  # the store may be gone
                code = error.exit_code if isinstance(error, AmpctlError) else AmpctlError.exit_code
                line = f"{self._ranks.rank} {code} {_head(error)}\n"
                self._store.append(_ENDED, line)  # type: ignore[attr-defined]
            raise
        finally:
            self._over.set()
            self._thread.join(self._period_s)
            with contextlib.suppress(RuntimeError):
                self._say(all_of_it=True)

    @contextlib.contextmanager
    def explaining(self) -> Iterator[None]:
        """Raise MachineError, with the ranks that are missing, for an error that others cause."""
        try:
            yield
        except RuntimeError as error:
            if self._store is None or not failure.comes_of_others(error):
                raise
            try:
                told = self._found_out(has_waited=failure.is_timeout(error))
            except RuntimeError:  # the store is gone too
                raise error from None
            _log("%s failed", self.doing, exc_info=error)
            raise told from (None if failure.is_timeout(error) else error)

    def place(self) -> str:
        """Return the line that this rank is at, of the user's own if there is one."""
        return _place(sys._current_frames().get(self._training or 0))

    def log_stacks(self, why: str) -> None:
        """Write to the log what each thread is at."""
        frames = sys._current_frames()
        stacks = {
            thread.name: "".join(traceback.format_stack(frames[thread.ident]))
            for thread in threading.enumerate()
            if thread.ident in frames
        }
        told = "\n".join(f"{name} is at:\n{stack}" for name, stack in stacks.items())
        _log("%s\n%s", why, told)

    def stop(self, number: int) -> Store | None:
        """Send a signal to all ranks at once; return a store of one's own, to end together by."""
        if self._store is None:
            return None
        store: Store = self._store.clone()
        store.set(_STOP, f"{number}")
        return store

    def meet_at_end(self, what: str, steps: int, samples: int) -> None:
        """Wait until the data has ended on all ranks. Raises UsageError if it does not end alike.

        Through the store: another rank may be in the reduction of a step that this one never takes.
        """
        store = self._store
        if store is None:
            return
        name, deadline = f"{_ENDED}/{what}", time.monotonic() + self._minutes * 60
        own = f"after {steps} steps and {samples} samples"
        store.set(f"{name}/{self._ranks.rank}", own)
        for rank in range(self._ranks.size):
            key = f"{name}/{rank}"
            while not store.check([key]):
                place = self._place_of(rank)
                if place.get("step", 0) > self.step:
                    raise self._uneven(what, own, rank, "goes on")
                if time.monotonic() > deadline:
                    raise self._found_out(has_waited=True)
                time.sleep(0.01)
            other = store.get(key).decode()
            if other != own:
                raise self._uneven(what, own, rank, f"ends {other}")

    def _uneven(self, what: str, own: str, rank: int, other: str) -> UsageError:
        return UsageError(
            f"{what} ends {own} on rank {self._ranks.rank} and {other} on rank {rank}: "
            "every rank must read the same samples, of which ampctl deals it its part. A data set "
            "that gives each rank a part of its own must not do so here."
        )

    def say_once(self, text: str, say: Callable[[str], None]) -> None:
        """Print a text unless another rank has; what all have to say is left to rank 0."""
        if self._store is None:
            say(text)
            return
        self._unsaid.append((0 if self._ranks.is_first else self._beats + 3, text, say))
        if self._ranks.is_first:
            self._say()

    def _say(self, *, all_of_it: bool = False) -> None:
        due = [each for each in self._unsaid if all_of_it or each[0] <= self._beats]
        for each in due:
            self._unsaid.remove(each)
            _, text, say = each
            digest = hashlib.sha256(text.encode()).hexdigest()
            if self._store is not None and self._store.add(f"said/{digest}", 1) == 1:
                say(text)

    # The thread

    def _watch(self) -> None:
        """Publish this rank's place until the end; end the process if it is found to be stuck."""
        assert self._store is not None
        use_device(self._device)
        with contextlib.suppress(RuntimeError):  # the store goes with the job
            while not self._over.wait(self._period_s):
                self._beat()
                self._say()
                if not self.is_stopped and self._store.check([_STOP]):
                    self.is_stopped = True
                    self.hear(int(self._store.get(_STOP)))
                if self._store.check([_VERDICT]):
                    self._end_if_stuck(self._store.get(_VERDICT).decode())
                elif self._waits_for_device(self._minutes * 60):
                    self._leave(f"{self._found_out(has_waited=True)}")

    def _beat(self) -> None:
        assert self._store is not None
        self._beats += 1
        frame = sys._current_frames().get(self._training or 0)
        if not self._waited:  # else it looks for the others by now
            self._at = _place(frame)
        waits = self._waited or _waits(frame) or self._waits_for_device(self._period_s / 2)
        place = {"doing": self.doing, "step": self.step, "at": self._at, "waits": waits}
        now = {"beat": self._beats, **place}
        self._store.set(f"place/{self._ranks.rank}", json.dumps(now))

    def _waits_for_device(self, seconds: float) -> bool:
        """Return whether the training has waited for its device for so long, by whatever call.

        It has if it is at the same instruction all the while, with work left on the device. What
        waits there is NCCL, whose own watchdog would end the process without a word.
        """
        frame = sys._current_frames().get(self._training or 0)
        place = None if frame is None else (id(frame), frame.f_lasti, self.doing)
        if place != self._since[1]:
            self._since = (time.monotonic(), place)
        return time.monotonic() - self._since[0] > seconds and has_work(self._device)

    def _end_if_stuck(self, verdict: str) -> None:
        """Give the training a moment to find out by itself; then end this process."""
        if not self._over.wait(2 * self._period_s):
            self._leave(verdict)

    def _leave(self, verdict: str) -> None:
        self.log_stacks(verdict)
        failure.leave(failure.StuckError(verdict))

    # What is found out

    def _found_out(self, *, has_waited: bool) -> AmpctlError:
        """Return what became of the other ranks, as the error that ends this one."""
        store = self._store
        assert store is not None
        self._waited = True
        if not has_waited and (gone := self._gone()) is not None:
            return gone
        before = self._places()
        for _ in range(3):  # a rank that lives tells its place in this time
            time.sleep(self._period_s / 2)
            self._beat()
        if store.check([_VERDICT]):
            return failure.StuckError(store.get(_VERDICT).decode())
        if not has_waited and (gone := self._gone()) is not None:
            return gone
        told = self._missing(before, self._places(), has_waited=has_waited)
        if not has_waited:
            return MachineError(told)
        # The words of the first to ask are those of all.
        return failure.StuckError(store.compare_set(_VERDICT, "", told).decode())

    def _gone(self) -> AmpctlError | None:
        """Describe which rank ended first with an error, if one has said so, with its exit code."""
        assert self._store is not None
        if not self._store.check([_ENDED]):
            return None
        rank, code, head = self._store.get(_ENDED).decode().splitlines()[0].split(" ", 2)
        return failure.RankFailedError(f"{self.doing}: rank {rank} ended: {head}", int(code))

    def _missing(
        self, before: Mapping[int, Any], after: Mapping[int, Any], *, has_waited: bool
    ) -> str:
        silent = [r for r in after if after[r].get("beat") == before[r].get("beat")]
        silent = [r for r in silent if r != self._ranks.rank]
        elsewhere = [r for r in after if r not in silent and after[r] and not after[r]["waits"]]
        waited = f"for {self._minutes:g} minutes (distributed.timeout_minutes)"
        told = [f"{_ranks(silent)} gave no sign of life"] if silent else []
        if not has_waited:
            lost = "; ".join(told) or "every other rank is still there: is it the network?"
            return f"{self.doing}: the connection to another rank broke: {lost}"
        told += [f"rank {r} was in {after[r]['doing']}, at {after[r]['at']}" for r in elsewhere]
        if told:
            waiting = [r for r in after if r not in silent and r not in elsewhere]
            return (
                f"{_ranks(waiting) or 'other ranks'} waited {waited} in {self.doing}: "
                f"{'; '.join(told)}. If it needs that long, raise the limit."
            )
        places = [f"rank {r} in {each['doing']}, at {each['at']}" for r, each in after.items()]
        return (
            f"the ranks waited for each other {waited}, in different places: {'; '.join(places)}. "
            "All ranks must take the same steps: is there a branch, or a collective of your own, "
            "that depends on the rank, or does a data set end earlier on one of them?"
        )

    def _places(self) -> dict[int, Any]:
        return {rank: self._place_of(rank) for rank in range(self._ranks.size)}

    def _place_of(self, rank: int) -> dict[str, Any]:
        assert self._store is not None
        key = f"place/{rank}"
        found: dict[str, Any] = json.loads(self._store.get(key)) if self._store.check([key]) else {}
        return found


def _log(text: str, *values: object, exc_info: BaseException | None = None) -> None:
    """Write to the run's log file, if it is there by now; Python would print it otherwise."""
    log = logging.getLogger("ampctl")
    if log.hasHandlers():
        log.error(text, *values, exc_info=exc_info)


def _head(error: BaseException) -> str:
    text = f"{error}" if isinstance(error, AmpctlError) else f"{type(error).__name__}: {error}"
    return text.partition("\n")[0]


def _ranks(ranks: list[int]) -> str:
    names = ", ".join(map(str, ranks))
    return f"rank{'s' if len(ranks) > 1 else ''} {names}" if ranks else ""


def _waits(frame: FrameType | None) -> bool:
    """Return whether a thread is in a call that waits for other ranks, as far as can be seen.

    In a backward pass it is in native code, where DDP waits for gradients too.
    """
    if frame is None:
        return False
    code = frame.f_code
    is_backward = code.co_name == "_engine_run_backward"
    return is_backward or any(each in code.co_filename for each in _WAITING)


def _place(frame: FrameType | None) -> str:
    """Return the innermost line of the user's own, or else of ampctl."""
    ours = None
    while frame is not None and not frame.f_code.co_filename.startswith(_OUTERMOST):
        if is_users_own_file(frame.f_code.co_filename):
            return _line(frame)
        if ours is None and f"{_HOME}" in frame.f_code.co_filename:
            ours = frame
        frame = frame.f_back
    return "its start" if ours is None else _line(ours)


def _line(frame: FrameType) -> str:
    file = Path(frame.f_code.co_filename)
    for folder in (Path.cwd(), _HOME.parent):
        if file.is_relative_to(folder):
            file = file.relative_to(folder)
    return f"{file}:{frame.f_lineno} in {frame.f_code.co_name}"
