"""The tasks that come with ampctl: how a batch becomes a loss and, in evaluation, metrics.

Losses and metrics are computed in float32, whatever the model puts out: a half precision reduction
overflows at 65504, and in float16 it makes the loss scale itself the seed of the gradient.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.overrides import TorchFunctionMode

from ampctl.errors import UsageError
from ampctl.tasks.task import Task, as_task, why_not_called

__all__ = [
    "Classification",
    "LanguageModel",
    "Regression",
    "Task",
    "Transformers",
    "as_task",
    "why_not_called",
]

IGNORE_INDEX = -100


class Classification(Task):
    """Cross entropy and accuracy; a batch is (inputs, labels).

    The model returns logits [batch, classes, ...], or an object with them in ``.logits``. Labels
    are int64 [batch, ...], or the probability of each class, floats of the logits' shape (mixup).

    The arguments are those of ``torch.nn.functional.cross_entropy``: ``label_smoothing`` from 0 to
    1; ``weight`` has a number for each class; labels of ``ignore_index`` do not count. The items
    are the labels that count, each as many as the weight of its class, by which accuracy is weighed
    too; of probabilities every one is an item, whose largest entry is the label.
    """

    def __init__(
        self,
        label_smoothing: float = 0.0,
        weight: Sequence[float] | Tensor | None = None,
        ignore_index: int = IGNORE_INDEX,
    ) -> None:
        if not 0 <= label_smoothing <= 1:
            raise ValueError(f"label_smoothing is {label_smoothing!r}; it must be from 0 to 1")
        self.label_smoothing = label_smoothing
        self.ignore_index = ignore_index
        self.weight = None if weight is None else _class_weights(weight)
        self._weight_there = self.weight  # the same, where the logits are

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the cross entropy and the logits; labels that are all ignored have loss 0."""
        inputs, labels = _pair(batch, "inputs", "labels")
        logits = _tensor(model(inputs)).float()
        weight = self._weight_at(logits)
        smoothing = self.label_smoothing
        if labels.is_floating_point():
            if not labels.numel():
                return logits.sum(), logits
            loss = F.cross_entropy(logits, labels.float(), weight, label_smoothing=smoothing)
            return loss, logits
        counted = self._counts(labels)
        if weight is not None:  # of classes that weigh nothing torch's mean may be 0 / 0, too
            labels = labels.where(counted != 0, self.ignore_index)
        loss = F.cross_entropy(
            logits, labels, weight, ignore_index=self.ignore_index, label_smoothing=smoothing
        )
        # The mean of nothing is 0 / 0, and its gradient 0 already: only the value need be mended.
        loss.detach().masked_fill_(counted.any().logical_not(), 0.0)
        return loss, logits

    def metrics(self, output: Any, batch: Any) -> dict[str, Tensor | float]:
        """Return ``accuracy``."""
        _, labels = _pair(batch, "inputs", "labels")
        guesses = output.argmax(dim=1)
        if labels.is_floating_point():
            return {"accuracy": _mean((guesses == labels.argmax(dim=1)).float())}
        counted = self._counts(labels)
        items = counted.sum()
        right = (counted * (guesses == labels)).sum()
        return {"accuracy": right / items.where(items != 0, 1)}

    def num_items(self, batch: Any) -> float | Tensor:
        """Count the labels that enter the loss, each as many as the weight of its class.

        Samples, in the batches of a task that inherits from this one and reads others.
        """
        labels = batch[1] if isinstance(batch, tuple | list) and len(batch) == 2 else None
        if not isinstance(labels, Tensor):
            return super().num_items(batch)
        if labels.is_floating_point():
            return labels.numel() / max(1, labels.shape[1] if labels.ndim > 1 else 1)
        items: Tensor = self._counts(labels).sum()
        return items

    def _counts(self, labels: Tensor) -> Tensor:
        """Return for each label how much it counts: nothing if it is ignored."""
        counted = labels != self.ignore_index
        weight = self._weight_at(labels)
        return counted if weight is None else weight[labels.where(counted, 0)] * counted

    def _weight_at(self, tensor: Tensor) -> Tensor | None:
        """Return the weights of the classes where a tensor is; they are kept there."""
        if self.weight is None or tensor.device == self.weight.device:
            return self.weight
        if self._weight_there is None or self._weight_there.device != tensor.device:
            self._weight_there = self.weight.to(tensor.device)
        return self._weight_there


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
        if not targets.numel():
            return predictions.sum(), predictions  # the mean of nothing is 0 / 0
        return F.mse_loss(predictions, targets.float()), predictions

    def metrics(self, output: Any, batch: Any) -> dict[str, Tensor | float]:
        """Return ``mae``."""
        _, targets = _pair(batch, "inputs", "targets")
        return {"mae": _mean((output - targets.float()).abs())}


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

    The items are the labels other than ``ignore_index`` where labels are whole numbers, samples
    otherwise. ``shift`` says that the model moves labels [batch, time] on by one token, as most
    causal language models do. What is None (null) is found out from the model and a batch.
    """

    def __init__(self, shift: bool | None = None, ignore_index: int | None = None) -> None:
        self.shift = shift
        self.ignore_index = ignore_index
        self.found = ""  # what was found out, in words

    @property
    def is_known(self) -> bool:
        """Whether it is known which labels count."""
        return self.shift is not None and self.ignore_index is not None

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        """Return ``model(**batch).loss`` in float32; labels that are all ignored have loss 0."""
        loss = _own_loss(model, batch).float()
        labels = _labels(batch)
        return loss if labels is None else loss.where(self._count(labels) != 0, 0.0)

    def num_items(self, batch: Any) -> float | Tensor:
        """Count the labels that enter the loss, or the samples where labels are no numbers.

        Raises UsageError if the model would have to be asked first.
        """
        labels = _labels(batch)
        if labels is None:
            return super().num_items(batch)
        items = self._count(labels)
        if self.shift is None and labels.ndim == 2 and items:
            raise UsageError(
                "task: it is not known whether the model moves its labels on by one token; give "
                "Transformers shift (true for causal language models, else false)"
            )
        return items

    def find_out(self, model: nn.Module, batch: Any) -> None:
        """Ask a model in eval mode which labels of a batch its loss counts, if that is not known.

        The index that it ignores is the one that it calls torch's cross entropy with. Labels are
        moved on if the first one of each row changes nothing; that stays open until a batch has a
        label that counts.
        """
        labels = _labels(batch)
        if labels is None:
            return
        if self.ignore_index is None:
            with _IgnoreIndex() as seen:
                _own_loss(model, batch)
            self.ignore_index = seen.found
        if self.shift is None and labels.ndim == 2:
            counted = labels[labels != self.ignore_index]
            if not counted.numel():
                return
            none = torch.full_like(labels, self.ignore_index)
            first = none.clone()
            first[:, 0] = counted.max()
            without, with_first = (
                _own_loss(model, {**batch, "labels": each}).float() for each in (none, first)
            )
            self.shift = bool(torch.isclose(without, with_first, rtol=1e-3, equal_nan=True))
        self.shift = bool(self.shift)
        moved = "moved on by one token" if self.shift else "not moved on"
        self.found = f"{moved}, {self.ignore_index} ignored, as the model's loss does it"

    def _count(self, labels: Tensor) -> Tensor:
        if labels.ndim == 2:
            labels = labels[:, int(bool(self.shift)) :]
        return (labels != (IGNORE_INDEX if self.ignore_index is None else self.ignore_index)).sum()


class _IgnoreIndex(TorchFunctionMode):
    """See which labels the first cross entropy that is called inside ignores."""

    def __init__(self) -> None:
        super().__init__()
        self.found = IGNORE_INDEX
        self._is_open = True

    def __torch_function__(
        self, func: Any, types: Any, args: Any = (), kwargs: Mapping[str, Any] | None = None
    ) -> Any:
        kwargs = kwargs or {}
        if self._is_open and func in (F.cross_entropy, F.nll_loss):
            self._is_open = False
            default = args[4] if len(args) > 4 else IGNORE_INDEX
            self.found = int(kwargs.get("ignore_index", default))
        return func(*args, **kwargs)


def _labels(batch: Any) -> Tensor | None:
    """Return a batch's labels, if they are whole numbers."""
    labels = _mapping(batch).get("labels")
    if not isinstance(labels, Tensor) or not labels.ndim or labels.is_floating_point():
        return None
    return labels


def _own_loss(model: nn.Module, batch: Any) -> Tensor:
    loss = getattr(model(**_mapping(batch)), "loss", None)
    if not isinstance(loss, Tensor):
        raise UsageError(
            f"{type(model).__name__} returned no .loss for a batch with "
            f"{', '.join(map(str, batch))}; a model of transformers returns one when the "
            'batch has "labels"'
        )
    return loss


def _class_weights(weight: Sequence[float] | Tensor) -> Tensor:
    """Return weights of classes in float32; raises ValueError for what no mean can divide by."""
    weights = torch.as_tensor(weight, dtype=torch.float32)
    if weights.ndim != 1 or not bool((weights.isfinite() & (weights >= 0)).all()):
        raise ValueError(f"weight is {weight!r:.60}; it must be a list of numbers, 0 or more")
    if not weights.any():
        raise ValueError("weight is 0 for every class, so that no label would count")
    return weights


def _mean(values: Tensor) -> Tensor:
    return values.mean() if values.numel() else values.sum()


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
