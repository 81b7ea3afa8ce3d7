"""A checkpoint by itself: its metrics are those of training, on any ranks; and its model."""

from __future__ import annotations

import json
import random
import re
import signal
import sys
from contextlib import ExitStack, suppress
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
from processes import starting
from test_ddp import free_port
from test_resume_exact import RECIPE
from torch import Tensor, nn
from torch.nn import functional as F
from typer.testing import CliRunner, Result

import ampctl
from ampctl.builder.job import build_job
from ampctl.checkpoint import disk, file
from ampctl.cli import app
from ampctl.errors import AmpctlError, CheckpointError
from ampctl.recipe.load import load_recipe
from ampctl.rng import seed_everything
from ampctl.run import from_checkpoint, worker
from ampctl.track.metrics import read_metrics

TESTS = Path(__file__).parent
EVERY_STEP = ("train.eval_every_steps=1", "train.max_epochs=1", "checkpoint.every_steps=1")


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    (folder / "recipe.yaml").write_text(RECIPE)


def train(run_dir: str = "a", *overrides: str) -> Path:
    loaded = load_recipe("recipe.yaml", (*EVERY_STEP, *overrides))
    worker.train(loaded, run_dir=Path(run_dir), resume=False, quiet=True)
    return Path(run_dir)


def train_by_command(folder: Path, *overrides: str) -> None:
    """Train with the code in the folder, so that commands in other processes trust it there."""
    (folder / "own_parts.py").write_bytes((TESTS / "own_parts.py").read_bytes())
    with starting(folder) as start:
        ended = start("train", "recipe.yaml", "--run-dir", "a", *EVERY_STEP, *overrides).wait()
    assert ended.code == 0, ended


def run(*argv: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exc_info)
    assert "Traceback" not in result.stderr
    if code:
        assert result.stderr.count("error: ") == 1
        assert result.stdout == ""
    return result


def evaluated(*argv: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run("eval", *argv, "--json").stdout)
    return facts


def metrics_of(run_dir: Path) -> dict[int, dict[str, float]]:
    """The metrics that training found, by step."""
    events = [e for e in read_metrics(run_dir / "metrics.jsonl") if e["event"] == "eval"]
    return {e["step"]: {k: v for k, v in e.items() if k.startswith("eval/")} for e in events}


class Penalized:
    """Its loss, in an evaluation too, has a gradient in it and depends on the step."""

    def loss(self, model: nn.Module, batch: Any, step: int, grad: Any) -> tuple[Tensor, int]:
        x, y = batch
        x = x.requires_grad_()
        logits = model(x)
        steepness = grad(logits, x).square().mean()
        return F.cross_entropy(logits.float(), y) + steepness, step

    def metrics(self, step: int, batch: Any) -> dict[str, float]:
        return {"step": float(step)}


class Hidden(nn.Module):
    """Has random numbers that no checkpoint holds: a buffer that is not persistent."""

    def __init__(self) -> None:
        super().__init__()
        self.layer = nn.Linear(8, 4)
        self.register_buffer("projection", torch.randn(8, 8), persistent=False)

    def forward(self, x: Tensor) -> Tensor:
        return self.layer(x @ self.projection)


@pytest.mark.parametrize(
    "overrides",
    [
        ("amp.dtype=float32",),
        ("amp.dtype=bfloat16", "data.eval.size=7", "data.eval_batch_size=2"),
        ("amp.dtype=float16", "train.ema_decay=null"),
        ("amp.dtype=float16", "task={_target_: test_eval.Penalized}"),
        ("amp.dtype=bfloat16", "amp.modules={head: float32}"),
        ("amp.upcast=true", "model={_target_: own_parts.HalfNet}"),
        ("model={_target_: test_eval.Hidden}",),
        (
            "train.channels_last=true",
            "model={_target_: ampctl.models.ConvNet, num_classes: 4}",
            "data.train={_target_: own_parts.Images}",
            "data.eval={_target_: own_parts.Images}",
            "task={_target_: ampctl.tasks.Classification}",
        ),
    ],
    ids=lambda overrides: overrides[0],
)
def test_an_evaluation_gives_the_metrics_of_training_to_the_bit(overrides: tuple[str, ...]) -> None:
    run_dir = train("a", *overrides)
    found = metrics_of(run_dir)
    assert len(found) == 4 or "Images" in f"{overrides}"
    for step, metrics in found.items():
        torch.manual_seed(step)  # what was drawn here before does not matter
        facts = evaluated(f"a/checkpoints/step-{step:08d}.pt")
        assert facts["metrics"] == metrics
        assert facts["stored"] == metrics
        assert facts["step"] == step
    assert evaluated("a")["step"] == max(found)


def test_raw_weights_are_those_that_a_run_without_an_average_evaluates() -> None:
    averaged, raw = metrics_of(train("a"))[4], metrics_of(train("b", "train.ema_decay=null"))[4]
    assert averaged != raw
    facts = evaluated("a", "--raw")
    assert (facts["metrics"], facts["weights"], facts["stored"]) == (raw, "raw", None)
    facts = evaluated("a", "--ema")
    assert (facts["metrics"], facts["weights"]) == (averaged, "ema")
    assert evaluated("b")["weights"] == "raw"
    assert "holds no EMA" in run("eval", "b", "--ema", code=4).stderr


def test_an_evaluation_writes_nothing_and_needs_no_training_data(folder: Path) -> None:
    train()
    before = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    facts = evaluated("a", "data.train.size=0")
    assert facts["metrics"] == metrics_of(Path("a"))[4]
    after = {path: path.stat().st_mtime_ns for path in folder.rglob("*")}
    assert {path: after[path] for path in after if "__pycache__" not in path.parts} == {
        path: before[path] for path in before if "__pycache__" not in path.parts
    }


def test_another_split_may_be_named(folder: Path) -> None:
    train("a")
    facts = evaluated("a", "data.eval.size=5")
    assert facts["samples"] == 5
    assert facts["metrics"] != facts["stored"]
    split = "data.eval={_target_: own_parts.Augmented, size: 9}"
    assert evaluated("a", "data.eval=null", split)["metrics"] == facts["stored"]
    for argv in (("a",), ("a", "--nproc-per-node", "2")):
        message = run("eval", *argv, "data.eval=null", code=2).stderr
        assert "data.eval: there is no split to evaluate on" in message
        assert "_target_" in message
    text = run("eval", "a").stdout
    name, value = next(iter(facts["stored"].items()))
    assert f"{name}:  {value} (in training {value})" in text
    assert "weights:    averaged (EMA)" in text


def test_dd3_ranks_evaluate_as_one_does(folder: Path) -> None:
    train_by_command(folder, "data.eval.size=7", "task={_target_: ampctl.tasks.Classification}")
    alone = evaluated("a", "--trust")
    place = {"WORLD_SIZE": "3", "MASTER_ADDR": "127.0.0.1", "MASTER_PORT": f"{free_port()}"}
    with ExitStack() as stack:  # as torchrun starts them
        running = []
        for rank in range(3):
            start = starting(folder, RANK=f"{rank}", LOCAL_RANK=f"{rank}", **place)
            running.append(stack.enter_context(start)("eval", "a", "--json"))
        ended = [each.wait() for each in running]
    assert [each.code for each in ended] == [0, 0, 0], ended
    assert [each.out for each in ended[1:]] == ["", ""]
    facts = json.loads(ended[0].out)
    assert (facts["world_size"], facts["samples"]) == (3, 7)
    assert facts["metrics"] == pytest.approx(alone["metrics"], rel=1e-6)


def test_batches_are_those_of_training_on_another_number_of_ranks_too() -> None:
    sizes = {}
    for given in ((), ("data.eval_batch_size=5",), ("data.micro_batch_size=2",)):
        loaded = load_recipe("recipe.yaml", ("data.micro_batch_size=null", *given))
        batches = [from_checkpoint._with_batches_of_training(loaded, n) for n in (1, 3)]
        sizes[given] = [each.recipe.data.eval_batch_size for each in batches]
    assert list(sizes.values()) == [[6, 2], [5, 5], [2, 2]]


def test_our_launcher_evaluates_and_its_first_rank_tells_the_outcome(folder: Path) -> None:
    train_by_command(folder, "task={_target_: ampctl.tasks.Classification}")
    alone = evaluated("a", "--trust", "--raw", "data.eval.size=5")
    with starting(folder) as start:
        flags = ("--raw", "--json", "--nproc-per-node", "2")
        ended = start("eval", *flags, "a", "data.eval.size=5").wait()
    # Gloo of torch 2.10 tells its connections, in pieces that several ranks write into each other.
    said = re.sub(
        r"\[Gloo\] Rank | is connected to |[^:]*connected peer ranks is : ", "", ended.err
    )
    assert ended.code == 0
    assert not said.strip("0123456789 \n"), ended.err
    facts = json.loads(ended.out)
    assert (facts["world_size"], facts["samples"], facts["weights"]) == (2, 5, "raw")
    assert facts["metrics"] == pytest.approx(alone["metrics"], rel=1e-6)


def test_what_cannot_be_evaluated_is_told_with_its_code(folder: Path) -> None:
    train("a", "model={_target_: own_parts.Poisons}")
    assert "no such file" in run("eval", "nowhere", code=4).stderr
    wider = "model={_target_: own_parts.Net, width: 3}"
    assert "first.weight: [16, 8] saved, [3, 8]" in run("eval", "a", wider, code=4).stderr
    if not torch.cuda.is_available():
        assert "none is here" in run("eval", "a", "train.device=cuda", code=5).stderr
    (bad,) = Path("a/checkpoints").glob("*.nonfinite.pt")
    assert "it holds NaN or infinity in model.largest" in run("eval", f"{bad}", code=4).stderr
    newest = Path("a/checkpoints/latest.pt").resolve()
    newest.write_bytes(newest.read_bytes()[:-100])
    assert "damaged" in run("eval", f"{newest}", code=4).stderr
    assert f"checkpoint {newest.name} cannot be used" in run("eval", "a").stderr


def test_a_fault_of_the_data_or_the_task_is_told_as_in_training() -> None:
    train("a", "task={_target_: ampctl.tasks.Classification}")
    message = run("eval", "a", "task={_target_: ampctl.tasks.Regression}", code=2).stderr
    assert "predictions have shape" in message


@pytest.mark.parametrize(("number", "code"), [(signal.SIGTERM, 75), (signal.SIGINT, 130)])
def test_a_signal_ends_an_evaluation(folder: Path, number: signal.Signals, code: int) -> None:
    train_by_command(folder)
    (folder / "slow_part.py").write_text(
        "import pathlib, time\n"
        "from own_parts import Augmented\n"
        "class Slow(Augmented):\n"
        "    def __getitem__(self, index):\n"
        "        pathlib.Path('reading').touch()\n"
        "        time.sleep(1)\n"
        "        return super().__getitem__(index)\n"
    )
    with starting(folder) as start:
        running = start("eval", "a", "data.eval={_target_: slow_part.Slow, size: 500}")
        running.until(lambda: (folder / "reading").exists())
        running.send(number)
        ended = running.wait()
    assert ended.code == code
    assert "before the evaluation was over" in ended.err
    assert ended.err.count("error: ") == 1


# The model itself


def test_load_model_gives_the_ready_model_in_one_line() -> None:
    saved = torch.load(train() / "checkpoints" / "latest.pt", weights_only=True)
    for ema, part in ((None, "ema"), (True, "ema"), (False, "model")):
        model = ampctl.load_model("a", ema=ema)
        assert type(model).__name__ == "Net"
        assert not any(module.training for module in model.modules())
        state = model.state_dict()
        assert state.keys() == saved[part].keys()
        for name, value in state.items():
            assert torch.equal(value, saved[part][name]), name
    on_cpu = ampctl.load_model(Path("a"), device=torch.device("cpu"), ema=False)
    assert torch.equal(on_cpu(torch.ones(2, 8)), model(torch.ones(2, 8)))
    train("b", "train.ema_decay=null")
    assert ampctl.load_model("b/checkpoints/latest.pt") is not None
    with pytest.raises(CheckpointError, match="holds no EMA"):
        ampctl.load_model("b", ema=True)


def test_load_model_leaves_the_program_s_random_numbers_alone() -> None:
    train()
    draws = []
    for loads in (False, True):
        seed_everything(5)
        if loads:
            ampctl.load_model("a")
        draws.append([random.random(), np.random.rand(), torch.rand(()).item()])
    assert draws[0] == draws[1]


def test_load_model_has_what_no_checkpoint_holds_and_the_dtypes_that_were_trained() -> None:
    train("a", "model={_target_: test_eval.Hidden}")
    loaded = load_recipe("recipe.yaml", ("model={_target_: test_eval.Hidden}",))
    trained = build_job(loaded).state.bare
    assert torch.equal(ampctl.load_model("a").projection, trained.projection)
    train("b", "model={_target_: own_parts.HalfNet}", "amp.upcast=true")
    assert ampctl.load_model("b").head.weight.dtype == torch.float32
    train("c", "amp.modules={head: bfloat16}", "train.channels_last=false")
    assert type(ampctl.load_model("c").head) is nn.Linear  # the bare model, as its class makes it


def test_a_strangers_checkpoint_needs_trust(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (folder / "hostile.py").write_text(
        "open('canary', 'w').close()\nfrom own_parts import Net, Augmented\n"
    )
    train("a", "model={_target_: hostile.Net}", "data.eval={_target_: hostile.Augmented, size: 4}")
    (folder / "canary").unlink()
    monkeypatch.delitem(sys.modules, "hostile")
    monkeypatch.setenv("XDG_STATE_HOME", f"{folder / 'fresh'}")
    message = run("eval", "a", code=4).stderr
    assert "model: hostile.Net" in message
    assert "data.eval: hostile.Augmented" in message
    assert "--trust" in message
    assert "model: hostile.Net" in run("eval", "a", "--nproc-per-node", "2", code=4).stderr
    with pytest.raises(CheckpointError, match="trust=True"):
        ampctl.load_model("a")
    assert not (folder / "canary").exists()
    assert "trusted: model: hostile.Net" in run("eval", "a", "--trust").stderr
    assert (folder / "canary").exists()
    assert ampctl.load_model("a", trust=True) is not None
    assert not (folder / "fresh").exists()  # to look at it once is not to have trained it


def test_a_wrong_override_is_told_with_its_remedy() -> None:
    train()
    assert "did you mean data.eval" in run("eval", "a", "data.evall=1", code=2).stderr


ODD: dict[str, dict[str, Any]] = {
    "no rng": {"rng": []},
    "rng of nothing": {"rng": [{}]},
    "rng of text": {"rng": [{"python": "x", "numpy": "y", "torch": "z"}]},
    "rng of one byte": {"rng": [{"python": (3, (1,), None), "numpy": {}, "torch": torch.ones(1)}]},
    "no progress": {"progress": {}},
    "step of text": {"progress": {"step": "one"}},
    "step of infinity": {"progress": {"step": float("inf")}},
    "no scale": {"scaler": {}},
    "scale of text": {"scaler": {"scale": "large", "enabled": True}},
    "scale of nan": {"scaler": {"scale": float("nan"), "_growth_tracker": 0, "enabled": True}},
    "no weights": {"model": {}, "ema": {}},
    "weights of text": {"ema": {"head.weight": "text"}},
    "ranks below none": {"world_size": -5},
    "ranks without end": {"world_size": 1 << 40},
    "no ranks": {"world_size": 0},
    "half a letter": {"recipe": "\ud800"},
    "no recipe": {"recipe": ""},
    "another dtype": {"dtype": "\x1b[31mfloat4"},
}


@pytest.mark.parametrize("kind", ODD)
def test_odd_contents_never_end_in_a_traceback(kind: str) -> None:
    train("a", "amp.dtype=float16", "train.eval_every_steps=4")
    payload = {**torch.load("a/checkpoints/latest.pt", weights_only=True)}
    if kind == "weights of text":
        ODD[kind]["ema"] = {**payload["ema"], **ODD[kind]["ema"]}
    file.write(Path("odd.pt"), {**payload, **ODD[kind]})
    disk.publish(disk.temporary(Path("odd.pt")), Path("odd.pt"))
    result = CliRunner().invoke(app, ["eval", "odd.pt"])
    assert result.exit_code in (0, 2, 4), (result.output, result.exc_info)
    assert result.stderr.count("error: ") == bool(result.exit_code)
    assert "\x1b" not in result.output
    with suppress(AmpctlError):
        ampctl.load_model("odd.pt")
