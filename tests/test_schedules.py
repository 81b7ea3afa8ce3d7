"""The schedules, by value."""

from __future__ import annotations

import dataclasses
import math

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from ampctl.schedules import Constant, Cosine, Linear, Step


def test_constant_is_one():
    assert [Constant()(update) for update in (0, 1, 10**9)] == [1.0, 1.0, 1.0]


@pytest.mark.parametrize(
    "schedule",
    [Constant(4), Cosine(100, 4), Linear(100, 4), Step(50, warmup_steps=4)],
)
def test_warmup_rises_by_equal_steps_from_above_zero_to_one(schedule):
    assert [schedule(update) for update in range(5)] == [0.25, 0.5, 0.75, 1.0, 1.0]


def test_cosine_by_value():
    schedule = Cosine(total_steps=8, final_ratio=0.2)
    assert [schedule(update) for update in (0, 2, 4, 6)] == pytest.approx(
        [1, 0.2 + 0.8 * (1 + math.sqrt(0.5)) / 2, 0.6, 0.2 + 0.8 * (1 - math.sqrt(0.5)) / 2]
    )


def test_cosine_counts_its_half_wave_from_the_end_of_the_warmup():
    assert Cosine(total_steps=30, warmup_steps=10)(20) == pytest.approx(0.5)


def test_cosine_without_warmup_is_that_of_torch():
    optimizer = torch.optim.SGD([torch.zeros(1, requires_grad=True)], lr=1.0)
    theirs = torch.optim.lr_scheduler.CosineAnnealingLR(optimizer, T_max=20, eta_min=0.1)
    ours = Cosine(total_steps=20, final_ratio=0.1)
    for update in range(20):
        assert ours(update) == pytest.approx(theirs.get_last_lr()[0])
        optimizer.step()
        theirs.step()


def test_linear_by_value():
    schedule = Linear(total_steps=10, warmup_steps=2, final_ratio=0.5)
    assert [schedule(update) for update in (0, 1, 2, 4, 6, 10)] == [0.5, 1, 1, 0.875, 0.75, 0.5]


def test_step_by_value_counts_from_the_first_update():
    schedule = Step(every=10, gamma=0.5, warmup_steps=4)
    assert [schedule(update) for update in (3, 9, 10, 19, 20, 40)] == [1, 1, 0.5, 0.5, 0.25, 0.0625]


@pytest.mark.parametrize("kind", [Cosine, Linear])
def test_a_decay_ends_near_its_final_ratio_and_stays_there(kind):
    schedule = kind(total_steps=1000, warmup_steps=20, final_ratio=0.1)
    assert schedule(999) == pytest.approx(0.1, abs=1e-3)
    assert [schedule(update) for update in (1000, 1001, 10**6)] == pytest.approx([0.1] * 3)
    assert kind(total_steps=1000)(1000) == 0


@given(
    kind=st.sampled_from([Cosine, Linear]),
    total=st.integers(1, 50),
    warmup=st.integers(0, 60),
    final=st.floats(0, 1),
)
def test_a_decay_is_defined_everywhere_rises_then_falls(kind, total, warmup, final):
    schedule = kind(total_steps=total, warmup_steps=warmup, final_ratio=final)
    factors = [schedule(update) for update in range(total)]
    assert all(0 < factor <= 1 for factor in factors)
    rising, falling = factors[:warmup], factors[warmup:]
    assert rising == sorted(rising)
    assert falling == sorted(falling, reverse=True)


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Constant(warmup_steps=-1), "warmup_steps is -1; .* 0 or more"),
        (lambda: Constant(warmup_steps=0.1), "warmup_steps is 0.1; it must be a whole number"),
        (lambda: Constant(warmup_steps=True), "warmup_steps is True"),
        (lambda: Cosine(total_steps=0), "total_steps is 0; .* 1 or more"),
        (lambda: Linear(total_steps=5, final_ratio=1.5), "final_ratio is 1.5; .* from 0 to 1"),
        (lambda: Cosine(total_steps=5, final_ratio=math.nan), "final_ratio is nan"),
        (lambda: Step(every=0), "every is 0"),
        (lambda: Step(every=5, gamma=0), "gamma is 0; it must be above 0"),
    ],
)
def test_wrong_values_are_refused_by_name(make, message: str):
    with pytest.raises(ValueError, match=message):
        make()


def test_schedules_are_values():
    assert Cosine(10, 2) == Cosine(total_steps=10, warmup_steps=2)
    with pytest.raises(dataclasses.FrozenInstanceError):
        Constant().warmup_steps = 3  # type: ignore[misc]
