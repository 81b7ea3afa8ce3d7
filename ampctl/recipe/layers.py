"""One tree of nodes out of several: deep merge, ``KEY=VALUE`` and ``${...}`` interpolation.

The merge is ours and not OmegaConf's because each value carries its line and its raw text along;
interpolation is OmegaConf's.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any

from omegaconf import DictConfig, ListConfig, OmegaConf
from omegaconf.errors import OmegaConfBaseException

from ampctl.errors import Problem, RecipeError
from ampctl.recipe.keys import Path, dotted, parse_override
from ampctl.recipe.scalar import escape, is_interpolated, scalar
from ampctl.recipe.schema import TARGET
from ampctl.recipe.yaml_source import Node, parse_value, text_node

COMMAND_LINE = "command line"

_OVERRIDE_ADVICE = (
    "write it like optimizer.lr=3e-4, model.layers[0]=64 or 'amp.modules[head.0]=float32'"
)
_REFERENCE = re.compile(r"\$\{[^${}:]*\}")  # ${a.b}: another value as it is, of its own type
_INTERPOLATION_ADVICE = r"name a key of this recipe or ${oc.env:NAME,default}; \${ is a literal ${"


def leaves(node: Node, path: Path = ()) -> Iterator[tuple[Path, Node]]:
    """Yield every scalar, empty mapping and empty list of a tree with its path."""
    if isinstance(node.value, Mapping) and node.value:
        for key, child in node.value.items():
            yield from leaves(child, (*path, key))
    elif isinstance(node.value, tuple) and node.value:
        for index, child in enumerate(node.value):
            yield from leaves(child, (*path, index))
    else:
        yield path, node


def transform(node: Node, change: Callable[[Path, Node], Node], path: Path = ()) -> Node:
    """Copy a tree with each scalar replaced by ``change(path, scalar)``."""
    if isinstance(node.value, Mapping):
        items = node.value.items()
        return replace(node, value={k: transform(v, change, (*path, k)) for k, v in items})
    if isinstance(node.value, tuple):
        children = enumerate(node.value)
        return replace(node, value=tuple(transform(v, change, (*path, i)) for i, v in children))
    return change(path, node)


def merge(base: Node, over: Node) -> Node:
    """Merge mappings key by key; ``over`` wins. A block whose ``_target_`` changes starts empty.

    The arguments of another target mean nothing to the new one, so they are dropped with it.
    """
    if not isinstance(base.value, Mapping) or not isinstance(over.value, Mapping):
        return over
    target = over.value.get(TARGET)
    if target is not None and TARGET in base.value and target.text != base.value[TARGET].text:
        return over
    merged = dict(base.value)
    for key, node in over.value.items():
        merged[key] = merge(merged[key], node) if key in merged else node
    return replace(base, value=merged)


def apply_overrides(tree: Node, overrides: Sequence[str], problems: list[Problem]) -> Node:
    """Apply ``KEY=VALUE`` texts in order, a block's ``_target_`` before its other arguments."""
    parsed: list[tuple[Path, Node]] = []
    for override in overrides:
        try:
            path, value = parse_override(override)
        except ValueError as error:
            message = f"got {override!r}; allowed: KEY=VALUE with a dotted key, and {error}"
            problems.append(Problem(COMMAND_LINE, "", message, _OVERRIDE_ADVICE))
            continue
        try:
            parsed.append((path, parse_value(value, COMMAND_LINE, problems)))
        except RecipeError as error:
            problems.extend(replace(each, key=dotted(path)) for each in error.problems)
    for path, node in _targets_first(parsed):
        try:
            tree = _assign(tree, path, node)
        except IndexError as error:
            advice = "an override changes the items that are there; give the whole list to add one"
            problems.append(Problem(COMMAND_LINE, dotted(path), f"{error}", advice))
    return tree


def interpolate(tree: Node, defaults: Mapping[str, Any], problems: list[Problem]) -> Node:
    """Resolve every ``${...}``; each one that fails is a problem of its own line.

    ``${a.b}`` alone is that value with its type. A plain text with an interpolation in it is read
    again by the scalar rules (``lr: ${oc.env:LR,0.1}`` is a number), a quoted one stays text.
    ``defaults``: what a key that the tree leaves out refers to.
    """
    pending = {path: node for path, node in leaves(tree) if is_interpolated(node.value)}
    failed: dict[Path, Node] = {}

    def attempt(path: Path, read: Callable[..., Any], *args: Any) -> Any:
        try:
            return read(*args)
        except (OmegaConfBaseException, RecursionError) as error:
            node = pending.pop(path)
            reason = f"{error}".splitlines()[0] if f"{error}" else "it is nested too deep"
            message = f"got {node.text}, which does not resolve: {reason}"
            problems.append(Problem(node.where, dotted(path), message, _INTERPOLATION_ADVICE))
            failed[path] = replace(node, failed=True)
            return None

    for path, node in list(pending.items()):  # the grammar first: one bad text spoils the whole
        attempt(path, OmegaConf.create, [node.text])
    for is_reference in (False, True):  # references last: what they copy is resolved by then
        config = OmegaConf.create(_over(defaults, _values(tree, pending))) if pending else None
        resolved: dict[Path, Node] = {}
        for path, node in list(pending.items()):
            if is_reference == bool(_REFERENCE.fullmatch(node.text)):
                value = attempt(path, _select, config, path)
                if path in pending:
                    resolved[path] = _node(value, pending.pop(path), is_literal=is_reference)
        tree = _replaced(tree, resolved)
    return _replaced(tree, failed)


def _replaced(tree: Node, new: Mapping[Path, Node]) -> Node:
    return transform(tree, lambda path, node: new.get(path, node))


def _values(node: Node, pending: Mapping[Path, Node], path: Path = ()) -> Any:
    """Turn a tree into plain values for OmegaConf; only what is pending may be interpolated."""
    if isinstance(node.value, Mapping):
        return {key: _values(v, pending, (*path, key)) for key, v in node.value.items()}
    if isinstance(node.value, tuple):
        return [_values(v, pending, (*path, index)) for index, v in enumerate(node.value)]
    if isinstance(node.value, str) and path not in pending:
        return escape(node.value)
    return node.value


def _over(defaults: Any, given: Any) -> Any:
    """Return values with the defaults of the keys that they leave out; what is given wins."""
    if not isinstance(defaults, Mapping) or not isinstance(given, Mapping):
        return given
    return {**defaults, **{key: _over(defaults.get(key), value) for key, value in given.items()}}


def _select(config: Any, path: Path) -> Any:
    for part in path:
        config = config[part]
    is_container = isinstance(config, DictConfig | ListConfig)
    return OmegaConf.to_container(config, resolve=True) if is_container else config


def _node(value: Any, origin: Node, *, is_literal: bool) -> Node:
    """Make the node of a resolved value, in the place of the text that it came from."""
    if isinstance(value, dict):
        items = value.items()
        return replace(origin, value={f"{k}": _node(v, origin, is_literal=True) for k, v in items})
    if isinstance(value, list):
        return replace(origin, value=tuple(_node(v, origin, is_literal=True) for v in value))
    if isinstance(value, str):
        if is_literal or origin.quoted:
            return text_node(value, origin.where)
        return Node(scalar(value), origin.where, value)
    words = {None: "null", True: "true", False: "false"}
    text = words[value] if value is None or isinstance(value, bool) else f"{value}"
    return Node(value, origin.where, text)


def _targets_first(parsed: Sequence[tuple[Path, Node]]) -> list[tuple[Path, Node]]:
    """Move each ``_target_`` before the first override that sets an argument of its block."""
    ordered: list[tuple[Path, Node]] = []
    for path, node in parsed:
        at = len(ordered)
        if path[-1] == TARGET:
            block = path[:-1]
            inside = (
                i for i, (other, _) in enumerate(ordered) if other[: len(block)] == block != other
            )
            at = next(inside, at)
        ordered.insert(at, (path, node))
    return ordered


def _assign(node: Node, path: Path, new: Node) -> Node:
    """Set one value deep in a tree; mappings on the way are made, list items must exist."""
    if not path:
        return merge(node, new)
    if path == (TARGET,):
        return merge(node, Node({TARGET: new}, COMMAND_LINE))
    part, rest = path[0], path[1:]
    if isinstance(node.value, tuple) and f"{part}".isdecimal():
        index = int(part)
        if index >= len(node.value):
            raise IndexError(f"got item {index} of a list of {len(node.value)}")
        items = list(node.value)
        items[index] = _assign(items[index], rest, new)
        return replace(node, value=tuple(items))
    name = f"{part}"
    if isinstance(node.value, Mapping) and name in node.value:
        return replace(node, value={**node.value, name: _assign(node.value[name], rest, new)})
    items_asked = [each for each in path if isinstance(each, int)]
    if items_asked:
        raise IndexError(f"got item {items_asked[0]} of what is no list, or is not there")
    for each in reversed(path):
        new = Node({f"{each}": new}, COMMAND_LINE)
    return merge(node, new)
