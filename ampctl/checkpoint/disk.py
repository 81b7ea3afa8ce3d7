"""Files that are whole or absent: a temporary file, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path

from ampctl.errors import MachineError


def temporary(path: Path) -> Path:
    """Return where the bytes are written that `publish` moves to ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def discard(tmp: Path) -> None:
    """Remove a temporary file or folder, if it is there, while another error is on its way."""
    if tmp.is_dir():
        shutil.rmtree(tmp, ignore_errors=True)
        return
    with contextlib.suppress(OSError):
        tmp.unlink()


def publish(tmp: Path, path: Path) -> None:
    """Give a written file or folder its name, atomically and down to the disk."""
    if tmp.is_dir():
        sync_folder(tmp)
        if path.is_dir():
            _exchange(tmp, path)
            sync_folder(path.parent)
            shutil.rmtree(tmp)  # what had the name before
            return
    os.replace(tmp, path)
    sync_folder(path.parent)


def _exchange(a: Path, b: Path) -> None:
    """Let two folders change their names, at once where the file system can."""
    current, exchange = -100, 2  # AT_FDCWD and RENAME_EXCHANGE of renameat2(2)
    rename = getattr(ctypes.CDLL(None, use_errno=True), "renameat2", None)
    names = (os.fsencode(a), os.fsencode(b))
    if rename is not None and not rename(current, names[0], current, names[1], exchange):
        return
    aside = a.with_name(f"{a.name}.old.tmp")
    os.replace(b, aside)
    os.replace(a, b)
    os.replace(aside, a)


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
