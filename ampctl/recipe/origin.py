"""Where the code that a recipe names would be found, without importing any of it."""

from __future__ import annotations

import importlib
import os
import site
import sys
import sysconfig
from collections.abc import Sequence
from importlib.machinery import ModuleSpec, PathFinder
from pathlib import Path

INSTALLED = ""


def folder_of(target: str) -> str | None:
    """Return the folder in which the module of an import path would be found.

    The current folder comes first, as it does where it is opened to imports. ``INSTALLED``: among
    the installed packages, wherever those lie; None: nowhere. A link to a module is of the folder
    that the link is in, as are the modules which it imports from beside it.
    """
    importlib.invalidate_caches()
    parts = target.split(".")
    here = os.path.realpath(os.getcwd())
    spec, depth = _top(parts[0], [here, *sys.path]), 1
    # Of a namespace package, which may be spread over several folders, the module in it counts.
    while spec is not None and spec.origin is None and depth < len(parts):
        depth += 1
        places = list(spec.submodule_search_locations or ())
        spec = PathFinder.find_spec(".".join(parts[:depth]), places)
    if spec is None or spec.origin is None:
        return None
    if not spec.has_location:  # built into Python
        return INSTALLED
    is_package = spec.submodule_search_locations is not None
    folder = os.path.realpath(Path(os.path.abspath(spec.origin)).parents[depth - 1 + is_package])
    return INSTALLED if folder != here and folder in _installed() else folder


def _top(name: str, path: Sequence[str]) -> ModuleSpec | None:
    """Find a module that is on no package's path; one that is imported is found already."""
    if name in sys.modules:
        return getattr(sys.modules[name], "__spec__", None)
    for finder in sys.meta_path:
        found = (
            PathFinder.find_spec(name, path)
            if finder is PathFinder
            else finder.find_spec(name, None)
        )
        if found is not None:
            return found
    return None


def _installed() -> set[str]:
    paths = sysconfig.get_paths()
    folders = [paths[name] for name in ("stdlib", "platstdlib", "purelib", "platlib")]
    folders += [os.path.join(paths["platstdlib"], "lib-dynload"), *site.getsitepackages()]
    return {os.path.realpath(each) for each in [*folders, site.getusersitepackages()]}
