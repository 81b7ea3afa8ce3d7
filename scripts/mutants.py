"""Break the modules that carry ampctl's promises, one small change at a time, and count survivors.

    scripts/mutants [--count N] [--seed N] [--jobs N] [--module NAME ...] [--json FILE]

A mutant is a copy of the checkout with one operator, number, comparison or decorator changed by
cosmic-ray. It is killed when a test of its module fails, and survives when none does. Exit 1 if
more than ``--most-percent`` of the mutants survive, those of ``mutants_equivalent.yaml`` left out.
"""

from __future__ import annotations

import argparse
import ast
import compileall
import json
import os
import queue
import random
import re
import shutil
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from contextlib import suppress
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import TypeVar

import yaml
from mutants_tests import TESTS, TOO_LONG
from rich.console import Console
from rich.progress import track
from rich.table import Table

T = TypeVar("T")
ROOT = Path(__file__).resolve().parents[1]
EQUIVALENT = ROOT / "scripts" / "mutants_equivalent.yaml"
LONGEST_S = 30.0
"""What the tests of one module may take; in processor time, so that a busy machine counts alike."""


@dataclass(frozen=True)
class Mutant:
    """One change to one module; ``was`` and ``becomes`` are the lines that differ."""

    module: str
    path: str
    operator: str
    occurrence: int
    line: int
    was: str
    becomes: str


@dataclass(frozen=True)
class Fate:
    """How the tests ended: ``killed``, ``timeout`` (killed too) or ``survived``, and by which."""

    outcome: str
    seconds: float
    cpu_s: float
    by: str = ""


def module_path(name: str) -> Path:
    """Return the one file of a module's name; exit if it has none, or several."""
    found = sorted((ROOT / "ampctl").rglob(f"{name}.py"))
    if len(found) != 1:
        places = ", ".join(str(path.relative_to(ROOT)) for path in found) or "none"
        sys.exit(f"scripts/mutants.py: TESTS names the module {name!r}; files of it: {places}")
    return found[0]


def _annotated(tree: ast.AST) -> Iterator[tuple[tuple[int, int], tuple[int, int]]]:
    """Yield where annotations begin and end: nothing evaluates them."""
    for node in ast.walk(tree):
        for name in ("annotation", "returns"):
            part = getattr(node, name, None)
            if isinstance(part, ast.expr) and part.end_lineno and part.end_col_offset:
                yield (part.lineno, part.col_offset), (part.end_lineno, part.end_col_offset)


def mutants_of(name: str) -> list[list[Mutant]]:
    """Return the mutants of a module, together those of one place and kind."""
    import cosmic_ray.plugins
    from cosmic_ray.ast import ast_nodes, get_ast

    path = module_path(name)
    source = path.read_text(encoding="utf-8")
    nodes = list(ast_nodes(get_ast(source)))
    annotated = list(_annotated(ast.parse(source)))
    places: dict[tuple[object, str], list[Mutant]] = {}
    for operator_name in cosmic_ray.plugins.operator_names():
        operator_class = cosmic_ray.plugins.get_operator(operator_name)
        if operator_class.arguments() or operator_name.endswith("NoOp"):
            continue
        operator = operator_class()
        positions = (each for node in nodes for each in operator.mutation_positions(node))
        for occurrence, (start, end) in enumerate(positions):
            if any(first <= start and end <= last for first, last in annotated):
                continue
            kind = operator_name.split("/")[-1].split("_")[0]
            path_text = str(path.relative_to(ROOT))
            mutant = Mutant(name, path_text, operator_name, occurrence, start[0], "", "")
            places.setdefault((start, kind), []).append(mutant)
    return list(places.values())


def changed(mutant: Mutant) -> tuple[Mutant, str]:
    """Return a mutant with the lines that differ, and the mutated source."""
    import cosmic_ray.plugins
    from cosmic_ray.mutating import mutate_code

    source = (ROOT / mutant.path).read_text(encoding="utf-8")
    operator = cosmic_ray.plugins.get_operator(mutant.operator)()
    mutated = mutate_code(source, operator, mutant.occurrence)
    assert mutated is not None, f"{mutant} cannot be made"
    before, after = source.splitlines(), mutated.splitlines()
    pairs = [(a, b) for a, b in zip(before, after, strict=False) if a != b]
    was, becomes = pairs[0] if pairs else (before[mutant.line - 1], "")
    lines = {"was": was.strip(), "becomes": becomes.strip()}
    return Mutant(**{**asdict(mutant), **lines}), mutated


def sample(names: Sequence[str], count: int, seed: int) -> list[Mutant]:
    """Choose mutants by a seed: places in proportion to each module's, then one change for each."""
    chance = random.Random(seed)
    places = {name: mutants_of(name) for name in names}
    total = sum(map(len, places.values()))
    chosen = []
    for name in names:
        share = min(len(places[name]), max(1, -(-count * len(places[name]) // total)))
        for place in chance.sample(places[name], share):
            mutant, source = changed(chance.choice(place))
            with suppress(SyntaxError):  # the star of keyword-only arguments, taken for a product
                compile(source, mutant.path, "exec")
                chosen.append(mutant)
    return chosen


class Copy:
    """A copy of the checkout that tests run in."""

    def __init__(self, home: Path) -> None:
        self.root = home
        git = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
        listed = subprocess.run(git, cwd=ROOT, capture_output=True, check=True).stdout.decode()
        for name in filter(None, listed.split("\0")):
            if (ROOT / name).is_file():
                (home / name).parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / name, home / name)
        compileall.compile_dir(home / "ampctl", quiet=2)

    def run(self, module: str, limit_s: float) -> Fate:
        """Run a module's tests, part after part until one fails; return how they end."""
        seconds = cpu_s = 0.0
        for part in TESTS[module]:
            fate = self._run(part, limit_s - seconds)
            seconds, cpu_s = seconds + fate.seconds, cpu_s + fate.cpu_s
            if fate.outcome != "survived":
                break
        return Fate(fate.outcome, round(seconds, 1), round(cpu_s, 1), fate.by)

    def _run(self, part: str, limit_s: float) -> Fate:
        tests = [f"tests/{name}" for name in part.split()]
        skipped = [f"--deselect=tests/{name}" for name in TOO_LONG]
        options = ["-x", "-q", "-p", "no:cacheprovider", "-m", "not slow", "--hypothesis-seed=0"]
        variables = {
            "PYTHONPATH": f"{self.root}",
            "PYTHONDONTWRITEBYTECODE": "1",
            "OMP_NUM_THREADS": "1",
        }
        began = time.monotonic()
        log = self.root / "pytest.log"
        with log.open("wb") as words:
            child = subprocess.Popen(
                [sys.executable, "-m", "pytest", *options, *skipped, *tests],
                cwd=self.root,
                env={**os.environ, **variables},
                stdin=subprocess.DEVNULL,
                stdout=words,
                stderr=words,
                start_new_session=True,
            )
        code, cpu_s = self._end(child.pid, began + limit_s)
        text = log.read_text(encoding="utf-8", errors="replace")
        found = re.search(r"^(?:FAILED|ERROR) (\S+)", text, re.MULTILINE)
        by = found[1] if found else text.strip().rpartition("\n")[2]
        outcome = "timeout" if code is None else "killed" if code else "survived"
        return Fate(outcome, time.monotonic() - began, cpu_s, by if code else "")

    def _end(self, child: int, until: float) -> tuple[int | None, float]:
        """Wait for a child; return its exit code, None if it takes too long, and its CPU time."""
        try:
            while time.monotonic() < until:
                done, status, used = os.wait4(child, os.WNOHANG)
                if done:
                    return os.waitstatus_to_exitcode(status), used.ru_utime + used.ru_stime
                time.sleep(0.05)
            return None, 0.0
        finally:
            with suppress(ProcessLookupError):
                os.killpg(child, signal.SIGKILL)  # what its tests left running, too
            with suppress(ChildProcessError):
                os.waitpid(child, 0)

    def run_mutant(self, mutant: Mutant, limit_s: float) -> Fate:
        """Run a module's tests on one mutant."""
        path = self.root / mutant.path
        stale = path.parent / "__pycache__" / f"{path.stem}.{sys.implementation.cache_tag}.pyc"
        stale.unlink(missing_ok=True)
        source = path.read_text(encoding="utf-8")
        try:
            path.write_text(changed(mutant)[1], encoding="utf-8")
            return self.run(mutant.module, limit_s)
        finally:
            path.write_text(source, encoding="utf-8")


def in_parallel(
    items: Sequence[T], run: Callable[[Copy, T], Fate], jobs: int, title: str
) -> list[Fate]:
    """Run items, each in one of ``jobs`` copies; return their fates in the order of the items."""
    free: queue.Queue[Copy] = queue.Queue()
    with tempfile.TemporaryDirectory(prefix="mutants-") as home:
        for number in range(min(jobs, len(items))):
            place = Path(home, str(number))
            place.mkdir()
            free.put(Copy(place))

        def one(item: T) -> Fate:
            copy = free.get()
            try:
                return run(copy, item)
            finally:
                free.put(copy)

        with ThreadPoolExecutor(jobs) as pool:
            console = Console(stderr=True)
            return list(track(pool.map(one, items), title, len(items), console=console))


def known_equivalents() -> list[dict[str, str]]:
    """Return the mutants that behave as the original; exit if one is of a line that is gone."""
    known: list[dict[str, str]] = yaml.safe_load(EQUIVALENT.read_text(encoding="utf-8")) or []
    for row in known:
        if row["was"] not in module_path(row["module"]).read_text(encoding="utf-8"):
            sys.exit(f"{EQUIVALENT.name}: {row['module']} has no line {row['was']!r} any more")
    return known


def equivalent(mutant: Mutant, known: Sequence[dict[str, str]]) -> bool:
    """Return whether a mutant is listed as one that behaves as the original does."""
    return any(
        (row["module"], row["was"], row["becomes"]) == (mutant.module, mutant.was, mutant.becomes)
        for row in known
    )


def report(
    mutants: Sequence[Mutant], fates: Sequence[Fate], known: Sequence[dict[str, str]]
) -> float:
    """Print a table and the survivors; return the percentage that survives."""
    table = Table("module", "mutants", "killed", "timed out", "equivalent", "survived")
    left, counted = [], 0
    for name in TESTS:
        own = [(m, f) for m, f in zip(mutants, fates, strict=True) if m.module == name]
        alive = [m for m, f in own if f.outcome == "survived"]
        same = [m for m in alive if equivalent(m, known)]
        left += [m for m in alive if m not in same]
        counted += len(own) - len(same)
        outcomes = [f.outcome for _, f in own]
        numbers = (len(own), outcomes.count("killed"), outcomes.count("timeout"), len(same))
        if own:
            table.add_row(name, *map(str, numbers), str(len(alive) - len(same)))
    console = Console()
    console.print(table)
    for mutant in left:
        print(f"survived: {mutant.path}:{mutant.line} {mutant.operator.split('/')[-1]}")
        print(f"    - {mutant.was}\n    + {mutant.becomes}")
    percent = 100 * len(left) / max(counted, 1)
    print(f"{len(mutants)} mutants, {len(left)} of {counted} survived: {percent:.1f} %")
    return percent


def main() -> None:
    """Measure the tests unchanged, then try the mutants."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--count", type=int, default=320, help="mutants of all modules together")
    parser.add_argument("--seed", type=int, default=0)
    parser.add_argument("--jobs", type=int, default=os.cpu_count() or 1)
    parser.add_argument("--module", nargs="+", choices=sorted(TESTS), default=list(TESTS))
    parser.add_argument("--tests", action="store_true", help="only time the tests, unchanged")
    parser.add_argument("--most-percent", type=float, default=3.0)
    parser.add_argument("--json", type=Path)
    asked = parser.parse_args()
    os.environ["OMP_NUM_THREADS"] = "1"
    known = known_equivalents()
    mutants = sample(asked.module, asked.count, asked.seed)
    times = {}
    whole = in_parallel(
        asked.module, lambda copy, name: copy.run(name, 20 * LONGEST_S), asked.jobs, "unchanged"
    )
    broken = []
    for name, fate in zip(asked.module, whole, strict=True):
        if fate.outcome != "survived":
            broken.append(f"{name}: its tests fail without any change: {fate.outcome}, {fate.by}")
            continue
        print(f"{name}: {fate.cpu_s:.0f} s of processor time, {fate.seconds:.0f} s by the clock")
        if fate.cpu_s > LONGEST_S:
            print(f"    more than {LONGEST_S:.0f} s: give TESTS faster ones")
        times[name] = fate.seconds
    if broken:
        sys.exit("\n".join(broken))
    if asked.tests:
        return

    def run(copy: Copy, mutant: Mutant) -> Fate:
        return copy.run_mutant(mutant, 3 * times[mutant.module] + LONGEST_S)

    fates = in_parallel(mutants, run, asked.jobs, "mutants")
    percent = report(mutants, fates, known)
    if asked.json:
        rows = [{**asdict(m), **asdict(f)} for m, f in zip(mutants, fates, strict=True)]
        asked.json.write_text(json.dumps(rows, indent=1) + "\n", encoding="utf-8")
    sys.exit(percent > asked.most_percent)


if __name__ == "__main__":
    main()
