"""The recipes that come with ampctl: they build, say what they are, and reach what they promise."""

from __future__ import annotations

import itertools
import re
from pathlib import Path
from typing import Any

import pytest

from ampctl.doctor.check import check_recipe
from ampctl.recipe import builtin
from ampctl.recipe.load import load_recipe
from ampctl.run import worker
from ampctl.track.metrics import read_metrics

ROOT = Path(__file__).parents[1]
RECIPES = sorted((ROOT / "recipes").rglob("*.yaml"))
NAMES = [str(path.relative_to(ROOT / "recipes")) for path in RECIPES]


def header(path: Path) -> list[str]:
    """Return the comment that a recipe opens with, without its marks."""
    lines = path.read_text(encoding="utf-8").splitlines()
    end = next(i for i, line in enumerate(lines) if not line.startswith("#"))
    return [line.removeprefix("#").strip() for line in lines[:end]]


def toy_overrides() -> list[str]:
    """Return the overrides that the header of python_gpt.yaml gives for a CPU."""
    text = " ".join(header(ROOT / "recipes" / "python_gpt.yaml"))
    command = re.search(r"command: +ampctl train python_gpt ((?:[\w.]+=\S+ ?)+)", text)
    assert command, "the header holds no command with overrides"
    return command[1].split()


def train(recipe: str, *overrides: str) -> list[dict[str, Any]]:
    run_dir = Path("run")
    worker.train(load_recipe(recipe, overrides), run_dir=run_dir, resume=False, quiet=True)
    return read_metrics(run_dir / "metrics.jsonl")


def of(events: list[dict[str, Any]], kind: str) -> list[dict[str, Any]]:
    return [event for event in events if event["event"] == kind]


def test_the_recipes_are_all_there() -> None:
    assert {"digits.yaml", "digits_bf16.yaml", "python_gpt.yaml"} <= set(NAMES)


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_each_recipe_loads_builds_and_checks(path: Path) -> None:
    # The real size of a recipe for a GPU is built too; one short step tells what a long one would.
    few = ["data.batch_size=2"] if "gpt" in path.stem else []
    facts = check_recipe(load_recipe(path, ["train.device=cpu", *few]))
    assert facts["recipe"] == path.stem
    assert facts["verdict"] == "ready to train"
    assert "skipped" not in facts["first step"]


@pytest.mark.parametrize("path", RECIPES, ids=NAMES)
def test_each_recipe_opens_with_what_it_is_and_what_it_reached(path: Path) -> None:
    lines = header(path)
    assert 20 < len(lines[0]) <= 100
    assert lines[0].endswith(".")
    text = "\n".join(lines)
    assert re.search(rf"^command: +ampctl train {path.stem}\b", text, re.MULTILINE)
    for word in ("hardware", "time", "result"):
        assert re.search(rf"^{word}: +\S", text, re.MULTILINE), f"the header says no {word}"
    assert re.search(r"^time: .*\d+ s\b", text, re.MULTILINE)


def test_a_recipe_is_described_by_its_first_line() -> None:
    for name in builtin.builtin_names():
        assert builtin.describe(name) == header(builtin.builtin_path(name))[0]


def test_digits_reaches_its_accuracy_in_float16_with_the_scaler_at_work(folder: Path) -> None:
    events = train("digits", "train.device=cpu")
    assert of(events, "start")[0]["dtype"] == "float16"
    assert of(events, "eval")[-1]["eval/accuracy"] >= 0.985
    scales = [(event["step"], event["scale"]) for event in of(events, "train")]
    skips = of(events, "skip")
    assert any(after > before for (_, before), (_, after) in itertools.pairwise(scales))
    assert skips
    assert all(event["scale_after"] == event["scale_before"] / 2 for event in skips)
    assert of(events, "train")[-1]["skipped"] == len(skips)
    assert of(events, "stop")[0]["reason"] == "complete"


def test_digits_bf16_differs_from_digits_in_name_and_dtype_alone() -> None:
    bf16, fp16 = load_recipe("digits_bf16"), load_recipe("digits")
    again = load_recipe("digits", ["name=digits_bf16", "amp.dtype=bfloat16"])
    assert bf16.recipe == again.recipe
    assert fp16.recipe.amp.dtype == "float16"


def test_digits_bf16_learns_without_a_scale(folder: Path) -> None:
    events = train("digits_bf16", "train.device=cpu", "train.max_epochs=3")
    assert of(events, "start")[0]["dtype"] == "bfloat16"
    assert of(events, "eval")[-1]["eval/accuracy"] >= 0.9
    assert not of(events, "skip")


def test_python_gpt_has_a_real_size_and_decays_no_norm_or_bias() -> None:
    from ampctl.builder.job import build_job

    job = build_job(load_recipe("python_gpt", ["train.device=cpu"]))
    assert 10e6 <= sum(p.numel() for p in job.state.bare.parameters()) <= 25e6
    decayed, kept = job.state.updaters[0].optimizer.param_groups
    assert decayed["weight_decay"] == 0.1
    assert kept["weight_decay"] == 0
    assert all(parameter.ndim >= 2 for parameter in decayed["params"])
    assert all(parameter.ndim < 2 for parameter in kept["params"])


def test_python_gpt_learns_as_the_toy_that_its_header_gives(folder: Path) -> None:
    overrides = toy_overrides()
    assert load_recipe("python_gpt", overrides).recipe.train.max_steps == 600
    few = ["train.max_steps=60", "train.eval_every_steps=60", "data.eval.max_bytes=20000"]
    events = train("python_gpt", *overrides, *few, "train.device=cpu", "log.every_steps=1")
    losses = [event["loss"] for event in of(events, "train")]
    assert losses[0] > 5
    assert losses[-1] < 3.2
    assert of(events, "eval")[-1]["eval/perplexity"] < 30
