"""What becomes of a run whose training does not heed a signal: it is stuck, or takes its time.

Another thread than the training's saves the state of the last step boundary, if it is whole, and
ends the process. Of several ranks each does so, and rank 0 saves for all.
"""

from __future__ import annotations

import pickle
import signal
import threading
import time
from collections.abc import Callable
from contextlib import suppress
from pathlib import Path
from typing import Any

from ampctl.distributed.env import use_device
from ampctl.errors import AmpctlError
from ampctl.step import settle
from ampctl.train import words
from ampctl.train.restore import Origin
from ampctl.train.run import Run
from ampctl.train.save import hand_over, look

_LIMIT_S = 9.0
"""After so long the process ends, unless a save gets on."""

_STILL_S = 2.5
"""A save that has not got on for so long is stuck."""

_PEERS_S = 2.0
_BUSY_TICKS = 5
_LOOK_S = 0.1
_WORDS = "words"


def watch_over(run: Run, origin: Origin | None) -> None:
    """Let a signal that the training does not heed save the run, as it is from ``origin`` on."""
    if origin is not None:
        run.saved_step, run.newest = run.progress.step, origin.path
    run.job.state.boundary.mark(run.job.state.device, run.job.train_data.probe)
    signals, rescue = run.heed.signals, Rescue(run)
    signals.rescue, signals.lost, signals.is_urgent = rescue, rescue.lost, rescue.is_urgent


class Rescue:
    """Saves a run in the place of its training, for a `StopSignals`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._signals = run.heed.signals

    def is_urgent(self) -> bool:
        """Return whether another rank is stuck already."""
        return self._run.attendance.is_stopped

    def lost(self) -> str:
        """Return what is lost where the run ends at once."""
        return f", and what was not saved is lost: {words.newest(self._run)}"

    def __call__(self, number: signal.Signals, since: float) -> AmpctlError:
        """Save what can be saved; return the error that ends the process."""
        run, store = self._run, None
        with suppress(RuntimeError):  # the store may be gone, with the rank that has it
            store = run.attendance.stop(number)
        step = f"{run.attendance.doing}, at {run.attendance.place()}"
        end = since + _LIMIT_S
        while True:
            writer = run.store.flight.worker
            if writer is not None:
                if not _gets_on(self._writers):
                    return self._unsaved(number, "a save was stuck")
            elif self._signals.outcome is not None:  # the training is on its way out
                if time.monotonic() > end:
                    return self._signals.outcome
                time.sleep(_LOOK_S)
            elif run.job.state.boundary.take_over(1.0):
                break
            elif time.monotonic() > end - 3 * _PEERS_S:
                return self._unsaved(number, f"the run was in the midst of {step}")
        if run.job.state.ranks.shards:
            return self._unsaved(number, f"the run was stuck in {step}, and has parts on each rank")
        every = self._generators(store, end)
        if not run.job.state.ranks.is_first:
            return self._as_first(store, number, end)
        error = self._saved(number, step, every, end)
        if store is not None:
            with suppress(RuntimeError):
                store.set(_WORDS, f"{error}")
                time.sleep(0.3)  # it may be this process that has the store
        return error

    def _saved(
        self, number: signal.Signals, step: str, generators: list[dict[str, Any]], end: float
    ) -> AmpctlError:
        """Save, in yet another thread, as the disk may be what is stuck."""
        failed: list[Exception] = []

        def work() -> None:
            try:
                self._save(generators)
            except Exception as error:
                failed.append(error)

        thread = threading.Thread(target=work, name="rescue save", daemon=True)
        thread.start()
        while thread.is_alive():
            is_late = not self._writers() and time.monotonic() > end + _LIMIT_S  # a device, say
            if is_late or not _gets_on(lambda: [thread, *self._writers()]):
                return self._unsaved(number, f"the run was stuck in {step}, and the save after it")
            thread.join(_LOOK_S)
        if failed:
            if isinstance(failed[0], AmpctlError):
                return failed[0]
            return self._unsaved(number, f"the run was stuck in {step}, and {failed[0]!r}")
        error = self._signals.error(words.saved(self._run), number)
        if self._run.progress.step:
            error.args = (f"{error} (it was stuck in {step})",)
        self._tell(error)
        return error

    def _writers(self) -> list[threading.Thread]:
        writer = self._run.store.flight.worker
        return [writer] if writer else []

    def _save(self, generators: list[dict[str, Any]]) -> None:
        run, state = self._run, self._run.job.state
        use_device(state.device)
        report = settle(state)
        if report is not None:
            self._report = report
        if state.progress.step == 0 or run.saved_step == state.progress.step:
            return
        if state.ema is not None:
            state.ema.take_back()
        parts = state.parts()
        if state.buffers.is_kept:
            for name, buffer in state.buffers.kept().items():
                for held in (parts["model"], parts["ema"] or {}):
                    if name in held:
                        held[name] = buffer
        hand_over(run, {**parts, **state.rest(generators)}, None)
        run.store.wait()

    def _generators(self, store: Any, end: float) -> list[dict[str, Any]]:
        """Return the states of each rank's generators; where they are not known, this rank's."""
        ranks, progress = self._run.job.state.ranks, self._run.progress
        own = self._run.job.state.boundary.rng_state()
        every = [own] * ranks.size
        if store is None:
            return every
        with suppress(RuntimeError):
            if not ranks.is_first:
                store.set(f"generators/{ranks.rank}", pickle.dumps((progress.step, own)))
                return every
            missing = set(range(1, ranks.size))
            until = min(time.monotonic() + _PEERS_S, end)
            while missing and time.monotonic() < until:
                for rank in sorted(missing):
                    if store.check([f"generators/{rank}"]):
                        missing.discard(rank)
                        step, state = pickle.loads(store.get(f"generators/{rank}"))
                        every[rank] = state if step == progress.step else own
                time.sleep(_LOOK_S)
        return every

    def _as_first(self, store: Any, number: signal.Signals, end: float) -> AmpctlError:
        """Wait for the words of rank 0, which saves."""
        with suppress(RuntimeError):
            while store is not None and time.monotonic() < end:
                if store.check([_WORDS]):
                    return type(self._signals.error("", number))(store.get(_WORDS).decode())
                time.sleep(_LOOK_S)
        return self._signals.error("and rank 0 does not say what it has saved", number)

    def _unsaved(self, number: signal.Signals, why: str) -> AmpctlError:
        error = self._signals.error(f"and {why}: {words.newest(self._run)}", number)
        self._tell(error)
        return error

    def _tell(self, error: AmpctlError) -> None:
        """Write the last events, unless whatever takes them is stuck, and give the screen back."""
        run = self._run

        def tell() -> None:
            self._run.attendance.log_stacks(f"{error}")
            with suppress(AmpctlError, OSError, ValueError):
                look(run)
                reason = "interrupted" if error.exit_code == 130 else "preempted"
                run.log.stop(run.progress.step, reason, error.exit_code)
                run.log.console.close()

        thread = threading.Thread(target=tell, name="last words", daemon=True)
        thread.start()
        thread.join(1.0)


def _gets_on(threads: Callable[[], list[threading.Thread]]) -> bool:
    """Return whether one of these threads ends, works, or waits for a disk, within a while.

    What waits for a disk cannot be interrupted ("D"); what sleeps, or waits for a pipe, can.
    """
    first, busy = threads(), 0
    begun = _run_time(first)
    end = time.monotonic() + _STILL_S
    while time.monotonic() < end:
        time.sleep(_LOOK_S)
        now = threads()
        if now != first or not all(each.is_alive() for each in now):
            return True
        states = [_fields(each)[0] for each in now]
        busy += "R" in states
        if "D" in states or busy >= _BUSY_TICKS or _run_time(now) - begun >= _BUSY_TICKS:
            return True
    return False


def _run_time(threads: list[threading.Thread]) -> int:
    """Return how long threads have run, in hundredths of a second."""
    return sum(int(field) for each in threads for field in _fields(each)[11:13])


def _fields(thread: threading.Thread) -> list[str]:
    """Return what the kernel says of a thread, from its state on; see proc_pid_stat(5)."""
    with suppress(OSError):
        text = Path(f"/proc/self/task/{thread.native_id}/stat").read_text()
        return text.rpartition(")")[2].split()
    return ["Z"]
