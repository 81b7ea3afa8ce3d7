"""Where the values that are not finite come from: each is followed to the operation that made it.

An infinity that is made on purpose (the constant of a mask) is followed too, and is a fault only
if it reaches the loss or a gradient.
"""

from __future__ import annotations

import math
from bisect import bisect_right
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal, NamedTuple

import torch
from torch import Tensor, nn

from ampctl import torch_private
from ampctl.data.move import tensors
from ampctl.doctor.trace import Operation, Place, Places, Trace

# Memory that nothing has been written to yet holds anything.
_UNWRITTEN = frozenset({"empty", "empty_like", "empty_strided", "new_empty", "new_empty_strided"})
# What a vanished eps guards still lacks its guard after these.
_KEEPS_ZERO = frozenset({"sqrt", "_to_copy", "clone", "abs"})
_TAKES_EPS = frozenset({"add", "add_", "clamp", "clamp_", "clamp_min", "clamp_min_", "maximum"})


class Holds(NamedTuple):
    """Which values that are not finite a tensor holds."""

    nan: bool
    plus: bool
    minus: bool

    def __str__(self) -> str:
        """Return the worst of them."""
        return "NaN" if self.nan else "inf" if self.plus else "-inf"


@dataclass(frozen=True, eq=False)
class Event:
    """An operation that made a value that is not finite out of finite ones, or NaN out of inf.

    ``kind`` is ``constant`` for an infinity that is there on purpose and ``buffer`` for one that
    the model holds (``operation`` is then its name). ``node`` is the autograd node, None in the
    forward pass; ``dtype`` and ``holds`` are of the output. Of the inputs: ``largest`` (the
    largest finite absolute value), ``zeros`` and ``negatives`` (whether the divisor of a division,
    or else the first input, has any), the plain ``numbers``, the ``eps`` that is 0 in this dtype,
    the name of a ``parameter`` among them, and whether infinities were there (``from_inf``).
    """

    index: int
    kind: Literal["operation", "constant", "buffer"]
    operation: str
    node: str | None
    place: Place
    dtype: torch.dtype
    holds: Holds
    largest: float = 0.0
    zeros: bool = False
    negatives: bool = False
    numbers: tuple[float, ...] = ()
    eps: float | None = None
    parameter: str | None = None
    from_inf: bool = False


class _Read(NamedTuple):
    event: Event
    holds: Holds


class _Shown(NamedTuple):
    """What an event says of the values of its operation's inputs."""

    largest: float
    zeros: bool
    negatives: bool


@dataclass
class _Before:
    """What must be known of an operation's inputs before it runs."""

    reads: list[_Read]
    keys: set[int]
    shown: _Shown | None


@dataclass
class Watch:
    """Follow one pass over a model. Use :attr:`trace` as the context, then ask.

    Values are followed by their storage, which views share.
    """

    model: nn.Module
    then: dict[Event, Event] = field(default_factory=dict)
    events: list[Event] = field(default_factory=list)
    losses: list[Event] = field(default_factory=list)

    def __post_init__(self) -> None:
        self._places = Places(self.model)
        self._origins: dict[int, Event] = {}
        self._vanished: dict[int, float] = {}
        self._scalar: Event | None = None
        self._in_forward = True
        self._regions = _regions([*self.model.parameters(), *self.model.buffers()])
        self._buffers = {self._key(b): name for name, b in self.model.named_buffers() if _known(b)}
        named = self.model.named_parameters()
        self._parameters = {self._key(p): name for name, p in named if _known(p)}
        self.trace = Trace(self._observe, self._look)

    def origin(self, value: Tensor) -> Event | None:
        """Return where a tensor's values that are not finite come from."""
        return self._origins.get(self._key(value)) if _known(value) and holds(value) else None

    def _key(self, value: Tensor) -> int:
        """Return what tensors of the same values have in common: their storage, or a part of it.

        The statistics of all BatchNorms lie in one storage (see ``buffers``), one after another.
        """
        value = _stored(value)
        storage, address = value.untyped_storage().data_ptr(), value.data_ptr()
        starts = self._regions.get(storage, ())
        return starts[bisect_right(starts, address) - 1] if starts else storage

    def _vanishes(self, value: Tensor) -> bool:
        return _known(value) and self._key(value) in self._vanished

    def _look(self, function: Any, args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> _Before:
        inputs = [t for t in tensors((args, kwargs)) if _known(t)]
        reads = []
        for value in inputs:
            found = holds(value)
            if found:
                reads.append(
                    _Read(self._origins.get(self._key(value)) or self._given(value, found), found)
                )
        # What works in place leaves nothing to look at afterwards.
        in_place = torch_private.is_in_place(function)
        shown = _show(function.overloadpacket.__name__, args, inputs) if in_place else None
        return _Before(reads, {self._key(t) for t in inputs}, shown)

    def _observe(self, operation: Operation) -> None:
        place = self._places.here()
        node = torch_private.current_autograd_node()
        self._follow_loss(operation, node)
        if operation.name in _UNWRITTEN:
            return
        self._follow_eps(operation)
        before: _Before = operation.before
        for value in operation.outputs():
            if not _known(value):
                continue
            found, key = holds(value), self._key(value)
            if found:
                self._origins[key] = self._cause(operation, place, node, value, found)
            elif key not in before.keys:
                self._origins.pop(key, None)

    def _cause(
        self, operation: Operation, place: Place, node: Any, value: Tensor, found: Holds
    ) -> Event:
        before: _Before = operation.before
        numbers = tuple(_numbers((operation.args, operation.kwargs)))
        infinite = any(math.isinf(number) for number in numbers)
        with_nan = [read.event for read in before.reads if read.holds.nan]
        if with_nan:
            return _first(with_nan)
        if not found.nan and before.reads:
            return _first([read.event for read in before.reads])
        given = any(math.isnan(number) for number in numbers) or (infinite and not found.nan)
        event = self._event(operation, place, node, value, found, "constant" if given else None)
        faults = [read.event for read in before.reads if read.event.kind == "operation"]
        if faults:  # NaN out of an infinity that is a fault itself
            first = _first(faults)
            self.then.setdefault(first, event)
            return first
        self.events.append(event)
        return event

    def _event(
        self,
        operation: Operation,
        place: Place,
        node: Any,
        value: Tensor,
        found: Holds,
        kind: Literal["constant"] | None,
    ) -> Event:
        before: _Before = operation.before
        numbers = tuple(_numbers((operation.args, operation.kwargs)))
        inputs = [t for t in operation.inputs() if _known(t)]
        shown = before.shown or _show(operation.name, operation.args, inputs)
        return Event(
            index=len(self.events) + len(self.then),
            kind=kind or "operation",
            operation=operation.name,
            node=node.name() if node is not None else None,
            place=place,
            dtype=value.dtype,
            holds=found,
            largest=shown.largest,
            zeros=shown.zeros,
            negatives=shown.negatives,
            numbers=numbers,
            eps=next((e for t in inputs if (e := self._vanished.get(self._key(t)))), None),
            parameter=next((n for t in inputs if (n := self._parameters.get(self._key(t)))), None),
            from_inf=bool(before.reads) or any(map(math.isinf, numbers)),
        )

    def _given(self, value: Tensor, found: Holds) -> Event:
        """Return an event for a value that no operation of this pass has made."""
        name = self._buffers.get(self._key(value))
        kind: Literal["constant", "buffer"] = "constant" if name is None else "buffer"
        place = self._places.here()
        event = Event(len(self.events), kind, name or "", None, place, value.dtype, found)
        self._origins[self._key(value)] = event
        return event

    def _follow_loss(self, operation: Operation, node: Any) -> None:
        """Note whether the loss is finite: the last scalar that is read before a backward pass."""
        if node is None:
            self._in_forward = True
            if any(_known(t) and t.ndim == 0 for t in operation.inputs()):
                before: _Before = operation.before
                self._scalar = before.reads[0].event if before.reads else None
        elif self._in_forward:
            self._in_forward = False
            if self._scalar is not None:
                self.losses.append(self._scalar)

    def _follow_eps(self, operation: Operation) -> None:
        """Remember what an eps was to guard that is 0 in its dtype."""
        out = next((t for t in operation.outputs() if _known(t)), None)
        if out is None:
            return
        key = self._key(out)
        marked = [self._vanished[self._key(t)] for t in operation.inputs() if self._vanishes(t)]
        if operation.name in _TAKES_EPS:
            for number in _numbers(operation.args[1:]):
                if number and torch.tensor(number, dtype=out.dtype).item() == 0:
                    marked.append(number)
        if marked and (operation.name in _TAKES_EPS | _KEEPS_ZERO or key in operation.before.keys):
            self._vanished[key] = marked[-1]
        else:
            self._vanished.pop(key, None)


def holds(value: Tensor) -> Holds | None:
    """Return which values that are not finite a tensor holds; None if it holds none."""
    with torch.no_grad():
        value = _stored(value.detach())
        if bool(torch.isfinite(value).all()):  # sync: this is a diagnosis
            return None
        if value.is_complex():
            value = torch.view_as_real(value)
        return Holds(
            bool(torch.isnan(value).any()),
            bool((value == math.inf).any()),
            bool((value == -math.inf).any()),
        )


def _first(events: Sequence[Event]) -> Event:
    """Choose among origins: a fault before a constant, what is not a mask's -inf, the earliest."""
    return min(
        events,
        key=lambda e: (e.kind != "operation", not (e.holds.nan or e.holds.plus), e.index),
    )


def _show(name: str, args: Sequence[Any], inputs: Sequence[Tensor]) -> _Shown:
    with torch.no_grad():
        values = [_stored(t.detach()) for t in inputs if t.numel()]
        sizes = [torch.where(v.isfinite(), v.abs(), 0) for v in values]
        decides = values[:1]
        if name in ("div", "div_"):  # by a number, which is among the numbers, or by a tensor
            decides = values[-1:] if len(args) > 1 and isinstance(args[1], Tensor) else []
        return _Shown(
            max((float(size.max()) for size in sizes), default=0.0),
            any(bool((v == 0).any()) for v in decides),
            any(bool((v < 0).any()) for v in decides if not v.is_complex()),
        )


def _known(value: Tensor) -> bool:
    """Return whether a tensor's values can be looked at: those of a sparse one are its entries."""
    plain = value.layout in (torch.strided, torch.sparse_coo)
    return plain and (value.is_floating_point() or value.is_complex())


def _stored(value: Tensor) -> Tensor:
    return torch_private.stored_values(value) if value.layout is torch.sparse_coo else value


def _regions(values: Sequence[Tensor]) -> dict[int, list[int]]:
    """Return, for each storage that several tensors lie in, the addresses where they begin."""
    starts: dict[int, set[int]] = {}
    for value in filter(_known, values):
        storage = _stored(value).untyped_storage().data_ptr()
        starts.setdefault(storage, {storage}).add(_stored(value).data_ptr())
    return {storage: sorted(found) for storage, found in starts.items() if len(found) > 1}


def _numbers(value: Any) -> Iterator[float]:
    if isinstance(value, int | float) and not isinstance(value, bool):
        yield float(value)
    elif isinstance(value, Mapping):
        for part in value.values():
            yield from _numbers(part)
    elif isinstance(value, tuple | list):
        for part in value:
            yield from _numbers(part)
