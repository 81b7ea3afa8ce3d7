"""The weights that a new run starts from, instead of those that its model is built with.

What of them a model takes is settled here, by name; where they are read from is left to ``train``.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ampctl.errors import CheckpointError, first_of, printable
from ampctl.state_dict.checks import place
from ampctl.state_dict.copies import nonfinite
from ampctl.state_dict.load import allowances, listing, mismatches, rounding

PREFIXES = ("module.", "_orig_mod.", "model.")
"""What DDP, torch.compile and Lightning put before all names of the model that they wrap."""


@dataclass(frozen=True)
class InitialWeights:
    """Weights by name; ``where`` they are from, in words.

    Names that match a glob of ``allow_missing`` may be lacking, not fit or be of no use.
    ``prefixes`` may stand before all names, and are taken off then. ``notify`` is told what a model
    has taken.
    """

    tensors: Mapping[str, Any]
    where: str
    notify: Callable[[str], None]
    allow_missing: Sequence[str] = ()
    prefixes: Sequence[str] = ()

    def fill(self, model: nn.Module) -> None:
        """Load them into a model. Raises CheckpointError for what does not fit, by name.

        Of tied weights one name will do: the model ties them itself.
        """
        own = model.state_dict()
        prefix, tensors = _without_prefix(own, self.tensors, self.prefixes)
        where = f"{self.where}, without the `{prefix}` before its names" if prefix else self.where
        wrong = _wrong(own, tensors)
        taken = {name: value for name, value in tensors.items() if name not in wrong}
        as_built = _as_built(own, taken)
        count = f"{len(own) - len(as_built)} of {len(own)}"
        if len(as_built) == len(own):
            lines = _lines(wrong, wrong)
            raise CheckpointError(
                f"none of the weights of {where} fits the model:\n{listing(lines)}"
            )
        bad = [n for n in wrong if not any(fnmatchcase(n, each) for each in self.allow_missing)]
        lines = _lines(wrong, bad) + [
            f"--allow-missing {each}: no weight is called so"
            for each in self.allow_missing
            if not any(fnmatchcase(name, each) for name in {*own, *tensors})
        ]
        if lines:
            message = f"the weights of {where} do not fit the model:\n{listing(lines)}"
            if bad:
                message += (
                    f"\n{count} weights of the model are in it. To take those, build the others "
                    "anew and leave out what only the file has:\n"
                    f"    {allowances(own, tensors, bad)}"
                )
            raise CheckpointError(message)
        told = f"starting from the weights of {where}: {count} taken"
        if as_built:
            told += f"; as the model builds them: {first_of(as_built)}"
        left_out = sorted(printable(name) for name in (tensors.keys() & wrong) - {*as_built})
        if left_out:
            told += f"; in the file and left out: {first_of(left_out)}"
        self.notify(told)
        if rounded := rounding(own, taken):
            self.notify(rounded)
        model.load_state_dict({**own, **taken}, strict=True)


def _lines(wrong: Mapping[str, str], names: Iterable[str]) -> list[str]:
    return [f"{printable(name)}: {wrong[name]}" for name in sorted(names)]


def _wrong(own: Mapping[str, Any], tensors: Mapping[str, Any]) -> dict[str, str]:
    """Return why each name that cannot be taken cannot."""
    wrong = mismatches(own, tensors)
    first: dict[Any, str] = {}
    for name in (each for each in own if each in tensors and each not in wrong):
        first.setdefault(_memory(name, own[name]), name)
    for name, value in own.items():
        kept = first.get(_memory(name, value))
        if kept is not None and name not in tensors:
            del wrong[name]
        elif kept is not None and name not in wrong and not _same(tensors[name], tensors[kept]):
            wrong[name] = f"one tensor with {kept} in the model, and another one in the file"
    by_design = nonfinite(own)
    for name in nonfinite({n: v for n, v in tensors.items() if n in own and n not in wrong}):
        if name in tensors and name not in by_design:
            wrong[name] = "NaN or infinity in it"
    return wrong


def _as_built(own: Mapping[str, Any], taken: Iterable[str]) -> list[str]:
    """Return the names that no taken weight fills, itself or as one that is tied to it."""
    filled = {_memory(name, own[name]) for name in taken}
    return sorted(name for name in own if _memory(name, own[name]) not in filled)


def _memory(name: str, value: Any) -> Any:
    """Return what the names of one tensor have in common; what has no values stands alone."""
    return place(value) if isinstance(value, Tensor) and value.numel() else name


def _same(one: Tensor, other: Tensor) -> bool:
    return place(one) == place(other) or torch.equal(one, other)


def _without_prefix(
    own: Mapping[str, Any], tensors: Mapping[str, Any], prefixes: Sequence[str]
) -> tuple[str, Mapping[str, Any]]:
    """Return the prefix that all names have where the model knows none of them, and what is left.

    There may be several, one before the other.
    """
    prefix, bare = "", tensors
    while bare and not own.keys() & bare.keys():
        found = next((p for p in prefixes if all(name.startswith(p) for name in bare)), None)
        if found is None:
            return "", tensors
        prefix += found
        bare = {name.removeprefix(found): value for name, value in bare.items()}
    return prefix, bare
