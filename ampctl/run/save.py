"""A checkpoint of a run: a copy of its state at a step boundary, which the store writes."""

from __future__ import annotations

import time
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from pathlib import Path
from typing import Any

from torch import Tensor

from ampctl.builder.checkpointable import refuse_unsavable
from ampctl.builder.job import Job
from ampctl.checkpoint.shard_writer import ShardWriter
from ampctl.checkpoint.store import Store
from ampctl.data.workers import WorkerError
from ampctl.distributed.ranks import Writers
from ampctl.errors import AmpctlError, UsageError, first_of
from ampctl.recipe.schema import CheckpointConfig
from ampctl.run import folder
from ampctl.run.restore import Origin
from ampctl.run.run import Run
from ampctl.state_dict import copies
from ampctl.state_dict.host_memory import HostMemory
from ampctl.track.console import Console

SHORT_S = 0.25
"""So long training waits for a save beside it, or for the time of a step if that is longer."""
SLOW_DISK = 1e8
"""Bytes a second; what cannot be written in that time at this pace is not waited for."""


def open_store(
    job: Job, run_dir: Path, origin: Origin | None, writers: Writers | None, console: Console
) -> Store | ShardWriter:
    """Return where this rank saves, with what the settings do not keep dropped from there.

    ``writers``: the ranks that write together, where each has a part of the state.
    """
    checkpoint = job.recipe.checkpoint
    if not job.state.ranks.is_first:
        return ShardWriter(run_dir, asynchronous=checkpoint.asynchronous, writers=writers)
    return _tidied(checkpoint, run_dir, origin, writers, console)


def leave_complete(run_dir: Path, origin: Origin, console: Console) -> None:
    """End a save of a complete run that a kill cut off, and change nothing else there.

    What is kept is what its own settings keep: those of a resume that does nothing do not count.
    """
    if origin.entry is not None:
        _tidied(origin.saved_recipe.recipe.checkpoint, run_dir, origin, None, console)


def _tidied(
    checkpoint: CheckpointConfig,
    run_dir: Path,
    origin: Origin | None,
    writers: Writers | None,
    console: Console,
) -> Store:
    folder.clear(run_dir)
    entry = origin.entry if origin is not None else None
    store = Store(
        run_dir,
        keep_last=checkpoint.keep_last,
        keep_best=checkpoint.keep_best,
        monitor=checkpoint.monitor,
        mode=checkpoint.mode,
        asynchronous=checkpoint.asynchronous,
        writers=writers,
        notify=console.warn if entry is None else _unheard,  # it was said when that was found
    )
    if entry is not None:
        store.tidy(entry)
    return store


def _unheard(text: str) -> None:
    """Ignore it: it was told before."""


def prepare(run: Run) -> None:
    """Once a step has made the whole state, see that it can be saved, and make memory for copies.

    The memory is made beside the training. Raises RecipeError for what no checkpoint can hold.
    """
    if not run.is_savable:
        refuse_unsavable(run.job, begun=True)
        run.is_savable = True
    if run.memory is not None and not run.memory.is_prepared:
        run.memory.prepare(copies.copied_tensors(run.job.state.parts()))


def save(run: Run) -> None:
    """Take a snapshot of the state and hand it to the store; the store writes it."""
    begin = time.perf_counter()
    state, progress = run.job.state, run.progress
    finish(run)  # or what is being written would be copied over
    state.require_agreement()
    saved = state.state_dict()
    with state.boundary.changing():  # nobody else may save meanwhile
        size = hand_over(run, saved, run.memory)
    if isinstance(run.store, ShardWriter):
        return
    run.store.wait_at_most(_patience(run, size))
    run.log.stalled(progress.step, time.perf_counter() - begin)
    look(run)


def hand_over(run: Run, saved: Mapping[str, Any], memory: HostMemory | None) -> int:
    """Make the store write a copy of a state; ``memory``: where that may be made.

    Returns the size in bytes of what this rank tells of.
    """
    job, state, progress = run.job, run.job.state, run.progress
    run.saved_step, run.saved_at = progress.step, time.monotonic()
    shards: dict[str, Tensor] | None = {} if state.ranks.shards else None
    if isinstance(run.store, ShardWriter) and shards is None:  # rank 0 writes what all of them hold
        return 0
    nonfinite = state.nonfinite(saved)
    payload = copies.snapshot(
        {
            **saved,
            "data": job.train_data.state_dict(),
            "recipe": job.loaded.text,
            "environment": {
                **run.environment,
                "nonfinite_by_design": sorted(state.nonfinite_by_design),
            },
        },
        shards=shards,
        memory=memory,
    )
    if isinstance(run.store, ShardWriter):
        run.store.save(shards or {}, step=progress.step)
        return 0
    if nonfinite:
        run.log.console.warn(
            f"step {progress.step}: not finite: {first_of(nonfinite)}. The "
            "checkpoint is set aside as .nonfinite, and the newest one stays as it was"
        )
    run.not_finite, run.set_aside = nonfinite, run.set_aside + 1 if nonfinite else 0
    run.store.save(
        payload,
        step=progress.step,
        metrics=progress.metrics if progress.evaluated_step == progress.step else {},
        nonfinite=nonfinite,
        shards=shards,
    )
    return copies.num_bytes((payload, shards))


def _patience(run: Run, size: int) -> float:
    """Return for how many seconds a save is waited for, lest a kill in the next step undo it."""
    seconds = max(SHORT_S, run.step_seconds)
    return seconds if size <= seconds * SLOW_DISK else 0.0


def look(run: Run) -> None:
    """Log the saves that are on the disk by now; raise the error of one that has failed."""
    run.newest = run.newest_on_disk
    with _undone(run):
        saved = run.store.finished()
    run.log.saved(saved, run.run_dir)


def finish(run: Run) -> Path | None:
    """Wait for the save under way, and tell of it; return the newest file. Raises its error."""
    with _undone(run):
        newest = run.store.wait()
    look(run)
    return newest


@contextmanager
def _undone(run: Run) -> Iterator[None]:
    """Count the last step as unsaved where its save has failed."""
    try:
        yield
    except BaseException:
        run.saved_step = -1
        raise


def note_what_is_saved(run: Run, error: BaseException) -> None:
    """Add to an error in data, code or recipe where the run can go on once it is mended."""
    is_theirs = isinstance(error, UsageError | WorkerError) or not isinstance(error, AmpctlError)
    # What several ranks have saved is for their launcher to say.
    is_saved = run.saved_step > 0 and not run.set_aside and run.job.state.ranks.size == 1
    if is_theirs and is_saved and run.resume_command not in f"{error}":
        error.add_note(
            f"step {run.saved_step} is saved: `{run.resume_command}` goes on once this is mended"
        )


def end_saves(run: Run) -> None:
    """Wait for the save that is under way, and log it, before the run's last event."""
    try:
        finish(run)
    except AmpctlError as error:
        run.log.console.warn(str(error))  # another error is on its way to the user
        look(run)
