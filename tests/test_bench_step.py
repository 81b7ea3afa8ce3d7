"""The benchmark of steps: that it runs, and that it tells a warning once."""

from __future__ import annotations

import json
from pathlib import Path

import pytest
from cpus import WITH_FLOAT16, WITHOUT_EITHER, Cpu, on_cpus
from processes import spawn

SCRIPTS = Path(__file__).parents[1] / "scripts"


@on_cpus(WITHOUT_EITHER, pytest.param(WITH_FLOAT16, marks=pytest.mark.slow))
def test_it_times_both_in_turn_and_tells_a_warning_once(folder: Path, cpu: Cpu) -> None:
    few = ("--rounds", "2", "--steps", "10", "--json", "rows.json")
    done = spawn(f"{SCRIPTS / 'bench_step.py'}", *few)
    assert done.returncode == 0, done.stderr
    rows = json.loads(Path("rows.json").read_text())
    assert len(rows) == 6
    assert all(row["hand_us"] > 0 and row["ampctl_us"] > 0 for row in rows)
    warnings = [line for line in done.stderr.splitlines() if line.startswith("warning: ")]
    emulated = [dtype for dtype in ("bfloat16", "float16") if not getattr(cpu, dtype)]
    assert len(warnings) == len(emulated), done.stderr
    for dtype, line in zip(emulated, warnings, strict=True):
        assert f"dtype-not-in-hardware: amp.dtype: {dtype} is emulated" in line
