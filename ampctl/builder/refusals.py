"""What is refused of a recipe before anything is built, and metrics that no task gives."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

from ampctl.errors import Problem, RecipeError
from ampctl.recipe.arguments import parameters_of
from ampctl.recipe.keys import child
from ampctl.recipe.load import LoadedRecipe
from ampctl.recipe.schema import TARGET, Recipe, block_key, by_name
from ampctl.recipe.target import is_class, locate, problems_of


def refuse_unsupported(loaded: LoadedRecipe) -> None:
    """Raise RecipeError for keys of the schema that this version cannot honour yet."""
    recipe = loaded.recipe
    asked = {
        "data.micro_batch_size": recipe.data.micro_batch_size == "auto",
        "log.trackers": bool(recipe.log.trackers),
    }
    advice = {
        "data.micro_batch_size": "give a number, or null",
        "log.trackers": "leave it empty; metrics.jsonl holds every figure",
    }
    problems = [
        Problem(loaded.place(key), key, f"not supported yet: {_value(recipe, key)!r}", advice[key])
        for key, is_asked in asked.items()
        if is_asked
    ]
    if problems:
        raise RecipeError(problems)


def refuse_unknown_targets(loaded: LoadedRecipe) -> None:
    """Raise RecipeError with every target that is not there and every argument that is wrong."""
    recipe = loaded.recipe
    soon = object()  # stands for what is built later
    asked: list[tuple[str, Mapping[str, Any] | None, dict[str, Any], list[Any]]] = [
        ("model", recipe.model, {}, []),
        ("task", recipe.task, {}, []),
        ("data.train", recipe.data.train, {}, []),
        ("data.eval", recipe.data.eval, {}, []),
        (
            "data.collate_fn",
            recipe.data.collate_fn,
            {},
            [] if is_class(recipe.data.collate_fn) else [soon],  # the samples
        ),
    ]
    for name, block in by_name(recipe.optimizer).items():
        ours = ("groups", "params") if name else ("groups",)  # what ampctl itself reads
        arguments = {k: v for k, v in block.items() if k not in ours}
        at = block_key("optimizer", name)
        asked.append((at, arguments, {}, [soon]))
        groups = block.get("groups")
        asked.append((child(at, "groups"), groups if isinstance(groups, Mapping) else {}, {}, []))
    for name, block in by_name(recipe.scheduler).items():
        asked.append(
            (block_key("scheduler", name), block, {"optimizer": soon, "total_steps": soon}, [])
        )
    problems = [
        problem
        for key, block, provide, args in asked
        if block is not None
        for problem in problems_of(
            block, key=key, origins=loaded.origins, provide=provide, args=args
        )
    ]
    if problems:
        raise RecipeError(problems)


def refuse_odd_numbers(loaded: LoadedRecipe) -> None:
    """Raise RecipeError for numbers of optimizers and schedulers that nothing can be trained with.

    torch's constructors take an infinity. One that is an argument's own default may be given.
    """
    problems = []
    for section in ("optimizer", "scheduler"):
        for name, block in by_name(getattr(loaded.recipe, section)).items():
            signature = parameters_of(locate(block[TARGET]))
            for key, value in _numbers(block, block_key(section, name)):
                argument = key.rpartition(".")[2]
                default = getattr(signature.get(argument), "default", None)
                if math.isfinite(value) or value == default:
                    continue
                least = ", at least 0" if argument in ("lr", "weight_decay") else ""
                message = f"got {value:g}; allowed: a finite number{least}"
                problems.append(loaded.problem(key, message))
    if problems:
        raise RecipeError(problems)


def _numbers(value: Any, key: str) -> Iterator[tuple[str, float]]:
    """Yield each fraction in a block with its dotted key."""
    if isinstance(value, float):
        yield key, value
    elif isinstance(value, Mapping):
        for name, part in value.items():
            yield from _numbers(part, child(key, name))
    elif isinstance(value, list | tuple):
        for index, part in enumerate(value):
            yield from _numbers(part, child(key, index))


def unknown_metric(
    loaded: LoadedRecipe, key: str, monitor: str, metrics: Iterable[str], advice: str = ""
) -> Problem:
    """Return the problem that the task does not give the metric which ``key`` watches."""
    message = f"no metric is called {monitor!r}; this task gives {', '.join(sorted(metrics))}"
    return Problem(loaded.place(key), key, message, advice)


def _value(recipe: Recipe, key: str) -> Any:
    value: Any = recipe
    for part in key.split("."):
        value = getattr(value, part)
    return value
