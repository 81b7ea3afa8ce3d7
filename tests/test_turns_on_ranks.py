"""Several optimizers that take turns, on several ranks: the turns, skips and weights of one."""

from __future__ import annotations

import os
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from gan_parts import Gan, Pair
from test_ddp import TESTS, assert_close, events, one, ranks
from test_resume_exact import assert_same, last
from torch import Tensor, nn

RECIPE = """
name: turns
seed: 3
model: {_target_: test_turns_on_ranks.Smooth}
task: {_target_: gan_parts.Gan, every: 2, penalty: 1.0}
data:
  train: {_target_: gan_parts.Points, size: 22}
  batch_size: 8
optimizer:
  critic: {_target_: torch.optim.Adam, params: "critic.*", lr: 1e-2}
  generator: {_target_: torch.optim.SGD, params: "generator.*", lr: 1e-2, momentum: 0.9}
amp: {dtype: float32, init_scale: 1024, growth_interval: 3, clip_norm: 1.0}
train: {max_epochs: 3, ema_decay: 0.9}
checkpoint: {every_steps: 1, keep_last: 100}
log: {every_steps: 1}
"""


class Smooth(Pair):
    """Without statistics of a batch, which differ between one rank and two; one layer is idle."""

    def __init__(self) -> None:
        super().__init__()
        self.generator[1] = nn.LayerNorm(8)
        self.critic.idle = nn.Linear(2, 2)
        self.critic.forward = lambda x: self.critic[2](self.critic[1](self.critic[0](x)))
        if os.environ.get("RANK", "0") != "0":  # whose weights are not those of the seed
            with torch.no_grad():
                self.critic[0].weight.add_(1.0)


class Odd(Gan):
    """Its turns depend on the rank."""

    def losses(self, model: Any, batch: Any, step: int, grad: Any) -> Iterator[tuple[str, Tensor]]:
        turns = list(super().losses(model, batch, step, grad))
        yield from turns[: 1 + int(os.environ.get("RANK", "0"))]


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    Path("recipe.yaml").write_text(RECIPE)


@pytest.mark.parametrize(
    ("size", "changes"),
    [
        (2, ("amp.dtype=float16", "data.train.bad_real=[3]")),
        (3, ("data.micro_batch_size=2", "amp.all_or_nothing=true")),
    ],
)
def test_turns_on_several_ranks_equal_those_of_one(size: int, changes: tuple[str, ...]) -> None:
    whole = one("one", *changes)
    ranks(size, "many", *changes)
    many = last(Path("many"))
    dtype = "float16" if "amp.dtype=float16" in changes else "float32"
    assert_close(many, whole, dtype)
    for name in ("optimizer_updates", "optimizer_skips"):
        assert many["progress"][name] == whole["progress"][name]
    assert many["progress"]["optimizer_updates"]["generator"] < many["progress"]["updates"]
    assert bool(many["progress"]["skipped"]) == (dtype == "float16")
    assert torch.equal(many["model"]["critic.idle.weight"], whole["model"]["critic.idle.weight"])
    for mine, other in zip(events("many", "train"), events("one", "train"), strict=True):
        for name in ("loss/critic", "grad_norm/critic"):
            if other[name] not in ("nan", "inf"):
                assert mine[name] == pytest.approx(other[name], rel=3e-2)


def test_resume_of_turns_on_ranks_is_exact_with_statistics_of_each_rank() -> None:
    pair = ("model={_target_: gan_parts.Pair}",)
    ranks(2, "a", *pair)
    ranks(2, "b", resume="a/checkpoints/step-00000004.pt")
    assert_same(last(Path("b")), last(Path("a")))


def test_dd_turns_that_differ_between_ranks_are_told_and_hang_nobody() -> None:
    odd = "task={_target_: test_turns_on_ranks.Odd}"
    with pytest.raises(Exception, match=r"same turns on each rank: .*'generator' and at their end"):
        ranks(2, "a", odd)
