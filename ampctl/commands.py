"""The commands that messages give, written so that a shell, and ampctl, take them as they stand."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from pathlib import Path

from ampctl.errors import as_argument


def train(
    recipe: Path | str,
    overrides: Sequence[str] = (),
    *,
    ranks: str = "",
    init_from: Path | None = None,
    allow_missing: Sequence[str] = (),
) -> str:
    """Return the command that trains a recipe in a new run folder.

    ``ranks``: the option that starts as many processes, as `Ranks.option` has it.
    """
    words = [as_argument(recipe), *map(shlex.quote, overrides)]
    if init_from is not None:
        words += ["--init-from", as_argument(init_from), *allowances(allow_missing)]
    return f"ampctl train {' '.join(words)}{ranks}"


def resume(
    source: Path | str,
    overrides: Sequence[str] = (),
    *,
    ranks: str = "",
    run_dir: Path | None = None,
) -> str:
    """Return the command that goes on from a checkpoint or a run, in ``run_dir`` or its own."""
    words = [as_argument(source), *map(shlex.quote, overrides)]
    if run_dir is not None:
        words += ["--run-dir", as_argument(run_dir)]
    return f"ampctl resume {' '.join(words)}{ranks}"


def allowances(globs: Sequence[str]) -> list[str]:
    """Return the options that let weights of some names be missing."""
    return [f"--allow-missing {shlex.quote(each)}" for each in globs]


def beside(run_dir: Path) -> Path:
    """Return a folder beside that of a run, by its name and a number, that is not there yet."""
    number = 2
    while (free := run_dir.with_name(f"{run_dir.name}-{number}")).exists():
        number += 1
    return free
