"""Optimizers that train at one point and are evaluated at another: ``train()`` and ``eval()``."""

from __future__ import annotations

import copy
import importlib.util
import math
from pathlib import Path
from typing import Any

import model_parts
import own_parts
import pytest
import torch
from states import batches, make_state, run, spoil
from test_resume_changes import RECIPE
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner

from ampctl import load_model
from ampctl.cli import app
from ampctl.engine.boundary import Boundary
from ampctl.engine.ema import OptimizerAverage, WeightAverage
from ampctl.engine.step import settle, train_step
from ampctl.recipe.load import load_recipe
from ampctl.run import worker
from ampctl.run.init_from import build
from ampctl.track.metrics import read_metrics

OWN = "optimizer={_target_: model_parts.TwoPoints, lr: 0.1}"
NET = ("scheduler=null", "model={_target_: own_parts.Net, dropout: 0.0}")
KINDS = [OWN]
if importlib.util.find_spec("schedulefree"):
    KINDS += [
        f"optimizer={{_target_: schedulefree.{kind}, lr: 0.01}}"
        for kind in ("AdamWScheduleFree", "SGDScheduleFree", "RAdamScheduleFree")
    ]


@pytest.fixture(autouse=True)
def _recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def saved(path: str) -> dict[str, Any]:
    return torch.load(path, weights_only=True)


def train(*overrides: str, run_dir: str = "a") -> dict[str, Any]:
    loaded = load_recipe("recipe.yaml", (*NET, *overrides))
    worker.train(loaded, run_dir=Path(run_dir), resume=False, quiet=True)
    return saved(f"{run_dir}/checkpoints/latest.pt")


def same(some: Any, other: Any) -> bool:
    return all(torch.equal(value, other[name]) for name, value in some.items())


@pytest.mark.parametrize("optimizer", KINDS)
def test_a6_the_weights_of_training_and_of_evaluation_are_those_by_hand(optimizer: str) -> None:
    """However often there are evaluations and saves, of which a loop by hand has none."""
    job = build(load_recipe("recipe.yaml", (*NET, optimizer)))
    windows = [window for epoch in (0, 1) for window, _ in job.train_data.windows(epoch, 0)]
    model = copy.deepcopy(job.state.bare)
    (updater,) = job.state.updaters
    groups = updater.optimizer.defaults
    by_hand = type(updater.optimizer)(model.parameters(), lr=groups["lr"])
    by_hand.train()
    for ((x, y),) in windows:
        by_hand.zero_grad()
        F.cross_entropy(model(x), y).backward()
        by_hand.step()
    often = train(optimizer, "train.eval_every_steps=1", "checkpoint.asynchronous=true")
    assert same(model.state_dict(), often["model"])
    by_hand.eval()
    assert same(model.state_dict(), often["ema"])
    assert not torch.equal(often["ema"]["first.weight"], often["model"]["first.weight"])
    seldom = train(optimizer, "train.eval_every_steps=8", "checkpoint.every_steps=8", run_dir="c")
    assert same(often["model"], seldom["model"])


@pytest.mark.parametrize("optimizer", KINDS)
@pytest.mark.parametrize("step", [1, 4, 7])
def test_a6_a_run_resumes_exactly(optimizer: str, step: int) -> None:
    whole = train(optimizer)
    source = Path(f"a/checkpoints/step-{step:08d}.pt")
    worker.resume(source, (), run_dir=Path("b"), trusted=False, quiet=True)
    again = saved("b/checkpoints/latest.pt")
    assert same(whole["model"], again["model"])
    assert same(whole["ema"], again["ema"])
    assert whole["optimizer"]["param_groups"] == again["optimizer"]["param_groups"]


def test_a6_another_rate_does_not_begin_anew_what_the_optimizer_counts() -> None:
    train(OWN)
    source = Path("a/checkpoints/step-00000004.pt")
    changed = ("optimizer.lr=0.05", "optimizer.beta=0.8")
    worker.resume(source, changed, run_dir=Path("b"), trusted=False, quiet=True)
    (group,) = saved("b/checkpoints/latest.pt")["optimizer"]["param_groups"]
    assert (group["k"], group["lr"], group["beta"], group["train_mode"]) == (8, 0.05, 0.8, True)


def test_a6_what_is_for_use_has_the_weights_for_evaluation() -> None:
    """Evaluations, ``eval``, ``export``, ``load_model``, ``--init-from`` and the best file."""
    whole = train(OWN, "train.eval_every_steps=8")
    assert same(whole["ema"], saved("a/checkpoints/best.pt")["ema"])
    assert same(whole["ema"], load_model("a").state_dict())
    (evaluation,) = (each for each in read_metrics("a/metrics.jsonl") if each["event"] == "eval")
    command = CliRunner().invoke(app, ["eval", "a", "--trust"])
    assert f"eval/loss:     {evaluation['eval/loss']}" in command.stdout, command.stderr
    assert CliRunner().invoke(app, ["export", "a", "w.pt"]).exit_code == 0
    assert same(whole["ema"], torch.load("w.pt", weights_only=True))
    model = own_parts.Net(dropout=0.0).eval()
    model.load_state_dict(whole["ema"])
    data = own_parts.Augmented(size=9)
    assert math.isfinite(float(model(data.x).sum()))


def test_a6_a_skipped_step_leaves_no_trace() -> None:
    torch.manual_seed(0)
    model = own_parts.Net(dropout=0.0)
    state = make_state(model, model_parts.TwoPoints(model.parameters()), "float32")
    (updater,) = state.updaters
    state.ema = OptimizerAverage(model, [updater.optimizer])
    run(state, [batches(1)])
    before = copy.deepcopy([model.state_dict(), state.ema.state_dict()])
    (report,) = run(state, [[spoil(batches(1)[0])]])
    assert report.skipped
    assert same(before[0], model.state_dict())
    assert same(before[1], state.ema.state_dict())


def test_a6_of_several_optimizers_each_is_asked() -> None:
    both = (
        "optimizer=null",
        'optimizer={one: {_target_: model_parts.TwoPoints, params: "first.*"}, '
        'two: {_target_: torch.optim.SGD, lr: 0.1, params: "*"}}',
        "amp.all_or_nothing=true",
    )
    whole = train(*both)
    same_there = [n for n in whole["ema"] if torch.equal(whole["ema"][n], whole["model"][n])]
    assert "head.weight" in same_there
    assert "first.weight" not in same_there
    source = Path("a/checkpoints/step-00000003.pt")
    worker.resume(source, (), run_dir=Path("b"), trusted=False, quiet=True)
    assert same(whole["ema"], saved("b/checkpoints/latest.pt")["ema"])


def test_a6_an_average_of_ours_beside_it_is_refused() -> None:
    done = CliRunner().invoke(app, ["check", "recipe.yaml", *NET, OWN, "train.ema_decay=0.9"])
    assert done.exit_code == 2
    assert "train.ema_decay: TwoPoints keeps an average of the weights itself" in done.stderr
    assert "ready" in CliRunner().invoke(app, ["check", "recipe.yaml", *NET, OWN]).stdout


def test_a6_an_evaluation_that_fails_gives_the_weights_of_training_back() -> None:
    model = nn.Linear(8, 4)
    state = make_state(model, model_parts.TwoPoints(model.parameters()), "float32")
    (updater,) = state.updaters
    average = OptimizerAverage(model, [updater.optimizer])
    for window in ([batch] for batch in batches(3)):
        train_step(state, window)
    settle(state)
    before: Tensor = model.weight.detach().clone()

    def fails() -> None:
        with average.applied(Boundary()):
            assert not torch.equal(model.weight, before)
            raise KeyError

    with pytest.raises(KeyError):
        fails()
    assert torch.equal(model.weight, before)
    assert updater.optimizer.param_groups[0]["train_mode"]


def test_the_weights_of_training_are_taken_back_from_an_evaluation_that_has_not_ended() -> None:
    model = nn.Linear(2, 2)
    average = WeightAverage(model, 0.5)
    averaged = model.weight.detach().clone()
    with torch.no_grad():
        model.weight.add_(1.0)
    trained = model.weight.detach().clone()
    evaluation = average.applied(Boundary())
    with evaluation:
        assert torch.equal(model.weight, averaged)
        for _ in range(2):
            average.take_back()
            assert torch.equal(model.weight, trained)
