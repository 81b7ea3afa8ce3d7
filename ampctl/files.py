"""The one way in which the files of a run folder or of a checkpoint are opened.

They may be damaged or a stranger's: behind a name there may be a pipe, a device, a folder, a link
to a file of the user's, or more bytes than there is memory for.
"""

from __future__ import annotations

import errno
import os
import stat
from contextlib import suppress
from io import BufferedReader
from pathlib import Path
from typing import BinaryIO

_KINDS = {
    stat.S_IFIFO: "a pipe",
    stat.S_IFCHR: "a device",
    stat.S_IFBLK: "a device",
    stat.S_IFSOCK: "a socket",
}


class UnfitFileError(OSError):
    """What has the name is no regular file, or has more bytes than it may have."""


def descriptor(path: Path, flags: int, *, follow: bool = False, mode: int = 0o666) -> int:
    """Open a regular file and return its descriptor.

    ``follow``: its name may be a link; ``mode``: the rights to a file that is made. Raises
    ``IsADirectoryError``, or ``UnfitFileError`` for anything else, at once: nobody waits for the
    other end of a pipe. Other faults are the system's.
    """
    safe = os.O_CLOEXEC | os.O_NONBLOCK | os.O_NOCTTY | (0 if follow else os.O_NOFOLLOW)
    try:
        file = os.open(path, flags | safe, mode)
    except OSError as error:
        if error.errno == errno.ELOOP and not follow:
            raise UnfitFileError(errno.ELOOP, "it is a link", f"{path}") from error
        if error.errno == errno.ENXIO:  # nobody reads that pipe, or listens at that socket
            raise UnfitFileError(errno.ENXIO, "it is a pipe or a socket", f"{path}") from error
        raise
    kind = stat.S_IFMT(os.fstat(file).st_mode)
    if kind != stat.S_IFREG:
        os.close(file)
        if kind == stat.S_IFDIR:
            raise IsADirectoryError(errno.EISDIR, "it is a folder", f"{path}")
        found = f"it is {_KINDS.get(kind, 'something else')}, not a regular file"
        raise UnfitFileError(errno.EINVAL, found, f"{path}")
    return file


def open_to_read(path: Path, *, follow: bool = False) -> BufferedReader:
    """Open a regular file to read it. Raises as `descriptor`."""
    return open(path, "rb", opener=lambda _, flags: descriptor(path, flags, follow=follow))


def read(path: Path, *, most: int, follow: bool = False) -> bytes:
    """Return the content of a regular file of up to ``most`` bytes. Raises as `descriptor`."""
    with open_to_read(path, follow=follow) as file:
        content = file.read(most + 1) if os.fstat(file.fileno()).st_size <= most else None
    if content is None or len(content) > most:
        raise UnfitFileError(errno.EFBIG, f"it has more than {most:,} bytes", f"{path}")
    return content


def create(path: Path) -> BinaryIO:
    """Open a new file to write it, in place of what has the name. Raises ``OSError``."""
    with suppress(FileNotFoundError):
        path.unlink()  # a link is not written through
    return os.fdopen(descriptor(path, os.O_WRONLY | os.O_CREAT | os.O_EXCL), "wb")
