"""Whether the checkpoints of a run are what was saved: bytes, content, finiteness, index and links.

Nothing is built and nothing is changed. Every file gets a verdict, and a reason in one form.
"""

from __future__ import annotations

import glob
import os
import stat
from collections.abc import Mapping
from contextlib import suppress
from dataclasses import asdict, dataclass, replace
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampctl.checkpoint import file, identity, sharded
from ampctl.checkpoint.abandoned import ABANDONED
from ampctl.checkpoint.consistency import abandoned_files, links_of, missing_files
from ampctl.checkpoint.contents import (
    Facts,
    fact,
    is_whole,
    named_tensors,
    nonfinite_by_design,
)
from ampctl.checkpoint.file import Passed, UnusableCheckpointError, unseen
from ampctl.checkpoint.index import (
    FOLDER,
    INDEX,
    NONFINITE,
    Entry,
    content,
    parse_index,
    step_files,
)
from ampctl.checkpoint.links import followed, require_own_folders
from ampctl.checkpoint.store import NoCheckpointError
from ampctl.checkpoint.without_run import nothing_saved
from ampctl.errors import CheckpointError, RecipeError, first_of, printable
from ampctl.recipe.load import parse_recipe
from ampctl.state_dict.copies import nonfinite
from ampctl.state_dict.required import lacking

INTACT = "intact"
SET_ASIDE = "set aside"
UNUSABLE = "unusable"

_TRIES = 20
"""How often a run is looked at that changes its files meanwhile."""


@dataclass(frozen=True)
class Verdict:
    """What was found of one checkpoint; ``reason`` is empty where there is nothing to add.

    ``proof``: what its bytes were held against, "SHA-256", or "CRC-32" where it was saved anew.
    """

    file: str
    verdict: str
    reason: str
    bytes: int
    step: int | None
    advice: str
    proof: str | None


_Seen = dict[tuple[str, str], Verdict]
"""What was found, by the name of a file and the SHA-256 that the index had of it, or ""."""


def verify(source: Path, *, passed: Passed = unseen) -> Facts:
    """Examine a checkpoint, or all of a run folder, and return what was found as facts.

    ``files`` has a `Verdict` of each; ``problems`` what is wrong, file by file, and is empty where
    all is as it should be; ``notes`` what a killed run leaves behind and the next one clears up.
    ``passed`` is told how far it is, in bytes of all files.
    Raises NoCheckpointError for a run without a checkpoint, CheckpointError for a path that is
    not there.
    """
    try:
        is_folder = stat.S_ISDIR(source.stat().st_mode)
    except FileNotFoundError:
        is_folder = False
    except OSError as error:
        reason = f"it cannot be opened ({error.strerror})"
        raise UnusableCheckpointError(source, reason, file.NAME_ANOTHER) from error
    if not is_folder or sharded.is_folder(source):
        return _one(source, passed)
    is_checkpoints = source.name == FOLDER and not (source / FOLDER).is_dir()
    folder = source if is_checkpoints else source / FOLDER
    require_own_folders(folder.parent)
    return _run(source, folder, passed)


def require_sound(facts: Facts) -> None:
    """Raise CheckpointError that lists the problems found, if there are any."""
    problems = facts["problems"]
    if problems and not facts["is_run"]:
        (only,) = facts["files"]
        raise UnusableCheckpointError(Path(facts["path"]), only["reason"], only["advice"])
    if problems:
        listing = "\n".join(f"  {problem}" for problem in problems)
        raise CheckpointError(f"{facts['path']} is not as it was saved:\n{listing}")


def _one(source: Path, passed: Passed) -> Facts:
    for tries_left in reversed(range(_TRIES)):
        path = followed(source)  # latest and best are links
        index = parse_index(path.parent) or []
        entry = next((e for e in index if e.file == path.name), None)
        named = path if sharded.is_folder(path) else source
        found = [_examine(named, entry, passed)]
        problems = [f"{v.file}: {v.reason}" for v in found if v.verdict != INTACT]
        if not problems or not tries_left or Path(os.path.realpath(source)) == path:
            break  # else a run has saved another one meanwhile
    return {
        "path": printable(f"{source}"),
        "is_run": False,
        "files": [asdict(v) for v in found],
        "links": {},
        "notes": [],
        "problems": problems,
    }


def _run(source: Path, folder: Path, passed: Passed) -> Facts:
    """Examine a run; of one that is under way, anew what it has changed meanwhile."""
    seen: _Seen = {}
    tries_left = _TRIES
    while True:
        tries_left -= 1
        before = content(folder)
        facts = _run_at_once(source, folder, passed, seen)
        if tries_left and content(folder) != before and (facts is None or facts["problems"]):
            continue
        if facts is None:
            raise NoCheckpointError(nothing_saved(folder.parent))
        return facts


def _run_at_once(source: Path, folder: Path, passed: Passed, seen: _Seen) -> Facts | None:
    """Examine what was not ``seen`` yet, and all of it together; None if there is nothing."""
    entries = parse_index(folder)
    listed = {entry.file: entry for entry in entries or ()}
    files = [*step_files(folder), *abandoned_files(folder)]
    keys = {
        path: (path.name, listed[path.name].sha256 if path.name in listed else "") for path in files
    }
    to_see = [path for path, key in keys.items() if key not in seen]
    before, total = 0, sum(map(_size, to_see))
    for path in to_see:

        def further(done: int, of: int, before: int = before) -> None:
            passed(before + done, total)

        verdict = _examine(path, listed.get(path.name), further)
        before += verdict.bytes
        if verdict.verdict != UNUSABLE or os.path.lexists(path):  # else it was given up meanwhile
            seen[keys[path]] = verdict
    found = [_judged(seen[key]) for key in keys.values() if key in seen]
    missing = missing_files(folder)
    if not found and not missing:
        return None
    aside = {v.file for v in found if v.verdict == SET_ASIDE}
    problems = [f"{v.file}: {v.reason}" for v in found if v.verdict == UNUSABLE]
    notes = []
    if entries is None:
        problems.append(f"{INDEX}: it is missing or damaged; the next save makes it again")
    else:
        strays = [v.file for v in found if v.file not in listed and v.file.startswith("step-")]
        notes += [
            f"{name}: {INDEX} does not tell of it, so no run goes on from it" for name in strays
        ]
    links, dangling, behind = links_of(folder, entries or [], aside)
    problems += dangling
    notes += behind
    for place, name in missing:
        # A row stands before its file has the name, and the links are set after that: a kill in
        # between leaves the last row without a file, and no link to it.
        cut_off = place == "last" and name not in links.values()
        dropped = any(folder.glob(f".{glob.escape(name)}.*.tmp"))  # retention was cut off
        how = "a save that was cut off" if cut_off or dropped else "someone has removed it"
        if (folder / f"{ABANDONED}{name}").exists():
            how = f"it is {ABANDONED}{name}, of a return to an older one that was cut off"
        where = problems if how.startswith("someone") else notes
        where.append(f"{name}: {INDEX} tells of it and it is not there: {how}")
    if not any(v.verdict == INTACT and not v.file.startswith(ABANDONED) for v in found):
        problems.append("there is no checkpoint to go on from")
    left = sorted(path.name for path in folder.glob(".*.tmp"))
    if left:
        notes.append(
            f"{first_of(left)}: of a save that is under way or was cut off; the next start of the "
            "run removes it"
        )
    return {
        "path": printable(f"{source}"),
        "is_run": True,
        "files": [asdict(v) for v in found],
        "links": {name: printable(target) for name, target in links.items()},
        "notes": notes,
        "problems": problems,
    }


def _judged(verdict: Verdict) -> Verdict:
    """Take a damaged file that a resume has put aside for no fault of the run."""
    is_aside = verdict.verdict == UNUSABLE and verdict.file.startswith(ABANDONED)
    return replace(verdict, verdict=SET_ASIDE) if is_aside else verdict


def _examine(path: Path, entry: Entry | None, passed: Passed) -> Verdict:
    """Read one checkpoint as a resume would, and look at all that is in it."""
    step, advice, proof = None, file.NAME_ANOTHER, None
    try:
        digests = [entry.sha256] if entry else None
        payload = identity.read(path, digests, mmap=True, passed=passed)
        proof = "SHA-256" if entry or file.is_sealed(sharded.main_file(path)) else "CRC-32"
        step = payload["progress"].get("step")
        verdict, reason = _content(payload, path, entry)
    except UnusableCheckpointError as error:
        verdict, reason, advice = UNUSABLE, error.reason, error.advice
    return Verdict(
        file=printable(path.name),
        verdict=verdict,
        reason=reason,
        bytes=_size(path),
        step=fact(step) if type(step) is int else None,
        advice="" if verdict == INTACT else advice,
        proof=proof,
    )


def _size(path: Path) -> int:
    """Return the bytes of a checkpoint; 0 if it is gone or cannot be looked at."""
    with suppress(OSError):
        return sharded.size(path)
    return 0


def _content(payload: dict[str, Any], path: Path, entry: Entry | None) -> tuple[str, str]:
    missing = lacking(payload)
    if missing:
        return UNUSABLE, f"it lacks {', '.join(missing)}"
    try:
        parse_recipe(payload["recipe"], where="its recipe")
    except RecipeError as error:
        first = f"{error.problems[0]}".splitlines()[0]
        return UNUSABLE, printable(f"its recipe cannot be read ({first[:200]})")
    if entry is not None and payload["progress"]["step"] != entry.step:
        return UNUSABLE, f"it is of step {payload['progress']['step']}, not {entry.step}"
    if sharded.is_folder(path):
        sharded.fill(payload, path)
    tensors = dict(named_tensors(payload))
    strange = [name for name, tensor in tensors.items() if not _has_values(tensor)]
    if strange:
        return UNUSABLE, f"it holds what is no plain tensor in {first_of(strange)}"
    bad = _nonfinite(payload, tensors)
    if bad:
        told = f"NaN or infinity in {first_of(bad)}"
        is_told = NONFINITE in path.name if entry is None else not entry.finite
        return (SET_ASIDE if is_told else UNUSABLE), f"it holds {told}"
    if NONFINITE in path.name:
        return SET_ASIDE, "no NaN or infinity is left in it"
    return INTACT, ""


def _has_values(tensor: Tensor) -> bool:
    """Return whether all values are in the file; a sparse tensor has none where it is 0."""
    return not tensor.is_meta and (tensor.layout != torch.strided or is_whole(tensor))


def _nonfinite(payload: dict[str, Any], tensors: Mapping[str, Any]) -> list[str]:
    """Return the names of tensors that have become non-finite (masks are so from the start)."""
    held = {n: t for n, t in tensors.items() if n.split(".")[0] in ("model", "optimizer", "ema")}
    return nonfinite(held, by_design=nonfinite_by_design(payload))
