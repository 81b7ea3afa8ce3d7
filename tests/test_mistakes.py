"""Mistakes in a recipe or an override, each told with key, value and place, and ended with 2."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ampctl.cli import app
from ampctl.errors import RecipeError
from ampctl.recipe.keys import child, dotted, parse_override
from ampctl.recipe.load import load_recipe, parse_recipe

RECIPE = """\
name: small
model: {_target_: torch.nn.Linear, in_features: 2, out_features: 1}
task: {_target_: ampctl.tasks.Regression}
data:
  train: {_target_: own.data, size: 8}
  batch_size: 4
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
amp: {dtype: float32}
train: {max_steps: 1, device: cpu}
"""

MODULE = """\
import torch
from torch.utils.data import TensorDataset


def data(size):
    return TensorDataset(torch.zeros(size, 2), torch.zeros(size, 1))


class Sized:
    def __init__(self, length):
        self.length = length

    def __len__(self):
        if self.length == "raises":
            raise KeyError("no length")
        return self.length

    def __getitem__(self, index):
        return torch.zeros(2), torch.zeros(1)


class NoRate(torch.optim.Optimizer):
    def __init__(self, params):
        super().__init__(params, {})


def factor(value=None):
    return lambda update: value
"""


@pytest.fixture(autouse=True)
def _user(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "own.py").write_text(MODULE)
    (folder / "r.yaml").write_text(RECIPE)
    yield
    sys.modules.pop("own", None)


def told(*overrides: str, command: str = "check", code: int = 2) -> str:
    result = CliRunner().invoke(app, [command, "r.yaml", *overrides])
    assert result.exit_code == code, (result.output, result.exception)
    return result.stderr


GROUPS = "command line: optimizer.groups"


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer.groups=3.5", f"{GROUPS}: got 3.5; allowed: a mapping"),
        ("optimizer.groups=[1]", f"{GROUPS}: got [1]; allowed: a mapping"),
        ("optimizer.groups=text", f"{GROUPS}: got 'text'; allowed: a mapping"),
        ("optimizer.groups={'*': {lr: abc}}", f"{GROUPS}.*.lr: got 'abc' (text); allowed: a nu"),
        ("optimizer.groups={'*': {lr: '1,5'}}", f"{GROUPS}.*.lr: got '1,5' (text)"),
        ("optimizer.groups={'*': {lr: -1}}", f"{GROUPS}.*.lr: got -1; allowed: a finite number"),
        ("optimizer.groups={'*': {lr: .inf}}", f"{GROUPS}.*.lr: got inf; allowed: a finite"),
        ("optimizer.groups={'*': {weight_decay: .nan}}", f"{GROUPS}.*.weight_decay: got nan"),
        ("optimizer.groups={'*': {momentum: 1}}", f"{GROUPS}.*: 'momentum' is not an option"),
        ("optimizer.groups={'*': 3}", f"{GROUPS}.*: its options are 3, not a mapping"),
        ("optimizer={_target_: own.NoRate}", "optimizer: own.NoRate has no learning rate"),
        ("optimizer={_target_: builtins.list}", "optimizer: builtins.list gave a list"),
        (
            "optimizer.betas=3",
            "optimizer.betas is 3 (command line), where a list of 2 numbers is wanted",
        ),
        ("optimizer.betas=0.9,0.95", "command line: optimizer.betas: got '0.9,0.95' (text)"),
        ("optimizer.lr=1,5e-3", "write 1.5e-3"),
        ("optimizer.lr=1,000", "write 1000, or 1.000"),
        ("optimizer.lr=null", "optimizer.lr is null (command line); its default is 0.001"),
        ("train.max_steps=1,000", "did you mean 1000?"),
        ("amp.growth_factor=2,5", "did you mean 2.5?"),
        ("scheduler={_target_: torch.nn.ReLU}", "called with the update count 0, failed"),
        ("scheduler={_target_: own.factor, value: abc}", "gave 'abc' for update 0"),
        ("scheduler={_target_: own.factor}", "gave None for update 0"),
        ("model={_target_: torch.nn.ReLU}", "no trainable parameter"),
        ("model={_target_: sys.exit}", "model: sys.exit failed: it called sys.exit(None)"),
        ("log.trackers={a: '${seed}'}", "command line: log.trackers: got a mapping"),
        ("train.max_steps={a: '${seed}'}", "command line: train.max_steps: got a mapping"),
        (
            "data.train={_target_: torch.utils.data.Subset, indices: [99999],"
            " dataset: {_target_: own.data, size: 8}}",
            "data.train: reading sample 0 failed: IndexError: index 99999 is out of bounds",
        ),
        (
            "data.eval={_target_: torch.utils.data.Subset, indices: [0, 99],"
            " dataset: {_target_: own.data, size: 8}}",
            "data.eval: reading sample 1 failed: IndexError: index 99 is out of bounds",
        ),
        ("data.train={_target_: builtins.dict, a: 1}", "reading sample 0 failed: KeyError: 0"),
        ("task={_target_: builtins.dict}", "command line: task: the task is a dict"),
        ("data.train={_target_: torch.utils.data.TensorDataset}", "data.train: the length of the"),
        ("data.train={_target_: own.Sized, length: raises}", "KeyError: 'no length'"),
        ("data.train={_target_: own.Sized, length: -1}", "should return >= 0"),
        ("data.train={_target_: own.Sized, length: 1e30}", "cannot be interpreted as an integer"),
    ],
)
def test_d1_a_wrong_value_ends_with_2_and_is_told_with_its_key(override: str, says: str) -> None:
    assert says in told(override)
    assert says in told(override, command="train")


@pytest.mark.parametrize("step_size", ["null", "0", "[1]"])
def test_d1_a_schedule_that_fails_when_it_is_stepped_ends_with_2(step_size: str) -> None:
    target = "_target_: torch.optim.lr_scheduler.StepLR"
    for steps in ("1", "2"):  # it is stepped at a boundary, or at the next step
        override = f"scheduler={{{target}, step_size: {step_size}}}"
        assert "StepLR" in told(override, f"train.max_steps={steps}", command="train")


@pytest.mark.parametrize("override", ["data.shuffle=true", "data.shuffle=false"])
def test_d1_more_samples_than_fit_into_memory_end_with_5(override: str) -> None:
    data = "data.train={_target_: own.Sized, length: 1000000000000000}"
    assert "1,000,000,000,000,000 samples, 8 bytes each" in told(data, override, code=5)


@pytest.mark.parametrize(
    "rate", [".inf", "-.inf", ".nan", "-1", "{_target_: torch.tensor, data: .inf}"]
)
def test_d22_a_rate_that_no_training_can_use_is_told_at_check(rate: str) -> None:
    message = told(f"optimizer.lr={rate}")
    assert message.startswith("error: command line: optimizer.lr")
    assert "allowed: a finite number" in message


def test_d22_a_name_that_is_too_long_for_a_folder_is_told_at_check() -> None:
    assert "name: got a name of 256 bytes; allowed: up to 255" in told(f"name={'x' * 256}")
    assert "name: got a name of 257 bytes" in told(f"name={'é' * 128}x")
    told(f"name={'é' * 127}x", code=0)
    told("name=-x. y \N{ROCKET}", code=0)
    assert "a name for a folder" in told('name="a\\0b"')


# None


@pytest.mark.parametrize(
    ("override", "key"),
    [
        ("name=None", "name"),
        ("scheduler=None", "scheduler"),
        ("train.max_epochs=None", "train.max_epochs"),
        ("model.bias=None", "model.bias"),
        ("optimizer.betas=[0.9, None]", "optimizer.betas[1]"),
        ("optimizer.groups={'*': {lr: None}}", "optimizer.groups.*.lr"),
        ("seed=${oc.env:NO_SUCH_VARIABLE,None}", "seed"),
    ],
)
def test_d13_pythons_none_is_told_to_be_null(override: str, key: str) -> None:
    message = told(override)
    assert f"command line: {key}: got None, which is the text 'None' in YAML" in message
    assert 'write null, or "None" in quotes for the text' in message


def test_d13_none_in_a_file_is_told_with_its_line(folder: Path) -> None:
    (folder / "r.yaml").write_text(RECIPE.replace("size: 8", "size: 8, root: None"))
    assert "r.yaml:5: data.train.root: got None" in told()


@pytest.mark.parametrize("key", ["data.eval", "amp.clip_norm", "train", "name", "unknown"])
def test_d7_a_key_with_none_is_one_problem(key: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("r.yaml", [f"{key}=None"])
    assert [problem.key for problem in caught.value.problems] == [key]


LR = "_target_: torch.optim.lr_scheduler"
MULTI, STEP = f"{LR}.MultiStepLR", f"{LR}.StepLR"
ONE, TWO = "where one number is wanted", "where a list of 2 numbers is wanted: write it like [0."


@pytest.mark.parametrize(
    ("override", "key", "says"),
    [
        ("optimizer.betas=0.9", "optimizer.betas", TWO),
        ("optimizer.betas=[0.9]", "optimizer.betas", "where 2 numbers are wanted"),
        ("optimizer.lr=[0.1]", "optimizer.lr", f"{ONE}: write it like 0.1"),
        ("optimizer.eps={a: 1}", "optimizer.eps", ONE),
        ("optimizer.groups={weight: {lr: [0.1]}}", "optimizer.groups.weight.lr", ONE),
        ("optimizer.groups={weight: {betas: 0.9}}", "optimizer.groups.weight.betas", TWO),
        (
            "optimizer.groups={weight: {weight_decay: [0]}}",
            "optimizer.groups.weight.weight_decay",
            ONE,
        ),
        (
            "scheduler={_target_: torch.optim.lr_scheduler.MultiStepLR, milestones: 30}",
            "scheduler.milestones",
            "where a list is wanted: write it like [30]",
        ),
        ("optimizer.betas=[0.9, null]", "optimizer.betas[1]", "is null (command line)"),
        ("optimizer.betas=[0.9, [0.99]]", "optimizer.betas[1]", ONE),
        ("optimizer.betas={a: 1}", "optimizer.betas", "is a mapping (command line), where a list"),
        ("optimizer.lr=true", "optimizer.lr", "got True; allowed: a finite number"),
        ("optimizer.amsgrad=3", "optimizer.amsgrad", "got 3; allowed: true or false"),
        ("optimizer.groups={w: {maximize: [true]}}", "optimizer.groups.w.maximize", "true or f"),
        ("optimizer.groups={_target_: builtins.list}", "optimizer.groups", "allowed: a mapping"),
        # What the constructor takes, and the first step does not.
        (
            "optimizer={_target_: torch.optim.Rprop, step_sizes: 50}",
            "optimizer.step_sizes",
            TWO[:40],
        ),
        ("optimizer={_target_: torch.optim.ASGD, lambd: [0.1]}", "optimizer.lambd", ONE),
        (f"scheduler={{{MULTI}, milestones: [a]}}", "scheduler.milestones[0]", "got 'a' (text)"),
        (f"scheduler={{{MULTI}, milestones: {{a: 3}}}}", "scheduler.milestones", "allowed: a list"),
        (f"scheduler={{{MULTI}, milestones: null}}", "scheduler.milestones", "got null; allowed"),
        (f"scheduler={{{MULTI}, milestones: [1], gamma: [0.1]}}", "scheduler.gamma", ONE),
        (
            f"scheduler={{{STEP}, step_size: [30]}}",
            "scheduler.step_size",
            f"{ONE}: write it like 30",
        ),
        (f"scheduler={{{STEP}, step_size: null}}", "scheduler.step_size", "a number is wanted"),
        (
            f"scheduler={{{LR}.ChainedScheduler, schedulers: {{{STEP}, step_size: 3}}}}",
            "scheduler.schedulers",
            "is a block (command line), where a list is wanted",
        ),
        (
            f"scheduler={{{LR}.ChainedScheduler, schedulers: [{{{STEP}, step_size: [3]}}]}}",
            "scheduler.schedulers[0].step_size",
            ONE,
        ),
    ],
)
def test_d7_one_number_and_a_list_of_them_are_told_apart(
    override: str, key: str, says: str
) -> None:
    output = told("optimizer={_target_: torch.optim.Adam, lr: 0.1}", override)
    assert output.startswith(f"error: command line: {key}: ")
    assert "problems" not in output
    assert says in output


def test_d13_a_quoted_none_is_the_text_and_is_written_so_that_it_reads_back() -> None:
    loaded = load_recipe("r.yaml", ['name="None"', "model.other='none'"])
    assert loaded.recipe.name == "None"
    assert parse_recipe(loaded.text, where="x").recipe == loaded.recipe
    Path("again.yaml").write_text(loaded.text)
    assert load_recipe("again.yaml").recipe == loaded.recipe
    older = loaded.text.replace("name: 'None'", "name: None")  # as earlier versions wrote it
    assert parse_recipe(older, where="x").recipe.name == "None"
    with pytest.raises(RecipeError, match="got None"):
        parse_recipe(older, where="x", overrides=["scheduler=None"])


# Keys with dots


@pytest.mark.parametrize(
    ("override", "path", "value"),
    [
        ("a=1", ("a",), "1"),
        (" a.b = 1", ("a", "b"), " 1"),
        ("a[0].b[12]=x=y", ("a", 0, "b", 12), "x=y"),
        ('a."2.*".lr=1', ("a", "2.*", "lr"), "1"),
        ("a.'2.*'.lr=1", ("a", "2.*", "lr"), "1"),
        ("a[2.*].lr=1", ("a", "2.*", "lr"), "1"),
        ("a['x.[0-9]']=1", ("a", "x.[0-9]"), "1"),
        ('a["x=\\"\\\\y"]=1', ("a", 'x="\\y'), "1"),
        ('a["0"]=1', ("a", "0"), "1"),
        ("a.it's=1", ("a", "it's"), "1"),
        ('a.""=1', ("a", ""), "1"),
    ],
)
def test_d8_a_key_with_a_dot_in_it_stands_in_quotes_or_brackets(
    override: str, path: tuple[str | int, ...], value: str
) -> None:
    assert parse_override(override) == (path, value)


@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("a.b", "it has no ="),
        ("", "it has no ="),
        ('a."b.c=1', "the quote of '\"b.c=1' is not closed"),
        ("a['b=1", 'the quote of "[\'b=1" is not closed'),
        ("a[b=1", "its key cannot be read from '[b=1' on"),
        ("a..b=1", "its key cannot be read from '.b=1' on"),
        ("a[]=1", "its key cannot be read from '[]=1' on"),
        ('a."b"c=1', "its key cannot be read from 'c=1' on"),
        ("=1", "its key cannot be read from '=1' on"),
        ("[a]=1", "its key cannot be read from '[a]=1' on"),
        ("a b=1", "its key cannot be read from ' b=1' on"),
    ],
)
def test_d8_a_key_that_cannot_be_read_is_told_with_where(override: str, says: str) -> None:
    with pytest.raises(RecipeError) as caught:
        load_recipe("r.yaml", [override])
    assert f"got {override!r}; allowed: KEY=VALUE with a dotted key, and {says}" in str(
        caught.value
    )


@pytest.mark.parametrize(
    "name",
    ["2.*", "a.b", "layers.[0-9]*", "a b", "it's", 'say "x.y"', "a\\b.c", "x=y", "0", "é.é", " "],
)
def test_d8_any_name_is_shown_as_it_can_be_pasted(name: str) -> None:
    path = ("optimizer", "groups", name, "lr")
    assert parse_override(f"{dotted(path)}=1") == (path, "1")
    assert parse_override(f"{child('a', name)}=1") == (("a", name), "1")


def test_d8_overrides_of_dotted_keys_and_what_origin_shows_of_them() -> None:
    result = CliRunner().invoke(
        app,
        [
            "show",
            "r.yaml",
            "--origin",
            'amp.modules."head.0"=float32',
            "optimizer.groups['w.*'].lr=1",
        ],
    )
    rows = dict(line.split(maxsplit=1) for line in result.stdout.splitlines())
    assert rows["amp.modules[head.0]"] == rows["optimizer.groups[w.*].lr"] == "command line"
    loaded = load_recipe("r.yaml", ["amp.modules[head.0]=float32", "optimizer.groups[w.*].lr=1"])
    assert loaded.recipe.amp.modules == {"head.0": "float32"}
    assert loaded.recipe.optimizer["groups"] == {"w.*": {"lr": 1}}


def test_d8_null_takes_an_entry_out() -> None:
    overrides = ["amp.modules={head.0: float32, x: bfloat16}", "amp.modules[head.0]=null"]
    assert load_recipe("r.yaml", overrides).recipe.amp.modules == {"x": "bfloat16"}
    told("optimizer.groups={w*: {lr: 1}}", "optimizer.groups[w*]=null", code=0)


def test_d8_a_dot_without_quotes_is_told_with_how_to_write_it() -> None:
    assert "write it in brackets: amp.modules[head.0]" in told("amp.modules.head.0=float32")
    message = told("optimizer.groups.2.*.lr=1")
    assert "a name that has dots stands in brackets or quotes: groups[a.b].lr" in message
