"""Numbers that went wrong in the field: the diagnosis names the operation that was first."""

from __future__ import annotations

import copy
import math
import random
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any
from weakref import ref

import numpy as np
import pytest
import torch
from faulty_parts import Spoiled
from states import DTYPES, Net, batches, make_state, run
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl import rng
from ampctl.amp.modules import set_module_dtypes
from ampctl.doctor.mismatch import in_words
from ampctl.doctor.nonfinite import Diagnosis, examine
from ampctl.doctor.trace import Trace
from ampctl.engine.state import TrainState
from ampctl.errors import NumericsError, UsageError
from ampctl.recipe.load import load_recipe
from ampctl.recipe.schema import AmpConfig
from ampctl.run import worker
from ampctl.state_dict.copies import nonfinite
from ampctl.tasks import Regression, Task
from ampctl.tasks.task import as_task

INF = math.inf
X, Y = batches(1)[0]


class Own(nn.Module):
    """A layer, and what ``compute`` makes of it and the input."""

    def __init__(self, compute: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.compute = compute

    def forward(self, x: Tensor) -> Tensor:
        return self.compute(self.layer, x)


class Inside(nn.Module):
    """A model that has it as its part ``inner``."""

    def __init__(self, compute: Callable[[nn.Linear, Tensor], Tensor]) -> None:
        super().__init__()
        self.inner = Own(compute)

    def forward(self, x: Tensor) -> Tensor:
        return self.inner(x)


class BCE:
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        return F.binary_cross_entropy_with_logits(model(x).float(), F.one_hot(y, 4).float())


def state_of(model: nn.Module, dtype: str, task: Task | None = None, **amp: Any) -> TrainState:
    config = AmpConfig(**{"init_scale": 4.0, **amp})
    return make_state(
        model, torch.optim.SGD(model.parameters(), lr=0.0), dtype, amp=config, task=task
    )


def diagnose(
    model: nn.Module,
    dtype: str = "float16",
    batch: Any = (X, Y),
    task: Task | None = None,
    **amp: Any,
) -> Diagnosis:
    """Take a step as a run does, which must be a bad one, and examine it.

    Its rate is 0: where the loss alone is not finite, the step is taken.
    """
    torch.manual_seed(0)
    state = state_of(model, dtype, task, **amp)
    (report,) = run(state, [[batch]])
    assert report.skipped or not math.isfinite(report.loss)
    return examine(state, [batch])


class Wide(nn.Module):
    """The second of three layers overflows float16, the third does not mind."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.wide, self.last = nn.Linear(8, 64), nn.Linear(64, 1), nn.Linear(1, 4)
        nn.init.constant_(self.first.weight, 5.0)
        nn.init.constant_(self.wide.weight, 40.0)

    def forward(self, x: Tensor) -> Tensor:
        return self.last(torch.log1p(self.wide(self.first(x))))


def test_nu1_the_layer_whose_output_overflows_is_named_not_the_loss() -> None:
    found = diagnose(Wide(), batch=(torch.ones(6, 8), Y))
    assert found.module == "wide"
    assert "matrix product in model.wide (Linear)" in found.cause
    assert "gives inf" in found.cause
    assert "float16 ends at 65504" in found.cause
    assert "up to 40" in found.cause
    assert found.override == "amp.dtype=bfloat16"
    assert 'amp.modules: {"wide": float32} (tried on this batch: finite)' in found.advice
    assert any("nan in float16" in fact and "finite" in fact for fact in found.facts)


class Group(nn.Module):
    """Two parts that are added, each with parts of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = Wide(), Wide()

    def forward(self, x: Tensor) -> Tensor:
        return self.one(x) + self.two(x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize(
    ("names", "advice"),
    [
        (["one"], 'amp.modules: {"one.wide": float32} (tried'),
        (["one.wide"], 'amp.modules: {"one.wide": float32} (tried'),
        (["one", "two"], "leave one, two out of amp.modules"),
    ],
)
def test_nu1_a_module_that_the_recipe_runs_in_float16_is_run_in_float32_too(
    dtype: str, names: list[str], advice: str
) -> None:
    model = Group()
    dtypes = set_module_dtypes(model, dict.fromkeys(names, "float16"), device_type="cpu")
    state = replace(state_of(model, dtype), module_dtypes=dtypes)
    state.scaler.enabled = True
    if dtype == "float16" and len(names) == 1:
        model.two.wide.weight.data.div_(100)
    (report,) = run(state, [[(X.abs(), Y)]])
    assert report.skipped
    for _ in range(2):  # and everything is as it was
        found = examine(state, [(X.abs(), Y)])
        assert found.module == "one.wide"
        assert "in float32 the step is finite" in found.cause
        assert "with amp.modules, " in found.facts[0]
        assert advice in found.advice


def test_nu1_the_layer_alone_in_float32_is_not_advised_where_that_does_not_help() -> None:
    """The next layer casts what is too large for it back to float16."""
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 1), nn.Linear(1, 4))
    nn.init.constant_(model[0].weight, 5.0)
    nn.init.constant_(model[1].weight, 40.0)
    found = diagnose(model, batch=(torch.ones(6, 8), Y))
    assert found.module == "1"
    assert "amp.modules" not in found.advice
    assert "amp.dtype=bfloat16 (tried" in found.advice


MASKED = torch.tensor([[True] * 4, [False] * 4] * 3)


def test_nu2_a_mask_constant_that_is_filled_in_is_told_with_its_line() -> None:
    model = Inside(lambda layer, x: layer(x).masked_fill(MASKED, -1e9))
    state = state_of(model, "float16")
    with pytest.raises(RuntimeError, match="without overflow") as raised:
        run(state, [[(X, Y)]])
    note = f"{in_words(raised.value, model, [(X, Y)], doing='step 1')}"
    assert note.startswith("step 1: a constant in model.inner (Own, ")
    assert "test_field_numerics.py:" in note
    assert "does not fit float16" in note
    assert "torch.finfo(x.dtype).min" in note
    assert "amp.dtype=bfloat16" in note


@pytest.mark.parametrize(
    "mask",
    [
        lambda h: h + torch.tensor(-1e9),
        lambda h: h + torch.ones(4, dtype=h.dtype) * -1e9,
        lambda h: h + torch.full((4,), -1e9).to(h.dtype),
        lambda h: torch.where(torch.ones(4, dtype=torch.bool), -1e9, h),
    ],
)
def test_nu2_a_mask_constant_that_is_added_is_named_where_a_whole_row_is_masked(
    mask: Callable[[Tensor], Tensor],
) -> None:
    found = diagnose(Inside(lambda layer, x: mask(h := layer(x)).half().softmax(-1) + h))
    assert "a constant in model.inner (Own), " in found.cause
    assert "does not fit float16: -1e9 becomes -inf" in found.cause
    assert "the softmax in model.inner (Own), " in found.cause
    assert "whole row" in found.cause
    assert "torch.finfo(x.dtype).min" in found.advice
    assert found.module == "inner"


@pytest.mark.parametrize("dtype", DTYPES)
def test_nu2_masks_that_leave_something_are_no_fault(dtype: str) -> None:
    keep = torch.eye(4, dtype=torch.bool).repeat(2, 1)[:6]
    bias = torch.where(keep, 0.0, -1e9)

    def masked(layer: nn.Linear, x: Tensor) -> Tensor:
        h = layer(x)
        h = h.masked_fill(~keep & (h > 9), -INF) + torch.log(keep.to(h.dtype))
        return (h + bias.to(h.dtype)).softmax(-1)

    state = state_of(Inside(masked), dtype)
    (report,) = run(state, [[(X, Y)]])
    assert not report.skipped
    found = examine(state, [(X, Y)])
    assert "run again, the step is finite" in found.cause
    assert not any("intermediate" in fact for fact in found.facts)


def test_nu2_a_mask_beside_a_fault_is_not_taken_for_it() -> None:
    """The -inf of log(0) comes first, but is not what reaches the loss."""

    def masked(layer: nn.Linear, x: Tensor) -> Tensor:
        bias = torch.tensor([1.0, 0.0, 1.0, 1.0]).log()
        h = layer(x)
        return (h + bias).softmax(-1) + (h * 0 + 6e4) * 4

    found = diagnose(Inside(masked), task=as_task(BCE()))
    assert "overflow" in found.cause or "gives inf" in found.cause
    assert "mul in model.inner" in found.cause


def test_nu2_a_mask_of_log_zero_is_not_taken_for_the_overflow_that_meets_it() -> None:
    def masked(layer: nn.Linear, x: Tensor) -> Tensor:
        bias = torch.tensor([1.0, 0.0, 1.0, 1.0]).log()
        return ((layer(x) * 0 + 6e4) * 4 + bias).softmax(-1)  # inf - inf

    assert "mul in model.inner" in diagnose(Inside(masked)).cause


def test_nu2_a_row_that_is_masked_throughout_is_told_in_any_precision() -> None:
    found = diagnose(
        Inside(lambda layer, x: layer(x).masked_fill(MASKED, -INF).softmax(-1)), "float32"
    )
    assert "softmax in model.inner (Own), " in found.cause
    assert "a whole row of its input is -inf" in found.cause


def test_an_overflow_beside_the_one_that_is_named_is_not_called_hidden() -> None:
    def twice(layer: nn.Linear, x: Tensor) -> Tensor:
        h = layer(x) * 0 + 6e4
        return h * 4 + h / 0.1

    found = diagnose(Inside(twice))
    assert "mul in model.inner" in found.cause
    assert not any("intermediate" in fact for fact in found.facts)


def test_nu4_normalize_of_zero_names_its_module_and_the_eps_that_is_zero() -> None:
    def normalized(layer: nn.Linear, x: Tensor) -> Tensor:
        return F.normalize(layer(x) * 0)

    found = diagnose(Inside(normalized))
    line = normalized.__code__.co_firstlineno + 1
    assert "0 / 0 in model.inner (Own), " in found.cause
    assert f"test_field_numerics.py:{line}: " in found.cause
    assert "eps 1e-12 is 0 in float16 (below 6e-8)" in found.cause
    assert found.module == "inner"
    state = state_of(Inside(normalized), "bfloat16")
    assert not run(state, [[(X, Y)]])[0].skipped


def test_nu4_an_eps_that_is_added_under_a_root_is_found_too() -> None:
    found = diagnose(Inside(lambda layer, x: (h := layer(x) * 0) / (h.abs() + 1e-8).sqrt()))
    assert "eps 1e-8 is 0 in float16" in found.cause


def rms_norm(layer: nn.Linear, x: Tensor) -> Tensor:
    h = layer(x) * 0 + 300
    return h * torch.rsqrt((h * h).mean(-1, keepdim=True) + 1e-4)


def test_nu7_squares_that_overflow_are_told_though_the_result_hides_them() -> None:
    model = Inside(rms_norm)
    state = state_of(model, "float16")
    (report,) = run(state, [[(X, Y)]])
    assert not report.skipped  # nothing raises
    with torch.autocast("cpu", dtype=torch.float16):
        assert not model(X).any()
    found = examine(state, [(X, Y)])
    assert "finite" in found.cause
    assert found.module == "inner"
    (fact,) = [fact for fact in found.facts if "intermediate" in fact]
    assert fact.startswith("inf in an intermediate result in model.inner (Own), ")
    assert "mul of values up to 300 in float16" in fact
    state = state_of(model, "float32")
    assert not any("intermediate" in fact for fact in examine(state, [(X, Y)]).facts)


def test_nu10_infinite_logits_are_told_rather_than_the_loss_that_is_nan() -> None:
    model = nn.Sequential(nn.Linear(8, 64), nn.Linear(64, 4))
    nn.init.constant_(model[0].weight, 5.0)
    nn.init.constant_(model[1].weight, -40.0)
    found = diagnose(model, batch=(torch.ones(6, 8), Y), task=as_task(BCE()))
    assert found.cause.startswith("logits contain -inf before the loss: matrix product in model.1 ")
    assert found.module == "1"


def test_nu10_logits_that_are_masked_with_infinity_are_told_in_any_precision() -> None:
    found = diagnose(
        Inside(lambda layer, x: layer(x).masked_fill(torch.ones(4).bool(), -INF)),
        "float32",
        task=as_task(BCE()),
    )
    assert "logits contain inf before the loss" in found.cause
    assert "test_field_numerics.py:" in found.cause


# ---------------------------------------------------------------- faults of any precision

FAULTS: dict[str, tuple[Callable[[nn.Linear, Tensor], Tensor], str]] = {
    "division by zero": (lambda layer, x: 1 / (layer(x) * 0), "division by zero"),
    "zero by zero": (lambda layer, x: (h := layer(x) * 0) / h, "0 / 0"),
    "log of zero": (lambda layer, x: (layer(x) * 0).log(), "the logarithm of zero"),
    "log of a negative": (
        lambda layer, x: (-layer(x).abs() - 1).log(),
        "the logarithm of a negative number",
    ),
    "root of a negative": (
        lambda layer, x: (-layer(x).abs() - 1).sqrt(),
        "the root of a negative number",
    ),
    "root of a negative in place": (
        lambda layer, x: (-layer(x).abs() - 1).sqrt_(),
        "the root of a negative number",
    ),
    "exp": (lambda layer, x: (layer(x) * 0 + 1000).exp(), "its argument reaches 1000"),
    "zero times infinity": (lambda layer, x: layer(x) * 0 * INF, "0 * inf"),
    "infinity less itself": (
        lambda layer, x: layer(x) + (t := torch.full((4,), INF)) - t,
        "inf - inf",
    ),
    "derivative of a root": (
        lambda layer, x: (layer(x) * 0).sqrt(),
        "the derivative of sqrt at 0 is not finite",
    ),
    "hidden by where": (
        lambda layer, x: torch.where((h := layer(x)) > 1e9, 1 / (h * 0), h),
        "division by zero",
    ),
    "label that is masked": (
        lambda layer, x: layer(x).masked_fill(F.one_hot(Y, 4).bool(), -INF),
        "a constant -inf",
    ),
}


@pytest.mark.parametrize("fault", FAULTS)
def test_the_operation_its_module_and_its_line_are_named(fault: str) -> None:
    compute, words = FAULTS[fault]
    found = diagnose(Inside(compute), "float32")
    assert "not finite in float32 either" in found.cause
    assert words in found.cause
    assert f"test_field_numerics.py:{compute.__code__.co_firstlineno}" in found.cause
    assert "model.inner (Own)" in found.cause
    assert found.module == "inner"
    if fault in ("derivative of a root",):
        assert "the backward pass of" in found.cause
    if fault == "hidden by where":
        assert "the gradient does" in found.cause


class Masked(Wide):
    """Adds a parameter to its logits."""

    def __init__(self, *mask: float, trained: bool = False) -> None:
        super().__init__()
        self.mask = nn.Parameter(torch.tensor(mask), requires_grad=trained)

    def forward(self, x: Tensor) -> Tensor:
        return super().forward(x).float() + self.mask


def examined(model: nn.Module) -> Diagnosis:
    state = replace(
        state_of(model, "float16"), nonfinite_by_design=frozenset(nonfinite(model.state_dict()))
    )
    (report,) = run(state, [[(X.abs(), torch.zeros_like(Y))]])
    assert report.skipped
    return examine(state, [(X.abs(), torch.zeros_like(Y))])


def test_a_frozen_mask_is_no_weight_that_was_lost() -> None:
    found = examined(Masked(0.0, 0.0, 0.0, -INF))
    assert (found.module, found.override) == ("wide", "amp.dtype=bfloat16")
    assert any(fact.startswith("largest weight: 40 in") for fact in found.facts)


def test_a_buffer_that_holds_nan_is_named() -> None:
    model = Inside(lambda layer, x: layer(x))
    model.register_buffer("shift", torch.tensor([1.0, math.nan, 1.0, 1.0]))
    model.inner.compute = lambda layer, x: layer(x) + model.shift
    found = diagnose(model, "float32")
    assert "buffer shift holds NaN" in found.cause


@pytest.mark.parametrize(
    ("amp", "override"),
    [
        ({"init_scale": 65536.0}, "amp.init_scale=128"),  # 2048 would not do
        ({"init_scale": 65536.0, "static": True}, "amp.static=false"),
    ],
)
def test_a_gradient_that_only_the_scale_makes_too_large_is_told_so(
    amp: dict[str, Any], override: str
) -> None:
    found = diagnose(Inside(lambda layer, x: layer(x)), batch=(X * 100, Y), **amp)
    assert "times the loss scale" in found.cause
    assert "without the scale it is finite" in found.cause
    assert "model.inner.layer (Linear)" in found.cause
    assert found.module == "inner.layer"
    assert found.override == override


# ---------------------------------------------------------------- NF: aborts and anomaly mode


class Line(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 1)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf2_a_rate_too_high_and_a_corrupt_sample_have_different_causes(dtype: str) -> None:
    data = [(x, x[:, :1].sum(1)) for x, _ in batches(30)]

    def until_bad(lr: float, windows: list[Any]) -> Diagnosis:
        torch.manual_seed(0)
        model = Line()
        state = make_state(
            model,
            torch.optim.SGD(model.parameters(), lr=lr),
            dtype,
            amp=AmpConfig(init_scale=4.0),
            task=Regression(),
        )
        for batch in windows:
            (report,) = run(state, [[batch]])
            if report.skipped:
                return examine(state, [batch])
        raise AssertionError("no step went bad")

    high = until_bad(1e6, data)
    assert "the weights have grown to" in high.advice
    assert "optimizer.lr" in high.advice
    assert high.override == "optimizer.lr=100000"
    x, y = data[2]
    corrupt = until_bad(0.01, [*data[:2], (x.index_fill(0, torch.tensor([3]), INF), y)])
    assert "the batch holds values that are not finite: batch[0] (its samples 3)" in corrupt.cause
    assert corrupt.override is None
    assert "optimizer.lr" not in corrupt.advice
    for found in (high, corrupt):
        facts = "\n".join(found.facts)
        assert "in float32, where the same batch is" in facts
        assert "largest weight: " in facts
        assert "largest input: " in facts
        assert "non-finite gradients: layer.weight, layer.bias" in facts


def test_nf2_a_model_that_cannot_run_in_float32_is_diagnosed_all_the_same() -> None:
    """It asks for float16 by hand."""

    def half(layer: nn.Linear, x: Tensor) -> Tensor:
        assert torch.is_autocast_enabled("cpu") or x.dtype is torch.float16
        return F.linear(x.half() * 6e4, layer.weight)

    def wrong_in_float32(layer: nn.Linear, x: Tensor) -> Tensor:
        return half(layer, x if torch.is_autocast_enabled("cpu") else x.half())

    found = diagnose(Inside(wrong_in_float32))
    assert "model.inner (Own)" in found.cause
    assert any("does not run in float32 (RuntimeError" in fact for fact in found.facts)


@pytest.fixture
def _anomaly_mode() -> Iterator[None]:
    before = torch.is_anomaly_enabled()
    yield
    torch.autograd.set_detect_anomaly(before)


RECIPE = """
name: anomaly
model: {_target_: ampctl.models.MLP, in_features: 64, hidden: [8], num_classes: 10}
task: {_target_: ampctl.tasks.Classification}
data: {train: {_target_: ampctl.data.Digits}, batch_size: 256}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
amp: {dtype: float16, init_scale: 1e30}
train: {max_steps: 2}
"""


@pytest.mark.filterwarnings("ignore:Anomaly Detection")
@pytest.mark.usefixtures("_anomaly_mode")
def test_nf12_anomaly_mode_that_stops_at_an_overflow_is_told_in_words(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE)
    loaded = load_recipe("recipe.yaml", [])
    worker.train(loaded, run_dir=Path("off"), resume=False, quiet=True)  # skips, and goes on
    torch.autograd.set_detect_anomaly(True)
    with pytest.raises(UsageError, match="step 1: anomaly mode is on") as told:
        worker.train(loaded, run_dir=Path("on"), resume=False, quiet=True)
    assert "In float16 an overflow now and then is normal" in str(told.value)
    assert "torch.autograd.set_detect_anomaly(False)" in str(told.value)
    assert "Traceback" in Path("on/logs/rank-0.log").read_text()


def test_nf12_no_healthy_run_is_in_anomaly_mode() -> None:
    seen: list[bool] = []

    class Watched:
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            seen.append(torch.is_anomaly_enabled())
            return F.cross_entropy(model(batch[0]).float(), batch[1])

    state = state_of(Net(), "float16", as_task(Watched()))
    run(state, [batches(2), batches(2)])
    assert seen == [False] * 4


# ---------------------------------------------------------------- nothing is changed by it


class Untidy(nn.Module):
    """Draws, counts, renorms its weight, and leaves training mode; raises in its ``last`` pass."""

    def __init__(self, last: int = 99) -> None:
        super().__init__()
        self.layer, self.norm = nn.Linear(8, 4), nn.BatchNorm1d(4)
        self.register_buffer("count", torch.zeros(()))
        self.passes, self.last = 0, last

    def forward(self, x: Tensor) -> Tensor:
        self.passes += 1
        self.count += 1
        self.layer.weight.data = self.layer.weight.data * 0.5
        h = self.norm(self.layer(x * torch.rand(()) * random.random() * float(np.random.rand())))
        self.norm.eval()
        if self.passes == self.last:
            raise ValueError("the last pass")
        return h / 0


@pytest.mark.parametrize("last", [99, 1, 2])
@pytest.mark.parametrize("dtype", DTYPES)
def test_examining_leaves_everything_as_it_was(dtype: str, last: int) -> None:
    model = Untidy(last)
    state = state_of(model, dtype)
    for parameter in model.parameters():
        parameter.grad = torch.full_like(parameter, 7.0)
    before = copy.deepcopy(model.state_dict())
    generators = rng.get_state()
    if last == 1 or (last == 2 and dtype != "float32"):
        with pytest.raises(ValueError, match="the last pass"):
            examine(state, [(X, Y)])
    else:
        assert "division by zero" in examine(state, [(X, Y)]).cause
    for name, value in model.state_dict().items():
        assert torch.equal(value, before[name]), name
    assert all(parameter.grad is None for parameter in model.parameters())
    assert str(rng.get_state()) == str(generators)
    assert all(module.training for module in model.modules())
    assert float(state.scaler.current_scale) == (4.0 if dtype == "float16" else 1.0)


class InPlace(Task):
    """Scales its inputs in place, which only a tensor without a gradient lets it do."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x = batch[0].mul_(1e9).requires_grad_()
        return F.mse_loss(model(x).float(), torch.zeros(6, 4))


def test_a_batch_that_is_written_into_is_the_same_in_each_replay() -> None:
    state = state_of(nn.Linear(8, 4), "float32", InPlace())
    x = X.clone()
    (report,) = run(state, [[(x, Y)]])
    assert not report.skipped
    once = x.detach().clone()
    found = examine(state, [(x, Y)])
    assert torch.equal(x, once)
    assert "run again, the step is finite" in found.cause
    assert examine(state, [(x, Y)]) == found


def test_a_module_that_was_tried_in_float32_is_itself_again() -> None:
    model = Wide()
    diagnose(model, batch=(torch.ones(6, 8), Y))
    assert type(model.wide) is nn.Linear


def test_a_compiled_model_is_examined_by_its_own_modules() -> None:
    class Compiled(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            raise AssertionError("nothing can be seen in here")

    state = state_of(Wide(), "float16")
    state.model = Compiled()
    assert examine(state, [(torch.ones(6, 8), Y)]).module == "wide"


def test_parts_that_are_compiled_are_examined_as_they_were_written() -> None:
    ran: list[str] = []

    def backend(graph: torch.fx.GraphModule, _: Any) -> Callable[..., Any]:
        def compiled(*args: Any) -> Any:
            ran.append("compiled")
            return graph(*args)

        return compiled

    state = state_of(Wide(), "float16")
    state.bare.wide.compile(backend=backend)  # type: ignore[operator, union-attr]
    run(state, [[(torch.ones(6, 8), Y)]])
    assert ran
    ran.clear()
    assert examine(state, [(torch.ones(6, 8), Y)]).module == "wide"
    assert not ran


def test_the_backward_pass_is_watched_in_the_thread_of_the_forward_pass() -> None:
    alone: list[bool] = []
    model = Wide()
    model.wide.register_full_backward_hook(
        lambda *_: alone.append(not torch._C._is_multithreading_enabled())
    )
    examine(state_of(model, "float16"), [(torch.ones(6, 8), Y)])
    assert alone
    assert all(alone)
    assert torch._C._is_multithreading_enabled()


class Hungry(nn.Module):
    """Raises at its pass ``at``, with a large tensor in its frame."""

    def __init__(self, at: int) -> None:
        super().__init__()
        self.layer, self.at, self.passes = nn.Linear(8, 4), at, 0
        self.held: list[ref[Tensor]] = []

    def forward(self, x: Tensor) -> Tensor:
        assert not any(each() is not None for each in self.held), "what failed is still held"
        self.passes += 1
        if self.passes == self.at:
            activation = torch.ones(1000)
            self.held.append(ref(activation))
            raise torch.OutOfMemoryError("CUDA out of memory")
        return self.layer(x) * torch.tensor(6e4).to(x.dtype) * 1e3


def test_a_replay_without_room_is_told_so() -> None:
    found = examine(state_of(Hungry(1), "bfloat16"), [(X, Y)])
    assert "took more memory than there is" in found.cause
    assert "data.micro_batch_size" in found.advice
    found = examine(state_of(Hungry(1), "bfloat16"), [(X * INF, Y)])
    assert "the batch holds values that are not finite" in found.cause


def test_a_replay_that_fails_holds_no_memory() -> None:
    model = Hungry(2)  # in float32; what is tried next needs the room
    found = examine(state_of(model, "float16"), [(X * 1e4, Y)])
    assert any("does not run in float32 (OutOfMemoryError" in fact for fact in found.facts)
    assert model.passes > 2


def test_a_healthy_run_is_not_traced(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuse(*_: Any) -> None:
        raise AssertionError("a trace was opened")

    monkeypatch.setattr(Trace, "__init__", refuse)
    run(state_of(Net(), "float16"), [[batch] for batch in batches(3)])


def test_nf2_the_abort_shows_history_last_good_step_tensor_and_float32(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(
        "name: abort\n"
        "model: {_target_: torch.nn.Linear, in_features: 8, out_features: 1}\n"
        "task: {_target_: ampctl.tasks.Regression}\n"
        "data: {train: {_target_: faulty_parts.Spoiled, size: 40}, batch_size: 2, shuffle: false}\n"
        "optimizer: {_target_: torch.optim.SGD, lr: 1e6}\n"
        "amp: {dtype: float16, init_scale: 1024, max_skips: 3}\n"
        "train: {max_steps: 20}\n"
    )
    assert len(Spoiled(size=40)) == 40
    loaded = load_recipe("recipe.yaml", [])
    with pytest.raises(NumericsError) as stopped:
        worker.train(loaded, run_dir=Path("run"), resume=False, quiet=True)
    said = str(stopped.value)
    assert "the last good step was 1" in said
    assert "512 (step 2) -> 256 (step 3) -> 128 (step 4)" in said
    assert "non-finite gradients: weight, bias" in said
    assert "in float32, where the same batch is finite" in said
    assert "lower optimizer.lr" in said
    assert "next:   `ampctl train run/recipe.yaml optimizer.lr=100000`" in said


def test_the_micro_batch_that_went_wrong_is_the_one_that_is_told() -> None:
    state = state_of(Inside(lambda layer, x: layer(x) * x[:, :1].sqrt()), "float32")
    found = examine(state, [(X.abs() + 1, Y), (-X.abs() - 1, Y), (X.abs() + 1, Y)])
    assert "the root of a negative number in model.inner" in found.cause
