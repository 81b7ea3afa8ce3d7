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
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.engine.boundary import Boundary
from ampctl.engine.buffers import BufferGuard
from ampctl.engine.ema import Average
from ampctl.engine.pending import Pending
from ampctl.engine.rewind import Rewind
from ampctl.engine.updater import Updater, one_or_by_name
from ampctl.engine.weight_changes import Untouched
from ampctl.errors import CheckpointError
from ampctl.recipe.schema import AmpConfig
from ampctl.state_dict.checks import require_counts, require_scale
from ampctl.state_dict.copies import nonfinite
from ampctl.state_dict.load import MismatchError, load_model, load_optimizer, require_fit
from ampctl.state_dict.required import lacking_of
from ampctl.tasks.task import Task, asks_for, has_own


@dataclass
class Progress:
    """How far a run has come. Steps count attempts, updates the steps that were applied.

    ``followed_step`` is that of the last evaluation which schedules and patience have followed.
    With several optimizers a step is applied if each that took part in it was;
    ``optimizer_updates`` and ``optimizer_skips`` count for each by itself, and
    ``optimizer_skips_in_a_row`` the last of its turns.
    """

    step: int = 0
    updates: int = 0
    skipped: int = 0
    consecutive_skips: int = 0
    epoch: int = 0
    batch_in_epoch: int = 0
    samples: int = 0
    evaluated_step: int = -1
    followed_step: int = -1
    metrics: dict[str, float] = field(default_factory=dict)
    best: float | None = None
    best_step: int | None = None
    early_stop_best: float | None = None
    early_stop_bad: int = 0
    optimizer_updates: dict[str, int] = field(default_factory=dict)
    optimizer_skips: dict[str, int] = field(default_factory=dict)
    optimizer_skips_in_a_row: dict[str, int] = field(default_factory=dict)


@dataclass(frozen=True)
class StepReport:
    """What became of one step, once the host knows.

    ``loss`` is the mean over the step's items, None where there was none of them on any rank: such
    a step makes no update, and is no skip. ``lr`` is the largest group's rate; ``scale_before``
    was used by the step, ``scale_after`` is used by the next; ``scale_differs``, where measured:
    whether ``scale_before`` was another one on another rank. Where measured, else None:
    ``grad_norm``, the 2-norm of the unscaled gradient before clipping; ``underflow``, the share of
    gradient values that float16 loses at this scale; ``largest``, the largest scaled one;
    ``activation``, the largest float16 output of a module, and which module's it is.

    With several optimizers ``loss`` is the sum of what their turns lost, ``lr`` the rate of the
    first that took part, and the step is skipped if one of them was; ``consecutive_skips`` counts
    the steps in a row, or the turns of one of the skipped if it had more; ``optimizers`` has for
    each that took part whether it was ``skipped``, and its own figures. ``moved``: a parameter that
    the task or the model has changed, in the first steps (see ``untouched``).
    """

    step: int
    loss: float | None
    lr: float
    grad_norm: float | None
    underflow: float | None
    largest: float | None
    activation: float | None
    activation_module: str | None
    skipped: bool
    scale_before: float
    scale_after: float
    consecutive_skips: int
    scale_differs: bool = False
    optimizers: Mapping[str, Mapping[str, float]] = field(default_factory=dict)
    moved: str | None = None


@dataclass
class TrainState:
    """Everything that training changes, and the fixed parts that a step needs.

    ``model`` is what the forward pass of a step calls (in DDP, say), ``local`` what a pass of this
    rank alone does (compiled, say); ``bare`` is the module itself, whose names and tensors a
    checkpoint holds. ``blocks``: the names of the modules that a sharded one is gathered by.
    """

    model: nn.Module
    local: nn.Module
    bare: nn.Module
    task: Task
    updaters: Sequence[Updater]
    scaler: LossScaler
    precision: Precision
    amp: AmpConfig
    device: torch.device
    buffers: BufferGuard
    ema: Average | None
    ranks: Ranks = ALONE
    channels_last: bool = False
    compiled: bool = False
    nonfinite_by_design: frozenset[str] = frozenset()
    module_dtypes: Mapping[str, str] = field(default_factory=dict)
    upcast: Sequence[str] = ()
    blocks: Sequence[str] = ()
    allows_unused: bool = False
    progress: Progress = field(default_factory=Progress)
    boundary: Boundary = field(default_factory=Boundary)
    pending: Pending | None = None
    scale_on_host: float = 1.0
    parameters: Sequence[nn.Parameter] = field(init=False)
    rewinds: Mapping[str, Rewind] = field(init=False)
    takes_turns: bool = field(init=False)
    watches_activations: bool = field(init=False)
    shares_buffers: bool = field(init=False)
    counts_samples: bool = field(init=False)
    untouched: Untouched = field(init=False)
    _asked: Mapping[str, frozenset[str]] = field(init=False)

    def __post_init__(self) -> None:
        self.scale_on_host = float(self.scaler.current_scale)  # sync: a state is built
        self.parameters = [p for updater in self.updaters for p in updater.parameters]
        self.untouched = Untouched(self.bare, self.parameters)
        together = self.amp.all_or_nothing and len(self.updaters) > 1
        self.rewinds = {each.name: Rewind(each) for each in self.updaters} if together else {}
        self.takes_turns = has_own(self.task, "losses")
        self.counts_samples = not has_own(self.task, "num_items")
        # A hook would make a compiled model be compiled anew.
        self.watches_activations = self.scaler.enabled and not self.compiled
        self.shares_buffers = self.ranks.shards or (self.ranks.size > 1 and self.takes_turns)
        self._asked = {name: asks_for(getattr(self.task, name)) for name in ("loss", "losses")}
        self._count_each()

    def _count_each(self) -> None:
        """Start a counter for each optimizer that has a name."""
        counts, progress = {each.name: 0 for each in self.updaters if each.name}, self.progress
        progress.optimizer_updates = {**counts, **progress.optimizer_updates}
        progress.optimizer_skips = {**counts, **progress.optimizer_skips}
        progress.optimizer_skips_in_a_row = {**counts, **progress.optimizer_skips_in_a_row}

    def extras(self, method: str) -> dict[str, Any]:
        """Return what a method of the task asks for beside the model and the batch, by name."""
        asked = self._asked[method]
        if not asked:
            return {}
        given = {"grad": self.scaler.grad, "step": self.progress.step}
        return {name: given[name] for name in asked}

    def zeros(self, count: int) -> tuple[Tensor, ...]:
        """Return so many float32 zeros on the device: what a rank finds in no gradient at all."""
        return tuple(torch.zeros(count, device=self.device).unbind())

    def agree(self) -> None:
        """Start all ranks with the loss scale of rank 0."""
        self.ranks.follow_first_(self.scaler.tensors())
        self.scale_on_host = float(self.scaler.current_scale)  # sync: at the start

    def require_agreement(self) -> None:
        """Raise NumericsError if the loss scale that the host last read differs between ranks."""
        if self.ranks.size > 1:
            self.ranks.require_equal("the loss scale", self.scale_on_host)

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint holds of this state, by the contract's keys.

        Only at a step boundary, with nothing pending, and on all ranks. Tensors are references, not
        copies.
        """
        assert self.pending is None, "settle the last step before the state is taken"
        with self.boundary.changing():  # while the EMA's weights change places with the model's
            parts = self.parts()
        return {**parts, **self.rest(self.ranks.gather(rng.get_state(self.device)))}

    def rest(self, generators: list[dict[str, Any]]) -> dict[str, Any]:
        """Return what `state_dict` has beside its large parts, with each rank's ``generators``."""
        schedules = {each.name: each.learning_rate.state_dict() for each in self.updaters}
        return {
            "scheduler": one_or_by_name(schedules),
            "scaler": self.scaler.state_dict(),
            "progress": asdict(self.progress),
            "rng": generators,
            "dtype": self.precision.name,
            "world_size": self.ranks.size,
        }

    def parts(self) -> dict[str, Any]:
        """Return the parts of `state_dict` that are as large as the model, by the same keys."""
        optimizers = {each.name: each.optimizer.state_dict() for each in self.updaters}
        return {
            "model": self.bare.state_dict(),
            "optimizer": one_or_by_name(optimizers),
            "ema": self.ema.state_dict() if self.ema else None,
        }

    def nonfinite(self, saved: Mapping[str, Any]) -> list[str]:
        """Return the names of non-finite tensors that were not so from the start (masks are).

        ``saved``: the `state_dict`, or its `parts`. Of a sharded state the ranks put together what
        each finds in its part.
        """
        held = {key: saved[key] for key in ("model", "optimizer", "ema")}
        found = nonfinite(held, by_design=self.nonfinite_by_design)
        if not self.ranks.shards:
            return found
        return list(dict.fromkeys(name for every in self.ranks.gather(found) for name in every))

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
        missing = lacking_of(saved, optimizers)
        if missing:
            raise CheckpointError(
                f"the checkpoint cannot be used: it lacks {', '.join(missing)}; "
                "name another one, or the run folder for its newest intact one"
            )
        require_counts(saved["progress"])
        require_scale(saved["scaler"])
        load_model(self.bare, saved["model"], notify)
        known = Progress.__dataclass_fields__
        progress = {k: v for k, v in saved["progress"].items() if k in known}
        self.progress = Progress(**{"followed_step": progress.get("evaluated_step", -1)} | progress)
        self._count_each()
        for updater in self.updaters:
            name = updater.name
            load_optimizer(
                updater.optimizer,
                optimizers[name],
                saved["model"],
                recipe_wins=name in changed_optimizers,
                notify=notify,
                key=f"optimizer.{name}" if name else "optimizer",
            )
            updater.learning_rate.load_state_dict(
                schedules[name],
                updates=self.progress.optimizer_updates.get(name, self.progress.updates),
                new_base=name in changed_optimizers,
                new_plan=name in changed_schedulers,
            )
        if self.ema is not None:
            if saved["ema"] is None:
                notify("the checkpoint holds no EMA (train.ema_decay): it starts from the weights")
            require_fit(self.bare, saved["ema"] or saved["model"])
            self.ema.load_state_dict(saved["ema"] or saved["model"])
        elif saved["ema"] is not None:
            notify("the EMA in the checkpoint is dropped: train.ema_decay is not set")
        self.scaler.load_state_dict(saved["scaler"], notify)
        self.scale_on_host = float(self.scaler.current_scale)  # sync: resuming
        if saved["rng"][0].get("device_type") != (
            None if self.device.type == "cpu" else self.device.type
        ):
            notify("saved on another kind of device: random numbers on this one start anew")
        if len(saved["rng"]) != self.ranks.size:
            notify(
                f"the checkpoint holds the generators of {len(saved['rng'])} ranks, and the run is "
                f"resumed on {self.ranks.size}: the samples of each step stay the same, random "
                "numbers of the training do not"
            )
        if self.ranks.rank < len(saved["rng"]):
            rng.set_state(saved["rng"][self.ranks.rank], self.device)
        else:  # a rank that was not there
            rng.seed_everything(rng.mix(self.ranks.rank, self.progress.step, *_digest(saved)))

    def _saved_by_name(self, saved: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
        """Return the states of optimizers and of schedules by name, if the names are this run's."""
        names = sorted(saved["progress"].get("optimizer_updates") or [""])
        own = sorted(updater.name for updater in self.updaters)
        if names != own:
            was, now = (", ".join(each).strip() or "one without a name" for each in (names, own))
            difference = [f"{was} in the checkpoint, {now} in the recipe"]
            raise MismatchError("the optimizers", difference, keys=("optimizer",))
        if names == [""]:
            return {"": saved["optimizer"]}, {"": saved["scheduler"]}
        return saved["optimizer"], saved["scheduler"]


def _digest(saved: Mapping[str, Any]) -> list[int]:
    """Return a few numbers that differ from run to run, to seed from."""
    return [int(byte) for byte in saved["rng"][0]["torch"][:8]]
