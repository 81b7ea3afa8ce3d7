"""The metrics of a split: weighed by items, and without a host read for each batch."""

from __future__ import annotations

import math
from typing import Any

import pytest
import torch
from states import batches, make_state
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.doctor.trace import Operation, Trace
from ampctl.engine.evaluation import _means, evaluate
from ampctl.tasks import Classification
from ampctl.tasks.task import as_task


class Counted:
    """The loss is the first value of the batch, which counts as many items as its second says."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return batch[0]

    def num_items(self, batch: Tensor) -> Tensor:
        return batch[1].long()


def test_each_batch_weighs_by_its_items_and_one_without_items_not_at_all() -> None:
    model = nn.Linear(1, 1)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = make_state(model, optimizer, "float32", task=as_task(Counted()))
    split = [torch.tensor(each) for each in ([2.0, 3.0], [math.nan, 0.0], [5.0, 1.0])]
    assert evaluate(state, split) == {"eval/loss": 11 / 4}


class Logits(Classification):
    """Counts by a tensor, as a language model does."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        inputs, labels = batch
        logits = model(inputs)
        return F.mse_loss(logits[:, 0], labels.float()), logits

    def metrics(self, output: Any, batch: Any) -> dict[str, Tensor | float]:
        return {"mean": output.mean()}

    def num_items(self, batch: Any) -> Tensor:
        return (batch[1] >= 0).sum()


def test_a_device_is_not_waited_for_at_each_batch() -> None:
    model = nn.Linear(8, 4, device="meta")  # whose values nobody can read
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = make_state(model, optimizer, "float32", task=Logits())
    state.device = torch.device("meta")
    seen: list[Operation] = []
    with pytest.raises((RuntimeError, NotImplementedError), match="meta"), Trace(seen.append):
        _means(state, batches(3), lambda: True)  # raises at its end, where the sums are read
    on_device = [op for op in seen if any(t.is_meta for t in op.outputs())]
    from_host = [op.name for op in on_device if any(t.device.type == "cpu" for t in op.inputs())]
    assert from_host == ["_to_copy"] * 6  # inputs and labels, and nothing that the host worked out
