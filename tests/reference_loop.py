"""The loop by hand, in plain torch: what ampctl's results are compared with, bit for bit.

Nothing of ampctl is imported here. With ``guarded`` it also does, by hand, what ampctl adds to the
AMP page of the PyTorch documentation: a non-finite step is skipped in every dtype, and BatchNorm's
buffers go back to what they were.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import dataclass, field

import torch
from torch import Tensor, nn

Batch = tuple[Tensor, Tensor]


@dataclass
class Record:
    losses: list[float] = field(default_factory=list)
    norms: list[float] = field(default_factory=list)
    scales: list[float] = field(default_factory=list)
    skipped: list[bool] = field(default_factory=list)


def train(
    model: nn.Module,
    windows: Iterable[Sequence[Batch]],
    loss_function: Callable[[Tensor, Tensor], Tensor],
    optimizer: torch.optim.Optimizer,
    *,
    dtype: torch.dtype,
    device_type: str = "cpu",
    clip_norm: float | None = None,
    factor: Callable[[int], float] | None = None,
    init_scale: float = 65536.0,
    growth_interval: int = 2000,
    guarded: bool = False,
    log_every: int = 1,
) -> Record:
    scaler = torch.amp.GradScaler(
        device_type,
        init_scale=init_scale,
        growth_interval=growth_interval,
        enabled=dtype == torch.float16,
    )
    base = [group["lr"] for group in optimizer.param_groups]
    parameters = [p for group in optimizer.param_groups for p in group["params"]]
    record, updates = Record(), 0
    for step, window in enumerate(windows, start=1):
        buffers = [b.clone() for b in model.buffers()] if guarded else []
        optimizer.zero_grad(set_to_none=True)
        total, mean = sum(len(y) for _, y in window), 0.0
        for x, y in window:
            with torch.autocast(device_type, dtype=dtype, enabled=dtype != torch.float32):
                loss = loss_function(model(x).float(), y)
                if len(window) > 1:
                    loss = loss * (len(y) / total)
            scaler.scale(loss).backward()
            mean = mean + loss.detach()
        if factor is not None:
            for group, rate in zip(optimizer.param_groups, base, strict=True):
                group["lr"] = rate * factor(updates)
        scaler.unscale_(optimizer)
        if clip_norm is not None:
            norm = nn.utils.clip_grad_norm_(parameters, clip_norm)
        else:
            gradients = [p.grad for p in parameters if p.grad is not None]
            values = [g.coalesce().values() if g.is_sparse else g for g in gradients]
            norm = nn.utils.get_total_norm(values)
        if scaler.is_enabled():
            skipped = any(v.item() for v in scaler._found_inf_per_device(optimizer).values())
            scaler.step(optimizer)
        else:
            skipped = guarded and not torch.isfinite(norm)
            if not skipped:
                optimizer.step()
        scaler.update()
        updates += not skipped
        if skipped and guarded:
            for buffer, saved in zip(model.buffers(), buffers, strict=True):
                buffer.copy_(saved)
        if step % log_every == 0:
            record.losses.append(float(mean))
            record.norms.append(float(norm))
            record.scales.append(scaler.get_scale() if scaler.is_enabled() else 1.0)
            record.skipped.append(bool(skipped))
    return record
