"""The index of a run's checkpoint files: ``index.json``, read, written, and made again if lost.

Entries stand in the order of saving, which is what "newest" means: after going back in a run, a
file of a lower step is the newer one.
"""

from __future__ import annotations

import json
import logging
import math
import re
from collections.abc import Callable, Sequence
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

from ampctl import files
from ampctl.checkpoint import disk, file, identity, sharded

FOLDER = identity.FOLDER
INDEX = "index.json"
NONFINITE = ".nonfinite"

_MOST_BYTES = 1 << 24

Notify = Callable[[str], None]
"""Says a line to the user."""

# Names from an index are joined to the folder and may be unlinked: nothing else is let in.
_FILE_NAME = re.compile(r"step-(\d{8,})(\.nonfinite)?\.(pt|dist)")


@dataclass(frozen=True)
class Entry:
    """One file of a run; ``time`` is that of saving, in Unix seconds."""

    file: str
    step: int
    size: int
    sha256: str
    metrics: dict[str, float]
    finite: bool
    time: float


def log_warning(message: str) -> None:
    """Log a warning, for callers that have no better place."""
    logging.getLogger("ampctl").warning("%s", message)


def file_name(step: int, finite: bool, *, in_parts: bool = False) -> str:
    """Return the name of a step's file, or of its folder where ranks write it together."""
    return f"step-{step:08d}{'' if finite else NONFINITE}{sharded.SUFFIX if in_parts else '.pt'}"


def step_files(folder: Path) -> list[Path]:
    """Return the checkpoints in a folder, in the order of their steps."""
    return sorted(path for path in folder.glob("step-*") if _FILE_NAME.fullmatch(path.name))


def read_index(run_dir: Path, notify: Notify = log_warning) -> list[Entry]:
    """Return the entries whose file is there, in the order of saving; empty if there is none.

    A missing or damaged index is made again, in memory, from the step files that are intact;
    ``notify`` is told so, and told of each file that is not.
    """
    folder = run_dir / FOLDER
    entries = parse_index(folder)
    if entries is not None:
        return entries
    files = step_files(folder)
    if not files:
        return []
    notify(f"{folder / INDEX} is missing or damaged; examining the {len(files)} checkpoint files")
    rebuilt = [entry for path in files if (entry := _examine(path, notify))]
    return sorted(rebuilt, key=lambda entry: (entry.time, entry.step))


def parse_index(folder: Path) -> list[Entry] | None:
    """Return the entries whose file is in the folder; None if the index is missing or damaged."""
    try:
        raw_rows = json.loads(content(folder))
        rows = [_entry(raw) for raw in raw_rows] if isinstance(raw_rows, list) else []
    except (
        OSError,
        ValueError,
        KeyError,
        TypeError,
        AttributeError,
        OverflowError,
        RecursionError,
    ):
        return None
    if not rows:  # none is ever written
        return None
    entries: dict[str, Entry] = {}
    for row in rows:
        if not (folder / row.file).exists():  # a kill came between index and rename
            continue
        if row.file in entries:
            # A name is saved anew after going back in a run. Both rows stand until the new file has
            # the name; the old one holds if a kill came before.
            with suppress(OSError):  # of a run under way, which has given it up meanwhile
                if sharded.digest(folder / row.file) != row.sha256:
                    continue
            del entries[row.file]
        entries[row.file] = row
    return list(entries.values())


def write_index(folder: Path, entries: Sequence[Entry]) -> None:
    """Replace the index, atomically and down to the disk; non-finite metrics become text."""
    disk.write_bytes(folder / INDEX, _content(entries))


def is_current(folder: Path, entries: Sequence[Entry]) -> bool:
    """Return whether the index on the disk has these entries, and nothing else."""
    return content(folder) == _content(entries)


def content(folder: Path) -> bytes:
    """Return the bytes of the index, which change with every save; none if it cannot be read."""
    try:
        return files.read(folder / INDEX, most=_MOST_BYTES)
    except OSError:
        return b""


def _content(entries: Sequence[Entry]) -> bytes:
    rows = [asdict(entry) for entry in entries]
    for row in rows:
        row["metrics"] = {
            name: value if math.isfinite(value) else str(value)
            for name, value in row["metrics"].items()
        }
    return (json.dumps(rows, indent=1, allow_nan=False) + "\n").encode()


def _entry(raw: dict[str, Any]) -> Entry:
    """Check one row; raises one of the errors that `parse_index` takes for damage."""
    if not _FILE_NAME.fullmatch(raw["file"]) or not isinstance(raw["sha256"], str):
        raise ValueError(f"not a row of an index: {raw}")
    return Entry(
        file=raw["file"],
        step=int(raw["step"]),
        size=int(raw["size"]),
        sha256=raw["sha256"],
        metrics={name: float(value) for name, value in raw["metrics"].items()},
        finite=bool(raw["finite"]),
        time=float(raw["time"]),
    )


def _examine(path: Path, notify: Notify) -> Entry | None:
    try:
        payload = identity.read(path, None, mmap=True)
    except file.UnusableCheckpointError as error:
        notify(f"checkpoint {path.name} cannot be used ({error.reason}); it is left out")
        return None
    run = identity.of_folder(path.parent.parent)
    if run is not None and identity.of_facts(payload["environment"]) is None:
        notify(f"{path.name} was saved by an older ampctl: nothing in it tells which run it is of")
    facts = path.stat()
    metrics = payload.get("metrics")
    return Entry(
        file=path.name,
        step=int(path.name[len("step-") :].split(".")[0]),
        size=sharded.size(path),
        sha256=sharded.digest(path),
        metrics=metrics if isinstance(metrics, dict) else {},
        finite=NONFINITE not in path.name,
        time=facts.st_mtime,
    )
