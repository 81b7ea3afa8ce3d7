"""The checkpoint files of a run: at every moment the newest intact one is found."""

from __future__ import annotations

import errno
import itertools
import json
import math
import multiprocessing
import os
import random
import shutil
import signal
import subprocess
import time
from collections.abc import Iterator
from contextlib import nullcontext
from multiprocessing.connection import Connection
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st

from ampctl.checkpoint import disk, file, lock, sharded
from ampctl.checkpoint.abandoned import abandon_after
from ampctl.checkpoint.index import Entry, read_index, write_index
from ampctl.checkpoint.retention import ranked, retained
from ampctl.checkpoint.store import NoCheckpointError, Store, load
from ampctl.checkpoint.verify import verify
from ampctl.errors import CheckpointError, MachineError, UsageError
from ampctl.monitor import is_better
from ampctl.state_dict.copies import nonfinite, snapshot

KILLS = 15


def payload(step: int, serial: int = 0, size: int = 64, weight: float = 1.0) -> dict[str, Any]:
    return {
        "model": {"weight": torch.full((size,), weight), "bn.running_mean": torch.zeros(3)},
        "optimizer": {"state": {}, "param_groups": []},
        "scheduler": None,
        "ema": None,
        "scaler": {"scale": 1024.0},
        "progress": {"step": step, "serial": serial},
        "rng": [],
        "data": None,
        "recipe": "name: digits\n",
        "dtype": "float32",
        "world_size": 1,
        "environment": {},
    }


def store(run_dir: Path, **changes: Any) -> Store:
    settings = {
        "keep_last": 3,
        "keep_best": 1,
        "monitor": "eval/loss",
        "mode": "min",
        "asynchronous": False,
    }
    return Store(run_dir, **{**settings, **changes})


def run_of(run_dir: Path, steps: list[int], **changes: Any) -> Path:
    """Save these steps, each with a lower loss, and return the folder of the files."""
    saver = store(run_dir, **changes)
    for step in steps:
        saver.save(payload(step), step=step, metrics={"eval/loss": 1 / step})
    saver.close()
    return run_dir / "checkpoints"


def silent(message: str) -> None:
    pytest.fail(f"nothing should be said, but: {message}")


def names(folder: Path) -> set[str]:
    return {path.name for path in folder.iterdir()}


def test_a_save_leaves_the_file_the_index_and_the_links(tmp_path):
    folder = run_of(tmp_path, [100, 200])
    assert names(folder) == {
        "step-00000100.pt",
        "step-00000200.pt",
        "index.json",
        "latest.pt",
        "best.pt",
    }
    assert (
        os.readlink(folder / "latest.pt") == os.readlink(folder / "best.pt") == "step-00000200.pt"
    )
    row = json.loads((folder / "index.json").read_text())[1]
    path = folder / "step-00000200.pt"
    assert row.pop("time") > 0
    assert row == {
        "file": path.name,
        "step": 200,
        "size": path.stat().st_size,
        "sha256": file.digest(path),
        "metrics": {"eval/loss": 0.005},
        "finite": True,
    }


def test_load_takes_a_folder_a_file_a_link_and_a_lone_copy(tmp_path):
    folder = run_of(tmp_path / "run", [100, 200])
    newest = load(tmp_path / "run", notify=silent)
    assert newest.payload["progress"]["step"] == 200
    assert newest.entry is not None
    assert (newest.entry.step, newest.run_dir) == (200, tmp_path / "run")
    assert load(folder, notify=silent).path == newest.path
    assert load(folder / "latest.pt", notify=silent).path == newest.path
    assert load(folder / "latest.pt", notify=silent).entry == newest.entry
    assert load(folder / "step-00000100.pt", notify=silent).payload["progress"]["step"] == 100
    lone = tmp_path / "mine.pt"
    lone.write_bytes(newest.path.read_bytes())
    loaded = load(lone, notify=silent)
    assert (loaded.payload["progress"]["step"], loaded.run_dir, loaded.entry) == (200, None, None)


def test_a_run_without_a_checkpoint_is_told_from_one_without_an_intact_one(tmp_path):
    with pytest.raises(NoCheckpointError, match="holds no checkpoint"):
        load(tmp_path, notify=silent)
    with pytest.raises(CheckpointError, match="there is no such file"):
        load(tmp_path / "gone", notify=silent)
    folder = run_of(tmp_path, [100, 200])
    for step in (100, 200):
        os.truncate(folder / f"step-00000{step}.pt", 500)
    with pytest.raises(CheckpointError) as caught:
        load(tmp_path, notify=silent)
    assert not isinstance(caught.value, NoCheckpointError)
    for step in (100, 200):
        assert f"step-00000{step}.pt: it is damaged" in str(caught.value)


@pytest.mark.parametrize("share", [0, 0.02, 0.3, 0.5, 0.9, 0.999, "flip"])
def test_ck1_a_damaged_newest_file_is_passed_over_loudly(tmp_path, share):
    folder = run_of(tmp_path, [100, 200, 300])
    path = folder / "step-00000300.pt"
    content = bytearray(path.read_bytes())
    if share == "flip":
        content[len(content) // 2] ^= 1
    else:
        del content[int(len(content) * share) :]
    path.write_bytes(content)
    said: list[str] = []
    assert load(tmp_path, notify=said.append).payload["progress"]["step"] == 200
    assert len(said) == 1
    assert said[0].startswith("checkpoint step-00000300.pt cannot be used (it is damaged")
    assert said[0].endswith("; step-00000200.pt is taken instead")
    with pytest.raises(CheckpointError, match="cannot be used: it is damaged"):
        load(folder / "latest.pt", notify=silent)


def test_a_newest_file_that_someone_removed_is_passed_over_loudly(tmp_path):
    folder = run_of(tmp_path, [100, 200, 300])
    (folder / "step-00000300.pt").unlink()
    said: list[str] = []
    assert load(tmp_path, notify=said.append).passed_over == ("step-00000300.pt",)
    reason = "cannot be used (someone has removed it); step-00000200.pt is taken instead"
    assert said == [f"checkpoint step-00000300.pt {reason}"]


def save_until_killed(run_dir: Path, first: int, serial: int, asynchronous: bool, end: Connection):
    saver = store(run_dir, keep_last=2, asynchronous=asynchronous)
    for step, number in zip(itertools.count(first), itertools.count(serial)):
        saver.save(payload(step, number), step=step, metrics={"eval/loss": random.random()})
        for _ in saver.finished():
            end.send(number - asynchronous)


def test_ck2_a_kill_at_any_moment_leaves_the_newest_file_that_was_reported(tmp_path):
    """The saver is killed again and again; each time it starts a little back in the run."""
    processes = multiprocessing.get_context("fork")  # a fresh interpreter would import torch first
    moment = random.Random(0)
    first, serial = 10, 0
    for turn in range(KILLS):
        receiver, sender = processes.Pipe(duplex=False)
        saver = processes.Process(
            target=save_until_killed, args=(tmp_path, first, serial, turn % 2 == 1, sender)
        )
        saver.start()
        sender.close()
        reported = receiver.recv()
        time.sleep(moment.random() * 0.05)
        os.kill(saver.pid, signal.SIGKILL)
        saver.join()
        try:
            while True:
                reported = receiver.recv()
        except (EOFError, OSError):
            receiver.close()
        loaded = load(tmp_path, notify=silent)
        progress = loaded.payload["progress"]
        assert progress["serial"] >= reported
        assert loaded.entry is not None
        assert loaded.entry.step == progress["step"]
        for link in ("latest.pt", "best.pt"):
            load(tmp_path / "checkpoints" / link, notify=silent)
        first, serial = max(progress["step"] - 2, 1), progress["serial"] + 100
    store(tmp_path)
    assert not list((tmp_path / "checkpoints").glob(".*"))


class Killed(BaseException):
    """Stands for a kill: nothing that comes after it changes the disk."""


DISK_CALLS = [
    (os, "replace"),
    (os, "fsync"),
    (os, "symlink"),
    (os, "unlink"),
    (Path, "unlink"),
    (Path, "open"),
]


def kill_after(calls: int, patched: pytest.MonkeyPatch) -> None:
    """Let so many calls that change the disk pass, and none after them."""
    left = itertools.count(calls, -1)

    def counted(original: Any) -> Any:
        def call(*args: Any, **kwargs: Any) -> Any:
            if next(left) <= 0:
                raise Killed
            return original(*args, **kwargs)

        return call

    for owner, name in DISK_CALLS:
        patched.setattr(owner, name, counted(getattr(owner, name)))


@pytest.mark.parametrize("name_held", ["an older save", "an orphan of retention", "nothing"])
@pytest.mark.parametrize("keep_last", [1, 2])
def test_ck2_a_kill_before_any_call_that_changes_the_disk(
    tmp_path, monkeypatch, keep_last, name_held
):
    """One save, tried with a kill at each of its calls; its name may be taken already."""
    step = 200 if name_held == "an older save" else 300
    for calls in itertools.count():
        run_dir = tmp_path / str(calls)
        folder = run_of(run_dir, [100, 200], keep_last=keep_last)
        if name_held == "an orphan of retention":
            (folder / "step-00000300.pt").write_bytes((folder / "step-00000200.pt").read_bytes())
        saver = store(run_dir, keep_last=keep_last, mode="max", monitor="x")
        with monkeypatch.context() as patched:
            kill_after(calls, patched)
            try:
                saver.save(payload(step, serial=1), step=step, metrics={"x": 1.0})
                killed = False
            except Killed:
                killed = True
        loaded = load(run_dir, notify=silent)
        progress = loaded.payload["progress"]
        is_new = progress["serial"] == 1
        assert progress["step"] == (step if is_new else 200)
        assert is_new or killed
        # The index tells of the content that is there, not of the one that was to come.
        assert loaded.entry is not None
        assert ("x" in loaded.entry.metrics) == is_new
        if not killed:
            break
    assert calls > 10


@pytest.mark.parametrize("abandoned_before", [False, True])
def test_ck2_a_kill_while_a_run_goes_back_leaves_it_at_one_of_its_checkpoints(
    tmp_path, monkeypatch, abandoned_before
):
    names_aside = ["abandoned-step-00000300.pt", "abandoned-step-00000400.pt"]
    for calls in itertools.count():
        run_dir = tmp_path / str(calls)
        folder = run_of(run_dir, [100, 200, 300, 400], keep_last=9)
        if abandoned_before:
            (folder / names_aside[1]).write_bytes(b"of an earlier way")
        entry = read_index(run_dir, silent)[1]
        with monkeypatch.context() as patched:
            kill_after(calls, patched)
            try:
                abandon_after(run_dir, entry)
                killed = False
            except Killed:
                killed = True
        assert load(run_dir, notify=silent).payload["progress"]["step"] in (200, 300, 400)
        load(folder / "latest.pt", notify=silent)
        facts = verify(run_dir)  # which finds this test's files too small to be resumed
        said = [*facts["problems"], *facts["notes"]]
        assert not [text for text in said if "there is none" in text or "does not tell" in text]
        assert not [text for text in facts["problems"] if "index.json" in text]
        abandon_after(run_dir, entry)
        store(run_dir, keep_last=9).tidy(entry)
        assert load(run_dir, notify=silent).payload["progress"]["step"] == 200
        assert sorted(path.name for path in folder.glob("abandoned-*")) == names_aside
        assert load(folder / names_aside[1], notify=silent)
        for link in ("latest.pt", "best.pt"):
            assert os.readlink(folder / link) == "step-00000200.pt"
        assert verify(run_dir)["notes"] == []
        if not killed:
            break
    assert calls > 5


def test_an_index_that_was_lost_is_there_again_before_a_run_goes_on(tmp_path):
    folder = run_of(tmp_path, [100, 200])
    (folder / "index.json").unlink()
    newest = read_index(tmp_path, lambda text: None)[-1]
    assert abandon_after(tmp_path, newest) == []
    assert read_index(tmp_path, silent)[-1] == newest


def test_ck2_a_folder_that_is_in_the_way_leaves_the_one_being_written_alone(tmp_path):
    path = tmp_path / "step-00000100.dist"
    for folder in (path, disk.temporary(path)):
        folder.mkdir()
        (folder / "state.pt").touch()
    sharded.remove(path)
    assert names(tmp_path) == {disk.temporary(path).name}


def test_ck2_stale_temporary_files_are_removed_at_the_start(tmp_path):
    folder = run_of(tmp_path, [100])
    (folder / ".step-00000200.pt.12345.tmp").write_bytes(b"half")
    store(tmp_path)
    assert not list(folder.glob(".*"))


def test_going_back_in_a_run_the_last_save_is_the_newest(tmp_path):
    run_of(tmp_path, [100, 200, 300])
    folder = run_of(tmp_path, [150])
    assert load(tmp_path, notify=silent).payload["progress"]["step"] == 150
    assert os.readlink(folder / "latest.pt") == "step-00000150.pt"
    saver = store(tmp_path)
    saver.save(payload(200, serial=7), step=200, metrics={})
    loaded = load(tmp_path, notify=silent)
    assert loaded.payload["progress"] == {"step": 200, "serial": 7}
    assert [entry.step for entry in read_index(tmp_path, silent)].count(200) == 1


def test_a_step_file_that_the_index_does_not_know_is_ignored(tmp_path):
    folder = run_of(tmp_path, [100, 200])
    (folder / "step-00000900.pt").write_bytes((folder / "step-00000100.pt").read_bytes())
    assert load(tmp_path, notify=silent).payload["progress"]["step"] == 200


@pytest.mark.parametrize("own", [{"run_id": "ours"}, {}])
def test_a_file_that_says_of_no_run_is_told_where_the_index_is_lost(tmp_path, own):
    saver = store(tmp_path)
    saver.save({**payload(100), "environment": own}, step=100, metrics={})
    (tmp_path / "environment.json").write_text('{"run_id": "ours"}')
    (tmp_path / "checkpoints" / "index.json").unlink()
    said: list[str] = []
    assert [entry.step for entry in read_index(tmp_path, said.append)] == [100]
    told = [line for line in said if "was saved by an older ampctl" in line]
    assert len(told) == (0 if own else 1)


@pytest.mark.parametrize(
    "content",
    [
        None,
        b"",
        b"[",
        b"{}",
        b"[]",
        b"[1]",
        b"\xff\xfe",
        b"[" * 100_000,
        b'[{"file": "../../x.pt"}]',
    ],
)
def test_a_lost_index_is_made_again_from_the_files(tmp_path, content):
    folder = run_of(tmp_path, [100, 200, 300], mode="max", keep_last=2)
    before = read_index(tmp_path, silent)
    assert [entry.step for entry in before] == [100, 200, 300]
    if content is None:
        (folder / "index.json").unlink()
    else:
        (folder / "index.json").write_bytes(content)
    os.truncate(folder / "step-00000200.pt", 700)
    said: list[str] = []
    loaded = load(tmp_path, notify=said.append)
    assert loaded.payload["progress"]["step"] == 300
    assert "index.json is missing or damaged" in said[0]
    assert "step-00000200.pt cannot be used (it is damaged" in said[1]
    saver = store(tmp_path, mode="max", keep_last=1, notify=said.append)
    saver.save(payload(400), step=400, metrics={"eval/loss": 0.0})
    assert [e.step for e in read_index(tmp_path, silent)] == [100, 400]  # the best is known still
    assert read_index(tmp_path, silent)[0].metrics == before[0].metrics


def test_an_index_cannot_name_files_outside_its_folder(tmp_path):
    folder = run_of(tmp_path, [100], keep_last=1)
    victim = tmp_path / "step-00000050.pt"
    victim.write_bytes(b"precious")
    rows = json.loads((folder / "index.json").read_text())
    rows.insert(0, {**rows[0], "file": "../step-00000050.pt"})
    (folder / "index.json").write_text(json.dumps(rows))
    saver = store(tmp_path, keep_last=1, notify=lambda message: None)
    saver.save(payload(200), step=200, metrics={})
    assert victim.read_bytes() == b"precious"


def test_nf6_a_nonfinite_file_is_set_aside_and_refused(tmp_path):
    folder = run_of(tmp_path, [100], keep_last=1)
    saver = store(tmp_path, keep_last=1)
    for step in (200, 300):
        bad = payload(step)
        bad["model"]["bn.running_mean"][1] = math.nan
        saver.save(bad, step=step, metrics={"eval/loss": 0.0}, nonfinite=nonfinite(bad))
    assert names(folder) == {
        "step-00000100.pt",
        "step-00000300.nonfinite.pt",
        "index.json",
        "latest.pt",
        "best.pt",
    }
    assert (
        os.readlink(folder / "latest.pt") == os.readlink(folder / "best.pt") == "step-00000100.pt"
    )
    assert saver.wait() == folder / "step-00000100.pt"
    assert load(tmp_path, notify=silent).payload["progress"]["step"] == 100
    bad_file = folder / "step-00000300.nonfinite.pt"
    with pytest.raises(CheckpointError, match=r"model\.bn\.running_mean"):
        load(bad_file, notify=silent)
    renamed = tmp_path / "x.nonfinite.pt"
    renamed.write_bytes(bad_file.read_bytes())
    with pytest.raises(CheckpointError, match=r"model\.bn\.running_mean"):
        load(renamed, notify=silent)


def test_nf6_a_run_of_nonfinite_files_alone_cannot_be_gone_on_with(tmp_path):
    saver = store(tmp_path)
    saver.save(payload(5), step=5, metrics={}, nonfinite=["model.weight"])
    assert saver.wait() is None
    with pytest.raises(CheckpointError, match=r"step-00000005\.nonfinite\.pt: it holds"):
        load(tmp_path, notify=silent)


def test_nf8_nan_is_never_best(tmp_path):
    saver = store(tmp_path, keep_last=1)
    for step, loss in enumerate([math.nan, 0.5, math.nan, 0.4, math.inf, -math.inf], 1):
        saver.save(payload(step), step=step, metrics={"eval/loss": loss})
    folder = tmp_path / "checkpoints"
    assert os.readlink(folder / "best.pt") == "step-00000004.pt"
    assert [entry.step for entry in read_index(tmp_path, silent)] == [4, 6]
    json.loads((folder / "index.json").read_text(), parse_constant=pytest.fail)
    assert read_index(tmp_path, silent)[1].metrics == {"eval/loss": -math.inf}


def test_rs15_best_stays_when_a_resumed_run_gets_worse(tmp_path):
    folder = run_of(tmp_path, [100], keep_last=1)
    before = (folder / "best.pt").read_bytes()
    saver = store(tmp_path, keep_last=1)
    saver.save(payload(200), step=200, metrics={"eval/loss": 0.5})
    assert (folder / "best.pt").read_bytes() == before


def test_without_symlinks_hard_links_or_copies_do(tmp_path, monkeypatch):
    def refuse(*args):
        raise OSError(1, "Operation not permitted")

    monkeypatch.setattr(os, "symlink", refuse)
    for name in ("hard links", "copies"):
        if name == "copies":
            monkeypatch.setattr(os, "link", refuse)
        folder = run_of(tmp_path / name, [100, 200])
        run_of(tmp_path / name, [200])  # the name is used anew
        assert not (folder / "latest.pt").is_symlink()
        loaded = load(folder / "latest.pt", notify=silent)
        assert loaded.payload["progress"]["step"] == 200
        assert not list(folder.glob(".*"))


entries = st.lists(
    st.builds(
        lambda loss, finite: (loss, finite),
        st.one_of(st.none(), st.sampled_from([0.0, 1.0, 2.0]), st.floats()),
        st.booleans(),
    ),
    max_size=12,
).map(
    lambda rows: [
        Entry(
            file=f"step-{i:08d}.pt",
            step=i,
            size=1,
            sha256="",
            metrics={} if loss is None else {"m": loss},
            finite=finite,
            time=0.0,
        )
        for i, (loss, finite) in enumerate(rows)
    ]
)


@settings(deadline=None, max_examples=300)
@given(
    entries=entries,
    keep_last=st.integers(1, 4),
    keep_best=st.integers(0, 3),
    mode=st.sampled_from(["min", "max"]),
)
def test_retention_keeps_the_newest_the_best_and_nothing_else(entries, keep_last, keep_best, mode):
    rules = {"keep_last": keep_last, "keep_best": keep_best, "monitor": "m", "mode": mode}
    kept = retained(entries, **rules)
    finite = [e for e in entries if e.finite]
    best: list[Entry] = []
    for _ in range(keep_best):
        winner = None
        for e in finite:
            if "m" in e.metrics and e not in best:
                so_far = winner.metrics["m"] if winner else None
                winner = e if is_better(e.metrics["m"], so_far, mode) else winner
        best += [winner] if winner else []
    newest_bad = [e for e in entries if not e.finite][-1:]
    wanted = [*finite[-keep_last:], *best, *newest_bad]
    assert kept == [e for e in entries if e in wanted]
    assert ranked(entries, "m", mode)[: len(best)] == best
    assert retained(kept, **rules) == kept


@settings(deadline=None, max_examples=20)
@given(
    losses=st.lists(st.sampled_from([None, math.nan, 0.1, 0.2, 0.3]), min_size=1, max_size=6),
    keep_last=st.integers(1, 3),
    keep_best=st.integers(0, 2),
)
def test_the_folder_holds_what_retention_keeps(tmp_path_factory, losses, keep_last, keep_best):
    run_dir = tmp_path_factory.mktemp("run")
    saver = store(run_dir, keep_last=keep_last, keep_best=keep_best)
    for step, loss in enumerate(losses):
        metrics = {} if loss is None else {"eval/loss": loss}
        saver.save(payload(step), step=step, metrics=metrics)
    index = read_index(run_dir, silent)
    files = {name for name in names(run_dir / "checkpoints") if name.startswith("step-")}
    assert files == {entry.file for entry in index}
    best = ranked(index, "eval/loss", "min")
    assert (run_dir / "checkpoints/best.pt").exists() == bool(best)
    if best:
        assert os.readlink(run_dir / "checkpoints/best.pt") == best[0].file
    assert os.readlink(run_dir / "checkpoints/latest.pt") == f"step-{len(losses) - 1:08d}.pt"


@pytest.fixture
def small_disk(tmp_path: Path) -> Iterator[Path]:
    folder = tmp_path / "disk"
    folder.mkdir()
    mounted = subprocess.run(
        ["mount", "-t", "tmpfs", "-o", "size=256k", "tmpfs", folder], capture_output=True, text=True
    )
    if mounted.returncode:
        pytest.skip(f"this user may not mount a tmpfs: {mounted.stderr.strip()}")
    yield folder
    subprocess.run(["umount", folder], check=True)


def save_and_wait(saver: Store, state: dict[str, Any], step: int) -> None:
    saver.save(state, step=step, metrics={})
    saver.wait()


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_full_disk_leaves_the_files_before_and_says_how_much_is_missing(
    small_disk, tmp_path, asynchronous
):
    saver = store(small_disk, asynchronous=asynchronous)
    large = 25_000  # 100 kB of float32, of which two files fit
    for step in (100, 200):
        saver.save(payload(step, size=large), step=step, metrics={})
    needed = file.write(tmp_path / "x", {**payload(300, size=large), "metrics": {}}).size
    with pytest.raises(MachineError) as caught:
        save_and_wait(saver, payload(300, size=large), 300)
    free = os.statvfs(small_disk).f_bavail * os.statvfs(small_disk).f_frsize
    assert f"{needed:,} bytes are needed, {free:,} bytes are free" in str(caught.value)
    assert not list((small_disk / "checkpoints").glob(".*"))
    assert load(small_disk, notify=silent).payload["progress"]["step"] == 200
    (small_disk / "checkpoints/step-00000100.pt").unlink()
    saver.save(payload(300, size=large), step=300, metrics={})
    saver.close()
    assert load(small_disk, notify=silent).payload["progress"]["step"] == 300


@pytest.mark.parametrize(
    ("number", "words"),
    [
        (errno.EDQUOT, "the quota of this user or folder is used up"),
        (errno.EFBIG, r"bytes are needed, more than one file may have here .*ulimit -f"),
        (errno.EIO, "the disk or its connection fails"),
        (errno.ENOENT, "its folder is gone"),
    ],
)
def test_a_fault_of_the_disk_has_words_of_its_own(tmp_path, monkeypatch, number, words):
    saver = store(tmp_path)
    saver.save(payload(100), step=100, metrics={})
    with monkeypatch.context() as patched:

        def fail(descriptor: int) -> None:
            raise OSError(number, os.strerror(number))

        patched.setattr(os, "fsync", fail)
        with pytest.raises(MachineError, match=words):
            saver.save(payload(200), step=200, metrics={})
        with pytest.raises(MachineError) as tidying:
            saver.tidy(*read_index(tmp_path))
        patched.setattr(Path, "mkdir", lambda path, **_: fail(0))
        with pytest.raises(MachineError) as making:
            saver.save(payload(200), step=200, metrics={})
        for raised in (tidying, making):  # before it is known how many
            assert "bytes are needed" not in f"{raised.value}"
    assert load(tmp_path, notify=silent).payload["progress"]["step"] == 100
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_folder_of_checkpoints_that_someone_removed_is_made_anew(tmp_path):
    folder = run_of(tmp_path, [100])
    saver = store(tmp_path)
    shutil.rmtree(folder)
    saver.save(payload(200), step=200, metrics={})
    assert load(tmp_path, notify=silent).payload["progress"]["step"] == 200
    shutil.rmtree(tmp_path)
    with pytest.raises(MachineError, match="its folder is gone"):
        saver.save(payload(300), step=300, metrics={})


def test_a_folder_that_cannot_be_made_is_told_as_a_fault_of_the_disk(tmp_path):
    (tmp_path / "run").write_text("")
    with pytest.raises(MachineError, match="checkpoints"):
        store(tmp_path / "run")


def test_a_save_that_fails_where_its_folder_is_there_is_not_tried_again(tmp_path, monkeypatch):
    saver, tries = store(tmp_path), []

    def failing(path: Path, state: Any) -> file.Written:
        tries.append(path)
        raise MachineError("the disk is full")

    monkeypatch.setattr(file, "write", failing)
    with pytest.raises(MachineError, match="full"):
        saver.save(payload(200), step=200, metrics={})
    assert len(tries) == 1


@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EIO])
def test_a_full_disk_has_room_for_the_index_once_old_files_are_gone(tmp_path, monkeypatch, number):
    saver = store(tmp_path, keep_last=1, keep_best=0)
    saver.save(payload(100), step=100, metrics={})
    write, rows = write_index, []

    def full(folder: Path, entries: list[Entry]) -> None:
        rows.append([entry.step for entry in entries])
        if rows[-1] == [200] and any(folder.glob(".*step-00000100*")):
            raise OSError(number, os.strerror(number))
        write(folder, entries)

    monkeypatch.setattr("ampctl.checkpoint.store.write_index", full)
    fails = pytest.raises(MachineError, match="disk") if number == errno.EIO else nullcontext()
    with fails:
        saver.save(payload(200), step=200, metrics={})
    assert rows == [[100, 200], [200], [200]][: 2 if number == errno.EIO else 3]
    assert load(tmp_path, notify=silent).payload["progress"]["step"] == 200
    assert not list((tmp_path / "checkpoints").glob(".*"))


def test_a_step_that_is_saved_anew_has_one_row_in_the_index(tmp_path):
    folder = run_of(tmp_path, [100, 200, 200])
    rows = json.loads((folder / "index.json").read_text())
    assert [row["step"] for row in rows] == [100, 200]


def test_a_run_that_is_never_still_is_told_after_some_tries(tmp_path, monkeypatch):
    saver = store(tmp_path, keep_last=1, keep_best=0)
    read, steps = sharded.read, itertools.count(100)

    def save() -> None:
        step = next(steps)
        assert step < 200, "it is looked for without end"
        saver.save(payload(step), step=step, metrics={})

    save()
    save()  # the first of a run is read back

    def late(*args: Any, **kwargs: Any) -> Any:
        save()
        return read(*args, **kwargs)

    monkeypatch.setattr(sharded, "read", late)
    with pytest.raises(CheckpointError, match="can be used"):
        load(tmp_path, notify=silent)


def test_a_folder_that_is_removed_while_a_file_is_written_is_made_anew(tmp_path, monkeypatch):
    folder = run_of(tmp_path, [100])
    saver = store(tmp_path)
    write, written = file.write, []

    def disturbed(path: Path, state: Any) -> file.Written:
        written.append(path)
        done = write(path, state)
        if len(written) == 1:
            shutil.rmtree(folder)
        return done

    monkeypatch.setattr(file, "write", disturbed)
    saver.save(payload(200), step=200, metrics={})
    assert len(written) == 2
    assert load(tmp_path, notify=silent).payload["progress"]["step"] == 200
    (saved,) = saver.finished()
    assert saved.gone == ("step-00000100.pt",)
    assert not list(folder.glob(".*"))


@pytest.mark.parametrize("asynchronous", [False, True])
def test_a_file_holds_the_state_of_the_moment_of_save(tmp_path, asynchronous):
    saver = store(tmp_path, asynchronous=asynchronous, keep_last=9)
    state = payload(0, size=200_000)
    for step in range(1, 4):
        state["model"]["weight"].fill_(step)
        saver.save(snapshot(state), step=step, metrics={})
        state["model"]["weight"].fill_(math.nan)  # training goes on at once
    assert saver.wait() == tmp_path / "checkpoints/step-00000003.pt"
    for step in range(1, 4):
        loaded = load(tmp_path / f"checkpoints/step-{step:08d}.pt", notify=silent)
        assert torch.equal(loaded.payload["model"]["weight"], torch.full((200_000,), float(step)))
    saved = saver.finished()
    assert [(s.step, s.path.name) for s in saved] == [(i, f"step-{i:08d}.pt") for i in (1, 2, 3)]
    assert saved[0].size == saved[0].path.stat().st_size
    assert saver.finished() == []
    saver.close()


@pytest.mark.parametrize("surfaces", ["save", "wait", "close"])
def test_an_error_of_the_writing_thread_surfaces(tmp_path, surfaces, monkeypatch):
    saver = store(tmp_path, asynchronous=True)
    with monkeypatch.context() as patched:
        patched.setattr(
            disk, "publish", lambda *args: (_ for _ in ()).throw(OSError(5, "I/O error"))
        )
        saver.save(payload(1), step=1, metrics={})
        assert saver.background_save._running is not None
        saver.background_save._running.exception()
    act = {
        "save": lambda: saver.save(payload(2), step=2, metrics={}),
        "wait": saver.wait,
        "close": saver.close,
    }
    with pytest.raises(MachineError, match="I/O error"):
        act[surfaces]()
    if surfaces != "close":
        saver.save(payload(3), step=3, metrics={})
        assert saver.wait() == tmp_path / "checkpoints/step-00000003.pt"
        saver.close()


def test_a_file_that_could_not_be_resumed_is_seen_at_the_first_save(tmp_path):
    incomplete = payload(1)
    del incomplete["scaler"]
    with pytest.raises(CheckpointError, match="lacks `scaler`"):
        store(tmp_path).save(incomplete, step=1, metrics={})


def test_ck5_a_second_run_in_a_folder_is_refused_and_told_of_the_first(tmp_path):
    run_dir = tmp_path / "runs" / "digits"
    with (
        lock.hold(run_dir),
        pytest.raises(UsageError, match=rf"is in use: process {os.getpid()} on .+ \(since 20"),
        lock.hold(run_dir),
    ):
        pytest.fail("held twice")
    with lock.hold(run_dir):
        pass


def test_ck5_the_lock_ends_with_its_holder_although_a_forked_worker_lives_on(tmp_path):
    processes = multiprocessing.get_context("fork")
    receiver, sender = processes.Pipe(duplex=False)

    def hold_with_a_worker() -> None:
        with lock.hold(tmp_path):
            worker = os.fork()
            if worker == 0:
                time.sleep(60)
                os._exit(0)
            sender.send(worker)
            time.sleep(60)

    holder = processes.Process(target=hold_with_a_worker)
    holder.start()
    worker = receiver.recv()
    try:
        with pytest.raises(UsageError, match=f"process {holder.pid} "), lock.hold(tmp_path):
            pytest.fail("held twice")
        os.kill(holder.pid, signal.SIGKILL)
        holder.join()
        os.kill(worker, 0)  # it is there still
        with lock.hold(tmp_path):
            pass
    finally:
        os.kill(worker, signal.SIGKILL)


def test_ck5_a_lock_that_its_holder_removed_on_leaving_is_none(tmp_path, monkeypatch):
    path, acquire, left = tmp_path / lock.LOCK_FILE, lock._acquire, []

    def late(file: int, run_dir: Path) -> None:
        if not left:  # opened before it was removed, locked after
            left.append(path.unlink())
        acquire(file, run_dir)

    monkeypatch.setattr(lock, "_acquire", late)
    with lock.hold(tmp_path), pytest.raises(UsageError, match="is in use"), lock.hold(tmp_path):
        pytest.fail("held twice")


def test_a_lock_where_a_file_stands_is_a_usage_error(tmp_path):
    (tmp_path / "file").write_text("")
    with pytest.raises(UsageError, match="is a file"), lock.hold(tmp_path / "file"):
        pass
