"""What ``ampctl`` says of a small recipe that some of its parts are replaced in."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_resume_changes import RECIPE
from typer.testing import CliRunner

from ampctl.cli import app


@pytest.fixture(autouse=True)
def recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Put the recipe into the current folder, for each test of a module that imports this."""
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def ampctl(*argv: str, code: int) -> str:
    """Run a command on the recipe; return all that it says."""
    done = CliRunner().invoke(app, [argv[0], "recipe.yaml", *argv[1:]])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exc_info)
    assert "Traceback" not in done.stderr
    assert ("ready" in done.stdout) == (code == 0 and argv[0] == "check")
    return done.stdout + done.stderr
