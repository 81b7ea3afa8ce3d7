"""Names that point at a checkpoint beside them: ``latest.pt`` and ``best.pt``, or ``.dist``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ampctl.checkpoint import disk, parts
from ampctl.errors import printable

LATEST = "latest"
BEST = "best"
SUFFIXES = (".pt", parts.SUFFIX)


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
        with target.open("rb") as source, link.open("wb") as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
    return True
