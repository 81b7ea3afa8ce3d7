"""The passes of one micro-batch, and how the items of a window weigh in its mean.

Which micro-batches make a step, and in what order, is ``losses``'s and ``turns``'s.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampctl import rng
from ampctl.data.loader import Padding
from ampctl.data.move import to_device
from ampctl.engine.modes import in_eval_mode
from ampctl.engine.state import TrainState
from ampctl.engine.updater import Updater
from ampctl.errors import UsageError
from ampctl.recipe.schema import block_key
from ampctl.tasks import Transformers
from ampctl.tasks.task import count_items

Turn = tuple[Sequence[Updater], Tensor]
"""The optimizers whose gradients are complete, and the mean loss of the window, in float32."""


class NoGradientError(UsageError):
    """No parameter of an optimizer received a gradient."""


def items_of(state: TrainState, window: Sequence[Any]) -> list[float]:
    """Return the items of each micro-batch of this rank, which are still on the host."""
    if len(window) == 1 and state.ranks.size == 1 and state.counts_samples:
        return [1.0]  # whatever it holds, it is all of the step
    return [0.0 if isinstance(each, Padding) else items_in(state, each) for each in window]


def items_in(state: TrainState, batch: Any) -> float:
    """Return the items of a batch on the host; the model is asked once which labels it counts."""
    task = state.task
    if isinstance(task, Transformers) and not task.is_known:
        there = to_device(batch, state.device, channels_last=state.channels_last)
        with (
            in_eval_mode(state.bare),
            torch.no_grad(),
            rng.preserved(state.device),
            state.precision.autocast(),
        ):
            task.find_out(state.bare, there)
    return count_items(task, batch)


def items_known(state: TrainState, samples: int | None) -> float | None:
    """Return the items of a step over several ranks if they are its samples; else None."""
    several = state.ranks.size > 1 and state.counts_samples
    return float(samples) if several and samples is not None else None


def weighed(
    mean: Tensor, parameters: Iterable[nn.Parameter], held: float, given: float
) -> Tensor | None:
    """Return a mean over ``held`` items as one over those ``given`` a loss; None if none were.

    The gradients follow.
    """
    if not given:
        return None
    if given == held:
        return mean
    with torch.no_grad():
        for parameter in parameters:
            if parameter.grad is not None:
                parameter.grad.mul_(held / given)
    return mean * (held / given)


def forward(state: TrainState, batch: Any, extras: Mapping[str, Any]) -> Tensor | None:
    """Run the forward pass; of what the task returns beside the loss nothing is kept alive."""
    batch = to_device(batch, state.device, channels_last=state.channels_last)
    with state.untouched.around(), state.precision.autocast():
        given = state.task.loss(state.model, batch, **extras)
    loss = given[0] if isinstance(given, tuple) and given else given
    return None if loss is None else scalar(loss, state, "loss")


def no_gradient(state: TrainState, updater: Updater) -> NoGradientError:
    """Return the error that no parameter of an optimizer received a gradient."""
    own = set(map(id, updater.parameters))
    names = [name for name, p in state.bare.named_parameters() if id(p) in own]
    return NoGradientError(
        f"{block_key('optimizer', updater.name)}: 0 of {len(names)} parameters "
        f"received a gradient ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}). The "
        "loss does not depend on them: is it computed from a detached tensor, or are the layers "
        "that it uses frozen?"
    )


def scalar(loss: Any, state: TrainState, method: str) -> Tensor:
    """Return a loss that a method of the task gave; raise UsageError if it is no scalar tensor."""
    if isinstance(loss, Tensor) and not loss.ndim:
        return loss
    what = "return" if method == "loss" else "yield"
    raise wrong(
        state,
        f"must {what} a scalar tensor, the mean over the batch, or None; found {kind(loss)}",
        method,
    )


def kind(value: Any) -> str:
    """Return what a value is, in a few words."""
    is_tensor = isinstance(value, Tensor)
    return f"shape {list(value.shape)}" if is_tensor else f"{type(value).__name__}"


def wrong(state: TrainState, what: str, method: str = "losses") -> UsageError:
    """Return an error about what a method of the task does."""
    return UsageError(f"task: {state.task.name}.{method} {what}")
