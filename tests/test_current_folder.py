"""A checkpoint of a stranger lies in a folder of his: no module there is imported for it."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from collections.abc import Callable, Iterator
from multiprocessing import forkserver
from pathlib import Path

import pytest
from processes import Ended, Running, spawn, starting

from ampctl.recipe.current_folder import (
    close_current_folder,
    closed_current_folder,
    open_current_folder,
)
from ampctl.recipe.load import load_recipe
from ampctl.run import worker

RECIPE = """
name: visit
model: {_target_: torchvision.models.VisionTransformer, image_size: 4, patch_size: 4, num_layers: 1,
  num_heads: 1, hidden_dim: 4, mlp_dim: 4, num_classes: 2}
task: {_target_: ampctl.tasks.Classification}
data:
  train: &data {_target_: torchvision.datasets.FakeData, size: 8, image_size: [3, 4, 4],
    num_classes: 2, transform: {_target_: torchvision.transforms.ToTensor}}
  eval: *data
  batch_size: 4
optimizer: {_target_: torch.optim.SGD, lr: 0.01}
amp: {dtype: float32}
train: {max_steps: 2}
checkpoint: {every_steps: 1, asynchronous: false}
"""
OWN_DATA = """
import torch


class Set(torch.utils.data.Dataset):
    def __len__(self):
        return 4

    def __getitem__(self, index):
        import own_detail

        return torch.zeros(3, 4, 4), own_detail.LABEL
"""
# What torch, torchvision and ampctl import when they need it, or before anything else.
NAMES = ("PIL", "accelerate", "rich", "safetensors", "sentencepiece", "sklearn", "timm", "typer")
NAMES += ("numpy", "omegaconf", "sympy", "torch", "yaml")

Start = Callable[..., Running]


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """A state home that knows the recipe, and beside it the checkpoint of half a run."""
    where, before = tmp_path_factory.mktemp("saved"), Path.cwd()
    os.chdir(where)
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("XDG_STATE_HOME", f"{where / 'state'}")
        (where / "recipe.yaml").write_text(RECIPE)
        worker.train(load_recipe("recipe.yaml"), run_dir=Path("a"), resume=False, quiet=True)
    os.chdir(before)
    forkserver.ensure_running()  # which imports what it preloads, and not from a hostile folder
    shutil.copy(where / "a/checkpoints/step-00000001.pt", where / "visit.pt")
    return where


@pytest.fixture
def hostile(folder: Path, saved: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """A folder with the checkpoint, of a recipe that was trained here too, and hostile modules.

    It is a repository besides, whose settings let git run a program when it is asked for changes.
    """
    monkeypatch.setenv("XDG_STATE_HOME", f"{saved / 'state'}")
    shutil.copy(saved / "visit.pt", folder)
    for name in NAMES:
        (folder / f"{name}.py").write_text(
            f"import pathlib; pathlib.Path({str(folder)!r}, 'canary-{name}').touch()\n"
        )
    who = ("-c", "user.name=a", "-c", "user.email=a")
    for words in (
        ("init", "-q"),
        ("add", "visit.pt"),
        (*who, "commit", "-q", "-m", "a"),
        ("config", "core.fsmonitor", f"touch {folder / 'canary-git'}; false #"),
    ):
        subprocess.run(["git", *words], cwd=folder, check=True)
    return folder


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    with starting(folder) as start:
        yield start


def well(ended: Ended) -> str:
    assert ended.code == 0, ended
    assert not list(Path().glob("canary*")), ended
    return ended.out


@pytest.mark.parametrize(
    "argv",
    [
        ["resume", "visit.pt", "--run-dir", "b", "data.num_workers=1"],
        ["eval", "visit.pt"],
        ["inspect", "visit.pt"],
        ["verify", "visit.pt"],
        ["export", "visit.pt", "out.safetensors"],
        ["eval", "visit.pt", "--trust"],  # which has nothing to let in
    ],
    ids=lambda argv: " ".join(argv[::2]),
)
def test_what_lies_beside_a_checkpoint_is_not_imported_for_it(
    argv: list[str], hostile: Path, start: Start
) -> None:
    well(start(*argv).wait())


def test_nor_is_it_by_the_command_and_the_ranks_that_it_starts(hostile: Path) -> None:
    """From the first line of each interpreter on: they are started as users start them."""
    for name in ("types", "typing", "ampctl"):  # what is imported before any line of ours
        shutil.copy("PIL.py", f"{name}.py")
    script = "from ampctl.__main__ import main; main()"
    argv = ("resume", "visit.pt", "--run-dir", "b", "--nproc-per-node", "2", "--quiet")
    done = spawn("-P", "-c", script, *argv, cwd=hostile)
    well(Ended(done.returncode, done.stdout, done.stderr))
    assert (hostile / "b" / "checkpoints" / "step-00000002.pt").exists()


@pytest.mark.slow
def test_nor_is_it_by_plain_torchruns_ranks(hostile: Path) -> None:
    options = ("--nproc-per-node", "2", "--master-port", "29513", "-m", "ampctl")
    argv = ("resume", "visit.pt", "--run-dir", "b", "--quiet")
    done = spawn("-P", "-m", "torch.distributed.run", *options, *argv, cwd=hostile)
    well(Ended(done.returncode, done.stdout, done.stderr))


def test_nor_is_it_by_a_program_that_loads_the_model(hostile: Path) -> None:
    program = (
        "import sys, ampctl; before = list(sys.path); ampctl.load_model('visit.pt');"
        "assert sys.path == before and before[0] == ''; import os;"
        "assert 'PYTHONSAFEPATH' not in os.environ"
    )
    done = spawn("-c", program, cwd=hostile)
    well(Ended(done.returncode, done.stdout, done.stderr))


def test_a_package_that_the_recipe_names_is_not_to_lie_there(
    hostile: Path, start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    (hostile / "torchvision.py").write_text((hostile / "PIL.py").read_text())
    monkeypatch.setenv("XDG_STATE_HOME", f"{hostile / 'fresh'}")
    ended = start("eval", "visit.pt").wait()
    assert ended.code == 4
    assert "model: torchvision.models.VisionTransformer (another torchvision lies" in ended.err
    assert not list(hostile.glob("canary*"))


def test_what_the_user_names_beside_it_is_imported(hostile: Path, start: Start) -> None:
    (hostile / "own_data.py").write_text(OWN_DATA)
    (hostile / "own_detail.py").write_text("LABEL = 1\n")
    for name in NAMES:
        (hostile / f"{name}.py").unlink()
    shutil.rmtree(hostile / ".git")
    said = well(start("eval", "visit.pt", "data.eval={_target_: own_data.Set}").wait())
    assert "evaluated:     4 samples" in said


def test_the_current_folder_is_closed_until_it_is_opened(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    path = ["/elsewhere", "", f"{folder}", f"{folder}/.", f"{folder}/inside"]
    monkeypatch.setattr(sys, "path", list(path))
    monkeypatch.delenv("PYTHONSAFEPATH", raising=False)
    with closed_current_folder():
        assert sys.path == ["/elsewhere", f"{folder}/inside"]
        assert os.environ["PYTHONSAFEPATH"]
    assert sys.path == path
    assert "PYTHONSAFEPATH" not in os.environ
    with closed_current_folder():
        open_current_folder()
        assert sys.path == [f"{folder}", "/elsewhere", f"{folder}/inside"]
        assert "PYTHONSAFEPATH" not in os.environ
    assert sys.path == path
    monkeypatch.setenv("PYTHONSAFEPATH", "1")
    close_current_folder()
    open_current_folder()
    assert os.environ["PYTHONSAFEPATH"] == "1"  # the user's own word
