"""Parts of a recipe that do not fit each other are told in words; a user's own fault is not."""

from __future__ import annotations

from pathlib import Path

import pytest
import torch
from torch import nn

from ampctl.doctor.misfit import in_words
from ampctl.errors import MachineError, UsageError
from ampctl.recipe.load import load_recipe
from ampctl.train import worker
from ampctl.train.check import check_recipe

RECIPE = """
name: misfit
model: {_target_: ampctl.models.MLP, in_features: 64, hidden: [8], num_classes: 10}
task: {_target_: ampctl.tasks.Classification}
data:
  train: {_target_: ampctl.data.Digits}
  eval: {_target_: ampctl.data.Digits, split: test}
  batch_size: 256
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
amp: {dtype: bfloat16}
train: {max_epochs: 1}
"""


@pytest.fixture(autouse=True)
def _recipe(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE)


def said(*overrides: str) -> str:
    with pytest.raises(UsageError) as found:
        check_recipe(load_recipe("recipe.yaml", overrides))
    return str(found.value)


def test_a_model_of_other_inputs_is_named_with_its_module_and_the_batch() -> None:
    message = said("model.in_features=60")
    assert "the first step failed in model.layers" in message or "(Linear)" in message
    assert "float32 [256, 1, 8, 8], int64 [256]" in message


def test_labels_that_the_model_has_no_class_for_are_told() -> None:
    assert "failed in Classification.loss: IndexError: Target 9 is out of" in said(
        "model.num_classes=9"
    )


def test_an_optimizer_that_cannot_do_it_is_named() -> None:
    assert "failed in SparseAdam.step" in said("optimizer={_target_: torch.optim.SparseAdam}")


def test_training_tells_it_too_and_keeps_the_traceback_in_the_log() -> None:
    loaded = load_recipe("recipe.yaml", ["model.in_features=60"])
    with pytest.raises(UsageError, match="step 1 failed"):
        worker.train(loaded, run_dir=Path("run"), resume=False, quiet=True)
    log = Path("run/logs/rank-0.log").read_text()
    assert "step 1 failed" in log
    assert "Traceback" in log


def test_a_fault_in_the_users_own_file_is_left_alone(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (folder / "own_wrong.py").write_text(
        "from torch import nn\n"
        "class Net(nn.Module):\n"
        "    def __init__(self):\n"
        "        super().__init__()\n"
        "        self.only = nn.Linear(60, 10)\n"
        "    def forward(self, x):\n"
        "        return self.only(x.flatten(1))\n"
    )
    monkeypatch.syspath_prepend(str(folder))
    with pytest.raises(RuntimeError, match="mat1 and mat2"):
        check_recipe(load_recipe("recipe.yaml", ["model={_target_: own_wrong.Net}"]))


def test_out_of_memory_says_what_to_lower() -> None:
    error = torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB")
    told = in_words(error, nn.Linear(1, 1), (), doing="step 3")
    assert isinstance(told, MachineError)
    assert "step 3: out of memory" in str(told)
    assert "Lower data.micro_batch_size" in str(told)
