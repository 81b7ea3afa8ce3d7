"""The loss scale: its policy, the finite guard of every dtype, and the one truth of a skipped step.

The policy is that of ``torch.amp.GradScaler`` with a floor, a ceiling and hysteresis added; with
``min_scale=0``, ``hysteresis=1`` and no ``max_scale`` it is that scaler to the bit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

import torch
from torch import Tensor

from ampctl import torch_private
from ampctl.amp.precision import has_float64
from ampctl.recipe.schema import AmpConfig

_LARGEST_SEED = 2.0**15  # the largest power of two in float16

Gradients = Sequence[Sequence[Tensor]]
"""Gradients in lists of one device and dtype each, none without elements: see ``gradients``."""


class LossScaler:
    """Scale losses, unscale gradients, and decide on the device whether a step counts.

    In float32 and bfloat16 (``enabled=False``) the scale is 1 and stays 1, but gradients are
    checked all the same: one path for every dtype. Nothing here reads a value back to the host,
    except :meth:`step` for an optimizer that is not fused, and the state.

    Source: https://docs.pytorch.org/docs/stable/amp.html#gradient-scaling
    """

    def __init__(self, config: AmpConfig, *, enabled: bool, device: torch.device) -> None:
        self.config = config
        self.enabled = enabled
        self._one = torch.ones((), dtype=torch.float32, device=device)
        self._scale = self._one * (config.init_scale if enabled else 1.0)
        self._growth_tracker = torch.zeros((), dtype=torch.int32, device=device)
        self._hysteresis_tracker = torch.full_like(self._growth_tracker, config.hysteresis)

    @property
    def current_scale(self) -> Tensor:
        """The scale, a float32 scalar on the device; it changes in place at :meth:`update`."""
        return self._scale

    def tensors(self) -> tuple[Tensor, Tensor, Tensor]:
        """Return the scale and its two trackers, which ranks must have in common."""
        return self._scale, self._growth_tracker, self._hysteresis_tracker

    def scale(self, loss: Tensor) -> Tensor:
        """Multiply a loss by the scale."""
        return loss * self._scale if self.enabled else loss

    def unscale_(self, gradients: Gradients) -> Tensor:
        """Divide gradients by the scale in place; return ``found_inf``.

        It is a float32 scalar on the device: 1 if one of them is not finite, else 0.
        """
        found_inf = torch.zeros_like(self._one)
        inverse = self._inverse(self._scale) if self.enabled else self._one
        for group in gradients:
            if group[0].dtype is torch.bfloat16:
                # The fused check has no bfloat16 kernel on CUDA. A largest absolute value is
                # finite exactly if all values are, and cannot overflow.
                largest = torch.stack(torch_private.foreach_norm(list(group), float("inf")))
                found_inf.add_(largest.isfinite().all().logical_not()).clamp_(max=1.0)
                if self.enabled:
                    torch_private.foreach_mul_(list(group), inverse)
            else:
                torch_private.check_and_unscale_(list(group), found_inf, inverse)
        return found_inf

    def _inverse(self, scale: Tensor) -> Tensor:
        if not has_float64(scale.device):
            return scale.reciprocal()
        return scale.double().reciprocal().float()

    def check_norm(self, norm: Tensor, found_inf: Tensor) -> None:
        """Count a norm that overflowed as non-finite: clipping by it would zero every gradient."""
        torch_private.check_and_unscale_([norm], found_inf, self._one)

    def grad(self, outputs: Tensor, inputs: Tensor | Iterable[Tensor]) -> Any:
        """Return the gradient of ``outputs.sum()`` by ``inputs``, to be used in a loss.

        For gradient penalties: it is computed at the loss scale, so that float16 does not lose it,
        and unscaled; it is in float32 and can be differentiated again. A tensor for a tensor, a
        tuple for several. Runs outside of autocast, as a backward pass should; what is done with
        the gradient runs in whatever surrounds it.

        Source: https://docs.pytorch.org/docs/stable/notes/amp_examples.html#gradient-penalty
        """
        wanted = (inputs,) if isinstance(inputs, Tensor) else tuple(inputs)
        scale = self._scale
        if outputs.dtype is torch.float16:
            scale = scale.clamp(max=_LARGEST_SEED)  # the outputs' own gradient is the scale
        with torch.autocast(self._scale.device.type, enabled=False):
            total = outputs.float().sum()
            scaled = torch.autograd.grad(
                total * scale if self.enabled else total, wanted, create_graph=True
            )
            found = tuple(g.to(torch.promote_types(g.dtype, torch.float32)) for g in scaled)
            if self.enabled:
                inverse = self._inverse(scale)
                found = tuple(gradient * inverse for gradient in found)
        return found[0] if isinstance(inputs, Tensor) else found

    def step(self, optimizer: torch.optim.Optimizer, found_inf: Tensor) -> None:
        """Step the optimizer unless ``found_inf``; a fused optimizer's own kernel decides."""
        decides = torch_private.steps_by_scale(optimizer)
        if decides and found_inf.device.type != "mps":  # MPS kernels do not look at it
            optimizer.grad_scale = None  # type: ignore[attr-defined]
            optimizer.found_inf = found_inf  # type: ignore[attr-defined]
            try:
                optimizer.step()
            finally:
                del optimizer.grad_scale, optimizer.found_inf  # type: ignore[attr-defined]
        elif not found_inf.item():  # sync: an optimizer that is not fused cannot decide itself
            optimizer.step()

    def update(self, found_inf: Tensor) -> None:
        """Move the scale on after a step, by the policy in the contract's words.

        Once for all optimizers: ``found_inf`` says whether any of them met a value that is not
        finite.
        """
        config = self.config
        if not self.enabled or config.static:
            return
        if config.hysteresis == 1 and config.max_scale is None:
            self._torch_update(found_inf)
            self._scale.clamp_(min=config.min_scale)
            return
        before, tracker_before = self._scale.clone(), self._growth_tracker.clone()
        self._torch_update(found_inf)
        overflow = found_inf.bool()
        grew = ~overflow & (tracker_before + 1 == config.growth_interval)
        hysteresis = self._hysteresis_tracker
        hysteresis.copy_(
            torch.where(overflow, (hysteresis - 1).clamp_(min=0), hysteresis).where(
                ~grew, hysteresis.new_full((), config.hysteresis)
            )
        )
        self._scale.copy_(torch.where(overflow & (hysteresis > 0), before, self._scale))
        if config.max_scale is not None:
            # torch refuses to grow to inf before the ceiling is looked at, so grow again here.
            wide = before.double() if has_float64(before.device) else before
            grown = (wide * config.growth_factor).clamp_(max=config.max_scale).float()
            self._scale.copy_(torch.where(grew & grown.isfinite(), grown, self._scale))
        floored = self._scale.clamp(min=config.min_scale)
        self._scale.copy_(torch.where(overflow & (hysteresis == 0), floored, self._scale))

    def _torch_update(self, found_inf: Tensor) -> None:
        torch_private.update_scale_(
            self._scale,
            self._growth_tracker,
            found_inf,
            self.config.growth_factor,
            self.config.backoff_factor,
            self.config.growth_interval,
        )

    def state_dict(self) -> dict[str, Any]:
        """Return the state: the keys of ``torch.amp.GradScaler`` with ampctl's own beside them."""
        config = self.config
        return {
            "scale": self._scale.item(),  # sync: saving
            "growth_factor": config.growth_factor,
            "backoff_factor": config.backoff_factor,
            "growth_interval": config.growth_interval,
            "_growth_tracker": int(self._growth_tracker.item()),  # sync: saving
            "hysteresis_tracker": int(self._hysteresis_tracker.item()),  # sync: saving
            "hysteresis": config.hysteresis,
            "init_scale": config.init_scale,
            "min_scale": config.min_scale,
            "max_scale": config.max_scale,
            "static": config.static,
            "enabled": self.enabled,
        }

    def load_state_dict(self, state: Mapping[str, Any], notify: Callable[[str], None]) -> None:
        """Take over a saved scale and its trackers; the recipe's constants stay.

        A state saved without scaling (float32, bfloat16) starts a fresh scale, an ``init_scale``
        that differs from the saved one wins, and a scale outside the recipe's floor and ceiling
        is brought inside; each is said through ``notify``. A state of a stock
        ``torch.amp.GradScaler`` loads too.
        """
        config = self.config
        was_enabled = bool(state) and bool(state.get("enabled", True))
        if not self.enabled:
            if was_enabled:
                notify("the loss scale in the checkpoint is dropped: this dtype needs none")
            return
        if not was_enabled:
            notify(
                "the checkpoint holds no loss scale (it was saved without float16): "
                f"starting at {config.init_scale:g}"
            )
            return
        saved_scale = self._scale.new_tensor(float(state["scale"]))  # in float32, as it is kept
        saved_init = state.get("init_scale", config.init_scale)
        if saved_init != config.init_scale or config.static:
            if self._scale.ne(saved_scale).item():  # sync: resuming
                notify(
                    f"amp.init_scale wins over the scale in the checkpoint: "
                    f"{config.init_scale:g} instead of {state['scale']:g}"
                )
            return
        scale = max(float(state["scale"]), config.min_scale)
        if config.max_scale is not None:
            scale = min(scale, config.max_scale)
        self._scale.fill_(scale)
        if self._scale.ne(saved_scale).item():  # sync: resuming
            notify(f"the scale in the checkpoint, {state['scale']:g}, is brought to {scale:g}")
        self._growth_tracker.fill_(int(state["_growth_tracker"]) % config.growth_interval)
        hysteresis = int(state.get("hysteresis_tracker", config.hysteresis))
        self._hysteresis_tracker.fill_(min(hysteresis, config.hysteresis))
