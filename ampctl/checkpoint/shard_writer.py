"""What ranks other than the first have in place of a store: they write their parts, or nothing."""

from __future__ import annotations

from collections import deque
from collections.abc import Mapping
from pathlib import Path

from torch import Tensor

from ampctl.checkpoint import sharded
from ampctl.checkpoint.background_save import BackgroundSave, FinishedSave
from ampctl.checkpoint.index import FOLDER, file_name
from ampctl.distributed.ranks import Writers


class ShardWriter:
    """The store of a rank other than 0, which writes what all of them hold.

    Of a sharded state each rank has a part, and writes it here.
    """

    def __init__(self, run_dir: Path, *, asynchronous: bool, writers: Writers | None) -> None:
        self._folder = run_dir / FOLDER
        self._writers = writers
        self.saved: deque[FinishedSave] = deque()
        self.background_save = BackgroundSave(asynchronous, writers.device if writers else None)

    def save(self, shards: Mapping[str, Tensor], *, step: int) -> None:
        """Write this rank's part. Waits for the save before it, and raises that one's error."""
        path = self._folder / file_name(step, True, in_parts=True)  # a name for messages
        assert self._writers is not None, "a sharded state has several ranks"
        self.background_save.start(sharded.write_part, path, shards, self._writers)

    def wait(self) -> None:
        """Block until this rank's last part is on the disk. Raises the error of that save."""
        self.background_save.wait()

    def finished(self) -> list[FinishedSave]:
        """Return nothing, as rank 0 tells; raise the error of a save that has failed by now."""
        self.background_save.look()
        return []

    def close(self) -> None:
        """Wait for the last save, raise its error, and end the thread."""
        self.background_save.close()
