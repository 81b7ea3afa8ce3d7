"""Several optimizers in one run: turns, skips, all or nothing, checkpoints."""

from __future__ import annotations

import copy
import math
import re
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest
import states
import torch
from gan_parts import Gan, Pair
from states import DTYPES, run
from test_resume_exact import assert_same, last
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.amp.precision import cache_keeps_gradients
from ampctl.builder.job import build_job
from ampctl.doctor.check import check_recipe
from ampctl.doctor.trace import Operation, Trace
from ampctl.engine.learning_rate import FunctionSchedule
from ampctl.engine.rewind import Rewind
from ampctl.engine.state import TrainState
from ampctl.engine.updater import Updater
from ampctl.errors import CheckpointError, RecipeError, UsageError
from ampctl.recipe.load import load_recipe
from ampctl.recipe.schema import AmpConfig
from ampctl.run import worker
from ampctl.tasks.task import as_task
from ampctl.track.metrics import read_metrics

Make = Callable[[list[nn.Parameter]], torch.optim.Optimizer]
OPTIMIZERS: dict[str, Make] = {
    "adam": lambda p: torch.optim.Adam(p, lr=1e-2),
    "fused adam": lambda p: torch.optim.Adam(p, lr=1e-2, fused=True),
    "sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9),
    "fused sgd": lambda p: torch.optim.SGD(p, lr=1e-2, momentum=0.9, fused=True),
}


def pair(seed: int = 0) -> Pair:
    torch.manual_seed(seed)
    return Pair()


def make_state(
    model: nn.Module,
    parts: Sequence[str],
    task: Any,
    dtype: str = "float32",
    *,
    make: Make = OPTIMIZERS["fused adam"],
    ema_decay: float | None = None,
    **amp: Any,
) -> TrainState:
    """A state with an optimizer for each named child of a model."""
    optimizers = {name: make(list(getattr(model, name).parameters())) for name in parts}
    config = AmpConfig(**amp)
    return states.make_state(
        model, optimizers, dtype, amp=config, ema_decay=ema_decay, task=as_task(task)
    )


def batch(size: int = 6, seed: int = 0) -> tuple[Tensor, Tensor]:
    generator = torch.Generator().manual_seed(seed)
    return torch.randn(size, 2, generator=generator), torch.randn(size, 4, generator=generator)


def spoiled(value: float = math.inf) -> tuple[Tensor, Tensor]:
    real, noise = batch()
    return real, noise * value


# ---------------------------------------------------------------- the loop by hand


def autocast(dtype: torch.dtype | None) -> torch.autocast:
    """Return the autocast of a loop by hand; without its cache where that loses gradients."""
    cache = cache_keeps_gradients()
    return torch.autocast("cpu", dtype=dtype, enabled=dtype is not None, cache_enabled=cache)


def by_hand(
    model: Pair,
    windows: Sequence[Sequence[tuple[Tensor, Tensor]]],
    dtype: str,
    make: Make,
    clip: float | None,
) -> list[float]:
    """The GAN loop of the AMP page: one scaler, two optimizers, one update after both."""
    kind = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    scaler = torch.amp.GradScaler("cpu", init_scale=2.0**14, enabled=dtype == "float16")
    critic, generator = model.critic, model.generator
    optimizers = {"critic": make([*critic.parameters()])}
    optimizers["generator"] = make([*generator.parameters()])
    scales = []

    def step(name: str, losses: list[Callable[[], Tensor]]) -> None:
        model.zero_grad()
        for loss in losses:
            with autocast(kind):
                value = loss()
                value = value * (1 / len(losses)) if len(losses) > 1 else value
            scaler.scale(value).backward()
        scaler.unscale_(optimizers[name])
        if clip is not None:
            nn.utils.clip_grad_norm_(getattr(model, name).parameters(), clip)
        scaler.step(optimizers[name])

    def critic_loss(real: Tensor, noise: Tensor) -> Tensor:
        with torch.no_grad():
            fake = generator(noise)
        scores = critic(real).float(), critic(fake).float()
        return F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()

    def generator_loss(noise: Tensor) -> Tensor:
        return F.softplus(-critic(generator(noise)).float()).mean()

    for window in windows:
        step("critic", [lambda b=b: critic_loss(*b) for b in window])  # type: ignore[misc]
        step("generator", [lambda b=b: generator_loss(b[1]) for b in window])  # type: ignore[misc]
        scaler.update()
        scales.append(scaler.get_scale())
    return scales


@pytest.mark.parametrize("optimizer", ["adam", "fused adam", "fused sgd"])
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("micro", [1, 2])
@pytest.mark.parametrize("clip", [None, 0.05])
def test_parity_with_a_gan_loop_by_hand(
    dtype: str, micro: int, optimizer: str, clip: float | None
) -> None:
    windows = [[batch(seed=10 * i + j) for j in range(micro)] for i in range(6)]
    model, other = pair(), pair()
    state = make_state(
        model,
        ("critic", "generator"),
        Gan(),
        dtype,
        make=OPTIMIZERS[optimizer],
        init_scale=2.0**14,
        clip_norm=clip,
    )
    reports = run(state, windows)
    scales = by_hand(other, windows, dtype, OPTIMIZERS[optimizer], clip)
    assert_same(dict(model.named_parameters()), dict(other.named_parameters()))
    assert_same(dict(model.named_buffers()), dict(other.named_buffers()))
    if dtype == "float16":
        assert [report.scale_after for report in reports] == scales
    assert not any(report.skipped for report in reports)


class Shared:
    """The order of the DCGAN tutorial: what the critic judged is generated once, for both turns."""

    def losses(self, model: Any, batch: Any) -> Iterator[tuple[str, Tensor]]:
        real, noise = batch
        fake = model.generator(noise)
        scores = model.critic(real).float(), model.critic(fake.detach()).float()
        yield "critic", F.softplus(-scores[0]).mean() + F.softplus(scores[1]).mean()
        yield "generator", F.softplus(-model.critic(fake).float()).mean()


class Scaled(nn.Module):
    """A constant in a buffer that a backward pass needs."""

    def __init__(self) -> None:
        super().__init__()
        self.register_buffer("by", torch.tensor([2.0, 3.0]))

    def forward(self, x: Tensor) -> Tensor:
        return x * self.by


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_a_graph_from_before_an_earlier_turn_is_used_after_it(dtype: str) -> None:
    windows = [[batch(seed=i)] for i in range(3)]
    model, other = pair(), pair()
    for each in (model, other):
        each.generator.append(Scaled())
    run(make_state(model, ("critic", "generator"), Shared(), dtype), windows)
    kind = {"float32": None, "bfloat16": torch.bfloat16}[dtype]
    optimizers = {
        name: OPTIMIZERS["fused adam"]([*getattr(other, name).parameters()])
        for name in ("critic", "generator")
    }
    for (each,) in windows:
        turns = Shared().losses(other, each)
        for _ in optimizers:
            with autocast(kind):
                name, loss = next(turns)
            other.zero_grad()
            loss.backward()
            optimizers[name].step()
    assert_same(dict(model.named_parameters()), dict(other.named_parameters()))
    assert_same(dict(model.named_buffers()), dict(other.named_buffers()))


class TwoLosses:
    """The example of the AMP page: two models, and two losses that each depend on both."""

    def loss(self, model: Any, batch: Any) -> Tensor:
        x, y = batch
        a, b = model.a(x).float(), model.b(x).float()
        return F.mse_loss(2 * a + 3 * b, y) + F.mse_loss(3 * a - 5 * b, y)


@pytest.mark.parametrize("dtype", DTYPES)
def test_one_loss_moves_every_optimizer(dtype: str) -> None:
    def models() -> nn.ModuleDict:
        torch.manual_seed(0)
        return nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})

    batches = [(torch.randn(4, 3), torch.randn(4, 1)) for _ in range(4)]
    ours, theirs = models(), models()
    state = make_state(
        ours, ("a", "b"), TwoLosses(), dtype, make=OPTIMIZERS["sgd"], init_scale=256.0
    )
    reports = run(state, [[each] for each in batches])
    kind = {"float32": None, "bfloat16": torch.bfloat16, "float16": torch.float16}[dtype]
    scaler = torch.amp.GradScaler("cpu", init_scale=256.0, enabled=dtype == "float16")
    optimizers = [OPTIMIZERS["sgd"](list(theirs[n].parameters())) for n in "ab"]
    for each in batches:
        for optimizer in optimizers:
            optimizer.zero_grad()
        with autocast(kind):
            loss = TwoLosses().loss(theirs, each)
        scaler.scale(loss).backward()
        for optimizer in optimizers:
            scaler.step(optimizer)
        scaler.update()
    assert_same(dict(ours.named_parameters()), dict(theirs.named_parameters()))
    assert set(reports[0].optimizers) == {"a", "b"}
    total = math.hypot(*(own["grad_norm"] for own in reports[0].optimizers.values()))
    assert reports[0].grad_norm == total


# ---------------------------------------------------------------- skips


class Apart:
    """Each optimizer's loss reads its own half of the batch."""

    def losses(self, model: Any, batch: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield "a", model.a(batch[:, :3]).float().square().sum()
        yield "b", model.b(batch[:, 3:]).float().square().sum()


class Norms(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(0)
        self.a = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))
        self.b = nn.Sequential(nn.Linear(3, 4), nn.BatchNorm1d(4), nn.Linear(4, 1))


def apart(dtype: str, optimizer: str, **amp: Any) -> TrainState:
    """Two optimizers whose losses have nothing to do with each other, and an average."""
    make = OPTIMIZERS[optimizer]
    parts = ("a", "b")
    return make_state(
        Norms(), parts, Apart(), dtype, make=make, ema_decay=0.5, init_scale=256.0, **amp
    )


def halves(bad: str = "") -> Tensor:
    x = torch.randn(5, 6, generator=torch.Generator().manual_seed(3))
    if "a" in bad:
        x[0, 0] = math.inf
    if "b" in bad:
        x[0, 5] = math.nan
    return x


def states_of(state: TrainState, name: str) -> dict[str, Any]:
    """All that a step may change of one of the optimizers and its module."""
    updater = next(each for each in state.updaters if each.name == name)
    averages = state.ema.state_dict() if state.ema else {}
    values = [dict(updater.optimizer.state.get(p, {})) for p in updater.parameters]
    # A fused kernel that is told to skip its first step makes its state all the same: zeros.
    made = [v for each in values for v in each.values() if v is not None and v.any()]
    return copy.deepcopy(
        {
            "module": getattr(state.bare, name).state_dict(),
            "optimizer": values if made else [],
            "average": {k: v for k, v in averages.items() if k.startswith(f"{name}.")},
            "lr": updater.learning_rate.state_dict(),
        }
    )


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("first", [True, False])
def test_op7_the_one_that_overflows_is_skipped_and_the_other_steps(
    dtype: str, optimizer: str, first: bool
) -> None:
    state = apart(dtype, optimizer)
    if not first:
        run(state, [[halves()]])
    before = {name: states_of(state, name) for name in "ab"}
    scale = state.scale_on_host
    (report,) = run(state, [[halves("a")]])
    assert_same(states_of(state, "a"), before["a"])
    for part in ("module", "average"):
        changed = states_of(state, "b")[part]
        key = "2.weight" if part == "module" else "b.2.weight"
        assert not torch.equal(changed[key], before["b"][part][key]), part
    clean = int(not first)
    assert state.progress.optimizer_updates == {"a": clean, "b": clean + 1}
    assert state.progress.optimizer_skips == {"a": 1, "b": 0}
    assert report.skipped
    assert [own["skipped"] for own in report.optimizers.values()] == [True, False]
    assert report.scale_after == (scale / 2 if dtype == "float16" else 1.0)
    assert (state.progress.updates, state.progress.skipped) == (clean, 1)


@pytest.mark.parametrize("optimizer", OPTIMIZERS)
@pytest.mark.parametrize("dtype", DTYPES)
@pytest.mark.parametrize("bad", ["a", "b"])
@pytest.mark.parametrize("steps", [0, 2])
def test_all_or_nothing_takes_back_the_step_of_both(
    dtype: str, optimizer: str, bad: str, steps: int
) -> None:
    state = apart(dtype, optimizer, all_or_nothing=True)
    free = apart(dtype, optimizer)
    run(state, [[halves()]] * steps)
    run(free, [[halves()]] * steps)
    before = {name: states_of(state, name) for name in "ab"}
    for name in "ab":  # where nothing overflows it changes nothing
        assert_same(before[name], states_of(free, name))
    (report,) = run(state, [[halves(bad)]])
    for name in "ab":
        assert_same(states_of(state, name), before[name])
    assert [own["skipped"] for own in report.optimizers.values()] == [True, True]
    assert state.progress.optimizer_skips == {"a": 1, "b": 1}
    state.scaler.load_state_dict(free.scaler.state_dict(), lambda _: None)
    run(state, [[halves()]] * 2)
    run(free, [[halves()]] * 2)
    for name in "ab":
        assert_same(states_of(state, name), states_of(free, name))


class Counting(torch.optim.SGD):
    """Counts its steps in its groups, as schedule-free optimizers do."""

    def step(self, closure: Any = None) -> Any:
        for group in self.param_groups:
            group["k"] = group.get("k", 0) + 1
        return super().step(closure)


def test_all_or_nothing_takes_back_what_a_step_writes_into_groups() -> None:
    state = make_state(
        Norms(), ("a", "b"), Apart(), make=lambda p: Counting(p, lr=0.1), all_or_nothing=True
    )
    counts = []
    for bad in ("b", "", "b"):
        run(state, [[halves(bad)]])
        counts.append([u.optimizer.param_groups[0].get("k", 0) for u in state.updaters])
    assert counts == [[0, 0], [1, 1], [1, 1]]


def test_all_or_nothing_moves_its_verdict_once_to_each_device() -> None:
    parameters = [nn.Parameter(torch.ones(2, device="meta")) for _ in range(3)]
    optimizer = torch.optim.SGD(parameters, lr=0.1)
    rewind = Rewind(Updater("a", optimizer, FunctionSchedule(optimizer, None)))
    rewind.mark()
    moved: list[Operation] = []
    with Trace(moved.append):
        rewind.restore(torch.ones(()))
    copies = [each for each in moved if each.name == "_to_copy" and "device" in each.kwargs]
    assert len(copies) == 1


def test_all_or_nothing_with_one_loss_for_both() -> None:
    torch.manual_seed(0)
    model = nn.ModuleDict({"a": nn.Linear(3, 1), "b": nn.Linear(3, 1)})

    class OnlyA:
        def loss(self, model: Any, batch: Tensor) -> Tensor:
            return model.a(batch).sum() + model.b(torch.ones(1, 3)).sum()

    state = make_state(model, ("a", "b"), OnlyA(), all_or_nothing=True)
    before = copy.deepcopy(model.state_dict())
    run(state, [[torch.full((2, 3), math.inf)]])
    assert_same(model.state_dict(), before)
    state = make_state(model, ("a", "b"), OnlyA())
    run(state, [[torch.full((2, 3), math.inf)]])
    assert torch.equal(model["a"].weight, before["a.weight"])
    assert not torch.equal(model["b"].weight, before["b.weight"])


def test_the_skips_in_a_row_of_each_are_counted_up_to_its_next_update() -> None:
    state = apart("float32", "sgd")
    rows = []
    for bad in ("a", "a", "ab", "b", ""):
        (report,) = run(state, [[halves(bad)]])
        rows.append((*state.progress.optimizer_skips_in_a_row.values(), report.consecutive_skips))
    assert rows == [(1, 0, 1), (2, 0, 2), (3, 1, 3), (0, 2, 4), (0, 0, 0)]


@pytest.mark.parametrize("moves", [False, True])
def test_a_step_without_a_turn_has_the_rate_of_the_first_and_names_what_moved(moves: bool) -> None:
    class Nothing:
        def losses(self, model: Any, batch: Tensor) -> Iterator[tuple[str, Tensor]]:
            if moves:
                with torch.no_grad():
                    model.b[2].weight.add_(1.0)
            yield from ()

    state = make_state(Norms(), ("a", "b"), Nothing())
    state.updaters[1].optimizer.param_groups[0]["lr"] = 0.5
    (report,) = run(state, [[halves()]])
    assert (report.lr, report.loss, report.skipped, report.optimizers) == (1e-2, None, False, {})
    assert report.moved == ("b.2.weight" if moves else None)


def test_a_turn_that_is_left_out_leaves_its_optimizer_alone() -> None:
    state = make_state(pair(), ("critic", "generator"), Gan(every=3))
    before = states_of(state, "generator")
    reports = run(state, [[batch(seed=i)] for i in range(1)])
    after = states_of(state, "generator")
    reports += run(state, [[batch(seed=i)] for i in range(2)])
    # The generator's buffers are of its forward passes, which go on.
    for part in ("optimizer", "lr"):
        assert_same(states_of(state, "generator")[part], after[part])
    assert [sorted(report.optimizers) for report in reports] == [
        ["critic", "generator"],
        ["critic"],
        ["critic"],
    ]
    assert state.progress.optimizer_updates == {"critic": 3, "generator": 1}
    assert not torch.equal(
        before["module"]["0.weight"], states_of(state, "generator")["module"]["0.weight"]
    )


class Island:
    """Computes a loss in an autocast of its own, and yields inside of it or after it."""

    def __init__(self, inside: bool) -> None:
        self.inside = inside

    def losses(self, model: Any, batch: Any) -> Iterator[tuple[str, Tensor]]:
        real, noise = batch
        score = model.critic(real)
        with torch.autocast("cpu", enabled=False):
            loss = F.softplus(-score.float()).mean()
            if self.inside:
                yield "critic", loss
        if not self.inside:
            yield "critic", loss
        yield "generator", F.softplus(-model.critic(model.generator(noise)).float()).mean()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_a_turn_sees_the_weights_after_the_last_one_wherever_it_is_yielded(dtype: str) -> None:
    ends = []
    for inside in (True, False):
        state = make_state(pair(), ("critic", "generator"), Island(inside), dtype)
        run(state, [[batch(seed=i)] for i in range(4)])
        ends.append(state.bare.state_dict())
    assert_same(*ends)


# ---------------------------------------------------------------- what a task may not do


class Given:
    """A task whose losses are told to it."""

    def __init__(self, *turns: Callable[[Any, Any], Any]) -> None:
        self.turns = turns

    def losses(self, model: Any, batch: Any) -> Iterator[Any]:
        for turn in self.turns:
            yield turn(model, batch)


def good(name: str) -> Callable[[Any, Any], Any]:
    return lambda model, batch: (name, model.critic(batch[0]).sum())


@pytest.mark.parametrize(
    ("task", "words"),
    [
        (Given(good("discriminator")), "'discriminator'; the optimizers of this recipe are critic"),
        (Given(good("critic"), good("critic")), "a second turn in one step.*step % 5"),
        (Given(good("critic"), lambda m, b: None, good("generator")), "must yield.*NoneType"),
        (Given(lambda m, b: m.critic(b[0]).sum()), r"must yield \(name of an optimizer, loss\)"),
        (Given(lambda m, b: ("critic", m.critic(b[0]))), "a scalar tensor.*shape"),
        (Given(lambda m, b: ("critic", 1.0)), "a scalar tensor.*float"),
        (Given(good("generator")), r"optimizer.generator: 0 of 6 .*generator.0.weight"),
        (
            Given(lambda m, b: ("critic", m.critic(b[0]).sum().detach())),
            r"optimizer.critic: 0 of 4 .*critic.0.weight",
        ),
    ],
)
def test_a_loss_that_is_not_as_it_should_be_is_told(task: Any, words: str) -> None:
    state = make_state(pair(), ("critic", "generator"), task)
    with pytest.raises(UsageError, match=words):
        run(state, [[batch()]])


def test_losses_that_are_no_generator_are_told() -> None:
    class Returns:
        def losses(self, model: Any, batch: Any) -> Any:
            return [("critic", model.critic(batch[0]).sum())]

    with pytest.raises(UsageError, match=r"Returns.losses must be a generator; .* list"):
        run(make_state(pair(), ("critic", "generator"), Returns()), [[batch()]])


def test_turns_that_differ_between_micro_batches_are_told() -> None:
    class Uneven:
        def losses(self, model: Any, batch: Any) -> Iterator[Any]:
            yield "critic", model.critic(batch[0]).sum()
            if len(batch[0]) > 3:
                yield "generator", model.generator(batch[1]).sum()

    state = make_state(pair(), ("critic", "generator"), Uneven())
    with pytest.raises(UsageError, match="the same turns for each micro-batch: generator and None"):
        run(state, [[batch(4), batch(3)]])


# ---------------------------------------------------------------- recipes

RECIPE = """
name: gan
model: {_target_: gan_parts.Pair}
task: {_target_: gan_parts.Gan, every: 2}
data:
  train: {_target_: gan_parts.Points, bad: [3], bad_real: [11]}
  eval: {_target_: gan_parts.Points}
  batch_size: 6
  micro_batch_size: 4
optimizer:
  generator: {_target_: torch.optim.Adam, lr: 1e-2, params: "generator.*"}
  critic: {_target_: torch.optim.SGD, lr: 2e-2, momentum: 0.9, params: ["critic.*"]}
scheduler:
  generator: {_target_: ampctl.schedules.Cosine}
amp: {dtype: float32, init_scale: 1024, growth_interval: 3}
train: {max_epochs: 3, ema_decay: 0.9}
checkpoint: {every_steps: 1, keep_last: 100, asynchronous: false}
log: {every_steps: 1}
"""


@pytest.fixture
def recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "gan.yaml").write_text(RECIPE)
    return folder


def train(run_dir: str, *overrides: str) -> Path:
    worker.train(
        load_recipe("gan.yaml", overrides), run_dir=Path(run_dir), resume=False, quiet=True
    )
    return Path(run_dir)


def resume(source: Path, *overrides: str) -> None:
    worker.resume(source, overrides, run_dir=Path("b"), trusted=False, quiet=True)


@pytest.mark.parametrize("changes", [(), ("amp.dtype=float16",), ("amp.all_or_nothing=true",)])
@pytest.mark.parametrize("stop", [1, 4, 7])
def test_a_run_with_two_optimizers_resumes_exactly(
    recipe: Path, stop: int, changes: tuple[str, ...]
) -> None:
    whole = last(train("a", *changes))
    resume(Path(f"a/checkpoints/step-{stop:08}.pt"))
    assert_same(last(Path("b")), whole)
    progress = whole["progress"]
    assert progress["skipped"] > 0
    assert set(whole["optimizer"]) == set(whole["scheduler"]) == {"generator", "critic"}
    turns = progress["optimizer_updates"]["generator"] + progress["optimizer_skips"]["generator"]
    assert turns == 6  # every second one of 12 steps


def test_the_figures_of_each_are_written(recipe: Path, capsys: pytest.CaptureFixture[str]) -> None:
    worker.train(load_recipe("gan.yaml"), run_dir=Path("a"), resume=False, quiet=False)
    events = list(read_metrics(Path("a/metrics.jsonl")))
    both, alone = [event for event in events if event["event"] == "train"][:2]
    for what in ("loss", "lr", "grad_norm"):
        assert isinstance(both[f"{what}/critic"], float)
        assert isinstance(both[f"{what}/generator"], float)
        assert f"{what}/generator" not in alone
    assert alone["loss"] == alone["loss/critic"]
    assert both["loss"] == pytest.approx(both["loss/critic"] + both["loss/generator"])
    skips = [event["optimizers"] for event in events if event["event"] == "skip"]
    assert ["critic"] in skips
    final = [event for event in events if event["event"] == "train"][-1]
    saved = last(Path("a"))["progress"]
    for name in ("critic", "generator"):
        assert final[f"updates/{name}"] == saved["optimizer_updates"][name]
        assert final[f"skipped/{name}"] == saved["optimizer_skips"][name]
    said = capsys.readouterr().out
    assert "optimizer critic: tensors 4, parameters 33: lr 0.02, weight_decay 0" in said
    assert "skipped: non-finite gradient of critic" in said
    assert f"critic: {saved['optimizer_updates']['critic']} updates" in said


def test_the_schedule_of_one_follows_its_own_updates(recipe: Path) -> None:
    saved = last(train("a"))
    rates = {name: each["param_groups"][0]["lr"] for name, each in saved["optimizer"].items()}
    updates = saved["progress"]["optimizer_updates"]["generator"]
    assert saved["scheduler"]["generator"]["updates"] == updates
    assert rates["critic"] == 2e-2
    assert 0 < rates["generator"] < 1e-2


def test_a_new_rate_of_one_leaves_the_other(recipe: Path) -> None:
    train("a")
    resume(Path("a/checkpoints/step-00000004.pt"), "optimizer.critic.lr=0.5")
    before = torch.load("a/checkpoints/step-00000004.pt", weights_only=True)
    saved = last(Path("b"))
    assert saved["optimizer"]["critic"]["param_groups"][0]["lr"] == 0.5
    assert (
        saved["scheduler"]["generator"]["base_lrs"] == before["scheduler"]["generator"]["base_lrs"]
    )


def test_other_names_do_not_fit_a_checkpoint(recipe: Path) -> None:
    train("a", "train.max_epochs=1")
    text = Path("gan.yaml").read_text().replace("  critic:", "  judge:")
    text = text.replace("gan_parts.Gan, every: 2", "test_several_optimizers.Judged")
    Path("gan.yaml").write_text(text)
    Path("a/recipe.yaml").unlink()
    with pytest.raises(
        CheckpointError, match="critic, generator in the checkpoint, generator, jud"
    ):
        worker.train(load_recipe("gan.yaml"), run_dir=Path("a"), resume=True, quiet=True)


class Judged:
    def losses(self, model: Any, batch: Any) -> Iterator[Any]:
        yield "judge", model.critic(batch[0]).float().mean()

    def loss(self, model: Any, batch: Any) -> Tensor:
        return model.critic(batch[0]).float().mean()


class Wants(Judged):
    def losses(self, model: Any, batch: Any, step: int, epoch: int) -> Iterator[Any]:
        yield from super().losses(model, batch)


def changed(old: str, new: str) -> None:
    text = Path("gan.yaml").read_text()
    assert old in text
    Path("gan.yaml").write_text(text.replace(old, new))


@pytest.mark.parametrize(
    ("old", "new", "words"),
    [
        (', params: "generator.*"', "", r"yaml:11: optimizer.generator: needs params, a glob"),
        ('"generator.*"', '"generater.*"', r"optimizer: 6 trainable parameters are in no optimi"),
        ('["critic.*"]', '["generator.3.*"]', r"every parameter it matches is taken by an earlier"),
        ('["critic.*"]', "[]", "optimizer.critic: needs params"),
        ('["critic.*"]', '["critic.*", "critik.2.*"]', r"'critik.2.*': no parameter of Pair"),
        (
            'params: ["critic.*"]',
            'params: ["critic.*"], groups: {"generator.0.*": {lr: 1e-4}}',
            r"critic.groups\[generator.0.\*\]: what it matches is trained by another optimizer",
        ),
        ('["critic.*"]', "3", "optimizer.critic: needs params"),
        ('["critic.*"]', "{critic: all}", "optimizer.critic: needs params"),
        ('["critic.*"]', '["critic.*", 3]', "optimizer.critic: needs params"),
        (
            "scheduler:\n  generator",
            "scheduler:\n  genrator",
            "yaml:14: scheduler.genrator: no opt",
        ),
        (
            "torch.optim.SGD, lr: 2e-2, momentum: 0.9",
            "torch.optim.LBFGS, lr: 1.0",
            "optimizer.critic: LBFGS calls the model itself, several times a step, and must be alo",
        ),
        ("torch.optim.SGD, lr", "torch.optim.SGD, lrr", "optimizer.critic.lrr: .* did you mean lr"),
        ("gan_parts.Gan, every: 2", "gan_parts.Nothing", "no attribute 'Nothing'"),
        (
            "gan_parts.Gan, every: 2",
            "test_several_optimizers.Wants",
            "yaml:4: task: Wants.losses cannot be called .* missing a required argument: 'epoch'",
        ),
    ],
)
def test_a_mistake_in_one_of_several_blocks_is_placed(
    recipe: Path, old: str, new: str, words: str
) -> None:
    changed(old, new)
    with pytest.raises(RecipeError) as caught:
        check_recipe(load_recipe("gan.yaml"))
    assert re.search(words, str(caught.value).replace("\n   ", "")), caught.value


def test_an_option_that_one_of_several_cannot_have_is_told_with_its_key(recipe: Path) -> None:
    changed("momentum: 0.9", "momentum: 0.9, fused: true, dampening: 0.1")
    with pytest.raises(UsageError, match=r"^optimizer\.critic: .* Set optimizer\.critic\.fused=f"):
        check_recipe(load_recipe("gan.yaml"))


def test_turns_need_names(recipe: Path) -> None:
    text = Path("gan.yaml").read_text()
    start, end = text.index("optimizer:"), text.index("amp:")
    Path("gan.yaml").write_text(
        text[:start] + "optimizer: {_target_: torch.optim.SGD, lr: 0.1}\n" + text[end:]
    )
    with pytest.raises(RecipeError, match="gives each loss to an optimizer by its name"):
        check_recipe(load_recipe("gan.yaml"))


def test_an_evaluation_needs_a_loss(recipe: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.delattr(Gan, "loss")
    with pytest.raises(RecipeError, match=r"data\.eval: Gan has losses, and no method loss"):
        check_recipe(load_recipe("gan.yaml"))
    assert check_recipe(load_recipe("gan.yaml", ["data.eval=null"]))["optimizer"] == (
        "generator: Adam, fused; critic: SGD, fused"
    )


def test_parts_that_a_task_calls_are_compiled_one_by_one(recipe: Path) -> None:
    changed("gan_parts.Gan, every: 2", "test_several_optimizers.Plain")
    plain = last(train("plain"))
    options = "train.compile={backend: eager}"
    job = build_job(load_recipe("gan.yaml", [options]))
    assert all(part._compiled_call_impl is not None for part in job.state.bare.children())
    compiled = last(train("compiled", options))
    assert_same(compiled["model"], plain["model"])


class Plain:
    """A GAN's task that asks for nothing."""

    def losses(self, model: Any, batch: Any) -> Iterator[Any]:
        yield "critic", model.critic(batch[0]).float().square().mean()
        yield "generator", model.critic(model.generator(batch[1])).float().square().mean()

    def loss(self, model: Any, batch: Any) -> Tensor:
        return model.critic(batch[0]).float().mean()


class Afterwards(Apart):
    """Runs a forward pass after its last turn, of which nothing comes."""

    def losses(self, model: Any, batch: Tensor) -> Iterator[tuple[str, Tensor]]:
        yield from super().losses(model, batch)
        model.a(batch[:, :3])


@pytest.mark.parametrize("together", [False, True])
@pytest.mark.parametrize("dtype", DTYPES)
def test_a_forward_pass_after_the_last_turn_leaves_no_trace_of_a_skipped_step(
    dtype: str, together: bool
) -> None:
    state = make_state(
        Norms(), ("a", "b"), Afterwards(), dtype, init_scale=256.0, all_or_nothing=together
    )
    run(state, [[halves()]])
    statistics = copy.deepcopy(state.bare.a[1].state_dict())
    assert statistics["num_batches_tracked"] == 2
    run(state, [[halves("a")]])
    assert_same(state.bare.a[1].state_dict(), statistics)
