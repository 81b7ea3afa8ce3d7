"""The half of a step after its backward pass, on fake CUDA tensors: the host reads nothing of them.

A fake tensor has a device and no values: ``.item()`` raises, and so does an operation on tensors of
two devices. The backward pass itself cannot run so; gradients are put in its place.
"""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from states import Net
from torch import Tensor, nn
from torch._subclasses.fake_tensor import DataDependentOutputException, FakeTensorMode

from ampctl.amp.activations import Peaks
from ampctl.amp.scaler import LossScaler
from ampctl.distributed.ranks import ALONE
from ampctl.engine.buffers import BufferGuard
from ampctl.engine.ema import WeightAverage
from ampctl.engine.learning_rate import FunctionSchedule
from ampctl.engine.step import _any, _leave_no_trace, _unscale_and_clip
from ampctl.engine.updater import Updater
from ampctl.recipe.schema import AmpConfig

CUDA = torch.device("cuda")


def fake_state(dtype: torch.dtype, amp: AmpConfig, **options: Any) -> Any:
    """What a step needs after its backward pass; to be called in a fake mode."""
    torch.set_default_dtype(dtype)
    try:
        with CUDA:
            model, part = Net(), nn.Linear(8, 8, dtype=torch.float16)
    finally:
        torch.set_default_dtype(torch.float32)
    optimizer = torch.optim.AdamW(model.parameters(), **options)
    return SimpleNamespace(
        part=part,
        updaters=[Updater("", optimizer, FunctionSchedule(optimizer, None))],
        scaler=LossScaler(amp, enabled=True, device=CUDA),
        amp=amp,
        ranks=ALONE,
        buffers=BufferGuard(model),
        ema=WeightAverage(model, 0.9),
        takes_turns=True,
        rewinds={},
    )


def half_a_step(state: Any) -> dict[str, Tensor]:
    figures: dict[str, Tensor] = {}
    (updater,) = state.updaters
    state.buffers.snapshot()
    with Peaks(active=True) as peaks, torch.no_grad():
        state.part(torch.ones(2, 8, dtype=torch.float16, device=CUDA))
    for parameter in updater.parameters:
        parameter.grad = torch.empty_like(parameter)
    found = {"": _unscale_and_clip(state, updater, figures, measure=True)}
    state.scaler.step(updater.optimizer, found[""])
    _leave_no_trace(state, state.updaters, found)
    state.scaler.update(_any({**found, "other": found[""]}))
    return figures | found | peaks.figures()


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
@pytest.mark.parametrize(
    "amp",
    [
        AmpConfig(clip_norm=1.0),
        AmpConfig(clip_value=1.0, hysteresis=2, max_scale=2.0**20),
    ],
)
def test_nothing_is_read_and_every_figure_is_a_float32_scalar_there(
    dtype: torch.dtype, amp: AmpConfig
) -> None:
    with FakeTensorMode():
        state = fake_state(dtype, amp, fused=True)
        for _ in range(2):
            figures = half_a_step(state)
    assert len(figures) == 6
    for name, figure in figures.items():
        assert (figure.device.type, figure.dtype, figure.ndim) == ("cuda", torch.float32, 0), name


def test_the_host_reads_a_verdict_for_an_optimizer_that_is_not_fused() -> None:
    with FakeTensorMode(), pytest.raises(DataDependentOutputException):
        half_a_step(fake_state(torch.float32, AmpConfig(), foreach=False))
