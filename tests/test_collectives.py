"""What the ranks of a job tell each other, how they join it, and that one alone asks nobody."""

from __future__ import annotations

import os
from datetime import timedelta
from pathlib import Path
from typing import Any

import pytest
import torch
from test_ranks import SIZE, each_rank
from torch import distributed as dist
from torch import nn

from ampctl.distributed import ranks
from ampctl.distributed.ranks import ALONE, Ranks, Writers, from_environment, joined
from ampctl.errors import MachineError, NumericsError

CPU = torch.device("cpu")


def numbers(*values: float) -> torch.Tensor:
    return torch.tensor(values)


def _sums(rank: int) -> None:
    me, here = Ranks(rank, SIZE, shares_verdict=True), float(rank)
    for each, expected in ((me, 1.0), (Ranks(rank, SIZE), here)):
        found = torch.tensor(here)
        each.any_(found)
        assert found == expected
    for shards, norm, share, largest in ((True, 5.0, 0.75, 8.0), (False, 3 + here, here, 7 + here)):
        each = Ranks(rank, SIZE, shards=shards)
        values = [torch.tensor(value) for value in (3 + here, here, 7 + here)]
        each.norm_(values[0])
        each.share_and_largest_(values[1], 2 + 4 * rank, values[2])
        assert [float(value) for value in values] == [norm, share, largest]
    for alike, differs in ((64.0, 0.0), (1e-20, 0.0), (64.0 + here, 1.0), (here, 1.0), (0.0, 0.0)):
        value = torch.tensor(2 * here)
        assert me.mean_(value, alike=torch.tensor(alike)) == differs
        assert value == 1
    assert me.total(1.5 + rank) == me.total_later(1.5 + rank)() == 4.0
    assert me.every(rank, 7) == [[0, 7], [1, 7]]
    assert me.largest(rank, -rank) == [1, 0]
    me.wait()
    me.require_equal("it", 3.0)
    with pytest.raises(NumericsError, match="it differs between ranks: 0 on rank 0, 1 on rank 1"):
        me.require_equal("it", here)
    tensors = [numbers(here, 2.0), numbers(here)]
    me.follow_first_(tensors)
    assert [tensor.tolist() for tensor in tensors] == [[0, 2], [0]]
    for each in (me, Writers(me, 1, CPU)):
        assert each.gather({"at": rank}) == [{"at": 0}, {"at": 1}]
        assert each.of_first({"at": rank}) == {"at": 0}


def _gradients(rank: int) -> None:
    """Of every rank, of one, of the other, of none, and of another dtype, in buckets of four."""
    ranks._BUCKET_ELEMENTS = 4
    shapes = ((2, 2), (3,), (1,), (2,), ())
    held = ((0, 1), (0,), (1,), (), (0, 1))
    parameters = [nn.Parameter(torch.zeros(shape)) for shape in shapes]
    parameters[-1] = nn.Parameter(torch.zeros((), dtype=torch.float64))
    for parameter, by in zip(parameters, held, strict=True):
        if rank in by:
            parameter.grad = torch.full_like(parameter, 2.0 + 2 * rank)
    sent, reduce = [], dist.all_reduce
    dist.all_reduce = lambda value, **how: sent.append(value.numel()) or reduce(value, **how)
    Ranks(rank, SIZE).mean_gradients_(parameters)
    found = [None if p.grad is None else p.grad.tolist() for p in parameters]
    assert found == [[[3, 3], [3, 3]], [1, 1, 1], [2], None, 3]
    assert sent == [len(parameters), 4, 4, 1]


def _both(rank: int) -> None:
    _sums(rank)
    _gradients(rank)


def test_ranks_agree_on_what_they_tell_each_other_and_on_the_mean_of_gradients(
    tmp_path: Path,
) -> None:
    each_rank(_both, tmp_path)


def test_one_process_alone_asks_nobody() -> None:
    found, norm, value = torch.tensor(1.0), torch.tensor(3.0), torch.tensor(2.0)
    alone = Ranks(shares_verdict=True)
    alone.any_(found)
    alone.norm_(norm)
    alone.follow_first_([value])
    alone.wait()
    alone.require_equal("it", 3.0)
    assert (found, norm, value) == (1, 3, 2)
    assert alone.mean_(value, alike=value) is None
    assert alone.total(1.5) == alone.total_later(1.5)() == 1.5
    assert (alone.every(1, 2), alone.largest(1, 2)) == ([[1, 2]], [1, 2])
    assert (alone.gather("a"), alone.of_first("a")) == (["a"], "a")


JOB = {
    "WORLD_SIZE": "4",
    "RANK": "3",
    "LOCAL_RANK": "1",
    "MASTER_ADDR": "localhost",
    "MASTER_PORT": "1",
}


def job(monkeypatch: pytest.MonkeyPatch, **changes: str) -> None:
    for name, value in (JOB | changes).items():
        monkeypatch.setenv(name, value)


def test_the_place_in_a_job_is_read_from_what_the_launcher_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    assert from_environment() is ALONE
    job(monkeypatch)
    assert from_environment() == Ranks(3, 4, 1)
    assert [Ranks(rank, 4).is_first for rank in (0, 1)] == [True, False]
    job(monkeypatch, WORLD_SIZE="2", RANK="0", LOCAL_RANK="0")
    assert from_environment() == Ranks(0, 2, 0)
    job(monkeypatch, RANK="", MASTER_PORT="")
    with pytest.raises(MachineError, match="is 4 in the environment, and RANK, MASTER_PORT not"):
        from_environment()
    job(monkeypatch, RANK="first")
    with pytest.raises(MachineError, match="RANK is 'first' in the environment"):
        from_environment()
    for size in ("0", "1"):
        job(monkeypatch, WORLD_SIZE=size, RANK="")
        assert from_environment() is ALONE


@pytest.mark.parametrize(
    ("size", "on_machine", "number", "option"),
    [
        (1, "", 1, ""),
        (1, "3", 1, ""),
        (4, "", 4, " --nproc-per-node 4"),
        (4, "4", 4, " --nproc-per-node 4"),
        (4, "2", 2, " ..."),
    ],
)
def test_the_option_that_starts_as_many_again_is_of_one_node_alone(
    monkeypatch: pytest.MonkeyPatch, size: int, on_machine: str, number: int, option: str
) -> None:
    monkeypatch.setenv("LOCAL_WORLD_SIZE", on_machine)
    some = Ranks(0, size)
    assert (some.num_on_machine, some.option) == (number, option)


def test_what_goes_wrong_at_the_meeting_is_a_fault_of_the_machine(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    job(monkeypatch)
    words = r"rank 3 of 4 cannot join the others at localhost:1\. .*, 2, is how .* \(no port\)"
    for error in (dist.DistStoreError("no port"), RuntimeError("no port"), ValueError("no port")):

        def failing(*_: Any, error: Exception = error, **__: Any) -> Any:
            raise error

        monkeypatch.setattr(ranks, "rendezvous", failing)
        with (
            pytest.raises(MachineError, match=words),
            joined(Ranks(3, 4), backend="auto", device=CPU, minutes=2),
        ):
            pytest.fail("it has joined")


@pytest.fixture
def met(monkeypatch: pytest.MonkeyPatch) -> list[dict[str, Any]]:
    """What process groups are opened with, in a job whose store is there."""
    opened: list[dict[str, Any]] = []
    job(monkeypatch)
    monkeypatch.setattr(ranks, "rendezvous", lambda *_, **__: iter([(dist.HashStore(), 0, 1)]))
    monkeypatch.setattr(ranks, "meet", lambda store, *_, **__: ranks.Rendezvous(store, "", 1))
    monkeypatch.setattr(
        dist, "init_process_group", lambda kind, **how: opened.append({"kind": kind, **how})
    )
    monkeypatch.setattr(dist, "destroy_process_group", lambda: opened.append({}))
    return opened


@pytest.mark.parametrize(
    ("backend", "device", "kind"),
    [
        ("auto", "cpu", "gloo"),
        ("auto", "cuda:1", "cpu:gloo,cuda:nccl"),
        ("auto", "xpu:0", "cpu:gloo,xpu:xccl"),
        ("gloo", "cuda:1", "gloo"),
    ],
)
def test_the_host_speaks_gloo_and_nccl_s_watchdog_comes_after_ours(
    met: list[dict[str, Any]], backend: str, device: str, kind: str
) -> None:
    with joined(Ranks(3, 4), backend=backend, device=torch.device(device), minutes=2):
        (how,) = met
    is_gloo = kind == "gloo"
    assert (how["kind"], how["rank"], how["world_size"]) == (kind, 3, 4)
    assert how["timeout"] == timedelta(minutes=2, seconds=0 if is_gloo else 30)
    assert how["device_id"] == (None if is_gloo else torch.device(device))
    assert met[1:] == [{}]  # and it was left


def test_one_process_that_may_be_started_anew_meets_and_opens_no_group(
    met: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch
) -> None:
    with joined(ALONE, backend="auto", device=CPU, minutes=2) as meeting:
        assert meeting is None
    monkeypatch.setenv("TORCHELASTIC_USE_AGENT_STORE", "True")
    with joined(ALONE, backend="auto", device=CPU, minutes=2) as meeting:
        assert meeting is not None
    assert met == []


@pytest.mark.parametrize(
    ("on_machine", "named", "interface"),
    [("2", "", "eth7"), ("2", "own0", "own0"), ("4", "", None), ("", "", None)],
)
def test_gloo_takes_the_interface_that_leads_to_other_nodes_unless_one_is_named(
    met: list[dict[str, Any]],
    monkeypatch: pytest.MonkeyPatch,
    on_machine: str,
    named: str,
    interface: str | None,
) -> None:
    monkeypatch.delenv("GLOO_SOCKET_IFNAME", raising=False)
    monkeypatch.setenv("LOCAL_WORLD_SIZE", on_machine)
    if named:
        monkeypatch.setenv("GLOO_SOCKET_IFNAME", named)
    monkeypatch.setattr(ranks, "towards", lambda host, port: f"{host}:{port}")
    monkeypatch.setattr(ranks, "interface_of", {"localhost:1": "eth7"}.get)
    with joined(Ranks(3, 4), backend="gloo", device=CPU, minutes=2):
        assert os.environ.get("GLOO_SOCKET_IFNAME") == interface


def test_native_words_while_a_group_is_opened_stay_out_of_the_output(
    met: list[dict[str, Any]], monkeypatch: pytest.MonkeyPatch, capfd: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(dist, "init_process_group", lambda *_, **__: os.write(1, b"connected"))
    with joined(Ranks(3, 4), backend="gloo", device=CPU, minutes=2):
        os.write(1, b"output")
    assert capfd.readouterr() == ("output", "connected")
