"""The precision preflight: a finding fires where it should, and not at what is right beside it."""

from __future__ import annotations

import copy
import inspect
import json
import random
import re
import sys
import threading
from collections.abc import Callable, Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from cpus import Cpu, on_each_cpu
from states import Net, batches, make_state
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.checkpoint import checkpoint
from typer.testing import CliRunner

from ampctl import rng
from ampctl.amp.modules import set_module_dtypes
from ampctl.builder.job import build_job
from ampctl.cli import app
from ampctl.doctor.dry_run import traced_findings
from ampctl.doctor.finding import MEANINGS, Finding, Target
from ampctl.doctor.precision_check import preflight, static_findings
from ampctl.engine.learning_rate import FunctionSchedule
from ampctl.engine.state import TrainState
from ampctl.engine.step import train_step
from ampctl.engine.updater import Updater
from ampctl.errors import UsageError
from ampctl.recipe.load import load_recipe
from ampctl.tasks.task import as_task

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")

CUDA = Target("cuda", "float16", here=False)
CPU = Target("cpu", "float16")


def state_of(
    model: nn.Module,
    task: Any = None,
    *,
    optimizer: Callable[..., torch.optim.Optimizer] = torch.optim.Adam,
    dtype: str = "float16",
    **options: Any,
) -> TrainState:
    trained = [p for p in model.parameters() if p.requires_grad]
    task = as_task(task) if task is not None else None
    return make_state(model, optimizer(trained, **options), dtype, task=task)


def names(findings: list[Finding]) -> list[tuple[str, str]]:
    return [(finding.name, finding.severity) for finding in findings]


class Applies(nn.Module):
    """A linear layer, and then some function of its half-precision output."""

    def __init__(self, function: Callable[[Tensor], Tensor]) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.function = function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def traced(function: Callable[[Tensor], Tensor], target: Target) -> list[Finding]:
    return traced_findings(state_of(Applies(function)), batches(1), target)


class Probabilities:
    """Binary cross entropy of probabilities, in autocast or outside of it."""

    def __init__(self, island: bool = False, held: bool = True) -> None:
        self.island = island
        if held:
            self.criterion = nn.BCELoss()

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        x, y = batch
        p = model(x).float().sigmoid()
        target = F.one_hot(y, 4).float()
        with torch.autocast(p.device.type, enabled=not self.island and p.device.type == "cpu"):
            if self.island:
                return self.criterion(p, target)
        return F.binary_cross_entropy(p, target)


# ---------------------------------------------------------------- what was built


def of_hardware(cpu: Cpu) -> list[tuple[str, str]]:
    """Return what is found of any float16 run on a CPU."""
    return [] if cpu.float16 else [("dtype-not-in-hardware", "warning")]


def test_a_finding_has_a_promised_name_and_two_lines() -> None:
    finding = Finding("no-gradient", "head.weight", "it is so", "Do this.")
    assert str(finding) == "no-gradient: head.weight: it is so\n    Do this."
    with pytest.raises(AssertionError, match="promised nowhere"):
        Finding("another", "here", "why", "what")
    assert all(re.fullmatch("[a-z0-9-]+", name) for name in MEANINGS)


@on_each_cpu
def test_op1_trainable_float16_parameters_are_named_and_frozen_ones_are_not(cpu: Cpu) -> None:
    model = Net()
    model.head.half()
    state = state_of(model, optimizer=torch.optim.SGD, lr=0.1)
    finding, *others = static_findings(state, CPU)
    assert names(others) == of_hardware(cpu)
    assert (finding.name, finding.severity) == ("half-parameters", "error")
    assert finding.place == "head.weight, head.bias"
    assert "2 trainable parameters are float16" in finding.reason
    assert "amp.upcast=true" in finding.remedy
    model.head.requires_grad_(False)
    assert names(static_findings(state_of(model), CPU)) == of_hardware(cpu)


@on_each_cpu
def test_op2_an_eps_that_is_zero_in_float16_is_named_with_its_optimizer(cpu: Cpu) -> None:
    model = Net()
    model.head.half()
    found = static_findings(state_of(model, optimizer=torch.optim.AdamW), CPU)
    half, eps = ("half-parameters", "error"), ("vanishing-eps", "error")
    assert names(found) == [half, eps, *of_hardware(cpu)]
    assert found[1].place == "optimizer"
    assert "eps 1e-08 of AdamW is 0 in float16" in found[1].reason
    assert names(static_findings(state_of(model, eps=1e-4), CPU)) == [half, *of_hardware(cpu)]


def test_ac5_trainable_bfloat16_parameters_are_a_warning() -> None:
    model = Net()
    model.head.bfloat16()
    (finding,) = static_findings(state_of(model, dtype="bfloat16"), Target("cpu", "float32"))
    assert (finding.name, finding.severity) == ("half-parameters", "warning")
    assert "bfloat16" in finding.reason
    assert "eps" not in str(finding)
    assert static_findings(state_of(Net(), dtype="bfloat16"), Target("cpu", "float32")) == []


def test_sp4_an_optimizer_without_trainable_parameters_is_named() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = make_state(model, optimizer, "float32")
    assert static_findings(state) == []
    model.requires_grad_(False)
    (finding,) = static_findings(state)
    assert (finding.name, finding.severity) == ("no-parameters", "error")
    assert "SGD got no trainable parameter of Net: all 6 are frozen" in finding.reason


@on_each_cpu
def test_ac6_a_dtype_that_the_hardware_lacks_is_said_with_the_reason(cpu: Cpu) -> None:
    state = state_of(Net())
    for dtype, is_native in (("float16", cpu.float16), ("bfloat16", cpu.bfloat16)):
        found = static_findings(state, Target("cpu", dtype))
        assert names(found) == ([] if is_native else [("dtype-not-in-hardware", "warning")])
        for finding in found:
            assert f"{dtype} is emulated on this cpu: this CPU has none of AMX-" in finding.reason
    for silent in (CUDA, Target("cpu", "float32")):
        assert static_findings(state, silent) == []


def test_ac2_a_loss_that_cuda_refuses_is_seen_in_model_and_task() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.BCELoss())
    (finding,) = static_findings(state_of(model, Probabilities()), CUDA)
    assert (finding.name, finding.severity) == ("refused-by-autocast", "warning")
    assert finding.place == "model.1, task.criterion"
    assert "BCEWithLogitsLoss" in finding.remedy

    state = state_of(Net(), Probabilities())
    assert names(static_findings(state, CUDA)) == [("refused-by-autocast", "warning")]
    (elsewhere,) = static_findings(state, Target("cpu", "bfloat16", here=False, chosen=True))
    assert "on CUDA" in elsewhere.reason  # the device was `auto`, and another machine takes a GPU
    for silent in (CPU, Target("cuda", "float32", here=False), Target("mps", "float16", False)):
        assert not [f for f in static_findings(state, silent) if f.name == "refused-by-autocast"]


def test_ac2_logits_and_a_float32_island_of_the_recipe_are_not_refused() -> None:
    model = nn.Sequential(nn.Linear(8, 4), nn.Sequential(nn.BCELoss()), nn.BCEWithLogitsLoss())
    chosen = set_module_dtypes(model, {"1": "float32"}, device_type="cpu")
    state = state_of(model)
    assert names(static_findings(state, CUDA)) == [("refused-by-autocast", "warning")]
    state.module_dtypes = chosen
    assert static_findings(state, CUDA) == []


def test_building_blocks_of_a_large_model_are_looked_at_once() -> None:
    model = nn.Sequential(*[nn.Sequential(nn.Identity(), nn.BCELoss()) for _ in range(2000)])
    model.append(nn.Linear(2, 2))
    (finding,) = static_findings(state_of(model), CUDA)
    assert "and 1995 more" in finding.place


# ---------------------------------------------------------------- constants


@pytest.mark.parametrize("eps", [1e-8, 1e-12, 2.0**-25])
@pytest.mark.parametrize(
    "function",
    [
        lambda x, eps: x / (x.abs() + eps),
        lambda x, eps: x / (eps - x),
        lambda x, eps: x / x.abs().clamp(min=eps),
        lambda x, eps: x / x.abs().clamp_min_(eps),
        lambda x, eps: x / x.masked_fill(x == 0, eps),
        lambda x, eps: x / torch.where(x == 0, eps, x),
        lambda x, eps: x / torch.full_like(x, eps),
    ],
)
def test_nu4_an_eps_that_is_zero_in_float16_is_named_with_its_line(
    function: Callable[[Tensor, float], Tensor], eps: float
) -> None:
    (finding,) = traced(lambda x: function(x, eps), CUDA)
    assert (finding.name, finding.severity) == ("vanishing-eps", "warning")
    line = inspect.getsourcelines(function)[1]
    assert finding.place.startswith("model (Applies), ")
    assert re.search(rf"test_precision_preflight\.py:{line}$", finding.place)
    assert f"{eps:g} in `" in finding.reason
    assert traced(lambda x: function(x, 2.0**-24), CUDA) == []  # the smallest that float16 has
    assert traced(lambda x: function(x.float(), eps), CUDA) == []
    bfloat16 = Target("cuda", "bfloat16", here=False)
    assert traced(lambda x: function(x, eps), bfloat16) == []


def test_nu4_normalize_is_judged_by_the_dtype_it_has_on_the_target() -> None:
    (finding,) = traced(F.normalize, CPU)
    assert "1e-12 in `clamp_min` is 0 in float16" in finding.reason
    assert traced(F.normalize, CUDA) == []  # CUDA autocast computes norms in float32


def test_nu4_the_modules_that_share_a_line_are_one_finding() -> None:
    class Scale(nn.Module):
        def forward(self, x: Tensor) -> Tensor:
            return x / (x.abs() + 1e-8)

    model = nn.Sequential(nn.Linear(8, 4), Scale(), Scale(), nn.Linear(4, 4), Scale())
    (finding,) = traced_findings(state_of(model), batches(1), CUDA)
    assert finding.place.startswith("model.1 (Scale), ")
    assert finding.place.endswith(", and 2 more modules")
    assert "amp.modules={1: float32}" in finding.remedy


@pytest.mark.parametrize("target", [CPU, CUDA])
@pytest.mark.parametrize(
    "norm",
    [
        nn.LayerNorm(4, eps=1e-12),
        nn.RMSNorm(4, eps=1e-12),
        nn.BatchNorm1d(4, eps=1e-12),
        nn.GroupNorm(2, 4, eps=1e-12),
    ],
)
def test_nu4_the_norms_of_torch_keep_their_eps_and_are_no_finding(
    norm: nn.Module, target: Target
) -> None:
    zeros = norm(torch.zeros(2, 4, dtype=torch.float32))
    assert torch.isfinite(zeros).all()
    assert traced_findings(state_of(nn.Sequential(nn.Linear(8, 4), norm)), batches(1), target) == []


STORED = {
    "masked_fill": lambda x, c: x.masked_fill(x > 0, c),
    "masked_fill_": lambda x, c: x.clone().masked_fill_(x > 0, c),
    "full": lambda x, c: x + torch.full((4,), c, dtype=x.dtype, device=x.device),
    "full_like": lambda x, c: x + torch.full_like(x, c),
    "new_full": lambda x, c: x + x.new_full((4,), c),
    "fill_": lambda x, c: x.clone().fill_(c),
    "index_fill": lambda x, c: x.index_fill(0, torch.tensor([0], device=x.device), c),
    "pad": lambda x, c: F.pad(x, (0, 1), value=c)[:, :4],
}
COMPARED = {
    "clamp": lambda x, c: x.clamp(min=c),
    "clamp_min": lambda x, c: x.clamp_min(c),
    "clamp_max": lambda x, c: x.clamp_max(c),
}
COMPUTED = {
    "add": lambda x, c: x + c,
    "sub": lambda x, c: x - c,
    "rsub": lambda x, c: c - x,
    "mul": lambda x, c: (x + 1) * c,
    "where": lambda x, c: torch.where(x > 0, x, c),
}


@pytest.mark.parametrize("constant", [-1e9, 65505.0])
@pytest.mark.parametrize("case", [*STORED, *COMPARED, *COMPUTED])
def test_nu2_a_constant_too_large_is_an_error_exactly_where_torch_raises(
    case: str, constant: float
) -> None:
    function = (STORED | COMPARED | COMPUTED)[case]
    (finding,) = traced(lambda x: function(x, constant), CPU)
    assert finding.name == "constant-out-of-range"
    assert "does not fit float16" in finding.reason
    half = torch.zeros(2, 4, dtype=torch.float16)
    if finding.severity == "error":
        assert "it raises" in finding.reason
        with pytest.raises(RuntimeError, match="without overflow"):
            function(half, constant)
    else:
        assert f"becomes {'-' if constant < 0 else ''}inf" in finding.reason
        if constant < -65519:
            assert torch.isinf(function(half, constant)).any()
    assert (finding.severity == "error") == (case not in COMPUTED)


@pytest.mark.parametrize("case", STORED | COMPARED | COMPUTED)
def test_nu2_infinities_and_what_fits_are_no_finding(case: str) -> None:
    function = (STORED | COMPARED | COMPUTED)[case]
    for fits in (-float("inf"), float("inf"), -65504.0, torch.finfo(torch.float16).min):
        assert traced(lambda x, fits=fits: function(x, fits), CPU) == []  # type: ignore[misc]
    assert traced(lambda x: function(x.float(), -1e9), CPU) == []
    assert traced(lambda x: function(x, -1e9), Target("cpu", "bfloat16")) == []


@pytest.mark.parametrize("case", COMPARED)
def test_nu2_a_gpu_compares_with_constants_in_float32(case: str) -> None:
    assert traced(lambda x: COMPARED[case](x, -1e9), CUDA) == []


# ---------------------------------------------------------------- refused by autocast


class Functional(Probabilities):
    """The function rather than the module."""

    def __init__(self) -> None:
        super().__init__(held=False)


def test_ac2_the_function_is_found_with_the_line_that_calls_it() -> None:
    state = state_of(Net(), Functional())
    assert static_findings(state, CUDA) == []
    (finding,) = traced_findings(state, batches(1), CUDA)
    assert (finding.name, finding.severity) == ("refused-by-autocast", "error")
    assert re.fullmatch(r"(.*/)?test_precision_preflight\.py:\d+", finding.place)
    assert traced_findings(state, batches(1), Target("cuda", "float32", here=False)) == []
    assert traced_findings(state, batches(1), CPU) == []


def test_ac2_a_module_is_refused_where_it_is_called_not_where_it_is_held() -> None:
    class Inside(Net):
        def __init__(self) -> None:
            super().__init__()
            self.criterion = nn.BCELoss()

        def forward(self, x: Tensor) -> Tensor:
            return self.criterion(super().forward(x).float().sigmoid(), torch.ones_like(x[:, :4]))

    class Own:
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return model(batch[0])

    (finding,) = traced_findings(state_of(Inside(), Own()), batches(1), CUDA)
    assert finding.name == "refused-by-autocast"
    assert finding.place.startswith("model.criterion (BCELoss), ")


# ---------------------------------------------------------------- gradients


class Partly(Net):
    """Two layers that the loss does not depend on."""

    def __init__(self, frozen: bool = False) -> None:
        super().__init__()
        self.unused = nn.Linear(3, 3).requires_grad_(not frozen)


def test_sp4_parameters_that_the_loss_does_not_reach_are_named() -> None:
    (finding,) = traced_findings(state_of(Partly()), batches(1), CUDA)
    assert (finding.name, finding.severity) == ("no-gradient", "warning")
    assert finding.place == "unused.weight, unused.bias"
    assert "6 of 8 parameters" in finding.reason
    assert traced_findings(state_of(Partly(frozen=True)), batches(1), CUDA) == []


def two_optimizers(model: Partly, task: Any) -> TrainState:
    state = state_of(model, task)
    unused = {id(p) for p in model.unused.parameters()}
    parts = {
        "main": [p for p in model.parameters() if id(p) not in unused],
        "rest": list(model.unused.parameters()),
    }
    updaters = []
    for name, part in parts.items():
        optimizer = torch.optim.SGD(part, lr=0.1)
        updaters.append(Updater(name, optimizer, FunctionSchedule(optimizer, None)))
    return replace(state, updaters=updaters)


class Plain:
    """One loss for all."""

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return F.cross_entropy(model(batch[0]).float(), batch[1])


class Turns(Plain):
    """The optimizers take turns, one of them at some steps alone, with a gradient penalty."""

    def __init__(self, rest: bool) -> None:
        self.rest = rest

    def losses(
        self, model: nn.Module, batch: Any, grad: Callable[..., Tensor]
    ) -> Iterator[tuple[str, Tensor]]:
        x = batch[0].clone().requires_grad_()
        logits = model(x)
        yield "main", F.cross_entropy(logits.float(), batch[1]) + grad(logits, x).norm()
        if self.rest:
            yield "rest", self.loss(model, batch)


def test_sp4_an_optimizer_that_gets_no_gradient_at_all_is_an_error() -> None:
    (finding,) = traced_findings(two_optimizers(Partly(), Plain()), batches(1), CUDA)
    assert (finding.name, finding.severity) == ("no-gradient", "error")
    assert finding.place == "optimizer.rest"
    assert "0 of 2 parameters received a gradient" in finding.reason
    assert "(unused.weight, unused.bias)" in finding.reason


def test_sp4_an_optimizer_is_judged_by_its_own_turn() -> None:
    missing = traced_findings(two_optimizers(Partly(), Turns(rest=True)), batches(1), CUDA)
    assert [(f.name, f.place) for f in missing] == [("no-gradient", "optimizer.rest")]
    waiting = traced_findings(two_optimizers(Partly(), Turns(rest=False)), batches(1), CUDA)
    assert waiting == []


def test_a_checkpointed_part_whose_graph_is_not_there_yet_is_no_finding() -> None:
    class Checkpointed(Net):
        def __init__(self, reentrant: bool) -> None:
            super().__init__()
            self.reentrant = reentrant

        def forward(self, x: Tensor) -> Tensor:
            return checkpoint(super().forward, x.requires_grad_(), use_reentrant=self.reentrant)

    for reentrant in (False, True):
        assert traced_findings(state_of(Checkpointed(reentrant)), batches(1), CUDA) == []


def test_a_loss_without_a_graph_is_left_to_the_step_which_tells_it() -> None:
    class Detached(Plain):
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return super().loss(model, batch).detach()

    state = state_of(Net(), Detached())
    assert traced_findings(state, batches(1), CUDA) == []
    with pytest.raises(UsageError, match="0 of 6 parameters received a gradient"):
        train_step(state, batches(1))


# ---------------------------------------------------------------- what cannot be traced


class ReadsValues(Net):
    """Its way depends on what the tensors hold."""

    def forward(self, x: Tensor) -> Tensor:
        y = super().forward(x) + 1e-8
        return y * 2 if float(y.sum()) > 0 else y


def test_a_pass_that_reads_values_is_traced_as_far_as_it_goes() -> None:
    found = traced_findings(state_of(ReadsValues()), batches(1), CUDA)
    assert names(found) == [("vanishing-eps", "warning"), ("not-traced", "warning")]
    assert found[1].place.startswith("model (ReadsValues), ")
    assert "_local_scalar_dense" in found[1].reason


def test_what_cannot_be_copied_or_is_unknown_to_torch_is_not_traced() -> None:
    model = Net()
    model.lock = threading.Lock()  # type: ignore[assignment]
    (finding,) = traced_findings(state_of(model), batches(1), CUDA)
    assert (finding.name, finding.place) == ("not-traced", "model and task")
    assert "lock" in finding.reason
    if not torch.xpu.is_available():
        target = Target("xpu", "float16", here=False)
        (finding,) = traced_findings(state_of(Net()), batches(1), target)
        assert (finding.name, finding.place) == ("not-traced", "xpu")


def test_a_fault_of_the_users_own_stays_for_the_first_step(
    caplog: pytest.LogCaptureFixture,
) -> None:
    (finding,) = traced_findings(state_of(nn.Linear(9, 4)), batches(1), CUDA)
    assert finding.name == "not-traced"
    assert "RuntimeError" in finding.reason
    assert not caplog.records  # torch would log a traceback


class Keeps(Net):
    """A hook, or a lambda, that holds on to the model which it was made for."""

    def __init__(self, lookup: bool) -> None:
        super().__init__()
        self.found: dict[str, Tensor] = {}
        self.lookup = lookup
        self.first.register_forward_hook(lambda m, i, output: self.found.update(first=output))
        self.last = lambda x: self.head(F.relu(self.norm(x)))

    def forward(self, x: Tensor) -> Tensor:
        first = self.first(x)
        return self.last(self.found["first"] if self.lookup else first)


@pytest.mark.parametrize("target", [CPU, CUDA])
def test_a_model_whose_copy_is_tied_to_it_is_no_error(target: Target) -> None:
    found = traced_findings(state_of(Keeps(lookup=True)), batches(1), target)
    assert ("not-traced", "warning") in names(found)
    assert "KeyError" in str(found[-1])
    found = traced_findings(state_of(Keeps(lookup=False)), batches(1), target)
    assert all(severity == "warning" for _, severity in names(found))
    if target is CPU:
        assert not found


class Refuses(Net):
    def __deepcopy__(self, memo: Any) -> Any:
        raise KeyError("never")


def test_a_copy_that_is_refused_in_any_way_is_told() -> None:
    (finding,) = traced_findings(state_of(Refuses()), batches(1), CPU)
    assert (finding.name, finding.severity) == ("not-traced", "warning")


class Lively(Net):
    """Draws, counts, and writes into a buffer of its own, a tensor that is no buffer, a list."""

    def __init__(self) -> None:
        super().__init__(dropout=0.5)
        self.count = 0
        self.seen: list[int] = []
        self.register_buffer("passes", torch.zeros(()))
        self.loose = torch.zeros(4)

    def forward(self, x: Tensor) -> Tensor:
        self.count += 1
        self.seen.append(len(x))
        self.passes += 1
        self.loose += 1
        noise = random.random() + float(np.random.rand()) + torch.rand(())
        return super().forward(x.add_(1)) + noise.to(x.device)


@pytest.mark.parametrize("target", [CPU, Target("cuda", "bfloat16", here=False)])
def test_nothing_is_changed_by_a_trace(target: Target) -> None:
    class Counts(Plain):
        count = 0

        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            self.count += 1
            return super().loss(model, batch)

    model, task, window = Lively(), Counts(), batches(1)
    for parameter in model.parameters():
        parameter.grad = torch.ones_like(parameter)
    state = state_of(model, task)
    before = copy.deepcopy((model.state_dict(), window, rng.get_state()))
    gradients = [parameter.grad for parameter in model.parameters()]
    for _ in range(2):
        assert traced_findings(state, window, target) == []
    after = (model.state_dict(), window, rng.get_state())
    torch.testing.assert_close(after[:2], before[:2], rtol=0, atol=0)
    assert str(after[2]) == str(before[2])
    assert torch.equal(after[2]["torch"], before[2]["torch"])
    assert (model.count, model.seen, task.count) == (0, [], 0)
    assert torch.equal(model.loose, torch.zeros(4))
    assert all(p.grad is g for p, g in zip(model.parameters(), gradients, strict=True))
    assert not torch.is_autocast_enabled(target.device_type)
    assert torch.get_autocast_dtype("cuda") == torch.float16


def test_a_module_in_a_dtype_of_its_own_is_so_on_the_target() -> None:
    model = nn.Sequential(Applies(lambda x: x + 1e-8))
    state = state_of(model)
    assert names(traced_findings(state, batches(1), CUDA)) == [("vanishing-eps", "warning")]
    set_module_dtypes(model, {"0": "float32"}, device_type="cpu")
    assert traced_findings(state, batches(1), CUDA) == []
    assert "_ampctl_device_type" not in vars(model[0])


def test_frozen_parameters_that_an_optimizer_was_given_are_no_finding() -> None:
    model = Partly(frozen=True)
    model.unused.half()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = make_state(model, optimizer, "float16")
    assert len(state.parameters) == 8
    assert static_findings(state, CUDA) == []
    assert traced_findings(state, batches(1), CUDA) == []


# ---------------------------------------------------------------- preflight and check

OWN = """
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, eps=0.0, half=False):
        super().__init__()
        self.layer = nn.Linear(64, 10)
        self.eps = eps
        if half:
            self.layer.half()

    def forward(self, x):
        x = self.layer(x.flatten(1))
        return x / (x.abs() + self.eps) if self.eps else x

class Task:
    def __init__(self, island=False):
        self.island = island
        self.criterion = nn.BCELoss()

    def loss(self, model, batch):
        p = model(batch[0]).float().sigmoid()
        target = F.one_hot(batch[1], 10).float()
        if self.island:
            with torch.autocast(p.device.type, enabled=False):
                return self.criterion(p, target)
        return self.criterion(p, target)
"""
RECIPE = """
name: own
model: {_target_: own_net.Net}
task: {_target_: ampctl.tasks.Classification}
data: {train: {_target_: ampctl.data.Digits}, batch_size: 8}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-3}
amp: {dtype: float16, init_scale: 16}
train: {max_steps: 1, device: cpu}
"""
BCE = "task={_target_: own_net.Task}"


@pytest.fixture
def recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    (folder / "own_net.py").write_text(OWN)
    (folder / "recipe.yaml").write_text(RECIPE)
    monkeypatch.syspath_prepend(str(folder))
    monkeypatch.delitem(sys.modules, "own_net", raising=False)
    return folder / "recipe.yaml"


def check(*overrides: str, code: int = 0) -> Any:
    result = CliRunner().invoke(app, ["check", "recipe.yaml", *overrides])
    assert result.exit_code == code, result.output
    return result


@needs_no_cuda
@pytest.mark.usefixtures("recipe")
def test_ac2_check_on_a_cpu_refuses_what_cuda_would_and_a_cpu_trains_it(folder: Path) -> None:
    said = check(BCE, "train.device=cuda", code=2).stderr
    assert "error: refused-by-autocast: own_net.py:29" in said
    assert "BCEWithLogitsLoss" in said
    island = check("task={_target_: own_net.Task, island: true}", "train.device=cuda")
    assert "refused-by-autocast" not in island.stderr
    assert "refused-by-autocast" not in check(BCE).stderr
    warned = check(BCE, "train.device=auto").stderr
    assert "warning: refused-by-autocast: task.criterion: on CUDA" in warned
    result = CliRunner().invoke(app, ["train", "recipe.yaml", BCE, "--run-dir", "r"])
    assert result.exit_code == 0, result.output


@needs_no_cuda
@pytest.mark.usefixtures("recipe")
def test_ac9_a_recipe_for_a_gpu_is_checked_where_there_is_none() -> None:
    said = check("train.device=cuda").stdout
    assert "cuda, which is not here: rehearsed on the cpu, traced for cuda" in said
    assert said.endswith("ready to train\n")
    said = check("train.device=cuda", "amp.dtype=auto").stdout
    assert "auto, settled there" in said
    check("train.device=gpu", code=2)


@needs_no_cuda
@pytest.mark.usefixtures("recipe")
def test_check_says_which_settings_have_no_effect_on_the_device_that_is_meant() -> None:
    ignored = ("amp.dtype=bfloat16", "amp.init_scale=1024", "amp.reduced_precision_reduction=false")
    ignored += ("distributed.timeout_minutes=5",)  # of as many processes as train is given
    scale = "in bfloat16, which needs no loss scale: amp.init_scale\n"
    said = check(*ignored, "train.device=cpu").stdout
    assert f"no effect:   on cpu: amp.reduced_precision_reduction; {scale}" in said
    assert f"no effect:   {scale}" in check(*ignored, "train.device=cuda").stdout
    assert "no effect" not in check().stdout


@pytest.mark.usefixtures("recipe")
def test_a_warning_is_said_once_and_is_in_the_json() -> None:
    said = check("model.eps=1e-8", "amp.dtype=float16")
    assert said.stderr.count("warning: vanishing-eps: model (Net), own_net.py:16: 1e-08") == 1
    listed = json.loads(check("model.eps=1e-8", "--json").stdout)["findings"]
    (finding,) = [f for f in listed if f["name"] == "vanishing-eps"]
    assert finding.keys() == {"name", "place", "reason", "remedy", "severity"}
    assert finding["severity"] == "warning"
    assert "vanishing-eps" not in check("model.eps=1e-4").stderr


@pytest.mark.usefixtures("recipe")
def test_op1_preflight_raises_all_errors_and_returns_warnings() -> None:
    job = build_job(load_recipe("recipe.yaml", ["model.eps=1e-8"]))
    assert "vanishing-eps" not in [f.name for f in preflight(job)]  # nothing was run
    (window, _) = next(iter(job.train_data.windows(0, 0)))
    assert "vanishing-eps" in [f.name for f in preflight(job, window)]
    layer: nn.Module = job.state.bare.layer  # type: ignore[assignment]
    layer.half()
    with pytest.raises(UsageError) as found:
        preflight(job)
    assert found.value.exit_code == 2
    message = str(found.value)
    assert message.startswith("2 findings before the first step\nhalf-parameters: layer.weight, ")
    assert "vanishing-eps: optimizer: eps 1e-08" in message


def test_a_trial_pass_caches_casts_only_where_a_step_does(monkeypatch: pytest.MonkeyPatch) -> None:
    cached: list[bool] = []

    def note(x: Tensor) -> Tensor:
        cached.append(torch.is_autocast_cache_enabled())
        return x

    for keeps in (True, False):
        monkeypatch.setattr("ampctl.amp.precision.cache_keeps_gradients", lambda keeps=keeps: keeps)
        traced(note, CUDA)
    assert cached == [True, False]
    assert torch.is_autocast_cache_enabled()
