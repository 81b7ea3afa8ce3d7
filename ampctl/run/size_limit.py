"""No model out of a checkpoint is to be far larger than the weights in it.

The recipe beside them may be a stranger's, and ask for more memory than the machine has.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from contextlib import ExitStack, contextmanager
from typing import Any

from torch import Tensor, nn
from torch.nn.modules.module import (
    register_module_buffer_registration_hook,
    register_module_module_registration_hook,
    register_module_parameter_registration_hook,
)
from torch.nn.parameter import is_lazy

from ampctl.errors import CheckpointError

# Parts may be registered twice, or replaced; and what is as small as this does no harm.
_TIMES, _SMALL = 4, 10_000_000
_TIMES_PARTS, _FEW = 50, 10_000


@contextmanager
def no_larger_than(weights: Mapping[str, Any]) -> Iterator[None]:
    """Raise CheckpointError as soon as a model is built that is far larger than its weights.

    A parameter is counted when it is registered, which layers do before they write to its memory,
    and so are modules and buffers: the smallest take time and memory if there are millions.
    """
    held = sum(each.numel() for each in weights.values() if isinstance(each, Tensor))
    most, built = _TIMES * held + _SMALL, 0
    most_parts, parts = _TIMES_PARTS * len(weights) + _FEW, 0

    def count(module: nn.Module, name: str, part: Any) -> None:
        nonlocal built, parts
        parts += 1
        if parts > most_parts:
            raise CheckpointError(
                f"the checkpoint does not fit the recipe: it has {len(weights):,} weights, and the "
                f"model would have more than {most_parts:,} modules, parameters and buffers (a "
                f"{type(module).__name__} is being built). Go on with the model that it was saved "
                "with"
            )
        if isinstance(part, nn.Parameter):
            built += 0 if is_lazy(part) else part.numel()
        if built > most:
            raise CheckpointError(
                f"the checkpoint does not fit the recipe: its weights are {held:,} values, and "
                f"the model would have more than {most:,} (a {type(module).__name__} is being "
                "built). Go on with the model that it was saved with"
            )

    with ExitStack() as hooks:
        for register in (
            register_module_buffer_registration_hook,
            register_module_module_registration_hook,
            register_module_parameter_registration_hook,
        ):
            hooks.callback(register(count).remove)
        yield
