"""How a dotted key is written and read, alike in messages, in ``--origin`` and in ``KEY=VALUE``."""

from __future__ import annotations

import re
from functools import reduce
from typing import TypeAlias

Path: TypeAlias = tuple[str | int, ...]

_PLAIN = re.compile(r"""[^.\[\]\s"'=]+""")
_QUOTED = r"""
    " (?P<double> (?: [^"\\] | \\. )* ) "
  | ' (?P<single> [^']* ) '
"""
_NAME = re.compile(rf"""{_QUOTED} | (?P<bare> [^.\[\]\s"'=] [^.\[\]\s=]* )""", re.VERBOSE)
_IN_BRACKETS = re.compile(
    rf"""\[ \s* (?: {_QUOTED} | (?P<bare> [^\[\]\s"'=] [^\[\]"'=]* ) ) \]""", re.VERBOSE
)
_EQUALS = re.compile(r"\s*=")


def dotted(path: Path) -> str:
    """Write a path as a dotted key, as ``KEY=VALUE`` takes it: ``model.layers[0].width``."""
    return reduce(child, path, "")


def child(key: str, part: str | int) -> str:
    """Return the dotted key of an item of ``key``; a name that has dots stands in brackets."""
    if isinstance(part, int):
        return f"{key}[{part}]"
    if _PLAIN.fullmatch(part):
        return f"{key}.{part}" if key else part
    bare = _IN_BRACKETS.fullmatch(f"[{part}]")
    if bare and bare["bare"] == part.strip() == part:
        return f"{key}[{part}]"
    escaped = part.replace("\\", "\\\\").replace('"', '\\"')
    return f'{key}["{escaped}"]'


def parse_override(text: str) -> tuple[Path, str]:
    """Read ``KEY=VALUE`` into the path of the key and the text of the value.

    A name that has dots stands in quotes or brackets: ``amp.modules."head.0"=float32``,
    ``amp.modules[head.0]=float32``; a number in brackets is the place in a list. Raises ValueError
    that says where the key cannot be read.
    """
    parts: list[str | int] = []
    at = len(text) - len(text.lstrip())
    while True:
        in_brackets = bool(parts) and text[at - 1 : at] != "." and text.startswith("[", at)
        match = (_IN_BRACKETS if in_brackets else _NAME).match(text, at)
        if match is None:
            raise ValueError(_why(text, at))
        parts.append(_part(match, in_brackets=in_brackets))
        at = match.end()
        if equals := _EQUALS.match(text, at):
            return tuple(parts), text[equals.end() :]
        if text.startswith(".", at):
            at += 1
        elif not text.startswith("[", at):
            raise ValueError(_why(text, at))


def _part(match: re.Match[str], *, in_brackets: bool) -> str | int:
    if match["bare"] is not None:
        name = match["bare"].strip()
        return int(name) if in_brackets and name.isdecimal() and len(name) < 10 else name
    if match["single"] is not None:
        return match["single"]
    return re.sub(r"\\(.)", r"\1", match["double"])


def _why(text: str, at: int) -> str:
    rest = text[at:]
    if not rest.strip():
        return "it has no ="
    opens = re.match(r"""\[?\s*(["'])""", rest)
    if opens and rest.count(opens[1]) == 1:
        return f"the quote of {rest!r} is not closed"
    return f"its key cannot be read from {rest!r} on"
