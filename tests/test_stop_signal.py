"""Heeding signals together: ranks that look equally often agree at the same look."""

from __future__ import annotations

import signal
import threading
from concurrent.futures import ThreadPoolExecutor

import pytest
from processes import DEADLINE_S

from ampctl.distributed.env import StopSignals
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.distributed.stop_signal import MOST_LOOKS, StopSignal


class Together:
    """Two ranks in two threads, with a clock each; a collective is where both meet."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.collectives = 0
        self.signals = [StopSignals(), StopSignals()]
        self._barrier = threading.Barrier(2, timeout=DEADLINE_S)
        self._said: dict[int, tuple[float, ...]] = {}
        self._clock = threading.local()
        self.heeds: list[StopSignal] = []
        monkeypatch.setattr(Ranks, "largest", lambda ranks, *said: self._largest(ranks, said))
        monkeypatch.setattr("time.monotonic", lambda: getattr(self._clock, "now", 0.0))
        self.heeds = [StopSignal(each, Ranks(rank, 2)) for rank, each in enumerate(self.signals)]

    def _largest(self, ranks: Ranks, said: tuple[float, ...]) -> list[float]:
        self._said[ranks.rank] = said
        self._barrier.wait()
        agreed = [max(column) for column in zip(*self._said.values(), strict=True)]
        self.collectives += ranks.is_first
        self._barrier.wait()
        return agreed

    def look(self, times: int, seconds: float, *, is_time: bool = False) -> list[int | None]:
        """Let each rank look so often; return at which look it knew of a signal."""

        def rank(stop_signal: StopSignal) -> int | None:
            self._clock.now = 0.0
            stop_signal.begin()
            for place in range(times):
                self._clock.now += seconds
                self.is_due = stop_signal.look(is_time=is_time)
                if stop_signal.received is not None:
                    return place
            return None

        with ThreadPoolExecutor(2) as pool:
            return list(pool.map(rank, self.heeds))


def test_one_process_heeds_at_once() -> None:
    signals = StopSignals()
    stop_signal = StopSignal(signals, ALONE)
    assert stop_signal.received is None
    signals.received = signal.SIGTERM
    assert stop_signal.received is signal.SIGTERM
    assert stop_signal.look(is_time=True)
    assert not stop_signal.look()


@pytest.mark.parametrize(("step_s", "most"), [(0.001, 500 / MOST_LOOKS + 8), (2.0, 500)])
def test_ranks_meet_seldom_where_steps_are_short(
    monkeypatch: pytest.MonkeyPatch, step_s: float, most: float
) -> None:
    together = Together(monkeypatch)
    assert together.look(500, step_s) == [None, None]
    assert 1 < together.collectives <= most


@pytest.mark.parametrize("rank", [0, 1])
def test_both_know_of_a_signal_at_the_same_look(monkeypatch: pytest.MonkeyPatch, rank: int) -> None:
    together = Together(monkeypatch)
    together.signals[rank].received = signal.SIGUSR1
    assert together.look(3, 5.0) == [0, 0]  # the first look after `begin` is one together
    assert [stop_signal.received for stop_signal in together.heeds] == [signal.SIGUSR1] * 2


def test_the_clock_of_the_first_rank_counts(monkeypatch: pytest.MonkeyPatch) -> None:
    together = Together(monkeypatch)
    together.look(1, 1.0, is_time=True)
    assert together.is_due
