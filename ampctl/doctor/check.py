"""What can be found wrong with a recipe without training: it is built and tried on one batch."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator
from dataclasses import asdict, replace
from itertools import chain, count, islice
from typing import Any

import torch

from ampctl.builder.checkpointable import changed_by_a_pass, refuse_unsavable
from ampctl.builder.job import Job, build_new
from ampctl.builder.refusals import unknown_metric
from ampctl.data.loader import EvalData
from ampctl.distributed.env import choose_device
from ampctl.doctor import remedy
from ampctl.doctor.finding import Target
from ampctl.doctor.half_precision import HalfPrecisionError
from ampctl.doctor.ignored import ignored_settings
from ampctl.doctor.lone_sample import refuse_lone_sample
from ampctl.doctor.mismatch import in_words
from ampctl.doctor.nonfinite import examine
from ampctl.doctor.precision_check import preflight
from ampctl.doctor.replay import Replay, tried, without_scale
from ampctl.doctor.schedule_length import not_compared, schedule_findings
from ampctl.doctor.weight_changes import moved_too_early, what_is_moved
from ampctl.engine.evaluation import NoItemsError, evaluate
from ampctl.engine.modes import parts_in_eval_mode
from ampctl.engine.state import StepReport, TrainState
from ampctl.engine.step import settle, train_step
from ampctl.engine.updater import Updater
from ampctl.engine.weight_changes import figures
from ampctl.errors import MachineError, NumericsError, RecipeError, UsageError, first_of
from ampctl.recipe.current_folder import open_current_folder
from ampctl.recipe.load import LoadedRecipe
from ampctl.recipe.schema import DType
from ampctl.track.console import Console

MOST_WITHOUT_ITEMS = 10
"""So many steps or batches in a row may be empty before a recipe is refused for it."""

Facts = dict[str, Any]

_MOST_TRIED = 100
"""So many steps are tried at most, whatever `amp.max_skips` allows."""


def check_recipe(loaded: LoadedRecipe) -> Facts:
    """Build a recipe, look at its precision, try one step and evaluate one batch.

    Returns what would run; warnings go to stderr, and are among it as ``findings``. Nothing is
    written. Raises what ``train`` would raise, except for a device that is not here: the recipe is
    rehearsed on the CPU, and its precision examined for that device.
    """
    open_current_folder()
    rehearsed, target = _rehearsal(loaded)
    try:
        return _check(loaded, rehearsed, target)
    except HalfPrecisionError as error:
        amp = rehearsed.recipe.amp
        if target is None or amp.dtype == "float32":
            raise
        # It is this CPU that cannot run it; the trace has shown what can be known of the target.
        modules: dict[str, DType] = dict.fromkeys(amp.modules, "float32")
        in_float32 = replace(amp, dtype="float32", modules=modules)
        again = replace(rehearsed, recipe=replace(rehearsed.recipe, amp=in_float32))
        return _check(loaded, again, target, f"{error}".partition(", in float32")[0])


def _check(
    loaded: LoadedRecipe, rehearsed: LoadedRecipe, target: Target | None, why: str = ""
) -> Facts:
    """Check a recipe by way of a rehearsal; ``why`` it is in float32, if it was not meant to be."""
    job = build_new(rehearsed)
    state = job.state
    try:
        refuse_unsavable(job, begun=False)
        refuse_lone_sample(job)
        windows = _windows(job)
        first = next(windows, None)
        if first is None:
            raise UsageError("data.train: the iterable data set gave no step")
        window, samples = first
        findings = [*schedule_findings(job), *preflight(job, window, target)]
        report, made = _first_update(job, chain([first], windows))
        refuse_unsavable(job, begun=True)
        if job.eval_data is not None:
            metrics = _first_evaluation(job, job.eval_data)
            refuse_unsavable(job, begun=True)  # what a model does in eval mode alone
            _check_monitors(job, metrics)
    finally:
        job.train_data.close()
        if job.eval_data is not None:
            job.eval_data.close()
    console = Console(quiet=True)
    for finding in findings:
        console.warn(str(finding))
    dtype, device_type = (target.dtype, target.device_type) if target else ("", "")
    kept = first_of(parts_in_eval_mode(state.bare))
    unknown = not_compared(job)
    notes = ignored_settings(job, dtype=dtype, device_type=device_type)
    ignored = [note.removeprefix("no effect ") for note in notes]
    return {
        "recipe": job.recipe.name,
        **_device_and_dtype(loaded, state, target),
        **({"rehearsal": f"in float32: {why}"} if why else {}),
        "parameters": job.num_parameters,
        "steps": job.total_steps,
        **({"schedule": f"not compared with the run: {unknown}"} if unknown else {}),
        **({"eval mode": f"{kept}, as the model is built"} if kept else {}),
        **({"no effect": "; ".join(ignored)} if ignored else {}),
        **({"labels": found} if (found := getattr(state.task, "found", "")) else {}),
        "optimizer": "; ".join(_optimizer_words(updater) for updater in state.updaters),
        "first step": _first_words(report, samples),
        **({"first made": _made_words(made)} if made is not report else {}),
        "findings": [asdict(finding) for finding in findings],
        "verdict": "ready to train",
    }


def _rehearsal(loaded: LoadedRecipe) -> tuple[LoadedRecipe, Target | None]:
    """Move a recipe whose device is not here to the CPU, and return what it is meant for."""
    recipe = loaded.recipe
    try:
        choose_device(recipe.train.device)
    except MachineError:
        kind = torch.device(recipe.train.device).type
        # What `auto` takes over there cannot be known here; the GPUs of today have bfloat16.
        dtype = "bfloat16" if recipe.amp.dtype == "auto" else recipe.amp.dtype
        on_cpu = replace(recipe, train=replace(recipe.train, device="cpu"))
        return replace(loaded, recipe=on_cpu), Target(kind, dtype, here=False)
    return loaded, None


def _device_and_dtype(wanted: LoadedRecipe, state: TrainState, target: Target | None) -> Facts:
    here = state.precision
    if target is None:
        return {"device": str(state.device), "dtype": f"{here.name} ({here.reason})"}
    device, dtype = wanted.recipe.train.device, f"{target.dtype} ({here.reason})"
    if wanted.recipe.amp.dtype == "auto":
        dtype = f"auto, settled there: rehearsed in {here.name}, traced in {target.dtype}"
    return {
        "device": f"{device}, which is not here: rehearsed on the cpu, traced for {device}",
        "dtype": dtype,
    }


def _windows(job: Job) -> Iterator[tuple[list[Any], int]]:
    """Yield the windows of training, epoch after epoch."""
    for epoch in count():
        empty = True
        for each in job.train_data.windows(epoch, 0):
            empty = False
            yield each
        if empty:
            return


def _first_update(
    job: Job, windows: Iterable[tuple[list[Any], int]]
) -> tuple[StepReport, StepReport]:
    """Take steps as training would until one is made; return the first report and that one's.

    Steps without items are passed over. One more is taken with the same samples, which shows where
    that one has led; not under a loss scale. Raises NumericsError if none is made in as many as
    training would try, if the state or the next step is spoilt by it, or if it is too small to move
    a weight, and UsageError if a number of them have no items.
    """
    amp, state = job.recipe.amp, job.state
    tries = 1 if amp.nonfinite == "stop" else min(amp.max_skips, _MOST_TRIED)
    reports: list[StepReport] = []
    window: list[Any] = []
    before = figures(state.parameters)
    for window, _ in windows:
        report = _step(job, window)
        if report.loss is not None:
            reports.append(report)
            if not report.skipped or len(reports) == tries:
                break
        elif report.step - len(reports) == MOST_WITHOUT_ITEMS:
            break
    if not reports:
        raise UsageError(
            f"the first {state.progress.step} steps have no items, so that nothing would be "
            "learned: every label is ignored, or the task gave no loss for any batch. Compare the "
            "task (ignore_index, num_items) with the labels of data.train"
        )
    first, last = reports[0], reports[-1]
    if last.skipped:
        scales = f", at scales from {first.scale_before:g} to {last.scale_before:g}"
        raise NumericsError(
            f"no step was made in {len(reports)} tries{scales if state.scaler.enabled else ''}: "
            f"the gradient was never finite{_diagnosis(job, window, last)}"
        )
    _refuse_nonfinite(state, "step leaves")
    rates = [each.lr for each in state.updaters if each.learning_rate.source is None]
    is_still = bool((figures(state.parameters) == before).all())
    if is_still and last.grad_norm and len(rates) == len(state.updaters) and max(rates) > 0:
        raise NumericsError(
            f"the first step has changed no weight: a rate of {max(rates):g} is too small for "
            f"their dtype. Raise {remedy.rate(state)}"
        )
    if state.scaler.enabled:  # float16 may overflow in the next step, whatever the rate
        return first, last
    then = _step(job, window)
    if then.skipped:
        raise NumericsError(
            f"the first step goes too far: the gradient after it is not finite"
            f"{_diagnosis(job, window, then)}"
        )
    _refuse_nonfinite(state, "two steps leave")
    return first, last


def _refuse_nonfinite(state: TrainState, which: str) -> None:
    if bad := state.nonfinite(state.parts()):
        raise NumericsError(
            f"the first {which} values that are not finite: {first_of(bad)}. Lower "
            f"{remedy.rate(state)}, or look at the optimizer's other settings"
        )


def _step(job: Job, window: list[Any]) -> StepReport:
    try:
        train_step(job.state, window, measure=True)
        report = settle(job.state)
    except Exception as error:
        told = (
            changed_by_a_pass(job)
            or moved_too_early(error, job.state)
            or in_words(
                error,
                job.state.bare,
                window,
                doing="the first step",
                state=job.state,
                data=job.train_data,
            )
        )
        if told is None:
            raise
        raise told from error
    assert report is not None, "a step was just taken"
    if warning := what_is_moved(job.state, window, report) if report.step == 1 else "":
        Console(quiet=True).warn(warning)
    loss = 0.0 if report.loss is None else report.loss
    if not math.isfinite(loss) and not _scale_alone_is_at_fault(job.state, window):
        which = "the first step" if report.step == 1 else f"step {report.step}"
        diagnosis = _diagnosis(job, window, report)
        raise NumericsError(f"the loss of {which} is {report.loss}{diagnosis}")
    return report


def _scale_alone_is_at_fault(state: TrainState, window: list[Any]) -> bool:
    """Return whether a loss that holds a gradient is finite once the scale has backed off."""
    method = "losses" if state.takes_turns else "loss"
    fixed = state.amp.static or state.amp.min_scale > 1
    if "grad" not in state.extras(method) or not state.scaler.enabled or fixed:
        return False
    first = replace(without_scale(state), progress=replace(state.progress, step=0))
    found = tried(first, window)
    return isinstance(found, Replay) and found.is_finite


def _first_evaluation(job: Job, data: EvalData) -> dict[str, float]:
    nothing: NoItemsError | None = None
    try:
        for batch in islice(data, MOST_WITHOUT_ITEMS):
            try:
                return evaluate(job.state, [batch]) or {}
            except NoItemsError as error:
                nothing = error
        raise nothing or UsageError("data.eval: the data set is empty")
    except Exception as error:
        told = in_words(error, job.state.bare, (), doing="the evaluation", state=job.state)
        if told is None:
            raise
        raise told from error


def _diagnosis(job: Job, window: list[Any], report: StepReport) -> str:
    found = examine(job.state, window, step=report.step - 1)
    facts = "".join(f"\n  seen:   {fact}" for fact in found.facts)
    return f"\n  cause:  {found.cause}{facts}\n  advice: {found.advice}"


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


def _gradient_words(report: StepReport) -> str:
    if not report.skipped:
        return f"grad {report.grad_norm:.4g}"
    scales = f"{report.scale_before:g} -> {report.scale_after:g}"
    falls = report.scale_after < report.scale_before
    return f"skipped: non-finite gradient{f', scale {scales}' if falls else ''}"


def _first_words(report: StepReport, samples: int) -> str:
    """Describe the first step that had items."""
    empty = f"; before it {report.step - 1} without items" if report.step > 1 else ""
    return f"{samples} samples, loss {report.loss:.4g}, {_gradient_words(report)}{empty}"


def _made_words(report: StepReport) -> str:
    """Describe when a step was made at last, after float16 had found its scale."""
    at = f"step {report.step}, at scale {report.scale_before:g}"
    return f"{at}, loss {report.loss:.4g}, {_gradient_words(report)}"


def _optimizer_words(updater: Updater) -> str:
    optimizer = updater.optimizer
    fused = any(group.get("fused") for group in optimizer.param_groups)
    name = f"{updater.name}: " if updater.name else ""
    return f"{name}{type(optimizer).__name__}{', fused' if fused else ''}"
