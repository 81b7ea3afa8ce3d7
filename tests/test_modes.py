"""Which parts of a model are in train mode, where the model has chosen that itself."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume_changes import RECIPE
from typer.testing import CliRunner

from ampctl.cli import app
from ampctl.recipe.load import load_recipe
from ampctl.run import worker
from ampctl.run.init_from import build

FROZEN = "model={_target_: model_parts.Frozen}"
TURNS = (
    "task={_target_: model_parts.Both}",
    "scheduler=null",
    "optimizer=null",
    'optimizer={all: {_target_: torch.optim.SGD, lr: 0.1, params: "*"}}',
)


@pytest.fixture(autouse=True)
def _recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def saved(run: str) -> dict[str, Any]:
    return torch.load(f"{run}/checkpoints/latest.pt", weights_only=True)


def train(*overrides: str) -> dict[str, Any]:
    loaded = load_recipe("recipe.yaml", overrides)
    worker.train(loaded, run_dir=Path("a"), resume=False, quiet=True)
    return saved("a")


@pytest.mark.parametrize(
    "overrides",
    [
        (),
        TURNS,
        ("train.compile={backend: eager}",),
        ("data.micro_batch_size=3", "amp.modules={backbone: bfloat16}"),
    ],
)
def test_a4_a_part_that_is_built_in_eval_mode_stays_so(overrides: tuple[str, ...]) -> None:
    """Through steps, evaluations, saves and a resume; the model itself looks at its modes."""
    whole = train(FROZEN, "train.eval_every_steps=2", *overrides)
    assert whole["progress"]["updates"] == 8
    assert whole["model"]["backbone.1.num_batches_tracked"] == 0
    assert torch.equal(whole["model"]["backbone.1.running_mean"], torch.zeros(8))
    source = Path("a/checkpoints/step-00000003.pt")
    worker.resume(source, (), run_dir=Path("b"), trusted=False, quiet=True)
    again = saved("b")["model"]
    assert all(torch.equal(value, again[name]) for name, value in whole["model"].items())


def test_a4_a_model_in_eval_mode_as_a_whole_is_set_to_train_as_a_whole() -> None:
    job = build(load_recipe("recipe.yaml", ["model={_target_: model_parts.Frozen, whole: true}"]))
    assert all(module.training for module in job.state.bare.modules())


def test_a4_a_model_that_sees_to_its_modes_itself_is_told_of_both() -> None:
    whole = train("model={_target_: model_parts.Keeps}", "train.eval_every_steps=4")
    assert whole["model"]["backbone.1.num_batches_tracked"] == 0
    job = build(load_recipe("recipe.yaml", ["model={_target_: model_parts.Keeps}"]))
    assert job.state.bare.told == [True]


def test_a4_what_stays_in_eval_mode_is_said() -> None:
    checked = CliRunner().invoke(app, ["check", "recipe.yaml", FROZEN])
    assert "eval mode:   backbone, as the model is built" in checked.stdout
    trained = CliRunner().invoke(app, ["train", "recipe.yaml", FROZEN, "--run-dir", "a"])
    assert "left in eval mode, as the model is built: backbone\n" in trained.stdout
