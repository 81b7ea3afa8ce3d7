"""Saved states of models and optimizers into present ones; what does not fit is told by name."""

from __future__ import annotations

import glob
from collections.abc import Callable, Collection, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampctl import commands
from ampctl.errors import CheckpointError, first_of
from ampctl.state_dict.checks import fitting_groups, fitting_state
from ampctl.state_dict.optimizers import (
    KERNEL_CHOICES,
    counted_in_groups,
    needs_closure,
    state_names,
)

_SHOWN = 8
_MOST_GLOBS = 4

Notify = Callable[[str], None]


class MismatchError(CheckpointError):
    """A part of a checkpoint that does not fit what was built: what of it does, and what does not.

    ``keys`` are those of the recipe that the part hangs on. ``allowances`` are the options with
    which a new run starts from its weights; None: none of them fits.
    """

    def __init__(
        self,
        part: str,
        lines: Sequence[str],
        *,
        fits: str = "",
        keys: Sequence[str] = (),
        allowances: str | None = "",
    ) -> None:
        self.keys = keys
        self.allowances = allowances
        told = f"{listing(lines)}\n  {fits}" if fits else listing(lines)
        super().__init__(f"the checkpoint does not fit the recipe: {part}\n{told}")


def mismatches(own: Mapping[str, Any], saved: Mapping[str, Any]) -> dict[str, str]:
    """Return why each name that does not fit does not."""
    lines = {name: "missing in the checkpoint" for name in own if name not in saved}
    lines |= {name: "not in the model" for name in saved if name not in own}
    for name in own.keys() & saved.keys():
        mine, theirs = own[name], saved[name]
        if isinstance(mine, Tensor) != isinstance(theirs, Tensor):
            lines[name] = f"a {type(theirs).__name__} saved, a {type(mine).__name__} in the model"
        elif isinstance(mine, Tensor) and mine.shape != theirs.shape:
            lines[name] = f"{list(theirs.shape)} saved, {list(mine.shape)} in the model"
    return lines


def allowances(own: Collection[str], saved: Collection[str], wrong: Collection[str]) -> str:
    """Return the options that let a model take of saved weights what fits; "" if nothing does.

    ``own`` and ``saved`` are the names of all weights, ``wrong`` of those that do not fit. What
    fits is taken even if a glob names it, so that one for all will do where many were needed.
    """
    fitting = {*own} & {*saved} - {*wrong}
    if not fitting:
        return ""
    every = {*own, *saved}
    globs = list(dict.fromkeys(_glob(name, every - {*wrong}) for name in sorted(wrong)))
    if len(globs) > _MOST_GLOBS or any(not each.isprintable() for each in globs):
        globs = ["*"]
    return " ".join(commands.allowances(globs))


def _glob(name: str, fine: Collection[str]) -> str:
    """Return a glob for the outermost module that a weight is in and no fine one, or its name."""
    parts = name.split(".")
    for count in range(1, len(parts)):
        start = ".".join(parts[:count]) + "."
        if not any(other.startswith(start) for other in fine):
            return f"{glob.escape(start)}*"
    return glob.escape(name)


def require_fit(model: nn.Module, state: Mapping[str, Any]) -> None:
    """Raise MisfitError that lists by name what of saved weights does not fit."""
    own = model.state_dict()
    lines = mismatches(own, state)
    if lines:
        every = own.keys() | state.keys()
        raise MismatchError(
            "model",
            [f"{name}: {why}" for name, why in sorted(lines.items(), key=str)],
            fits=f"{len(every) - len(lines)} of {len(every)} tensors fit",
            keys=("model",),
            allowances=allowances(own, state, lines) or None,
        )


def load_model(model: nn.Module, state: Mapping[str, Any], notify: Notify) -> None:
    """Load weights strictly. Raises MisfitError that lists by name what does not fit.

    Values are rounded to the model's dtypes, which ``notify`` is told where that loses some.
    """
    require_fit(model, state)
    if rounded := rounding(model.state_dict(), state):
        notify(rounded)
    model.load_state_dict(dict(state), strict=True)


def rounding(own: Mapping[str, Any], state: Mapping[str, Any]) -> str:
    """Describe which saved weights the dtypes of the model cannot hold exactly; "" if none."""
    rounded = [n for n, value in own.items() if n in state and _loses(state[n], value)]
    if not rounded:
        return ""
    saved, now = (_dtype(each[rounded[0]]) for each in (state, own))
    return (
        f"{len(rounded)} of {len(own)} tensors were saved in {saved} and are {now} in the model, "
        f"so they are rounded: {first_of(rounded)}"
    )


def _loses(saved: Any, own: Any) -> bool:
    """Return whether values may be another ones in the dtype of the tensor that they go to."""
    if not isinstance(saved, Tensor) or not isinstance(own, Tensor):
        return False
    return torch.promote_types(saved.dtype, own.dtype) != own.dtype


def _dtype(tensor: Tensor) -> str:
    return f"{tensor.dtype}".removeprefix("torch.")


def load_optimizer(
    optimizer: torch.optim.Optimizer,
    state: Mapping[str, Any],
    weights: Mapping[str, Any],
    *,
    recipe_wins: bool,
    notify: Notify,
    key: str = "optimizer",
) -> None:
    """Load an optimizer's state. Raises MisfitError that names the parameters that differ.

    ``weights`` are those that were saved with it, by name: where their dtype is another one now
    (``amp.upcast``), what the optimizer held in it goes along. ``key`` is its own in the recipe;
    ``notify`` is told what of the state it has no use for.
    """
    own_groups = optimizer.state_dict()["param_groups"]
    ordered = in_present_order(state, optimizer)
    if ordered is not state:
        state = ordered
        notify(
            f"{key}: the model has its parameters in another order than when it was saved; what "
            "the optimizer holds is given to each by its name"
        )
    own, saved = _names(own_groups), _names(state["param_groups"])
    if own != saved or _counts(own_groups) != _counts(state["param_groups"]):
        lines, fits = _group_difference(optimizer, own_groups, state["param_groups"])
        raise MismatchError(key, lines, fits=fits, keys=("optimizer", "model"))
    from_recipe = [
        {name: value for name, value in group.items() if name not in ("params", "param_names")}
        for group in own_groups
    ]
    # How a step is computed was settled when the optimizer was built, for this device. The rate is
    # the schedule's, which brings a new base rate to bear itself.
    counted = counted_in_groups(optimizer)
    of_recipe = [
        {
            name: value
            for name, value in group.items()
            if name in KERNEL_CHOICES
            or (recipe_wins and name not in ("lr", "initial_lr", *counted))
        }
        for group in from_recipe
    ]
    kept = [
        {name: value for name, value in group.items() if name not in fresh}
        for group, fresh in zip(state["param_groups"], of_recipe, strict=True)
    ]
    groups = [
        {**fitting, **fresh}
        for fitting, fresh in zip(fitting_groups(kept, from_recipe), of_recipe, strict=True)
    ]
    useless = _state_difference(optimizer, state, key)
    if useless:
        kind, names = type(optimizer).__name__, ", ".join(sorted(useless))
        notify(f"{key}: {kind} has no use for {names} of the checkpoint, which is dropped")
    state = {**state, "state": fitting_state(optimizer, state, weights)}
    try:
        optimizer.load_state_dict({**state, "param_groups": groups})
    except (ValueError, KeyError, TypeError, RuntimeError) as error:
        raise MismatchError(key, [str(error)], keys=("optimizer", "model")) from error
    for kept in optimizer.state.values():
        for name in useless & kept.keys():
            del kept[name]
    _put_back_dtypes(optimizer, state, weights)
    for group, fresh in zip(optimizer.param_groups, from_recipe, strict=True):
        for name, value in fresh.items():
            group.setdefault(name, value)


def _put_back_dtypes(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], weights: Mapping[str, Any]
) -> None:
    """Undo that torch casts an optimizer's state to its parameter's dtype (NAdam's products)."""
    groups = state["param_groups"]
    indices = [index for group in groups for index in group["params"]]
    names = [n for g in groups for n in g.get("param_names", [None] * len(g["params"]))]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    for index, name, parameter in zip(indices, names, parameters, strict=True):
        was = getattr(weights.get(name), "dtype", parameter.dtype)
        for key, saved in state["state"].get(index, {}).items():
            loaded = optimizer.state[parameter].get(key)
            if not isinstance(saved, Tensor) or not isinstance(loaded, Tensor):
                continue
            # Averages of gradients go along with the parameter; scalars are counters and products.
            follows = saved.dtype == was != parameter.dtype and saved.ndim >= min(parameter.ndim, 1)
            if loaded.dtype != saved.dtype and not follows:
                optimizer.state[parameter][key] = saved.to(loaded.device)


def in_present_order(
    state: Mapping[str, Any], optimizer: torch.optim.Optimizer
) -> Mapping[str, Any]:
    """Return an optimizer's saved state with the parameters of each group in their order now.

    It is the same object where they are, where the groups hold others or have no names, and where
    the state is one for all parameters together (LBFGS's).
    """
    own, saved = _names(optimizer.param_groups), _names(state["param_groups"])
    is_other_order = own != saved and list(map(sorted, own)) == list(map(sorted, saved))
    if not is_other_order or needs_closure(optimizer):
        return state
    groups = []
    for group, names in zip(state["param_groups"], own, strict=True):
        index = dict(zip(group["param_names"], group["params"], strict=True))
        params = [index[name] for name in names]
        groups.append({**group, "params": params, "param_names": list(names)})
    return {**state, "param_groups": groups}


def _names(groups: Sequence[Mapping[str, Any]]) -> list[tuple[str, ...]]:
    return [tuple(group.get("param_names", ())) for group in groups]


def _counts(groups: Sequence[Mapping[str, Any]]) -> list[int]:
    return [len(group["params"]) for group in groups]


def _group_difference(
    optimizer: torch.optim.Optimizer,
    own_groups: Sequence[Mapping[str, Any]],
    saved_groups: Sequence[Mapping[str, Any]],
) -> tuple[list[str], str]:
    """Describe what differs between groups of parameters, and how much does not."""
    own, saved = _names(own_groups), _names(saved_groups)
    place = {name: f"group {i}" for i, names in enumerate(own) for name in names}
    saved_place = {name: f"group {i}" for i, names in enumerate(saved) for name in names}
    if not place or not saved_place:
        was, now = (" + ".join(map(str, _counts(each))) for each in (saved_groups, own_groups))
        return [f"{was} parameters in the checkpoint, {now} now, not told apart by names"], ""
    lines = [
        f"{name}: {saved_place.get(name, 'nowhere')} in the checkpoint, "
        f"{place.get(name, 'nowhere (frozen or gone)')} now"
        for name in sorted(place.keys() | saved_place.keys())
        if place.get(name) != saved_place.get(name)
    ]
    stay = f"{len(place.keys() | saved_place.keys()) - len(lines)} of {len(place | saved_place)}"
    if lines:
        return lines, f"{stay} parameters are where they were"
    if len(own) != len(saved):
        return [f"{len(saved)} parameter groups in the checkpoint, {len(own)} now"], ""
    kind = type(optimizer).__name__
    line = f"the same parameters in another order, and what {kind} holds is of all of them together"
    return [line], ""


def _state_difference(
    optimizer: torch.optim.Optimizer, state: Mapping[str, Any], key: str
) -> set[str]:
    """Return the names in a saved state that the optimizer does not keep.

    Raises MisfitError for what it keeps and the state lacks: made of nothing, it would not be what
    it was (and some kernels fail). A parameter without any state has not been trained yet.
    """
    indices = [index for group in state["param_groups"] for index in group["params"]]
    known = state_names(optimizer)
    lacking: dict[str, int] = {}
    useless: set[str] = set()
    for index, names in zip(indices, known, strict=True):
        saved = {name for name, value in state["state"].get(index, {}).items() if value is not None}
        if names is None or not saved:
            continue
        useless |= saved - names
        for name in names - saved:
            lacking[name] = lacking.get(name, 0) + 1
    if lacking:
        kind = type(optimizer).__name__
        lines = [
            f"{name}: {kind} keeps it, and the checkpoint has none for {count} of {len(indices)} "
            "parameters"
            for name, count in sorted(lacking.items())
        ]
        held = {name for each in state["state"].values() for name in each}
        raise MismatchError(
            key, lines, fits=f"the checkpoint has {', '.join(sorted(held))}", keys=("optimizer",)
        )
    return useless


def listing(lines: Sequence[str]) -> str:
    """Return the first few lines for a message, indented, and how many more there are."""
    more = f"\n  and {len(lines) - _SHOWN} more" if len(lines) > _SHOWN else ""
    return "\n".join(f"  {line}" for line in lines[:_SHOWN]) + more
