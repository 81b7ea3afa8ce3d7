"""A schedule that goes on: exactly, at a new base rate, with other settings, as another one."""

from __future__ import annotations

import copy
import io
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import own_schedules as own
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from test_resume_exact import assert_same
from torch.optim import Optimizer
from torch.optim import lr_scheduler as lr
from torch.optim.swa_utils import SWALR

from ampctl.engine.learning_rate import FunctionSchedule, TorchSchedule
from ampctl.errors import CheckpointError, RecipeError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker
from ampctl.schedules import Cosine
from ampctl.state_dict import copies
from ampctl.state_dict.group_options import group_values
from ampctl.track.metrics import read_metrics

Make = Callable[..., Any]
UPDATES = 24


def sequence(o: Optimizer, warm: int = 4, floor: float = 0.0, period: int = 5) -> Any:
    return lr.SequentialLR(
        o,
        [
            lr.LinearLR(o, start_factor=0.1, total_iters=warm),
            lr.CosineAnnealingWarmRestarts(o, period, eta_min=floor),
            lr.MultiStepLR(o, [3, 9], gamma=0.5),
        ],
        milestones=[warm, 14],
    )


# Each with the settings that it is saved with, and others that it may be resumed with.
MAKES: dict[str, tuple[Make, dict[str, Any], dict[str, Any]]] = {
    "LambdaLR": (
        lambda o, by: lr.LambdaLR(o, own.Ramp(by)),
        {"by": 0.1},
        {"by": 0.3},
    ),
    "LambdaLR of a function": (
        lambda o, f: lr.LambdaLR(o, f),
        {"f": own.squared},
        {"f": own.ninetieth},
    ),
    "MultiplicativeLR": (lr.MultiplicativeLR, {"lr_lambda": own.ninetieth}, {}),
    "StepLR": (lr.StepLR, {"step_size": 5, "gamma": 0.1}, {"step_size": 3, "gamma": 0.5}),
    "MultiStepLR": (lr.MultiStepLR, {"milestones": [3, 8]}, {"milestones": [5, 10, 11]}),
    "ConstantLR": (lr.ConstantLR, {"total_iters": 5}, {"total_iters": 9, "factor": 0.5}),
    "LinearLR": (lr.LinearLR, {"total_iters": 9}, {"total_iters": 5, "end_factor": 0.5}),
    "ExponentialLR": (lr.ExponentialLR, {"gamma": 0.9}, {"gamma": 0.8}),
    "PolynomialLR": (lr.PolynomialLR, {"total_iters": 20}, {"total_iters": 15, "power": 2}),
    "CosineAnnealingLR": (lr.CosineAnnealingLR, {"T_max": 20}, {"T_max": 30, "eta_min": 1e-4}),
    "CosineAnnealingWarmRestarts": (
        lr.CosineAnnealingWarmRestarts,
        {"T_0": 4, "T_mult": 2},
        {"T_0": 3, "T_mult": 3, "eta_min": 1e-4},
    ),
    "CyclicLR": (
        lr.CyclicLR,
        {"base_lr": 0.001, "max_lr": 0.1, "step_size_up": 4},
        {"base_lr": 0.002, "max_lr": 0.2, "step_size_up": 3, "mode": "triangular2"},
    ),
    "OneCycleLR": (
        lr.OneCycleLR,
        {"max_lr": 0.1, "total_steps": UPDATES},
        {"max_lr": 0.2, "total_steps": UPDATES + 5, "max_momentum": 0.97},
    ),
    "OneCycleLR without momentum": (
        lr.OneCycleLR,
        {"max_lr": 0.1, "total_steps": UPDATES},
        {"max_lr": 0.1, "total_steps": UPDATES, "cycle_momentum": False},
    ),
    "SWALR": (SWALR, {"swa_lr": 0.01, "anneal_epochs": 6}, {"swa_lr": 0.02, "anneal_epochs": 9}),
    "SequentialLR": (sequence, {}, {"warm": 6, "floor": 1e-4, "period": 3}),
    "SequentialLR in SequentialLR": (
        lambda o, last, **more: lr.SequentialLR(
            o, [sequence(o, **more), lr.ConstantLR(o, 0.5, 3)], [last]
        ),
        {"last": 18},
        {"last": 16, "floor": 1e-3},
    ),
    "SequentialLR in ChainedScheduler": (
        lambda o, gamma, **more: lr.ChainedScheduler(
            [sequence(o, **more), lr.ExponentialLR(o, gamma)]
        ),
        {"gamma": 0.9},
        {"gamma": 0.8, "warm": 5},
    ),
    "ChainedScheduler": (
        lambda o, gamma, iters: lr.ChainedScheduler(
            [lr.ExponentialLR(o, gamma), lr.LinearLR(o, total_iters=iters)]
        ),
        {"gamma": 0.9, "iters": 6},
        {"gamma": 0.95, "iters": 9},
    ),
    "one that counts down": (own.Countdown, {}, {"floor": 1e-3}),
    "one around another": (
        lambda o, power, T_max: own.Around(o, lr.CosineAnnealingLR(o, T_max), power),
        {"power": 1, "T_max": 30},
        {"power": 2, "T_max": 40},
    ),
}


FUNCTIONS: dict[str, Any] = {"Cosine": Cosine(UPDATES), "none": None}


def optimizer(base: float, kind: str = "number") -> Optimizer:
    parameters = [torch.nn.Parameter(torch.zeros(2)) for _ in range(2)]
    rates = [torch.tensor(each) if kind == "tensor" else each for each in (base, base / 2)]
    groups = [{"params": [p], "lr": rate} for p, rate in zip(parameters, rates, strict=True)]
    return torch.optim.SGD(groups, lr=base, momentum=0.9)


def built(
    make: Make, base: float, options: dict[str, Any], kind: str = "number"
) -> tuple[Optimizer, TorchSchedule]:
    on = optimizer(base, kind)
    bare = group_values(on)
    return on, TorchSchedule(on, make(on, **options), bare)


def course(on: Optimizer, schedule: Any, updates: int) -> list[Any]:
    """Return what the groups hold before each of so many updates."""
    seen = []
    for _ in range(updates):
        schedule.before_update()
        seen.append(
            [
                (float(g["lr"]), float(g["momentum"]), isinstance(g["lr"], torch.Tensor))
                for g in on.param_groups
            ]
        )
        on.step()
        schedule.updated()
    return seen


def saved(on: Optimizer, schedule: Any) -> tuple[Any, Any]:
    """Return both states as they are read from a checkpoint."""
    file = io.BytesIO()
    torch.save((copies.snapshot(on.state_dict()), copies.snapshot(schedule.state_dict())), file)
    file.seek(0)
    states: tuple[Any, Any] = torch.load(file, weights_only=True)
    return states


def loaded(on: Optimizer, schedule: Any, states: tuple[Any, Any], **how: Any) -> None:
    of_optimizer, of_schedule = copy.deepcopy(states)
    on.load_state_dict(of_optimizer)
    schedule.load_state_dict(of_schedule, **{"new_base": False, "new_plan": False} | how)


@pytest.mark.parametrize("kind", ["number", "tensor"])
@pytest.mark.parametrize("name", MAKES)
def test_a_schedule_goes_on_exactly_wherever_it_is_stopped(name: str, kind: str) -> None:
    make, options, _ = MAKES[name]
    if name.startswith(("OneCycle", "Cyclic")) and kind == "tensor":
        pytest.skip("torch computes their rates as numbers")
    on, schedule = built(make, 0.1, options, kind)
    expected = course(on, schedule, UPDATES)
    end = saved(on, schedule)
    for stop in (0, 1, 3, 4, 7, 13, 14, 19):
        on, schedule = built(make, 0.1, options, kind)
        course(on, schedule, stop)
        states = saved(on, schedule)
        on, schedule = built(make, 0.1, options, kind)
        loaded(on, schedule, states, updates=stop)
        assert course(on, schedule, UPDATES - stop) == expected[stop:], stop
        assert f"{saved(on, schedule)}" == f"{end}", stop


@settings(max_examples=100)
@given(
    name=st.sampled_from([*MAKES]),
    stop=st.integers(0, UPDATES - 1),
    base=st.sampled_from([0.1, 0.05, 0.3]),
    changes=st.booleans(),
    kind=st.sampled_from(["number", "tensor"]),
)
def test_b1_b2_b3_a_changed_schedule_is_where_it_would_be_by_hand(
    name: str, stop: int, base: float, changes: bool, kind: str
) -> None:
    make, options, others = MAKES[name]
    kind = "number" if name.startswith(("OneCycle", "Cyclic")) else kind
    on, schedule = built(make, 0.1, options, kind)
    course(on, schedule, stop)
    states = saved(on, schedule)
    now = options | others if changes else options
    by_hand = course(*built(make, base, now, kind), UPDATES)
    on, schedule = built(make, base, now, kind)
    loaded(on, schedule, states, updates=stop, new_base=base != 0.1, new_plan=changes)
    assert course(on, schedule, UPDATES - stop) == by_hand[stop:]


@given(
    name=st.sampled_from([*MAKES, *FUNCTIONS]),
    other=st.sampled_from([*MAKES, *FUNCTIONS]),
    stop=st.integers(0, UPDATES - 1),
)
def test_any_schedule_takes_over_from_any_other(name: str, other: str, stop: int) -> None:
    def start(name: str) -> tuple[Optimizer, Any]:
        if name in FUNCTIONS:
            on = optimizer(0.1)
            return on, FunctionSchedule(on, FUNCTIONS[name])
        return built(MAKES[name][0], 0.1, MAKES[name][1])

    on, schedule = start(name)
    course(on, schedule, stop)
    states = saved(on, schedule)
    by_hand = course(*start(other), UPDATES)
    on, schedule = start(other)
    loaded(on, schedule, states, updates=stop, new_plan=name != other)
    assert course(on, schedule, UPDATES - stop) == by_hand[stop:]


def test_a_schedule_that_is_taken_out_leaves_the_rates_of_the_optimizer() -> None:
    on = optimizer(0.1)
    schedule = FunctionSchedule(on, Cosine(UPDATES))
    course(on, schedule, 9)
    states = saved(on, schedule)
    on = optimizer(0.1)
    loaded(on, FunctionSchedule(on, None), states, updates=9, new_plan=True)
    assert [group["lr"] for group in on.param_groups] == [0.1, 0.05]


@pytest.mark.parametrize("count", [1, 3])
def test_rates_of_another_number_of_groups_are_not_taken(count: int) -> None:
    on = optimizer(0.1)
    states = saved(on, FunctionSchedule(on, Cosine(UPDATES)))
    states[1]["base_lrs"] = [0.7] * count
    by_hand = course(on, FunctionSchedule(on, Cosine(UPDATES)), UPDATES)
    on = optimizer(0.1)
    schedule = FunctionSchedule(on, Cosine(UPDATES))
    loaded(on, schedule, states, updates=0)
    assert course(on, schedule, UPDATES) == by_hand


def test_what_a_scheduler_writes_is_found_at_its_first_update_alone(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """Rates may be tensors on a GPU, and comparing them waits for it."""
    on, schedule = built(lr.StepLR, 0.1, {"step_size": 3}, "tensor")
    course(on, schedule, 1)
    compared = "ampctl.engine.learning_rate.differing"
    monkeypatch.setattr(compared, lambda *_: pytest.fail("rates were compared"))
    course(on, schedule, UPDATES)


def test_a_changed_run_length_alone_is_a_changed_plan() -> None:
    """Which ampctl gives to the schedule, so that no block of the recipe changes."""
    options = {"max_lr": 0.1, "total_steps": 10}
    on, schedule = built(lr.OneCycleLR, 0.1, options)
    course(on, schedule, 6)
    states = saved(on, schedule)
    longer = {**options, "total_steps": 20}
    by_hand = course(*built(lr.OneCycleLR, 0.1, longer), 20)
    for state in (states, (states[0], {k: states[1][k] for k in ("kind", "base_lrs", "state")})):
        on, schedule = built(lr.OneCycleLR, 0.1, longer)
        loaded(on, schedule, state, updates=6)
        assert course(on, schedule, 14) == by_hand[6:]


METRICS = [1.0, 2.0, 2.0, 2.0, 0.5, 0.6, 0.6, 0.6, 0.7, 0.7, 0.7]
FOLLOWERS: dict[str, tuple[Make, dict[str, Any], dict[str, Any]]] = {
    "plateau": (
        lr.ReduceLROnPlateau,
        {"patience": 1},
        {"patience": 2, "factor": 0.5, "min_lr": 1e-7, "cooldown": 1, "threshold": 1e-3},
    ),
    "own": (own.WorstOf, {}, {}),
}


def reached(on: Optimizer, schedule: Any, metrics: list[float]) -> list[float]:
    seen = []
    for metric in metrics:
        schedule.evaluated(metric)
        seen.append(float(on.param_groups[0]["lr"]))
    return seen


@pytest.mark.parametrize("stop", range(len(METRICS)))
@pytest.mark.parametrize("name", FOLLOWERS)
def test_a_schedule_that_follows_a_metric_keeps_what_it_has_come_to(name: str, stop: int) -> None:
    make, options, others = FOLLOWERS[name]
    on, schedule = built(make, 0.1, options)
    before = reached(on, schedule, METRICS[:stop])
    states = saved(on, schedule)
    expected = reached(on, schedule, METRICS[stop:])
    for base in (0.1, 0.4):
        on, schedule = built(make, base, options)
        loaded(on, schedule, states, updates=9 * stop, new_base=base != 0.1)
        scaled = [rate * base / 0.1 for rate in expected]
        assert reached(on, schedule, METRICS[stop:]) == pytest.approx(scaled)
    if not others:
        return
    by_hand, source = built(make, 0.1, options)
    reached(by_hand, source, METRICS[:stop])
    scheduler: Any = source.source
    for key, value in others.items():
        setattr(scheduler, *(("min_lrs", [value] * 2) if key == "min_lr" else (key, value)))
    expected = reached(by_hand, source, METRICS[stop:])
    on, schedule = built(make, 0.1, options | others)
    loaded(on, schedule, states, updates=9 * stop, new_plan=True)
    assert [float(on.param_groups[0]["lr"])] == (before or [0.1])[-1:]
    assert reached(on, schedule, METRICS[stop:]) == pytest.approx(expected)


def test_a_plateau_of_an_earlier_version_goes_on_unchanged_and_not_with_other_settings() -> None:
    on, schedule = built(lr.ReduceLROnPlateau, 0.1, {"patience": 1})
    reached(on, schedule, METRICS[:5])
    of_optimizer, of_schedule = saved(on, schedule)
    states = of_optimizer, {k: of_schedule[k] for k in ("kind", "base_lrs", "state")}
    expected = reached(on, schedule, METRICS[5:])
    on, schedule = built(lr.ReduceLROnPlateau, 0.1, {"patience": 1})
    loaded(on, schedule, states, updates=5)
    assert reached(on, schedule, METRICS[5:]) == expected
    on, schedule = built(lr.ReduceLROnPlateau, 0.1, {"patience": 2})
    with pytest.raises(CheckpointError, match="has other settings than when it was saved"):
        loaded(on, schedule, states, updates=5, new_plan=True)


def test_a_schedule_that_ends_before_the_updates_that_were_made_is_told() -> None:
    on, schedule = built(lr.StepLR, 0.1, {"step_size": 3})
    course(on, schedule, 9)
    states = saved(on, schedule)
    on, schedule = built(lr.OneCycleLR, 0.1, {"max_lr": 0.1, "total_steps": 5})
    with pytest.raises(CheckpointError, match="OneCycleLR ends before the updates that were made"):
        loaded(on, schedule, states, updates=9, new_plan=True)


def test_a_forged_count_of_updates_is_not_made_again() -> None:
    on, schedule = built(lr.StepLR, 0.1, {"step_size": 3})
    states = saved(on, schedule)
    with pytest.raises(CheckpointError, match="100,000,000 is the most"):
        loaded(on, schedule, states, updates=1 << 60, new_plan=True)


RECIPE = """
name: schedules
model: {_target_: torch.nn.Linear, in_features: 2, out_features: 1}
task: {_target_: ampctl.tasks.Regression}
data:
  train: {_target_: own_tensors.pairs, size: 40}
  eval: {_target_: own_tensors.pairs, size: 4}
  batch_size: 20
optimizer: {_target_: torch.optim.SGD, lr: 0.01, momentum: 0.9}
amp: {dtype: float32}
train: {max_steps: 16}
checkpoint: {every_steps: 1, keep_last: 100, asynchronous: false}
log: {every_steps: 1}
"""
SEQUENCE = """{_target_: torch.optim.lr_scheduler.SequentialLR, milestones: [4], schedulers: [
  {_target_: torch.optim.lr_scheduler.LinearLR, start_factor: 0.1, total_iters: 4},
  {_target_: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0: 40}]}"""


@pytest.fixture
def recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def train(*overrides: str, run_dir: str = "a") -> None:
    loaded = load_recipe("recipe.yaml", overrides)
    worker.train(loaded, run_dir=Path(run_dir), resume=False, quiet=True)


def resume(
    step: int, *overrides: str, source: str = "a", run_dir: str = "b", quiet: bool = True
) -> None:
    path = Path(f"{source}/checkpoints/step-{step:08d}.pt")
    worker.resume(path, overrides, run_dir=Path(run_dir), trusted=False, quiet=quiet)


def rates(run_dir: str = "b") -> list[float]:
    return [e["lr"] for e in read_metrics(f"{run_dir}/metrics.jsonl") if e["event"] == "train"]


@pytest.mark.parametrize(
    ("scheduler", "changes"),
    [
        (SEQUENCE, ["optimizer.lr=0.02"]),
        ("{_target_: torch.optim.lr_scheduler.CosineAnnealingLR, T_max: 20}", ["eta_min=1e-4"]),
        (
            "{_target_: torch.optim.lr_scheduler.CosineAnnealingWarmRestarts, T_0: 4, T_mult: 2, "
            "eta_min: 1e-4}",
            ["eta_min=1e-3", "T_mult=3"],
        ),
        ("{_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: 0.1}", ["cycle_momentum=false"]),
        (SEQUENCE, ["optimizer.weight_decay=0.1", "train.max_steps=17"]),
    ],
)
def test_b1_b2_b3_a_run_resumed_with_another_schedule_has_its_rates(
    scheduler: str, changes: list[str], recipe: None
) -> None:
    keys = [c if c.startswith(("optimizer", "train")) else f"scheduler.{c}" for c in changes]
    train(f"scheduler={scheduler}")
    train(f"scheduler={scheduler}", *keys, run_dir="by_hand")
    resume(7, *keys)
    assert rates() == pytest.approx(rates("by_hand")[7:])


PLATEAU = "{_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, patience: 1, eps: 0}"
STILL = (  # too small a rate to move a weight: each evaluation but the first is a bad one
    f"scheduler={PLATEAU}",
    "optimizer={_target_: torch.optim.SGD, lr: 1e-12}",
)


@pytest.mark.parametrize(("limit", "every"), [(3, 2), (4, 2), (7, 2), (3, "null")])
def test_b5_a_run_that_is_made_longer_follows_the_evaluations_of_one_that_was_never_stopped(
    limit: int, every: Any, recipe: None
) -> None:
    """At 7, with an evaluation each second step, one more would be the fourth."""
    stop = "train.early_stop={monitor: eval/loss, patience: 4}"
    changes = (*STILL, f"train.eval_every_steps={every}", stop)
    train(*changes, "train.max_steps=20")
    train(*changes, f"train.max_steps={limit}", run_dir="short")
    evaluations = [e["step"] for e in read_metrics("short/metrics.jsonl") if e["event"] == "eval"]
    assert evaluations[-1] == limit  # a run is evaluated at its end all the same
    worker.resume(Path("short"), ["train.max_steps=20"], run_dir=None, trusted=False, quiet=True)
    assert rates("short") == rates("a")
    assert len({*rates("a")}) == 2
    ends = [torch.load(f"{run}/checkpoints/latest.pt", weights_only=True) for run in ("a", "short")]
    for end in ends:
        assert end["progress"].pop("step") == 10
    assert_same(*ends)


def test_b5_the_last_evaluation_counts_once_where_an_epoch_of_a_stream_ends_there(
    recipe: None,
) -> None:
    changes = (*STILL, "data.train={_target_: own_tensors.Stream, size: 60}")
    train(*changes, "train.max_steps=18")
    train(*changes, "train.max_steps=9", run_dir="short")
    worker.resume(Path("short"), ["train.max_steps=18"], run_dir=None, trusted=False, quiet=True)
    assert rates("short") == rates("a")
    assert len({*rates("a")}) == 3


def test_b6_a_plateaus_bad_evaluations_are_not_counted_on_for_another_metric(recipe: None) -> None:
    changes = (*STILL, "train.eval_every_steps=1", "train.max_steps=10")
    train(*changes, "checkpoint.monitor=eval/mae")
    drops = [1e-12] * 3 + [1e-13] * 2 + [1e-14] * 2 + [1e-15] * 2 + [1e-16]
    assert rates("a") == pytest.approx(drops)
    saved = torch.load("a/checkpoints/step-00000002.pt", weights_only=True)
    assert saved["scheduler"]["state"]["num_bad_epochs"] == 1
    resume(2)
    assert rates() == rates("a")[2:]
    metrics = saved["progress"]["metrics"]
    assert metrics["eval/loss"] > metrics["eval/mae"]  # it would never be the best so far
    resume(2, "checkpoint.monitor=eval/loss", run_dir="c")
    assert rates("c") == pytest.approx(drops[:8])


def test_b6_bad_evaluations_are_forgotten_even_if_the_next_one_is_bad_too() -> None:
    on, schedule = built(lr.ReduceLROnPlateau, 0.1, {"patience": 1})
    assert reached(on, schedule, [1.0, 2.0]) == [0.1, 0.1]
    schedule.forget_evaluations()
    assert reached(on, schedule, [math.nan, 5.0, 6.0, 7.0]) == pytest.approx([0.1, 0.1, 0.1, 0.01])


def test_b1_the_new_base_holds_in_schedulers_inside_schedulers(recipe: None) -> None:
    train(f"scheduler={SEQUENCE}")
    resume(7, "optimizer.lr=0.02")
    assert rates()[-1] == pytest.approx(
        0.02 * (1 + torch.cos(torch.tensor(torch.pi * 11 / 40))) / 2
    )


@pytest.mark.parametrize(
    "optimizer",
    [
        "{_target_: torch.optim.Adam, lr: {_target_: torch.tensor, data: 0.01}, betas: "
        "[{_target_: torch.tensor, data: 0.9}, {_target_: torch.tensor, data: 0.99}], "
        "foreach: false, capturable: false}",
        "{_target_: torch.optim.SGD, lr: {_target_: torch.tensor, data: 0.01}}",
        "{_target_: torch.optim.SGD, lr: {_target_: own_tensors.short, value: 0.01}, momentum: "
        "{_target_: own_tensors.long, value: 0.9}}",
    ],
)
@pytest.mark.parametrize(
    "scheduler",
    ["null", "{_target_: ampctl.schedules.Cosine}", SEQUENCE],
    ids=["none", "function", "torch"],
)
def test_b4_rates_of_any_kind_resume_exactly(optimizer: str, scheduler: str, recipe: None) -> None:
    changes = (f"optimizer={optimizer}", f"scheduler={scheduler}")
    train(*changes)
    resume(7)
    assert rates() == rates("a")[7:]
    ends = [torch.load(f"{run}/checkpoints/latest.pt", weights_only=True) for run in ("a", "b")]
    assert_same(*ends)
    resume(7, "optimizer.weight_decay=0.0", "optimizer.lr=0.02", run_dir="c")
    assert rates("c") == pytest.approx([2 * rate for rate in rates("a")[7:]])


FROZEN = "{_target_: torch.optim.lr_scheduler.ConstantLR, factor: 0.0, total_iters: 9}"
THEN = "{_target_: torch.optim.lr_scheduler.ExponentialLR, gamma: 0.9}"
ADAM = "optimizer={_target_: torch.optim.AdamW, lr: 0.01, betas: [0.9, 0.99]}"


@pytest.mark.parametrize(
    ("scheduler", "changes", "told"),
    [
        ("OneCycleLR, max_lr: 0.1", ["optimizer.lr=0.3"], "0.3 (no effect: OneCycleLR sets it, "),
        ("OneCycleLR, max_lr: 0.1", ["optimizer.momentum=0.5"], "scheduler.max_momentum)"),
        (
            "CyclicLR, base_lr: 0.1, max_lr: 0.2, cycle_momentum: false",
            ["optimizer.lr=0.3"],
            "0.3 (no effect: CyclicLR sets it, from scheduler.base_lr, scheduler.max_lr)",
        ),
        (
            "OneCycleLR, max_lr: 0.1",
            [ADAM, "optimizer.betas=[0.8,0.99]"],
            "betas[0] 0.9 -> 0.8 (no effect: OneCycleLR sets it, from its own arguments",
        ),
    ],
)
def test_b3_a_changed_setting_that_the_schedule_sets_is_told_to_have_no_effect(
    scheduler: str, changes: list[str], told: str, recipe: None, capsys: pytest.CaptureFixture[str]
) -> None:
    plan = f"scheduler={{_target_: torch.optim.lr_scheduler.{scheduler}}}"
    train(plan, *changes[:-1])
    resume(7, *changes[-1:], quiet=False)
    assert rates() == rates("a")[7:]
    assert told in " ".join("".join(capsys.readouterr()).split())


@pytest.mark.parametrize(
    ("scheduler", "change"),
    [
        ("OneCycleLR, max_lr: 0.1", "optimizer.weight_decay=0.1"),
        ("CyclicLR, base_lr: 0.1, max_lr: 0.2, cycle_momentum: false", "optimizer.momentum=0.5"),
        ("ConstantLR", "optimizer.lr=0.3"),
        # Of a rate that starts at 0 nothing is seen at first.
        (f"SequentialLR, milestones: [9], schedulers: [{FROZEN}, {THEN}]", "optimizer.lr=0.3"),
    ],
)
def test_b3_a_changed_setting_that_the_schedule_leaves_is_told_as_changed(
    scheduler: str, change: str, recipe: None, capsys: pytest.CaptureFixture[str]
) -> None:
    train(f"scheduler={{_target_: torch.optim.lr_scheduler.{scheduler}}}")
    capsys.readouterr()
    resume(7, change, quiet=False)
    told = " ".join("".join(capsys.readouterr()).split())
    assert f"changed since the checkpoint: {change.partition('=')[0]} " in told
    assert "(no effect" not in told


@pytest.mark.parametrize("scheduler", ["null", SEQUENCE], ids=["none", "torch"])
def test_b4_a_rate_that_is_built_for_a_group_resumes_exactly(scheduler: str, recipe: None) -> None:
    groups = "{weight: {lr: {_target_: torch.tensor, data: 0.03}}}"
    train(f"scheduler={scheduler}", f"optimizer.groups={groups}")
    assert max(rates("a")) == pytest.approx(0.03)
    resume(7)
    assert rates() == rates("a")[7:]
    ends = [torch.load(f"{run}/checkpoints/latest.pt", weights_only=True) for run in ("a", "b")]
    assert_same(*ends)


def test_b4_a_block_within_a_group_that_cannot_be_built_is_told_with_its_key(recipe: None) -> None:
    groups = "{weight: {lr: {_target_: torch.tenor, data: 0.03}}}"
    with pytest.raises(RecipeError, match=r"optimizer\.groups\.weight\.lr\._target_: torch has no"):
        train(f"optimizer.groups={groups}")
