"""Weights are trained by the optimizer's step alone; what else changes them is named."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from told import ampctl
from told import recipe as recipe

from ampctl.engine.step import settle, train_step
from ampctl.recipe.load import load_recipe
from ampctl.run.init_from import build

CHANGES = ("by hand", "no_grad", "replaces")
IN_TURNS = (
    "scheduler=null",
    "optimizer=null",
    'optimizer={all: {_target_: torch.optim.SGD, lr: 0.1, params: "*"}}',
)
RUN = ("--run-dir", "a", "checkpoint.every_steps=8")


def task(how: str, kind: str = "Meddles") -> str:
    return f"task={{_target_: model_parts.{kind}, how: {how}}}"


@pytest.mark.parametrize("how", CHANGES)
@pytest.mark.parametrize("turns", [False, True])
def test_a3_weights_that_a_task_changes_are_named(how: str, turns: bool) -> None:
    rest = IN_TURNS if turns else ()
    wrong = task(how, "MeddlesInTurns" if turns else "Meddles")
    for argv in (("check", wrong, *rest), ("train", wrong, *rest, *RUN)):
        said = ampctl(*argv, code=2)
        assert "in step 1 the task or the model itself changes first.weight, which an op" in said
    assert not list(Path("a").glob("checkpoints/*.pt"))


@pytest.mark.parametrize(
    "model", ["torch.nn.Linear, in_features: 8, out_features: 4", "own_parts.Net"]
)
def test_a3_a_task_that_trains_the_model_itself_is_named(model: str) -> None:
    """Whether torch can still go back through what it has changed or not."""
    rest = ("task={_target_: model_parts.TrainsItself}", f"model={{_target_: {model}}}")
    for argv in (("check", *rest), ("train", *rest, *RUN)):
        said = ampctl(*argv, code=2)
        assert re.search(
            r"task: in step 1 the task or the model itself changes \S*weight, wh", said
        )
        assert "leave out a step or an update of your own" in said


@pytest.mark.parametrize("part", ["task: StepsItself", "model: StepsInBackward"])
def test_a3_a_step_that_leaves_no_gradient_is_named(part: str) -> None:
    key, kind = part.split(": ")
    wrong = f"{key}={{_target_: model_parts.{kind}}}"
    for argv in (("check", wrong), ("train", wrong, *RUN)):
        said = ampctl(*argv, code=2)
        assert re.search(r"itself changes \S*weight, which .* and leaves it no gradient", said)
        assert "frozen?" not in said


def test_a3_a_step_in_the_backward_pass_that_leaves_gradients_is_named() -> None:
    wrong = "model={_target_: model_parts.StepsInBackward, drops: false}"
    for argv in (("check", wrong), ("train", wrong, *RUN)):
        assert "in step 1 the task or the model itself changes weight, wh" in ampctl(*argv, code=2)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("how", ["step", "backward"])
def test_a3_gradients_that_a_task_makes_are_named(how: str, dtype: str) -> None:
    for argv in (("check", task(how)), ("train", task(how), *RUN)):
        said = ampctl(*argv, f"amp.dtype={dtype}", code=2)
        assert "task: the task or the model changes gradients itself, of first.weight" in said
        assert "leave out backward(), zero_grad() and step()" in said


def test_a3_gradients_that_a_task_drops_are_named_where_they_are_accumulated() -> None:
    said = ampctl("check", task("zero_grad"), "data.micro_batch_size=3", code=2)
    assert "changes gradients itself, of first.weight" in said
    ampctl("check", task("zero_grad"), code=0)  # there are none yet


def test_a3_a_model_that_a_task_casts_is_named() -> None:
    plain = ("scheduler=null", "optimizer={_target_: torch.optim.SGD, lr: 0.1, foreach: false}")
    said = ampctl("check", task("half"), *plain, code=2)
    assert "task: the task or the model casts parameters itself: first.weight, first.bias" in said


@pytest.mark.parametrize("kind", ["Meddles", "MeddlesInTurns"])
def test_a3_bounds_are_allowed_and_named(kind: str) -> None:
    """The weights of a critic that are clamped, or a norm that is kept small."""
    rest = IN_TURNS if "Turns" in kind else ()
    for argv in (
        ("check", task("clamps", kind), *rest),
        ("train", task("clamps", kind), *rest, *RUN),
    ):
        said = ampctl(*argv, code=0)
        assert said.count("changes first.weight, which an optimizer trains; run again it ch") == 1
        assert "A skipped step does not take this back" in said
    renormed = "model={_target_: own_parts.Renormed}"
    assert "changes layer.weight" in ampctl("check", renormed, code=0)


def test_a3_a_teacher_and_spectral_norm_are_nobody_s_business() -> None:
    teacher = "model={_target_: model_parts.Teacher%s}"
    for argv in (("check", teacher % ""), ("train", teacher % "", *RUN)):
        said = ampctl(*argv, code=0)
        assert "itself changes" not in said
    said = ampctl("check", teacher % ", freezes: false", code=2)
    assert "changes teacher.weight" in said
    assert "requires_grad_(False)" in said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("optimizer", ["SGD, lr: 0.1", "AdamW", "LBFGS"])
def test_a3_a_task_that_returns_its_loss_is_never_blamed(dtype: str, optimizer: str) -> None:
    if (dtype, optimizer) == ("float16", "LBFGS"):
        return
    chosen = ("scheduler=null", f"optimizer={{_target_: torch.optim.{optimizer}}}")
    rest = ("data.micro_batch_size=3", "amp.clip_norm=0.1", f"amp.dtype={dtype}")
    job = build(load_recipe("recipe.yaml", [*chosen, *rest]))
    windows = itertools.islice(job.train_data.windows(0, 0), 3)
    reports = [train_step(job.state, window, measure=True) for window, _ in windows]
    assert [report.moved for report in [*reports[1:], settle(job.state)]] == [None] * 3


def test_a3_only_the_first_steps_are_looked_at(monkeypatch: pytest.MonkeyPatch) -> None:
    looked: list[Any] = []
    figures = torch.linalg.vector_norm
    monkeypatch.setattr(
        torch.linalg, "vector_norm", lambda *a, **k: looked.append(a) or figures(*a, **k)
    )
    job = build(load_recipe("recipe.yaml", ["data.micro_batch_size=6"]))
    counts = []
    for window, _ in itertools.islice(job.train_data.windows(0, 0), 4):
        before = len(looked)
        train_step(job.state, window)
        counts.append(len(looked) - before)
    count = 4 * len(job.state.parameters)
    assert counts == [count, count, count, 0]
