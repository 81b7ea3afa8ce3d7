"""An optimizer with what belongs to it: the parameters that it trains and their schedule.

A recipe has one, or several by name (a GAN's two). When they step is the business of ``step``.
"""

from __future__ import annotations

import math
from collections.abc import Collection, Mapping, Sequence
from contextlib import suppress
from copy import deepcopy
from dataclasses import dataclass, field
from numbers import Real
from typing import Any

import torch
from torch import Tensor, nn
from torch.optim.lr_scheduler import LRScheduler

from ampctl.distributed.shard import is_sharded
from ampctl.engine import parameter_groups
from ampctl.engine.learning_rate import (
    FunctionSchedule,
    LearningRate,
    TorchSchedule,
    follows_metric,
)
from ampctl.errors import Problem, RecipeError
from ampctl.recipe.arguments import Context, fitted, parameters_of
from ampctl.recipe.fault import failure
from ampctl.recipe.keys import child
from ampctl.recipe.load import LoadedRecipe
from ampctl.recipe.schema import TARGET, Block, block_key, by_name
from ampctl.recipe.target import blocks, build, build_inside, failure_of, locate
from ampctl.state_dict import optimizers
from ampctl.state_dict.group_options import group_values

_FUSED_DEVICES = ("cpu", "cuda", "xpu")  # the kernels of MPS do not look at found_inf


@dataclass
class Updater:
    """One optimizer, its parameters and its schedule; ``name`` is ``""`` where it is the only one.

    ``lr`` is the rate of the group with most parameters. ``may_leave_fused``: the recipe leaves the
    choice of a kernel to us.
    """

    name: str
    optimizer: torch.optim.Optimizer
    learning_rate: LearningRate
    may_leave_fused: bool = False
    parameters: Sequence[nn.Parameter] = field(init=False)
    closure: bool = field(init=False)
    _largest_group: int = field(init=False)

    def __post_init__(self) -> None:
        groups = self.optimizer.param_groups
        self.parameters = [parameter for group in groups for parameter in group["params"]]
        self.closure = optimizers.needs_closure(self.optimizer)
        sizes = [sum(parameter.numel() for parameter in group["params"]) for group in groups]
        self._largest_group = sizes.index(max(sizes))

    @property
    def lr(self) -> float:
        """The present learning rate."""
        rate = self.optimizer.param_groups[self._largest_group]["lr"]
        return float(rate)  # sync: where somebody made it a tensor

    def take_sparse(self) -> None:
        """Step without the fused kernel from now on: it takes no sparse gradient."""
        if self.may_leave_fused:
            optimizers.leave_fused(self.optimizer)


def key(figure: str, name: str) -> str:
    """Return what a figure of an optimizer is called: ``loss``, or ``loss/NAME`` of several."""
    return f"{figure}/{name}" if name else figure


def one_or_by_name(values: Mapping[str, Any]) -> Any:
    """Return the value of the only optimizer itself, or those of several by name."""
    return values[""] if "" in values else dict(values)


def build_updaters(
    loaded: LoadedRecipe, model: nn.Module, device: torch.device, total_steps: int | None
) -> list[Updater]:
    """Build a recipe's optimizers over the trainable parameters of a model, and their schedules.

    Raises RecipeError for blocks that do not fit, for a parameter that no optimizer gets, and for
    an optimizer that gets none.
    """
    blocks, schedules = by_name(loaded.recipe.optimizer), by_name(loaded.recipe.scheduler)
    unknown = [name for name in schedules if name and name not in blocks]
    if unknown:
        names = ", ".join(filter(None, blocks)) or "without a name"
        raise RecipeError(
            [
                loaded.problem(
                    child("scheduler", name), "no optimizer is called so", f"they are {names}"
                )
                for name in unknown
            ]
        )
    parts = parameter_groups.divide(model, loaded, blocks)
    return [
        _updater(loaded, name, block, model, parts[name], device, total_steps)
        for name, block in blocks.items()
    ]


def _updater(
    loaded: LoadedRecipe,
    name: str,
    block: Block,
    model: nn.Module,
    part: Collection[nn.Parameter],
    device: torch.device,
    total_steps: int | None,
) -> Updater:
    at = block_key("optimizer", name)
    optimizer = _build_optimizer(loaded, at, block, model, part, device)
    optimizers.make_skippable(optimizer, at)
    schedules = by_name(loaded.recipe.scheduler)
    chosen = name if name in schedules else ""
    at = block_key("scheduler", chosen)
    schedule = _build_learning_rate(loaded, at, schedules.get(chosen), optimizer, total_steps)
    chosen_here = not any(kernel in block for kernel in optimizers.KERNEL_CHOICES)
    return Updater(name, optimizer, schedule, may_leave_fused=chosen_here)


def _build_optimizer(
    loaded: LoadedRecipe,
    key: str,
    block: Block,
    model: nn.Module,
    part: Collection[nn.Parameter],
    device: torch.device,
) -> torch.optim.Optimizer:
    """Build an optimizer over named parameters, fused where device and parameters allow it."""
    globs = _options_by_glob(loaded, child(key, "groups"), block)
    block = {name: value for name, value in block.items() if name not in ("groups", "params")}
    signature = parameters_of(locate(block[TARGET]))
    options = set(signature) - {"params"}
    default = getattr(signature.get("weight_decay"), "default", None)
    groups = parameter_groups.parameter_groups(
        model,
        globs,
        weight_decay=block.get("weight_decay", default),
        allowed=options,
        only=part,
        key=child(key, "groups"),
        where=loaded.place(child(key, "groups")),
    )
    if wrong := _wrong_rates(loaded, key, block):
        raise RecipeError(wrong)
    tried = {glob: options for glob, options in (globs or {}).items() if options}
    for at, own in {"": {}, **tried}.items() if tried else ():
        # torch looks at what its constructor is given, and not at the options of a group.
        place = child(child(key, "groups"), at) if at else key
        # One parameter will do; some make state of each when they are built.
        _checked_optimizer(loaded, place, {**block, **own}, [{"params": [*part][:1]}])
    fusable = device.type in _FUSED_DEVICES and "fused" in options
    fusable &= not block.get("dampening")  # see optimizers.make_skippable
    fusable &= all(parameter.is_floating_point() for parameter in part)  # complex is not
    sharded = any(map(is_sharded, part))
    if sharded and block.get("fused") and not _steps_shards(block):
        message = f"the fused kernel of {block[TARGET]} does not take parameters sharded by fsdp"
        raise RecipeError([loaded.problem(child(key, "fused"), message, "leave it out")])
    if sharded and not _steps_shards(block):
        fusable = False
    if fusable and not any(name in block for name in optimizers.KERNEL_CHOICES):
        # Not every optimizer has a fused kernel for every device; if the fault is another one, the
        # plain form below has it too.
        with suppress(RecipeError):
            fused = _checked_optimizer(loaded, key, {**block, "fused": True}, groups)
            if optimizers.can_step(fused):
                return fused
    return _checked_optimizer(loaded, key, block, groups)


def _options_by_glob(
    loaded: LoadedRecipe, key: str, block: Block
) -> dict[str, Mapping[str, Any]] | None:
    """Return an optimizer's ``groups``, with text made what its arguments are; None without any.

    Null takes a glob out. Raises RecipeError for what is no mapping, and for wrong values.
    """
    globs = block.get("groups")
    if globs is None:
        return None
    globs = build_inside(globs, key=key, origins=loaded.origins)
    if not isinstance(globs, Mapping):
        message = f"got {globs!r}; allowed: a mapping of globs of parameter names to options"
        advice = 'write it like groups: {"head.*": {lr: 1e-4}}'
        raise RecipeError([loaded.problem(key, message, advice)])
    parameters = parameters_of(locate(block[TARGET]))
    context = Context(loaded.origins, {}, [])
    fitting = {
        glob: {
            name: fitted(parameters[name], value, child(child(key, glob), name), context)
            if name in parameters
            else value
            for name, value in options.items()
        }
        if isinstance(options, Mapping)
        else options
        for glob, options in globs.items()
        if options is not None
    }
    for glob, options in fitting.items():
        if isinstance(options, Mapping):
            context.problems.extend(_wrong_rates(loaded, child(key, glob), options))
    if context.problems:
        raise RecipeError(context.problems)
    return fitting


def _wrong_rates(loaded: LoadedRecipe, key: str, options: Mapping[str, Any]) -> list[Problem]:
    """Return a problem for each learning rate and weight decay that no training can use."""
    return [
        loaded.problem(child(key, name), f"got {value}; allowed: a finite number, at least 0")
        for name, value in options.items()
        if name in ("lr", "weight_decay") and isinstance(value, int | float)
        if isinstance(value, bool) or not (math.isfinite(value) and value >= 0)
    ]


def _steps_shards(block: Block) -> bool:
    """Return whether torch has a fused kernel of an optimizer for sharded parameters."""
    return locate(block[TARGET]) in (torch.optim.Adam, torch.optim.AdamW)


def _checked_optimizer(
    loaded: LoadedRecipe, key: str, block: Mapping[str, Any], groups: list[dict[str, Any]]
) -> torch.optim.Optimizer:
    copies = [dict(group) for group in groups]  # torch writes its defaults into what it is given
    optimizer = build(block, key=key, origins=loaded.origins, args=[copies])
    if not isinstance(optimizer, torch.optim.Optimizer):
        found = type(optimizer).__name__
        message = f"{block[TARGET]} gave a {found}, not an Optimizer"
        raise RecipeError([loaded.problem(key, message)])
    for group in optimizer.param_groups:
        rate = group.get("lr")
        if not isinstance(rate, Real | Tensor):
            message = f"{block[TARGET]} has no learning rate: the lr of a group is {rate!r}"
            raise RecipeError([loaded.problem(key, message, "give it a number: lr: 1e-3")])
        if wrong := _wrong_rates(loaded, key, {"lr": float(rate)}):
            raise RecipeError(wrong)
        # torch lets all groups share a tensor that is a default.
        group.update({n: v.clone() for n, v in group.items() if isinstance(v, Tensor)})
    try:
        optimizers.can_step(optimizer)
    except Exception as error:
        doing = f"{block[TARGET]}, tried on a parameter of one element, failed"
        raise failure_of(block, error, doing, key=key, origins=loaded.origins) from error
    return optimizer


def _build_learning_rate(
    loaded: LoadedRecipe,
    key: str,
    block: Block | None,
    optimizer: torch.optim.Optimizer,
    total_steps: int | None,
) -> LearningRate:
    if block is None:
        return FunctionSchedule(optimizer, None)
    bare = group_values(optimizer)
    schedule = build_schedule(loaded, key, block, optimizer, total_steps)
    if isinstance(schedule, LRScheduler):
        if follows_metric(schedule) and loaded.recipe.data.eval is None:
            message = f"{type(schedule).__name__} needs data.eval"
            raise RecipeError([loaded.problem(key, message)])
        return TorchSchedule(optimizer, schedule, bare)
    if not callable(schedule):
        message = f"{block[TARGET]} gave a {type(schedule).__name__}"
        advice = "it must be a torch scheduler, or be callable: update count -> factor on the rate"
        raise RecipeError([loaded.problem(key, message, advice)])
    try:
        first = schedule(0)
    except Exception as error:
        doing = f"{block[TARGET]}, called with the update count 0, failed"
        raise failure(error, doing, loaded.place(key), key) from error
    if not isinstance(first, Real) or not math.isfinite(first):
        message = f"{block[TARGET]} gave {first!r} for update 0; it must give a finite number"
        raise RecipeError([loaded.problem(key, message, "the rate is multiplied by it")])
    return FunctionSchedule(optimizer, schedule)


def build_schedule(
    loaded: LoadedRecipe,
    key: str,
    block: Block,
    optimizer: torch.optim.Optimizer,
    total_steps: int | None,
) -> Any:
    """Build what a scheduler's block names, for an optimizer and a run of so many steps."""
    provide: dict[str, Any] = {"optimizer": optimizer}
    if total_steps is not None:
        provide["total_steps"] = total_steps
    for _, inner in blocks(block := deepcopy(block)):
        own = {"epochs", "steps_per_epoch"} <= inner.keys()  # a length of the recipe's own
        if own and "total_steps" in parameters_of(locate(inner[TARGET])):
            inner.setdefault("total_steps", None)
    return build(block, key=key, origins=loaded.origins, provide=provide)
