"""YAML text into nodes that know their line; no key may be given twice, no text be too big.

A fault of its YAML becomes a ``RecipeError``; what the keys mean is not known here.
"""

from __future__ import annotations

import re
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import yaml

from ampctl.errors import Problem, RecipeError
from ampctl.recipe.scalar import Scalar, scalar

MAX_BYTES = 1_000_000
MAX_DEPTH = 50
MAX_NODES = 100_000

_PLAIN = "plain"
_QUOTED = "quoted"
_STANDARD = "tag:yaml.org,2002:"
_SYNTAX_ADVICE = (
    (r"mapping values are not allowed", "quote a value that holds ': ', or start a new line"),
    (r"expected ',' or '[\]}]'|expected the node content", "close the bracket, or quote the text"),
    (r"cannot start any token", "quote a value that starts with this character"),
    (r"found unexpected end of stream|while scanning a quoted", "close the quote"),
    (r"could not find expected ':'|expected <block end>", "check the indentation and the ':'"),
    (r"expected a single document", "keep one document in the file: remove the '---'"),
    (r"undefined alias", "define the anchor (&name) above it, or quote a text that starts with *"),
)


@dataclass(frozen=True)
class Node:
    """A value of the recipe: a scalar, a mapping or a list, and where it stands.

    ``where`` is ``file:line`` of its key, or ``command line``. ``text`` is the raw text of a
    scalar, for keys that want text: the value of ``1e4`` is a number, its text is not.
    ``failed``: a problem has been told of it already.
    """

    value: Scalar | Mapping[str, Node] | tuple[Node, ...]
    where: str
    text: str = ""
    quoted: bool = False
    failed: bool = False


def text_node(text: str, where: str) -> Node:
    """Make the node of a quoted text."""
    return Node(text, where, text, quoted=True)


def parse_yaml(text: str, where: str, problems: list[Problem]) -> Node:
    """Read YAML text into a node; ``where`` names it in messages.

    Duplicate and unusable keys are added to ``problems``. Raises ``RecipeError`` where the text is
    no YAML, or is too big, or too deep.
    """
    root = _compose(text, where)
    if root is None:
        raise refusal(where, "is empty", "a recipe needs at least name, model, task and data")
    return _Construction(where, problems).node(root, f"{where}:{root.start_mark.line + 1}", depth=1)


def parse_value(text: str, where: str, problems: list[Problem]) -> Node:
    """Read the value of a ``KEY=VALUE``: flow YAML after a bracket or a quote, else a scalar."""
    text = text.strip()
    if not text.startswith(("[", "{", '"', "'")):
        return Node(scalar(text), where, text)
    root = _compose(text, where)
    assert root is not None, "a text that opens with a bracket or a quote is a document"
    return _Construction(where, problems, lines=False).node(root, where, depth=1)


def refusal(where: str, message: str, advice: str = "") -> RecipeError:
    """Return the error of a text that is no recipe."""
    return RecipeError([Problem(where, "", message, advice)])


def too_big(where: str) -> RecipeError:
    """Return the error of a text of more than ``MAX_BYTES``."""
    return refusal(where, f"is larger than {MAX_BYTES:,} bytes, the most that a recipe may have")


class _Loader(yaml.BaseLoader):
    """PyYAML's composer without its YAML 1.1 value rules, bounded in depth and size."""

    depth = 0
    composed = 0

    def resolve(self, kind: type, value: Any, implicit: Any) -> Any:
        if kind is yaml.ScalarNode:
            return _PLAIN if implicit[0] else _QUOTED
        return super().resolve(kind, value, implicit)  # type: ignore[no-untyped-call]

    def compose_node(self, parent: Any, index: Any) -> Any:
        self.depth += 1
        self.composed += 1
        if self.depth > MAX_DEPTH or self.composed > MAX_NODES:
            mark = self.peek_event().start_mark  # type: ignore[no-untyped-call]
            what = f"nested deeper than {MAX_DEPTH}"
            if self.composed > MAX_NODES:
                what = f"holds more than {MAX_NODES:,} values"
            raise yaml.MarkedYAMLError(problem=what, problem_mark=mark)
        node = super().compose_node(parent, index)
        self.depth -= 1
        return node


def _compose(text: str, where: str) -> yaml.Node | None:
    if len(text) > MAX_BYTES or len(text.encode("utf-8", "surrogatepass")) > MAX_BYTES:
        raise too_big(where)
    try:
        loader = _Loader(text)
        return loader.get_single_node()
    except yaml.MarkedYAMLError as error:
        raise _syntax_error(error, text, where) from None
    except yaml.reader.ReaderError as error:
        line = text.count("\n", 0, error.position) + 1
        message = f"holds the character U+{ord(text[error.position]):04X}, which is no text"
        raise refusal(f"{where}:{line}", message, "is this a recipe? save it as text") from None
    except (ValueError, OverflowError):
        # PyYAML turns "\UFFFFFFFF" into a character without asking whether there is one.
        raise refusal(where, r"holds a \U escape that is no character") from None


def _syntax_error(error: yaml.MarkedYAMLError, text: str, where: str) -> RecipeError:
    mark = error.problem_mark or error.context_mark
    assert mark is not None, "PyYAML marks every syntax error"
    lines = text.splitlines() or [""]
    line = lines[min(mark.line, len(lines) - 1)]
    message = f"{error.problem}"
    whole = f"{error.context} {message}"
    advice = next((told for rule, told in _SYNTAX_ADVICE if re.search(rule, whole)), "")
    if "\t" in line:
        message = "YAML allows no tab here"
        advice = "replace the tab by spaces"
    elif error.context_mark is not None and error.context_mark.line != mark.line:
        message += f" ({error.context} that starts in line {error.context_mark.line + 1})"
    shown = line.strip(" ").replace("\t", "<TAB>")
    shown = shown if len(shown) <= 100 else f"{shown[:100]}..."
    place = f"{where}:{mark.line + 1}:{mark.column + 1}"
    return refusal(place, f"{message}\n    | {shown}", advice)


@dataclass
class _Construction:
    """One pass over composed nodes that counts what it makes, aliases expanded."""

    source: str
    problems: list[Problem]
    lines: bool = True
    made: int = field(default=0, init=False)
    characters: int = field(default=0, init=False)

    def where(self, node: yaml.Node) -> str:
        return f"{self.source}:{node.start_mark.line + 1}" if self.lines else self.source

    def node(self, node: yaml.Node, where: str, depth: int) -> Node:
        """Turn a composed node into ours; ``where`` is the place of its key."""
        self.count(node, depth)
        if isinstance(node, yaml.MappingNode):
            self.check_tag(node, f"{_STANDARD}map")
            return Node(self.mapping(node, depth), where)
        if isinstance(node, yaml.SequenceNode):
            self.check_tag(node, f"{_STANDARD}seq")
            items = (self.node(item, self.where(item), depth + 1) for item in node.value)
            return Node(tuple(items), where)
        assert isinstance(node, yaml.ScalarNode)
        text = self.text(node)
        if node.tag == _PLAIN:
            return Node(scalar(text), where, text)
        if node.tag != _QUOTED:
            self.check_tag(node, f"{_STANDARD}str")
        return text_node(text, where)

    def mapping(self, node: yaml.MappingNode, depth: int) -> dict[str, Node]:
        """Construct a mapping: its own keys win over merged (``<<``) ones, and these in order."""
        own: dict[str, Node] = {}
        merged: dict[str, Node] = {}
        for key_node, value_node in node.value:
            where = self.where(key_node)
            if not isinstance(key_node, yaml.ScalarNode) or not key_node.value:
                message = "a key must be a name; this one is empty, a list or a mapping"
                self.problems.append(Problem(where, "", message, "write KEY: VALUE"))
                continue
            key = self.text(key_node)
            if key == "<<" and key_node.tag == _PLAIN:
                for name, value in self.merge_sources(value_node, depth):
                    merged.setdefault(name, value)
            elif key in own:
                message = f"given twice, at {own[key].where} and at {where}"
                self.problems.append(Problem(where, key, message, "keep one of the two"))
            else:
                own[key] = self.node(value_node, where, depth + 1)
        return {**merged, **own}

    def merge_sources(self, node: yaml.Node, depth: int) -> Iterator[tuple[str, Node]]:
        """Yield the items that a merge key brings in: of one mapping or of a list of them."""
        for source in node.value if isinstance(node, yaml.SequenceNode) else [node]:
            self.count(source, depth + 1)
            if isinstance(source, yaml.MappingNode):
                yield from self.mapping(source, depth + 1).items()
            else:
                message = "merges a value that is no mapping"
                where = self.where(source)
                self.problems.append(Problem(where, "<<", message, "write <<: *anchor"))

    def count(self, node: yaml.Node, depth: int) -> None:
        self.made += 1
        if self.made > MAX_NODES or self.characters > MAX_BYTES:
            message = f"holds more than {MAX_NODES:,} values or {MAX_BYTES:,} characters"
            advice = "each alias (*name) counts as all that its anchor holds"
            raise refusal(self.where(node), message, advice)
        if depth > MAX_DEPTH:
            raise refusal(self.where(node), f"nested deeper than {MAX_DEPTH}")

    def text(self, node: yaml.ScalarNode) -> str:
        text: str = node.value
        self.characters += len(text)
        try:
            text.encode()
        except UnicodeEncodeError:
            message = "a text holds half of a surrogate pair, which is no character"
            self.problems.append(Problem(self.where(node), "", message, "remove it"))
            return text.encode("utf-8", "replace").decode()
        return text

    def check_tag(self, node: yaml.Node, allowed: str) -> None:
        if node.tag != allowed:
            tag = f"{node.tag}".replace(_STANDARD, "!!")
            message = f"the tag {tag} is not allowed; a recipe holds plain values"
            self.problems.append(Problem(self.where(node), "", message, "remove the tag"))
