"""Faults that an attack on the whole program found, each as it was found."""

from __future__ import annotations

import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from states import make_state, run
from torch import Tensor, nn

from ampctl.checkpoint.store import load
from ampctl.errors import AmpctlError, CheckpointError, MachineError, RecipeError, UsageError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker

RECIPE = """
name: attacked
model: {_target_: own_parts.Net}
task: {_target_: ampctl.tasks.Classification}
data: {train: {_target_: own_parts.Augmented, size: 24}, batch_size: 6}
optimizer: {_target_: torch.optim.AdamW, lr: 0.01}
amp: {dtype: float32}
train: {max_epochs: 3}
checkpoint: {every_steps: 1, keep_last: 100, asynchronous: false}
"""


@pytest.fixture(autouse=True)
def _recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def train(*overrides: str, run_dir: str = "a") -> dict[str, Any]:
    loaded = load_recipe("recipe.yaml", overrides)
    worker.train(loaded, run_dir=Path(run_dir), resume=False, quiet=True)
    return torch.load(f"{run_dir}/checkpoints/latest.pt", weights_only=True)


def resume(source: str, *overrides: str, run_dir: str | None = "b") -> dict[str, Any]:
    where = Path(run_dir) if run_dir else None
    worker.resume(Path(source), overrides, run_dir=where, trusted=False, quiet=True)
    return torch.load(f"{run_dir or 'a'}/checkpoints/latest.pt", weights_only=True)


class Buffers(nn.Module):
    """Buffers that are aliased, resized in place, and written to by every forward."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        count = torch.zeros(1)
        self.register_buffer("count", count)
        self.alias = count
        self.register_buffer("empty", torch.empty(0))
        self.register_buffer("other", torch.arange(4.0) + 100)

    def forward(self, x: Tensor) -> Tensor:
        self.alias += 1
        self.empty.resize_(3).fill_(7)
        return self.layer(x)


def test_buffers_may_be_aliased_and_resized() -> None:
    model = Buffers()
    state = make_state(model, torch.optim.SGD(model.parameters(), lr=0.1), "float32")
    good = (torch.randn(6, 8), torch.randint(0, 4, (6,)))
    bad = (good[0] * float("nan"), good[1])
    run(state, [[bad], [good], [bad], [good], [good]])
    assert model.count.item() == 3
    assert model.count is model.alias
    assert model.empty.tolist() == [7, 7, 7]
    assert model.other.tolist() == [100, 101, 102, 103]


def test_a_stateful_stream_saved_after_its_short_last_batch_is_not_read_again() -> None:
    data = "data.train={_target_: own_parts.StatefulStream, size: 20}"
    whole = train(data)
    again = resume("a/checkpoints/step-00000004.pt")
    assert again["progress"] == whole["progress"]
    for name, value in whole["model"].items():
        assert torch.equal(again["model"][name], value), name


@pytest.mark.parametrize("fault", ["BrokenPipeError", "SystemExit"])
def test_an_error_of_the_users_code_never_ends_with_code_0(folder: Path, fault: str) -> None:
    from typer.testing import CliRunner

    from ampctl.cli import app

    (folder / f"own_{fault.lower()}.py").write_text(
        "from torch.utils.data import Dataset\n"
        "class Raise(Dataset):\n"
        "    def __len__(self): return 9\n"
        f"    def __getitem__(self, i): raise {fault}()\n"
    )
    target = f"data.train={{_target_: own_{fault.lower()}.Raise}}"
    ended = CliRunner().invoke(app, ["train", "recipe.yaml", "--run-dir", "x", target])
    assert ended.exit_code != 0


def test_a_link_in_a_run_folder_is_not_written_through(folder: Path) -> None:
    precious = folder / "precious"
    precious.write_text("dear")
    train("train.max_epochs=1")
    names = (".lock", "metrics.jsonl", "logs/rank-0.log")
    for name in names:
        (folder / "a" / name).unlink(missing_ok=True)
        (folder / "a" / name).symlink_to(precious)
        with pytest.raises((MachineError, UsageError)):
            resume("a", "train.max_epochs=2", run_dir=None)
        assert precious.read_text() == "dear"
        (folder / "a" / name).unlink()


def test_another_batch_size_is_refused_and_drop_last_ends_the_epoch() -> None:
    train("data.train.size=20", "train.max_epochs=2")
    with pytest.raises(CheckpointError, match=r"data\.batch_size was 6 .* and is 12 now"):
        resume("a/checkpoints/step-00000003.pt", "data.batch_size=12")
    again = resume("a/checkpoints/step-00000003.pt", "data.drop_last=true")
    assert again["progress"]["step"] == 6


def test_an_average_follows_weights_that_the_forward_changes() -> None:
    data = ("model={_target_: own_parts.Renormed}", "train.ema_decay=0.9")
    whole = train(*data, "checkpoint.every_steps=null")
    again = resume("a/checkpoints/step-00000004.pt")
    for name, value in whole["ema"].items():
        assert torch.equal(again["ema"][name], value), name
    often = train(*data, run_dir="c")
    assert torch.equal(often["ema"]["layer.weight"], whole["ema"]["layer.weight"])


def test_an_optimizers_state_keeps_its_dtype() -> None:
    double = ("model={_target_: own_parts.Double}", "task={_target_: own_parts.DoubleTask}")
    nadam = ("optimizer={_target_: torch.optim.NAdam, lr: 0.01}", "train.max_epochs=2")
    whole = train(*double, *nadam)
    again = resume("a/checkpoints/step-00000003.pt")
    for name, value in whole["model"].items():
        assert torch.equal(again["model"][name], value), name


def test_an_evaluation_leaves_buffers_alone() -> None:
    evaluated = ("model={_target_: own_parts.Counting}", "train.max_epochs=1")
    never = train(*evaluated)
    often = train(
        *evaluated,
        "data.eval={_target_: own_parts.Augmented}",
        "train.eval_every_steps=1",
        run_dir="b",
    )
    assert torch.equal(never["model"]["count"], often["model"]["count"])


def test_going_back_takes_later_checkpoints_out_of_the_run(
    capsys: pytest.CaptureFixture[str],
) -> None:
    train("train.max_epochs=2")
    resume("a/checkpoints/step-00000003.pt", "train.max_epochs=1", run_dir=None)
    assert "going back to step 3" in capsys.readouterr().err
    names = {path.name for path in Path("a/checkpoints").glob("*.pt")}
    assert "abandoned-step-00000008.pt" in names
    assert "step-00000008.pt" not in names
    with pytest.raises(UsageError, match=r"is no longer of the run in .*a, .* another --run-dir"):
        resume("a/checkpoints/abandoned-step-00000008.pt", run_dir=None)
    resume("a/checkpoints/abandoned-step-00000008.pt", "train.max_epochs=3", run_dir="c")
    Path("a/checkpoints/step-00000004.pt").write_bytes(b"damaged")
    found = load(Path("a"), notify=lambda line: None)
    assert found.path.name == "step-00000003.pt"


@pytest.mark.parametrize(
    "override",
    ["amp.modules={nope: float32}", "train.max_steps=2", "model={_target_: torch.nn.Tanh}"],
)
def test_a_resume_that_does_not_go_on_leaves_later_checkpoints_in_the_run(override: str) -> None:
    train("train.max_epochs=2")
    before = {path: path.read_bytes() for path in Path("a/checkpoints").iterdir()}
    with suppress(AmpctlError):  # or the run is complete there
        resume("a/checkpoints/step-00000003.pt", override, run_dir=None)
    assert {path: path.read_bytes() for path in Path("a/checkpoints").iterdir()} == before


def test_what_changed_since_the_checkpoint_is_told(capsys: pytest.CaptureFixture[str]) -> None:
    train("train.max_epochs=1")
    loaded = load_recipe("recipe.yaml", ["train.max_epochs=2", "optimizer.lr=0.02"])
    worker.train(loaded, run_dir=Path("a"), resume=True, quiet=False)
    said = capsys.readouterr().out
    assert (
        "changed since the checkpoint: optimizer.lr 0.01 -> 0.02, train.max_epochs 1 -> 2" in said
    )


class InfiniteLoss:
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return nn.functional.cross_entropy(model(batch[0]).float(), batch[1]) + math.inf


@pytest.mark.parametrize("dtype", ["float16", "float32"])
def test_a_loss_that_alone_is_not_finite_is_told_once_with_what_to_do_in_float16(
    dtype: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train("task={_target_: test_attacks.InfiniteLoss}", f"amp.dtype={dtype}", "train.max_steps=3")
    said = capsys.readouterr().err
    assert said.count("the loss is inf and every gradient is finite, so the step was made") == 1
    assert ("compute the loss from `model(...).float()`" in said) == (dtype == "float16")


def test_a_lazy_module_is_refused_by_name() -> None:
    with pytest.raises(RecipeError, match="weight has no shape before the first batch"):
        train("model={_target_: torch.nn.LazyLinear, out_features: 4}")


def test_a_metric_that_is_no_number_is_named() -> None:
    with pytest.raises(UsageError, match="the metric 'word' is str"):
        train("task={_target_: own_parts.Wordy}", "data.eval={_target_: own_parts.Augmented}")
