"""The precision preflight: what would go wrong in this dtype, named before the first step.

Here is what can be said of what was built, without running it; ``dry_run`` looks at each operation.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import torch
from torch import nn

from ampctl import environment
from ampctl.builder.job import Job
from ampctl.doctor.dry_run import owners, traced_findings
from ampctl.doctor.finding import (
    REFUSED_REMEDY,
    REFUSING,
    Finding,
    Target,
    vanishes,
)
from ampctl.engine.ema import WeightAverage
from ampctl.engine.state import TrainState
from ampctl.engine.updater import Updater
from ampctl.errors import UsageError, first_of
from ampctl.recipe.schema import block_key
from ampctl.tasks.task import Task


def preflight(
    job: Job, window: Sequence[Any] | None = None, target: Target | None = None
) -> list[Finding]:
    """Look for what would go wrong; return the warnings.

    Args:
        job: what was built.
        window: the micro-batches of a step. With them a forward pass is traced on fake tensors,
            which calls the model and the task once more, on copies; without, nothing is run.
        target: what the run is for, if that is not the device that it was built on.

    Raises:
        UsageError: something would end or spoil the run; all of it is told.
    """
    target = target or Target.of(job.state, chosen=job.recipe.train.device == "auto")
    findings = static_findings(job.state, target)
    _refuse(findings)
    if window is not None:
        traced = traced_findings(job.state, window, target)
        if target.device_type in REFUSING and not any(f.name == "not-traced" for f in traced):
            # A loss that is there need not be called under autocast: the trace knows.
            findings = [f for f in findings if f.name != "refused-by-autocast"]
        findings += traced
        _refuse(findings)
    return findings


def _refuse(findings: Sequence[Finding]) -> None:
    errors = [finding for finding in findings if finding.severity == "error"]
    if errors:
        head = f"{len(errors)} findings before the first step\n" if len(errors) > 1 else ""
        raise UsageError(head + "\n".join(f"{finding}" for finding in errors))


def static_findings(state: TrainState, target: Target | None = None) -> list[Finding]:
    """Return what can be said of a built state without running it; takes milliseconds."""
    target = target or Target.of(state)
    return [
        *_no_parameters(state),
        *_half_parameters(state),
        *_refused(state, target),
        *_not_in_hardware(target),
    ]


def _no_parameters(state: TrainState) -> Iterator[Finding]:
    for updater in state.updaters:
        if any(parameter.requires_grad for parameter in updater.parameters):
            continue
        count = len(updater.parameters)
        kind, model = type(updater.optimizer).__name__, type(state.bare).__name__
        found = f"all {count} are frozen" if count else "it has none"
        yield Finding(
            "no-parameters",
            block_key("optimizer", updater.name),
            f"{kind} got no trainable parameter of {model}: {found}",
            "Set requires_grad=True on what should be trained.",
            "error",
        )


def _half_parameters(state: TrainState) -> Iterator[Finding]:
    upcast = (
        "Set amp.upcast=true (float32 masters of them), or load the model in float32 (for "
        "transformers: dtype=torch.float32); autocast casts where that is safe."
    )
    half = _trained_names(state, torch.float16)
    if half:
        yield Finding(
            "half-parameters",
            first_of(half),
            f"{len(half)} trainable parameters are float16 themselves: a gradient in float16 "
            "cannot be unscaled, and small updates are lost",
            f"{upcast} Frozen parameters may stay float16.",
            "error",
        )
        yield from (finding for updater in state.updaters for finding in _lost_eps(updater, upcast))
    half = _trained_names(state, torch.bfloat16)
    if half:
        lost = "an update below 1/256 of a weight can be lost"
        averaged = isinstance(state.ema, WeightAverage)
        if averaged:
            lost += ", and the average that train.ema_decay asks for stands still"
        yield Finding(
            "half-parameters",
            first_of(half),
            f"{len(half)} trainable parameters are bfloat16 themselves: {lost}",
            upcast,
            "error" if averaged else "warning",
        )


def _lost_eps(updater: Updater, remedy: str) -> Iterator[Finding]:
    """Find an optimizer's ``eps`` that is 0 in the dtype of its parameters."""
    for group in updater.optimizer.param_groups:
        eps = group.get("eps")
        is_half = any(p.requires_grad and p.dtype == torch.float16 for p in group["params"])
        if is_half and isinstance(eps, float) and vanishes(eps):
            yield Finding(
                "vanishing-eps",
                block_key("optimizer", updater.name),
                f"eps {eps:g} of {type(updater.optimizer).__name__} is 0 in float16, which its "
                "parameters are in: a small gradient is divided by 0",
                remedy,
                "error",
            )
            return


def _trained_names(state: TrainState, dtype: torch.dtype) -> list[str]:
    wanted = {id(p) for p in state.parameters if p.requires_grad and p.dtype == dtype}
    # Names cost a walk over all modules, and most models need none.
    return [n for n, p in state.bare.named_parameters() if id(p) in wanted] if wanted else []


def _refused(state: TrainState, target: Target) -> Iterator[Finding]:
    """Find losses that CUDA autocast refuses; here only that they are there, not that they run."""
    elsewhere = target.chosen and target.device_type == "cpu"
    if target.dtype == "float32" or (target.device_type not in REFUSING and not elsewhere):
        return
    places = [
        f"model.{name}"
        for name, module in state.bare.named_modules()
        if isinstance(module, nn.BCELoss) and not _in_float32(state, name)
    ]
    places += [f"task.{name}" for name in _held_losses(state.task)]
    if places:
        where = "on CUDA autocast refuses" if elsewhere else "autocast refuses"
        yield Finding(
            "refused-by-autocast",
            first_of(places),
            f"{where} BCELoss, as probabilities in half precision round to 0 and 1",
            REFUSED_REMEDY,
        )


def _in_float32(state: TrainState, name: str) -> bool:
    parts = name.split(".")
    around = (".".join(parts[:end]) for end in range(len(parts), 0, -1))
    chosen = next((state.module_dtypes[each] for each in around if each in state.module_dtypes), "")
    return chosen == "float32"


def _held_losses(task: Task) -> Iterator[str]:
    """Yield the losses among the attributes of a task, or of the object that it stands for."""
    for owner in owners(task):
        for name, value in vars(owner).items():
            if isinstance(value, nn.BCELoss):
                yield name
        if isinstance(owner, nn.Module):
            yield from (n for n, m in owner.named_modules() if isinstance(m, nn.BCELoss))


def _not_in_hardware(target: Target) -> Iterator[Finding]:
    if not target.here or target.dtype == "float32":
        return
    ask = {
        "bfloat16": environment.bfloat16_is_native,
        "float16": environment.float16_is_native,
    }
    native, reason = ask[target.dtype](target.device_type)
    if not native:
        yield Finding(
            "dtype-not-in-hardware",
            "amp.dtype",
            f"{target.dtype} is emulated on this {target.device_type}: {reason}",
            "Right for a rehearsal, not for speed; amp.dtype=auto takes what the device does.",
        )
