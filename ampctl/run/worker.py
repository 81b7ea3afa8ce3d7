"""One process's part of a run: build what the recipe names, restore, fit, and tear down."""

from __future__ import annotations

import logging
import socket
from collections.abc import Callable, Sequence
from contextlib import ExitStack, closing, nullcontext, suppress
from pathlib import Path
from typing import Any

import torch

from ampctl import environment
from ampctl.builder.checkpointable import refuse_unsavable
from ampctl.builder.job import Job
from ampctl.checkpoint import identity, lock
from ampctl.checkpoint.abandoned import ABANDONED, abandon_after
from ampctl.checkpoint.index import Entry
from ampctl.checkpoint.shard_writer import ShardWriter
from ampctl.checkpoint.store import Loaded, NoCheckpointError, Store, load
from ampctl.distributed.env import StopSignals, ended_at_once
from ampctl.distributed.launched import seconds_to_save
from ampctl.distributed.ranks import Ranks, Writers, from_environment
from ampctl.distributed.stop_signal import StopSignal
from ampctl.distributed.watchdog import Watchdog
from ampctl.doctor.ignored import ignored_settings
from ampctl.doctor.lone_sample import refuse_lone_sample
from ampctl.doctor.precision_check import preflight
from ampctl.doctor.schedule_length import schedule_findings
from ampctl.errors import (
    AmpctlError,
    CheckpointError,
    InterruptedRunError,
    MachineError,
    NumericsError,
    PreemptedError,
    UsageError,
)
from ampctl.recipe import current_folder, trust
from ampctl.recipe.fault import memory_told
from ampctl.recipe.load import LoadedRecipe
from ampctl.run import folder, messages
from ampctl.run.agreement import require_one_job, require_same_data
from ampctl.run.init_from import InitFrom, build
from ampctl.run.job_place import Place, joined
from ampctl.run.log import RunLog, log_file
from ampctl.run.loop import evaluation_was_cut_off, finished, fit
from ampctl.run.rescue import watch_over
from ampctl.run.restore import Origin, read, restore, run_id, saved_recipe
from ampctl.run.run import Run, begun_anew
from ampctl.run.save import end_saves, leave_complete, note_what_is_saved, open_store
from ampctl.run.size_limit import no_larger_than
from ampctl.state_dict.host_memory import HostMemory
from ampctl.track.console import Console
from ampctl.track.metrics import MetricsFile
from ampctl.track.warned import warnings_told

Watch = Callable[[Job], Job]

_REASONS: dict[type[BaseException], str] = {
    PreemptedError: "preempted",
    InterruptedRunError: "interrupted",
    NumericsError: "nonfinite",
}


def _alone(job: Job) -> Job:
    """Show nothing."""
    return job


def train(
    loaded: LoadedRecipe,
    *,
    run_dir: Path | None,
    resume: bool,
    quiet: bool,
    init_from: InitFrom | None = None,
    watch: Watch = _alone,
) -> None:
    """Train a recipe in a new run folder, or with ``resume`` go on with the one there.

    ``init_from``: where the weights of a run that does not go on are from, if not from the model.
    ``watch`` is given the job as it is built, and returns the one to run. Raises an AmpctlError
    whose exit code says how the run ended, if not well.
    """
    current_folder.open_current_folder()
    notes: list[str] = []
    with ended_at_once(messages.TOO_EARLY) as signals, ExitStack() as held:
        place = held.enter_context(joined(loaded))
        ranks, begun = place.ranks, place.begun
        told = {"command": "train", "__run_dir": run_dir, "__init_from": init_from}
        notes += require_one_job(loaded, ranks, **told)
        where = place.folder(loaded, run_dir)
        # Of several nodes one may have been there before the others were started anew.
        resume = any(ranks.gather(resume)) or begun.before
        if ranks.is_first:
            if run_dir is None:
                held.callback(folder.discard_unused, where)
            if not resume:
                folder.refuse_to_overwrite(where)
            held.enter_context(folder.taken(where))
            trust.record(loaded)
        origin = _newest(where, notes, ranks) if resume else None
        weights = init_from if origin is None else None
        _run(loaded, where, origin, notes, signals, place, watch, weights, quiet=quiet)


def resume(
    source: Path,
    overrides: Sequence[str],
    *,
    run_dir: Path | None,
    trusted: bool,
    quiet: bool,
    watch: Watch = _alone,
) -> None:
    """Go on from a checkpoint file, or from the newest intact one of a run folder.

    Raises CheckpointError if there is none that can be used or trusted, and what :func:`train`
    raises.
    """
    notes: list[str] = []
    is_first = from_environment().is_first
    with ended_at_once(messages.TOO_EARLY) as signals, ExitStack() as held:
        home = folder.run_of(source)
        if is_first and run_dir is None and home is not None:
            # Before it is read: the run that holds it may be about to save a newer checkpoint.
            held.enter_context(lock.hold(home))
        found, saved, loaded = read(
            source, overrides, trusted=trusted, notify=notes.append, in_parts=True
        )
        place = held.enter_context(joined(loaded))
        ranks, begun = place.ranks, place.begun
        notes += require_one_job(loaded, ranks, command="resume", __run_dir=run_dir)
        path = ranks.of_first(found.path)
        if path != found.path:
            found = _as_first(path, ranks)
        where = place.folder(loaded, run_dir or found.run_dir)
        goes_on = where == found.run_dir
        if goes_on and found.path.name.startswith(ABANDONED):
            raise UsageError(
                f"{found.path} is no longer of the run in {where}, which has gone another way: "
                "give another --run-dir to go on from it"
            )
        if is_first:
            if run_dir is not None and not goes_on and not begun.before:
                folder.refuse_to_overwrite(run_dir)
            if run_dir is None and found.run_dir is None:
                held.callback(folder.discard_unused, where)
            if run_dir is not None or home is None:
                held.enter_context(folder.taken(where))
            trust.record(loaded)
        entry = found.entry if goes_on else None
        origin = Origin(found.path, found.payload, saved, entry, found.passed_over)
        # What the job has saved before it was started anew is newer than its source. In the folder
        # of the source that holds only once the job has gone back to it.
        if begun.run_dir is not None if goes_on else begun.before:
            origin = _newest(where, notes, ranks) or origin
        _run(loaded, where, origin, notes, signals, place, watch, quiet=quiet)


def _newest(run_dir: Path, notes: list[str], ranks: Ranks) -> Origin | None:
    """Return where a requeued run goes on, or None if it has saved nothing yet."""
    found = None
    if ranks.is_first:
        with suppress(NoCheckpointError):
            found = load(run_dir, notify=notes.append, in_parts=True)
    path = ranks.of_first(found.path if found else None)
    if path is None:
        return None
    found = found or _as_first(path, ranks)
    return Origin(found.path, found.payload, saved_recipe(found), found.entry, found.passed_over)


def _as_first(path: Path, ranks: Ranks) -> Loaded:
    """Load the checkpoint that rank 0 has found, which has told what there is to tell of it."""
    try:
        return load(path, notify=lambda _: None, in_parts=True)
    except CheckpointError as error:
        raise CheckpointError(
            f"rank {ranks.rank} on {socket.gethostname()} cannot go on from {path} as rank 0 "
            f"does: {error}. Is the run folder on a file system that all nodes share?"
        ) from error


def _run(
    loaded: LoadedRecipe,
    run_dir: Path,
    origin: Origin | None,
    notes: list[str],
    signals: StopSignals,
    place: Place,
    watch: Watch,
    init_from: InitFrom | None = None,
    *,
    quiet: bool,
) -> None:
    ranks = place.ranks
    own = run_id(run_dir, origin)
    console = Console(quiet=quiet, rank=ranks.rank)

    def warned(text: str) -> None:
        place.watchdog.say_once(text, console.warn)

    with closing(console), warnings_told(warned):
        for note in notes if ranks.is_first else ():
            console.warn(note)
        with no_larger_than(origin.payload["model"]) if origin else nullcontext():
            built = build(loaded, ranks, init_from, console.note)
        job = _prepare(watch(built), run_dir, origin, console)
        if job is None:
            if ranks.is_first and origin is not None:
                leave_complete(run_dir, origin, console)
            return
        if ranks.is_first and origin is not None and origin.entry is not None:
            _go_back(run_dir, origin.entry, origin.passed_over, console)
        place.begun.mark(run_dir)
        minutes = job.recipe.distributed.timeout_minutes
        every = job.state.ranks
        writers = Writers(every, minutes, job.state.device) if every.shards else None
        # It may make the room that all else needs.
        store = open_store(job, run_dir, origin, writers, console)
        # A commit tells of code that nothing here can import; and git runs what a repository says.
        facts = environment.collect(str(job.state.device), with_git=current_folder.is_open())
        facts[identity.RUN_ID] = own
        if ranks.is_first:
            folder.write_facts(run_dir, loaded.text, facts)
        ranks.wait()  # its folders are there
        signals.training = True
        with log_file(run_dir, ranks.rank):
            anew = begun_anew(loaded, run_dir, origin, init_from, every)
            _fit(job, store, run_dir, origin, console, signals, place.watchdog, facts, anew)


def _go_back(run_dir: Path, entry: Entry, damaged: Sequence[str], console: Console) -> None:
    """Take what was saved after a checkpoint out of the run, which is built and can go on."""
    abandoned = abandon_after(run_dir, entry)
    for name in damaged:  # that it cannot be used was said when it was read
        if f"{ABANDONED}{name}" in abandoned:
            abandoned.remove(f"{ABANDONED}{name}")
            console.note(f"{name} is put aside as {ABANDONED}{name}; remove it when you like")
    if abandoned:
        console.warn(
            f"going back to step {entry.step}: what was saved after it is kept as "
            f"{', '.join(abandoned)}, and is no longer of this run"
        )


def _prepare(job: Job, run_dir: Path, origin: Origin | None, console: Console) -> Job | None:
    """Examine a job and restore its state; return None if the run is complete already."""
    require_same_data(job)
    refuse_unsavable(job, begun=False)
    for finding in (*schedule_findings(job), *preflight(job)):
        if job.state.ranks.is_first:
            console.warn(str(finding))
    for note in ignored_settings(job, world_size=job.state.ranks.size):
        console.note(note)
    if origin is None:
        refuse_lone_sample(job)
        return job
    changes = messages.changes(job, origin.saved_recipe)
    if changes:
        console.note(f"changed since the checkpoint: {', '.join(changes)}")
    restore(job, origin, console.note)
    reason = finished(job)
    if reason is None or evaluation_was_cut_off(job):
        refuse_lone_sample(job)  # after the restoring, which tells of data of another length
        return job
    console.finish(messages.already_complete(job, run_dir, reason))
    return None


def _fit(
    job: Job,
    store: Store | ShardWriter,
    run_dir: Path,
    origin: Origin | None,
    console: Console,
    signals: StopSignals,
    watchdog: Watchdog,
    facts: dict[str, Any],
    anew: str,
) -> None:
    checkpoint, ranks = job.recipe.checkpoint, job.state.ranks
    log = RunLog(
        MetricsFile(run_dir / folder.METRICS) if ranks.is_first else None,
        console,
        every_steps=job.recipe.log.every_steps,
        total_steps=job.total_steps,
        device=job.state.device,
        scaling=job.state.scaler.enabled,
        seconds_to_save=seconds_to_save(),
        files_kept=checkpoint.keep_last + checkpoint.keep_best,
    )
    copies = checkpoint.asynchronous and (ranks.is_first or ranks.shards)
    memory = HostMemory() if copies else None
    run = Run(job, run_dir, store, log, StopSignal(signals, ranks), watchdog, facts, anew, memory)
    watch_over(run, origin)
    try:
        with watchdog.explaining(), memory_told():  # before it is told how the run has ended
            job.state.agree()
            _tell_start(run, origin)
            reason = fit(run)
        job.state.boundary.begin()  # unless another thread ends the process by now
        signals.is_done = True
        log.stop(run.progress.step, reason, 0)
        console.finish(messages.ending(job, run_dir, reason))
    except BaseException as error:
        job.state.boundary.begin()  # as above
        code = error.exit_code if isinstance(error, AmpctlError) else 1
        if isinstance(error, AmpctlError):
            signals.outcome = error
        else:  # whole, where the screen shows the user's lines
            logging.getLogger("ampctl").error("the run ends", exc_info=error)
        with suppress(MachineError):  # a disk without room hides no other error, nor its own cause
            end_saves(run)
            if ranks.size == 1:  # several would have to put together their parts of its loss
                log.log_last(run.progress)
            note_what_is_saved(run, error)
            log.stop(run.progress.step, _REASONS.get(type(error), "error"), code)
        raise
    finally:
        signals.rescue = None
        with ExitStack() as last:  # each is closed, whatever another one raises
            last.callback(log.close)
            last.callback(store.close)
            last.callback(job.train_data.close)
            if job.eval_data is not None:
                last.callback(job.eval_data.close)


def _tell_start(run: Run, origin: Origin | None) -> None:
    job, state, progress = run.job, run.job.state, run.progress
    fields: dict[str, Any] = {
        "recipe_digest": job.loaded.digest,
        "dtype": state.precision.name,
        "device": str(state.device),
        "world_size": state.ranks.size,
        "parameters": job.num_parameters,
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if origin is not None:
        fields |= {"checkpoint": origin.path.name, "epoch": progress.epoch}
    event = "start" if origin is None else "resume"
    lines = messages.start(job, run.run_dir, origin.path if origin else None)
    run.log.begin(event, progress.step, lines, **fields)
