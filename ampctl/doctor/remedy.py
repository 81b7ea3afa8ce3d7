"""Which settings would help a run, and can: keys that it has, and values that change something."""

from __future__ import annotations

from torch.optim.lr_scheduler import CyclicLR, OneCycleLR

from ampctl.engine.state import TrainState
from ampctl.engine.updater import Updater
from ampctl.recipe.schema import block_key


def scale_can_fall(state: TrainState) -> bool:
    """Return whether the loss scale is above 1, so that a lower one is another one."""
    return state.scaler.enabled and state.scale_on_host > 1


def lower_scales(state: TrainState, factor: float) -> list[float]:
    """Return values of ``init_scale`` that go on with a lower scale, in falling order.

    Not the present ``init_scale``: a resume takes it for a setting that nobody has changed.
    """
    amp, found, scale = state.amp, [], state.scale_on_host / factor
    while scale >= max(amp.min_scale, 1.0):
        if scale != amp.init_scale:
            found.append(scale)
        scale /= factor
    return found


def clip(state: TrainState) -> str:
    """Describe how to limit gradients further."""
    limit = state.amp.clip_norm
    return "set amp.clip_norm (1.0, say)" if limit is None else f"lower amp.clip_norm ({limit:g})"


def rate(state: TrainState, weight: str | None = None) -> str:
    """Return the key of the rate that moves a weight."""
    updater = _trainer(state, weight)
    name = updater.name if updater is not None else "NAME"
    if updater is not None and _decides_itself(updater):
        return f"max_lr of {type(updater.learning_rate.source).__name__}"
    if updater is not None and _rates(updater) > 1:
        return f"the rates of {block_key('optimizer', name)} and its groups"
    return f"{block_key('optimizer', name)}.lr"


def lower_rate(state: TrainState, weight: str | None = None) -> str | None:
    """Return an override that lowers the rate of a weight to a tenth, if one key does so."""
    updater = _trainer(state, weight)
    if updater is None or _decides_itself(updater) or _rates(updater) > 1:
        return None
    base = float(updater.optimizer.defaults.get("lr") or 0.0)
    return f"{rate(state, weight)}={base / 10:g}" if base else None


def _decides_itself(updater: Updater) -> bool:
    """Return whether the scheduler sets rates of its own, whatever the optimizer's are."""
    return isinstance(updater.learning_rate.source, OneCycleLR | CyclicLR)


def _rates(updater: Updater) -> int:
    return len({float(group["lr"]) for group in updater.optimizer.param_groups})


def _trainer(state: TrainState, weight: str | None) -> Updater | None:
    """Return the only optimizer, or of several the one that trains a weight."""
    if len(state.updaters) == 1:
        return state.updaters[0]
    named = dict(state.bare.named_parameters()).get(weight or "")
    own = (each for each in state.updaters if any(p is named for p in each.parameters))
    return next(own, None)
