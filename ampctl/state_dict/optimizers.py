"""What is known of an optimizer: how it steps, and what it keeps of each parameter."""

from __future__ import annotations

import inspect
from collections import OrderedDict, defaultdict
from collections.abc import Mapping
from typing import Any

import torch
from torch import nn

from ampctl import torch_private
from ampctl.errors import UsageError
from ampctl.recipe.arguments import parameters_of

KERNEL_CHOICES = ("fused", "foreach", "capturable", "differentiable")
"""Options of torch's optimizers that choose how a step is computed, not what."""


def refuse_closure(optimizer: torch.optim.Optimizer) -> None:
    """Raise UsageError for an optimizer that cannot be used with loss scaling (LBFGS)."""
    if needs_closure(optimizer):
        raise UsageError(
            f"{type(optimizer).__name__} calls the model itself, several times a step, and so "
            "cannot be used with loss scaling, which float16 needs. "
            "Set amp.dtype to float32 or bfloat16, or take another optimizer."
        )


def needs_closure(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether ``step`` must be given a closure that computes the loss, as LBFGS's must."""
    # Of the class: a scheduler of torch puts a wrapper in place of the instance's step.
    closure = inspect.signature(type(optimizer).step).parameters.get("closure")
    return closure is not None and closure.default is inspect.Parameter.empty


def is_torchs_own(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether torch brings the optimizer's class, so that what it keeps is known."""
    return f"{type(optimizer).__module__}.".startswith("torch.optim.")


def counted_in_groups(optimizer: torch.optim.Optimizer) -> set[str]:
    """Return what an optimizer keeps in its groups beside its arguments: how far it has come."""
    arguments = parameters_of(type(optimizer))
    if not arguments or any(each.kind is each.VAR_KEYWORD for each in arguments.values()):
        return set()
    return optimizer.defaults.keys() - arguments.keys()


def leave_fused(optimizer: torch.optim.Optimizer) -> None:
    """Make an optimizer that was built with the fused kernel step by another one."""
    for group in optimizer.param_groups:
        group["fused"] = False
    torch_private.step_without_scale(optimizer)


def make_skippable(optimizer: torch.optim.Optimizer, at: str = "optimizer") -> None:
    """Prepare a fused SGD with momentum for a first step that is skipped.

    torch makes its momentum buffers without a value at the first step and leaves it to the kernel
    to fill them; a kernel that is told to skip does not, and the next step takes what the memory
    held. Zeros in their place give the same first step. Raises UsageError for ``dampening``, with
    which they would not; ``at`` is the optimizer's key in the recipe.
    """
    if not isinstance(optimizer, torch.optim.SGD):
        return
    for group in optimizer.param_groups:
        if not group["fused"] or not group["momentum"]:
            continue
        if group["dampening"]:
            raise UsageError(
                f"{at}: a fused SGD with dampening takes its momentum from uninitialised "
                f"memory if its first step is skipped. Set {at}.fused=false."
            )
        for parameter in group["params"]:
            optimizer.state[parameter].setdefault("momentum_buffer", torch.zeros_like(parameter))


def state_names(optimizer: torch.optim.Optimizer) -> list[frozenset[str] | None]:
    """Return the state names of each parameter once the optimizer has stepped, in their order.

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


def can_step(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer can step where its parameters are, if it is torch's own.

    Some fused kernels are of a CPU alone, which their class tells no sooner than at its first step.
    What the step raises for settings that it cannot use comes through.
    """
    if not is_torchs_own(optimizer) or needs_closure(optimizer):
        return True
    parts = ((group, each) for group in optimizer.param_groups for each in group["params"])
    first = next(parts, None)
    return first is None or _tiny_step(optimizer, *first) is not None
