"""What a run says of itself when it begins and when it ends."""

from __future__ import annotations

import shlex
from pathlib import Path

from ampctl import commands
from ampctl.builder.job import Job, micro_batch_size
from ampctl.doctor.nonfinite import Diagnosis
from ampctl.doctor.set_by_schedule import set_by_schedule
from ampctl.engine.modes import parts_in_eval_mode
from ampctl.engine.parameter_groups import describe_groups
from ampctl.engine.state import Progress, StepReport
from ampctl.errors import first_of
from ampctl.recipe.load import LoadedRecipe, recipe_changes
from ampctl.run.run import Run


def changes(job: Job, saved: LoadedRecipe) -> list[str]:
    """Describe what has changed since a recipe was saved, and of what it has no effect."""
    ignored = set_by_schedule(job)
    return [
        next((f"{c} (no effect: {why})" for k, why in ignored.items() if c.startswith(f"{k} ")), c)
        for c in recipe_changes(saved, job.loaded)
    ]


def start(job: Job, run_dir: Path, checkpoint: Path | None) -> list[str]:
    """Describe what is about to run: how large, how long, on what and why, where it is kept."""
    state, progress, data = job.state, job.state.progress, job.recipe.data
    micro = micro_batch_size(job.recipe, state.ranks)
    passes = -(-data.batch_size // (micro * state.ranks.size))
    accumulated = f" in {passes} micro-batches each" if passes > 1 else ""
    steps = f"{job.total_steps:,} steps" if job.total_steps is not None else "steps"
    lines = [
        f"{job.recipe.name}: {job.num_parameters:,} parameters, "
        f"{steps} of {data.batch_size} samples{accumulated}",
        f"on {_devices(job)} in {state.precision.name} ({state.precision.reason})",
    ]
    accuracy = _accuracy(job)
    if accuracy:
        lines.append(accuracy)
    if state.upcast:
        lines.append(
            f"upcast: {len(state.upcast)} parameters that came in half precision are trained in "
            f"float32: {first_of(state.upcast)}"
        )
    if state.module_dtypes:
        names = ", ".join(f"{name} in {dtype}" for name, dtype in state.module_dtypes.items())
        lines.append(f"apart: {names}")
    if kept := parts_in_eval_mode(state.bare):
        lines.append(f"left in eval mode, as the model is built: {first_of(kept)}")
    for updater in state.updaters:
        groups = updater.optimizer.param_groups
        if updater.name or len(groups) > 1:
            title = f"optimizer {updater.name}" if updater.name else "group"
            lines += [f"{title}: {line}" for line in describe_groups(groups)]
    lines.append(f"run folder: {run_dir}")
    if checkpoint is not None:
        scale = f", scale {state.scale_on_host:g}" if state.scaler.enabled else ""
        lines.append(
            f"going on from {checkpoint.name}: step {progress.step}, epoch {progress.epoch}"
            f"{scale}, {progress.skipped} skipped"
        )
    return lines


def _devices(job: Job) -> str:
    device, ranks, blocks = job.state.device, job.state.ranks, job.state.blocks
    if not ranks.shards:
        return f"{ranks.size} ranks of {device.type}" if ranks.size > 1 else f"{device}"
    few = f"{len(blocks)} blocks, {blocks[0]} to {blocks[-1]}" if blocks else "one piece"
    return f"{ranks.size} ranks of {device.type}, sharded in {few},"


def _accuracy(job: Job) -> str:
    """Describe how matrix products are computed, where the recipe or the device leaves a choice."""
    amp, said = job.recipe.amp, []
    on_cuda = job.state.device.type == "cuda"
    if amp.matmul_precision != "highest" or on_cuda:
        said.append(f"float32 products at precision {amp.matmul_precision}")
    if on_cuda and job.state.precision.name != "float32":
        kind = "half" if amp.reduced_precision_reduction else "float32"
        said.append(f"{job.state.precision.name} products added up in {kind} precision")
    return "; ".join(said)


def ending(job: Job, run_dir: Path, reason: str) -> list[str]:
    """Describe how a run ended, what it reached, and the command that goes on."""
    progress = job.state.progress
    skipped = f", {progress.skipped} skipped" if progress.skipped else ""
    if empty := progress.step - progress.updates - progress.skipped:
        skipped += f", {empty} without items"
    how = "stopped early" if reason == "early_stop" else "complete"
    lines = [f"{how}: {progress.step} steps, {progress.updates} updates{skipped}"]
    for name, updates in progress.optimizer_updates.items():
        lines.append(f"{name}: {updates} updates, {progress.optimizer_skips[name]} skipped")
    if progress.best is not None:
        monitor = job.recipe.checkpoint.monitor
        lines.append(f"best {monitor} {progress.best:.4g} at step {progress.best_step}")
    if progress.metrics:
        figures = "  ".join(f"{name} {value:.4g}" for name, value in progress.metrics.items())
        lines.append(f"last {figures}")
    return [*lines, f"run folder: {run_dir}", _extend(job, run_dir)]


def stopped(run: Run, report: StepReport, diagnosis: Diagnosis, saved: Path | None) -> str:
    """Describe why a run stopped itself over non-finite steps, and how to go on."""
    history = " -> ".join(f"{scale:g} (step {step})" for step, scale in run.scales)
    command = run.resume_command if saved else run.anew
    change = f" {shlex.quote(diagnosis.override)}" if diagnosis.override else ""
    lines = [
        f"stopped at step {report.step}: {_row(report, run.progress)}",
        f"  cause:  {diagnosis.cause}",
        *(f"  seen:   {fact}" for fact in diagnosis.facts),
        *([f"  scale:  {history}"] if history else []),
        f"  advice: {diagnosis.advice}",
        f"  next:   `{command}{change}`" + ("" if change else ", once this is mended"),
        f"  {_untouched(report)} not touched by these steps; "
        + (f"the newest checkpoint is {saved}" if saved else "no checkpoint was saved before them"),
    ]
    return "\n".join(lines)


TOO_EARLY = "before the first step: nothing was trained, so nothing is lost"


def saved(run: Run) -> str:
    """Describe where a run is saved that a signal ended."""
    if not run.progress.step:
        return TOO_EARLY
    return f"at step {run.progress.step}, which is saved: `{run.resume_command}` goes on"


def newest(run: Run) -> str:
    """Describe from where a run that ended unsaved can be resumed."""
    path = run.newest_on_disk
    if path is None and run.job.state.ranks.is_first:
        return "no checkpoint has been saved"
    return f"`{run.resume_command}` goes on from {path or 'the newest checkpoint'}"


def lost(run: Run, saved: Path | None) -> str:
    """Describe why a run is ended that trains, but saves nothing that could be resumed."""
    times = f", for {run.set_aside} checkpoints in a row" if run.set_aside > 1 else ""
    way_on = f"the newest one that can is {saved}" if saved else "none was saved before that can"
    again = f"`{run.resume_command}` goes on" if saved else f"`{run.anew}` begins anew"
    return (
        f"at step {run.progress.step} the state is not finite{times}: {first_of(run.not_finite)}."
        f" No run can go on from such a checkpoint; {way_on}. Find what makes them so; then {again}"
    )


def _row(report: StepReport, progress: Progress) -> str:
    """Describe what lasted too long: steps, or the turns of one optimizer."""
    count = report.consecutive_skips
    if count > progress.consecutive_skips:
        names = [n for n, row in progress.optimizer_skips_in_a_row.items() if row == count]
        return f"{count} non-finite turns of {', '.join(names)} in a row"
    row = "the first non-finite step" if count == 1 else f"{count} non-finite steps in a row"
    return f"{row}; the last good step was {report.step - count}"


def _untouched(report: StepReport) -> str:
    skipped = [name for name, own in report.optimizers.items() if own["skipped"]]
    whose = "" if len(skipped) == len(report.optimizers) else f" of {', '.join(skipped)}"
    return f"weights{whose} were"


def already_complete(job: Job, run_dir: Path, reason: str) -> list[str]:
    """Describe that there is nothing left to do."""
    progress, train = job.state.progress, job.recipe.train
    if reason == "early_stop":
        what = f"stopped early at step {progress.step}"
    elif train.max_steps is not None and progress.step >= train.max_steps:
        what = f"{progress.step} of {train.max_steps} steps"
    else:
        what = f"{progress.epoch} of {train.max_epochs} epochs"
    return [f"already complete ({what}); nothing is changed", _extend(job, run_dir)]


def _extend(job: Job, run_dir: Path) -> str:
    """Return the command that trains on: it lifts the limit that ended the run."""
    progress, train = job.state.progress, job.recipe.train
    early_stop = train.early_stop
    if early_stop is not None and progress.early_stop_bad >= early_stop.patience:
        change = "train.early_stop=null"
    elif train.max_steps is not None and progress.step >= train.max_steps:
        change = f"train.max_steps={2 * max(train.max_steps, progress.step)}"
    else:
        change = f"train.max_epochs={2 * max(train.max_epochs or 1, progress.epoch)}"
    return f"to go on: {commands.resume(run_dir, [change], ranks=job.state.ranks.option)}"
