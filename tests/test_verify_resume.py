"""`ampctl verify RECIPE --resume`: does it resume exactly, and if not, what differs first."""

from __future__ import annotations

import json
import multiprocessing
import multiprocessing.util
import os
import sys
import tempfile
from pathlib import Path
from typing import Any

import processes
import pytest
from cpus import python_path
from test_resume_exact import RECIPE
from typer.testing import CliRunner, Result

from ampctl.cli import app
from ampctl.exactness import proof, verdict, witness

TESTS = Path(__file__).parent
STEPS = 6
IN_PROCESS = proof._in_process


def _witness(folder: str, spec: str, env: dict[str, str], sent: str | None) -> None:
    os.chdir(folder)
    if sent is not None:
        with tempfile.TemporaryFile() as file:
            file.write(sent.encode())
            file.seek(0)
            os.dup2(file.fileno(), 0)
    os.environ.update(env)
    sys.path.insert(0, f"{TESTS}")
    # Its own data workers start as a plain interpreter starts them, not from the server.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    os._exit(witness.main(spec))


def _forked(spec: Path, sent: str | None) -> tuple[int, str]:
    """Run a witness in a process that has torch imported already."""
    process = processes._server.Process(
        target=_witness, args=(os.getcwd(), f"{spec}", dict(os.environ), sent)
    )
    process.start()
    process.join(processes.DEADLINE_S)
    assert process.exitcode is not None
    return process.exitcode, ""


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(f"{TESTS}")
    monkeypatch.setattr(proof, "_in_process", _forked)
    multiprocessing.util.get_temp_dir()  # sockets lie in it, whose names must be short
    monkeypatch.setattr(tempfile, "tempdir", f"{folder / 'tmp'}")
    (folder / "tmp").mkdir()
    (folder / "recipe.yaml").write_text(RECIPE)


def verify(*argv: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["verify", *argv])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exc_info)
    assert result.stderr.count("error: ") == (1 if code else 0), result.stderr
    assert not list(Path("tmp").glob("ampctl-*"))
    assert sorted(os.listdir()) == ["recipe.yaml", "tmp"]
    return result


def proved(*overrides: str, code: int = 0) -> dict[str, Any]:
    result = verify("recipe.yaml", "--resume", "--json", *overrides, code=code)
    facts: dict[str, Any] = json.loads(result.stdout)
    return facts


def test_a_recipe_out_of_standard_input_is_sent_to_each_run() -> None:
    before = os.dup(0)
    try:
        with open("recipe.yaml") as file:
            os.dup2(file.fileno(), 0)
        assert "exact" in verify("-", "--resume").stdout
    finally:
        os.dup2(before, 0)
        os.close(before)


@pytest.mark.parametrize(
    "overrides",
    [
        ("amp.dtype=float16",),
        ("data.num_workers=2",),
        ("data.train={_target_: own_parts.Stream}", "scheduler=null"),
        ("data.train={_target_: own_parts.StatefulStream}", "scheduler=null"),
        ("model={_target_: own_parts.Counting}", "train.ema_decay=null"),
    ],
)
def test_what_resumes_exactly_is_said_to(overrides: tuple[str, ...]) -> None:
    facts = proved(*overrides)
    assert facts["exact"]
    assert (facts["steps"], facts["difference"]) == (STEPS, None)
    assert facts["stops"] == [3, 4]  # the middle, and an epoch's end: 22 samples are four steps
    assert facts["epoch_ends"] == [4]
    assert facts["found"] == "the resumed run is the straight one, bit for bit"


def test_an_exact_verdict_says_what_was_not_tried_and_how_to_try_it() -> None:
    assert proved("--steps", "3")["found"].endswith(
        "; no epoch boundary was among them: --steps 5 would reach one"
    )
    # What the recipe itself ends is tried to its end.
    assert "epoch boundary" not in proved("train.max_epochs=1")["found"]


def found(facts: dict[str, Any]) -> tuple[int, str, bool]:
    assert not facts["exact"]
    what = facts["difference"]
    return what["step"], what["part"], what["restored"]


def test_rs4_a_counter_in_python_is_named_with_the_step_and_the_weights() -> None:
    facts = proved("model={_target_: forgetful_parts.CountsInPython}", code=4)
    assert found(facts) == (4, "weights", False)
    assert facts["repeatable"]
    assert facts["hidden"] == {"model.calls": ["6", "0"]}  # two micro-batches a step
    assert facts["difference"]["names"][0] == "first.weight"
    assert facts["largest"]["weight"] in facts["difference"]["names"]
    result = verify(
        "recipe.yaml", "--resume", "model={_target_: forgetful_parts.CountsInPython}", code=4
    )
    assert (
        "advice: no checkpoint holds model.calls: it was 6 and is 0 after resuming" in result.stdout
    )
    assert "register_buffer" in result.stdout
    assert (
        "error: the recipe does not resume exactly: stopped after step 3 and resumed, it has other "
        "weights (first.weight" in result.stderr
    )


def test_what_each_part_counts_for_itself_is_named_and_torchs_own_flags_are_not() -> None:
    """The optimizer is a fused SGD, in which torch keeps a flag; the schedule puts another one."""
    facts = proved(
        "model={_target_: forgetful_parts.CountsOutside}",
        "optimizer={_target_: forgetful_parts.CountsItsSteps, lr: 0.1}",
        "scheduler={_target_: forgetful_parts.CountsItsCalls}",
        "task={_target_: forgetful_parts.CountsItsLosses}",
        "data.train.bad=[]",
        code=4,
    )
    ours, theirs = facts["hidden"].pop("global forgetful_parts.CALLS")
    assert ours.startswith("list ")
    assert theirs.startswith("list ")
    assert facts["hidden"] == {
        "optimizer.steps": ["3", "0"],
        "scheduler.calls": ["4", "1"],
        "task.losses_taken": ["6", "0"],
        "global forgetful_parts.CountsOutside.calls": ["6", "0"],
    }
    said = "\n".join(facts["advice"])
    assert "no checkpoint holds optimizer.steps: it was 3 and is 0 after resuming" in said
    assert "nor does one hold global forgetful_parts.CALLS, global forgetful_parts.Counts" in said
    for owner in ("optimizer", "scheduler", "task", "global"):
        assert verdict._WHAT_HOLDS[owner] in facts["advice"]
    assert verdict._WHAT_HOLDS["model"] not in facts["advice"]


def test_what_is_hidden_deeper_than_was_looked_is_told_to_be() -> None:
    differs = proof.Difference(4, "weights", ("a",), ("weights",), restored=False)
    assert verdict.advice(differs, True, {}, {}, {}) == [verdict._UNSEEN]


@pytest.mark.parametrize(
    ("ours", "theirs", "said"),
    [
        ("3", "0", "it was 3 and is 0 after resuming"),
        ("3", None, "it was 3 and is not there after resuming"),
        (f"Random {'0' * 16}", f"Random {'1' * 16}", "this generator does not go on where"),
        (f"tuple {'0' * 16}", f"tuple {'1' * 16}", "this tuple does not hold what it held"),
        (f"torch.float32 [8] {'0' * 16}", f"torch.float32 [8] {'1' * 16}", "its values are not"),
        (f"list {'0' * 16}", None, "it is not there after resuming"),
    ],
)
def test_how_a_hidden_value_differs_is_told_by_its_kind(
    ours: str, theirs: str | None, said: str
) -> None:
    assert said in verdict._how_it_differs(ours, theirs)


@pytest.mark.parametrize(
    ("ends", "length", "said"),
    [
        ([4], 4, ""),
        ([], 16, "; no epoch boundary was among them: --steps 17 would reach one"),
        ([], None, "; no epoch boundary was among them: more --steps may reach one"),
    ],
)
def test_steps_without_an_epochs_end_among_them_prove_nothing_of_it(
    ends: list[int], length: int | None, said: str
) -> None:
    assert verdict.no_boundary({"epoch_ends": ends, "steps_per_epoch": length}) == said


def test_a_buffer_that_is_not_saved_is_named() -> None:
    facts = proved("model={_target_: forgetful_parts.KeepsOutside}", code=4)
    assert found(facts) == (4, "weights", False)
    assert list(facts["hidden"]) == ["model.mean (persistent=False)"]


def test_a_state_that_is_loaded_as_another_one_is_seen_before_any_step() -> None:
    facts = proved(
        "model={_target_: forgetful_parts.LoadsOtherwise}", "train.ema_decay=null", code=4
    )
    assert found(facts) == (3, "weights", True)
    assert facts["difference"]["names"] == ["head.bias"]
    assert "it comes back with other weights (head.bias)" in facts["found"]


def test_rs5_a_data_set_with_a_generator_of_its_own_is_named() -> None:
    facts = proved("data.train={_target_: forgetful_parts.OwnGenerator}", code=4)
    assert found(facts) == (4, "samples", False)
    assert facts["repeatable"]
    assert list(facts["hidden"]) == ["data.train.generator"]
    assert facts["advice"][0] == (
        "no checkpoint holds data.train.generator: after resuming, this generator does not go on "
        "where it stood"
    )
    assert "must follow from its index" in facts["advice"][1]


@pytest.mark.parametrize(
    ("override", "part", "said"),
    [
        (
            "data.train={_target_: forgetful_parts.OwnGenerator, seed: null}",
            "samples",
            "a generator that nobody seeds",
        ),
        ("task={_target_: forgetful_parts.Unseeded}", "weights", "train.deterministic"),
    ],
)
def test_what_does_not_even_repeat_is_told_apart(override: str, part: str, said: str) -> None:
    facts = proved("data.train.bad=[]", override, code=4)
    assert not facts["repeatable"]
    assert found(facts) == (1, part, False)
    assert facts["found"].startswith("two straight runs differ already: ")
    assert said in facts["advice"][0]


@pytest.mark.parametrize(
    ("data", "step", "said"),
    [
        ("GoesOnStream", 3, "it reads those of step 1 again: an iterable data set without"),
        ("ForgetsState", 4, "state_dict() must say where the iterator stands"),
    ],
)
def test_rs5_a_stream_that_cannot_be_found_again_is_named(data: str, step: int, said: str) -> None:
    """The first gives others in its second epoch, after two steps; the second begins anew."""
    changes = [f"data.train={{_target_: forgetful_parts.{data}}}", "scheduler=null"]
    facts = proved(*changes, code=4)
    assert found(facts)[:2] == (step, "samples")
    assert said in facts["advice"][-1]


@pytest.mark.parametrize(
    ("argv", "code", "said"),
    [
        (["nowhere.yaml", "--resume"], 2, "no such file"),
        (["recipe.yaml", "--resume", "modle.x=1"], 2, "modle"),
        (["recipe.yaml", "--resume", "--steps", "1"], 2, "--steps"),
        (["recipe.yaml", "--resume", "train.max_epochs=1", "data.batch_size=22"], 2, "two to stop"),
        (["recipe.yaml", "--resume", "data.train.size=0"], 2, "has no samples"),
        (["recipe.yaml", "--resume", "train.device=cuda:77"], 5, "cuda:77"),
        (["recipe.yaml", "--resume", "amp.nonfinite=stop"], 3, "the straight run: stopped at step"),
        (["tmp", "--resume"], 2, "tmp is no recipe"),
        (["step-00000001.pt", "--resume"], 2, "is no recipe"),
        (["digits"], 2, "`ampctl verify digits --resume`"),
        (["my.yaml"], 2, "my.yaml is a recipe"),
        (["a", "train.max_steps=3"], 2, "are for a recipe"),
        (["a", "--steps", "3"], 2, "are for a recipe"),
        (["a", "b"], 2, "at a time: `ampctl verify a`, then `ampctl verify b`"),
    ],
)
def test_what_cannot_be_tried_is_told_in_words(argv: list[str], code: int, said: str) -> None:
    result = CliRunner().invoke(app, ["verify", *argv])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exc_info)
    assert said in result.stderr
    assert "Traceback" not in result.stderr
    assert not list(Path("tmp").glob("ampctl-*"))


def test_the_runs_are_fresh_processes_and_a_fault_of_the_users_own_keeps_its_traceback(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setattr(proof, "_in_process", IN_PROCESS)
    monkeypatch.setenv("PYTHONPATH", python_path(TESTS, TESTS.parent))
    argv = ["recipe.yaml", "--resume", "task={_target_: forgetful_parts.Dies, how: here}"]
    result = CliRunner().invoke(app, ["verify", *argv])
    assert result.exit_code == 1
    assert "the straight run failed" in result.stderr
    assert "forgetful_parts.py" in result.stderr
    assert "KeyError: 'here'" in result.stderr
