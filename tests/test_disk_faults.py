"""Faults of the disk, for real and in the midst of a run, through the command line.

A run goes on, or stops with exit 5 in words; what `latest` leads to is intact throughout, and once
the fault is mended the run ends as the one that nothing happened to.
"""

from __future__ import annotations

import contextlib
import logging
import os
import re
import resource
import shutil
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import DEADLINE_S, read_events, starting
from test_cli import RECIPE, TESTS, ampctl
from test_resume_exact import assert_same
from torch import Tensor, nn

from ampctl.checkpoint.store import load
from ampctl.tasks import Classification
from ampctl.track.console import Console

OPTIONS = (
    *("checkpoint.every_steps=1", "log.every_steps=1", "train.max_steps=6"),
    *("task._target_=test_disk_faults.Disturbed", "model.width=24"),
)
NOW, LATER = "checkpoint.asynchronous=false", "checkpoint.asynchronous=true"
AT = 4
PAGE = 4096

_whole: dict[str, Any] = {}


class Disturbed(Classification):
    """Lets something happen while the step ``AT`` is computed, once."""

    happens: Callable[[], None] | None = None
    batches = 0

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        Disturbed.batches += model.training
        if Disturbed.batches == AT and Disturbed.happens is not None:
            happens, Disturbed.happens = Disturbed.happens, None
            happens()
        return super().loss(model, batch)


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    (folder / "recipe.yaml").write_text(RECIPE)


@pytest.fixture
def loop(folder: Path) -> Iterator[Path]:
    """A file system of its own, ext4 in a file, mounted as ``loop``; `remount` mounts it anew."""
    place = folder / "loop"
    place.mkdir()
    with (folder / "image").open("wb") as image:
        image.truncate(2**23)
    with contextlib.suppress(FileNotFoundError):
        subprocess.run(["mkfs.ext4", "-q", folder / "image"], capture_output=True)
    if subprocess.run(["mount", "-o", "loop", folder / "image", place]).returncode:
        pytest.skip("this user may not mount a file, or there is no mkfs.ext4")
    yield place
    subprocess.run(["umount", place], check=True)


def mount_options(*argv: Any) -> None:
    subprocess.run(["mount", *argv], check=True)


def remount(loop: Path) -> None:
    subprocess.run(["umount", loop], check=True)
    mount_options("-o", "loop", loop.parent / "image", loop)


def run(run_dir: Path, happens: Callable[[], None] | None, *options: str, code: int = 0) -> Any:
    """Train, with something happening once step ``AT - 1`` is saved."""
    latest = run_dir / "checkpoints/latest.pt"

    def settled() -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not latest.is_symlink() or os.readlink(latest) != f"step-{AT - 1:08d}.pt":
            assert time.monotonic() < deadline
            time.sleep(0.001)
        if happens is not None:
            happens()

    Disturbed.batches = 0
    Disturbed.happens = settled if happens is not None else None
    line = ("train", "recipe.yaml", "--run-dir", f"{run_dir}", "--resume", "auto")
    return ampctl(*line, *OPTIONS, *options, code=code)


def last(run_dir: Path) -> dict[str, Any]:
    return torch.load(run_dir / "checkpoints/latest.pt", weights_only=True)


def undisturbed() -> dict[str, Any]:
    """Return the end of the run that nothing happens to."""
    if not _whole:
        run(Path("whole"), None)
        _whole.update(last(Path("whole")))
    return _whole


def check_end(run_dir: Path) -> None:
    assert_same(last(run_dir), undisturbed())
    assert not list(run_dir.rglob("*.tmp"))
    verified = ampctl("verify", f"{run_dir}").stdout
    assert "no problems" in verified
    assert "note: " not in verified


def check_goes_on(run_dir: Path, step: int = AT - 1) -> None:
    """See that a run whose fault is mended goes on from a step, to the end it would have had."""
    ampctl("verify", f"{run_dir}")
    said = ampctl("resume", f"{run_dir}")
    assert f"going on from step-{step:08d}.pt" in said.stdout
    assert said.stderr == ""
    check_end(run_dir)


# ---------------------------------------------------------------- a disk that turns read-only


def test_a_disk_that_turns_read_only_by_itself_stops_the_run(loop: Path) -> None:
    """As ext4 does after an error of the device, whatever is open for writing."""
    run_dir = loop / "d"
    abort = partial(mount_options, "-o", "remount,abort", loop)
    told = run(run_dir, abort, NOW, "log.every_steps=100", code=5).stderr
    assert f"cannot write {run_dir}/checkpoints/step-00000004.pt: Read-only file system" in told
    assert last(run_dir)["progress"]["step"] == 3
    told = ampctl("resume", f"{run_dir}", code=5).stderr
    assert f"cannot write in {run_dir}: Read-only file system" in told
    remount(loop)
    check_goes_on(run_dir)


@pytest.mark.parametrize(("when", "part"), [(NOW, ""), (LATER, "checkpoints")])
def test_a_folder_that_is_made_read_only_stops_the_run(mount: Any, when: str, part: str) -> None:
    """Mounted over itself, as one with open files cannot be made so otherwise."""
    run_dir = mount("size=10m") / "d"
    place = run_dir / part

    def close() -> None:
        mount_options("--bind", place, place)
        mount_options("-o", "remount,bind,ro", place)

    told = run(run_dir, close, when, code=5).stderr
    assert f"cannot write {run_dir}/checkpoints/step-00000004.pt: Read-only file system" in told
    assert last(run_dir)["progress"]["step"] == 3
    stop = read_events(run_dir)[-1]
    assert (stop["event"], stop["exit_code"]) == ("stop", 5)
    mount_options("-o", "remount,bind,rw", place)
    check_goes_on(run_dir)
    subprocess.run(["umount", place], check=True)


# ---------------------------------------------------------------- no room


@pytest.mark.parametrize(
    ("when", "limit", "words"),
    [
        (
            LATER,
            20_000,
            r"4\.pt: \d\d,\d{3} bytes are needed, more than one file may have here \(File",
        ),
        (NOW, 1000, r"metrics\.jsonl: the metrics cannot be written: File too large"),
    ],
)
def test_a_limit_to_the_size_of_a_file_is_told_as_one(
    folder: Path, when: str, limit: int, words: str
) -> None:
    """The kernel's signal for it, SIGXFSZ, is ignored by the interpreter."""
    usual = resource.getrlimit(resource.RLIMIT_FSIZE)
    limited = partial(resource.setrlimit, resource.RLIMIT_FSIZE, (limit, usual[1]))
    try:
        told = run(folder / "d", limited, when, code=5).stderr
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, usual)
    assert re.search(words, told)
    assert "(`ulimit -f`)" in told
    assert last(folder / "d")["progress"]["step"] == 3
    check_goes_on(folder / "d")


def fill(disk: Path, leave: int) -> None:
    """Write a tmpfs full but for some bytes, of which it gives whole pages."""
    with (disk / "filler").open("wb", buffering=0) as filler:
        with contextlib.suppress(OSError):
            while True:
                filler.write(b"x" * PAGE)
        filler.truncate(filler.tell() - leave)


@pytest.mark.parametrize(("when", "lacking"), [(NOW, "file"), (LATER, "index")])
def test_a_disk_full_at_one_file_of_a_save(mount: Any, when: str, lacking: str) -> None:
    disk = mount("size=1m")
    run_dir = disk / "d"

    def full() -> None:
        size = (run_dir / "checkpoints/step-00000003.pt").stat().st_size
        assert (
            256 < size % PAGE < PAGE - 256
        )  # the next one, of nearly that size, has as many pages
        pages = -(-size // PAGE)
        fill(disk, (pages if lacking == "index" else pages - 1) * PAGE)

    told = run(run_dir, full, when, code=5).stderr
    assert f"no room to write {run_dir}/checkpoints/step-00000004.pt: " in told
    assert re.search(r"4\.pt: \d\d,\d{3} bytes are needed, [0-9,]+ bytes are free \(No space", told)
    assert "the checkpoints before it are intact: make room, then resume. (`ampctl resume" in told
    assert last(run_dir)["progress"]["step"] == 3
    assert not list(run_dir.rglob("*.tmp"))
    (disk / "filler").unlink()
    check_goes_on(run_dir)


@pytest.mark.parametrize(
    ("when", "lacking", "inodes"), [(NOW, "file", 0), (NOW, "index", 1), (LATER, "link", 2)]
)
def test_a_disk_without_inodes_at_one_file_of_a_save(
    mount: Any, when: str, lacking: str, inodes: int
) -> None:
    disk = mount("size=10m,nr_inodes=64")
    run_dir = disk / "d"

    def full() -> None:
        if lacking == "link":  # else the index that is replaced leaves its own to the link
            (run_dir / "checkpoints/index.json").unlink()
        fillers = (disk / f"filler-{number}" for number in range(64))
        with contextlib.suppress(OSError):
            for filler in fillers:
                filler.touch()
        for number in range(inodes):
            (disk / f"filler-{number}").unlink()

    told = run(run_dir, full, when, code=5).stderr
    assert f"no room to write {run_dir}/checkpoints/step-00000004.pt: " in told
    assert "not one more file can be made there (no inodes are left)" in told
    # With all but the link written, that is the step to go on from.
    assert last(run_dir)["progress"]["step"] == 3
    for filler in disk.glob("filler-*"):
        filler.unlink()
    check_goes_on(run_dir, 4 if lacking == "link" else 3)


@pytest.mark.parametrize("when", [NOW, LATER])
def test_a_folder_with_a_quota_is_told_as_one(folder: Path, when: str) -> None:
    if not all(map(shutil.which, ("mkfs.btrfs", "btrfs"))):
        pytest.skip("no btrfs-progs: of the file systems here btrfs alone has quotas for root")
    disk, image = folder / "disk", folder / "image"
    disk.mkdir()
    with image.open("wb") as file:
        file.truncate(2**27)
    subprocess.run(["mkfs.btrfs", "-q", image], check=True)
    if subprocess.run(["mount", "-o", "loop", image, disk]).returncode:
        pytest.skip("this user may not mount a file")
    try:
        for words in (
            *(["subvolume", "create", disk / "d"], ["quota", "enable", disk]),
            ["qgroup", "limit", "200k", disk / "d"],
        ):
            subprocess.run(["btrfs", *words], check=True, capture_output=True)
        told = run(disk / "d", None, "checkpoint.keep_last=9", when, code=5).stderr
        assert re.search(
            r"\d\.pt: \d\d,\d{3} bytes are needed, the quota of this user or folder", told
        )
        assert "(Disk quota exceeded); the checkpoints before it are intact: remove files" in told
        subprocess.run(["btrfs", "qgroup", "limit", "none", disk / "d"], check=True)
        check_goes_on(disk / "d", last(disk / "d")["progress"]["step"])
    finally:
        subprocess.run(["umount", disk], check=True)


def too_small(mount: Any, options: str, larger: str, when: str) -> None:
    """Start a run on a disk that is too small, see it end in words, and again with room."""
    disk = mount(options)
    told = run(disk / "d", None, when, code=5).stderr
    assert "No space left on device" in told
    folder = disk / "d/checkpoints"
    if list(folder.glob("step-*.pt")):
        load(disk / "d", notify=pytest.fail)
    else:
        assert "the checkpoints before it" not in told
    for link in folder.glob("*t.pt"):
        load(link, notify=pytest.fail)
    mount_options("-o", f"remount,{larger}", disk)
    run(disk / "d", None, when)
    check_end(disk / "d")
    shutil.rmtree(disk / "d")


@pytest.mark.parametrize("pages", [1, 3, 11])
def test_a_disk_too_small_for_a_run_ends_it_in_words_at_whatever_file(
    mount: Any, pages: int
) -> None:
    too_small(mount, f"size={pages * PAGE}", "size=10m", NOW)


@pytest.mark.parametrize("inodes", [3, 7, 11])
def test_too_few_inodes_for_a_run_end_it_in_words_at_whatever_file(mount: Any, inodes: int) -> None:
    too_small(mount, f"size=10m,nr_inodes={inodes}", "size=10m,nr_inodes=64", NOW)


@pytest.mark.slow
@pytest.mark.parametrize("when", [NOW, LATER])
def test_a_disk_of_every_small_size_ends_a_run_in_words(mount: Any, when: str) -> None:
    for pages in range(1, 34):
        too_small(mount, f"size={pages * PAGE}", "size=10m", when)
    for inodes in range(2, 17):
        too_small(mount, f"size=10m,nr_inodes={inodes}", "size=10m,nr_inodes=64", when)


# ---------------------------------------------------------------- no room for what is only told


def test_a_log_that_finds_no_room_costs_a_run_nothing(
    mount: Any, capfd: pytest.CaptureFixture[str]
) -> None:
    disk = mount("size=1m")

    def full() -> None:
        fill(disk, 0)
        logging.getLogger("mine").warning("hello %s", "x" * PAGE)
        (disk / "filler").unlink()
        logging.getLogger("mine").warning("hello again")

    told = run(disk / "d", full)
    assert "warning: mine: hello x" in told.stderr
    assert capfd.readouterr().err == ""
    assert "mine: hello again" in (disk / "d/logs/rank-0.log").read_text()
    check_end(disk / "d")


def test_a_run_whose_output_finds_no_room_goes_on(mount: Any, folder: Path) -> None:
    """Both its streams go to files on a disk that is full; it is saved on another."""
    disk = mount("size=64k")
    for part in ("recipe.yaml", TESTS / "own_parts.py"):
        shutil.copy(part, disk)
    fill(disk, 0)
    with starting(disk) as start:
        line = ("train", "recipe.yaml", "--run-dir", f"{folder / 'd'}", "train.max_steps=3")
        ended = start(*line).wait()
        assert (ended.code, ended.out, ended.err) == (0, "", "")
        ended = start(*line).wait()  # a run is there, and even that cannot be said
        assert (ended.code, ended.out, ended.err) == (2, "", "")
    assert read_events(folder / "d")[-1]["reason"] == "complete"


def test_an_output_that_fails_is_told_once_on_the_other_stream(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    with open("/dev/full", "w") as full:
        monkeypatch.setattr(sys, "stdout", full)
        console = Console()
        console.note("one")
        console.note("two")
    told = "warning: nothing more is told here (No space left on device), and the run goes on: "
    assert capsys.readouterr().err == f"{told}metrics.jsonl has it all\n"


def test_a_command_whose_output_fails_ends_with_5() -> None:
    with open("/dev/full", "w") as full:
        command = [sys.executable, "-m", "ampctl", "schema"]
        ended = subprocess.run(command, stdout=full, stderr=subprocess.PIPE, text=True)
    told = "error: cannot write the output: No space left on device\n"
    assert (ended.returncode, ended.stderr) == (5, told)


# ---------------------------------------------------------------- files that someone removes


def removed(checkpoints: Path, *patterns: str) -> Callable[[], None]:
    def remove() -> None:
        for path in [path for pattern in patterns for path in checkpoints.glob(pattern)]:
            path.unlink()

    return remove


@pytest.mark.parametrize(
    ("when", "patterns", "told"),
    [
        (NOW, ["step-00000003.pt"], "step-00000003.pt"),  # the newest, and the best
        (LATER, ["*"], "step-00000001.pt, step-00000002.pt, step-00000003.pt"),
        (NOW, ["index.json", "latest.pt", "best.pt"], ""),
    ],
)
def test_a_run_goes_on_when_someone_removes_its_files(
    folder: Path, when: str, patterns: list[str], told: str
) -> None:
    run_dir = folder / "d"
    checkpoints = run_dir / "checkpoints"
    said = run(run_dir, removed(checkpoints, *patterns), when).stderr
    warning = f"warning: someone has removed {told} from {checkpoints}: the run goes on, and "
    assert said == (f"{warning}step-00000004.pt is saved\n" if told else "")
    assert os.readlink(checkpoints / "latest.pt") == "step-00000006.pt"
    best = "step-00000006.pt" if told else "step-00000003.pt"
    assert os.readlink(checkpoints / "best.pt") == best
    check_end(run_dir)
    assert "already complete" in ampctl("resume", "d").stdout


def test_a_folder_of_checkpoints_that_someone_removes_is_made_anew(folder: Path) -> None:
    checkpoints = folder / "d/checkpoints"
    said = run(folder / "d", partial(shutil.rmtree, checkpoints), LATER).stderr
    assert said.startswith("warning: someone has removed step-00000001.pt, step-00000002.pt, step")
    check_end(folder / "d")


def test_a_run_folder_that_someone_removes_ends_the_run_in_words(folder: Path) -> None:
    told = run(folder / "d", partial(shutil.rmtree, folder / "d"), NOW, code=5).stderr
    assert f"cannot write {folder}/d/checkpoints/step-00000004.pt: its folder is gone: " in told
    assert not (folder / "d").exists()
    run(folder / "d", None)
    check_end(folder / "d")


@pytest.mark.parametrize("link", ["latest.pt", "best.pt"])
@pytest.mark.parametrize("how", ["dangling", "file"])
def test_what_someone_puts_in_the_place_of_a_link_is_replaced(
    folder: Path, link: str, how: str
) -> None:
    place = folder / "d/checkpoints" / link

    def replace() -> None:
        place.unlink()
        if how == "dangling":
            place.symlink_to("nowhere")
        else:
            place.write_text("mine")

    run(folder / "d", replace, NOW)
    check_end(folder / "d")


@pytest.mark.parametrize(
    ("obstacle", "step"),
    [("latest.pt", 4), ("best.pt", 4), ("index.json", 3), ("step-00000004.pt", 3)],
)
def test_what_stands_in_the_way_of_a_save_is_named(folder: Path, obstacle: str, step: int) -> None:
    place = folder / "d/checkpoints" / obstacle

    def put() -> None:
        place.unlink(missing_ok=True)
        place.mkdir()
        (place / "mine").touch()

    told = run(folder / "d", put, NOW, code=5).stderr
    assert f"step-00000004.pt: {place} is in the way (Is a directory): remove or rename it" in told
    assert f"{obstacle}: it is" in ampctl("verify", "d", code=4).stderr
    assert f"d/checkpoints/{obstacle} is in the way" in ampctl("resume", "d", code=5).stderr
    assert (place / "mine").exists()
    shutil.rmtree(place)
    assert f"going on from step-{step:08d}.pt" in ampctl("resume", "d").stdout
    check_end(folder / "d")


@pytest.mark.parametrize(
    ("replaced", "reason"), [("d/checkpoints", "File exists"), ("d", "Not a directory")]
)
def test_a_file_in_the_place_of_a_folder_is_named(folder: Path, replaced: str, reason: str) -> None:
    place = folder / replaced

    def put() -> None:
        place.rename("aside")
        place.write_text("mine")

    told = run(folder / "d", put, NOW, code=5).stderr
    assert f"step-00000004.pt: {place} is in the way ({reason}): remove or rename it" in told
    place.unlink()
    Path("aside").rename(place)
    check_goes_on(folder / "d")
