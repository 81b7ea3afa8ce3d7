"""How metrics are compared, and when patience runs out."""

from __future__ import annotations

import math

import pytest

from ampctl.monitor import Patience, is_better

SERIES = [math.nan, 0.5, math.inf, math.nan, 0.4, -math.inf, 0.6, 0.4]


@pytest.mark.parametrize(("mode", "expected"), [("min", 0.4), ("max", 0.6)])
def test_nf8_nan_and_infinity_are_never_best(mode, expected):
    best = None
    for value in SERIES:
        if is_better(value, best, mode):
            best = value
    assert best == expected


@pytest.mark.parametrize("mode", ["min", "max"])
def test_nf8_a_best_that_is_not_finite_is_beaten_by_any_number(mode):
    for best in (math.nan, math.inf, -math.inf):
        assert is_better(1.0, best, mode)


@pytest.mark.parametrize("mode", ["min", "max"])
def test_a_tie_is_no_improvement(mode):
    assert not is_better(0.5, 0.5, mode)


def test_patience_runs_out_after_that_many_evaluations_without_improvement():
    patience = Patience("min", 2)
    assert [patience.update(v) for v in (1.0, 1.1, 0.9, 0.9, 0.95)] == [False] * 4 + [True]
    assert patience.best == 0.9


def test_nf8_nan_counts_as_no_improvement():
    patience = Patience("max", 2)
    assert [patience.update(v) for v in (math.nan, 0.1, math.nan, math.inf)] == [
        False,
        False,
        False,
        True,
    ]
    assert patience.best == 0.1


def test_rs15_patience_goes_on_where_it_stood():
    before = Patience("min", 3)
    for value in (0.1, 0.5, 0.5):
        before.update(value)
    after = Patience("min", 3, before.best, before.bad)
    assert after == before
    assert after.update(0.5)
