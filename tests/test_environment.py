"""Facts about the machine are plain, never fail for want of git, and judge precisions rightly."""

import json
import os
import subprocess
import sys
from pathlib import Path

import pytest
import torch
from cpus import Cpu, on_each_cpu
from processes import spawn, starting

import ampctl
from ampctl import environment
from ampctl.environment import (
    bfloat16_is_native,
    collect,
    describe,
    float16_is_native,
    precisions,
)


def git(folder: Path, *words: str) -> str:
    who = ["-c", "user.name=a", "-c", "user.email=a@example.org", "-c", "commit.gpgsign=false"]
    done = subprocess.run(
        ["git", *who, *words], cwd=folder, check=True, capture_output=True, text=True
    )
    return done.stdout.strip()


@pytest.fixture
def repository(tmp_path, monkeypatch) -> Path:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    folder = tmp_path / "project"
    folder.mkdir()
    git(folder, "init", "-q")
    monkeypatch.chdir(folder)
    return folder


def commit(folder: Path) -> str:
    (folder / "model.py").write_text("1")
    git(folder, "add", ".")
    git(folder, "commit", "-q", "-m", "first")
    return git(folder, "rev-parse", "HEAD")


def test_facts_are_plain_and_load_with_weights_only(tmp_path) -> None:
    facts = collect("cpu")
    assert json.loads(json.dumps(facts, allow_nan=False)) == facts
    torch.save(facts, tmp_path / "facts.pt")
    assert torch.load(tmp_path / "facts.pt", weights_only=True) == facts


def test_facts_name_versions_device_and_command(monkeypatch) -> None:
    monkeypatch.setattr(sys, "argv", ["ampctl", "train", "digits.yaml"])
    facts = collect("cpu")
    assert facts["ampctl"] == ampctl.__version__
    assert facts["torch"] == torch.__version__
    assert facts["device"] == "cpu"
    assert facts["command"] == ["ampctl", "train", "digits.yaml"]
    assert 1 <= facts["cpu"]["cores"] <= (os.cpu_count() or 1)
    assert facts["cpu"]["model"]
    assert len(facts["devices"]) == torch.cuda.device_count()


def test_git_commit_and_changes_of_the_current_folder(repository) -> None:
    head = commit(repository)
    assert collect()["git"] == {"commit": head, "dirty": False}
    (repository / "runs").mkdir()
    (repository / "runs" / "metrics.jsonl").write_text("")
    assert collect()["git"] == {"commit": head, "dirty": False}, "an untracked file is no change"
    (repository / "model.py").write_text("2")
    assert collect()["git"] == {"commit": head, "dirty": True}


def test_no_commit_yet_is_null(repository) -> None:
    assert collect()["git"] is None


def test_no_repository_is_null(tmp_path, monkeypatch) -> None:
    monkeypatch.setenv("GIT_CEILING_DIRECTORIES", str(tmp_path.parent))
    monkeypatch.chdir(tmp_path)
    assert collect()["git"] is None


def test_no_git_is_null(repository, monkeypatch) -> None:
    commit(repository)
    monkeypatch.setenv("PATH", str(repository))
    assert collect()["git"] is None


def test_git_that_hangs_is_null(repository, monkeypatch) -> None:
    def hang(*args: object, timeout: float, **options: object) -> None:
        raise subprocess.TimeoutExpired("git", timeout)

    commit(repository)
    monkeypatch.setattr(subprocess, "run", hang)
    assert environment._git() is None


def test_every_precision_of_every_device_present_has_a_verdict_and_a_reason() -> None:
    rows = precisions()
    cpu = [row for row in rows if row["device"] == "cpu"]
    assert [row["precision"] for row in cpu] == ["float32", "tf32", "bfloat16", "float16"]
    assert {row["support"] for row in rows} <= {"native", "emulated", "none"}
    assert all(row["reason"] for row in rows)
    assert any(row["device"] == "cuda" for row in rows) == torch.cuda.is_available()


@pytest.mark.parametrize(
    ("flags", "bfloat16", "float16"),
    [
        ("avx2 f16c", "emulated", "emulated"),
        ("avx512f avx512_bf16", "native", "emulated"),
        ("avx512_bf16 amx_bf16 avx512_fp16", "native", "native"),
        ("amx_fp16", "emulated", "native"),
        ("fp asimd fphp asimdhp", "emulated", "native"),
        ("asimdhp bf16", "native", "native"),
        (None, "emulated", "emulated"),
    ],
)
def test_a_cpu_is_judged_by_its_flags(monkeypatch, flags, bfloat16, float16) -> None:
    found = None if flags is None else frozenset(flags.split())
    monkeypatch.setattr(environment, "_cpu_flags", lambda: found)
    supports = {row["precision"]: row["support"] for row in precisions() if row["device"] == "cpu"}
    assert supports == {
        "float32": "native",
        "tf32": "none",
        "bfloat16": bfloat16,
        "float16": float16,
    }
    assert bfloat16_is_native("cpu")[0] is (bfloat16 == "native")
    assert float16_is_native("cpu")[0] is (float16 == "native")


def test_the_reason_names_the_units_that_were_found(monkeypatch) -> None:
    monkeypatch.setattr(environment, "_cpu_flags", lambda: frozenset({"avx512_bf16", "amx_bf16"}))
    assert bfloat16_is_native("cpu") == (True, "this CPU has AMX-BF16 and AVX512-BF16")
    assert "rehearsal" in float16_is_native("cpu")[1]


@on_each_cpu
def test_every_process_of_a_test_sees_the_cpu_of_the_test(folder: Path, cpu: Cpu) -> None:
    here = (bfloat16_is_native("cpu"), float16_is_native("cpu"))
    assert [native for native, _ in here] == [cpu.bfloat16, cpu.float16]
    names = "bfloat16_is_native, float16_is_native"
    program = f"from ampctl.environment import {names}; print([f('cpu') for f in ({names})])"
    assert spawn("-c", program).stdout == f"{list(here)}\n"
    with starting(folder) as start:
        forked = start("env", "--json").wait()
    assert json.loads(forked.out)["cpu"]["model"] == f"CPU {cpu.name}"


@pytest.mark.parametrize(
    ("capabilities", "supports"),
    [
        ([(6, 1)], ["native", "none", "emulated", "emulated"]),
        ([(7, 0)], ["native", "none", "emulated", "native"]),
        ([(7, 5)], ["native", "none", "emulated", "native"]),
        ([(8, 0)], ["native", "native", "native", "native"]),
        ([(12, 0)], ["native", "native", "native", "native"]),
        ([(9, 0), (7, 5)], ["native", "none", "emulated", "native"]),
    ],
)
def test_cuda_is_judged_by_the_least_able_gpu(monkeypatch, capabilities, supports) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: True)
    monkeypatch.setattr(torch.cuda, "device_count", lambda: len(capabilities))
    monkeypatch.setattr(torch.cuda, "get_device_capability", lambda index: capabilities[index])
    monkeypatch.setattr(torch.version, "hip", None)
    rows = [row for row in precisions() if row["device"] == "cuda"]
    assert [row["support"] for row in rows] == supports
    major, minor = min(capabilities)
    assert f"{major}.{minor}" in rows[-1]["reason"]


def test_a_device_that_is_not_here_does_nothing_natively(monkeypatch) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    assert bfloat16_is_native("cuda") == (False, "this machine has no cuda device")


def test_a_system_without_cpuinfo_still_has_facts(monkeypatch) -> None:
    monkeypatch.setattr(environment, "CPUINFO", Path("/proc/none"))
    assert environment._cpu_flags() is None
    assert collect()["cpu"]["model"]


def test_describe_aligns_its_columns() -> None:
    facts = {
        **collect(),
        "cuda": "13.0",
        "devices": [
            {"device": "cuda:0", "name": "H200", "memory": 150 * 2**30, "capability": "9.0"},
            {"device": "mps", "name": "Apple GPU", "memory": 0, "capability": None},
        ],
        "git": {"commit": "0" * 40, "dirty": True},
    }
    lines = describe(facts, precisions())
    assert "cuda:0    H200, 150.0 GiB, capability 9.0" in lines
    assert "mps       Apple GPU" in lines
    assert f"git       {'0' * 40} and changes" in lines
    assert lines.count("") == 1
    table = lines[lines.index("") + 1 :]
    column = table[0].index("support")
    assert all(line[column - 1] == " " and line[column] != " " for line in table)
    assert not any(line.endswith(" ") for line in lines)


def test_describe_says_when_there_is_no_commit() -> None:
    lines = describe({**collect(), "git": None, "cuda": None, "cudnn": None}, precisions())
    assert any(line.startswith("git ") and "no commit" in line for line in lines)
    assert any(line.endswith(torch.__version__) for line in lines)
