"""How much memory a pickle can make its reader take, found out before anything reads it.

A few bytes can ask for a memo of gigabytes, claim a text that is not there, or copy one long list
again and again. What a whole pickle may take is bounded by how long it is.
"""

from __future__ import annotations

import pickletools
from typing import Any

_SPARE = 1 << 26
_FACTOR = 64
"""A pickle of N bytes may take ``_SPARE + _FACTOR * N``. By the costs below, which are on the high
side, what torch writes takes up to 54 N: that of tensors with a few values."""

_OPCODE, _CALL, _ITEM = 40, 1000, 16
_COSTS = {
    "EMPTY_LIST": 300,
    "EMPTY_DICT": 300,
    "EMPTY_SET": 300,
    "LIST": 300,
    "DICT": 300,
    "FROZENSET": 300,
    "TUPLE": 200,
    "TUPLE1": 200,
    "TUPLE2": 200,
    "TUPLE3": 200,
    "BINPERSID": 300,
    "PERSID": 300,
    "GET": 100,  # a tensor in one more place has one more name
    "BINGET": 100,
    "LONG_BINGET": 100,
}
_BY_CODE = {ord(each.code): each for each in pickletools.opcodes}
_COST = [_COSTS.get(_BY_CODE[code].name, _OPCODE) if code in _BY_CODE else 0 for code in range(256)]
_PREFIXES = {
    pickletools.TAKEN_FROM_ARGUMENT1: 1,
    pickletools.TAKEN_FROM_ARGUMENT4: 4,
    pickletools.TAKEN_FROM_ARGUMENT4U: 4,
    pickletools.TAKEN_FROM_ARGUMENT8U: 8,
}
_STOP, _PUT, _LONG_PUT = ord("."), ord("p"), ord("r")
_LONGEST_NUMBER = 20


class ForgedError(Exception):
    """A file that ``torch.save`` does not write; the message says what is wrong with it."""


class Budget:
    """What is left of the memory that a pickle may take, in bytes."""

    def __init__(self, left: int) -> None:
        self._left = left

    def take(self, amount: int) -> None:
        """Take a part of it; raise ForgedError if that is more than is left."""
        self._left -= amount
        if self._left < 0:
            raise ForgedError("its pickle would take far more memory than its size")

    def spend(self, *arguments: Any) -> None:
        """Take what a call may copy of its arguments."""
        amount = _CALL
        for argument in arguments:
            if isinstance(argument, str | bytes):
                amount += 4 * len(argument)
            elif isinstance(argument, tuple | list | dict):
                amount += _ITEM * len(argument) * (6 if isinstance(argument, dict) else 1)
                amount += sum(
                    _ITEM * len(inner) for inner in argument if isinstance(inner, tuple | list)
                )
        self.take(amount)


def _steps() -> list[int]:
    """Return how far it is from each opcode to the next, or 0 where its argument tells."""
    steps = [0] * 256
    for code, each in _BY_CODE.items():
        if code not in (_PUT, _LONG_PUT) and (each.arg is None or each.arg.n >= 0):
            steps[code] = 1 + (each.arg.n if each.arg else 0)
    return steps


_STEPS = _steps()


def walk(content: bytes) -> Budget:
    """Go through the opcodes of a pickle; return what is left for the calls in it.

    Raises ForgedError for an argument that reaches beyond the end, for a place in the memo that no
    pickle of this length has filled, and for what would take too much memory.
    """
    place, size, cost = 0, len(content), 0
    costs, steps = _COST, _STEPS
    while place < size:
        code = content[place]
        cost += costs[code]
        step = steps[code]
        if step:
            place += step
            if code == _STOP:
                break
            continue
        length, text = _argument(content, place)
        cost += 4 * text
        place += length
    if place > size:
        raise ForgedError("its pickle is cut off")
    budget = Budget(_SPARE + _FACTOR * size)
    budget.take(cost)
    return budget


def _argument(content: bytes, place: int) -> tuple[int, int]:
    """Return the length of an opcode with its argument, and how much of that is content."""
    opcode = _BY_CODE.get(content[place])
    if opcode is None or opcode.arg is None:
        raise ForgedError("its pickle has an opcode that there is not")
    if content[place] == _LONG_PUT:
        _require_place(int.from_bytes(content[place + 1 : place + 5], "little"), place)
        return 5, 0
    width = _PREFIXES.get(opcode.arg.n)
    if width is not None:
        length = int.from_bytes(content[place + 1 : place + 1 + width], "little")
        return 1 + width + length, length
    end = content.find(b"\n", place)
    if opcode.arg.name == "stringnl_noescape_pair" and end >= 0:
        end = content.find(b"\n", end + 1)
    if end < 0:
        raise ForgedError("its pickle is cut off")
    if content[place] == _PUT:
        digits = content[place + 1 : end]
        is_number = digits.isdigit() and len(digits) < _LONGEST_NUMBER
        _require_place(int(digits) if is_number else 1 << 62, place)
    return end + 1 - place, end - place


def _require_place(index: int, place: int) -> None:
    """Raise for a place in the memo before which there cannot be as many: each takes 3 bytes."""
    if index > place // 3:
        raise ForgedError("its pickle has a memo larger than itself")
