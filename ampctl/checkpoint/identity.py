"""Whether a checkpoint is the one that its name and its place say: of that step, and of that run.

A run has an identity, which ``environment.json`` and each of its checkpoints hold.
"""

from __future__ import annotations

import json
import os
import re
import uuid
from collections.abc import Collection, Mapping
from pathlib import Path
from typing import Any

from ampctl import files
from ampctl.checkpoint import file, sharded
from ampctl.checkpoint.file import Passed, UnusableCheckpointError, unseen

FOLDER = "checkpoints"
ENVIRONMENT = "environment.json"
RUN_ID = "run_id"
"""The key of it, in that file and in the ``environment`` of a checkpoint."""

_MOST_BYTES = 1 << 22
_STEP = re.compile(r"step-(\d{8,})(?:\.nonfinite)?\.(?:pt|dist)$")


def of_folder(run_dir: Path) -> str | None:
    """Return the identity of the run in a folder; None if an older ampctl began it, or none."""
    try:
        return of_facts(json.loads(files.read(run_dir / ENVIRONMENT, most=_MOST_BYTES)))
    except (OSError, ValueError, RecursionError):
        return None


def of_facts(environment: Any) -> str | None:
    """Return the identity of the run that facts are of, if they hold one."""
    found = environment.get(RUN_ID) if isinstance(environment, Mapping) else None
    return found if isinstance(found, str) else None


def new() -> str:
    """Return an identity that no other run has."""
    return uuid.uuid4().hex


def read(
    path: Path, digests: Collection[str] | None, *, mmap: bool, passed: Passed = unseen
) -> dict[str, Any]:
    """Read a checkpoint as `parts.read` does; where no digest tells, prove that it belongs there.

    Raises ``UnusableCheckpointError`` for one among the checkpoints of a run that is of another
    run, or of another step than its name says, and where there is a link in its place. One that
    lies elsewhere may have any name, and be a link.
    """
    is_in_run = path.absolute().parent.name == FOLDER and _STEP.search(path.name) is not None
    payload = sharded.read(path, digests, mmap=mmap, passed=passed, follow=not is_in_run)
    place = Path(os.path.realpath(path))
    if digests is None and place.parent.name == FOLDER and (wrong := _objection(payload, place)):
        raise UnusableCheckpointError(path, wrong, file.NAME_ANOTHER)
    return payload


def _objection(payload: Mapping[str, Any], path: Path) -> str:
    named, step = _STEP.search(path.name), payload["progress"].get("step")
    if named is not None and type(step) is int and step != int(named[1]):
        return f"it is of step {step}, not {int(named[1])}"
    wanted, own = of_folder(path.parent.parent), of_facts(payload["environment"])
    if wanted is not None and own is not None and wanted != own:
        return "it is of another run: someone has put it here"
    return ""
