"""Custom ``torch.autograd.Function``s and autocast: what works trains, what does not is told."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import pytest
import torch
from states import batches, make_state, run
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.amp.precision import choose_precision
from ampctl.doctor.check import check_recipe
from ampctl.doctor.mismatch import in_words
from ampctl.doctor.nonfinite import examine
from ampctl.errors import UsageError
from ampctl.recipe.load import load_recipe
from ampctl.recipe.schema import AmpConfig
from ampctl.tasks.task import as_task

HALVES = ("float16", "bfloat16")
ROUGH = {"float32": 1e-6, "float16": 5e-3, "bfloat16": 4e-2}


class Plain(torch.autograd.Function):
    """A matrix product without decorators."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Decorated(torch.autograd.Function):
    """The same; its backward runs in the autocast state of its forward."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu")
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class InFloat32(torch.autograd.Function):
    """One that needs a dtype: float32, whatever comes in."""

    seen: set[torch.dtype] = set()  # noqa: RUF012

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        InFloat32.seen |= {x.dtype, weight.dtype}
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return grad @ weight.t(), x.t() @ grad


class Product(nn.Module):
    """A hidden layer whose product is a custom function, or torch's own where there is none."""

    def __init__(self, function: type[torch.autograd.Function] | None) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 8), nn.Linear(8, 4)
        self.weight = nn.Parameter(torch.randn(8, 8) / 3)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        h = self.first(x)
        h = h @ self.weight if self.function is None else self.function.apply(h, self.weight)
        return self.head(h)


def trained(function: type[torch.autograd.Function] | None, dtype: str) -> nn.Module:
    torch.manual_seed(0)
    model = Product(function)
    amp = AmpConfig(init_scale=64.0)
    state = make_state(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype, amp=amp)
    reports = run(state, [[batch] for batch in batches(4)])
    assert not any(report.skipped for report in reports)
    return model


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("function", [Decorated, InFloat32])
def test_ac3_a_decorated_function_trains_as_plain_autograd_does(
    function: type[torch.autograd.Function], dtype: str
) -> None:
    InFloat32.seen.clear()
    found, expected = trained(function, dtype), trained(None, dtype)
    exact = trained(None, "float32")
    for name, parameter in found.named_parameters():
        for other in (expected, exact):
            reference = other.get_parameter(name)
            torch.testing.assert_close(parameter, reference, rtol=0, atol=ROUGH[dtype])
    if function is Decorated:
        # The same products in the same dtype, so the same bits.
        assert all(
            torch.equal(parameter, expected.get_parameter(name))
            for name, parameter in found.named_parameters()
        )
    else:
        assert InFloat32.seen == {torch.float32}


@pytest.mark.parametrize("dtype", HALVES)
def test_ac3_a_bare_function_is_named_with_its_line_and_the_decorators(dtype: str) -> None:
    model = Product(Plain)
    state = make_state(model, torch.optim.SGD(model.parameters(), lr=0.1), dtype)
    with pytest.raises(RuntimeError, match="dtype") as raised:
        run(state, [batches(1)])
    note = f"{in_words(raised.value, model, batches(1), doing='step 1')}"
    line = Plain.backward.__code__.co_firstlineno + 3
    assert re.search(rf"Function Plain \(.*test_autograd_functions\.py:{line}\)", note)
    assert '@torch.amp.custom_fwd(device_type="cpu")' in note
    assert '@torch.amp.custom_bwd(device_type="cpu")' in note


def test_ac3_a_decorated_function_is_not_told_to_be_decorated() -> None:
    class Wrong(Decorated):
        @staticmethod
        @torch.amp.custom_bwd(device_type="cpu")
        def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
            raise RuntimeError("my own check: dtype Half, not Float")

    model = Product(Wrong)
    state = make_state(model, torch.optim.SGD(model.parameters(), lr=0.1), "float16")
    with pytest.raises(RuntimeError, match="my own check") as raised:
        run(state, [batches(1)])
    assert in_words(raised.value, model, batches(1), doing="step 1") is None
    assert raised.value.__notes__ == ["in step 1"]


@pytest.mark.parametrize("function", [Plain, Decorated, InFloat32])
def test_ac3_in_float32_any_of_them_is_plain_autograd(
    function: type[torch.autograd.Function],
) -> None:
    found, expected = trained(function, "float32"), trained(None, "float32")
    for name, parameter in found.named_parameters():
        assert torch.equal(parameter, expected.get_parameter(name))


OWN = """
import torch
from torch import nn

class Mine(torch.autograd.Function):
    @staticmethod{forward}
    def forward(ctx, x, w):
        ctx.save_for_backward(x, w)
        return x @ w
    @staticmethod{backward}
    def backward(ctx, g):
        x, w = ctx.saved_tensors
        return g @ w.t(), x.t() @ g

class Net(nn.Module):
    def __init__(self):
        super().__init__()
        self.w = nn.Parameter(torch.zeros(64, 10))
    def forward(self, x):
        return Mine.apply(x.flatten(1), self.w)
"""
RECIPE = """
name: own
model: {{_target_: own_{name}.Net}}
task: {{_target_: ampctl.tasks.Classification}}
data: {{train: {{_target_: ampctl.data.Digits}}, batch_size: 32}}
optimizer: {{_target_: torch.optim.SGD, lr: 0.1}}
amp: {{dtype: {dtype}, init_scale: 64}}
train: {{max_steps: 2}}
"""


@pytest.mark.parametrize("dtype", HALVES)
@pytest.mark.parametrize("decorated", [True, False])
def test_ac3_a_recipe_with_a_function_of_the_users_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str, decorated: bool
) -> None:
    name = f"{dtype}_{decorated}".lower()
    marks = (
        f'\n    @torch.amp.custom_{each}(device_type="cpu")' if decorated else ""
        for each in ("fwd", "bwd")
    )
    text = OWN.format(**dict(zip(("forward", "backward"), marks, strict=True)))
    (folder / f"own_{name}.py").write_text(text)
    (folder / "recipe.yaml").write_text(RECIPE.format(name=name, dtype=dtype))
    monkeypatch.syspath_prepend(str(folder))
    loaded = load_recipe("recipe.yaml", [])
    if decorated:
        assert "ready to train" in check_recipe(loaded)["verdict"]
        return
    with pytest.raises(UsageError, match=rf"Function Mine \(own_{name}\.py:13\)"):
        check_recipe(loaded)


class Overflows(torch.autograd.Function):
    """Its backward divides by zero."""

    @staticmethod
    @torch.amp.custom_fwd(device_type="cpu", cast_inputs=torch.float32)
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.save_for_backward(x, weight)
        return x @ weight

    @staticmethod
    @torch.amp.custom_bwd(device_type="cpu")
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor, Tensor]:
        x, weight = ctx.saved_tensors
        return (grad @ weight.t()) / (x * 0), x.t() @ grad


def test_a_backward_of_the_users_own_that_goes_wrong_is_named_with_its_line() -> None:
    model = Product(Overflows)
    state = make_state(model, torch.optim.SGD(model.parameters(), lr=0.1), "float16")
    (report,) = run(state, [batches(1)])
    assert report.skipped
    found = examine(state, batches(1))
    line = Overflows.backward.__wrapped__.__code__.co_firstlineno + 4
    assert "division by zero in the backward pass of model (Product)" in found.cause
    assert f"test_autograd_functions.py:{line}" in found.cause


@pytest.mark.parametrize("dtype", HALVES)
def test_ac1_a_forward_without_gradients_leaves_the_next_one_its_gradients(dtype: str) -> None:
    """Both are in one autocast region, which keeps casts of the weights."""

    class Twice:
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            x, y = batch
            with torch.no_grad():
                target = model(x).float().argmax(1)
            logits = model(x).float()
            return F.cross_entropy(logits, y) + 0.0 * (logits * F.one_hot(target, 4)).sum()

    grads = {}
    for task in (as_task(Twice()), None):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        amp = AmpConfig(init_scale=64.0)
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        before = model.weight.detach().clone()
        state = make_state(model, optimizer, dtype, amp=amp, task=task)
        (report,) = run(state, [batches(1)])
        assert not report.skipped
        assert not torch.equal(model.weight, before)
        grads[task is None] = model.weight.detach() - before
    torch.testing.assert_close(grads[True], grads[False], rtol=0, atol=ROUGH[dtype] / 10)


def test_ac1_a_cache_that_loses_gradients_is_not_used_and_that_is_said(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    kept = torch.is_autocast_cache_enabled()
    monkeypatch.setattr("ampctl.amp.precision.cache_keeps_gradients", lambda: False)
    precision = choose_precision("bfloat16", torch.device("cpu"))
    assert "without autocast's cache" in precision.reason
    with precision.autocast():
        assert not torch.is_autocast_cache_enabled()
    assert torch.is_autocast_cache_enabled() is kept
    assert "cache" not in choose_precision("float32", torch.device("cpu")).reason
