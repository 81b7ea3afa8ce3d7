"""Parts of a recipe that do not fit each other are told in words; a user's own fault is not."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from states import make_state, run
from torch import nn

from ampctl.doctor.check import check_recipe
from ampctl.doctor.mismatch import in_words
from ampctl.engine.learning_rate import FunctionSchedule
from ampctl.engine.updater import Updater
from ampctl.errors import MachineError, UsageError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker
from ampctl.tasks.task import as_task

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


def raised_in(file: str, error: RuntimeError, **names: object) -> RuntimeError:
    """Return an error as if raised in a file, by code that sees the names."""
    body = f"def f({', '.join(names)}):\n    raise error"
    scope = {"error": error}
    exec(compile(body, file, "exec"), scope)
    with pytest.raises(RuntimeError) as raised:
        scope["f"](**names)  # type: ignore[operator]
    # Without the frames of this test, which is a file of a user's.
    assert raised.value.__traceback__ is not None
    last = raised.value.__traceback__.tb_next
    assert last is not None
    while last.tb_next is not None:
        last = last.tb_next
    return raised.value.with_traceback(last)


LIBRARY = str(Path(torch.__file__).parents[1] / "someones" / "model.py")


def test_nu2_a_constant_in_a_library_is_told_without_a_traceback() -> None:
    model = nn.Sequential(nn.Linear(1, 1))
    error = RuntimeError("value cannot be converted to type at::Half without overflow")
    told = in_words(raised_in(LIBRARY, error, self=model[0]), model, (), doing="step 3")
    assert isinstance(told, UsageError)
    assert "step 3: a constant in model.0 (Linear, model.py:2) does not fit float16" in str(told)
    assert "torch.finfo(x.dtype).min" in str(told)
    assert "torch says: value cannot" in str(told)


class Stale(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(2, 2), nn.Linear(2, 2)


@pytest.mark.parametrize("fault", ["graph", "in place"])
def test_a_loss_from_before_an_earlier_step_is_told(fault: str) -> None:
    model = Stale()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    hidden = model.b(model.a(torch.ones(3, 2)))
    first, second = hidden.sum(), (hidden * hidden).sum()
    first.backward(retain_graph=fault == "in place")
    if fault == "in place":
        optimizer.step()
    with pytest.raises(RuntimeError) as raised:
        second.backward()
    assert raised.value.__traceback__ is not None
    error = raised.value.with_traceback(raised.value.__traceback__.tb_next)
    told = in_words(error, model, (), doing="step 2")
    assert isinstance(told, UsageError)
    assert "a loss that is yielded after an earlier optimizer stepped" in str(told)
    assert "detach" in str(told)
    assert ("A task that calls backward() itself must not" in str(told)) == (fault == "graph")


def test_errors_that_only_look_like_the_known_ones_are_left_alone() -> None:
    for text in ("nothing known", "Function 'X' returned nan values in its 0th output."):
        assert in_words(RuntimeError(text), nn.Linear(1, 1), (), doing="step 1") is None


class Stales:
    """The second loss is computed before the first optimizer has stepped, or after."""

    def __init__(self, late: bool) -> None:
        self.late = late

    def losses(self, model: Stale, batch: Any) -> Iterator[tuple[str, torch.Tensor]]:
        out = model.b(model.a(batch))
        yield "b", out.float().mean()
        if self.late:
            out = model.b(model.a(batch))
        yield "a", out.float().mean()


@pytest.mark.parametrize("late", [False, True])
def test_a_turn_whose_loss_is_from_before_the_last_step_is_told(late: bool) -> None:
    model = Stale()
    optimizers = {name: torch.optim.SGD(getattr(model, name).parameters(), 0.1) for name in "ba"}
    state = make_state(model, optimizers["a"], "bfloat16", task=as_task(Stales(late)))
    state = replace(
        state,
        updaters=[Updater(n, o, FunctionSchedule(o, None)) for n, o in optimizers.items()],
    )
    if late:
        run(state, [[torch.ones(3, 2)]])
        return
    with pytest.raises(RuntimeError) as raised:
        run(state, [[torch.ones(3, 2)]])
    told = in_words(raised.value, model, (), doing="step 1")
    assert "compute a loss that is yielded after an earlier" in f"{told}"
