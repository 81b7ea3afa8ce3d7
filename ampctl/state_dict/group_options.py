"""What the parameter groups of an optimizer hold apart from their parameters: rates and options."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection
from typing import Any

from torch import Tensor
from torch.optim import Optimizer

from ampctl.state_dict.checks import are_same

Values = list[dict[str, Any]]
"""What each group of an optimizer holds, by name."""


def group_values(optimizer: Optimizer) -> Values:
    """Return a copy of what the groups of an optimizer hold apart from their parameters."""
    return [
        {name: copied(value) for name, value in group.items() if name != "params"}
        for group in optimizer.param_groups
    ]


def stand_in(optimizer: Optimizer, values: Values) -> Optimizer:
    """Return another optimizer of the same class and parameters, with groups of its own.

    A schedule can be tried on it. It has no state, and its parameters are those of the first one.
    """
    kind = type(optimizer)
    other: Optimizer = object.__new__(kind)
    # A scheduler of torch has put a counter in place of `step`, which is of the first one.
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    groups = [
        {**{name: copied(item) for name, item in value.items()}, "params": group["params"]}
        for value, group in zip(values, optimizer.param_groups, strict=True)
    ]
    vars(other).update({**own, "state": defaultdict(dict), "param_groups": groups})
    return other


def give_back(optimizer: Optimizer, values: Values, names: Collection[str]) -> None:
    """Set some of what the groups hold to what it is in ``values``, or drop it."""
    for group, value in zip(optimizer.param_groups, values, strict=True):
        for name in {*names} - {"params"}:
            group.pop(name, None)
            if name in value:
                group[name] = copied(value[name])


def differing(some: Values, others: Values) -> set[str]:
    """Return the names of what is not the same in some groups and in others."""
    absent = object()
    return {
        name
        for one, other in zip(some, others, strict=True)
        for name in one.keys() | other.keys()
        if not are_same(one.get(name, absent), other.get(name, absent))
    }


def set_rate(group: dict[str, Any], rate: float) -> None:
    """Set the rate of a group; a tensor stays the one that it is, as in torch."""
    if isinstance(group["lr"], Tensor):
        group["lr"].fill_(rate)
    else:
        group["lr"] = rate


def copied(value: Any) -> Any:
    """Return a value that shares no tensor with another one."""
    if isinstance(value, Tensor):
        return value.detach().clone()
    if isinstance(value, list | tuple):
        return type(value)(map(copied, value)) if type(value) in (list, tuple) else value
    return value
