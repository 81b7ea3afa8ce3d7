"""Which labels the loss of a model of transformers counts is found out from the model."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from states import make_state
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.engine.evaluation import evaluate
from ampctl.engine.step import settle, train_step
from ampctl.errors import UsageError
from ampctl.tasks import Transformers


class Labelled(nn.Module):
    """Token classes, pixels or a causal loss, with an ignored index of its own."""

    def __init__(self, kind: str, ignored: int) -> None:
        super().__init__()
        self.kind, self.ignored = kind, ignored
        self.layer = nn.Embedding(4, 4)
        self.dropout = nn.Dropout(0.0)

    def forward(self, input_ids: Tensor, labels: Tensor) -> SimpleNamespace:
        logits = self.dropout(self.layer(input_ids)).movedim(-1, 1)
        if self.kind == "causal":  # as transformers does it: padded, so that shapes do not show it
            labels = F.pad(labels, (0, 1), value=self.ignored)[:, 1:]
        criterion = nn.CrossEntropyLoss(ignore_index=self.ignored)
        return SimpleNamespace(loss=criterion(logits, labels))


def _batch(kind: str, ignored: int) -> dict[str, Tensor]:
    generator = torch.Generator().manual_seed(3)
    shape = (6, 5, 2) if kind == "pixels" else (6, 5)
    labels = torch.randint(0, 4, shape, generator=generator)
    for row in range(6):
        labels[row, : row % 4] = ignored
    labels[0] = ignored  # a micro-batch that is all ignored
    inputs = torch.randint(0, 4, shape, generator=generator)
    return {"input_ids": inputs, "labels": labels}


@pytest.mark.parametrize("ignored", [-100, 255])
@pytest.mark.parametrize("kind", ["causal", "tokens", "pixels"])
def test_a1_a_model_s_own_labels_weigh_alike_however_they_are_cut(kind: str, ignored: int) -> None:
    batch = _batch(kind, ignored)
    cut = [{name: value[at : at + 1] for name, value in batch.items()} for at in range(6)]
    weights, losses, evaluated = [], [], []
    for window in ([batch], cut):
        torch.manual_seed(0)
        model, task = Labelled(kind, ignored), Transformers()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.5)
        state = make_state(model, optimizer, "float32", task=task)
        train_step(state, window)
        report = settle(state)
        assert report is not None
        assert (task.shift, task.ignore_index) == (kind == "causal", ignored)
        assert model.training
        losses.append(report.loss)
        weights.append(model.layer.weight.detach().clone())
        evaluated.append((evaluate(state, window) or {})["eval/loss"])
    assert losses[0] == pytest.approx(losses[1], rel=1e-5)
    assert evaluated[0] == pytest.approx(evaluated[1], rel=1e-5)
    assert torch.allclose(weights[0], weights[1], rtol=1e-5)


def test_a1_what_the_recipe_says_of_labels_is_taken_and_nothing_is_guessed() -> None:
    task, batch = Transformers(shift=True, ignore_index=1), _batch("tokens", -100)
    task.find_out(Labelled("tokens", -100), batch)
    assert (task.shift, task.ignore_index) == (True, 1)
    with pytest.raises(UsageError, match="give Transformers shift"):
        Transformers().num_items(batch)


def _tiny(kind: str) -> Any:
    transformers = pytest.importorskip("transformers")
    if kind == "BertForMaskedLM":
        config: Any = transformers.BertConfig(
            vocab_size=11,
            hidden_size=8,
            num_hidden_layers=1,
            num_attention_heads=1,
            intermediate_size=8,
        )
    elif kind == "T5ForConditionalGeneration":
        config = transformers.T5Config(
            vocab_size=11,
            d_model=8,
            d_kv=8,
            d_ff=8,
            num_layers=1,
            num_heads=1,
            decoder_start_token_id=0,
        )
    else:
        config = transformers.GPT2Config(
            vocab_size=11, n_positions=8, n_embd=8, n_layer=1, n_head=1, num_labels=11
        )
    return getattr(transformers, kind)(config).eval()


@pytest.mark.parametrize(
    ("kind", "shift"),
    [
        ("GPT2LMHeadModel", True),
        ("GPT2ForTokenClassification", False),
        ("BertForMaskedLM", False),
        ("T5ForConditionalGeneration", False),
    ],
)
def test_a1_real_models_are_found_out(kind: str, shift: bool) -> None:
    tokens = torch.arange(16).reshape(2, 8) % 11
    labels = tokens.clone()
    labels[0, :3] = -100
    task = Transformers()
    with torch.no_grad():
        task.find_out(_tiny(kind), {"input_ids": tokens, "labels": labels})
    assert (task.shift, task.ignore_index) == (shift, -100)
