"""What a proof found, in words: what differs first, what is likely at fault, what to do."""

from __future__ import annotations

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any

from ampctl.checkpoint.contents import Facts
from ampctl.errors import first_of

Noted = Mapping[str, Any]
"""What a witness has noted of a run."""

_MOST_HIDDEN = 3
_HASH = re.compile(r"\b[0-9a-f]{16}\b")
_OWNERS = {"weights": "model", "buffers": "model", "random numbers": "training", "ema": "model"}
_STATES = ("optimizer", "scheduler", "scaler", "data set")
_WHAT_HOLDS = {
    "model": "keep what the model counts or collects in a buffer (register_buffer), or in its "
    "get_extra_state and set_extra_state",
    "task": "nothing of a task is saved: let it follow from `step`, which loss gets if it has an "
    "argument of that name, or keep it in a buffer (register_buffer) of the model",
    "optimizer": "keep what the optimizer counts or collects in its `state` or its `param_groups`, "
    "which its state_dict() returns",
    "scheduler": "let the scheduler's state_dict() return it, and its load_state_dict() take it "
    "back; or let the rate follow from the number of updates alone",
    "data": "let a sample follow from its index alone; an iterable data set can return what it "
    "keeps from state_dict(), and take it back in load_state_dict()",
    "global": "nothing of a module's globals is saved: keep it in a buffer (register_buffer) of "
    "the model",
}
"""By the first part of a hidden value's name: what of its owner a checkpoint holds."""

_UNSEEN = (
    "the step began with the same state and samples, and nothing that was looked at differs: no "
    "attribute of model, task, optimizer, scheduler and data set, no plain global of your modules. "
    "What steers it is held elsewhere (in an object inside another one, a closure, a file, a "
    "library's globals): keep it in a buffer (register_buffer) of the model, or in its "
    "get_extra_state and set_extra_state"
)


@dataclass(frozen=True)
class Difference:
    """The first thing that differs between two runs.

    ``part`` is "samples" (of step ``step``) or a part of the state after ``step`` steps; ``names``
    what in it, ``parts`` all parts that differ there. ``restored``: it differs as it is resumed.
    """

    step: int
    part: str
    names: tuple[str, ...]
    parts: tuple[str, ...]
    restored: bool


def words(found: Difference, stop: int, repeats: bool) -> str:
    """Describe what differs first, and when."""
    part = f"{found.part} state" if found.part in _STATES else found.part
    what = f"{part} ({first_of(found.names, 2)})" if found.names else part
    if not repeats:
        where = "of step" if found.part == "samples" else "after step"
        return f"two straight runs differ already: {what} {where} {found.step}"
    if found.restored:
        return f"stopped after step {stop}, it comes back with other {what}"
    where = "of" if found.part == "samples" else "after"
    return f"stopped after step {stop} and resumed, it has other {what} {where} step {found.step}"


def advice(
    found: Difference, repeats: bool, hidden: Mapping[str, Any], straight: Noted, resumed: Noted
) -> list[str]:
    """Describe what is likely at fault and what to do about it."""
    if not repeats:
        return [_unrepeatable(found)]
    said = [_about_hidden(name, *values) for name, values in list(hidden.items())[:_MOST_HIDDEN]]
    if len(hidden) > _MOST_HIDDEN:
        said.append(f"nor does one hold {first_of(list(hidden)[_MOST_HIDDEN:])}")
    owners = dict.fromkeys(re.split(r"[. ]", name)[0] for name in hidden)
    if found.part == "samples":
        said.append(_about_data(found, straight, resumed))
    elif found.restored:
        said.append(
            f"loading a state_dict() must bring back what it was taken of: look at state_dict and "
            f"load_state_dict of the {_OWNERS.get(found.part, found.part)}"
        )
    elif not hidden:
        said.append(_UNSEEN)
    if not found.restored:
        is_told = found.part == "samples"
        said += [_WHAT_HOLDS[each] for each in owners if not (is_told and each == "data")]
    return said


def no_boundary(facts: Facts) -> str:
    """Describe that no epoch ended in these steps, so its end is not proved; "" if one did."""
    if facts["epoch_ends"]:
        return ""
    length = facts["steps_per_epoch"]
    enough = f"--steps {length + 1} would reach one" if length else "more --steps may reach one"
    return f"; no epoch boundary was among them: {enough}"


def _about_hidden(name: str, ours: str, theirs: str | None) -> str:
    what = f"the {name}" if name.startswith("global ") else name
    return f"no checkpoint holds {what}: {_how_it_differs(ours, theirs)}"


def _how_it_differs(ours: str, theirs: str | None) -> str:
    """Describe a hidden value before and after; of most there is only their type and a digest."""
    kind = ours.split()[0]
    if not _HASH.search(ours + (theirs or "")):
        return f"it was {ours} and is {'not there' if theirs is None else theirs} after resuming"
    if theirs is None:
        return "it is not there after resuming"
    if kind in ("Random", "Generator", "RandomState"):
        return "after resuming, this generator does not go on where it stood"
    if kind in ("list", "tuple", "set", "frozenset"):
        return f"after resuming, this {kind} does not hold what it held"
    return "after resuming, its values are not those that it had"


def _unrepeatable(found: Difference) -> str:
    if found.part == "samples":
        return (
            "the data set draws from a generator that nobody seeds, or reads in no fixed order "
            "(a set, a folder, the time): use random, numpy.random and torch's own generator, "
            "which ampctl seeds for each sample, or one of its own with a fixed seed"
        )
    return (
        "the samples are the same: set train.deterministic=true for operations that add up in any "
        "order, and draw from generators that are seeded (random, numpy.random, torch)"
    )


def _about_data(found: Difference, straight: Noted, resumed: Noted) -> str:
    read = resumed["samples"].get(f"{found.step}")
    earlier = [step for step, samples in straight["samples"].items() if samples == read]
    began = f"it reads those of step {earlier[0]} again: " if read and earlier else ""
    if straight["kind"] == "by index":
        return (
            f"{began}a sample must follow from its index: draw from random, numpy.random or "
            "torch's own generator, which ampctl seeds for each sample, and not from one that the "
            "data set keeps, and keep no counters in it"
        )
    if straight["kind"] == "by its state_dict":
        return (
            f"{began}state_dict() must say where the iterator stands, its own generators too, and "
            "the next __iter__ after load_state_dict() must go on there"
        )
    return (
        f"{began}an iterable data set without a state_dict is read from its beginning, so "
        "__iter__ must give the same again in a new process: seed what it draws from by a fixed "
        "number, or give it state_dict() and load_state_dict()"
    )
