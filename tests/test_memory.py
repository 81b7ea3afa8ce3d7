"""What a step holds on to: nothing of a forward pass outlives its backward pass."""

from __future__ import annotations

import gc
from collections.abc import Iterator
from typing import Any
from weakref import ref

import pytest
import torch
from states import batches, make_state, run
from test_several_optimizers import make_state as make_several
from torch import Tensor, nn

from ampctl.amp.activations import Peaks
from ampctl.tasks import Classification


class Watched(Classification):
    """Keeps an eye on the logits of earlier micro-batches."""

    def __init__(self) -> None:
        super().__init__()
        self.made: list[ref[Tensor]] = []

    def alive(self) -> int:
        gc.collect()
        return sum(each() is not None for each in self.made)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        assert not self.alive(), "a forward pass runs beside the logits of the one before"
        loss, logits = super().loss(model, batch)
        self.made += [ref(loss), ref(logits)]
        return loss, logits


@pytest.mark.parametrize("micro_batches", [1, 3])
def test_logits_are_gone_before_the_next_pass_and_the_step(micro_batches: int) -> None:
    model, task = nn.Linear(8, 4), Watched()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    alive: list[int] = []
    optimizer.register_step_pre_hook(lambda *_: alive.append(task.alive()))
    run(make_state(model, optimizer, "float32", task=task), [batches(micro_batches)])
    assert alive == [0]


def test_the_loss_of_a_turn_is_gone_before_its_step() -> None:
    made: list[ref[Tensor]] = []

    class Turns:
        def losses(self, model: Any, batch: Tensor) -> Iterator[tuple[str, Tensor]]:
            for name in "ab":
                yield name, self.noted(model[name](batch).sum())

        def noted(self, loss: Tensor) -> Tensor:
            made.append(ref(loss))
            return loss

    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})
    state = make_several(model, ("a", "b"), Turns())
    alive: list[int] = []
    for updater in state.updaters:
        updater.optimizer.register_step_pre_hook(
            lambda *_: alive.append(sum(each() is not None for each in made))
        )
    run(state, [[torch.ones(2, 3), torch.ones(2, 3)]])
    assert len(made) == 4
    assert alive == [0, 0]


def test_a_look_at_the_outputs_keeps_none_of_them() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4))
    with Peaks(active=True) as peaks, torch.autocast("cpu", dtype=torch.float16):
        output = ref(model(torch.ones(1, 4)))
        assert len(peaks.modules) == 2
        assert output() is None
