"""Time a step of ampctl against the loop by hand of ``tests/reference_loop.py``, in turn.

    python scripts/bench_step.py [--rounds 7] [--steps 600] [--json FILE]
    python scripts/bench_step.py --startup [--rounds 7]
    python scripts/bench_step.py --numerics [--rounds 7] [--json FILE]

A 64-128-10 MLP, batch 64, fused AdamW, clipping at 1.0, one thread; the loop by hand reads a
``DataLoader`` over a ``TensorDataset``. ampctl runs whole: progress, logging and metrics are on.
``item by item`` reads the same tensors through ``__getitem__``, ``batched`` is a TensorDataset,
which ampctl reads with one gather a batch. A ratio below 1 means that ampctl is faster.
``--startup`` compares the peak memory of a whole run, and what ``ampctl --help`` takes longer than
``python -c pass``.
``--numerics`` is the cost of the float16 figures (``underflow``, ``headroom``) at the default log
interval: a 10.5 M parameter MLP, batch 256, measured every tenth step against never, in turn; and,
since that difference drowns in noise, the time of the one function over that of ten steps. It is
the processor's time, which other programs touch less than the clock's.
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import io
import json
import math
import statistics
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path

import torch
from torch import Tensor, nn
from torch.nn import functional as F
from torch.utils.data import DataLoader, Dataset, TensorDataset

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT / "tests"), str(ROOT / "scripts")]

from reference_loop import train as train_by_hand  # noqa: E402

SAMPLES, BATCH, WARM_UP = 8192, 64, 50
DTYPES = ("float32", "bfloat16", "float16")


def tensors() -> TensorDataset:
    """Return the data, the same each time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(SAMPLES, 64, generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (SAMPLES,), generator=generator))


class ItemByItem(Dataset[tuple[Tensor, Tensor]]):
    """The same data, as a dataset that can only be read one sample at a time."""

    def __init__(self) -> None:
        self.x, self.y = tensors().tensors

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return self.x[index], self.y[index]


RECIPE = """
name: bench
model: {{_target_: ampctl.models.MLP, in_features: 64, hidden: [128], num_classes: 10}}
task: {{_target_: ampctl.tasks.Classification}}
data: {{train: {{_target_: bench_step.{dataset}}}, batch_size: 64}}
optimizer: {{_target_: torch.optim.AdamW, lr: 1e-3}}
scheduler: {{_target_: ampctl.schedules.Cosine}}
amp: {{dtype: {dtype}, clip_norm: 1.0}}
train: {{max_steps: {steps}, device: cpu}}
checkpoint: {{every_steps: 1000000}}
"""


@contextlib.contextmanager
def silent() -> Iterator[None]:
    """Keep a run off the screen, but for warnings that no run before it has told."""
    told = io.StringIO()
    with contextlib.redirect_stdout(io.StringIO()), contextlib.redirect_stderr(told):
        yield
    tell_once(told.getvalue())


@functools.cache
def tell_once(text: str) -> None:
    """Print a text to stderr the first time that it comes."""
    sys.stderr.write(text)


def by_ampctl(dtype: str, dataset: str, steps: int) -> float:
    """Return microseconds a step, read from the times in ``metrics.jsonl``."""
    # Imported here, so that the process of the loop by hand holds nothing of ampctl.
    from ampctl.recipe.load import parse_recipe
    from ampctl.run import worker
    from ampctl.track.metrics import read_metrics

    loaded = parse_recipe(
        RECIPE.format(dtype=dtype, dataset=dataset, steps=steps + WARM_UP), where="bench"
    )
    with tempfile.TemporaryDirectory() as folder, silent():
        run_dir = Path(folder) / "run"
        worker.train(loaded, run_dir=run_dir, resume=False, quiet=False)
        times = {
            e["step"]: e["time"]
            for e in read_metrics(run_dir / "metrics.jsonl")
            if e["event"] == "train"
        }
    return (times[steps + WARM_UP] - times[WARM_UP]) / steps * 1e6


def by_hand(dtype: str, steps: int) -> float:
    """Return microseconds a step of the loop by hand."""
    torch.manual_seed(0)
    model = nn.Sequential(nn.Linear(64, 128), nn.ReLU(), nn.Linear(128, 10))
    loader = DataLoader(tensors(), batch_size=BATCH, shuffle=True)
    marks: list[float] = []

    def windows() -> Iterator[list[tuple[Tensor, Tensor]]]:
        done = 0
        while True:
            for batch in loader:
                if done in (WARM_UP, steps + WARM_UP):
                    marks.append(time.perf_counter())
                if done == steps + WARM_UP:
                    return
                done += 1
                yield [batch]

    train_by_hand(
        model,
        windows(),
        F.cross_entropy,
        torch.optim.AdamW(model.parameters(), lr=1e-3, fused=True),
        dtype=getattr(torch, dtype),
        clip_norm=1.0,
        factor=lambda update: 0.5 * (1 + math.cos(math.pi * update / (steps + WARM_UP))),
        log_every=10,
    )
    return (marks[1] - marks[0]) / steps * 1e6


HAND = """
import resource, sys
sys.path[:0] = [{tests!r}, {scripts!r}]
import torch
torch.set_num_threads(1)
import bench_step
bench_step.by_hand("bfloat16", 300)
"""
AMPCTL = """
import resource, sys
sys.path[:0] = [{tests!r}, {scripts!r}]
import torch
torch.set_num_threads(1)
import bench_step
bench_step.by_ampctl("bfloat16", "tensors", 300)
"""
PEAK = "print(resource.getrusage(resource.RUSAGE_SELF).ru_maxrss / 1024)"


def peak_memory(program: str) -> float:
    """Return the peak memory of a fresh process, in MiB."""
    paths = {"tests": str(ROOT / "tests"), "scripts": str(ROOT / "scripts")}
    command = [sys.executable, "-c", program.format(**paths) + PEAK]
    return float(subprocess.run(command, check=True, capture_output=True, text=True).stdout)


def seconds(*command: str) -> float:
    """Return how long a command takes, the shortest of three."""
    times = []
    for _ in range(3):
        begin = time.perf_counter()
        subprocess.run(command, check=True, capture_output=True)
        times.append(time.perf_counter() - begin)
    return min(times)


def startup(rounds: int) -> None:
    """Print the comparison of start-up and memory."""
    memory = [(peak_memory(HAND), peak_memory(AMPCTL)) for _ in range(rounds)]
    hand, ours = (statistics.median(column) for column in zip(*memory, strict=True))
    ratio = statistics.median(b / a for a, b in memory)
    print(f"peak memory: by hand {hand:.0f} MiB, ampctl {ours:.0f} MiB, ratio {ratio:.3f}")
    extra = statistics.median(
        seconds(sys.executable, "-m", "ampctl", "--help") - seconds(sys.executable, "-c", "pass")
        for _ in range(rounds)
    )
    print(f"ampctl --help: {extra:.2f} s more than python -c pass")


NUMERICS = """
name: numerics
model: {_target_: ampctl.models.MLP, in_features: 512, hidden: [2048, 2048, 2048], num_classes: 512}
task: {_target_: ampctl.tasks.Classification}
data: {train: {_target_: bench_step.tensors}, batch_size: 256}
optimizer: {_target_: torch.optim.AdamW, lr: 1e-4}
amp: {dtype: float16, clip_norm: 1.0}
train: {max_steps: 1000, device: cpu}
"""
LOG_INTERVAL, NUMERICS_STEPS = 10, 20


def numerics(rounds: int) -> dict[str, float]:
    """Print and return what measuring every tenth step costs, and what the figures alone cost."""
    from ampctl.amp import gradients
    from ampctl.builder.job import build_job
    from ampctl.engine.step import train_step
    from ampctl.recipe.load import parse_recipe

    state = build_job(parse_recipe(NUMERICS, where="numerics")).state
    window = [(torch.randn(256, 512), torch.randint(0, 512, (256,)))]

    def step_ms(interval: int) -> float:
        begin = time.process_time()
        for step in range(1, NUMERICS_STEPS + 1):
            train_step(state, window, measure=step % interval == 0)
        return (time.process_time() - begin) / NUMERICS_STEPS * 1e3

    def figures_ms() -> float:
        groups = gradients.gather(state.parameters)
        begin = time.process_time()
        gradients.float16_range(groups)
        return (time.process_time() - begin) * 1e3

    step_ms(LOG_INTERVAL)  # warms up
    figures_ms()
    found = [
        (step_ms(NUMERICS_STEPS + 1), step_ms(LOG_INTERVAL), figures_ms()) for _ in range(rounds)
    ]
    never, measured, figures = (statistics.median(column) for column in zip(*found, strict=True))
    ratios = sorted(b / a for a, b, _ in found)
    row = {
        "parameters": sum(p.numel() for p in state.parameters),
        "never_ms": never,
        "measured_ms": measured,
        "ratio": statistics.median(ratios),
        "figures_ms": figures,
        "share": figures / (LOG_INTERVAL * never),
    }
    print(
        f"{row['parameters'] / 1e6:.1f} M parameters, float16: {never:.1f} ms a step unmeasured, "
        f"{measured:.1f} ms measured every {LOG_INTERVAL}; ratio {row['ratio']:.3f} "
        f"({ratios[0]:.3f}..{ratios[-1]:.3f})\n"
        f"float16_range alone: {figures:.1f} ms, {row['share']:.2%} of {LOG_INTERVAL} steps"
    )
    return row


def main() -> None:
    """Print a table of medians and of the median ratio of the rounds."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=7)
    parser.add_argument("--steps", type=int, default=600)
    parser.add_argument("--json", type=Path)
    parser.add_argument("--startup", action="store_true")
    parser.add_argument("--numerics", action="store_true")
    options = parser.parse_args()
    if options.startup:
        startup(options.rounds)
        return
    torch.set_num_threads(1)
    if options.numerics:
        row = numerics(options.rounds)
        if options.json:
            options.json.write_text(json.dumps([row], indent=1) + "\n")
        return
    rows = []
    print(f"{'dtype':<10}{'data':<14}{'by hand us':>12}{'ampctl us':>12}{'ratio':>8}  min..max")
    for dtype in DTYPES:
        for label, dataset in (("item by item", "ItemByItem"), ("batched", "tensors")):
            pairs = [
                (by_hand(dtype, options.steps), by_ampctl(dtype, dataset, options.steps))
                for _ in range(options.rounds)
            ]
            ratios = sorted(ours / theirs for theirs, ours in pairs)
            hand, ours = (statistics.median(column) for column in zip(*pairs, strict=True))
            ratio = statistics.median(ratios)
            rows.append(
                {"dtype": dtype, "data": label, "hand_us": hand, "ampctl_us": ours, "ratio": ratio}
            )
            print(
                f"{dtype:<10}{label:<14}{hand:>12.0f}{ours:>12.0f}{ratio:>8.2f}"
                f"  {ratios[0]:.2f}..{ratios[-1]:.2f}",
                flush=True,
            )
    if options.json:
        options.json.write_text(json.dumps(rows, indent=1) + "\n")


if __name__ == "__main__":
    main()
