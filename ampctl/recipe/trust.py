"""Whether a recipe out of a checkpoint may import what it names: it may be a stranger's.

It may if all of it is ``safe``, if this user has trained it before with code out of the same
folders (kept in a private file, as ssh keeps known hosts), or if the user says so.
"""

from __future__ import annotations

import hashlib
import json
import os
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from ampctl import files
from ampctl.errors import CheckpointError, printable
from ampctl.recipe.load import LoadedRecipe, to_plain
from ampctl.recipe.origin import folder_of
from ampctl.recipe.safe import compile_objection, objection
from ampctl.recipe.schema import TARGET
from ampctl.recipe.target import blocks

_MOST_SHOWN = 10


def record(loaded: LoadedRecipe) -> bool:
    """Remember that this user trains this recipe; False where the file cannot be written."""
    line = f"{_fingerprint(loaded)} {_digest(_folders(loaded))}"
    try:
        path = _path()
        if line in _lines(path):
            return True
        path.parent.mkdir(mode=0o700, parents=True, exist_ok=True)
        # One write of one short line in append mode is atomic: several runs may start at once.
        descriptor = files.descriptor(path, os.O_WRONLY | os.O_APPEND | os.O_CREAT, mode=0o600)
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
    if _is_known(loaded):
        listing += (
            "\nyou have trained it, but not with the code that is found here (or with an older "
            "ampctl, which did not note where its code was)"
        )
    raise CheckpointError(
        "the recipe in this checkpoint is not trusted; it would import and call\n"
        f"{listing}\n"
        "allowed: objects of torch, torchvision, timm, transformers, torchmetrics and ampctl that "
        "fit their place, and recipes that you have trained with the code in this folder\n"
        "    if you know where the checkpoint comes from, say --trust (trust=True in Python); or "
        "train that recipe here; see `ampctl docs trust`"
    )


def wants_current_folder(saved: LoadedRecipe, loaded: LoadedRecipe, *, trust: bool) -> bool:
    """Return whether the modules beside the user are to be found, for a recipe that is trusted.

    They may be a stranger's even where the recipe is the user's own: they are wanted by --trust, by
    the user's own words (``loaded`` is ``saved`` with those), and by a recipe trained with them.
    """
    words = set(foreign(loaded)) - (set() if trust else set(foreign(saved)))
    here = os.path.realpath(os.getcwd())
    return bool(words) or (_is_recorded(saved) and here in _folders(saved).values())


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
    """Return whether this user has trained this recipe with the code that is found now.

    It may be another one in numbers alone.
    """
    return [_fingerprint(loaded), _digest(_folders(loaded))] in _words()


def _is_known(loaded: LoadedRecipe) -> bool:
    """Return whether this user has trained this recipe with whatever code."""
    known = {word for words in _words() for word in words}
    return bool({_fingerprint(loaded), loaded.digest} & known)


def _folders(loaded: LoadedRecipe) -> dict[str, str | None]:
    """Return in which folder the module of each target is; that of a link is where the link is."""
    targets = {f"{block[TARGET]}" for _, block in blocks(to_plain(loaded.recipe))}
    return {target: folder_of(target) for target in sorted(targets)}


def _fingerprint(loaded: LoadedRecipe) -> str:
    """Digest what steers the code of a recipe: the targets and their arguments but for numbers."""
    steering = [[key, _marks(block)] for key, block in blocks(to_plain(loaded.recipe))]
    if isinstance(loaded.recipe.train.compile, Mapping):
        steering.append(["train.compile", _marks(to_plain(loaded.recipe.train.compile))])
    return _digest(steering)


def _marks(value: Any) -> Any:
    """Return a value with a mark of its kind at each place; numbers other than 0 are alike.

    A 0 or a null may switch off what a 1 switches on.
    """
    if isinstance(value, dict):
        return {name: _marks(item) for name, item in value.items()}
    if isinstance(value, list):
        return ["list", *(_marks(item) for item in value)]
    if isinstance(value, str | bool) or value is None:
        return [type(value).__name__, value]
    return ["number", value != 0]


def _digest(value: Any) -> str:
    return hashlib.sha256(json.dumps(value, sort_keys=True).encode()).hexdigest()


def _path() -> Path:
    state = os.environ.get("XDG_STATE_HOME", "")
    folder = Path(state) if os.path.isabs(state) else Path.home() / ".local" / "state"
    return folder / "ampctl" / "trained-recipes"


def _words() -> list[list[str]]:
    """Return what is recorded: of each recipe its fingerprint, and the digest of its folders."""
    try:
        return [line.split() for line in _lines(_path())]
    except (OSError, RuntimeError):
        return []


def _lines(path: Path) -> list[str]:
    """Read the file; one that others may write is not believed."""
    try:
        with files.open_to_read(path, follow=True) as file:
            status = os.fstat(file.fileno())
            is_private = status.st_uid == os.getuid() and not status.st_mode & 0o022
            content = file.read() if is_private else b""
    except FileNotFoundError:
        return []
    return content.decode("ascii", "replace").splitlines()
