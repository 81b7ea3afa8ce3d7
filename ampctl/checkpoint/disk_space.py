"""Whether a disk has room for the checkpoints that a run will keep."""

from __future__ import annotations

import shutil
from contextlib import suppress
from pathlib import Path

from ampctl.checkpoint import sharded
from ampctl.checkpoint.index import step_files


def shortage(folder: Path, size: int, kept: int) -> str | None:
    """Describe that a disk has no room for ``kept`` files of a size and one more.

    The one more is the file that is being written, while those before it are all there. None: it
    has the room, or how much it has cannot be told.
    """
    present = 0
    for path in step_files(folder):
        with suppress(OSError):  # given up meanwhile, by the save that is under way
            present += sharded.size(path)
    needed = size * (kept + 1) - present
    try:
        free = shutil.disk_usage(folder).free
    except OSError:
        return None
    if needed <= free:
        return None
    return (
        f"the disk of {folder} will be full before long: a checkpoint has {size:,} bytes, and up "
        f"to {kept + 1} of them will be there at once (checkpoint.keep_last, checkpoint.keep_best "
        f"and the one being written), which takes {needed:,} bytes more; {free:,} bytes are free"
    )
