"""Resuming with another learning rate, schedule, kernel, patience or stream."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ampctl.errors import CheckpointError, RecipeError, UsageError
from ampctl.recipe.load import load_recipe
from ampctl.track.metrics import read_metrics
from ampctl.train import worker

RECIPE = """
name: changes
model: {_target_: own_parts.Net}
task: {_target_: ampctl.tasks.Classification}
data:
  train: {_target_: own_parts.Augmented, size: 24}
  eval: {_target_: own_parts.Augmented, size: 9}
  batch_size: 6
optimizer: {_target_: torch.optim.SGD, lr: 0.1, momentum: 0.9}
scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 3, gamma: 0.1}
amp: {dtype: float32}
train: {max_steps: 8}
checkpoint: {every_steps: 1, keep_last: 100, asynchronous: false}
log: {every_steps: 1}
"""


@pytest.fixture(autouse=True)
def _recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def train(*overrides: str) -> None:
    worker.train(load_recipe("recipe.yaml", overrides), run_dir=Path("a"), resume=False, quiet=True)


def resume(step: int, *overrides: str) -> None:
    source = Path(f"a/checkpoints/step-{step:08d}.pt")
    worker.resume(source, overrides, run_dir=Path("b"), trusted=False, quiet=True)


def rates(run_dir: str = "b") -> list[float]:
    return [e["lr"] for e in read_metrics(f"{run_dir}/metrics.jsonl") if e["event"] == "train"]


def test_a_new_rate_scales_what_a_torch_schedule_has_made_of_the_old_one() -> None:
    train()
    assert rates("a") == pytest.approx([0.1] * 3 + [0.01] * 3 + [0.001] * 2)
    resume(4, "optimizer.lr=0.2")
    assert rates() == pytest.approx([0.02, 0.02, 0.002, 0.002])


def test_a_new_rate_counts_with_a_plateau_schedule_too() -> None:
    plateau = "scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, patience: 50}"
    train(plateau)
    resume(4, "optimizer.lr=0.05")
    assert rates() == pytest.approx([0.05] * 4)


def test_new_constants_of_the_same_schedule_count_from_the_same_update() -> None:
    train()
    resume(4, "scheduler.gamma=0.5", "scheduler.step_size=5")
    assert rates() == pytest.approx([0.01, 0.005, 0.005, 0.005])


def test_a_pure_schedule_takes_over_from_any_other() -> None:
    train()
    resume(4, "scheduler={_target_: ampctl.schedules.Linear, total_steps: 8}")
    train_rates = rates()
    assert train_rates == sorted(train_rates, reverse=True)
    assert train_rates[0] == pytest.approx(0.1 * 4 / 8, rel=0.3)


def test_a_torch_schedule_cannot_take_over_from_another_and_says_so() -> None:
    train("scheduler={_target_: ampctl.schedules.Cosine}")
    with pytest.raises(CheckpointError, match="its schedule is function, and StepLR cannot go on"):
        resume(4, "scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}")


@pytest.mark.parametrize(("saved", "wanted"), [("false", "true"), ("true", "false")])
def test_the_kernel_is_the_recipes_not_the_checkpoints(saved: str, wanted: str) -> None:
    adam = "optimizer={_target_: torch.optim.AdamW, lr: 0.01, fused: %s}"
    train(adam % saved)
    resume(4, adam % wanted)
    groups = torch.load("b/checkpoints/latest.pt", weights_only=True)["optimizer"]["param_groups"]
    assert groups[0]["fused"] is (wanted == "true")


def test_more_patience_lets_a_run_that_stopped_early_go_on() -> None:
    stop = ("optimizer.lr=0", "scheduler=null", "train.max_steps=null", "train.max_epochs=9")
    train(*stop, "train.early_stop={patience: 1}")
    stopped = torch.load("a/checkpoints/latest.pt", weights_only=True)["progress"]["step"]
    worker.resume(
        Path("a"), ["train.early_stop.patience=3"], run_dir=None, trusted=False, quiet=True
    )
    went = torch.load("a/checkpoints/latest.pt", weights_only=True)["progress"]["step"]
    assert went > stopped


def test_plateau_without_an_evaluation_is_refused() -> None:
    with pytest.raises(RecipeError, match=r"ReduceLROnPlateau needs data\.eval"):
        train("scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau}", "data.eval=null")


def test_a_stream_that_can_be_read_only_once_is_told() -> None:
    with pytest.raises(UsageError, match="gave no step in epoch 1"):
        train("data.train={_target_: own_parts.Once}", "scheduler=null")


def test_a_stream_that_goes_on_where_it_was_resumes_between_epochs() -> None:
    data = ("data.train={_target_: own_parts.Rewinding}", "scheduler=null", "data.eval=null")
    stream = (*data, "train.max_steps=null", "train.max_epochs=3", "checkpoint.every_steps=null")
    train(*stream)
    whole = torch.load("a/checkpoints/latest.pt", weights_only=True)
    resume(3)
    again = torch.load("b/checkpoints/latest.pt", weights_only=True)
    assert again["progress"]["step"] == whole["progress"]["step"] == 9
    for name, value in whole["model"].items():
        assert torch.equal(again["model"][name], value), name


def test_an_average_of_half_weights_is_refused() -> None:
    with pytest.raises(UsageError, match=r"train\.ema_decay asks for stands still"):
        train("model={_target_: own_parts.HalfNet}", "train.ema_decay=0.9", "amp.dtype=bfloat16")


def damaged(change: Any) -> None:
    path = Path("a/checkpoints/step-00000004.pt")
    payload = torch.load(path, weights_only=True)
    change(payload)
    torch.save(payload, path.with_name("other.pt"))


@pytest.mark.parametrize(
    ("change", "lacks"),
    [
        (lambda p: p.update(rng=[]), "a state in `rng`"),
        (lambda p: p.update(optimizer={}), "`optimizer.param_groups`"),
        (lambda p: p["progress"].update(step="x"), "whole numbers in `progress`"),
    ],
)
def test_a_checkpoint_that_is_wrong_inside_is_told_in_words(change: Any, lacks: str) -> None:
    train()
    damaged(change)
    with pytest.raises(CheckpointError, match=lacks):
        worker.resume(
            Path("a/checkpoints/other.pt"), (), run_dir=Path("b"), trusted=False, quiet=True
        )
