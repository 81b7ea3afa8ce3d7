"""The forward and backward passes of one step: losses, weighted and scaled, into gradients.

Stepping is ``step``'s. A task has one loss for all of its parameters, or lets several optimizers
take turns: then the pass of one runs after the step of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ampctl import torch_private
from ampctl.data.loader import Borrowed, unwrapped
from ampctl.data.move import tensors, to_device
from ampctl.errors import UsageError, first_of
from ampctl.recipe.schema import block_key
from ampctl.state import TrainState
from ampctl.updater import Updater

Turn = tuple[Sequence[Updater], Tensor]
"""The optimizers whose gradients are complete, and the mean loss of the window, in float32."""

_OVER: Any = object()  # what a generator that has no more turns gives


def backward_passes(
    state: TrainState, window: Sequence[Any], samples: int | None = None
) -> Iterator[Turn]:
    """Accumulate the scaled gradients of a window, and yield when optimizers can step by them.

    On several ranks each has its part of the window; ``samples`` are those of all of them, and the
    gradients are averaged so that each sample (or token) weighs the same.

    Once for a task with ``loss``: every optimizer steps by it. For a task with ``losses``, once for
    each of its turns; what the task computes after a turn sees the weights as they are then.

    Raises UsageError if the losses are not what they should be.
    """
    shares = _shares(state, window, samples)
    if state.takes_turns:
        yield from _turns(state, shares)
        return
    extras = state.extras("loss")
    mean: Tensor | None = None
    for place, (batch, share) in enumerate(shares):
        with _reduction(state, now=place == len(shares) - 1):
            if share == 0.0 and state.ranks.size > 1:
                loss = _nothing(state, batch, extras)
            else:
                loss = _loss(state, batch, extras)
            part = _backward(state, loss, share, state.updaters[0])
            del loss  # with its graph
        mean = part if mean is None else mean + part
    assert mean is not None, "a window holds at least one micro-batch"
    _require_all_used(state)
    yield state.updaters, mean


def forward_backward(state: TrainState, window: Sequence[Any]) -> Tensor:
    """Run all passes of a window without a step between; return the sum of the losses."""
    total: Tensor | None = None
    for _, loss in backward_passes(state, window):
        total = loss if total is None else total + loss
    assert total is not None, "there is at least one turn"
    return total


def no_gradient(state: TrainState, updater: Updater) -> UsageError:
    """Say that no parameter of an optimizer received a gradient."""
    own = set(map(id, updater.parameters))
    names = [name for name, p in state.bare.named_parameters() if id(p) in own]
    return UsageError(
        f"{block_key('optimizer', updater.name)}: 0 of {len(names)} parameters "
        f"received a gradient ({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}). The "
        "loss does not depend on them: is it computed from a detached tensor, or are the layers "
        "that it uses frozen?"
    )


def unused(names: Sequence[str], state: TrainState, step: int) -> UsageError:
    """Say which parameters took no part in the loss of a step, where ranks wait for all of them."""
    return UsageError(
        f"distributed: {len(names) or 'some'} parameters take no part in the loss of step {step} "
        f"on rank {state.ranks.rank}: {first_of(names)}. Several ranks wait for the gradient of "
        "each parameter: freeze these (requires_grad=False), or set "
        "distributed.find_unused_parameters=true"
    )


def _require_all_used(state: TrainState) -> None:
    """Raise UsageError for parameters without a gradient, which the other ranks wait for.

    Before any other collective: under DDP other ranks would take it for that of the gradients.
    Sharded gradients of another parameter, used in its place on another rank, are in the sum.
    """
    if state.ranks.size == 1 or state.allows_unused:
        return
    if any(parameter.grad is None for parameter in state.parameters):
        trained = set(map(id, state.parameters))
        every = state.bare.named_parameters()
        names = [name for name, p in every if id(p) in trained and p.grad is None]
        raise unused(names, state, state.progress.step + 1)


def _reduction(state: TrainState, *, now: bool) -> AbstractContextManager[None]:
    """Let ranks average their gradients at the last micro-batch of a window only."""
    if now or not isinstance(state.model, DistributedDataParallel):
        return nullcontext()
    context: AbstractContextManager[None] = state.model.no_sync()
    return context


def _nothing(state: TrainState, batch: Any, extras: Mapping[str, Any]) -> Tensor:
    """Return a loss of 0 that depends on every parameter, whose gradients are 0.

    For a micro-batch that weighs nothing, whose own loss may be 0 / 0: the other ranks wait for its
    passes, and for a gradient of each parameter, all the same.
    """
    if not state.ranks.shards:
        _loss(state, batch, extras)
        return torch.stack([(each.float() * 0.0).sum() for each in state.parameters]).sum()
    # Sharded parameters are whole only while the model runs: go by way of what it gives.
    outputs: list[Any] = []
    model: Any = state.model
    with model.register_forward_hook(lambda module, inputs, output: outputs.append(output)):
        loss = _loss(state, batch, extras)
    given = [each for each in tensors(outputs) if each.requires_grad] or [loss]
    return torch.stack([(each.float() * 0.0).sum() for each in given]).sum()


def _shares(
    state: TrainState, window: Sequence[Any], samples: int | None
) -> list[tuple[Any, float]]:
    """Return the micro-batches of a window with the part of its items that each holds."""
    if state.ranks.size > 1:
        return _shares_of_rank(state, window, samples)
    if len(window) == 1:
        return [(window[0], 1.0)]
    counts = [float(state.task.num_items(batch)) for batch in window]  # still on the host
    held = sum(counts)
    if not held:
        return [(batch, 0.0) for batch in window]
    # One without items has no mean (all labels ignored, say), and weighs nothing.
    return [(b, count / held) for b, count in zip(window, counts, strict=True) if count]


def _shares_of_rank(
    state: TrainState, window: Sequence[Any], samples: int | None
) -> list[tuple[Any, float]]:
    """Return the same of one of several ranks, whose gradients DDP averages."""
    counts = [
        0.0 if isinstance(each, Borrowed) else float(state.task.num_items(each)) for each in window
    ]
    known = samples is not None and state.counts_samples
    held = float(samples or 0) if known else state.ranks.total(sum(counts))
    size, held = state.ranks.size, held or 1.0
    batches = unwrapped(window)
    return [(batch, count * size / held) for batch, count in zip(batches, counts, strict=True)]


def _turns(state: TrainState, shares: Sequence[tuple[Any, float]]) -> Iterator[Turn]:
    """Let the task's generators, one for each micro-batch, go on together from turn to turn."""
    extras = state.extras("losses")
    runs = []
    for batch, share in shares:
        batch = to_device(batch, state.device, channels_last=state.channels_last)
        losses = state.task.losses(state.model, batch, **extras)
        if not isinstance(losses, Iterator):
            raise _wrong(state, f"must be a generator; it returned a {type(losses).__name__}")
        runs.append((losses, share))
    had: list[str] = []
    while (turn := _turn(state, runs, had)) is not None:
        updater, mean = turn
        had.append(updater.name)
        if state.ranks.size > 1:
            _average(state, updater)
        yield [updater], mean
        # A task that yields inside an autocast of its own keeps the casts of weights alive, which
        # the optimizer has moved since.
        torch.clear_autocast_cache()
    if state.ranks.size > 1:
        _require_same_turn(state, None)
    if not had:
        raise _wrong(state, "yielded no loss")


def _average(state: TrainState, updater: Updater) -> None:
    """Average the gradients of a turn over the ranks.

    DDP cannot: it counts on one pass through the whole model, and a turn calls what it likes.
    """
    _require_same_turn(state, updater)
    apart = torch_private.left_out_by_ddp(state.bare)
    left_out = {id(p) for name, p in state.bare.named_parameters() if name in apart}
    parameters = [p for p in updater.parameters if id(p) not in left_out]
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise _wrong(state, "leaves a sparse gradient, which several ranks cannot average")
    state.ranks.mean_gradients_(parameters)


def _require_same_turn(state: TrainState, updater: Updater | None) -> None:
    """Raise UsageError on every rank if it is another optimizer's turn, or the end, on one."""
    names = [each.name for each in state.updaters]
    own = names.index(updater.name) if updater is not None else len(names)
    largest, negative = state.ranks.largest(own, -own)
    if largest != -negative:
        told = " and ".join(
            "at their end" if place == len(names) else f"at {names[place]!r}"
            for place in (int(-negative), int(largest))
        )
        raise _wrong(state, f"must have the same turns on each rank: they are {told}")


def _turn(
    state: TrainState, runs: Sequence[tuple[Iterator[Any], float]], had: Sequence[str]
) -> tuple[Updater, Tensor] | None:
    """Take each generator to its next loss, and that loss's backward pass; None at their end."""
    updaters = {updater.name: updater for updater in state.updaters}
    mean: Tensor | None = None
    names: list[str | None] = []
    for losses, share in runs:
        with state.untouched.around(), state.precision.autocast():
            given: Any = next(losses, _OVER)
        names.append(_name(state, given, had) if given is not _OVER else None)
        if names[0] != names[-1]:
            told = " and ".join(str(name) for name in (names[0], names[-1]))
            raise _wrong(state, f"must have the same turns for each micro-batch: {told}")
        if given is _OVER:
            continue
        updater = updaters[given[0]]
        loss = _scalar(given[1], state, "losses")
        # Of this optimizer alone: what a generator's loss leaves in the critic is not the
        # critic's gradient. A task may have frozen a part, for a while or from now on.
        trained = [each for each in updater.parameters if each.requires_grad]
        if share == 0.0 and state.ranks.size > 1:  # its own loss may be 0 / 0
            mean = torch.zeros_like(loss.detach(), dtype=torch.float32) if mean is None else mean
            continue
        part = _backward(state, loss, share, updater, inputs=trained)
        mean = part if mean is None else mean + part
    return None if mean is None else (updater, mean)


def _loss(state: TrainState, batch: Any, extras: Mapping[str, Any]) -> Tensor:
    """Run the forward pass; of what the task returns beside the loss nothing is kept alive."""
    batch = to_device(batch, state.device, channels_last=state.channels_last)
    with state.untouched.around(), state.precision.autocast():
        given = state.task.loss(state.model, batch, **extras)
    return _scalar(given[0] if isinstance(given, tuple) else given, state, "loss")


def _backward(
    state: TrainState,
    loss: Tensor,
    share: float,
    updater: Updater,
    inputs: Sequence[Tensor] | None = None,
) -> Tensor:
    """Add the scaled gradient of a micro-batch; return its part of the mean loss.

    ``inputs``: the parameters that get a gradient, if not all.
    """
    if share != 1.0:
        loss = loss * share
    if not loss.requires_grad or (inputs is not None and not inputs):
        raise no_gradient(state, updater)
    torch.autograd.backward(state.scaler.scale(loss), inputs=inputs)
    return loss.detach().float()


def _name(state: TrainState, given: Any, had: Sequence[str]) -> str:
    """Return the optimizer whose turn it is, if it may have one."""
    names = [updater.name for updater in state.updaters]
    if not isinstance(given, tuple) or len(given) != 2:
        raise _wrong(state, f"must yield (name of an optimizer, loss); found {_kind(given)}")
    name = given[0]
    if name not in names:
        raise _wrong(
            state, f"yielded {name!r}; the optimizers of this recipe are {', '.join(names)}"
        )
    if name in had:
        raise _wrong(
            state,
            f"gave {name!r} a second turn in one step; to train it more often than another one, "
            "take an argument `step` and let the other wait (`if step % 5 == 0`)",
        )
    return str(name)


def _scalar(loss: Any, state: TrainState, method: str) -> Tensor:
    if isinstance(loss, Tensor) and not loss.ndim:
        return loss
    what = "return" if method == "loss" else "yield"
    raise _wrong(
        state, f"must {what} a scalar tensor, the mean over the batch; found {_kind(loss)}", method
    )


def _kind(value: Any) -> str:
    is_tensor = isinstance(value, Tensor)
    return f"shape {list(value.shape)}" if is_tensor else f"{type(value).__name__}"


def _wrong(state: TrainState, what: str, method: str = "losses") -> UsageError:
    return UsageError(f"task: {state.task.name}.{method} {what}")
