"""The loss scale against ten lines of plain Python, against torch's own scaler, and its state."""

from __future__ import annotations

import math
from dataclasses import replace
from typing import Any

import numpy as np
import pytest
import torch
from hypothesis import example, given, settings
from hypothesis import strategies as st
from torch import nn

from ampctl.amp import gradients
from ampctl.amp.scaler import LossScaler
from ampctl.doctor.trace import Trace
from ampctl.recipe.schema import AmpConfig

CPU = torch.device("cpu")


class Model:
    """The contract's "Scale policy", word by word; the scale is a float32."""

    def __init__(self, c: AmpConfig) -> None:
        self.c, self.s, self.g, self.h = c, np.float32(c.init_scale), 0, c.hysteresis

    def update(self, bad: bool) -> None:
        c = self.c
        if bad:
            self.g, self.h = 0, max(self.h - 1, 0)
            if self.h == 0 and not c.static:
                self.s = max(np.float32(float(self.s) * c.backoff_factor), np.float32(c.min_scale))
            return
        self.g += 1
        if self.g == c.growth_interval:
            ceiling = math.inf if c.max_scale is None else c.max_scale
            with np.errstate(over="ignore"):
                grown = np.float32(min(float(self.s) * c.growth_factor, ceiling))
            if np.isfinite(grown) and not c.static:
                self.s = grown
            self.g, self.h = 0, c.hysteresis


def make(config: AmpConfig, *, enabled: bool = True) -> LossScaler:
    return LossScaler(config, enabled=enabled, device=CPU)


def attempt(scaler: LossScaler, bad: bool) -> None:
    """One step's worth of the scaler, with a real gradient."""
    scaler.update(scaler.unscale_([[torch.tensor([math.inf if bad else 1.0])]]))


configs = st.builds(
    AmpConfig,
    init_scale=st.sampled_from([1.0, 3.0, 65536.0, 2.0**40, 1e38]),
    growth_factor=st.sampled_from([2.0, 1.5, 1.001, 1e6]),
    backoff_factor=st.sampled_from([0.5, 0.3, 0.999, 1e-6]),
    growth_interval=st.integers(1, 5),
    min_scale=st.sampled_from([0.0, 1e-3, 0.1, 1.0]),
    max_scale=st.sampled_from([None, 2.0**41, 1.1e38, 1e39, 3e38]),
    hysteresis=st.integers(1, 4),
    static=st.sampled_from([False, False, False, True]),
).map(
    # The recipe refuses an init_scale above max_scale.
    lambda c: replace(c, init_scale=min(c.init_scale, c.max_scale)) if c.max_scale else c
)


def long_sequence(seed: int, share_bad: float, length: int) -> list[bool]:
    return (np.random.default_rng(seed).random(length) < share_bad).tolist()


sequences = st.tuples(
    st.integers(0, 2**31),
    st.sampled_from([0.0, 0.05, 0.3, 0.7, 1.0]),
    st.integers(1, 250),
)


@settings(max_examples=150)
@given(configs, sequences, st.sets(st.integers(0, 250), max_size=4))
@example(AmpConfig(growth_interval=1, max_scale=1e39), (0, 0.0, 200), set())
@example(AmpConfig(growth_interval=1, min_scale=0.0), (0, 1.0, 200), set())
def test_the_scale_follows_the_policy_of_the_contract(
    config: AmpConfig, sequence: tuple[int, float, int], reloads: set[int]
) -> None:
    scaler, model = make(config), Model(config)
    for place, bad in enumerate(long_sequence(*sequence)):
        if place in reloads:
            state = scaler.state_dict()
            scaler = make(config)
            scaler.load_state_dict(state, pytest.fail)
        attempt(scaler, bad)
        model.update(bad)
        assert scaler.current_scale.item() == float(model.s), place
        if not config.static:
            assert scaler.state_dict()["_growth_tracker"] == model.g, place


@settings(max_examples=40)
@given(configs, sequences, st.integers(0, 250))
def test_with_nothing_added_it_is_torch_s_own_scaler_to_the_bit(
    config: AmpConfig, sequence: tuple[int, float, int], handover: int
) -> None:
    config = replace(config, min_scale=0.0, max_scale=None, hysteresis=1, static=False)
    ours = make(config)
    arguments = {
        "init_scale": config.init_scale,
        "growth_factor": config.growth_factor,
        "backoff_factor": config.backoff_factor,
        "growth_interval": config.growth_interval,
    }
    stock = torch.amp.GradScaler("cpu", **arguments)
    weights = [nn.Parameter(torch.ones(3)) for _ in range(2)]
    optimizers = [torch.optim.SGD([w], lr=1e-3) for w in weights]
    for place, bad in enumerate(long_sequence(*sequence)):
        if place == handover:  # each goes on from what the other saved
            for_ours, for_stock = stock.state_dict(), ours.state_dict()
            ours = make(config)
            ours.load_state_dict(for_ours, pytest.fail)
            stock = torch.amp.GradScaler("cpu", **arguments)
            stock.load_state_dict(for_stock)
        for weight, optimizer, scaler in zip(weights, optimizers, (ours, stock), strict=True):
            weight.grad = None
            scaler.scale(
                (weight * torch.tensor([1.0, math.inf if bad else 0.3, 0.7])).sum()
            ).backward()
            if isinstance(scaler, LossScaler):
                found_inf = scaler.unscale_(gradients.gather([weight]))
                scaler.step(optimizer, found_inf)
                scaler.update(found_inf)
            else:
                scaler.step(optimizer)
                scaler.update()
        assert ours.current_scale.item() == stock.get_scale(), place
        assert ours.state_dict()["_growth_tracker"] == stock._get_growth_tracker(), place
        # Below 2**-127 torch's reciprocal is inf and weights are lost; both must agree even there.
        assert torch.equal(weights[0].isnan(), weights[1].isnan())
        assert torch.equal(weights[0].nan_to_num(), weights[1].nan_to_num()), place


def test_nf1_the_scale_never_falls_below_its_floor_and_good_batches_train_on() -> None:
    for count in (5, 50, 200):
        scaler = make(AmpConfig())
        weight = nn.Parameter(torch.ones(2))
        optimizer = torch.optim.SGD([weight], lr=0.5)
        for place in range(count + 1):
            bad = place < count
            weight.grad = scaler.scale(torch.full((2,), math.nan if bad else 1.0))
            found_inf = scaler.unscale_([[weight.grad]])
            scaler.step(optimizer, found_inf)
            scaler.update(found_inf)
        assert weight.tolist() == [0.5, 0.5]
        assert scaler.current_scale.item() == max(65536.0 * 0.5**count, 1.0)


def test_nf4_tiny_losses_stop_growing_at_the_ceiling() -> None:
    limited = make(AmpConfig(growth_interval=1, max_scale=2.0**24))
    free = make(AmpConfig(growth_interval=1))
    for _ in range(200):
        attempt(limited, bad=False)
        attempt(free, bad=False)
    assert limited.current_scale.item() == 2.0**24
    assert free.current_scale.item() == 2.0**127


# ---------------------------------------------------------------- state


def moved(enabled: bool, **changes: Any) -> dict[str, Any]:
    """The state of a scaler that has seen some steps."""
    scaler = make(AmpConfig(growth_interval=10, **changes), enabled=enabled)
    for bad in (True, True, False, False, False):
        attempt(scaler, bad)
    return scaler.state_dict()


@pytest.mark.parametrize("saved", ["float32", "bfloat16", "float16"])
@pytest.mark.parametrize("now", ["float32", "bfloat16", "float16"])
def test_rs4_a_scale_survives_every_switch_of_dtype(saved: str, now: str) -> None:
    said: list[str] = []
    scaler = make(AmpConfig(growth_interval=10), enabled=now == "float16")
    scaler.load_state_dict(moved(saved == "float16"), said.append)
    state = scaler.state_dict()
    if now != "float16":
        assert (state["scale"], state["enabled"]) == (1.0, False)
        assert ["is dropped" in line for line in said] == [True] * (saved == "float16")
    elif saved == "float16":
        assert (state["scale"], state["_growth_tracker"], said) == (16384.0, 3, [])
    else:
        assert (state["scale"], state["_growth_tracker"]) == (65536.0, 0)
        assert "holds no loss scale" in said[0]
        assert len(said) == 1


def test_rs4_the_empty_state_of_a_disabled_stock_scaler_loads() -> None:
    said: list[str] = []
    empty = torch.amp.GradScaler("cpu", enabled=False).state_dict()
    assert empty == {}
    scaler = make(AmpConfig(init_scale=64.0))
    scaler.load_state_dict(empty, said.append)
    assert scaler.current_scale.item() == 64.0
    assert "starting at 64" in said[0]
    make(AmpConfig(), enabled=False).load_state_dict(empty, pytest.fail)


@pytest.mark.parametrize(
    ("now", "scale", "word"),
    [
        ({"init_scale": 1024.0}, 1024.0, "init_scale wins"),
        ({"min_scale": 20000.0}, 20000.0, "brought to 20000"),
        ({"max_scale": 8192.0, "init_scale": 65536.0}, 8192.0, "brought to 8192"),
        ({"static": True}, 65536.0, "init_scale wins"),
    ],
)
def test_a_changed_recipe_wins_over_the_saved_scale_and_says_so(
    now: dict[str, Any], scale: float, word: str
) -> None:
    said: list[str] = []
    scaler = make(AmpConfig(growth_interval=10, **now))
    scaler.load_state_dict(moved(True), said.append)
    assert scaler.current_scale.item() == scale
    assert len(said) == 1
    assert word in said[0]


def test_the_recipe_s_constants_win_and_the_trackers_fit_them() -> None:
    scaler = make(AmpConfig(growth_interval=2, hysteresis=2))
    state = {**moved(True, hysteresis=4), "hysteresis_tracker": 4}
    scaler.load_state_dict(state, pytest.fail)
    now = scaler.state_dict()
    assert (now["growth_interval"], now["hysteresis"]) == (2, 2)
    assert now["_growth_tracker"] < 2  # torch compares for equality: a larger one never grows again
    assert now["hysteresis_tracker"] <= 2


# ---------------------------------------------------------------- unscaling


def mixed_gradients(scale: float) -> list[nn.Parameter]:
    parameters = []
    for dtype in (torch.float32, torch.float64, torch.bfloat16, torch.float16):
        for shape in ((3,), (2, 2), ()):
            parameter = nn.Parameter(torch.zeros(shape, dtype=dtype))
            parameter.grad = torch.full(shape, 0.5 * scale, dtype=dtype)
            parameters.append(parameter)
    embedding = nn.Embedding(10, 2, sparse=True)
    (embedding(torch.tensor([1, 1, 7])).sum() * scale).backward()
    return [
        *parameters,
        embedding.weight,
        nn.Parameter(torch.ones(2)),
    ]  # the last one has no gradient


def test_op5_gradients_of_every_kind_are_unscaled() -> None:
    scaler = make(AmpConfig(init_scale=256.0))
    parameters = mixed_gradients(256.0)
    assert scaler.unscale_(gradients.gather(parameters)).item() == 0
    for parameter in parameters[:-2]:
        assert parameter.grad is not None
        assert torch.equal(parameter.grad, torch.full_like(parameter.grad, 0.5)), parameter.dtype
    sparse = parameters[-2].grad
    assert sparse is not None
    assert sparse.is_coalesced()
    assert sparse.to_dense()[[1, 7]].tolist() == [[2.0, 2.0], [1.0, 1.0]]
    assert parameters[-1].grad is None


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("value", [math.inf, -math.inf, math.nan])
def test_one_bad_element_in_any_kind_of_gradient_is_found(enabled: bool, value: float) -> None:
    count = len(mixed_gradients(1.0)) - 1
    for place in range(count):
        scaler = make(AmpConfig(), enabled=enabled)
        parameters = mixed_gradients(1.0)
        if place == count - 1:  # the sparse one, whose values lie in memory of its own once merged
            parameters[place].grad = parameters[place].grad.coalesce()
        gradients.values(parameters[place].grad).view(-1)[-1] = value
        assert scaler.unscale_(gradients.gather(parameters)).item() == 1, parameters[place].dtype
        assert scaler.unscale_(gradients.gather(mixed_gradients(1.0))).item() == 0


@pytest.mark.parametrize("dtype", [torch.float32, torch.float64, torch.bfloat16])
@pytest.mark.parametrize("enabled", [True, False])
def test_an_empty_gradient_is_no_fault(dtype: torch.dtype, enabled: bool) -> None:
    scaler = make(AmpConfig(), enabled=enabled)
    empty, bad = (torch.nn.Parameter(torch.ones(size, dtype=dtype)) for size in (0, 1))
    empty.grad, bad.grad = torch.zeros_like(empty), torch.full_like(bad, math.nan)
    assert scaler.unscale_(gradients.gather([empty])).item() == 0
    assert scaler.unscale_(gradients.gather([empty, bad])).item() == 1


def test_bfloat16_is_checked_without_the_kernel_that_cuda_has_not_for_it() -> None:
    for dtype in (torch.float32, torch.bfloat16):
        names: list[str] = []
        with Trace(lambda operation, names=names: names.append(operation.name)):
            make(AmpConfig()).unscale_([[torch.ones(2, dtype=dtype)]])
        fused = "_amp_foreach_non_finite_check_and_unscale_" in names
        assert fused == (dtype is torch.float32), names


def test_the_largest_finite_bfloat16_values_are_finite() -> None:
    scaler = make(AmpConfig(), enabled=False)
    top = torch.full((100_000,), torch.finfo(torch.bfloat16).max, dtype=torch.bfloat16)
    assert scaler.unscale_([[top]]).item() == 0


def test_a_norm_that_overflowed_counts_as_non_finite() -> None:
    scaler = make(AmpConfig(), enabled=False)
    groups = [[torch.full((4,), 3e38)]]
    found_inf = scaler.unscale_(groups)
    assert found_inf.item() == 0
    scaler.check_norm(gradients.total_norm(groups), found_inf)
    assert found_inf.item() == 1


def test_nu13_the_norm_of_large_half_precision_gradients_is_finite() -> None:
    group = [torch.full((1,), 5000.0, dtype=torch.float16) for _ in range(4)]
    assert gradients.total_norm([group]).item() == 10000.0


def test_a_ceiling_needs_no_float64_where_a_device_has_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr("ampctl.amp.scaler.has_float64", lambda _: False)
    scaler = make(AmpConfig(init_scale=2.0**126, growth_interval=1, max_scale=2.0**128 * 0.75))
    seen: list[torch.dtype] = []
    with Trace(lambda operation: seen.extend(each.dtype for each in operation.outputs())):
        for _ in range(3):  # a third doubling alone would be infinite
            scaler.update(torch.zeros(()))
    assert scaler.current_scale.item() == 2.0**128 * 0.75
    assert torch.float64 not in seen


@pytest.mark.parametrize("enabled", [True, False])
@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32])
@pytest.mark.parametrize("place", [0, 1, 2])
def test_a10_one_bad_gradient_among_finite_ones_is_found(
    place: int, dtype: torch.dtype, enabled: bool
) -> None:
    """Beside others of its own dtype, which are looked at together."""
    group = [torch.ones(2, dtype=dtype) for _ in range(3)]
    group[place][1] = math.inf
    scaler = make(AmpConfig(init_scale=2.0), enabled=enabled)
    assert scaler.unscale_([group]).item() == 1
    assert scaler.unscale_([[torch.ones(2, dtype=dtype)], group]).item() == 1


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16, torch.float32, torch.float64])
def test_a10_clip_value_limits_on_both_sides(dtype: torch.dtype) -> None:
    group = [torch.tensor([-3.0, -0.25, 0.25, 3.0], dtype=dtype), torch.tensor([-9.0], dtype=dtype)]
    gradients.clip_value_([group], 0.5)
    assert [each.tolist() for each in group] == [[-0.5, -0.25, 0.25, 0.5], [-0.5]]


@pytest.mark.parametrize("dtype", [torch.bfloat16, torch.float16])
def test_a10_norms_of_half_precision_gradients_add_up_in_float32(dtype: torch.dtype) -> None:
    """One norm in half precision would have lost digits, and its square might be inf."""
    group = [torch.full((1000,), 0.1, dtype=dtype), torch.full((3,), 300.0, dtype=dtype)]
    norm = gradients.total_norm([group])
    exact = torch.linalg.vector_norm(torch.cat(group).double())
    assert norm.dtype is torch.float32
    assert norm.item() == pytest.approx(exact.item(), rel=1e-6)
    largest = [torch.full((4,), torch.finfo(dtype).max / 4, dtype=dtype)]
    assert math.isfinite(gradients.total_norm([largest]).item()) or dtype is torch.bfloat16
