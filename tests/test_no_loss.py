"""A task that gives no loss for a batch: it counts as one without items, on every rank."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from states import Net, batches, make_state, run
from test_ddp import RECIPE, TESTS, Counted, assert_close, events, one, ranks, seen
from test_resume_exact import assert_same, last
from torch import Tensor, nn
from torch.nn import functional as F

from ampctl.engine.evaluation import NoItemsError, evaluate
from ampctl.engine.step import settle
from ampctl.errors import UsageError
from ampctl.tasks.task import as_task


class Choosy:
    """Gives no loss for batches with a value above 100, before or after it calls the model."""

    def __init__(self, how: str = "early") -> None:
        self.how = how

    def loss(self, model: nn.Module, batch: Any) -> Any:
        x, y = batch
        bad = bool((x > 100).any())
        if bad and self.how == "early":
            return None
        logits = model(x).float()
        if bad:
            return (None, logits) if self.how == "pair" else None
        return F.cross_entropy(logits, y), logits

    def metrics(self, output: Tensor, batch: Any) -> dict[str, Tensor]:
        return {"right": (output.argmax(1) == batch[1]).float().mean()}


def bad(batch: tuple[Tensor, Tensor]) -> tuple[Tensor, Tensor]:
    return batch[0] + 1000, batch[1]


@pytest.mark.parametrize("how", ["early", "late", "pair"])
@pytest.mark.parametrize("dtype", ["float32", "float16"])
def test_d18_a_step_without_a_loss_is_as_if_it_had_not_been(how: str, dtype: str) -> None:
    ends = []
    for left_out in (False, True):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.AdamW(model.parameters(), lr=0.1)
        task = as_task(Choosy(how))
        state = make_state(model, optimizer, dtype, ema_decay=0.9, task=task)
        good = batches(2)
        windows = [[good[0]], [bad(good[0])], [bad(good[0]), bad(good[1])], [good[1]]]
        run(state, windows[:1] + windows[3:] if left_out else windows)
        progress = state.progress
        assert (progress.updates, progress.skipped, progress.consecutive_skips) == (2, 0, 0)
        ends.append((model.state_dict(), optimizer.state_dict(), state.scaler.state_dict()))
    assert_same(*ends)


def test_d18_a_row_of_skips_goes_on_over_a_step_without_a_loss() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = make_state(model, optimizer, "float32", task=as_task(Choosy()))
    (good,) = batches(1)
    poor = (good[0] * float("nan"), good[1])
    reports = run(state, [[poor], [bad(good)], [poor]])
    assert [report.consecutive_skips for report in reports] == [1, 1, 2]
    assert settle(state) is None


def test_d18_a_micro_batch_without_a_loss_weighs_nothing() -> None:
    ends = []
    first, second, third = batches(3)
    for window in ([first, bad(second), third], [first, third]):
        torch.manual_seed(0)
        model = Net()
        optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
        state = make_state(model, optimizer, "float32", task=as_task(Choosy()))
        (report,) = run(state, [window])
        ends.append((report.loss, report.grad_norm, [*model.parameters()]))
    assert ends[0][:2] == pytest.approx(ends[1][:2], rel=1e-6)
    for a, b in zip(ends[0][2], ends[1][2], strict=True):
        torch.testing.assert_close(a, b)


def test_d18_what_a_batch_without_a_loss_wrote_into_statistics_is_taken_back() -> None:
    first, second = batches(2)
    poor = (second[0] * float("nan"), second[1])

    class Wary(Choosy):
        def loss(self, model: nn.Module, batch: Any) -> Any:
            loss = F.cross_entropy(model(batch[0]).float(), batch[1])
            return loss if loss.isfinite() else None

    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    state = make_state(model, optimizer, "float32", task=as_task(Wary()))
    run(state, [[first, poor], [poor, first], [poor], [poor, poor]])
    assert state.progress.updates == 2
    assert all(value.isfinite().all() for value in model.state_dict().values())


def test_d18_an_evaluation_leaves_such_a_batch_out() -> None:
    model = Net()
    optimizer = torch.optim.SGD(model.parameters(), lr=0.1)
    for how in ("early", "late", "pair"):
        state = make_state(model, optimizer, "float32", task=as_task(Choosy(how)))
        first, second = batches(2)
        split = [first, bad(second)]
        assert evaluate(state, split) == evaluate(state, [first])
        with pytest.raises(NoItemsError, match="nothing to average over"):
            evaluate(state, [bad(first)])


def test_d18_a_loss_that_depends_on_nothing_is_an_error_still() -> None:
    class Constant:
        def loss(self, model: nn.Module, batch: Any) -> Tensor:
            return torch.zeros(())

    model = Net()
    state = make_state(
        model, torch.optim.SGD(model.parameters(), lr=0.1), "float32", task=as_task(Constant())
    )
    with pytest.raises(UsageError, match="0 of 6 parameters received a gradient"):
        run(state, [batches(1)])


class Two(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.a, self.b = nn.Linear(8, 4), nn.Linear(8, 4)


class Turns:
    """Two optimizers in turn; ``how`` a batch with values above 100 is left out."""

    def __init__(self, how: str = "all") -> None:
        self.how = how

    def losses(self, model: Any, batch: Any) -> Iterator[Any]:
        x, y, *_ = batch
        is_bad = bool((x > 100).any())
        if is_bad and self.how == "all":
            return
        yield "a", None if is_bad else F.cross_entropy(model.a(x).float(), y)
        yield "b", F.cross_entropy(model.b(x / 100).float(), y)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model.a(batch[0]).float(), batch[1])


def turns(how: str, windows: Any, dtype: str = "float32") -> Any:
    torch.manual_seed(0)
    model = Two()
    optimizers = {name: torch.optim.SGD(getattr(model, name).parameters(), lr=0.1) for name in "ab"}
    state = make_state(model, optimizers, dtype, task=as_task(Turns(how)))
    return state, run(state, windows)


def test_d18_a_task_may_leave_a_batch_out_of_its_turns() -> None:
    first, second = batches(2)
    state, reports = turns("all", [[first], [bad(second)]])
    assert [report.loss is None for report in reports] == [False, True]
    assert state.progress.optimizer_updates == {"a": 1, "b": 1}
    state, reports = turns("one", [[first], [bad(second)]])
    assert state.progress.optimizer_updates == {"a": 1, "b": 2}
    assert state.progress.updates == 2
    for how in ("all", "one"):
        mixed, _ = turns(how, [[first, bad(second)]])
        plain, _ = turns(how, [[first]])
        torch.testing.assert_close(mixed.bare.a.weight, plain.bare.a.weight)
    torch.testing.assert_close(
        turns("all", [[bad(second), first]])[0].bare.b.weight, plain.bare.b.weight
    )


class Picky(Counted):
    """Leaves out the samples of ``out``, before the model is called or after it."""

    def __init__(self, out: Any, how: str = "early") -> None:
        self.out, self.how = set(out), how

    def loss(self, model: nn.Module, batch: Any) -> Any:
        drop = bool(self.out & set(batch[2].tolist()))
        if drop and self.how == "early":
            return None
        found = super().loss(model, batch)
        return (None, found[1]) if drop else found


class Statistics(nn.Module):
    """Has buffers, which DDP sends around at each pass, and a part that it may leave out."""

    def __init__(self) -> None:
        super().__init__()
        self.first, self.norm, self.head = nn.Linear(8, 6), nn.LayerNorm(6), nn.Linear(6, 4)
        self.unused = nn.Linear(2, 2)
        self.register_buffer("passes", torch.zeros(()))

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.norm(self.first(x)).relu())


class PickyTurns:
    """Leaves samples out of the turns of two optimizers."""

    def __init__(self, out: Any) -> None:
        self.out = set(out)

    def losses(self, model: Any, batch: Any) -> Iterator[Any]:
        x, y, index = batch
        if not self.out & set(index.tolist()):
            yield "a", F.cross_entropy(model.a(x).float(), y)
            yield "b", F.cross_entropy(model.b(x).float(), y)

    def loss(self, model: Any, batch: Any) -> Tensor:
        return F.cross_entropy(model.a(batch[0]).float(), batch[1])


OUT = [*range(8), 9, 12, 20, 21]  # all of the first step of an epoch, then some, then all of a rank


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    Path("recipe.yaml").write_text(RECIPE.replace("size: 7", "size: 22"))


@pytest.mark.parametrize(
    "changes",
    [
        ("task.how=early",),
        ("task.how=late", "amp.dtype=float16"),
        (
            "task.how=early",
            "model={_target_: test_no_loss.Statistics}",
            "distributed.find_unused_parameters=true",
        ),
        ("task.how=late", "distributed.strategy=fsdp"),
    ],
)
def test_d18_ranks_that_have_no_loss_wait_for_nobody(changes: tuple[str, ...]) -> None:
    task = f"task={{_target_: test_no_loss.Picky, out: {OUT}}}"
    common = (task, "data.shuffle=false", "data.micro_batch_size=1", "data.eval_batch_size=1")
    apart = [change for change in changes if not change.startswith("distributed")]
    whole = one("one", *common, *apart)
    seen("train")
    ranks(2, "many", *common, *changes)
    if "strategy" in changes[-1]:
        assert [e["updates"] for e in events("many", "train")] == [
            e["updates"] for e in events("one", "train")
        ]
        for mine, other in zip(events("many", "train"), events("one", "train"), strict=True):
            assert mine["loss"] == (None if other["loss"] is None else pytest.approx(other["loss"]))
        return
    assert_close(last(Path("many")), whole, "float16" if "float16" in f"{changes}" else "float32")
    assert whole["progress"]["updates"] == 6
    assert whole["progress"]["skipped"] == 0


def test_d18_a_sharded_model_must_be_called_and_that_is_told() -> None:
    task = f"task={{_target_: test_no_loss.Picky, out: {OUT}}}"
    with pytest.raises(Exception, match="Under fsdp the other ranks wait"):
        ranks(2, "a", task, "data.shuffle=false", "distributed.strategy=fsdp")


def test_d18_turns_that_one_rank_leaves_out() -> None:
    optimizer = "\n".join(
        f"  {name}: {{_target_: torch.optim.SGD, params: '{name}.*', lr: 0.1}}" for name in "ab"
    )
    adam = "optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}"
    assert adam in RECIPE
    Path("recipe.yaml").write_text(RECIPE.replace(adam, f"optimizer:\n{optimizer}"))
    changes = (
        f"task={{_target_: test_no_loss.PickyTurns, out: {OUT}}}",
        "model={_target_: test_no_loss.Two}",
        *("data.shuffle=false", "data.micro_batch_size=1"),
    )
    whole = one("one", *changes)
    ranks(2, "many", *changes)
    assert_close(last(Path("many")), whole, "float32")
    assert whole["progress"]["optimizer_updates"] == {"a": 6, "b": 6}
