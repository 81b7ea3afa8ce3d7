"""What becomes of a run whose training does not heed a signal: it is stuck, or takes its time.

Another thread than the training's saves the state of the last step boundary, if it is whole, and
ends the process. Of several ranks each does so, and rank 0 saves for all.
"""

from __future__ import annotations

import pickle
import signal
import threading
import time
from contextlib import suppress
from typing import Any

from ampctl.distributed.env import use_device
from ampctl.distributed.thread_activity import LOOK_S, ThreadActivity
from ampctl.engine.step import settle
from ampctl.errors import AmpctlError
from ampctl.run import messages
from ampctl.run.restore import Origin
from ampctl.run.run import Run
from ampctl.run.save import hand_over, look

_LIMIT_S = 9.0
"""So long a step that changes the state is waited for, or as long as `_STEPS` of them take."""

_WORKING_S = 60.0
"""The same where it works, and does not wait for anything."""

_STEPS = 3

_PEERS_S = 2.0
_WORDS, _AT_WORK = "words", "at work"


def watch_over(run: Run, origin: Origin | None) -> None:
    """Save a run whose training does not react to a signal, as it is from ``origin`` on."""
    if origin is not None:
        run.saved_step, run.newest = run.progress.step, origin.path
    run.job.state.boundary.mark(run.job.state.device, run.job.train_data.probe)
    signals, rescue = run.stop_signal.signals, Rescue(run)
    signals.rescue, signals.lost, signals.is_urgent = rescue, rescue.lost, rescue.is_urgent
    run.watchdog.hear = signals.hear


class Rescue:
    """Saves a run in the place of its training, for a `StopSignals`."""

    def __init__(self, run: Run) -> None:
        self._run = run
        self._signals = run.stop_signal.signals
        self._activity = ThreadActivity()
        self._begun, self._first_step = time.monotonic(), run.progress.step
        self._heard = (b"", 0.0)

    def is_urgent(self) -> bool:
        """Return whether another rank is stuck already."""
        return self._run.watchdog.is_stopped

    def lost(self) -> str:
        """Return what is lost where the run ends at once."""
        return f", and what was not saved is lost: {messages.newest(self._run)}"

    def __call__(self, number: signal.Signals, since: float) -> AmpctlError:
        """Save what can be saved; return the error that ends the process."""
        store = None
        with suppress(RuntimeError):  # the store may be gone, with the rank that has it
            store = self._run.watchdog.stop(number)
        error = self._end(number, since, store)
        if store is not None and self._run.job.state.ranks.is_first:
            with suppress(RuntimeError):
                store.set(_WORDS, f"{error}")
                time.sleep(0.3)  # it may be this process that has the store
        return error

    def _end(self, number: signal.Signals, since: float, store: Any) -> AmpctlError:
        run, state, training = self._run, self._run.job.state, threading.main_thread()
        step = f"{run.watchdog.doing}, at {run.watchdog.place()}"
        while True:
            writers = self._writers()
            is_still = self._activity.has_stopped(writers or [training])
            if writers:
                if is_still:
                    return self._unsaved(number, "a save was stuck")
            elif self._is_free() and state.boundary.take_over(LOOK_S):
                break
            elif self._is_late(store, since, is_still=is_still):
                outcome = self._signals.outcome
                why = f"the run was in the midst of {step}"
                if state.ranks.shards:
                    why = f"the run was stuck in {step}, and has parts on each rank"
                return outcome or self._unsaved(number, why)
            self._tell_at_work(store)
            time.sleep(LOOK_S)
        if not state.ranks.is_first:
            self._generators(store)
            return self._as_first(store, number)
        return self._saved(number, step, self._generators(store), store)

    def _is_free(self) -> bool:
        """Return whether the training may be kept from going on: what is sharded needs all of it.

        Nor may one that has heeded the signal and is on its way out.
        """
        return self._signals.outcome is None and not self._run.job.state.ranks.shards

    def _is_late(self, store: Any, since: float, *, is_still: bool) -> bool:
        """Return whether the training, or a save elsewhere, has had its time.

        Where it works it has more: a copy of a large state is made in that time.
        """
        run = self._run
        steps = run.progress.step - self._first_step
        limit = _STEPS * (time.monotonic() - self._begun) / steps if steps else 0.0
        limit = max(limit, _LIMIT_S if is_still else _WORKING_S)
        return time.monotonic() > max(since, self._first_at_work(store)) + limit

    def _tell_at_work(self, store: Any) -> None:
        """Show the other ranks that this one is saving: they wait for it."""
        if store is not None and self._run.job.state.ranks.is_first:
            with suppress(RuntimeError):
                store.set(_AT_WORK, f"{time.monotonic()}")

    def _first_at_work(self, store: Any) -> float:
        """Return when rank 0 was last heard to be at it, by this process's clock."""
        with suppress(RuntimeError):
            is_other = store is not None and not self._run.job.state.ranks.is_first
            if is_other and store.check([_AT_WORK]):
                said = store.get(_AT_WORK)
                if said != self._heard[0]:
                    self._heard = (said, time.monotonic())
        return self._heard[1]

    def _saved(
        self, number: signal.Signals, step: str, generators: list[dict[str, Any]], store: Any
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
        begun = time.monotonic()
        while thread.is_alive():
            writers = self._writers()
            is_still = self._activity.has_stopped([thread, *writers])
            if is_still or (not writers and self._is_late(None, begun, is_still=False)):
                return self._unsaved(number, f"the run was stuck in {step}, and the save after it")
            self._tell_at_work(store)
            thread.join(LOOK_S)
        if failed:
            if not isinstance(failed[0], AmpctlError):
                return self._unsaved(number, f"the run was stuck in {step}, and {failed[0]!r}")
            self._tell(failed[0])
            return failed[0]
        error = self._signals.error(messages.saved(self._run), number)
        if self._run.progress.step:
            error.args = (f"{error} (it was stuck in {step})",)
        self._tell(error)
        return error

    def _writers(self) -> list[threading.Thread]:
        writer = self._run.store.background_save.worker
        return [writer] if writer else []

    def _save(self, generators: list[dict[str, Any]]) -> None:
        run, state = self._run, self._run.job.state
        use_device(state.device)
        settle(state)
        if state.progress.step == 0:
            return
        if run.saved_step != state.progress.step:
            self._hand_over(generators)
        run.store.wait()  # also for a save that the training began

    def _hand_over(self, generators: list[dict[str, Any]]) -> None:
        run, state, begin = self._run, self._run.job.state, time.perf_counter()
        if state.ema is not None:
            state.ema.take_back()
        parts = state.parts()
        if state.buffers.is_kept:
            for name, buffer in state.buffers.kept().items():
                for held in (parts["model"], parts["ema"] or {}):
                    if name in held:
                        held[name] = buffer
        hand_over(run, {**parts, **state.rest(generators)}, None)
        run.log.stalled(state.progress.step, time.perf_counter() - begin)

    def _generators(self, store: Any) -> list[dict[str, Any]]:
        """Return the states of each rank's generators, this rank's alone if one is not known.

        Whoever resumes then seeds the others anew.
        """
        ranks, progress = self._run.job.state.ranks, self._run.progress
        own = self._run.job.state.boundary.rng_state()
        if store is None:
            return [own]
        every = {ranks.rank: own}
        with suppress(RuntimeError):
            if not ranks.is_first:
                store.set(f"generators/{ranks.rank}", pickle.dumps((progress.step, own)))
                return [own]
            until = time.monotonic() + _PEERS_S
            while len(every) < ranks.size and time.monotonic() < until:
                for rank in range(ranks.size):
                    if rank not in every and store.check([f"generators/{rank}"]):
                        step, state = pickle.loads(store.get(f"generators/{rank}"))
                        if step != progress.step:
                            return [own]
                        every[rank] = state
                time.sleep(LOOK_S)
        return [every[rank] for rank in range(ranks.size)] if len(every) == ranks.size else [own]

    def _as_first(self, store: Any, number: signal.Signals) -> AmpctlError:
        """Wait for the words of rank 0, which saves."""
        since = time.monotonic()
        with suppress(RuntimeError):
            while store is not None and not self._is_late(store, since, is_still=True):
                if store.check([_WORDS]):
                    return type(self._signals.error("", number))(store.get(_WORDS).decode())
                time.sleep(LOOK_S)
        return self._signals.error("and rank 0 does not say what it has saved", number)

    def _unsaved(self, number: signal.Signals, why: str) -> AmpctlError:
        error = self._signals.error(f"and {why}: {messages.newest(self._run)}", number)
        self._tell(error)
        return error

    def _tell(self, error: AmpctlError) -> None:
        """Write the last events, unless whatever takes them is stuck, and give the screen back."""
        run = self._run

        def tell() -> None:
            with suppress(AmpctlError, OSError, ValueError):
                look(run)
            with suppress(AmpctlError, OSError, ValueError):
                reason = {130: "interrupted", 75: "preempted"}.get(error.exit_code, "error")
                run.log.stop(run.progress.step, reason, error.exit_code)
                run.log.console.close()
            run.watchdog.log_stacks(f"{error}")

        thread = threading.Thread(target=tell, name="last words", daemon=True)
        thread.start()
        activity = ThreadActivity()
        while thread.is_alive() and not activity.has_stopped([thread]):
            thread.join(LOOK_S)
