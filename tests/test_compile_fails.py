"""What a user is told where torch.compile fails: that it did, and how to train without it."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import pytest
import torch
from typer.testing import CliRunner

from ampctl.cli import app

RECIPE = """\
name: compiled
model: {_target_: torch.nn.Linear, in_features: 2, out_features: 1}
task: {_target_: own.Task}
data: {train: {_target_: own.data}, batch_size: 4}
optimizer: {_target_: torch.optim.SGD, lr: 1e-2}
amp: {dtype: float32}
train: {max_steps: 1, device: cpu, compile: true}
"""

MODULE = """\
import torch
from torch.nn.functional import mse_loss
from torch.utils.data import TensorDataset


def data():
    return TensorDataset(torch.ones(4, 2), torch.ones(4, 1))


class Task:
    def loss(self, model, batch):
        return mse_loss(model(batch[0]), batch[1])


class Breaks(torch.nn.Linear):
    def __init__(self):
        super().__init__(2, 1)

    def forward(self, x):
        return super().forward(x) + float(open("/dev/null").read() or 0)


class Wrong(torch.nn.Linear):
    def __init__(self):
        super().__init__(3, 1)
"""


@pytest.fixture(autouse=True)
def _own(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[None]:
    monkeypatch.setattr(sys, "path", list(sys.path))
    (folder / "own.py").write_text(MODULE)
    (folder / "r.yaml").write_text(RECIPE)
    torch._dynamo.reset()
    yield
    torch._dynamo.reset()
    sys.modules.pop("own", None)


def told(command: str, *overrides: str) -> str:
    result = CliRunner().invoke(app, [command, "r.yaml", *overrides])
    assert result.exit_code == 2, (result.output, result.exception)
    return result.stderr


def test_d5_no_compiler_names_train_compile(folder: Path) -> None:
    nothing = {"CC": "/nonexistent/gcc", "CXX": "/nonexistent/g++"}
    cache = {"TORCHINDUCTOR_CACHE_DIR": f"{folder / 'cache'}"}
    command = [sys.executable, "-m", "ampctl", "train", "r.yaml", "--run-dir", "d"]
    ended = subprocess.run(
        command, env={**os.environ, **nothing, **cache}, capture_output=True, text=True, timeout=300
    )
    assert ended.returncode == 2
    assert "torch.compile needs a C++ compiler, and none was found" in ended.stderr
    assert "set train.compile=false" in ended.stderr
    assert "do not fit each other" not in ended.stderr
    assert "InvalidCxxCompiler" in (folder / "d" / "logs" / "rank-0.log").read_text()


@pytest.mark.parametrize(
    ("overrides", "says"),
    [
        (["train.compile={fullgraph: true}", "model={_target_: own.Breaks}"], "Unsupported"),
        (
            ["train.compile={backend: aot_eager}", "model={_target_: own.Wrong}"],
            "must have same reduction dim",
        ),
    ],
)
def test_d5_another_failure_of_torch_compile_names_it_too(overrides: list[str], says: str) -> None:
    for command in ("check", "train"):
        message = told(command, *overrides)
        assert "torch.compile failed; train.compile=false trains without it" in message
        assert says in message


def test_d5_arguments_that_torch_compile_refuses_are_told_with_their_key() -> None:
    for given, says in (("{backend: nope}", "Invalid backend: 'nope'"), ("{zz: 1}", "'zz'")):
        message = told("check", f"train.compile={given}")
        assert "command line: train.compile: torch.compile refused its arguments" in message
        assert says in message


def test_a_failure_of_the_compiler_is_known_by_its_class() -> None:
    from ampctl.doctor.torch_errors import of_compiler

    assert of_compiler(RuntimeError("torch._dynamo")) is None
    assert of_compiler(torch._dynamo.exc.InternalTorchDynamoError("x")) is not None
