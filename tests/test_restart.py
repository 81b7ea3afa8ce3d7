"""Ranks that are killed, and the job that its launcher starts anew: it ends as if nothing had been.

The launcher is the real one, and so are its ranks; what they train is tiny.
"""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpus import STARTUP, python_path
from processes import Running, read_events, starting
from test_resume_exact import assert_same, last
from torch import Tensor, nn
from torch.utils.data import Dataset

TESTS = Path(__file__).parent
RECIPE = """
name: restarted
seed: 3
model: {_target_: test_restart.Net}
task: {_target_: test_restart.Task}
data:
  train: {_target_: test_restart.Samples, size: 22}
  eval: {_target_: test_restart.Samples, size: 8}
  batch_size: 8
  eval_batch_size: 1
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
amp: {dtype: bfloat16}
train: {max_epochs: 3, device: cpu}
checkpoint: {every_steps: 2}
log: {every_steps: 1}
distributed: {timeout_minutes: 1}
"""
TWO = ("--nproc-per-node", "2")
# A disk that takes its time, in every process that finds this on its path.
SLOW_DISK = """
import os, runpy, time
runpy.run_path({startup!r})  # of one name an interpreter takes the first alone
fsync = os.fsync
def slow(file):
    time.sleep(0 if os.path.exists("go") else {seconds})
    fsync(file)
os.fsync = slow
"""
Start = Callable[..., Running]


class Net(nn.Module):
    def __init__(self, width: int = 16) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, width), nn.Linear(width, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu())


class Samples(Dataset[tuple[Tensor, int]]):
    def __init__(self, size: int) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 8, generator=generator)

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, int]:
        return self.x[index], index % 4


class Task:
    """Cross entropy; ``hold`` names a batch of the first start, train-4 say, that goes no further.

    It makes the file ``held`` and waits until there is a file ``go``. Until then each training
    batch takes ``delay_s`` more. ``fails`` is a rank that meets a mistake of the user's own.
    """

    def __init__(self, hold: str = "", delay_s: float = 0.0, fails: str = "") -> None:
        self.hold = hold
        self.delay_s = delay_s
        self.fails = fails
        self.counts = {"train": 0, "eval": 0}

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        kind = "train" if torch.is_grad_enabled() else "eval"
        self.counts[kind] += 1
        if self.hold == f"{kind}-{self.counts[kind]}" and not Path("go").exists():
            Path(f"held-{os.environ['RANK']}").touch()
            while not Path("go").exists():
                time.sleep(0.01)
        if kind == "train" and not Path("go").exists():
            time.sleep(self.delay_s)
        if self.counts["train"] == 3 and self.fails == os.environ.get("RANK"):
            raise KeyError("a mistake of mine")
        x, y = batch
        return nn.functional.cross_entropy(model(x).float(), y)


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", path_by_disk(folder))
    (folder / "disk").mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    with starting(folder, TMPDIR=f"{folder}") as function:
        yield function


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> dict[str, Any]:
    """The end of the run that nothing happens to."""
    folder = tmp_path_factory.mktemp("whole")
    (folder / "recipe.yaml").write_text(RECIPE)
    home = {"PYTHONPATH": python_path(TESTS, TESTS.parent), "XDG_STATE_HOME": f"{folder}"}
    with starting(folder, **home) as start:
        ended = start("train", "recipe.yaml", "--run-dir", "d", *TWO).wait()
    assert (ended.code, ended.err) == (0, "")
    return last(folder / "d")


def path_by_disk(folder: Path) -> str:
    """Return a ``PYTHONPATH`` by which what `slow_disk` writes is found before all else."""
    return os.pathsep.join([f"{folder / 'disk'}", python_path(TESTS, TESTS.parent)])


def slow_disk(seconds: float) -> None:
    text = SLOW_DISK.format(seconds=seconds, startup=f"{STARTUP / 'sitecustomize.py'}")
    Path("disk/sitecustomize.py").write_text(text)


def rank_pids(launcher: Running) -> dict[int, int]:
    """Return the processes that a launcher has for ranks, by rank."""
    found = {}
    for children in Path(f"/proc/{launcher.pid}/task").glob("*/children"):
        for pid in children.read_text().split():
            entries = Path(f"/proc/{pid}/environ").read_bytes().split(b"\0")
            ranks = [entry[5:] for entry in entries if entry.startswith(b"RANK=")]
            found |= {int(rank): int(pid) for rank in ranks}
    return found


def kill_held(running: Running, rank: int, saved: str = "") -> int:
    """Kill a rank once both hold still and a checkpoint is there; let the others go on."""
    running.until(lambda: all(Path(f"held-{each}").exists() for each in (0, 1)))
    latest = Path(saved).parent / "latest.pt"
    running.until(lambda: not saved or latest.resolve() == Path(saved).resolve())
    pid = rank_pids(running)[rank]
    os.kill(pid, signal.SIGKILL)
    Path("go").touch()
    return pid


def begun(run_dir: str) -> list[tuple[str, int]]:
    return [(e["event"], e["step"]) for e in read_events(Path(run_dir)) if "recipe_digest" in e]


@pytest.mark.parametrize(
    ("rank", "hold", "goes_on_at"),
    [
        (0, "train-6", 4),
        pytest.param(1, "train-6", 4, marks=pytest.mark.slow),
        pytest.param(0, "eval-6", 4, marks=pytest.mark.slow),
        pytest.param(0, "train-2", 0, marks=pytest.mark.slow),
    ],
)
def test_a_killed_rank_starts_all_anew_and_the_end_is_that_of_the_undisturbed_run(
    rank: int, hold: str, goes_on_at: int, start: Start, undisturbed: dict[str, Any]
) -> None:
    line = ("train", "recipe.yaml", "--run-dir", "d", *TWO, "--max-restarts", "2")
    running = start(*line, f"task.hold={hold}")
    saved = f"d/checkpoints/step-{goes_on_at:08d}.pt" if goes_on_at else ""
    pid = kill_held(running, rank, saved)
    ended = running.wait()
    assert ended.code == 0, ended
    assert f"rank {rank} (process {pid}) was killed (SIGKILL)" in ended.err
    assert "starting all ranks anew from the newest checkpoint (1 more restarts" in ended.err
    assert "Traceback" not in ended.err
    again = ("resume", goes_on_at) if goes_on_at else ("start", 0)
    assert begun("d") == [("start", 0), again]
    assert_same(last(Path("d")), undisturbed)


@pytest.mark.slow
def test_rank_0_killed_in_a_save(start: Start, undisturbed: dict[str, Any]) -> None:
    slow_disk(2.0)
    running = start("train", "recipe.yaml", "--run-dir", "d", *TWO, "--max-restarts", "1")
    running.until(lambda: list(Path("d").glob("checkpoints/.step-00000004*.tmp")))
    os.kill(rank_pids(running)[0], signal.SIGKILL)
    Path("go").touch()
    ended = running.wait()
    assert ended.code == 0, ended
    assert begun("d") == [("start", 0), ("resume", 2)]
    assert_same(last(Path("d")), undisturbed)


def test_a_killed_rank_is_told_with_the_newest_checkpoint_and_the_command_that_goes_on(
    start: Start, undisturbed: dict[str, Any]
) -> None:
    running = start("train", "recipe.yaml", "--run-dir", "d", *TWO, "task.hold=train-6")
    pid = kill_held(running, 0, "d/checkpoints/step-00000004.pt")
    ended = running.wait()
    assert ended.code == 5
    assert ended.err.startswith(f"error: rank 0 (process {pid}) was killed (SIGKILL). Most often")
    newest = "The newest checkpoint is d/checkpoints/step-00000004.pt: "
    assert ended.err.endswith(f"{newest}`ampctl resume d --nproc-per-node 2` goes on from it.\n")
    assert ended.err.count("\n") == 1
    ended = start("resume", "d", "--nproc-per-node", "2").wait()
    assert (ended.code, ended.err) == (0, "")
    assert_same(last(Path("d")), undisturbed)


def test_a_resume_in_a_new_folder_starts_again_from_its_source_before_the_first_save(
    start: Start, undisturbed: dict[str, Any]
) -> None:
    first = start("train", "recipe.yaml", "--run-dir", "a", *TWO, "train.max_steps=4").wait()
    assert first.code == 0, first
    line = ("resume", "a", "--run-dir", "b", *TWO, "--max-restarts", "1")
    running = start(*line, "train.max_steps=null", "task.hold=train-2")
    kill_held(running, 1)
    ended = running.wait()
    assert ended.code == 0, ended
    assert begun("b") == [("resume", 4), ("resume", 4)]
    assert_same(last(Path("b")), undisturbed)


@pytest.mark.slow
def test_a_resume_in_a_new_folder_goes_on_with_what_it_has_saved_there(
    start: Start, undisturbed: dict[str, Any]
) -> None:
    first = start("train", "recipe.yaml", "--run-dir", "a", *TWO, "train.max_steps=4").wait()
    assert first.code == 0, first
    line = ("resume", "a", "--run-dir", "b", *TWO, "--max-restarts", "1")
    running = start(*line, "train.max_steps=null", "task.hold=train-4")
    kill_held(running, 0, "b/checkpoints/step-00000006.pt")
    ended = running.wait()
    assert ended.code == 0, ended
    assert begun("b") == [("resume", 4), ("resume", 6)]
    assert_same(last(Path("b")), undisturbed)
