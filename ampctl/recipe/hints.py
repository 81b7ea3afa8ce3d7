"""What the types and metadata of ``schema`` say, for what reads or describes a recipe."""

from __future__ import annotations

import operator
import types
from collections import abc
from collections.abc import Callable, Iterator, Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from ampctl.recipe.schema import TARGET, Recipe

LIMITS: Mapping[str, tuple[str, Callable[[Any, Any], bool]]] = types.MappingProxyType(
    {
        "above": ("above", operator.gt),
        "at_least": ("at least", operator.ge),
        "below": ("below", operator.lt),
        "at_most": ("at most", operator.le),
    }
)


def schema_keys(cls: type[Any] = Recipe, prefix: str = "") -> Iterator[str]:
    """Yield every dotted key of the schema, sections before what they hold."""
    hints = get_type_hints(cls)
    for entry in fields(cls):
        yield f"{prefix}{entry.name}"
        for member in members(hints[entry.name]):
            if is_dataclass(member) and isinstance(member, type):
                yield from schema_keys(member, f"{prefix}{entry.name}.")


def default_values(cls: type[Any] = Recipe) -> dict[str, Any]:
    """Return the values of all keys that have a default, as nested mappings."""
    values: dict[str, Any] = {}
    hints = get_type_hints(cls)
    for entry in fields(cls):
        if is_dataclass(hints[entry.name]):
            values[entry.name] = default_values(hints[entry.name])
        elif entry.default is not MISSING:
            values[entry.name] = entry.default
        elif entry.default_factory is not MISSING:
            values[entry.name] = entry.default_factory()
    return values


def members(hint: Any) -> tuple[Any, ...]:
    """Return the members of a union, or the type itself; None stands for null."""
    is_union = get_origin(hint) in (Union, types.UnionType)
    return tuple(None if m is type(None) else m for m in (get_args(hint) if is_union else [hint]))


def is_block(hint: Any) -> bool:
    """Return whether a type is a ``_target_`` block: a mapping of anything, or null."""
    return [member for member in members(hint) if member is not None] == [Mapping[str, Any]]


def allowed(hint: Any, limits: Mapping[str, Any] = types.MappingProxyType({})) -> str:
    """Describe in words what a type, of a key or of an argument, takes."""
    bounds = "".join(
        f", {words} {_figure(limits[n])}" for n, (words, _) in LIMITS.items() if n in limits
    )
    told = []
    for member in members(hint):
        origin = get_origin(member)
        if member in (int, float):
            told.append(("a whole number" if member is int else "a number") + bounds)
        elif origin is Literal:
            told.extend(get_args(member))
        elif is_block(hint) and origin is abc.Mapping:
            told.append(f"a block with a {TARGET}")
        elif is_dataclass(member):
            told.append(f"a mapping of {', '.join(entry.name for entry in fields(member))}")
        elif origin in (tuple, list, abc.Sequence):
            told.append(f"a list of {_plural(allowed(get_args(member)[0], limits))}")
        else:
            names = {bool: "true or false", str: "text", None: "null", abc.Mapping: "a mapping"}
            told.append(names.get(origin or member) or f"a {getattr(member, '__name__', 'value')}")
    return " or ".join(told)


def _plural(words: str) -> str:
    """Return ``whole numbers`` for ``a whole number``; other words as they are."""
    return f"{words[2:]}s" if words in ("a whole number", "a number") else words


def _figure(limit: float) -> str:
    return f"{limit}" if isinstance(limit, int) else f"{limit:g}"
