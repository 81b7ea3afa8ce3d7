"""What a model makes, or makes larger, in its first pass is told before a run is lost with it."""

from __future__ import annotations

from pathlib import Path

import pytest
from told import ampctl
from told import recipe as recipe

from ampctl.track.metrics import read_metrics

MADE = {
    "parameter": "scale is a new parameter",
    "layer": "head.weight is a new parameter, head.bias is a new parameter",
    "buffer": "mean is a new buffer",
    "later": "later is a new buffer",
    "larger": "seen has the shape [",
    "resized": "seen has the shape [4], and had [1]",
    "replaced": "first.weight is another parameter than the one that was there",
    "replaced at once": "first.weight is another parameter than the one that was there",
    "grown parameter": "first.bias has the shape [1, 4], and had [4]",
}
RUN = ("--run-dir", "a", "checkpoint.every_steps=4")


@pytest.mark.parametrize("what", MADE)
def test_a9_what_the_first_pass_makes_is_named(what: str) -> None:
    model = f"model={{_target_: model_parts.Makes, what: {what}}}"
    for argv in (("check", model), ("train", model, *RUN)):
        said = ampctl(*argv, code=2)
        assert (
            f"command line: model: a pass has changed what the model is made of: {MADE[what]}"
            in said
        )
        assert "make parameters and buffers in __init__" in said
    steps = [event["step"] for event in read_metrics("a/metrics.jsonl")]
    assert max(steps) <= 2  # one more step may be on its way
    assert not list(Path("a").glob("checkpoints/*.pt"))


@pytest.mark.parametrize(("what", "name"), [("buffer", "counts"), ("parameter", "extra")])
def test_a9_what_the_first_evaluation_makes_is_named(what: str, name: str) -> None:
    model = f"model={{_target_: model_parts.Makes, what: {what} in eval mode}}"
    averaged = "train.ema_decay=0.9" if what == "buffer" else "train.ema_decay=null"
    for argv in (("check", model), ("train", model, *RUN, "train.eval_every_steps=3", averaged)):
        said = ampctl(*argv, code=2)
        assert f"changed what the model is made of: {name} is a new {what}" in said
    assert max(event["step"] for event in read_metrics("a/metrics.jsonl") if "step" in event) <= 3
    assert not list(Path("a").glob("checkpoints/*.pt"))


def test_a9_what_a_task_gives_the_model_is_named() -> None:
    task = "task={_target_: model_parts.MakesTask}"
    for argv in (("check", task), ("train", task, *RUN)):
        assert "temperature is a new parameter" in ampctl(*argv, code=2)


def test_a9_a_buffer_that_is_not_saved_may_grow() -> None:
    model = "model={_target_: model_parts.Makes, what: cached}"
    assert "ready to train" in ampctl("check", model, code=0)
    ampctl("train", model, *RUN, code=0)


@pytest.mark.parametrize(
    ("model", "name"),
    [
        ("torch.nn.LazyLinear, out_features: 4", "weight"),
        ("torch.nn.LazyBatchNorm1d, affine: false", "running_mean"),
    ],
)
def test_a9_a_module_without_shapes_is_named(model: str, name: str) -> None:
    said = ampctl("check", f"model={{_target_: {model}}}", code=2)
    assert f"model: {name} has no shape before the first batch" in said
