"""The training loop: steps, and between them evaluations, checkpoints and reasons to stop."""

from __future__ import annotations

import math
import time
from collections.abc import Iterator

from ampctl import rng
from ampctl.builder.checkpointable import changed_by_a_pass
from ampctl.builder.job import Job
from ampctl.builder.refusals import unknown_metric
from ampctl.data.loader import Window
from ampctl.doctor.across_ranks import diagnose, unused_later
from ampctl.doctor.mismatch import in_words
from ampctl.doctor.weight_changes import moved_too_early, what_is_moved
from ampctl.engine.evaluation import NoItemsError, evaluate
from ampctl.engine.state import StepReport
from ampctl.engine.step import settle, train_step
from ampctl.errors import NumericsError, RecipeError, UsageError
from ampctl.monitor import LOSS
from ampctl.run import messages
from ampctl.run.after_evaluation import follow, take_metrics
from ampctl.run.run import Run
from ampctl.run.save import finish, look, prepare, save

MOST_SET_ASIDE = 2
"""So many checkpoints in a row may be set aside; with the next one a run stops."""


def fit(run: Run) -> str:
    """Train until a reason to stop; return it: ``complete`` or ``early_stop``.

    Raises NumericsError when the numbers stay non-finite, PreemptedError or InterruptedRunError
    after a signal, with the state saved.
    """
    progress = run.progress
    run.log.go(progress)
    if evaluation_was_cut_off(run.job):
        _boundary(run, epoch_ended=progress.batch_in_epoch == 0)
    while (reason := finished(run.job)) is None:
        _epoch(run)
    if run.saved_step != progress.step:
        save(run)
    _require_a_use(run, at_most=0)
    finish(run)
    run.job.state.ranks.wait()
    return reason


def finished(job: Job) -> str | None:
    """Return why a run is over, or None if it is not."""
    progress, limits = job.state.progress, job.recipe.train
    if limits.early_stop is not None and progress.early_stop_bad >= limits.early_stop.patience:
        return "early_stop"
    if limits.max_steps is not None and progress.step >= limits.max_steps:
        return "complete"
    if limits.max_epochs is not None and progress.epoch >= limits.max_epochs:
        return "complete"
    return None


def _epoch(run: Run) -> None:
    """Train from the present place to the epoch's end, or to where the run is over."""
    job, state, progress, log = run.job, run.job.state, run.progress, run.log
    epoch = progress.epoch
    steps_per_epoch = job.train_data.steps_per_epoch
    for window, samples in _windows(run):
        run.step_began = time.perf_counter()
        run.watchdog.step = progress.step + 1
        run.watchdog.doing = f"step {progress.step + 1}"
        try:
            measure = log.is_due(progress.step + 1)
            report = train_step(state, window, samples=samples, measure=measure)
        except Exception as error:
            doing = f"step {progress.step + 1}"
            told = (
                changed_by_a_pass(job)
                or moved_too_early(error, state)
                or unused_later(error, state)
                or in_words(
                    error, state.bare, window, doing=doing, state=state, data=job.train_data
                )
            )
            if told is None:
                raise
            raise told from error
        run.windows.append((progress.step, window))
        progress.batch_in_epoch += 1
        progress.samples += samples
        ended = progress.batch_in_epoch == steps_per_epoch
        if ended:
            progress.epoch, progress.batch_in_epoch = epoch + 1, 0
        state.boundary.mark(state.device, job.train_data.probe)
        state.boundary.end()
        run.watchdog.doing = f"step {progress.step + 1}"
        log.mark(progress, epoch)
        if report is not None:
            _take(run, report)
        look(run)
        by_time = run.stop_signal.look(is_time=_time_to_save(run))
        if ended or run.stop_signal.received or by_time or _due(run) or finished(job):
            _boundary(run, epoch_ended=ended, by_time=by_time)
            if ended or finished(job):
                return
    if steps_per_epoch is None:
        if not progress.batch_in_epoch:
            raise UsageError(
                f"data.train: the iterable data set gave no step in epoch {epoch}. Its __iter__ "
                "must start anew each epoch, and hold a whole batch where data.drop_last is set."
            )
        ends = f"data.train, in epoch {epoch},"
        run.watchdog.meet_at_end(ends, progress.batch_in_epoch, progress.samples)
        with state.boundary.changing():
            progress.epoch, progress.batch_in_epoch = epoch + 1, 0
        _boundary(run, epoch_ended=True)


def _windows(run: Run) -> Iterator[tuple[Window, int]]:
    """Yield what is left of the epoch; if the data fail, which is between two steps, save first.

    Several ranks could save only together, and the others know nothing of it.
    """
    progress = run.progress
    try:
        yield from run.job.train_data.windows(progress.epoch, progress.batch_in_epoch)
    except Exception:
        state = run.job.state
        if state.ranks.size == 1 and progress.step:
            # What was read in vain has moved the generators on.
            rng.set_state(state.boundary.rng_state(), state.device)
            _boundary(run, epoch_ended=False, stopping=True)
        raise


def _due(run: Run) -> bool:
    """Return whether the step just taken ends with an evaluation or a checkpoint."""
    step, recipe = run.progress.step, run.job.recipe
    evaluation, steps = recipe.train.eval_every_steps, recipe.checkpoint.every_steps
    return (evaluation is not None and step % evaluation == 0) or (
        steps is not None and step % steps == 0
    )


def _time_to_save(run: Run) -> bool:
    minutes = run.job.recipe.checkpoint.every_minutes
    return minutes is not None and time.monotonic() - run.saved_at >= minutes * 60


def _boundary(
    run: Run, *, epoch_ended: bool, by_time: bool = False, stopping: bool = False
) -> None:
    """Do what is due after a step: learn its fate, evaluate, save, and heed a signal.

    ``by_time``: a save is due by the clock. ``stopping``: an error ends the run here; save,
    whatever is due.
    """
    try:
        with run.job.state.boundary.changing():
            report = settle(run.job.state)
    except Exception as error:
        doing = f"step {run.progress.step}"
        told = in_words(error, run.job.state.bare, (), doing=doing)
        if told is None:
            raise
        raise told from error
    run.step_seconds = time.perf_counter() - run.step_began
    if report is not None:
        _take(run, report)
    run.log.pause()
    over = finished(run.job) is not None
    recipe, step = run.job.recipe, run.progress.step
    every = recipe.train.eval_every_steps
    is_due = epoch_ended if every is None else step % every == 0
    if run.stop_signal.received is None and (over or is_due) and not stopping:
        _evaluate(run, is_due=is_due)
        if is_due:
            follow(run)
        over = finished(run.job) is not None
    if run.stop_signal.received or stopping or over:
        _log_last(run)
    if run.stop_signal.received or stopping or over or by_time or _save_is_due(run, epoch_ended):
        save(run)
        if run.stop_signal.received is None:
            _require_a_use(run, at_most=MOST_SET_ASIDE)
    run.log.go(run.progress)
    if received := run.stop_signal.received:
        signals = run.stop_signal.signals
        finish(run)
        signals.outcome = signals.error(messages.saved(run), received)
        run.job.state.ranks.wait()  # a launcher ends the others when the first one leaves
        raise signals.outcome


def _require_a_use(run: Run, *, at_most: int) -> None:
    """Raise NumericsError if no run could go on from what has been saved last."""
    if run.set_aside > at_most:
        raise NumericsError(messages.lost(run, finish(run)))


def _save_is_due(run: Run, epoch_ended: bool) -> bool:
    config = run.job.recipe.checkpoint
    if config.every_steps is None:
        return epoch_ended and config.every_minutes is None
    return run.progress.step % config.every_steps == 0


def evaluation_was_cut_off(job: Job) -> bool:
    """Return whether the run was stopped between a step and the evaluation due after it."""
    progress, recipe = job.state.progress, job.recipe
    if progress.step == 0 or progress.evaluated_step == progress.step:
        return False
    if job.eval_data is None:
        return False
    if finished(job):
        return True
    every = recipe.train.eval_every_steps
    return progress.batch_in_epoch == 0 if every is None else progress.step % every == 0


def _take(run: Run, report: StepReport) -> None:
    """Log a step, and stop the run when non-finite steps have lasted too long."""
    if report.scale_differs:
        run.job.state.require_agreement()
    run.log.report(report, run.progress)
    window = next((batches for step, batches in run.windows if step == report.step), [])
    if report.moved is not None and not run.is_bound:
        warning = what_is_moved(run.job.state, window, report)
        run.is_bound = True
        if run.job.state.ranks.is_first:
            run.log.console.warn(warning)
    if report.scale_after != report.scale_before:
        run.scales.append((report.step, report.scale_after))
    amp = run.job.recipe.amp
    if not report.skipped:
        if report.loss is not None:
            prepare(run)
        return
    if amp.nonfinite == "skip" and report.consecutive_skips < amp.max_skips:
        return
    _log_last(run)
    diagnosis = diagnose(run.job, window, step=report.step - 1)
    run.log.diagnosis(
        report.step,
        cause=diagnosis.cause,
        module=diagnosis.module,
        tensor=diagnosis.tensor,
        advice=diagnosis.advice,
    )
    saved = finish(run)
    raise NumericsError(messages.stopped(run, report, diagnosis, saved))


def _log_last(run: Run) -> None:
    """Log the step that the run ends with, where nobody knew that it would be the last one."""
    log, ranks = run.log, run.job.state.ranks
    if log.unlogged is None:
        return
    loss = log.unlogged.loss
    if loss is not None:
        loss = ranks.total(loss) / ranks.size  # the loss of a step is each rank's part of it
    log.log_last(run.progress, loss=loss)


def _evaluate(run: Run, *, is_due: bool) -> None:
    """Evaluate, and let the best so far see the result; a signal cuts it off."""
    data, progress, recipe = run.job.eval_data, run.progress, run.job.recipe
    if data is None or progress.evaluated_step == progress.step:
        return
    run.stop_signal.begin()
    run.watchdog.doing = f"the evaluation after step {progress.step}"
    with run.log.console.evaluating(len(data)) as shown:

        def proceed() -> bool:
            shown.advance()
            run.stop_signal.look()
            return run.stop_signal.received is None

        try:
            metrics = evaluate(run.job.state, data, proceed=proceed)
        except NoItemsError as error:
            if run.job.state.ranks.is_first:
                run.log.console.warn(f"step {progress.step}: {error}")
            metrics = dict.fromkeys((LOSS, *_watched(run)), math.nan)
        except Exception as error:
            if changed := changed_by_a_pass(run.job):
                raise changed from error
            if run.job.state.ranks.size == 1 and run.saved_step != progress.step:
                save(run)  # the step before it is done
            doing = f"the evaluation after step {progress.step}"
            told = in_words(error, run.job.state.bare, (), doing=doing, state=run.job.state)
            if told is None:
                raise
            raise told from error
    if changed := changed_by_a_pass(run.job):  # in eval mode alone, or since the first step
        raise changed
    if metrics is None:
        return
    monitor = recipe.checkpoint.monitor
    with run.job.state.boundary.changing():
        best = take_metrics(run, metrics)
        if is_due:
            follow(run)
    epoch = progress.epoch - 1 if progress.batch_in_epoch == 0 else progress.epoch
    run.log.evaluation(progress, epoch, metrics, best=best)
    _warn_of_bad_evaluation(run, metrics)
    _require_metric(run, "checkpoint.monitor", monitor, metrics)
    if recipe.train.early_stop is not None:
        _require_metric(run, "train.early_stop.monitor", recipe.train.early_stop.monitor, metrics)


def _watched(run: Run) -> list[str]:
    """Return the metrics that a run is steered by."""
    early_stop = run.job.recipe.train.early_stop
    monitor = run.job.recipe.checkpoint.monitor
    return [monitor, early_stop.monitor] if early_stop is not None else [monitor]


def _warn_of_bad_evaluation(run: Run, metrics: dict[str, float]) -> None:
    names = dict.fromkeys((LOSS, *_watched(run)))
    bad = [n for n in names if not math.isfinite(metrics.get(n, 0.0))]
    if bad and run.job.state.ranks.is_first:
        told = ", ".join(f"{name} is {metrics[name]}" for name in bad)
        run.log.console.warn(
            f"step {run.progress.step}: {told}: this evaluation counts as one that is not better "
            "than any, for the best checkpoint, early stopping and ReduceLROnPlateau"
        )


def _require_metric(run: Run, key: str, monitor: str, metrics: dict[str, float]) -> None:
    """Stop, with the state saved, over a metric that the task does not give."""
    if monitor in metrics:
        return
    save(run)
    finish(run)
    advice = f"the state is saved: `{run.resume_command} {key}=NAME` goes on"
    raise RecipeError([unknown_metric(run.job.loaded, key, monitor, metrics, advice)])
