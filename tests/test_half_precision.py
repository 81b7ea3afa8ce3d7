"""What does not run in half precision ends in words, with cures that were tried; none is timed.

That a device lacks a kernel is played: by an operation that refuses the dtypes it is told.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

from ampctl.doctor.check import check_recipe
from ampctl.doctor.half_precision import HalfPrecisionError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker

RECIPE = """
name: half
model: {_target_: test_half_precision.Net}
task: {_target_: ampctl.tasks.Regression}
data:
  train: {_target_: test_half_precision.data}
  eval: {_target_: test_half_precision.data}
  batch_size: 4
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
amp: {dtype: float16, init_scale: 1.0}
train: {max_epochs: 1, device: cpu}
"""
SAID = {
    "kernel": "\"lu_cpu\" not implemented for '{}'",
    "primitive": "could not create a primitive descriptor for the LSTM forward propagation",
    "clash": "expected scalar type Float but found {}",
    "autocast": "torch.nn.functional.binary_cross_entropy and torch.nn.BCELoss are unsafe to "
    "autocast.",
}
NAMES = {torch.float16: "Half", torch.bfloat16: "BFloat16"}


def data() -> TensorDataset:
    return TensorDataset(torch.ones(8, 2), torch.ones(8, 2))


class Refuses(torch.autograd.Function):
    """An operation that is there in float32 alone: in the forward or in the backward pass."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, said: str, refused: tuple[str, ...], backward: bool) -> Tensor:
        ctx.said, ctx.refused, ctx.backward = said, refused, backward
        if not backward:
            _refuse(x, said, refused)
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> Any:
        if ctx.backward:
            _refuse(gradient, ctx.said, ctx.refused)
        return gradient, None, None, None


def _refuse(x: Tensor, said: str, refused: tuple[str, ...]) -> None:
    if NAMES.get(x.dtype) in refused:
        raise NotImplementedError(SAID[said].format(NAMES[x.dtype]))


class Memory(nn.Linear):
    def __init__(self, said: str, refused: tuple[str, ...], backward: bool) -> None:
        super().__init__(2, 2)
        self.setting = (said, refused, backward)

    def forward(self, x: Tensor) -> Tensor:
        return Refuses.apply(super().forward(x), *self.setting)


class Net(nn.Module):
    def __init__(
        self,
        said: str = "kernel",
        refused: list[str] | None = None,
        backward: bool = False,
        bug: str = "",
    ) -> None:
        super().__init__()
        self.memory = Memory(said, tuple(refused or ("Half",)), backward)
        self.bug = bug

    def forward(self, x: Tensor) -> Tensor:
        if self.bug == "text":
            raise RuntimeError("nothing that float16 has to do with")
        if self.bug == "shape":
            return self.memory(x) @ x.half()
        return self.memory(x)


@pytest.fixture(autouse=True)
def _recipe(folder: Path) -> None:
    (folder / "r.yaml").write_text(RECIPE)


def trains(*overrides: str, run_dir: str = "again") -> None:
    worker.train(load_recipe("r.yaml", overrides), run_dir=Path(run_dir), resume=False, quiet=True)


def trained(*overrides: str) -> str:
    with pytest.raises(HalfPrecisionError) as found:
        trains(*overrides, run_dir="run")
    return f"{found.value}"


@pytest.mark.parametrize("said", SAID)
def test_d4_what_does_not_run_in_float16_is_named_with_cures_that_were_tried(said: str) -> None:
    message = trained(f"model.said={said}")
    assert message.startswith(
        "step 1: model.memory (Memory) does not run in float16 on this cpu, in float32 it does. "
        'Set amp.modules={"memory": float32} or amp.dtype=bfloat16 or amp.dtype=float32 '
        "(tried on this batch)."
    )
    assert "in your own code: " in message
    assert "test_half_precision.py" in message
    assert "torch says: " in message
    assert "Traceback" in Path("run/logs/rank-0.log").read_text()
    trains('amp.modules={"memory": float32}', f"model.said={said}")


def test_d4_a_cure_that_does_not_work_is_not_given() -> None:
    message = trained("model.refused=[Half,BFloat16]")
    assert 'Set amp.modules={"memory": float32} or amp.dtype=float32 (tried' in message
    assert "bfloat16" not in message


def test_d4_bfloat16_that_does_not_run_is_told_too() -> None:
    message = trained("model.refused=[BFloat16]", "amp.dtype=bfloat16")
    assert "does not run in bfloat16" in message
    assert 'amp.modules={"memory": float32} or amp.dtype=float32 (tried' in message


def test_d4_an_operation_of_the_backward_pass_is_told() -> None:
    assert "does not run in float16 on this cpu" in trained("model.backward=true")


@pytest.mark.parametrize("bug", ["text", "shape"])
def test_d4_another_fault_is_not_laid_on_the_dtype(bug: str) -> None:
    with pytest.raises(RuntimeError):
        trains(f"model.bug={bug}")


def test_d4_check_for_a_device_that_is_not_here_goes_on_in_float32(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(torch.cuda, "is_available", lambda: False)
    facts = check_recipe(load_recipe("r.yaml", ["train.device=cuda", "model.said=primitive"]))
    assert facts["verdict"] == "ready to train"
    assert facts["dtype"].startswith("float16")
    assert "model.memory (Memory) does not run in float16 on this cpu" in facts["rehearsal"]
    with pytest.raises(HalfPrecisionError):
        check_recipe(load_recipe("r.yaml", ["model.said=primitive"]))
