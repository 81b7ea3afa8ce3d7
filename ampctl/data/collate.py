"""Samples into a batch: by a function of the user's own, or by torch's, whose errors get words."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import partial
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.utils.data import default_collate, get_worker_info

from ampctl.data.faults import FAULTS
from ampctl.errors import AmpctlError, RecipeError, UsageError, first_of
from ampctl.recipe.fault import failure
from ampctl.recipe.load import LoadedRecipe
from ampctl.recipe.own_code import as_exception, own_frames
from ampctl.recipe.schema import TARGET
from ampctl.recipe.target import build, is_class, locate

MOST_SHOWN = 8
_PLAIN = (Tensor, np.ndarray, np.generic, bool, int, float, str, bytes)

Function = Callable[[list[Any]], Any]

_KEY = "data.collate_fn"
_IMAGE = (
    "    A PIL image becomes a tensor by a transform of the data set: "
    "{_target_: torchvision.transforms.ToTensor}, or torchvision.transforms.v2.ToImage and "
    "ToDtype with scale: true\n"
)


def build_collate_fn(loaded: LoadedRecipe) -> Function | None:
    """Return what a recipe makes batches by: an object of a class, or a function with arguments.

    Raises RecipeError for what cannot be called.
    """
    block = loaded.recipe.data.collate_fn
    if block is None:
        return None
    if not is_class(block):
        arguments = {name: value for name, value in block.items() if name != TARGET}
        built = build(arguments, key=_KEY, origins=loaded.origins)
        return partial(locate(f"{block[TARGET]}"), **built)
    made = build(block, key=_KEY, origins=loaded.origins)
    if not callable(made):
        message = f"{block[TARGET]} gave a {type(made).__name__}, which cannot be called"
        advice = "name a function, or a class with __call__"
        raise RecipeError([loaded.problem(_KEY, message, advice)])
    function: Function = made
    return function


class Collate:
    """Make a batch of samples: by a ``given`` function, the data set's ``collate_fn``, or torch's.

    ``key`` is what the data set is called in messages: ``data.train``.
    """

    def __init__(self, dataset: Any, given: Function | None, key: str) -> None:
        self.key = key
        self._kind = type(dataset).__name__
        own = getattr(dataset, "collate_fn", None)
        self._name = _KEY if given else f"{self._kind}.collate_fn" if own else ""
        self._function: Function = given or own or default_collate

    @property
    def keeps_order(self) -> bool:
        """Whether the samples of a batch surely stand in the order in which they were given."""
        return self._function is default_collate

    def __call__(self, samples: list[Any], numbers: Sequence[int]) -> Any:
        """Return the batch of samples, whose ``numbers`` tell them in messages.

        Raises UsageError for samples that cannot form one, or for a function that returns none.
        """
        # In a worker torch casts all samples to the dtype of the first, without a word.
        if self.keeps_order and get_worker_info() and (found := difference(samples, numbers)):
            raise self._unlike(found)
        try:
            batch = self._function(samples)
        except FAULTS as fault:
            error = as_exception(fault)
            if isinstance(error, AmpctlError):
                raise
            if self._name:
                what = f"of samples {listed(numbers)} of {self.key}"
                if own_frames(error):
                    error.add_note(f"in {self._name}, {what}")
                    raise error from error.__cause__
                raise UsageError(
                    f"{self._name}: no batch {what}: {type(error).__name__}: {error}\n"
                    "    It is called with the list of samples, and returns the batch."
                ) from error
            found = difference(samples, numbers)
            if not found:
                if own_frames(error):
                    raise error from error.__cause__
                doing = f"making a batch of samples {listed(numbers)} failed"
                raise failure(error, doing, "", self.key) from error
            raise self._unlike(found) from error
        if batch is None:
            raise UsageError(
                f"{self._name}: returned None for samples {listed(numbers)} of {self.key}; it must "
                "return the batch"
            )
        return batch

    def _unlike(self, found: str) -> UsageError:
        image = _IMAGE if "PIL." in found else ""
        return UsageError(
            f"{self.key}: samples of {self._kind} cannot form a batch: {found}\n{image}"
            "    Let the data set give samples of one form, of tensors, NumPy arrays, numbers "
            "and texts; or set data.collate_fn to a function of your own that makes a batch of "
            'a list of samples: "data.collate_fn={_target_: my_data.collate}"'
        )


def listed(numbers: Sequence[int]) -> str:
    """List the numbers of samples for a message."""
    return first_of([f"{number}" for number in numbers], MOST_SHOWN)


def difference(values: Sequence[Any], numbers: Sequence[int], at: str = "") -> str:
    """Describe where samples first differ in form, or what torch cannot collate; "" if nowhere."""
    forms = [_form(value) for value in values]
    if len(set(forms)) > 1 or not isinstance(values[0], (*_PLAIN, Mapping, tuple, list)):
        return _told(forms, numbers, at)
    first = values[0]
    if isinstance(first, np.ndarray | np.generic) and first.dtype.kind in "OSUMmV":
        return _told(forms, numbers, at)
    keys: Sequence[Any] = ()
    if isinstance(first, Mapping):
        keys = list(first)
    elif isinstance(first, tuple | list):
        keys = range(len(first))
    parts = ((f"{at}[{k!r}]", [value[k] for value in values]) for k in keys)
    return next(filter(None, (difference(part, numbers, place) for place, part in parts)), "")


def _form(value: Any) -> str:
    """Describe what must be the same in all samples of a batch."""
    if isinstance(value, Tensor):
        sparse = "" if value.layout == torch.strided else f"{value.layout} "
        return f"{sparse}{str(value.dtype).removeprefix('torch.')} {list(value.shape)}"
    if isinstance(value, np.ndarray | np.generic):
        return f"NumPy {value.dtype} {list(value.shape)}"
    if isinstance(value, Mapping):
        return f"a {type(value).__name__} of {first_of(sorted(map(repr, value)), MOST_SHOWN)}"
    if isinstance(value, tuple | list):
        return f"a {type(value).__name__} of {len(value)}"
    if value is None:
        return "None"
    if isinstance(value, int | float):
        return "a number"
    kind = type(value)
    is_builtin = kind.__module__ == "builtins"
    return f"a {kind.__name__}" if is_builtin else f"a {kind.__module__}.{kind.__name__}"


def _told(forms: Sequence[str], numbers: Sequence[int], at: str) -> str:
    of_each: dict[str, int] = {}
    for form, number in zip(forms, numbers, strict=True):
        of_each.setdefault(form, number)
    told = [f"sample {number} is {form}" for form, number in of_each.items()]
    where = f"at {at}, " if at else ""
    return f"{where}{first_of(told, 4)}"
