"""The script that breaks modules on purpose: what it runs, what it leaves out, how it counts."""

from __future__ import annotations

from pathlib import Path
from types import ModuleType

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def mutants(monkeypatch: pytest.MonkeyPatch) -> ModuleType:
    monkeypatch.syspath_prepend(str(ROOT / "scripts"))
    import mutants

    return mutants


def mutant(
    mutants: ModuleType, module: str = "order", line: str = "a", becomes: str = "b"
) -> object:
    return mutants.Mutant(module, f"ampctl/data/{module}.py", "core/AddNot", 0, 1, line, becomes)


def test_each_module_is_found_once_wherever_it_stands_and_its_tests_are_there(
    mutants: ModuleType,
) -> None:
    assert len(mutants.TESTS) == 14
    for module, files in mutants.TESTS.items():
        assert mutants.module_path(module).name == f"{module}.py"
        for name in (*" ".join(files).split(), *mutants.TOO_LONG):
            file, _, test = name.partition("::")
            assert f"def {test}" in (ROOT / "tests" / file).read_text(encoding="utf-8"), name


def test_a_module_that_is_gone_or_there_twice_is_told(mutants: ModuleType) -> None:
    with pytest.raises(SystemExit, match=r"the module 'no_such'; files of it: none"):
        mutants.module_path("no_such")
    with pytest.raises(SystemExit, match=r"files of it: ampctl/.*__init__\.py, "):
        mutants.module_path("__init__")


def test_every_mutant_said_to_be_equivalent_is_still_a_line_of_its_module_with_a_reason(
    mutants: ModuleType,
) -> None:
    for row in mutants.known_equivalents():
        assert set(row) == {"module", "was", "becomes", "reason"}
        assert len(row["reason"]) > 10


def test_survivors_are_counted_but_for_those_that_behave_alike(
    mutants: ModuleType, capsys: pytest.CaptureFixture[str]
) -> None:
    tried = [mutant(mutants, becomes=text) for text in ("killed", "slow", "same", "missed")]
    outcomes = ("killed", "timeout", "survived", "survived")
    fates = [mutants.Fate(outcome, 1.0, 1.0) for outcome in outcomes]
    known = [{"module": "order", "was": "a", "becomes": "same", "reason": "-"}]
    assert mutants.report(tried, fates, known) == pytest.approx(100 / 3)
    said = capsys.readouterr().out
    assert "+ missed" in said
    assert "+ same" not in said
    assert "4 mutants, 1 of 3 survived: 33.3 %" in said


def test_a_broken_copy_is_killed_and_an_unchanged_one_survives(
    mutants: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    """In a copy: the checkout itself is left as it is."""
    source = (ROOT / "ampctl" / "monitor.py").read_text(encoding="utf-8")
    assert "<" in source
    monkeypatch.setitem(mutants.TESTS, "monitor", ("test_monitor.py",))
    monkeypatch.setattr(mutants, "TOO_LONG", ())
    copy = mutants.Copy(tmp_path)
    assert not (tmp_path / ".git").exists()
    tried = mutants.Mutant("monitor", "ampctl/monitor.py", "", 0, 1, "", "")
    for changed, outcome in ((source, "survived"), (source.replace("<", ">"), "killed")):
        monkeypatch.setattr(mutants, "changed", lambda each, changed=changed: (each, changed))
        fate = copy.run_mutant(tried, 120.0)
        assert fate.outcome == outcome, fate
        assert fate.by.startswith("tests/test_monitor.py::") == (outcome == "killed")
    assert (tmp_path / "ampctl" / "monitor.py").read_text(encoding="utf-8") == source
    assert (ROOT / "ampctl" / "monitor.py").read_text(encoding="utf-8") == source


def test_a_run_that_takes_too_long_counts_as_one_that_was_seen(
    mutants: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(mutants.TESTS, "monitor", ("test_monitor.py",))
    assert mutants.Copy(tmp_path).run("monitor", 0.01).outcome == "timeout"


def test_annotations_are_no_mutants(mutants: ModuleType) -> None:
    import ast

    tree = ast.parse(
        "def f(a: int | None, b: str = 'x') -> list[int] | None:\n    c: int = a | 1\n"
    )
    assert sorted(mutants._annotated(tree)) == [
        ((1, 9), (1, 19)),
        ((1, 24), (1, 27)),
        ((1, 38), (1, 54)),
        ((2, 7), (2, 10)),
    ]
