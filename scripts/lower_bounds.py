"""Print the lower bounds of pyproject.toml as pip constraints, for ``scripts/test --oldest``."""

from __future__ import annotations

import re
import tomllib
from pathlib import Path

BOUND = re.compile(r"([A-Za-z0-9_.-]+)(?:\[[^]]*\])? *>= *([0-9][\w.]*)")


def lower_bounds(text: str) -> list[str]:
    """Return ``NAME==VERSION`` for each ``NAME>=VERSION`` of the contents of a pyproject.toml."""
    project = tomllib.loads(text)
    wanted = [*project["build-system"]["requires"], *project["project"]["dependencies"]]
    for extra in project["project"]["optional-dependencies"].values():
        wanted += extra
    bounds = (BOUND.match(requirement) for requirement in wanted)
    return [f"{found[1]}=={found[2]}" for found in bounds if found]


if __name__ == "__main__":
    pyproject = Path(__file__).resolve().parents[1] / "pyproject.toml"
    print("\n".join(lower_bounds(pyproject.read_text(encoding="utf-8"))))
