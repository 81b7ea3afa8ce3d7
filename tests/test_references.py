"""The reference pages of the manual: they are current, complete, and what they show works."""

from __future__ import annotations

import inspect
import os
import re
from collections.abc import Iterator
from pathlib import Path
from types import ModuleType
from typing import Any, Literal, get_args, get_origin

import pytest
import torch
from gan_parts import Gan, Points
from torch import Tensor, nn
from typer.testing import CliRunner

from ampctl import data, models, schedules, tasks
from ampctl.cli import app
from ampctl.errors import NumericsError
from ampctl.recipe import builtin
from ampctl.recipe.hints import members, schema_keys
from ampctl.recipe.load import load_recipe, to_plain
from ampctl.recipe.target import build
from ampctl.run import worker
from ampctl.track.events import COMMON, EVENTS, Field
from ampctl.track.metrics import read_metrics

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "ampctl" / "docs"
PAGES = ("recipe", "commands", "events", "builtin")


def page(name: str) -> str:
    return (DOCS / f"reference-{name}.md").read_text(encoding="utf-8")


def section(name: str, heading: str) -> str:
    """Return what stands under a heading, up to the next one."""
    found = re.search(rf"^##+ {re.escape(heading)}\n(.*?)(?=^##|\Z)", page(name), re.M | re.S)
    assert found, f"reference-{name}.md has no heading {heading}"
    return found[1]


def yaml_blocks(text: str) -> list[str]:
    return re.findall(r"^```yaml\n(.*?)^```$", text, re.MULTILINE | re.DOTALL)


@pytest.fixture
def references(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import references

    return references


# ---------------------------------------------------------------- current


@pytest.mark.parametrize("name", PAGES)
def test_the_page_is_current_and_names_its_command(references: ModuleType, name: str) -> None:
    text = page(name)
    assert text == references.PAGES[f"reference-{name}.md"](), "run scripts/references"
    assert "generated" in text.splitlines()[2]
    assert "`scripts/references`" in text.splitlines()[2]


def test_there_is_no_other_page_that_looks_generated() -> None:
    assert {file.name for file in DOCS.glob("reference-*")} == {f"reference-{n}.md" for n in PAGES}
    assert os.access(ROOT / "scripts" / "references", os.X_OK)


def test_the_command_writes_what_is_not_current_and_nothing_else(
    references: ModuleType, folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: Any
) -> None:
    docs = folder / "ampctl" / "docs"
    docs.mkdir(parents=True)
    monkeypatch.setattr(references, "DOCS", docs)
    references.main()
    assert len(capsys.readouterr().out.splitlines()) == len(PAGES)
    (docs / "reference-events.md").write_text("old")
    references.main()
    assert capsys.readouterr().out == "written: ampctl/docs/reference-events.md\n"
    assert (docs / "reference-events.md").read_text(encoding="utf-8") == page("events")


# ---------------------------------------------------------------- recipe keys


def test_every_key_is_there_once() -> None:
    for key in schema_keys():
        listed = len(re.findall(rf"^\* \*\*`{re.escape(key)}`\*\*:", page("recipe"), re.MULTILINE))
        headed = len(re.findall(rf"^## {re.escape(key)}$", page("recipe"), re.MULTILINE))
        assert listed + headed == 1 or key == "train.early_stop", key


def test_the_example_of_each_key_loads_and_changes_it(folder: Path) -> None:
    (least,) = yaml_blocks(page("recipe"))
    (folder / "least.yaml").write_text(least)
    whole = to_plain(load_recipe("least.yaml").recipe)
    examples = re.findall(r"^\* \*\*`(.*?)`\*\*.* Example: `(.*)`$", page("recipe"), re.MULTILINE)
    assert len(examples) > 50
    unchanged = []
    for key, example in examples:
        (folder / "example.yaml").write_text(f"extends: least.yaml\n{example}\n")
        loaded = load_recipe("example.yaml")
        assert any(at.startswith(key) for at in loaded.explicit), key
        if to_plain(loaded.recipe) == whole:
            unchanged.append(key)
    needed = {"name", "model", "task", "data.train", "data.batch_size", "optimizer"}
    assert set(unchanged) == needed | {"train.max_epochs", "log.trackers"}


def test_the_examples_of_optimizers_load(folder: Path) -> None:
    (least,) = yaml_blocks(page("recipe"))
    (folder / "least.yaml").write_text(least)
    groups, several = re.findall(r"`((?:groups|generator): \{.*?\})`", page("recipe"))
    with_groups = load_recipe("least.yaml", [f"optimizer={{{groups}}}"])
    assert with_groups.recipe.optimizer["groups"] == {"head.*": {"lr": 1e-4}}
    text = re.sub(r"(?m)^optimizer: .*$", f"optimizer: {{{several}}}", least)
    (folder / "several.yaml").write_text(text)
    assert load_recipe("several.yaml").recipe.optimizer["generator"]["params"] == "generator.*"


# ---------------------------------------------------------------- commands


def commands(command: Any, name: str = "ampctl") -> Iterator[tuple[str, Any]]:
    yield name, command
    for each, inner in getattr(command, "commands", {}).items():
        yield from commands(inner, f"{name} {each}")


def test_every_option_that_help_shows_is_there(monkeypatch: pytest.MonkeyPatch) -> None:
    from typer.main import get_command

    monkeypatch.setenv("COLUMNS", "200")
    everywhere = {"--help", "--install-completion", "--show-completion"}
    names = [name for name, _ in commands(get_command(app))]
    assert len(names) > 12
    for name in names:
        shown = CliRunner().invoke(app, [*name.split()[1:], "--help"]).stdout
        rows = re.findall(r"^\W*(--\w[\w-]*)(?:.*?(--\w[\w-]*))?", shown, re.MULTILINE)
        options = {row[0] for row in rows} - everywhere
        listed = re.findall(r"^\* \*\*`(--[^ `]*)", section("commands", name), re.MULTILINE)
        assert options == {each.split("/")[0] for each in listed}, name


# ---------------------------------------------------------------- events


RECIPE = """
name: events
model: {_target_: gan_parts.Pair}
task: {_target_: gan_parts.Gan, every: 2}
data:
  train: {_target_: gan_parts.Points, bad: [3]}
  eval: {_target_: gan_parts.Points}
  batch_size: 6
optimizer:
  generator: {_target_: torch.optim.Adam, lr: 1e-2, params: "generator.*"}
  critic: {_target_: torch.optim.SGD, lr: 2e-2, params: "critic.*"}
amp: {dtype: float32, init_scale: 1024}
train: {max_epochs: 2}
log: {every_steps: 1}
"""


class Plain(nn.Module):
    """Linear, for one optimizer."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(2, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x)


class Idle(Gan):
    """A GAN that has no loss for the first step."""

    def losses(self, model: Any, batch: Any, step: int, grad: Any) -> Iterator[tuple[str, Tensor]]:
        if step:
            yield from super().losses(model, batch, step, grad)


class IdleRegression(tasks.Regression):
    """A regression that has no loss for a batch that starts with the first sample."""

    def loss(self, model: nn.Module, batch: Any) -> Any:
        loss, predictions = super().loss(model, batch)
        return None if torch.equal(batch[0][0], Points().real[0]) else loss, predictions


PLAIN = """
name: events
model: {_target_: test_references.Plain}
task: {_target_: ampctl.tasks.Regression}
data:
  train: {_target_: gan_parts.Points, bad_real: [7]}
  eval: {_target_: gan_parts.Points}
  batch_size: 6
  shuffle: false
optimizer: {_target_: torch.optim.SGD, lr: 1e-2}
amp: {dtype: float32}
train: {max_epochs: 1}
log: {every_steps: 1}
"""


def fits(value: Any, kind: Any) -> bool:
    """Return whether a value read from JSON is of a declared type."""
    if len(members(kind)) > 1:
        return any(fits(value, each) for each in members(kind))
    if kind is None:
        return value is None
    if get_origin(kind) is Literal:
        return value in get_args(kind)
    if get_origin(kind) is list:
        return isinstance(value, list) and all(fits(each, get_args(kind)[0]) for each in value)
    if kind is float:
        return type(value) in (int, float) or value in ("nan", "inf", "-inf")
    return type(value) is kind


def declared(event: str, name: str) -> tuple[str, Field] | None:
    fields = {**COMMON, **EVENTS[event].fields}
    pattern = name if name in fields else f"{name.split('/')[0]}/NAME"
    return (pattern, fields[pattern]) if pattern in fields else None


def wrong(event: dict[str, Any]) -> list[str]:
    """Return what in an event is not as the table declares it."""
    kind = event["event"]
    if kind not in EVENTS:
        return [f"no event {kind}"]
    found, seen = [], set()
    for name, value in event.items():
        known = declared(kind, name)
        if known is None:
            found.append(f"{kind}.{name} is not declared")
            continue
        pattern, field = known
        seen.add(pattern)
        if not fits(value, field.type):
            found.append(f"{kind}.{name} is {value!r}")
    always = {n for n, field in {**COMMON, **EVENTS[kind].fields}.items() if not field.only}
    return found + [f"{kind}.{name} is missing" for name in sorted(always - seen)]


@pytest.fixture
def events(folder: Path, monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """All events of runs in which all happens that is written."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "gan.yaml").write_text(RECIPE)
    (folder / "plain.yaml").write_text(PLAIN)

    def train(recipe: str, run_dir: str, *overrides: str) -> None:
        loaded = load_recipe(recipe, overrides)
        worker.train(loaded, run_dir=Path(run_dir), resume=False, quiet=True)

    train("gan.yaml", "gan")
    idle = ("task._target_=test_references.Idle", "train.max_epochs=1", "data.train.bad=[]")
    train("gan.yaml", "idle-gan", *idle)
    idle = ("task._target_=test_references.IdleRegression", "data.eval=null")
    train("plain.yaml", "idle", *idle)
    worker.resume(Path("gan"), ["train.max_epochs=3"], run_dir=None, trusted=False, quiet=True)
    train("plain.yaml", "plain")
    train("plain.yaml", "half", "amp.dtype=float16", "train.max_steps=2", "data.batch_size=2")
    with pytest.raises(NumericsError):
        train("plain.yaml", "stopped", "amp.nonfinite=stop")
    return [
        event
        for run_dir in ("gan", "idle-gan", "idle", "plain", "half", "stopped")
        for event in read_metrics(Path(run_dir) / "metrics.jsonl")
    ]


def test_runs_write_the_events_that_are_declared_and_all_of_them(
    events: list[dict[str, Any]],
) -> None:
    assert [each for event in events for each in wrong(event)] == []
    for kind, event in EVENTS.items():
        written = [each for each in events if each["event"] == kind]
        assert written, f"no run wrote {kind}"
        names = {known[0] for each in written for n in each if (known := declared(kind, n))}
        assert names == {*COMMON, *event.fields}, kind
    orders = [[n for n in each if "/" not in n] for each in events]
    for each, order in zip(events, orders, strict=True):
        plain = [n for n in EVENTS[each["event"]].fields if n in each]
        assert order == ["event", "step", *plain, "time"]


GOOD = {"event": "stop", "step": 3, "reason": "complete", "exit_code": 0, "time": 1.5}


@pytest.mark.parametrize(
    ("change", "told"),
    [
        ({"event": "rest"}, "no event rest"),
        ({"cause": "?"}, "stop.cause is not declared"),
        ({"reason": "tired"}, "stop.reason is 'tired'"),
        ({"step": 3.0}, "stop.step is 3.0"),
        ({"exit_code": True}, "stop.exit_code is True"),
        ({"exit_code": None}, "stop.exit_code is None"),
    ],
)
def test_an_event_that_is_not_as_declared_is_found(change: dict[str, Any], told: str) -> None:
    assert wrong(GOOD) == []
    assert wrong(GOOD | change) == [told]
    less = {name: value for name, value in GOOD.items() if name != "reason"}
    assert wrong(less) == ["stop.reason is missing"]


def test_the_page_lists_each_field_of_each_event() -> None:
    for kind, event in EVENTS.items():
        listed = re.findall(r"^\* \*\*`(.*?)`\*\*", section("events", kind), re.MULTILINE)
        assert listed == list(event.fields), kind


# ---------------------------------------------------------------- what is built in


BUILT_IN = [
    (f"{module.__name__}.{name}", cls)
    for module in (tasks, models, data, schedules)
    for name, cls in vars(module).items()
    if isinstance(cls, type) and cls.__module__.startswith(module.__name__) and name[0] != "_"
]


def test_each_class_and_recipe_is_there() -> None:
    assert len(BUILT_IN) == len(re.findall(r"^### ", page("builtin"), re.MULTILINE)) > 12
    listed = re.findall(r"^\* \*\*`(.*?)`\*\*", section("builtin", "Recipes"), re.MULTILINE)
    assert listed == builtin.builtin_names()


@pytest.mark.parametrize(("path", "cls"), BUILT_IN, ids=[path for path, _ in BUILT_IN])
def test_each_argument_is_there_and_the_docstring_explains_it(path: str, cls: type) -> None:
    text = section("builtin", path)
    listed = re.findall(r"^\* \*\*`(\w+)`\*\*", text, re.MULTILINE)
    assert cls is tasks.Task or listed == list(inspect.signature(cls).parameters)
    for name in listed:
        assert f"``{name}``" in str(cls.__doc__), f"{path} does not explain {name}"


def test_the_example_of_each_class_builds_it(folder: Path) -> None:
    (folder / "book.txt").write_text("It was the best of times. " * 100)
    for path, cls in BUILT_IN:
        for example in yaml_blocks(section("builtin", path)):
            (folder / "example.yaml").write_text(f"extends: digits\n{example}")
            loaded = load_recipe("example.yaml")
            recipe = loaded.recipe
            blocks = [recipe.model, recipe.task, recipe.data.train, recipe.scheduler]
            (block,) = [each for each in blocks if each and each["_target_"] == path]
            provide = {"total_steps": 10} if cls.__module__ == schedules.__name__ else {}
            assert type(build(block, key="it", origins={}, provide=provide)) is cls
