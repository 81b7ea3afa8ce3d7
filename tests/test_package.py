"""What is built and installed: the wheel and the archive of sources, and their types for a user."""

from __future__ import annotations

import os
import subprocess
import sys
import tarfile
import venv
import zipfile
from pathlib import Path

import pytest
from processes import spawn

ROOT = Path(__file__).parents[1]

USERS_CODE = """\
import ampctl
from ampctl.data import Digits
from ampctl.schedules import Cosine
from ampctl.tasks import Regression
from torch import Tensor, nn

class Scaled(Regression):
    def metrics(self, output: Tensor, batch: tuple[Tensor, Tensor]) -> dict[str, Tensor | float]:
        return {**super().metrics(output, batch), "largest": output.abs().amax()}

model: nn.Module = ampctl.load_model("runs/first", device="cpu")
image, label = Digits(split="test")[0]
factor: float = Cosine(total_steps=30, warmup_steps=3)(4)
"""


@pytest.fixture(scope="module")
def built(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder with the wheel and the archive of sources, made as for a release."""
    pytest.importorskip("hatchling", reason="the build backend is not installed")
    folder = tmp_path_factory.mktemp("dist")
    done = spawn("-m", "hatchling", "build", "-d", f"{folder}", cwd=ROOT)
    assert done.returncode == 0, done.stderr
    return folder


@pytest.fixture
def user(built: Path, folder: Path) -> Path:
    """The Python of a user who has installed the wheel, beside all else that is installed here."""
    venv.create(folder / "venv", symlinks=True)
    (packages,) = (folder / "venv" / "lib").glob("python*/site-packages")
    (wheel,) = built.glob("*.whl")
    zipfile.ZipFile(wheel).extractall(packages)
    others = [path for path in sys.path if Path(path).name in ("site-packages", "dist-packages")]
    (packages / "others.pth").write_text("\n".join(others))
    return folder / "venv" / "bin" / "python"


def checked(user: Path, code: str) -> str:
    """Return what mypy says of a module of the user's."""
    Path("user.py").write_text(code)
    kept = ROOT / ".mypy_cache"
    cache = f"--cache-dir={kept if os.access(kept, os.W_OK) else 'cache'}"
    words = ("-m", "mypy", "--strict", cache, f"--python-executable={user}", "user.py")
    return spawn(*words).stdout


def test_d20_a_users_type_checker_sees_the_types(user: Path) -> None:
    said = checked(user, USERS_CODE)
    assert said.startswith("Success"), said
    wrong = USERS_CODE + "ampctl.load_model(3)\nCosine(total_steps='3')\n"
    said = checked(user, wrong)
    assert said.count("error:") == 2, said
    assert 'user.py:14: error: Argument 1 to "load_model"' in said
    assert 'user.py:15: error: Argument "total_steps" to "Cosine"' in said


def test_d20_the_marker_of_types_is_in_all_that_is_built(built: Path) -> None:
    (wheel,), (sources,) = built.glob("*.whl"), built.glob("*.tar.gz")
    assert "ampctl/py.typed" in zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sources) as archive:
        assert "ampctl-0.1.0/ampctl/py.typed" in archive.getnames()


def test_the_manual_is_in_all_that_is_built_and_read_from_there(built: Path, user: Path) -> None:
    (wheel,), (sources,) = built.glob("*.whl"), built.glob("*.tar.gz")
    in_wheel = zipfile.ZipFile(wheel).namelist()
    with tarfile.open(sources) as archive:
        in_archive = archive.getnames()
    pages = [f"ampctl/docs/{path.name}" for path in (ROOT / "ampctl" / "docs").iterdir()]
    assert len(pages) >= 20
    assert set(pages) <= set(in_wheel)
    assert {f"ampctl-0.1.0/{page}" for page in pages} <= set(in_archive)
    done = subprocess.run(
        [user, "-m", "ampctl", "docs", "resuming"], capture_output=True, text=True, timeout=120
    )
    assert done.stdout.startswith("# Resuming"), done.stderr
