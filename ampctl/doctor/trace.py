"""Every operation of a forward and backward pass, with the module and the line that it comes from.

It only watches; what an operation shows is for ``nonfinite`` and ``precision`` to judge. Nothing is
hooked: a trace is a dispatch mode, there while its context is open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._python_dispatch import TorchDispatchMode

_TORCH = str(Path(torch.__file__).parent)
_DOCTOR = str(Path(__file__).parent)


@dataclass(frozen=True)
class Place:
    """Where an operation comes from.

    ``module`` is the dotted name of the innermost module of the model whose forward was running,
    ``""`` for the model itself and None outside of it (in the task, or in the backward pass);
    ``kind`` is that module's class. ``source`` is the line of Python, ``my_model.py:31``, outside
    of torch; ``""`` if there is none.
    """

    module: str | None
    kind: str
    source: str

    def __str__(self) -> str:
        """Name it for a person: ``model.head (Linear), my_model.py:31``."""
        if self.module is None:
            return self.source or "the backward pass"
        name = f"model.{self.module}" if self.module else "model"
        return f"{name} ({self.kind})" + (f", {self.source}" if self.source else "")


@dataclass(frozen=True)
class Operation:
    """An ATen operation that has just run: ``name`` without overload, inputs and output."""

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any

    def inputs(self) -> Iterator[Tensor]:
        """Yield the tensors among the arguments."""
        yield from tensors((self.args, self.kwargs))

    def outputs(self) -> Iterator[Tensor]:
        """Yield the tensors of the output."""
        yield from tensors(self.output)


class Trace(TorchDispatchMode):  # type: ignore[no-untyped-call]
    """Call ``observe`` after every operation that runs inside the context, in any thread of it."""

    def __init__(self, observe: Callable[[Operation], None]) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observe = observe

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        output = func(*args, **kwargs)
        self._observe(Operation(func.overloadpacket.__name__, func, args, kwargs, output))
        return output


def place(model: nn.Module, frame: FrameType | None = None) -> Place:
    """Tell where the running code is, from the frames that lead to it.

    ``frame``: the innermost one; by default that of the caller. Takes some microseconds, so it is
    for an operation that has something to it.
    """
    names = {id(module): name for name, module in model.named_modules()}
    frame = frame or sys._getframe(1)
    source = ""
    while frame is not None:
        file = frame.f_code.co_filename
        if not source and not file.startswith((_TORCH, _DOCTOR, "<")):
            source = f"{_shown(file)}:{frame.f_lineno}"
        owner = frame.f_locals.get("self")
        if isinstance(owner, nn.Module) and id(owner) in names:
            return Place(names[id(owner)], type(owner).__name__, source)
        frame = frame.f_back
    return Place(None, "", source)


def tensors(value: Any) -> Iterator[Tensor]:
    """Yield every tensor in nested tuples, lists and mappings."""
    if isinstance(value, Tensor):
        yield value
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from tensors(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from tensors(part)


def _shown(file: str) -> str:
    path = Path(file)
    return str(path.relative_to(Path.cwd())) if path.is_relative_to(Path.cwd()) else path.name
