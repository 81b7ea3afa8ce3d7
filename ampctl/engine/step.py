"""One step in mixed precision: the heart of ampctl, the same for every dtype and device.

It reads like the AMP page of the PyTorch documentation; what is added is that every dtype has the
finite guard, that a skipped step leaves no trace, and that the host never waits for the step that
it has just queued. Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

import copy
import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn

from ampctl.amp import gradients
from ampctl.amp.activations import Peaks
from ampctl.distributed.failure import comes_of_others
from ampctl.engine.losses import backward_passes, forward_backward
from ampctl.engine.passes import no_gradient
from ampctl.engine.pending import Pending
from ampctl.engine.state import StepReport, TrainState
from ampctl.engine.updater import Updater, key
from ampctl.errors import UsageError
from ampctl.recipe.schema import block_key


def train_step(
    state: TrainState, window: Sequence[Any], *, samples: int | None = None, measure: bool = False
) -> StepReport | None:
    """Attempt one step, of every optimizer that has its turn, on a window of micro-batches.

    Args:
        state: the run; its weights, buffers, scale and counters move on.
        window: the step's micro-batches on the host; one, unless gradients are accumulated. Each
            counts by its items (samples, or tokens), so a short last one weighs what it holds.
        samples: those of the step over all ranks; known to the loader, else they are counted.
        measure: compute what is logged of the gradient: its norm (even if nothing is clipped),
            and in float16 how it lies in the range of that format.

    Returns:
        What became of the step *before* this one, which the host can read by now without waiting;
        None if there was none. :func:`settle` tells the fate of the last one.

    Raises:
        UsageError: no parameter of an optimizer received a gradient, or the task does not give its
            losses as it should.
    """
    gradients.drop(state.parameters)
    if state.shares_buffers:
        state.buffers.follow_first(state.ranks)
    state.boundary.begin()
    state.buffers.snapshot()
    state.boundary.end()
    state.untouched.begin()
    before: StepReport | None = None
    rates: dict[str, float] = {}
    figures: dict[str, Tensor] = {}
    found: dict[str, Tensor] = {}  # found_inf of each optimizer that has had its turn
    with Peaks(active=measure and state.watches_activations) as peaks:
        for updaters, loss in backward_passes(state, window, samples):
            if not found:
                # Schedules and counters must stand before the next update.
                state.boundary.begin()
                before = settle(state)
                state.boundary.end()
            if measure:
                differs = state.ranks.mean_(loss, alike=state.scaler.current_scale)
                if differs is not None:
                    figures["scale_differs"] = differs
            figures[key("loss", updaters[0].name if len(updaters) == 1 else "")] = loss
            for updater in updaters:
                found[updater.name] = _unscale_and_clip(state, updater, figures, measure=measure)
            state.boundary.begin()  # whoever knows the place in the data ends it
            for updater in updaters:
                updater.learning_rate.before_update()
                rates[updater.name] = updater.lr
            if state.rewinds:  # all or nothing
                found = dict.fromkeys(found, _any(found))
            for updater in updaters:
                found_inf = found[updater.name]
                if state.rewinds:
                    state.rewinds[updater.name].mark()
                try:
                    if updater.closure:
                        _step_with_closure(state, updater, found_inf, window, loss)
                    else:
                        state.scaler.step(updater.optimizer, found_inf)
                except (RuntimeError, NotImplementedError) as error:
                    if told := _unsteppable(error, state, updater):
                        raise told from error
                    raise
            if not state.rewinds:
                _leave_no_trace(state, updaters, found)

    state.boundary.begin()
    state.progress.step += 1
    moved = state.untouched.end()
    if not found:  # no item, hence no gradient: it is as if the window had not been
        before = settle(state)
        state.buffers.restore(torch.ones_like(state.scaler.current_scale))
        state.buffers.is_kept = False
        figures = {"scale": state.scaler.current_scale}
        figures |= {"moved": moved} if moved is not None else {}
        state.pending = Pending(state.progress.step, {}, figures, ())
        return before
    overflow = _any(found)
    if state.rewinds:
        found = dict.fromkeys(found, overflow)
        for name in found:
            state.rewinds[name].restore(overflow)
        _leave_no_trace(state, [each for each in state.updaters if each.name in found], found)
    elif state.takes_turns:
        state.buffers.restore(overflow)  # from what the task ran after its last turn
    state.scaler.update(overflow)
    state.buffers.is_kept = False
    figures |= {key("found_inf", name): found_inf for name, found_inf in found.items()}
    figures |= {"scale": state.scaler.current_scale, **peaks.figures()}
    if moved is not None:
        figures["moved"] = moved
    state.pending = Pending(state.progress.step, rates, figures, peaks.modules)
    return before


def settle(state: TrainState) -> StepReport | None:
    """Learn what became of the last step, and let schedules and counters follow it.

    ``found_inf`` alone tells: a skipped step moves the skip counters and nothing else.
    """
    pending, state.pending = state.pending, None
    if pending is None:
        return None
    figures, progress = pending.read(), state.progress
    has_items = bool(pending.rates)
    of_each = {
        name: _own_figures(figures, name, rate) for name, rate in pending.rates.items() if name
    }
    if of_each:
        figures |= _together(of_each, figures)
    skipped = bool(figures.get("found_inf"))  # a step without items has none
    progress.skipped += skipped
    progress.updates += has_items and not skipped
    if has_items:
        progress.consecutive_skips = progress.consecutive_skips + 1 if skipped else 0
    for updater in state.updaters:
        name = updater.name
        if name not in pending.rates:
            continue  # it had no turn
        if figures[key("found_inf", name)]:
            if name:
                progress.optimizer_skips[name] += 1
                progress.optimizer_skips_in_a_row[name] += 1
            continue
        if name:
            progress.optimizer_updates[name] += 1
            progress.optimizer_skips_in_a_row[name] = 0
        updater.learning_rate.updated()
    rows = [progress.optimizer_skips_in_a_row[name] for name in of_each]
    scale_before, state.scale_on_host = state.scale_on_host, figures["scale"]
    return StepReport(
        step=pending.step,
        loss=figures.get("loss"),
        lr=next(iter(pending.rates.values()), state.updaters[0].lr),
        grad_norm=figures.get("grad_norm"),
        underflow=figures.get("underflow"),
        largest=figures.get("largest"),
        activation=figures.get("activation"),
        activation_module=_name(state, pending.modules, figures.get("activation_at")),
        skipped=skipped,
        scale_before=scale_before,
        scale_after=figures["scale"],
        scale_differs=bool(figures.get("scale_differs")),
        consecutive_skips=max([progress.consecutive_skips, *rows]),
        optimizers=of_each,
        moved=state.untouched.name(figures.get("moved", 0.0)),
    )


def _name(state: TrainState, modules: Sequence[nn.Module], at: float | None) -> str | None:
    """Return the name of the module with the largest output."""
    if at is None:
        return None
    module = modules[int(at)]
    return next((name for name, each in state.bare.named_modules() if each is module), None)


def _own_figures(figures: Mapping[str, float], name: str, lr: float) -> dict[str, float]:
    """Pick out the figures of one of several optimizers."""
    wanted = ("loss", "grad_norm", "underflow", "largest", "found_inf")
    own = {what: figures[key(what, name)] for what in wanted if key(what, name) in figures}
    return {"skipped": bool(own.pop("found_inf")), "lr": lr, **own}


def _together(
    of_each: Mapping[str, Mapping[str, float]], figures: Mapping[str, float]
) -> dict[str, float]:
    """Return the figures of the step as a whole, from those of its optimizers."""
    every = list(of_each.values())
    whole = {
        "found_inf": any(own["skipped"] for own in every),
        "loss": figures.get("loss", sum(own.get("loss", 0.0) for own in every)),
    }
    if all("grad_norm" in own for own in every):
        whole["grad_norm"] = math.hypot(*(own["grad_norm"] for own in every))
    if all("largest" in own for own in every):
        whole["largest"] = max(own["largest"] for own in every)
        whole["underflow"] = max(own["underflow"] for own in every)
    return whole


def _any(found: Mapping[str, Tensor]) -> Tensor:
    """Return whether one of several verdicts is an overflow: 1, or else 0."""
    first, *more = found.values()
    return torch.stack([first, *more]).amax() if more else first


def _leave_no_trace(
    state: TrainState, updaters: Sequence[Updater], found: Mapping[str, Tensor]
) -> None:
    """Restore buffers where a step was skipped; update the average where it was made."""
    state.buffers.restore(_any({updater.name: found[updater.name] for updater in updaters}))
    if state.takes_turns:
        state.buffers.snapshot()  # before the forward pass of the next turn
    if state.ema is None:
        return
    for updater in updaters:
        state.ema.update(found[updater.name], updater.parameters if updater.name else None)


def _unscale_and_clip(
    state: TrainState, updater: Updater, figures: dict[str, Tensor], *, measure: bool
) -> Tensor:
    """Unscale, then measure, then clip: never in another order. Return ``found_inf``."""
    groups, ranks = gradients.gather(updater.parameters, updater.take_sparse), state.ranks
    if not groups and all(parameter.grad is None for parameter in updater.parameters):
        raise no_gradient(state, updater)
    name = updater.name
    if measure and state.scaler.enabled:
        lost, largest = gradients.float16_range(groups) if groups else state.zeros(2)
        ranks.share_and_largest_(lost, sum(g.numel() for group in groups for g in group), largest)
        figures |= {key("underflow", name): lost, key("largest", name): largest}
    found_inf = state.scaler.unscale_(groups)
    if measure or state.amp.clip_norm is not None:
        norm = gradients.total_norm(groups) if groups else state.zeros(1)[0]
        ranks.norm_(norm)
        figures[key("grad_norm", name)] = norm.float()
    if state.amp.clip_norm is not None:
        state.scaler.check_norm(norm, found_inf)
        gradients.clip_norm_(groups, norm, state.amp.clip_norm)
    if state.amp.clip_value is not None:
        gradients.clip_value_(groups, state.amp.clip_value)
    ranks.any_(found_inf)
    return found_inf


def _unsteppable(error: Exception, state: TrainState, updater: Updater) -> UsageError | None:
    """Return the error that an optimizer cannot step sharded parameters, if it is that."""
    if not state.ranks.shards or comes_of_others(error):
        return None
    return UsageError(
        f"{block_key('optimizer', updater.name)}: {type(updater.optimizer).__name__} cannot step "
        f"parameters that fsdp shards: {str(error).splitlines()[0]}. Use distributed.strategy=ddp, "
        "or an optimizer of torch.optim that updates element by element (AdamW, SGD, ...)"
    )


def _step_with_closure(
    state: TrainState, updater: Updater, found_inf: Tensor, window: Sequence[Any], loss: Tensor
) -> None:
    """Step an optimizer that evaluates the loss itself (LBFGS), never under a loss scale.

    If any of its evaluations is not finite, ``found_inf`` is set, and weights and optimizer go back
    to before the step.
    """
    weights = [parameter.detach().clone() for parameter in updater.parameters]
    saved = copy.deepcopy(updater.optimizer.state_dict())
    fresh = True

    def closure() -> Tensor:
        nonlocal fresh
        if fresh:  # the gradients of the first evaluation are already there
            fresh = False
            return loss
        gradients.drop(updater.parameters)
        again = forward_backward(state, window)
        found_inf.add_(_unscale_and_clip(state, updater, {}, measure=False)).clamp_(max=1.0)
        return again

    if not found_inf.item():  # sync: the closure reads the loss on the host anyway
        updater.optimizer.step(closure)  # type: ignore[arg-type]
        if found_inf.item():  # sync: as above
            updater.optimizer.load_state_dict(saved)
            with torch.no_grad():
                for parameter, weight in zip(updater.parameters, weights, strict=True):
                    parameter.copy_(weight)
