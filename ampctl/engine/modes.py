"""Train and eval mode of a model: who sets them, and what of it a model has chosen itself."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager

from torch import nn


def set_to_train(model: nn.Module) -> None:
    """Set a model to train mode, but for parts that it was built with in eval mode.

    Those stay so where the model itself is in train mode already: a frozen backbone, for instance.
    A model in eval mode as a whole (``from_pretrained`` returns one) is set to train as a whole.
    """
    kept = [module for module in model.modules() if not module.training] if model.training else []
    model.train()
    for module in kept:
        module.training = False


@contextmanager
def in_eval_mode(model: nn.Module) -> Iterator[None]:
    """Set a model to eval mode inside, and each of its modules back to its own mode afterwards."""
    modes = {module: module.training for module in model.modules()}
    model.eval()
    try:
        yield
    finally:
        model.train(modes[model])  # a model may do more there than set a flag
        for module, training in modes.items():
            module.training = training


def parts_in_eval_mode(model: nn.Module) -> list[str]:
    """Return the names of the outermost modules in eval mode, of a model in train mode."""
    found: list[str] = []
    for name, module in model.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in found)
        if name and not module.training and not inside:
            found.append(name)
    return found
