"""The forward and backward passes of one step: losses, weighted and scaled, into gradients.

Stepping is ``step``'s; tasks with several losses, one for each optimizer, are ``turns``'s.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel

from ampctl.data.loader import unwrapped
from ampctl.data.move import tensors
from ampctl.engine.passes import Turn, forward, items_known, items_of, no_gradient, weighed, wrong
from ampctl.engine.state import TrainState
from ampctl.engine.turns import turns
from ampctl.errors import UsageError, first_of
from ampctl.tasks.task import may_give_none


def backward_passes(
    state: TrainState, window: Sequence[Any], samples: int | None = None
) -> Iterable[Turn]:
    """Accumulate the scaled gradients of a window; return the optimizers that can step by them.

    On several ranks each has its part of the window; ``samples`` are those of all of them, and the
    gradients are averaged so that each item (a sample, a token) weighs the same.

    For a task with ``loss`` there is one turn, with every optimizer in it, or none where no rank
    has an item or a loss for one. For a task with ``losses`` the passes of a turn run when it is
    asked for, and what the task computes after a turn sees the weights as they are then.

    Raises UsageError if the losses are not what they should be.
    """
    if state.takes_turns:
        return turns(state, window, samples)
    extras, ranks = state.extras("loss"), state.ranks
    counts, held = items_of(state, window), items_known(state, samples)
    # What a later micro-batch turns out to have no loss for is not in the sum that is made first.
    may_lack = may_give_none(state.task)
    several = len(window) > 1
    agrees = may_lack and ranks.size > 1 and (held is not None or several)
    later: Callable[[], float] | None = None
    mean: Tensor | None = None
    for place, batch in enumerate(unwrapped(window)):
        if ranks.size == 1 and not counts[place]:
            continue  # it has no mean (all labels ignored, say), and weighs nothing
        now = place == len(window) - 1
        with _reduction(state, now=now):
            watched = may_lack and (several or ranks.size > 1)
            with _outputs(state, wanted=watched or not counts[place]) as outputs:
                loss = forward(state, batch, extras)
            if loss is None:
                counts[place] = 0.0
                if outputs:  # its values may be why: none of them stays in the buffers
                    state.buffers.restore(torch.ones_like(state.scaler.current_scale))
            if held is None:
                held = ranks.total(sum(counts))
            if now and agrees:
                later = ranks.total_later(sum(counts))
            if not counts[place]:
                if ranks.size == 1:
                    continue
                loss = _nothing(state, loss, outputs)
            outputs.clear()
            assert loss is not None, "one rank has gone on, and several have a loss of 0"
            share = counts[place] * ranks.size / (held or 1.0)
            loss = loss * share if share != 1.0 else loss
            if not loss.requires_grad:
                raise no_gradient(state, state.updaters[0])
            with state.untouched.around_backward():
                torch.autograd.backward(state.scaler.scale(loss))
            part = loss.detach().float()
            del loss  # with its graph
        mean = part if mean is None else mean + part
    if mean is not None:
        given = sum(counts) if ranks.size == 1 else held if later is None else later()
        mean = weighed(mean, state.parameters, held or 0.0, given or 0.0)
    _require_all_used(state, begun=mean is not None)
    return [(state.updaters, mean)] if mean is not None else []


def forward_backward(state: TrainState, window: Sequence[Any]) -> Tensor:
    """Run all passes of a window without a step between; return the sum of the losses, if any."""
    total: Tensor | None = None
    for _, loss in backward_passes(state, window):
        total = loss if total is None else total + loss
    return torch.zeros((), device=state.device) if total is None else total


def unused(names: Sequence[str], state: TrainState, step: int) -> UsageError:
    """Describe which parameters took no part in the loss of a step; ranks wait for all of them."""
    return UsageError(
        f"distributed: {len(names) or 'some'} parameters take no part in the loss of step {step} "
        f"on rank {state.ranks.rank}: {first_of(names)}. Several ranks wait for the gradient of "
        "each parameter: freeze these (requires_grad=False), or set "
        "distributed.find_unused_parameters=true"
    )


def _require_all_used(state: TrainState, *, begun: bool) -> None:
    """Raise UsageError for parameters without a gradient, which the other ranks wait for.

    Before any other collective: under DDP other ranks would take it for that of the gradients.
    Sharded gradients of another parameter, used in its place on another rank, are in the sum.
    """
    if state.ranks.size == 1 or state.allows_unused or not begun:
        return
    if any(parameter.grad is None for parameter in state.parameters):
        trained = set(map(id, state.parameters))
        every = state.bare.named_parameters()
        names = [name for name, p in every if id(p) in trained and p.grad is None]
        raise unused(names, state, state.progress.step + 1)


def _reduction(state: TrainState, *, now: bool) -> AbstractContextManager[None]:
    """Average gradients over the ranks at the last micro-batch of a window only."""
    if now or not isinstance(state.model, DistributedDataParallel):
        return nullcontext()
    context: AbstractContextManager[None] = state.model.no_sync()
    return context


@contextmanager
def _outputs(state: TrainState, *, wanted: bool) -> Iterator[list[Any]]:
    """Keep what the model returns inside, where it matters whether it is called."""
    kept: list[Any] = []
    if not wanted:
        yield kept
        return
    with state.model.register_forward_hook(lambda module, inputs, output: kept.append(output)):
        yield kept


def _nothing(state: TrainState, loss: Tensor | None, outputs: Sequence[Any]) -> Tensor:
    """Return a loss of 0 that depends on every parameter, whose gradients are 0.

    For a micro-batch that weighs nothing, whose own loss may be 0 / 0 or none: the other ranks wait
    for its passes, and for a gradient of each parameter, all the same. ``outputs``: what the model
    has returned, if the task has called it.
    """
    if state.ranks.shards and not outputs:
        raise wrong(
            state,
            "gave no loss for a batch before it called the model. Under fsdp the other ranks wait "
            "for that call: call model first, or set distributed.strategy=ddp",
            "loss",
        )
    if outputs and (state.ranks.shards or state.allows_unused):
        # Sharded parameters are whole only while the model runs, and those that take no part are
        # told by what it gives: go by way of that.
        given = [each for each in tensors(outputs) if each.requires_grad]
        return _zero_of(given or ([loss] if loss is not None else []))
    if outputs or not isinstance(state.model, DistributedDataParallel):
        return _zero_of(state.parameters)
    # What no rank uses gets no gradient: by way of one, DDP sees that the others have no part.
    depends_on = state.parameters[:1] if state.allows_unused else state.parameters
    model, state.model.module = state.model.module, _Zero(state.bare, depends_on)
    try:
        return state.model()  # type: ignore[no-any-return]
    finally:
        state.model.module = model


class _Zero(nn.Module):
    """Stands in for a model that a task has not called, so that DDP does what a pass begins with.

    It has the model's parts, whose buffers DDP sends around.
    """

    def __init__(self, model: nn.Module, depends_on: Sequence[Tensor]) -> None:
        super().__init__()
        self._modules, self._buffers = model._modules, model._buffers
        self._depends_on = tuple(depends_on)

    def forward(self) -> Tensor:
        return _zero_of(self._depends_on)


def _zero_of(values: Sequence[Tensor]) -> Tensor:
    return torch.stack([(each.float() * 0.0).sum() for each in values]).sum()
