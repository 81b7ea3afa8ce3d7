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

# The longest prefix of a module's dotted name gives its floor. What stands on no floor fails.
FLOORS = {
    "": 0,  # the package itself: the version; and the front door, which hands on when asked
    "commands": 0,
    "errors": 0,
    "files": 0,
    "recipe": 0,
    "rng": 0,
    "host_memory": 1,
    "plain": 1,
    "torch_private": 0,
    "monitor": 1,
    "environment": 1,
    "preflight": 1,
    "amp": 1,
    "boundary": 1,
    "buffers": 1,
    "data": 1,
    "distributed.address": 1,
    "distributed.attendance": 1,
    "distributed.ear": 1,
    "distributed.early": 1,
    "distributed.env": 1,
    "distributed.failure": 1,
    "distributed.meet": 1,
    "distributed.pulse": 1,
    "distributed.ranks": 1,
    "distributed.shard": 1,
    "distributed.heed": 1,
    "distributed.member": 0,
    "ema": 1,
    "groups": 1,
    "lr": 1,
    "layout": 1,
    "models": 1,
    "modes": 1,
    "optim": 1,
    "optimizers": 1,
    "ignored": 3,
    "own_code": 1,
    "lacking": 1,
    "saved": 1,
    "schedules": 1,
    "task": 1,
    "tasks": 1,
    "build": 2,
    "parts": 2,
    "surroundings": 0,
    "parallel": 2,
    "state": 2,
    "step": 2,
    "losses": 2,
    "passes": 2,
    "turns": 2,
    "load_state": 1,
    "first_weights": 1,
    "pending": 1,
    "untouched": 1,
    "rewind": 2,
    "updater": 2,
    "checkpoint": 3,
    "doctor": 3,
    "track": 3,
    "train": 4,
    "bench": 5,
    "distributed": 5,
    "report": 5,
    "__main__": 6,
    "cli": 6,
}
LIGHT = (
    "",
    "cli",
    "cli.checkpoints",
    "cli.options",
    "cli.recipes",
    "cli.runs",
    "cli.screen",
    "distributed.launch",
    "distributed.plan",
    "distributed.member",
    "distributed.address",
    "distributed.early",
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


def floor(module: str) -> int:
    parts = module.split(".")
    while parts and ".".join(parts) not in FLOORS:
        parts.pop()
    if not parts and module:
        pytest.fail(f"ampctl.{module} stands on no floor: add it to the table and to DESIGN")
    return FLOORS[".".join(parts)]


def imported(module: str, *, top_level: bool = False) -> Iterator[tuple[int, str]]:
    """Yield (line, absolute name) of what a module imports, inside functions too."""
    nodes = TREES[module].body if top_level else ast.walk(TREES[module])
    for node in nodes:
        if isinstance(node, ast.Import):
            yield from ((node.lineno, alias.name) for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            assert node.level == 0, f"{module}:{node.lineno}: a relative import"
            for alias in node.names:
                whole = f"{node.module}.{alias.name}"
                is_module = whole.removeprefix("ampctl.") in FILES
                yield node.lineno, whole if is_module else str(node.module)


def test_every_module_stands_on_a_floor() -> None:
    for module in FILES:
        floor(module)


def test_imports_go_down_only() -> None:
    upward = []
    for module in filter(None, FILES):
        for line, name in imported(module):
            if name != "ampctl" and not name.startswith("ampctl."):
                continue
            target = name.removeprefix("ampctl").lstrip(".")
            if floor(target) > floor(module):
                upward.append(f"{FILES[module]}:{line} imports {name}")
    assert not upward, "\n".join(upward)


def test_no_floor_imports_in_a_circle() -> None:
    graph = {
        module: {
            name.removeprefix("ampctl.")
            for _, name in imported(module, top_level=True)
            if name.startswith("ampctl.")
        }
        for module in FILES
    }
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
        if floor(module) <= 2:
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
