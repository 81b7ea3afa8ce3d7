"""The benchmark of two ranks: that it runs, and that both of its sides are what it says."""

from __future__ import annotations

import json
from pathlib import Path
from types import ModuleType

import pytest
from processes import spawn

from ampctl.recipe.load import parse_recipe

SCRIPTS = Path(__file__).parents[1] / "scripts"


@pytest.fixture
def bench_ddp(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import bench_ddp

    return bench_ddp


def test_it_times_both_in_turn_and_tells_the_ratio(folder: Path) -> None:
    few = ("--rounds", "2", "--steps", "4", "--width", "8", "--dtypes", "float16")
    done = spawn(f"{SCRIPTS / 'bench_ddp.py'}", *few, "--json", "rows.json")
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path("rows.json").read_text())
    assert [(row["dtype"], row["data"]) for row in rows] == [
        ("float16", "item by item"),
        ("float16", "batched"),
    ]
    for row in rows:
        for name in ("wall", "cpu"):
            ratio = row[f"ampctl_{name}_us"] / row[f"hand_{name}_us"]
            assert row[f"{name}_ratio"] == pytest.approx(ratio)
            assert 0 < row[f"{name}_ratios"][0] <= row[f"{name}_ratios"][1]
    assert done.stdout.count("float16") == 2


def test_the_marks_count_the_steps_after_the_warm_up(bench_ddp: ModuleType) -> None:
    marks = bench_ddp.Marks(4)
    for step in range(bench_ddp.WARM_UP + 4 + 1):
        assert len(marks._times) == (step > bench_ddp.WARM_UP)
        marks.pass_by()
    (begin, _), (end, _) = marks._times
    assert marks.wall_and_cpu_us()[0] == pytest.approx((end - begin) / 4 * 1e6)


def test_each_strategy_of_the_loop_by_hand_is_one_of_the_recipe(bench_ddp: ModuleType) -> None:
    for strategy in bench_ddp.WRAPS:
        text = bench_ddp.RECIPE.format(
            dtype="float32", dataset="tensors", width=8, steps=4, all_steps=9, strategy=strategy
        )
        assert parse_recipe(text, where="bench").recipe.distributed.strategy == strategy
