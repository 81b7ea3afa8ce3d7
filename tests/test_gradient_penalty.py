"""A loss that holds a gradient: computed at the loss scale, unscaled, and differentiated again.

Source of the loop by hand: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

import copy
import math
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from states import DTYPES, Net, batches, make_state, run, spoil
from test_resume_exact import assert_same, last
from test_several_optimizers import RECIPE
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.amp.scaler import LossScaler
from ampctl.doctor.check import check_recipe
from ampctl.engine.evaluation import evaluate
from ampctl.errors import NumericsError, RecipeError
from ampctl.recipe.load import load_recipe
from ampctl.recipe.schema import AmpConfig
from ampctl.run import worker
from ampctl.tasks.task import as_task

KINDS = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}


class Penalized:
    """Cross entropy, and the norm of its gradient by all the weights."""

    def loss(self, model: nn.Module, batch: Any, grad: Any) -> Tensor:
        loss = F.cross_entropy(model(batch[0]).float(), batch[1])
        slopes = grad(loss, model.parameters())
        return loss + torch.stack([slope.square().sum() for slope in slopes]).sum().sqrt()


def by_hand(model: nn.Module, windows: Any, dtype: str, init_scale: float) -> list[float]:
    kind = KINDS[dtype]
    scaler = torch.amp.GradScaler("cpu", init_scale=init_scale, enabled=kind is torch.float16)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for ((x, y),) in windows:
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
            loss = F.cross_entropy(model(x).float(), y)
        scaled = torch.autograd.grad(scaler.scale(loss), model.parameters(), create_graph=True)
        slopes = [slope * (1.0 / scaler.get_scale()) for slope in scaled]
        with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
            penalty = torch.stack([slope.square().sum() for slope in slopes]).sum().sqrt()
            loss = loss + penalty
        scaler.scale(loss).backward()
        scaler.step(optimizer)
        scaler.update()


@pytest.mark.parametrize("dtype", DTYPES)
def test_parity_with_the_gradient_penalty_by_hand(dtype: str) -> None:
    model = Net()
    other = copy.deepcopy(model)
    windows = [batches(1, seed=seed) for seed in range(5)]
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = make_state(
        model, optimizer, dtype, task=as_task(Penalized()), amp=AmpConfig(init_scale=1024.0)
    )
    reports = run(state, windows)
    by_hand(other, windows, dtype, 1024.0)
    assert_same(model.state_dict(), other.state_dict())
    assert not any(report.skipped for report in reports)


@pytest.mark.parametrize("value", [math.inf, math.nan])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_penalty_that_is_not_finite_is_skipped(dtype: str, value: float) -> None:
    model = Net()
    before = copy.deepcopy(model.state_dict())
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = make_state(model, optimizer, dtype, task=as_task(Penalized()))
    (report,) = run(state, [[spoil(batches(1)[0], value)]])
    assert report.skipped
    assert_same(model.state_dict(), before)


def test_a_gradient_that_overflows_at_this_scale_backs_the_scale_off() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    amp = AmpConfig(init_scale=2.0**24)
    state = make_state(model, optimizer, "float16", task=as_task(Penalized()), amp=amp)
    reports = run(state, [batches(1)] * 16)
    assert reports[0].skipped
    assert not reports[-1].skipped
    assert reports[-1].scale_after < 2.0**24


@pytest.mark.parametrize("enabled", [True, False])
def test_grad_is_unscaled_in_float32_and_can_be_differentiated_again(enabled: bool) -> None:
    scaler = LossScaler(AmpConfig(init_scale=256.0), enabled=enabled, device=torch.device("cpu"))
    x = torch.tensor([2.0, 3.0], dtype=torch.float16, requires_grad=True)
    slope = scaler.grad((x.float() ** 3).sum(), x)
    assert slope.dtype == torch.float32
    assert slope.tolist() == [12.0, 27.0]
    slope.sum().backward()
    assert x.grad is not None
    assert x.grad.tolist() == [12.0, 18.0]
    several = scaler.grad(x.float() ** 2, [x])
    assert isinstance(several, tuple)
    assert several[0].tolist() == [4.0, 6.0]


@pytest.mark.parametrize(("enabled", "slope"), [(True, 1e-9), (False, 0.0)])
def test_nu9_a_small_gradient_in_a_loss_is_not_lost_either(enabled: bool, slope: float) -> None:
    x, layer = torch.ones(1), nn.Linear(1, 1, bias=False)
    scaler = LossScaler(AmpConfig(), enabled=enabled, device=torch.device("cpu"))
    with torch.autocast("cpu", dtype=torch.float16):
        found = scaler.grad(layer(x) * 1e-9, layer.weight)
    assert found.item() == pytest.approx(slope, rel=0.05)


def test_an_evaluation_of_a_penalized_task_leaves_no_gradient() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = make_state(model, optimizer, "float32", task=as_task(Penalized()))
    metrics = evaluate(state, batches(2))
    assert metrics is not None
    plain = evaluate(make_state(model, optimizer, "float32"), batches(2))
    assert plain is not None
    assert metrics["eval/loss"] > plain["eval/loss"]
    assert all(parameter.grad is None for parameter in model.parameters())


@pytest.fixture
def recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "gan.yaml").write_text(RECIPE.replace("every: 2", "every: 2, penalty: 10.0"))


def test_a_critic_with_a_gradient_penalty_resumes_exactly(recipe: None) -> None:
    worker.train(load_recipe("gan.yaml"), run_dir=Path("a"), resume=False, quiet=True)
    step = Path("a/checkpoints/step-00000005.pt")
    worker.resume(step, (), run_dir=Path("b"), trusted=False, quiet=True)
    assert_same(last(Path("b")), last(Path("a")))


def test_a_penalty_in_a_compiled_model_is_refused(recipe: None) -> None:
    with pytest.raises(RecipeError, match=r"train\.compile: Gan differentiates a gradient"):
        check_recipe(load_recipe("gan.yaml", ["train.compile=true"]))


class Steep:
    """A penalty on a slope so large that a scale of 65536 overflows it in float16."""

    def losses(self, model: Any, batch: Any, grad: Any) -> Iterator[tuple[str, Tensor]]:
        real, noise = batch[0].requires_grad_(), batch[1]
        yield "critic", grad(model.critic(real) * 100, real).square().mean()
        yield "generator", model.generator(noise).float().square().mean()


def test_a_scale_that_is_too_large_for_a_penalty_at_first_is_no_fault(recipe: None) -> None:
    steep = ["task=null", "task._target_=test_gradient_penalty.Steep", "data.eval=null"]
    steep += ["data.train.bad=[]", "amp.dtype=float16", "amp.init_scale=65536"]
    good = [*steep, "data.train.bad_real=[]"]
    said = check_recipe(load_recipe("gan.yaml", good))
    assert said["first step"].endswith("nan, skipped: non-finite gradient, scale 65536 -> 32768")
    assert said["verdict"] == "ready to train"
    bad = f"data.train.bad_real={list(range(24))}"
    for faulty in ([*good, "amp.static=true"], [*good, "amp.min_scale=65536"], [*steep, bad]):
        with pytest.raises(NumericsError, match="the loss of the first step is nan"):
            check_recipe(load_recipe("gan.yaml", faulty))
