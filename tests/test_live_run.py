"""A run under way that saves at every step: others look at it, and none may write where it does."""

from __future__ import annotations

import errno
import itertools
import json
import os
import shutil
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import job
from processes import Running, read_events, starting
from test_checkpoint_store import payload, silent, store
from test_cli import RECIPE, TESTS, ampctl

from ampctl.checkpoint import disk, file, lock, sharded, verify
from ampctl.checkpoint.store import load
from ampctl.errors import CheckpointError

LOOKS = 6


@pytest.fixture
def live(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Running]:
    """A run in ``d`` that keeps the newest file and the best, and goes on until it is killed."""
    monkeypatch.syspath_prepend(str(TESTS))
    shutil.copy(TESTS / "own_parts.py", folder)
    (folder / "recipe.yaml").write_text(RECIPE)
    for_long = ("train.max_epochs=null", "train.max_steps=1000000", "log.every_steps=1000")
    saving = ("checkpoint.every_steps=1", "checkpoint.keep_last=1", "train.eval_every_steps=5")
    with starting(folder) as start:
        process = start("train", "recipe.yaml", "--quiet", "--run-dir", "d", *for_long, *saving)
        process.until((folder / "d/checkpoints/best.pt").exists)
        yield process
        assert process.is_alive(), process.said()


def test_a_run_is_looked_at_while_it_saves(live: Running) -> None:
    first = read_events(Path("d"))[-1]["step"]
    for _ in range(LOOKS):
        for name in ("d", "d/checkpoints/latest.pt", "d/checkpoints/best.pt"):
            assert json.loads(ampctl("inspect", name, "--json").stdout)["nonfinite"] == []
            assert ampctl("verify", name).stderr == ""
        assert ampctl("export", "d", "out.safetensors", "--force").stderr == ""
        told = ampctl("eval", "d", "--trust").stderr.splitlines()
        assert all(line.startswith("warning: trusted: ") for line in told)
    assert live.said() == ""
    assert read_events(Path("d"))[-1]["step"] > first


def test_ck5_nothing_else_trains_in_the_folder_of_a_run_under_way(live: Running) -> None:
    held = f"d is in use: process {live.pid} on {socket.gethostname()} (since 20"
    for line in (
        ("resume", "d", "--trust"),
        ("resume", "d/checkpoints/latest.pt", "--trust"),
        ("train", "recipe.yaml", "--run-dir", "d", "--resume", "auto"),
    ):
        assert held in ampctl(*line, code=2).stderr
        with job(Path(), *line) as ranks:
            ended = ranks.wait()
        assert (ended.code, ended.err) == (2, ""), ended
        assert held in ended.error
    told = ampctl("train", "recipe.yaml", "--run-dir", "d", code=2).stderr
    assert "d already holds a run, which is never written over" in told
    # From a file of it another run may go on elsewhere.
    ampctl("resume", "d/checkpoints/best.pt", "--run-dir", "e", "--trust", "train.max_steps=6")
    assert live.said() == ""


def test_ck5_the_record_of_a_run_that_is_gone_holds_nothing(folder: Path) -> None:
    """Killed, on whatever machine: the kernel has given its lock back, and the record is old."""
    gone = {"pid": 1, "host": f"{'far' * 20}.example.org", "started": "2026-01-01T00:00:00+00:00"}
    (folder / ".lock").write_text(json.dumps(gone))
    with lock.hold(folder):
        record = json.loads((folder / ".lock").read_text())
        assert (record["pid"], record["host"]) == (os.getpid(), socket.gethostname())


# ---------------------------------------------------------------- at the worst moment


Look = Callable[[], Any]


@pytest.mark.parametrize("source", ["", "checkpoints", "checkpoints/latest.pt"])
@pytest.mark.parametrize("older", [False, True])
def test_what_a_run_gives_up_while_it_is_read_is_no_damage(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, source: str, older: bool
) -> None:
    """Not even where an older one, the best, could do in its place."""
    saver = store(tmp_path, keep_last=1, keep_best=int(older))
    steps = itertools.count(99)

    def save() -> None:
        step = next(steps)
        saver.save(payload(step), step=step, metrics={"eval/loss": step})

    save()
    save()
    read = sharded.read

    def late(path: Path, *args: Any, **kwargs: Any) -> Any:
        if path.resolve().name in ("step-00000100.pt", "step-00000101.pt"):
            save()
        return read(path, *args, **kwargs)

    monkeypatch.setattr(sharded, "read", late)
    found = load(tmp_path / source, notify=silent)
    assert found.payload["progress"]["step"] == 102
    assert found.passed_over == ()


@pytest.mark.parametrize("kept", [1, 2])
def test_a_verdict_on_a_run_is_on_what_it_has_at_one_time(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, kept: int
) -> None:
    """It saves while the files are examined, and again while what the index tells is looked for."""
    monkeypatch.setattr(verify, "_content", lambda *args: ("intact", ""))
    saver = store(tmp_path, keep_last=kept, keep_best=0)
    steps = itertools.count(100)

    def save() -> None:
        step = next(steps)
        saver.save(payload(step), step=step, metrics={})

    def late(function: Any, *moments: Look) -> Any:
        left = iter(moments)

        def call(*args: Any) -> Any:
            next(left, lambda: None)()
            return function(*args)

        return call

    save()
    save()
    monkeypatch.setattr(verify, "_examine", late(verify._examine, save))
    monkeypatch.setattr(verify, "missing_files", late(verify.missing_files, save, save))
    monkeypatch.setattr(verify, "links_of", late(verify.links_of, lambda: None, save))
    facts = verify.verify(tmp_path)
    assert facts["problems"] == []
    assert {each["verdict"] for each in facts["files"]} == {"intact"}
    assert not [note for note in facts["notes"] if "it is not there" in note]


def test_a_verdict_on_a_link_is_on_the_file_that_it_led_to(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(verify, "_content", lambda *args: ("intact", ""))
    saver = store(tmp_path, keep_last=1)
    saver.save(payload(100), step=100, metrics={})
    examine, times = verify._examine, iter([True, False])

    def late(*args: Any) -> Any:
        if next(times):
            saver.save(payload(200), step=200, metrics={})
        return examine(*args)

    monkeypatch.setattr(verify, "_examine", late)
    facts = verify.verify(tmp_path / "checkpoints/latest.pt")
    assert facts["problems"] == []
    assert facts["files"][0]["step"] == 200


def test_what_is_looked_at_is_what_was_proved(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """A file that comes in the place of another between proof and reading is not read."""
    for step in (100, 200):
        written = file.write(tmp_path / f"{step}.pt", payload(step))
        disk.publish(disk.temporary(tmp_path / f"{step}.pt"), tmp_path / f"{step}.pt")
    check = file._check_bytes

    def late(*args: Any) -> Any:
        proved = check(*args)
        os.replace(tmp_path / "100.pt", tmp_path / "200.pt")
        return proved

    monkeypatch.setattr(file, "_check_bytes", late)
    read = sharded.read(tmp_path / "200.pt", [written.sha256], mmap=True)
    assert read["progress"]["step"] == 200


@pytest.mark.parametrize("look", [False, True])
def test_a_file_that_the_disk_cannot_read_is_passed_over(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, look: bool
) -> None:
    saver = store(tmp_path)
    for step in (100, 200):
        saver.save(payload(step), step=step, metrics={})
    fingerprint = file._fingerprint

    def failing(opened: Any, size: int, passed: file.Passed) -> Any:
        if "200" in os.path.realpath(opened.name):
            raise OSError(errno.EIO, os.strerror(errno.EIO))
        return fingerprint(opened, size, passed)

    monkeypatch.setattr(file, "_fingerprint", failing)
    told: list[str] = []
    found = load(tmp_path, notify=told.append, look=look)
    assert found.payload["progress"]["step"] == 100
    reason = "it is damaged: it cannot be read (Input/output error)"
    assert told == [
        f"checkpoint step-00000200.pt cannot be used ({reason}); step-00000100.pt is taken instead"
    ]
    with pytest.raises(CheckpointError, match=r"cannot be read \(Input/output error\)"):
        load(tmp_path / "checkpoints/latest.pt", notify=silent, look=look)
