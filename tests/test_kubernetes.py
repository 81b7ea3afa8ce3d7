"""The manifest in the manual, run as a pod would run it; what operators of Kubernetes set in pods.

The variables are those of the Training Operator (v1.9) and of Trainer v2. Nothing of Kubernetes is
here: pods are processes.
"""

from __future__ import annotations

import os
import re
import shlex
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import typer.main
import yaml
from cpus import python_path
from processes import starting
from test_launch import RECIPE
from test_slurm import free_port, program

from ampctl.cli import app
from ampctl.distributed import launched
from ampctl.errors import UsageError
from ampctl.launcher.plan import Options, with_variables
from ampctl.track.metrics import read_metrics

ROOT = Path(__file__).parents[1]
PAGE = (ROOT / "ampctl" / "docs" / "kubernetes.md").read_text(encoding="utf-8")
DEADLINE_S = 120
Pods = Callable[[int, int], dict[str, str]]


@pytest.fixture(autouse=True)
def _no_variables(monkeypatch: pytest.MonkeyPatch) -> None:
    for name in list(os.environ):
        if name.startswith("PET_") or name in (*launched.VARIABLES, "MASTER_ADDR", "MASTER_PORT"):
            monkeypatch.delenv(name)


def manifest() -> dict[str, Any]:
    (block,) = re.findall(r"^```yaml\n(apiVersion: .*?)^```$", PAGE, re.M | re.S)
    loaded: dict[str, Any] = yaml.safe_load(block)
    return loaded


def worker() -> dict[str, Any]:
    replica: dict[str, Any] = manifest()["spec"]["pytorchReplicaSpecs"]["Worker"]
    return replica


def container() -> dict[str, Any]:
    (only,) = worker()["template"]["spec"]["containers"]
    return dict(only)


def of_training_operator(port: int) -> dict[str, str]:
    """Return what the operator sets for the manifest: ``elasticPolicy``, and workers alone."""
    job, policy = manifest(), manifest()["spec"]["elasticPolicy"]
    assert set(job["spec"]["pytorchReplicaSpecs"]) == {"Worker"}  # else RANK and more are set too
    assert not {"minReplicas", "maxReplicas"} & set(policy)  # else PET_NNODES is MIN:MAX
    return {
        "PYTHONUNBUFFERED": "0",
        "PET_NNODES": f"{worker()['replicas']}",
        "PET_RDZV_BACKEND": policy["rdzvBackend"],
        "PET_RDZV_ENDPOINT": f"localhost:{port}",
        "PET_MAX_RESTARTS": f"{policy['maxRestarts']}",
    }


def with_a_master(rank: int, port: int) -> dict[str, str]:
    """Return what the operator sets where there is a Master, of one process in each of two pods."""
    return {
        "MASTER_ADDR": "localhost",
        "MASTER_PORT": f"{port}",
        "WORLD_SIZE": "2",
        "RANK": f"{rank}",
        **of_trainer(rank, port),
    }


def of_trainer(rank: int, port: int) -> dict[str, str]:
    """Return what Trainer v2 sets in a pod of a TrainJob."""
    return {
        "PET_NNODES": "2",
        "PET_NPROC_PER_NODE": "1",
        "PET_NODE_RANK": f"{rank}",
        "PET_MASTER_ADDR": "localhost",
        "PET_MASTER_PORT": f"{port}",
    }


def test_the_manifest_is_one_that_the_operator_reads() -> None:
    job, pod = manifest(), worker()["template"]["spec"]
    assert (job["apiVersion"], job["kind"]) == ("kubeflow.org/v1", "PyTorchJob")
    assert worker()["restartPolicy"] == "ExitCode"
    assert container()["name"] == "pytorch"
    assert container()["command"] == ["bash", "-c"]
    mounts = {mount["name"]: mount["mountPath"] for mount in container()["volumeMounts"]}
    assert mounts.keys() == {volume["name"] for volume in pod["volumes"]}
    assert pod["terminationGracePeriodSeconds"] > 30


def test_its_command_line_is_one_of_ours() -> None:
    (line,) = [x for x in container()["args"][0].splitlines() if x.startswith("ampctl ")]
    words = shlex.split(line.removesuffix("&"))
    command = typer.main.get_command(app).commands[words[1]]  # type: ignore[attr-defined]
    options = command.make_context(words[1], words[2:]).params
    mounts = [Path(mount["mountPath"]) for mount in container()["volumeMounts"]]
    assert any(mount in options["run_dir"].parents for mount in mounts)
    assert (options["resume"].value, options["nproc_per_node"]) == ("auto", "auto")
    # What it leaves out the operator sets.
    assert options["nnodes"] is options["rdzv_endpoint"] is options["max_restarts"] is None


def pod(folder: Path, text: str, **variables: str) -> subprocess.Popen[bytes]:
    """Start what the container of a pod runs."""
    environment = {**os.environ, **variables, "PATH": f"{folder / 'bin'}:{os.environ['PATH']}"}
    return subprocess.Popen([*container()["command"], text], env=environment)


@pytest.mark.parametrize(("code", "ends"), [(0, 0), (75, 143), (2, 2), (1, 1), (3, 3), (5, 5)])
def test_only_a_preempted_pod_is_made_anew(code: int, ends: int, folder: Path) -> None:
    program(folder / "bin" / "ampctl", f"exit {code}")
    with pod(folder, container()["args"][0]) as started:
        assert started.wait(DEADLINE_S) == ends
    # The operator's policy ExitCode retries what ends with 128 or more.
    assert (ends >= 128) == (code == 75)


def test_sg3_a_pod_that_is_evicted_waits_for_the_save(folder: Path) -> None:
    stand_in = (
        "trap 'sleep 0.3; touch saved; exit 75' TERM; touch ready\nwhile :; do sleep 0.05; done"
    )
    program(folder / "bin" / "ampctl", stand_in)
    with pod(folder, container()["args"][0]) as started:
        end = time.monotonic() + DEADLINE_S
        while not Path("ready").exists():
            assert time.monotonic() < end
            time.sleep(0.02)
        started.send_signal(signal.SIGTERM)
        assert started.wait(DEADLINE_S) == 143
    assert Path("saved").exists()


def test_two_pods_of_the_manifest_are_one_job(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE.replace("0.05", "1"))
    program(folder / "bin" / "ampctl", f'exec "{sys.executable}" -m ampctl "$@"')
    text = container()["args"][0].replace("digits ", "recipe.yaml ", 1)
    text = text.replace("/runs/", f"{folder}/runs/")
    variables = {**of_training_operator(free_port()), "PYTHONPATH": python_path(ROOT)}
    pods = [pod(folder, text, **variables) for _ in range(2)]
    try:
        assert [each.wait(DEADLINE_S) for each in pods] == [0, 0]
    finally:
        for each in pods:
            each.terminate()
            each.wait()
    (started,) = events("runs/digits", "start")
    assert started["world_size"] == 2


@pytest.mark.parametrize("variables", [with_a_master, of_trainer])
def test_two_pods_of_other_operators_are_one_job(variables: Pods, folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE.replace("0.05", "1"))
    port = free_port()
    train = ("train", "recipe.yaml", "--run-dir", "d", "--quiet")
    with (
        starting(folder, **variables(0, port)) as on_first,
        starting(folder, **variables(1, port)) as on_second,
    ):
        ended = [each.wait() for each in (on_first(*train), on_second(*train))]
    assert [each.code for each in ended] == [0, 0], ended
    (started,) = events("d", "start")
    assert started["world_size"] == 2


def test_torchruns_variables_count_for_what_the_command_line_does_not_say(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    for name, value in of_training_operator(29400).items():
        monkeypatch.setenv(name, value)
    found = with_variables(Options(nproc_per_node="4", max_restarts=0))
    assert (found.nnodes, found.nproc_per_node, found.max_restarts) == ("2", "4", 0)
    assert (found.rdzv_backend, found.rdzv_endpoint) == ("c10d", "localhost:29400")
    monkeypatch.setenv("PET_NODE_RANK", "1")  # has no meaning for c10d
    assert with_variables(Options()).node_rank is None
    monkeypatch.setenv("PET_RDZV_BACKEND", "static")
    assert with_variables(Options()).node_rank == 1
    monkeypatch.setenv("PET_NODE_RANK", "first")
    with pytest.raises(UsageError, match="PET_NODE_RANK: got 'first'"):
        with_variables(Options())
    monkeypatch.setenv("TORCHELASTIC_RUN_ID", "x")  # a rank inherits them, and is one already
    assert with_variables(Options()) == Options()


def events(run_dir: str, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_metrics(Path(run_dir) / "metrics.jsonl") if e["event"] == kind]
