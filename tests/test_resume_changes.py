"""Resuming with another learning rate, schedule, kernel, patience or stream."""

from __future__ import annotations

import shutil
from pathlib import Path
from typing import Any

import own_parts
import pytest
import torch

from ampctl import load_model
from ampctl.errors import CheckpointError, RecipeError, UsageError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker
from ampctl.state_dict.optimizers import state_names
from ampctl.track.metrics import read_metrics

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
    worker.resume(source, overrides, run_dir=Path("b"), trusted=False, quiet=False)


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


def test_the_rates_that_are_told_are_those_that_come(capsys: pytest.CaptureFixture[str]) -> None:
    cosine = "scheduler={_target_: ampctl.schedules.Cosine}"
    groups = "optimizer.groups={head.*: {lr: 0.05}}"
    train(cosine, groups)
    resume(4, "optimizer.lr=0.2")
    told = [line for line in capsys.readouterr().out.splitlines() if "tensors" in line]
    assert [line.rpartition("lr ")[2].split(",")[0] for line in told] == ["0.025", "0.1"]
    assert rates()[0] == pytest.approx(0.1)


def test_new_constants_of_the_same_schedule_count_from_the_same_update() -> None:
    train()
    resume(4, "scheduler.gamma=0.5", "scheduler.step_size=5")
    assert rates() == pytest.approx([0.1, 0.05, 0.05, 0.05])


def test_a_pure_schedule_takes_over_from_any_other() -> None:
    train()
    resume(4, "scheduler={_target_: ampctl.schedules.Linear, total_steps: 8}")
    train_rates = rates()
    assert train_rates == sorted(train_rates, reverse=True)
    assert train_rates[0] == pytest.approx(0.1 * 4 / 8, rel=0.3)


def test_a_torch_schedule_takes_over_from_any_other_too() -> None:
    train("scheduler={_target_: ampctl.schedules.Cosine}")
    resume(4, "scheduler={_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}")
    assert rates() == pytest.approx([0.01, 0.01, 0.001, 0.001])


def test_a_plateau_cannot_take_over_from_another_and_says_so() -> None:
    train("scheduler={_target_: ampctl.schedules.Cosine}")
    with pytest.raises(CheckpointError, match="a function of updates, and ReduceLROnPlateau"):
        resume(4, "scheduler={_target_: torch.optim.lr_scheduler.ReduceLROnPlateau}")


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


ADAM = "optimizer={_target_: torch.optim.AdamW, lr: 0.01%s}"


def refusal(step: int, *overrides: str) -> str:
    with pytest.raises(CheckpointError) as refused:
        resume(step, *overrides)
    return str(refused.value)


def test_another_model_is_told_tensor_by_tensor_with_the_key_that_changed() -> None:
    train()
    a = Path("a").resolve()
    told = refusal(4, "model.width=32", "log.every_steps=2")
    assert told.splitlines() == [
        "the checkpoint does not fit the recipe: model",
        "  first.bias: [16] saved, [32] in the model",
        "  first.weight: [16, 8] saved, [32, 8] in the model",
        "  head.weight: [4, 16] saved, [4, 32] in the model",
        *(
            f"  norm.{name}: [16] saved, [32] in the model"
            for name in ("bias", "running_mean", "running_var", "weight")
        ),
        "  2 of 9 tensors fit",
        "changed since it was saved: model.width unset -> 32",
        "Go on with what it was saved with, or start a new run from its weights that fit:",
        f"    ampctl train {a / 'recipe.yaml'} model.width=32 log.every_steps=2 --init-from "
        f"{a / 'checkpoints/step-00000004.pt'} --allow-missing '*'",
    ]


def test_another_model_of_the_same_recipe_is_put_down_to_code_or_versions(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train()
    monkeypatch.setattr(own_parts.Net.__init__, "__defaults__", (24, 0.2))
    same = "nothing under model in the recipe; no version either, so the code behind it\n"
    assert f"changed since it was saved: {same}" in refusal(4)
    with pytest.raises(CheckpointError, match=r"norm\.weight: \[16\] saved, \[24\] in the model"):
        load_model("a", trust=True)
    path = Path("a/checkpoints/step-00000004.pt")
    payload = torch.load(path, weights_only=True)
    payload["environment"]["torch"] = "2.10.0"
    path = Path("older.pt")
    torch.save(payload, path)
    with pytest.raises(CheckpointError, match=r"recipe; torch 2\.10\.0 -> 2"):
        worker.resume(path, (), run_dir=Path("b"), trusted=False, quiet=True)


def test_weights_that_are_rounded_are_told(capsys: pytest.CaptureFixture[str]) -> None:
    train()
    half = "{_target_: torch.nn.Module.bfloat16, self: {_target_: own_parts.Net}}"
    resume(4, f"model={half}", "amp.upcast=false", "amp.dtype=bfloat16")
    out = capsys.readouterr().out
    assert "8 of 9 tensors were saved in float32 and are bfloat16 in the model" in out


@pytest.mark.parametrize(
    ("saved", "wanted", "lines"),
    [
        (
            ADAM % "",
            ADAM % ", amsgrad: true",
            [
                "max_exp_avg_sq: AdamW keeps it, and the checkpoint has none for 6 of 6 parameters",
                "the checkpoint has exp_avg, exp_avg_sq, step",
                "optimizer.amsgrad unset -> True",
            ],
        ),
        (
            ADAM % "",
            "optimizer={_target_: torch.optim.SGD, lr: 0.1, momentum: 0.9}",
            ["momentum_buffer: SGD keeps it", "_target_ torch.optim.AdamW -> torch.optim.SGD"],
        ),
        (
            "optimizer.momentum=0.9",
            ADAM % "",
            ["exp_avg: AdamW keeps it", "step: AdamW", "has momentum_buffer"],
        ),
    ],
)
def test_a_state_that_lacks_what_the_optimizer_goes_on_from_is_refused(
    saved: str, wanted: str, lines: list[str]
) -> None:
    train(saved, "scheduler=null")
    told = refusal(4, wanted)
    for line in lines:
        assert line in told


@pytest.mark.parametrize(
    ("saved", "wanted", "dropped"),
    [
        (
            ADAM % ", amsgrad: true",
            ADAM % ", amsgrad: false",
            "AdamW has no use for max_exp_avg_sq",
        ),
        (
            ADAM % "",
            "optimizer={_target_: torch.optim.SGD, lr: 0.1}",
            "SGD has no use for exp_avg, exp_avg_sq, step",
        ),
        (ADAM % "", (ADAM % "").replace("AdamW", "Adam"), ""),
    ],
)
def test_what_another_optimizer_has_no_use_for_is_told_and_dropped(
    saved: str, wanted: str, dropped: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train(saved, "scheduler=null")
    resume(4, wanted)
    out = capsys.readouterr().out
    assert ("has no use for" in out) == bool(dropped)
    assert dropped in out
    last = torch.load("b/checkpoints/latest.pt", weights_only=True)["optimizer"]["state"]
    names = {"exp_avg", "exp_avg_sq", "step"} if "Adam" in wanted else set()
    assert {name for state in last.values() for name in state} == names


def test_every_optimizer_of_torch_says_what_it_keeps_without_a_trace() -> None:
    shapes = {1: (5,), 2: (3, 4), 4: (2, 3, 2, 2)}
    kinds = [
        kind
        for name in dir(torch.optim)
        if isinstance(kind := getattr(torch.optim, name), type)
        and issubclass(kind, torch.optim.Optimizer)
        and kind is not torch.optim.Optimizer
    ]
    assert len(kinds) > 10
    for kind in kinds:
        dims = [2] if kind.__name__ == "Muon" else [1, 2, 4]
        parameters = [torch.nn.Parameter(torch.randn(shapes[ndim])) for ndim in dims]
        optimizer = kind(parameters)
        before = [parameter.clone() for parameter in parameters]
        held = {parameter: set(state) for parameter, state in optimizer.state.items()}
        names = state_names(optimizer)
        assert {parameter: set(state) for parameter, state in optimizer.state.items()} == held
        assert all(map(torch.equal, before, parameters))
        if kind.__name__ in ("LBFGS", "SparseAdam"):
            assert names == [None] * len(dims)
            continue
        for parameter in parameters:
            parameter.grad = torch.randn_like(parameter)
        optimizer.step()
        for parameter, told in zip(parameters, names, strict=True):
            state = optimizer.state[parameter]
            assert told == {name for name, value in state.items() if value is not None}, kind


def test_another_metric_to_watch_starts_best_patience_and_plateau_anew(
    capsys: pytest.CaptureFixture[str],
) -> None:
    plateau = "{_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, patience: 1, mode: max}"
    train(
        "train.max_steps=4",
        "train.eval_every_steps=1",
        f"scheduler={plateau}",
        "train.early_stop={monitor: eval/loss, patience: 50}",
        "checkpoint.keep_best=0",
    )
    saved = torch.load("a/checkpoints/latest.pt", weights_only=True)
    assert saved["progress"]["best"] is not None
    # A loss of 1.4 would stay the best that an accuracy could never reach.
    saved["progress"] |= {"best": 1.4, "early_stop_best": -9.0, "early_stop_bad": 49}
    saved["scheduler"]["state"] |= {"best": 1.4, "num_bad_epochs": 1}
    torch.save(saved, "a.pt")
    watch = ("checkpoint.monitor=eval/accuracy", "checkpoint.mode=max", "train.max_steps=6")
    stop = "train.early_stop={monitor: eval/accuracy, mode: max, patience: 50}"
    worker.resume(Path("a.pt"), [*watch, stop], run_dir=Path("b"), trusted=False, quiet=False)
    out = capsys.readouterr().out
    assert "checkpoint.monitor was eval/loss (min) and is eval/accuracy (max)" in out
    assert "train.early_stop watched eval/loss (min) and watches eval/accuracy (max)" in out
    last = torch.load("b/checkpoints/latest.pt", weights_only=True)
    metrics = [e for e in read_metrics("b/metrics.jsonl") if e["event"] == "eval"]
    best = max(event["eval/accuracy"] for event in metrics)
    assert last["progress"]["best"] == last["progress"]["early_stop_best"] == best
    assert last["progress"]["early_stop_bad"] <= 1
    assert last["scheduler"]["state"]["best"] == best


@pytest.mark.parametrize("change", ["seed=5", "data.shuffle=false"])
def test_another_order_within_an_epoch_is_told(
    change: str, capsys: pytest.CaptureFixture[str]
) -> None:
    train()
    resume(4, change)  # the end of an epoch
    assert "come twice" not in capsys.readouterr().out
    shutil.rmtree("b")
    resume(3, change)
    told = f"{change.split('=')[0]} changed within epoch 0: the rest of it is of another order"
    assert told in capsys.readouterr().out


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


@pytest.mark.parametrize(("drops", "place"), [("true", (1, 1)), ("false", (1, 0))])
def test_an_epoch_that_has_become_shorter_is_over_where_it_was_left(
    drops: str, place: tuple[int, int]
) -> None:
    short = ("data.train.size=15", "train.max_steps=2")  # batches of 6, 6 and 3
    train(*short)
    resume(2, "train.max_steps=3", f"data.drop_last={drops}")
    progress = torch.load("b/checkpoints/latest.pt", weights_only=True)["progress"]
    assert (progress["epoch"], progress["batch_in_epoch"]) == place


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
        (lambda p: p["data"].update(num_samples="24"), "`data.num_samples` is a str"),
        (lambda p: p["data"].update(seed=1.5), "`data.seed` is a float"),
    ],
)
def test_a_checkpoint_that_is_wrong_inside_is_told_in_words(change: Any, lacks: str) -> None:
    train()
    damaged(change)
    with pytest.raises(CheckpointError, match=lacks):
        worker.resume(
            Path("a/checkpoints/other.pt"), (), run_dir=Path("b"), trusted=False, quiet=True
        )
