"""The tasks: losses and metrics against plain torch, what they count, and what they refuse."""

from __future__ import annotations

import math
from types import SimpleNamespace

import pytest
import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.errors import UsageError
from ampctl.tasks import Classification, LanguageModel, Regression, Task, Transformers
from ampctl.tasks.task import as_task, why_not_called


class Echo(nn.Module):
    """Returns what it is given, so that a test chooses the outputs."""

    def forward(self, inputs: Tensor) -> Tensor:
        return inputs


class Wrapped(nn.Module):
    def forward(self, inputs: Tensor) -> SimpleNamespace:
        return SimpleNamespace(logits=inputs, hidden=None)


def test_classification_is_cross_entropy_and_accuracy():
    logits = torch.tensor([[2.0, 0.0, 0.0], [0.0, 3.0, 0.0], [0.0, 0.0, 1.0], [5.0, 0.0, 0.0]])
    batch = (logits, torch.tensor([0, 1, 1, 0]))
    task = Classification()
    loss, output = task.loss(Echo(), batch)
    assert torch.equal(loss, F.cross_entropy(logits, batch[1]))
    assert task.metrics(output, batch)["accuracy"] == 0.75
    assert task.num_items(batch) == 4


def test_classification_smooths_labels():
    batch = (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    loss, _ = Classification(label_smoothing=0.1).loss(Echo(), batch)
    assert torch.equal(loss, F.cross_entropy(*batch, label_smoothing=0.1))
    with pytest.raises(ValueError, match="label_smoothing is 2"):
        Classification(label_smoothing=2)


def test_classification_of_each_pixel():
    logits, labels = torch.randn(2, 5, 4, 4), torch.randint(5, (2, 4, 4))
    _, output = Classification().loss(Echo(), (logits, labels))
    accuracy = Classification().metrics(output, (logits, labels))["accuracy"]
    assert accuracy == (logits.argmax(1) == labels).float().mean()


@pytest.mark.parametrize("task", [Classification(), LanguageModel()])
def test_a_model_may_return_an_object_with_logits(task: Task):
    batch = (torch.randn(4, 3), torch.tensor([0, 1, 2, 0]))
    plain, wrapped = task.loss(Echo(), batch), task.loss(Wrapped(), batch)
    if isinstance(plain, tuple):
        plain, wrapped = plain[0], wrapped[0]
    assert torch.equal(plain, wrapped)


def test_regression_is_mse_and_mae():
    batch = (torch.tensor([1.0, 2.0, 5.0]), torch.tensor([1.0, 4.0, 1.0]))
    loss, output = Regression().loss(Echo(), batch)
    assert loss.item() == pytest.approx(20 / 3)
    assert Regression().metrics(output, batch)["mae"].item() == pytest.approx(2)


def test_regression_never_broadcasts_predictions_against_targets():
    predictions, targets = torch.randn(5, 1), torch.randn(5)
    loss, output = Regression().loss(Echo(), (predictions, targets))
    assert torch.equal(loss, F.mse_loss(predictions[:, 0], targets))
    assert output.shape == targets.shape
    with pytest.raises(UsageError, match=r"shape \[5, 2\] and the targets \[5\]"):
        Regression().loss(Echo(), (torch.randn(5, 2), targets))
    with pytest.raises(UsageError, match="they must be the same"):
        Regression().loss(Echo(), (torch.randn(5), targets[:, None]))


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nu8_losses_and_metrics_are_not_reduced_in_half_precision(dtype: torch.dtype):
    # In float16 each of these sums, 70,000 or 90,000, is inf; in bfloat16 it is far off.
    count = 70_000
    batch = (torch.zeros(count, 2, dtype=dtype), torch.zeros(count, dtype=torch.int64))
    loss, output = Classification().loss(Echo(), batch)
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(2), rel=1e-5)
    assert Classification().metrics(output, batch)["accuracy"] == 1.0

    batch = (torch.full((9,), 300.0, dtype=dtype), torch.full((9,), 200.0, dtype=dtype))
    loss, output = Regression().loss(Echo(), batch)
    assert loss.item() == 10_000
    assert Regression().metrics(output, batch)["mae"] == 100
    loss, _ = Regression().loss(Echo(), (torch.full((9,), 400.0, dtype=dtype), torch.zeros(9)))
    assert loss.item() == 160_000

    loss = LanguageModel().loss(
        Echo(), (torch.zeros(count, 1, 2, dtype=dtype), torch.zeros(count, 1).long())
    )
    assert loss.dtype == torch.float32
    assert loss.item() == pytest.approx(math.log(2), rel=1e-5)


@pytest.mark.parametrize("dtype", [torch.float16, torch.bfloat16])
def test_nu8_autocast_does_not_lower_the_loss(dtype: torch.dtype):
    model = nn.Linear(4, 3)
    for task, targets in (
        (Classification(), torch.tensor([0, 2])),
        (Regression(), torch.randn(2, 3)),
    ):
        with torch.autocast("cpu", dtype):
            loss, output = task.loss(model, (torch.randn(2, 4), targets))
            metrics = task.metrics(output, (None, targets))
        assert loss.dtype == torch.float32
        assert all(value.dtype == torch.float32 for value in metrics.values())


def test_language_model_weighs_by_the_tokens_that_are_not_ignored():
    logits = torch.randn(2, 3, 5)
    targets = torch.tensor([[1, -100, 2], [-100, -100, 4]])
    task = LanguageModel()
    assert task.num_items((logits, targets)) == 3
    loss = task.loss(Echo(), (logits, targets))
    of_each = -logits.log_softmax(-1)
    expected = (of_each[0, 0, 1] + of_each[0, 2, 2] + of_each[1, 2, 4]) / 3
    assert loss.item() == pytest.approx(expected.item())
    assert LanguageModel(ignore_index=4).num_items((logits, targets.abs())) == 5


def test_micro_batches_of_unequal_tokens_add_up_to_the_whole():
    logits = torch.randn(4, 6, 5)
    targets = torch.randint(5, (4, 6))
    targets[0, 1:] = -100
    task = LanguageModel()
    whole = task.loss(Echo(), (logits, targets))
    parts = [(logits[:1], targets[:1]), (logits[1:], targets[1:])]
    weighed = sum(task.loss(Echo(), part) * task.num_items(part) for part in parts)
    assert (weighed / task.num_items((logits, targets))).item() == pytest.approx(whole.item())


def test_a_batch_of_ignored_tokens_has_loss_zero_and_gradient_zero():
    logits = torch.randn(1, 3, 5, requires_grad=True)
    batch = (logits, torch.full((1, 3), -100))
    loss = LanguageModel().loss(Echo(), batch)
    loss.backward()
    assert loss == 0
    assert LanguageModel().num_items(batch) == 0
    assert not logits.grad.any()


def test_perplexity_is_of_the_mean_loss_and_overflows_to_inf():
    assert LanguageModel().summary({"loss": 2.0}) == {"loss": 2.0, "perplexity": math.exp(2.0)}
    assert LanguageModel().summary({"loss": 1e6})["perplexity"] == math.inf
    assert math.isnan(LanguageModel().summary({"loss": math.nan})["perplexity"])


class CausalModel(nn.Module):
    """Computes its loss as the causal models of transformers do, in float16 to be unkind."""

    def forward(self, input_ids: Tensor, labels: Tensor | None = None) -> SimpleNamespace:
        logits = F.one_hot(input_ids, 7).float()
        if labels is None:
            return SimpleNamespace(loss=None, logits=logits)
        loss = F.cross_entropy(logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten())
        return SimpleNamespace(loss=loss.half(), logits=logits)


def test_transformers_takes_the_models_own_loss_and_counts_shifted_labels():
    tokens = torch.randint(7, (2, 5))
    labels = tokens.clone()
    labels[:, :2] = -100
    labels[0, 4] = -100
    batch = {"input_ids": tokens, "labels": labels}
    loss = Transformers().loss(CausalModel(), batch)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, CausalModel()(**batch).loss.float())
    task = Transformers()
    task.find_out(CausalModel(), batch)
    assert (task.shift, task.ignore_index) == (True, -100)
    assert task.num_items(batch) == 5
    # The first label of a row is never predicted when labels are shifted.
    full = {"input_ids": tokens, "labels": tokens}
    assert task.num_items(full) == 8
    assert Transformers(shift=False).num_items(full) == 10


@pytest.mark.parametrize("labels", [torch.tensor([1, 0, 2]), torch.rand(3, 2)])
def test_transformers_counts_samples_where_labels_are_of_samples(labels: Tensor):
    assert Transformers().num_items({"input_ids": torch.zeros(3, 9).long(), "labels": labels}) == 3


def test_transformers_matches_a_real_causal_model():
    transformers = pytest.importorskip("transformers")
    config = transformers.GPT2Config(vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=1)
    model = transformers.GPT2LMHeadModel(config).eval()
    tokens = torch.randint(11, (2, 8))
    labels = tokens.clone()
    labels[1, 3:] = -100
    batch = {"input_ids": tokens, "labels": labels}
    task = Transformers(shift=True)
    logits = model(tokens).logits
    total = F.cross_entropy(
        logits[:, :-1].flatten(0, 1), labels[:, 1:].flatten(), ignore_index=-100, reduction="sum"
    )
    assert task.num_items(batch) == 9
    assert task.loss(model, batch).item() == pytest.approx(total.item() / 9, rel=1e-5)


def test_transformers_says_what_it_misses():
    with pytest.raises(
        UsageError, match=r"CausalModel returned no \.loss for a batch with input_ids"
    ):
        Transformers().loss(CausalModel(), {"input_ids": torch.zeros(1, 2).long()})
    with pytest.raises(UsageError, match=r"mapping .* gives a tuple"):
        Transformers().loss(CausalModel(), (1, 2))


@pytest.mark.parametrize(
    "batch",
    [
        torch.zeros(6, 2),
        (torch.zeros(6, 2), torch.zeros(6)),
        [torch.tensor(1.0), {"scale": 2.0, "inputs": [torch.zeros(6)]}],
        {"name": "text", "images": torch.zeros(6, 1)},
    ],
)
def test_items_are_samples_unless_a_task_says_otherwise(batch):
    assert Classification().num_items(batch) == 6


@pytest.mark.parametrize("batch", ["text", {"scale": torch.tensor(1.0)}, [], object()])
def test_a_batch_without_tensors_is_told_in_words(batch):
    with pytest.raises(UsageError, match=r"give the task a method num_items\(batch\)"):
        Classification().num_items(batch)


@pytest.mark.parametrize("task", [Classification(), Regression(), LanguageModel()])
def test_a_batch_that_is_not_a_pair_is_told_in_words(task: Task):
    with pytest.raises(UsageError, match="gives a tuple of 3"):
        task.loss(Echo(), (1, 2, 3))
    with pytest.raises(UsageError, match="gives a dict"):
        task.loss(Echo(), {"inputs": 1, "labels": 2})


def test_a_model_without_a_tensor_is_told_in_words():
    class Several(nn.Module):
        def forward(self, inputs: Tensor) -> tuple[Tensor, Tensor]:
            return inputs, inputs

    with pytest.raises(UsageError, match="returned a tuple"):
        Classification().loss(Several(), (torch.zeros(2, 2), torch.zeros(2).long()))


def test_a_task_that_inherits_is_taken_as_it_is():
    task = Classification()
    assert as_task(task) is task


def test_any_object_with_loss_is_a_task_and_keeps_its_own_methods():
    class Own:
        def loss(self, model, batch):
            return model(batch).mean()

        def num_items(self, batch):
            return 2 * len(batch)

    task = as_task(Own())
    batch = torch.arange(4.0)
    assert isinstance(task, Task)
    assert task.loss(Echo(), batch) == 1.5
    assert task.num_items(batch) == 8
    assert task.metrics(None, batch) == {}
    assert task.summary({"loss": 1.0}) == {"loss": 1.0}


def test_an_object_without_loss_is_no_task():
    with pytest.raises(UsageError, match=r"task is a SimpleNamespace, which has no method loss\("):
        as_task(SimpleNamespace(metrics=len))
    with pytest.raises(UsageError, match=r"SimpleNamespace\.metrics is not a method"):
        as_task(SimpleNamespace(loss=len, metrics={}))


@pytest.mark.parametrize(
    ("loss", "why"),
    [
        (lambda model: 0, "too many positional arguments"),
        (lambda model, batch, epoch: 0, "missing a required argument: 'epoch'"),
        (lambda model, batch, *, step, rate: 0, "missing a required argument: 'rate'"),
        (lambda model, batch, step, rate=1, **options: 0, ""),
        (lambda *anything: 0, ""),
        (max, ""),
    ],
)
def test_a_method_that_cannot_be_called_as_a_task_s_is_told(loss, why):
    assert why_not_called(loss) == why


@pytest.mark.parametrize("shape", [(), (2, 3)])
@pytest.mark.parametrize("dtype", [torch.float32, torch.float16, torch.float64])
@pytest.mark.parametrize("smoothing", [0.0, 0.1])
@pytest.mark.parametrize("weight", [None, [0.5, 1.0, 2.0]])
def test_d10_soft_labels_are_taken_as_torch_takes_them(shape, dtype, smoothing, weight):
    logits, labels = torch.randn(4, 3, *shape), torch.rand(4, 3, *shape).softmax(1).to(dtype)
    task = Classification(label_smoothing=smoothing, weight=weight)
    loss, output = task.loss(Echo(), (logits, labels))
    weights = torch.tensor(weight) if weight else None
    theirs = F.cross_entropy(logits, labels.float(), weights, label_smoothing=smoothing)
    assert loss.dtype == torch.float32
    assert torch.equal(loss, theirs)
    right = (logits.argmax(1) == labels.argmax(1)).float().mean()
    assert torch.equal(task.metrics(output, (logits, labels))["accuracy"], right)
    assert task.num_items((logits, labels)) == 4 * math.prod(shape)


def test_d10_labels_may_be_soft_in_training_and_whole_numbers_in_evaluation():
    task = Classification(ignore_index=0)
    logits = torch.randn(4, 3)
    soft = F.one_hot(torch.tensor([0, 1, 2, 0]), 3).float()
    loss, _ = task.loss(Echo(), (logits, soft))
    assert loss.isfinite()
    assert task.num_items((logits, soft)) == 4
    assert task.num_items((logits, torch.tensor([0, 1, 2, 0]))) == 2
