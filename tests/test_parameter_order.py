"""Resuming a model that registers the same parameters in another order."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import own_parts
import pytest
import torch
from test_resume_changes import RECIPE
from test_resume_exact import assert_same

from ampctl.errors import CheckpointError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker
from ampctl.state_dict.load import load_optimizer

OTHER = "model={_target_: own_parts.OtherOrder}"
ADAM = "optimizer={_target_: torch.optim.AdamW, lr: 0.01, groups: {'*norm*': {lr: 0.02}}}"


@pytest.fixture(autouse=True)
def _recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def train(*overrides: str) -> None:
    loaded = load_recipe("recipe.yaml", overrides)
    worker.train(loaded, run_dir=Path("a"), resume=False, quiet=True)


def resume(step: int, *overrides: str) -> None:
    source = Path(f"a/checkpoints/step-{step:08d}.pt")
    worker.resume(source, overrides, run_dir=Path("b"), trusted=False, quiet=False)


def held(run_dir: str) -> tuple[dict[str, Any], list[list[str]], dict[str, Any]]:
    """Return what the optimizer holds at the end, by name; the names in order; and the weights."""
    saved = torch.load(f"{run_dir}/checkpoints/latest.pt", weights_only=True)
    groups, state = saved["optimizer"]["param_groups"], saved["optimizer"]["state"]
    names = [group["param_names"] for group in groups]
    by_name = {
        name: state[index]
        for group in groups
        for name, index in zip(group["param_names"], group["params"], strict=True)
    }
    return by_name, names, saved["model"]


@pytest.mark.parametrize("overrides", [(), (ADAM, "train.ema_decay=0.9")])
def test_the_same_parameters_in_another_order_go_on_to_the_bit(
    overrides: tuple[str, ...], capsys: pytest.CaptureFixture[str]
) -> None:
    train(*overrides)
    resume(4, OTHER)
    assert "optimizer: the model has its parameters in another order" in capsys.readouterr().out
    (states, names, weights), (others, order, moved) = held("a"), held("b")
    assert order != names
    assert [sorted(group) for group in order] == [sorted(group) for group in names]
    assert states.keys() == others.keys()
    for name, state in states.items():
        assert_same(state, others[name])
    assert weights.keys() == moved.keys()
    for name, value in weights.items():
        assert torch.equal(value, moved[name])


def test_a_state_of_all_parameters_together_is_refused_with_what_differs() -> None:
    lbfgs = "optimizer={_target_: torch.optim.LBFGS, max_iter: 2}"
    train(lbfgs, "train.max_steps=2", "scheduler=null")
    with pytest.raises(CheckpointError) as told:
        resume(1, OTHER)
    assert "the same parameters in another order, and what LBFGS holds is of all" in f"{told.value}"
    assert "where they were" not in f"{told.value}"


@pytest.mark.parametrize(
    ("gone", "said"),
    [
        (("param_names",), "6 parameters in the checkpoint, 6 now, not told apart by names"),
        (("param_names", "params"), "5 parameters in the checkpoint, 6 now"),
    ],
)
def test_a_state_without_names_is_told_as_such(gone: tuple[str, ...], said: str) -> None:
    model = own_parts.Net()
    optimizer = torch.optim.SGD(list(model.named_parameters()), lr=0.1)
    state = optimizer.state_dict()
    (group,) = state["param_groups"]
    del group["param_names"]
    if "params" in gone:
        group["params"].pop()
    with pytest.raises(CheckpointError) as told:
        load_optimizer(optimizer, state, {}, recipe_wins=False, notify=print)
    assert said in f"{told.value}"
    assert "where they were" not in f"{told.value}"
