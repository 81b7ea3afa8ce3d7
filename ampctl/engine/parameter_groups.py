"""The parameter groups of an optimizer: which parameters it gets, and with which options."""

from __future__ import annotations

import difflib
import re
from collections.abc import Collection, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

from torch import nn

from ampctl.errors import Problem, RecipeError, first_of
from ampctl.recipe.keys import child
from ampctl.recipe.load import LoadedRecipe
from ampctl.recipe.schema import Block
from ampctl.recipe.suggest import names_near

Group = dict[str, Any]

NORM_CLASS = re.compile(r"norm(\d?d)?$", re.IGNORECASE)
SHOWN = ("lr", "weight_decay")


@dataclass(frozen=True)
class _Owned:
    """A trainable parameter: all of its names (several if it is tied) and whether it may decay."""

    names: tuple[str, ...]
    parameter: nn.Parameter
    decays: bool

    def matches(self, glob: str) -> bool:
        return any(fnmatchcase(name, glob) for name in self.names)


def parameter_groups(
    model: nn.Module,
    globs: Mapping[str, Mapping[str, Any]] | None,
    *,
    weight_decay: float | None,
    allowed: Collection[str] | None = None,
    only: Collection[nn.Parameter] | None = None,
    key: str = "optimizer.groups",
    where: str = "",
) -> list[Group]:
    """Divide the trainable parameters into groups of (name, parameter) for a torch optimizer.

    Without ``globs`` there is one group. With them (``{}`` too) a parameter goes, with the options,
    to the first glob that matches its dotted name, or one of its names if it is tied; to the
    optimizer's own options if none does. Then, where ``weight_decay`` is not 0 or None and the
    glob's options do not set it, what should not decay gets ``weight_decay: 0.0``: parameters of
    fewer than two dimensions, those named ``bias``, and those of norms (the class or a base of it
    is called ...Norm, ...Norm2d and the like). Embeddings decay, as torch does by default.

    Frozen parameters are left out, and those that are not in ``only``. ``allowed`` names the
    options that the optimizer knows (None: any); torch itself takes an unknown one without a word.
    Raises RecipeError, with all problems, for such an option and for a glob that gets no parameter.
    """
    part = None if only is None else set(map(id, only))
    owned = [each for each in _trainable(model) if part is None or id(each.parameter) in part]
    if globs is None:
        return [{"params": [(entry.names[0], entry.parameter) for entry in owned]}]
    problems = [
        Problem(where, child(key, glob), *why)
        for glob, options in globs.items()
        for why in _wrong_options(options, allowed)
    ]
    places: dict[str | None, list[_Owned]] = {None: [], **{glob: [] for glob in globs}}
    for entry in owned:
        places[next((glob for glob in globs if entry.matches(glob)), None)].append(entry)
    problems += [
        Problem(where, child(key, glob), *_why_empty(glob, globs, owned, model))
        for glob in globs
        if not places[glob]
    ]
    if problems:
        raise RecipeError(problems)

    groups: list[Group] = []
    for glob in (*globs, None):
        options = {} if glob is None else dict(globs[glob])
        if not weight_decay or "weight_decay" in options:
            parts = [(places[glob], options)]
        else:
            parts = [
                ([entry for entry in places[glob] if entry.decays], options),
                (
                    [entry for entry in places[glob] if not entry.decays],
                    {**options, "weight_decay": 0.0},
                ),
            ]
        for entries, part_options in parts:
            if entries:
                named = [(entry.names[0], entry.parameter) for entry in entries]
                groups.append({**part_options, "params": named})
    return groups or [{"params": []}]


def divide(
    model: nn.Module, loaded: LoadedRecipe, blocks: Mapping[str, Block]
) -> dict[str, list[nn.Parameter]]:
    """Divide the trainable parameters among named optimizers by their ``params``.

    ``params`` is a glob of dotted names or a list of them; a parameter goes to the first optimizer
    that has one for it. Raises RecipeError for an optimizer without ``params`` or that gets none,
    and for parameters that no optimizer gets.
    """
    owned = _trainable(model)
    if "" in blocks:
        return {"": [entry.parameter for entry in owned]}
    places: dict[str, list[nn.Parameter]] = {name: [] for name in blocks}
    globs: dict[str, list[str]] = {}
    problems, left = [], []
    for name, block in blocks.items():
        given = block.get("params")
        listed = [given] if isinstance(given, str) else given
        if isinstance(listed, list | tuple) and listed and all(isinstance(g, str) for g in listed):
            globs[name] = list(listed)
            continue
        message = "needs params, a glob of the names of its parameters, or a list"
        advice = f'for example params: "{name}.*"'
        problems.append(loaded.problem(child("optimizer", name), message, advice))
    if problems:
        raise RecipeError(problems)
    for entry in owned:
        owners = [name for name in blocks if any(map(entry.matches, globs[name]))]
        if owners:
            places[owners[0]].append(entry.parameter)
        else:
            left.append(entry.names[0])
    if left:
        message = f"{len(left)} trainable parameters are in no optimizer's params: {first_of(left)}"
        advice = "add a glob for them, or set requires_grad=False on them"
        problems.append(loaded.problem("optimizer", message, advice))
    every = {glob: None for name in blocks for glob in globs[name]}
    problems += [
        loaded.problem(
            child(child("optimizer", name), "params"),
            *_why_empty(globs[name][0], every, owned, model),
        )
        for name in blocks
        if not places[name]
    ]
    names = [name for name, _ in model.named_parameters(remove_duplicate=False)]
    for name in filter(places.get, blocks):
        for glob in globs[name]:
            if not any(fnmatchcase(each, glob) for each in names):
                message, advice = _why_empty(glob, every, owned, model)
                at = child(child("optimizer", name), "params")
                problems.append(loaded.problem(at, f"{glob!r}: {message}", advice))
    if problems:
        raise RecipeError(problems)
    return places


def describe_groups(groups: Iterable[Mapping[str, Any]]) -> list[str]:
    """Describe each group in a line: how many tensors and parameters, and its own options.

    Takes what ``parameter_groups`` returns, or an optimizer's ``param_groups``.
    """
    lines = []
    for group in groups:
        tensors = [entry[1] if isinstance(entry, tuple) else entry for entry in group["params"]]
        options = [f"{name} {group[name]:.3g}" for name in SHOWN if group.get(name) is not None]
        lines.append(
            f"tensors {len(tensors)}, parameters {sum(tensor.numel() for tensor in tensors):,}: "
            + (", ".join(options) or "the optimizer's own options")
        )
    return lines


def _trainable(model: nn.Module) -> list[_Owned]:
    """List the trainable parameters, tied ones once, in the order of ``named_parameters``."""
    names: dict[nn.Parameter, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        if parameter.requires_grad:
            names.setdefault(parameter, []).append(name)
    modules = dict(model.named_modules(remove_duplicate=False))
    return [
        _Owned(tuple(own), parameter, _decays(own[0], parameter, modules))
        for parameter, own in names.items()
    ]


def _decays(name: str, parameter: nn.Parameter, modules: Mapping[str, nn.Module]) -> bool:
    path, _, leaf = name.rpartition(".")
    # Every base is asked by name: a subclass of a norm, an alias or another library's is one too.
    is_norm = any(NORM_CLASS.search(base.__name__) for base in type(modules[path]).__mro__)
    return parameter.ndim >= 2 and leaf != "bias" and not is_norm


def _wrong_options(options: Any, allowed: Collection[str] | None) -> list[tuple[str, str]]:
    """Describe what is wrong with a glob's options, and what to do."""
    if not isinstance(options, Mapping):
        return [(f"its options are {options!r}, not a mapping", "write, for instance, {lr: 1e-4}")]
    unknown = [name for name in options if name == "params" or name not in (allowed or options)]
    wrong = []
    for name in unknown:
        near = difflib.get_close_matches(str(name), allowed or (), n=1)
        hint = f"did you mean {near[0]}? " if near else ""
        if isinstance(options[name], Mapping):  # optimizer.groups.2.*.lr=1 on the command line
            hint = "a name that has dots stands in brackets or quotes: groups[a.b].lr; "
        names = ", ".join(sorted(allowed)) if allowed else "the optimizer's arguments"
        wrong.append((f"{name!r} is not an option of a group", f"{hint}allowed: {names}"))
    return wrong


def _why_empty(
    glob: str, globs: Iterable[str], owned: Sequence[_Owned], model: nn.Module
) -> tuple[str, str]:
    """Describe why a glob got no parameter, and what to do."""
    taken = [entry for entry in owned if entry.matches(glob)]
    if taken:
        first = next(other for other in globs if taken[0].matches(other))
        return (
            f"every parameter it matches is taken by an earlier glob ({first!r})",
            "put the narrower glob first",
        )
    named = dict(model.named_parameters(remove_duplicate=False))
    names = list(named)
    matched = [parameter for name, parameter in named.items() if fnmatchcase(name, glob)]
    if any(parameter.requires_grad for parameter in matched):
        return "what it matches is trained by another optimizer", "move it to that one's groups"
    if matched:
        return "it matches frozen parameters only", "leave it out, or unfreeze them"
    return (
        f"no parameter of {type(model).__name__} matches",
        names_near(glob, names, what="parameter"),
    )
