"""``kill -9`` at random moments of runs that save every step: nothing is lost that was saved.

The moments are drawn from a seed; what a run is doing at one differs from time to time, which is
the point. Every kill is looked at in itself, and each run that was killed, maybe several times,
ends as the run that never was.
"""

from __future__ import annotations

import itertools
import os
import random
import shutil
import time
from collections.abc import Callable, Iterator, Sequence
from contextlib import suppress
from dataclasses import dataclass
from pathlib import Path
from signal import SIGKILL
from typing import Any

import pytest
from jobs import job
from processes import Running, read_events, starting
from test_kill_and_signals import RECIPE, TESTS, ampctl
from test_resume_exact import assert_same

from ampctl.checkpoint import sharded
from ampctl.checkpoint.index import parse_index
from ampctl.checkpoint.store import load

STEPS = 20
EVERY_STEP = ("checkpoint.every_steps=1", "log.every_steps=2", f"train.max_steps={STEPS}")
WIDE = "model.width=12000"  # a file of some megabytes, so that saving is a good part of a step
NOW, LATER = "checkpoint.asynchronous=false", "checkpoint.asynchronous=true"

SHARDED = "each rank its part"
SETTINGS = {
    "asynchronous": (WIDE, LATER, "checkpoint.keep_last=3"),
    "the newest alone": (WIDE, NOW, "checkpoint.keep_last=1"),
    "asynchronous, the newest alone": (WIDE, LATER, "checkpoint.keep_last=1"),
    "without average": (WIDE, NOW, "checkpoint.keep_last=3", "train.ema_decay=null"),
    "bfloat16": (WIDE, LATER, "checkpoint.keep_last=2", "amp.dtype=bfloat16"),
    "float16": ("model.width=1000", LATER, "checkpoint.keep_last=1", "amp.dtype=float16"),
    "small": (NOW, "checkpoint.keep_last=1", "train.eval_every_steps=1"),
    "small, workers": (LATER, "checkpoint.keep_last=1", "data.num_workers=1"),
    SHARDED: (
        *("model.width=2000", LATER, "checkpoint.keep_last=2", "data.micro_batch_size=null"),
        *("distributed.strategy=fsdp", "distributed.timeout_minutes=0.5"),
    ),
}
BY_DEFAULT = ("asynchronous", "the newest alone", "float16", "small")
KILLS = 25
A_FEW = 3


@dataclass
class Found:
    """What the kills of one setting left, all together."""

    kills: int = 0
    in_a_save: int = 0
    before_the_first: int = 0
    finished: int = 0


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    shutil.copy(TESTS / "own_parts.py", folder)
    (folder / "recipe.yaml").write_text(RECIPE.replace("max_epochs: 3", "max_epochs: 9"))


@pytest.fixture
def start(folder: Path) -> Iterator[Callable[..., Running]]:
    with starting(folder) as function:
        yield function


def lines(setting: str) -> Iterator[tuple[str, ...]]:
    """Yield the commands that go on with a run in ``d``: what a cluster requeues, and a resume."""
    anew = ("train", "recipe.yaml", "--run-dir", "d", "--resume", "auto", *SETTINGS[setting])
    return itertools.cycle([(*anew, *EVERY_STEP), ("resume", "d")])


def reported(run_dir: Path) -> int:
    """Return the last step of which the run has said that it is on the disk, or 0."""
    saved = [e["step"] for e in read_events(run_dir) if e["event"] == "checkpoint"]
    return saved[-1] if saved else 0


def kill_at_random(processes: Sequence[Running], run_dir: Path, moment: random.Random) -> bool:
    """Kill a run some time after it has begun to save, or to live; tell if it was still alive.

    Of several ranks one is killed, or all at once, as when their machine stops.
    """
    index = run_dir / "checkpoints" / "index.json"
    before = index.stat().st_mtime_ns if index.exists() else 0
    from_the_start = moment.random() < 0.1

    def saves() -> bool:
        try:
            ended = not any(process.is_alive() for process in processes)
            return ended or index.stat().st_mtime_ns != before
        except FileNotFoundError:
            return False

    if not from_the_start:
        while not saves():
            time.sleep(0.002)
    time.sleep(moment.random() * 0.3)
    victims = moment.choice([processes, *([process] for process in processes)])
    alive = [process for process in victims if process.is_alive()]
    for process in alive:
        with suppress(ProcessLookupError):
            os.kill(process.pid, SIGKILL)
    return bool(alive)


class Alone:
    """A run of one process."""

    def __init__(self, start: Callable[..., Running]) -> None:
        self._start = start

    def ended(self, *argv: str) -> None:
        """Run a command to its end."""
        ended = self._start(*argv).wait()
        assert ended.code == 0, ended

    def killed(self, argv: Sequence[str], run_dir: Path, moment: random.Random) -> bool:
        """Run a command and kill it; return whether it was not at its end before."""
        process = self._start(*argv)
        kill_at_random([process], run_dir, moment)
        ended = process.wait()
        assert ended.code in (0, -SIGKILL), ended
        return ended.code == -SIGKILL


class Two:
    """A run of two ranks, each of which writes its part of a checkpoint."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def ended(self, *argv: str) -> None:
        with job(self._folder, *argv) as ranks:
            ended = ranks.wait()
        assert ended.code == 0, ended

    def killed(self, argv: Sequence[str], run_dir: Path, moment: random.Random) -> bool:
        with job(self._folder, *argv) as ranks:
            killed = kill_at_random(ranks.ranks, run_dir, moment)
            ended = ranks.wait()
        assert "Traceback" not in ended.error
        return killed and ended.code != 0


def check_what_is_left(run_dir: Path, at_least: int) -> None:
    """See that a killed run has all that it said it had, and that nothing there is damaged."""
    newest = load(run_dir, notify=pytest.fail)
    assert newest.payload["progress"]["step"] >= at_least
    checkpoints = run_dir / "checkpoints"
    for link in (*checkpoints.glob("latest.*"), *checkpoints.glob("best.*")):
        load(link, notify=pytest.fail)
    if len(parse_index(checkpoints) or ()) > 1:
        assert list(checkpoints.glob("latest.*"))
    ampctl("verify", f"{run_dir}")


def end_of(run_dir: Path) -> dict[str, Any]:
    """Return the newest checkpoint of a run, whole."""
    found = load(run_dir, notify=pytest.fail).payload
    found.pop(sharded.PARTS, None)
    return found


def check_end(run_dir: Path, expected: dict[str, Any]) -> None:
    assert_same(end_of(run_dir), expected)
    assert not list(run_dir.rglob("*.tmp"))
    verified = ampctl("verify", f"{run_dir}").out
    assert "note: " not in verified
    assert "no problems" in verified
    files = {path.name for path in (run_dir / "checkpoints").glob("step-*")}
    assert files == {entry.file for entry in parse_index(run_dir / "checkpoints") or ()}


def kill_again_and_again(run: Alone | Two, folder: Path, setting: str, kills: int) -> Found:
    options = (*SETTINGS[setting], *EVERY_STEP)
    # In a process of its own, as those that are killed: this one may compute in another way by now.
    run.ended("train", "recipe.yaml", "--run-dir", "whole", *options)
    expected = end_of(folder / "whole")
    assert expected["progress"]["skipped"] == 5
    moment = random.Random(setting)
    found, run_dir = Found(), folder / "d"
    line, number = lines(setting), 0
    while found.kills < kills:
        number += 1
        saved = reported(run_dir)
        if not run.killed(next(line if saved else lines(setting)), run_dir, moment):
            found.finished += 1
            check_end(run_dir, expected)
            run_dir.rename(folder / f"finished-{number}")
            continue
        found.kills += 1
        if not list(run_dir.glob("checkpoints/step-*")):
            assert not reported(run_dir)
            found.before_the_first += 1
            continue
        found.in_a_save += bool(list(run_dir.glob("checkpoints/.step-*.tmp")))
        check_what_is_left(run_dir, max(reported(run_dir), saved))
        copy = folder / "copy"
        shutil.copytree(run_dir, copy, symlinks=True)
        run.ended("resume", "copy", "checkpoint.every_steps=1000", "data.num_workers=0")
        check_end(copy, expected)
        shutil.rmtree(copy)
    return found


def test_ck2_a_run_killed_before_the_links_of_its_last_save_is_tidied(folder: Path) -> None:
    ampctl("train", "recipe.yaml", "--run-dir", "d", "train.max_steps=2", *EVERY_STEP[:1])
    for stale in ("checkpoints/.index.json.1.tmp", ".recipe.yaml.1.tmp"):
        (folder / "d" / stale).write_text("[")
    latest = folder / "d/checkpoints/latest.pt"
    latest.unlink()
    latest.symlink_to("step-00000001.pt")
    assert "already complete" in ampctl("resume", "d").out
    assert os.readlink(latest) == "step-00000002.pt"
    assert not list((folder / "d").rglob("*.tmp"))


@pytest.mark.parametrize("setting", BY_DEFAULT)
def test_ck2_a_few_kills_at_random_moments_lose_nothing(
    start: Callable[..., Running], folder: Path, setting: str
) -> None:
    kill_again_and_again(Alone(start), folder, setting, A_FEW)


def test_ck2_a_few_kills_of_ranks_that_write_together_lose_nothing(folder: Path) -> None:
    kill_again_and_again(Two(folder), folder, SHARDED, A_FEW)


def recorded(found: Found, record_property: Callable[[str, object], None]) -> None:
    for name, count in vars(found).items():
        record_property(name, count)


@pytest.mark.slow
@pytest.mark.parametrize("setting", [name for name in SETTINGS if name != SHARDED])
def test_ck2_200_kills_at_random_moments_lose_nothing(
    start: Callable[..., Running],
    folder: Path,
    setting: str,
    record_property: Callable[[str, object], None],
) -> None:
    found = kill_again_and_again(Alone(start), folder, setting, KILLS)
    recorded(found, record_property)
    if "small" not in setting:
        assert found.in_a_save > 0


@pytest.mark.slow
@pytest.mark.timeout(900)
def test_ck2_50_kills_of_ranks_that_write_together_lose_nothing(
    folder: Path, record_property: Callable[[str, object], None]
) -> None:
    found = kill_again_and_again(Two(folder), folder, SHARDED, 2 * KILLS)
    recorded(found, record_property)
    assert found.in_a_save > 0
