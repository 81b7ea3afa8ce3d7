"""What a diagnosis, a check or an error says is so, and what it advises can be done."""

from __future__ import annotations

import math
import re
from pathlib import Path
from typing import Any

import pytest
import torch
from states import batches, make_state
from test_field_numerics import X, diagnose
from test_resume_changes import RECIPE
from torch import Tensor, nn
from typer.testing import CliRunner

from ampctl.cli import app
from ampctl.doctor import remedy
from ampctl.doctor.mismatch import in_words
from ampctl.doctor.nonfinite import Diagnosis
from ampctl.engine.learning_rate import TorchSchedule
from ampctl.recipe.schema import AmpConfig


class TwoNorms(nn.Module):
    """Two BatchNorms that use their statistics, one of which holds a NaN."""

    def __init__(self, bad: str) -> None:
        super().__init__()
        self.bn1, self.bn2, self.bn3 = (nn.BatchNorm1d(8).eval() for _ in range(3))
        self.head = nn.Linear(8, 4)
        self.get_submodule(bad).running_var[3] = math.nan

    def forward(self, x: Tensor) -> Tensor:
        return self.head(self.bn3(self.bn2(self.bn1(x))))


@pytest.mark.parametrize("bad", ["bn1", "bn2", "bn3"])
def test_d12_the_buffer_that_is_bad_is_named(bad: str) -> None:
    """All statistics lie in one piece of memory."""
    assert f"buffer {bad}.running_var holds NaN" in diagnose(TwoNorms(bad), "float32").cause


class Computes(nn.Module):
    """What a function makes of the output of a layer without weights of its own but one."""

    def __init__(self, function: Any) -> None:
        super().__init__()
        self.layer, self.function = nn.Linear(8, 4), function

    def forward(self, x: Tensor) -> Tensor:
        return self.function(self.layer(x))


def computed(function: Any, dtype: str = "float32") -> Diagnosis:
    return diagnose(Computes(function), dtype, (X, batches(1)[0][1]))


DERIVATIVES = {
    "hypot": lambda y: y + torch.hypot(0 * y, 0 * y),
    "acos": lambda y: y + torch.acos(1 + 0 * y),
    "pow": lambda y: y + (0 * y).abs().pow(0.5),
}


@pytest.mark.parametrize("name", DERIVATIVES)
def test_d12_nothing_is_called_a_division_where_none_is_written(name: str) -> None:
    found = computed(DERIVATIVES[name])
    assert "divisor" not in found.advice
    assert f"the derivative of {name}" in found.cause or name == "acos"
    assert "overflows" not in found.cause


def test_d12_a_division_by_what_is_not_zero_is_not_called_one_by_zero() -> None:
    found = computed(lambda y: (y * (y > 0)) * 3e4 / 1e-4, "float16")
    assert "by zero" not in found.cause
    assert "0 / 0" not in found.cause


def test_d12_a_mean_of_nothing_is_not_said_to_be_too_large() -> None:
    found = computed(lambda y: y + y[:0].mean())
    assert "gives NaN" in found.cause
    assert "ends at" not in found.cause


# ---------------------------------------------------------------- check, and what it advises


@pytest.fixture
def recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def check(*overrides: str, code: int) -> Any:
    done = CliRunner().invoke(app, ["check", "recipe.yaml", *overrides])
    assert done.exit_code == code, (done.stdout, done.stderr, done.exc_info)
    assert ("ready" in done.stdout) == (code == 0)
    return done


NET = "model={_target_: own_parts.Net, dropout: 0.0}"
ISLAND = ("model={_target_: model_parts.Island}", "amp.dtype=float16")


@pytest.mark.usefixtures("recipe")
def test_a8_no_step_made_is_not_ready_to_train() -> None:
    """A compiled model whose gradient overflows at every scale, and that alone is said of it."""
    said = check(*ISLAND, "train.compile={backend: aot_eager}", code=3).stderr
    assert "no step was made in 25 tries, at scales from 65536 to 1: the gradient was nev" in said
    assert "runs as it is written, not compiled" in said
    assert "advice: set train.compile=false" in said
    assert "dropout" not in said
    assert "init_scale" not in said
    assert "ready" in check(*ISLAND, code=0).stdout


@pytest.mark.usefixtures("recipe")
def test_a8_the_search_for_a_scale_goes_on_until_a_step_is_made() -> None:
    high = ("amp.dtype=float16", "amp.init_scale=1e9", NET)
    out = check(*high, code=0).stdout
    assert "skipped: non-finite gradient, scale 1e+09 -> 5e+08" in out
    assert re.search(r"first made:  step \d+, at scale \d+.*, loss \d.*, grad \d", out)
    for fewer in ("amp.max_skips=2", "amp.nonfinite=stop", "amp.static=true"):
        said = check(*high, fewer, code=3).stderr
        assert "no step was made in" in said
        advice = re.search(r"advice: set (amp\.[^;]*);", said)
        assert advice
        check(*high, fewer, advice[1], code=0)


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize(
    "override",
    [
        "optimizer.lr=.inf",
        "optimizer.lr=.nan",
        "optimizer.lr=1e400",
        "optimizer.weight_decay=.inf",
        "optimizer.momentum=.nan",
        "optimizer.groups={'head.*': {lr: .inf}}",
        "optimizer.groups={'head.*': {lr: -0.1}}",
        "optimizer.groups={'head.*': {weight_decay: -1}}",
        "optimizer={_target_: torch.optim.Adam, eps: .inf}",
        "optimizer={_target_: torch.optim.Adam, betas: [.nan, 0.9]}",
        "optimizer={_target_: torch.optim.Adam, lr: {_target_: torch.tensor, data: .inf}}",
        "scheduler.gamma=.inf",
        "scheduler={_target_: torch.optim.lr_scheduler.OneCycleLR, max_lr: .nan}",
    ],
)
def test_d17_numbers_that_nothing_trains_with_are_refused(override: str) -> None:
    said = check(override, code=2).stderr
    assert re.search(
        r"(optimizer|scheduler)\..*: got (inf|nan|-0.1|-1); allowed: a finite nu", said
    )


@pytest.mark.usefixtures("recipe")
def test_d17_an_infinity_that_is_the_optimizers_default_may_be_written_down() -> None:
    check(
        "scheduler=null", "optimizer={_target_: model_parts.Bounded, lr: 0.1, most: .inf}", code=0
    )


@pytest.mark.usefixtures("recipe")
def test_d17_a_first_step_that_spoils_the_weights_is_not_ready() -> None:
    said = check(
        "scheduler=null", "optimizer={_target_: model_parts.Spoils, lr: 0.1}", code=3
    ).stderr
    assert "the first step leaves values that are not finite: model.first.weight" in said
    assert "Lower optimizer.lr" in said


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize(
    ("override", "says"),
    [
        ("optimizer={_target_: torch.optim.SGD, lr: 1e38}", "the loss of step 2 is "),
        ("optimizer={_target_: torch.optim.AdamW, lr: 1e38}", "the first step leaves"),
        (
            "optimizer={_target_: torch.optim.AdamW, weight_decay: 1e38}",
            "the first step goes too far",
        ),
        ("optimizer={_target_: torch.optim.SGD, lr: 1e-60}", "a rate of 1e-60 is too small"),
    ],
)
def test_d17_a_rate_that_the_first_step_shows_to_be_useless_is_not_ready(
    override: str, says: str
) -> None:
    said = check("scheduler=null", override, code=3).stderr
    assert says in said
    assert "optimizer.lr" in said


@pytest.mark.usefixtures("recipe")
@pytest.mark.parametrize("scheduler", ["null", "{_target_: ampctl.schedules.Linear}"])
def test_d17_a_rate_of_zero_is_meant(scheduler: str) -> None:
    check(f"scheduler={scheduler}", "optimizer={_target_: torch.optim.SGD, lr: 0}", code=0)


def state_at(scale: float, **amp: Any) -> Any:
    state = make_state(
        nn.Linear(8, 4),
        torch.optim.SGD([nn.Parameter(torch.ones(1))], lr=0.1),
        "float16",
        amp=AmpConfig(**amp),
    )
    state.scale_on_host = scale
    return state


def test_d17_a_scale_that_is_advised_is_another_one_and_allowed() -> None:
    assert remedy.lower_scales(state_at(65536.0, init_scale=4096.0), 16) == [256.0, 16.0, 1.0]
    assert remedy.lower_scales(state_at(2.0, init_scale=1.0), 2) == []
    assert remedy.lower_scales(state_at(64.0, min_scale=16.0), 2) == [32.0, 16.0]
    assert not remedy.scale_can_fall(state_at(1.0))


def test_d17_a_limit_that_is_set_is_not_advised_to_be_set() -> None:
    assert remedy.clip(state_at(1.0)) == "set amp.clip_norm (1.0, say)"
    assert remedy.clip(state_at(1.0, clip_norm=0.5)) == "lower amp.clip_norm (0.5)"


def test_d17_the_rate_that_is_advised_is_the_one_that_moves_the_weights() -> None:
    model = nn.Linear(8, 4)
    plain = torch.optim.SGD(model.parameters(), lr=0.5)
    state = make_state(model, plain, "float32", factor=lambda _: 0.01)
    plain.param_groups[0]["lr"] = 0.005
    assert remedy.lower_rate(state) == "optimizer.lr=0.05"
    groups = [{"params": [model.weight], "lr": 1.0}, {"params": [model.bias]}]
    state = make_state(model, torch.optim.SGD(groups, lr=0.5), "float32")
    assert remedy.lower_rate(state) is None
    assert remedy.rate(state) == "the rates of optimizer and its groups"
    cycle = torch.optim.lr_scheduler.OneCycleLR(plain, max_lr=1.0, total_steps=9)
    state = make_state(model, plain, "float32", learning_rate=TorchSchedule(plain, cycle))
    assert remedy.lower_rate(state) is None
    assert remedy.rate(state) == "max_lr of OneCycleLR"


def memory(doing: str, batches: list[Any]) -> str:
    error = torch.OutOfMemoryError("CUDA out of memory")
    return f"{in_words(error, nn.Linear(1, 1), batches, doing=doing)}"


def test_d17_what_takes_less_memory_is_what_is_there_to_be_lowered() -> None:
    several, one = (torch.zeros(4, 2), torch.zeros(4)), {"x": torch.zeros(1, 2)}
    assert "Lower data.micro_batch_size" in memory("step 3", [several])
    assert "Lower data.micro_batch_size" in memory("step 3", [one, several])
    assert "Each pass takes one sample already" in memory("step 3", [one, one])
    assert "Lower data.eval_batch_size" in memory("the evaluation after step 3", [])
