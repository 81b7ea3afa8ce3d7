"""The step against the loop by hand: equal weights, losses, norms and scales, to the bit."""

from __future__ import annotations

import copy
import math
import traceback
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from reference_loop import train
from states import DTYPES, Net, batches, make_state, run, spoil
from torch import nn
from torch.nn import functional as F

from ampctl.engine.step import settle, train_step
from ampctl.recipe.load import load_recipe
from ampctl.recipe.schema import AmpConfig
from ampctl.run import worker
from ampctl.schedules import Cosine

OPTIMIZERS: dict[str, Callable[[Iterable[nn.Parameter]], torch.optim.Optimizer]] = {
    "adamw": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=False, foreach=False),
    "adamw-fused": lambda p: torch.optim.AdamW(p, lr=1e-2, weight_decay=0.1, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, foreach=False),
    "sgd-fused": lambda p: torch.optim.SGD(p, lr=0.1, momentum=0.9, fused=True),
}


def compare(
    windows: list[Any],
    *,
    dtype: str,
    optimizer: str = "adamw",
    amp: AmpConfig | None = None,
    factor: Callable[[int], float] | None = None,
) -> list[bool]:
    """Train the same model both ways; assert equality of all; return which steps were skipped."""
    amp = amp or AmpConfig()
    torch.manual_seed(0)
    mine = Net()
    theirs = copy.deepcopy(mine)
    state = make_state(
        mine, OPTIMIZERS[optimizer](mine.parameters()), dtype, amp=amp, factor=factor
    )
    reports = run(state, windows)
    record = train(
        theirs,
        windows,
        F.cross_entropy,
        OPTIMIZERS[optimizer](theirs.parameters()),
        dtype=getattr(torch, dtype),
        clip_norm=amp.clip_norm,
        factor=factor,
        init_scale=amp.init_scale,
        growth_interval=amp.growth_interval,
        guarded=True,
    )
    for (name, a), b in zip(mine.state_dict().items(), theirs.state_dict().values(), strict=True):
        assert torch.equal(a, b), name
    same = [
        (r.loss, r.grad_norm, r.scale_after if dtype == "float16" else 1.0, r.skipped)
        for r in reports
    ]
    other = list(zip(record.losses, record.norms, record.scales, record.skipped, strict=True))
    assert str(same) == str(other)  # as text, so that nan equals nan
    return record.skipped


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("clip_norm", [None, 0.5])
def test_parity_with_the_loop_by_hand(dtype: str, optimizer: str, clip_norm: float | None) -> None:
    windows = [[b] for b in batches(12)]
    compare(
        windows,
        dtype=dtype,
        optimizer=optimizer,
        amp=AmpConfig(clip_norm=clip_norm, init_scale=1024.0, growth_interval=3),
        factor=Cosine(total_steps=12, warmup_steps=3),
    )


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
def test_parity_with_accumulation_and_a_short_last_window(dtype: str, optimizer: str) -> None:
    data = batches(10, size=4) + batches(1, size=3, seed=5)
    windows = [data[i : i + 3] for i in range(0, len(data), 3)]
    compare(windows, dtype=dtype, optimizer=optimizer, amp=AmpConfig(clip_norm=1.0))


@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("value", [math.inf, math.nan])
def test_parity_with_non_finite_steps(dtype: str, optimizer: str, value: float) -> None:
    windows = [[b] for b in batches(10)]
    # By hand, fused SGD loses its weights when its first step is skipped: see the test below.
    bad = (3, 4, 7) if optimizer == "sgd-fused" else (0, 3, 4)
    for i in bad:
        windows[i] = [spoil(windows[i][0], value)]
    skipped = compare(
        windows,
        dtype=dtype,
        optimizer=optimizer,
        amp=AmpConfig(clip_norm=1.0, init_scale=512.0, growth_interval=2),
        factor=Cosine(total_steps=10, warmup_steps=2),
    )
    assert tuple(i for i, s in enumerate(skipped) if s) == bad


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_fused_sgd_survives_that_its_first_step_is_skipped(dtype: str) -> None:
    torch.manual_seed(0)
    fused = Net()
    clean = copy.deepcopy(fused)
    windows = [[b] for b in batches(5)]
    amp = AmpConfig(init_scale=512.0)
    make = OPTIMIZERS["sgd-fused"]
    run(
        make_state(fused, make(fused.parameters()), dtype, amp=amp),
        [[spoil(windows[0][0])], *windows],
    )
    half = AmpConfig(init_scale=256.0)
    run(make_state(clean, make(clean.parameters()), dtype, amp=half), windows)
    for name, value in clean.state_dict().items():
        assert torch.equal(fused.state_dict()[name], value), name


def test_sp1_one_unscale_a_window_with_clipping_and_accumulation() -> None:
    data = batches(9)
    windows = [data[0:4], data[4:8], data[8:9]]
    assert compare(windows, dtype="float16", amp=AmpConfig(clip_norm=1.0)) == [False] * 3


def test_sp3_clipping_sees_unscaled_gradients() -> None:
    torch.manual_seed(0)
    model = nn.Linear(4, 4, bias=False)
    before = model.weight.detach().clone()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    state = make_state(model, optimizer, "float16", amp=AmpConfig(clip_norm=1.0, init_scale=4096.0))
    x, y = torch.randn(8, 4) * 20, torch.randint(0, 4, (8,))
    (report,) = run(state, [[(x, y)]])
    assert report.grad_norm is not None
    assert report.grad_norm > 5
    assert (model.weight - before).norm().item() == pytest.approx(1.0, rel=1e-3)


def test_sp9_the_step_uses_the_scale_of_its_own_backward() -> None:
    class Sum(nn.Module):
        def __init__(self) -> None:
            super().__init__()
            self.weight = nn.Parameter(torch.zeros(()))

        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return self.weight * x

    class Task:
        def loss(self, model: nn.Module, batch: torch.Tensor) -> torch.Tensor:
            return model(batch).sum()

    from ampctl.tasks.task import as_task

    model = Sum()
    optimizer = torch.optim.SGD(model.parameters(), lr=1.0)
    amp = AmpConfig(growth_interval=1, init_scale=8.0)
    state = make_state(model, optimizer, "float16", amp=amp, task=as_task(Task()))
    for step in range(1, 6):
        run(state, [[torch.ones(1)]])
        assert model.weight.item() == -step


def test_sp10_an_overflow_in_one_window_leaves_the_next_alone() -> None:
    data = batches(12)
    data[1] = spoil(data[1])
    windows = [data[i : i + 4] for i in range(0, 12, 4)]
    assert compare(windows, dtype="float16", amp=AmpConfig(init_scale=64.0)) == [True, False, False]


def test_sa4_a_tail_window_is_the_mean_of_what_it_holds() -> None:
    torch.manual_seed(0)
    model = nn.Linear(8, 4)
    whole = copy.deepcopy(model)
    (x, y) = batches(1, size=2)[0]
    parts = [(x[i : i + 1], y[i : i + 1]) for i in range(2)]
    for net, window in ((model, parts), (whole, [(x, y)])):
        run(make_state(net, torch.optim.SGD(net.parameters(), lr=1.0), "float32"), [window])
    torch.testing.assert_close(model.weight, whole.weight, rtol=1e-6, atol=1e-7)


def test_a_step_measures_the_gradient_where_it_is_asked_to() -> None:
    model = Net()
    state = make_state(model, OPTIMIZERS["sgd"](model.parameters()), "float16")
    for asked in ({}, {"measure": False}, {"measure": True}):
        train_step(state, batches(1), **asked)
        report = settle(state)
        assert report is not None
        figures = (report.grad_norm, report.underflow, report.largest)
        assert [figure is not None for figure in figures] == [bool(asked.get("measure"))] * 3


def test_torch_is_called_four_frames_below_the_worker(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """Whoever reads a traceback, or the code from the loop on, comes to the step at once."""
    frames: dict[str, list[str]] = {}

    def watched(owner: Any, name: str) -> None:
        original = getattr(owner, name)

        def call(*args: Any, **kwargs: Any) -> Any:
            ours = [
                f
                for f in traceback.extract_stack()
                if Path(worker.__file__).parents[1] in Path(f.filename).parents
            ]
            last = max(i for i, f in enumerate(ours) if f.filename == worker.__file__)
            frames[name] = [f.name for f in ours[last + 1 :]]
            return original(*args, **kwargs)

        monkeypatch.setattr(owner, name, call)

    watched(torch.autograd, "backward")
    watched(torch.optim.SGD, "step")
    (folder / "r.yaml").write_text(SMALL)
    worker.train(load_recipe("r.yaml"), run_dir=folder / "run", resume=False, quiet=True)
    assert frames == {
        "backward": ["fit", "_epoch", "train_step", "backward_passes"],
        "step": ["fit", "_epoch", "train_step", "step"],
    }


SMALL = """
name: small
model: {_target_: ampctl.models.MLP, in_features: 64, hidden: [8], num_classes: 10}
task: {_target_: ampctl.tasks.Classification}
data: {train: {_target_: ampctl.data.Digits}, batch_size: 64}
optimizer: {_target_: torch.optim.SGD, lr: 0.1}
amp: {dtype: float32}
train: {max_steps: 1, device: cpu}
"""
