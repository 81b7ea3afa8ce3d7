"""What no checkpoint can hold is told before a step is lost with it, not at the first save."""

from __future__ import annotations

from pathlib import Path

import pytest
from test_resume_changes import RECIPE
from typer.testing import CliRunner

from ampctl.cli import app
from ampctl.track.metrics import read_metrics

FAILS = "state_dict() fails (NotImplementedError: no state), and a checkpoint is made of what it"
SGD = "optimizer={_target_: unsavable_parts.%s, lr: 0.1}"
STREAM = "data.train={_target_: unsavable_parts.StreamOfObjects}"


@pytest.fixture(autouse=True)
def _recipe(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(Path(__file__).parent))
    (folder / "recipe.yaml").write_text(RECIPE)


def refused(*argv: str) -> str:
    result = CliRunner().invoke(app, [argv[0], "recipe.yaml", *argv[1:]])
    assert result.exit_code == 2, (result.stdout, result.stderr, result.exc_info)
    assert "Traceback" not in result.stderr
    assert "ready" not in result.stdout
    return result.stderr


@pytest.mark.parametrize(
    ("override", "steps", "said"),
    [
        (SGD % "NoState", 0, f"optimizer: NoState.{FAILS}"),
        (SGD % "EmptyState", 0, "EmptyState.state_dict() gives no `state` and `param_groups`"),
        (SGD % "HoldsFunction", 0, "HoldsFunction: cannot save optimizer.warm_up: it holds a func"),
        (SGD % "HoldsFunctionLater", 1, "cannot save optimizer.state.0.rule: it holds a function"),
        (
            "scheduler={_target_: unsavable_parts.NoSchedule, step_size: 3}",
            0,
            "scheduler: NoSchedule.state_dict() fails (KeyError: 'step_size')",
        ),
        ("model={_target_: unsavable_parts.ExtraFunction}", 0, "cannot save model._extra_state."),
        (STREAM, 1, "StreamOfObjects: cannot save data.dataset.place: it holds a object"),
    ],
)
def test_what_no_checkpoint_can_hold_is_named_before_it_is_needed(
    override: str, steps: int, said: str
) -> None:
    """Saved is after 8 steps only; what the first step makes is found right after it."""
    assert said in refused("check", override)
    rest = ("--run-dir", "a", "checkpoint.every_steps=8", "checkpoint.asynchronous=true")
    message = refused("train", override, *rest)
    assert said in message
    assert message.count("error: ") == 1
    log = Path("a/metrics.jsonl")
    events = read_metrics(log) if log.exists() else []
    # By then one more step may be on its way.
    assert max((event["step"] for event in events), default=0) <= 2 * steps
    assert not list(Path("a").glob("checkpoints/*.pt"))
    assert bool(events) == (steps > 0)


def test_several_of_them_are_told_at_once() -> None:
    message = refused(
        "check",
        SGD % "NoState",
        "scheduler={_target_: unsavable_parts.NoSchedule, step_size: 3}",
    )
    assert "2 problems in the recipe" in message
    assert "NoSchedule.state_dict()" in message
