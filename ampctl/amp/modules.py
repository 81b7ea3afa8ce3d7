"""Modules that run in another dtype than the rest of the model."""

from __future__ import annotations

import copy
from collections.abc import Mapping
from fnmatch import fnmatchcase
from typing import Any

import torch
from torch import Tensor, nn

from ampctl.amp.precision import DTYPES
from ampctl.errors import Problem, RecipeError
from ampctl.recipe.keys import child
from ampctl.recipe.suggest import names_near

KEY = "amp.modules"


def set_module_dtypes(
    model: nn.Module,
    globs: Mapping[str, str],
    *,
    device_type: str,
    origins: Mapping[str, str] | None = None,
) -> dict[str, str]:
    """Run the modules that a glob matches in its dtype; return each one's name and dtype.

    A glob is held against the dotted names of the submodules; the first that matches counts. Such
    a module runs with autocast off (float32) or in that dtype, and floating inputs are cast to it.
    Its class becomes a subclass of what it was, so that names, ``isinstance`` and state dicts stay
    as they were, and ``torch.compile`` and DDP see an ordinary module. Raises RecipeError for a
    glob that gets no module, with the nearest names.
    """
    chosen: dict[str, str] = {}
    used: set[str] = set()
    for name, module in model.named_modules():
        glob = next((glob for glob in globs if name and fnmatchcase(name, glob)), None)
        if glob is None:
            continue
        used.add(glob)
        chosen[name] = globs[glob]
        _set_dtype(module, DTYPES[globs[glob]], device_type)
    problems = [
        Problem((origins or {}).get(child(KEY, glob), ""), child(KEY, glob), *_why(glob, model))
        for glob in globs
        if glob not in used
    ]
    if problems:
        raise RecipeError(problems)
    return chosen


class _InDtype:
    """Mixed into the class of a module: its forward in a dtype of its own."""

    _ampctl_dtype: torch.dtype
    _ampctl_device_type: str

    def forward(self, *args: Any, **kwargs: Any) -> Any:
        """Run the module's own forward on inputs of its dtype."""
        dtype, device_type = self._ampctl_dtype, self._ampctl_device_type
        enabled = dtype is not torch.float32
        around = torch.is_autocast_enabled(device_type)
        with torch.autocast(device_type, dtype=dtype if enabled else None, enabled=enabled):
            output = super().forward(*_cast(args, dtype), **_cast(kwargs, dtype))  # type: ignore[misc]
        # Without autocast nobody downstream would cast a half-precision output back.
        return output if around else _cast(output, torch.float32)


def _set_dtype(module: nn.Module, dtype: torch.dtype, device_type: str) -> None:
    kind = type(module)
    fields = {
        "_ampctl_dtype": dtype,
        "_ampctl_device_type": device_type,
        "__module__": kind.__module__,
        "__qualname__": kind.__qualname__,
    }
    module.__class__ = type(kind.__name__, (_InDtype, kind), fields)


def _cast(value: Any, dtype: torch.dtype) -> Any:
    if isinstance(value, Tensor):
        return value.to(dtype) if value.is_floating_point() else value
    if isinstance(value, tuple | list):
        parts = [_cast(part, dtype) for part in value]
        return type(value)(*parts) if hasattr(value, "_fields") else type(value)(parts)
    if type(value) is dict:
        return {name: _cast(part, dtype) for name, part in value.items()}
    if isinstance(value, dict):
        cast = copy.copy(value)  # a subclass (ModelOutput) stays one
        for name, part in value.items():
            cast[name] = _cast(part, dtype)
        return cast
    return value


def _why(glob: str, model: nn.Module) -> tuple[str, str]:
    names = [name for name, _ in model.named_modules() if name]
    return (
        f"no module of {type(model).__name__} is called so, or an earlier glob takes them all",
        names_near(glob, names, what="submodule"),
    )
