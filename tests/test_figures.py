"""What a run tells of its steps: the last one always, and how fast it is."""

from __future__ import annotations

import os
import signal
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ddp import RECIPE, TESTS, Counted, events, ranks
from torch import nn

from ampctl.errors import NumericsError, PreemptedError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker
from ampctl.run.speed import Speed


class Leaves(Counted):
    """Sends its process a signal, or raises, in a step of the training."""

    def __init__(self, at: int, how: str) -> None:
        self.at, self.how = at, how

    def loss(self, model: nn.Module, batch: Any, step: int) -> Any:
        if torch.is_grad_enabled() and step + 1 == self.at and os.environ.get("RANK", "0") == "0":
            if self.how == "raise":
                raise ZeroDivisionError("mine")
            os.kill(os.getpid(), signal.SIGTERM)
        return super().loss(model, batch)


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    Path("recipe.yaml").write_text(RECIPE.replace("log: {every_steps: 1}", ""))


def train(*changes: str) -> list[int]:
    loaded = load_recipe("recipe.yaml", changes)
    try:
        worker.train(loaded, run_dir=Path("d"), resume=False, quiet=True)
    finally:
        logged = events("d", "train")
        last = logged[-1]
        assert last["samples_per_s"] > 0
        assert last["step_ms"] > 0
    return [event["step"] for event in logged]


@pytest.mark.parametrize(
    ("changes", "steps"),
    [
        (("train.max_steps=3", "train.max_epochs=null"), [3]),
        (("train.max_epochs=1",), [3]),
        (("log.every_steps=4",), [4, 8, 9]),
        (("log.every_steps=3",), [3, 6, 9]),
        (
            (
                "data.train={_target_: test_ddp.Stream, size: 22}",
                "scheduler=null",
                "log.every_steps=2",
            ),
            [2, 4, 6, 8, 9],
        ),
    ],
)
def test_d19_the_last_step_is_always_logged(changes: tuple[str, ...], steps: list[int]) -> None:
    assert train(*changes) == steps
    whole = events("d", "train")
    assert all(isinstance(event["loss"], float) for event in whole)


def test_d19_where_a_run_stops_early() -> None:
    early = "train.early_stop={monitor: eval/index, mode: max, patience: 1}"
    assert train(early, "train.max_epochs=30")[-1] == events("d", "stop")[-1]["step"]
    assert events("d", "stop")[-1]["reason"] == "early_stop"


def test_d19_where_a_signal_stops_it() -> None:
    with pytest.raises(PreemptedError):
        train("task={_target_: test_figures.Leaves, at: 2, how: signal}")
    assert [event["step"] for event in events("d", "train")] == [2]


def test_d19_where_numbers_stop_it() -> None:
    with pytest.raises(NumericsError):
        train("data.train.bad=[9]", "amp.nonfinite=stop", "data.shuffle=false")
    assert [event["step"] for event in events("d", "train")] == [2]
    assert events("d", "train")[-1]["skipped"] == 1


def test_d19_where_an_error_stops_it() -> None:
    with pytest.raises(ZeroDivisionError):
        train("task={_target_: test_figures.Leaves, at: 4, how: raise}")
    assert events("d", "train")[-1]["step"] in (2, 3)  # what was known by then


def test_d19_ranks_put_their_losses_together() -> None:
    stop = "train.early_stop={monitor: eval/index, mode: max, patience: 1}"
    common = (stop, "data.shuffle=false")
    ranks(2, "a", *common)
    ranks(2, "b", *common, "log.every_steps=1")
    (mine,), theirs = events("a", "train"), events("b", "train")
    assert mine["step"] == theirs[-1]["step"]
    assert mine["loss"] == pytest.approx(theirs[-1]["loss"], rel=1e-5)


def test_d19_only_steps_that_are_logged_are_measured(monkeypatch: pytest.MonkeyPatch) -> None:
    from ampctl.run import loop

    measured = []
    real = loop.train_step

    def noted(*args: Any, measure: bool, **options: Any) -> Any:
        measured.append(measure)
        return real(*args, measure=measure, **options)

    monkeypatch.setattr(loop, "train_step", noted)
    train("log.every_steps=4")
    assert measured == [False, False, False, True] * 2 + [True]


def test_d22_the_rate_is_over_some_steps_and_a_second_without_pauses() -> None:
    now = 0.0
    speed = Speed(10, clock=lambda: now)
    speed.go(0, 0)
    now = 2.0
    assert speed.rates(speed.now(10, 200)) == (100.0, 0.2)
    speed.pause()
    now = 100.0  # an evaluation
    speed.go(10, 200)
    now = 100.001  # a step that was queued before
    samples_per_s, _ = speed.rates(speed.now(11, 220))
    assert samples_per_s == pytest.approx(220 / 2.001)
    now = 104.0  # slower from here on: the window moves on
    assert speed.rates(speed.now(30, 600))[0] == pytest.approx((600 - 220) / 3.999)
    now = 104.5  # steps enough, and too short a time
    assert speed.rates(speed.now(45, 900))[0] == pytest.approx((900 - 220) / 4.499)


def test_d22_a_resumed_run_counts_from_where_it_goes_on() -> None:
    now = 50.0
    speed = Speed(10, clock=lambda: now)
    speed.go(100, 2000)
    assert speed.rates(speed.now(100, 2000)) == (None, None)
    now = 51.0
    assert speed.rates(speed.now(105, 2100)) == (100.0, 0.2)
