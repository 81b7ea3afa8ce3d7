"""What a check is given and hands back, how it fails or is skipped, and how it compares."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor


class CheckFailed(Exception):  # noqa: N818 - a result, not an error of the script
    """What was looked for is not so; the text says what was found."""


class CheckSkipped(Exception):  # noqa: N818
    """The check has no meaning here; the text says why."""


@dataclass(frozen=True)
class Setup:
    """Where to check, and whether as a rehearsal: the same code on models that a CPU can train."""

    device: torch.device
    tiny: bool


@dataclass(frozen=True)
class Finding:
    """What a check that passed has to tell: a line for a person, figures for a program."""

    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)


Check = Callable[[Setup], Finding]


def require(condition: bool, message: str) -> None:
    """Raise CheckFailed with the message unless the condition holds."""
    if not condition:
        raise CheckFailed(message)


def first_difference(a: Any, b: Any, path: str = "") -> str | None:
    """Name the first place where two nests of dicts, lists and tensors differ in a single bit."""
    left, right = dict(leaves(a, path)), dict(leaves(b, path))
    if left.keys() != right.keys():
        return f"{sorted(left.keys() ^ right.keys())[0]} is in one of the two only"
    for name, value in left.items():
        other = right[name]
        if isinstance(value, Tensor) and isinstance(other, Tensor):
            if not _same_bits(value, other):
                return f"{name} differs{_by_how_much(value, other)}"
        elif value != other and not (value != value and other != other):
            return f"{name}: {value!r} and {other!r}"
    return None


def leaves(value: Any, path: str = "") -> Iterator[tuple[str, Any]]:
    """Yield the dotted path and the value of every leaf of nested dicts, lists and tuples."""
    if isinstance(value, Mapping):
        for key, part in value.items():
            yield from leaves(part, f"{path}.{key}" if path else f"{key}")
    elif isinstance(value, list | tuple):
        for i, part in enumerate(value):
            yield from leaves(part, f"{path}[{i}]")
    else:
        yield path, value


def cloned(value: Any) -> Any:
    """Return a nest of dicts, lists and tuples with every tensor copied."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, Mapping):
        return {key: cloned(part) for key, part in value.items()}
    if isinstance(value, list | tuple):
        return [cloned(part) for part in value]
    return value


def _same_bits(a: Tensor, b: Tensor) -> bool:
    """Compare as bytes, so that a nan equals itself."""
    if a.shape != b.shape or a.dtype != b.dtype:
        return False
    ours, theirs = (tensor.detach().reshape(-1).view(torch.uint8) for tensor in (a, b))
    return torch.equal(ours, theirs)


def _by_how_much(a: Tensor, b: Tensor) -> str:
    if a.shape != b.shape or a.dtype != b.dtype:
        return f": {a.dtype} {list(a.shape)} and {b.dtype} {list(b.shape)}"
    largest = (a.double() - b.double()).abs().max().item()
    return f" in {int((a != b).sum())} of {a.numel()} values, by at most {largest:.3g}"
