"""Every operation of a forward and backward pass, with the module and the line that it comes from.

It only watches; what an operation shows is for ``watch`` and ``float16_constants`` to judge.
Nothing is hooked: a trace is a dispatch mode, there while its context is open.
"""

from __future__ import annotations

import sys
from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, replace
from pathlib import Path
from types import FrameType
from typing import Any

import torch
from torch import Tensor, nn

from ampctl import torch_private
from ampctl.data.move import tensors

_PACKAGE = Path(__file__).parents[1]
_TORCH = str(Path(torch.__file__).parent)
_DOCTOR = str(Path(__file__).parent)
# Whoever calls a step has no part in what its operations do.
_STEP = tuple(str(_PACKAGE / name) for name in ("step.py", "losses.py", "turns.py", "passes.py"))
# What called the model is no part of it.
_TASKS = str(_PACKAGE / "tasks.py")
# Of ampctl's own lines, those of the parts that a recipe names tell a user something.
_PARTS = tuple(str(_PACKAGE / name) for name in ("models", "tasks.py", "data"))


@dataclass(frozen=True)
class Place:
    """Where an operation comes from.

    ``module`` is the dotted name of the innermost module of the model whose forward was running,
    ``""`` for the model itself and None outside of it (in the task, or in the backward pass);
    ``kind`` is that module's class. ``source`` is the line of Python, ``my_model.py:31``, outside
    of torch: where a module of torch's own was running, the line that called it; ``""`` if there
    is none.
    """

    module: str | None
    kind: str
    source: str

    def __str__(self) -> str:
        """Return it as text: ``model.head (Linear), my_model.py:31``."""
        if self.module is None:
            return self.source or "the backward pass"
        name = f"model.{self.module}" if self.module else "model"
        return f"{name} ({self.kind})" + (f", {self.source}" if self.source else "")


@dataclass(frozen=True)
class Operation:
    """An ATen operation that has just run: ``name`` without overload, inputs and output.

    ``before`` is what the trace's ``before`` returned: what an operation that works in place has
    written over cannot be read from its inputs any more.
    """

    name: str
    function: Any
    args: tuple[Any, ...]
    kwargs: Mapping[str, Any]
    output: Any
    before: Any = None

    def inputs(self) -> Iterator[Tensor]:
        """Yield the tensors among the arguments."""
        yield from tensors((self.args, self.kwargs))

    def outputs(self) -> Iterator[Tensor]:
        """Yield the tensors of the output."""
        yield from tensors(self.output)


class Trace(torch_private.DispatchMode):  # type: ignore[no-untyped-call]
    """Call ``observe`` after every operation that runs inside the context, in any thread of it.

    ``before``, if given, is called ahead of each with the operation and its arguments.
    """

    def __init__(
        self,
        observe: Callable[[Operation], None],
        before: Callable[[Any, tuple[Any, ...], Mapping[str, Any]], Any] | None = None,
    ) -> None:
        super().__init__()  # type: ignore[no-untyped-call]
        self._observe = observe
        self._before = before

    def __torch_dispatch__(self, func: Any, types: Any, args: Any = (), kwargs: Any = None) -> Any:
        kwargs = kwargs or {}
        before = self._before(func, args, kwargs) if self._before is not None else None
        output = func(*args, **kwargs)
        name = func.overloadpacket.__name__
        self._observe(Operation(name, func, args, kwargs, output, before))
        return output


class Places:
    """Find the place of each operation of a pass, those of the backward pass too.

    It remembers where each node of the autograd graph was made; an operation of the backward pass
    is where its node was made in the forward pass.
    """

    def __init__(self, model: nn.Module) -> None:
        self._names = _names(model)
        self._made: dict[int, Place] = {}

    def here(self) -> Place:
        """Return where the running operation belongs; to be called for each, in order."""
        found = _walk(self._names, sys._getframe(1))
        node = torch_private.current_autograd_node()
        if node is not None and found.module is None:
            made = self._made.get(torch_private.autograd_number(node))
            # The backward of a function of the user's own has a line of its own.
            return replace(made, source=found.source or made.source) if made else found
        # A node takes its number just before its operation runs.
        self._made.setdefault(torch_private.next_autograd_number() - 1, found)
        return found


def place(model: nn.Module, frame: FrameType | None = None) -> Place:
    """Return where the running code is, from the frames that lead to it.

    ``frame``: the innermost one; by default that of the caller. Takes some microseconds, so it is
    for an operation that has something to it.
    """
    return _walk(_names(model), frame or sys._getframe(1))


def source_of(frame: FrameType, line: int | None = None) -> str:
    """Return a frame's ``file:line``, relative to the current folder if it lies in there."""
    path = Path(frame.f_code.co_filename)
    shown = path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path.name
    return f"{shown}:{line or frame.f_lineno}"


def _names(model: nn.Module) -> dict[int, str]:
    return {id(module): name for name, module in model.named_modules()}


def _walk(names: Mapping[int, str], innermost: FrameType) -> Place:
    frame: FrameType | None = innermost
    module: nn.Module | None = None
    source = ""
    outside = False  # of the doctor, whose observers are the innermost frames
    while frame is not None and not (module is not None and source):
        file = frame.f_code.co_filename
        doctors = file.startswith(_DOCTOR)
        if file in _STEP or (doctors and outside):
            break
        outside = outside or not doctors
        if not source and outside and _tells(file) and not (module is not None and file == _TASKS):
            source = source_of(frame)
        owner = frame.f_locals.get("self")
        if module is None and isinstance(owner, nn.Module) and id(owner) in names:
            module = owner
        frame = frame.f_back
    if module is None:
        return Place(None, "", source)
    return Place(names[id(module)], type(module).__name__, source)


def _tells(file: str) -> bool:
    if file.startswith((_TORCH, "<")):
        return False
    return file.startswith(_PARTS) or not file.startswith(str(_PACKAGE))
