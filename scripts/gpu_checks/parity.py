"""Parity: training by ampctl and by the loop by hand give the same numbers, to the bit."""

from __future__ import annotations

import copy
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import torch
from reference_loop import train as train_by_hand
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.models import GPT
from ampctl.schedules import Cosine
from gpu_checks import parts
from gpu_checks.check import Check, Finding, Setup, first_difference, require
from gpu_checks.parts import Batch

NUM_STEPS = 8
# A fused SGD by hand loses its weights when its first step is skipped, so that one is clean.
BAD_STEPS = (2, 3, 6)


@dataclass(frozen=True)
class Case:
    """Two runs that must agree: what is trained, and on which windows of micro-batches."""

    name: str
    model: parts.Block
    task: str
    loss: Callable[[Tensor, Tensor], Tensor]
    optimizer: Mapping[str, Any]
    windows: Sequence[Sequence[Batch]]
    clip_norm: float | None


def parity(dtype: str) -> Check:
    """Return the check that training in a dtype equals the loop by hand, to the bit."""
    return partial(_parity, dtype)


def _parity(dtype: str, setup: Setup) -> Finding:
    cases = [*_image_cases(setup), *_token_cases(setup)]
    for case in cases:
        _compare(case, dtype, setup.device)
    return Finding(
        f"{len(cases)} runs of {NUM_STEPS} steps: weights, buffers, losses, norms, scales and "
        "skips equal those of the loop by hand, to the bit",
        {"runs": len(cases), "cases": [case.name for case in cases]},
    )


def _image_cases(setup: Setup) -> list[Case]:
    """Every optimizer (two, if tiny) on a convolutional network with BatchNorm and dropout."""
    optimizers = list(parts.OPTIMIZERS.items())[:: 3 if setup.tiny else 1]
    batches = [
        parts.moved(parts.image_batch(6 - i % 2, seed=i), setup.device)
        for i in range(3 * NUM_STEPS)
    ]
    single = [[batch] for batch in batches[:NUM_STEPS]]
    bad = [[parts.spoiled(b)] if i in BAD_STEPS else [b] for i, [b] in enumerate(single)]
    short = batches[:-2]  # its last window holds one micro-batch of three
    several = [short[i : i + 3] for i in range(0, len(short), 3)]
    variants: dict[str, tuple[Sequence[Sequence[Batch]], float | None]] = {
        "as it is": (single, None),
        "clipped": (single, 0.5),
        "accumulated and clipped": (several, 0.5),
        "clipped, with non-finite batches": (bad, 0.5),
    }
    return [
        Case(
            f"{optimizer}, {variant}",
            parts.target(parts.SmallNet, dropout=0.1),
            "ampctl.tasks.Classification",
            F.cross_entropy,
            options,
            windows,
            clip_norm,
        )
        for optimizer, options in optimizers
        for variant, (windows, clip_norm) in variants.items()
    ]


def _token_cases(setup: Setup) -> list[Case]:
    """A transformer with a tied head: fused attention and an embedding's gradient."""
    shape = {"vocab_size": 32, "context": 16, "num_layers": 2, "num_heads": 2, "width": 32}
    batches = [
        parts.moved(parts.token_batch(2, 16, 32, seed=i), setup.device)
        for i in range(2 * NUM_STEPS)
    ]
    windows = [batches[i : i + 2] for i in range(0, len(batches), 2)]
    model, task = parts.target(GPT, **shape), "ampctl.tasks.LanguageModel"
    return [
        Case(
            "GPT, accumulated and clipped",
            model,
            task,
            token_loss,
            parts.ADAMW | parts.FUSED,
            windows,
            1.0,
        )
    ]


def token_loss(logits: Tensor, targets: Tensor) -> Tensor:
    """Return the mean cross entropy of the tokens, by the operations of the task LanguageModel."""
    total = F.cross_entropy(logits.flatten(0, -2), targets.flatten(), reduction="sum")
    # A count on the device: CUDA multiplies by the reciprocal of one on the host, which rounds.
    return total / (targets != -100).sum()


def _compare(case: Case, dtype: str, device: torch.device) -> None:
    amp = {"dtype": dtype, "clip_norm": case.clip_norm, "init_scale": 1024.0, "growth_interval": 3}
    state = parts.build_state(
        device,
        model=case.model,
        task={"_target_": case.task},
        optimizer=dict(case.optimizer),
        scheduler={"_target_": "ampctl.schedules.Cosine", "warmup_steps": 3},
        amp=amp,
        train={"deterministic": True, "max_steps": NUM_STEPS},
    )
    model = copy.deepcopy(state.bare)
    reports = parts.run(state, case.windows)
    record = train_by_hand(
        model,
        _seeded(case.windows),
        case.loss,
        optimizer_by_hand(case.optimizer, model),
        dtype=getattr(torch, dtype),
        device_type=device.type,
        clip_norm=case.clip_norm,
        factor=Cosine(total_steps=NUM_STEPS, warmup_steps=3),
        init_scale=1024.0,
        growth_interval=3,
        guarded=True,
    )
    ours = {
        "loss": [r.loss for r in reports],
        "norm": [r.grad_norm for r in reports],
        "scale": [r.scale_after for r in reports],
        "skipped": [r.skipped for r in reports],
        "model": state.bare.state_dict(),
    }
    theirs = {
        "loss": record.losses,
        "norm": record.norms,
        "scale": record.scales,
        "skipped": record.skipped,
        "model": model.state_dict(),
    }
    difference = first_difference(ours, theirs)
    require(difference is None, f"{case.name}: {difference} (ampctl, by hand)")


def optimizer_by_hand(block: Mapping[str, Any], model: nn.Module) -> torch.optim.Optimizer:
    """Build the optimizer of a recipe's block without ampctl."""
    options = {name: value for name, value in block.items() if name != "_target_"}
    kind = getattr(torch.optim, block["_target_"].rpartition(".")[2])
    optimizer: torch.optim.Optimizer = kind(model.parameters(), **options)
    return optimizer


def _seeded(windows: Sequence[Sequence[Batch]]) -> Sequence[Sequence[Batch]]:
    """Seed dropout as :func:`parts.run` does, on the device too."""
    torch.manual_seed(parts.SEED)
    return windows
