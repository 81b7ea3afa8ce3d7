"""What the text of a YAML scalar means, read and written, by the rules of YAML 1.2.

What a key of the schema wants of it is the affair of ``validate``.
"""

from __future__ import annotations

import math
import re
from collections.abc import Mapping
from typing import Any, TypeAlias

import yaml

Scalar: TypeAlias = bool | int | float | str | None

_NULL = frozenset({"", "~", "null", "Null", "NULL"})
_TRUE = frozenset({"true", "True", "TRUE"})
_FALSE = frozenset({"false", "False", "FALSE"})
_TRUE_WORDS = frozenset({"true", "yes", "on"})
_FALSE_WORDS = frozenset({"false", "no", "off"})
_INT = re.compile(r"[-+]?[0-9]+|0x[0-9a-fA-F]+|0o[0-7]+")
_FLOAT = re.compile(r"[-+]?(\.[0-9]+|[0-9]+(\.[0-9]*)?)([eE][-+]?[0-9]+)?")
_INF = re.compile(r"[-+]?\.(inf|Inf|INF)")
_NAN = frozenset({".nan", ".NaN", ".NAN"})
_INTERPOLATION = re.compile(r"(\\*)\$\{")
# Python reads and writes no more than 4300 decimal digits, and as many make 3500 hexadecimal ones.
_MAX_INT_DIGITS = 3500
_LONGEST_SLIP = 40


def scalar(text: str) -> Scalar:
    """Read the text of a plain (unquoted) scalar; what is no number, boolean or null is text.

    ``on``, ``off``, ``yes`` and ``no`` are text, and ``1e-4`` is a number: YAML 1.2, core schema.
    """
    if text in _NULL:
        return None
    if text in _TRUE or text in _FALSE:
        return text in _TRUE
    read = number(text)
    return text if read is None else read


def number(text: str) -> int | float | None:
    """Read a number, or return None where the text is none."""
    if _INT.fullmatch(text) and len(text) <= _MAX_INT_DIGITS:
        return int(text, 10 if text.lstrip("+-").isdigit() else 0)
    if _FLOAT.fullmatch(text):
        return float(text)
    if _INF.fullmatch(text):
        return -math.inf if text.startswith("-") else math.inf
    return math.nan if text in _NAN else None


def number_meant(text: str, *, whole: bool = False) -> str:
    """Return how to write the number that a text was probably meant to be, or "".

    That is 1.5 for ``1,5``, 1000 for ``1_000`` and, of a ``whole`` number, for ``1,000``.
    """
    if len(text) > _LONGEST_SLIP or number(text.strip()) is not None:
        return ""
    plain = text.strip().replace("\N{MINUS SIGN}", "-").replace("_", "").replace(" ", "")
    if re.fullmatch(r"[-+]?\d{1,3}(,\d{3})+(\.\d*)?", plain):
        thousands = plain.replace(",", "")
        is_clear = whole or plain.count(",") > 1 or "." in plain
        return thousands if is_clear else f"{thousands}, or {plain.replace(',', '.')}"
    plain = plain.replace(",", ".") if plain.count(",") == 1 else plain
    plain = re.sub(r"(?<=[\d.])[fFdDL]$", "", plain)
    read = number(plain)
    return plain if read is not None and math.isfinite(read) else ""


def list_meant(text: str) -> str:
    """Return how to write the list of numbers that a text was probably meant to be, or ""."""
    items = [item.strip() for item in text.strip().strip("()").split(",") if item.strip()]
    is_list = bool(items) and all(number(item) is not None for item in items)
    return f"[{', '.join(items)}]" if is_list else ""


def boolean(text: str) -> bool | None:
    """Read a boolean word where a boolean is wanted: on, off, yes, no, true, false; else None."""
    word = text.strip().lower()
    return word in _TRUE_WORDS if word in _TRUE_WORDS | _FALSE_WORDS else None


def is_interpolated(value: object) -> bool:
    """Return whether a value holds ``${``, escaped or not."""
    return isinstance(value, str) and "${" in value


def escape(text: str) -> str:
    r"""Write literal text so that interpolation gives it back: ``${`` becomes ``\${``."""
    return _INTERPOLATION.sub(lambda match: match[1] * 2 + "\\${", text) if "${" in text else text


def unescape(text: str) -> str:
    r"""Undo ``escape``; an unescaped ``${`` stays as it is."""

    def halve(match: re.Match[str]) -> str:
        slashes = match[1]
        return (slashes[: len(slashes) // 2] if len(slashes) % 2 else slashes) + "${"

    return _INTERPOLATION.sub(halve, text) if "${" in text else text


class _Dumper(yaml.SafeDumper):
    """A dumper whose output reads back by the rules above, and by those of YAML 1.1 too."""

    def ignore_aliases(self, data: Any) -> bool:
        return True


def _represent_text(dumper: yaml.SafeDumper, text: str) -> yaml.ScalarNode:
    # A plain None would be taken for a mistake: null is meant by it more often.
    style = None if isinstance(scalar(text), str) and text != "None" else "'"
    if not text.isprintable():
        style = '"'  # a single-quoted line break (U+0085 too) would be read back as a space
    return dumper.represent_scalar("tag:yaml.org,2002:str", text, style=style)


_Dumper.add_representer(str, _represent_text)


def dump(values: Mapping[str, Any]) -> str:
    """Write plain values as YAML text in their own order; literal ``${`` is escaped."""
    return yaml.dump(
        _escaped(values), Dumper=_Dumper, sort_keys=False, allow_unicode=True, width=math.inf
    )


def _escaped(value: Any) -> Any:
    if isinstance(value, Mapping):
        return {key: _escaped(item) for key, item in value.items()}
    if isinstance(value, list):
        return [_escaped(item) for item in value]
    return escape(value) if isinstance(value, str) else value
