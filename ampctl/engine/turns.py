"""The passes of a task with ``losses``: optimizers that take turns in one step.

The pass of one runs after the step of the one before.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import torch
from torch import Tensor

from ampctl import torch_private
from ampctl.data.loader import unwrapped
from ampctl.data.move import to_device
from ampctl.engine.passes import (
    Turn,
    items_known,
    items_of,
    kind,
    no_gradient,
    scalar,
    weighed,
    wrong,
)
from ampctl.engine.state import TrainState
from ampctl.engine.updater import Updater

_OVER: Any = object()  # what a generator that has no more turns gives


@dataclass
class _Run:
    """A task's generator for one micro-batch; ``is_left_out``: it has ended without a turn."""

    losses: Iterator[Any]
    count: float
    is_left_out: bool = False


def turns(state: TrainState, window: Sequence[Any], samples: int | None) -> Iterator[Turn]:
    """Advance the task's generators, one for each micro-batch, together from turn to turn."""
    ranks, counts, known = state.ranks, items_of(state, window), items_known(state, samples)
    held = ranks.total(sum(counts)) if known is None else known
    if not held:
        return
    runs = []
    for batch, count in zip(unwrapped(window), counts, strict=True):
        if count or ranks.size > 1:
            runs.append(_Run(_generator(state, batch), count))
    had: list[str] = []
    while True:
        updater, mean, given = _turn(state, runs, had, held)
        if ranks.size > 1:
            updater, given = _agreed(state, runs, updater, given)
        if updater is None:
            return
        had.append(updater.name)
        if ranks.size > 1 and given:
            _average(state, updater)
        mean = torch.zeros((), device=state.device) if mean is None else mean
        found = weighed(mean, updater.parameters, held, given)
        if found is not None:
            yield [updater], found
        # A task that yields inside an autocast of its own keeps the casts of weights alive, which
        # the optimizer has moved since.
        torch.clear_autocast_cache()


def _generator(state: TrainState, batch: Any) -> Iterator[Any]:
    batch = to_device(batch, state.device, channels_last=state.channels_last)
    losses = state.task.losses(state.model, batch, **state.extras("losses"))
    if not isinstance(losses, Iterator):
        raise wrong(state, f"must be a generator; it returned a {type(losses).__name__}")
    return losses


def _average(state: TrainState, updater: Updater) -> None:
    """Average the gradients of a turn over the ranks.

    DDP cannot: it counts on one pass through the whole model, and a turn calls what it likes.
    """
    apart = torch_private.left_out_by_ddp(state.bare)
    left_out = {id(p) for name, p in state.bare.named_parameters() if name in apart}
    parameters = [p for p in updater.parameters if id(p) not in left_out]
    if any(p.grad is not None and p.grad.is_sparse for p in parameters):
        raise wrong(state, "leaves a sparse gradient, which several ranks cannot average")
    state.ranks.mean_gradients_(parameters)


def _agreed(
    state: TrainState, runs: Sequence[_Run], updater: Updater | None, given: float
) -> tuple[Updater | None, float]:
    """Return whose turn it is on every rank (None: all are at the end), and the items of all.

    A rank whose batches are left out follows the others. Raises UsageError on every rank if it is
    another optimizer's turn, or the end, on one.
    """
    names = [each.name for each in state.updaters]
    own = names.index(updater.name) if updater is not None else len(names)
    follows = all(run.is_left_out for run in runs)
    every = state.ranks.every(float("nan") if follows else own, given)
    at = sorted({int(place) for place, _ in every if place == place})
    if len(at) > 1:
        told = " and ".join(
            "at their end" if place == len(names) else f"at {names[place]!r}"
            for place in (at[0], at[-1])
        )
        raise wrong(state, f"must have the same turns on each rank: they are {told}")
    is_over = not at or at[0] == len(names)
    return None if is_over else state.updaters[at[0]], sum(count for _, count in every)


def _turn(
    state: TrainState, runs: Sequence[_Run], had: Sequence[str], held: float
) -> tuple[Updater | None, Tensor | None, float]:
    """Take each generator to its next loss, and that loss's backward pass.

    Returns whose turn it is (None at their end), the mean loss and the items that it is of.
    """
    updaters = {updater.name: updater for updater in state.updaters}
    mean: Tensor | None = None
    items = 0.0
    names: list[str | None] = []
    for run in runs:
        if run.is_left_out:
            continue
        with state.untouched.around(), state.precision.autocast():
            given: Any = next(run.losses, _OVER)
        if given is _OVER and not had:
            run.is_left_out = True
            continue
        names.append(_name(state, given, had) if given is not _OVER else None)
        if names[0] != names[-1]:
            told = " and ".join(str(name) for name in (names[0], names[-1]))
            raise wrong(state, f"must have the same turns for each micro-batch: {told}")
        if given is _OVER:
            continue
        if given[1] is None:
            state.buffers.restore(torch.ones_like(state.scaler.current_scale))
            continue
        updater = updaters[given[0]]
        loss = scalar(given[1], state, "losses")
        if not run.count:
            continue  # its own loss may be 0 / 0
        # Of this optimizer alone: what a generator's loss leaves in the critic is not the
        # critic's gradient. A task may have frozen a part, for a while or from now on.
        trained = [each for each in updater.parameters if each.requires_grad]
        share = run.count * state.ranks.size / held
        loss = loss * share if share != 1.0 else loss
        if not loss.requires_grad or not trained:
            raise no_gradient(state, updater)
        with state.untouched.around_backward():
            torch.autograd.backward(state.scaler.scale(loss), inputs=trained)
        part = loss.detach().float()
        mean = part if mean is None else mean + part
        items += run.count
    name = names[0] if names else None
    return None if name is None else updaters[name], mean, items


def _name(state: TrainState, given: Any, had: Sequence[str]) -> str:
    """Return the optimizer whose turn it is, if it may have one."""
    names = [updater.name for updater in state.updaters]
    if not isinstance(given, tuple) or len(given) != 2:
        raise wrong(state, f"must yield (name of an optimizer, loss); found {kind(given)}")
    name = given[0]
    if name not in names:
        raise wrong(
            state, f"yielded {name!r}; the optimizers of this recipe are {', '.join(names)}"
        )
    if name in had:
        raise wrong(
            state,
            f"gave {name!r} a second turn in one step; to train it more often than another one, "
            "take an argument `step` and let the other wait (`if step % 5 == 0`)",
        )
    return str(name)
