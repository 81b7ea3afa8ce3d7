"""An evaluation that is not finite: never the best one, and one that patience counts."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ddp import RECIPE, TESTS, events, ranks
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.checkpoint.index import read_index
from ampctl.recipe.load import load_recipe
from ampctl.run import worker

NAN, INF = math.nan, math.inf
FINE = [(0.9, 0.3), (0.8, 0.4)]


class Scripted:
    """Evaluations give these losses and scores, one after the other."""

    done = 0

    def __init__(self, series: Any) -> None:
        self.series = [(float(loss), float(score)) for loss, score in series]

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss = F.cross_entropy(model(batch[0]).float(), batch[1])
        if torch.is_grad_enabled():
            return loss
        Scripted.done += 1
        value, score = self.series[Scripted.done - 1]
        return loss * 0 + value, score

    def metrics(self, score: float, batch: Any) -> dict[str, Tensor | float]:
        return {"score": score}


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    monkeypatch.setattr(Scripted, "done", 0)
    text = RECIPE.replace("eval_batch_size: 2", "eval_batch_size: 100").replace(
        "test_ddp.Counted", "test_bad_evaluations.Scripted, series: []"
    )
    Path("recipe.yaml").write_text(text.replace("keep_last: 100", "keep_last: 1, keep_best: 1"))


def train(series: Any, *changes: str) -> None:
    told = [[f"{loss}", f"{score}"] for loss, score in series]
    overrides = (f"task.series={told}", "train.eval_every_steps=1", *changes)
    overrides += (f"train.max_steps={len(series)}", "train.max_epochs=null")
    loaded = load_recipe("recipe.yaml", overrides)
    worker.train(loaded, run_dir=Path("d"), resume=False, quiet=True)


def best() -> int:
    return int(Path("d/checkpoints/best.pt").resolve().stem.removeprefix("step-"))


@pytest.mark.parametrize(
    ("monitor", "mode"), [("eval/loss", "min"), ("eval/score", "min"), ("eval/score", "max")]
)
@pytest.mark.parametrize("bad", [(NAN, 0.0), (NAN, 9.0), (INF, 0.0), (-INF, 9.0), (0.7, NAN)])
def test_a2_an_evaluation_that_is_not_finite_is_never_best(
    monitor: str, mode: str, bad: Any, capsys: pytest.CaptureFixture[str]
) -> None:
    if monitor == "eval/loss" and not math.isnan(bad[1]):
        return
    settings = (f"checkpoint.monitor={monitor}", f"checkpoint.mode={mode}")
    train([*FINE, bad, bad], *settings)
    expected = {"min": 1, "max": 2}[mode]
    if monitor == "eval/loss":
        expected = 3  # its loss is fine, and the metric that is not is not watched
    assert best() == expected
    entries = read_index(Path("d"))
    assert expected in [entry.step for entry in entries]
    if monitor != "eval/loss":
        said = capsys.readouterr().err
        assert "step 3: eval/" in said
        assert "this evaluation counts as one that is not better than any" in said


def test_a2_the_first_one_of_all_may_be_bad_and_a_resume_goes_on_from_it() -> None:
    watch = ("checkpoint.monitor=eval/score", "checkpoint.mode=max")
    train([(NAN, 1.0)], *watch)
    assert not Path("d/checkpoints/best.pt").is_symlink()
    Scripted.done = 0
    more = [[f"{loss}", f"{score}"] for loss, score in [(INF, 2.0), (0.5, 0.1), (NAN, 5.0)]]
    worker.resume(
        Path("d"),
        [f"task.series={more}", "train.max_steps=4"],
        run_dir=None,
        trusted=True,
        quiet=True,
    )
    assert best() == 3


def test_a2_patience_and_a_plateau_count_it() -> None:
    early = "train.early_stop={monitor: eval/score, mode: max, patience: 2}"
    plateau = (
        "scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, mode: max, "
        "patience: 0, factor: 0.1}"
    )
    watch = ("checkpoint.monitor=eval/score", "checkpoint.mode=max")
    train([(0.5, 0.5), (NAN, 0.9), (INF, 0.8), (0.1, 0.9)], early, plateau, *watch)
    assert events("d", "stop")[-1]["reason"] == "early_stop"
    assert [event["step"] for event in events("d", "eval")] == [1, 2, 3]
    rates = [event["lr"] for event in events("d", "train")]
    assert rates == pytest.approx([1e-2, 1e-2, 1e-3])  # an inf would be its best for ever


def test_a2_ranks_agree_on_it() -> None:
    told = [["0.5", "0.5"], ["nan", "0.9"]]
    changes = (f"task.series={told}", "train.eval_every_steps=1", "train.max_steps=2")
    watch = ("checkpoint.monitor=eval/score", "checkpoint.mode=max", "train.max_epochs=null")
    ranks(2, "d", *changes, *watch)
    assert best() == 1


class Absent(Scripted):
    """Has no loss in its second evaluation."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        found = super().loss(model, batch)
        return None if not torch.is_grad_enabled() and Scripted.done == 2 else found


def test_a2_an_evaluation_of_nothing_is_told_and_the_run_goes_on(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train([(0.5, 0.1), (0.1, 0.1), (0.6, 0.1)], "task._target_=test_bad_evaluations.Absent")
    losses = [float(event["eval/loss"]) for event in events("d", "eval")]
    assert losses == pytest.approx([0.5, NAN, 0.6], nan_ok=True)
    assert best() == 1
    assert "warning: step 2: data.eval: there is nothing to average over" in capsys.readouterr().err
