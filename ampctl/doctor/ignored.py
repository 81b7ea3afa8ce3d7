"""Settings that have no effect in a run, so that nobody relies on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import fields
from typing import Any

from ampctl.builder.job import Job
from ampctl.doctor.set_by_schedule import set_by_schedule
from ampctl.recipe.schema import Recipe, by_name

_SCALING = (
    "init_scale",
    "growth_factor",
    "backoff_factor",
    "growth_interval",
    "min_scale",
    "max_scale",
    "hysteresis",
    "static",
)


def ignored_settings(
    job: Job, *, dtype: str = "", device_type: str = "", world_size: int = 0
) -> list[str]:
    """Return the settings that have no effect in a run, on its own device or on another one.

    ``world_size`` 0: how many processes there will be is not known.
    """
    state = job.state
    dtype = dtype or state.precision.name
    notes = _ignored(
        job.recipe,
        dtype=dtype,
        scaling="float16" in (dtype, *state.module_dtypes.values()),
        device=device_type or state.device.type,
        world_size=world_size,
    )
    if job.recipe.amp.upcast and not state.upcast:
        notes.append("no effect where no trainable parameter is in half precision: amp.upcast")
    notes += [f"no effect where {why}: {key}" for key, why in set_by_schedule(job).items()]
    return notes


def _ignored(
    recipe: Recipe, *, dtype: str, scaling: bool, device: str, world_size: int = 1
) -> list[str]:
    """Return those that follow from the recipe; ``device`` is a type: ``cpu``, ``cuda``..."""
    ignored = {}
    if world_size == 1:
        ignored["with one process"] = _changed("distributed", recipe.distributed)
    elif recipe.distributed.strategy == "ddp":
        ignored["with ddp"] = _changed("distributed", recipe.distributed, ("blocks",))
    if device != "cuda":
        name = "reduced_precision_reduction"
        ignored[f"on {device}"] = _changed("amp", recipe.amp, (name,))
    if len(by_name(recipe.optimizer)) == 1:
        ignored["with one optimizer"] = _changed("amp", recipe.amp, ("all_or_nothing",))
    if not scaling:
        reason = f"in {dtype}, which needs no loss scale"
        ignored[reason] = _changed("amp", recipe.amp, _SCALING)
    elif recipe.amp.static:
        moving = [name for name in _SCALING if name not in ("init_scale", "static")]
        ignored["on a static scale"] = _changed("amp", recipe.amp, moving)
    if recipe.data.eval is None:
        ignored["without data.eval"] = [
            *_changed("data", recipe.data, ("eval_batch_size",)),
            *_changed("train", recipe.train, ("eval_every_steps",)),
            *_changed("checkpoint", recipe.checkpoint, ("keep_best", "monitor", "mode")),
        ]
    return [f"no effect {reason}: {', '.join(keys)}" for reason, keys in ignored.items() if keys]


def _changed(section: str, config: Any, names: Sequence[str] | None = None) -> list[str]:
    return [
        f"{section}.{entry.name}"
        for entry in fields(config)
        if (names is None or entry.name in names) and getattr(config, entry.name) != entry.default
    ]
