"""Time a step of ampctl on two ranks against a loop by hand on two ranks, in turn.

    python scripts/bench_ddp.py [--rounds 7] [--steps 400] [--width 128] [--json FILE]
        [--strategy ddp|fsdp]

Two processes on this machine, gloo between them, one thread each. The loop by hand is that of
``tests/reference_loop.py`` with a ``DistributedSampler``, around a ``DistributedDataParallel`` or
what ``fully_shard`` makes of the model, which has no blocks to gather one by one; the model,
optimizer, clipping and data are those of ``bench_step.py``, 64 samples a step over both
ranks. ampctl runs whole: progress, logging and metrics are on. ``item by item`` reads the tensors
through ``__getitem__``, ``batched`` is a TensorDataset, which ampctl reads with one gather a batch.
A ratio below 1 means that ampctl is faster. ``wall`` is the clock's; ``cpu`` is the time of both
processes on a processor, which other programs touch less, and which holds no waiting.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import os
import socket
import statistics
import sys
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch import distributed as dist
from torch import multiprocessing as mp
from torch.distributed.device_mesh import init_device_mesh
from torch.distributed.fsdp import fully_shard
from torch.nn import functional as F
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader, DistributedSampler

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "tests"), str(ROOT / "scripts")]

from bench_step import BATCH, DTYPES, WARM_UP, tensors  # noqa: E402
from reference_loop import train as train_by_hand  # noqa: E402

from ampctl.tasks import Classification  # noqa: E402

RANKS = 2
DATA = {"item by item": "ItemByItem", "batched": "tensors"}
WRAPS: dict[str, Callable[[nn.Module], nn.Module]] = {
    "ddp": DistributedDataParallel,
    "fsdp": lambda model: fully_shard(model, mesh=init_device_mesh("cpu", (RANKS,))),
}
"""How the model is spread over ranks by hand, by the name that the recipe has for it."""

RECIPE = """
name: bench
model: {{_target_: ampctl.models.MLP, in_features: 64, hidden: [{width}], num_classes: 10}}
task: {{_target_: bench_ddp.Marked, steps: {steps}}}
data: {{train: {{_target_: bench_step.{dataset}}}, batch_size: 64}}
optimizer: {{_target_: torch.optim.AdamW, lr: 1e-3}}
scheduler: {{_target_: ampctl.schedules.Cosine}}
amp: {{dtype: {dtype}, clip_norm: 1.0}}
train: {{max_steps: {all_steps}, device: cpu}}
checkpoint: {{every_steps: 1000000}}
distributed: {{strategy: {strategy}, backend: gloo}}
"""


class Marks:
    """The clock and the processor's time, when the steps that count begin and when they end."""

    def __init__(self, steps: int) -> None:
        self._places = (WARM_UP, WARM_UP + steps)
        self._steps = steps
        self._count = 0
        self._times: list[tuple[float, float]] = []

    def pass_by(self) -> None:
        """Note the times if this step is the first or the one after the last of those."""
        if self._count in self._places:
            self._times.append((time.perf_counter(), time.process_time()))
        self._count += 1

    def wall_and_cpu_us(self) -> tuple[float, float]:
        """Return microseconds a step."""
        begin, end = self._times
        wall, cpu = ((b - a) / self._steps * 1e6 for a, b in zip(begin, end, strict=True))
        return wall, cpu


class Marked(Classification):
    """The task, with a mark at each step."""

    last: Marks

    def __init__(self, steps: int) -> None:
        super().__init__()
        Marked.last = self.marks = Marks(steps)

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss of a batch."""
        self.marks.pass_by()
        return super().loss(model, batch)


def by_ampctl(
    rank: int, dtype: str, dataset: str, options: argparse.Namespace
) -> tuple[float, float]:
    """Train with ampctl in this rank; return microseconds a step, by clock and processor."""
    import bench_ddp  # not __main__: the recipe names it so

    from ampctl.recipe.load import parse_recipe
    from ampctl.run import worker

    text = RECIPE.format(
        dtype=dtype,
        dataset=dataset,
        width=options.width,
        steps=options.steps,
        all_steps=WARM_UP + options.steps + 1,
        strategy=options.strategy,
    )
    run_dir = Path(options.folder) / os.environ["MASTER_PORT"]  # the same on all ranks
    with contextlib.redirect_stdout(io.StringIO()):
        loaded = parse_recipe(text, where="bench")
        worker.train(loaded, run_dir=run_dir, resume=False, quiet=False)
    return bench_ddp.Marked.last.wall_and_cpu_us()


def by_hand(
    rank: int, dtype: str, dataset: str, options: argparse.Namespace
) -> tuple[float, float]:
    """Train by hand in this rank; return microseconds a step, by clock and processor."""
    dist.init_process_group("gloo")
    torch.manual_seed(0)
    width, last_step = options.width, WARM_UP + options.steps + 1
    model = WRAPS[options.strategy](
        nn.Sequential(nn.Linear(64, width), nn.ReLU(), nn.Linear(width, 10))
    )
    data = tensors()
    sampler: DistributedSampler[Any] = DistributedSampler(data, RANKS, rank)
    loader = DataLoader(data, batch_size=BATCH // RANKS, sampler=sampler)
    marks = Marks(options.steps)

    def windows() -> Iterator[list[tuple[Tensor, Tensor]]]:
        done, epoch = 0, 0
        while True:
            sampler.set_epoch(epoch)
            for batch in loader:
                if done == last_step:
                    return
                marks.pass_by()
                done += 1
                yield [batch]
            epoch += 1

    train_by_hand(
        model,
        windows(),
        F.cross_entropy,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        dtype=getattr(torch, dtype),
        clip_norm=1.0,
        factor=lambda update: 0.5 * (1 + math.cos(math.pi * update / last_step)),
        log_every=10,
    )
    dist.destroy_process_group()
    return marks.wall_and_cpu_us()


def _rank(
    rank: int, ports: list[int], options: argparse.Namespace, results: mp.SimpleQueue[Any]
) -> None:
    """Be a rank: run both in turn, and hand over the times of each."""
    torch.set_num_threads(1)
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{RANKS}"}
    os.environ["MASTER_ADDR"] = "127.0.0.1"
    for dtype in options.dtypes:
        for label, dataset in DATA.items():
            for each in range(options.rounds):
                pair = [by_hand, by_ampctl]
                for run in pair if each % 2 else reversed(pair):
                    os.environ["MASTER_PORT"] = f"{ports.pop()}"
                    wall, cpu = run(rank, dtype, dataset, options)
                    results.put((dtype, label, run.__name__, each, rank, wall, cpu))


def free_ports(count: int) -> list[int]:
    """Return ports that are free now: each run has one of its own."""
    with contextlib.ExitStack() as stack:
        servers = [stack.enter_context(socket.socket()) for _ in range(count)]
        for server in servers:
            server.bind(("127.0.0.1", 0))
        return [int(server.getsockname()[1]) for server in servers]


def measure(options: argparse.Namespace) -> list[dict[str, Any]]:
    """Run the ranks; return a row of medians for each dtype and way to read."""
    count = len(options.dtypes) * len(DATA) * options.rounds * 2
    results: mp.SimpleQueue[Any] = mp.get_context("spawn").SimpleQueue()
    ranks = mp.spawn(_rank, args=(free_ports(count), options, results), nprocs=RANKS, join=False)
    assert ranks is not None
    found: dict[tuple[str, str, str], dict[int, list[tuple[float, float]]]] = {}
    for _ in range(count * RANKS):
        while results.empty():
            if ranks.join(timeout=0.1) and results.empty():
                raise RuntimeError("the ranks ended before they had measured all")
        dtype, label, run, each, _, wall, cpu = results.get()
        found.setdefault((dtype, label, run), {}).setdefault(each, []).append((wall, cpu))
    while not ranks.join():
        pass
    return [_row(dtype, label, found) for dtype in options.dtypes for label in DATA]


def _row(dtype: str, label: str, found: dict[Any, Any]) -> dict[str, Any]:
    """Return the medians over rounds: the clock of the mean rank, the processor of all ranks."""
    row: dict[str, Any] = {"dtype": dtype, "data": label}
    rounds = {
        run: [found[dtype, label, run][each] for each in sorted(found[dtype, label, run])]
        for run in ("by_hand", "by_ampctl")
    }
    for place, name in enumerate(("wall", "cpu")):
        hand, ours = (
            [statistics.mean(times[place] for times in each) for each in rounds[run]]
            for run in ("by_hand", "by_ampctl")
        )
        ratios = sorted(b / a for a, b in zip(hand, ours, strict=True))
        row[f"hand_{name}_us"] = statistics.median(hand)
        row[f"ampctl_{name}_us"] = statistics.median(ours)
        row[f"{name}_ratio"] = row[f"ampctl_{name}_us"] / row[f"hand_{name}_us"]
        row[f"{name}_ratios"] = [ratios[0], ratios[-1]]
    return row


def main() -> None:
    """Print a table of medians, and of their ratios."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=400)
    parser.add_argument("--width", type=int, default=128, help="of the hidden layer")
    parser.add_argument("--dtypes", nargs="+", choices=DTYPES, default=DTYPES)
    parser.add_argument("--strategy", choices=sorted(WRAPS), default="ddp")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    with tempfile.TemporaryDirectory() as options.folder:
        rows = measure(options)
    print(
        f"{'dtype':<10}{'data':<14}{'by hand us':>12}{'ampctl us':>12}{'wall':>7}  min..max  "
        f"{'cpu':>7}  min..max"
    )
    for row in rows:
        parts = (
            f"{row[f'{name}_ratio']:>7.3f}  "
            f"{row[f'{name}_ratios'][0]:.2f}..{row[f'{name}_ratios'][1]:.2f}"
            for name in ("wall", "cpu")
        )
        print(
            f"{row['dtype']:<10}{row['data']:<14}{row['hand_wall_us']:>12.0f}"
            f"{row['ampctl_wall_us']:>12.0f}{'  '.join(parts)}"
        )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
