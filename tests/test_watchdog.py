"""What a rank finds out about the others, with stand-ins for them in one store."""

from __future__ import annotations

import json
import threading
import time
from collections.abc import Callable
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch.distributed import HashStore

from ampctl.distributed.env import has_work
from ampctl.distributed.failure import RankFailedError
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.distributed.watchdog import Watchdog, _place
from ampctl.errors import MachineError

CLOSED = "[third_party/gloo/gloo/transport/tcp/pair.cc:1] Connection closed by peer [::1]:1"
TIMEOUT = "[gloo/transport/tcp/unbound_buffer.cc:1] Timed out waiting 3000ms for recv operation"


def watchdog(minutes: float = 0.01, rank: int = 0) -> tuple[Watchdog, Any]:
    store = HashStore()
    return Watchdog(Ranks(rank, 2), store, minutes), store


def alive(store: Any, place: dict[str, Any]) -> Callable[[], None]:
    """Let rank 1 tell its place until the returned function is called."""
    over = threading.Event()

    def beat() -> None:
        number = 0
        while not over.wait(0.02):
            number += 1
            store.set("place/1", json.dumps({"beat": number, "step": 4, **place}))

    threading.Thread(target=beat, daemon=True).start()
    return over.set


def test_errors_of_ones_own_are_raised_as_they_are() -> None:
    for mine in (watchdog()[0], Watchdog(ALONE, None, 1.0)):
        for error in (KeyError("x"), RuntimeError("connection closed"), RuntimeError("timed out")):
            with pytest.raises(type(error)) as raised, mine.open():
                raise error
            assert raised.value is error


def test_a_rank_that_lives_and_does_something_else_is_named_with_its_place() -> None:
    mine, store = watchdog()
    mine.doing = "step 5"
    end = alive(store, {"doing": "step 4", "at": "mine.py:3 in forward", "waits": False})
    with pytest.raises(MachineError) as raised, mine.open():
        raise RuntimeError(TIMEOUT)
    end()
    words = "rank 0 waited for 0.01 minutes (distributed.timeout_minutes) in step 5: rank 1 was in"
    assert f"{raised.value}".startswith(f"{words} step 4, at mine.py:3 in forward. ")
    assert store.get("verdict").decode() == f"{raised.value}"  # which ends rank 1


def test_ranks_that_wait_in_different_places_are_told_with_them() -> None:
    mine, store = watchdog()
    mine.doing = "step 5"
    end = alive(store, {"doing": "the evaluation", "at": "loop.py:3 in f", "waits": True})
    words = r"rank 0 in step 5, .*; rank 1 in the evaluation, at loop"
    with pytest.raises(MachineError, match=words), mine.open():
        raise RuntimeError(TIMEOUT)
    end()


def test_a_rank_that_is_alone_in_losing_its_connection_says_so() -> None:
    mine, store = watchdog()
    end = alive(store, {"doing": "step 1", "at": "", "waits": True})
    words = r"connection .* broke: every other rank is still there"
    with pytest.raises(MachineError, match=words), mine.open():
        raise RuntimeError(CLOSED)
    end()


def test_the_error_of_a_rank_that_ended_is_handed_on_with_its_code() -> None:
    store = HashStore()
    first, other = Watchdog(Ranks(1, 2), store, 0.01), Watchdog(Ranks(0, 2), store, 0.01)
    with pytest.raises(KeyError), first.open():
        raise KeyError("mine")
    words = "the start: rank 1 ended: KeyError: 'mine'"
    with pytest.raises(RankFailedError, match=words) as raised, other.open():
        raise RuntimeError(CLOSED)
    assert raised.value.exit_code == 1
    assert raised.value.__cause__ is not None  # so that it is known to follow from another's


@pytest.fixture
def device(monkeypatch: pytest.MonkeyPatch) -> SimpleNamespace:
    """A device of four that has work left as long as ``busy`` says so."""
    state = SimpleNamespace(busy=True, device=torch.device("cuda:3"))
    monkeypatch.setattr("ampctl.distributed.watchdog.use_device", lambda _: None)
    monkeypatch.setattr(
        "ampctl.distributed.watchdog.has_work",
        lambda device: device == state.device and state.busy,
    )
    return state


@pytest.mark.parametrize("busy", [True, False])
def test_e7_a_rank_that_waits_for_its_device_for_too_long_ends_before_the_watchdog_of_nccl(
    monkeypatch: pytest.MonkeyPatch, device: SimpleNamespace, busy: bool
) -> None:
    """Where it waits for NCCL no exception comes, whatever call it waits in: here a lock's."""
    told: list[str] = []
    left = threading.Lock()  # waited for in native code, as by `.item()`
    left.acquire()

    def leave(self: Watchdog, verdict: str) -> None:
        if not told:
            told.append(verdict)
            left.release()

    monkeypatch.setattr(Watchdog, "_leave", leave)
    device.busy = busy
    mine = Watchdog(Ranks(0, 2), HashStore(), 0.01, device.device)
    mine.doing = "step 5"
    with mine.open():
        assert left.acquire(timeout=120 if busy else 2) == busy
    if not busy:
        assert told == []  # it is in something of its own
        return
    assert told[0].startswith("rank 0 waited for 0.01 minutes")
    assert "rank 1 gave no sign of life" in told[0]


def test_e7_a_rank_that_waits_for_its_device_is_not_told_as_one_that_is_elsewhere(
    device: SimpleNamespace,
) -> None:
    store = HashStore()
    mine = Watchdog(Ranks(0, 2), store, 0.01, device.device)
    left = threading.Lock()
    left.acquire()

    def waits() -> bool:
        return bool(json.loads(store.get("place/0"))["waits"])

    def look() -> None:
        deadline = time.monotonic() + 60
        while not waits() and time.monotonic() < deadline:
            time.sleep(0.01)
        left.release()

    mine._minutes = 10.0  # it is to tell its place, not to end
    threading.Thread(target=look).start()
    with mine.open():
        left.acquire()
        assert waits()


def test_e7_a_device_has_work_until_its_stream_is_done(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[torch.device] = []
    third = torch.device("cuda:3")

    def stream(device: torch.device) -> SimpleNamespace:
        asked.append(device)
        return SimpleNamespace(query=lambda: answers.pop(0))

    answers: list[bool] = [False, True]
    monkeypatch.setattr(torch.cuda, "current_stream", stream)
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: True)
    assert has_work(third)
    assert not has_work(third)
    assert asked == [third, third]
    monkeypatch.setattr(torch.cuda, "is_initialized", lambda: False)
    assert not has_work(third)  # to ask would open a context
    assert not has_work(torch.device("cpu"))


def test_equal_words_of_two_ranks_are_said_once() -> None:
    store, said = HashStore(), []
    first, other = Watchdog(Ranks(0, 2), store, 1.0), Watchdog(Ranks(1, 2), store, 1.0)
    with other.open():
        other.say_once("both", lambda text: said.append((1, text)))
        other.say_once("one", lambda text: said.append((1, text)))
        with first.open():
            first.say_once("both", lambda text: said.append((0, text)))
            first.say_once("both", lambda text: said.append((0, text)))
    assert said == [(0, "both"), (1, "one")]


def test_the_place_is_the_innermost_line_of_the_users_own() -> None:
    import sys

    assert _place(sys._getframe()).startswith("tests/test_watchdog.py:")
    assert _place(None) == "its start"
