"""What a checkpoint that has all keys must hold within them, so that a run can go on from it."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any


def lacking(payload: Mapping[str, Any]) -> list[str]:
    """Return the entries that a resume needs and a checkpoint with all keys lacks."""
    names = payload["progress"].get("optimizer_updates")
    saved = payload["optimizer"]
    several = isinstance(names, Mapping) and bool(names)
    return lacking_of(payload, {n: saved.get(n) for n in names} if several else {"": saved})


def lacking_of(payload: Mapping[str, Any], optimizers: Mapping[str, Any]) -> list[str]:
    """Return the same, where the states of the optimizers are known by name."""
    inside = _inside(payload, optimizers)
    return [what for what, is_there in inside.items() if not is_there]


def _inside(payload: Mapping[str, Any], optimizers: Mapping[str, Any]) -> dict[str, bool]:
    """Return for each entry that a resume needs whether it is there; the keys themselves are."""
    groups = [s.get("param_groups") if isinstance(s, dict) else None for s in optimizers.values()]
    counts = ("step", "updates", "skipped", "consecutive_skips", "epoch", "batch_in_epoch")
    states = payload["rng"]
    return {
        "`optimizer.param_groups`": all(
            isinstance(each, list) and all(map(_is_group, each)) for each in groups
        ),
        "whole numbers in `progress`": all(
            isinstance(payload["progress"].get(name), int) for name in counts
        ),
        "a state in `rng` for each rank": isinstance(states, list)
        and bool(states)
        and all(isinstance(s, dict) and {"python", "numpy", "torch"} <= s.keys() for s in states),
    }


def _is_group(group: Any) -> bool:
    return isinstance(group, dict) and isinstance(group.get("params"), list)
