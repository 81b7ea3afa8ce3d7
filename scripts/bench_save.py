"""Measure what a checkpoint costs training: how long it stands still, and its pace afterwards.

    python scripts/bench_save.py [--rounds 3] [--steps 40] [--every 10] [--width 2048] [--depth 9]
        [--batch 64] [--device cpu] [--json FILE]

The same recipe is trained with ``checkpoint.asynchronous: true`` and ``false``, in turn, on one
thread; as given the state (weights and two moments of AdamW) has 400 MB. ``stall`` is how long
training stood still for a save, as ``metrics.jsonl`` tells it, the first save of a run (which
makes the room for the copies) by itself; its ratio is to the stall of a synchronous save.
``pace`` is the time of a step while no file is being written over that of a step while one is:
1 means that a save under way slows nothing down. Medians over all saves, and over all steps.
"""

from __future__ import annotations

import argparse
import contextlib
import io
import json
import math
import statistics
import sys
import tempfile
import time
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils.data import TensorDataset

ROOT = Path(__file__).resolve().parents[1]
sys.path[:0] = [str(ROOT), str(ROOT / "scripts")]

from ampctl.tasks import Classification  # noqa: E402

RECIPE = """
name: bench
model: {{_target_: ampctl.models.MLP, in_features: 64, hidden: {hidden}, num_classes: 10}}
task: {{_target_: bench_save.Watched, run_dir: {run_dir}}}
data: {{train: {{_target_: bench_save.tensors, samples: {samples}}}, batch_size: {batch}}}
optimizer: {{_target_: torch.optim.AdamW, lr: 1e-4}}
amp: {{dtype: float32}}
train: {{max_steps: {steps}, device: {device}}}
checkpoint: {{every_steps: {every}, keep_last: 1, keep_best: 0, asynchronous: {asynchronous}}}
"""


def tensors(samples: int) -> TensorDataset:
    """Return random data, the same each time."""
    generator = torch.Generator().manual_seed(0)
    x = torch.randn(samples, 64, generator=generator)
    return TensorDataset(x, torch.randint(0, 10, (samples,), generator=generator))


class Watched(Classification):
    """The task; notes at each step what time it is and whether a file is being written."""

    last: Watched

    def __init__(self, run_dir: str) -> None:
        super().__init__()
        self._folder = Path(run_dir) / "checkpoints"
        self.marks: list[tuple[float, bool]] = []
        Watched.last = self

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Any]:
        """Return the loss of a batch."""
        writes = any(self._folder.glob(".step-*.tmp"))
        self.marks.append((time.perf_counter(), writes))
        return super().loss(model, batch)

    def step_ms(self, *, writing: bool) -> list[float]:
        """Return what each step took that began and ended while a file was written, or not."""
        pairs = zip(self.marks, self.marks[1:], strict=False)
        return [(b - a) * 1e3 for (a, at_a), (b, at_b) in pairs if at_a == at_b == writing]


@dataclass
class Measured:
    """What one run has shown, in seconds and milliseconds."""

    bytes: int
    first_stall_s: float
    stalls_s: list[float]
    steps_ms: list[float]
    steps_while_writing_ms: list[float]


def measure(options: argparse.Namespace, *, asynchronous: bool) -> Measured:
    """Train once; return what the saves cost."""
    import bench_save  # not __main__: the recipe names it so

    from ampctl.recipe.load import parse_recipe
    from ampctl.run import worker
    from ampctl.track.metrics import read_metrics

    with tempfile.TemporaryDirectory(dir=options.folder) as folder:
        run_dir = Path(folder) / "run"
        text = RECIPE.format(
            hidden=[options.width] * options.depth,
            run_dir=json.dumps(f"{run_dir}"),
            samples=options.batch * options.steps,
            batch=options.batch,
            steps=options.steps,
            every=options.every,
            device=options.device,
            asynchronous=str(asynchronous).lower(),
        )
        with contextlib.redirect_stdout(io.StringIO()):
            worker.train(
                parse_recipe(text, where="bench"), run_dir=run_dir, resume=False, quiet=True
            )
        saves = [e for e in read_metrics(run_dir / "metrics.jsonl") if e["event"] == "checkpoint"]
    seen = bench_save.Watched.last
    # The first steps make the optimizer's state; the last save has nothing beside it.
    return Measured(
        saves[0]["bytes"],
        saves[0]["seconds"],
        [save["seconds"] for save in saves[1:]],
        seen.step_ms(writing=False)[2:],
        seen.step_ms(writing=True),
    )


def summary(rounds: list[tuple[Measured, Measured]]) -> dict[str, float]:
    """Put together rounds of an asynchronous and a synchronous run each."""
    beside, instead = zip(*rounds, strict=True)
    stall = statistics.median(s for run in beside for s in run.stalls_s)
    standing = statistics.median(s for run in instead for s in run.stalls_s)
    normal = statistics.median(s for run in beside for s in run.steps_ms)
    during = [s for run in beside for s in run.steps_while_writing_ms]
    writing = statistics.median(during) if during else math.nan
    return {
        "state_mb": beside[0].bytes / 1e6,
        "stall_s": stall,
        "first_stall_s": statistics.median(run.first_stall_s for run in beside),
        "synchronous_s": standing,
        "stall_ratio": stall / standing,
        "first_stall_ratio": statistics.median(
            a.first_stall_s / b.first_stall_s for a, b in rounds
        ),
        "step_ms": normal,
        "step_while_writing_ms": writing,
        "pace": normal / writing,
        "steps_while_writing": len(during),
    }


def main() -> None:
    """Measure in turn; print and keep the outcome."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--steps", type=int, default=40)
    parser.add_argument("--every", type=int, default=10)
    parser.add_argument("--width", type=int, default=2048)
    parser.add_argument("--depth", type=int, default=9)
    parser.add_argument("--batch", type=int, default=64)
    parser.add_argument("--device", default="cpu")
    parser.add_argument("--folder", type=Path, help="where runs are kept meanwhile")
    parser.add_argument("--json", type=Path)
    options = parser.parse_args()
    if options.device == "cpu":
        torch.set_num_threads(1)
    rounds = []
    for number in range(options.rounds):
        pair = [measure(options, asynchronous=kind) for kind in (True, False)]
        rounds.append((pair[0], pair[1]))
        print(f"round {number + 1}: {told(summary(rounds[-1:]))}", flush=True)
    whole = summary(rounds)
    print(f"all: {told(whole)}")
    if options.json:
        runs = [[asdict(a), asdict(b)] for a, b in rounds]
        options.json.write_text(json.dumps({**whole, "rounds": runs}, indent=1) + "\n")


def told(figures: dict[str, float]) -> str:
    """Say figures in one line."""
    return (
        f"{figures['state_mb']:.0f} MB; stall {figures['stall_s']:.3f} s, the first "
        f"{figures['first_stall_s']:.3f} s, of a synchronous {figures['synchronous_s']:.3f} s: "
        f"{figures['stall_ratio']:.0%}, the first {figures['first_stall_ratio']:.0%}; a step "
        f"{figures['step_ms']:.0f} ms, while writing {figures['step_while_writing_ms']:.0f} ms "
        f"({figures['steps_while_writing']} steps): pace {figures['pace']:.2f}"
    )


if __name__ == "__main__":
    main()
