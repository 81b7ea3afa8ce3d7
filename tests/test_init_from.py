"""A new run that starts from the weights of another: which are taken, what is said of the rest."""

from __future__ import annotations

import math
from pathlib import Path
from typing import Any

import pytest
import torch
from own_parts import Net
from safetensors.torch import save_file
from test_export import run as export
from test_resume_exact import RECIPE, last, train
from torch import nn
from typer.testing import CliRunner, Result

from ampctl.cli import app
from ampctl.recipe import trust
from ampctl.track.metrics import read_metrics

TESTS = Path(__file__).parent
LAST = "recipe.yaml", "train.max_steps=1", "optimizer.lr=0.0"
"""With a rate of 0 the weights after a step are those that the run started from."""


class Wider(Net):
    """With a head for five classes."""

    def __init__(self) -> None:
        super().__init__()
        self.head = nn.Linear(16, 5)


class Spoiled(Net):
    """With a value of one of its tensors that is not finite; the mask is none of its weights."""

    def __init__(self, name: str, value: float, trained: bool = True) -> None:
        super().__init__()
        self.register_buffer("mask", torch.tensor([0.0, -math.inf]))
        weight = self.get_parameter(name)
        weight.requires_grad_(trained)
        with torch.no_grad():
            weight.view(-1)[0] = value


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    (folder / "recipe.yaml").write_text(RECIPE)


def ampctl(*argv: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(argv))
    assert result.exit_code == code, (result.output, result.exc_info)
    return result


def assert_equal(run_dir: str, weights: dict[str, Any], but: tuple[str, ...] = ()) -> None:
    ours = last(Path(run_dir))["model"]
    for name, parameter in ours.items():
        if not name.endswith(("running_mean", "running_var", "num_batches_tracked")):
            assert torch.equal(parameter, weights[name]) != (name in but), name


@pytest.mark.parametrize("source", ["a", "a/checkpoints/latest.pt", "weights.safetensors"])
def test_a_run_starts_from_the_averaged_weights_of_another(source: str) -> None:
    train("a", "train.max_epochs=1")
    if source == "weights.safetensors":
        export("a", source)
    theirs = last(Path("a"))
    said = ampctl("train", *LAST, "--run-dir", "b", "--init-from", source, "seed=9").stdout
    assert f"starting from the weights of {source}" in said
    if source != "weights.safetensors":
        assert "(averaged weights of step 4)" in said
    assert_equal("b", theirs["ema"])
    ours = last(Path("b"))
    assert ours["progress"]["step"] == 1
    assert read_metrics("b/metrics.jsonl")[0]["event"] == "start"


def test_weights_that_do_not_fit_are_named_and_may_be_left_as_the_model_builds_them() -> None:
    train("a", "train.max_epochs=1", "train.ema_decay=null")
    theirs = last(Path("a"))["model"]
    other = ("model={_target_: test_init_from.Wider}",)
    message = ampctl("train", *LAST, *other, "--run-dir", "b", "--init-from", "a", code=4).stderr
    assert "do not fit the model:" in message
    assert "head.weight: [4, 16] saved, [5, 16] in the model" in message
    assert "--allow-missing GLOB leaves those" in message
    assert not Path("b/recipe.yaml").exists()
    flags = ("--init-from", "a", "--allow-missing", "head.*")
    said = ampctl("train", *LAST, *other, "--run-dir", "b", *flags).stdout
    assert "; as the model builds them: head.bias, head.weight" in said
    ours = last(Path("b"))["model"]
    assert torch.equal(ours["first.weight"], theirs["first.weight"])


def test_a_glob_that_names_nothing_and_flags_that_miss_each_other_are_mistakes() -> None:
    train("a", "train.max_epochs=1")
    flags = ("--init-from", "a", "--allow-missing", "tail.*")
    message = ampctl("train", *LAST, "--run-dir", "b", *flags, code=4).stderr
    assert "--allow-missing tail.*: no weight is called so" in message
    message = ampctl("train", *LAST, "--allow-missing", "head.*", code=2).stderr
    assert "--allow-missing is about the weights of --init-from" in message
    for wrong in ("nowhere", "recipe.yaml", "no.safetensors"):
        message = ampctl("train", *LAST, "--run-dir", "b", "--init-from", wrong, code=4).stderr
        assert wrong in message
    Path("bad.safetensors").write_bytes(b"\x08\0\0\0\0\0\0\0{}")
    message = ampctl("train", *LAST, "--init-from", "bad.safetensors", code=4).stderr
    assert "bad.safetensors cannot be used" in message


def test_a_requeued_run_goes_on_with_its_own_weights() -> None:
    train("a", "train.max_epochs=1")
    flags = ("--run-dir", "b", "--init-from", "a", "--resume", "auto")
    ampctl("train", "recipe.yaml", "train.max_steps=2", *flags)
    first = last(Path("b"))
    said = ampctl("train", "recipe.yaml", "train.max_steps=2", *flags).stdout
    assert "complete" in said
    assert torch.equal(last(Path("b"))["model"]["head.weight"], first["model"]["head.weight"])


def test_nothing_of_the_recipe_in_the_other_checkpoint_is_built(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    train("a", "train.max_epochs=1")
    monkeypatch.setattr(trust, "require_trusted", lambda *args, **kwargs: pytest.fail("asked"))
    ampctl("train", *LAST, "--run-dir", "b", "--init-from", "a")


@pytest.mark.parametrize(
    ("value", "trained"), [(math.nan, True), (math.inf, True), (math.nan, False)]
)
def test_weights_that_are_not_finite_from_the_start_begin_no_run(
    value: float, trained: bool
) -> None:
    model = {"_target_": "test_init_from.Spoiled", "name": "head.bias"}
    model |= {"value": "nan" if math.isnan(value) else "inf", "trained": trained}
    block = ", ".join(f"{key}: {value}" for key, value in model.items())
    block = f"model={{{block}}}".replace(" nan", " .nan").replace(" inf", " .inf")
    for command in (("train", *LAST, "--run-dir", "b"), ("check", *LAST)):
        said = ampctl(*command, block, code=2).stderr
        assert "model: its weights are not finite from the start: head.bias" in said
    assert not list(Path("b").glob("checkpoints/*"))


def test_a_frozen_infinity_is_a_mask() -> None:
    block = "{_target_: test_init_from.Spoiled, name: head.bias, value: -.inf, trained: false}"
    ampctl("train", *LAST, "--run-dir", "b", f"model={block}", "amp.clip_norm=null")
    assert last(Path("b"))["model"]["head.bias"][0] == -math.inf


def test_a_file_with_nan_begins_no_run() -> None:
    train("a", "train.max_epochs=1")
    weights = last(Path("a"))["ema"]
    weights["head.bias"][0] = math.nan
    save_file(weights, "bad.safetensors")
    start = ("train", *LAST, "--run-dir", "b", "--init-from", "bad.safetensors")
    said = ampctl(*start, code=4).stderr
    assert "the weights of bad.safetensors hold NaN or infinity in head.bias" in said
    assert not list(Path("b").glob("checkpoints/*"))
