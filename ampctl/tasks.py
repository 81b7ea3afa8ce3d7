"""How a batch becomes a loss and, in evaluation, metrics. Averaging over batches is left to others.

Losses and metrics are computed in float32, whatever the model puts out: a half precision reduction
overflows at 65504, and in float16 it makes the loss scale itself the seed of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterator, Mapping
from inspect import Signature
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.errors import UsageError
from ampctl.recipe.arguments import parameters_of

IGNORE_INDEX = -100
EXTRAS = frozenset(("grad", "step"))
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

    def loss(self, model: nn.Module, batch: Any) -> Tensor | tuple[Tensor, Any]:
        """Return the mean loss of the batch's items, a scalar; and what ``metrics`` needs.

        With several optimizers all of them step by it; it is what an evaluation reports.
        """
        raise UsageError(
            f"task: {self.name} has no method loss(model, batch), which an evaluation needs"
        )

    def losses(self, model: nn.Module, batch: Any) -> Iterator[tuple[str, Tensor]]:
        """Yield the name of an optimizer and its mean loss, a scalar; then the next, and so on.

        When the generator goes on, that optimizer has made its step. The gradient of a loss goes
        to the parameters of its own optimizer alone. An optimizer has one turn a step, or none.
        """
        raise NotImplementedError

    def metrics(self, output: Any, batch: Any) -> dict[str, Tensor | float]:
        """Return means over the batch's items, by name; asked for in evaluation only.

        ``output`` is the second value that ``loss`` returned, or None.
        """
        return {}

    def num_items(self, batch: Any) -> int | Tensor:
        """Count what the loss is a mean over.

        Here: samples, the first dimension of the first tensor in the batch. Raises UsageError if
        the batch holds no tensor with a dimension.
        """
        count = _first_dimension(batch)
        if count is None:
            raise UsageError(
                f"a batch of type {type(batch).__name__} holds no tensor whose first dimension "
                "counts the samples; give the task a method num_items(batch)"
            )
        return count

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Turn the means over a whole split, ``loss`` among them, into what is reported."""
        return means


class Classification(Task):
    """Cross entropy and accuracy; a batch is (inputs, labels).

    The model returns logits [batch, classes, ...], or an object with them in ``.logits``; labels
    are int64 [batch, ...].
    """

    def __init__(self, label_smoothing: float = 0.0) -> None:
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing is {label_smoothing!r}; it must be from 0 to 1")
        self.label_smoothing = label_smoothing

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the cross entropy and the logits."""
        inputs, labels = _pair(batch, "inputs", "labels")
        logits = _tensor(model(inputs)).float()
        return F.cross_entropy(logits, labels, label_smoothing=self.label_smoothing), logits

    def metrics(self, output: Any, batch: Any) -> dict[str, Tensor | float]:
        """Return ``accuracy``."""
        _, labels = _pair(batch, "inputs", "labels")
        return {"accuracy": (output.argmax(dim=1) == labels).float().mean()}


class Regression(Task):
    """Mean squared error, and the mean absolute one (``mae``); a batch is (inputs, targets).

    The predictions have the shape of the targets, or one more dimension of size 1 at the end.
    """

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the mean squared error and the predictions."""
        inputs, targets = _pair(batch, "inputs", "targets")
        predictions = _tensor(model(inputs)).float()
        if predictions.shape == (*targets.shape, 1):
            predictions = predictions.squeeze(-1)
        # Broadcasting [batch, 1] against [batch] would train on [batch, batch] without a word.
        if predictions.shape != targets.shape:
            raise UsageError(
                f"the model's predictions have shape {list(predictions.shape)} and the targets "
                f"{list(targets.shape)}; they must be the same"
            )
        return F.mse_loss(predictions, targets.float()), predictions

    def metrics(self, output: Any, batch: Any) -> dict[str, Tensor | float]:
        """Return ``mae``."""
        _, targets = _pair(batch, "inputs", "targets")
        return {"mae": (output - targets.float()).abs().mean()}


class LanguageModel(Task):
    """Cross entropy of each next token, and perplexity; a batch is (tokens, targets).

    Both are int64 [batch, time]; the targets stand one token ahead already. The items are the
    targets other than ``ignore_index``; a batch without any has loss 0 and weighs nothing.
    """

    def __init__(self, ignore_index: int = IGNORE_INDEX) -> None:
        self.ignore_index = ignore_index

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return the mean cross entropy of the targets that are not ignored, in nats a token."""
        tokens, targets = _pair(batch, "tokens", "targets")
        logits = _tensor(model(tokens)).float().flatten(0, -2)
        total = F.cross_entropy(
            logits, targets.flatten(), ignore_index=self.ignore_index, reduction="sum"
        )
        # The mean that torch offers is 0 / 0 where all targets are ignored.
        return total / self.num_items(batch).clamp(min=1)

    def num_items(self, batch: Any) -> Tensor:
        """Count the targets that are not ignored."""
        _, targets = _pair(batch, "tokens", "targets")
        return (targets != self.ignore_index).sum()

    def summary(self, means: dict[str, float]) -> dict[str, float]:
        """Add ``perplexity``, exp(loss); ``inf`` if it is too large for a float."""
        try:
            perplexity = math.exp(means["loss"])
        except OverflowError:
            perplexity = math.inf
        return {**means, "perplexity": perplexity}


class Transformers(Task):
    """The loss that a model of ``transformers`` computes itself; a batch is its keyword arguments.

    The items are the labels other than -100 where labels are [batch, time], samples otherwise.
    ``shift`` says that the model moves the labels on by one token, as causal language models do;
    set it to false for masked and sequence-to-sequence models and for token classification.
    """

    def __init__(self, shift: bool = True) -> None:
        self.shift = shift

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return ``model(**batch).loss`` in float32."""
        loss = getattr(model(**_mapping(batch)), "loss", None)
        if not isinstance(loss, Tensor):
            raise UsageError(
                f"{type(model).__name__} returned no .loss for a batch with "
                f"{', '.join(map(str, batch))}; a model of transformers returns one when the "
                'batch has "labels"'
            )
        return loss.float()

    def num_items(self, batch: Any) -> int | Tensor:
        """Count the labels that enter the loss, or the samples where there is one label each."""
        labels = _mapping(batch).get("labels")
        if not isinstance(labels, Tensor) or labels.ndim != 2 or labels.is_floating_point():
            return super().num_items(batch)
        return (labels[:, int(self.shift) :] != IGNORE_INDEX).sum()


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


def as_written(task: Task) -> Any:
    """Return the object that somebody wrote, if need be without what :func:`as_task` put round."""
    return task.inner if isinstance(task, _Adapted) else task


def has_own(task: Task, method: str) -> bool:
    """Tell whether a task brings a method itself, rather than having it from Task."""
    found = getattr(task, method)
    return getattr(found, "__func__", found) is not getattr(Task, method)


def asks_for(method: Callable[..., Any]) -> frozenset[str]:
    """Return which of ``grad`` and ``step`` a task's method wants, by the names of its arguments.

    The first two arguments are the model and the batch, whatever they are called.
    """
    return frozenset(list(parameters_of(method))[2:]) & EXTRAS


def why_not_called(method: Callable[..., Any]) -> str:
    """Say why a task's method cannot be called with a model and a batch; "" if it can."""
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


def _first_dimension(batch: Any) -> int | None:
    """Return the first dimension of the first tensor found, depth first; scalars have none."""
    if isinstance(batch, Tensor):
        return batch.shape[0] if batch.ndim else None
    parts = batch.values() if isinstance(batch, Mapping) else batch
    if not isinstance(batch, Mapping | tuple | list):
        return None
    for part in parts:
        count = _first_dimension(part)
        if count is not None:
            return count
    return None


def _pair(batch: Any, first: str, second: str) -> tuple[Any, Tensor]:
    """Take a batch apart into two, or say in words that it is not of two."""
    if not isinstance(batch, tuple | list) or len(batch) != 2:
        size = f" of {len(batch)}" if isinstance(batch, tuple | list) else ""
        raise UsageError(
            f"this task takes batches ({first}, {second}); the data set gives "
            f"a {type(batch).__name__}{size}. Write a task of your own: any object with "
            "loss(model, batch) will do"
        )
    return batch[0], batch[1]


def _mapping(batch: Any) -> Mapping[str, Any]:
    if not isinstance(batch, Mapping):
        raise UsageError(
            f"this task takes a batch that is a mapping of the model's arguments (input_ids, "
            f"labels ...); the data set gives a {type(batch).__name__}"
        )
    return batch


def _tensor(output: Any) -> Tensor:
    """Return the model's output tensor, or its ``.logits``."""
    tensor = getattr(output, "logits", output)
    if not isinstance(tensor, torch.Tensor):
        raise UsageError(
            f"the model returned a {type(output).__name__}; this task needs a tensor, or an object "
            "with one in .logits"
        )
    return tensor
