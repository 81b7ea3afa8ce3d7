"""The private names of torch that ampctl uses, each with its reason; no other module uses one.

A new version of torch may rename or drop any of them: the tests of this module tell which it lacks.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from multiprocessing.process import BaseProcess
from operator import attrgetter
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.modules.batchnorm import _BatchNorm as BatchNorm  # the one base of these layers
from torch.nn.modules.batchnorm import _NormBase as NormBase  # of those and of InstanceNorm
from torch.utils._python_dispatch import TorchDispatchMode as DispatchMode  # sees each operation

__all__ = ["BatchNorm", "DispatchMode", "NormBase"]  # the others are made here

# One kernel for a whole list of tensors: `torch.optim` and `clip_grad_norm_` are made of these.
foreach_add_ = torch._foreach_add_
foreach_clamp_max_ = torch._foreach_clamp_max_
foreach_clamp_min_ = torch._foreach_clamp_min_
foreach_lerp_ = torch._foreach_lerp_
foreach_mul_ = torch._foreach_mul_
foreach_norm = torch._foreach_norm
foreach_sub = torch._foreach_sub

# The kernels of GradScaler, which itself reads their result back to the host at each step.
check_and_unscale_ = torch._amp_foreach_non_finite_check_and_unscale_
update_scale_ = torch._amp_update_scale_

# The buffers of one module, to put others in their place, whatever `setattr` of a user's does.
own_buffers: Callable[[nn.Module], dict[str, Tensor | None]] = attrgetter("_buffers")

# The node of the backward pass that runs now: an operation there belongs to where it was made.
current_autograd_node = torch._C._current_autograd_node


def next_autograd_number() -> int:
    """Return the number that the next node of the autograd graph gets, to know it again by."""
    return int(torch._C._autograd._get_sequence_nr())


def autograd_number(node: Any) -> int:
    """Return the number that a node of the autograd graph has got."""
    return int(node._sequence_nr())


def is_in_place(operator: Any) -> bool:
    """Return whether an operator changes its arguments, which its schema alone tells."""
    return bool(operator._schema.is_mutable)


def fake_tensor_mode() -> Any:
    """Return a mode in which tensors have no memory; it loads slowly, so only when it is needed."""
    from torch._subclasses.fake_tensor import FakeTensorMode

    return FakeTensorMode(allow_non_fake_inputs=True)


def stored_values(value: Tensor) -> Tensor:
    """Return the elements of a sparse tensor; ``values()`` refuses one that is not coalesced."""
    return value._values()


def has_backward_hooks(value: Tensor) -> bool:
    """Return whether a tensor has backward hooks, which a file can forge."""
    return bool(value._backward_hooks)


def times_written(value: Tensor) -> int:
    """Return how often a tensor was written to in place, which torch counts for autograd."""
    return int(value._version)


def passing_buffers(module: nn.Module) -> set[str]:
    """Return the names of the buffers of one module that its ``state_dict`` leaves out."""
    return module._non_persistent_buffers_set


def left_out_by_ddp(module: nn.Module) -> set[str]:
    """Return the names of the parameters and buffers that a user told DDP to leave alone."""
    return set(getattr(module, "_ddp_params_and_buffers_to_ignore", ()))


def steps_by_scale(optimizer: torch.optim.Optimizer) -> bool:
    """Return whether an optimizer's own kernel looks at ``found_inf``, as GradScaler asks it."""
    return bool(getattr(optimizer, "_step_supports_amp_scaling", False))


def step_without_scale(optimizer: torch.optim.Optimizer) -> None:
    """Make :func:`steps_by_scale` false for an optimizer that has left its fused kernel."""
    optimizer._step_supports_amp_scaling = False  # type: ignore[attr-defined]


def inner_schedulers(scheduler: Any) -> Sequence[Any]:
    """Return the schedulers that ``SequentialLR`` and ``ChainedScheduler`` are made of."""
    inner: Sequence[Any] = getattr(scheduler, "_schedulers", ())
    return inner


def pin_memory(batch: Any) -> Any:
    """Return a batch in page-locked memory, whose copies to CUDA overlap, as a DataLoader does."""
    from torch.utils.data._utils import pin_memory

    return pin_memory.pin_memory(batch)  # type: ignore[no-untyped-call]


def take_iterator(loader: Any) -> Any:
    """Take the iterator that a loader keeps for its next pass, or None, to end its workers."""
    iterator, loader._iterator = loader._iterator, None
    return iterator


def workers(iterator: Any) -> Sequence[BaseProcess]:
    """Return the processes of a loader's iterator, which never tells of what one died."""
    processes: Sequence[BaseProcess] = iterator._workers
    return processes


def shut_down_workers(iterator: Any) -> None:
    """Ask the processes of a loader's iterator to end; else they end with the iterator alone."""
    iterator._shutdown_workers()
