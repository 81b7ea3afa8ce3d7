"""A run's folder: where it lies, whether it holds a run already, and its two files of facts."""

from __future__ import annotations

import json
import os
from collections.abc import Iterator, Mapping
from contextlib import contextmanager, suppress
from datetime import datetime
from itertools import count
from pathlib import Path
from typing import Any

from ampctl import commands
from ampctl.checkpoint import disk, lock
from ampctl.checkpoint.identity import ENVIRONMENT
from ampctl.checkpoint.index import FOLDER as CHECKPOINTS
from ampctl.checkpoint.links import followed
from ampctl.checkpoint.lock import LOCK_FILE
from ampctl.errors import UsageError

RECIPE = "recipe.yaml"
METRICS = "metrics.jsonl"
LOGS = Path("logs")
ROOT = Path("runs")


def new_run_dir(name: str) -> Path:
    """Make and return a folder for a new run, by name and local time, that no other run has."""
    stamp = datetime.now().strftime("%Y%m%d-%H%M%S")
    folder = ROOT / name / stamp
    for number in count(2):
        try:
            folder.mkdir(parents=True)
        except FileExistsError:
            folder = ROOT / name / f"{stamp}-{number}"
        except OSError as error:
            raise disk.fault(folder, error, 0) from error
        else:
            break
    return folder


def holds_run(run_dir: Path) -> bool:
    """Return whether a run has been started in a folder."""
    return any(os.path.exists(run_dir / name) for name in (RECIPE, METRICS))


def run_of(source: Path) -> Path | None:
    """Return the run folder that a path is, or that has it among its checkpoints; else None.

    Raises CheckpointError for a link that leads out of a run.
    """
    inside = followed(source)  # latest and best are links
    places = [source] if inside.name != CHECKPOINTS else [source, inside.parent]
    if inside.parent.name == CHECKPOINTS:
        places.append(inside.parent.parent)
    return next((place for place in places if holds_run(place)), None)


def refuse_to_overwrite(run_dir: Path) -> None:
    """Raise UsageError if a folder holds a run, or things that are no run's."""
    if holds_run(run_dir):
        saved = any((run_dir / CHECKPOINTS).glob("step-*"))
        way_on = (
            f"`{commands.resume(run_dir)}` goes on with it"
            if saved
            else "It has saved nothing yet: `--resume auto` starts there anew"
        )
        raise UsageError(
            f"{run_dir} already holds a run, which is never written over. "
            f"{way_on}; give another --run-dir to start a new one."
        )
    if os.path.exists(run_dir) and not os.path.isdir(run_dir):
        raise UsageError(f"{run_dir} is a file; --run-dir names a folder")


@contextmanager
def taken(run_dir: Path) -> Iterator[None]:
    """Hold a run folder, made if need be. One in which no run has begun is left as it was found.

    Raises as `lock.hold`.
    """
    made = [place for place in (run_dir, *run_dir.parents) if not os.path.exists(place)]
    had_lock = os.path.exists(run_dir / LOCK_FILE)
    with lock.hold(run_dir):
        try:
            yield
        finally:
            if not holds_run(run_dir):
                with suppress(OSError):
                    if not had_lock:
                        (run_dir / LOCK_FILE).unlink()
                    for place in made:
                        place.rmdir()


def discard_unused(run_dir: Path) -> None:
    """Remove a folder made for a new run whose recipe, it turned out, cannot be built."""
    if holds_run(run_dir):
        return
    with suppress(OSError):
        (run_dir / LOCK_FILE).unlink(missing_ok=True)  # of a rank that was killed
        for path in (run_dir, run_dir.parent, ROOT):
            path.rmdir()


def clear(run_dir: Path) -> None:
    """Remove the files of facts that a kill has left half written, if that can be done."""
    for name in (RECIPE, ENVIRONMENT):
        for stale in run_dir.glob(f".{name}.*.tmp"):
            disk.discard(stale)


def write_facts(run_dir: Path, recipe_text: str, environment: Mapping[str, Any]) -> None:
    """Write ``recipe.yaml`` and ``environment.json``, each whole or not at all.

    Raises MachineError if there is no room or no right to write.
    """
    for name, content in (
        (RECIPE, recipe_text),
        (ENVIRONMENT, json.dumps(dict(environment), indent=1, default=str) + "\n"),
    ):
        try:
            run_dir.mkdir(parents=True, exist_ok=True)
            (run_dir / LOGS).mkdir(exist_ok=True)
            disk.write_bytes(run_dir / name, content.encode())
        except OSError as error:
            raise disk.fault(run_dir / name, error, len(content)) from error
