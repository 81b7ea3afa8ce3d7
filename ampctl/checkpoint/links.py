"""Names that point at a checkpoint beside them: ``latest.pt`` and ``best.pt``, or ``.dist``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ampctl import files
from ampctl.checkpoint import disk, sharded
from ampctl.checkpoint.index import FOLDER
from ampctl.errors import CheckpointError, printable

LATEST = "latest"
BEST = "best"
SUFFIXES = (".pt", sharded.SUFFIX)

_MOST_LINKS = 40


def require_own_folders(run_dir: Path) -> None:
    """Raise CheckpointError if a folder of a run is a link: what it leads to may be another run's.

    The run folder itself may be one, or lie behind one.
    """
    for name in (FOLDER, "logs", "crash"):
        if os.path.islink(run_dir / name):
            raise CheckpointError(
                f"{run_dir / name} is a link, and a run writes and removes files there: put a "
                "folder in its place. To keep runs on another disk, train with a --run-dir there, "
                "or let the run folder itself be a link"
            )


def followed(source: Path) -> Path:
    """Return where a path leads to that may be a link to a checkpoint.

    Raises CheckpointError for one among the checkpoints of a run that leads out of them.
    """
    path = source.absolute()
    for _ in range(_MOST_LINKS):
        for inner in (path, path.parent):
            if inner.name == FOLDER:
                require_own_folders(inner.parent)
        if not os.path.islink(path):
            return Path(os.path.realpath(path))
        target = os.readlink(path)
        if path.parent.name == FOLDER and os.path.basename(target) != target:
            raise CheckpointError(
                f"{path} leads out of its folder, to {printable(target)}: name that file itself"
            )
        path = path.parent / target
    raise CheckpointError(f"{source} is a link in a circle; name a checkpoint or a run folder")


def point(link: Path, target: str | None) -> None:
    """Point a name of the folder at a checkpoint of it, atomically, or take the name away.

    Where there are no symbolic links a checkpoint that is a folder has no such name.
    """
    if target is None:
        link.unlink(missing_ok=True)
        return
    if link.is_symlink() and os.readlink(link) == target:
        return
    tmp = disk.temporary(link)
    tmp.unlink(missing_ok=True)
    try:
        if _make(tmp, link.with_name(target)):
            os.replace(tmp, link)
        else:
            link.unlink(missing_ok=True)
    finally:
        tmp.unlink(missing_ok=True)  # rename leaves it where both are one file already


def point_both(folder: Path, latest: str | None, best: str | None) -> None:
    """Point latest and best at checkpoints of the folder, under the suffix that each has."""
    for name, target in ((LATEST, latest), (BEST, best)):
        for suffix in SUFFIXES:
            is_its = target is not None and target.endswith(suffix)
            point(folder / f"{name}{suffix}", target if is_its else None)


def removed(folder: Path) -> list[str]:
    """Return the newest checkpoint, if its name is all that is left of it."""
    links = [folder / f"{LATEST}{suffix}" for suffix in SUFFIXES]
    targets = [os.readlink(link) for link in links if link.is_symlink() and not link.exists()]
    return [printable(target) for target in targets if target.startswith("step-")]


def _make(link: Path, target: Path) -> bool:
    """Make a link, or what does for one; return whether that was possible."""
    try:
        os.symlink(target.name, link)
        return True
    except OSError:  # FAT, some network and container mounts
        if target.is_dir():
            return False
    try:
        os.link(target, link)
    except OSError:
        with files.open_to_read(target) as source, files.create(link) as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
    return True
