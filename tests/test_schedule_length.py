"""A schedule that is shorter than its run is told, with its key; what is meant to be so is not."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from test_schedule_resume import RECIPE

from ampctl.doctor.check import check_recipe
from ampctl.errors import RecipeError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker

TORCH = "torch.optim.lr_scheduler"
STEPS = 12


@pytest.fixture(autouse=True)
def _recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def block(target: str, **arguments: Any) -> str:
    return str({"_target_": target, **arguments})


def torchs(name: str, **arguments: Any) -> str:
    return block(f"{TORCH}.{name}", **arguments)


def one_after_another(first: Any, second: Any, milestone: int) -> str:
    return torchs("SequentialLR", schedulers=[first, second], milestones=[milestone])


def warmed(**second: Any) -> str:
    warm = {"_target_": f"{TORCH}.LinearLR", "start_factor": 0.1, "total_iters": 3}
    return one_after_another(warm, second, 3)


def loaded(scheduler: str, *overrides: str) -> Any:
    changes = (f"scheduler={scheduler}", f"train.max_steps={STEPS}", *overrides)
    return load_recipe("recipe.yaml", changes)


def told(scheduler: str, *overrides: str) -> list[tuple[str, str]]:
    """Return what `check` finds wrong with the length of a schedule, and where."""
    facts = check_recipe(loaded(scheduler, *overrides))
    found = [f for f in facts["findings"] if f["name"] == "schedule-too-short"]
    return [(f["place"], f["reason"]) for f in found]


COSINE = {"_target_": f"{TORCH}.CosineAnnealingLR"}


@pytest.mark.parametrize(
    ("scheduler", "key"),
    [
        (torchs("OneCycleLR", max_lr=0.1, total_steps=4), "scheduler.total_steps"),
        (torchs("OneCycleLR", max_lr=0.1, total_steps=STEPS - 1), "scheduler.total_steps"),
        (
            warmed(_target_=f"{TORCH}.OneCycleLR", max_lr=0.1, total_steps=5),
            "scheduler.schedulers[1].total_steps",
        ),
        (torchs("OneCycleLR", max_lr=0.1, epochs=2, steps_per_epoch=3), "scheduler.epochs"),
        (
            torchs(
                "SequentialLR",
                milestones=[2],
                schedulers=[
                    {"_target_": f"{TORCH}.LinearLR"},
                    {"_target_": f"{TORCH}.OneCycleLR", "max_lr": 0.1, "total_steps": 5},
                ],
            ),
            "scheduler.schedulers[1].total_steps",
        ),
        (block("own_schedules.Listed", rates=[1.0, 0.5, 0.1]), "scheduler"),
    ],
)
def test_a7_a_schedule_that_ends_before_the_run_is_refused_before_the_first_step(
    scheduler: str, key: str
) -> None:
    wrong = rf"command line: {re.escape(key)}: \w+ ends after \d+ updates .*the run has 12 steps"
    with pytest.raises(RecipeError, match=wrong):
        check_recipe(loaded(scheduler))
    with pytest.raises(RecipeError, match=wrong):
        worker.train(loaded(scheduler), run_dir=Path("a"), resume=False, quiet=True)
    assert not list(Path().glob("a/checkpoints/*.pt"))


@pytest.mark.parametrize(
    ("scheduler", "key", "reason"),
    [
        (torchs("CosineAnnealingLR", T_max=4), "scheduler.T_max", "climbs again from update 5"),
        (warmed(**COSINE, T_max=4), "scheduler.schedulers[1].T_max", "climbs again from update 8"),
        (
            torchs("ChainedScheduler", schedulers=[{**COSINE, "T_max": 4}]),
            "scheduler.schedulers[0].T_max",
            "climbs again from update 5",
        ),
        (
            block("own_schedules.warm_cosine", num_warmup_steps=2, num_training_steps=7),
            "scheduler.num_training_steps",
            "climbs again",
        ),
        (block("ampctl.schedules.Cosine", total_steps=4), "scheduler.total_steps", "last 8 of 12"),
        (block("ampctl.schedules.Linear", total_steps=6), "scheduler.total_steps", "last 6 of 12"),
        (torchs("PolynomialLR", total_iters=4), "scheduler.total_iters", "last 8 of 12"),
        (
            torchs("LinearLR", start_factor=1.0, end_factor=0.0, total_iters=4),
            "scheduler.total_iters",
            "last 8 of 12",
        ),
        (torchs("MultiStepLR", milestones=[3, 5], gamma=0.0), "scheduler.gamma", "last 9"),
        (torchs("MultiStepLR", milestones=[3], gamma=0.0), "scheduler.gamma", "last 9"),
        (torchs("ExponentialLR", gamma=0), "scheduler.gamma", "last 11"),
        (
            block("own_schedules.warm_linear", num_warmup_steps=1, num_training_steps=4),
            "scheduler.num_training_steps",
            "last 8",
        ),
        (
            torchs(
                "SequentialLR",
                milestones=[2],
                schedulers=[
                    {"_target_": f"{TORCH}.LinearLR", "total_iters": 2},
                    {"_target_": f"{TORCH}.PolynomialLR", "total_iters": 4},
                ],
            ),
            "scheduler.schedulers[1].total_iters",
            "last 6",
        ),
        (
            torchs(
                "ChainedScheduler",
                schedulers=[
                    {"_target_": f"{TORCH}.LinearLR", "total_iters": 2},
                    {**COSINE, "T_max": 4},
                ],
            ),
            "scheduler.schedulers[1].T_max",
            "climbs again from update 5",
        ),
        (torchs("LambdaLR", lr_lambda={"_target_": "own_schedules.Ramp", "until": 5}), "", "last"),
    ],
)
def test_a7_a_schedule_shorter_than_the_run_is_told_with_its_key(
    scheduler: str, key: str, reason: str, capsys: pytest.CaptureFixture[str]
) -> None:
    found = told(scheduler)
    assert [place for place, _ in found] == [key or "scheduler.lr_lambda.until"]
    assert reason in found[0][1]
    capsys.readouterr()
    worker.train(loaded(scheduler), run_dir=Path("a"), resume=False, quiet=True)
    assert f"schedule-too-short: {found[0][0]}: {found[0][1]}" in capsys.readouterr().err


@pytest.mark.parametrize(
    "scheduler",
    [
        "null",
        *(block(f"ampctl.schedules.{name}") for name in ("Cosine", "Linear", "Constant")),
        block("ampctl.schedules.Cosine", total_steps=4, final_ratio=0.1),
        block("ampctl.schedules.Cosine", total_steps=99, warmup_steps=2),
        block("ampctl.schedules.Step", every=2),
        torchs("OneCycleLR", max_lr=0.1),
        torchs("OneCycleLR", max_lr=0.1, epochs=4, steps_per_epoch=3),
        torchs("OneCycleLR", max_lr=0.1, three_phase=True),
        torchs("CosineAnnealingLR", T_max=STEPS),
        torchs("CosineAnnealingLR", T_max=STEPS - 1),
        torchs("CosineAnnealingLR", T_max=1000),
        torchs("CosineAnnealingWarmRestarts", T_0=2),
        torchs("CosineAnnealingWarmRestarts", T_0=2, T_mult=2, eta_min=1e-4),
        torchs("CyclicLR", base_lr=0.001, max_lr=0.1, step_size_up=2),
        torchs("CyclicLR", base_lr=0.0, max_lr=0.1, step_size_up=3, mode="triangular2"),
        torchs("ReduceLROnPlateau", patience=0),
        torchs("ConstantLR", total_iters=3),
        torchs("ConstantLR", total_iters=300),
        one_after_another(
            {"_target_": f"{TORCH}.LinearLR", "start_factor": 1.0, "end_factor": 0.1},
            {"_target_": f"{TORCH}.ConstantLR", "factor": 0.5, "total_iters": 3},
            5,
        ),
        one_after_another(
            {"_target_": f"{TORCH}.ExponentialLR", "gamma": 0.5},
            {"_target_": f"{TORCH}.LinearLR", "start_factor": 0.1, "total_iters": 3},
            5,
        ),
        torchs("LinearLR", total_iters=3),
        torchs("StepLR", step_size=3),
        torchs("ExponentialLR", gamma=0.5),
        torchs("PolynomialLR", total_iters=STEPS),
        warmed(**COSINE, T_max=STEPS - 3),
        warmed(_target_=f"{TORCH}.CosineAnnealingWarmRestarts", T_0=3),
        one_after_another({**COSINE, "T_max": 6}, {**COSINE, "T_max": 6}, 6),
        block("own_schedules.warm_cosine", num_warmup_steps=2, num_training_steps=STEPS),
        block("own_schedules.Countdown", floor=0.001),
    ],
)
def test_a7_nothing_is_told_of_a_schedule_that_is_meant_so(scheduler: str) -> None:
    assert told(scheduler) == []


def test_a7_a_length_in_epochs_is_the_recipes_own_and_the_advice_is_in_epochs() -> None:
    short = torchs("OneCycleLR", max_lr=0.1, epochs=2, steps_per_epoch=5)
    with pytest.raises(RecipeError, match=r"ends after 10 updates (?s:.*)Set scheduler\.epochs=3,"):
        check_recipe(loaded(short))


def test_a7_a_schedule_in_epochs_need_not_take_another_length() -> None:
    assert told(block("own_schedules.in_epochs", epochs=3, steps_per_epoch=4)) == []


def test_a7_a_rate_that_is_0_altogether_is_no_schedules_fault() -> None:
    assert told(block("ampctl.schedules.Cosine"), "optimizer.lr=0") == []


def test_a7_a_run_that_is_made_longer_than_its_schedule_is_told_when_it_is_resumed(
    capsys: pytest.CaptureFixture[str],
) -> None:
    cosine = torchs("CosineAnnealingLR", T_max=STEPS)
    worker.train(loaded(cosine), run_dir=Path("a"), resume=False, quiet=True)
    assert "schedule-too-short" not in capsys.readouterr().err
    worker.resume(Path("a"), ["train.max_steps=20"], run_dir=None, trusted=False, quiet=True)
    said = capsys.readouterr().err
    assert "schedule-too-short: scheduler.T_max: CosineAnnealingLR ends at 12, and its rate" in said
    assert "Set scheduler.T_max=20" in said
    one = torchs("OneCycleLR", max_lr=0.1, total_steps=STEPS)
    worker.train(loaded(one), run_dir=Path("b"), resume=False, quiet=True)
    with pytest.raises(RecipeError, match=r"scheduler\.total_steps: OneCycleLR ends after 12"):
        worker.resume(Path("b"), ["train.max_steps=20"], run_dir=None, trusted=False, quiet=True)


def test_a7_what_is_tried_leaves_no_trace() -> None:
    """A scheduler that draws as it is built, and as it is stepped, draws the same all the same."""
    drawing = loaded(block("own_schedules.Drawing"), "optimizer.momentum=0.5")
    worker.train(drawing, run_dir=Path("a"), resume=False, quiet=True)
    saved = torch.load("a/checkpoints/latest.pt", weights_only=True)
    assert saved["scheduler"]["state"]["steps"] == STEPS + 1
    assert saved["optimizer"]["param_groups"][0]["momentum"] == 0.5


def test_a7_the_length_of_a_stream_is_that_of_its_limit_or_is_said_to_be_unknown() -> None:
    stream = ("data.train={_target_: own_tensors.Stream, size: 60}", "train.max_epochs=9")
    assert told(torchs("CosineAnnealingLR", T_max=4), *stream) != []
    unknown = loaded(torchs("CosineAnnealingLR", T_max=4), *stream, "train.max_steps=null")
    facts = check_recipe(unknown)
    assert facts["findings"] == []
    assert facts["schedule"] == (
        "not compared with the run: how many steps there will be is not known"
    )
