"""A checkpoint with the right keys and something wrong in one of them: told, and never trained."""

from __future__ import annotations

import math
import os
import random
import shutil
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch
from typer.testing import CliRunner

from ampctl.checkpoint import disk, file
from ampctl.cli import app
from ampctl.recipe.load import load_recipe
from ampctl.run import worker

RECIPE = """
name: wrong
model: {_target_: ampctl.models.MLP, in_features: 64, hidden: [4], num_classes: 10}
task: {_target_: ampctl.tasks.Classification}
data:
  train: {_target_: ampctl.data.Digits, split: test}
  eval: {_target_: ampctl.data.Digits, split: test}
  batch_size: 355
optimizer: {_target_: torch.optim.AdamW, lr: 0.01}
amp: {dtype: float16}
train: {max_steps: 3, ema_decay: 0.9, early_stop: {monitor: eval/loss, patience: 5}}
checkpoint: {every_steps: 1, asynchronous: false}
"""
SCHEDULES = {
    "a function": "{_target_: ampctl.schedules.Cosine}",
    "of torch": "{_target_: torch.optim.lr_scheduler.StepLR, step_size: 3}",
    "plateau": "{_target_: torch.optim.lr_scheduler.ReduceLROnPlateau, patience: 3}",
}
GONE = object()
VALUES: list[Any] = [
    *(None, True, -1, 0, 1 << 70, math.nan, math.inf, -0.5, "text", "3", b"x", [], {}, [1, 2]),
    *({"a": 1}, torch.zeros(3), torch.tensor(math.nan), torch.zeros(2, dtype=torch.int64), GONE),
]
HARMLESS = ("environment", "world_size", "dtype", "metrics")  # facts that no run goes on from


@pytest.fixture(scope="module")
def saved(tmp_path_factory: pytest.TempPathFactory) -> dict[str, dict[str, Any]]:
    """The payload of a run with each kind of schedule."""
    before, found = Path.cwd(), {}
    with pytest.MonkeyPatch.context() as patch:
        for place, (kind, schedule) in enumerate(SCHEDULES.items()):
            where = tmp_path_factory.mktemp("saved")
            patch.setenv("XDG_STATE_HOME", f"{where}")
            os.chdir(where)
            (where / "recipe.yaml").write_text(f"{RECIPE}scheduler: {schedule}\n")
            loaded = load_recipe("recipe.yaml", ())
            worker.train(loaded, run_dir=Path(f"{place}"), resume=False, quiet=True)
            name = f"{place}/checkpoints/step-00000002.pt"
            found[kind] = torch.load(name, weights_only=True)
    os.chdir(before)
    return found


def places(value: Any, path: tuple[Any, ...] = ()) -> Iterator[tuple[Any, ...]]:
    """Yield the path of everything in a payload; of a list the first few items."""
    if path:
        yield path
    items = (
        value.items() if isinstance(value, dict) else enumerate(value[:3]) if _many(value) else ()
    )
    for key, item in items:
        yield from places(item, (*path, key))


def _many(value: Any) -> bool:
    return isinstance(value, list | tuple)


def changed(value: Any, path: tuple[Any, ...], new: Any) -> Any:
    """Return a payload with something else in one place."""
    if not path:
        return new
    first, rest = path[0], path[1:]
    if isinstance(value, dict):
        if new is GONE and not rest:
            return {key: item for key, item in value.items() if key != first}
        return {**value, first: changed(value.get(first), rest, new)}
    items = list(value)
    items[first] = changed(items[first], rest, None if new is GONE else new)
    return type(value)(items)


def values(old: Any) -> list[Any]:
    """Return what may stand in a place instead."""
    if not isinstance(old, torch.Tensor):
        return VALUES
    other = [old.double(), old.bool(), old.to(torch.complex64), old.reshape(-1)[:0]]
    other += [torch.empty(old.shape, device="meta"), old[..., None].expand(*old.shape, 9)]
    if old.is_floating_point():
        other += [old * math.nan, old.long(), torch.zeros((), dtype=old.dtype).expand(old.shape)]
    return [*VALUES, *other, *([old.to_sparse()] if old.ndim else [])]


def at(value: Any, path: tuple[Any, ...]) -> Any:
    for key in path:
        value = value[key]
    return value


def resumed(payload: dict[str, Any]) -> Any:
    file.write(Path("odd.pt"), payload)
    disk.publish(disk.temporary(Path("odd.pt")), Path("odd.pt"))
    shutil.rmtree("b", ignore_errors=True)
    return CliRunner().invoke(app, ["resume", "odd.pt", "--run-dir", "b", "--quiet"])


def require_told(payload: dict[str, Any], path: tuple[Any, ...], new: Any) -> None:
    result = resumed(changed(payload, path, new))
    told = (path, new, result.output, result.exc_info)
    assert result.exit_code in (0, 3, 4), told  # 3: it made the state not finite, and that is told
    assert result.stderr.count("error: ") == (1 if result.exit_code else 0), told
    if result.exit_code == 0 and Path("b/checkpoints/latest.pt").exists():  # else it was complete
        weights = torch.load("b/checkpoints/latest.pt", weights_only=True)["model"]
        assert all(torch.isfinite(weight).all() for weight in weights.values()), told


def cases(payload: dict[str, Any]) -> list[tuple[tuple[Any, ...], Any]]:
    chosen = [path for path in places(payload) if path[0] not in ("format", "version", "recipe")]
    return [(path, new) for path in chosen for new in values(at(payload, path))]


@pytest.mark.parametrize("kind", SCHEDULES)
def test_anything_wrong_anywhere_is_told_or_changes_nothing(
    kind: str, saved: dict[str, dict[str, Any]], folder: Path
) -> None:
    payload = saved[kind]
    for path, new in random.Random(0).sample(cases(payload), 40):
        require_told(payload, path, new)


@pytest.mark.slow
@pytest.mark.parametrize("kind", SCHEDULES)
def test_all_that_can_be_wrong_is_told_or_changes_nothing(
    kind: str, saved: dict[str, dict[str, Any]], folder: Path
) -> None:
    payload = saved[kind]
    every = [case for case in cases(payload) if case[0][0] not in HARMLESS]
    for path, new in random.Random(1).sample(every, min(len(every), 250)):
        require_told(payload, path, new)


ABSURD: list[tuple[tuple[Any, ...], Any]] = [
    (("progress", "step"), -1),
    (("progress", "step"), True),
    (("progress", "updates"), 9),
    (("progress", "early_stop_bad"), []),
    (("progress", "metrics"), 3),
    (("progress", "best"), math.nan),
    (("scaler", "scale"), math.nan),
    (("scaler", "scale"), math.inf),
    (("scaler", "scale"), 0.0),
    (("scaler", "scale"), -2.0),
    (("scaler", "_growth_tracker"), "3"),
    (("optimizer", "param_groups", 0, "lr"), "0.1"),
    (("optimizer", "param_groups", 0, "lr"), -0.1),
    (("optimizer", "param_groups", 0, "betas"), [0.9]),
    (("optimizer", "param_groups", 0, "amsgrad"), True),
    (("optimizer", "param_groups", 0, "params"), [0, 1, 2, 2]),
    (("optimizer", "param_groups", 0, "params", 2), True),
    (("optimizer", "state", 0, "exp_avg"), torch.zeros(3)),
    (("optimizer", "state", 0, "exp_avg"), torch.zeros(1).expand(3, 64)),
    (("optimizer", "state", 0, "exp_avg"), torch.zeros(4, 64, dtype=torch.int64)),
    (("optimizer", "state", 0, "exp_avg"), torch.zeros(4, 64).to_sparse()),
    (("optimizer", "state", 0, "exp_avg_sq"), GONE),
    (("optimizer", "state", 0, "step"), torch.tensor(2)),
    (("optimizer", "state", 7), {}),
    (("model", "layers.0.weight"), torch.full((4, 64), math.nan)),
    (("ema", "layers.0.weight"), torch.zeros(1)),
    (("data",), [1, 2]),
    (("data", "num_samples"), torch.zeros(3)),
    (("rng", 0, "torch"), torch.zeros(3, dtype=torch.uint8)),
    (("rng", 0, "numpy", "keys"), torch.zeros(3)),
    (("rng", 0, "python"), (3, (1, 2), None)),
]


@pytest.mark.parametrize(
    ("path", "new"), ABSURD, ids=lambda value: ".".join(map(str, value)) if _many(value) else None
)
def test_what_no_run_can_have_saved_is_refused(
    path: tuple[Any, ...], new: Any, saved: dict[str, dict[str, Any]], folder: Path
) -> None:
    result = resumed(changed(saved["a function"], path, new))
    assert result.exit_code == 4, (result.output, result.exc_info)
    assert result.stderr.count("error: ") == 1


@pytest.mark.parametrize(
    ("kind", "key", "new"),
    [
        ("of torch", "step_size", 0),
        ("of torch", "gamma", "x"),
        ("of torch", "last_epoch", None),
        ("plateau", "best", "x"),
        ("plateau", "factor", -1),
    ],
)
def test_a_wrong_state_of_a_schedule_is_refused(
    kind: str, key: str, new: Any, saved: dict[str, dict[str, Any]], folder: Path
) -> None:
    result = resumed(changed(saved[kind], ("scheduler", "state", key), new))
    assert result.exit_code == 4, (result.output, result.exc_info)


def test_a_state_in_other_strides_is_brought_into_those_of_its_parameter(
    saved: dict[str, dict[str, Any]], folder: Path
) -> None:
    """A fused kernel takes its memory to be laid out as the parameter's is."""
    payload, path = saved["a function"], ("optimizer", "state", 0, "exp_avg")
    want = resumed(payload)
    assert want.exit_code == 0, want.output
    weights = torch.load("b/checkpoints/latest.pt", weights_only=True)["model"]
    turned = at(payload, path).t().contiguous().t()
    assert turned.stride() != at(payload, path).stride()
    assert resumed(changed(payload, path, turned)).exit_code == 0
    again = torch.load("b/checkpoints/latest.pt", weights_only=True)["model"]
    assert all(torch.equal(weights[name], again[name]) for name in weights)


def test_a_schedule_may_not_be_given_other_attributes(
    saved: dict[str, dict[str, Any]], folder: Path
) -> None:
    payload = saved["of torch"]
    state = {**payload["scheduler"]["state"], "step": 3, "optimizer": "x", "get_lr": 1}
    assert resumed(changed(payload, ("scheduler", "state"), state)).exit_code == 0
