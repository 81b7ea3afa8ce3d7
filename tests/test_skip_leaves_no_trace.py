"""A skipped step leaves no trace: a run with bad batches in it ends as the run without them."""

from __future__ import annotations

import copy
import math
from collections.abc import Callable, Iterable
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from states import DTYPES, batches, make_state, run, spoil
from test_resume_exact import assert_same
from torch import Tensor, nn
from torch.nn import functional as F
from torch.optim import SGD, Adagrad, Adam, AdamW, Optimizer, RMSprop
from torch.optim.lr_scheduler import OneCycleLR, StepLR

from ampctl.doctor.trace import Operation, Trace
from ampctl.engine.buffers import BufferGuard
from ampctl.engine.learning_rate import FunctionSchedule, LearningRate, TorchSchedule
from ampctl.engine.state import TrainState
from ampctl.recipe.schema import AmpConfig
from ampctl.schedules import Cosine

CLEAN_STEPS = 5


# ---------------------------------------------------------------- models that write into buffers


class Base(nn.Module):
    """Two layers with something of the subclass's between them."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 6), nn.Linear(6, 4)

    def between(self, x: Tensor) -> Tensor:
        return x

    def forward(self, x: Tensor) -> Tensor:
        return self.head(F.relu(self.between(self.first(x))))


class BatchNorm(Base):
    def __init__(self, **options: Any) -> None:
        super().__init__()
        self.norm = nn.BatchNorm1d(6, **options)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x)


class InstanceNorm(Base):
    def __init__(self) -> None:
        super().__init__()
        self.norm = nn.InstanceNorm1d(2, track_running_stats=True, affine=True)

    def between(self, x: Tensor) -> Tensor:
        return self.norm(x.view(-1, 2, 3)).flatten(1)


class SharesStatistics(Base):
    """Two BatchNorms with one running mean and variance; each writes into both."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.BatchNorm1d(6), nn.BatchNorm1d(6)
        self.two.running_mean, self.two.running_var = self.one.running_mean, self.one.running_var

    def between(self, x: Tensor) -> Tensor:
        assert self.one.running_mean is self.two.running_mean
        assert self.one.running_var is self.two.running_var
        return self.two(F.relu(self.one(x)))


class ReplacesStatistics(BatchNorm):
    """BatchNorm whose statistics are new tensors after each forward pass."""

    def between(self, x: Tensor) -> Tensor:
        normed = super().between(x)
        if self.norm.training:
            self.norm.running_mean = self.norm.running_mean.clone() * 0.99
            self.norm.running_var = self.norm.running_var + 0.01
        return normed


class Replaces(Base):
    """Puts new tensors in its buffers' places instead of writing into them."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))
        self.register_buffer("mean", torch.zeros(6))

    def between(self, x: Tensor) -> Tensor:
        self.seen = self.seen + 1
        self.mean = 0.9 * self.mean + 0.1 * x.detach().float().mean(0)
        return x - self.mean.to(x.dtype)


class Grows(BatchNorm):
    """A buffer that is longer after each forward pass, beside BatchNorm's own."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("history", torch.zeros(1))

    def between(self, x: Tensor) -> Tensor:
        self.history = torch.cat((self.history, x.detach().float().mean().reshape(1)))
        return super().between(x)


class Shrinks(BatchNorm):
    """A buffer that is shorter after each forward pass."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("left", torch.arange(20.0))

    def between(self, x: Tensor) -> Tensor:
        self.left = self.left[1:].clone()
        return super().between(x)


class Late(BatchNorm):
    """A buffer that is None until the first forward pass, and one that changes its dtype there."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)
        self.register_buffer("count", torch.zeros((), dtype=torch.int32))

    def between(self, x: Tensor) -> Tensor:
        batch_mean = x.detach().float().mean(0)
        self.mean = batch_mean if self.mean is None else 0.5 * (self.mean + batch_mean)
        self.count = self.count.double() + 1
        return super().between(x)


class Empty(Base):
    """A buffer that is None until the first forward pass, and no other."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("mean", None)

    def between(self, x: Tensor) -> Tensor:
        if self.mean is None:
            self.mean = torch.zeros(6)
        self.mean.add_(x.detach().float().mean(0))
        return x - self.mean.to(x.dtype)


class Shares(Base):
    """One buffer held by two modules, written into in place; and one of integers."""

    def __init__(self) -> None:
        super().__init__()
        self.one, self.two = nn.Module(), nn.Module()
        buffer = torch.zeros(6)
        self.one.register_buffer("mean", buffer)
        self.two.register_buffer("mean", buffer)
        self.register_buffer("counts", torch.zeros(4, dtype=torch.int64))
        self.register_buffer("seen", torch.zeros(2, dtype=torch.bool))

    def between(self, x: Tensor) -> Tensor:
        assert self.one.mean is self.two.mean
        self.one.mean.mul_(0.9).add_(x.detach().float().mean(0))
        self.counts += 1
        self.seen.logical_not_()
        return x - self.two.mean.to(x.dtype)


class Unshares(Shares):
    """One of two modules that share a buffer replaces it: the other's stays."""

    def between(self, x: Tensor) -> Tensor:
        self.one.mean = 0.9 * self.one.mean + x.detach().float().mean(0)
        return x - self.two.mean.to(x.dtype) + self.one.mean.to(x.dtype)


class Tied(BatchNorm):
    """One weight in two places."""

    def __init__(self) -> None:
        super().__init__()
        self.again = nn.Linear(6, 6)
        self.once_more = nn.Linear(6, 6)
        self.once_more.weight = self.again.weight

    def between(self, x: Tensor) -> Tensor:
        return super().between(self.once_more(F.relu(self.again(x))))


MODELS: dict[str, Callable[[], nn.Module]] = {
    "batchnorm": BatchNorm,
    "batchnorm-cumulative": lambda: BatchNorm(momentum=None),
    "instancenorm": InstanceNorm,
    "shares-statistics": SharesStatistics,
    "replaces-statistics": ReplacesStatistics,
    "replaces": Replaces,
    "grows": Grows,
    "shrinks": Shrinks,
    "late": Late,
    "empty": Empty,
    "shares": Shares,
    "unshares": Unshares,
    "tied": Tied,
}

Make = Callable[[Iterable[nn.Parameter]], Optimizer]
OPTIMIZERS: dict[str, Make] = {
    f"{name}-{form}": lambda p, kind=kind, options=options, form=form: kind(
        p, lr=0.01, **options, **({} if form == "default" else {"foreach": False, form: True})
    )
    for name, kind, options, forms in (
        ("adam", Adam, {"amsgrad": True}, ("foreach", "fused", "default")),
        ("adamw", AdamW, {"weight_decay": 0.1}, ("foreach", "fused", "default")),
        ("sgd", SGD, {"momentum": 0.9, "nesterov": True}, ("foreach", "fused", "default")),
        ("rmsprop", RMSprop, {"momentum": 0.9, "centered": True}, ("foreach", "default")),
        ("adagrad", Adagrad, {"lr_decay": 0.1}, ("foreach", "fused", "default")),
    )
    for form in forms
}
SCHEDULES: dict[str, Callable[[Optimizer], LearningRate]] = {
    "none": lambda o: FunctionSchedule(o, None),
    "cosine": lambda o: FunctionSchedule(o, Cosine(total_steps=CLEAN_STEPS, warmup_steps=2)),
    "onecycle": lambda o: TorchSchedule(
        o,
        OneCycleLR(o, max_lr=0.05, total_steps=CLEAN_STEPS + 1, cycle_momentum=cycles_momentum(o)),
    ),
    "step": lambda o: TorchSchedule(o, StepLR(o, step_size=2, gamma=0.5)),
}


def cycles_momentum(optimizer: Optimizer) -> bool:
    return "momentum" in optimizer.defaults or "betas" in optimizer.defaults


def whole_state(state: TrainState) -> dict[str, Any]:
    """All that a checkpoint would hold, but the counters that a skipped step does move."""
    for updater in state.updaters:
        updater.learning_rate.before_update()  # rates follow from the updates when they are needed
    saved = state.state_dict()
    progress = saved.pop("progress")
    saved.pop("rng")
    assert progress["updates"] == CLEAN_STEPS
    buffers = dict(state.bare.named_buffers(remove_duplicate=False))  # those not saved too
    return {**saved, "buffers": buffers}


def build(
    model: nn.Module, optimizer: str, schedule: str, dtype: str, clip_norm: float | None
) -> TrainState:
    made = OPTIMIZERS[optimizer](model.parameters())
    return make_state(
        model,
        made,
        dtype,
        amp=AmpConfig(init_scale=64.0, static=True, clip_norm=clip_norm),
        learning_rate=SCHEDULES[schedule](made),
        ema_decay=0.8,
    )


@settings(max_examples=60, suppress_health_check=[HealthCheck.too_slow])
@given(
    model=st.sampled_from(sorted(MODELS)),
    optimizer=st.sampled_from(sorted(OPTIMIZERS)),
    schedule=st.sampled_from(sorted(SCHEDULES)),
    dtype=st.sampled_from(DTYPES),
    bad_before=st.lists(st.integers(0, CLEAN_STEPS), min_size=1, max_size=4),
    value=st.sampled_from([math.inf, -math.inf, math.nan]),
    clip_norm=st.sampled_from([None, 1.0]),
    micro=st.sampled_from([1, 2]),
)
@example("batchnorm", "adam-fused", "cosine", "float16", [0, 0, 5], math.inf, 1.0, 1)
@example("grows", "sgd-fused", "step", "float32", [0, 3], math.nan, None, 2)
@example("shrinks", "sgd-fused", "step", "float32", [0, 3], math.nan, None, 2)
@example("late", "adamw-foreach", "none", "bfloat16", [0], math.nan, None, 1)
@example("unshares", "adagrad-fused", "onecycle", "float32", [0, 1], math.nan, None, 1)
@example("empty", "sgd-default", "step", "float32", [0, 0], math.nan, None, 1)
@example("shares", "rmsprop-default", "onecycle", "float32", [0, 4], math.inf, 1.0, 1)
@example("shares-statistics", "adam-fused", "none", "float32", [0, 3], math.nan, None, 1)
@example("replaces-statistics", "sgd-fused", "none", "bfloat16", [0, 3], math.nan, None, 2)
@example("tied", "adagrad-foreach", "cosine", "bfloat16", [2, 2], math.nan, 1.0, 2)
def test_a_run_with_bad_batches_ends_as_the_run_without(
    model: str,
    optimizer: str,
    schedule: str,
    dtype: str,
    bad_before: list[int],
    value: float,
    clip_norm: float | None,
    micro: int,
) -> None:
    torch.manual_seed(0)
    clean_model = MODELS[model]()
    spoilt_model = copy.deepcopy(clean_model)
    parts = batches(CLEAN_STEPS * micro)
    clean = [parts[i : i + micro] for i in range(0, len(parts), micro)]
    spoilt = []
    for place in range(CLEAN_STEPS + 1):
        for _ in range(bad_before.count(place)):
            window = batches(micro, seed=place + 1)
            spoilt.append([*window[:-1], spoil(window[-1], value)])
        spoilt += clean[place : place + 1]

    expected = build(clean_model, optimizer, schedule, dtype, clip_norm)
    run(expected, clean)
    state = build(spoilt_model, optimizer, schedule, dtype, clip_norm)
    reports = run(state, spoilt)

    assert sum(report.skipped for report in reports) == len(bad_before)
    assert state.progress.skipped == len(bad_before)
    assert_same(whole_state(state), whole_state(expected))


@pytest.mark.parametrize("model", MODELS)
def test_a_run_without_bad_batches_is_that_of_the_model_alone(model: str) -> None:
    """What keeps the buffers changes nothing of what the model does with them."""
    torch.manual_seed(0)
    guarded = MODELS[model]()
    alone = copy.deepcopy(guarded)
    data = batches(4)
    run(
        make_state(guarded, SGD(guarded.parameters(), lr=0.1), "float32"),
        [[batch] for batch in data],
    )
    optimizer = SGD(alone.parameters(), lr=0.1)
    for x, y in data:
        optimizer.zero_grad()
        F.cross_entropy(alone(x), y).backward()
        optimizer.step()
    assert_same(guarded.state_dict(), alone.state_dict())


class Branches(nn.Module):
    """Parameters that take part only in batches whose first number is large."""

    def __init__(self) -> None:
        super().__init__()
        self.always, self.sometimes = nn.Linear(8, 4), nn.Linear(8, 4)

    def forward(self, x: Tensor) -> Tensor:
        out = self.always(x)
        return out + self.sometimes(x) if x[0, 1] > 50 else out


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_parameter_whose_first_gradient_comes_in_a_skipped_step(optimizer: str) -> None:
    def branch(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
        x = batch[0].clone()
        x[0, 1] = 100.0
        return x, batch[1]

    torch.manual_seed(0)
    clean_model = Branches()
    spoilt_model = copy.deepcopy(clean_model)
    a, b, c, d, e = batches(CLEAN_STEPS)
    clean = [[a], [b], [branch(c)], [d], [branch(e)]]
    spoilt = [[a], [spoil(branch(b), math.nan)], *clean[1:]]
    expected = build(clean_model, optimizer, "cosine", "float32", None)
    run(expected, clean)
    state = build(spoilt_model, optimizer, "cosine", "float32", None)
    assert [report.skipped for report in run(state, spoilt)] == [False, True, *[False] * 4]
    assert_same(whole_state(state), whole_state(expected))


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_a_run_of_nothing_but_bad_batches_changes_nothing(optimizer: str) -> None:
    torch.manual_seed(0)
    model = BatchNorm()
    before = copy.deepcopy(model.state_dict())
    state = build(model, optimizer, "cosine", "bfloat16", 1.0)
    run(state, [[spoil(batch)] for batch in batches(6)])
    assert_same(model.state_dict(), before)
    assert state.ema is not None
    assert_same(dict(state.ema.state_dict()), dict(before))
    assert (state.progress.updates, state.progress.consecutive_skips) == (0, 6)
    assert all(
        not torch.count_nonzero(value)
        for values in state.updaters[0].optimizer.state.values()
        for value in values.values()
        if isinstance(value, Tensor)
    )


def test_what_an_evaluation_puts_into_a_buffer_stays_when_the_next_step_is_skipped() -> None:
    model = Replaces()
    state = build(model, "adam-fused", "none", "float32", None)
    run(state, [[batch] for batch in batches(2)])
    model.eval()
    with torch.no_grad():
        model(batches(1, seed=9)[0][0])
    seen, mean = int(model.seen), model.mean.clone()
    model.train()
    run(state, [[spoil(batches(1)[0])]])
    assert (int(model.seen), seen) == (3, 3)
    assert torch.equal(model.mean, mean)


@pytest.mark.parametrize("model", ["shares-statistics", "replaces-statistics"])
def test_a10_statistics_that_are_shared_or_replaced_survive_a_skip(model: str) -> None:
    torch.manual_seed(0)
    net = MODELS[model]()
    state = build(net, "sgd-fused", "none", "float32", None)
    run(state, [[batch] for batch in batches(2)])
    before = copy.deepcopy(net.state_dict())
    (report,) = run(state, [[spoil(batches(1, seed=5)[0], math.nan)]])
    assert report.skipped
    assert_same(net.state_dict(), before)
    run(state, [[batch] for batch in batches(1, seed=6)])
    moved = [name for name in before if "running" in name]
    assert moved
    assert not any(torch.equal(net.state_dict()[name], before[name]) for name in moved)


def test_keeping_and_putting_back_take_a_kernel_a_dtype_however_many_layers_there_are() -> None:
    guard = BufferGuard(nn.Sequential(*[nn.BatchNorm1d(3) for _ in range(5)]))
    for act, kernel in (
        (guard.snapshot, "copy_"),
        (lambda: guard.restore(torch.zeros(())), "where"),
    ):
        seen: list[Operation] = []
        with Trace(seen.append):
            act()
        assert [operation.name for operation in seen].count(kernel) == 2, kernel


@pytest.mark.parametrize("model", MODELS)
def test_what_is_kept_are_all_buffers_as_they_were(model: str) -> None:
    net = MODELS[model]()
    guard = BufferGuard(net)
    before = {name: each.clone() for name, each in net.named_buffers(remove_duplicate=False)}
    guard.snapshot()
    net(batches(1)[0][0])
    assert_same(guard.kept(), before)


def test_every_dense_buffer_follows_the_first_rank() -> None:
    net = Late()  # one of its own buffers is None
    net.register_buffer("links", torch.eye(3).to_sparse())

    class FromFirst:
        def follow_first_(self, values: Iterable[Tensor]) -> None:
            for value in values:
                value.fill_(7)

    BufferGuard(net).follow_first(FromFirst())
    found = dict(net.named_buffers())
    assert torch.equal(found.pop("links").to_dense(), torch.eye(3))
    assert found
    assert all((buffer == 7).all() for buffer in found.values())
