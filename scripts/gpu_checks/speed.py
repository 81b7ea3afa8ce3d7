"""Steps a second and peak memory of a ResNet-50 and a GPT of 124 M parameters, against plain torch.

The two sides take turns in one run, so that a clock that rises or falls touches both.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.engine.step import train_step
from ampctl.models import GPT
from gpu_checks import parts
from gpu_checks.check import Check, Finding, Setup
from gpu_checks.parts import Batch

CLIP_NORM = 1.0
OPTIMIZER = {"lr": 1e-4, "fused": True}
LOG_INTERVAL = 10
"""ampctl measures what it logs on every tenth step, as a run with the defaults does."""


@dataclass(frozen=True)
class Workload:
    """What is trained: a model, a synthetic batch on the CPU, and its loss by hand."""

    model: type[nn.Module]
    arguments: Mapping[str, Any]
    task: str
    loss: Callable[[Tensor, Tensor], Tensor]
    batch: Batch
    channels_last: bool = False


@dataclass(frozen=True)
class Budget:
    """How long each part of a measurement takes: by time, so that it fits any device."""

    warm_up_s: float
    round_s: float
    rounds: int


FULL, TINY = Budget(warm_up_s=1.5, round_s=1.0, rounds=5), Budget(0.05, 0.05, 2)


def speed(workload: Callable[[bool], Workload], dtype: str) -> Check:
    """Return the check that measures a workload in a dtype."""
    return partial(_speed, workload, dtype)


def resnet50(tiny: bool) -> Workload:
    """Return ResNet-50 on 64 images of 224 pixels, channels last."""
    depths, width, count, size = ([1, 1], 8, 4, 32) if tiny else ([3, 4, 6, 3], 64, 64, 224)
    generator = torch.Generator().manual_seed(0)
    images = torch.randn(count, 3, size, size, generator=generator)
    labels = torch.randint(0, 1000, (count,), generator=generator)
    return Workload(
        parts.ResNet,
        {"depths": depths, "width": width},
        "ampctl.tasks.Classification",
        F.cross_entropy,
        (images, labels),
        channels_last=True,
    )


def gpt124m(tiny: bool) -> Workload:
    """Return the smallest GPT-2, with a vocabulary of 50257, on 8 sequences of 1024 tokens."""
    layers, heads, width, vocabulary, count, length = (
        (2, 2, 32, 64, 2, 16) if tiny else (12, 12, 768, 50257, 8, 1024)
    )
    return Workload(
        GPT,
        {
            "vocab_size": vocabulary,
            "context": length,
            "num_layers": layers,
            "num_heads": heads,
            "width": width,
        },
        "ampctl.tasks.LanguageModel",
        lambda logits, targets: F.cross_entropy(logits.flatten(0, -2), targets.flatten()),
        parts.token_batch(count, length, vocabulary),
    )


def _speed(workload: Callable[[bool], Workload], dtype: str, setup: Setup) -> Finding:
    device, work, budget = setup.device, workload(setup.tiny), TINY if setup.tiny else FULL
    # The memory that cuBLAS keeps from its first use on must count for neither side.
    square = torch.ones(8, 8, device=device, dtype=getattr(torch, dtype))
    square.mm(square)
    batch = parts.moved(work.batch, device)
    if work.channels_last:
        batch = batch[0].contiguous(memory_format=torch.channels_last), batch[1]
    sides = {}
    memory: dict[str, float | None] = {}
    for name, build in (("by_hand", _by_hand), ("ampctl", _by_ampctl)):
        before = _allocated(device)
        sides[name] = _Side(build(work, dtype, batch, device), device)
        sides[name].warm_up(budget)
        peak = _peak(device)
        memory[name] = None if peak is None else peak - before
    rates: dict[str, list[float]] = {name: [] for name in sides}
    for turn in range(budget.rounds):
        for name in list(sides) if turn % 2 == 0 else reversed(list(sides)):
            rates[name].append(sides[name].steps_per_s(budget))
    ratios = sorted(b / a for a, b in zip(rates["by_hand"], rates["ampctl"], strict=True))
    medians = {name: statistics.median(found) for name, found in rates.items()}
    figures = {
        "parameters": _count(work),
        "steps_per_s": medians,
        "rates": rates,
        "ratio": statistics.median(ratios),
        "peak_memory_bytes": memory,
    }
    return Finding(_words(figures, ratios), figures)


def _count(work: Workload) -> int:
    with torch.device("meta"):  # a model without memory, which takes no time to fill
        return sum(p.numel() for p in work.model(**work.arguments).parameters())


def _words(figures: Mapping[str, Any], ratios: list[float]) -> str:
    hand, ours = figures["steps_per_s"]["by_hand"], figures["steps_per_s"]["ampctl"]
    line = (
        f"{figures['parameters'] / 1e6:.4g} M parameters: by hand {hand:.4g} steps/s, ampctl "
        f"{ours:.4g}; ratio {figures['ratio']:.3f} ({ratios[0]:.3f} to {ratios[-1]:.3f})"
    )
    hand, ours = figures["peak_memory_bytes"]["by_hand"], figures["peak_memory_bytes"]["ampctl"]
    if hand is None:
        return f"{line}; memory is measured on CUDA only"
    return (
        f"{line}; peak memory {hand / 2**30:.2f} GiB by hand, {ours / 2**30:.2f} GiB ampctl, "
        f"ratio {ours / hand:.3f}"
    )


class _Side:
    """One of the two loops: a step to repeat, and how many of them make a round."""

    def __init__(self, step: Callable[[], Any], device: torch.device) -> None:
        self._step = step
        self._device = device
        self._steps = 1

    def warm_up(self, budget: Budget) -> None:
        """Run until kernels are chosen, then settle how many steps a round has."""
        self._seconds(1)
        begin, count = time.perf_counter(), 0
        while time.perf_counter() - begin < budget.warm_up_s:
            self._seconds(1)
            count += 1
        a_step = (time.perf_counter() - begin) / count
        self._steps = max(1, round(budget.round_s / a_step))

    def steps_per_s(self, budget: Budget) -> float:
        """Run a round; return its rate."""
        return self._steps / self._seconds(self._steps)

    def _seconds(self, steps: int) -> float:
        begin = time.perf_counter()
        for _ in range(steps):
            self._step()
        if self._device.type == "cuda":
            torch.cuda.synchronize(self._device)
        return time.perf_counter() - begin


def _by_hand(work: Workload, dtype: str, batch: Batch, device: torch.device) -> Callable[[], None]:
    """Return the step of the AMP page of the PyTorch documentation; it reads nothing back."""
    model = work.model(**work.arguments).to(device)
    if work.channels_last:
        model = model.to(memory_format=torch.channels_last)
    optimizer = torch.optim.AdamW(model.parameters(), **OPTIMIZER)
    scaler = torch.amp.GradScaler(device.type, enabled=dtype == "float16")
    precision = getattr(torch, dtype)
    inputs, targets = batch

    def step() -> None:
        optimizer.zero_grad(set_to_none=True)
        with torch.autocast(device.type, dtype=precision, enabled=dtype != "float32"):
            loss = work.loss(model(inputs).float(), targets)
        scaler.scale(loss).backward()
        scaler.unscale_(optimizer)
        nn.utils.clip_grad_norm_(model.parameters(), CLIP_NORM)
        scaler.step(optimizer)
        scaler.update()

    return step


def _by_ampctl(
    work: Workload, dtype: str, batch: Batch, device: torch.device
) -> Callable[[], None]:
    """Return ampctl's step on the same; like its loop, it learns of each step one step later."""
    state = parts.build_state(
        device,
        model=parts.target(work.model, **work.arguments),
        task={"_target_": work.task},
        optimizer={"_target_": "torch.optim.AdamW", **OPTIMIZER},
        amp={"dtype": dtype, "clip_norm": CLIP_NORM},
        train={"channels_last": work.channels_last},
    )
    window = [batch]

    def step() -> None:
        due = (state.progress.step + 1) % LOG_INTERVAL == 0
        train_step(state, window, measure=due)

    return step


def _allocated(device: torch.device) -> int:
    """Return the bytes in use, and start to watch for the most of them from here on."""
    if device.type != "cuda":
        return 0
    torch.cuda.reset_peak_memory_stats(device)
    return torch.cuda.memory_allocated(device)


def _peak(device: torch.device) -> int | None:
    return torch.cuda.max_memory_allocated(device) if device.type == "cuda" else None
