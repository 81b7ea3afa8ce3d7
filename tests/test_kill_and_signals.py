"""Runs that are killed, preempted, interrupted or go bad, and the exact run that goes on from them.

The processes are real and so are the signals; nothing waits for a fixed time.
"""

from __future__ import annotations

import multiprocessing
import re
import shutil
import signal
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from signal import SIGHUP, SIGINT, SIGKILL, SIGTERM, SIGUSR1
from typing import Any

import pytest
import torch
from cpus import Cpu, on_each_cpu
from processes import DEADLINE_S, Ended, Running, read_events, session_members, spawn, starting
from test_resume_exact import assert_same
from typer.testing import CliRunner

from ampctl.cli import app
from ampctl.data.loader import MapData, TrainData
from ampctl.data.order import Order
from ampctl.data.stream import StreamData
from ampctl.state_dict.copies import nonfinite

TESTS = Path(__file__).parent
STEPS = 12
RECIPE = """
name: killed
seed: 3
model: {_target_: own_parts.Net}
task: {_target_: own_parts.NoisyTask}
data:
  train: {_target_: own_parts.Augmented, bad: [5]}
  eval: {_target_: own_parts.Augmented, size: 9}
  batch_size: 6
  micro_batch_size: 4
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
scheduler: {_target_: ampctl.schedules.Cosine, warmup_steps: 3}
amp: {dtype: float32, init_scale: 1024, growth_interval: 3, clip_norm: 1.0}
train: {max_epochs: 3, ema_decay: 0.9}
checkpoint: {every_steps: 2}
log: {every_steps: 1}
"""
FIELDS = {
    "start": {
        "recipe_digest",
        "dtype",
        "device",
        "world_size",
        "parameters",
        "matmul_precision",
    },
    "train": {
        *("epoch", "loss", "lr", "grad_norm", "scale", "skipped", "updates", "samples"),
        *("samples_per_s", "step_ms", "memory_mb"),
        *("underflow", "headroom", "activation_headroom"),  # more than the contract asks for
    },
    "skip": {"scale_before", "scale_after", "consecutive"},
    "eval": {"epoch", "eval/loss"},
    "checkpoint": {"path", "seconds", "bytes"},
    "diagnosis": {"cause", "module", "tensor", "advice"},
    "stop": {"reason", "exit_code"},
}
FIELDS["resume"] = FIELDS["start"] | {"checkpoint", "epoch"}

Start = Callable[..., Running]
SLOW, QUICK = "data.train.delay_s=0.01", "data.train.delay_s=0"


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    for name in ("own_parts.py", "faulty_parts.py"):
        shutil.copy(TESTS / name, folder)
        # Those of another test are of another folder, whose code this recipe is not trained with.
        monkeypatch.delitem(sys.modules, name.removesuffix(".py"), raising=False)
    (folder / "recipe.yaml").write_text(RECIPE)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    with starting(folder) as function:
        yield function


def held(batch: int) -> str:
    """Let a run hold still at a training batch; two of them are a step, one the epoch's last."""
    return f"task={{_target_: faulty_parts.Watched, hold_at: {batch}}}"


def ampctl(*argv: str, code: int = 0) -> Ended:
    """Run a command in this process."""
    result = CliRunner().invoke(app, argv)
    shown = result.exc_info if result.exit_code == 1 else None
    assert result.exit_code == code, (result.stdout, result.stderr, shown)
    return Ended(result.exit_code, result.stdout, result.stderr)


def last(run_dir: Path) -> dict[str, Any]:
    return torch.load(run_dir / "checkpoints" / "latest.pt", weights_only=True)


def never_stopped(*overrides: str) -> dict[str, Any]:
    ampctl("train", "recipe.yaml", "--run-dir", "whole", *overrides)
    check_events(Path("whole"))
    return last(Path("whole"))


def check_events(run_dir: Path) -> list[dict[str, Any]]:
    """Hold ``metrics.jsonl`` against section 3 of the contract: names, fields and kinds."""
    events = read_events(run_dir)
    assert events
    for event in events:
        kind = event["event"]
        assert event.keys() - {"event", "step", "time"} == FIELDS[kind], event
        assert isinstance(event["step"], int)
        if kind == "checkpoint":
            assert event["seconds"] >= 0
            assert event["bytes"] > 0
    return events


def check_no_workers_are_left(process: Running) -> None:
    """See that the data workers of a killed run end; torch lets them look every five seconds."""
    deadline = time.monotonic() + DEADLINE_S
    while session_members(process.pid):
        assert time.monotonic() < deadline, "data workers outlive the run"
        time.sleep(0.05)


def check_tidy(run_dir: Path) -> None:
    assert not list(run_dir.rglob("*.tmp"))
    assert [e["event"] for e in check_events(run_dir)][-1] == "stop"


# kill -9


def killed_at(process: Running, folder: Path, step: int) -> None:
    """Kill a run that holds still, once its save at a step is on the disk."""
    process.until(lambda: (folder / "held").exists())
    process.until(lambda: (folder / f"d/checkpoints/step-{step:08d}.pt").exists())
    assert process.kill().code == -SIGKILL
    (folder / "held").unlink()


def test_kill_9_in_a_window_and_after_a_save_requeued(folder: Path, start: Start) -> None:
    expected = never_stopped()
    line = ("train", "recipe.yaml", "--run-dir", "d", "--resume", "auto", "data.num_workers=2")
    # The folder is empty: it starts anew. Killed in the window of the sixth step, which is in the
    # second epoch.
    process = start(*line, held(11))
    killed_at(process, folder, 4)
    # Requeued, and killed in the step after its next save.
    process = start(*line, held(5))
    killed_at(process, folder, 6)
    check_no_workers_are_left(process)
    ended = start(*line).wait()
    assert (ended.code, ended.err) == (0, "")
    assert_same(last(folder / "d"), expected)
    check_tidy(folder / "d")
    events = read_events(folder / "d")
    begun = [(e["event"], e["step"]) for e in events if "recipe_digest" in e]
    assert begun == [("start", 0), ("resume", 4), ("resume", 6)]
    # What was told again after a kill was told the same.
    for step in range(1, STEPS + 1):
        assert len({e["loss"] for e in events if e["event"] == "train" and e["step"] == step}) == 1


def test_kill_9_while_an_asynchronous_save_runs(folder: Path, start: Start) -> None:
    # Large enough that writing takes a while.
    options = ("amp.dtype=bfloat16", "model.width=50000", "checkpoint.every_steps=1")
    expected = never_stopped(*options, "checkpoint.asynchronous=false")
    run_dir = folder / "d"
    process = start("train", "recipe.yaml", "--run-dir", "d", *options, SLOW)
    process.until_event(run_dir, "checkpoint", 1)

    def caught_in_a_save() -> list[Path]:
        """Hold the process while a file is half written."""
        found = list(run_dir.glob("checkpoints/.step-*.tmp"))
        if found:
            process.send(signal.SIGSTOP)
            found = [path for path in found if path.exists()]
            if not found:
                process.send(signal.SIGCONT)
        return found

    process.until(caught_in_a_save, pause_s=0.0005)
    assert process.kill().code == -SIGKILL
    assert list(run_dir.glob("checkpoints/.step-*.tmp"))
    ended = start("resume", "d", QUICK).wait()
    assert (ended.code, ended.err) == (0, "")
    assert_same(last(run_dir), expected)
    check_tidy(run_dir)


@on_each_cpu
def test_kill_9_in_float16_with_skips_ema_and_accumulation(
    folder: Path, start: Start, cpu: Cpu
) -> None:
    options = ("amp.dtype=float16", "checkpoint.every_steps=3")
    expected = never_stopped(*options)
    assert expected["progress"]["skipped"] == 3
    assert expected["ema"] is not None
    process = start("train", "recipe.yaml", "--run-dir", "d", *options, held(12))
    killed_at(process, folder, 6)
    (folder / "go").touch()
    ended = start("resume", "d").wait()
    assert (ended.code, cpu.rest(ended.err)) == (0, "")
    assert_same(last(folder / "d"), expected)
    check_tidy(folder / "d")


def test_a_new_interpreter_resumes_what_another_was_killed_in(folder: Path, start: Start) -> None:
    expected = never_stopped()
    killed_at(start("train", "recipe.yaml", "--run-dir", "d", held(9)), folder, 4)
    (folder / "go").touch()
    done = spawn("-m", "ampctl", "resume", "d")
    assert (done.returncode, done.stderr) == (0, "")
    assert "going on from step-00000004.pt: step 4" in done.stdout
    assert_same(last(folder / "d"), expected)


def test_a_run_killed_before_its_first_save_starts_anew(folder: Path, start: Start) -> None:
    process = start("train", "recipe.yaml", "--run-dir", "d", held(3))
    process.until_event(folder / "d", "start", 0)
    process.kill()
    assert ampctl("resume", "d", code=4).err.startswith("error: d holds no checkpoint")
    ampctl("train", "recipe.yaml", "--run-dir", "d", "--resume", "auto")
    assert_same(last(folder / "d"), never_stopped())


# Signals

ENDS = {
    SIGTERM: (75, "preempted", "SIGTERM received"),
    SIGUSR1: (75, "preempted", "SIGUSR1 received"),
    SIGHUP: (75, "preempted", "SIGHUP received"),
    SIGINT: (130, "interrupted", "interrupted"),
}


def check_stopped(ended: Ended, number: signal.Signals, run_dir: Path) -> int:
    """See that a signal ended a run as the contract says; return the step it was saved at."""
    code, reason, words = ENDS[number]
    stop = check_events(run_dir)[-1]
    assert ended.code == code, ended
    assert (stop["event"], stop["reason"], stop["exit_code"]) == ("stop", reason, code)
    saved = f"at step {stop['step']}, which is saved: `ampctl resume {run_dir.name}` goes on"
    assert ended.err == f"error: {words} {saved}\n"
    assert last(run_dir)["progress"]["step"] == stop["step"]
    check_tidy(run_dir)
    return stop["step"]


@pytest.mark.parametrize(
    ("number", "workers", "group"),
    [
        (SIGTERM, 0, False),
        (SIGUSR1, 2, False),
        (SIGINT, 0, False),
        (SIGINT, 2, True),
        (SIGTERM, 2, True),
        pytest.param(SIGHUP, 2, True, id="c12"),
    ],
)
def test_sg3_a_signal_in_training_saves_and_ends(
    folder: Path, start: Start, number: signal.Signals, workers: int, group: bool
) -> None:
    options = (f"data.num_workers={workers}", "checkpoint.every_steps=100")
    process = start("train", "recipe.yaml", "--run-dir", "d", held(11), *options)
    process.until((folder / "held").exists)
    (process.send_to_group if group else process.send)(number)
    (folder / "go").touch()
    # The window under way is finished, and no other is begun.
    assert check_stopped(process.wait(), number, folder / "d") == 6
    assert session_members(process.pid) == []
    ampctl("resume", "d")
    assert_same(last(folder / "d"), never_stopped())


SLOW_EVALUATION = (
    "task._target_=faulty_parts.Watched",
    "data.eval.size=60",
    "data.eval.delay_s=0.05",
    "data.eval_batch_size=1",
)


@pytest.mark.parametrize(
    ("number", "workers", "group"), [(SIGTERM, 0, False), (SIGUSR1, 0, False), (SIGINT, 2, True)]
)
def test_sg4_a_signal_in_evaluation_ends_it_within_a_batch_and_it_is_redone_once(
    folder: Path, start: Start, number: signal.Signals, workers: int, group: bool
) -> None:
    options = (*SLOW_EVALUATION, f"data.num_workers={workers}")
    process = start("train", "recipe.yaml", "--run-dir", "d", *options)
    evaluated = folder / "evaluated"
    process.until(lambda: evaluated.exists() and evaluated.stat().st_size >= 5)
    (process.send_to_group if group else process.send)(number)
    count = evaluated.stat().st_size
    ended = process.wait()
    assert evaluated.stat().st_size <= count + 2  # the batch under way, and one that has just begun
    assert check_stopped(ended, number, folder / "d") == 4
    assert not [e for e in read_events(folder / "d") if e["event"] == "eval"]
    ampctl("resume", "d", "data.eval.delay_s=0")
    evaluations = [e["step"] for e in check_events(folder / "d") if e["event"] == "eval"]
    assert evaluations == [4, 8, 12]
    assert_same(last(folder / "d"), never_stopped(*SLOW_EVALUATION[:2], "data.eval_batch_size=1"))


@pytest.mark.parametrize("limit", ["train.max_epochs=1", "train.max_steps=3"])
def test_sg4_the_last_evaluation_is_redone_too(folder: Path, start: Start, limit: str) -> None:
    process = start("train", "recipe.yaml", "--run-dir", "d", *SLOW_EVALUATION, limit)
    process.until((folder / "evaluated").exists)
    process.send(SIGTERM)
    check_stopped(process.wait(), SIGTERM, folder / "d")
    assert "complete: " in ampctl("resume", "d", "data.eval.delay_s=0").out
    events = [e["event"] for e in check_events(folder / "d")]
    assert events.count("eval") == 1
    expected = never_stopped(*SLOW_EVALUATION[:2], "data.eval_batch_size=1", limit)
    assert_same(last(folder / "d"), expected)
    assert "already complete" in ampctl("resume", "d").out


@pytest.mark.parametrize("workers", [0, 2])
def test_a_second_ctrl_c_leaves_at_once(folder: Path, start: Start, workers: int) -> None:
    process = start(
        *("train", "recipe.yaml", "--run-dir", "d", f"data.num_workers={workers}"),
        "data.train={_target_: faulty_parts.Hangs}",
    )
    process.until((folder / "hanging").exists)
    process.send_to_group(SIGINT)
    # The first does not end it: the sample that it waits for never comes. Those sent before it
    # has taken the first are one to the kernel, so they are sent until it leaves.
    sent, deadline = 1, time.monotonic() + DEADLINE_S
    while process.is_alive():
        assert time.monotonic() < deadline, "it did not leave"
        time.sleep(0.1)
        if process.is_alive():
            process.send_to_group(SIGINT)
            sent += 1
    ended = process.wait()
    assert sent > 1
    told = "interrupted twice: ended at once, and what was not saved is lost"
    assert ended.code == 130
    assert ended.err == f"error: {told}: no checkpoint has been saved\n"


# Numbers that are not finite

LINE = (
    "model={_target_: torch.nn.Linear, in_features: 8, out_features: 1}",
    "task={_target_: ampctl.tasks.Regression}",
    "optimizer={_target_: torch.optim.SGD, lr: 0.05}",
    "scheduler=null",
    "amp.dtype=float16",
    "amp.clip_norm=null",
    "amp.growth_interval=2000",
    "data.eval=null",
    "data.shuffle=false",
    "data.batch_size=2",
    "data.micro_batch_size=null",
    "train.ema_decay=null",
)


def spoiled(**arguments: int) -> tuple[str, ...]:
    listed = ", ".join(f"{name}: {value}" for name, value in arguments.items())
    return (*LINE, f"data.train={{_target_: faulty_parts.Spoiled, {listed}}}")


def test_nf1_bad_data_for_ever_ends_the_run_with_its_cause(folder: Path) -> None:
    data = spoiled(size=200, bad=200)
    ended = ampctl("train", "recipe.yaml", "--run-dir", "d", *data, "amp.max_skips=8", code=3)
    events = check_events(folder / "d")
    stop, diagnosis = events[-1], next(e for e in events if e["event"] == "diagnosis")
    assert (stop["reason"], stop["exit_code"]) == ("nonfinite", 3)
    assert "the batch holds values that are not finite" in diagnosis["cause"]
    assert "stopped at step 8: 8 non-finite steps in a row; the last good step was 0" in ended.err
    assert diagnosis["cause"] in ended.err
    assert diagnosis["advice"] in ended.err
    assert "512 (step 1) -> 256 (step 2)" in ended.err
    assert ended.err.count("stopped at step") == 1
    for path in (folder / "d/checkpoints").glob("step-*.pt"):
        assert not nonfinite(torch.load(path, weights_only=True)["model"])
    # To go on is to meet the same batches again.
    ampctl("resume", "d", "amp.max_skips=8", code=3)


@pytest.mark.parametrize(("bad", "code"), [(5, 0), (50, 3), (200, 3)])
def test_nf1_bad_batches_then_good_ones(folder: Path, bad: int, code: int) -> None:
    """torch's own scale falls to 0 in 166 such steps, and the next good batch makes NaN weights."""
    data = spoiled(size=2 * bad + 100, bad=2 * bad)
    options = (*data, "train.max_epochs=1")
    ampctl("train", "recipe.yaml", "--run-dir", "d", *options, code=code)
    steps = 5 if not code else 25
    assert sum(e["event"] == "skip" for e in read_events(folder / "d")) == steps
    # With more patience the run comes through, with the scale at its floor.
    ampctl("train", "recipe.yaml", "--run-dir", "e", *options, "amp.max_skips=1000")
    saved = last(folder / "e")
    assert not nonfinite(saved["model"])
    assert saved["progress"]["skipped"] == bad
    assert saved["progress"]["updates"] == 50
    figures = [e for e in read_events(folder / "e") if e["event"] == "train"]
    assert min(e["scale"] for e in figures) == (1.0 if bad > 5 else 32.0)
    assert figures[-1]["loss"] < 1.0 < float(figures[bad]["loss"])


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_nonfinite_stop_ends_at_the_first(folder: Path, dtype: str) -> None:
    options = (*spoiled(corrupt=7), "amp.nonfinite=stop", f"amp.dtype={dtype}", "log.every_steps=1")
    ended = ampctl("train", "recipe.yaml", "--run-dir", "d", *options, code=3)
    assert "stopped at step 4: the first non-finite step; the last good step was 3" in ended.err
    assert "its samples 7)" in ended.err
    assert not nonfinite(last(folder / "d")["model"])
    assert f"the newest checkpoint is d/checkpoints/step-{2:08d}.pt" in ended.err


@pytest.mark.parametrize("rate", ["1e6", "1e30"])
def test_nf2_a_rate_too_high_and_a_corrupt_sample_are_told_apart(folder: Path, rate: str) -> None:
    corrupt = (*spoiled(corrupt=7), "amp.nonfinite=stop", "data.batch_size=100")
    ampctl("train", "recipe.yaml", "--run-dir", "corrupt", *corrupt, code=3)
    high = (*spoiled(size=100), f"optimizer.lr={rate}", "train.max_epochs=100")
    ended = ampctl("train", "recipe.yaml", "--run-dir", "high", *high, code=3)
    causes = [
        next(e["cause"] for e in read_events(folder / name) if e["event"] == "diagnosis")
        for name in ("corrupt", "high")
    ]
    assert "batch holds values that are not finite" in causes[0]
    assert "batch holds" not in causes[1]
    assert "learning rate" in ended.err or "optimizer.lr" in ended.err
    for path in (folder / "high/checkpoints").glob("step-*.pt"):
        finite = not path.stem.endswith("nonfinite")
        assert finite == (not nonfinite(torch.load(path, weights_only=True)["model"]))


# Data workers


@pytest.mark.parametrize("where", ["reading", "computing"])
def test_dl1_a_dead_worker_is_told_with_its_signal_and_samples(
    folder: Path, start: Start, where: str
) -> None:
    slow = 0.2 if where == "computing" else 0.0  # the worker dies while a step is being computed
    options = (
        *("data.shuffle=false", "data.micro_batch_size=null", "train.max_epochs=1"),
        "data.train={_target_: faulty_parts.Kills, deadly: 20}",
        "task={_target_: faulty_parts.Watched}",
    )
    process = start(
        *("train", "recipe.yaml", "--run-dir", "d", "data.num_workers=2", *options),
        f"task.slow_s={slow}",
    )
    ended = process.wait()
    assert ended.code == 1
    assert "Traceback" not in ended.err
    message = re.search(
        r"data worker 1 was ended by SIGKILL .* the samples ([0-9, ]+)\.", ended.err
    )
    assert message, ended.err
    listed = [int(index) for index in message.group(1).split(",")]
    assert listed[-6:] == [18, 19, 20, 21, 22, 23]
    assert "data.num_workers" in ended.err
    stop = check_events(folder / "d")[-1]
    assert (stop["reason"], stop["exit_code"]) == ("error", 1)
    assert session_members(process.pid) == []
    # What was trained before is saved; once the data is repaired, it is as if nothing had been.
    assert last(folder / "d")["progress"]["step"] == stop["step"]
    (folder / "repaired").touch()
    ampctl("resume", "d", "data.num_workers=0", "task.slow_s=0")
    assert_same(last(folder / "d"), never_stopped(*options))


@pytest.mark.parametrize("iterable", [False, pytest.param(True, marks=pytest.mark.slow)])
def test_workers_that_hang_in_a_sample_end_with_the_run(iterable: bool) -> None:
    import faulty_parts

    data: TrainData
    if iterable:
        stream = faulty_parts.HangingStream(good=3)
        data = StreamData(stream, batch_size=3, micro_batch_size=3, seed=0, num_workers=1)
    else:
        order = Order(12, 3, 3, seed=0, shuffle=False)
        data = MapData(faulty_parts.Hangs(good=3), order, num_workers=1)
    windows = data.windows(0, 0)
    next(windows)
    deadline = time.monotonic() + DEADLINE_S
    while not Path("hanging").exists():
        assert time.monotonic() < deadline
        time.sleep(0.01)
    data.close()
    assert multiprocessing.active_children() == []


def seen() -> list[str]:
    lines = Path("seen").read_text().splitlines()
    Path("seen").unlink()
    return lines


ORDER = (
    "data.train={_target_: faulty_parts.Indexed}",
    "task={_target_: faulty_parts.Writing}",
    "data.eval=null",
    "data.batch_size=4",
    "train.max_epochs=2",
    "checkpoint.every_steps=1",
    "checkpoint.keep_last=100",
)


def test_dl2_dl4_order_and_draws_differ_by_epoch_and_follow_the_seed_alone(folder: Path) -> None:
    runs = []
    for workers in (0, 1, 2):
        name = f"w{workers}"
        ampctl("train", "recipe.yaml", "--run-dir", name, *ORDER, f"data.num_workers={workers}")
        runs.append(seen())
    assert runs[0] == runs[1] == runs[2]
    epochs = [runs[0][:3], runs[0][3:]]
    order = [
        [int(i) for line in epoch for i in re.findall(r"\d+", line.partition(";")[0])]
        for epoch in epochs
    ]
    assert sorted(order[0]) == sorted(order[1]) == list(range(10))
    assert order[0] != order[1]
    draws = [value for line in runs[0] for value in re.findall(r"[-.\d]+", line.partition(";")[2])]
    assert len(set(draws)) == len(draws) == 20
    for step in (1, 3, 4):
        source = f"w0/checkpoints/step-{step:08d}.pt"
        ampctl("resume", source, "--run-dir", f"again-{step}", "data.num_workers=0")
        assert seen() == runs[0][step:]
    ampctl("train", "recipe.yaml", "--run-dir", "other", *ORDER, "seed=4")
    assert seen() != runs[0]


def test_dl5_no_graph_outlives_its_step(folder: Path) -> None:
    from faulty_parts import Attached

    options = ("task={_target_: faulty_parts.Attached}", "train.max_epochs=20")
    ampctl("train", "recipe.yaml", "--run-dir", "d", "data.train.delay_s=0", *options)
    assert 0 < Attached.most_alive <= 3
    events = read_events(folder / "d")
    assert sum("eval/height" in e for e in events if e["event"] == "eval") == 20
