"""Two machines, as two network namespaces with a cable between them: one job, its end, its faults.

Each has a loopback and an address of its own, and no name for the other. Both see one folder.
"""

from __future__ import annotations

import contextlib
import itertools
import os
import shutil
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from cpus import python_path
from processes import DEADLINE_S, read_events
from test_ddp import events, one
from test_restart import RECIPE, TESTS, begun, undisturbed
from test_resume_exact import assert_same, last

__all__ = ["undisturbed"]  # a fixture
_numbers = itertools.count()
ADDRESSES = ("10.213.7.1", "10.213.7.2")
# How soon torchelastic closes a round, and believes that a node is lost: half a minute, else.
QUICK = "last_call_timeout=2,keep_alive_interval=1,keep_alive_max_attempt=3"


class Node:
    """A machine that stands beside the other: what runs there, and how it is cut off."""

    def __init__(self, name: str, folder: Path) -> None:
        self.name = name
        self.cable = ""
        self._folder = folder
        self._running: subprocess.Popen[bytes] | None = None
        self._err = folder / "none"

    def start(self, *argv: str, **env: str) -> None:
        self._err = self._folder / f"{self.name}-{time.monotonic_ns()}.err"
        self.out = self._err.with_suffix(".out")
        whole = {**os.environ, "PET_RDZV_CONF": QUICK, "TMPDIR": f"{self._folder}", **env}
        with self.out.open("wb") as out, self._err.open("wb") as err:
            self._running = subprocess.Popen(
                ["ip", "netns", "exec", self.name, sys.executable, *argv],
                cwd=self._folder,
                env=whole,
                stdin=subprocess.DEVNULL,
                stdout=out,
                stderr=err,
                start_new_session=True,
            )

    def said(self) -> str:
        return self._err.read_text()

    def pids(self) -> list[int]:
        """Return all that runs there."""
        done = subprocess.run(
            ["ip", "netns", "pids", self.name], capture_output=True, text=True, check=False
        )
        return [int(pid) for pid in done.stdout.split()]

    def wait(self) -> tuple[int, str]:
        assert self._running is not None
        try:
            code = self._running.wait(DEADLINE_S)
        except subprocess.TimeoutExpired:
            raise AssertionError(f"{self.name} still runs:\n{self.said()}") from None
        return code, self.said()

    def until(self, condition: Callable[[], Any]) -> None:
        deadline = time.monotonic() + DEADLINE_S
        while not condition():
            assert self._running is not None
            assert self._running.poll() is None, f"{self.name} ended:\n{self.said()}"
            assert time.monotonic() < deadline, f"it never came to that:\n{self.said()}"
            time.sleep(0.02)

    def send(self, number: signal.Signals) -> None:
        assert self._running is not None
        self._running.send_signal(number)

    def kill(self) -> None:
        """End all that runs there at once, as a machine does that loses its power."""
        for pid in self.pids():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        if self._running is not None:
            self._running.wait()


def ip(*argv: str) -> None:
    subprocess.run(["ip", *argv], check=True, capture_output=True)


@pytest.fixture
def nodes(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[tuple[Node, Node]]:
    """Lay the cable; skip where that is not allowed. All is taken away again, whatever happens."""
    monkeypatch.setenv("PYTHONPATH", python_path(TESTS, TESTS.parent))
    for name in ("GLOO_SOCKET_IFNAME", "PET_RDZV_CONF"):
        monkeypatch.delenv(name, raising=False)
    (folder / "recipe.yaml").write_text(RECIPE)
    if shutil.which("ip") is None:
        pytest.skip("two network namespaces need the command `ip` (iproute2)")
    mark = f"{os.getpid()}{next(_numbers)}"
    machines = tuple(Node(f"ampctl-{mark}-{end}", folder) for end in "ab")
    ends = [f"amp{mark}{end}" for end in "ab"]
    try:
        try:
            for node in machines:
                ip("netns", "add", node.name)
                ip("-n", node.name, "link", "set", "lo", "up")
            ip("link", "add", ends[0], "type", "veth", "peer", "name", ends[1])
            for node, end, address in zip(machines, ends, ADDRESSES, strict=True):
                node.cable = end
                ip("link", "set", end, "netns", node.name)
                ip("-n", node.name, "address", "add", f"{address}/24", "dev", end)
                ip("-n", node.name, "link", "set", end, "up")
        except subprocess.CalledProcessError as error:
            told = error.stderr.decode().strip()
            pytest.skip(f"no network namespaces here: `{' '.join(error.cmd)}`: {told}")
        yield machines[0], machines[1]
    finally:
        for node in machines:
            node.kill()
            subprocess.run(["ip", "netns", "del", node.name], check=False, capture_output=True)
        subprocess.run(["ip", "link", "del", ends[0]], check=False, capture_output=True)


def line(*more: str, at: int = 0, nnodes: str = "2") -> list[str]:
    """The one command that each node runs; they meet at the first of them, or at the second."""
    rendezvous = ("--rdzv-backend", "c10d", "--rdzv-endpoint", f"{ADDRESSES[at]}:29471")
    options = ("--nnodes", nnodes, "--nproc-per-node", "1", *rendezvous, "--rdzv-id", "job")
    return ["-m", "ampctl", "train", "recipe.yaml", "--run-dir", "d", *options, *more]


def both(nodes: tuple[Node, Node], *more: str) -> list[tuple[int, str]]:
    """Run a command on both nodes to its end; return exit codes and what was said on stderr."""
    for node in nodes:
        node.start(*line(*more))
    return [node.wait() for node in nodes]


def check_is_the_undisturbed_run(nodes: tuple[Node, Node], expected: dict[str, Any]) -> None:
    assert_same(last(Path("d")), expected)
    assert begun("d") == [("start", 0)]
    assert sorted(path.name for path in Path("d/logs").iterdir()) == ["rank-0.log", "rank-1.log"]
    said = [node.out.read_text() for node in nodes]
    assert said[0].count("complete: 9 steps") == 1
    assert said[1] == ""  # rank 0's node tells all


def test_two_nodes_are_one_run_with_the_weights_of_two_ranks_on_one(
    nodes: tuple[Node, Node], undisturbed: dict[str, Any]
) -> None:
    assert both(nodes) == [(0, ""), (0, "")]
    check_is_the_undisturbed_run(nodes, undisturbed)


@pytest.mark.slow
def test_a_folder_that_holds_a_run_is_refused_on_both_nodes_alike(
    nodes: tuple[Node, Node],
) -> None:
    Path("d").mkdir()
    Path("d/metrics.jsonl").touch()
    told = both(nodes)
    assert [code for code, _ in told] == [2, 2]
    assert told[0][1].startswith("error: d already holds a run, which is never written over.")
    assert "because of node 0" in told[1][1]
    assert "d already holds a run" in told[1][1]


@pytest.mark.slow
def test_two_nodes_of_the_static_rendezvous(
    nodes: tuple[Node, Node], undisturbed: dict[str, Any]
) -> None:
    for rank, node in enumerate(nodes):
        node.start(*line("--rdzv-backend", "static", "--node-rank", f"{rank}"))
    assert [node.wait() for node in nodes] == [(0, ""), (0, "")]
    check_is_the_undisturbed_run(nodes, undisturbed)


@pytest.mark.slow
def test_two_nodes_by_torchrun_are_the_same_run(
    nodes: tuple[Node, Node], undisturbed: dict[str, Any]
) -> None:
    """Torchrun wants to be told its own address, where no name service knows it."""
    for node, address in zip(nodes, ADDRESSES, strict=True):
        options = ("--nnodes", "2", "--nproc-per-node", "1", "--rdzv-backend", "c10d")
        where = ("--rdzv-endpoint", f"{ADDRESSES[0]}:29471", "--local-addr", address)
        conf = f"{QUICK},is_host={int(address == ADDRESSES[0])}"
        command = ("-m", "ampctl", "train", "recipe.yaml", "--run-dir", "d")
        argv = ("-m", "torch.distributed.run", *options, *where, "--rdzv-conf", conf, *command)
        node.start(*argv, TORCH_CPP_LOG_LEVEL="ERROR")
    for node in nodes:
        code, said = node.wait()
        assert code == 0, said
    check_is_the_undisturbed_run(nodes, undisturbed)


def test_an_error_is_told_where_it_happened_and_the_other_node_ends_with_its_code(
    nodes: tuple[Node, Node],
) -> None:
    first, second = both(nodes, "task.fails='1'")
    assert second[0] == 1
    assert second[1].startswith("error: rank 1 failed\nTraceback (most recent call last):\n")
    assert second[1].endswith("KeyError: 'a mistake of mine'\n")
    assert first[0] == 1
    assert first[1].startswith("error: the job ended because of node 1 (")
    assert first[1].endswith("where all is told: KeyError: 'a mistake of mine'\n")
    assert first[1].count("\n") == 1


@pytest.mark.slow
def test_a_signal_to_one_launcher_stops_both_nodes_with_one_checkpoint(
    nodes: tuple[Node, Node],
) -> None:
    for node in nodes:
        node.start(*line("task.delay_s=0.3", "checkpoint.every_steps=100"))
    nodes[1].until(lambda: any(e["event"] == "train" for e in read_events(Path("d"))))
    nodes[1].send(signal.SIGTERM)
    told = [node.wait() for node in nodes]
    assert [code for code, _ in told] == [75, 75]
    step = last(Path("d"))["progress"]["step"]
    for _, said in told:
        assert said == (
            f"error: SIGTERM received at step {step}, which is saved: "
            "`ampctl resume d ...` goes on\n"
        )
    assert len(list(Path("d/checkpoints").glob("step-*.pt"))) == 1


@pytest.mark.slow
def test_a_node_that_is_lost_ends_the_job_with_5_where_no_restart_is_left(
    nodes: tuple[Node, Node],
) -> None:
    for node in nodes:
        node.start(*line("task.delay_s=0.3"))
    nodes[0].until(lambda: any(e["event"] == "train" for e in read_events(Path("d"))))
    nodes[1].kill()
    code, said = nodes[0].wait()
    assert code == 5, said
    assert said.startswith("error: node 1 is gone, or cut off: ")
    assert "Traceback" not in said


@pytest.mark.slow
@pytest.mark.parametrize(("at", "how"), [(0, "kill"), (1, "kill"), (0, "cable")])
def test_one_node_lost_and_the_other_goes_on_until_it_comes_back(
    at: int, how: str, nodes: tuple[Node, Node]
) -> None:
    """They meet at the node that stays; rank 0 is on it, or on the one that is lost."""
    stays, leaves = nodes[at], nodes[1 - at]
    options = ("train.max_epochs=null", "train.max_steps=200", "amp.dtype=float32")
    elastic = line("--max-restarts", "3", *options, "task.delay_s=0.3", at=at, nnodes="1:2")
    if how == "cable":
        elastic.append("distributed.timeout_minutes=0.3")
    for node in nodes:
        node.start(*elastic)

    def of_size(size: int) -> list[dict[str, Any]]:
        events = [e for e in read_events(Path("d")) if "world_size" in e]
        return [e for e in events[-1:] if e["world_size"] == size]

    def trained(size: int, steps: int = 3) -> bool:
        """Whether so many steps have been taken on so many ranks."""
        return any(read_events(Path("d"))[-1]["step"] >= e["step"] + steps for e in of_size(size))

    stays.until(lambda: trained(2))
    if how == "cable":
        ip("-n", leaves.name, "link", "set", leaves.cable, "down")
    else:
        leaves.kill()
    stays.until(lambda: trained(1))
    if how == "cable":  # it comes back by itself
        ip("-n", leaves.name, "link", "set", leaves.cable, "up")
    else:
        leaves.start(*elastic)
    stays.until(lambda: trained(2))
    Path("go").touch()
    for node in nodes:
        code, said = node.wait()
        assert code == 0, said
    told = stays.said()
    assert "nodes: 1, and not 2 any more; all ranks start anew" in told
    assert "nodes: 2, and not 1 any more; all ranks start anew" in told
    starts = [(e["event"], e["world_size"]) for e in read_events(Path("d")) if "world_size" in e]
    assert starts == [("start", 2), ("resume", 1), ("resume", 2)]
    # No sample was left out or taken twice: it is the run of one process, but for rounding.
    whole = one("whole", *options)
    for name, value in whole["model"].items():
        torch.testing.assert_close(last(Path("d"))["model"][name], value, rtol=1e-3, atol=1e-3)
    losses = [{e["step"]: e["loss"] for e in events(run, "train")} for run in ("d", "whole")]
    assert losses[0].keys() == losses[1].keys() == set(range(1, 201))
    for step, loss in losses[1].items():
        assert losses[0][step] == pytest.approx(loss, rel=1e-3), step
