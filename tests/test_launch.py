"""Several processes: what is settled before they start, and how their launcher ends with them.

The ranks here are stand-ins: the real command line, but in place of training they do what a file
says, so that a launch costs a second. What real ranks do is tested where they are.
"""

from __future__ import annotations

import contextlib
import json
import os
import re
import signal
import socket
import sys
import threading
import time
from collections.abc import Callable, Iterator, Mapping
from concurrent.futures import Future
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import DEADLINE_S, Ended, Running, spawn, starting
from test_cli import without_style
from test_recipe_sent import RECIPE as SMALL
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import get_args_parser
from typer.testing import CliRunner, Result

from ampctl.cli import app
from ampctl.distributed import failure
from ampctl.distributed import launched as member
from ampctl.distributed.env import choose_device
from ampctl.distributed.ranks import Ranks
from ampctl.errors import MachineError, NumericsError, PreemptedError
from ampctl.launcher import agent, launch
from ampctl.launcher.plan import Options, Plan, plan_for
from ampctl.recipe.load import load_recipe

RECIPE = f"{SMALL}distributed: {{timeout_minutes: 0.05}}\n"
# What a rank does, and what it is told: {"rank": what}, in plan.json.
STAND_IN = f"""#!{sys.executable}
import json, os, signal, sys, time
from ampctl import __main__, errors
from ampctl.distributed import launched
from ampctl.launcher import launch

rank, restart = os.environ["RANK"], os.environ["TORCHELASTIC_RESTART_COUNT"]

def write(name, value):
    with open(f"{{name}}-{{rank}}.part", "w") as file:
        json.dump(value, file)
    os.replace(file.name, f"{{name}}-{{rank}}")

def act(loaded, options, **others):
    words = [loaded.source, *loaded.overrides]
    what = json.load(open("plan.json"))[rank]
    run_dir = f"{{others['run_dir']}}"
    write(f"told-{{restart}}", [words, run_dir, others["resume"], launched.is_restarted()])
    write("env", {{name: os.environ[name] for name in ("OMP_NUM_THREADS", "MASTER_PORT")}})
    end = time.monotonic() + {DEADLINE_S}
    while time.monotonic() < end and not os.path.exists(f"env-{{1 - int(rank)}}"):
        time.sleep(0.01)  # ranks join each other before they do anything
    received = []
    if what in ("wait", "save slowly", "deaf"):
        for number in (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT):
            signal.signal(number, lambda number, _: received.append(number))
        write("ready", os.getpid())
        while not received:
            time.sleep(0.02)
        write("heard", 1)
        while what == "deaf":
            time.sleep(0.02)
            if signal.SIGTERM in received:
                write("orphaned", 1)
        time.sleep(2 if what == "save slowly" else 0)
        write("saved", int(received[0]))
        name = signal.Signals(received[0]).name
        stopped = errors.InterruptedRunError if name == "SIGINT" else errors.PreemptedError
        raise stopped(f"{{name}} received after step 7")
    if what == "crash once" and restart == "0" or what == "crash":
        raise KeyError("a mistake of mine")
    if what == "lost peer":
        time.sleep(0.2)
        raise RuntimeError("[gloo/transport/tcp/pair.cc:1] Connection closed by peer [::1]:1")
    if what == "numerics":
        raise errors.NumericsError("the scale is at its floor")
    if what == "usage":
        raise errors.UsageError("data.batch_size: 8 is not divisible by 3 ranks")
    if what == "killed":
        os.kill(os.getpid(), signal.SIGKILL)

launch.train = act
sys.argv = ["ampctl", *sys.argv[4:]]  # after: python -u -m ampctl
__main__.main()
"""

Start = Callable[..., Running]


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "recipe.yaml").write_text(RECIPE)
    for name in (*member.VARIABLES, "OMP_NUM_THREADS", "TORCHELASTIC_ERROR_FILE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def start(folder: Path) -> Iterator[Start]:
    """Give a function that launches two stand-ins that do what ``plan`` says."""
    (folder / "rank").write_text(STAND_IN)
    (folder / "rank").chmod(0o755)
    # Their temporary files go with the test, those of a launcher that is killed too.
    env = {"PYTHON_EXEC": f"{folder / 'rank'}", "TMPDIR": f"{folder}"}
    with starting(folder, **env) as start_ampctl:

        def start(plan: str, *argv: str) -> Running:
            first, _, second = plan.partition(", ")
            (folder / "plan.json").write_text(json.dumps({"0": first, "1": second or first}))
            return start_ampctl("train", "recipe.yaml", "--nproc-per-node", "2", *argv)

        yield start
    for path in folder.glob("ready-*"):  # ranks lead sessions of their own
        pid = json.loads(path.read_text())
        if not is_gone(pid) and f"{folder}" in Path(f"/proc/{pid}/cmdline").read_text():
            os.kill(pid, signal.SIGKILL)


def said_by(folder: Path, name: str, rank: int) -> Any:
    path = folder / f"{name}-{rank}"
    return json.loads(path.read_text()) if path.exists() else None


def both_say(folder: Path, running: Running, name: str) -> list[Any]:
    """Wait until both ranks have written a file of that name."""

    def said() -> list[Any]:
        return [said_by(folder, name, rank) for rank in (0, 1)]

    return running.until(lambda: None not in said() and said())


def is_gone(pid: int) -> bool:
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except FileNotFoundError:
        return True


def until(condition: Callable[[], bool]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not condition():
        assert time.monotonic() < deadline
        time.sleep(0.05)


# Before any rank starts


@pytest.fixture
def launched(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """Take the place of the agent, and note what it is asked for."""
    asked: list[dict[str, Any]] = []

    def run(options: Any, argv: Any, **others: Any) -> None:
        parsed = vars(get_args_parser().parse_args([*options, "ampctl"]))
        seen = {name: os.environ.get(name) for name in ("OMP_NUM_THREADS", member.LAUNCHER)}
        folders = sorted(Path("runs").glob("*/*"))
        asked.append({"options": parsed, "argv": argv, **seen, "folders": folders, **others})

    monkeypatch.setattr(agent, "run", run)
    return asked


def ampctl(*argv: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exc_info)
    return result


def two(*argv: str, code: int = 0) -> Result:
    return ampctl("train", "recipe.yaml", "--nproc-per-node", "2", *argv, code=code)


@pytest.mark.parametrize("argv", ["", "--nproc-per-node 1", "--nproc-per-node auto --nnodes 1"])
def test_one_process_runs_in_place(argv: str, launched: list[dict[str, Any]]) -> None:
    ampctl("train", "recipe.yaml", "--run-dir", "d", "--quiet", *argv.split())
    assert not launched
    assert Path("d/checkpoints/latest.pt").exists()


def test_torchruns_options_reach_it(launched: list[dict[str, Any]]) -> None:
    two("--nnodes", "1:3", "--rdzv-endpoint", "node-a:29400", "--rdzv-id", "job-7")
    two("--max-restarts", "3")
    static_ones = ("--nnodes", "2", "--node-rank", "1", "--rdzv-backend", "static")
    two(*static_ones, "--rdzv-endpoint", "node-a:29500")
    several, alone, static = (asked["options"] for asked in launched)
    assert (several["nnodes"], several["nproc_per_node"]) == ("1:3", "2")
    assert (several["rdzv_backend"], several["rdzv_endpoint"]) == ("c10d", "node-a:29400")
    assert (several["rdzv_id"], several["max_restarts"]) == ("job-7", 0)
    assert (alone["rdzv_backend"], alone["rdzv_endpoint"]) == ("c10d", "localhost:0")
    assert (alone["max_restarts"], len(alone["rdzv_id"])) == (3, 32)
    assert (static["node_rank"], static["rdzv_backend"]) == (1, "static")
    assert launched[0]["timeout_s"] == 3


def test_the_ranks_are_given_one_run_folder(launched: list[dict[str, Any]], folder: Path) -> None:
    two("train.max_steps=1", "--quiet")
    (made,) = launched[0]["folders"]
    flags = [f"--run-dir={made}", "--quiet"]
    assert launched[0]["argv"] == ["train", *flags, "--", "recipe.yaml", "train.max_steps=1"]
    assert not Path("runs").exists()  # nothing was trained in it
    two("--run-dir", "d", "--resume", "auto")
    assert launched[1]["argv"][:3] == ["train", "--run-dir=d", "--resume=auto"]
    two("--nnodes", "2", "--rdzv-endpoint", "a:1")
    assert launched[2]["argv"] == ["train", "--", "recipe.yaml"]


def test_cores_are_shared_between_ranks(
    launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(os, "sched_getaffinity", lambda _: range(7))
    two()
    assert launched[0]["OMP_NUM_THREADS"] == "3"
    assert "OMP_NUM_THREADS" not in os.environ
    monkeypatch.setenv("OMP_NUM_THREADS", "5")
    two()
    assert launched[1]["OMP_NUM_THREADS"] == "5"
    monkeypatch.delenv("OMP_NUM_THREADS")
    ampctl("train", "recipe.yaml", "--nproc-per-node", "9")
    assert launched[2]["OMP_NUM_THREADS"] == "1"
    assert member.LAUNCHER not in os.environ


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("--nproc-per-node gpu", "--nproc-per-node: got 'gpu'; allowed: a number from 1, or auto"),
        ("--nproc-per-node 0", "--nproc-per-node: got '0'"),
        ("--nnodes 2:1", "--nnodes: got '2:1'; allowed: a number from 1, or MIN:MAX"),
        ("--nnodes x", "--nnodes: got 'x'"),
        ("--nnodes 2", "--nnodes 2 needs --rdzv-endpoint HOST:PORT"),
        ("--rdzv-backend static", "static needs --rdzv-endpoint HOST:PORT, .*; got none"),
        ("--node-rank 0 --rdzv-endpoint a", "static needs --rdzv-endpoint HOST:PORT, .*; got a"),
        ("--nnodes 2 --rdzv-backend static --rdzv-endpoint a:1", "static needs --node-rank"),
        ("--node-rank 1 --rdzv-backend c10d", "--node-rank is for --rdzv-backend static alone"),
        ("--nnodes 2 --rdzv-endpoint a:1 --max-restarts 1", "goes on from .* in --run-dir: give"),
        ("--nproc-per-node 2 train.device=cuda:1", "cuda:1 is one device.*Use train.device=cuda:"),
        ("--nproc-per-node 2 train.device=tpu", "'tpu' is no device"),
        ("--nproc-per-node 2 --resume auto", "--resume auto looks for the run in --run-dir"),
        ("--nproc-per-node 2 amp.dtyp=float16", "did you mean amp.dtype"),
        ("--nproc-per-node 2 --run-dir recipe.yaml", "recipe.yaml is a file"),
    ],
)
def test_what_cannot_be_is_refused_before_a_rank_starts(
    argv: str, words: str, launched: list[dict[str, Any]]
) -> None:
    told = ampctl("train", "recipe.yaml", *argv.split(), code=2).stderr
    assert told.count("error: ") == 1
    assert "Traceback" not in told
    assert re.search(words, told, re.DOTALL), told
    assert not launched
    assert not Path("runs").exists()


def test_a_run_folder_is_not_written_over_by_ranks(launched: list[dict[str, Any]]) -> None:
    ampctl("train", "recipe.yaml", "--run-dir", "d", "--quiet")
    assert "d already holds a run" in two("--run-dir", "d", code=2).stderr
    assert not launched
    two("--run-dir", "d", "--resume", "auto")
    assert launched


class Gpus:
    """A machine with so many CUDA devices."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, count: int) -> None:
        monkeypatch.setattr(torch.cuda, "is_available", lambda: count > 0)
        monkeypatch.setattr(torch.cuda, "device_count", lambda: count)


@pytest.mark.parametrize(
    ("gpus", "device", "processes"), [(4, "auto", 4), (4, "cuda", 4), (4, "cpu", 1), (0, "auto", 1)]
)
def test_auto_counts_the_gpus(
    gpus: int, device: str, processes: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    Gpus(monkeypatch, gpus)
    recipe = load_recipe("recipe.yaml", [f"train.device={device}"]).recipe
    plan = plan_for(Options(nproc_per_node="auto"), recipe)
    assert (1 if plan is None else plan.processes) == processes


@pytest.mark.parametrize("device", ["auto", "cuda"])
def test_more_ranks_than_gpus_end_with_5(device: str, monkeypatch: pytest.MonkeyPatch) -> None:
    Gpus(monkeypatch, 2)
    told = ampctl(
        *("train", "recipe.yaml", f"train.device={device}", "--nproc-per-node", "3"), code=5
    ).stderr
    assert "--nproc-per-node 3: 2 of cuda are here" in told
    two_there = load_recipe("recipe.yaml", [f"train.device={device}"]).recipe
    assert plan_for(Options(nproc_per_node="2"), two_there) is not None


@pytest.mark.parametrize("device", ["cuda:1", "cuda:0", "xpu:3"])
def test_d15_one_accelerator_for_several_ranks_of_a_machine_is_refused(
    device: str, launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    Gpus(monkeypatch, 4)
    argv, kind = ("train", "recipe.yaml", f"train.device={device}"), device.partition(":")[0]
    two_asked = ampctl(*argv, "--nproc-per-node", "2", code=2).stderr
    for name in ("WORLD_SIZE", "LOCAL_WORLD_SIZE"):  # as plain torchrun does; others set one
        monkeypatch.setenv("RANK", "1")
        monkeypatch.setenv(name, "2")
        for name, value in {"LOCAL_RANK": "1", "MASTER_ADDR": "a", "MASTER_PORT": "1"}.items():
            monkeypatch.setenv(name, value)
        told = ampctl(*argv, code=2).stderr
        for each in (told, two_asked):
            assert f"train.device: {device} is one device" in each
            assert f"Use train.device={kind}: each takes one of its own" in each
            assert ("CUDA_VISIBLE_DEVICES" if kind == "cuda" else "ZE_AFFINITY_MASK") in each
        assert "2 ranks are on this machine" in told
    assert not launched


def test_d15_one_accelerator_is_right_for_the_only_rank_of_a_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    Gpus(monkeypatch, 2)
    assert choose_device("cuda:1") == torch.device("cuda:1")
    recipe = load_recipe("recipe.yaml", ["train.device=cuda:1"]).recipe
    assert plan_for(Options(nproc_per_node="auto"), recipe) is None
    assert plan_for(Options(nnodes="2", rdzv_endpoint="a:1"), recipe) is not None
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "1")  # one on each of two machines
    assert choose_device("cuda:1", Ranks(1, 2, 0)) == torch.device("cuda:1")
    monkeypatch.setenv("LOCAL_WORLD_SIZE", "2")
    assert choose_device("cuda", Ranks(1, 2, 1)) == torch.device("cuda:1")
    Gpus(monkeypatch, 1)  # srun --gpus-per-task=1 shows each its own alone
    assert choose_device("cuda", Ranks(1, 2, 1)) == torch.device("cuda:0")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    with pytest.raises(MachineError, match="cuda:1 was asked for and 1 of that kind"):
        choose_device("cuda", Ranks(1, 2, 1))
    monkeypatch.delenv("TORCHELASTIC_RUN_ID")
    for device in ("cpu", "cpu:0"):  # which processes share
        assert choose_device(device, Ranks(1, 2, 1)) == torch.device("cpu")
        recipe = load_recipe("recipe.yaml", [f"train.device={device}"]).recipe
        assert plan_for(Options(nproc_per_node="2"), recipe) is not None


def test_resume_reads_the_checkpoint_before_a_rank_starts(
    launched: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    options = ("--nproc-per-node", "2")
    assert "error: " in ampctl("resume", "nowhere", *options, code=4).stderr
    ampctl("train", "recipe.yaml", "--run-dir", "d", "--quiet")
    assert "amp.dtype" in ampctl("resume", "d", "amp.dtyp=float16", *options, code=2).stderr
    monkeypatch.setenv("XDG_STATE_HOME", f"{Path.cwd() / 'fresh'}")
    monkeypatch.setattr("ampctl.recipe.trust.objection", lambda key, block: "not known here")
    assert "is not trusted" in ampctl("resume", "d", *options, code=4).stderr
    assert not launched
    ampctl("resume", "d", "train.max_steps=4", "--trust", *options)
    words = ["--", "d", "train.max_steps=4"]
    assert launched[0]["argv"] == ["resume", "--run-dir=d", "--trust", *words]
    ampctl("resume", "d/checkpoints/latest.pt", "--run-dir", "e", "--trust", *options)
    assert launched[1]["argv"][:2] == ["resume", "--run-dir=e"]


@pytest.mark.parametrize("variables", [{"TORCHELASTIC_RUN_ID": "x"}, {"RANK": "0"}])
def test_a_rank_runs_in_place_and_refuses_the_options(
    variables: Mapping[str, str], monkeypatch: pytest.MonkeyPatch, launched: list[dict[str, Any]]
) -> None:
    for name, value in {**variables, "WORLD_SIZE": "1"}.items():
        monkeypatch.setenv(name, value)
    ampctl("train", "recipe.yaml", "--run-dir", "d", "--quiet")
    for argv in (("train", "recipe.yaml"), ("resume", "d")):
        told = ampctl(*argv, "--nproc-per-node", "2", "--rdzv-id", "x", code=2).stderr
        assert "--nproc-per-node, --rdzv-id: this process is a rank of a job already" in told
    assert not launched


def test_a_rank_that_is_started_anew_goes_on_from_the_newest_checkpoint(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    more = ("--run-dir", "d", "train.max_steps=4")
    ampctl("train", "recipe.yaml", "--run-dir", "d", "checkpoint.every_steps=1", "--quiet")
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")
    ampctl("train", "recipe.yaml", *more, code=2)
    monkeypatch.setenv("TORCHELASTIC_RESTART_COUNT", "1")
    going_on = "going on from step-00000002.pt"
    assert going_on in ampctl("resume", "d/checkpoints/step-00000001.pt", *more).stdout
    assert (
        "going on from step-00000004.pt"
        in ampctl(*("train", "recipe.yaml", "--run-dir", "d", "train.max_steps=5")).stdout
    )


def test_an_error_file_that_cannot_be_written_leaves_the_telling_to_the_rank(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TORCHELASTIC_ERROR_FILE", f"{tmp_path / 'gone' / '0' / 'error.json'}")
    monkeypatch.setenv(member.LAUNCHER, f"{os.getppid()}")
    assert failure.record(NumericsError("n"))


def test_help_names_torchruns_options() -> None:
    for command in ("train", "resume"):
        told = without_style(ampctl(command, "--help").stdout)
        for name in Options("2", "1", 0, "a", "b", "c", 0).given():
            assert name in told


# Which error is told


def failed(
    folder: Path, rank: int, code: int, error: BaseException | None, *, late_s: int = 0
) -> ProcessFailure:
    """Return what torchelastic knows of a rank that ended, with the error that it has left."""
    file = folder / "attempt" / f"{rank}" / "error.json"
    file.parent.mkdir(parents=True, exist_ok=True)
    if error is not None:
        with pytest.MonkeyPatch.context() as patch:
            patch.setenv("TORCHELASTIC_ERROR_FILE", f"{file}")
            failure.record(error)
    ended = ProcessFailure(local_rank=rank, pid=100 + rank, exitcode=code, error_file=f"{file}")
    ended.timestamp += late_s
    return ended


CLOSED = RuntimeError("[pair.cc:534] Connection closed by peer [127.0.0.1]:5")
LOST = MachineError("rank 1 is gone")
LOST.__cause__ = CLOSED
STOPPED = PreemptedError("SIGTERM received after step 7")


@pytest.mark.parametrize(
    ("first", "second", "code", "words"),
    [
        ((1, CLOSED), (1, KeyError("mine")), 1, "rank 1 failed\nKeyError: 'mine'"),
        ((5, LOST), (1, KeyError("mine")), 1, "rank 1 failed\nKeyError: 'mine'"),
        ((1, torch.distributed.DistNetworkError("x")), (3, NumericsError("n")), 3, "rank 1: n"),
        ((3, NumericsError("n")), (3, NumericsError("n")), 3, "n"),
        ((1, CLOSED), (-9, None), 5, "rank 1 (process 101) was killed (SIGKILL)"),
        ((1, CLOSED), (-11, None), 1, "rank 1 (process 101) crashed (SIGSEGV)"),
        ((75, STOPPED), (1, CLOSED), 75, "SIGTERM received after step 7"),
        ((75, STOPPED), (-15, None), 75, "SIGTERM received after step 7"),
        ((-15, STOPPED), (-15, STOPPED), 75, "SIGTERM received after step 7"),
        ((-15, NumericsError("n")), (-15, NumericsError("n")), 3, "n"),
        ((1, CLOSED), (75, STOPPED), 1, "rank 0 failed\nRuntimeError: [pair.cc"),
        ((-15, None), (-15, None), 75, "rank 0 (process 100) was ended by SIGTERM before"),
        ((-2, None), (-2, None), 130, "rank 0 (process 100) was ended by SIGINT before"),
        ((-9, None), (5, failure.StuckError("rank 0 hangs")), 5, "rank 0 hangs"),
        ((7, None), (1, CLOSED), 7, "rank 0 (process 100) ended with code 7"),
    ],
)
def test_the_error_that_the_others_followed_is_told(
    first: Any, second: Any, code: int, words: str, tmp_path: Path
) -> None:
    failures = {0: failed(tmp_path, 0, *first), 1: failed(tmp_path, 1, *second)}
    told = failure.cause(failures)
    assert told.exit_code == code
    assert f"{told}".startswith(words)


def test_a_rank_that_was_killed_for_not_ending_is_not_the_cause(tmp_path: Path) -> None:
    stuck = failed(tmp_path, 0, -9, None, late_s=31)
    told = failure.cause({0: stuck, 1: failed(tmp_path, 1, 1, CLOSED)})
    assert f"{told}".startswith("rank 1 failed")


@pytest.mark.parametrize("suffix", ["pt", "dist"])
def test_the_way_on_names_the_newest_checkpoint_of_either_form(suffix: str, folder: Path) -> None:
    plan = Plan(2, 1, (), 0)
    assert launch._way_on(Path("d"), plan) == "No checkpoint had been saved in d."
    saved = Path(f"d/checkpoints/step-00000004.{suffix}")
    saved.mkdir(parents=True)
    saved.with_name(f"latest.{suffix}").symlink_to(saved.name)
    assert launch._way_on(Path("d"), plan) == (
        f"The newest checkpoint is {saved}: `ampctl resume d --nproc-per-node 2` goes on from it."
    )


# Two ranks


@pytest.mark.parametrize(
    ("plan", "code", "words"),
    [
        ("numerics", 3, "error: the scale is at its floor\n"),
        ("usage", 2, "error: data.batch_size: 8 is not divisible by 3 ranks\n"),
        ("lost peer, killed", 5, "was killed (SIGKILL)"),
    ],
)
def test_the_launcher_ends_with_the_ranks_code_and_its_words(
    plan: str, code: int, words: str, start: Start, folder: Path
) -> None:
    ended = start(plan).wait()
    assert (ended.code, ended.out) == (code, "")
    assert words in ended.err
    assert_said_once(ended)
    assert not (folder / "runs").exists()


def assert_said_once(ended: Ended) -> None:
    assert ended.err.startswith("error: ")
    assert ended.err.count("error: ") == 1
    for noise in ("torch/distributed", "FAILED", "*****", "Signal handlers", "warn"):
        assert noise not in ended.err, ended.err


def test_a_users_traceback_is_said_once_with_its_rank(start: Start) -> None:
    ended = start("lost peer, crash").wait()
    assert ended.code == 1
    assert ended.err.startswith("error: rank 1 failed\nTraceback (most recent call last):\n")
    assert ended.err.endswith("KeyError: 'a mistake of mine'\n")
    assert ended.err.count("Traceback") == 1
    assert_said_once(ended)


def test_dd10_two_launches_at_once_and_each_rank_reads_the_words(
    start: Start, folder: Path
) -> None:
    """On one machine no port is fixed; what a rank is told is what was on the command line."""
    words = ("seed=3", "name='$$ ${seed} a b'")
    other = start("ends", *words, "--run-dir", "e")
    ended = start("ends", *words, "--run-dir", "d").wait()
    assert (ended.code, ended.out, ended.err) == (0, "", "")
    assert (other.wait().code, other.said()) == (0, "")
    for rank in (0, 1):
        told = said_by(folder, "told-0", rank)
        assert told[0] == ["recipe.yaml", *words]
        assert told[1] in ("d", "e")
        assert told[2:] == [False, False]


@pytest.mark.parametrize(("name", "code"), [("SIGTERM", 75), ("SIGUSR1", 75), ("SIGINT", 130)])
def test_a_signal_to_the_launcher_reaches_every_rank(
    name: str, code: int, start: Start, folder: Path
) -> None:
    running = start("wait")
    both_say(folder, running, "ready")
    running.send(signal.Signals[name])
    ended = running.wait()
    assert ended.code == code
    assert ended.err == f"error: {name} received after step 7\n"
    assert [said_by(folder, "saved", rank) for rank in (0, 1)] == [signal.Signals[name]] * 2


def test_sg1_a_signal_to_one_rank_leaves_the_other_its_time_to_save(
    start: Start, folder: Path
) -> None:
    running = start("save slowly, wait")
    pids = both_say(folder, running, "ready")
    os.kill(pids[1], signal.SIGUSR1)
    ended = running.wait()
    assert (ended.code, ended.err) == (75, "error: rank 1: SIGUSR1 received after step 7\n")
    assert said_by(folder, "saved", 0) == signal.SIGTERM


def test_a_second_ctrl_c_ends_ranks_that_do_not_listen(start: Start, folder: Path) -> None:
    running = start("deaf")
    pids = both_say(folder, running, "ready")
    running.send(signal.SIGINT)
    both_say(folder, running, "heard")
    running.send(signal.SIGINT)
    ended = running.wait()
    assert ended.code == 130
    assert ended.err.startswith("error: interrupted twice")
    until(lambda: all(map(is_gone, pids)))
    assert said_by(folder, "orphaned", 0) is None  # it did not take their watch to end them


def test_no_rank_outlives_a_launcher_that_was_killed(start: Start, folder: Path) -> None:
    running = start("wait")
    pids = both_say(folder, running, "ready")
    ended = running.kill()
    assert ended.code == -9
    until(lambda: all(map(is_gone, pids)))
    assert said_by(folder, "saved", 0) == signal.SIGTERM  # it could still save
    assert running.said().count("error: SIGTERM received") == 1


def test_after_a_crash_all_ranks_go_on_from_the_newest_checkpoint(
    start: Start, folder: Path
) -> None:
    ended = start("ends, crash once", "--max-restarts", "2", "--run-dir", "d").wait()
    assert ended.code == 0
    assert ended.err.startswith("rank 1 failed\nTraceback")
    assert "starting all ranks anew from the newest checkpoint (1 more restarts" in ended.err
    assert said_by(folder, "told-0", 0)[1:] == ["d", False, False]
    for rank in (0, 1):
        assert said_by(folder, "told-1", rank)[1:] == ["d", False, True]


def test_a_stop_that_was_meant_is_not_started_anew(start: Start, folder: Path) -> None:
    ended = start("numerics", "--max-restarts", "2").wait()
    assert (ended.code, ended.err) == (3, "error: the scale is at its floor\n")
    assert not list(folder.glob("told-1-*"))


def test_dd10_a_port_that_is_taken_is_named_with_the_way_to_change_it(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
        ended = start("ends", "--node-rank", "0", "--rdzv-endpoint", where).wait()
    assert ended.code == 5
    assert f"no rendezvous at {where}: another process listens there" in ended.err
    assert "--rdzv-endpoint" in ended.err
    assert_said_once(ended)


def test_nodes_that_do_not_come_end_with_5(start: Start) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
    ended = start("ends", "--nnodes", "2", "--rdzv-endpoint", where).wait()
    assert ended.code == 5
    assert f"no rendezvous at {where}: fewer nodes than --nnodes came in time" in ended.err
    assert "distributed.timeout_minutes" in ended.err
    assert_said_once(ended)


def test_a_node_that_finds_no_first_node_says_so_without_native_stack_frames(folder: Path) -> None:
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
    options = ("--nnodes", "2", "--node-rank", "1", "--rdzv-endpoint", where)
    done = spawn("-m", "ampctl", "train", "recipe.yaml", *options, cwd=folder)
    assert (done.returncode, done.stdout) == (5, "")
    assert done.stderr.startswith(f"error: no rendezvous at {where}: ")
    assert done.stderr.count("\n") == 1


@pytest.mark.parametrize(
    ("answer", "static"),
    [("nothing", False), ("the end", False), ("other words", False), ("nothing", True)],
)
def test_c10_a_port_that_something_else_holds_ends_with_5_in_time(
    answer: str, static: bool, folder: Path
) -> None:
    """A program that is no store of torch takes the connection, and is silent, leaves, or babbles.

    In a new interpreter, as a thread that waits in native code must not abort its end.
    """
    held = socket.create_server(("127.0.0.1", 0))
    taken: list[socket.socket] = []

    def serve() -> None:
        with contextlib.suppress(OSError):
            while True:
                taken.append(held.accept()[0])
                if answer == "the end":
                    taken[-1].close()
                elif answer == "other words":
                    taken[-1].recv(1)
                    taken[-1].sendall(b"HTTP/1.1 400 Bad Request\r\n\r\n")

    threading.Thread(target=serve, daemon=True).start()
    where = f"127.0.0.1:{held.getsockname()[1]}"
    options = ("--nnodes", "2", "--rdzv-endpoint", where, *(["--node-rank", "1"] * static))
    ended = spawn("-m", "ampctl", "train", "recipe.yaml", *options, cwd=folder)
    held.close()
    assert ended.returncode == 5, ended.stderr
    told = ended.stderr.splitlines()
    assert told[-1].startswith(f"error: no rendezvous at {where}: ")
    assert "distributed.timeout_minutes is how long they wait for each other" in told[-1]
    assert len(told) == 1, told


def test_c10_a_word_is_said_while_the_nodes_are_waited_for(
    start: Start, monkeypatch: pytest.MonkeyPatch
) -> None:
    said: list[str] = []
    outcome: Future[None] = Future()
    node = agent._Agent(said.append)
    monkeypatch.setattr(agent, "_WORD_AFTER_S", 0)
    config = LaunchConfig(1, 2, 1, rdzv_endpoint="a:1", rdzv_backend="c10d")

    def meet() -> None:
        until(lambda: len(said) == 1)
        node.has_met.set()

    threading.Thread(target=meet).start()
    agent._await_rendezvous(outcome, node, config, 60)
    node.has_met.clear()
    node.has_store.set()
    threading.Thread(target=lambda: (until(lambda: len(said) == 2), outcome.cancel())).start()
    agent._await_rendezvous(outcome, node, config, 60)
    assert [each.partition(":1, ")[2] for each in said] == [
        "for an answer from there: up to 60 s in all",
        "for the other nodes: up to 60 s in all",
    ]


def test_a_signal_while_nodes_are_waited_for_ends_the_launcher(start: Start) -> None:
    """In native code, which signals do not end: it must not wait for the others' ten minutes."""
    with socket.create_server(("127.0.0.1", 0)) as server:
        where = f"127.0.0.1:{server.getsockname()[1]}"
    options = ("--nnodes", "2", "--node-rank", "0", "--rdzv-endpoint", where)
    running = start("ends", *options, "distributed.timeout_minutes=10")

    def listens() -> bool:
        # Looked up: a probe that connects too early may take the port for itself.
        rows = "".join(Path(f"/proc/net/{name}").read_text() for name in ("tcp", "tcp6"))
        return bool(re.search(rf":{int(where.rpartition(':')[2]):04X} \S+ 0A ", rows))

    running.until(listens)
    running.send(signal.SIGTERM)
    ended = running.wait()
    assert ended.code == 75
    assert ended.err == "error: SIGTERM received before the ranks had started\n"


def test_plain_torchrun_is_the_same_job(start: Start, folder: Path) -> None:
    start("numerics").wait()
    for path in folder.glob("*-[01]"):  # of that run
        path.unlink()
    options = ("--nproc-per-node", "2", "-m", "ampctl", "train", "recipe.yaml", "--run-dir", "d")
    env = {**os.environ, "PYTHON_EXEC": f"{folder / 'rank'}"}
    done = spawn("-m", "torch.distributed.run", *options, env=env, cwd=folder)
    assert done.returncode == 1  # torchrun has no other
    told = done.stderr.index("error: the scale is at its floor")
    assert told < done.stderr.index("FAILED"), done.stderr
    assert done.stderr.count("error: the scale") == 1, done.stderr
    assert said_by(folder, "told-0", 1)[1] == "d"


def test_a_rank_that_ends_well_does_so_as_a_program_but_is_not_torn_down() -> None:
    """A native thread that wakes up while the interpreter is torn down would abort the process."""
    program = """
import atexit, os, sys, threading, time
os.environ |= {"RANK": "0", "WORLD_SIZE": "1"}
from concurrent.futures import ThreadPoolExecutor
from ampctl.distributed import launched

class Torn:
    def __del__(self): print("torn down")

torn, pool = Torn(), ThreadPoolExecutor(1)
pool.submit(time.sleep, 0)
atexit.register(print, "at exit")
threading.Thread(target=lambda: (time.sleep(0.2), print("a thread"))).start()
with launched.leaving_at_its_end():
    sys.exit(CODE)
"""
    for code, ends, last in (("7", 7, "torn down\n"), ("None", 0, "")):
        done = spawn("-c", program.replace("CODE", code))
        said = f"a thread\nat exit\n{last}"
        assert (done.returncode, done.stdout, done.stderr) == (ends, said, "")
