"""One optimizer step in mixed precision: the heart of ampctl, the same for every dtype and device.

It reads like the AMP page of the PyTorch documentation; what is added is that every dtype has the
finite guard, that a skipped step leaves no trace, and that the host never waits for the step that
it has just queued. Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html
"""

from __future__ import annotations

import copy
from collections.abc import Sequence
from typing import Any

import torch
from torch import Tensor

from ampctl.amp import gradients
from ampctl.data.move import to_device
from ampctl.errors import UsageError
from ampctl.state import Pending, StepReport, TrainState


def train_step(
    state: TrainState, window: Sequence[Any], *, measure: bool = False
) -> StepReport | None:
    """Attempt one optimizer step on a window of micro-batches.

    Args:
        state: the run; its weights, buffers, scale and counters move on.
        window: the step's micro-batches on the host; one, unless gradients are accumulated. Each
            counts by its items (samples, or tokens), so a short last one weighs what it holds.
        measure: compute what is logged of the gradient: its norm (even if nothing is clipped),
            and in float16 how it lies in the range of that format.

    Returns:
        What became of the step *before* this one, which the host can read by now without waiting;
        None if there was none. :func:`settle` tells the fate of the last one.

    Raises:
        UsageError: no parameter received a gradient.
    """
    gradients.drop(state.parameters)
    state.buffers.snapshot()
    loss = forward_backward(state, window)

    before = settle(state)  # its schedule and counters must stand before the next update
    state.learning_rate.before_update()

    figures = _unscale_and_clip(state, measure=measure)
    if state.closure:
        _step_with_closure(state, window, loss)
    else:
        state.scaler.step(state.optimizer)
    found_inf = state.scaler.found_inf
    state.scaler.update()
    state.buffers.restore(found_inf)
    if state.ema is not None:
        state.ema.update(found_inf)

    state.progress.step += 1
    group = state.optimizer.param_groups[state.largest_group]
    lr = float(group["lr"])  # sync: where somebody made it a tensor
    figures |= {"found_inf": found_inf, "loss": loss, "scale": state.scaler.current_scale}
    state.pending = Pending(state.progress.step, lr, figures)
    return before


def settle(state: TrainState) -> StepReport | None:
    """Learn what became of the last step, and let schedule and counters follow it.

    ``found_inf`` alone tells: a skipped step moves the skip counters and nothing else.
    """
    pending, state.pending = state.pending, None
    if pending is None:
        return None
    figures = pending.read()
    progress = state.progress
    skipped = bool(figures["found_inf"])
    if skipped:
        progress.skipped += 1
        progress.consecutive_skips += 1
    else:
        progress.updates += 1
        progress.consecutive_skips = 0
        state.learning_rate.updated()
    scale_before, state.scale_on_host = state.scale_on_host, figures["scale"]
    return StepReport(
        step=pending.step,
        loss=figures["loss"],
        lr=pending.lr,
        grad_norm=figures.get("grad_norm"),
        underflow=figures.get("underflow"),
        largest=figures.get("largest"),
        skipped=skipped,
        scale_before=scale_before,
        scale_after=figures["scale"],
        consecutive_skips=progress.consecutive_skips,
    )


def forward_backward(state: TrainState, window: Sequence[Any]) -> Tensor:
    """Accumulate the scaled gradient of the window's mean loss; return that loss, in float32."""
    counts = [float(state.task.num_items(batch)) for batch in window] if len(window) > 1 else [1.0]
    held = sum(counts)
    total = held or 1.0
    mean: Tensor | None = None
    for batch, count in zip(window, counts, strict=True):
        if held > 0 and count == 0:
            continue  # it has no mean (all labels ignored, say), and weighs nothing
        batch = to_device(batch, state.device, channels_last=state.channels_last)
        with state.precision.autocast():
            loss = _scalar_loss(state, state.task.loss(state.model, batch))
            if len(window) > 1:
                loss = loss * (count / total)
        state.scaler.scale(loss).backward()  # type: ignore[no-untyped-call]
        part = loss.detach().float()
        mean = part if mean is None else mean + part
    assert mean is not None, "a window holds at least one micro-batch"
    return mean


def _scalar_loss(state: TrainState, output: Tensor | tuple[Tensor, Any]) -> Tensor:
    loss = output[0] if isinstance(output, tuple) else output
    if not isinstance(loss, Tensor) or loss.ndim:
        found = f"shape {list(loss.shape)}" if isinstance(loss, Tensor) else type(loss).__name__
        raise UsageError(
            f"task: {state.task.name}.loss must return a scalar tensor, the mean over "
            f"the batch; found {found}"
        )
    if not loss.requires_grad:
        raise _no_gradient(state)
    return loss


def _no_gradient(state: TrainState) -> UsageError:
    names = [name for name, p in state.bare.named_parameters() if p.requires_grad]
    return UsageError(
        f"optimizer: 0 of {len(names)} parameters received a gradient "
        f"({', '.join(names[:3])}{', ...' if len(names) > 3 else ''}). The loss does not depend "
        "on them: is it computed from a detached tensor, or are the layers that it uses frozen?"
    )


def _unscale_and_clip(state: TrainState, *, measure: bool) -> dict[str, Tensor]:
    """Unscale, then measure, then clip: never in another order. Return what was measured."""
    figures: dict[str, Tensor] = {}
    groups = gradients.gather(state.parameters)
    if not groups:
        raise _no_gradient(state)
    if measure and state.scaler.enabled:
        figures["underflow"], figures["largest"] = gradients.float16_range(groups)
    state.scaler.unscale_(groups)
    if measure or state.amp.clip_norm is not None:
        norm = gradients.total_norm(groups)
        figures["grad_norm"] = norm.float()
    if state.amp.clip_norm is not None:
        state.scaler.check_norm(norm)
        gradients.clip_norm_(groups, norm, state.amp.clip_norm)
    if state.amp.clip_value is not None:
        gradients.clip_value_(groups, state.amp.clip_value)
    return figures


def _step_with_closure(state: TrainState, window: Sequence[Any], loss: Tensor) -> None:
    """Step an optimizer that evaluates the loss itself (LBFGS), never under a loss scale.

    If any of its evaluations is not finite, weights and optimizer go back to before the step.
    """
    found_inf = state.scaler.found_inf.clone()
    weights = [parameter.detach().clone() for parameter in state.parameters]
    saved = copy.deepcopy(state.optimizer.state_dict())
    fresh = True

    def closure() -> Tensor:
        nonlocal fresh
        if fresh:  # the gradients of the first evaluation are already there
            fresh = False
            return loss
        gradients.drop(state.parameters)
        again = forward_backward(state, window)
        _unscale_and_clip(state, measure=False)
        found_inf.add_(state.scaler.found_inf).clamp_(max=1.0)
        return again

    if not found_inf.item():  # sync: the closure reads the loss on the host anyway
        state.optimizer.step(closure)  # type: ignore[arg-type]
        if found_inf.item():
            state.optimizer.load_state_dict(saved)
            with torch.no_grad():
                for parameter, weight in zip(state.parameters, weights, strict=True):
                    parameter.copy_(weight)
    state.scaler.found_inf.copy_(found_inf)
