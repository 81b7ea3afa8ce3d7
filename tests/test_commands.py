"""The commands that messages give do what they say, whatever the run was begun with."""

from __future__ import annotations

import re
import shlex
from pathlib import Path
from typing import Any

import own_parts
import pytest
import torch
from test_resume_changes import RECIPE
from typer.testing import CliRunner

from ampctl import commands
from ampctl.cli import app
from ampctl.track.metrics import read_metrics

BAD = ("data.train.bad=[3]", "amp.nonfinite=stop", "data.shuffle=false", "scheduler=null")
WEIGHTS = "the weights' file.pt"


@pytest.fixture(autouse=True)
def _recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "my recipe.yaml").write_text(RECIPE)
    state = own_parts.Net().state_dict()
    del state["head.bias"]
    torch.save(state, WEIGHTS)


def ampctl(*argv: str, code: int) -> Any:
    done = CliRunner().invoke(app, argv)
    assert done.exit_code == code, (done.stdout, done.stderr, done.exc_info)
    return done


def printed(said: str, pattern: str) -> list[str]:
    """Return the words of a command that a message gives, as a shell takes them."""
    found = re.search(pattern, said)
    assert found, said
    name, *words = shlex.split(found[1])
    assert name == "ampctl"
    return words


INIT = ("--init-from", WEIGHTS, "--allow-missing", "head.*", "--allow-missing", "head.[b]ias")
NEXT = r"next:   `(.*)`(?:, once this is mended)?\n"


def test_b7_a_run_that_saved_nothing_begins_from_the_same_weights() -> None:
    said = ampctl("train", "my recipe.yaml", *BAD, *INIT, "--run-dir", "a b", code=3).stderr
    words = printed(said, NEXT)
    assert words[:2] == ["train", "a b/recipe.yaml"]
    again = ampctl(*words, "data.train.bad=[]", "--run-dir", "c", code=0)
    assert f"starting from the weights of {WEIGHTS}: 8 of 9 taken" in again.stdout


def test_b7_a_run_from_another_ones_checkpoint_goes_on_from_that_again() -> None:
    """In a folder of its own: the run that it comes from is left alone."""
    good = ("train.max_steps=3", "optimizer.lr=0.05", "scheduler=null", "data.shuffle=false")
    ampctl("train", "my recipe.yaml", *good, "--run-dir", "the first", code=0)
    before = sorted(Path("the first/checkpoints").iterdir())
    ours = ("data.train.bad=[21]", "train.max_steps=8", "amp.nonfinite=stop", "--run-dir", "b")
    said = ampctl("resume", "the first", *ours, "--trust", code=3).stderr
    words = printed(said, NEXT)
    assert words[:2] == ["resume", "the first/checkpoints/step-00000003.pt"]
    assert words[words.index("--run-dir") + 1] == "b-2"
    assert {"data.train.bad=[21]", "train.max_steps=8"} <= {*words}
    again = ampctl(*words, "data.train.bad=[]", code=0)
    assert "going on from step-00000003.pt" in again.stdout
    assert read_metrics("b-2/metrics.jsonl")[-1]["reason"] == "complete"
    assert sorted(Path("the first/checkpoints").iterdir()) == before


def test_b7_a_run_that_saved_goes_on_from_there() -> None:
    late = (*BAD, "data.train.bad=[21]")
    said = ampctl("train", "my recipe.yaml", *late, *INIT, "--run-dir", "-a b", code=3).stderr
    words = printed(said, NEXT)
    assert words[:2] == ["resume", "./-a b"]
    again = ampctl(*words, "data.train.bad=[]", code=0)
    assert "going on from step-00000003.pt" in again.stdout
    more = ampctl(*printed(again.stdout, "to go on: (.*)\n"), code=0)
    assert "complete: 16 steps" in more.stdout


def test_b7_a_run_folder_that_is_taken_is_told_with_its_command() -> None:
    ampctl("train", "my recipe.yaml", "--run-dir", "it's a run", code=0)
    said = ampctl("train", "my recipe.yaml", "--run-dir", "it's a run", code=2).stderr
    assert "already complete" in ampctl(*printed(said, "`(.*)` goes on with it"), code=0).stdout


def test_b7_names_are_written_for_a_shell() -> None:
    given = commands.train("-x y.yaml", ["a.b={c: 1}"], init_from=Path("-w"), allow_missing=["h*"])
    words = ["./-x y.yaml", "a.b={c: 1}", "--init-from", "./-w", "--allow-missing", "h*"]
    assert shlex.split(given) == ["ampctl", "train", *words]
    given = commands.resume("a'b", ["x=$y"], run_dir=Path("c d"), ranks=" --nproc-per-node 2")
    words = ["a'b", "x=$y", "--run-dir", "c d", "--nproc-per-node", "2"]
    assert shlex.split(given) == ["ampctl", "resume", *words]


def test_b7_a_folder_beside_a_run_is_not_there_yet(folder: Path) -> None:
    (folder / "a-2").mkdir()
    assert commands.beside(Path("a")) == Path("a-3")
