"""Recipes out of standard input and pipes; and pipes and devices that no recipe comes from."""

from __future__ import annotations

import json
import os
import threading
from collections.abc import Callable
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ampctl.cli import app
from ampctl.errors import RecipeError, UsageError
from ampctl.launcher import launch
from ampctl.launcher.plan import refuse_shared_pipe
from ampctl.recipe import reading
from ampctl.recipe.load import load_recipe
from ampctl.recipe.yaml_source import MAX_BYTES

RECIPE = """\
name: small
model: {_target_: ampctl.models.MLP, in_features: 64, hidden: [4], num_classes: 10}
task: {_target_: ampctl.tasks.Classification}
data:
  train: {_target_: ampctl.data.Digits, split: train}
  batch_size: 8
optimizer: {_target_: torch.optim.SGD, lr: 1e-2}
train: {max_steps: 2, device: cpu}
"""

Send = Callable[..., None]


@pytest.fixture
def send(folder: Path, request: pytest.FixtureRequest) -> Send:
    """Return what makes standard input a pipe, or a file, with a text in it that then ends."""

    def sent(data: bytes | str, *, file: bool = False) -> None:
        data = data if isinstance(data, bytes) else data.encode()
        before = os.dup(0)
        request.addfinalizer(lambda: (os.dup2(before, 0), os.close(before)))
        if file:
            (folder / "sent").write_bytes(data)
            source = os.open(folder / "sent", os.O_RDONLY)
        else:
            source = pipe_with(data)
        os.dup2(source, 0)
        os.close(source)

    return sent


def pipe_with(data: bytes) -> int:
    """Return the end of a pipe to read, where some bytes come in two parts."""
    source, target = os.pipe()

    def write() -> None:
        with open(target, "wb", buffering=0) as pipe:
            try:
                pipe.write(data[:7])
                pipe.write(data[7:])
            except BrokenPipeError:
                pass

    threading.Thread(target=write, daemon=True).start()
    return source


def run(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, [*words])
    assert result.exit_code == code, (result.output, result.exc_info)
    return result


@pytest.mark.parametrize("file", [False, True])
def test_a_recipe_is_read_from_standard_input(send: Send, file: bool) -> None:
    send(RECIPE, file=file)
    origins = json.loads(run("show", "-", "seed=3", "--origin", "--json").stdout)
    assert origins["train.max_steps"] == "standard input:8"
    assert origins["seed"] == "command line"


def test_a_file_that_is_sent_can_be_read_by_several_and_from_where_it_stands(send: Send) -> None:
    send(f"skipped\n{RECIPE}", file=True)
    os.lseek(0, len("skipped\n"), os.SEEK_SET)
    assert load_recipe("-") == load_recipe("-")


def test_check_and_train_take_standard_input(send: Send) -> None:
    send(RECIPE)
    run("check", "-")
    send(RECIPE)
    run("train", "-", "--run-dir", "run", "optimizer.lr=1e-3")
    assert load_recipe("run/recipe.yaml").recipe.optimizer["lr"] == 1e-3


def test_what_standard_input_extends_is_relative_to_the_current_folder(
    send: Send, folder: Path
) -> None:
    (folder / "base.yaml").write_text(RECIPE)
    send("extends: base.yaml\nseed: 5\n")
    loaded = load_recipe("-")
    assert (loaded.recipe.seed, loaded.origins["name"]) == (5, "base.yaml:1")
    assert (loaded.source, loaded.sent) == ("", "extends: base.yaml\nseed: 5\n")


@pytest.mark.parametrize(
    ("data", "says"),
    [
        (b"", "standard input: is empty, or closed"),
        (b" \n", "standard input: is empty, or closed"),
        (RECIPE.replace("8", "many").encode(), "standard input:6: data.batch_size: "),
        (b"a: [\n", "standard input:2:1: "),
        (b"a: " + b"x" * 2 * MAX_BYTES, "standard input: is larger than 1,000,000 bytes"),
        (b"a: \xff", "standard input:1: is not UTF-8 text"),
    ],
)
def test_what_is_wrong_with_standard_input_is_told_by_its_name(
    send: Send, data: bytes, says: str
) -> None:
    send(data)
    assert says in run("show", "-", code=2).stderr


def test_a_folder_or_an_end_to_write_as_standard_input_is_told(send: Send, folder: Path) -> None:
    send("")
    for target, flags in ((folder, os.O_RDONLY), (folder / "new", os.O_WRONLY | os.O_CREAT)):
        other = os.open(target, flags)
        os.dup2(other, 0)
        os.close(other)
        with pytest.raises(RecipeError, match=r"^standard input: cannot be read: "):
            load_recipe("-")


def test_a_file_named_as_standard_input_is_read_by_its_path(folder: Path) -> None:
    (folder / "-").write_text(RECIPE)
    assert load_recipe("./-").origins["name"] == "-:1"


@pytest.mark.parametrize("source", ["-", "fifo"])
def test_ranks_each_read_all_that_was_sent(
    send: Send, folder: Path, monkeypatch: pytest.MonkeyPatch, source: str
) -> None:
    send(RECIPE)
    if source == "fifo":
        write_to(folder / source)
    seen = []

    def start(plan: object, argv: list[str], *_: object) -> None:
        words = argv[argv.index("--") + 1 :]
        seen.extend(load_recipe(words[0], words[1:]) for _ in range(2))

    monkeypatch.setattr(launch, "_start", start)
    run("train", source, "seed=4", "--nproc-per-node", "2")
    assert [each.recipe.seed for each in seen] == [4, 4]
    assert {each.origins["name"] for each in seen} == {"standard input:1"}


def test_ranks_of_torchrun_with_one_pipe_are_told(
    send: Send, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    send(RECIPE)
    with pytest.raises(UsageError, match="name a file, or send it itself"):
        refuse_shared_pipe("-")
    send(RECIPE, file=True)
    refuse_shared_pipe("-")


def write_to(fifo: Path, text: str = RECIPE) -> None:
    """Make a pipe with a name, and write to it once somebody reads."""
    os.mkfifo(fifo)
    threading.Thread(target=lambda: fifo.write_text(text), daemon=True).start()


def test_a_pipe_is_read_as_a_recipe_while_somebody_writes_to_it(folder: Path) -> None:
    source = pipe_with(RECIPE.encode())
    assert load_recipe(f"/dev/fd/{source}").origins["name"] == f"/dev/fd/{source}:1"
    os.close(source)
    write_to(folder / "fifo")
    loaded = load_recipe("fifo")
    assert (loaded.recipe.name, loaded.source, loaded.sent) == ("small", "", RECIPE)


def test_a_pipe_that_nobody_writes_to_is_not_waited_for(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(reading, "FOR_A_WRITER_S", 0.05)
    monkeypatch.setattr(reading, "FOR_A_WORD_S", 0.1)
    os.mkfifo(folder / "fifo")
    with pytest.raises(RecipeError, match=r"^fifo: is a pipe, and nothing came out of it in 0\.05"):
        load_recipe("fifo")
    source, target = os.pipe()
    with pytest.raises(RecipeError, match=r"is a pipe, and nothing came out of it in 0\.1 s"):
        load_recipe(f"/dev/fd/{source}")
    os.close(source)
    os.close(target)


def test_no_pipe_and_no_device_is_extended(folder: Path) -> None:
    os.mkfifo(folder / "fifo")
    (folder / "r.yaml").write_text("extends: [fifo, /dev/zero]\n")
    with pytest.raises(RecipeError) as caught:
        load_recipe("r.yaml")
    told = [f"{problem}".splitlines()[0] for problem in caught.value.problems]
    assert told == [
        "fifo: cannot be read: it is a pipe, not a regular file",
        "/dev/zero: cannot be read: it is a device, not a regular file",
    ]
    with pytest.raises(RecipeError, match=r"^/dev/zero: cannot be read: it is a device"):
        load_recipe("/dev/zero")
