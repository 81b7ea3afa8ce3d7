"""The state of a training run: all that must be saved to go on exactly, in one place."""

from __future__ import annotations

from collections.abc import Callable, Collection, Mapping, Sequence
from dataclasses import asdict, dataclass, field
from typing import Any

import torch
from torch import Tensor, nn

from ampctl import rng
from ampctl.amp.precision import Precision
from ampctl.amp.scaler import LossScaler
from ampctl.buffers import BufferGuard
from ampctl.ema import WeightAverage
from ampctl.errors import CheckpointError
from ampctl.recipe.schema import AmpConfig
from ampctl.tasks import Task, asks_for, has_own
from ampctl.updater import Rewind, Updater, one_or_by_name

_KERNEL_CHOICES = ("fused", "foreach", "capturable", "differentiable")


@dataclass
class Progress:
    """How far a run has come. Steps count attempts, updates the steps that were applied.

    With several optimizers a step is applied if each that took part in it was;
    ``optimizer_updates`` and ``optimizer_skips`` count for each by itself.
    """

    step: int = 0
    updates: int = 0
    skipped: int = 0
    consecutive_skips: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    samples: int = 0
    evaluated_step: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    early_stop_best: float | None = None
    early_stop_bad: int = 0
    optimizer_updates: dict[str, int] = field(default_factory=dict)
    optimizer_skips: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """What became of one step, once the host knows.

    ``loss`` is the mean over the step's items, ``lr`` the largest group's rate; ``scale_before``
    was used by the step, ``scale_after`` is used by the next. Where measured, else None:
    ``grad_norm``, the 2-norm of the unscaled gradient before clipping; ``underflow``, the share of
    gradient values that float16 loses at this scale; ``largest``, the largest scaled one.

    With several optimizers ``loss`` is the sum of what their turns lost, ``lr`` the rate of the
    first that took part, and the step is skipped if one of them was; ``optimizers`` has for each
    that took part whether it was ``skipped``, and its own figures.
    """

    step: int
    loss: float
    lr: float
    grad_norm: float | None
    underflow: float | None
    largest: float | None
    skipped: bool
    scale_before: float
    scale_after: float
    consecutive_skips: int
    optimizers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)


class Pending:
    """A step's figures on their way to the host, by name: ``found_inf``, ``loss``, ``scale`` ...

    On an accelerator the copy is asynchronous; by the time the next optimizer step is about to be
    queued it has long arrived, so that reading it holds nothing up. ``rates`` are the learning
    rates of the optimizers that took part, by name.
    """

    def __init__(self, step: int, rates: Mapping[str, float], figures: Mapping[str, Tensor]):
        self.step = step
        self.rates = rates
        self._names = tuple(figures)
        self._event: Any = None
        values = torch.stack(list(figures.values()))
        if values.device.type not in ("cuda", "xpu"):
            self._values = values
        else:
            self._values = torch.empty(values.shape, dtype=values.dtype, pin_memory=True)
            self._values.copy_(values, non_blocking=True)
            module = torch.get_device_module(values.device)
            self._event = module.Event()
            self._event.record(module.current_stream(values.device))

    def read(self) -> dict[str, float]:
        """Return the figures; waits for the copy if it is still under way."""
        if self._event is not None:
            self._event.synchronize()  # sync: with the step before the one being queued
        return dict(zip(self._names, self._values.tolist(), strict=True))


@dataclass
class TrainState:
    """Everything that training changes, and the fixed parts that a step needs.

    ``model`` is what the forward pass calls (compiled, say); ``bare`` is the module itself, whose
    names and tensors a checkpoint holds.
    """

    model: nn.Module
    bare: nn.Module
    task: Task
    updaters: Sequence[Updater]
    scaler: LossScaler
    precision: Precision
    amp: AmpConfig
    device: torch.device
    buffers: BufferGuard
    ema: WeightAverage | None
    channels_last: bool = False
    nonfinite_by_design: frozenset[str] = frozenset()
    module_dtypes: Mapping[str, str] = field(default_factory=dict)
    upcast: Sequence[str] = ()
    progress: Progress = field(default_factory=Progress)
    pending: Pending | None = None
    scale_on_host: float = 1.0
    parameters: Sequence[nn.Parameter] = field(init=False)
    rewinds: Mapping[str, Rewind] = field(init=False)
    takes_turns: bool = field(init=False)
    _asked: Mapping[str, frozenset[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.scale_on_host = float(self.scaler.current_scale)
        self.parameters = [p for updater in self.updaters for p in updater.parameters]
        together = self.amp.all_or_nothing and len(self.updaters) > 1
        self.rewinds = {each.name: Rewind(each) for each in self.updaters} if together else {}
        self.takes_turns = has_own(self.task, "losses")
        self._asked = {name: asks_for(getattr(self.task, name)) for name in ("loss", "losses")}
        counts = {updater.name: 0 for updater in self.updaters if updater.name}
        self.progress.optimizer_updates = {**counts, **self.progress.optimizer_updates}
        self.progress.optimizer_skips = {**counts, **self.progress.optimizer_skips}

    def extras(self, method: str) -> dict[str, Any]:
        """Return what a method of the task asks for beside the model and the batch, by name."""
        asked = self._asked[method]
        if not asked:
            return {}
        given = {"grad": self.scaler.grad, "step": self.progress.step}
        return {name: given[name] for name in asked}

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this state, by the contract's keys.

        Only at a step boundary, with nothing pending. Tensors are references, not copies.
        """
        assert self.pending is None, "settle the last step before the state is taken"
        optimizers = {each.name: each.optimizer.state_dict() for each in self.updaters}
        schedules = {each.name: each.learning_rate.state_dict() for each in self.updaters}
        return {
            "model": self.bare.state_dict(),
            "optimizer": one_or_by_name(optimizers),
            "scheduler": one_or_by_name(schedules),
            "ema": self.ema.state_dict() if self.ema else None,
            "scaler": self.scaler.state_dict(),
            "progress": asdict(self.progress),
            "rng": [rng.get_state(self.device)],
            "dtype": self.precision.name,
            "world_size": 1,
        }

    def load_state_dict(
        self,
        saved: Mapping[str, Any],
        *,
        notify: Callable[[str], None],
        changed_optimizers: Collection[str] = (),
        changed_schedulers: Collection[str] = (),
    ) -> None:
        """Restore everything from a checkpoint's dict.

        ``changed_optimizers``, ``changed_schedulers``: the names of those whose block was changed
        in the recipe on resuming, so that its hyperparameters replace the saved ones. Raises
        CheckpointError naming what does not fit.
        """
        optimizers, schedules = self._saved_by_name(saved)
        lacking = [what for what, is_there in _inside(saved, optimizers).items() if not is_there]
        if lacking:
            raise CheckpointError(
                f"the checkpoint cannot be used: it lacks {', '.join(lacking)}; "
                "name another one, or the run folder for its newest intact one"
            )
        load_model(self.bare, saved["model"])
        known = Progress.__dataclass_fields__
        self.progress = Progress(**{k: v for k, v in saved["progress"].items() if k in known})
        for updater in self.updaters:
            name = updater.name
            load_optimizer(
                updater.optimizer, optimizers[name], recipe_wins=name in changed_optimizers
            )
            updates = self.progress.updates
            updater.learning_rate.load_state_dict(
                schedules[name],
                updates=self.progress.optimizer_updates.get(name, 0) if name else updates,
                new_base=name in changed_optimizers,
                new_plan=name in changed_schedulers,
            )
        if self.ema is not None:
            if saved["ema"] is None:
                notify("the checkpoint holds no EMA: it starts from the weights")
            self.ema.load_state_dict(saved["ema"] or saved["model"])
        elif saved["ema"] is not None:
            notify("the EMA in the checkpoint is dropped: train.ema_decay is not set")
        self.scaler.load_state_dict(saved["scaler"], notify)
        self.scale_on_host = float(self.scaler.current_scale)
        if saved["rng"][0].get("device_type") != (
            None if self.device.type == "cpu" else self.device.type
        ):
            notify("saved on another kind of device: random numbers on this one start anew")
        rng.set_state(saved["rng"][0], self.device)

    def _saved_by_name(self, saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of optimizers and of schedules by name, if the names are this run's."""
        names = sorted(saved["progress"].get("optimizer_updates") or [""])
        own = sorted(updater.name for updater in self.updaters)
        if names != own:
            was, now = (", ".join(each).strip() or "one without a name" for each in (names, own))
            difference = [f"{was} in the checkpoint, {now} in the recipe"]
            raise CheckpointError(_fit_message("the optimizers", difference))
        if names == [""]:
            return {"": saved["optimizer"]}, {"": saved["scheduler"]}
        return saved["optimizer"], saved["scheduler"]


def load_model(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Load weights strictly; raise CheckpointError that lists by name what does not fit."""
    own = model.state_dict()
    problems = [f"{name}: missing in the checkpoint" for name in own if name not in state]
    problems += [f"{name}: not in the model" for name in state if name not in own]
    for name in own.keys() & state.keys():
        mine, saved = own[name], state[name]
        if isinstance(mine, Tensor) and isinstance(saved, Tensor) and mine.shape != saved.shape:
            problems.append(f"{name}: {list(saved.shape)} saved, {list(mine.shape)} in the model")
    if problems:
        raise CheckpointError(_fit_message("model", sorted(problems)))
    model.load_state_dict(dict(state), strict=True)


def load_optimizer(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], *, recipe_wins: bool
) -> None:
    """Load an optimizer's state; raise CheckpointError that names the parameters that differ."""
    own_groups = optimizer.state_dict()["param_groups"]
    own = [tuple(group.get("param_names", ())) for group in own_groups]
    saved = [tuple(group.get("param_names", ())) for group in state["param_groups"]]
    counts_differ = [len(g["params"]) for g in own_groups] != [
        len(g["params"]) for g in state["param_groups"]
    ]
    if own != saved or counts_differ:
        raise CheckpointError(_fit_message("optimizer", _group_difference(own, saved)))
    from_recipe = [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in own_groups
    ]
    # How a step is computed was settled when the optimizer was built, for this device.
    groups = [
        {**group, **{name: fresh[name] for name in _KERNEL_CHOICES if name in fresh}}
        for group, fresh in zip(state["param_groups"], own_groups, strict=True)
    ]
    try:
        optimizer.load_state_dict({**state, "param_groups": groups})
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise CheckpointError(_fit_message("optimizer", [str(error)])) from error
    _put_back_dtypes(optimizer, state)
    for group, fresh in zip(optimizer.param_groups, from_recipe, strict=True):
        for name, value in fresh.items():
            # The rate is the schedule's, which brings a new base rate to bear itself.
            if name not in group or (recipe_wins and name not in ("lr", "initial_lr")):
                group[name] = value


def _put_back_dtypes(optimizer: torch.optim.Optimizer, state: Mapping[str, Any]) -> None:
    """Undo that torch casts an optimizer's state to its parameter's dtype (NAdam's products)."""
    indices = [index for group in state["param_groups"] for index in group["params"]]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, parameter in zip(indices, parameters, strict=True):
        for name, saved in state["state"].get(index, {}).items():
            loaded = optimizer.state[parameter].get(name)
            both = isinstance(saved, Tensor) and isinstance(loaded, Tensor)
            if both and loaded.dtype != saved.dtype:
                optimizer.state[parameter][name] = saved.to(loaded.device)


def _group_difference(own: Sequence[Sequence[str]], saved: Sequence[Sequence[str]]) -> list[str]:
    place = {name: f"group {i}" for i, names in enumerate(own) for name in names}
    saved_place = {name: f"group {i}" for i, names in enumerate(saved) for name in names}
    lines = [
        f"{name}: {saved_place.get(name, 'nowhere')} in the checkpoint, "
        f"{place.get(name, 'nowhere (frozen or gone)')} now"
        for name in sorted(place.keys() | saved_place.keys())
        if place.get(name) != saved_place.get(name)
    ]
    return lines or [f"{len(saved)} parameter groups in the checkpoint, {len(own)} now"]


def _fit_message(part: str, lines: Sequence[str], shown: int = 8) -> str:
    more = f"\n  and {len(lines) - shown} more" if len(lines) > shown else ""
    listing = "\n".join(f"  {line}" for line in lines[:shown])
    return (
        f"the checkpoint does not fit the recipe: {part}\n{listing}{more}\n"
        f"Resume with the recipe that it was saved with, or start a new run."
    )


def _inside(payload: Mapping[str, Any], optimizers: Mapping[str, Any]) -> dict[str, bool]:
    """Say of what a run cannot go on without whether it is there; the keys themselves are."""
    groups = [state.get("param_groups") for state in optimizers.values()]
    counts = ("step", "updates", "skipped", "consecutive_skips", "epoch", "batch_in_epoch")
    states = payload["rng"]
    return {
        "`optimizer.param_groups`": all(
            isinstance(each, list) and all(map(_is_group, each)) for each in groups
        ),
        "whole numbers in `progress`": all(
            isinstance(payload["progress"].get(name), int) for name in counts
        ),
        "a state in `rng` for each rank": isinstance(states, list)
        and bool(states)
        and all(isinstance(s, dict) and {"python", "numpy", "torch"} <= s.keys() for s in states),
    }


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("params"), list)
