"""Names that point at a checkpoint beside them: ``latest.pt`` and ``best.pt``."""

from __future__ import annotations

import os
import shutil
from pathlib import Path

from ampctl.checkpoint import disk


def point(link: Path, target: str | None) -> None:
    """Point a name of the folder at a file of it, atomically, or take the name away."""
    if target is None:
        link.unlink(missing_ok=True)
        return
    if link.is_symlink() and os.readlink(link) == target:
        return
    tmp = disk.temporary(link)
    tmp.unlink(missing_ok=True)
    try:
        _make(tmp, link.with_name(target))
        os.replace(tmp, link)
    finally:
        tmp.unlink(missing_ok=True)  # rename leaves it where both are one file already


def _make(link: Path, target: Path) -> None:
    try:
        os.symlink(target.name, link)
        return
    except OSError:  # FAT, some network and container mounts
        pass
    try:
        os.link(target, link)
    except OSError:
        with target.open("rb") as source, link.open("wb") as copy:
            shutil.copyfileobj(source, copy)
            copy.flush()
            os.fsync(copy.fileno())
