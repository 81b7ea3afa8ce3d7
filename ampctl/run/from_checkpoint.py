"""A checkpoint without a run that goes on from it: its model, and its metrics on a split.

Nothing is written. What the recipe inside names is built under the rules of `recipe.trust`.
"""

from __future__ import annotations

import os
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

import torch
from torch import nn

from ampctl import rng
from ampctl.amp.masters import upcast_
from ampctl.builder.job import build_eval_data, micro_batch_size
from ampctl.builder.parts import build_model
from ampctl.builder.state import build_state, settle_device
from ampctl.checkpoint.contents import Facts, fact
from ampctl.checkpoint.export import chosen_weights, tell_nonfinite
from ampctl.checkpoint.index import log_warning
from ampctl.checkpoint.store import Loaded, load
from ampctl.data.loader import EvalData
from ampctl.distributed.env import choose_device, ended_at_once
from ampctl.distributed.ranks import Ranks, from_environment
from ampctl.doctor.mismatch import in_words
from ampctl.engine.evaluation import evaluate
from ampctl.engine.state import TrainState
from ampctl.errors import RecipeError
from ampctl.recipe.load import LoadedRecipe
from ampctl.run.job_place import joined
from ampctl.run.restore import as_damage, mismatches_explained, read
from ampctl.run.size_limit import no_larger_than
from ampctl.state_dict.load import load_model as load_weights

Notify = Callable[[str], None]
Shown = Callable[[EvalData], Iterable[Any]]
"""Goes through the batches of a split, and may show how far it is."""


def load_model(
    checkpoint: str | os.PathLike[str],
    *,
    device: str | torch.device = "cpu",
    ema: bool | None = None,
    trust: bool = False,
) -> nn.Module:
    """Return the bare model of a checkpoint with its weights; see :func:`ampctl.load_model`."""
    found, saved, loaded = read(Path(checkpoint), (), trusted=trust, notify=log_warning)
    _, weights = chosen_weights(found.payload, found.path, ema=ema)
    place = choose_device(f"{device}")
    # The program that asks has random numbers of its own.
    with rng.preserved(place), no_larger_than(weights):
        model = _model(loaded, place)
    with mismatches_explained(found.path, found.payload, saved, loaded):
        _fill(model, weights, found.path, log_warning)
    tell_nonfinite(found.payload, weights, found.path, log_warning)
    return model.eval()


def require_split(loaded: LoadedRecipe) -> None:
    """Raise RecipeError for a recipe that names no data to evaluate on."""
    if loaded.recipe.data.eval is None:
        message = "there is no split to evaluate on in this recipe"
        advice = 'give one: "data.eval={_target_: ..., split: test}"'
        raise RecipeError([loaded.problem("data.eval", message, advice)])


def evaluate_checkpoint(
    source: Path,
    overrides: Sequence[str],
    *,
    ema: bool | None,
    trusted: bool,
    notify: Notify,
    shown: Shown = iter,
) -> Facts | None:
    """Evaluate a checkpoint, or a run folder's newest, on ``data.eval``; of several ranks a part.

    Returns the facts on the first rank and None on the others. ``metrics`` are those of training at
    this step, to the bit where device, ranks and recipe are the same; ``stored`` are those that it
    found, if it evaluated these weights there. ``ema``: the averaged weights or the raw ones; None
    is the average where there is one, as in training. Raises CheckpointError, RecipeError, and
    PreemptedError or InterruptedRunError for a signal.
    """
    ranks = from_environment()
    tell = notify if ranks.is_first else _unheard
    with ended_at_once("before the evaluation was over: it wrote nothing; run it again"):
        found, saved, loaded = read(source, overrides, trusted=trusted, notify=tell)
        require_split(loaded)
        with joined(loaded) as place:
            ranks = place.ranks
            path = ranks.of_first(found.path)  # the run may have saved another one meanwhile
            if path != found.path:
                found = load(path, notify=_unheard)
            with mismatches_explained(found.path, found.payload, saved, loaded):
                return _evaluate(found, loaded, ranks, ema=ema, tell=tell, shown=shown)


def _evaluate(
    found: Loaded,
    loaded: LoadedRecipe,
    ranks: Ranks,
    *,
    ema: bool | None,
    tell: Notify,
    shown: Shown,
) -> Facts | None:
    payload = found.payload
    which, weights = chosen_weights(payload, found.path, ema=ema)
    loaded = _with_batches_of_training(loaded, payload["world_size"])
    device, precision = settle_device(loaded.recipe, ranks)
    rng.seed_everything(loaded.recipe.seed)  # as a run does before it builds its data
    data = build_eval_data(loaded, device, ranks)
    assert data is not None, "a recipe without a split was refused"
    with no_larger_than(weights):
        rng.seed_everything(loaded.recipe.seed)  # and before its model, buffers of which are drawn
        state = build_state(loaded, device, precision, ranks, to_train=False)
    if state.precision.name != payload["dtype"]:
        tell(f"evaluating in {state.precision.name}; it was trained in {fact(payload['dtype'])}")
    _fill(state.bare, weights, found.path, tell)
    tell_nonfinite(payload, weights, found.path, tell)
    _restore(state, payload, found.path)
    try:
        metrics = evaluate(state, shown(data) if ranks.is_first else data)
    except Exception as error:
        told = in_words(error, state.bare, (), doing="the evaluation", state=state)
        if told is None:
            raise
        raise told from error
    finally:
        data.close()
    assert metrics is not None, "nothing cuts it off"
    if not ranks.is_first:
        return None
    progress = payload["progress"]
    usual, _ = chosen_weights(payload, found.path, ema=None)
    was_evaluated = which == usual and progress.get("evaluated_step") == progress.get("step")
    return {
        "checkpoint": f"{found.path}",
        "step": fact(progress.get("step")),
        "weights": which,
        "samples": data.num_samples,
        "device": f"{state.device}",
        "dtype": state.precision.name,
        "reason": state.precision.reason,
        "world_size": ranks.size,
        "metrics": fact(metrics),
        "stored": fact(progress.get("metrics")) if was_evaluated else None,
    }


def _with_batches_of_training(loaded: LoadedRecipe, world_size: int) -> LoadedRecipe:
    """Set the batches of the split to those of training, on however many ranks.

    A matrix product of another size may round otherwise.
    """
    recipe = loaded.recipe
    size = recipe.data.eval_batch_size or micro_batch_size(recipe, Ranks(size=max(1, world_size)))
    return replace(loaded, recipe=replace(recipe, data=replace(recipe.data, eval_batch_size=size)))


def _model(loaded: LoadedRecipe, device: torch.device) -> nn.Module:
    """Build the model as training did: from the seed, in the dtypes that its weights were saved in.

    What a checkpoint does not hold (a buffer that is not persistent) may be drawn at random.
    """
    rng.seed_everything(loaded.recipe.seed)
    model = build_model(loaded, device)
    if loaded.recipe.amp.upcast:
        upcast_(model)
    return model


def _fill(model: nn.Module, weights: Mapping[str, Any], path: Path, tell: Notify) -> None:
    with as_damage(path):
        load_weights(model, weights, tell)


def _restore(state: TrainState, payload: Mapping[str, Any], path: Path) -> None:
    """Restore what a task may use in an evaluation: the step, the scale, the random numbers."""
    saved, ranks = payload["rng"], state.ranks
    with as_damage(path):
        state.progress.step = int(payload["progress"]["step"])
        state.scaler.load_state_dict(payload["scaler"], _unheard)
        if len(saved) == ranks.size:
            rng.set_state(saved[ranks.rank], state.device)
        else:
            rng.seed_everything(rng.mix(state.progress.step, ranks.rank))


def _unheard(text: str) -> None:
    """Leave it to the first rank, or to a run that goes on, to say this."""
