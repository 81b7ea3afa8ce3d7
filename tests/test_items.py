"""What counts as an item: the same loss, gradient and metrics however a batch is cut."""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from states import Net, batches, make_state, run
from test_ddp import TESTS, assert_close, events, one, ranks
from test_resume_exact import last
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.doctor.check import check_recipe
from ampctl.engine.evaluation import NoItemsError, evaluate
from ampctl.engine.losses import forward_backward
from ampctl.errors import UsageError
from ampctl.recipe.load import load_recipe
from ampctl.tasks import Classification, LanguageModel, Regression, Task, Transformers
from ampctl.tasks.task import as_task, count_items

CLASSES = 3


class Tokens(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.embedding, self.head = nn.Embedding(CLASSES, 4), nn.Linear(4, CLASSES)

    def forward(self, tokens: Tensor) -> Tensor:
        return self.head(self.embedding(tokens))


class Foreign(Tokens):
    """Computes its loss as the models of transformers do, whose mean of nothing is NaN."""

    def __init__(self, shift: bool, of_samples: bool = False) -> None:
        super().__init__()
        self.shift, self.of_samples = shift, of_samples

    def forward(self, input_ids: Tensor, labels: Tensor) -> Any:
        logits = super().forward(input_ids)
        if self.of_samples:
            logits = logits.mean(1)
        elif self.shift:
            logits, labels = logits[:, :-1], labels[:, 1:]
        loss = F.cross_entropy(logits.reshape(-1, CLASSES), labels.reshape(-1))
        return SimpleNamespace(loss=loss, logits=logits)


def _labels(*shape: int, ignore: int = -100) -> Tensor:
    labels = torch.randint(CLASSES, shape)
    return torch.where(torch.rand(shape) < 0.5, ignore, labels)


def _classification(**options: Any) -> Any:
    ignore = options.get("ignore_index", -100)
    return (
        Classification(**options),
        nn.Linear(4, CLASSES),
        lambda n: (
            torch.randn(n, 4),
            _labels(n, ignore=ignore),
        ),
    )


def _segmentation(**options: Any) -> Any:
    return (
        Classification(**options),
        nn.Conv2d(4, CLASSES, 1),
        lambda n: (
            torch.randn(n, 4, 2, 3),
            _labels(n, 2, 3),
        ),
    )


def _soft(model: nn.Module, *shape: int, **options: Any) -> Any:
    return (
        Classification(**options),
        model,
        lambda n: (
            torch.randn(n, 4, *shape),
            torch.rand(n, CLASSES, *shape).softmax(1),
        ),
    )


def _transformers(shift: bool, of_samples: bool = False) -> Any:
    return (
        Transformers(shift=shift),
        Foreign(shift, of_samples),
        lambda n: {
            "input_ids": torch.randint(CLASSES, (n, 4)),
            "labels": _labels(n) if of_samples else _labels(n, 4),
        },
    )


WEIGHT = [0.2, 0.0, 3.5]
CASES: dict[str, Callable[[], tuple[Task, nn.Module, Callable[[int], Any]]]] = {
    "labels": lambda: _classification(),
    "ignore_index": lambda: _classification(ignore_index=1),
    "weights": lambda: _classification(weight=WEIGHT),
    "weights and smoothing": lambda: _classification(weight=[0.5, 1.0, 2.0], label_smoothing=0.2),
    "smoothing": lambda: _classification(label_smoothing=0.1),
    "pixels": lambda: _segmentation(),
    "weighted pixels": lambda: _segmentation(weight=WEIGHT),
    "soft": lambda: _soft(nn.Linear(4, CLASSES)),
    "soft, weighted": lambda: _soft(
        nn.Linear(4, CLASSES), weight=[0.5, 1.0, 2.0], label_smoothing=0.1
    ),
    "soft pixels": lambda: _soft(nn.Conv2d(4, CLASSES, 1), 2, 3),
    "regression": lambda: (
        Regression(),
        nn.Linear(4, 2),
        lambda n: (torch.randn(n, 4), torch.randn(n, 2)),
    ),
    "tokens": lambda: (
        LanguageModel(),
        Tokens(),
        lambda n: (torch.randint(CLASSES, (n, 4)), _labels(n, 4)),
    ),
    "causal": lambda: _transformers(True),
    "token classes": lambda: _transformers(False),
    "sequence classes": lambda: _transformers(False, of_samples=True),
}


def _cut(batch: Any, low: int, high: int) -> Any:
    if isinstance(batch, dict):
        return {name: value[low:high] for name, value in batch.items()}
    return tuple(value[low:high] for value in batch)


def _gradient(state: Any, window: Sequence[Any]) -> tuple[float, list[Tensor]]:
    for parameter in state.parameters:
        parameter.grad = None
    loss = forward_backward(state, window)
    return float(loss), [
        torch.zeros_like(p) if p.grad is None else p.grad.clone() for p in state.parameters
    ]


@pytest.mark.parametrize("name", CASES)
@settings(max_examples=15, deadline=None)
@given(data=st.data())
def test_a1_any_cut_gives_the_same_loss_gradient_and_metrics(name: str, data: Any) -> None:
    torch.manual_seed(data.draw(st.integers(0, 2**20)))
    task, model, make = CASES[name]()
    size = data.draw(st.integers(1, 6))
    batch = make(size)
    cuts = sorted(data.draw(st.lists(st.integers(0, size), max_size=5)))
    pieces = [_cut(batch, low, high) for low, high in zip([0, *cuts], [*cuts, size], strict=True)]
    state = make_state(model, torch.optim.SGD(model.parameters(), lr=0.1), "float32", task=task)

    items = count_items(task, batch)
    assert sum(count_items(task, each) for each in pieces) == pytest.approx(items)
    whole, gradients = _gradient(state, [batch])
    found, mine = _gradient(state, pieces)
    assert found == pytest.approx(whole, rel=1e-5, abs=1e-6)
    for a, b in zip(mine, gradients, strict=True):
        torch.testing.assert_close(a, b, rtol=1e-4, atol=1e-6)
    if not items:
        assert whole == 0
        with pytest.raises(NoItemsError):
            evaluate(state, pieces)
    else:
        assert evaluate(state, pieces) == pytest.approx(evaluate(state, [batch]), rel=1e-5)
    for each in pieces:
        if count_items(task, each):
            continue
        loss = task.loss(model, each)
        loss, output = loss if isinstance(loss, tuple) else (loss, None)
        assert loss == 0
        assert all(
            float(torch.as_tensor(value).detach()) == 0
            for value in task.metrics(output, each).values()
        )


@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, [0.5, 0.0, 2.0]])
def test_a1_the_loss_is_torchs_own_to_the_bit(smoothing: float, weight: Any) -> None:
    if smoothing and weight:
        weight = [0.5, 1.0, 2.0]
    labels = torch.tensor([0, -100, 1, 2, 2, -100, 0])
    logits = torch.randn(7, 3)
    task = Classification(label_smoothing=smoothing, weight=weight)
    theirs = F.cross_entropy(
        logits, labels, torch.tensor(weight) if weight else None, label_smoothing=smoothing
    )
    loss, output = task.loss(nn.Identity(), (logits, labels))
    assert torch.equal(loss, theirs)
    right = (logits.argmax(1) == labels)[labels >= 0].float()
    of_each = torch.tensor(weight or [1.0, 1.0, 1.0])[labels[labels >= 0]]
    assert float(task.metrics(output, (logits, labels))["accuracy"]) == pytest.approx(
        float((right * of_each).sum() / of_each.sum())
    )


def test_a1_a_batch_of_ignored_labels_has_no_gradient_either() -> None:
    for options in ({}, {"label_smoothing": 0.1}, {"weight": WEIGHT}):
        logits = torch.randn(2, 3, requires_grad=True)
        labels = torch.tensor([-100, 1 if "weight" in options else -100])
        loss, _ = Classification(**options).loss(nn.Identity(), (logits, labels))
        loss.backward()
        assert loss == 0
        assert not logits.grad.any()


@pytest.mark.parametrize("weight", [[1.0, -1.0], [math.nan], [0.0, 0.0], 3.0, [[1.0]]])
def test_a1_weights_that_no_mean_can_use_are_told(weight: Any) -> None:
    with pytest.raises(ValueError, match="weight is"):
        Classification(weight=weight)


@pytest.mark.parametrize("found", [None, -1, math.nan, math.inf, "many", torch.ones(2)])
def test_a1_a_count_that_is_none_is_told(found: Any) -> None:
    class Own:
        def loss(self, model: Any, batch: Any) -> Tensor:
            return model(batch[0]).mean()

        def num_items(self, batch: Any) -> Any:
            return found

    with pytest.raises(UsageError, match=r"Own\.num_items gave .*a number, 0 or more"):
        count_items(as_task(Own()), None)


@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_a1_a_step_without_items_makes_no_update_and_is_no_skip(dtype: str) -> None:
    """Weight decay and momentum would move the weights by a gradient of 0."""
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9, weight_decay=0.1)
    state = make_state(model, optimizer, dtype, ema_decay=0.9, factor=lambda n: 1 / (n + 1))
    good = batches(3)
    run(state, [[good[0]]])
    kept = {name: value.clone() for name, value in model.state_dict().items()}
    saved = state.scaler.state_dict()
    ignored = (good[1][0], torch.full_like(good[1][1], -100))
    reports = run(state, [[ignored], [ignored, ignored]])
    assert [report.loss for report in reports] == [None, None]
    assert not any(report.skipped for report in reports)
    for name, value in model.state_dict().items():
        assert torch.equal(value, kept[name]), name
    assert state.scaler.state_dict() == saved
    progress = state.progress
    assert (progress.step, progress.updates, progress.skipped) == (3, 1, 0)
    assert run(state, [[good[2]]])[-1].lr == 0.05  # the second update


def test_a1_an_ignored_micro_batch_leaves_statistics_alone() -> None:
    model = Net()
    state = make_state(model, torch.optim.SGD(model.parameters(), lr=0.1), "float32")
    first, second = batches(2)
    run(state, [[first, (second[0], torch.full_like(second[1], -100))]])
    assert int(model.norm.num_batches_tracked) == 1


RECIPE = """
name: items
seed: 3
model: {_target_: test_items.Small}
task: {_target_: ampctl.tasks.Classification, weight: [0.5, 2.0, 1.0, 0.0]}
data:
  train: {_target_: test_items.labelled, size: 22}
  eval: {_target_: test_items.labelled, size: 7}
  batch_size: 8
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
amp: {dtype: float32, clip_norm: 1.0}
train: {max_epochs: 2, ema_decay: 0.9, device: cpu}
log: {every_steps: 1}
"""


class Small(nn.Linear):
    def __init__(self) -> None:
        super().__init__(8, 4)


def labelled(size: int, ignored: int = 12) -> Any:
    """Samples in order; the first of them have no label that counts."""
    generator = torch.Generator().manual_seed(1)
    x = torch.randn(size, 8, generator=generator)
    y = torch.randint(0, 4, (size,), generator=generator)
    y[: ignored if size > ignored else 3] = -100
    return torch.utils.data.TensorDataset(x, y)


@pytest.fixture
def recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    Path("recipe.yaml").write_text(RECIPE)


@pytest.mark.usefixtures("recipe")
def test_a1_ranks_and_cuts_train_and_evaluate_alike(capsys: pytest.CaptureFixture[str]) -> None:
    in_order = "data.shuffle=false"  # so that the first step has no item, on any rank
    whole = one("one", in_order)
    assert whole["progress"]["updates"] == 4  # of six steps
    assert "complete: 6 steps, 4 updates, 2 without items" in capsys.readouterr().out
    one("cut", in_order, "data.micro_batch_size=1", "data.eval_batch_size=2")
    ranks(2, "many", in_order, "data.micro_batch_size=2", "data.eval_batch_size=1")
    for other in ("cut", "many"):
        assert_close(last(Path(other)), whole, "float32")
        for mine, theirs in zip(events(other, "eval"), events("one", "eval"), strict=True):
            for name in ("eval/loss", "eval/accuracy"):
                assert mine[name] == pytest.approx(theirs[name], rel=1e-5)
    told = [event["loss"] for event in events("many", "train")]
    assert [loss is None for loss in told] == [True, False, False] * 2


@pytest.mark.usefixtures("recipe")
def test_a1_check_tries_a_step_that_has_items() -> None:
    found = check_recipe(load_recipe("recipe.yaml", ["data.shuffle=false"]))
    assert found["first step"].endswith("; before it 1 without items")
    nothing = ["data.train.size=100", "data.train.ignored=99", "data.shuffle=false"]
    with pytest.raises(UsageError, match="the first 10 steps have no items"):
        check_recipe(load_recipe("recipe.yaml", nothing))


def image(height: int = 8) -> Tensor:
    return torch.zeros(3, height, 8)


def target(boxes: int) -> dict[str, Any]:
    return {"boxes": torch.zeros(boxes, 4), "labels": torch.zeros(boxes), "image_id": 1}


STACKED = torch.zeros(5, 3, 8, 8)
DETECTION = [(image(8), target(2)), (image(6), target(1)), (image(8), target(0)), (image(8), {})]
BATCHES: dict[str, tuple[Any, int | None]] = {
    "stacked": ((STACKED, torch.zeros(5)), 5),
    "stacked, as torch nests it": ([[STACKED, STACKED], {"y": torch.zeros(5)}], 5),
    "stacked, with texts": ({"text": ["a"] * 5, "x": STACKED}, 5),
    "tuples of images and targets": (tuple(zip(*DETECTION, strict=True)), 4),
    "lists of them": ([*map(list, zip(*DETECTION, strict=True))], 4),
    "one image": (([image()], [target(2)]), 1),
    "images of one size and classes": (((image(), image()), (1, 0)), 2),
    "a dictionary of lists": ({"images": [image()] * 4, "targets": [target(3)] * 4}, 4),
    "a list of pairs": ([(image(), target(n)) for n in range(6)], 6),
    "a list of dictionaries": ([target(n) for n in range(7)], 7),
    "a list of sequences": ([torch.zeros(n, 16) for n in (9, 2, 4)], 3),
    "images stacked, targets not": ((STACKED, [target(n) for n in range(5)]), 5),
    "targets first": ({"labels": [target(3)] * 5, "x": STACKED}, 5),
    "a tuple of fields": ((torch.zeros(8, 16), torch.zeros(9, 16)), 8),
    "with a number": ({"x": torch.zeros(8, 16), "length": 3}, 8),
    "a tensor": (torch.zeros(8), 8),
    "nothing": ({"x": torch.zeros(()), "y": "a"}, None),
}


@pytest.mark.parametrize(("batch", "count"), BATCHES.values(), ids=BATCHES)
def test_samples_are_counted_where_a_collate_function_leaves_them_in_lists(
    batch: Any, count: int | None
) -> None:
    task = Task()
    if count is None:
        with pytest.raises(UsageError, match=r"give the task a method num_items\(batch\)"):
            task.num_items(batch)
    else:
        assert task.num_items(batch) == count
