"""The checkpoint files of one run: which are kept, which is the newest, which the best.

At every moment a kill leaves a folder in which the newest intact file is found. What is in a file
is left to `file`.
"""

from __future__ import annotations

import os
import time
from collections import deque
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ampctl.checkpoint import disk, file, identity, links, sharded
from ampctl.checkpoint.background_save import BackgroundSave, FinishedSave
from ampctl.checkpoint.file import Passed, UnusableCheckpointError, unseen
from ampctl.checkpoint.index import (
    FOLDER,
    NONFINITE,
    Entry,
    Notify,
    content,
    file_name,
    is_current,
    log_warning,
    parse_index,
    read_index,
    write_index,
)
from ampctl.checkpoint.retention import newest, ranked, retained
from ampctl.checkpoint.without_run import nothing_saved
from ampctl.distributed.ranks import Writers
from ampctl.errors import CheckpointError, MachineError, first_of
from ampctl.monitor import Mode
from ampctl.state_dict.copies import nonfinite

_TRIES = 20
"""How often a checkpoint is looked for that the run which saves it has given up meanwhile."""


class NoCheckpointError(CheckpointError):
    """A run folder holds no checkpoint at all, which is no fault in a run that has not begun."""


@dataclass(frozen=True)
class Loaded:
    """A checkpoint as it was read; ``run_dir`` and ``entry`` are None where it lies alone.

    ``passed_over`` names newer files of its run that cannot be used.
    """

    path: Path
    payload: dict[str, Any]
    run_dir: Path | None
    entry: Entry | None
    passed_over: tuple[str, ...] = ()


class Store:
    """Saves the checkpoints of one run, one at a time, in a thread where ``asynchronous`` says so.

    Whoever makes one holds the lock of the run folder. The order of a save: temporary file, index
    with the new digest, rename, links, retention (names, index, then the files).
    """

    def __init__(
        self,
        run_dir: Path,
        *,
        keep_last: int,
        keep_best: int,
        monitor: str,
        mode: Mode,
        asynchronous: bool,
        writers: Writers | None = None,
        notify: Notify = log_warning,
    ) -> None:
        self._writers = writers
        self._folder = run_dir / FOLDER
        self._keep_last = keep_last
        self._keep_best = keep_best
        self._monitor = monitor
        self._mode: Mode = mode
        self.background_save = BackgroundSave(asynchronous, writers.device if writers else None)
        self.saved: deque[FinishedSave] = deque()
        self._proved = False
        try:
            self._folder.mkdir(parents=True, exist_ok=True)
            for stale in self._folder.glob(".*.tmp"):
                disk.remove(stale)
        except OSError as error:
            raise disk.fault(self._folder, error, 0) from error
        self._entries = read_index(run_dir, notify)

    def tidy(self, intact: Entry) -> None:
        """End a save that was cut off, and drop what the present settings do not keep.

        A full disk has no room for a new file while old ones are there. Nothing is dropped unless
        the newest is the one that was seen to be ``intact``.
        """
        if newest(self._entries) != intact:
            return
        try:
            self._tidy(is_current=is_current(self._folder, self._entries))
        except OSError as error:
            raise disk.fault(self._folder, error, 0) from error

    def save(
        self,
        payload: Mapping[str, Any],
        *,
        step: int,
        metrics: Mapping[str, float],
        nonfinite: Sequence[str] = (),
        shards: Mapping[str, Tensor] | None = None,
    ) -> None:
        """Save a snapshot; with ``nonfinite`` tensors it is set aside and never latest or best.

        With ``shards``, this rank's part of the tensors that are empty in the snapshot, the other
        ranks write theirs by `ShardWriter`. Waits for the save before it, and raises its error.
        """
        figures = {name: float(value) for name, value in metrics.items()}
        self.background_save.start(self._save, payload, step, figures, not nonfinite, shards)

    def wait_at_most(self, seconds: float) -> None:
        """Block until the last save is on the disk, for so long at most."""
        self.background_save.wait_at_most(seconds)

    def wait(self) -> Path | None:
        """Wait until it is; return the newest finite file, if any. Raises its error."""
        self.background_save.wait()
        found = newest(self._entries)
        return self._folder / found.file if found else None

    def finished(self) -> list[FinishedSave]:
        """Return the saves that are on the disk now and were not returned before.

        Raises the error of one that has failed by now.
        """
        self.background_save.look()
        return [self.saved.popleft() for _ in range(len(self.saved))]

    def close(self) -> None:
        """Wait for the last save, raise its error, and end the thread."""
        self.background_save.close()

    def _save(
        self,
        payload: Mapping[str, Any],
        step: int,
        metrics: dict[str, float],
        finite: bool,
        shards: Mapping[str, Tensor] | None,
    ) -> None:
        try:
            self._write(payload, step, metrics, finite, shards)
        except MachineError:
            if shards is not None or self._folder.exists():
                raise
            # Someone has removed the folder meanwhile: this state is all that is left of the run.
            self._write(payload, step, metrics, finite, shards)

    def _write(
        self,
        payload: Mapping[str, Any],
        step: int,
        metrics: dict[str, float],
        finite: bool,
        shards: Mapping[str, Tensor] | None,
    ) -> None:
        begin = time.monotonic()
        path = self._folder / file_name(step, finite, in_parts=shards is not None)
        try:
            self._folder.mkdir(exist_ok=True)  # someone may have removed it, with all that it held
        except OSError as error:
            raise disk.fault(path, error, 0) from error
        payload = {**payload, "metrics": metrics}  # from which a lost index is made again
        if shards is None:
            written = file.write(path, payload)
        else:
            assert self._writers is not None, "a sharded state has several ranks"
            written = sharded.write(path, payload, shards, self._writers)
        entry = Entry(
            file=path.name,
            step=step,
            size=written.size,
            sha256=written.sha256,
            metrics=metrics,
            finite=finite,
            time=time.time(),
        )
        try:
            present = [e for e in self._entries if (self._folder / e.file).exists()]
            gone = tuple(e.file for e in self._entries if e not in present)
            if all(e.file != entry.file for e in present):
                # A kill between index and unlink leaves a file that no row tells of: under the row
                # of the new file it would pass for damaged.
                sharded.remove(path)
            write_index(self._folder, [*present, entry])
            disk.publish(disk.temporary(path), path)
            self._entries = [*(e for e in present if e.file != entry.file), entry]
            self._read_back(path, entry)
            self._tidy(is_current=len(present) + 1 == len(self._entries))
        except OSError as error:
            raise disk.fault(path, error, written.size) from error
        finally:
            disk.discard(disk.temporary(path))
        self.saved.append(FinishedSave(path, step, written.size, time.monotonic() - begin, gone))

    def _read_back(self, path: Path, entry: Entry) -> None:
        """Read the first file back, before an older one is given up for it."""
        if not self._proved:
            sharded.read(path, [entry.sha256], mmap=True)
            self._proved = True

    def _tidy(self, *, is_current: bool) -> None:
        """Set the links and drop what is not kept; ``is_current``: the index has all rows alone."""
        kept = retained(
            self._entries,
            keep_last=self._keep_last,
            keep_best=self._keep_best,
            monitor=self._monitor,
            mode=self._mode,
        )
        last = newest(kept)
        best = ranked(kept, self._monitor, self._mode)[:1]
        links.point_both(self._folder, last.file if last else None, best[0].file if best else None)
        disk.sync_folder(self._folder)
        dropped = [e for e in self._entries if e not in kept]
        # Under the name of a temporary file a kill leaves nothing that stays for ever.
        going = [disk.set_aside(self._folder / entry.file) for entry in dropped]
        try:
            if dropped or not is_current:
                write_index(self._folder, kept)
        except OSError as error:
            if error.errno not in disk.NO_ROOM or not dropped:
                raise
            disk.discard(*going)  # which makes room
            write_index(self._folder, kept)
        finally:
            disk.discard(*going)
        self._entries = kept


def load(
    source: Path,
    *,
    notify: Notify,
    in_parts: bool = False,
    look: bool = False,
    passed: Passed = unseen,
) -> Loaded:
    """Read the newest intact finite checkpoint of a run folder, or the one named.

    Sharded tensors are whole in it; ``in_parts`` leaves them empty for `parts.fill`. ``look``: only
    to look at it: tensors stay in the file, and a named one may be non-finite. ``passed`` is told
    how far it is. A damaged file of a run folder is passed over with one line to ``notify``. A run
    that saves meanwhile may give up what is being read: then it is looked for again. Raises
    ``NoCheckpointError`` if the folder holds none, ``CheckpointError`` if none can be used.
    """
    try:
        return _load_at_last(source, notify, in_parts=in_parts, look=look, passed=passed)
    except OSError as error:  # a name that is too long, a disk that fails
        reason = f"it cannot be read ({error.strerror})"
        raise UnusableCheckpointError(source, reason, file.NAME_ANOTHER) from error


def _load_at_last(
    source: Path, notify: Notify, *, in_parts: bool, look: bool, passed: Passed
) -> Loaded:
    """Load what is there at one time: anew, when a run that saves has given up what was tried."""
    is_run = os.path.isdir(source) and not sharded.is_folder(source)
    is_checkpoints = source.name == FOLDER and not os.path.isdir(source / FOLDER)
    run_dir = source.parent if is_checkpoints else source
    if is_run:
        links.require_own_folders(run_dir)

    def there() -> bytes:
        """Return what changes when a run has saved: its index, or where a link leads to."""
        return content(run_dir / FOLDER) if is_run else os.fsencode(os.path.realpath(source))

    tries_left = _TRIES
    while True:
        tries_left -= 1
        told: list[str] = []
        before = there()
        try:
            how = (look, passed)
            found = _load_newest(run_dir, told.append, *how) if is_run else _load_one(source, *how)
            if not in_parts:
                sharded.fill(found.payload, found.path)
        except (CheckpointError, OSError):
            if not tries_left or there() == before:
                raise
            continue
        if not found.passed_over or not tries_left or there() == before:
            break
    for text in told:
        notify(text)
    return found


def _load_newest(run_dir: Path, notify: Notify, look: bool, passed: Passed) -> Loaded:
    entries = read_index(run_dir, notify)
    if not entries:
        raise NoCheckpointError(nothing_saved(run_dir))
    failed = [(name, "someone has removed it") for name in links.removed(run_dir / FOLDER)]
    for entry in reversed(entries):
        if not entry.finite:
            continue
        path = run_dir / FOLDER / entry.file
        try:
            payload = identity.read(path, [entry.sha256], mmap=look, passed=passed)
        except UnusableCheckpointError as error:
            failed.append((entry.file, error.reason))
            continue
        for name, reason in failed:
            notify(f"checkpoint {name} cannot be used ({reason}); {entry.file} is taken instead")
        return Loaded(path, payload, run_dir, entry, tuple(name for name, _ in failed))
    tried = [f"  {name}: {reason}" for name, reason in failed]
    tried += [f"  {e.file}: it holds non-finite tensors" for e in entries if not e.finite]
    raise CheckpointError(
        f"no checkpoint of {run_dir} can be used:\n" + "\n".join(tried) + "\n"
        "bring back an intact copy of one, or train again with another --run-dir"
    )


def _load_one(source: Path, look: bool, passed: Passed) -> Loaded:
    path = links.followed(source)  # latest and best are links
    index = parse_index(path.parent) or []
    entry = next((e for e in index if e.file == path.name), None)
    named = path if sharded.is_folder(path) else source
    digests = [entry.sha256] if entry else None
    payload = identity.read(named, digests, mmap=look, passed=passed)
    if not look and (NONFINITE in path.name or (entry and not entry.finite)):
        names = nonfinite({key: payload[key] for key in ("model", "optimizer", "ema")})
        raise UnusableCheckpointError(
            source,
            f"it holds NaN or infinity in {first_of(names) or 'some of its state'}",
            "name a finite one, or the run folder for its newest",
        )
    run_dir = path.parent.parent if path.parent.name == FOLDER else None
    return Loaded(path, payload, run_dir, entry)
