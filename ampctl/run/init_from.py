"""Where a new run's weights are from, if not from its model: another run's, or a file."""

from __future__ import annotations

import importlib.util
import os
import re
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

from torch import Tensor

from ampctl.builder.initial_weights import PREFIXES, InitialWeights
from ampctl.builder.job import Job, build_new
from ampctl.checkpoint.archive import WRONG_END
from ampctl.checkpoint.contents import is_whole, word
from ampctl.checkpoint.export import chosen_weights
from ampctl.checkpoint.file import ForeignFileError, UnusableCheckpointError, open_regular
from ampctl.checkpoint.index import log_warning
from ampctl.checkpoint.other_formats import SAFETENSORS, is_safetensors, state_dict_in
from ampctl.checkpoint.store import load
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.errors import UsageError, first_of
from ampctl.recipe.load import LoadedRecipe

_NAME_ANOTHER = (
    f"name a checkpoint, a run folder, a {SAFETENSORS} file, or a state dict that "
    "torch.save(model.state_dict(), FILE) has written"
)

Notify = Callable[[str], None]


@dataclass(frozen=True)
class InitFrom:
    """A checkpoint, a run folder or a file of weights alone, and what of it may be missing."""

    source: Path
    allow_missing: Sequence[str] = ()

    def __str__(self) -> str:
        return " ".join([f"{self.source}", *(f"--allow-missing {g}" for g in self.allow_missing)])

    def read(self, notify: Notify) -> InitialWeights:
        """Read the weights: those that were averaged where there are any, as evaluations do.

        Nothing is built, so that there is nothing to trust. Raises CheckpointError for what cannot
        be read, UsageError if safetensors is missing.
        """
        prefixes: Sequence[str] = PREFIXES
        if not os.path.isdir(self.source) and _is_safetensors(self.source):
            told, tensors = "", _tensors(self.source)
        else:
            try:
                found = load(self.source, notify=notify)
            except ForeignFileError as error:
                told, tensors = self._bare(error)
            else:
                which, tensors = chosen_weights(found.payload, found.path, ema=None)
                kind = "averaged weights" if which == "ema" else "weights"
                told = f"{kind} of step {found.payload['progress'].get('step')}"
                prefixes = ()
        _refuse_odd(tensors, self.source)
        where = f"{self.source} ({told})" if told else f"{self.source}"
        return InitialWeights(tensors, where, notify, self.allow_missing, prefixes)

    def _bare(self, error: ForeignFileError) -> tuple[str, dict[str, Any]]:
        """Return the weights of a file that is no checkpoint, and where in it they are."""
        found = state_dict_in(error.content)
        if found is None:
            raise UnusableCheckpointError(self.source, error.reason, _NAME_ANOTHER) from error
        key, tensors = found
        return f"its `{key}`" if key else "", tensors


def build(
    loaded: LoadedRecipe,
    ranks: Ranks = ALONE,
    init_from: InitFrom | None = None,
    tell: Notify = log_warning,
) -> Job:
    """Build the job of a new run, with the weights that it starts from.

    Once they are in the model nothing holds on to those that were read. Raises as
    :func:`ampctl.builder.job.build_new`.
    """
    return build_new(loaded, ranks, init_from.read(tell) if init_from else None)


def _is_safetensors(path: Path) -> bool:
    with open_regular(path, follow=True) as file:
        return is_safetensors(path, file.read(9), file.seek(0, os.SEEK_END))


def _tensors(path: Path) -> dict[str, Any]:
    if importlib.util.find_spec("safetensors") is None:
        raise UsageError('safetensors is not installed\n    pip install "ampctl[export]"')
    from safetensors import SafetensorError
    from safetensors.torch import load_file

    with open_regular(path, follow=True) as file:
        head, size = file.read(8), file.seek(0, os.SEEK_END)
    try:
        return dict(load_file(path))
    except (OSError, SafetensorError, ValueError, KeyError) as error:
        if size < 8 or int.from_bytes(head, "little") > size - 8:
            reason = "it is cut off, or no safetensors file" if size else "it is empty"
        elif re.search("not fully covered|IncompleteBuffer", f"{error}"):
            reason = f"it is damaged: {WRONG_END}"
        else:
            reason = "it is damaged, or no safetensors file: its header cannot be read"
        raise UnusableCheckpointError(path, reason, "bring back an intact copy") from error


def _refuse_odd(weights: Mapping[Any, Any], source: Path) -> None:
    """Raise CheckpointError for names that are none, and tensors without their values."""
    odd = [
        word(name)
        for name, value in weights.items()
        if not isinstance(name, str) or (isinstance(value, Tensor) and not is_whole(value))
    ]
    if odd:
        reason = f"it holds what is no plain tensor with a name in {first_of(odd)}"
        raise UnusableCheckpointError(source, reason, _NAME_ANOTHER)
