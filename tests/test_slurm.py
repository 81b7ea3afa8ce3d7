"""``scripts/slurm.sbatch``: what it calls, against stand-ins of SLURM, and jobs of a real cluster.

The cluster is of one node, on loopback, in a folder of its own; it is there if SLURM is installed.
"""

from __future__ import annotations

import contextlib
import os
import re
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
import typer.main
from cpus import python_path

from ampctl.cli import app
from ampctl.track.metrics import read_metrics

ROOT = Path(__file__).parents[1]
SCRIPT = ROOT / "scripts" / "slurm.sbatch"
DEADLINE_S = 200.0


def until(condition: Callable[[], Any], told: Callable[[], str] = str) -> Any:
    deadline = time.monotonic() + DEADLINE_S
    while not (value := condition()):
        assert time.monotonic() < deadline, told()
        time.sleep(0.05)
    return value


def program(path: Path, text: str) -> None:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n")
    path.chmod(0o755)


# Stand-ins: srun does what the variables say, and all that is called is written down.

SRUN = """
echo "srun $*" >> calls
stopped() { echo "srun got $1" >> calls; saves; exit 75; }
saves() { [[ -z $SAVES ]] || touch "$RUN/checkpoints/step-00000020.pt"; }
trap 'stopped USR1' USR1
trap 'stopped TERM' TERM
if [[ $CODE == signal ]]; then
    touch ready
    while :; do sleep 0.05; done
fi
saves
exit "$CODE"
"""
SCONTROL = """
case "$1 $2" in
    "show hostnames") [[ $3 == "node-[7-8]" ]] && printf 'node-7\\nnode-8\\n' ;;
    "show job") echo "JobId=$3 JobName=ampctl JobState=$STATE Reason=None" ;;
    *) echo "scontrol $*" >> calls ;;
esac
"""
RUN = Path("runs/slurm-123456")


@pytest.fixture
def stand_ins(folder: Path) -> dict[str, str]:
    """Put an older checkpoint into the run folder, stand-ins on PATH; return the environment."""
    (RUN / "checkpoints").mkdir(parents=True)
    (RUN / "checkpoints" / "step-00000010.pt").touch()
    program(folder / "bin" / "srun", SRUN)
    program(folder / "bin" / "scontrol", SCONTROL)
    slurm = {"JOB_ID": "123456", "JOB_NODELIST": "node-[7-8]", "NNODES": "2", "CPUS_PER_TASK": "6"}
    return {
        **os.environ,
        **{f"SLURM_{name}": value for name, value in slurm.items()},
        "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
        "RUN": f"{RUN}",
        "STATE": "RUNNING",
        "SAVES": "1",
    }


def calls() -> list[str]:
    return Path("calls").read_text().splitlines()


@pytest.mark.parametrize(
    ("code", "changes", "is_requeued", "words"),
    [
        (0, {}, False, ""),
        (75, {}, True, "requeued, to go on from runs/slurm-123456/checkpoints/step-00000020.pt"),
        (75, {"SAVES": ""}, False, "nothing was saved since the job was started"),
        (75, {"STATE": "CANCELLED"}, False, "SLURM is ending the job"),
        (75, {"STATE": "COMPLETING"}, False, "SLURM is ending the job"),
        (2, {}, False, ""),
        *((code, {}, False, "") for code in (1, 3, 4, 5, 130, 137)),
    ],
)
def test_a_job_is_requeued_where_it_was_preempted_and_has_saved(
    code: int, changes: dict[str, str], is_requeued: bool, words: str, stand_ins: dict[str, str]
) -> None:
    done = subprocess.run(
        ["bash", f"{SCRIPT}"],
        env={**stand_ins, "CODE": f"{code}", **changes},
        capture_output=True,
        text=True,
        timeout=60,
    )
    assert done.returncode == code
    assert calls()[1:] == ["scontrol requeue 123456"] * is_requeued
    assert words in done.stderr
    assert bool(done.stderr) == bool(words)


@pytest.mark.parametrize("name", ["USR1", "TERM"])
def test_sg3_the_script_passes_its_signals_on_and_waits_for_what_comes_of_them(
    name: str, stand_ins: dict[str, str]
) -> None:
    with subprocess.Popen(["bash", f"{SCRIPT}"], env={**stand_ins, "CODE": "signal"}) as job:
        until(Path("ready").exists)
        job.send_signal(getattr(signal, f"SIG{name}"))
        assert job.wait(60) == 75
    assert calls()[1:] == [f"srun got {name}", "scontrol requeue 123456"]


@pytest.mark.parametrize(
    ("argv", "recipe", "overrides"),
    [
        ([], "digits", []),
        (["my recipe.yaml"], "my recipe.yaml", []),
        (["mine.yaml", "seed=1", "name=a b"], "mine.yaml", ["seed=1", "name=a b"]),
        (["seed=1"], "digits", ["seed=1"]),
    ],
)
def test_the_script_starts_one_launcher_on_each_node(
    argv: list[str], recipe: str, overrides: list[str], stand_ins: dict[str, str]
) -> None:
    program(Path("bin/srun"), "printf '%s\\n' \"$@\" > arguments")
    subprocess.run(["bash", f"{SCRIPT}", *argv], env=stand_ins, check=True, timeout=60)
    given = Path("arguments").read_text().splitlines()
    start = given.index("ampctl")
    assert given[:start] == ["--ntasks-per-node=1", "--cpus-per-task=6"]
    assert given[start + 1] == "train"
    command = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    options = command.make_context("train", given[start + 2 :]).params
    assert (options["recipe"], options["overrides"] or []) == (recipe, overrides)
    assert (options["run_dir"], options["resume"].value) == (RUN, "auto")
    assert (options["nnodes"], options["nproc_per_node"]) == ("2", "auto")
    assert (options["rdzv_backend"], options["rdzv_endpoint"]) == ("c10d", "node-7:13456")
    assert options["rdzv_id"] == "123456"


def test_sbatch_reads_all_of_its_lines() -> None:
    lines = SCRIPT.read_text().splitlines()
    first_command = next(i for i, line in enumerate(lines) if line and line[0] != "#")
    for_sbatch = [i for i, line in enumerate(lines) if line.startswith("#SBATCH")]
    assert max(for_sbatch) < first_command  # it stops reading there
    told = " ".join(lines[i] for i in for_sbatch)
    for option in ("--requeue", "--signal=B:USR1@", "--open-mode=append", "--ntasks-per-node=1"):
        assert option in told
    assert os.access(SCRIPT, os.X_OK)


def test_the_script_is_good_bash() -> None:
    subprocess.run(["bash", "-n", f"{SCRIPT}"], check=True)
    if shutil.which("shellcheck"):
        done = subprocess.run(["shellcheck", f"{SCRIPT}"], capture_output=True, text=True)
        assert done.returncode == 0, done.stdout


# A real cluster

CONFIGURATION = """
ClusterName=ampctl
SlurmctldHost=localhost(127.0.0.1)
SlurmctldPort={controller}
SlurmdPort={node}
SlurmUser={user}
SlurmdUser={user}
AuthType=auth/munge
AuthInfo=socket={folder}/munge.socket,cred_expire=6
CredType=cred/munge
StateSaveLocation={folder}/state
SlurmdSpoolDir={folder}/spool
SlurmctldPidFile={folder}/slurmctld.pid
SlurmdPidFile={folder}/slurmd.pid
SlurmctldLogFile={folder}/slurmctld.log
SlurmdLogFile={folder}/slurmd.log
ProctrackType=proctrack/pgid
TaskPlugin=task/none
MpiDefault=none
SelectType=select/cons_tres
SelectTypeParameters=CR_CPU
JobAcctGatherType=jobacct_gather/none
AccountingStorageType=accounting_storage/none
JobCompType=jobcomp/none
MinJobAge=600
ReturnToService=2
SlurmdParameters=config_overrides
SchedulerParameters=batch_sched_delay=1,sched_interval=1,bf_interval=1
NodeName=localhost NodeAddr=127.0.0.1 CPUs=2
PartitionName=all Nodes=ALL Default=YES MaxTime=INFINITE State=UP
"""
PARTS = """
import time
from torch.utils.data import Dataset
from ampctl.data import Digits

class Slow(Dataset):
    def __init__(self, delay_s):
        self.digits = Digits(split="train")
        self.delay_s = delay_s

    def __len__(self):
        return len(self.digits)

    def __getitem__(self, index):
        time.sleep(self.delay_s)
        return self.digits[index]
"""
RECIPE = """
name: slow
model: {_target_: ampctl.models.MLP, in_features: 64, hidden: [8], num_classes: 10, dropout: 0.2}
task: {_target_: ampctl.tasks.Classification}
data:
  train: {_target_: slow_parts.Slow, delay_s: 0}
  batch_size: 8
optimizer: {_target_: torch.optim.AdamW, lr: 1e-3}
amp: {dtype: bfloat16, clip_norm: 1.0}
train: {max_steps: 60, device: cpu}
checkpoint: {every_steps: 4}
"""
ENDED = ("COMPLETED", "FAILED", "CANCELLED", "TIMEOUT", "NODE_FAIL", "OUT_OF_MEMORY")


class Cluster:
    """A controller, a node and munge for them, in a folder; all of it ends with :meth:`stop`."""

    def __init__(self, folder: Path) -> None:
        self.folder = folder
        self._daemons: list[subprocess.Popen[bytes]] = []
        self.environment = {
            **{name: value for name, value in os.environ.items() if "SLURM" not in name},
            "SLURM_CONF": f"{folder / 'slurm.conf'}",
            "PATH": f"{folder / 'bin'}:{os.environ['PATH']}",
            "PYTHONPATH": python_path(ROOT),
            "XDG_STATE_HOME": f"{folder / 'state-home'}",
            "OMP_NUM_THREADS": "1",
            "NPROC_PER_NODE": "2",
        }

    def start(self) -> None:
        folder = self.folder
        for name in ("state", "spool"):
            (folder / name).mkdir()
        (folder / "munge.key").write_bytes(os.urandom(128))
        (folder / "munge.key").chmod(0o600)
        user = subprocess.run(["id", "-un"], capture_output=True, text=True, check=True)
        (folder / "slurm.conf").write_text(
            CONFIGURATION.format(
                folder=folder, user=user.stdout.strip(), controller=free_port(), node=free_port()
            )
        )
        program(folder / "bin" / "ampctl", f'exec "{sys.executable}" -m ampctl "$@"')
        munge = ["munged", "--foreground", "--force", "--num-threads=2"]
        for name in ("socket", "pid-file", "log-file", "seed-file"):
            munge.append(f"--{name}={folder}/munge.{name.removesuffix('-file')}")
        self._start([*munge, f"--key-file={folder}/munge.key"])
        until((folder / "munge.socket").exists)
        self._start(["slurmctld", "-D"])
        self._start(["slurmd", "-D", "-N", "localhost"])
        deadline = time.monotonic() + 30
        while "idle" not in self.run("sinfo", "-h", "-o", "%t").stdout:
            if time.monotonic() > deadline or any(each.poll() for each in self._daemons):
                logs = "".join(path.read_text()[-2000:] for path in folder.glob("*.log"))
                pytest.skip(f"a cluster of SLURM does not start here: {logs}")
            time.sleep(0.2)

    def _start(self, command: list[str]) -> None:
        with (self.folder / "daemons.log").open("ab") as log:
            self._daemons.append(
                subprocess.Popen(command, env=self.environment, stdout=log, stderr=log)
            )

    def run(self, *command: str) -> subprocess.CompletedProcess[str]:
        return subprocess.run(
            command, env=self.environment, capture_output=True, text=True, timeout=60
        )

    def stop(self) -> None:
        self.run("scancel", "--user", f"{os.getuid()}")
        self.run("scancel", "--user", f"{os.getuid()}", "--signal=KILL", "--full")
        for daemon in reversed(self._daemons):
            daemon.terminate()
            with contextlib.suppress(subprocess.TimeoutExpired):
                daemon.wait(10)
            daemon.kill()
            daemon.wait()
        for pid in self.left():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)

    def left(self) -> list[int]:
        """Return the processes that have the cluster's folder in their environment or command."""
        found = []
        for entry in Path("/proc").iterdir():
            if entry.name.isdigit() and int(entry.name) != os.getpid():
                with contextlib.suppress(OSError):
                    text = (entry / "environ").read_bytes() + (entry / "cmdline").read_bytes()
                    if f"{self.folder}".encode() in text:
                        found.append(int(entry.name))
        return found

    def submit(self, *argv: str) -> str:
        """Submit the script as a user has changed it, from the current folder; return the job."""
        text = SCRIPT.read_text()
        for before, after in (
            ("--nodes=2 --gpus-per-node=8 --cpus-per-task=64", "--nodes=1 --cpus-per-task=2"),
            ("RECIPE=digits", "RECIPE=recipe.yaml"),
        ):
            assert before in text
            text = text.replace(before, after)
        Path("mine.sbatch").write_text(text)
        done = self.run("sbatch", "--parsable", "--output=out-%j", "mine.sbatch", *argv)
        assert done.returncode == 0, done.stderr
        return done.stdout.strip()

    def job(self, number: str) -> dict[str, str]:
        told = self.run("scontrol", "show", "job", number, "--oneliner").stdout
        return dict(re.findall(r"(\w+)=(\S*)", told))

    def ended(self, number: str) -> dict[str, str]:
        """Wait for the end of a job, its requeues too; return what SLURM says of it."""

        def is_over() -> dict[str, str] | None:
            job = self.job(number)
            return job if job.get("JobState") in ENDED else None

        job: dict[str, str] = until(is_over, lambda: f"{self.job(number)}\n{said(number)}")
        return job


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def said(job: str) -> str:
    path = Path(f"out-{job}")
    return path.read_text() if path.exists() else ""


def run_of(job: str) -> Path:
    return Path("runs") / f"slurm-{job}"


def events(job: str, kind: str) -> list[dict[str, Any]]:
    path = run_of(job) / "metrics.jsonl"
    return [e for e in read_metrics(path) if e["event"] == kind] if path.exists() else []


def last(job: str) -> dict[str, Any]:
    path = run_of(job) / "checkpoints" / "latest.pt"
    loaded: dict[str, Any] = torch.load(path, weights_only=True)
    return loaded


@pytest.fixture(scope="module")
def cluster() -> Iterator[Cluster]:
    needed = ("munged", "slurmctld", "slurmd", "sbatch", "srun", "scontrol")
    lacking = [name for name in needed if shutil.which(name) is None]
    if lacking:
        pytest.skip(f"SLURM is not installed: no {', '.join(lacking)}")
    # Not in pytest's folder: the path of a socket may have a hundred characters.
    with tempfile.TemporaryDirectory(prefix="ampctl-slurm-") as name:
        cluster = Cluster(Path(name))
        try:
            cluster.start()
            yield cluster
        finally:
            cluster.stop()
        assert not cluster.left()


@pytest.fixture
def work(folder: Path) -> Path:
    (folder / "slow_parts.py").write_text(PARTS)
    (folder / "recipe.yaml").write_text(RECIPE)
    return folder


@pytest.mark.slow
@pytest.mark.timeout(900)  # three starts of two ranks, and what SLURM waits between them
def test_sg3_a_job_that_is_signalled_requeues_itself_and_ends_as_one_that_was_not(
    cluster: Cluster, work: Path
) -> None:
    whole = cluster.submit()
    job = cluster.ended(whole)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "0")
    assert events(whole, "start")[0]["world_size"] == 2
    assert events(whole, "train")[-1]["step"] == 60

    stopped = cluster.submit("data.train.delay_s=0.04")
    until(lambda: list(run_of(stopped).glob("checkpoints/step-*.pt")), lambda: said(stopped))
    # To the script alone, as --signal=B:USR1@120 does before the time is up.
    assert cluster.run("scancel", "--batch", "--signal=USR1", stopped).returncode == 0
    until(lambda: events(stopped, "stop"), lambda: said(stopped))
    job = cluster.ended(stopped)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("COMPLETED", "0:0", "1"), job
    assert [(e["reason"], e["exit_code"]) for e in events(stopped, "stop")] == [
        ("preempted", 75),
        ("complete", 0),
    ]
    (resumed,) = events(stopped, "resume")
    assert 0 < resumed["step"] < 60
    assert resumed["step"] == events(stopped, "stop")[0]["step"]
    assert "slurm.sbatch: requeued, to go on from" in said(stopped)
    ours, theirs = last(stopped), last(whole)
    assert ours["progress"] == theirs["progress"]
    for name, value in theirs["model"].items():
        assert torch.equal(ours["model"][name], value), name


@pytest.mark.slow
def test_a_job_with_a_fault_in_its_recipe_ends_with_its_code_and_is_not_requeued(
    cluster: Cluster, work: Path
) -> None:
    faulty = cluster.submit("amp.dtype=fp16")
    job = cluster.ended(faulty)
    assert (job["JobState"], job["ExitCode"], job["Restarts"]) == ("FAILED", "2:0", "0")
    assert "did you mean float16?" in said(faulty)
    assert not run_of(faulty).exists()


@pytest.mark.slow
def test_a_job_that_is_cancelled_saves_and_is_not_requeued(cluster: Cluster, work: Path) -> None:
    job = cluster.submit("data.train.delay_s=0.05")
    until(lambda: list(run_of(job).glob("checkpoints/step-*.pt")), lambda: said(job))
    assert cluster.run("scancel", job).returncode == 0
    until(lambda: events(job, "stop"), lambda: said(job))
    ended = cluster.ended(job)
    assert (ended["JobState"], ended["Restarts"]) == ("CANCELLED", "0")
    assert [e["reason"] for e in events(job, "stop")] == ["preempted"]
    until(lambda: not cluster.run("squeue", "-h").stdout)
    assert cluster.job(job)["JobState"] == "CANCELLED"
