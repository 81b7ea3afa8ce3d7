"""The script that checks a GPU: its rehearsal on a CPU, and that each check can fail."""

from __future__ import annotations

import json
import math
import os
import subprocess
import sys
from collections.abc import Callable
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest
import torch

from ampctl.amp import gradients
from ampctl.amp.scaler import LossScaler
from ampctl.engine.buffers import BufferGuard
from ampctl.state_dict.host_memory import HostMemory

DEADLINE_S = 900
SCRIPTS = Path(__file__).parents[1] / "scripts"
DTYPES = ("float32", "bfloat16", "float16")
RESULTS = {
    **{f"parity-{dtype}": "pass" for dtype in DTYPES},
    "skips": "pass",
    "buffers": "pass",
    "host-copy": "pass",
    "resume": "pass",
    "bce": "pass",
    "bfloat16-gradients": "pass",
    "sync": "skipped",
    **dict.fromkeys(("turns", "all-or-nothing", "penalty", "lbfgs", "ema"), "pass"),
    **dict.fromkeys(("adagrad-fused", "stream", "workers", "compile"), "pass"),
    "compile-graphs": "skipped",
    **dict.fromkeys(("asynchronous-saves", "one-rank"), "pass"),
    **dict.fromkeys(("two-ranks-ddp", "two-ranks-fsdp"), "pass"),
    **{f"resnet50-{dtype}": "pass" for dtype in DTYPES},
    **{f"gpt124m-{dtype}": "pass" for dtype in DTYPES},
}


@pytest.fixture
def gpu_check(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(SCRIPTS))
    import gpu_check

    return gpu_check


def run(gpu_check: ModuleType, file: Path, *only: str) -> tuple[int, dict[str, Any]]:
    """Run chosen checks in this process; return the exit code and the rows by name."""
    names = [word for name in only for word in ("--only", name)]
    code = gpu_check.main(["--device", "cpu", "--tiny", "--json", str(file), *names])
    return code, {row["name"]: row for row in json.loads(file.read_text())["checks"]}


@pytest.mark.timeout(DEADLINE_S + 20)
def test_the_rehearsal_on_a_cpu_passes_every_check_that_a_cpu_can(tmp_path: Path) -> None:
    file = tmp_path / "deeper" / "figures.json"
    ended = subprocess.run(
        [SCRIPTS / "gpu_check", "--device", "cpu", "--tiny", "--json", file],
        env={**os.environ, "PYTHON": sys.executable},
        cwd=tmp_path,
        capture_output=True,
        text=True,
        timeout=DEADLINE_S,
        check=False,
    )
    assert ended.returncode == 0, f"{ended.stdout}\n{ended.stderr}"
    facts = json.loads(file.read_text())
    rows = {row["name"]: row for row in facts["checks"]}
    assert {name: row["result"] for name, row in rows.items()} == RESULTS
    assert all(name in ended.stdout for name in RESULTS)
    assert facts["failed"] == []
    assert facts["environment"]["torch"] == torch.__version__
    assert facts["environment"]["device"] == facts["device"] == "cpu"
    assert rows["resume"]["figures"]["killed_after_step"] < rows["resume"]["figures"]["steps"]
    assert rows["bce"]["figures"]["exit_code"] == 0
    figures = rows["gpt124m-float16"]["figures"]
    assert all(rate > 0 for rate in figures["steps_per_s"].values())
    assert figures["peak_memory_bytes"] == {"by_hand": None, "ampctl": None}
    assert [file.name] == os.listdir(file.parent)
    assert os.listdir(tmp_path) == ["deeper"]


def test_a_check_that_breaks_is_a_row_and_the_others_go_on(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    def broken(setup: object) -> None:
        raise ZeroDivisionError("the sky fell")

    monkeypatch.setattr(gpu_check, "CHECKS", {"first": broken, **gpu_check.CHECKS})
    code, rows = run(gpu_check, tmp_path / "figures.json", "first", "sync", "buffers")
    assert code == 1
    assert {name: row["result"] for name, row in rows.items()} == {
        "first": "fail",
        "buffers": "pass",
        "sync": "skipped",
    }
    assert rows["first"]["detail"] == "ZeroDivisionError: the sky fell"
    assert "in broken" in rows["first"]["traceback"]


@pytest.mark.parametrize(
    ("owner", "name", "check", "words"),
    [
        (BufferGuard, "restore", "buffers", "running_mean differs"),
        (BufferGuard, "restore", "skips", "a skipped step left a trace: model.first_norm"),
        (BufferGuard, "restore", "parity-float32", "with non-finite batches: model.first_norm"),
        (LossScaler, "update", "skips", "float16, step 1: the scale went from 1024 to 1024"),
        (gradients, "clip_norm_", "parity-bfloat16", "AdamW, plain, clipped: loss[2]: "),
    ],
)
def test_a_fault_of_ampctl_fails_the_check_that_is_for_it(
    gpu_check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    owner: Any,
    name: str,
    check: str,
    words: str,
) -> None:
    monkeypatch.setattr(owner, name, lambda *_: None)
    code, rows = run(gpu_check, tmp_path / "figures.json", check)
    assert code == 1
    assert rows[check]["result"] == "fail"
    assert words in rows[check]["detail"]
    assert rows[check]["traceback"] is None


@pytest.mark.parametrize(
    ("check", "words"),
    [
        ("host-copy", "the copy of step 1 is another: model.first.weight differs"),
        ("one-rank", "step 1: first.weight differs in 72 of 72 values"),
        ("asynchronous-saves", "step 1.model.first.weight differs in"),
    ],
)
def test_a_copy_for_a_checkpoint_that_is_another_is_seen(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path, check: str, words: str
) -> None:
    monkeypatch.setattr(HostMemory, "copy", lambda _, __, value: torch.zeros_like(value))
    code, rows = run(gpu_check, tmp_path / "figures.json", check)
    assert code == 1
    assert words in rows[check]["detail"]


@pytest.mark.parametrize(
    ("change", "words"),
    [
        (lambda run: run["model"]["head.bias"].add_(0.1), "weights are apart by 0."),
        (lambda run: run["ema"]["head.bias"].add_(0.1), "weights are apart by 0."),
        (lambda run: run["scaler"].update(scale=1.0), "scale: 1.0 and 256.0 (cpu, cpu)"),
        (lambda run: run["progress"].update(skipped=1), "skipped: 1 and 3 (cpu, cpu)"),
    ],
)
def test_a_device_that_trains_otherwise_than_the_cpu_is_seen(
    gpu_check: ModuleType,
    monkeypatch: pytest.MonkeyPatch,
    tmp_path: Path,
    change: Callable[[dict[str, Any]], Any],
    words: str,
) -> None:
    from gpu_checks import features

    trained, turns = features._trained, iter((True, False))

    def other(*arguments: Any) -> dict[str, Any]:
        saved = trained(*arguments)
        if next(turns):
            change(saved)
        return saved

    monkeypatch.setattr(features, "_trained", other)
    code, rows = run(gpu_check, tmp_path / "figures.json", "ema")
    assert code == 1
    assert words in rows["ema"]["detail"]


def test_the_figures_lie_under_runs_unless_a_file_is_named(
    gpu_check: ModuleType, monkeypatch: pytest.MonkeyPatch, folder: Path
) -> None:
    monkeypatch.setattr(gpu_check, "ROOT", folder)
    assert gpu_check.main(["--device", "cpu", "--only", "sync"]) == 0
    (file,) = (folder / "runs").glob("gpu_check-*.json")
    assert json.loads(file.read_text())["checks"][0]["name"] == "sync"


@pytest.mark.parametrize(
    ("arguments", "words"),
    [
        (["--device", "cpu", "--only", "no-such"], "no check is called no-such; there are parity-"),
        (["--device", "cuda:99"], "--device cuda:99: torch finds"),
        (["--device", "gpu"], "'gpu' is not one of cuda, cuda:N, cpu"),
    ],
)
def test_a_wrong_command_line_is_told_in_words(
    gpu_check: ModuleType, capsys: pytest.CaptureFixture[str], arguments: list[str], words: str
) -> None:
    with pytest.raises(SystemExit) as ended:
        gpu_check.main(arguments)
    assert ended.value.code == 2
    assert words in capsys.readouterr().err


def test_two_nests_are_compared_to_the_bit(gpu_check: ModuleType) -> None:
    from gpu_checks.check import first_difference

    a = {"w": [torch.tensor([1.0, math.nan])], "n": math.nan, "k": (1, "x")}
    assert (
        first_difference(a, {"w": [torch.tensor([1.0, math.nan])], "n": math.nan, "k": [1, "x"]})
        is None
    )
    other = {**a, "w": [torch.tensor([1.0 + 2.0**-23, math.nan])]}
    assert first_difference(a, other) == "w[0] differs in 2 of 2 values, by at most nan"
    assert first_difference({"w": torch.zeros(2)}, {"w": torch.tensor([0.0, 0.5])}) == (
        "w differs in 1 of 2 values, by at most 0.5"
    )
    assert first_difference({"w": torch.zeros(2)}, {"w": torch.zeros(2, dtype=torch.int32)}) == (
        "w differs: torch.float32 [2] and torch.int32 [2]"
    )
    assert first_difference({"a": 1}, {"a": 1, "b": 2}) == "b is in one of the two only"
    assert first_difference({"a": 1}, {"a": 2}) == "a: 1 and 2"
