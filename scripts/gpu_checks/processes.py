"""Checks with real processes: a run that is killed and resumed ends as if it had not been."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from gpu_checks import parts
from gpu_checks.check import CheckFailed, Finding, Setup, first_difference, require

ROOT = Path(__file__).resolve().parents[2]
NUM_STEPS, SAVED_EVERY, KILLED_AFTER = 32, 4, 8
DEADLINE_S = 120.0


def environment(home: Path) -> dict[str, str]:
    """Return the environment of a process that runs this checkout and keeps its records at home."""
    paths = [f"{ROOT}", f"{ROOT / 'scripts'}", *filter(None, [os.environ.get("PYTHONPATH")])]
    return {**os.environ, "PYTHONPATH": os.pathsep.join(paths), "XDG_STATE_HOME": f"{home}"}


def resume(setup: Setup) -> Finding:
    """Check that a run killed by SIGKILL resumes to the bits of an undisturbed one."""
    text = parts.recipe_text(
        setup.device,
        model=parts.target(parts.SmallNet, dropout=0.1),
        data={
            # Slow, so that the run is still under way when it is to be killed.
            "train": parts.target(parts.Images, size=48, bad=[5], pause_s=0.005),
            "batch_size": 8,
            "micro_batch_size": 4,
        },
        scheduler={"_target_": "ampctl.schedules.Cosine"},
        amp={"dtype": "float16", "clip_norm": 1.0, "init_scale": 1024.0, "growth_interval": 5},
        train={"max_steps": NUM_STEPS, "ema_decay": 0.9, "deterministic": True},
        checkpoint={"every_steps": SAVED_EVERY},
    )
    with tempfile.TemporaryDirectory() as name:
        folder = Path(name)
        (folder / "recipe.yaml").write_text(text, encoding="utf-8")
        whole = start(folder, "train", "recipe.yaml", "--run-dir", "whole", "--quiet")
        cut = start(folder, "train", "recipe.yaml", "--run-dir", "cut", "--quiet")
        try:
            killed_at = kill_after(cut, folder / "cut", KILLED_AFTER)
            end(start(folder, "resume", "cut", "--quiet"), folder)
            end(whole, folder)
        finally:
            for process in (whole, cut):
                process.kill()
                process.wait()
        ours, theirs = _latest(folder / "cut"), _latest(folder / "whole")
        events = _events(folder / "cut")
    require(any(e["event"] == "resume" for e in events), "the second process did not resume")
    difference = first_difference(ours, theirs)
    require(difference is None, f"killed after step {killed_at}: {difference} (resumed, whole)")
    skipped = ours["progress"]["skipped"]
    require(skipped > 0, "the run skipped no step, so that the check would not see one")
    return Finding(
        f"killed after step {killed_at} of {NUM_STEPS}, resumed: weights, optimizer, scale, "
        f"generators and counters equal those of an undisturbed run, {skipped} skips included",
        {"killed_after_step": killed_at, "steps": NUM_STEPS, "skipped": skipped},
    )


def start(
    folder: Path,
    *arguments: str,
    variables: Mapping[str, str] | None = None,
    stdout: int | None = None,
) -> subprocess.Popen[bytes]:
    """Start a command of this checkout in a folder, where it says what it has to say."""
    with (folder / "said").open("ab") as words:
        return subprocess.Popen(
            [sys.executable, "-m", "ampctl", *arguments],
            cwd=folder,
            env={**environment(folder), **(variables or {})},
            stdin=subprocess.DEVNULL,
            stdout=words if stdout is None else stdout,
            stderr=words,
        )


def itself(process: subprocess.Popen[bytes]) -> int:
    """Return a process's own number."""
    return process.pid


def kill_after(
    process: subprocess.Popen[bytes],
    run_dir: Path,
    step: int,
    of: Callable[[subprocess.Popen[bytes]], int] = itself,
) -> int:
    """Kill a run, or one process ``of`` it, once it has saved this step; return the newest one."""
    deadline = time.monotonic() + DEADLINE_S
    while (saved := _saved(run_dir)) < step:
        if process.poll() is not None:
            raise CheckFailed(f"the run ended before it was killed: {said(run_dir.parent)}")
        if time.monotonic() > deadline:
            raise CheckFailed(f"no checkpoint of step {step} after {DEADLINE_S:.0f} s")
        time.sleep(0.01)
    os.kill(of(process), signal.SIGKILL)
    code = process.wait(DEADLINE_S)
    require(code != 0, "the run was complete before it was killed")
    return saved


def _saved(run_dir: Path) -> int:
    """Return the newest step of which there is a file; 0 if there is none."""
    files = (run_dir / "checkpoints").glob("step-*")
    return max(
        (int(file.stem.split("-")[1]) for file in files if file.stem[5:].isdigit()), default=0
    )


def end(process: subprocess.Popen[bytes], folder: Path) -> None:
    """Wait for a process, which must end well."""
    code = process.wait(DEADLINE_S)
    require(code == 0, f"a run ended with exit {code}: {said(folder)}")


def _latest(run_dir: Path) -> dict[str, Any]:
    """Read a run's last checkpoint, without what differs between two runs."""
    path = run_dir / "checkpoints" / "latest.pt"
    payload = torch.load(path, map_location="cpu", weights_only=True)
    return {key: value for key, value in payload.items() if key != "environment"}


def _events(run_dir: Path) -> list[dict[str, Any]]:
    lines = (run_dir / "metrics.jsonl").read_text(encoding="utf-8").splitlines()
    return [json.loads(line) for line in lines]


def said(folder: Path) -> str:
    """Return the end of what the processes of a folder have said."""
    return (folder / "said").read_text(encoding="utf-8", errors="replace").strip()[-500:]
