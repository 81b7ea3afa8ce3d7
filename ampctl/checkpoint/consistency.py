"""What the index and the links of a run folder tell, held against what is there."""

from __future__ import annotations

import json
import os
from collections.abc import Collection, Sequence
from contextlib import suppress
from pathlib import Path

from ampctl import files
from ampctl.checkpoint import file, sharded
from ampctl.checkpoint.abandoned import ABANDONED
from ampctl.checkpoint.index import INDEX, Entry, content
from ampctl.checkpoint.links import BEST, LATEST, SUFFIXES
from ampctl.checkpoint.retention import ranked
from ampctl.errors import CheckpointError, RecipeError, printable
from ampctl.recipe.load import parse_recipe
from ampctl.recipe.schema import CheckpointConfig


def links_of(
    folder: Path, entries: Sequence[Entry], aside: Collection[str]
) -> tuple[dict[str, str], list[str], list[str]]:
    """Return what latest and best point at, what is wrong with them, and what lags behind.

    ``aside`` names the files that are set aside: neither may be one of those.
    """
    finite = [entry for entry in entries if entry.finite]
    wanted = {LATEST: finite[-1].file if finite else None, BEST: _best(folder, finite)}
    links, problems, notes = {}, [], []
    for name in (LATEST, BEST):
        there = [folder / f"{name}{s}" for s in SUFFIXES if os.path.lexists(folder / f"{name}{s}")]
        for link in there:
            if link.is_dir() and not link.is_symlink():
                problems.append(f"{link.name}: it is a folder in the place of a link; remove it")
                continue
            target = _target(link, entries)
            links[link.name] = target or "another file"
            if target is not None and os.path.basename(target) != target:
                problems.append(f"{link.name}: it leads out of its folder, to {target}")
            elif target is None or not (folder / target).exists():
                problems.append(
                    f"{link.name}: it points at {target or 'no file of this run'} and there is none"
                )
            elif target in aside:
                problems.append(f"{link.name}: it points at {target}, which is not finite")
            elif wanted[name] and target != wanted[name]:
                notes.append(f"{link.name}: it points at {target}, and {INDEX} has {wanted[name]}")
        if not there and wanted[name]:
            notes.append(f"{name}: there is no link to {wanted[name]}")
    return links, problems, notes


def _target(link: Path, entries: Sequence[Entry]) -> str | None:
    """Return the name of the file that a link is; where links cannot be, it is a copy of it."""
    try:
        if link.is_symlink():
            return printable(os.readlink(link))
        digest = sharded.digest(link)
    except (FileNotFoundError, files.UnfitFileError):  # a run under way has taken it away, say
        return None
    return next((entry.file for entry in reversed(entries) if entry.sha256 == digest), None)


def _best(folder: Path, finite: Sequence[Entry]) -> str | None:
    """Return the best file by the monitor that the newest readable recipe names."""
    config = _config(folder, finite)
    best = ranked(finite, config.monitor, config.mode) if config else []
    return best[0].file if best else None


def _config(folder: Path, finite: Sequence[Entry]) -> CheckpointConfig | None:
    for entry in reversed(finite):
        with suppress(CheckpointError, RecipeError):
            path = folder / entry.file
            payload = file.read(sharded.main_file(path), None, mmap=True)
            return parse_recipe(payload["recipe"], where="recipe").recipe.checkpoint
    return None


def missing_files(folder: Path) -> list[tuple[str, str]]:
    """Return the files that the index tells of and that are not there; the last row is "last"."""
    try:
        rows = json.loads(content(folder))
        names = [row["file"] for row in rows]
    except (ValueError, KeyError, TypeError, RecursionError):
        return []
    return [
        ("last" if place == len(names) - 1 else "", printable(name))
        for place, name in enumerate(names)
        if isinstance(name, str) and "\0" not in name and not os.path.lexists(folder / name)
    ]


def abandoned_files(folder: Path) -> list[Path]:
    """Return the checkpoints that were put aside when the run went back behind them."""
    return sorted(p for p in folder.glob(f"{ABANDONED}step-*") if p.suffix in SUFFIXES)
