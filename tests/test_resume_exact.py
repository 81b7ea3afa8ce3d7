"""Resuming gives the weights of the run that was never stopped, wherever it was stopped."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch

from ampctl.recipe.load import load_recipe
from ampctl.run import worker
from ampctl.track.metrics import read_metrics

RECIPE = """
name: exact
seed: 3
model: {_target_: own_parts.Net}
task: {_target_: own_parts.NoisyTask}
data:
  train: {_target_: own_parts.Augmented, bad: [5]}
  eval: {_target_: own_parts.Augmented, size: 9}
  batch_size: 6
  micro_batch_size: 4
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
scheduler: {_target_: ampctl.schedules.Cosine, warmup_steps: 3}
amp: {dtype: float32, init_scale: 1024, growth_interval: 3, clip_norm: 1.0}
train: {max_epochs: 3, ema_decay: 0.9}
checkpoint: {every_steps: 1, keep_last: 100, asynchronous: false}
log: {every_steps: 1}
"""
STEPS = 12


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def train(run_dir: str, *overrides: str) -> Path:
    worker.train(
        load_recipe("recipe.yaml", overrides), run_dir=Path(run_dir), resume=False, quiet=True
    )
    return Path(run_dir)


def resume(source: Path, *overrides: str, run_dir: str | None = None) -> Path:
    target = Path(run_dir) if run_dir else None
    worker.resume(source, overrides, run_dir=target, trusted=False, quiet=True)
    return target or source


def last(run_dir: Path) -> dict[str, Any]:
    return torch.load(run_dir / "checkpoints" / "latest.pt", weights_only=True)


def assert_same(a: Any, b: Any, path: str = "") -> None:
    """Compare two nests bit for bit; the environment and times are not part of a run's state."""
    if isinstance(a, dict):
        assert a.keys() == b.keys(), path
        for key in a:
            if key not in ("environment", "recipe"):
                assert_same(a[key], b[key], f"{path}.{key}")
    elif isinstance(a, list | tuple):
        assert len(a) == len(b), path
        for i, (x, y) in enumerate(zip(a, b, strict=True)):
            assert_same(x, y, f"{path}[{i}]")
    elif isinstance(a, torch.Tensor):
        assert torch.equal(a, b), path
    else:
        assert a == b or (a != a and b != b), path


def losses(run_dir: Path) -> dict[int, Any]:
    return {
        e["step"]: e["loss"]
        for e in read_metrics(run_dir / "metrics.jsonl")
        if e["event"] == "train"
    }


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_rs1_rs11_rs12_resume_is_exact_at_every_step(dtype: str) -> None:
    whole = train("whole", f"amp.dtype={dtype}")
    expected = last(whole)
    assert expected["progress"]["step"] == STEPS
    assert expected["progress"]["skipped"] == 3
    for step in range(1, STEPS):
        source = whole / "checkpoints" / f"step-{step:08d}.pt"
        again = resume(source, run_dir=f"from-{step}")
        assert_same(last(again), expected)
        assert losses(again) == {k: v for k, v in losses(whole).items() if k > step}


@pytest.mark.parametrize("data", ["Augmented, bad: [5]", "Stream", "StatefulStream"])
def test_resume_is_exact_with_two_workers_and_with_streams(data: str) -> None:
    text = RECIPE.replace("own_parts.Augmented, bad: [5]", f"own_parts.{data}")
    text = text.replace("scheduler: {_target_: ampctl.schedules.Cosine, warmup_steps: 3}", "")
    Path("recipe.yaml").write_text(text.replace("Stateful", "") if "Stateful" in data else text)
    expected = last(train("none"))
    Path("recipe.yaml").write_text(text)
    for workers in (0, 2):
        whole = train(f"whole-{workers}", f"data.num_workers={workers}")
        if data.startswith("Augmented") or not workers:
            assert_same(last(whole)["model"], expected["model"])
        for step in (4, 5, 9) if workers else (2, 4, 5, 9):
            source = whole / "checkpoints" / f"step-{step:08d}.pt"
            again = resume(source, run_dir=f"from-{workers}-{step}")
            assert_same(last(again), last(whole))


def test_evaluation_changes_nothing_in_training() -> None:
    assert_same(
        last(train("often", "train.eval_every_steps=1"))["model"],
        last(train("never", "data.eval=null"))["model"],
    )


def test_rs10_a_complete_run_says_so_and_can_be_extended(
    capsys: pytest.CaptureFixture[str],
) -> None:
    short = train("short", "train.max_epochs=2", "scheduler=null")
    before = (short / "metrics.jsonl").read_bytes(), (short / "checkpoints/latest.pt").read_bytes()
    capsys.readouterr()
    resume(short)
    assert "already complete (2 of 2 epochs)" in capsys.readouterr().out
    after = (short / "metrics.jsonl").read_bytes(), (short / "checkpoints/latest.pt").read_bytes()
    assert before == after
    resume(short, "train.max_epochs=3")
    whole = train("long", "scheduler=null")
    assert_same(last(short), last(whole))


def test_rs5_lr_goes_on_where_it_was() -> None:
    whole = train("whole")
    rates = {
        e["step"]: e["lr"] for e in read_metrics(whole / "metrics.jsonl") if e["event"] == "train"
    }
    again = resume(whole / "checkpoints/step-00000005.pt", run_dir="again")
    for event in read_metrics(again / "metrics.jsonl"):
        if event["event"] == "train":
            assert event["lr"] == rates[event["step"]]
    assert len(set(rates.values())) > 5


@pytest.mark.parametrize(
    "scheduler",
    [
        "{_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.02}",
        "{_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: 12}",
        "{_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, patience: 0, mode: max}",
    ],
)
def test_resume_is_exact_with_torch_schedulers(scheduler: str) -> None:
    Path("recipe.yaml").write_text(
        RECIPE.replace("{_target_: ampctl.schedules.Cosine, warmup_steps: 3}", scheduler)
    )
    whole = train("whole", "amp.dtype=float16", "train.eval_every_steps=2")
    assert len({e["lr"] for e in read_metrics(whole / "metrics.jsonl") if "lr" in e}) > 1
    for step in (1, 4, 8):
        again = resume(whole / f"checkpoints/step-{step:08d}.pt", run_dir=f"from-{step}")
        assert_same(last(again), last(whole))


def test_a_new_learning_rate_wins_on_resuming() -> None:
    whole = train("whole", "scheduler=null")
    again = resume(whole / "checkpoints/step-00000004.pt", "optimizer.lr=5e-3", run_dir="again")
    rates = {e["lr"] for e in read_metrics(again / "metrics.jsonl") if e["event"] == "train"}
    assert rates == {5e-3}


def test_rs15_early_stop_patience_and_best_are_restored() -> None:
    stop = ("train.early_stop={patience: 2}", "optimizer.lr=0", "train.max_epochs=9")
    whole = train("whole", *stop)
    assert last(whole)["progress"]["early_stop_bad"] == 2
    step = last(whole)["progress"]["step"]
    again = resume(whole / "checkpoints/step-00000004.pt", run_dir="again")
    assert last(again)["progress"]["step"] == step
    assert last(again)["progress"]["best"] == last(whole)["progress"]["best"]


def test_data_of_another_length_is_refused() -> None:
    from ampctl.errors import CheckpointError

    whole = train("whole")
    with pytest.raises(CheckpointError, match="had 22 samples when it was saved and has 24 now"):
        resume(whole / "checkpoints/step-00000004.pt", "data.train.size=24", run_dir="again")
