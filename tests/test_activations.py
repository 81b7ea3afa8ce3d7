"""How near activations come to the end of float16: measured where it is logged, warned of early."""

from __future__ import annotations

import itertools
import math
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from cpus import Cpu, on_each_cpu
from states import make_state, run
from torch import Tensor, nn
from torch.nn.modules import module as torch_module
from torch.utils.data import Dataset

from ampctl.amp.activations import Peaks
from ampctl.errors import NumericsError
from ampctl.recipe.load import load_recipe
from ampctl.recipe.schema import AmpConfig
from ampctl.run import worker
from ampctl.tasks import Regression
from ampctl.track.metrics import read_metrics

RECIPE = """
name: ramp
model: {_target_: test_activations.Net}
task: {_target_: ampctl.tasks.Regression}
data: {train: {_target_: test_activations.Ramp}, batch_size: 4, shuffle: false}
optimizer: {_target_: torch.optim.SGD, lr: 0.0}
amp: {dtype: float16, init_scale: 1.0, nonfinite: stop}
train: {max_epochs: 1}
log: {every_steps: 2}
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.body = nn.Sequential(nn.Linear(4, 4), nn.Identity())
        self.head = nn.Linear(4, 1)
        for parameter in self.parameters():
            nn.init.constant_(parameter, 0.25)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.body(x).tanh())


class Ramp(Dataset[tuple[Tensor, Tensor]]):
    """Grows by a fifth with each batch of four, so that the first layer overflows in the end."""

    def __len__(self) -> int:
        return 240

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor]:
        return torch.full((4,), 10 * 1.2 ** (index // 4)), torch.zeros(1)


@on_each_cpu
def test_nu12_a_warning_comes_before_the_overflow(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str], cpu: Cpu
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    Path("ramp.yaml").write_text(RECIPE)
    with pytest.raises(NumericsError):
        worker.train(load_recipe("ramp.yaml"), run_dir=Path("a"), resume=False, quiet=True)
    said = cpu.rest(capsys.readouterr().err)
    warnings = [line for line in said.splitlines() if "warning" in line]
    assert len(warnings) == 1, warnings  # once, though it stays that near
    assert 'amp.modules={"body.0": float32}' in warnings[0]
    events = list(read_metrics(Path("a/metrics.jsonl")))
    bad = next(event["step"] for event in events if event["event"] == "skip")
    assert 2 < int(warnings[0].split("step ")[1].split(":")[0]) < bad
    headroom = [e["activation_headroom"] for e in events if e["event"] == "train"]
    headroom = [each for each in headroom if each is not None]  # None: it has overflowed
    assert headroom[0] == pytest.approx(math.log2(65504 / 10.25 / 1.2), abs=0.3)
    assert all(after < before for before, after in itertools.pairwise(headroom))


class Steep(nn.Linear):
    """A model without parts, whose output is its own."""

    def reset_parameters(self) -> None:
        nn.init.constant_(self.weight, 0.25)


class Bounded:
    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        return model(batch[0]).float().tanh().mean()


def test_the_output_of_the_model_itself_is_warned_of_without_a_name(
    folder: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    model = "test_activations.Steep, in_features: 4, out_features: 1, bias: false"
    text = RECIPE.replace("test_activations.Net", model)
    Path("ramp.yaml").write_text(
        text.replace("ampctl.tasks.Regression", "test_activations.Bounded")
    )
    with suppress(NumericsError):
        worker.train(load_recipe("ramp.yaml"), run_dir=Path("a"), resume=False, quiet=True)
    (warning,) = (each for each in capsys.readouterr().err.splitlines() if "about to" in each)
    assert "the output of the model reaches" in warning
    assert "Set amp.dtype=bfloat16, or" in warning


def windows(value: float = 1.0) -> list[Any]:
    return [[(torch.full((2, 4), value), torch.zeros(2, 1))]]


@pytest.mark.parametrize(("dtype", "found"), [("float16", 4.25), ("bfloat16", None)])
def test_the_largest_output_and_its_module_are_known(dtype: str, found: float | None) -> None:
    model = Net()
    amp = AmpConfig(init_scale=1.0)
    optimizer = torch.optim.SGD(model.parameters(), lr=0.0)
    state = make_state(model, optimizer, dtype, task=Regression(), amp=amp)
    (report,) = run(state, windows(4.0))
    assert report.activation == found
    assert report.activation_module == ("body.0" if found else None)


def test_nothing_is_hooked_but_in_the_steps_that_are_measured() -> None:
    before = dict(torch_module._global_forward_hooks)
    model = Net()
    with Peaks(active=False) as peaks:
        assert torch_module._global_forward_hooks == before
        model(torch.ones(1, 4))
    assert peaks.figures() == {}
    with suppress(RuntimeError), Peaks(active=True):
        assert len(torch_module._global_forward_hooks) == len(before) + 1
        raise RuntimeError
    assert torch_module._global_forward_hooks == before


def test_a_container_hands_on_what_was_seen_already() -> None:
    model = Net()
    with Peaks(active=True) as peaks, torch.autocast("cpu", dtype=torch.float16):
        model(torch.ones(1, 4))
    assert [type(each).__name__ for each in peaks.modules] == ["Linear", "Linear"]
