"""The house as it is drawn: imports go down only, light modules stay light, files stay small."""

from __future__ import annotations

import ast
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest

import ampctl

ROOT = Path(ampctl.__file__).parent

FLOORS = (
    {"errors"},
    {"files", "rng", "commands", "monitor", "environment", "schedules"},
    {"recipe", "torch_private", "models"},
    {"distributed"},
    {"amp", "data", "state_dict"},
    {"tasks"},
    {"engine"},
    {"builder", "checkpoint", "track"},
    {"doctor"},
    {"run"},
    {"launcher", "exactness"},
    {"cli"},
    {"__main__"},
)
"""The folders and the loose modules of ``ampctl/``, the lowest first: imports go down only."""
HEIGHT = {folder: height for height, floor in enumerate(FLOORS) for folder in floor}
MOST_LOOSE_MODULES = 10
LIGHT = (
    "",
    "cli",
    "cli.checkpoints",
    "cli.options",
    "cli.recipes",
    "cli.runs",
    "cli.screen",
    "launcher.launch",
    "launcher.plan",
    "launcher.streams",
    "distributed.launched",
    "distributed.address",
    "distributed.startup_signal",
    "distributed.failure",
    "__main__",
    "errors",
    "recipe.schema",
    "recipe.load",
)
LONGEST_FILE = 350
MAY_PRINT = ("cli", "track")

FILES = {
    ".".join(path.relative_to(ROOT).with_suffix("").parts).removesuffix("__init__").strip("."): path
    for path in sorted(ROOT.rglob("*.py"))
}
TREES = {name: ast.parse(path.read_text(encoding="utf-8")) for name, path in FILES.items()}


def folder(module: str) -> str:
    """Return the folder of ampctl/ that a module is in, or its own name if it lies loose."""
    return module.split(".")[0]


def imported(module: str) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) of what a module imports, inside functions too."""
    for node in ast.walk(TREES[module]):
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole.removeprefix("ampctl.") in FILES
                yield node.lineno, whole if is_module else str(node.module)


def imported_here(module: str) -> Iterator[tuple[int, str]]:
    """Yield (line, name below ampctl) of the modules of ours that a module imports."""
    for line, name in imported(module):
        if name.startswith("ampctl."):
            yield line, name.removeprefix("ampctl.")


def test_every_folder_stands_on_a_floor() -> None:
    assert {folder(module) for module in FILES} - {""} == HEIGHT.keys()


def test_few_modules_lie_loose() -> None:
    loose = [path.stem for path in ROOT.glob("*.py")]
    assert len(loose) <= MOST_LOOSE_MODULES, loose


def test_imports_go_down_only() -> None:
    """From one folder to another on a lower floor; a circle between folders is thus impossible."""
    wrong = [
        f"{FILES[module]}:{line} imports {name}"
        for module in filter(None, FILES)
        for line, name in imported_here(module)
        if folder(name) != folder(module) and HEIGHT[folder(name)] >= HEIGHT[folder(module)]
    ]
    assert not wrong, "\n".join(wrong)


def test_no_modules_import_in_a_circle() -> None:
    graph = {module: {name for _, name in imported_here(module)} for module in FILES}
    done: set[str] = set()

    def visit(module: str, path: tuple[str, ...]) -> None:
        assert module not in path, " -> ".join((*path, module))
        if module not in done:
            for target in graph.get(module, ()):
                visit(target, (*path, module))
            done.add(module)

    for module in graph:
        visit(module, ())


@pytest.mark.parametrize("module", [name for name in LIGHT if name in FILES])
def test_light_modules_import_no_torch(module: str) -> None:
    """Looked for in what is really loaded: it may come by way of another module."""
    name = f"ampctl.{module}".rstrip(".")
    code = f"import sys, {name}; sys.exit('torch' in sys.modules)"
    assert subprocess.run([sys.executable, "-c", code], check=False).returncode == 0


def test_nothing_on_the_hot_path_knows_the_screen_or_the_command_line() -> None:
    for module in FILES:
        if module and HEIGHT[folder(module)] <= HEIGHT["engine"]:
            names = {name.split(".")[0] for _, name in imported(module)}
            assert not names & {"rich", "typer"}, module


@pytest.mark.parametrize("module", FILES)
def test_every_module_says_what_it_owns(module: str) -> None:
    path = FILES[module]
    assert ast.get_docstring(TREES[module]), f"{path} has no docstring"
    lines = len(path.read_text(encoding="utf-8").splitlines())
    assert lines <= LONGEST_FILE, f"{path} has {lines} lines"


def test_only_the_screen_prints() -> None:
    found = [
        f"{FILES[module]}:{node.lineno}"
        for module, tree in TREES.items()
        if not module.startswith(MAY_PRINT)
        for node in ast.walk(tree)
        if isinstance(node, ast.Call)
        and isinstance(node.func, ast.Name)
        and node.func.id == "print"
    ]
    assert not found, found


def test_no_except_catches_all_and_goes_on() -> None:
    """A bare or broad ``except`` must end in a ``raise``, or hand on what it caught."""
    found = []
    for module, tree in TREES.items():
        for node in ast.walk(tree):
            if not isinstance(node, ast.ExceptHandler):
                continue
            names = {name.id for name in ast.walk(node.type or tree) if isinstance(name, ast.Name)}
            broad = node.type is None or names & {"Exception", "BaseException"}
            handed_on = any(
                isinstance(inner, ast.Raise)
                or (isinstance(inner, ast.Name) and node.name and inner.id == node.name)
                for inner in ast.walk(node)
            )
            if broad and not handed_on:
                found.append(f"{FILES[module]}:{node.lineno}")
    assert not found, found
