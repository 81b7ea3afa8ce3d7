"""The recipes that come with ampctl: their names, files and one-line descriptions."""

from __future__ import annotations

from pathlib import Path

from ampctl.errors import UsageError
from ampctl.recipe.suggest import nearest


def builtin_names() -> list[str]:
    """Return the names of the built-in recipes, sorted."""
    return sorted(path.stem for path in _folder().glob("*.yaml"))


def builtin_path(name: str) -> Path:
    """Return the file of a built-in recipe; ``UsageError`` for a name that there is not."""
    names = builtin_names()
    if name not in names:
        close = nearest(name, names)
        advice = f"did you mean {close}?" if close else f"there are: {', '.join(names)}"
        raise UsageError(f"no built-in recipe is called {name!r}\n    {advice}")
    return _folder() / f"{name}.yaml"


def describe(name: str) -> str:
    """Return the first comment line of a built-in recipe, without its mark; "" if it has none."""
    with builtin_path(name).open(encoding="utf-8") as file:
        first = file.readline().strip()
    return first.lstrip("# ") if first.startswith("#") else ""


def _folder() -> Path:
    """The folder inside an installed package, or the one at the top of a checkout."""
    package = Path(__file__).parents[1]
    inside = package / "recipes"
    return inside if inside.is_dir() else package.parent / "recipes"
