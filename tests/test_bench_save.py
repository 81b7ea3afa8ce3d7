"""The benchmark of saves: that it runs, and that its ratios are those of what it measured."""

from __future__ import annotations

import json
import statistics
from pathlib import Path

import pytest
from processes import spawn

SCRIPTS = Path(__file__).parents[1] / "scripts"


def test_it_measures_stall_and_pace_in_turn(folder: Path) -> None:
    few = ("--rounds", "2", "--steps", "60", "--every", "4", "--width", "256", "--depth", "3")
    done = spawn(f"{SCRIPTS / 'bench_save.py'}", *few, "--json", "figures.json")
    assert done.returncode == 0, done.stderr
    assert done.stdout.count("\n") == 3
    figures = json.loads(Path("figures.json").read_text())
    beside, instead = zip(*figures["rounds"], strict=True)
    for run in (*beside, *instead):
        assert run["bytes"] == beside[0]["bytes"] > 1_000_000  # three times 150,000 floats, less
        assert len(run["stalls_s"]) == 60 / 4 - 1
    stall = statistics.median(s for run in beside for s in run["stalls_s"])
    standing = statistics.median(s for run in instead for s in run["stalls_s"])
    assert figures["stall_ratio"] == pytest.approx(stall / standing)
    # Nothing goes on beside a synchronous save, and something may beside the others.
    assert not any(run["steps_while_writing_ms"] for run in instead)
    during = [s for run in beside for s in run["steps_while_writing_ms"]]
    assert figures["steps_while_writing"] == len(during)
    if during:
        normal = statistics.median(s for run in beside for s in run["steps_ms"])
        assert figures["pace"] == pytest.approx(normal / statistics.median(during))
