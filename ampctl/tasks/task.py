"""What a task is: an object that turns a batch into a loss, and what is asked of one.

Those that come with ampctl are in ``tasks``; averaging over batches is left to others.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from inspect import Signature
from typing import Any

from torch import Tensor, nn

from ampctl.data.move import tensors
from ampctl.errors import UsageError
from ampctl.recipe.arguments import parameters_of

EXTRAS = frozenset(("grad", "step"))
BUILT_IN = "ampctl.tasks.builtin"
_METHODS = ("loss", "losses", "metrics", "num_items", "summary")


class Task:
    """What is to be learned: one object that reads a batch; it holds no state of the training.

    It has a method ``loss``, or for several optimizers that step in turn a method ``losses``; both
    may have further arguments, which they get by name:

    * ``grad(outputs, inputs)`` returns the gradient of ``outputs.sum()`` by a tensor or several, in
      float32, unscaled and differentiable: for gradient penalties. See ``LossScaler.grad``.
    * ``step`` is the number of the step, from 0. What a task does every few steps follows from it,
      so that a resumed run does the same.
    """

    @property
    def name(self) -> str:
        """What the task is called in messages."""
        return type(self).__name__

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor | None, Any] | None:
        """Return the mean loss of the batch's items, a scalar; and what ``metrics`` needs.

        None for the loss leaves the batch out: it counts as one without items. With several
        optimizers all of them step by the loss; it is what an evaluation reports.
        """
        raise UsageError(
            f"task: {self.name} has no method loss(model, batch), which an evaluation needs"
        )

    def losses(self, model: nn.Module, batch: Any) -> Iterator[tuple[str, Tensor | None]]:
        """Yield the name of an optimizer and its mean loss, a scalar; then the next, and so on.

        When the generator goes on, that optimizer has made its step. The gradient of a loss goes
        to the parameters of its own optimizer alone. An optimizer has one turn a step, or none.
        None for the loss leaves the batch out of that turn; to yield nothing leaves it out of all.
        """
        raise NotImplementedError

    def metrics(self, output: Any, batch: Any) -> dict[str, Tensor | float]:
        """Return means over the batch's items, by name; asked for in evaluation only.

        ``output`` is the second value that ``loss`` returned, or None.
        """
        return {}

    def num_items(self, batch: Any) -> float | Tensor:
        """Return how many items the loss and the metrics are means over; it may be a fraction.

        By it batches are weighed in a step, on several ranks and in evaluation; one of 0 items
        takes no part. Here: samples, the first dimension of the first tensor in the batch, or the
        length of a list that a ``collate_fn`` has left of the samples. Raises UsageError if the
        batch holds neither.
        """
        count = _num_samples(batch)
        if count is None:
            raise UsageError(
                f"a batch of type {type(batch).__name__} holds no tensor whose first dimension "
                "counts the samples, and no list of them; give the task a method num_items(batch)"
            )
        return count

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Turn the means over a whole split, ``loss`` among them, into what is reported."""
        return means


def as_task(candidate: Any) -> Task:
    """Return ``candidate``, as a Task if it does not inherit from it: what it lacks is Task's own.

    Raises UsageError if it has neither ``loss`` nor ``losses``, or a name of Task that is not a
    method.
    """
    name = type(candidate).__name__
    for method in _METHODS:
        if hasattr(candidate, method) and not callable(getattr(candidate, method)):
            raise UsageError(f"{name}.{method} is not a method, as a task's must be; rename it")
    task = candidate if isinstance(candidate, Task) else _Adapted(candidate)
    if not has_own(task, "loss") and not has_own(task, "losses"):
        raise UsageError(
            f"the task is a {name}, which has no method loss(model, batch); write one that returns "
            "the mean loss of the batch, or use a task of ampctl.tasks"
        )
    return task


def count_items(task: Task, batch: Any) -> float:
    """Return how many items a batch on the host has, by its task.

    Raises UsageError for what is no number from 0 on.
    """
    found = task.num_items(batch)
    try:
        count = float(found)
    except (TypeError, ValueError, RuntimeError):
        count = math.nan
    if not 0 <= count < math.inf:
        raise UsageError(
            f"task: {task.name}.num_items gave {found!r:.60}; it must be a number, 0 or more: how "
            "many items the loss of the batch is a mean over"
        )
    return count


def may_give_none(task: Task) -> bool:
    """Return whether a task can give no loss for a batch, as those of ampctl never do."""
    return getattr(task.loss, "__module__", "") != BUILT_IN


def as_written(task: Task) -> Any:
    """Return the object that somebody wrote, if need be without what :func:`as_task` put round."""
    return task.inner if isinstance(task, _Adapted) else task


def has_own(task: Task, method: str) -> bool:
    """Return whether a task brings a method itself, rather than having it from Task."""
    found = getattr(task, method)
    return getattr(found, "__func__", found) is not getattr(Task, method)


def asks_for(method: Callable[..., Any]) -> frozenset[str]:
    """Return which of ``grad`` and ``step`` a task's method wants, by the names of its arguments.

    The first two arguments are the model and the batch, whatever they are called.
    """
    return frozenset(list(parameters_of(method))[2:]) & EXTRAS


def why_not_called(method: Callable[..., Any]) -> str:
    """Describe why a task's method cannot be called with a model and a batch; "" if it can."""
    parameters = parameters_of(method)
    if not parameters:  # it does not tell them
        return ""
    try:
        Signature(list(parameters.values())).bind(None, None, **dict.fromkeys(asks_for(method)))
    except TypeError as error:
        return str(error)
    return ""


class _Adapted(Task):
    """A task that somebody wrote without inheriting from Task: its own methods, and Task's."""

    def __init__(self, inner: Any) -> None:
        self.inner = inner
        for method in _METHODS:
            if hasattr(inner, method):
                setattr(self, method, getattr(inner, method))

    @property
    def name(self) -> str:
        return type(self.inner).__name__


def _num_samples(batch: Any) -> int | None:
    """Return how many samples a batch holds, or None if that does not show.

    Samples that were stacked have one first dimension in all tensors. A batch with others, or with
    numbers, may hold them as they were: in lists of one length, for images and targets say, or as a
    list of (image, target). If not, the first tensor counts, one that is not inside others first.
    """
    parts = _parts(batch)
    firsts = set(_first_dimensions(batch))
    if len(firsts) > 1 and parts:
        if isinstance(batch, list) and len({*map(_form, parts)}) == 1:
            return len(parts)
        lengths = {len(part) if isinstance(part, tuple | list) else None for part in parts}
        if len(lengths) == 1 and None not in lengths:
            return lengths.pop()
    direct = [part for part in parts if isinstance(part, Tensor)]
    return next((each.shape[0] for each in (*direct, *tensors(batch)) if each.ndim), None)


def _parts(value: Any) -> list[Any]:
    if isinstance(value, Mapping):
        return list(value.values())
    return list(value) if isinstance(value, tuple | list) else []


def _first_dimensions(value: Any) -> Iterator[int | None]:
    """Yield the first dimension of each tensor; None for a number."""
    if isinstance(value, Tensor):
        yield value.shape[0] if value.ndim else None
    elif isinstance(value, int | float):
        yield None
    for part in _parts(value):
        yield from _first_dimensions(part)


def _form(value: Any) -> Any:
    """Return what samples of one data set have in common."""
    if isinstance(value, Tensor):
        return value.dtype, value.ndim
    return type(value), *(value if isinstance(value, Mapping) else map(_form, _parts(value)))
