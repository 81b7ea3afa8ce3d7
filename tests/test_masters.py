"""amp.upcast: float32 masters of half-precision parameters; and how exact matrix products are."""

from __future__ import annotations

import re
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume_exact import RECIPE, assert_same, last, resume, train
from torch import Tensor, nn

from ampctl.amp.masters import trainable_half, upcast_
from ampctl.builder.job import build_job
from ampctl.doctor.precision_check import preflight
from ampctl.errors import UsageError
from ampctl.recipe.load import load_recipe
from ampctl.track.metrics import read_metrics

HALF_MODEL = "model={_target_: test_masters.HalfNet}"


class HalfNet(nn.Module):
    """Trainable half-precision layers beside a frozen one, as an adapter on a base model is."""

    def __init__(self) -> None:
        super().__init__()
        self.base = nn.Linear(8, 16).half().requires_grad_(False)
        self.norm = nn.BatchNorm1d(16).half()
        self.head = nn.Linear(16, 4).half()

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.base(x)).relu())


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    Path("recipe.yaml").write_text(RECIPE)
    yield
    torch.set_float32_matmul_precision("highest")


def test_op1_upcast_makes_float32_masters_and_leaves_what_is_frozen() -> None:
    model = HalfNet()
    values = {name: p.detach().float() for name, p in model.named_parameters()}
    names = upcast_(model)
    assert names == ["norm.weight", "norm.bias", "head.weight", "head.bias"]
    assert trainable_half(model) == []
    assert model.norm.running_mean is not None
    assert {model.norm.running_mean.dtype, model.head.weight.dtype} == {torch.float32}
    assert model.base.weight.dtype == torch.float16
    for name, parameter in model.named_parameters():
        assert torch.equal(parameter.detach().float(), values[name])


def test_op1_a_tied_half_parameter_stays_tied() -> None:
    model = nn.Sequential(nn.Linear(4, 4), nn.Linear(4, 4)).half()
    model[1].weight = model[0].weight
    upcast_(model)
    assert model[1].weight is model[0].weight
    assert model[1].weight.dtype == torch.float32


@pytest.mark.parametrize("dtype", ["float16", "bfloat16"])
def test_op1_op2_a_half_model_trains_and_resumes_with_upcast(dtype: str) -> None:
    changes = (HALF_MODEL, f"amp.dtype={dtype}", "amp.upcast=true")
    saved = last(train("a", *changes))
    for name, tensor in saved["model"].items():
        if tensor.is_floating_point():
            half = name.startswith("base.")
            assert tensor.dtype == (torch.float16 if half else torch.float32), name
            assert torch.isfinite(tensor).all(), name
    resume(Path("a/checkpoints/step-00000005.pt"), run_dir="b")
    assert_same(last(Path("b")), saved)


class WholeNet(HalfNet):
    """All of it can be trained, and all of it is in bfloat16."""

    def __init__(self) -> None:
        super().__init__()
        self.requires_grad_(True).bfloat16()


@pytest.mark.parametrize(
    "optimizer",
    ["AdamW, lr: 1e-3", "NAdam, lr: 1e-3", "SGD, lr: 1e-2, momentum: 0.9", "Adafactor, lr: 1e-2"],
)
@pytest.mark.parametrize("upcast", [True, False])
def test_op1_a_run_goes_on_with_upcast_or_without_it(optimizer: str, upcast: bool) -> None:
    Path("recipe.yaml").write_text(
        re.sub(r"(?m)^optimizer:.*$", f"optimizer: {{_target_: torch.optim.{optimizer}}}", RECIPE)
    )
    model = "model={_target_: test_masters.WholeNet}"
    changes = (model, "amp.dtype=bfloat16", "train.ema_decay=null")
    train("a", *changes, f"amp.upcast={str(not upcast).lower()}")
    change = f"amp.upcast={str(upcast).lower()}"
    saved = last(resume(Path("a/checkpoints/step-00000005.pt"), change, run_dir="b"))
    now = torch.float32 if upcast else torch.bfloat16
    parameter = saved["model"]["head.weight"]
    (index,) = [
        place
        for group in saved["optimizer"]["param_groups"]
        for place, name in zip(group["params"], group["param_names"], strict=True)
        if name == "head.weight"
    ]
    for name, value in saved["optimizer"]["state"][index].items():
        wanted = torch.float32 if name in ("step", "mu_product") else now
        assert not isinstance(value, Tensor) or value.dtype == wanted, name
    assert parameter.dtype == now
    assert torch.isfinite(parameter).all()


def test_op1_without_it_the_parameters_are_named_with_the_remedy() -> None:
    with pytest.raises(UsageError, match=r"(?s)norm.weight.*amp.upcast=true"):
        preflight(build_job(load_recipe("recipe.yaml", [HALF_MODEL, "amp.dtype=float16"])))


def test_upcast_where_nothing_is_in_half_precision_says_so(
    capsys: pytest.CaptureFixture[str],
) -> None:
    from ampctl.run import worker

    loaded = load_recipe("recipe.yaml", ["amp.upcast=true", "train.max_epochs=1"])
    worker.train(loaded, run_dir=Path("a"), resume=False, quiet=False)
    assert "no effect where no trainable parameter is in half precision" in capsys.readouterr().out


@pytest.mark.parametrize("wanted", ["highest", "high", "medium"])
def test_the_precision_of_matrix_products_is_set_whatever_a_module_did(
    wanted: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    from ampctl.run import worker

    torch.set_float32_matmul_precision("medium" if wanted == "high" else "high")
    changes = [f"amp.matmul_precision={wanted}", "train.max_epochs=1"]
    loaded = load_recipe("recipe.yaml", changes)
    worker.train(loaded, run_dir=Path("a"), resume=False, quiet=False)
    assert torch.get_float32_matmul_precision() == wanted
    said = capsys.readouterr().out
    assert ("float32 products at precision" in said) == (wanted != "highest")
    start = next(e for e in read_metrics(Path("a/metrics.jsonl")) if e["event"] == "start")
    assert start["matmul_precision"] == wanted


@pytest.mark.parametrize("allowed", [True, False])
def test_reductions_in_half_precision_are_set_for_both_dtypes(
    allowed: bool, capsys: pytest.CaptureFixture[str]
) -> None:
    from ampctl.run import worker

    matmul: Any = torch.backends.cuda.matmul
    changes = [f"amp.reduced_precision_reduction={allowed}", "train.max_epochs=1"]
    loaded = load_recipe("recipe.yaml", changes)
    worker.train(loaded, run_dir=Path("a"), resume=False, quiet=False)
    assert matmul.allow_fp16_reduced_precision_reduction == allowed
    assert matmul.allow_bf16_reduced_precision_reduction == allowed
    matmul.allow_fp16_reduced_precision_reduction = True
    matmul.allow_bf16_reduced_precision_reduction = True
    said = capsys.readouterr().out
    assert ("no effect on cpu: amp.reduced_precision_reduction" in said) == (not allowed)
