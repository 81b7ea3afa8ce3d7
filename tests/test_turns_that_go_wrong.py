"""Turns of several optimizers that go wrong: what is told, and what is kept."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gan_parts import Gan
from test_several_optimizers import recipe, resume, train
from torch import Tensor
from torch.nn import functional as F

from ampctl.doctor.check import check_recipe
from ampctl.errors import NumericsError, UsageError
from ampctl.recipe.load import load_recipe
from ampctl.track.metrics import read_metrics

__all__ = ["recipe"]  # a fixture

GOOD = ("data.train.bad=[]", "data.train.bad_real=[]")


class Seldom(Gan):
    """The generator has its turn at each third step, and overflows float16 there."""

    def __init__(self, first: int = 0) -> None:
        super().__init__()
        self.first = first

    def losses(self, model: Any, batch: Any, step: int, grad: Any) -> Iterator[tuple[str, Tensor]]:
        real, noise = batch
        yield "critic", F.softplus(-model.critic(real).float()).mean()
        if step % 3 == self.first:
            yield "generator", (model.generator(noise) * 6e4 * 6e4).float().mean()


def task(name: str, **options: Any) -> str:
    listed = "".join(f", {key}: {value}" for key, value in options.items())
    return f"task={{_target_: test_turns_that_go_wrong.{name}{listed}}}"


def stopped(*overrides: str) -> str:
    with pytest.raises(NumericsError) as raised:
        train("a", *GOOD, "amp.dtype=float16", *overrides)
    return str(raised.value)


def weights(run_dir: Path, step: int) -> dict[str, Tensor]:
    saved = torch.load(run_dir / f"checkpoints/step-{step:08}.pt", weights_only=True)
    return dict(saved["model"])


@pytest.mark.parametrize("first", [0, 1, 2])
@pytest.mark.parametrize("every", [1, 4])
def test_the_turn_that_went_wrong_is_the_one_that_is_examined(
    recipe: Path, first: int, every: int
) -> None:
    said = stopped(
        task("Seldom", first=first), "amp.nonfinite=stop", f"checkpoint.every_steps={every}"
    )
    assert "mul in test_turns_that_go_wrong.py" in said.replace("tests/", "")
    assert "in float32 the step is finite" in said


def test_the_first_turn_is_examined_by_check(recipe: Path) -> None:
    with pytest.raises(NumericsError, match="in float32 the step is finite"):
        check_recipe(load_recipe("gan.yaml", [task("Seldom"), *GOOD, "amp.dtype=float16"]))


class Freezes(Gan):
    """Freezes a layer of the critic before its turn, from one step on."""

    def __init__(self, layers: int = 1) -> None:
        super().__init__()
        self.layers = layers

    def losses(self, model: Any, batch: Any, step: int, grad: Any) -> Iterator[tuple[str, Tensor]]:
        if step == 1:
            model.critic[: self.layers].requires_grad_(False)
        yield "critic", F.softplus(-model.critic(batch[0]).float()).mean()
        yield "generator", F.softplus(-model.critic(model.generator(batch[1])).float()).mean()


def test_a_part_that_is_frozen_in_training_stays_as_it_is(recipe: Path) -> None:
    run_dir = train("a", *GOOD, task("Freezes"), "optimizer.critic.momentum=0")
    first, final = weights(run_dir, 1), weights(run_dir, 12)
    assert torch.equal(first["critic.0.weight"], final["critic.0.weight"])
    assert not torch.equal(first["critic.2.weight"], final["critic.2.weight"])


def test_an_optimizer_whose_every_parameter_was_frozen_is_told(recipe: Path) -> None:
    with pytest.raises(UsageError, match=r"optimizer\.critic: 0 of 4 parameters received a grad"):
        train("a", *GOOD, task("Freezes", layers=3))


@pytest.mark.parametrize("stop", [None, 5])
def test_an_optimizer_that_overflows_at_each_of_its_turns_stops_the_run(
    recipe: Path, stop: int | None
) -> None:
    limits = (task("Seldom"), "amp.max_skips=4")
    if stop is None:
        said = stopped(*limits)
    else:
        train("a", *GOOD, "amp.dtype=float16", f"train.max_steps={stop}", *limits)
        with pytest.raises(NumericsError) as raised:
            resume(Path("a"), "train.max_steps=null")
        said = str(raised.value)
    assert said.startswith("stopped at step 10: 4 non-finite turns of generator in a row\n")
    events = read_metrics("b/metrics.jsonl" if stop else "a/metrics.jsonl")
    assert [e["consecutive"] for e in events if e["event"] == "skip"][-2:] == [3, 4]
    assert "\n  weights of generator were not touched by these steps" in said


def test_the_rate_of_the_optimizer_whose_weights_have_grown_is_to_be_lowered(recipe: Path) -> None:
    said = stopped("optimizer.critic.lr=1e9", "amp.max_skips=3", "task.every=1")
    assert re.search(r"have grown to \S+ \(critic\.\S+\): lower optimizer\.critic\.lr or", said)
    assert " optimizer.critic.lr=1e8`" in said.replace("1e+08", "1e8")
    assert "\n  weights were not touched by these steps" in said


class Huge(Gan):
    def losses(self, model: Any, batch: Any, step: int, grad: Any) -> Iterator[tuple[str, Tensor]]:
        yield "critic", (model.critic(batch[0]).float() * 1e38 * 1e38).mean()


def test_no_rate_is_named_where_none_is_at_fault(recipe: Path) -> None:
    said = stopped(task("Huge"), "amp.max_skips=1")
    assert "lower optimizer.NAME.lr, set amp.clip_norm" in said
    assert "once this is mended" in said
