"""A tree of nodes against the dataclasses of ``schema``: every mistake is told, none ends it.

The walk knows types, limits and blocks, and no key; only ``_check_together`` names keys, for the
rules that bind two of them.
"""

from __future__ import annotations

import math
import re
from collections import abc
from collections.abc import Mapping
from dataclasses import MISSING, Field, dataclass, field, fields, is_dataclass
from typing import Any, Literal, TypeVar, get_args, get_origin, get_type_hints

from ampctl.errors import Problem
from ampctl.recipe.hints import LIMITS, allowed, is_block, members, schema_keys
from ampctl.recipe.keys import Path, child, dotted
from ampctl.recipe.layers import COMMAND_LINE, leaves
from ampctl.recipe.scalar import boolean, number, number_meant
from ampctl.recipe.schema import TARGET, Recipe
from ampctl.recipe.suggest import nearest, right_key
from ampctl.recipe.yaml_source import Node

MAX_UNKNOWN_KEYS = 20
MAX_NAME_BYTES = 255
T = TypeVar("T")

_INVALID = object()
_NAME = re.compile(r"[A-Za-z][A-Za-z0-9_]*")
_IMPORT_PATH = re.compile(r"[^\W\d]\w*(\.[^\W\d]\w*)+")


@dataclass
class Validation:
    """What one walk has found: problems, the value of each key, and where it stands."""

    problems: list[Problem]
    values: dict[str, Any] = field(default_factory=dict)
    places: dict[str, str] = field(default_factory=dict)


def validate(tree: Node, found: Validation) -> Recipe | None:
    """Read a recipe out of a tree; None where ``found.problems`` got something to say."""
    before = len(found.problems)
    recipe = _section(Recipe, tree, (), found)
    _check_together(tree.where, found)
    return recipe if isinstance(recipe, Recipe) and len(found.problems) == before else None


def plain(node: Node) -> Any:
    """Return a tree as dicts, lists and scalars."""
    if isinstance(node.value, Mapping):
        return {key: plain(child) for key, child in node.value.items()}
    if isinstance(node.value, tuple):
        return [plain(child) for child in node.value]
    return node.value


def _section(cls: type[T], node: Node, path: Path, found: Validation) -> T | object:
    """Read a dataclass; a section left empty (null) has its defaults."""
    given = node.value if isinstance(node.value, Mapping) else {}
    if node.value is not None and not isinstance(node.value, Mapping):
        return _mismatch(cls, node, path, {}, found)
    hints = get_type_hints(cls)
    arguments: dict[str, Any] = {}
    for entry in fields(cls):  # type: ignore[arg-type]
        key = dotted((*path, entry.name))
        if entry.name in given:
            child = given[entry.name]
            value = _value(hints[entry.name], child, (*path, entry.name), entry.metadata, found)
            arguments[entry.name] = found.values[key] = value
        elif entry.default is MISSING and entry.default_factory is MISSING:
            _missing(entry, key, node.where, found)
            arguments[entry.name] = found.values[key] = _INVALID
        elif entry.default is not MISSING:
            found.values[key] = entry.default
    _unknown(cls, given, path, found)
    is_whole = all(value is not _INVALID for value in arguments.values())
    return cls(**arguments) if is_whole else _INVALID


def _value(hint: Any, node: Node, path: Path, limits: Mapping[str, Any], found: Validation) -> Any:
    """Read one value of a type; tells a problem and returns ``_INVALID`` where it does not fit."""
    found.places[dotted(path)] = node.where
    if node.failed:
        return _INVALID
    is_mapping, is_list = isinstance(node.value, Mapping), isinstance(node.value, tuple)
    if hint is Any or (is_block(hint) and is_mapping):
        found.places.update((dotted((*path, *at)), leaf.where) for at, leaf in leaves(node))
        if not is_block(hint):
            return plain(node)
        return (_blocks if limits.get("many") else _block)(node, path, found)
    if node.value is None and None in members(hint):
        return None
    if node.value is None and not is_block(hint) and get_origin(hint) in (abc.Mapping, tuple):
        return {} if get_origin(hint) is abc.Mapping else ()  # cleared: `amp.modules=null`
    for member in members(hint):
        if is_dataclass(member) and (is_mapping or node.value is None):
            return _section(member, node, path, found)  # type: ignore[arg-type]
        if get_origin(member) is abc.Mapping and is_mapping:
            return _mapping(member, node, path, limits, found)
        if get_origin(member) is tuple and is_list:
            return _list(member, node, path, limits, found)
        value = _INVALID if is_mapping or is_list else _scalar(member, node)
        if value is not _INVALID:
            return value if _within(value, limits) else _mismatch(hint, node, path, limits, found)
    return _mismatch(hint, node, path, limits, found)


def _mapping(
    hint: Any, node: Node, path: Path, limits: Mapping[str, Any], found: Validation
) -> dict[str, Any] | object:
    assert isinstance(node.value, Mapping)
    item = get_args(hint)[1]
    given = dict(node.value)
    if item is not Any and None not in members(item):  # null takes an entry out
        given = {name: each for name, each in given.items() if each.value is not None}
    read = {k: _value(item, v, (*path, k), limits, found) for k, v in given.items()}
    return _INVALID if any(value is _INVALID for value in read.values()) else read


def _list(
    hint: Any, node: Node, path: Path, limits: Mapping[str, Any], found: Validation
) -> tuple[Any, ...] | object:
    assert isinstance(node.value, tuple)
    item = get_args(hint)[0]
    read = tuple(_value(item, v, (*path, i), limits, found) for i, v in enumerate(node.value))
    return _INVALID if any(value is _INVALID for value in read) else read


def _scalar(member: Any, node: Node) -> Any:
    """Read a scalar as a type: raw text, ``on`` for a boolean, an exact float for an integer."""
    value = node.value
    if member is str:
        return node.text if node.text.strip() and value is not None else _INVALID
    if get_origin(member) is Literal:
        return node.text if node.text in get_args(member) else _INVALID
    if member is bool:
        read = boolean(value) if isinstance(value, str) else value
        return read if isinstance(read, bool) else _INVALID
    if member not in (int, float) or isinstance(value, bool):
        return _INVALID
    read_number = number(value.strip()) if isinstance(value, str) else value
    if not isinstance(read_number, int | float):
        return _INVALID
    if member is int:
        exact = isinstance(read_number, int) or read_number.is_integer()
        return int(read_number) if exact else _INVALID
    try:
        return float(read_number) if math.isfinite(read_number) else _INVALID
    except OverflowError:  # a whole number of hundreds of digits
        return _INVALID


def _within(value: Any, limits: Mapping[str, Any]) -> bool:
    is_number = isinstance(value, int | float) and not isinstance(value, bool)
    return not is_number or all(
        fits(value, limits[name]) for name, (_, fits) in LIMITS.items() if name in limits
    )


def _blocks(node: Node, path: Path, found: Validation) -> Any:
    """Check one block, or several by name; what has blocks in it and no target is several."""
    assert isinstance(node.value, Mapping)
    inside = list(node.value.values())
    if TARGET in node.value or not any(isinstance(item.value, Mapping) for item in inside):
        return _block(node, path, found)
    for name, item in node.value.items():
        if not _NAME.fullmatch(name):
            message = f"got the name {name!r}; allowed: letters, digits and _"
            found.problems.append(Problem(item.where, dotted((*path, name)), message))
        if isinstance(item.value, Mapping):
            _block(item, (*path, name), found)
        else:
            message = f"got {_got(item)}; allowed: a block with a {TARGET}, as its neighbours are"
            found.problems.append(Problem(item.where, dotted((*path, name)), message))
    return plain(node)


def _block(node: Node, path: Path, found: Validation, *, is_outermost: bool = True) -> Any:
    """Check that a block, and each block in it, names an import path; its arguments are free."""
    if isinstance(node.value, tuple):
        for index, child in enumerate(node.value):
            _block(child, (*path, index), found, is_outermost=False)
    elif isinstance(node.value, Mapping):
        target = node.value.get(TARGET)
        where = node.where if target is None else target.where
        advice = "write _target_: package.module.Name"
        if target is not None and not (
            isinstance(target.value, str) and _IMPORT_PATH.fullmatch(target.value)
        ):
            message = f"got {_got(target)}; allowed: a dotted import path"
            found.problems.append(Problem(where, dotted((*path, TARGET)), message, advice))
        elif target is None and is_outermost:
            message = f"has no {TARGET}; it says what to build"
            found.problems.append(Problem(where, dotted(path), message, advice))
        for key, child in node.value.items():
            _block(child, (*path, key), found, is_outermost=False)
    return plain(node)


def _mismatch(
    hint: Any, node: Node, path: Path, limits: Mapping[str, Any], found: Validation
) -> object:
    is_number = any(member in (int, float) for member in members(hint))
    meant = number_meant(node.text, whole=float not in members(hint)) if is_number else ""
    choices = [c for m in members(hint) if get_origin(m) is Literal for c in get_args(m)]
    close = nearest(node.text, choices, cutoff=0.5) if node.text else None
    close = close or meant
    advice = f"did you mean {close}?" if close else ""
    if isinstance(node.value, Mapping) and node.where == COMMAND_LINE and node.value:
        name = child(dotted(path[:-1]), ".".join([f"{path[-1]}", next(iter(node.value))]))
        advice = f"if the dot is part of a name, write it in brackets: {name}"
    message = f"got {_got(node)}; allowed: {allowed(hint, limits)}"
    found.problems.append(Problem(node.where, dotted(path), message, advice))
    return _INVALID


def _got(node: Node) -> str:
    value = node.value
    if isinstance(value, Mapping):
        return "a mapping"
    if isinstance(value, tuple):
        return "a list"
    if value is None:
        return "null, or nothing"
    text = node.text if len(node.text) <= 60 else f"{node.text[:60]}..."
    if isinstance(value, str):
        return f"{text!r} (text)"
    if isinstance(value, bool):
        return f"{text} (a boolean)"
    is_whole = isinstance(value, int) or value.is_integer()
    kind = "a whole number" if is_whole else "a fraction" if math.isfinite(value) else "not finite"
    return f"{text} ({kind})"


def _missing(entry: Field[Any], key: str, where: str, found: Validation) -> None:
    message = f"missing; needed: {entry.metadata['help']}"
    advice = f"add for example:  {entry.name}: {entry.metadata['example']}"
    found.problems.append(Problem(where, key, message, advice))


def _unknown(cls: type[Any], given: Mapping[str, Node], path: Path, found: Validation) -> None:
    known = {entry.name for entry in fields(cls)}
    unknown = [name for name in given if name not in known]
    section = dotted(path)
    for name in unknown[:MAX_UNKNOWN_KEYS]:
        meant = right_key(section, name, schema_keys())
        advice = f"did you mean {meant}?" if meant else f"keys here: {', '.join(sorted(known))}"
        key = dotted((*path, name))
        found.problems.append(Problem(given[name].where, key, "unknown key", advice))
    if len(unknown) > MAX_UNKNOWN_KEYS:
        message = f"{len(unknown) - MAX_UNKNOWN_KEYS} more unknown keys"
        where = given[unknown[MAX_UNKNOWN_KEYS]].where
        found.problems.append(Problem(where, section, message, "is this a recipe?"))


def _check_together(where: str, found: Validation) -> None:
    """Check the rules that bind several keys; a key that is wrong by itself is left out."""

    def tell(key: str, message: str, advice: str) -> None:
        section = found.places.get(key.rpartition(".")[0], where)
        place = found.places.get(key, section)
        found.problems.append(Problem(place, key, message, advice))

    def number_at(key: str) -> float | None:
        value = found.values.get(key)
        return value if isinstance(value, int | float) and not isinstance(value, bool) else None

    name = found.values.get("name")
    if isinstance(name, str) and (
        name in (".", "..") or re.search(r"[/\\]", name) or not name.isprintable()
    ):
        advice = "leave out slashes and what cannot be seen"
        tell("name", f"got {name!r}; allowed: a name for a folder", advice)
    elif isinstance(name, str) and len(name.encode()) > MAX_NAME_BYTES:
        message = f"got a name of {len(name.encode())} bytes; allowed: up to {MAX_NAME_BYTES}"
        tell("name", f"{message}, the most that a folder's name may have", "shorten it")
    is_read = found.values.get("train") is not _INVALID or "train.max_steps" in found.values
    limits = (found.values.get(f"train.max_{unit}") for unit in ("steps", "epochs"))
    if is_read and all(limit is None for limit in limits):
        message = "missing; train.max_steps or train.max_epochs says when to stop"
        tell("train.max_epochs", message, "add for example:  train: {max_epochs: 20}")
    scale, floor, ceiling = (number_at(f"amp.{n}_scale") for n in ("init", "min", "max"))
    is_set = "amp.init_scale" in found.places
    if scale is not None and floor is not None and scale < floor:
        message = f"init_scale {scale:g} is below min_scale {floor:g}"
        tell(
            "amp.init_scale" if is_set else "amp.min_scale", message, "raise one or lower the other"
        )
    if scale is not None and ceiling is not None and scale > ceiling:
        message = f"init_scale {scale:g} is above max_scale {ceiling:g}"
        tell(
            "amp.init_scale" if is_set else "amp.max_scale", message, "lower one or raise the other"
        )
    batch, micro = number_at("data.batch_size"), number_at("data.micro_batch_size")
    if batch is not None and micro is not None and micro > batch:
        message = f"micro_batch_size {micro} is larger than batch_size {batch}"
        tell("data.micro_batch_size", message, "a step is made of micro-batches: lower it")
