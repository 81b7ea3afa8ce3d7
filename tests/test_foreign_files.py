"""Files and folders of other programs where a checkpoint should be: what they are, what to do."""

from __future__ import annotations

import shlex
from pathlib import Path

import pytest
import torch
from own_parts import Net
from safetensors.torch import save_file
from test_resume_exact import RECIPE
from typer.testing import CliRunner, Result

import ampctl
from ampctl.cli import app
from ampctl.errors import CheckpointError

READERS = ("resume", "eval", "inspect", "verify", "export", "load_model")
BEGIN = ("recipe.yaml", "train.max_steps=1", "checkpoint.keep_best=0")


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def run(*argv: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, list(argv))
    assert result.exit_code == code, (result.output, result.exc_info)
    return result


def refusal(reader: str, source: str) -> str:
    if reader == "load_model":
        with pytest.raises(CheckpointError) as caught:
            ampctl.load_model(source)
        return str(caught.value)
    words = (reader, source, *(["out.pt"] if reader == "export" else []))
    return run(*words, code=4).stderr


def paste(message: str) -> str:
    """Run the command in a message with a recipe in the place of RECIPE; return what it says."""
    command = shlex.split(message.split("`")[1])
    assert command[:3] == ["ampctl", "train", "RECIPE"]
    return run("train", *BEGIN, *command[3:], "--run-dir", "b").stdout


@pytest.mark.parametrize("name", ["my weights.safetensors", "weights.pt", "weights.bin"])
def test_a_file_of_weights_is_told_with_what_can_be_done_with_it(name: str) -> None:
    weights = Net().state_dict()
    if name == "weights.pt":
        torch.save(weights, name)
    else:
        save_file(weights, name)
    kind = "a bare state dict" if name == "weights.pt" else "a safetensors file"
    for reader in READERS:
        message = refusal(reader, name)
        assert f"{name} cannot be used: it is {kind} (weights alone), of which no run" in message
    assert f"starting from the weights of {name}: 9 of 9 taken" in paste(message)


def test_a_folder_of_another_program_is_told_with_its_weights() -> None:
    hf = Path("hf model")
    hf.mkdir()
    for name in ("config.json", "tokenizer.json"):
        (hf / name).write_text("{}")
    save_file(Net().state_dict(), hf / "model.safetensors")
    (hf / "optimizer.pt").write_bytes(b"")
    for reader in READERS:
        message = refusal(reader, "hf model")
        assert "hf model holds no checkpoint: it is no run, and `ampctl train RECIPE" in message
        assert "--resume auto" not in message
    assert "hf model/model.safetensors: 9 of 9 taken" in paste(message)
    begin = ("train", *BEGIN, "--init-from", "hf model")
    assert "--init-from 'hf model/model.safetensors'` starts a new" in run(*begin, code=4).stderr
    parts = [f"model-0000{i}-of-00002.safetensors" for i in (1, 2)]
    (hf / "model.safetensors").replace(hf / parts[0])
    (hf / parts[1]).touch()
    message = run(*begin, code=4).stderr
    assert f"holds files of weights ({', '.join(parts)}); save the model to one file" in message


@pytest.mark.parametrize("inside", ["", "digits"])
def test_a_folder_of_runs_names_them(inside: str) -> None:
    for name in ("20260101-000000", "20260102-000000"):
        (Path("runs") / inside / name / "checkpoints").mkdir(parents=True)
    Path("runs/notes.txt").touch()
    first, second = (str(Path("runs") / inside / f"2026010{day}-000000") for day in (1, 2))
    for reader in READERS:
        message = refusal(reader, "runs")
        assert f"it is no run and holds some; name one of them: {second}, {first}" in message
        assert "--resume auto" not in message


def test_other_folders_are_told_and_only_a_run_is_to_be_started_anew() -> None:
    Path("empty").mkdir()
    Path("notes").mkdir()
    Path("notes/recipe.yaml").touch()
    Path("be gun/checkpoints").mkdir(parents=True)
    for reader in READERS:
        assert "empty holds no checkpoint: it is empty; name a run" in refusal(reader, "empty")
        assert "notes holds no checkpoint: it is no run; name a run" in refusal(reader, "notes")
        assert "--run-dir 'be gun' --resume auto`" in refusal(reader, "be gun")


def test_a_damaged_newest_file_is_passed_over_in_words_that_hold_for_every_reader() -> None:
    run("train", *BEGIN, "train.max_steps=2", "--run-dir", "a")
    newest = Path("a/checkpoints/latest.pt").resolve()
    newest.write_bytes(newest.read_bytes() + b"more")
    damage = "it is cut off, or something was added at its end"
    for words in (["inspect", "a"], ["eval", "a"], ["export", "a", "newest.pt"]):
        said = run(*words).stderr
        assert said.endswith("; step-00000001.pt is taken instead\n")
        assert "going on" not in said
    Path("alone.pt").write_bytes(newest.read_bytes())
    for reader in READERS:
        assert f"alone.pt cannot be used: it is damaged: {damage};" in refusal(reader, "alone.pt")
