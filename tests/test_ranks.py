"""Two processes over gloo: one step in DDP, one verdict, one loss scale."""

from __future__ import annotations

import copy
import math
import os
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch
from states import DTYPES, Net, batches, make_state
from torch import Tensor, multiprocessing, nn
from torch import distributed as dist
from torch.nn.parallel import DistributedDataParallel

from ampctl.distributed import ranks
from ampctl.distributed.ranks import ALONE, Ranks
from ampctl.engine.state import TrainState
from ampctl.engine.step import settle, train_step
from ampctl.errors import NumericsError
from ampctl.recipe.schema import AmpConfig
from ampctl.tasks.task import as_task

SIZE = 2


def each_rank(work: Callable[[int], None], folder: Path) -> None:
    """Run a function of this module on two ranks; an exception in one fails the test."""
    multiprocessing.spawn(_rank, args=(work, str(folder / "store")), nprocs=SIZE)


def _rank(rank: int, work: Callable[[int], None], store: str) -> None:
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)
    dist.init_process_group("gloo", init_method=f"file://{store}", rank=rank, world_size=SIZE)
    work(rank)
    dist.barrier()
    dist.destroy_process_group()
    os._exit(0)  # native threads can abort the interpreter's own way out


def in_ddp(rank: int, dtype: str, *, ignored: str = "", shares: bool = False, **amp: Any) -> Any:
    """The same state on every rank, its model in DDP."""
    torch.manual_seed(0)
    model = Net()
    state = make_state(
        model,
        torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True),
        dtype,
        amp=AmpConfig(init_scale=256.0, **amp),
    )
    if ignored:
        model._ddp_params_and_buffers_to_ignore = [ignored]  # as DDP's own helper sets it
    wrapped = DistributedDataParallel(model)
    return replace(state, model=wrapped, ranks=Ranks(rank, SIZE, shares_verdict=shares))


def everywhere(value: Tensor) -> list[Tensor]:
    every = [torch.empty_like(value) for _ in range(SIZE)]
    dist.all_gather(every, value)
    return every


def weights(state: TrainState) -> Tensor:
    return torch.cat([p.detach().reshape(-1) for p in state.bare.parameters()])


def by_hand(rank: int, dtype: str, steps: int) -> Tensor:
    """The DDP section of the AMP page: one process per device, autocast and scaler in each."""
    kind = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    torch.manual_seed(0)
    model = Net()
    wrapped = DistributedDataParallel(model)
    optimizer = torch.optim.AdamW(model.parameters(), lr=1e-2, fused=True)
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == "float16")
    for step in range(steps):
        ((x, y),) = batches(1, seed=10 * step + rank)
        optimizer.zero_grad()
        with torch.autocast("cpu", dtype=kind, enabled=kind is not None):
            loss = nn.functional.cross_entropy(wrapped(x).float(), y)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), 1.0)
        scaler.step(optimizer)
        scaler.update()
    return torch.cat([p.detach().reshape(-1) for p in model.parameters()])


def _parity(rank: int) -> None:
    for dtype in DTYPES:
        state = in_ddp(rank, dtype, clip_norm=1.0)
        for step in range(4):
            train_step(state, batches(1, seed=10 * step + rank), measure=True)
        report = settle(state)
        assert report is not None
        assert not report.skipped
        assert torch.equal(weights(state), by_hand(rank, dtype, 4)), dtype
        first, second = everywhere(weights(state))
        assert torch.equal(first, second)


def test_parity_with_ddp_by_hand(tmp_path: Path) -> None:
    each_rank(_parity, tmp_path)


def _verdicts(rank: int) -> None:
    class Overflow:
        """The gradient of the parameter that DDP ignores is infinite on one rank."""

        def loss(self, model: Any, batch: Any) -> Tensor:
            factor = math.inf if rank == 1 else 1.0
            model.module.first.bias.register_hook(lambda gradient: gradient * factor)
            return nn.functional.cross_entropy(model(batch[0]).float(), batch[1])

    for shares in (True, False):
        state = in_ddp(rank, "float16", ignored="first.bias", shares=shares)
        state = replace(state, task=as_task(Overflow()))
        train_step(state, batches(1))
        report = settle(state)
        assert report is not None
        assert report.skipped == (shares or rank == 1)
        if shares:
            state.require_agreement()
            assert report.scale_after == 128.0
            train_step(state, batches(1), measure=True)
            report = settle(state)
            assert report is not None
            assert not report.scale_differs
        else:  # what happens to those who do not share: the next step that is logged tells
            train_step(state, batches(1), measure=True)
            report = settle(state)
            assert report is not None
            assert report.scale_differs
            with pytest.raises(NumericsError, match=r"256 on rank 0, 64 on rank 1"):
                state.require_agreement()


def test_dd3_a_gradient_that_ddp_does_not_reduce_is_skipped_on_every_rank(tmp_path: Path) -> None:
    each_rank(_verdicts, tmp_path)


def _scales(rank: int) -> None:
    amp = {"growth_interval": 2}
    state = in_ddp(rank, "float16", **amp)
    other = copy.deepcopy(state.scaler.state_dict()) | {"scale": 64.0, "_growth_tracker": 1}
    if rank == 1:
        state.scaler.load_state_dict(other, lambda _: None)
    state.agree()
    assert [float(value) for value in state.scaler.tensors()] == [256.0, 0.0, 1.0]
    assert state.scale_on_host == 256.0
    state.require_agreement()


def test_dd1_every_rank_starts_with_the_scale_of_the_first(tmp_path: Path) -> None:
    each_rank(_scales, tmp_path)


def test_one_process_makes_no_collective() -> None:
    found = torch.ones(())
    ALONE.any_(found)
    ALONE.follow_first_([found])
    ALONE.require_equal("the loss scale", 1.0)
    assert not dist.is_initialized()


def test_what_native_code_prints_while_ranks_meet_is_no_output(
    capfd: pytest.CaptureFixture[str],
) -> None:
    with ranks._native_words_to_stderr():
        os.write(1, b"connected\n")
    os.write(1, b"figures\n")
    assert capfd.readouterr() == ("figures\n", "connected\n")


def test_c9_another_number_of_ranks_is_told_by_what_the_checkpoint_holds() -> None:
    """Generators say how many ranks a file knows of, and not how many have saved it."""
    model = nn.Linear(2, 2)
    state = make_state(model, torch.optim.SGD(model.parameters(), lr=0.1), "float32")
    saved = state.state_dict()
    said: list[str] = []
    state.load_state_dict({**saved, "rng": saved["rng"] * 2}, notify=said.append)
    (told,) = said
    assert told.startswith("the checkpoint holds the generators of 2 ranks, and the run is resumed")
    state.load_state_dict(saved, notify=said.append)
    assert len(said) == 1
