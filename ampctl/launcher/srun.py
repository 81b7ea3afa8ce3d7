"""The ranks of a job that srun or mpirun start by themselves, one task a rank, without torchrun.

What they tell each task by their own variables is put into those that torch reads. See
https://slurm.schedmd.com/srun.html, https://docs.open-mpi.org/en/main/tuning-apps/environment-var.html
and https://github.com/pmodels/mpich/blob/main/doc/wiki/how_to/Using_the_Hydra_Process_Manager.md.
"""

from __future__ import annotations

import os
import re
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from pathlib import Path

from ampctl.distributed.launched import is_rank
from ampctl.errors import MachineError, UsageError
from ampctl.launcher.plan import Options, highest_nnodes

_MPI = {
    "mpirun": "OMPI_COMM_WORLD_RANK OMPI_COMM_WORLD_SIZE OMPI_COMM_WORLD_LOCAL_RANK "
    "OMPI_COMM_WORLD_LOCAL_SIZE",
    "mpirun_rsh": "MV2_COMM_WORLD_RANK MV2_COMM_WORLD_SIZE MV2_COMM_WORLD_LOCAL_RANK "
    "MV2_COMM_WORLD_LOCAL_SIZE",
    "mpiexec": "PMI_RANK PMI_SIZE MPI_LOCALRANKID MPI_LOCALNRANKS",
    "jsrun": "JSM_NAMESPACE_RANK JSM_NAMESPACE_SIZE JSM_NAMESPACE_LOCAL_RANK "
    "JSM_NAMESPACE_LOCAL_SIZE",
}
"""Rank, number of ranks, rank on this machine and number there, by what starts them."""

_PMI = ("PMI_RANK", "PMIX_RANK")
_NO_TASKS = 0xFFFFFFF0
"""Steps from here on are SLURM's own: a batch script, an interactive shell."""

_FIRST_PORT, _PORTS = 10000, 20000  # below those that systems hand out by themselves
_DEFAULT_PORT = 29500  # torchrun's


@dataclass(frozen=True)
class _Task:
    """One of the tasks that ``tool`` has started; the ranks meet at a port of ``address``."""

    tool: str
    rank: int
    size: int
    local_rank: int
    local_size: int
    address: str | None
    port: int


def become_rank(options: Options, notify: Callable[[str], None]) -> None:
    """Where srun or mpirun has started several of this process, make it one rank of their job.

    ``notify`` is told where SLURM has tasks and srun did not start them. Raises UsageError for
    ``options`` of a launcher, of which each task would start its own, and MachineError where the
    tasks are not told enough to meet.
    """
    if is_rank():
        return
    task = _task(os.environ)
    if task is None or task.size == 1:
        given = "SLURM_NTASKS" in os.environ and _number(os.environ, "SLURM_NTASKS")
        if task is None and given and given > 1 and not options.given():
            notify(
                f"warning: SLURM has {given} tasks for this job (SLURM_NTASKS), and this process "
                "is none of those that srun starts: it trains alone. Begin the command with srun "
                "for a rank in each task, or give --nproc-per-node"
            )
        return
    if options.given():
        if options.rdzv_endpoint and task.size <= highest_nnodes(options):
            return  # a launcher on each node
        raise UsageError(
            f"{', '.join(options.given())}: {task.tool} has started {task.size} of this process, "
            "and each would start ranks of its own and train the whole run. Leave these options "
            "out, and each task is a rank of one job; or start one task on each node "
            "(`srun --ntasks-per-node=1`), with --nnodes and --rdzv-endpoint."
        )
    address = os.environ.get("MASTER_ADDR") or task.address
    if address is None:
        raise MachineError(
            f"{task.tool} has started {task.size} ranks on several machines, and does not tell "
            "them where the first one is. Set MASTER_ADDR to its machine, and MASTER_PORT to a "
            "free port there, for all of them."
        )
    os.environ.setdefault("MASTER_PORT", f"{task.port}")
    os.environ |= {
        "MASTER_ADDR": address,
        "RANK": f"{task.rank}",
        "WORLD_SIZE": f"{task.size}",
        "LOCAL_RANK": f"{task.local_rank}",
        "LOCAL_WORLD_SIZE": f"{task.local_size}",
    }


def _task(env: Mapping[str, str]) -> _Task | None:
    """Return the task that this process is; mpirun comes first, which may use srun itself."""
    for tool, listed in _MPI.items():
        names = listed.split()
        if env.keys() >= set(names):
            rank, size, local_rank, local_size = (_number(env, name) for name in names)
            is_here = local_size >= size
            address = "127.0.0.1" if is_here else _first_host(env)
            port = _port(_launcher(names[0]) if is_here else _job(env))
            return _Task(tool, rank, size, local_rank, local_size, address, port)
    if _is_task_of_srun(env):
        return _task_of_srun(env)
    found = next((name for name in _PMI if env.get(name)), None)
    if found is None or env.get("PMI_SIZE") == "1":
        return None
    raise MachineError(
        f"{found} is set: an MPI launcher has started this process, and does not say which of its "
        "ranks are on this machine. Start them with `mpirun` of Open MPI or MPICH, with srun or "
        "torchrun, or by `ampctl train ... --nproc-per-node N`; if this process is alone, unset "
        f"{found}."
    )


def _is_task_of_srun(env: Mapping[str, str]) -> bool:
    """Return whether srun has started this process as a task; a batch script knows its rank too."""
    if not {"SLURM_PROCID", "SLURM_NTASKS"} <= env.keys():
        return False
    if "SLURM_PTY_PORT" in env and os.isatty(0):  # a shell in a task: the others have none
        return False
    step = env.get("SLURM_STEP_ID")
    if step is None:
        return env.get("ENVIRONMENT") != "BATCH" and "SLURM_LOCALID" in env
    return step.isdecimal() and int(step) < _NO_TASKS


def _task_of_srun(env: Mapping[str, str]) -> _Task:
    size = _number(env, "SLURM_STEP_NUM_TASKS" if "SLURM_STEP_NUM_TASKS" in env else "SLURM_NTASKS")
    local_size = _on_this_node(env, size)
    step = _number(env, "SLURM_STEP_ID") if "SLURM_STEP_ID" in env else 0
    return _Task(
        tool="srun",
        rank=_number(env, "SLURM_PROCID"),
        size=size,
        local_rank=_number(env, "SLURM_LOCALID"),
        local_size=local_size,
        address="127.0.0.1" if local_size >= size else _first_host(env),
        port=_port(_job(env) + 31 * step),
    )


def _job(env: Mapping[str, str]) -> int:
    """Return a number that is the same on all nodes of a job, and of another job most often not."""
    return _number(env, "SLURM_JOB_ID") if "SLURM_JOB_ID" in env else _DEFAULT_PORT - _FIRST_PORT


def _on_this_node(env: Mapping[str, str], size: int) -> int:
    """Return how many of a step's tasks are on this node, from a list like ``4(x2),3``."""
    listed = env.get("SLURM_STEP_TASKS_PER_NODE") or env.get("SLURM_TASKS_PER_NODE") or f"{size}"
    counts: list[int] = []
    for count, times in re.findall(r"(\d+)(?:\(x(\d+)\))?", listed):
        counts += [int(count)] * int(times or 1)
    node = _number(env, "SLURM_NODEID") if "SLURM_NODEID" in env else 0
    return counts[node] if node < len(counts) else size


def _first_host(env: Mapping[str, str]) -> str | None:
    """Return the first node of SLURM's list, like ``gpu[01-03,7],login``."""
    listed = env.get("SLURM_STEP_NODELIST") or env.get("SLURM_JOB_NODELIST")
    listed = listed or env.get("SLURM_NODELIST") or ""
    first = re.match(r"(?:[^,\[]|\[[^\]]*\])*", listed)
    return re.sub(r"\[([^],-]*)[^]]*\]", r"\1", first[0]) or None if first else None


def _launcher(variable: str) -> int:
    """Return the process that started the tasks of this machine: the nearest above that is none.

    A task may be a shell script that starts this process.
    """
    pid = os.getppid()
    while True:
        try:
            known = Path(f"/proc/{pid}/environ").read_bytes()
            fields = Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()
        except OSError:  # another user's, or a system without /proc
            return pid
        if not re.search(rb"(^|\0)" + variable.encode() + b"=", known):
            return pid
        pid = int(fields[1])


def _port(number: int) -> int:
    return _FIRST_PORT + number % _PORTS


def _number(env: Mapping[str, str], name: str) -> int:
    text = env.get(name, "")
    if not text.isdecimal():
        raise MachineError(f"{name} is {text!r} in the environment; launchers set it to a number")
    return int(text)
