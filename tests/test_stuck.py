"""A signal while the training is stuck for good: the last step boundary is saved all the same.

Each part is really stuck, and each run that goes on ends as the one that was never stopped.
"""

from __future__ import annotations

import fcntl
import os
import re
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGSTOP, SIGTERM
from typing import Any

import pytest
from jobs import JobEnded, job
from processes import Ended, Running, read_events, session_members, starting
from test_resume_exact import assert_same, last

from ampctl.checkpoint.store import load

RECIPE = """
name: stuck
seed: 3
model: {_target_: stuck_parts.Net}
task: {_target_: stuck_parts.Task}
data:
  train: {_target_: stuck_parts.Samples}
  eval: {_target_: stuck_parts.Samples, size: 9}
  batch_size: 6
  micro_batch_size: 4
  shuffle: false
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
scheduler: {_target_: ampctl.schedules.Cosine, warmup_steps: 3}
amp: {dtype: float32}
train: {max_epochs: 3, ema_decay: 0.9, device: cpu}
checkpoint: {every_steps: 100}
log: {every_steps: 1}
distributed: {timeout_minutes: 5}
"""
LINE = ("train", "recipe.yaml", "--run-dir", "d")
STUCK = Path("stuck")
Start = Callable[..., Running]


@pytest.fixture(autouse=True)
def _here(folder: Path) -> None:
    for name in ("own_parts.py", "stuck_parts.py"):
        shutil.copy(Path(__file__).with_name(name), folder)
    (folder / "recipe.yaml").write_text(RECIPE)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    with starting(folder) as function:
        yield function


def stop(running: Running, number: signal.Signals = SIGTERM) -> Ended:
    running.until(STUCK.exists)
    running.send(number)
    return running.wait()


def check_saved(
    ended: Ended, step: int, *, name: str = "SIGTERM", option: str = "", is_stuck: bool = True
) -> None:
    """See that a run ended as a preempted one, saved at a step, and says so once."""
    saved = f"at step {step}, which is saved: `ampctl resume d{option}` goes on"
    assert ended.code == (130 if name == "SIGINT" else 75), ended
    said = "interrupted" if name == "SIGINT" else f"{name} received"
    told = f"error: {said} {saved} (it was stuck in "
    assert ended.err.startswith(told if is_stuck else told.partition(" (")[0]), ended
    assert ended.err.count("error: ") == 1
    stops = [event for event in read_events(Path("d")) if event["event"] == "stop"]
    assert [(each["step"], each["exit_code"]) for each in stops] == [(step, ended.code)]
    assert last(Path("d"))["progress"]["step"] == step


def check_goes_on(start: Start, *overrides: str) -> None:
    """Go on, healthy, and compare with the run that was never stopped."""
    Path("healthy").touch()
    ended = start("resume", "d").wait()
    assert (ended.code, ended.err) == (0, "")
    ended = start("train", "recipe.yaml", "--run-dir", "whole", *overrides).wait()
    assert ended.code == 0, ended
    assert_same(last(Path("d")), last(Path("whole")))


def samples(**arguments: Any) -> str:
    given = ", ".join(f"{name}: {value}" for name, value in arguments.items())
    return f"data.train={{_target_: stuck_parts.Samples, {given}}}"


@pytest.mark.parametrize("how", ["lock", "sleep", "busy", "fifo", "native"])
def test_c9_a_data_set_that_is_stuck_in_the_training_process(how: str, start: Start) -> None:
    """In its second epoch, in the second micro-batch of a window, with draws in between."""
    data = samples(at=11, nth=2, how=how)
    check_saved(stop(start(*LINE, data)), 5)
    *_, saved = (event for event in read_events(Path("d")) if event["event"] == "checkpoint")
    assert saved["step"] == 5
    assert saved["seconds"] > 0
    check_goes_on(start, data)


@pytest.mark.parametrize("number", [SIGTERM, SIGINT, SIGHUP])
def test_c9_data_workers_that_are_stopped(number: signal.Signals, start: Start) -> None:
    running = start(*LINE, "data.num_workers=2", samples(at=11, nth=2, how="sleep"))
    running.until(STUCK.exists)
    running.until_event(Path("d"), "train", 4)
    for pid in running.members():
        if pid != running.pid:
            os.kill(pid, SIGSTOP)
    running.send(number)
    ended = running.wait()
    step = read_events(Path("d"))[-1]["step"]
    assert 0 < step <= 6
    check_saved(ended, step, name=number.name, is_stuck=False)  # it may have come to a step yet
    deadline = time.monotonic() + 60
    while session_members(running.pid):
        assert time.monotonic() < deadline, "data workers outlive the run"
        time.sleep(0.05)
    check_goes_on(start, "data.num_workers=2")


def test_c9_a_stream_with_a_state_of_its_own(start: Start) -> None:
    data = ("data.train={_target_: stuck_parts.Stream, at: 9}", "scheduler=null")
    check_saved(stop(start(*LINE, *data)), 1)
    check_goes_on(start, *data)


@pytest.mark.parametrize(
    ("where", "at", "step"), [("train", 7, 3), ("eval", 2, 4), ("metrics", -1, 4)]
)
def test_c9_a_task_that_is_stuck(where: str, at: int, step: int, start: Start) -> None:
    """BatchNorm's statistics have moved, the model has the averaged weights, generators are on."""
    options = ("data.eval_batch_size=3",)
    task = f"task={{_target_: stuck_parts.Task, where: {where}, at: {at}}}"
    check_saved(stop(start(*LINE, task, *options)), step)
    check_goes_on(start, task, *options)


def test_c9_a_first_step_that_is_never_made_loses_nothing(start: Start) -> None:
    ended = stop(start(*LINE, samples(at=0)))
    assert ended.code == 75
    assert "before the first step: nothing was trained" in ended.err
    assert not list(Path("d/checkpoints").glob("step-*"))


def test_c9_a_second_ctrl_c_says_what_is_lost(start: Start) -> None:
    running = start(*LINE, samples(at=11, nth=2), "checkpoint.every_steps=2")
    running.until(STUCK.exists)
    running.until(Path("d/checkpoints/step-00000004.pt").exists)
    for _ in range(2):
        running.send(SIGINT)
        time.sleep(0.3)  # two at once are one to the kernel
    ended = running.wait()
    assert ended.code == 130
    told = "interrupted twice: ended at once, and what was not saved is lost"
    where = "`ampctl resume d` goes on from d/checkpoints/step-00000004.pt"
    assert ended.err == f"error: {told}: {where}\n"


def task(**arguments: Any) -> str:
    given = ", ".join(f"{name}: {value}" for name, value in arguments.items())
    return f"task={{_target_: stuck_parts.Task, {given}}}"


@pytest.mark.parametrize("asynchronous", ["true", "false"])
@pytest.mark.parametrize("how", ["lock", "sleep"])
def test_c9_a_save_that_is_stuck_names_the_newest_checkpoint(
    asynchronous: str, how: str, start: Start
) -> None:
    options = ("checkpoint.every_steps=2", f"checkpoint.asynchronous={asynchronous}")
    ended = stop(start(*LINE, task(where="disk", at=9, how=how), *options))
    assert ended.code == 75
    where = r"`ampctl resume d` goes on from d/checkpoints/step-0000000[24]\.pt"
    assert re.fullmatch(f"error: SIGTERM received and a save was stuck: {where}\n", ended.err)
    assert read_events(Path("d"))[-1]["exit_code"] == 75
    check_goes_on(start, *options)


def test_c9_output_that_nobody_reads(folder: Path) -> None:
    """It is full in the midst of a line; the checkpoint is saved, and what there is to say too."""
    reader, writer = os.pipe()
    fcntl.fcntl(writer, fcntl.F_SETPIPE_SZ, 4096)
    program = [sys.executable, "-m", "ampctl", *LINE, "train.max_epochs=100000", "data.eval=null"]
    process = subprocess.Popen(program, stdout=writer, stderr=subprocess.PIPE, text=True)
    os.close(writer)
    deadline, before = time.monotonic() + 120, -1
    while before != len(read_events(Path("d"))) or before < 20:
        before = len(read_events(Path("d")))
        assert time.monotonic() < deadline
        assert process.poll() is None
        time.sleep(1.0)
    process.send_signal(SIGTERM)
    _, told = process.communicate(timeout=120)
    os.close(reader)
    assert process.returncode == 75, told
    step = read_events(Path("d"))[-1]["step"]
    check_saved(Ended(75, "", told), step)


TWO = " --nproc-per-node 2"


def stop_ranks(
    folder: Path, *options: str, told: tuple[int, ...] = (0, 1), number: signal.Signals = SIGTERM
) -> JobEnded:
    """Start two ranks, send some of them a signal once the second is stuck; wait for their end."""
    with job(folder, *LINE, *options) as ranks:
        ranks.ranks[1].until(STUCK.exists)
        for rank in told:
            ranks.ranks[rank].send(number)
        return ranks.wait()


def resumed(folder: Path, *overrides: str) -> None:
    """Go on with two ranks, healthy, and compare with a run that was never stopped."""
    Path("healthy").touch()
    for argv in (("resume", "d"), ("train", "recipe.yaml", "--run-dir", "whole", *overrides)):
        with job(folder, *argv) as ranks:
            ended = ranks.wait()
            assert ended.code == 0, ended
    one, other = (load(Path(name), notify=print).payload for name in ("d", "whole"))
    for each in (one, other):
        each.pop("parts", None)  # how files of a sharded one are called
    assert_same(one, other)


@pytest.mark.parametrize("told", [(0, 1), (1,), (0,)])
def test_c9_a_rank_that_is_stuck_and_one_that_waits_for_it_in_a_collective(
    told: tuple[int, ...], folder: Path
) -> None:
    fault = task(at=7, rank=1)
    ended = stop_ranks(folder, fault, told=told)
    assert ended.code == 75, ended
    step = read_events(Path("d"))[-1]["step"]
    assert step > 0
    check_saved(Ended(75, ended.out, f"error: {ended.error}"), step, option=TWO)
    resumed(folder, fault)


def test_c9_ctrl_c_that_reaches_each_rank_is_one(folder: Path) -> None:
    ended = stop_ranks(folder, task(at=7, rank=1), number=SIGINT)
    assert ended.code == 130, ended
    assert "interrupted at step " in ended.error
    assert "twice" not in ended.error


def test_c9_a_slow_step_under_fsdp_is_made_and_saved(folder: Path) -> None:
    """What only all ranks can save together must not be given up for a step of some seconds."""
    ended = stop_ranks(folder, "distributed.strategy=fsdp", task(at=7, rank=1, how="slow"))
    assert ended.code == 75, ended
    assert ", which is saved: `ampctl resume d --nproc-per-node 2` goes on" in ended.error


def test_c9_a_rank_stuck_under_fsdp_names_the_newest_checkpoint(folder: Path) -> None:
    options = ("distributed.strategy=fsdp", "checkpoint.every_steps=2", task(at=7, rank=1))
    ended = stop_ranks(folder, *options)
    assert ended.code == 75, ended
    assert "`ampctl resume d --nproc-per-node 2` goes on from " in ended.error
    resumed(folder, *options)


def test_c9_the_launcher_of_a_stuck_rank_ends_with_its_code(start: Start) -> None:
    running = start(*LINE, "--nproc-per-node", "2", task(at=7, rank=1))
    ended = stop(running)
    check_saved(ended, read_events(Path("d"))[-1]["step"], option=TWO)
