"""Several ranks: the same samples, the same steps and, within rounding, the same weights as one.

The bound: gradients are sums in another order, so that weights after some steps differ by a few
units in the last place of float32, times the steps; a factor 2 of ranks changes no bit of the mean.
"""

from __future__ import annotations

import json
import os
import signal
import socket
import time
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import PRELOADED
from test_resume_exact import assert_same, last
from torch import Tensor, multiprocessing, nn
from torch.utils.data import Dataset, IterableDataset

from ampctl.errors import PreemptedError
from ampctl.recipe.load import load_recipe
from ampctl.track.metrics import read_metrics

TESTS = Path(__file__).parent
RECIPE = """
name: ranks
seed: 3
model: {_target_: test_ddp.Net}
task: {_target_: test_ddp.Counted}
data:
  train: {_target_: test_ddp.Samples, size: 22}
  eval: {_target_: test_ddp.Samples, size: 7}
  batch_size: 8
  eval_batch_size: 2
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
scheduler: {_target_: ampctl.schedules.Cosine}
amp: {dtype: float32, init_scale: 1024, growth_interval: 3, clip_norm: 1.0}
train: {max_epochs: 3, ema_decay: 0.9}
checkpoint: {every_steps: 1, keep_last: 100}
log: {every_steps: 1}
"""


class Net(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.first, self.head = nn.Linear(8, 16), nn.Linear(16, 4)

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.first(x).relu())


class Samples(Dataset[dict[str, Any]]):
    """A sample tells its index; those of ``bad`` are infinite."""

    def __init__(self, size: int, bad: tuple[int, ...] = (), delay_s: float = 0.0) -> None:
        generator = torch.Generator().manual_seed(1)
        self.x = torch.randn(size, 8, generator=generator)
        self.y = torch.randint(0, 4, (size,), generator=generator)
        self.x[list(bad)] = float("inf")
        self.delay_s = delay_s

    def __len__(self) -> int:
        return len(self.x)

    def __getitem__(self, index: int) -> tuple[Tensor, Tensor, int]:
        time.sleep(self.delay_s)
        return self.x[index], self.y[index], index


class Stream(IterableDataset[Any]):
    def __init__(self, size: int) -> None:
        self.samples = Samples(size)

    def __iter__(self) -> Any:
        return (self.samples[index] for index in range(len(self.samples)))


class Counted:
    """Cross entropy that keeps which samples it has seen, in a file of each rank."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, index = batch
        with Path(f"seen-{os.environ.get('RANK', '0')}").open("a") as file:
            mode = "train" if torch.is_grad_enabled() else "eval"
            print(json.dumps([mode, index.tolist()]), file=file)
        return nn.functional.cross_entropy(model(x).float(), y), index

    def metrics(self, index: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"index": index.float().mean()}


class Tokens(Counted):
    """Its loss is a mean over labels other than 0, of which a batch may have none."""

    def loss(self, model: nn.Module, batch: Any) -> tuple[Tensor, Tensor]:
        x, y, index = batch
        return nn.functional.cross_entropy(model(x).float(), y, ignore_index=0), index

    def num_items(self, batch: Any) -> Tensor:
        return (batch[1] != 0).sum()


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    Path("recipe.yaml").write_text(RECIPE)


def free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def ranks(size: int, run_dir: str, *overrides: str, resume: str = "", kill: Any = None) -> None:
    """Run a recipe on so many ranks, each a process, forked from one that has torch imported."""
    multiprocessing.set_forkserver_preload(PRELOADED)
    arguments = (size, free_port(), run_dir, overrides, resume, dict(os.environ))
    context = multiprocessing.start_processes(
        _rank, args=arguments, nprocs=size, join=False, start_method="forkserver"
    )
    if kill is not None:
        kill(context)
    while not context.join():
        pass


def _rank(
    rank: int,
    size: int,
    port: int,
    run_dir: str,
    overrides: tuple[str, ...],
    resume: str,
    environment: dict[str, str],
) -> None:
    from ampctl.run import worker

    torch.set_num_threads(1)
    os.environ |= environment
    os.environ |= {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", "WORLD_SIZE": f"{size}"}
    os.environ |= {"MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{port}"}
    if resume:
        target = Path(run_dir) if run_dir else None
        worker.resume(Path(resume), overrides, run_dir=target, trusted=False, quiet=True)
        return
    loaded = load_recipe("recipe.yaml", overrides)
    try:
        worker.train(loaded, run_dir=Path(run_dir), resume=False, quiet=True)
    except PreemptedError as error:
        Path(f"preempted-{rank}").write_text(f"{error}")


def one(run_dir: str, *overrides: str) -> dict[str, Any]:
    from ampctl.run import worker

    loaded = load_recipe("recipe.yaml", overrides)
    worker.train(loaded, run_dir=Path(run_dir), resume=False, quiet=True)
    return last(Path(run_dir))


def seen(mode: str) -> list[int]:
    """All samples that all ranks have seen, in order of their index."""
    lines = [line for path in Path().glob("seen-*") for line in path.read_text().splitlines()]
    for path in Path().glob("seen-*"):
        path.unlink()
    return sorted(i for kind, indices in map(json.loads, lines) if kind == mode for i in indices)


def events(run_dir: str, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_metrics(Path(run_dir) / "metrics.jsonl") if e["event"] == kind]


def assert_close(ours: dict[str, Any], theirs: dict[str, Any], dtype: str) -> None:
    """Compare what a checkpoint holds of the training but for rounding; counters to the bit."""
    assert ours["progress"]["step"] == theirs["progress"]["step"]
    for name in ("updates", "skipped", "epoch", "samples"):
        assert ours["progress"][name] == theirs["progress"][name], name
    assert ours["scaler"] == theirs["scaler"]
    bound = {"float32": 1e-5, "bfloat16": 3e-2, "float16": 5e-3}[dtype]
    for part in ("model", "ema"):
        for name, value in theirs[part].items():
            torch.testing.assert_close(ours[part][name], value, rtol=bound, atol=bound)


@pytest.mark.parametrize(
    ("size", "dtype", "changes"),
    [
        (2, "float32", ()),
        (3, "float32", ("data.micro_batch_size=2",)),
        (2, "bfloat16", ("data.micro_batch_size=1", "task={_target_: test_ddp.Tokens}")),
        (2, "bfloat16", ("amp.modules={head: float32}",)),
        (2, "float16", ("data.train.bad=[5]", "data.micro_batch_size=3")),
    ],
)
def test_several_ranks_equal_one(size: int, dtype: str, changes: tuple[str, ...]) -> None:
    changes = (*changes, f"amp.dtype={dtype}")
    whole = one("one", *changes)
    alone = {mode: seen(mode) for mode in ("train",)}
    ranks(size, "many", *changes)
    many = last(Path("many"))
    assert_close(many, whole, dtype)
    assert many["world_size"] == size
    assert len(many["rng"]) == size
    if "Tokens" not in f"{changes}":
        is_padding = len(seen("train")) - len(alone["train"])
        assert 0 <= is_padding <= 3 * size  # in the last step of an epoch, where samples are few
    ours, theirs = events("many", "eval"), events("one", "eval")
    for mine, other in zip(ours, theirs, strict=True):
        assert mine["eval/index"] == pytest.approx(other["eval/index"], rel=1e-12)
        assert mine["eval/loss"] == pytest.approx(other["eval/loss"], rel=3e-2)
    for mine, other in zip(events("many", "train"), events("one", "train"), strict=True):
        assert mine["samples"] == other["samples"]
        if other["loss"] not in ("nan", "inf"):
            assert mine["loss"] == pytest.approx(other["loss"], rel=3e-2)
    assert sorted(path.name for path in Path("many/logs").iterdir()) == [
        f"rank-{rank}.log" for rank in range(size)
    ]


def test_rs_resume_on_another_number_of_ranks_takes_the_same_steps() -> None:
    whole = one("one", "scheduler=null")  # whose plan would follow from max_steps
    ranks(2, "two", "train.max_steps=4", "scheduler=null")
    ranks(1, "", "train.max_steps=6", resume="two")
    ranks(3, "", "train.max_steps=null", resume="two")
    assert_close(last(Path("two")), whole, "float32")


def test_resume_on_the_same_ranks_is_exact_and_a_stream_is_dealt() -> None:
    stream = ("data.train={_target_: test_ddp.Stream, size: 22}", "scheduler=null")
    ranks(2, "a", *stream)
    whole = last(Path("a"))
    ranks(2, "b", resume="a/checkpoints/step-00000004.pt")
    assert_same(last(Path("b")), whole)
    assert_close(whole, one("one", *stream), "float32")


@pytest.mark.parametrize("number", [signal.SIGTERM, signal.SIGUSR1])
def test_sg3_a_signal_to_one_rank_stops_all_at_one_step_with_one_checkpoint(number: int) -> None:
    slow = "data.train.delay_s=0.05"

    def kill(context: Any) -> None:
        while not list(Path("a/checkpoints").glob("step-*.pt")):
            time.sleep(0.05)
        os.kill(context.pids()[1], number)

    ranks(2, "a", slow, "checkpoint.every_steps=2", kill=kill)
    said = [Path(f"preempted-{rank}").read_text() for rank in range(2)]
    assert said[0] == said[1]
    step = last(Path("a"))["progress"]["step"]
    assert f"at step {step}, which is saved" in said[0]
    assert events("a", "stop")[-1]["reason"] == "preempted"
    ranks(2, "", "data.train.delay_s=0", resume="a")
    assert_close(last(Path("a")), one("one"), "float32")


class Branch(Net):
    """A layer that takes no part."""

    def __init__(self) -> None:
        super().__init__()
        self.unused = nn.Linear(8, 4)


def test_dd4_unused_parameters_are_named_with_the_key_that_allows_them() -> None:
    branch = "model={_target_: test_ddp.Branch}"
    with pytest.raises(Exception, match=r"2 parameters take no part .*unused\.weight"):
        ranks(2, "a", branch)
    ranks(2, "b", branch, "distributed.find_unused_parameters=true", "train.max_steps=3")
    assert last(Path("b"))["progress"]["updates"] == 3


def test_dd7_a_bad_sample_on_one_rank_stops_all_and_is_told_with_its_rank() -> None:
    bad = ("data.train.bad=[7]", "data.shuffle=false", "amp.nonfinite=stop")
    with pytest.raises(Exception, match=r"(?s)batch holds .*its samples 7\).*on rank 1"):
        ranks(2, "a", *bad)
    assert events("a", "stop")[-1]["exit_code"] == 3
    assert "samples 7" in events("a", "diagnosis")[-1]["cause"]
