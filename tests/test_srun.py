"""Ranks that srun or mpirun start without torchrun: one job, by the variables that these set."""

from __future__ import annotations

import os
import shutil
import signal
import socket
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
from jobs import job
from processes import Ended, Running, read_events
from test_resume_exact import assert_same, last

from ampctl.distributed import launched
from ampctl.errors import AmpctlError, MachineError, UsageError
from ampctl.launcher import srun
from ampctl.launcher.plan import Options

RECIPE = """
name: tasks
seed: 3
model: {_target_: own_parts.Net}
task: {_target_: own_parts.NoisyTask}
data:
  train: {_target_: own_parts.Augmented}
  eval: {_target_: own_parts.Augmented, size: 9}
  batch_size: 6
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
amp: {dtype: float32}
train: {max_steps: 3, device: cpu}
distributed: {timeout_minutes: 1}
"""
Variables = dict[str, str]
FOREIGN = ("SLURM_", "OMPI_", "PMI_", "PMIX_", "MPI_", "MV2_", "JSM_", "PALS_", "MASTER_", "PET_")


def slurm(rank: int, size: int = 2, **more: str) -> Variables:
    """Return what srun sets for a task of a step on one node."""
    ours = {
        "JOB_ID": "4711",
        "STEP_ID": "0",
        "PROCID": f"{rank}",
        "LOCALID": f"{rank}",
        "NODEID": "0",
        "NTASKS": f"{size}",
        "STEP_NUM_TASKS": f"{size}",
        "STEP_TASKS_PER_NODE": f"{size}",
        "STEP_NODELIST": "node07",
        **more,
    }
    return {f"SLURM_{name}": value for name, value in ours.items()}


def open_mpi(rank: int, size: int = 2, local_size: int | None = None) -> Variables:
    """Return what mpirun of Open MPI sets; PMIX_RANK too."""
    local = local_size or size
    ours = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank % local, "LOCAL_SIZE": local}
    named = {f"OMPI_COMM_WORLD_{name}": f"{value}" for name, value in ours.items()}
    return {**named, "PMIX_RANK": f"{rank}", "PMIX_NAMESPACE": "prterun-node-1@1"}


def hydra(rank: int, size: int = 2) -> Variables:
    """Return what mpiexec of MPICH and of Intel MPI sets."""
    ours = {"PMI_RANK": rank, "PMI_SIZE": size, "MPI_LOCALRANKID": rank, "MPI_LOCALNRANKS": size}
    return {name: f"{value}" for name, value in ours.items()}


def mvapich(rank: int, size: int = 2) -> Variables:
    ours = {"RANK": rank, "SIZE": size, "LOCAL_RANK": rank, "LOCAL_SIZE": size}
    return {f"MV2_COMM_WORLD_{name}": f"{value}" for name, value in ours.items()}


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith(FOREIGN) or name in (*launched.VARIABLES, "ENVIRONMENT"):
            monkeypatch.delenv(name)
    (folder / "recipe.yaml").write_text(RECIPE)
    shutil.copy(Path(__file__).with_name("own_parts.py"), folder)


@pytest.fixture
def tasks(folder: Path) -> Iterator[Any]:
    """Give a function that runs ``ampctl ARGV`` as tasks with these variables, to their ends."""
    started: list[Running] = []

    def run(
        every: list[Variables], *argv: str, then: Callable[[list[Running]], None] = len
    ) -> list[Ended]:
        with socket.socket() as server:
            server.bind(("127.0.0.1", 0))
            port = f"{server.getsockname()[1]}"
        now = [Running(folder, argv, {"MASTER_PORT": port, **each}) for each in every]
        started.extend(now)
        then(now)
        return [each.wait() for each in now]

    yield run
    for each in started:
        each.close()


@pytest.mark.parametrize("tool", [slurm, open_mpi, hydra])
def test_d14_tasks_of_srun_and_mpirun_are_the_ranks_of_one_job(
    tool: Any, tasks: Any, folder: Path
) -> None:
    with job(folder, "train", "recipe.yaml", "--run-dir", "d") as ranks:
        assert ranks.wait().code == 0
    first, other = tasks([tool(0), tool(1)], "train", "recipe.yaml")
    assert (first.code, first.err, other.code, other.err, other.out) == (0, "", 0, "", "")
    (run_dir,) = Path("runs").glob("*/*")
    assert read_events(run_dir)[0]["world_size"] == 2
    assert_same(last(run_dir), last(folder / "d"))
    (evaluated, silent) = tasks([tool(0), tool(1)], "eval", f"{run_dir}", "--json")
    assert (evaluated.code, silent.code, silent.out) == (0, 0, "")
    assert '"eval/loss"' in evaluated.out


def test_d14_a_signal_to_the_tasks_is_told_once(tasks: Any, folder: Path) -> None:
    def stop(running: list[Running]) -> None:
        running[0].until_event(folder / "d", "train", 1)
        for each in running:
            each.send(signal.SIGTERM)

    slow = ("log.every_steps=1", "train.max_steps=1000", "data.train.delay_s=0.01")
    every = [slurm(0), slurm(1)]
    first, other = tasks(every, "train", "recipe.yaml", "--run-dir", "d", *slow, then=stop)
    assert (first.code, other.code, other.err) == (75, 75, "")
    assert first.err.startswith("error: SIGTERM received at step ")
    assert first.err.endswith("is saved: `ampctl resume d --nproc-per-node 2` goes on\n")


def becomes(
    variables: Variables, monkeypatch: pytest.MonkeyPatch, options: Options | None = None
) -> tuple[Variables | None, list[str]]:
    """Return torch's variables of a task, None if it is no rank, and what was said."""
    said: list[str] = []
    with monkeypatch.context() as patch:
        for name, value in variables.items():
            patch.setenv(name, value)
        before = dict(os.environ)
        try:
            srun.become_rank(options or Options(), said.append)
            rank = {k: v for k, v in os.environ.items() if k not in before}
        finally:
            os.environ.clear()
            os.environ.update(before)
    return rank or None, said


def place(rank: int, size: int, local_rank: int, local_size: int, address: str) -> Variables:
    return {
        "RANK": f"{rank}",
        "WORLD_SIZE": f"{size}",
        "LOCAL_RANK": f"{local_rank}",
        "LOCAL_WORLD_SIZE": f"{local_size}",
        "MASTER_ADDR": address,
    }


@pytest.mark.parametrize(
    ("nodes", "first"),
    [
        ("node[01-03,7]", "node01"),
        ("node[7,01-03]", "node7"),
        ("login,node[1-2]", "login"),
        ("rack[2-3]-gpu[08-09].site", "rack2-gpu08.site"),
        ("a", "a"),
    ],
)
def test_d14_ranks_on_several_nodes_meet_on_the_first(
    nodes: str, first: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    two = {"STEP_NODELIST": nodes, "STEP_TASKS_PER_NODE": "4(x2),3", "STEP_ID": "2"}
    own = slurm(9, 11, **two, LOCALID="1", NODEID="2")
    rank, _ = becomes(own, monkeypatch)
    port = f"{10000 + 4711 + 62}"
    assert rank == {**place(9, 11, 1, 3, first), "MASTER_PORT": port}
    assert becomes({**own, "MASTER_ADDR": "b", "MASTER_PORT": "1"}, monkeypatch)[0] == {
        name: value for name, value in rank.items() if not name.startswith("MASTER_")
    }


def test_d14_tasks_of_one_launcher_meet_at_one_port(monkeypatch: pytest.MonkeyPatch) -> None:
    for tool in (open_mpi, hydra, mvapich):
        ranks = [becomes(tool(number), monkeypatch)[0] for number in (0, 1)]
        assert ranks[0] is not None
        assert ranks[1] == {**ranks[0], "RANK": "1", "LOCAL_RANK": "1"}
        assert ranks[0]["MASTER_ADDR"] == "127.0.0.1"
    # mpirun starts its own daemons by srun, whose variables the tasks inherit.
    within = {**slurm(0, 2, STEP_NODELIST="n[3-4]"), **open_mpi(3, 8, 4)}
    rank, _ = becomes(within, monkeypatch)
    assert rank == {**place(3, 8, 3, 4, "n3"), "MASTER_PORT": "14711"}


def test_d14_mpirun_on_several_machines_needs_to_be_told_the_first(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    with pytest.raises(MachineError, match=r"Set MASTER_ADDR to its machine, and MASTER_PORT"):
        becomes(open_mpi(3, 8, 4), monkeypatch)
    rank, _ = becomes({**open_mpi(3, 8, 4), "MASTER_ADDR": "a"}, monkeypatch)
    assert rank is not None
    assert rank["MASTER_PORT"] == "29500"


ALONE: list[Variables] = [
    {},
    slurm(0, 1),  # srun --ntasks=1
    open_mpi(0, 1),
    hydra(0, 1),
    {"PMI_RANK": "0", "PMI_SIZE": "1"},
]
BATCH = {name: value for name, value in slurm(0, 4).items() if "STEP" not in name}
OF_NO_STEP: list[Variables] = [
    {**BATCH, "ENVIRONMENT": "BATCH"},
    slurm(0, 4, STEP_ID="4294967291"),  # a batch script
    slurm(0, 4, STEP_ID="4294967290"),  # the shell of salloc
    slurm(0, 4, STEP_ID="batch"),
    {"SLURM_NTASKS": "4", "SLURM_JOB_ID": "1"},  # salloc, on the login node
]


def test_d14_one_task_and_a_batch_script_wait_for_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    for variables in ALONE:
        assert becomes(variables, monkeypatch) == (None, [])
    for variables in OF_NO_STEP:
        rank, said = becomes(variables, monkeypatch)
        assert rank is None
        assert "SLURM has 4 tasks" in said[0]
        assert "Begin the command with srun" in said[0]
        given = Options(nproc_per_node="4")
        assert becomes(variables, monkeypatch, given) == (None, [])


def test_d14_a_shell_in_a_task_is_alone(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(os, "isatty", lambda _: True)
    assert becomes(slurm(0, SRUN_COMM_PORT="1", PTY_PORT="1"), monkeypatch)[0] is None
    monkeypatch.setattr(os, "isatty", lambda _: False)  # a step within that shell
    assert becomes(slurm(0, PTY_PORT="1"), monkeypatch)[0] is not None


@pytest.mark.parametrize(
    "variables", [{"RANK": "0", "WORLD_SIZE": "2"}, {"TORCHELASTIC_RUN_ID": "x"}]
)
def test_d14_what_torchrun_has_set_counts(
    variables: Variables, monkeypatch: pytest.MonkeyPatch
) -> None:
    assert becomes({**slurm(1, 4), **variables}, monkeypatch) == (None, [])


def test_d14_launchers_are_one_a_node(monkeypatch: pytest.MonkeyPatch) -> None:
    way = Options(nproc_per_node="4", nnodes="2", rdzv_endpoint="a:1")
    assert becomes(slurm(1), monkeypatch, way) == (None, [])  # as scripts/slurm.sbatch does it
    assert becomes(slurm(0, 1), monkeypatch, Options(nproc_per_node="4")) == (None, [])
    for tool in (slurm, open_mpi, hydra):
        for wrong in (Options(nproc_per_node="4"), Options(nnodes="1"), way):
            with pytest.raises(UsageError, match=r"started 4 of this process.*--ntasks-per-node=1"):
                becomes(tool(1, 4), monkeypatch, wrong)


@pytest.mark.parametrize(
    ("variables", "words"),
    [
        ({"PMIX_RANK": "0"}, r"PMIX_RANK is set: .* `ampctl train \.\.\. --nproc-per-node N`"),
        ({"PMI_RANK": "0", "PMI_SIZE": "2"}, "PMI_RANK is set"),
        (slurm(0, 2, LOCALID="x"), "SLURM_LOCALID is 'x' in the environment"),
    ],
)
def test_d14_tasks_that_know_too_little_are_refused(
    variables: Variables, words: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    with pytest.raises(AmpctlError, match=words) as raised:
        becomes(variables, monkeypatch)
    assert raised.value.exit_code == 5
