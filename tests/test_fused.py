"""Which kernel an optimizer steps by, where the recipe leaves the choice to ampctl."""

from __future__ import annotations

import copy
import itertools
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_loop import train as by_hand
from states import DTYPES, spoil
from test_resume_changes import RECIPE
from torch.nn import functional as F

from ampctl.engine.step import settle, train_step
from ampctl.errors import RecipeError
from ampctl.recipe.load import load_recipe
from ampctl.run import worker
from ampctl.run.init_from import build

COMPLEX = "model={_target_: model_parts.Complex}"
TOKENS = ("data.train={_target_: own_parts.Tokens}", "data.eval={_target_: own_parts.Tokens}")
SPARSE = ("own_parts.Bag", "model_parts.FunctionalBag")
OPTIMIZERS = ("SGD, lr: 0.1, momentum: 0.9", "Adam", "AdamW, lr: 0.01", "Adagrad, lr: 0.1")


@pytest.fixture(autouse=True)
def _recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def made(optimizer: str, *overrides: str) -> Any:
    chosen = f"optimizer={{_target_: torch.optim.{optimizer}}}"
    return build(load_recipe("recipe.yaml", ["scheduler=null", chosen, *overrides]))


def steps(job: Any, count: int = 4) -> tuple[list[Any], list[Any]]:
    """Take the first steps of a job, and return their windows and reports."""
    windows = [window for window, _ in itertools.islice(job.train_data.windows(0, 0), count)]
    reports = [train_step(job.state, window, measure=True) for window in windows]
    return windows, [*reports[1:], settle(job.state)]


def fused(job: Any) -> bool:
    (updater,) = job.state.updaters
    return any(group.get("fused") for group in updater.optimizer.param_groups)


def in_torch(job: Any, model: torch.nn.Module) -> torch.optim.Optimizer:
    """Return the same optimizer over another model, by the kernel that torch chooses."""
    (updater,) = job.state.updaters
    ours = ("fused", "decoupled_weight_decay")
    options = {k: v for k, v in updater.optimizer.defaults.items() if k not in ours}
    return type(updater.optimizer)(model.parameters(), **options)


@pytest.mark.parametrize("clip_norm", [None, 0.05])
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
def test_d3_complex_parameters_train_as_by_hand(
    dtype: str, optimizer: str, clip_norm: float | None
) -> None:
    """After a skipped step, which leaves no trace; the average follows."""
    amp = (f"amp.clip_norm={clip_norm or 'null'}", f"amp.dtype={dtype}", "train.ema_decay=0.5")
    # A loop by hand cannot have conjugated gradients: torch's clipping and Adam take none.
    conjugates = f"model.conjugates={dtype == 'float16'}".lower()
    scale = ("amp.init_scale=256", "amp.static=true")
    job = made(optimizer, COMPLEX, conjugates, *scale, *amp)
    assert not fused(job)
    mine, ema = job.state.bare, job.state.ema
    theirs, before = copy.deepcopy(mine), copy.deepcopy(mine.state_dict())
    bad = [spoil((torch.ones(6, 8), torch.zeros(6, dtype=torch.int64)))]
    train_step(job.state, bad)
    report = settle(job.state)
    assert report is not None
    assert report.skipped
    for name, tensor in mine.state_dict().items():
        assert torch.equal(tensor, before[name]), name
    windows, reports = steps(job)
    assert not any(report.skipped for report in reports)
    average = ema.state_dict()["filter"]
    assert not torch.equal(average, mine.filter)
    assert not torch.equal(average, before["filter"])
    if dtype == "float16":  # torch's scaler knows no complex gradients
        return
    compared = getattr(torch, dtype)
    record = by_hand(
        theirs,
        windows,
        F.cross_entropy,
        in_torch(job, theirs),
        dtype=compared,
        clip_norm=clip_norm,
    )
    for report, norm in zip(reports, record.norms, strict=True):
        assert report.grad_norm == pytest.approx(norm, rel=1e-5)
    for name, tensor in theirs.state_dict().items():
        close = torch.equal if clip_norm is None else torch.allclose
        assert close(mine.state_dict()[name], tensor), name


def test_d3_complex_parameters_resume_exactly() -> None:
    overrides = (COMPLEX, "scheduler=null", "optimizer={_target_: torch.optim.Adam}")
    worker.train(load_recipe("recipe.yaml", overrides), run_dir=Path("a"), resume=False, quiet=True)
    source = Path("a/checkpoints/step-00000003.pt")
    worker.resume(source, (), run_dir=Path("b"), trusted=False, quiet=True)
    ends = [torch.load(f"{run}/checkpoints/latest.pt", weights_only=True) for run in "ab"]
    whole, again = (end["model"] for end in ends)
    assert all(torch.equal(value, again[name]) for name, value in whole.items())


@pytest.mark.parametrize("model", ["Complex, dtype: float64", "Complex, dtype: bfloat16"])
def test_d3_parameters_of_several_dtypes_train(model: str) -> None:
    job = made("AdamW", f"model={{_target_: model_parts.{model}}}")
    assert not any(report.skipped for report in steps(job)[1])
    assert not fused(job)


def test_d3_parameters_that_the_fused_kernel_takes_keep_it() -> None:
    """Among them float64 ones, empty ones, and those of another optimizer than the complex one."""
    assert fused(made("AdamW", "model={_target_: own_parts.Double}"))
    both = '{real: {_target_: torch.optim.AdamW, params: ["first.*", "head.*", "nothing"]}, '
    both += 'other: {_target_: torch.optim.AdamW, params: "*"}}'
    loaded = load_recipe(
        "recipe.yaml", [COMPLEX, "scheduler=null", "optimizer=null", f"optimizer={both}"]
    )
    job = build(loaded)
    real, other = job.state.updaters
    assert real.optimizer.param_groups[0]["fused"]
    assert not other.optimizer.param_groups[0]["fused"]
    assert not any(report.skipped for report in steps(job)[1])


@pytest.mark.parametrize("model", SPARSE)
@pytest.mark.parametrize("optimizer", ["SGD, lr: 0.1", "SGD, lr: 0.1, momentum: 0.9", "Adagrad"])
def test_d3_a_sparse_gradient_leaves_the_fused_kernel(optimizer: str, model: str) -> None:
    """Whichever way it comes: no module of the model need announce it."""
    job = made(optimizer, f"model={{_target_: {model}}}", *TOKENS)
    theirs = copy.deepcopy(job.state.bare)
    windows, reports = steps(job)
    assert not any(report.skipped for report in reports)
    assert not fused(job)
    by_hand(theirs, windows, F.cross_entropy, in_torch(job, theirs), dtype=torch.float32)
    for name, tensor in theirs.state_dict().items():
        torch.testing.assert_close(job.state.bare.state_dict()[name], tensor)


def test_d3_a_kernel_that_the_recipe_asks_for_is_not_left() -> None:
    job = made("SGD, lr: 0.1, fused: true", f"model={{_target_: {SPARSE[0]}}}", *TOKENS)
    with pytest.raises(RuntimeError, match="does not support sparse gradients"):
        steps(job)


def test_d3_a_parameter_without_values_is_named() -> None:
    with pytest.raises(RecipeError, match="weight is on the meta device: it has no values"):
        made(
            "AdamW",
            "model={_target_: torch.nn.Linear, in_features: 8, out_features: 4, device: meta}",
        )


def test_e11_a_fused_kernel_that_the_device_lacks_is_not_chosen(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    """As fused Adagrad on CUDA before torch 2.11: it is built, and refuses its first step."""
    step = torch.optim.Adagrad.step

    def refusing(self: torch.optim.Adagrad, *arguments: Any) -> Any:
        if self.param_groups[0]["fused"]:
            raise RuntimeError("`fused=True` requires all the params to be on a CPU")
        return step(self, *arguments)

    assert fused(made("Adagrad"))
    monkeypatch.setattr(torch.optim.Adagrad, "step", refusing)
    job = made("Adagrad")
    assert not fused(job)
    assert not any(report.skipped for report in steps(job)[1])
