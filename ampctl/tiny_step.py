"""What an optimizer keeps of a parameter, and whether it can step: tried on a tiny parameter."""

from __future__ import annotations

from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ampctl.optim import is_torchs_own, needs_closure


def state_names(optimizer: torch.optim.Optimizer) -> list[frozenset[str] | None]:
    """Name what the optimizer keeps of each of its parameters once it has stepped, in their order.

    A copy of it steps on a tiny parameter of the same number of dimensions. None where that cannot
    be known: for LBFGS and for SparseAdam, and for a class that is not torch's, which may hold on
    to more than a copy can leave alone.
    """
    found: dict[tuple[int, int], frozenset[str] | None] = {}
    names = []
    for number, group in enumerate(optimizer.param_groups):
        for parameter in group["params"]:
            kind = (number, parameter.ndim)
            if kind not in found:
                found[kind] = _names_for(optimizer, group, parameter)
            names.append(found[kind])
    return names


def _names_for(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> frozenset[str] | None:
    if not is_torchs_own(optimizer) or needs_closure(optimizer):
        return None
    if parameter in optimizer.state:  # some make it when they are built
        return frozenset(optimizer.state[parameter])
    state = _tiny_step(optimizer, group, parameter)
    if state is None:  # SparseAdam takes sparse gradients alone
        return None
    return frozenset(name for name, value in state.items() if value is not None)


def _tiny_step(
    optimizer: torch.optim.Optimizer, group: Mapping[str, Any], parameter: nn.Parameter
) -> Mapping[str, Any] | None:
    """Step a copy of an optimizer on a tiny parameter like one of its own.

    Return what it keeps of it, or None if it cannot step.
    """
    kind = type(optimizer)
    shape = (1,) * parameter.ndim
    tiny = nn.Parameter(torch.zeros(shape, dtype=parameter.dtype, device=parameter.device))
    tiny.grad = torch.zeros_like(tiny)
    probe: torch.optim.Optimizer = object.__new__(kind)
    # Hooks of others, and the counter that a scheduler puts in place of `step`, are not for this.
    own = {name: value for name, value in vars(optimizer).items() if name != "step"}
    hooks = {name: OrderedDict[int, Any]() for name in own if name.endswith("_hooks")}
    one = {**group, "params": [tiny], "param_names": ["tiny"]}
    vars(probe).update({**own, **hooks, "state": defaultdict(dict), "param_groups": [one]})
    try:
        kind.step(probe)
    except RuntimeError:
        return None
    state: Mapping[str, Any] = probe.state[tiny]
    return state


def steps_fused(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether a fused optimizer can step where its parameters are, if it is torch's own.

    Some kernels are of a CPU alone, which their class tells no sooner than at its first step.
    """
    parts = ((group, each) for group in optimizer.param_groups for each in group["params"])
    first = next(parts, None)
    return (
        not is_torchs_own(optimizer) or first is None or _tiny_step(optimizer, *first) is not None
    )
