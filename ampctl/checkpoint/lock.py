"""One run at a time in a run folder: a lock that the kernel gives back, however the run ends."""

from __future__ import annotations

import contextlib
import errno
import fcntl
import json
import logging
import os
import socket
from collections.abc import Iterator
from datetime import UTC, datetime
from pathlib import Path

from ampctl import files
from ampctl.checkpoint import disk
from ampctl.checkpoint.links import require_own_folders
from ampctl.errors import MachineError, UsageError

LOCK_FILE = ".lock"

_NO_LOCKS_HERE = (errno.ENOLCK, errno.ENOSYS, errno.EOPNOTSUPP)


@contextlib.contextmanager
def hold(run_dir: Path) -> Iterator[None]:
    """Hold a run folder, made if need be, as the only run that writes there.

    Raises ``UsageError`` naming the run that holds it already, ``CheckpointError`` if a folder in
    it is a link. On a file system without locks the folder is used unlocked, with a warning.
    """
    require_own_folders(run_dir)
    held: list[int] = []

    def let_go() -> None:
        while held:
            os.close(held.pop())

    try:
        while True:
            held.append(_open(run_dir))
            _acquire(held[0], run_dir)
            if _is_there(held[0], run_dir):
                break
            let_go()  # who held it before has removed it, as no run has begun there
        # A forked data worker shares the lock and would keep it when this process is killed, until
        # it notices. Closing the copy in the child leaves the parent's lock alone.
        os.register_at_fork(after_in_child=let_go)
        yield
    finally:
        let_go()


def _open(run_dir: Path) -> int:
    try:
        run_dir.mkdir(parents=True, exist_ok=True)
        return files.descriptor(run_dir / LOCK_FILE, os.O_RDWR | os.O_CREAT)
    except FileExistsError as error:
        raise UsageError(f"{run_dir} is a file; --run-dir names a folder") from error
    except (files.UnfitFileError, IsADirectoryError) as error:
        raise disk.fault(run_dir / LOCK_FILE, error, 0) from error
    except OSError as error:
        raise MachineError(
            f"cannot write in {run_dir}: {error.strerror}; give another --run-dir"
        ) from error


def _is_there(file: int, run_dir: Path) -> bool:
    try:
        return os.path.samestat(os.fstat(file), os.stat(run_dir / LOCK_FILE))
    except FileNotFoundError:
        return False


def _acquire(file: int, run_dir: Path) -> None:
    try:
        fcntl.flock(file, fcntl.LOCK_EX | fcntl.LOCK_NB)
    except BlockingIOError as error:
        raise UsageError(
            f"{run_dir} is in use: {_holder(file)} is writing there; wait until it ends or give "
            "another --run-dir"
        ) from error
    except OSError as error:
        if error.errno not in _NO_LOCKS_HERE:
            raise MachineError(f"cannot lock {run_dir}: {error.strerror}") from error
        logging.getLogger("ampctl").warning(
            "%s is on a file system without locks: see to it that no second run writes there",
            run_dir,
        )
        return
    record = {
        "pid": os.getpid(),
        "host": socket.gethostname(),
        "started": datetime.now(UTC).isoformat(timespec="seconds"),
    }
    line = json.dumps(record).encode() + b"\n"
    # It only tells others who is here. A disk without room must not keep a run from being resumed,
    # which may make room; what can be written over needs none.
    with contextlib.suppress(OSError):
        os.ftruncate(file, os.pwrite(file, line, 0))


def _holder(file: int) -> str:
    try:
        record = json.loads(os.pread(file, 4096, 0))
        return f"process {record['pid']} on {record['host']} (since {record['started']})"
    except (ValueError, KeyError, TypeError):  # it has the lock and is about to write the record
        return "another process"
