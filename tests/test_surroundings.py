"""What a command is started in: closed streams, a folder that is gone, variables not set."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner

from ampctl.cli import app, recipes
from ampctl.cli.options import Command

RECIPE = """\
name: small
model: {_target_: torch.nn.Linear, in_features: 2, out_features: 1}
task: {_target_: ampctl.tasks.Regression}
data: {train: {_target_: own.data}, batch_size: 4}
optimizer: {_target_: torch.optim.SGD, lr: 1e-2}
train: {max_steps: 1, device: cpu}
"""


@pytest.fixture(autouse=True)
def _recipe(folder: Path) -> None:
    (folder / "r.yaml").write_text(RECIPE)


def shell(command: str) -> subprocess.CompletedProcess[str]:
    """Run a line of a shell in which ``ampctl`` is the command."""
    line = f'ampctl() {{ "{sys.executable}" -m ampctl "$@"; }}; {command}'
    return subprocess.run(["bash", "-c", line], capture_output=True, text=True, timeout=300)


@pytest.mark.parametrize(
    ("redirected", "names"),
    [(">&-", "stdout"), ("2>&-", "stderr"), ("<&- >&-", "stdout"), ("<&- 2>&-", "stderr")],
)
def test_d9_a_closed_stream_is_told_on_the_other_one(redirected: str, names: str) -> None:
    ended = shell(f"ampctl train r.yaml --run-dir d {redirected}")
    assert ended.returncode == 5
    said = ended.stderr + ended.stdout
    assert said.startswith(f"error: {names} closed (>&- in a shell)")
    assert said.count("\n") == 1
    assert not Path("d").exists()


def test_d9_with_no_stream_at_all_the_code_tells_it() -> None:
    ended = shell("ampctl train r.yaml --run-dir d <&- >&- 2>&-")
    assert (ended.returncode, ended.stdout, ended.stderr) == (5, "", "")


def test_d9_a_closed_stdin_is_an_empty_one() -> None:
    ended = shell("ampctl show r.yaml <&-")
    assert (ended.returncode, ended.stderr) == (0, "")
    assert ended.stdout.startswith("name: small\n")


def test_d9_a_current_folder_that_was_removed_is_told(folder: Path) -> None:
    (folder / "gone").mkdir()
    ended = shell(f"cd gone; rmdir ../gone; ampctl check {folder}/r.yaml")
    assert ended.returncode == 5
    assert ended.stderr.startswith("error: the current folder cannot be used (No such file")
    assert ended.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("argv", "name"),
    [
        (["train", "r.yaml", "--run-dir", ""], "--run-dir"),
        (["train", "r.yaml", "--run-dir="], "--run-dir"),
        (["train", "r.yaml", "--run-dir", "  "], "--run-dir"),
        (["train", "r.yaml", "--init-from", ""], "--init-from"),
        (["train", "r.yaml", "--rdzv-endpoint", ""], "--rdzv-endpoint"),
        (["train", ""], "argument 1"),
        (["train", "r.yaml", ""], "argument 2"),
        (["train", "r.yaml", "--quiet", ""], "argument 3"),
        (["resume", ""], "argument 1"),
        (["resume", "d", "--run-dir", ""], "--run-dir"),
        (["inspect", ""], "argument 1"),
        (["recipes", "show", ""], "argument 1"),
    ],
)
def test_d9_an_empty_word_is_a_variable_that_is_not_set(
    argv: list[str], name: str, folder: Path
) -> None:
    before = sorted(folder.iterdir())
    result = CliRunner().invoke(app, argv, env={"COLUMNS": "200", "TERM": "dumb"})
    assert result.exit_code == 2
    assert f"{name} is empty; is a variable of the shell unset?" in result.output
    assert sorted(folder.iterdir()) == before


def test_d9_every_command_refuses_empty_words() -> None:
    commands = [*app.registered_commands, *recipes.app.registered_commands]
    assert len(commands) > 10
    assert all(each.cls is Command for each in commands)
