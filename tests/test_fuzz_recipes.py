"""Recipes and overrides changed at random, through the commands themselves.

Each ends in words: exit code 0 or 2 to 5, with a key or a place on stderr, never in a traceback.
``test_recipe_load`` changes the text of a recipe; here it is what the text means that is changed.
"""

from __future__ import annotations

import copy
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import yaml
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from typer.testing import CliRunner

from ampctl.cli import app
from ampctl.recipe.hints import schema_keys

pytestmark = pytest.mark.timeout(0)  # each example has a time limit of its own

DEADLINE_S = 300

RECIPE: dict[str, Any] = {
    "name": "fuzzed",
    "seed": 1,
    "model": {"_target_": "ampctl.models.MLP", "in_features": 2, "hidden": [3], "num_classes": 1},
    "task": {"_target_": "ampctl.tasks.Regression"},
    "data": {
        "train": {"_target_": "fuzzed_parts.data", "size": 9},
        "eval": {"_target_": "torch.utils.data.Subset", "dataset": None, "indices": [0, 1]},
        "batch_size": 4,
        "micro_batch_size": 2,
    },
    "optimizer": {
        "_target_": "torch.optim.AdamW",
        "lr": 1e-2,
        "betas": [0.9, 0.99],
        "groups": {"*bias": {"lr": 1e-3}},
    },
    "scheduler": {"_target_": "torch.optim.lr_scheduler.StepLR", "step_size": 2},
    "amp": {"dtype": "bfloat16", "modules": {"*": "float32"}, "clip_norm": 1.0},
    "train": {"max_steps": 1, "device": "cpu", "ema_decay": 0.9},
    "checkpoint": {"every_steps": 1, "asynchronous": False},
    "log": {"every_steps": 1},
}
RECIPE["data"]["eval"]["dataset"] = {"_target_": "fuzzed_parts.data", "size": 3}

PARTS = """\
import torch
from torch.utils.data import TensorDataset


def data(size=4):
    x = torch.linspace(-1, 1, 2 * int(size)).view(-1, 2)
    return TensorDataset(x, x.sum(dim=1, keepdim=True))


def fails(*args, **kwargs):
    raise LookupError("as it should")


def leaves(*args, **kwargs):
    raise SystemExit


async def waits():
    pass


def yields():
    yield 1
"""

TARGETS = [
    *("builtins.list", "builtins.dict", "builtins.str", "builtins.object", "builtins.type"),
    *("collections.OrderedDict", "collections.Counter", "functools.partial", "operator.add"),
    *("math.sqrt", "json.loads", "os.getcwd", "os.no_such", "sys.exit", "no_such.thing", "nothing"),
    *("torch.zeros", "torch.tensor", "torch.nn.Linear", "torch.nn.ReLU", "torch.nn.Sequential"),
    *("torch.nn.Module", "torch.nn.LazyLinear", "torch.nn.BatchNorm1d", "torch.nn.MSELoss"),
    *("torch.optim.SGD", "torch.optim.LBFGS", "torch.optim.Optimizer", "torch.optim.SparseAdam"),
    *("torch.optim.Adagrad", "torch.optim.lr_scheduler.OneCycleLR"),
    *("torch.optim.lr_scheduler.CosineAnnealingLR", "torch.optim.lr_scheduler.LambdaLR"),
    *("torch.optim.lr_scheduler.ReduceLROnPlateau", "torch.utils.data.TensorDataset"),
    *("torch.utils.data.Subset", "torch.utils.data.IterableDataset", "torch.utils.data.Dataset"),
    *("ampctl.models.MLP", "ampctl.models.ConvNet", "ampctl.tasks.Regression"),
    *("ampctl.tasks.Classification", "ampctl.tasks.LanguageModel", "ampctl.tasks.Task"),
    *("ampctl.tasks.Transformers", "ampctl.schedules.Cosine", "ampctl.data.Digits"),
    *("fuzzed_parts.data", "fuzzed_parts.fails", "fuzzed_parts.leaves", "fuzzed_parts.waits"),
    *("fuzzed_parts.yields", "fuzzed_parts.no_such", "fuzzed_parts"),
]
TEXTS = [
    *("", " ", "None", "null", "~", "nan", "inf", ".inf", "-.inf", ".nan", "1,5", "1_000", "0x10"),
    *("true", "no", "on", "float16", "auto", "cuda", "cuda:99", "cpu:1", "meta", "eval/loss", "*"),
    *("a.b", "[", "{", '"', "'", "${seed}", "${name}", "${oc.env:HOME}", "${", "${no.such}", "é"),
    *(
        "\u202e",
        "\0",
        "\x1b[31m",
        "a" * 300,
        "../x",
        "-x",
        "r.yaml",
        "%s",
        "{0}",
        "\ud800",
        "=",
        "&a",
    ),
]
NUMBERS = [
    *(0, 1, -1, 2, 3, 7, 2**31, 2**63, -(2**63), 10**20, 10**400),
    *(0.0, -0.0, 0.5, 1.0, 1e-8, -1e-3, 1e300, 1e-320, float("inf"), float("-inf"), float("nan")),
]
NAMES = [
    *("lr", "params", "groups", "size", "sizes", "device", "betas", "weight_decay", "fused"),
    *("optimizer", "total_steps", "self", "args", "kwargs", "_target_", "extends", "a.b", "*", "é"),
    *("<<", "0", "true", "null", "", " ", "x" * 80),
]

scalars = st.sampled_from([None, True, False]) | st.sampled_from(NUMBERS) | st.sampled_from(TEXTS)
blocks = st.fixed_dictionaries(
    {"_target_": st.sampled_from(TARGETS)},
    optional=dict.fromkeys(("lr", "size", "data", "func", "sizes", "module"), scalars),
)
values = st.recursive(
    scalars | blocks,
    lambda inner: (
        st.lists(inner, max_size=3)
        | st.dictionaries(st.sampled_from(NAMES), inner, max_size=3)
        | st.builds(lambda target, x: {"_target_": target, "x": x}, st.sampled_from(TARGETS), inner)
    ),
    max_leaves=4,
)


def paths(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in nested mappings and lists, but for the whole itself."""
    if not isinstance(value, dict | list):
        return
    for key, item in value.items() if isinstance(value, dict) else enumerate(value):
        yield (*path, key)
        yield from paths(item, (*path, key))


KEYS = sorted({*schema_keys(), *(".".join(map(str, path)) for path in paths(RECIPE))})


@st.composite
def recipes(draw: st.DrawFn) -> dict[str, Any]:
    recipe = copy.deepcopy(RECIPE)
    for _ in range(draw(st.integers(0, 3))):
        every = list(paths(recipe))
        if not every:
            break
        *outer, last = draw(st.sampled_from(every))
        place: Any = recipe
        for part in outer:
            place = place[part]
        kind = draw(st.sampled_from(["set", "set", "delete", "rename", "add", "wrap", "move"]))
        if kind == "set":
            place[last] = draw(values)
        elif kind == "delete":
            del place[last]
        elif kind == "add" and isinstance(place, dict):
            place[draw(st.sampled_from(NAMES))] = draw(values)
        elif kind == "rename" and isinstance(place, dict):
            place[draw(st.sampled_from(NAMES))] = place.pop(last)
        elif kind == "wrap":
            place[last] = draw(st.sampled_from([[place[last]], {"x": place[last]}]))
        else:
            recipe[draw(st.sampled_from(NAMES))] = copy.deepcopy(place[last])
    return recipe


BLOCKS = ("model", "task", "optimizer", "scheduler", "data.train", "data.eval", "data.eval.dataset")


@st.composite
def deep_recipes(draw: st.DrawFn) -> dict[str, Any]:
    """Draw a recipe that the schema allows, with one or two blocks that are another's."""
    recipe = copy.deepcopy(RECIPE)
    for key in draw(st.lists(st.sampled_from(BLOCKS), min_size=1, max_size=2)):
        block: Any = recipe
        for part in key.split("."):
            block = block[part]
        names = st.sampled_from([*(set(block) - {"_target_"}), *NAMES[:12]])
        for name in draw(st.lists(names, max_size=2)):
            block[name] = draw(values)
        if draw(st.booleans()):
            block["_target_"] = draw(st.sampled_from(TARGETS))
            if draw(st.booleans()):
                for name in [name for name in block if name not in ("_target_", "dataset")]:
                    del block[name]
    return recipe


likely = st.sampled_from(
    [None, True, False, 0, 1, 2, 3, 0.5, 1.5, 1e-3, "text", "eval/loss", [], {}]
)


@st.composite
def likely_overrides(draw: st.DrawFn) -> str:
    """Draw an override whose value may well be right."""
    return f"{draw(st.sampled_from(KEYS))}={flow(draw(likely))}"


@st.composite
def overrides(draw: st.DrawFn) -> str:
    key = draw(
        st.sampled_from(KEYS) | st.sampled_from([".".join(map(str, p)) for p in paths(RECIPE)])
    )
    more = draw(st.sampled_from(NAMES + TEXTS))
    shape = draw(
        st.sampled_from(["{k}", "{k}", "{k}", "{k}.{m}", '{k}."{m}"', "{k}[{m}]", "{k}['{m}'"])
    )
    key = shape.format(k=key, m=more)
    value = draw(values)
    text = value if isinstance(value, str) else flow(value)
    equals = draw(st.sampled_from(["=", "=", "=", "=", " = ", "", "=="]))
    return f"{key}{equals}{text}"


def flow(value: Any) -> str:
    """Write a value as YAML in one line."""
    text = yaml.safe_dump(value, default_flow_style=True, width=10**6, allow_unicode=False)
    return text.removesuffix("\n").removesuffix("\n...")


NAMED = r"command line|r\.yaml|\bstep\b|evaluation|--run-dir|\b[a-z_]+(\.[a-z_]+)*: "
SAFE = ["train.max_steps=1", "train.compile=false", "data.num_workers=0"]
"""What keeps one example short: the recipe's own values of these are looked at by ``show``."""


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "fuzzed_parts.py").write_text(PARTS)
    yield
    sys.modules.pop("fuzzed_parts", None)


class _Deadline:
    """Raise in the main thread, where whatever hangs is, once the time is up."""

    def __enter__(self) -> _Deadline:
        self.passed = False
        self._before = signal.signal(signal.SIGALRM, self._hangs)
        signal.alarm(DEADLINE_S)
        return self

    def __exit__(self, *_: object) -> None:
        signal.alarm(0)
        signal.signal(signal.SIGALRM, self._before)

    def _hangs(self, number: int, frame: FrameType | None) -> None:
        self.passed = True
        raise TimeoutError(f"still at work after {DEADLINE_S} s")


def ends_in_words(command: str, recipe: dict[str, Any], given: list[str]) -> None:
    """Run a command on a recipe, and look at how it ends."""
    text = yaml.safe_dump(recipe, sort_keys=False, allow_unicode=False)
    Path("r.yaml").write_text(text)
    words = [command, "r.yaml", *given]
    if command != "show":
        words += SAFE
    if command == "train":
        words += ["--run-dir", "run"]
    with _Deadline() as deadline:
        result = CliRunner().invoke(app, words)
    shutil.rmtree("run", ignore_errors=True)
    told = f"{words}\n{text}\n{result.output}"
    assert not deadline.passed, told
    if result.exception is not None and not isinstance(result.exception, SystemExit):
        raise AssertionError(told) from result.exception
    assert result.exit_code in (0, 2, 3, 4, 5), told
    if result.exit_code:
        assert re.search(
            r"command line|r\.yaml|KEY=VALUE|step|\b[a-z_]+(\.[a-z_]+)*: ", result.stderr
        )
        assert "Traceback" not in result.output, told


FEWER = settings(
    max_examples=120,
    suppress_health_check=[HealthCheck.function_scoped_fixture, HealthCheck.too_slow],
)
commands = st.sampled_from(["check", "check", "show", "train"])


any_case = st.tuples(recipes(), st.lists(overrides(), max_size=2)) | st.tuples(
    deep_recipes(), st.lists(likely_overrides(), max_size=1)
)
"""A recipe and overrides: changed anywhere, or in what the schema leaves open."""


@settings(FEWER)
@given(command=commands, case=any_case)
def test_any_recipe_and_any_overrides_end_in_words(
    command: str, case: tuple[dict[str, Any], list[str]]
) -> None:
    ends_in_words(command, *case)


@pytest.mark.slow
@settings(FEWER, max_examples=5000)
@given(command=commands, case=any_case)
def test_thousands_of_recipes_and_overrides_end_in_words(
    command: str, case: tuple[dict[str, Any], list[str]]
) -> None:
    ends_in_words(command, *case)
