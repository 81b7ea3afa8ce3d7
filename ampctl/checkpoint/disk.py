"""Files that are whole or absent: a temporary file, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import errno
import os
import shutil
from pathlib import Path

from ampctl.errors import MachineError


def temporary(path: Path) -> Path:
    """Return where the bytes are written that `publish` moves to ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def discard(tmp: Path) -> None:
    """Remove a temporary file, if it is there, while another error is on its way."""
    with contextlib.suppress(OSError):
        tmp.unlink()


def publish(tmp: Path, path: Path) -> None:
    """Give a written file its name, atomically and down to the disk."""
    os.replace(tmp, path)
    sync_folder(path.parent)


def write_bytes(path: Path, content: bytes) -> None:
    """Replace a small file, atomically and down to the disk."""
    tmp = temporary(path)
    try:
        with tmp.open("wb") as file:
            file.write(content)
            file.flush()
            os.fsync(file.fileno())
        publish(tmp, path)
    except BaseException:
        discard(tmp)
        raise


def sync_folder(folder: Path) -> None:
    """Bring the names in a folder down to the disk."""
    descriptor = os.open(folder, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(descriptor)
    except OSError as error:
        # Some network file systems have no fsync of a folder, and need none.
        if error.errno not in (errno.EINVAL, errno.EOPNOTSUPP):
            raise
    finally:
        os.close(descriptor)


def fault(path: Path, error: OSError, needed: int) -> MachineError:
    """Say in words why ``path`` could not be written; ``needed`` is its size in bytes, or 0."""
    if error.errno in (errno.ENOSPC, errno.EDQUOT):
        free = shutil.disk_usage(path.parent).free
        size = f"{needed:,} bytes are needed, " if needed else ""
        return MachineError(
            f"no room to write {path}: {size}{free:,} bytes are free ({error.strerror}); the "
            "checkpoints before it are intact: make room or lower checkpoint.keep_last, then resume"
        )
    return MachineError(
        f"cannot write {path}: {error.strerror or error}; make its folder writable or give another "
        "--run-dir"
    )
