"""A checkpoint that is written while the training goes on: what it holds, and when it fails."""

from __future__ import annotations

import errno
import threading
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import DEADLINE_S, read_events
from test_resume_exact import RECIPE, STEPS, assert_same, last, train

from ampctl.checkpoint import disk, file
from ampctl.engine.step import train_step
from ampctl.errors import MachineError
from ampctl.run import loop, save
from ampctl.state_dict import copies, host_memory

ASYNCHRONOUS = "checkpoint.asynchronous=true"


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


class Steps:
    """Counts the steps of a run, for another thread to wait for one."""

    def __init__(self) -> None:
        self.made = 0
        self._moved = threading.Condition()

    def train_step(self, *args: Any, **kwargs: Any) -> Any:
        report = train_step(*args, **kwargs)
        with self._moved:
            self.made += 1
            self._moved.notify_all()
        return report

    def await_step(self, step: int) -> None:
        with self._moved:
            assert self._moved.wait_for(lambda: self.made >= step, DEADLINE_S)


@pytest.fixture
def steps(monkeypatch: pytest.MonkeyPatch) -> Steps:
    counted = Steps()
    monkeypatch.setattr(loop, "train_step", counted.train_step)
    return counted


@pytest.mark.parametrize("every", [1, 3])
def test_a_file_holds_the_state_of_its_step_although_training_goes_on(
    steps: Steps, monkeypatch: pytest.MonkeyPatch, every: int
) -> None:
    saves = f"checkpoint.every_steps={every}"
    expected = train("instead", saves)
    steps.made = 0
    write = file.write
    under_way: list[Path] = []

    def held(path: Path, payload: Any) -> file.Written:
        under_way.append(path)
        assert under_way == [path]  # one at a time
        # By then all weights are others, and with `every` 1 the next save waits for this one.
        steps.await_step(min(payload["progress"]["step"] + 1, STEPS))
        written = write(path, payload)
        under_way.clear()
        return written

    monkeypatch.setattr(file, "write", held)
    beside = train("beside", saves, ASYNCHRONOUS)
    files = sorted(path.name for path in expected.glob("checkpoints/step-*.pt"))
    assert len(files) == STEPS // every
    for name in files:
        saved, other = (
            torch.load(run_dir / "checkpoints" / name, weights_only=True)
            for run_dir in (beside, expected)
        )
        assert_same(saved, other)


def test_an_error_of_a_save_ends_the_run_before_the_next_save(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    publish, failed = disk.publish, threading.Event()

    def refused(tmp: Path, path: Path) -> None:
        if path.name == "step-00000008.pt":
            failed.set()
            raise OSError(errno.EIO, "Input/output error")
        publish(tmp, path)

    def waiting(*args: Any, **kwargs: Any) -> Any:
        if steps.made == 8:
            assert failed.wait(DEADLINE_S)
        return steps.train_step(*args, **kwargs)

    monkeypatch.setattr(disk, "publish", refused)
    monkeypatch.setattr(loop, "train_step", waiting)
    with pytest.raises(MachineError, match=r"cannot write .*step-00000008\.pt: Input/output error"):
        train("d", "checkpoint.every_steps=4", "train.max_epochs=1000", ASYNCHRONOUS)
    stop = read_events(Path("d"))[-1]
    assert (stop["reason"], stop["exit_code"]) == ("error", 5)
    assert 8 <= stop["step"] < 12  # the next save is that of step 12
    assert last(Path("d"))["progress"]["step"] == 4


def test_a_save_is_told_once_it_is_on_the_disk_not_at_the_next_one(
    steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    told_at = []

    def looking(*args: Any, **kwargs: Any) -> Any:
        report = steps.train_step(*args, **kwargs)
        events = read_events(Path("d")) if not told_at else []
        if any(event["event"] == "checkpoint" for event in events):
            told_at.append(steps.made)
        return report

    monkeypatch.setattr(loop, "train_step", looking)
    train("d", "checkpoint.every_steps=100", "train.max_epochs=50", ASYNCHRONOUS)
    assert 100 < told_at[0] < 200
    told = [event for event in read_events(Path("d")) if event["event"] == "checkpoint"]
    assert [event["step"] for event in told] == [100, 200]
    for event in told:
        assert event["bytes"] == (Path("d") / event["path"]).stat().st_size
        assert event["seconds"] > 0


def test_b8_a_small_state_is_on_the_disk_before_the_next_step_begins(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    there = []

    def looking(*args: Any, **kwargs: Any) -> Any:
        there.append(sorted(path.name for path in Path("d/checkpoints").glob("step-*.pt")))
        return train_step(*args, **kwargs)

    monkeypatch.setattr(loop, "train_step", looking)
    monkeypatch.setattr(save, "SHORT_S", DEADLINE_S)
    saves = ("checkpoint.every_steps=2", "checkpoint.keep_last=1", "checkpoint.keep_best=0")
    train("d", *saves, "train.max_epochs=2", ASYNCHRONOUS)
    made = [[f"step-{step - step % 2:08d}.pt"] if step > 1 else [] for step in range(STEPS)]
    assert there == made[: len(there)]
    assert len(there) > 6


@pytest.mark.parametrize("short", ["SHORT_S", "SLOW_DISK"])
def test_b8_a_save_that_takes_long_is_not_waited_for(
    short: str, steps: Steps, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Because its time is up, or because the state is so large that it is not even tried."""
    write, waited = file.write, []

    def held(path: Path, payload: Any) -> file.Written:
        steps.await_step(min(payload["progress"]["step"] + 1, 5))
        waited.append(payload["progress"]["step"])
        return write(path, payload)

    monkeypatch.setattr(file, "write", held)
    monkeypatch.setattr(save, "SHORT_S", 0.01 if short == "SHORT_S" else 2 * DEADLINE_S)
    monkeypatch.setattr(save, "SLOW_DISK", 1e12 if short == "SHORT_S" else 1e-9)
    train("d", "checkpoint.every_steps=3", "train.max_steps=5", ASYNCHRONOUS)
    assert 3 in waited


def test_the_memory_of_the_first_copy_is_made_while_training_goes_on(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    room, made_in = host_memory._room, []

    def noted(value: torch.Tensor) -> torch.Tensor:
        if value.is_floating_point():
            made_in.append(threading.current_thread().name)
        return room(value)

    monkeypatch.setattr(host_memory, "_room", noted)
    run_dir = train("d", "checkpoint.every_steps=4", ASYNCHRONOUS)
    saved = last(run_dir)
    kept = {key: saved[key] for key in ("model", "optimizer", "ema")}
    tensors = [tensor for _, tensor in copies._tensors(kept, "") if tensor.is_floating_point()]
    assert made_in == ["host memory"] * len({tensor.data_ptr() for tensor in tensors})
    made_in.clear()
    train("e", "checkpoint.every_steps=4", "checkpoint.asynchronous=false")
    assert made_in == []
