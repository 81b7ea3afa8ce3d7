"""Whether modules of the current folder can be imported: a recipe of the user's own wants that.

One out of a checkpoint may be a stranger's, and so may all that lies beside it: a file there with
the name of a package that torch, timm or transformers import when they need it would run.
"""

from __future__ import annotations

import importlib
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager

_SAFE_PATH = "PYTHONSAFEPATH"  # Python's own: processes started from here look no more than we do
_BY_US = "ampctl"


def open_current_folder() -> None:
    """Put the current folder first on ``sys.path``, once: ``my_model.py`` lies beside the user."""
    if os.environ.get(_SAFE_PATH) == _BY_US:
        del os.environ[_SAFE_PATH]
    folder = os.getcwd()
    if folder not in sys.path:
        sys.path.insert(0, folder)
        importlib.invalidate_caches()


def is_open() -> bool:
    """Return whether modules of the current folder can be imported."""
    return any(map(_is_current, sys.path))


def close_current_folder() -> None:
    """Take the current folder off ``sys.path``, and off that of processes started from here.

    Where ampctl itself is imported from there, what lies in it runs anyway.
    """
    ours = os.path.dirname(os.path.dirname(os.path.dirname(os.path.abspath(__file__))))
    if _is_current(ours):
        return
    sys.path[:] = [entry for entry in sys.path if not _is_current(entry)]
    os.environ.setdefault(_SAFE_PATH, _BY_US)


@contextmanager
def closed_current_folder() -> Iterator[None]:
    """Close the current folder for a while, unless it is opened meanwhile, in another's program."""
    path, safe_path = list(sys.path), os.environ.get(_SAFE_PATH)
    close_current_folder()
    try:
        yield
    finally:
        sys.path[:] = [*(entry for entry in sys.path if entry not in path), *path]
        os.environ.pop(_SAFE_PATH, None)
        if safe_path is not None:
            os.environ[_SAFE_PATH] = safe_path


def _is_current(entry: str) -> bool:
    try:
        return os.path.samefile(entry or os.curdir, os.curdir)
    except (OSError, ValueError):  # it is not there, or is no name of a folder
        return False
