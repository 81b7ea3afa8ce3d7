"""A window of a run once more, watched, and nothing of the run changed by it.

The step's own forward and backward passes run; the optimizers do not step.
"""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from typing import Any

import torch
from torch import nn

from ampctl import rng
from ampctl.amp import gradients
from ampctl.amp.modules import set_module_dtypes
from ampctl.amp.scaler import LossScaler
from ampctl.data.move import tensors
from ampctl.doctor.watch import Event, Watch
from ampctl.engine.losses import forward_backward
from ampctl.engine.state import TrainState


@dataclass(frozen=True)
class Replay:
    """One more forward and backward pass of a window, and what was seen of it.

    ``first`` is where the loss, or else a gradient, stopped being finite, ``then`` where its
    infinity became NaN; ``hidden`` are infinities that reach neither. ``drew``: random numbers were
    drawn in it.
    """

    loss: float
    bad_gradients: tuple[str, ...]
    first: Event | None
    then: Event | None
    hidden: tuple[Event, ...]
    drew: bool = False

    @property
    def is_finite(self) -> bool:
        """Whether the loss and all gradients are."""
        return not self.bad_gradients and math.isfinite(self.loss)


def replay(state: TrainState, window: Sequence[Any]) -> Replay:
    """Run a window's passes under a watch; leave their gradients, and nothing else.

    The same random numbers are drawn each time. Raises what the user's code raises.
    """
    gradients.drop(_all_parameters(state))
    watch = Watch(state.bare)
    state.buffers.snapshot()
    # The module itself: what is compiled runs no operation that could be watched.
    plain = replace(state, model=state.bare)
    try:
        with (
            rng.preserved(state.device),
            # On a GPU autograd would work in a thread of its own, which numbers its nodes anew: an
            # operation could be taken for another one's (see ``Places``).
            torch.autograd.set_multithreading_enabled(False),
            _batch_kept(window),
            watch.trace,
        ):
            before = _generators(state)
            loss = forward_backward(plain, window)
            drew = _generators(state) != before
    finally:
        state.buffers.restore(torch.ones_like(state.scaler.current_scale))
    bad = {
        name: watch.origin(gradients.values(parameter.grad))
        for name, parameter in state.bare.named_parameters()
        if parameter.grad is not None
        and not bool(torch.isfinite(gradients.values(parameter.grad)).all())
    }
    reached = watch.losses or [event for event in bad.values() if event is not None]
    first = min(reached, key=lambda event: event.index, default=None)
    then = watch.then.get(first) if first is not None else None
    return Replay(float(loss), tuple(bad), first, then, _hidden(watch, reached), drew)


def _generators(state: TrainState) -> list[Any]:
    """Return where every generator stands, to be compared."""
    held = rng.get_state(state.device)
    positions = [held["python"], held["numpy"]["position"], held["numpy"]["has_gauss"]]
    return [*positions, *(value.tolist() for value in tensors(held))]


@contextmanager
def _batch_kept(window: Sequence[Any]) -> Iterator[None]:
    """Put back what a task or a model writes into a batch, so that each replay starts from it."""
    kept = [(tensor, tensor.detach().clone()) for tensor in tensors(window)]
    for tensor, _ in kept:
        if tensor.is_leaf:
            tensor.requires_grad_(False)
    try:
        yield
    finally:
        for tensor, values in kept:
            tensor.data.copy_(values)


def tried(state: TrainState, window: Sequence[Any]) -> Replay | RuntimeError:
    """Replay with a change that the run does not have; return the error if that does not run.

    It may need more memory than there is, or the model may be written for one dtype.
    """
    try:
        return replay(state, window)
    except RuntimeError as error:
        return error.with_traceback(None)  # its frames would keep the pass's tensors alive


def _hidden(watch: Watch, reached: Sequence[Event]) -> tuple[Event, ...]:
    """List the infinities of the forward pass that a finite loss does not show.

    One of -inf alone that goes nowhere is a mask.
    """
    if watch.losses:
        return ()
    found = {
        (event.place, event.operation): event
        for event in watch.events
        if event.kind == "operation" and event.node is None and event not in reached
        if event.holds.plus or event.holds.nan
    }
    return tuple(found.values())


def in_dtype(state: TrainState, name: str) -> TrainState:
    """Return the same run in another dtype; float16 alone has a loss scale."""
    precision = replace(state.precision, name=name)
    return replace(without_scale(state), precision=precision)


def without_scale(state: TrainState) -> TrainState:
    """Return the same run with a loss scale of 1."""
    scaler = LossScaler(state.amp, enabled=False, device=state.device)
    return replace(state, scaler=scaler)


def at_scale(state: TrainState, scale: float) -> TrainState:
    """Return the same run at another loss scale."""
    amp = replace(state.amp, init_scale=scale)
    return replace(state, scaler=LossScaler(amp, enabled=True, device=state.device))


def half_modules(state: TrainState) -> list[str]:
    """Return the names of the modules that ``amp.modules`` runs in half precision."""
    return [name for name, dtype in state.module_dtypes.items() if dtype != "float32"]


def in_float32(state: TrainState, window: Sequence[Any]) -> Replay | RuntimeError:
    """Replay in float32 throughout, what ``amp.modules`` has in half precision too."""
    with ExitStack() as around:
        for name in half_modules(state):
            around.enter_context(module_in_float32(state, name))
        return tried(in_dtype(state, "float32"), window)


@contextmanager
def module_in_float32(state: TrainState, name: str) -> Iterator[None]:
    """Run one module in float32 while the context is open, as ``amp.modules`` would."""
    module: Any = state.bare.get_submodule(name)
    if hasattr(module, "_ampctl_dtype"):
        module._ampctl_dtype = torch.float32  # over its class's
        try:
            yield
        finally:
            del module._ampctl_dtype
        return
    kind = module.__class__
    set_module_dtypes(state.bare, {name: "float32"}, device_type=state.device.type)
    try:
        yield
    finally:
        module.__class__ = kind


@contextmanager
def unchanged(state: TrainState) -> Iterator[None]:
    """Put back weights and modes, and leave no gradient, whatever happens inside.

    The copies of the weights are on the host, where a saved checkpoint has its room too. Gradients
    are not kept: they would need room beside those of the replay, and the next step drops them.
    """
    parameters = _all_parameters(state)
    weights = [p.detach().to("cpu", copy=True) for p in parameters]
    modes = [(module, module.training) for module in state.bare.modules()]
    try:
        yield
    finally:
        with torch.no_grad():
            for parameter, weight in zip(parameters, weights, strict=True):
                if not torch.equal(parameter.detach().cpu(), weight):
                    parameter.copy_(weight)
        gradients.drop(parameters)
        for module, training in modes:
            module.training = training


def _all_parameters(state: TrainState) -> list[nn.Parameter]:
    both = [*state.bare.parameters(), *state.parameters]
    return list({id(parameter): parameter for parameter in both}.values())
