"""Files that are whole or absent: a temporary file, fsync, rename, fsync of the folder."""

from __future__ import annotations

import contextlib
import ctypes
import errno
import os
import shutil
from pathlib import Path

from ampctl import files
from ampctl.errors import MachineError

NO_ROOM = (errno.ENOSPC, errno.EDQUOT)


def temporary(path: Path) -> Path:
    """Return where the bytes are written that `publish` moves to ``path``."""
    return path.with_name(f".{path.name}.{os.getpid()}.tmp")


def discard(*temporaries: Path) -> None:
    """Remove temporary files or folders, if they are there; another error may be on its way."""
    for tmp in temporaries:
        with contextlib.suppress(OSError):
            remove(tmp)


def remove(path: Path) -> None:
    """Remove a file, a link or a whole folder; what a link leads to stays. Raises OSError."""
    if path.is_dir() and not path.is_symlink():
        shutil.rmtree(path)
    else:
        path.unlink()


def set_aside(path: Path) -> Path:
    """Give a file or folder that is to be removed a temporary name, and return that."""
    going = temporary(path)
    with contextlib.suppress(FileNotFoundError):  # someone has removed it
        os.replace(path, going)
    return going


def publish(tmp: Path, path: Path) -> None:
    """Give a written file or folder its name, atomically and down to the disk."""
    if tmp.is_dir():
        sync_folder(tmp)
        if path.is_symlink():
            path.unlink()
        if path.is_dir():
            _exchange(tmp, path)
            sync_folder(path.parent)
            shutil.rmtree(tmp)  # what had the name before
            return
    os.replace(tmp, path)
    sync_folder(path.parent)


def _exchange(a: Path, b: Path) -> None:
    """Exchange the names of two folders, at once where the file system can."""
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
        with files.create(tmp) as file:
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
    """Describe why ``path`` could not be written; ``needed`` is its size in bytes, or 0."""
    reason = error.strerror or f"{error}"
    size = f"{needed:,} bytes are needed, " if needed else ""
    has_older = _holds_checkpoints(path.parent)
    intact = "the checkpoints before it are intact: " if has_older else ""
    if error.errno == errno.ENOSPC:
        return MachineError(
            f"no room to write {path}: {size}{_free(path)} ({reason}); {intact}make room, then "
            f"resume{_DROPS if has_older else ''}"
        )
    if error.errno == errno.EDQUOT:
        return MachineError(
            f"no room to write {path}: {size}the quota of this user or folder is used up "
            f"({reason}); {intact}remove files that count in it or ask for more, then resume"
            f"{_DROPS if has_older else ''}"
        )
    if error.errno == errno.EFBIG:
        return MachineError(
            f"cannot write {path}: {size}more than one file may have here ({reason}); {intact}"
            "raise the limit (`ulimit -f`) or, if it is the file system's, go on elsewhere with "
            "`ampctl resume RUN --run-dir DIR`"
        )
    if error.errno in _IN_THE_WAY or isinstance(error, files.UnfitFileError):
        return MachineError(
            f"cannot write {path}: {_obstacle(error) or path} is in the way ({reason}): remove or "
            "rename it, then resume"
        )
    if error.errno == errno.EIO:
        return MachineError(
            f"cannot write {path}: {reason}: the disk or its connection fails; what is saved is "
            "as good as it: `ampctl verify RUN` tells which checkpoints are intact, and "
            "`ampctl resume RUN --run-dir DIR` goes on on another disk"
        )
    if error.errno == errno.ENOENT:
        return MachineError(
            f"cannot write {path}: its folder is gone: someone has removed or renamed it, or its "
            "disk is no longer there; bring it back and resume, or train with another --run-dir"
        )
    return MachineError(
        f"cannot write {path}: {reason}; make its folder writable or give another --run-dir"
    )


_IN_THE_WAY = (errno.EISDIR, errno.ENOTDIR, errno.EEXIST, errno.ENOTEMPTY)
_DROPS = ". (`ampctl resume RUN checkpoint.keep_last=1` removes older checkpoints before it saves.)"


def _holds_checkpoints(folder: Path) -> bool:
    try:
        return any(folder.glob("step-*"))
    except OSError:  # the disk fails
        return False


def _free(path: Path) -> str:
    try:
        facts = os.statvfs(path.parent)
    except OSError:  # the folder is gone too
        return "how many are free is not known"
    free = f"{facts.f_bavail * facts.f_frsize:,} bytes are free"
    if facts.f_files and not facts.f_favail:  # some file systems do not count them
        return f"{free}, and not one more file can be made there (no inodes are left)"
    return free


def _obstacle(error: OSError) -> Path | None:
    """Return what stands where a file was to be made, or where its folder should be."""
    name = error.filename2 or error.filename
    if not isinstance(name, str | Path):
        return None
    place = Path(name)
    is_folder_at_fault = error.errno == errno.ENOTDIR and not place.parent.is_dir()
    return place.parent if is_folder_at_fault else place
