"""A micro-batch of one sample, and BatchNorm; the memory format of images and of volumes."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.utils.data import IterableDataset, TensorDataset
from typer.testing import CliRunner

from ampctl.cli import app
from ampctl.data.move import to_channels_last_, to_device

RECIPE = """\
name: lone
model: {_target_: test_lone_sample.Rows}
task: {_target_: ampctl.tasks.Regression}
data:
  train: {_target_: test_lone_sample.data, size: 9}
  batch_size: 4
optimizer: {_target_: torch.optim.SGD, lr: 1e-2}
amp: {dtype: float32}
train: {max_epochs: 1, device: cpu}
"""


def data(size: int) -> TensorDataset:
    x = torch.linspace(-1, 1, 8 * size).view(size, 8)
    return TensorDataset(x, x.sum(1, keepdim=True))


class Stream(IterableDataset[Any]):
    def __iter__(self) -> Iterator[Any]:
        return iter([data(9)[index] for index in range(9)])


class Rows(nn.Sequential):
    def __init__(self) -> None:
        super().__init__(nn.Linear(8, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


class Pooled(nn.Sequential):
    """A BatchNorm2d over one pixel, as after a pooling over the whole image."""

    def __init__(self) -> None:
        pooled = [nn.Unflatten(1, (2, 2, 2)), nn.AdaptiveAvgPool2d(1), nn.BatchNorm2d(2)]
        super().__init__(*pooled, nn.Flatten(), nn.Linear(2, 1))


class Images(nn.Sequential):
    def __init__(self) -> None:
        images = [nn.Unflatten(1, (2, 2, 2)), nn.Conv2d(2, 3, 1), nn.BatchNorm2d(3)]
        super().__init__(*images, nn.Flatten(), nn.Linear(12, 1))


class Volumes(nn.Sequential):
    def __init__(self) -> None:
        volumes = [nn.Unflatten(1, (1, 2, 2, 2)), nn.Conv3d(1, 2, 1), nn.BatchNorm3d(2)]
        images = [nn.Flatten(2, 3), nn.Conv2d(2, 2, 1)]
        super().__init__(*volumes, *images, nn.Flatten(), nn.Linear(16, 1))


class Evaluated(Rows):
    def __init__(self) -> None:
        super().__init__()
        self[1].eval()


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sys, "path", [f"{Path(__file__).parent}", *sys.path])
    (folder / "r.yaml").write_text(RECIPE)


def ampctl(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, (result.output, result.exception)
    return result.stderr


def model(name: str) -> str:
    return f"model={{_target_: test_lone_sample.{name}}}"


LAST = "data.drop_last: the last step of an epoch has 1 of 9 samples"
ALWAYS = "it leaves micro-batches of one sample, and model.1 (BatchNorm)"


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        ([], LAST),
        ([model("Pooled")], LAST),
        (["data.train.size=11", "data.micro_batch_size=2"], "has 3 of 11 samples"),
        (["data.micro_batch_size=1"], f"data.micro_batch_size: {ALWAYS}"),
        (["data.micro_batch_size=3"], f"data.micro_batch_size: {ALWAYS}"),
        (["data.batch_size=1"], f"data.batch_size: {ALWAYS}"),
    ],
)
def test_d9_batchnorm_and_a_micro_batch_of_one_are_told_before_time_is_spent(
    overrides: list[str], says: str
) -> None:
    assert says in ampctl("check", "r.yaml", *overrides, code=2)
    assert says in ampctl("train", "r.yaml", "--run-dir", "d", *overrides, code=2)
    assert not Path("d").exists()


@pytest.mark.parametrize(
    "overrides",
    [
        ["data.drop_last=true"],
        ["data.train.size=8"],
        ["data.batch_size=5"],
        ["train.max_epochs=null", "train.max_steps=2"],  # it ends before
        [model("Images")],  # several values in each channel
        [model("Evaluated")],
        ["model={_target_: torch.nn.Linear, in_features: 8, out_features: 1}"],
        ["data.eval={_target_: test_lone_sample.data, size: 1}", "data.drop_last=true"],
    ],
)
def test_d9_a_micro_batch_of_one_is_no_fault_where_it_can_be_trained(overrides: list[str]) -> None:
    ampctl("train", "r.yaml", "--run-dir", "d", *overrides)


def test_d9_the_end_of_a_stream_is_told_when_it_comes_with_drop_last_named() -> None:
    stream = "data.train={_target_: test_lone_sample.Stream}"
    message = ampctl("train", "r.yaml", "--run-dir", "d", stream, code=2)
    assert "step 3: a micro-batch holds one sample, and the BatchNorm model.1" in message
    assert "Set data.drop_last=true" in message


def test_d9_channels_last_is_the_format_of_each_tensors_own_dimensions() -> None:
    built = Volumes()
    to_channels_last_(built)
    assert built[1].weight.is_contiguous(memory_format=torch.channels_last_3d)
    assert built[4].weight.is_contiguous(memory_format=torch.channels_last)
    volume = to_device(torch.rand(2, 3, 4, 5, 6), torch.device("cpu"), channels_last=True)
    assert volume.is_contiguous(memory_format=torch.channels_last_3d)
    assert not volume.is_contiguous()


@pytest.mark.parametrize("name", ["Images", "Volumes"])
def test_d9_channels_last_trains_images_and_volumes(name: str) -> None:
    for choice in ("true", "false"):
        ampctl("train", "r.yaml", model(name), f"train.channels_last={choice}", "--run-dir", choice)
    first, second = (
        torch.load(f"{choice}/checkpoints/latest.pt", weights_only=True)["model"]
        for choice in ("true", "false")
    )
    for weight in first:
        torch.testing.assert_close(first[weight], second[weight])
