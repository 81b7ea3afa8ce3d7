"""Checkpoints that a run has left behind by going back to an older one: they are kept aside."""

from __future__ import annotations

import itertools
import os
from collections.abc import Sequence
from pathlib import Path

from ampctl.checkpoint import disk, sharded
from ampctl.checkpoint.index import FOLDER, Entry, parse_index, read_index, write_index
from ampctl.checkpoint.links import BEST, LATEST, SUFFIXES, point

ABANDONED = "abandoned-"


def abandon_after(run_dir: Path, entry: Entry) -> list[str]:
    """Take what was saved after ``entry`` out of a run that goes back to it; return the new names.

    The files stay, as ``abandoned-step-*.pt``: of a way that was not taken, they must be neither
    the newest nor the best. An index that was lost is there again. Whoever calls this holds the
    lock of the run folder, and has said what there is to say of its index.
    """
    entries = read_index(run_dir, lambda _: None)
    places = [place for place, other in enumerate(entries) if other == entry]
    if not places:
        return []
    kept, later = entries[: places[0] + 1], entries[places[0] + 1 :]
    later = [other for other in later if other.file not in {e.file for e in kept}]
    folder = run_dir / FOLDER
    try:
        _point_back(folder, entry, [other.file for other in later])
        # Newest first, and the index last, which passes over what is not there: a kill leaves the
        # run at one of them, and no file that it does not tell of.
        for other in reversed(later):
            aside = folder / f"{ABANDONED}{other.file}"
            sharded.remove(aside)  # of an earlier way: a folder is not replaced by another
            os.replace(folder / other.file, aside)
        if later:
            disk.sync_folder(folder)
        if later or parse_index(folder) is None:
            write_index(folder, kept)
    except OSError as error:
        raise disk.fault(folder, error, 0) from error
    return [f"{ABANDONED}{other.file}" for other in later]


def _point_back(folder: Path, entry: Entry, leaving: Sequence[str]) -> None:
    """Remove links to a file that is about to have another name; `tidy` finds the best."""
    for name, suffix in itertools.product((LATEST, BEST), SUFFIXES):
        link = folder / f"{name}{suffix}"
        if link.is_symlink() and os.readlink(link) in leaving:
            fits = name == LATEST and entry.file.endswith(suffix)
            point(link, entry.file if fits else None)
