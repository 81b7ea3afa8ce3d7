"""Models of other libraries and a user's own parts, each trained, saved and resumed by a recipe."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from test_resume_exact import assert_same, last
from typer.testing import CliRunner

from ampctl.cli import app
from ampctl.track.metrics import read_metrics

IMAGES = """
data:
  train: &images
    _target_: torchvision.datasets.FakeData
    size: 12
    image_size: [3, 32, 32]
    num_classes: 4
    transform: {_target_: torchvision.transforms.ToTensor}
  eval: *images
  batch_size: 4
task: {_target_: ampctl.tasks.Classification}
optimizer: {_target_: torch.optim.SGD, lr: 1e-2, momentum: 0.9}
"""
RESNET = "model: {_target_: torchvision.models.resnet18, weights: null, num_classes: 4}" + IMAGES
TIMM = (
    "model: {_target_: timm.create_model, model_name: test_convnext, pretrained: false, "
    "num_classes: 4}" + IMAGES
)
GPT2 = """
model:
  _target_: transformers.GPT2LMHeadModel
  config: {_target_: transformers.GPT2Config, vocab_size: 32, n_positions: 16, n_embd: 16,
           n_layer: 2, n_head: 2, bos_token_id: 0, eos_token_id: 0}
task: {_target_: ampctl.tasks.Transformers}
data:
  train: {_target_: my_data.Counting}
  eval: {_target_: my_data.Counting, first: 5}
  batch_size: 4
  micro_batch_size: 3
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
"""
COUNTING = '''
import torch

class Counting(torch.utils.data.Dataset):
    """Rows that count up; a shorter one is padded, and its padding has no label."""

    def __init__(self, first=0):
        self.first = first

    def __len__(self):
        return 12

    def __getitem__(self, index):
        tokens = (torch.arange(10) + index + self.first) % 32
        labels = tokens.clone()
        if index % 3 == 0:
            labels[6:] = -100
        return {"input_ids": tokens, "labels": labels}
'''
COMMON = """
name: other
train: {max_epochs: 2}
checkpoint: {every_steps: 1, keep_last: 20}
log: {every_steps: 1}
amp: {clip_norm: 1.0}
"""


def ampctl(*arguments: str, code: int = 0) -> str:
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def train_and_resume(recipe: str, *overrides: str, stranger: bool = False) -> list[dict[str, Any]]:
    """Train, resume from the middle, compare; return the run's events.

    ``stranger``: whoever resumes has never trained this recipe, and does not say --trust.
    """
    Path("recipe.yaml").write_text(COMMON + recipe)
    ampctl("check", "recipe.yaml", *overrides)
    ampctl("train", "recipe.yaml", *overrides, "--run-dir", "whole")
    with pytest.MonkeyPatch.context() as patch:
        if stranger:
            patch.setenv("XDG_STATE_HOME", str(Path("elsewhere").absolute()))
        ampctl("resume", "whole/checkpoints/step-00000004.pt", "--run-dir", "again")
    saved = last(Path("whole"))
    assert saved["progress"]["step"] == 6
    assert not any(name.startswith(("_orig_mod.", "module.")) for name in saved["model"])
    assert_same(last(Path("again")), saved)
    events = list(read_metrics(Path("whole/metrics.jsonl")))
    losses = [event["loss"] for event in events if event["event"] == "train"]
    assert len(losses) == 6
    assert all(isinstance(loss, float) for loss in losses)  # one that is not finite is text
    return events


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_torchvision_model_trains_and_a_stranger_resumes_it(folder: Path, dtype: str) -> None:
    pytest.importorskip("torchvision")
    events = train_and_resume(RESNET, f"amp.dtype={dtype}", stranger=True)
    assert events[0]["dtype"] == dtype
    assert events[0]["parameters"] == 11_178_564


def test_a_torchvision_model_in_channels_last_compiled(folder: Path) -> None:
    pytest.importorskip("torchvision")
    train_and_resume(
        RESNET.replace("resnet18, weights: null", "squeezenet1_1, weights: null"),
        "amp.dtype=float32",
        "train.channels_last=true",
        "train.compile={backend: eager, dynamic: false}",
        stranger=True,
    )
    weights = last(Path("whole"))["model"]
    four_d = [w for w in weights.values() if w.ndim == 4 and min(w.shape[1:]) > 1]
    assert four_d
    assert all(w.is_contiguous(memory_format=torch.channels_last) for w in four_d)


@pytest.mark.parametrize("channels_last", ["true", "false"])
def test_a_timm_model_trains_and_a_stranger_resumes_it(folder: Path, channels_last: str) -> None:
    pytest.importorskip("timm")
    pytest.importorskip("torchvision")
    train_and_resume(
        TIMM, "amp.dtype=bfloat16", f"train.channels_last={channels_last}", stranger=True
    )


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_a_transformers_model_trains_on_the_users_own_data(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    Path("my_data.py").write_text(COUNTING)
    events = train_and_resume(GPT2, f"amp.dtype={dtype}")
    evaluations = [event["eval/loss"] for event in events if event["event"] == "eval"]
    assert evaluations[-1] < evaluations[0]
    names = last(Path("whole"))["model"]
    assert "lm_head.weight" in names  # tied to the embedding, as the library saves it
    assert torch.equal(names["lm_head.weight"], names["transformer.wte.weight"])


def test_a_stranger_is_told_what_of_the_users_own_would_be_imported(
    folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("transformers")
    monkeypatch.delitem(sys.modules, "my_data", raising=False)
    Path("my_data.py").write_text(COUNTING)
    Path("recipe.yaml").write_text(COMMON + GPT2)
    ampctl("train", "recipe.yaml", "train.max_steps=2", "--run-dir", "whole")
    monkeypatch.setenv("XDG_STATE_HOME", str(folder / "elsewhere"))
    refusal = ampctl("resume", "whole", "train.max_steps=3", code=4)
    assert "data.train: my_data.Counting" in refusal
    assert "transformers.GPT2LMHeadModel" not in refusal
    ampctl("resume", "whole", "train.max_steps=3", "--trust")
    ampctl("resume", "whole", "train.max_steps=4")  # known by now


OWN = '''
import torch
from torch import nn
from torch.nn import functional as F

class Net(nn.Module):
    def __init__(self, width):
        super().__init__()
        self.layers = nn.Sequential(nn.Linear(3, width), nn.ReLU(), nn.Linear(width, 1))

    def forward(self, x):
        return self.layers(x).squeeze(-1)

class Plane(torch.utils.data.Dataset):
    """Points and their height; a sample is a dict with a text in it."""

    def __init__(self, count=12):
        self.points = torch.randn(count, 3, generator=torch.Generator().manual_seed(0))

    def __len__(self):
        return len(self.points)

    def __getitem__(self, index):
        x = self.points[index]
        return {"x": x, "height": x.sum(), "name": f"point {index}"}

class Height:
    def loss(self, model, batch):
        predicted = model(batch["x"]).float()
        return F.huber_loss(predicted, batch["height"]), predicted

    def metrics(self, predicted, batch):
        return {"worst": (predicted - batch["height"]).abs().max()}
'''
OWN_RECIPE = """
model: {_target_: my_project.Net, width: 16}
task: {_target_: my_project.Height}
data:
  train: {_target_: my_project.Plane}
  eval: {_target_: my_project.Plane, count: 5}
  batch_size: 4
  num_workers: 1
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
scheduler: {_target_: torch.optim.lr_scheduler.StepLR, step_size: 2}
"""


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "float16"])
def test_model_data_and_task_of_the_users_own(
    folder: Path, monkeypatch: pytest.MonkeyPatch, dtype: str
) -> None:
    monkeypatch.delitem(sys.modules, "my_project", raising=False)
    Path("my_project.py").write_text(OWN)
    events = train_and_resume(
        OWN_RECIPE, f"amp.dtype={dtype}", "checkpoint.monitor=eval/worst", "train.ema_decay=0.5"
    )
    assert [set(e) >= {"eval/loss", "eval/worst"} for e in events if e["event"] == "eval"] == [
        True,
        True,
    ]
