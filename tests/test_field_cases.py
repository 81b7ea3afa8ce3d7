"""Faults that people met in the field, each tried on ampctl; a name begins with its case."""

from __future__ import annotations

import copy
import math
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from own_parts import Masked
from states import CPU, DTYPES, Net, batches, make_state, run, spoil
from test_resume_exact import RECIPE, assert_same, last, losses, resume, train
from torch import Tensor, nn
from typer.testing import CliRunner

from ampctl.cli import app
from ampctl.data.move import to_device
from ampctl.engine.learning_rate import TorchSchedule
from ampctl.errors import CheckpointError, UsageError
from ampctl.recipe.schema import AmpConfig
from ampctl.schedules import Cosine
from ampctl.tasks import Task
from ampctl.tasks.task import as_task
from ampctl.track.metrics import read_metrics

needs_no_cuda = pytest.mark.skipif(torch.cuda.is_available(), reason="a CUDA device is here")


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    write()


def write(*changes: tuple[str, str]) -> None:
    """Write ``recipe.yaml`` with some of its text changed."""
    text = RECIPE
    for old, new in changes:
        assert old in text
        text = text.replace(old, new)
    Path("recipe.yaml").write_text(text)


def ampctl(*arguments: str, code: int = 0) -> str:
    """Run a command; return all it said."""
    result = CliRunner().invoke(app, list(arguments))
    assert result.exit_code == code, result.output
    return result.output


def events(run_dir: Path | str, kind: str) -> list[dict[str, Any]]:
    return [e for e in read_metrics(Path(run_dir) / "metrics.jsonl") if e["event"] == kind]


class Weights(nn.Module):
    """Three bare weights; the output is their product with the input."""

    def __init__(self) -> None:
        super().__init__()
        self.weight = nn.Parameter(torch.ones(3))

    def forward(self, x: Tensor) -> Tensor:
        return self.weight * x


class Sum:
    """The loss is the sum of the model's output: the gradient is what the batch holds."""

    def loss(self, model: nn.Module, batch: Tensor) -> Tensor:
        return model(batch).sum()


def sum_task() -> Task:
    return as_task(Sum())


# ---------------------------------------------------------------- SP: the order of the four calls


def test_sp4_the_parameters_that_get_no_gradient_are_named() -> None:
    class Detached:
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return model(batch[0]).detach().sum()

    class ShardWriter:
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return torch.ones(1, requires_grad=True).sum()

    for task in (Detached(), ShardWriter()):
        model = Net()
        before = copy.deepcopy(model.state_dict())
        state = make_state(
            model, torch.optim.SGD(model.parameters(), lr=1.0), "float16", task=as_task(task)
        )
        with pytest.raises(UsageError, match=r"0 of 6 parameters .*\(first.weight, first.bias, "):
            run(state, [batches(1)])
        assert_same(
            dict(model.named_parameters()), {k: before[k] for k, _ in model.named_parameters()}
        )


@pytest.mark.parametrize("micro", [1, 4])
def test_sp6_the_scale_is_updated_once_a_step(micro: int, monkeypatch: pytest.MonkeyPatch) -> None:
    model = Net()
    state = make_state(model, torch.optim.SGD(model.parameters(), lr=0.1), "float16")
    calls: list[str] = []
    for name in ("unscale_", "step", "update"):
        original = getattr(state.scaler, name)

        def counted(*args: Any, name: str = name, original: Any = original) -> Any:
            calls.append(name)
            return original(*args)

        monkeypatch.setattr(state.scaler, name, counted)
    run(state, [batches(micro, seed=i) for i in range(3)])
    assert calls == ["unscale_", "step", "update"] * 3


@pytest.mark.parametrize("options", [{"fused": True}, {"foreach": True}, {"foreach": False}])
@pytest.mark.parametrize("dtype", DTYPES)
def test_sp8_the_steps_that_were_skipped_are_known_exactly(
    dtype: str, options: dict[str, bool]
) -> None:
    """With growth at each step and a scale at its floor, no change of scale tells."""
    data = batches(4)
    windows = [[data[0]], [spoil(data[1])], [data[2]], [spoil(data[3])]]
    for init_scale, min_scale in ((64.0, 1.0), (64.0, 64.0)):
        model = Net()
        amp = AmpConfig(
            growth_interval=1, init_scale=init_scale, min_scale=min_scale, max_scale=128
        )
        state = make_state(model, torch.optim.Adam(model.parameters(), **options), dtype, amp=amp)
        reports = run(state, windows)
        assert [report.skipped for report in reports] == [False, True, False, True]
        assert (state.progress.updates, state.progress.skipped) == (2, 2)
        steps = {int(values["step"]) for values in state.updaters[0].optimizer.state.values()}
        assert steps == {2}


# ---------------------------------------------------------------- NU, NF: numbers


def test_nu9_gradients_below_the_range_of_float16_are_not_lost() -> None:
    class Tiny:
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return model(batch[0]).float().mean() * 1e-8

    torch.manual_seed(0)
    found = {}
    for dtype in ("float32", "float16"):
        torch.manual_seed(0)
        model = nn.Linear(8, 4)
        state = make_state(
            model, torch.optim.SGD(model.parameters(), lr=0.0), dtype, task=as_task(Tiny())
        )
        run(state, [batches(1, size=64)])
        assert model.weight.grad is not None
        found[dtype] = model.weight.grad.clone()
    assert torch.count_nonzero(found["float16"]) == found["float16"].numel()
    torch.testing.assert_close(found["float16"], found["float32"], rtol=2e-2, atol=1e-11)


def test_nf5_batchnorm_buffers_survive_a_skip() -> None:
    torch.manual_seed(0)
    model = Net()
    state = make_state(
        model,
        torch.optim.SGD(model.parameters(), lr=0.1),
        "float16",
        amp=AmpConfig(init_scale=64.0),
    )
    run(state, [[batch] for batch in batches(3)])
    before = copy.deepcopy(model.state_dict())
    x, y = batches(1, seed=9)[0]
    (report,) = run(state, [[(x.abs() * 1e6, y)]])  # the first layer overflows in float16
    assert report.skipped
    assert not math.isfinite(report.loss)
    assert_same(model.state_dict(), before)
    model.eval()
    assert torch.isfinite(model(x)).all()


def test_nf6_a_buffer_that_went_bad_is_set_aside_and_the_latest_stays() -> None:
    write(("own_parts.Net", "own_parts.Poisons"), ("micro_batch_size: 4", "micro_batch_size: 6"))
    start = ("train", "recipe.yaml", "--run-dir", "r", "data.train.bad=[]", "train.max_steps=4")
    said = ampctl(*start, code=3)
    assert "step 4: not finite: model.largest" in said
    assert "at step 4 the state is not finite: model.largest" in said
    assert "the newest one that can is r/checkpoints/step-00000003.pt" in said
    folder = Path("r/checkpoints")
    assert {path.name for path in folder.glob("*nonfinite*")} == {"step-00000004.nonfinite.pt"}
    assert torch.load(folder / "latest.pt", weights_only=True)["progress"]["step"] == 3
    refusal = ampctl("resume", str(folder / "step-00000004.nonfinite.pt"), code=4)
    assert "model.largest" in refusal
    ampctl("resume", "r", code=3)
    assert last(Path("r"))["progress"]["step"] == 3  # the fourth went bad again, in the same way


def test_nf6_a_run_that_saves_nothing_of_use_any_more_stops() -> None:
    poison = "model={_target_: own_parts.Poisons, lasting: true}"
    write(("micro_batch_size: 4", "micro_batch_size: 6"))
    said = ampctl("train", "recipe.yaml", "--run-dir", "r", "data.train.bad=[]", poison, code=3)
    assert "at step 6 the state is not finite, for 3 checkpoints in a row: model.largest" in said
    assert "step-00000003.pt. Find what makes them so; then `ampctl resume r` goes on" in said
    (stop,) = events(Path("r"), "stop")
    assert (stop["reason"], stop["exit_code"], stop["step"]) == ("nonfinite", 3, 6)


@pytest.mark.parametrize(("mode", "best"), [("min", 4), ("max", 2)])
def test_nf8_nan_is_never_best_in_a_run(mode: str, best: int) -> None:
    write(("own_parts.NoisyTask", "own_parts.Series, values: [.nan, 0.5, .nan, 0.4, -.inf, .inf]"))
    watched = ("checkpoint.monitor=eval/score", f"checkpoint.mode={mode}")
    more = ("train.eval_every_steps=1", "train.max_steps=6", "train.ema_decay=null")
    saved = last(train("r", "data.eval_batch_size=9", *watched, *more))
    assert saved["progress"]["best_step"] == best
    best_file = torch.load("r/checkpoints/best.pt", weights_only=True)
    assert best_file["progress"]["step"] == best
    scores = [event["eval/score"] for event in events("r", "eval")]
    assert [str(score) for score in scores] == ["nan", "0.5", "nan", "0.4", "-inf", "inf"]


@pytest.mark.parametrize("dtype", DTYPES)
def test_nf10_clipping_hides_no_infinite_gradient(dtype: str) -> None:
    model = Weights()
    state = make_state(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        dtype,
        amp=AmpConfig(clip_norm=1.0, init_scale=4.0),
        task=sum_task(),
    )
    bad, good = torch.tensor([1.0, math.inf, 1.0]), torch.tensor([0.0, 2.0, 0.0])
    reports = run(state, [[bad], [good]])
    assert [report.skipped for report in reports] == [True, False]
    assert model.weight.tolist() == pytest.approx([1.0, 0.0, 1.0], abs=1e-5)


def test_nf10_a_norm_too_large_for_a_float_is_skipped_not_clipped_to_nothing() -> None:
    model = Weights()
    state = make_state(
        model,
        torch.optim.SGD(model.parameters(), lr=1.0),
        "float32",
        amp=AmpConfig(clip_norm=1.0),
        task=sum_task(),
    )
    (report,) = run(state, [[torch.full((3,), 3e38)]])
    assert report.skipped
    assert model.weight.tolist() == [1.0, 1.0, 1.0]


@pytest.mark.parametrize("dtype", DTYPES)
def test_a_mask_of_minus_infinity_is_no_fault(dtype: str) -> None:
    write(("own_parts.Net", "own_parts.Masked"))
    run_dir = train("r", f"amp.dtype={dtype}", "data.train.bad=[]", "train.max_epochs=2")
    saved = last(run_dir)
    assert saved["progress"]["step"] == 8
    assert saved["progress"]["skipped"] == 0
    assert not list(run_dir.glob("checkpoints/*nonfinite*"))
    assert torch.equal(saved["model"]["mask"], Masked().mask)
    again = resume(run_dir / "checkpoints/step-00000003.pt", run_dir="again")
    assert_same(last(again), saved)


# ---------------------------------------------------------------- SA: schedules and accumulation


def test_sa1_the_schedule_waits_for_steps_that_were_really_taken() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1, momentum=0.9)
    with warnings.catch_warnings():
        warnings.simplefilter("error")
        torch_schedule = TorchSchedule(
            optimizer, torch.optim.lr_scheduler.OneCycleLR(optimizer, max_lr=1.0, total_steps=6)
        )
        state = make_state(model, optimizer, "float16", learning_rate=torch_schedule)
        data = batches(7)
        windows = [[spoil(data[0])], [spoil(data[1])], *([batch] for batch in data[2:])]
        reports = run(state, windows)
    assert [report.skipped for report in reports] == [True] * 2 + [False] * 5
    reference = torch.optim.SGD(Net().parameters(), lr=0.1, momentum=0.9)
    by_hand = torch.optim.lr_scheduler.OneCycleLR(reference, max_lr=1.0, total_steps=6)
    expected = []
    for _ in range(5):
        expected.append(by_hand.get_last_lr()[0])
        reference.step()
        by_hand.step()
    assert [report.lr for report in reports] == [expected[0], expected[0], *expected]


def test_sa2_the_schedule_counts_optimizer_steps_whatever_the_micro_batch() -> None:
    write(("own_parts.Augmented, bad: [5]", "own_parts.Augmented, bad: [5], size: 24"))
    expected = None
    for micro in (6, 4, 2):
        run_dir = train(
            f"micro-{micro}",
            f"data.micro_batch_size={micro}",
            "data.train.bad=[]",
            "train.max_epochs=2",
        )
        rates = [event["lr"] for event in events(run_dir, "train")]
        expected = expected or rates
        assert rates == expected
    schedule = Cosine(total_steps=8, warmup_steps=3)
    assert expected == [1e-2 * schedule(update) for update in range(8)]


def test_sa6_a_tail_window_weighs_the_same_after_resuming() -> None:
    """22 samples: windows of 8, 8 and 6, in micro-batches of 3, 3, 2 and of 3, 3."""
    options = ("data.batch_size=8", "data.micro_batch_size=3", "train.max_epochs=2")
    whole = train("whole", *options)
    for step in (1, 2, 4, 5):
        again = resume(whole / f"checkpoints/step-{step:08d}.pt", run_dir=f"from-{step}")
        assert losses(again) == {k: v for k, v in losses(whole).items() if k > step}
        assert_same(last(again), last(whole))


# ---------------------------------------------------------------- OP: optimizers


@pytest.mark.parametrize("command", ["check", "train"])
def test_op1_op2_trainable_float16_parameters_are_named_before_training(command: str) -> None:
    write(("own_parts.Net", "own_parts.Freezable, half: true"))
    where = ("--run-dir", "r") if command == "train" else ()
    said = ampctl(command, "recipe.yaml", *where, code=2)
    assert "head.weight, head.bias" in said
    assert not list(Path("r").glob("checkpoints/*.pt"))


def test_op1_frozen_float16_parameters_train_on() -> None:
    write(("own_parts.Net", "own_parts.Freezable, half: true, freeze: true"))
    saved = last(train("r", "amp.dtype=float16", "train.max_steps=2"))
    assert saved["model"]["head.weight"].dtype == torch.float16
    assert saved["progress"]["updates"] > 0


LBFGS = (
    "torch.optim.AdamW, lr: 1e-2",
    "torch.optim.LBFGS, max_iter: 3, line_search_fn: strong_wolfe",
)


@pytest.mark.parametrize("command", ["check", "train"])
def test_op4_lbfgs_in_float16_is_refused_by_name(command: str) -> None:
    write(LBFGS)
    where = ("--run-dir", "r") if command == "train" else ()
    said = ampctl(command, "recipe.yaml", *where, "amp.dtype=float16", code=2)
    assert "LBFGS" in said
    assert "bfloat16" in said


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_op4_lbfgs_learns_where_nothing_is_scaled(dtype: str) -> None:
    write(
        LBFGS,
        ("scheduler: {_target_: ampctl.schedules.Cosine, warmup_steps: 3}\n", ""),
        ("own_parts.NoisyTask", "ampctl.tasks.Classification"),
        ("own_parts.Net", "own_parts.Net, dropout: 0.0"),
    )
    data = ("data.train.bad=[]", "data.batch_size=22", "data.micro_batch_size=11")
    whole = train("r", f"amp.dtype={dtype}", *data, "train.max_epochs=10")
    values = [event["loss"] for event in events(whole, "train")]
    assert values[-1] < 0.8 * values[0]
    again = resume(whole / "checkpoints/step-00000006.pt", run_dir="again")
    assert_same(last(again), last(whole))


class FailsInside:
    """The loss is NaN at the given evaluations of it."""

    def __init__(self, *bad: int) -> None:
        self.calls, self.bad = 0, bad

    def loss(self, model: nn.Module, batch: Any) -> Tensor:
        self.calls += 1
        x, y = batch
        loss = nn.functional.cross_entropy(model(x).float(), y)
        return loss * math.nan if self.calls in self.bad else loss


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
@pytest.mark.parametrize("bad", [1, 2, 4])
def test_op4_a_nan_in_an_inner_evaluation_of_lbfgs_takes_all_of_the_step_back(
    bad: int, dtype: str
) -> None:
    torch.manual_seed(0)
    model = Net()
    optimizer = torch.optim.LBFGS(model.parameters(), max_iter=4)
    first = make_state(model, optimizer, dtype, task=as_task(FailsInside()))
    run(first, [batches(1)])
    before = copy.deepcopy((model.state_dict(), optimizer.state_dict()))
    task = FailsInside(bad)
    state = make_state(model, optimizer, dtype, task=as_task(task))
    (report,) = run(state, [batches(1, seed=1)])
    assert task.calls >= bad
    assert report.skipped
    assert_same([model.state_dict(), optimizer.state_dict()], list(before))
    (report,) = run(state, [batches(1, seed=1)])
    assert not report.skipped
    assert not torch.equal(model.head.weight, before[0]["head.weight"])


@pytest.mark.parametrize("dtype", DTYPES)
def test_op5_sparse_gradients_are_unscaled_clipped_and_skipped(dtype: str) -> None:
    write(
        ("own_parts.Net", "own_parts.Bag"),
        ("own_parts.NoisyTask", "ampctl.tasks.Classification"),
        ("own_parts.Augmented, bad: [5]", "own_parts.Tokens"),
        ("own_parts.Augmented, size: 9", "own_parts.Tokens"),
        ("torch.optim.AdamW, lr: 1e-2", "torch.optim.SparseAdam, lr: 0.1"),
        ("clip_norm: 1.0", "clip_norm: 0.05, clip_value: 0.02"),
    )
    whole = train("r", f"amp.dtype={dtype}", "train.max_epochs=6")
    accuracy = [event["eval/accuracy"] for event in events(whole, "eval")]
    assert accuracy[-1] == 1.0
    assert last(whole)["progress"]["skipped"] == 0
    again = resume(whole / "checkpoints/step-00000005.pt", run_dir="again")
    assert_same(last(again), last(whole))


def test_op5_the_norm_of_a_sparse_gradient_counts_a_repeated_row_once() -> None:
    embedding = nn.Embedding(6, 3, sparse=True)
    state = make_state(
        embedding,
        torch.optim.SparseAdam(list(embedding.parameters()), lr=0.1),
        "float32",
        amp=AmpConfig(clip_norm=1.0),
        task=sum_task(),
    )
    before = embedding.weight.detach().clone()
    (report,) = run(state, [[torch.tensor([2, 2, 4])]])
    assert report.grad_norm == pytest.approx(math.sqrt(3 * 4 + 3))  # rows of 2 and of 1
    assert embedding.weight.grad is not None  # clipped where the optimizer reads it
    assert embedding.weight.grad.to_dense().norm().item() == pytest.approx(1.0, rel=1e-5)
    assert (embedding.weight != before).any(1).tolist() == [False, False, True, False, True, False]


@pytest.mark.parametrize("change", ["optimizer.groups=null", "model.freeze=true"])
def test_op8_parameters_in_other_groups_are_named_on_resuming(change: str) -> None:
    write(
        ("own_parts.Net", "own_parts.Freezable, freeze: false"),
        (
            "torch.optim.AdamW, lr: 1e-2",
            'torch.optim.AdamW, lr: 1e-2, groups: {"*.bias": {lr: 1e-3}}',
        ),
    )
    source = train("r", "train.max_steps=2") / "checkpoints/step-00000001.pt"
    with pytest.raises(CheckpointError, match=r"does not fit the recipe: optimizer") as refusal:
        resume(source, change, run_dir="again")
    changed = "head.bias: group 0" if "freeze" in change else "norm.weight: group 2"
    now = "nowhere (frozen or gone)" if "freeze" in change else "group 0"
    assert f"{changed} in the checkpoint, {now} now" in str(refusal.value)


# ---------------------------------------------------------------- RS: resuming


def test_rs2_scale_and_growth_tracker_go_on_where_they_were() -> None:
    options = ("amp.dtype=float16", "amp.growth_interval=9", "data.train.bad=[]")
    whole = train("whole", *options)
    source = whole / "checkpoints/step-00000007.pt"
    saved = torch.load(source, weights_only=True)["scaler"]
    assert (saved["scale"], saved["_growth_tracker"]) == (1024.0, 7)
    again = resume(source, run_dir="again")
    scales = [event["scale"] for event in events(again, "train")]
    assert scales == [1024.0, 2048.0, 2048.0, 2048.0, 2048.0]
    stock = torch.amp.GradScaler("cpu")
    stock.load_state_dict(last(again)["scaler"])
    assert stock.get_scale() == 2048.0


@pytest.mark.parametrize(
    ("saved", "now", "word"),
    [
        ("bfloat16", "float16", "holds no loss scale"),
        ("float32", "float16", "holds no loss scale"),
        ("float16", "bfloat16", "is dropped"),
        ("bfloat16", "float32", "it was saved in bfloat16"),
    ],
)
def test_rs4_a_switch_of_dtype_on_resuming_is_said(saved: str, now: str, word: str) -> None:
    whole = train("whole", f"amp.dtype={saved}", "train.max_steps=3")
    source = str(whole / "checkpoints/step-00000002.pt")
    said = ampctl("resume", source, f"amp.dtype={now}", "--run-dir", "again")
    assert f"resuming in {now} (amp.dtype); it was saved in {saved}" in " ".join(said.split())
    assert word in " ".join(said.split())
    assert last(Path("again"))["dtype"] == now
    assert last(Path("again"))["scaler"]["enabled"] is (now == "float16")


def test_rs14_a_checkpoint_does_not_know_of_torch_compile() -> None:
    compiled = "train.compile={backend: eager, dynamic: true}"
    plain = train("plain", "train.compile=false")
    whole = train("compiled", compiled)
    names = set(last(plain)["model"])
    assert names == set(last(whole)["model"]) == set(last(whole)["ema"])
    assert not any("_orig_mod" in name for name in names)
    for source in (plain, whole):
        for choice in ("train.compile=false", compiled):
            where = f"{source.name}-{'eager' in choice}"
            again = resume(source / "checkpoints/step-00000005.pt", choice, run_dir=where)
            assert_same(last(again)["model"], last(source)["model"])


# ---------------------------------------------------------------- AC, CK: devices and files


def test_ac8_images_reach_the_model_in_channels_last_wherever_they_are_in_a_batch() -> None:
    image, row = torch.randn(2, 3, 4, 4), torch.randn(2, 3)
    moved = to_device({"a": [image, row], "b": "text"}, CPU, channels_last=True)
    assert moved["a"][0].is_contiguous(memory_format=torch.channels_last)
    assert_same(moved, {"a": [image, row], "b": "text"})


@pytest.mark.parametrize("channels", [1, 3])
@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_ac8_channels_last_learns_the_same(channels: int, dtype: str) -> None:
    images = f"own_parts.Images, channels: {channels}"
    write(
        ("own_parts.Net", f"ampctl.models.ConvNet, num_classes: 4, in_channels: {channels}"),
        ("own_parts.NoisyTask", "ampctl.tasks.Classification"),
        ("own_parts.Augmented, bad: [5]", images),
        ("own_parts.Augmented, size: 9", images),
    )
    found = {}
    for choice in ("false", "true"):
        options = (f"train.channels_last={choice}", f"amp.dtype={dtype}", "train.max_steps=4")
        whole = train(f"last-{choice}", *options)
        found[choice] = [event["loss"] for event in events(whole, "train")]
        again = resume(whole / "checkpoints/step-00000002.pt", run_dir=f"again-{choice}")
        assert_same(last(again), last(whole))
    assert found["true"] == pytest.approx(found["false"], rel=2e-3 if dtype == "float32" else 0.1)


@needs_no_cuda
def test_ac9_a_device_that_is_not_here_is_refused_with_advice() -> None:
    said = ampctl("train", "recipe.yaml", "train.device=cuda", code=5)
    assert "train.device=auto" in said


@needs_no_cuda
def test_ac9_float16_without_a_gpu_is_really_float16_with_a_scaler_at_work() -> None:
    saved = last(train("r", "amp.dtype=float16", "train.device=auto", "train.max_steps=3"))
    assert saved["dtype"] == "float16"
    assert saved["scaler"]["enabled"] is True
    assert saved["scaler"]["scale"] != 1.0
    assert events("r", "start")[0]["device"] == "cpu"


def test_ck4_metrics_that_are_numpy_numbers_are_saved_as_plain_ones() -> None:
    write(("own_parts.NoisyTask", "own_parts.Series, values: [0.5, 0.25, 0.125, 0.1]"))
    more = ("checkpoint.monitor=eval/score", "train.ema_decay=null", "data.eval_batch_size=9")
    run_dir = train("r", *more, "train.max_epochs=2")
    saved = torch.load(run_dir / "checkpoints/latest.pt", weights_only=True)
    assert saved["progress"]["best"] == 0.25
    assert {type(value) for value in saved["progress"]["metrics"].values()} == {float}
    said = ampctl("resume", "r", "train.max_epochs=3")
    assert "complete" in said
