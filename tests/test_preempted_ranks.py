"""Signals to the ranks of a job, or to its launcher: all stop at one step and save once.

What a signal does to one process alone is tested with the kills.
"""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGTERM, SIGUSR1
from typing import Any

import pytest
from processes import DEADLINE_S, Ended, Running, read_events, spawn, starting
from test_restart import RECIPE, TWO, path_by_disk, rank_pids, slow_disk, undisturbed
from test_resume_exact import assert_same, last
from torch.distributed.launcher.api import LaunchConfig

from ampctl.distributed.env import StopSignals

__all__ = ["undisturbed"]  # a fixture
Start = Callable[..., Running]
LINE = ("train", "recipe.yaml", "--run-dir", "d")


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PYTHONPATH", path_by_disk(folder))
    (folder / "recipe.yaml").write_text(RECIPE)
    (folder / "disk").mkdir()


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    with starting(folder, TMPDIR=f"{folder}") as function:
        yield function


def check_stopped(ended: Ended, name: str, *, rank: int = 0) -> int:
    """See that the job ended as a preempted one, with all of it saved once; return the step."""
    stop = read_events(Path("d"))[-1]
    assert (stop["event"], stop["reason"], stop["exit_code"]) == ("stop", "preempted", 75), ended
    step = int(stop["step"])
    again = "ampctl resume d --nproc-per-node 2"
    saved = f"{name} received at step {step}, which is saved: `{again}` goes on"
    assert ended.code == 75, ended
    assert ended.err.replace(f"rank {rank}: ", "") == f"error: {saved}\n"
    assert last(Path("d"))["progress"]["step"] == step
    assert not list(Path("d/checkpoints").glob(".*.tmp"))
    assert [e["step"] for e in read_events(Path("d")) if e["event"] == "checkpoint"][-1] == step
    return step


def check_goes_on(start: Start, expected: dict[str, Any]) -> None:
    Path("go").touch()
    ended = start("resume", "d", *TWO).wait()
    assert (ended.code, ended.err) == (0, "")
    assert_same(last(Path("d")), expected)


def test_sg4_a_signal_to_one_rank_in_an_evaluation_ends_it_on_all(
    start: Start, undisturbed: dict[str, Any]
) -> None:
    running = start(*LINE, *TWO, "task.hold=eval-2", "checkpoint.every_steps=100")
    running.until(lambda: all(Path(f"held-{rank}").exists() for rank in (0, 1)))
    os.kill(rank_pids(running)[1], SIGTERM)
    time.sleep(0.2)  # it holds still in Python, where the handler runs at the next turn
    Path("go").touch()
    assert check_stopped(running.wait(), "SIGTERM", rank=1) == 3
    assert not [e for e in read_events(Path("d")) if e["event"] == "eval"]
    check_goes_on(start, undisturbed)
    evaluated = [e["step"] for e in read_events(Path("d")) if e["event"] == "eval"]
    assert evaluated == [3, 6, 9]


@pytest.mark.slow
@pytest.mark.parametrize(("asynchronous", "number"), [("true", SIGTERM), ("false", SIGUSR1)])
def test_sg1_a_signal_while_a_save_is_under_way_waits_for_it_and_for_the_last_one(
    asynchronous: str, number: signal.Signals, start: Start, undisturbed: dict[str, Any]
) -> None:
    slow_disk(0.5)
    running = start(*LINE, *TWO, f"checkpoint.asynchronous={asynchronous}")
    running.until(lambda: list(Path("d").glob("checkpoints/.step-00000002*.tmp")))
    running.send(number)
    step = check_stopped(running.wait(), number.name)
    assert step >= 2
    # Ranks look for signals now and then: on a busy machine another save may have come due by then.
    due = sorted({*range(2, step + 1, 2), step})
    written = [e["step"] for e in read_events(Path("d")) if e["event"] == "checkpoint"]
    assert written == due
    kept = {path.name for path in Path("d/checkpoints").glob("step-*.pt")}
    assert {f"step-{each:08d}.pt" for each in due[-3:]} <= kept
    check_goes_on(start, undisturbed)


@pytest.mark.slow
def test_sg3_signals_to_all_ranks_and_the_launcher_and_once_more(
    start: Start, undisturbed: dict[str, Any]
) -> None:
    """As SLURM does it: every process of the job has it at once, and again before the kill."""
    slow_disk(0.3)
    running = start(*LINE, *TWO, "task.delay_s=0.3", "checkpoint.every_steps=100")
    running.until_event(Path("d"), "train", 1)
    for _ in range(2):
        for pid in (*rank_pids(running).values(), running.pid):
            os.kill(pid, SIGTERM)
        time.sleep(0.1)
    check_stopped(running.wait(), "SIGTERM")
    check_goes_on(start, undisturbed)


@pytest.mark.slow
@pytest.mark.skipif(
    not hasattr(LaunchConfig, "shutdown_timeout"),
    reason="this torchrun kills ranks after 30 s, whatever it is told",
)
def test_sg1_torchrun_cuts_a_save_off_and_the_one_before_is_whole_and_the_user_was_warned(
    undisturbed: dict[str, Any], start: Start
) -> None:
    slow_disk(1.5)  # a save syncs more than twice
    argv = ("-m", "torch.distributed.run", *TWO, "-m", "ampctl", *LINE)
    job = subprocess.Popen(
        [sys.executable, *argv, "task.delay_s=0.5"],
        env={**os.environ, "TORCH_ELASTIC_SHUTDOWN_TIMEOUT": "2"},
        stderr=subprocess.PIPE,
        text=True,
    )
    try:
        deadline = time.monotonic() + DEADLINE_S
        while not list(Path("d").glob("checkpoints/.step-00000004*.tmp")):
            assert time.monotonic() < deadline
            assert job.poll() is None
            time.sleep(0.02)
        job.send_signal(SIGTERM)
        said = job.communicate(timeout=DEADLINE_S)[1]
    finally:
        job.kill()
    warned = "torchrun kills ranks 2 s after SIGTERM: what is not written by then is lost"
    assert said.count(warned) == 1, said
    assert read_events(Path("d"))[-1]["event"] != "stop"  # it was killed
    assert last(Path("d"))["progress"]["step"] == 2
    check_goes_on(start, undisturbed)


def catches(pid: int, number: signal.Signals) -> bool:
    """Return whether a process has a handler of its own for a signal."""
    try:
        status = Path(f"/proc/{pid}/status").read_text()
    except FileNotFoundError:
        return False
    mask = next(line.split()[1] for line in status.splitlines() if line.startswith("SigCgt"))
    return bool(int(mask, 16) >> (number - 1) & 1)


@pytest.mark.parametrize("argv", [(), TWO])
@pytest.mark.parametrize("number", [SIGTERM, SIGUSR1])
def test_a_signal_while_the_program_is_loaded_ends_it_as_preempted(
    argv: tuple[str, ...], number: signal.Signals
) -> None:
    command = [sys.executable, "-m", "ampctl", *LINE, *argv]
    with subprocess.Popen(command, stderr=subprocess.PIPE, text=True) as job:
        while not catches(job.pid, number):
            assert job.poll() is None
            time.sleep(0.005)
        job.send_signal(number)
        said = job.communicate(timeout=DEADLINE_S)[1]
    assert (job.returncode, said) == (
        75,
        f"error: {number.name} received before the run had begun: nothing is lost\n",
    )
    assert not Path("d").exists()


@pytest.mark.slow
@pytest.mark.parametrize("whom", ["one rank", "the launcher"])
def test_a_signal_while_ranks_are_loaded_ends_all_of_them_and_nothing_is_lost(
    whom: str, start: Start
) -> None:
    running = start(*LINE, *TWO)
    running.until(lambda: catches(rank_pids(running).get(1, 0), SIGTERM))
    pids = rank_pids(running)
    os.kill(pids[1] if whom == "one rank" else running.pid, SIGTERM)
    ended = running.wait()
    assert ended.code == 75, ended
    assert ended.err.startswith("error: ")
    assert "SIGTERM" in ended.err
    assert "nothing" in ended.err
    assert ended.err.count("\n") == 1
    assert not [pid for pid in pids.values() if Path(f"/proc/{pid}").exists()]
    assert start(*LINE, *TWO, "--resume", "auto", "train.max_steps=1").wait().code == 0


@pytest.mark.parametrize(("local_rank", "times"), [(None, 1), ("0", 1), ("1", 0)])
def test_a_machine_says_once_how_to_leave_at_once(
    local_rank: str | None, times: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[bytes] = []
    write = os.write  # pipes go on: what hears of signals has one
    monkeypatch.setattr(os, "isatty", lambda _: True)
    monkeypatch.setattr(
        os, "write", lambda to, text: said.append(text) if to == 2 else write(to, text)
    )
    monkeypatch.delenv("LOCAL_RANK", raising=False)
    if local_rank is not None:
        monkeypatch.setenv("LOCAL_RANK", local_rank)
    with StopSignals() as signals:
        signals.training = True
        os.kill(os.getpid(), signal.SIGINT)
        deadline = time.monotonic() + DEADLINE_S
        while signals.received is None:
            assert time.monotonic() < deadline
    assert sum(b"press Ctrl-C to leave at once" in text for text in said) == times


def test_a_signal_that_was_heeded_early_goes_on_to_the_run(folder: Path) -> None:
    """The handler of the first seconds must not end a run that has begun to heed signals."""
    script = (
        "import os, signal\n"
        "from ampctl.distributed import startup_signal\n"
        "startup_signal.handle()\n"
        "from ampctl.distributed.env import StopSignals\n"
        "with StopSignals() as signals:\n"
        "    signals.training = True\n"
        "    os.kill(os.getpid(), signal.SIGTERM)\n"
        "print(signals.received.name)\n"
    )
    done = spawn("-c", script)
    assert (done.returncode, done.stdout) == (0, "SIGTERM\n"), done.stderr
