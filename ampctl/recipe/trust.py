"""Whether a recipe out of a checkpoint may import what it names: it may be a stranger's.

It may if all of it is ``safe``, if this user has trained it here before (kept in a private file, as
ssh keeps known hosts), or if the user says so.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampctl.errors import CheckpointError, printable
from ampctl.recipe.load import LoadedRecipe, to_plain
from ampctl.recipe.safe import compile_objection, objection
from ampctl.recipe.schema import TARGET
from ampctl.recipe.target import blocks

_MOST_SHOWN = 10


def record(loaded: LoadedRecipe) -> bool:
    """Remember that this user trains this recipe; False where the file cannot be written."""
    line = f"{_fingerprint(loaded)} {loaded.digest}"
    try:
        path = _path()
        if line in _lines(path):
            return True
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One write of one short line in append mode is atomic: several runs may start at once.
        descriptor = os.open(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT | os.O_NOFOLLOW, 0o600)
        try:
            os.write(descriptor, f"{line}\n".encode())
        finally:
            os.close(descriptor)
    except (OSError, RuntimeError):  # RuntimeError: this user has no home folder
        return False
    return True


def require_trusted(loaded: LoadedRecipe, *, trust: bool) -> list[str]:
    """Refuse a recipe out of a checkpoint whose targets may not be imported.

    Returns what ``trust`` lets in, as ``key: path`` lines, for a word on the screen. Raises
    ``CheckpointError`` that lists what would have been imported.
    """
    if not trust and _is_recorded(loaded):
        return []
    found = foreign(loaded)
    if not found or trust:
        return found
    listing = "\n".join(f"    {line}" for line in found[:_MOST_SHOWN])
    if len(found) > _MOST_SHOWN:
        listing += f"\n    and {len(found) - _MOST_SHOWN} more"
    raise CheckpointError(
        "the recipe in this checkpoint is not trusted; it would import and call\n"
        f"{listing}\n"
        "allowed: objects of torch, torchvision, timm, transformers, torchmetrics and ampctl that "
        "fit their place, and recipes that you have trained here\n"
        "    if you know where the checkpoint comes from, say --trust (trust=True in Python); or "
        "train that recipe here"
    )


def foreign(loaded: LoadedRecipe) -> list[str]:
    """Return what of a recipe is not built for anybody, as ``key: path (reason)`` lines."""
    found = []
    for key, block in blocks(to_plain(loaded.recipe)):
        reason = objection(key, block)
        if reason:
            found.append(printable(f"{key:.100}: {block[TARGET]:.100} ({reason})"))
    reason = compile_objection(loaded.recipe.train.compile)
    if reason:
        found.append(f"train.compile: torch.compile ({reason})")
    return found


def _is_recorded(loaded: LoadedRecipe) -> bool:
    """Tell whether this user has trained this recipe, or one that differs in numbers alone."""
    try:
        known = {word for line in _lines(_path()) for word in line.split()}
    except (OSError, RuntimeError):
        return False
    return bool({_fingerprint(loaded), loaded.digest} & known)


def _fingerprint(loaded: LoadedRecipe) -> str:
    """Digest what steers the code of a recipe: the targets and their arguments but for numbers."""
    steering = [[key, _without_numbers(block)] for key, block in blocks(to_plain(loaded.recipe))]
    if isinstance(loaded.recipe.train.compile, Mapping):
        steering.append(["train.compile", _without_numbers(to_plain(loaded.recipe.train.compile))])
    return hashlib.sha256(json.dumps(steering, sort_keys=True).encode()).hexdigest()


def _without_numbers(value: Any) -> Any:
    if isinstance(value, dict):
        return {name: _without_numbers(item) for name, item in value.items()}
    if isinstance(value, list):
        return [_without_numbers(item) for item in value]
    return value if isinstance(value, str | bool) else None


def _path() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "ampctl" / "trained-recipes"


def _lines(path: Path) -> list[str]:
    """Read the file; one that others may write is not believed."""
    try:
        status = path.stat()
    except FileNotFoundError:
        return []
    is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022
    return path.read_text(encoding="ascii", errors="replace").splitlines() if is_private else []
