"""A recipe file, or the text in a checkpoint, into a checked ``Recipe`` with its origins.

This module has the order of things: read, extend, override, interpolate, validate, write out.
"""

from __future__ import annotations

import hashlib
import os
import re
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field, fields, is_dataclass, replace
from functools import reduce
from pathlib import Path
from typing import Any

from ampctl.errors import Problem, RecipeError
from ampctl.recipe import builtin
from ampctl.recipe.hints import default_values
from ampctl.recipe.keys import Path as KeyPath
from ampctl.recipe.keys import dotted
from ampctl.recipe.layers import (
    COMMAND_LINE,
    apply_overrides,
    interpolate,
    leaves,
    merge,
    transform,
)
from ampctl.recipe.reading import STANDARD_INPUT, STDIN, read_file, read_once
from ampctl.recipe.scalar import dump, is_interpolated, unescape
from ampctl.recipe.schema import TARGET, Recipe
from ampctl.recipe.suggest import nearest
from ampctl.recipe.validate import Validation, validate
from ampctl.recipe.yaml_source import MAX_BYTES, Node, parse_yaml, text_node

EXTENDS = "extends"
DEFAULT = "default"


@dataclass(frozen=True)
class LoadedRecipe:
    """A valid recipe, its resolved text and where each value came from.

    ``text`` is YAML with every key and value, defaults too; ``load_recipe`` of a file that holds
    it and ``parse_recipe`` both give an equal ``Recipe``. ``digest`` is its SHA-256 in hex.
    ``origins`` maps the dotted key of every leaf to ``recipe.yaml:12``, ``command line`` or
    ``default``; ``explicit`` holds the keys that a file or the command line set. ``source`` and
    ``overrides`` are the words that named it. There is no source of one out of a checkpoint, nor of
    one that can be read only once, out of standard input or a pipe: ``sent`` is what came there.
    """

    recipe: Recipe
    text: str
    digest: str
    origins: Mapping[str, str]
    explicit: frozenset[str]
    source: str = field(default="", compare=False)
    overrides: tuple[str, ...] = field(default=(), compare=False)
    sent: str | None = field(default=None, compare=False, repr=False)

    def place(self, key: str) -> str:
        """Return where a key stands; of a mapping or a list, where its first leaf does."""
        return place(self.origins, key)

    def problem(self, key: str, message: str, advice: str = "") -> Problem:
        """Return what is wrong with a key, with the place where it stands."""
        return Problem(self.place(key), key, message, advice)


def load_recipe(source: str | Path, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load a recipe file, or a built-in recipe by its name, with ``KEY=VALUE`` overrides.

    ``-`` is standard input, and extends files of the current folder. Raises ``RecipeError`` that
    holds every problem of the files and of the overrides.
    """
    problems: list[Problem] = []
    source = f"{source}"
    path, shown = (Path(STDIN), STANDARD_INPUT) if source == STDIN else _find(source)
    sent = read_once(source, path)
    try:
        if sent is None:
            tree = _extended(read_file(path, shown), path, shown, (), problems)
        else:
            tree = _extended(sent, Path(STDIN), shown, (), problems)
    except RecipeError as error:
        raise RecipeError([*problems, *error.problems]) from None
    tree = apply_overrides(tree, overrides, problems)
    tree = interpolate(tree, default_values(), problems)
    _refuse_pythons_none(tree, problems)
    loaded = _finish(tree, shown, problems)
    named = source if sent is None else ""
    return replace(loaded, source=named, overrides=tuple(overrides), sent=sent)


def parse_recipe(text: str, *, where: str, overrides: Sequence[str] = ()) -> LoadedRecipe:
    """Load the resolved text of a recipe, as a checkpoint holds it; ``where`` names it in messages.

    The text may be a stranger's: it reads no other file and ``${...}`` in it is literal text.
    Raises ``RecipeError`` that holds every problem.
    """
    problems: list[Problem] = []
    tree = transform(_mapping_at_top(parse_yaml(text, where, problems), where), _unescaped)
    for override in overrides:
        _refuse_interpolation(override, problems)
    tree = apply_overrides(tree, overrides, problems)
    _refuse_pythons_none(tree, problems, of=COMMAND_LINE)
    loaded = _finish(tree, where, problems)
    return replace(loaded, overrides=tuple(overrides))


def place(origins: Mapping[str, str], key: str) -> str:
    """Return where a key stands; of a mapping or a list, where its first leaf does."""
    inside = (f"{key}.", f"{key}[")
    below = (origin for leaf, origin in origins.items() if leaf.startswith(inside))
    return origins.get(key) or next(below, "")


def to_plain(value: Any) -> Any:
    """Return a recipe, or a part of one, as dicts, lists and scalars in the order of the schema."""
    if is_dataclass(value) and not isinstance(value, type):
        return {entry.name: to_plain(getattr(value, entry.name)) for entry in fields(value)}
    if isinstance(value, Mapping):
        first = [TARGET] if TARGET in value else []
        return {key: to_plain(value[key]) for key in [*first, *(k for k in value if k != TARGET)]}
    if isinstance(value, list | tuple):
        return [to_plain(item) for item in value]
    return value


def recipe_changes(old: LoadedRecipe, new: LoadedRecipe) -> list[str]:
    """Describe each key whose value differs between two recipes."""
    before, after = dict(_leaves(to_plain(old.recipe))), dict(_leaves(to_plain(new.recipe)))
    return [
        f"{key} {before.get(key, 'unset')} -> {after.get(key, 'unset')}"
        for key in [*before, *(key for key in after if key not in before)]
        if before.get(key) != after.get(key)
    ]


def _find(source: str, *, folder: Path | None = None, where: str = "") -> tuple[Path, str]:
    """Find a file, or a built-in recipe by its name; ``folder``: of the file that extends it."""
    path = Path(source) if folder is None else folder / source
    names = builtin.builtin_names()
    is_builtin = source in names and not path.is_file()
    if is_builtin:
        return builtin.builtin_path(source), source
    if "\0" not in source and os.path.lexists(path):
        return path, f"{path}"
    is_there = "\0" not in source and os.path.isdir(path.parent)
    files = [f"{found}" for found in path.parent.glob("*.y*ml")] if is_there else []
    close = nearest(f"{path}", [*files, *names])
    advice = f"did you mean {close}?" if close else f"built-in recipes: {', '.join(names)}"
    key = EXTENDS if where else ""
    problem = Problem(where, key, f"no such file or built-in recipe: {path}", advice)
    raise RecipeError([problem])


def _extended(
    text: str, path: Path, shown: str, chain: Sequence[tuple[Path, str]], problems: list[Problem]
) -> Node:
    """Merge the text of a file with the files that it extends; raises if one cannot be read."""
    tree = _mapping_at_top(parse_yaml(text, shown, problems), shown)
    assert isinstance(tree.value, Mapping)
    chain = [*chain, (path.resolve(), shown)]
    lost: list[Problem] = []
    layers: list[Node] = []
    for base in _bases(tree.value.get(EXTENDS), lost):
        try:
            found, name = _find(base.text, folder=path.parent, where=base.where)
            if found.resolve() in dict(chain):
                names = " -> ".join([*(each for _, each in chain), name])
                advice = "take one of the files out of the circle"
                raise RecipeError([Problem(base.where, EXTENDS, f"a circle: {names}", advice)])
            text = read_file(found, name)
            layers.append(_extended(text, found, name, chain, problems))
        except RecipeError as error:
            lost.extend(error.problems)
    if lost:
        raise RecipeError(lost)
    own = {key: node for key, node in tree.value.items() if key != EXTENDS}
    return replace(reduce(merge, [*layers, replace(tree, value=own)]), where=tree.where)


def _bases(extends: Node | None, problems: list[Problem]) -> list[Node]:
    """Return the texts of ``extends``: none, one or a list."""
    if extends is None or extends.value is None:
        return []
    bases = list(extends.value) if isinstance(extends.value, tuple) else [extends]
    wrong = [base for base in bases if not isinstance(base.value, str)]
    for base in wrong:
        message = "allowed: the path of a file, or a list of paths"
        problems.append(Problem(base.where, EXTENDS, message, "write it like extends: base.yaml"))
    return [] if wrong else bases


def _mapping_at_top(tree: Node, where: str) -> Node:
    if isinstance(tree.value, Mapping):
        return tree
    kind = "a list" if isinstance(tree.value, tuple) else "a single value"
    message = f"got {kind} at the top; allowed: a mapping of keys"
    raise RecipeError([Problem(tree.where, "", message, "write KEY: VALUE lines")])


def _unescaped(path: KeyPath, node: Node) -> Node:
    if not is_interpolated(node.value):
        return node
    return text_node(unescape(node.text), node.where)


def _refuse_interpolation(text: str, problems: list[Problem]) -> None:
    if is_interpolated(text):
        message = f"got {text}; a stored recipe is resolved and takes no ${{...}}"
        key = text.partition("=")[0]
        problems.append(Problem(COMMAND_LINE, key, message, "give the value itself"))


def _refuse_pythons_none(tree: Node, problems: list[Problem], of: str = "") -> None:
    """Add a problem for each None that stands where YAML reads a text and null is meant.

    ``of``: a place outside of which nothing is looked at.
    """
    for path, node in leaves(tree):
        if node.text == "None" and not node.quoted and node.where.startswith(of):
            message = "got None, which is the text 'None' in YAML"
            advice = """write null, or "None" in quotes for the text"""
            problems.append(Problem(node.where, dotted(path), message, advice))


def _finish(tree: Node, where: str, problems: list[Problem]) -> LoadedRecipe:
    """Validate a merged tree and write it out; raises all problems in the order of the file."""
    found, told = Validation([]), {(problem.where, problem.key) for problem in problems}
    recipe = validate(tree, found)
    problems += [each for each in found.problems if (each.where, each.key) not in told]
    text = "" if recipe is None else dump(to_plain(recipe))
    if len(text.encode()) > MAX_BYTES:
        problems.append(Problem(where, "", f"is larger than {MAX_BYTES:,} bytes when written out"))
    if recipe is None or problems:
        raise RecipeError(sorted(problems, key=lambda problem: _position(problem, where)))
    places = found.places
    origins = {key: places.get(key, DEFAULT) for key, _ in _leaves(to_plain(recipe))}
    explicit = frozenset(key for key, origin in origins.items() if origin != DEFAULT)
    digest = hashlib.sha256(text.encode()).hexdigest()
    return LoadedRecipe(recipe, text, digest, origins, explicit)


def _leaves(value: Any, path: KeyPath = ()) -> Iterator[tuple[str, Any]]:
    """Yield the dotted key and the value of every leaf of plain values."""
    if isinstance(value, dict | list) and value:
        items = value.items() if isinstance(value, dict) else enumerate(value)
        for part, child in items:
            yield from _leaves(child, (*path, part))
    else:
        yield dotted(path), value


def _position(problem: Problem, main: str) -> tuple[bool, bool, str, int]:
    """Order problems: the file itself, the files that it extends, the command line."""
    match = re.fullmatch(r"(.*?):(\d+)(?::\d+)?", problem.where)
    file, line = (match[1], int(match[2])) if match else (problem.where, 0)
    return (file == COMMAND_LINE, file != main, file, line)
