"""One process's part of a run: build what the recipe names, restore, fit, and tear down."""

from __future__ import annotations

import logging
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch

from ampctl import environment
from ampctl.build import Job, build_job
from ampctl.checkpoint import lock
from ampctl.checkpoint.index import Entry
from ampctl.checkpoint.store import NoCheckpointError, Store, abandon_after, load
from ampctl.distributed.env import StopSignals
from ampctl.doctor.precision_preflight import preflight
from ampctl.errors import (
    AmpctlError,
    CheckpointError,
    InterruptedRunError,
    NumericsError,
    PreemptedError,
)
from ampctl.optim import make_skippable
from ampctl.preflight import without_effect
from ampctl.recipe import trust
from ampctl.recipe.load import LoadedRecipe, parse_recipe, recipe_changes
from ampctl.recipe.schema import Block, by_name
from ampctl.recipe.target import import_from_current_folder
from ampctl.track.console import Console
from ampctl.track.metrics import MetricsFile
from ampctl.train import folder, words
from ampctl.train.log import RunLog
from ampctl.train.loop import Run, evaluation_was_cut_off, finished, fit

_REASONS: dict[type[BaseException], str] = {
    PreemptedError: "preempted",
    InterruptedRunError: "interrupted",
    NumericsError: "nonfinite",
}


@dataclass(frozen=True)
class Origin:
    """The checkpoint that a run goes on from, and the recipe text that was saved in it.

    ``entry`` is its place in the run's own index, where the run may have to go back to it.
    """

    path: Path
    payload: dict[str, Any]
    saved_recipe: LoadedRecipe
    entry: Entry | None = None


def train(loaded: LoadedRecipe, *, run_dir: Path | None, resume: bool, quiet: bool) -> None:
    """Train a recipe in a new run folder, or with ``resume`` go on with the one there.

    Raises an AmpctlError whose exit code says how the run ended, if not well.
    """
    import_from_current_folder()
    where = run_dir or folder.new_run_dir(loaded.recipe.name)
    if not resume:
        folder.refuse_to_overwrite(where)
    notes: list[str] = []
    try:
        with _stop_signals() as signals, lock.hold(where):
            origin = _newest(where, notes) if resume else None
            trust.record(loaded)
            _run(loaded, where, origin, notes, signals, quiet=quiet)
    finally:
        if run_dir is None:
            folder.discard_unused(where)


def resume(
    source: Path,
    overrides: Sequence[str],
    *,
    run_dir: Path | None,
    trusted: bool,
    quiet: bool,
) -> None:
    """Go on from a checkpoint file, or from the newest intact one of a run folder.

    Raises CheckpointError if there is none that can be used or trusted, and what :func:`train`
    raises.
    """
    import_from_current_folder()
    notes: list[str] = []
    with _stop_signals() as signals, ExitStack() as held:
        if run_dir is None and folder.holds_run(source):
            # Before it is read: the run that holds it may be about to save a newer checkpoint.
            held.enter_context(lock.hold(source))
        found = load(source, notify=notes.append)
        text, name = found.payload["recipe"], f"recipe of {found.path.name}"
        saved = parse_recipe(text, where=name)
        notes += [f"trusted: {line}" for line in trust.require_trusted(saved, trust=trusted)]
        loaded = parse_recipe(text, where=name, overrides=overrides)
        where = run_dir or found.run_dir or folder.new_run_dir(loaded.recipe.name)
        if run_dir is not None and run_dir != found.run_dir:
            folder.refuse_to_overwrite(run_dir)
        if run_dir is not None or not folder.holds_run(source):
            held.enter_context(lock.hold(where))
        trust.record(loaded)
        origin = Origin(
            found.path, found.payload, saved, found.entry if where == found.run_dir else None
        )
        _run(loaded, where, origin, notes, signals, quiet=quiet)


def _newest(run_dir: Path, notes: list[str]) -> Origin | None:
    """Return where a requeued run goes on, or None if it has saved nothing yet."""
    try:
        found = load(run_dir, notify=notes.append)
    except NoCheckpointError:
        return None
    saved = parse_recipe(found.payload["recipe"], where=found.path.name)
    return Origin(found.path, found.payload, saved)


@contextmanager
def _stop_signals() -> Iterator[StopSignals]:
    """Heed signals from the start: before the first step there is nothing to save."""
    with StopSignals() as signals:
        try:
            yield signals
        except KeyboardInterrupt:
            if signals.received is None:
                raise
            raise signals.error(
                "before the first step: nothing was trained, so nothing is lost"
            ) from None


def _run(
    loaded: LoadedRecipe,
    run_dir: Path,
    origin: Origin | None,
    notes: list[str],
    signals: StopSignals,
    *,
    quiet: bool,
) -> None:
    console = Console(quiet=quiet)
    try:
        for note in notes:
            console.warn(note)
        job = _prepare(loaded, run_dir, origin, console)
        if job is not None:
            if origin is not None and origin.entry is not None:
                _go_back(run_dir, origin.entry, console)
            facts = environment.collect(str(job.state.device))
            folder.write_facts(run_dir, loaded.text, facts)
            signals.training = True
            with _log_file(run_dir):
                _fit(job, run_dir, origin, console, signals, facts)
    finally:
        console.close()


def _go_back(run_dir: Path, entry: Entry, console: Console) -> None:
    """Take what was saved after a checkpoint out of the run, which is built and can go on."""
    abandoned = abandon_after(run_dir, entry)
    if abandoned:
        console.warn(
            f"going back to step {entry.step}: what was saved after it is kept as "
            f"{', '.join(abandoned)}, and is no longer of this run"
        )


def _prepare(
    loaded: LoadedRecipe, run_dir: Path, origin: Origin | None, console: Console
) -> Job | None:
    """Build the job and restore its state; return None if the run is complete already."""
    job = build_job(loaded)
    for finding in preflight(job):
        console.warn(str(finding))
    for note in _without_effect(job):
        console.note(note)
    if origin is None:
        return job
    changes = recipe_changes(origin.saved_recipe, loaded)
    if changes:
        console.note(f"changed since the checkpoint: {', '.join(changes)}")
    _restore(job, origin, console.note)
    reason = finished(job)
    if reason is None or evaluation_was_cut_off(job):
        return job
    console.finish(words.already_complete(job, run_dir, reason))
    return None


def _fit(
    job: Job,
    run_dir: Path,
    origin: Origin | None,
    console: Console,
    signals: StopSignals,
    facts: dict[str, Any],
) -> None:
    checkpoint = job.recipe.checkpoint
    log = RunLog(
        MetricsFile(run_dir / folder.METRICS),
        console,
        every_steps=job.recipe.log.every_steps,
        total_steps=job.total_steps,
        device=job.state.device,
        scaling=job.state.scaler.enabled,
    )
    store = Store(
        run_dir,
        keep_last=checkpoint.keep_last,
        keep_best=checkpoint.keep_best,
        monitor=checkpoint.monitor,
        mode=checkpoint.mode,
        asynchronous=checkpoint.asynchronous,
        notify=console.warn,
    )
    run = Run(job, run_dir, store, log, signals, facts)
    if origin is not None:
        run.saved_step = job.state.progress.step
    try:
        job.state.agree()
        _tell_start(run, origin)
        reason = fit(run)
        log.stop(run.progress.step, reason, 0)
        console.finish(words.ending(job, run_dir, reason))
    except BaseException as error:
        code = error.exit_code if isinstance(error, AmpctlError) else 1
        _end_saves(run)
        log.stop(run.progress.step, _REASONS.get(type(error), "error"), code)
        raise
    finally:
        with ExitStack() as last:  # each is closed, whatever another one raises
            last.callback(log.close)
            last.callback(store.close)
            last.callback(job.train_data.close)
            if job.eval_data is not None:
                last.callback(job.eval_data.close)


def _end_saves(run: Run) -> None:
    """Let the save that is under way end, and tell it, before the run's last event."""
    try:
        run.store.wait()
    except AmpctlError as error:
        run.log.console.warn(str(error))  # another error is on its way to the user
    run.log.saved(run.store.finished(), run.run_dir)


def _restore(job: Job, origin: Origin, notify: Callable[[str], None]) -> None:
    """Load the checkpoint into the job. Raises CheckpointError for what does not fit."""
    payload = origin.payload
    saved_recipe = origin.saved_recipe.recipe
    saved_data = payload["data"] or {}
    length = job.train_data.state_dict().get("num_samples")
    saved_length = saved_data.get("num_samples")
    if length is not None and saved_length is not None and length != saved_length:
        raise CheckpointError(
            f"the checkpoint does not fit the data: data.train had {saved_length} samples when it "
            f"was saved and has {length} now, so the order of the samples cannot be continued. "
            "Bring the data back, or start a new run."
        )
    size, saved_size = job.recipe.data.batch_size, saved_recipe.data.batch_size
    if size != saved_size:
        raise CheckpointError(
            f"the checkpoint does not fit the recipe: data.batch_size was {saved_size} when it was "
            f"saved and is {size} now, and progress and schedule are counted in steps of that many "
            "samples. Change data.micro_batch_size instead, or start a new run."
        )
    if payload["dtype"] != job.state.precision.name:
        notify(f"resuming in {job.state.precision.name}; it was saved in {payload['dtype']}")
    names = [updater.name for updater in job.state.updaters]
    try:
        job.state.load_state_dict(
            payload,
            notify=notify,
            changed_optimizers=_changed(saved_recipe.optimizer, job.recipe.optimizer, names),
            changed_schedulers=_changed(saved_recipe.scheduler, job.recipe.scheduler, names),
        )
        job.train_data.load_state_dict(saved_data)
    except (KeyError, TypeError, ValueError, IndexError, AttributeError, RuntimeError) as error:
        raise CheckpointError(
            f"checkpoint {origin.path} cannot be used: its content is not what ampctl saves "
            f"({type(error).__name__}: {error}); name another one"
        ) from error
    for updater in job.state.updaters:
        make_skippable(updater.optimizer)
    progress, steps = job.state.progress, job.train_data.steps_per_epoch
    if steps is not None and progress.batch_in_epoch >= steps:  # data.drop_last, say
        progress.epoch, progress.batch_in_epoch = progress.epoch + 1, 0
    payload.clear()  # or a second copy of the state would stay in memory for the whole run


def _changed(old: Block | None, new: Block | None, names: Sequence[str]) -> list[str]:
    """Return the optimizers whose block, or whose schedule's, is another than it was."""
    before, after = by_name(old), by_name(new)
    return [n for n in names if before.get(n, before.get("")) != after.get(n, after.get(""))]


def _without_effect(job: Job) -> list[str]:
    state = job.state
    notes = without_effect(
        job.recipe,
        dtype=state.precision.name,
        scaling=state.scaler.enabled,
        device=state.device.type,
    )
    if job.recipe.amp.upcast and not state.upcast:
        notes.append("no effect where no trainable parameter is in half precision: amp.upcast")
    return notes


def _tell_start(run: Run, origin: Origin | None) -> None:
    job, state, progress = run.job, run.job.state, run.progress
    fields: dict[str, Any] = {
        "recipe_digest": job.loaded.digest,
        "dtype": state.precision.name,
        "device": str(state.device),
        "world_size": state.ranks.size,
        "parameters": sum(p.numel() for p in state.bare.parameters()),
        "matmul_precision": torch.get_float32_matmul_precision(),
    }
    if origin is not None:
        fields |= {"checkpoint": origin.path.name, "epoch": progress.epoch}
    event = "start" if origin is None else "resume"
    lines = words.start(job, run.run_dir, origin.path if origin else None)
    run.log.begin(event, progress.step, lines, **fields)


@contextmanager
def _log_file(run_dir: Path) -> Iterator[None]:
    """Keep what libraries and ampctl log in the run's own file."""
    handler = logging.FileHandler(run_dir / folder.LOG)
    handler.setFormatter(logging.Formatter("%(asctime)s %(levelname)s %(name)s: %(message)s"))
    root = logging.getLogger()
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)
        handler.close()
