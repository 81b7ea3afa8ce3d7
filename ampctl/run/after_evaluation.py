"""What an evaluation changes in a run: its best, its schedules, and whether it stops early."""

from __future__ import annotations

from ampctl.monitor import Patience, is_better, monitored
from ampctl.run.run import Run


def follow(run: Run) -> None:
    """Show an evaluation that was due to schedules and early stopping, once.

    One at a run's end that is not due is none of a run that was longer from the start.
    """
    progress, recipe = run.progress, run.job.recipe
    if progress.evaluated_step != progress.step or progress.followed_step == progress.step:
        return
    progress.followed_step = progress.step
    value = monitored(progress.metrics, recipe.checkpoint.monitor)
    for updater in run.job.state.updaters:
        updater.learning_rate.evaluated(value)  # NaN is no progress to a plateau scheduler
    _early_stop(run, progress.metrics)


def take_metrics(run: Run, metrics: dict[str, float]) -> bool:
    """Take note of an evaluation's metrics; return whether they are the best."""
    progress, config = run.progress, run.job.recipe.checkpoint
    progress.evaluated_step, progress.metrics = progress.step, metrics
    value = monitored(metrics, config.monitor) if config.monitor in metrics else None
    best = value is not None and is_better(value, progress.best, config.mode)
    if best:
        progress.best, progress.best_step = value, progress.step
    return best


def _early_stop(run: Run, metrics: dict[str, float]) -> None:
    config, progress = run.job.recipe.train.early_stop, run.progress
    if config is None or config.monitor not in metrics:
        return
    patience = Patience(
        config.mode, config.patience, progress.early_stop_best, progress.early_stop_bad
    )
    patience.update(monitored(metrics, config.monitor))
    progress.early_stop_best, progress.early_stop_bad = patience.best, patience.bad
