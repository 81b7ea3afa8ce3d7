"""The JSON Schema of a recipe, for editors, made from the dataclasses of ``schema``."""

from __future__ import annotations

from collections import abc
from collections.abc import Mapping
from dataclasses import MISSING, fields, is_dataclass
from typing import Any, Literal, get_args, get_origin, get_type_hints

from ampctl.recipe.hints import is_block, members
from ampctl.recipe.schema import TARGET, Recipe

_NAME = r"^[A-Za-z][A-Za-z0-9_]*$"
_DIALECT = "https://json-schema.org/draft/2020-12/schema"
_LIMITS = (
    ("above", "exclusiveMinimum"),
    ("at_least", "minimum"),
    ("below", "exclusiveMaximum"),
    ("at_most", "maximum"),
)


def json_schema() -> dict[str, Any]:
    """Return the JSON Schema (2020-12) of a recipe file, as plain values.

    A file that extends another may leave out any key, so keys are required of the others alone. A
    scalar may be an interpolation (``${...}``) in place of its own type.
    """
    paths = {"oneOf": [{"type": "string"}, {"type": "array", "items": {"type": "string"}}]}
    extends = {**paths, "description": "one file or a list, relative to this file; this file wins"}
    section = _section(Recipe)
    end = [{"required": [name]} for name in ("max_steps", "max_epochs")]
    whole = _required(Recipe)
    whole["required"].append("train")
    whole["properties"]["train"] = {"anyOf": end}
    return {
        "$schema": _DIALECT,
        "title": "ampctl recipe",
        **section,
        "properties": {**section["properties"], "extends": extends},
        "if": {"not": {"required": ["extends"]}},
        "then": whole,
        "$defs": {
            "interpolation": {"type": "string", "pattern": r"\$\{"},
            "block": {
                "type": "object",
                "description": "an import path and the arguments to call it with",
                "properties": {TARGET: {"type": "string", "description": "dotted import path"}},
                "additionalProperties": True,
            },
            "blocks": {
                "type": "object",
                "description": "several blocks, by name",
                "propertyNames": {"pattern": _NAME},
                "additionalProperties": {"$ref": "#/$defs/block"},
            },
        },
    }


def _section(cls: type[Any]) -> dict[str, Any]:
    hints = get_type_hints(cls)
    properties = {}
    for entry in fields(cls):
        schema = _type(hints[entry.name], entry.metadata)
        schema["description"] = entry.metadata.get("help", "")
        if entry.default is not MISSING:
            schema["default"] = list(entry.default) if entry.default == () else entry.default
        properties[entry.name] = schema
    return {"type": "object", "properties": properties, "additionalProperties": False}


def _required(cls: type[Any]) -> dict[str, Any]:
    """Return what a file that extends nothing must hold, sections inside too."""
    hints = get_type_hints(cls)
    needed = [
        entry
        for entry in fields(cls)
        if entry.default is MISSING and entry.default_factory is MISSING
    ]
    names = [entry.name for entry in needed]
    inner = {
        name: _required(hints[name]) if is_dataclass(hints[name]) else {"required": [TARGET]}
        for name in (entry.name for entry in needed if not entry.metadata.get("many"))
        if is_dataclass(hints[name]) or is_block(hints[name])
    }
    return {"required": names, "properties": inner}


def _type(hint: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    if is_block(hint):
        block = {"$ref": "#/$defs/block"}
        choices = [block, {"type": "null"}] if None in members(hint) else [block]
        if limits.get("many"):
            choices.insert(1, {"$ref": "#/$defs/blocks"})
        return {"anyOf": [*choices, {"$ref": "#/$defs/interpolation"}]}
    choices = [_member(member, limits) for member in members(hint)]
    is_text = any(choice.get("type") == "string" and "enum" not in choice for choice in choices)
    if not is_text and not (len(choices) == 1 and is_dataclass(hint)):
        choices.append({"$ref": "#/$defs/interpolation"})
    return choices[0] if len(choices) == 1 else {"anyOf": choices}


def _member(member: Any, limits: Mapping[str, Any]) -> dict[str, Any]:
    if is_dataclass(member) and isinstance(member, type):
        return _section(member)
    origin = get_origin(member)
    if origin is Literal:
        return {"type": "string", "enum": list(get_args(member))}
    if origin is tuple:
        return {"type": "array", "items": _type(get_args(member)[0], limits)}
    if origin is abc.Mapping:
        item = get_args(member)[1]
        values = True if item is Any else _type(item, limits)
        return {"type": "object", "additionalProperties": values}
    if member in (int, float):
        bounds = {word: limits[name] for name, word in _LIMITS if name in limits}
        return {"type": "integer" if member is int else "number", **bounds}
    names = {bool: "boolean", str: "string", None: "null"}
    return {"type": names[member]}
