"""One part of a recipe by itself: built, and held against what it must be."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import torch
from torch import nn
from torch.nn.parameter import is_lazy

from ampctl.data.move import to_channels_last_
from ampctl.errors import RecipeError, UsageError
from ampctl.recipe.fault import failure
from ampctl.recipe.load import LoadedRecipe
from ampctl.recipe.schema import TARGET
from ampctl.recipe.target import build
from ampctl.tasks.task import Task, as_task


def build_part(loaded: LoadedRecipe, key: str, block: Mapping[str, Any]) -> Any:
    """Build one block of a recipe."""
    return build(block, key=key, origins=loaded.origins)


def build_model(
    loaded: LoadedRecipe, device: torch.device, *, spread_later: bool = False
) -> nn.Module:
    """Build the bare model on a device, in the memory format that the recipe wants.

    ``spread_later``: leave it where it was built, because it is sharded, which moves it part by
    part.
    """
    recipe = loaded.recipe
    model = build_part(loaded, "model", recipe.model)
    if not isinstance(model, nn.Module):
        found = type(model).__name__
        raise wrong(loaded, "model", f"{recipe.model[TARGET]} gave a {found}, not an nn.Module")
    held = (*model.named_parameters(), *model.named_buffers())
    lazy = [name for name, tensor in held if is_lazy(tensor)]
    if lazy:
        message = f"{lazy[0]} has no shape before the first batch"
        raise wrong(loaded, "model", message, "give the sizes: nn.Linear instead of nn.LazyLinear")
    meta = [name for name, tensor in held if tensor.is_meta]
    if meta:
        message = f"{meta[0]} is on the meta device: it has no values"
        raise wrong(loaded, "model", message, "build it on a device, the cpu for instance")
    if not spread_later:
        model = model.to(device)
    if recipe.train.channels_last:
        to_channels_last_(model)
    return model


def build_task(loaded: LoadedRecipe) -> Task:
    """Build the task. Raises RecipeError for what is none."""
    built = build_part(loaded, "task", loaded.recipe.task)
    try:
        return as_task(built)
    except UsageError as error:
        raise wrong(loaded, "task", f"{error}") from error


def length_of(loaded: LoadedRecipe, key: str, dataset: Any) -> int:
    """Return how many samples a data set has. Raises RecipeError if it is none, or has none."""
    if not hasattr(dataset, "__getitem__") or not hasattr(dataset, "__len__"):
        raise wrong(
            loaded,
            key,
            f"a {type(dataset).__name__} cannot be read by index: it needs __getitem__ and __len__",
            "for training data without a length, inherit from torch.utils.data.IterableDataset",
        )
    try:
        length = len(dataset)
    except Exception as error:
        doing = f"the length of the {type(dataset).__name__} cannot be known: len() failed"
        raise failure(error, doing, loaded.place(key), key) from error
    if length == 0:
        raise wrong(loaded, key, f"the {type(dataset).__name__} has no samples")
    return length


def wrong(loaded: LoadedRecipe, key: str, message: str, advice: str = "") -> RecipeError:
    """Return an error that says what is wrong with one key."""
    return RecipeError([loaded.problem(key, message, advice)])
