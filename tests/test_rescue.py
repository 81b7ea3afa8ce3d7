"""The parts that save a run in the place of its training, each for itself; see also test_stuck."""

from __future__ import annotations

import os
import signal
import threading
import time
from signal import SIGTERM

import pytest

from ampctl.checkpoint.background_save import BackgroundSave
from ampctl.distributed import failure, thread_activity
from ampctl.distributed.env import StopSignals
from ampctl.distributed.signal_listener import SignalListener
from ampctl.errors import AmpctlError


def test_c9_a_signal_to_a_process_that_was_forked_off_is_no_signal_to_the_run() -> None:
    heard: list[object] = []
    listener = SignalListener(lambda *given: heard.append(given), lambda: None, lambda: True)
    listener.open([SIGTERM])
    before = signal.signal(SIGTERM, lambda *_: None)
    try:
        child = os.fork()
        if not child:
            signal.raise_signal(SIGTERM)
            os._exit(0)
        os.waitpid(child, 0)
        assert not listener.has_heard
    finally:
        listener.close()  # reads all that was written before
        signal.signal(SIGTERM, before)
    assert not listener.has_heard
    assert not heard


@pytest.mark.parametrize(
    ("code", "still"), [("while not over.is_set(): pass", False), ("over.wait()", True)]
)
def test_c9_what_works_gets_on_and_what_waits_does_not(
    code: str, still: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(thread_activity, "_STILL_LOOKS", 20)
    over = threading.Event()
    thread = threading.Thread(target=exec, args=(code, {"over": over}), daemon=True)
    thread.start()
    try:
        one = thread_activity.ThreadActivity()
        stopped = False
        for _ in range(40):
            stopped = stopped or one.has_stopped([thread])
            time.sleep(0.02)
        assert stopped is still
    finally:
        over.set()
        thread.join()


def test_c9_a_rescue_that_fails_ends_the_process(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """The training may wait for it by then."""
    ended: list[BaseException] = []
    monkeypatch.setattr(failure, "leave", ended.append)
    signals = StopSignals("nothing")
    fault = ValueError("broken")

    def rescue(number: signal.Signals, since: float) -> AmpctlError:
        raise fault

    signals.rescue = rescue
    signals._overdue(SIGTERM, 0.0)
    assert ended[0] is fault


def test_c9_a_save_that_has_failed_is_not_told_as_saved() -> None:
    """Whoever waits for it at the same time as another thread gets its error too."""
    begun, over = threading.Event(), threading.Event()

    def fail() -> None:
        begun.set()
        over.wait()
        raise OSError("disk")

    background_save = BackgroundSave(True)
    background_save.start(fail)
    begun.wait()
    told: list[OSError] = []

    def land() -> None:
        with pytest.raises(OSError) as caught:
            background_save.wait()
        told.append(caught.value)

    threads = [threading.Thread(target=land) for _ in range(2)]
    for each in threads:
        each.start()
    time.sleep(0.2)
    over.set()
    for each in threads:
        each.join()
    background_save.close()
    assert len(told) == 2
