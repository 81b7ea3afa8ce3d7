"""What can be found wrong with a recipe without training: it is built and tried on one batch."""

from __future__ import annotations

import math
from itertools import islice
from typing import Any

from ampctl.build import Job, build_job
from ampctl.data.loader import EvalData
from ampctl.doctor.misfit import in_words
from ampctl.doctor.nonfinite import examine
from ampctl.errors import NumericsError, RecipeError, UsageError
from ampctl.preflight import unknown_metric
from ampctl.recipe.load import LoadedRecipe
from ampctl.recipe.target import import_from_current_folder
from ampctl.state import StepReport
from ampctl.step import settle, train_step
from ampctl.train.evaluate import evaluate


def check_recipe(loaded: LoadedRecipe) -> dict[str, Any]:
    """Build a recipe, try one step and evaluate one batch; return what would run.

    Nothing is written. Raises what ``train`` would raise.
    """
    import_from_current_folder()
    job = build_job(loaded)
    state = job.state
    try:
        first = next(iter(job.train_data.windows(0, 0)), None)
        if first is None:
            raise UsageError("data.train: the iterable data set gave no step")
        window, samples = first
        report = _first_step(job, window)
        if job.eval_data is not None:
            _check_monitors(job, _first_evaluation(job, job.eval_data))
    finally:
        job.train_data.close()
        if job.eval_data is not None:
            job.eval_data.close()
    return {
        "recipe": job.recipe.name,
        "device": str(state.device),
        "dtype": f"{state.precision.name} ({state.precision.reason})",
        "parameters": sum(p.numel() for p in state.bare.parameters()),
        "steps": job.total_steps,
        "optimizer": _optimizer_words(state.optimizer),
        "first step": f"{samples} samples, loss {report.loss:.4g}, "
        + ("skipped: non-finite gradient" if report.skipped else f"grad {report.grad_norm:.4g}"),
        "verdict": "ready to train",
    }


def _first_step(job: Job, window: list[Any]) -> StepReport:
    try:
        train_step(job.state, window, measure=True)
        report = settle(job.state)
    except Exception as error:
        told = in_words(error, job.state.bare, window, doing="the first step")
        if told is None:
            raise
        raise told from error
    assert report is not None, "a step was just taken"
    if not math.isfinite(report.loss):
        raise NumericsError(_not_finite(job, window, report.loss))
    return report


def _first_evaluation(job: Job, data: EvalData) -> dict[str, float]:
    try:
        return evaluate(job.state, islice(data, 1)) or {}
    except Exception as error:
        told = in_words(error, job.state.bare, (), doing="the evaluation")
        if told is None:
            raise
        raise told from error


def _not_finite(job: Job, window: list[Any], loss: float) -> str:
    found = examine(job.state, window)
    facts = "".join(f"\n  seen:   {fact}" for fact in found.facts)
    return (
        f"the loss of the first step is {loss}\n  cause:  {found.cause}{facts}\n"
        f"  advice: {found.advice}"
    )


def _check_monitors(job: Job, metrics: dict[str, float]) -> None:
    early_stop = job.recipe.train.early_stop
    watched = {"checkpoint.monitor": job.recipe.checkpoint.monitor}
    if early_stop is not None:
        watched["train.early_stop.monitor"] = early_stop.monitor
    problems = [
        unknown_metric(job.loaded, key, monitor, metrics)
        for key, monitor in watched.items()
        if monitor not in metrics
    ]
    if problems:
        raise RecipeError(problems)


def _optimizer_words(optimizer: Any) -> str:
    fused = any(group.get("fused") for group in optimizer.param_groups)
    return f"{type(optimizer).__name__}{', fused' if fused else ''}"
