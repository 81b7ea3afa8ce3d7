"""A folder in which no run has saved anything: what it is, and what can be done with it."""

from __future__ import annotations

import re
from contextlib import suppress
from itertools import islice
from pathlib import Path

from ampctl.checkpoint.index import FOLDER
from ampctl.checkpoint.other_formats import SAFETENSORS, start_from
from ampctl.errors import as_argument, first_of, printable

_MOST = 1000
"""How many entries of a folder are looked at."""

_OF_A_RUN = ("metrics.jsonl", "environment.json", FOLDER)
_WEIGHTS = (f"*{SAFETENSORS}", "pytorch_model*.bin", "*.pt", "*.pth")
_NAME_A_RUN = f"name a run folder in which `ampctl train` has saved one ({FOLDER}/step-*.pt)"


def nothing_saved(folder: Path) -> str:
    """Describe a folder that holds no checkpoint, and what can be done with it."""
    return f"{printable(f'{folder}')} holds no checkpoint: {_what_it_is(folder)}"


def _what_it_is(folder: Path) -> str:
    if any((folder / name).exists() for name in _OF_A_RUN):
        return (
            f"{_NAME_A_RUN}. A run that ended before its first save starts anew with "
            f"`ampctl train RECIPE --run-dir {as_argument(folder)} --resume auto`"
        )
    inside = _entries(folder)
    runs = [each for each in inside if (each / FOLDER).is_dir()] or [
        each for part in inside for each in _entries(part) if (each / FOLDER).is_dir()
    ]
    if runs:
        names = [printable(f"{each}") for each in reversed(runs)]
        return f"it is no run and holds some; name one of them: {first_of(names)}"
    for pattern in _WEIGHTS:
        found = [each for each in inside if each.match(pattern)]
        if len(found) == 1:
            return f"it is no run, and {start_from(found[0])}"
        if found:
            names = [printable(each.name) for each in found]
            told = f"it is no run, and holds files of weights ({first_of(names)}); "
            if all(re.search(r"-\d+-of-\d+\.", name) for name in names):
                return (
                    f"{told}save the model to one file for `ampctl train RECIPE --init-from FILE`"
                )
            return f"{told}`ampctl train RECIPE --init-from FILE` starts a new run from one"
    return f"it is {'no run' if inside else 'empty'}; {_NAME_A_RUN}"


def _entries(folder: Path) -> list[Path]:
    """Return what is in a folder by name; nothing of what is none, or may not be read."""
    with suppress(OSError):
        return sorted(islice(folder.iterdir(), _MOST))
    return []
