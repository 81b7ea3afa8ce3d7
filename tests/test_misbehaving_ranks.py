"""When one rank misbehaves: no job hangs, and what is told names the rank and what it did."""

from __future__ import annotations

import re
import shutil
import socket
from collections.abc import Callable, Iterator
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from cpus import python_path
from jobs import TESTS, Job, JobEnded, job
from processes import read_events, starting

from ampctl.distributed.ranks import Ranks
from ampctl.errors import CheckpointError, MachineError
from ampctl.recipe.load import load_recipe
from ampctl.run.agreement import require_one_job
from ampctl.run.worker import _as_first

RECIPE = """\
name: unruly
model: {_target_: unruly_parts.Net}
task: {_target_: unruly_parts.Task}
data:
  train: {_target_: unruly_parts.Samples}
  eval: {_target_: unruly_parts.Samples, size: 7}
  batch_size: 4
  shuffle: false
optimizer: {_target_: torch.optim.SGD, lr: 1e-2}
train: {max_steps: 12, device: cpu}
checkpoint: {every_steps: 2}
log: {every_steps: 5}
"""
STREAM = "data.train={_target_: unruly_parts.Stream"
RUN = Path("d")

Start = Callable[..., Job]


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Give a function that starts ranks that train, in ``d``, with overrides of the recipe."""
    (folder / "recipe.yaml").write_text(RECIPE)
    shutil.copy(TESTS / "unruly_parts.py", folder)
    with ExitStack() as stack:

        def start(*overrides: str, argv: tuple[str, ...] = (), **others: Any) -> Job:
            words = ("train", "recipe.yaml", "--run-dir", f"{RUN}", *argv, *overrides)
            return stack.enter_context(job(folder, *words, **others))

        yield start


def stopped(run_dir: Path = RUN) -> dict[str, Any]:
    return next(event for event in read_events(run_dir) if event["event"] == "stop")


def assert_told_once(ended: JobEnded) -> None:
    """The launcher says it, and no rank does."""
    assert ended.err == ""
    assert "Traceback" not in ended.error


# What ranks must have alike


@pytest.mark.parametrize("split", ["train", "eval"])
def test_dd5_other_lengths_are_refused_at_the_start_with_the_ranks(
    split: str, start: Start
) -> None:
    ended = start(f"data.{split}.more=3").wait()
    counts = {"train": "40 on rank 0, 43 on rank 1", "eval": "7 on rank 0, 10 on rank 1"}
    assert ended.code == 2
    assert ended.error.startswith(f"data.{split} has not the same length on all ranks: ")
    assert counts[split] in ended.error
    assert_told_once(ended)


@pytest.mark.parametrize(
    ("more", "words"),
    [
        (
            ("seed=4", "data.batch_size=8"),
            "the recipe differs between ranks. From rank 0 to rank 1: "
            "seed 0 -> 4, data.batch_size 4 -> 8.",
        ),
        (("--run-dir", "e"), "not started by one command: --run-dir is d on rank 0 and e on rank"),
    ],
)
def test_ranks_with_another_recipe_or_command_are_refused(
    more: tuple[str, ...], words: str, start: Start
) -> None:
    ended = start(own={1: more}).wait()
    assert ended.code == 2
    assert words in ended.error
    assert_told_once(ended)
    assert not Path("e").exists()


def test_another_model_on_a_rank_is_said_in_words(start: Start) -> None:
    ended = start("model.fault=another shape").wait()
    assert ended.code == 2
    assert ended.error.startswith("recipe.yaml:2: model: the model is another one on another rank")
    assert "head.weight [5, 4] torch.float32, head.bias [5] torch.float32 only on rank 1" in (
        ended.error
    )
    assert_told_once(ended)


def test_dd8_ranks_that_judge_otherwise_stop_early_together(start: Start) -> None:
    early = "train.early_stop={monitor: eval/loss, mode: min, patience: 1}"
    ended = start("task.fault=its own opinion", early, "train.eval_every_steps=2").wait()
    assert (ended.code, ended.error) == (0, "")
    assert (stopped()["reason"], stopped()["step"]) == ("early_stop", 4)


class Others(Ranks):
    """Two ranks on two nodes, of which the second is told apart by ``change``."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        super().__init__(0, 2)
        object.__setattr__(self, "change", change)

    def gather(self, value: Any) -> list[Any]:
        return [value, self.change(value)]  # type: ignore[attr-defined]


def with_version(value: Any, name: str, version: str) -> Any:
    _host, digest, *others = value
    changed = [{**each, name: version} if name in each else each for each in others]
    return ("node-b", digest, *changed)


def test_other_versions_on_a_node_are_told_with_the_node(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE)
    loaded = load_recipe("recipe.yaml")
    assert require_one_job(loaded, Others(lambda value: value), command="train") == []
    other = Others(lambda value: with_version(value, "ampctl", "9.9"))
    with pytest.raises(MachineError, match=r"ampctl is .* and 9\.9 on rank 1 \(node-b\)"):
        require_one_job(loaded, other, command="train")
    other = Others(lambda value: with_version(value, "torch", "9.9"))
    (note,) = require_one_job(loaded, other, command="train")
    assert "9.9 on rank 1 (node-b): results may differ in their last digits" in note


def test_a_checkpoint_that_only_rank_0_sees_is_named_with_the_likely_reason(folder: Path) -> None:
    with pytest.raises(CheckpointError, match=r"(?s)rank 1 on .* cannot go on from .*/step-2.*all"):
        _as_first(folder / "step-2.pt", Ranks(1, 2))


# A rank that others wait for

SHORT = "distributed.timeout_minutes=0.05"


@pytest.mark.parametrize(
    ("fault", "words"),
    [
        ("model.fault=hang", "in step 4: rank 1 was in step 4, at unruly_parts.py:"),
        ("model.fault=hang while built", "in the start: rank 1 was in the start, at unruly_parts"),
        ("task.fault=hang in evaluation", "rank 1 was in the evaluation after step 10, at unruly"),
    ],
)
def test_a_stuck_rank_is_named_with_the_line_it_is_at(fault: str, words: str, start: Start) -> None:
    ended = start(SHORT, fault, size=3).wait()
    assert ended.code == 5
    assert ended.error.startswith("ranks 0, 2 waited for 0.05 minutes (distributed.timeout_min")
    assert words in ended.error
    assert "the limit" in ended.error
    assert not ended.killed
    assert_told_once(ended)
    if "built" not in fault:
        assert (stopped()["reason"], stopped()["exit_code"]) == ("error", 5)
        assert "time.sleep(600)" in Path("d/logs/rank-1.log").read_text()


def test_a_rank_stuck_in_its_data_leaves_no_data_workers(start: Start) -> None:
    begun = start(SHORT, "data.train.fault=hang", "data.num_workers=1")
    ended = begun.wait()
    assert ended.code == 5
    assert "rank 1 was in step 6, at ampctl/data/workers.py:" in ended.error
    assert not [pid for rank in begun.ranks for pid in rank.members()]


def test_a_rank_that_never_comes_is_named(start: Start, folder: Path) -> None:
    words = ("train", "recipe.yaml", "--run-dir", f"{RUN}", SHORT)
    with ExitStack() as stack:
        waiting = Job(folder, 2, [words, ("recipes",)])
        stack.callback(waiting.close)
        ended = waiting.wait()
    assert ended.code == 5
    assert "1 of 2 ranks did not come within 3 s: rank 1. See what was said there" in ended.error


@pytest.mark.slow
def test_a_rank_that_does_not_answer_is_named(start: Start) -> None:
    ended = start(SHORT, "model.fault=freeze").wait()
    assert ended.code == 5
    assert "rank 0 waited for 0.05 minutes" in ended.error
    assert "rank 1 gave no sign of life" in ended.error


def test_a_rank_that_ends_without_a_word_is_named(start: Start) -> None:
    ended = start("model.fault=vanish").wait()
    assert ended.code == 5
    assert (
        "step 4: the connection to another rank broke: rank 1 gave no sign of life" in ended.error
    )
    assert_told_once(ended)
    assert (stopped()["reason"], stopped()["exit_code"]) == ("error", 5)


def test_dd5_a_stream_that_is_longer_on_one_rank_ends_the_job_at_once(start: Start) -> None:
    ended = start(STREAM + ", more: 5}").wait()
    assert ended.code == 2
    assert "data.train, in epoch 0, ends after 4 steps and 16 samples on rank 0" in ended.error
    assert "goes on on rank 1" in ended.error
    assert_told_once(ended)


# An error on one rank


@pytest.mark.parametrize(
    "fault",
    [
        "model.fault=raise",
        "task.fault=raise in loss",
        "task.fault=raise in evaluation",
        "task.fault=raise in a metric",
        "data.train.fault=raise",
    ],
)
def test_dd8_an_error_of_ones_own_on_one_rank_is_told_with_rank_and_traceback(
    fault: str, start: Start
) -> None:
    ended = start(fault).wait()
    assert (ended.code, ended.err) == (1, "")
    assert ended.error.startswith("rank 1 failed\nTraceback (most recent call last):\n")
    assert ended.error.count("Traceback") == 1
    assert ended.error.endswith("KeyError: 'my own mistake'")
    assert not ended.killed
    assert (stopped()["reason"], stopped()["exit_code"]) == ("error", 1)


def test_dd8_an_error_while_the_model_is_built_is_told_with_rank_and_line(start: Start) -> None:
    ended = start("model.fault=raise while built").wait()
    assert ended.code == 2
    words = "rank 1: recipe.yaml:2: model: unruly_parts.Net failed: KeyError: 'my own mistake'\n"
    assert ended.error.startswith(words)
    assert "unruly_parts.py:" in ended.error
    assert_told_once(ended)
    assert not ended.killed


# Data of its own


def test_a_stream_that_is_split_by_rank_is_refused(start: Start) -> None:
    ended = start(STREAM + ", shards: true}").wait()
    assert ended.code == 2
    assert "data.train gives other samples on rank 1 than on rank 0." in ended.error
    assert_told_once(ended)


def test_a_data_worker_that_dies_on_one_rank_is_told_with_the_rank(start: Start) -> None:
    ended = start("data.train.fault=killed", "data.num_workers=1").wait()
    assert ended.code == 1
    assert ended.error.startswith("rank 1: data worker 0 was ended by SIGKILL while reading among")
    assert_told_once(ended)


# NaN on one rank


def test_dd7_nan_on_one_rank_is_skipped_by_all(start: Start) -> None:
    ended = start("data.train.bad=22").wait()
    assert (ended.code, ended.error) == (0, "")
    (skip,) = [event for event in read_events(RUN) if event["event"] == "skip"]
    assert skip["step"] == 6
    assert [e["updates"] for e in read_events(RUN) if e["event"] == "train"] == [5, 9, 11]


@pytest.mark.parametrize("limit", ["amp.nonfinite=stop", "amp.max_skips=1"])
def test_dd7_the_diagnosis_names_the_rank(limit: str, start: Start) -> None:
    ended = start("data.train.bad=22", limit).wait()
    assert ended.code == 3
    assert "samples 22" in ended.error
    assert "on rank 1" in ended.error
    assert_told_once(ended)
    assert (stopped()["reason"], stopped()["exit_code"]) == ("nonfinite", 3)


# Parameters without a gradient


def test_dd4_a_parameter_that_is_unused_later_is_named_with_its_key(start: Start) -> None:
    ended = start("model.fault=spare").wait()
    assert ended.code == 2
    assert (
        "distributed: 2 parameters take no part in the loss of step 3 on rank 1: spare.weight, "
        "spare.bias." in ended.error
    )
    assert "distributed.find_unused_parameters=true" in ended.error
    assert_told_once(ended)


def test_dd4_parameters_that_are_unused_later_are_allowed_by_the_key(start: Start) -> None:
    ended = start("model.fault=spare", "distributed.find_unused_parameters=true").wait()
    assert (ended.code, ended.error) == (0, "")
    assert stopped()["step"] == 12


# Two runs, and what is said


def test_a_second_job_in_a_folder_is_refused_naming_the_first(start: Start) -> None:
    first = start("model.fault=hang")
    first.ranks[0].until(lambda: [e for e in read_events(RUN) if e["event"] == "start"])
    second = start(argv=("--resume", "auto")).wait()
    assert second.code == 2
    assert f"d is in use: process {first.ranks[0].pid} on {socket.gethostname()}" in second.error
    assert_told_once(second)


def test_dd11_each_line_is_said_once_and_a_warning_with_its_rank(start: Start) -> None:
    ended = start("model.fault=warn", "distributed.timeout_minutes=0.1", size=3).wait()
    assert ended.code == 0
    lines = [re.sub(r":\d+:", ":N:", line) for line in ended.err.splitlines()]
    assert sorted(lines) == [
        "warning: rank 1: mine: a line of the log",
        "warning: rank 1: unruly_parts.py:N: UserWarning: only one says this",
        "warning: unruly_parts.py:N: UserWarning: all ranks say this",
    ]
    for line in ("complete: 12 steps", "step  5/12", "step 10  eval"):
        assert ended.out.count(line) == 1, ended.out
    for rank in (0, 1, 2):
        log = Path(f"d/logs/rank-{rank}.log").read_text()
        assert "all ranks say this" in log
        assert ("only one says this" in log) == (rank == 1)


# Through the launcher


@pytest.mark.slow
def test_the_launcher_tells_the_stuck_rank_once_and_leaves_no_process(
    start: Start, folder: Path
) -> None:
    with starting(folder, PYTHONPATH=python_path(TESTS.parent), OMP_NUM_THREADS="1") as launch:
        words = ("train", "recipe.yaml", "--nproc-per-node", "2", "--run-dir", "e", "--quiet")
        ended = launch(*words, SHORT, "model.fault=hang").wait()
    assert ended.code == 5
    assert ended.err.startswith("error: rank 0 waited for 0.05 minutes (distributed.timeout_min")
    assert "rank 1 was in step 4, at unruly_parts.py:" in ended.err
    assert ended.err.count("\n") == 1, ended.err
    assert stopped(Path("e"))["exit_code"] == 5
