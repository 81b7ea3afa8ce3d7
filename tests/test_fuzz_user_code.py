"""Code of the user's own that goes wrong in a run: every end names the line, or what is wrong.

Exit code 1 and a traceback, from the user's own lines on, are for what that code raises itself, or
torch over its lines. All that ampctl can tell to be wrong ends in words and with 2.
"""

from __future__ import annotations

import os
import random
import re
import shutil
import signal
import sys
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import FrameType
from unittest.mock import patch

import pytest
from jobs import job
from test_resume_exact import assert_same, last

from ampctl.__main__ import main
from ampctl.cli import screen
from ampctl.distributed.launched import handled_signals

pytestmark = [
    pytest.mark.timeout(0),  # each case has a time limit of its own
    pytest.mark.filterwarnings("ignore:This DataLoader will create"),
]

TESTS = Path(__file__).parent
DEADLINE_S = 120

RECIPE = """\
name: broken
model: {_target_: broken_parts.Net}
task: {_target_: broken_parts.Task}
data:
  train: {_target_: broken_parts.Samples}
  eval: {_target_: broken_parts.Samples, size: 6, first: 100}
  batch_size: 4
  micro_batch_size: 2
  shuffle: false
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
train: {max_epochs: 1, device: cpu}
amp: {dtype: float32}
checkpoint: {asynchronous: false}
"""

KEYS = {  # where a point is in the recipe, and in which class
    "__len__": ("data.train", "Samples"),
    "__getitem__": ("data.train", "Samples"),
    "__getitems__": ("data.train", "Batches"),
    "__iter__": ("data.train", "Stream"),
    "__call__": ("data.collate_fn", "Collate"),
    "collate": ("data.collate_fn", "collate"),
    "forward": ("model", "Net"),
    "loss": ("task", "Task"),
    "metrics": ("task", "Task"),
    "a metric": ("task", "Task"),
    "num_items": ("task", "Task"),
    "summary": ("task", "Task"),
    "a summary": ("task", "Task"),
}
FAULTS = (
    *("raise", "exit", "none", "text", "list", "dict", "yes", "object", "empty", "number"),
    *("nan", "minus", "shape"),
)
FIRST, LATER, EVALUATION = 0, 6, 100
IN_EVALUATION = ("metrics", "a metric", "summary", "a summary")
OF_DATA = ("__getitem__", "__getitems__", "__iter__", "__call__", "collate")


@dataclass(frozen=True)
class Case:
    """One way in which one thing goes wrong, from one sample on."""

    point: str
    fault: str
    since: int
    workers: int = 0

    def __str__(self) -> str:
        when = {FIRST: "at once", LATER: "later", EVALUATION: "in evaluation"}[self.since]
        return f"{self.point}-{self.fault}-{when}-{self.workers} workers"

    def overrides(self) -> list[str]:
        key, name = KEYS[self.point]
        if self.since == EVALUATION and key == "data.train":
            key = "data.eval"
        target = f"{key}._target_=broken_parts.{name}"
        more = [
            f"{key}.point={self.point}",
            f"{key}.fault={self.fault}",
            f"{key}.since={self.since}",
        ]
        if key == "data.eval" and name == "Batches":
            more.append("data.eval.first=100")
        return [target, *more, f"data.num_workers={self.workers}"]


def every_case() -> Iterator[Case]:
    for point in KEYS:
        for fault in FAULTS:
            for since in (FIRST, LATER, EVALUATION):
                if since != EVALUATION and point in IN_EVALUATION:
                    continue
                if point == "__len__" and since == LATER:
                    continue
                if point == "__iter__" and since == EVALUATION:
                    continue  # an evaluation has a length
                for workers in (0, 2) if point in OF_DATA else (0,):
                    yield Case(point, fault, since, workers)


MATRIX = list(every_case())
SOME = random.Random(1).sample(MATRIX, 80)


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "broken_parts", raising=False)
    shutil.copy(TESTS / "broken_parts.py", folder)
    (folder / "recipe.yaml").write_text(RECIPE)
    yield
    sys.modules.pop("broken_parts", None)


def run(*argv: str) -> int:
    """Run the program in this process, and return its exit code, within a time limit."""

    def hangs(number: int, frame: FrameType | None) -> None:
        raise TimeoutError(f"still at work after {DEADLINE_S} s")

    code: object = None  # the program ends with SystemExit
    before = {each: signal.signal(each, hangs) for each in (signal.SIGALRM, *handled_signals())}
    signal.alarm(DEADLINE_S)
    try:
        with patch.dict(os.environ), patch.object(sys, "argv", ["ampctl", *argv]):
            main()
    except SystemExit as ended:
        code = ended.code
    finally:
        signal.alarm(0)
        for each, handler in before.items():
            signal.signal(each, handler)
    assert isinstance(code, int)
    return code


NAMED = (  # keys, and a class or method where the key alone does not tell
    r"broken_parts\.py:\d+|Samples|Batches|Stream|data\.collate_fn|Collate|Net|"
    r"Task\.(loss|metrics|num_items|summary)"
)
RIGHT = {  # what may be given: a loss of None leaves a batch out, and a number is one
    *(("__len__", "yes"), ("loss", "none"), ("num_items", "number"), ("num_items", "yes")),
    *(
        (part, kind)
        for part in ("a metric", "a summary")
        for kind in ("number", "nan", "minus", "yes")
    ),
}
TOLD = {"metrics", "a metric", "num_items", "summary", "a summary", "__len__"}
"""What ampctl alone reads, so that all that is wrong about it is misuse."""


def look_at(case: Case, capsys: pytest.CaptureFixture[str]) -> None:
    """Train with a fault, and look at how the run ends."""
    code = run("train", "recipe.yaml", *case.overrides(), "--run-dir", "run", "--quiet")
    said = capsys.readouterr().err
    told = f"{case} ended with {code}:\n{said}"
    if (case.point, case.fault) in RIGHT:
        assert code == 0, told
    elif code == 1:
        assert re.match(
            r'Traceback \(most recent call last\):\n  File ".*/broken_parts\.py"', said
        ), told
        assert str(Path(screen.__file__).parents[1]) not in said, told
        assert said.count("Traceback") == 1, told
        assert case.fault in ("raise", "exit") or case.point not in TOLD, told
        assert case.fault != "none" or case.point == "forward", told
    else:
        assert code == 2, told
        assert "Traceback" not in said, told
        assert re.search(NAMED, said), told
        assert case.fault not in ("raise", "exit") or case.point == "__len__", told
    if case.point in OF_DATA and case.since == LATER and case.fault in ("raise", "none"):
        assert "step 1 is saved: `ampctl resume run` goes on once this is mended" in said, told


def ids(case: Case) -> str:
    return f"{case}"


@pytest.mark.parametrize("case", SOME, ids=ids)
def test_a_fault_of_ones_own_code_is_told_with_its_line(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    look_at(case, capsys)


@pytest.mark.slow
@pytest.mark.parametrize("case", [case for case in MATRIX if case not in SOME], ids=ids)
def test_every_fault_of_ones_own_code_is_told_with_its_line(
    case: Case, capsys: pytest.CaptureFixture[str]
) -> None:
    look_at(case, capsys)


@pytest.mark.slow
@pytest.mark.parametrize(
    "case",
    [
        Case("__getitem__", "raise", LATER),
        Case("forward", "raise", LATER),
        Case("a metric", "none", EVALUATION),
        Case("num_items", "nan", FIRST),
    ],
    ids=ids,
)
def test_a_fault_on_one_of_two_ranks_is_told_with_its_line_and_rank(
    case: Case, folder: Path
) -> None:
    rank = f"{KEYS[case.point][0]}.rank='1'"
    with job(folder, "train", "recipe.yaml", *case.overrides(), rank, "--run-dir", "run") as ranks:
        ended = ranks.wait()
    assert ended.error.startswith("rank 1"), ended.error
    assert ended.code == (1 if case.fault == "raise" else 2)
    assert re.search(NAMED, ended.error) or 'broken_parts.py"' in ended.error
    assert ended.error.count("Traceback") == (case.fault == "raise")
    assert (ended.err, ended.killed) == ("", ())


@pytest.mark.parametrize(
    "case",
    [
        Case("__getitem__", "raise", LATER),
        Case("__getitem__", "none", LATER, 2),
        Case("__getitem__", "raise", EVALUATION),
        Case("metrics", "raise", EVALUATION),
    ],
    ids=ids,
)
def test_a_run_that_such_a_fault_ends_is_saved_and_goes_on_exactly(
    case: Case, folder: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    words = [*case.overrides(), "train.max_epochs=2", "checkpoint.every_steps=100"]
    key = next(word for word in words if ".since=" in word).split("=")[0]
    step = 1 if case.since == LATER else 3
    assert run("train", "recipe.yaml", *words, "--run-dir", "run") in (1, 2)
    said = capsys.readouterr().err
    assert f"step {step} is saved: `ampctl resume run` goes on once this is mended" in said
    assert last(folder / "run")["progress"]["step"] == step
    assert run("resume", "run", f"{key}=1000") == 0, capsys.readouterr().err
    assert run("train", "recipe.yaml", *words, f"{key}=1000", "--run-dir", "whole") == 0
    assert_same(last(folder / "run"), last(folder / "whole"))
