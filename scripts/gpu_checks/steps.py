"""Checks of single steps: skips and buffers without a trace, and no wait for the device."""

from __future__ import annotations

import copy
import traceback
from collections.abc import Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

import ampctl
from ampctl.engine.state import TrainState
from ampctl.engine.step import train_step
from ampctl.models import GPT
from ampctl.state_dict.copies import copied_tensors, snapshot
from ampctl.state_dict.host_memory import HostMemory
from gpu_checks import parts
from gpu_checks.check import (
    CheckFailed,
    CheckSkipped,
    Finding,
    Setup,
    cloned,
    first_difference,
    leaves,
    require,
)


def skips(setup: Setup) -> Finding:
    """Check that a non-finite batch leaves no trace but the scale, with every kind of optimizer."""
    for dtype in parts.DTYPES:
        for name, optimizer in parts.OPTIMIZERS.items():
            _skip(setup.device, dtype, optimizer, f"{name}, {dtype}")
    return Finding(
        f"{len(parts.OPTIMIZERS)} optimizers in {len(parts.DTYPES)} dtypes: weights, optimizer, "
        "buffers, EMA and schedule untouched to the bit, the scale halved once, the next step "
        "moves on",
        {"optimizers": list(parts.OPTIMIZERS), "dtypes": list(parts.DTYPES)},
    )


def _skip(device: torch.device, dtype: str, optimizer: Mapping[str, Any], case: str) -> None:
    """Two bad batches, the very first among them, each followed by a clean one."""
    state = parts.build_state(
        device,
        optimizer=dict(optimizer),
        scheduler={"_target_": "ampctl.schedules.Cosine"},
        amp={"dtype": dtype, "init_scale": 1024.0, "clip_norm": 1.0},
        train={"ema_decay": 0.9},
    )
    for step in range(4):
        batch = parts.moved(parts.image_batch(6, seed=step), device)
        bad = step % 2 == 0
        before, weights = _what_a_skip_spares(state), cloned(dict(state.bare.named_parameters()))
        (report,) = parts.run(state, [[parts.spoiled(batch) if bad else batch]])
        after = _what_a_skip_spares(state)
        place = f"{case}, step {step + 1}"
        require(report.skipped == bad, f"{place}: skipped is {report.skipped}, expected {bad}")
        factor = 0.5 if bad and dtype == "float16" else 1.0
        require(
            report.scale_after == report.scale_before * factor,
            f"{place}: the scale went from {report.scale_before:g} to {report.scale_after:g}",
        )
        if not bad:
            moved = first_difference(weights, dict(state.bare.named_parameters()))
            require(moved is not None, f"{place}: a clean step left the weights as they were")
            continue
        if step == 0:
            # An optimizer makes its state at its first step; skipped, it must be empty or zeros.
            made = [
                n for n, v in leaves(after.pop("optimizer")) if isinstance(v, Tensor) and v.any()
            ]
            require(not made, f"{place}: the skipped step wrote into the optimizer's {made[:1]}")
            before.pop("optimizer")
        difference = first_difference(before, after)
        require(difference is None, f"{place}: a skipped step left a trace: {difference}")


def _what_a_skip_spares(state: TrainState) -> dict[str, Any]:
    """Copy what a skip must leave alone.

    A group's rate is not of it: it is set anew before each step, for the update that may come.
    """
    whole = state.state_dict()
    spared = {key: cloned(whole[key]) for key in ("model", "scheduler", "ema")}
    optimizer = {n: cloned(v) for n, v in leaves(whole["optimizer"]) if not n.endswith(".lr")}
    return {**spared, "optimizer": optimizer}


def buffers(setup: Setup) -> Finding:
    """Check that BatchNorm's statistics share a tensor, survive a bad batch, and load into it."""
    state = parts.build_state(setup.device, amp={"dtype": "float16", "init_scale": 1024.0})
    good, other = (parts.moved(parts.image_batch(6, seed=i), setup.device) for i in range(2))
    bad = parts.spoiled(good)
    parts.run(state, [[good]])
    kept = cloned(dict(state.bare.named_buffers()))
    unguarded = copy.deepcopy(state.bare)
    unguarded(bad[0])
    poisoned = [n for n, b in unguarded.named_buffers() if not b.isfinite().all()]
    require(bool(poisoned), "the bad batch spoils no buffer, so that the check would see nothing")
    for step in range(2):
        tensors = dict(state.bare.named_buffers())
        storages = {b.untyped_storage().data_ptr() for b in tensors.values()}
        dtypes = {b.dtype for b in tensors.values()}
        require(
            len(storages) == len(dtypes),
            f"{len(tensors)} buffers lie in {len(storages)} tensors, one for each of "
            f"{len(dtypes)} dtypes expected",
        )
        parts.run(state, [[bad]])
        difference = first_difference(kept, dict(state.bare.named_buffers()))
        require(difference is None, f"bad batch {step + 1}: {difference}")
        parts.run(state, [[other]])
        difference = first_difference(kept, dict(state.bare.named_buffers()))
        require(difference is not None, "a clean batch left the statistics as they were")
        state.bare.load_state_dict(kept, strict=False)
    return Finding(
        f"{len(kept)} statistics in {len(storages)} tensors: untouched by a bad batch "
        f"({len(poisoned)} are lost without the guard), loaded back in place",
        {"buffers": len(kept), "poisoned_without_guard": poisoned},
    )


def host_copy(setup: Setup) -> Finding:
    """Check that a copy for a checkpoint is the state's, in memory that the device copies into."""
    state = parts.build_state(
        setup.device,
        optimizer={"_target_": "torch.optim.AdamW", "lr": 1e-3},
        amp={"dtype": "bfloat16"},
        train={"ema_decay": 0.9},
    )
    memory = HostMemory()
    for step in range(3):
        parts.run(state, [[parts.moved(parts.image_batch(6, seed=step), setup.device)]])
        if not memory.is_prepared:
            memory.prepare(copied_tensors(state.parts()))
        saved = state.state_dict()
        copy_ = snapshot(saved, memory=memory)
        difference = first_difference(copy_, snapshot(saved))
        require(difference is None, f"the copy of step {step + 1} is another: {difference}")
    weights = copy_["model"].values()
    require(all(weight.device.type == "cpu" for weight in weights), "it is not on the host")
    if setup.device.type == "cuda":
        require(all(weight.is_pinned() for weight in weights), "its memory is not page-locked")
    return Finding("three copies of a whole state equal to the bit, in memory made before", {})


def sync(setup: Setup) -> Finding:
    """Check that no steady step makes the host wait for the device."""
    if setup.device.type != "cuda":
        raise CheckSkipped(f"torch tells synchronisations of CUDA only, not of {setup.device.type}")
    images = parts.moved(parts.image_batch(32), setup.device)
    tokens = parts.moved(parts.token_batch(4, 32, 64), setup.device)
    model = parts.target(GPT, vocab_size=64, context=32, num_layers=2, num_heads=2, width=64)
    steps = 20
    for name, batch, blocks in (
        ("convolutional", images, {}),
        ("GPT", tokens, {"model": model, "task": {"_target_": "ampctl.tasks.LanguageModel"}}),
    ):
        state = parts.build_state(
            setup.device,
            optimizer=parts.ADAMW | parts.FUSED,
            scheduler={"_target_": "ampctl.schedules.Cosine"},
            amp={"dtype": "float16", "clip_norm": 1.0},
            train={"ema_decay": 0.9},
            **blocks,
        )
        parts.run(state, [[batch]] * 5)
        torch.cuda.synchronize(setup.device)
        torch.cuda.set_sync_debug_mode("error")
        try:
            for step in range(1, steps + 1):
                train_step(state, [batch], measure=step % 10 == 0)
        except RuntimeError as error:
            raise CheckFailed(f"{name} network, step {step}: {error} ({_where(error)})") from error
        finally:
            torch.cuda.set_sync_debug_mode("default")
    return Finding(
        f"{steps} steps of two networks, float16, fused AdamW, clipped, EMA: none waited"
    )


def _where(error: BaseException) -> str:
    """Name the innermost line of ampctl that an error came through."""
    package = Path(ampctl.__file__).parent
    frames = traceback.extract_tb(error.__traceback__)
    ours = [frame for frame in frames if Path(frame.filename).is_relative_to(package)]
    if not ours:
        return "outside of ampctl"
    return f"{Path(ours[-1].filename).relative_to(package.parent)}:{ours[-1].lineno}"
