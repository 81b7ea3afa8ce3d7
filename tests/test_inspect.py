"""What is in a checkpoint, and what differs between two: told, never built."""

from __future__ import annotations

import io
import json
import math
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from test_checkpoint_file import payload as small
from test_checkpoint_file import saved
from test_resume_exact import RECIPE
from typer.testing import CliRunner, Result

from ampctl.checkpoint import contents
from ampctl.checkpoint.difference import difference
from ampctl.checkpoint.store import Loaded, load
from ampctl.cli import app, screen
from ampctl.cli.inspection import difference_lines, lines_of, moved_rows
from ampctl.recipe.load import load_recipe
from ampctl.run import worker
from ampctl.track.metrics import read_metrics

TESTS = Path(__file__).parent


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    (folder / "recipe.yaml").write_text(RECIPE)


def train(run_dir: str = "a", *overrides: str) -> Path:
    loaded = load_recipe("recipe.yaml", ("amp.dtype=float16", *overrides))
    worker.train(loaded, run_dir=Path(run_dir), resume=False, quiet=True)
    return Path(run_dir)


def run(*argv: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["inspect", *argv])
    assert result.exit_code == code, (result.stdout, result.stderr, result.exc_info)
    assert result.stderr.count("error: ") == (1 if code else 0)
    return result


def facts_of(*argv: str) -> dict[str, Any]:
    facts: dict[str, Any] = json.loads(run(*argv, "--json").stdout)
    return facts


def held(**changes: Any) -> Loaded:
    """A checkpoint in a file of its own, as it is read for a look."""
    path = Path(f"step-0000000{len(list(Path().glob('step-*')))}.pt")
    saved(path, **changes)
    return load(path, notify=print, look=True)


def test_a_checkpoint_tells_all_that_a_run_goes_on_with() -> None:
    train("a", "train.max_epochs=2")
    saved_state = torch.load("a/checkpoints/latest.pt", weights_only=True)
    facts = facts_of("a")
    progress, scaler = saved_state["progress"], saved_state["scaler"]
    assert progress["skipped"] > 0  # of the bad sample
    for key in ("step", "updates", "skipped", "consecutive_skips", "epoch", "best", "best_step"):
        assert facts["progress"][key] == progress[key], key
    for key in ("scale", "_growth_tracker", "hysteresis_tracker", "enabled"):
        assert facts["scaler"][key] == scaler[key], key
    (row,) = [e for e in json.loads(Path("a/checkpoints/index.json").read_text()) if e["step"] == 8]
    assert (facts["sha256"], facts["bytes"]) == (row["sha256"], row["size"])
    assert facts["recipe"]["name"] == "exact"
    (start,) = [e for e in read_metrics("a/metrics.jsonl") if e["event"] == "start"]
    assert facts["recipe"]["digest"] == start["recipe_digest"]
    assert (facts["dtype"], facts["world_size"]) == ("float16", 1)
    assert facts["environment"]["torch"] == str(torch.__version__)
    assert facts["nonfinite"] == facts["strange"] == []
    text = run("a").stdout
    for words in (
        "recipe:     exact, digest",
        f"step:       8, after 0 steps of epoch 2, {progress['samples']} samples in all",
        f"{progress['updates']}; {progress['skipped']} steps skipped",
        f"growth tracker {scaler['_growth_tracker']} of 3, hysteresis 1 of 1",
        f"best:       eval/loss {progress['best']:.4g} at step {progress['best_step']}",
        "trained:    in float16 on 1 rank",
        "finite:     yes",
    ):
        assert words in text
    assert run("a").stdout == text
    assert "\x1b" not in text
    assert (
        "none: this dtype needs no loss scaling" in run(f"{train('b', 'amp.dtype=float32')}").stdout
    )


def test_sizes_are_told_by_part_and_what_is_shared_counts_once() -> None:
    tied = torch.zeros(10, 4)
    averaged = torch.zeros(10, 4, dtype=torch.bfloat16)
    counter = torch.zeros((), dtype=torch.int64)
    found = held(
        model={"in": tied, "out": tied, "seen": counter},
        ema={"in": averaged, "out": averaged, "seen": counter},
        optimizer={"state": {0: {"exp_avg": torch.zeros(40)}}, "param_groups": []},
        rng=[{"torch": torch.zeros(100, dtype=torch.uint8)}],
    )
    parts = contents.describe(found)["parts"]
    assert parts == {
        "model": {"tensors": 3, "values": {"float32": 40, "int64": 1}, "bytes": 168},
        "ema": {"tensors": 3, "values": {"bfloat16": 40}, "bytes": 80},
        "optimizer": {"tensors": 1, "values": {"float32": 40}, "bytes": 160},
        "rest": {"tensors": 1, "values": {"uint8": 100}, "bytes": 100},
    }
    lines = run(f"{found.path}").stdout.splitlines()
    assert "model      3        41      168    40 float32, 1 int64" in lines


def test_a_state_that_is_not_finite_can_be_looked_at_and_is_named() -> None:
    train("a", "model={_target_: own_parts.Poisons}", "train.ema_decay=null")
    (bad,) = Path("a/checkpoints").glob("*.nonfinite.pt")
    facts = facts_of(f"{bad}")
    assert facts["nonfinite"] == ["model.largest"]
    assert "finite:     no: NaN or infinity in model.largest" in run(f"{bad}").stdout
    change = facts_of("a/checkpoints/step-00000002.pt", f"{bad}")["difference"]["moved"]
    assert change[0] == {"weight": "largest", "relative": "nan", "change": "nan"}
    lines = run("a/checkpoints/step-00000002.pt", f"{bad}").stdout.splitlines()
    assert ["largest", "nan", "nan"] in [line.split() for line in lines]


def test_two_checkpoints_show_which_weights_moved_and_what_else_changed() -> None:
    first = held(
        model={
            "small": torch.full((100,), 2.0),
            "large": torch.full((3,), 2.0),
            "zero": torch.zeros(3),
            "mask": torch.tensor([-math.inf, 1.0, math.nan]),
            "same": torch.ones(3),
            "gone": torch.ones(3),
            "reshaped": torch.ones(3),
            "cast": torch.ones(3),
        },
        progress={"step": 3, "epoch": 1},
        recipe=load_recipe("recipe.yaml").text,
    )
    second = held(
        model={
            "small": torch.full((100,), 2.02),
            "large": torch.tensor([2.0, 2.0, 4.0]),
            "zero": torch.full((3,), 1e-3),
            "mask": torch.tensor([-math.inf, 1.5, math.nan]),
            "same": torch.ones(3),
            "new": torch.ones(3),
            "reshaped": torch.ones(4),
            "cast": torch.ones(3, dtype=torch.bfloat16),
        },
        progress={"step": 5, "epoch": 1},
        scaler={"scale": 512.0, "_growth_tracker": 7},
        recipe=load_recipe("recipe.yaml", ["train.max_epochs=9"]).text,
        dtype="bfloat16",
    )
    change = difference(first, second)
    moved = {row["weight"]: (row["relative"], row["change"]) for row in change["moved"]}
    assert list(moved) == ["zero", "large", "mask", "small"]
    assert moved["zero"] == ("inf", pytest.approx(1e-3 * 3**0.5))
    assert moved["large"] == (pytest.approx(2 / 12**0.5), pytest.approx(2.0))
    assert moved["mask"] == (pytest.approx(0.5), pytest.approx(0.5))
    assert moved["small"] == (pytest.approx(0.01, rel=1e-4), pytest.approx(0.2, rel=1e-4))
    assert change["same"] == 2  # cast too: the values are the same
    assert (change["appeared"], change["vanished"]) == (["new"], ["gone"])
    assert change["other"] == ["reshaped: shape [3] -> [4]", "cast: dtype float32 -> bfloat16"]
    assert change["progress"] == {"step": [3, 5]}
    assert change["scaler"] == {"scale": [1024.0, 512.0]}
    assert change["training"] == {"dtype": ["float16", "bfloat16"]}
    assert change["recipe"] == ["train.max_epochs 3 -> 9"]
    text = run(f"{first.path}", f"{second.path}").stdout
    lines = [" ".join(line.split()) for line in text.splitlines()]
    for line in (
        "step: 3 -> 5",
        "scale: 1024 -> 512",
        "recipe: train.max_epochs 3 -> 9",
        "weights: 4 moved, 2 the same",
        "weight relative change",
        "large 0.5774 2",
    ):
        assert line in lines
    assert text.index("zero") < text.index("large") < text.index("small")
    assert difference(first, first)["moved"] == []


def test_many_weights_are_cut_off_with_a_word() -> None:
    rows = [{"weight": f"w{i}", "relative": 0.5, "change": 1.0} for i in range(40)]
    shown = moved_rows({"moved": rows})
    assert len(shown) == 31
    assert shown[-1][0] == "... and 10 more; --json has all"


def test_the_recipe_inside_is_printed_alone_and_can_be_trained() -> None:
    train()
    text = run("a", "--recipe").stdout
    Path("again.yaml").write_text(text)
    assert load_recipe("again.yaml").text == load_recipe("a/recipe.yaml").text
    assert "--recipe prints" in run("a", "a", "--recipe", code=2).stderr


def test_what_is_no_checkpoint_or_damaged_ends_with_4() -> None:
    train()
    newest = Path("a/checkpoints/latest.pt").resolve()
    content = newest.read_bytes()
    for damaged in (content[:-1], content[:2000], b"", b"text\n", content.replace(b"K", b"L", 1)):
        newest.write_bytes(damaged)
        assert f"checkpoint {newest} cannot be used" in run(f"{newest}", code=4).stderr
        assert "cannot be used" in run("a/checkpoints/step-00000003.pt", f"{newest}", code=4).stderr
    assert f"checkpoint {newest.name} cannot be used" in run("a").stderr
    assert "no such file" in run("nowhere", code=4).stderr


def nested(depth: int) -> Any:
    value: Any = torch.ones(1)
    for _ in range(depth):
        value = {"deeper": value}
    return value


def shared(width: int, depth: int) -> Any:
    """A list that is width ** depth long if it is written out."""
    value: Any = [torch.ones(1)]
    for _ in range(depth):
        value = [value] * width
    return value


def circle() -> Any:
    value: list[Any] = []
    value.append(value)
    return value


ODD: dict[str, Callable[[], dict[str, Any]]] = {
    "deep": lambda: {"optimizer": nested(90)},
    "wide": lambda: {"data": shared(1000, 50)},
    "circle": lambda: {"data": circle()},
    "circle of facts": lambda: {"progress": {"step": 1, "metrics": circle()}},
    "wide facts": lambda: {"progress": {"step": 1, "metrics": shared(1000, 5)}},
    "wide scale": lambda: {"scaler": {"scale": shared(1000, 5)}},
    "expanded": lambda: {"model": {"huge": torch.ones(1).expand(1 << 45)}},
    "overlapping": lambda: {"model": {"huge": torch.ones(9).as_strided((1 << 40, 2), (0, 1))}},
    "sparse": lambda: {"model": {"sparse": torch.eye(3).to_sparse()}},
    "meta": lambda: {"model": {"none": torch.empty(1 << 40, device="meta")}},
    "bits": lambda: {"model": {"bits": torch.zeros(4, dtype=torch.uint8).view(torch.bits8)}},
    "complex": lambda: {"model": {"complex": torch.ones(3, dtype=torch.complex64)}},
    "half complex": lambda: {"model": {"complex": torch.ones(3, dtype=torch.complex32)}},
    "float8": lambda: {"model": {"small": torch.ones(3).to(torch.float8_e4m3fn)}},
    "quantized": lambda: {
        "model": {"q": torch.quantize_per_tensor(torch.ones(3), 0.1, 0, torch.qint8)}
    },
    "no tensor": lambda: {"model": {"extra": {"a": 1}, 3: "text"}},
    "huge number": lambda: {"progress": {"step": 10**500, "epoch": -(10**400)}},
    "no numbers": lambda: {"progress": {"step": "one", "best": [1], "metrics": 3, "samples": None}},
    "infinite": lambda: {
        "progress": {"step": math.inf, "best": math.nan},
        "scaler": {"scale": math.inf},
    },
    "half a letter": lambda: {
        "recipe": "\ud800",
        "progress": {"\ud800": "\udfff"},
        "dtype": "\ud800",
    },
    "escapes": lambda: {
        "model": {"\x1b[31m\nerror: a": torch.ones(1)},
        "dtype": "\x1b]0;title\x07",
        "recipe": "name: \x1b[2J\nx\x1b",
        "environment": {"torch": "\x1b[1m[red]", "hostname": "a\nb"},
    },
    "endless text": lambda: {"dtype": "a" * 1_000_000, "environment": {"torch": "b" * 1_000_000}},
    "no recipe": lambda: {"recipe": "model: [", "scaler": {}},
    "yaml bomb": lambda: {"recipe": "a: &a [x, x]\nb: &b [*a, *a]\nc: &c [*b, *b]\nname: [*c, *c]"},
    "many": lambda: {"model": {f"weight {i}": torch.ones(1) for i in range(1000)}},
}


@pytest.mark.filterwarnings("ignore")  # of torch, about what it will not have for long
@pytest.mark.parametrize("kind", ODD)
def test_odd_contents_are_told_in_words_and_steer_no_terminal(kind: str) -> None:
    found = held(**ODD[kind]())
    normal = held()
    for other in ((), (f"{normal.path}",), None):
        argv = (f"{normal.path}", f"{found.path}") if other is None else (f"{found.path}", *other)
        result = CliRunner().invoke(app, ["inspect", *argv])
        assert result.exit_code == 0, result.exc_info
        assert len(result.output) < 50_000
        assert not any(c in result.output for c in "\x1b\x07\x9b")
        assert "\nerror: a" not in result.output
        as_json = CliRunner().invoke(app, ["inspect", *argv, "--json"])
        json.loads(as_json.stdout)
        assert "\x1b" not in as_json.stdout
    shown = CliRunner().invoke(app, ["inspect", f"{found.path}", "--recipe"])
    assert shown.exit_code == 0
    assert "\x1b" not in shown.stdout


@pytest.mark.filterwarnings("ignore")
def test_strange_tensors_are_named_and_not_counted() -> None:
    for kind in ("expanded", "overlapping", "sparse", "meta", "bits", "quantized"):
        facts = contents.describe(held(**ODD[kind]()))
        (name,) = ODD[kind]()["model"]
        assert facts["strange"] == [f"model.{name}"], kind
        assert facts["parts"]["model"]["values"] == {}
        assert f"strange:    not plain tensors: model.{name}" in lines_of(facts)
    for kind in ("complex", "float8"):
        assert contents.describe(held(**ODD[kind]()))["strange"] == []


def test_a_pickle_that_would_run_something_is_refused(folder: Path) -> None:
    class Hostile:
        def __reduce__(self) -> Any:
            return (open, ("canary", "w"))

    torch.save({**small(), "format": "ampctl", "version": 1, "data": [Hostile()]}, "hostile.pt")
    message = run("hostile.pt", code=4).stderr
    assert "it would import" in message
    assert not (folder / "canary").exists()


def test_a_hostile_recipe_inside_runs_nothing(folder: Path) -> None:
    recipe = load_recipe("recipe.yaml").text.replace("own_parts.Net", "hostile.Net")
    (folder / "hostile.py").write_text("open('canary', 'w').close()\nclass Net: pass\n")
    sys.modules.pop("hostile", None)
    found = held(recipe=recipe)
    facts = facts_of(f"{found.path}", f"{held().path}")
    assert facts["first"]["recipe"]["name"] == "exact"
    assert "hostile.Net" in run(f"{found.path}", "--recipe").stdout
    assert not (folder / "canary").exists()


def test_a_table_is_drawn_on_a_terminal_and_takes_no_markup(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    rows = [["[red]weight[/red]", "0.5"], ["b", "0.25"]]
    for is_terminal in (False, True):
        out = io.StringIO()
        out.isatty = lambda is_terminal=is_terminal: is_terminal  # type: ignore[method-assign]
        monkeypatch.setattr(sys, "stdout", out)
        screen.table(("name", "value"), rows)
        text = out.getvalue()
        assert "[red]weight[/red]" in text
        assert ("─" in text) == is_terminal
        if not is_terminal:
            assert (
                text
                == "name               value\n[red]weight[/red]  0.5\nb                  0.25\n"
            )


def test_the_lines_of_a_difference_name_what_is_not_finite() -> None:
    first, second = held(), held(model={"weight": torch.full((64,), math.nan)})
    both = {
        "first": contents.describe(first),
        "second": contents.describe(second),
        "difference": difference(first, second),
    }
    lines = difference_lines(both)
    assert "not finite: model.weight" in lines
    assert "vanished:   bias" in lines


def test_a_look_leaves_the_tensors_in_the_file() -> None:
    mapped = Path("/proc/self/maps")
    found = held()
    name = f"{found.path}"
    assert name in mapped.read_text()
    del found
    whole = load(Path(name), notify=print)
    assert name not in mapped.read_text()
    assert whole.payload["model"]
