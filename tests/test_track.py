"""`metrics.jsonl` is strict JSON whatever happens, and the console hides nothing from a person."""

import io
import json
import math
import os
import re
import resource
import subprocess
import sys
import time
from pathlib import Path

import numpy as np
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st
from rich.console import Console as RichConsole

from ampctl.errors import MachineError, UsageError
from ampctl.track.console import (
    Console,
    evaluation_line,
    significant,
    skip_line,
    train_line,
)
from ampctl.track.metrics import MetricsFile, read_metrics

FIELDS = {
    "step": 120,
    "total_steps": 345,
    "epoch": 5,
    "loss": 0.12341,
    "lr": 2.1e-3,
    "grad_norm": 0.8702,
    "scale": 65536.0,
    "skipped": 1,
    "samples_per_s": 12345.4,
}


def refuse(constant: str) -> None:
    raise AssertionError(f"{constant} is not JSON")


def strict(line: str) -> dict[str, object]:
    return json.loads(line, parse_constant=refuse)


# metrics.jsonl


values = st.recursive(
    st.none() | st.booleans() | st.integers(-(2**70), 2**70) | st.floats() | st.text(),
    lambda inner: st.lists(inner, max_size=3) | st.dictionaries(st.text(), inner, max_size=3),
    max_leaves=8,
)


def as_written(value: object) -> object:
    if isinstance(value, float) and not math.isfinite(value):
        return "nan" if math.isnan(value) else "inf" if value > 0 else "-inf"
    if isinstance(value, list):
        return [as_written(item) for item in value]
    if isinstance(value, dict):
        return {key: as_written(item) for key, item in value.items()}
    return value


@settings(deadline=None, max_examples=100)
@given(
    st.dictionaries(
        st.text().filter(lambda name: name not in {"event", "step", "time"}), values, max_size=5
    )
)
def test_whatever_is_written_is_strict_json_and_reads_back(tmp_path_factory, fields) -> None:
    path = tmp_path_factory.mktemp("run") / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write("train", 7, **fields)
        metrics.write("stop", 8)
    lines = path.read_text(encoding="ascii").splitlines()
    assert len(lines) == 2
    record = strict(lines[0])
    assert list(record) == ["event", "step", *fields, "time"]
    assert isinstance(record.pop("time"), float)
    assert record == {"event": "train", "step": 7, **as_written(fields)}
    assert [event["event"] for event in read_metrics(path)] == ["train", "stop"]


@pytest.mark.parametrize("kind", [np.float16, np.float32, np.float64, np.longdouble])
def test_numpy_scalars_are_numbers_and_their_nan_is_text(tmp_path, kind) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.write("train", np.int64(3), loss=kind(0.5), worst=kind("nan"), least=kind("-inf"))
        metrics.write("train", 4, flag=np.bool_(True), matrix=np.array([[1.0, np.inf]], kind))
    first, second = read_metrics(tmp_path / "metrics.jsonl")
    assert (first["step"], first["loss"]) == (3, 0.5)
    assert isinstance(first["step"], int)
    assert (first["worst"], first["least"]) == ("nan", "-inf")
    assert second["flag"] is True
    assert second["matrix"] == [[1.0, "inf"]]


def test_paths_are_text_and_other_objects_are_refused_by_name(tmp_path) -> None:
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        metrics.write("checkpoint", 1, path=Path("checkpoints/é.pt"))
        with pytest.raises(TypeError, match="not object"):
            metrics.write("train", 1, loss=object())
        metrics.write("checkpoint", 2, path="b.pt")
    assert [event["path"] for event in read_metrics(tmp_path / "metrics.jsonl")] == [
        "checkpoints/é.pt",
        "b.pt",
    ]


@pytest.mark.parametrize(
    "torn", ['{"event": "tr', '{"event": "train", "step": 3}', "\0\0\0\0", "garbage\n", "[1]\n"]
)
def test_a_torn_last_line_is_left_out_by_readers_and_cut_by_the_next_writer(tmp_path, torn) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write("train", 1)
        metrics.write("train", 2)
    whole = path.read_text()
    path.write_text(whole + torn)
    assert [event["step"] for event in read_metrics(path)] == [1, 2]
    with MetricsFile(path) as metrics:
        assert path.read_text() == whole
        metrics.write("resume", 2)
    assert [event["event"] for event in read_metrics(path)] == ["train", "train", "resume"]


@pytest.mark.parametrize("torn", ["", "{", "\n"])
def test_a_file_without_a_whole_line_is_emptied(tmp_path, torn) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text(torn)
    MetricsFile(path).close()
    assert path.read_bytes() == b""
    assert read_metrics(path) == []


def test_a_whole_file_is_not_touched_by_opening_it(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    with MetricsFile(path) as metrics:
        metrics.write("train", 1, text="x" * 100_000)
    before = path.read_bytes()
    metrics = MetricsFile(path)
    metrics.close()
    metrics.close()
    assert path.read_bytes() == before


def test_each_line_is_one_system_call(tmp_path, monkeypatch) -> None:
    calls = []
    real = os.write
    with MetricsFile(tmp_path / "metrics.jsonl") as metrics:
        monkeypatch.setattr(os, "write", lambda file, data: calls.append(data) or real(file, data))
        metrics.write("train", 1, loss=math.nan, text="x" * 10_000)
    assert len(calls) == 1
    assert calls[0].endswith(b"}\n")


def test_a_kill_leaves_whole_lines_only(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    code = (
        "import sys\nfrom ampctl.track.metrics import MetricsFile\n"
        "metrics = MetricsFile(sys.argv[1])\n"
        "for step in range(10**9): metrics.write('train', step, text='x' * (step % 3000))\n"
    )
    writer = subprocess.Popen([sys.executable, "-c", code, str(path)])
    while not path.exists() or path.stat().st_size < 100_000:
        assert writer.poll() is None
        time.sleep(0.01)
    writer.kill()
    writer.wait()
    steps = [event["step"] for event in read_metrics(path)]
    assert steps == list(range(len(steps)))
    assert path.read_bytes().count(b"\n") - len(steps) == 0


def test_a_full_disk_is_told_in_words_and_leaves_no_torn_line(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    with MetricsFile(path) as metrics:
        metrics.write("train", 1)
        before = path.read_bytes()
        resource.setrlimit(resource.RLIMIT_FSIZE, (len(before) + 50, hard))
        try:
            with pytest.raises(MachineError, match=re.escape(str(path))) as caught:
                metrics.write("train", 2, text="x" * 100)
        finally:
            resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
        assert caught.value.exit_code == 5
        assert path.read_bytes() == before
        metrics.write("stop", 2)
    assert [event["event"] for event in read_metrics(path)] == ["train", "stop"]


def test_a_place_that_cannot_be_written_is_told_in_words(tmp_path) -> None:
    with pytest.raises(MachineError, match="No such file"):
        MetricsFile(tmp_path / "absent" / "metrics.jsonl")


def test_reading_names_the_line_that_is_not_json(tmp_path) -> None:
    path = tmp_path / "metrics.jsonl"
    path.write_text('{"event": "start", "step": 0}\n<<<<<<< ours\n{"event": "stop", "step": 1}\n')
    with pytest.raises(UsageError, match=r"metrics\.jsonl:2: not a JSON object: '<<<<<<< ours'"):
        read_metrics(path)
    with pytest.raises(UsageError, match="cannot be read"):
        read_metrics(tmp_path)


# Words


@pytest.mark.parametrize(
    ("value", "digits", "text"),
    [
        (0.12341, 4, "0.1234"),
        (2.3, 4, "2.300"),
        (0.0, 4, "0.000"),
        (1234.0, 4, "1234"),
        (12345.6, 4, "12346"),
        (1.5e7, 4, "1.500e+07"),
        (1.2e-7, 4, "1.200e-07"),
        (-0.5, 2, "-0.50"),
        (99.97, 2, "100"),
        (math.nan, 4, "nan"),
        (-math.inf, 4, "-inf"),
    ],
)
def test_significant_digits(value, digits, text) -> None:
    assert significant(value, digits) == text


def test_train_line_has_every_figure_and_fits_80_columns_until_a_step_is_skipped() -> None:
    assert train_line(FIELDS) == (
        "step 120/345  epoch 5  loss 0.1234  lr 2.1e-03  grad 0.87  scale 65536  "
        "skipped 1  12,345/s"
    )
    assert len(train_line({**FIELDS, "skipped": 0})) <= 80


def test_train_line_without_a_known_end_or_some_figures() -> None:
    assert train_line({"step": 7, "loss": 1.0, "grad_norm": None}) == "step 7  loss 1.000"
    assert train_line({"step": 7, "total_steps": 1000}) == "step    7/1000"


def test_train_line_shows_what_is_not_finite() -> None:
    line = train_line({**FIELDS, "loss": math.nan, "grad_norm": math.inf, "lr": -math.inf})
    assert "loss nan  lr -inf  grad inf" in line


def test_skip_line_tells_the_scale_only_if_it_moved() -> None:
    assert skip_line(3, 65536.0, 32768.0, 1) == (
        "step 3  skipped: non-finite gradient, scale 65536 -> 32768"
    )
    assert skip_line(3, 1.0, 1.0, 2) == "step 3  skipped: non-finite gradient, 2 in a row"


def test_evaluation_line_takes_any_kind_of_metric() -> None:
    metrics = {"eval/loss": np.float32(0.25), "eval/count": 10, "eval/note": "x", "f1": math.nan}
    assert evaluation_line(9, metrics, best=True) == (
        "step 9  eval  loss 0.2500  count 10  note x  f1 nan  best so far"
    )
    assert "best" not in evaluation_line(9, metrics, best=False)


# The console where there is no terminal


def tell_everything(console: Console, total: int | None = 345) -> None:
    console.start(["digits: 1,000 parameters"], total_steps=total)
    console.advance(1)
    console.train({**FIELDS, "total_steps": total})
    console.train({**FIELDS, "step": 121, "loss": math.nan})
    console.skip(122, 65536.0, 32768.0, 1)
    with console.evaluating(3) as evaluation:
        for _ in range(3):
            evaluation.advance()
    console.evaluation(122, {"eval/loss": math.inf}, best=False)
    console.note("a note with [brackets]")
    console.warn("a fall-back")
    console.finish(["done"])
    console.close()


def test_plain_output_is_one_line_an_event_without_control_characters(capsys) -> None:
    tell_everything(Console())
    out, err = capsys.readouterr()
    assert out.splitlines() == [
        "digits: 1,000 parameters",
        train_line(FIELDS),
        train_line({**FIELDS, "step": 121, "loss": math.nan}),
        "step 122  skipped: non-finite gradient, scale 65536 -> 32768",
        "step 122  eval  loss inf",
        "a note with [brackets]",
        "done",
    ]
    assert err == "warning: a fall-back\n"
    assert not re.search(r"[^\n\x20-\x7e]", out + err)


def test_total_steps_given_at_the_start_are_kept(capsys) -> None:
    console = Console()
    console.start([], total_steps=50)
    console.train({"step": 5})
    console.close()
    assert capsys.readouterr().out == "step  5/50\n"


def test_quiet_leaves_warnings_and_the_last_lines(capsys) -> None:
    tell_everything(Console(quiet=True))
    assert capsys.readouterr() == ("done\n", "warning: a fall-back\n")


def test_quiet_draws_no_bar_on_a_terminal(capsys) -> None:
    terminal = RichConsole(file=io.StringIO(), force_terminal=True, width=80)
    tell_everything(Console(quiet=True, terminal=terminal))
    assert terminal.file.getvalue() == "done\n"
    assert capsys.readouterr().err == "warning: a fall-back\n"


@pytest.mark.parametrize("term", ["dumb", "unknown", None])
def test_a_terminal_that_cannot_move_the_cursor_gets_plain_lines(monkeypatch, capsys, term) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    if term is None:
        monkeypatch.delenv("TERM", raising=False)
    else:
        monkeypatch.setenv("TERM", term)
    tell_everything(Console())
    assert "\x1b" not in capsys.readouterr().out


def test_letters_that_a_stream_lacks_do_not_end_the_run(monkeypatch) -> None:
    stream = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    monkeypatch.setattr(sys, "stdout", stream)
    Console().note("modèle")
    monkeypatch.undo()
    assert stream.buffer.getvalue() == b"mod\\xe8le\n"

    narrow = io.TextIOWrapper(io.BytesIO(), encoding="ascii")
    console = Console(terminal=RichConsole(file=narrow, force_terminal=True, width=80))
    console.start(["modèle"], total_steps=3)
    console.note("modèle")
    console.close()
    assert narrow.buffer.getvalue().count(b"mod\\xe8le") == 2


def test_the_command_line_can_import_tracking_without_rich_or_torch() -> None:
    code = (
        "import sys\nimport ampctl.track.console, ampctl.track.metrics\n"
        "from ampctl.track.console import Console\nConsole().note('x')\n"
        "assert not {'rich', 'torch', 'numpy'} & set(sys.modules), sorted(sys.modules)"
    )
    subprocess.run([sys.executable, "-c", code], check=True, stdout=subprocess.DEVNULL)


# The console on a terminal


class Clock:
    """A clock that moves only when told, so that what is due does not depend on the machine."""

    def __init__(self) -> None:
        self.now = 1000.0

    def monotonic(self) -> float:
        return self.now


@pytest.fixture
def clock(monkeypatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr("ampctl.track.console.time", clock)
    return clock


def open_terminal(width: int = 80) -> RichConsole:
    return RichConsole(
        file=io.StringIO(), force_terminal=True, width=width, height=24, _environ={"TERM": "xterm"}
    )


def seen(terminal: RichConsole) -> str:
    """Return all that was ever drawn, without colours and cursor moves."""
    return re.sub(r"\x1b\[[0-9;?]*[A-Za-z]", "", terminal.file.getvalue())


def test_the_bar_shows_place_and_figures_and_lines_stand_above_it(clock) -> None:
    terminal = open_terminal()
    console = Console(terminal=terminal)
    console.start(["digits"], total_steps=345)
    console.train(FIELDS)
    console.evaluation(120, {"eval/loss": 0.5}, best=True)
    drawn = [line.rstrip() for line in seen(terminal).splitlines()]
    assert drawn[0] == "digits"
    line = drawn.index("step 120  eval  loss 0.5000  best so far")
    assert re.match(r"epoch 5 \S+ *120/345 -:--:--$", drawn[line + 1])
    assert drawn[line + 2].startswith("loss 0.1234  lr 2.1e-03  grad 0.87  scale 65536  skipped 1")
    console.finish(["done"])
    assert seen(terminal).endswith("done\n")
    assert terminal.file.getvalue().count("\x1b[?25l") == terminal.file.getvalue().count(
        "\x1b[?25h"
    )


def test_figures_that_are_not_finite_are_red(clock) -> None:
    terminal = open_terminal()
    console = Console(terminal=terminal)
    console.start([], total_steps=345)
    console.train({**FIELDS, "loss": math.nan, "grad_norm": math.inf, "samples_per_s": math.nan})
    console.evaluation(120, {"eval/loss": -math.inf}, best=False)
    console.close()
    raw = terminal.file.getvalue()
    for figure in ("loss \x1b[1;31mnan", "grad \x1b[1;31minf", "loss \x1b[1;31m-inf"):
        assert figure in raw
    assert "\x1b[1;31mnan\x1b[0m/s" in raw


def test_advance_draws_only_when_a_redraw_is_due(clock) -> None:
    terminal = open_terminal()
    console = Console(terminal=terminal)
    console.start([], total_steps=1000)
    before = terminal.file.getvalue()
    for step in range(1, 500):
        console.advance(step)
    assert terminal.file.getvalue() == before
    clock.now += 1.0
    console.advance(500)
    console.advance(501)
    assert "500/1000" in seen(terminal)
    assert "501/1000" not in seen(terminal)
    console.close()


def test_many_train_events_in_a_moment_are_drawn_once(clock) -> None:
    terminal = open_terminal()
    console = Console(terminal=terminal)
    console.start([], total_steps=1000)
    for step in range(1, 50):
        console.train({"step": step, "loss": float(step)})
    assert "loss 1.000" in seen(terminal)
    assert "loss 2.000" not in seen(terminal)
    clock.now += 1.0
    console.advance(50)
    assert "loss 49.00" in seen(terminal)
    console.close()


def test_a_run_without_a_known_end_has_no_time_left(clock) -> None:
    terminal = open_terminal()
    console = Console(terminal=terminal)
    console.start([])
    console.train({**FIELDS, "total_steps": None})
    console.close()
    assert "120/?" in seen(terminal)
    assert ":--" not in seen(terminal)


def test_a_resumed_run_does_not_count_the_steps_before_it_as_speed(clock) -> None:
    terminal = open_terminal()
    console = Console(terminal=terminal)
    console.start([], step=900_000, total_steps=1_000_000)
    console.train({"step": 900_001})
    console.close()
    assert "900000/1000000 -:--:--" in seen(terminal)
    assert "900001/1000000 0:00:00" not in seen(terminal)


def test_an_evaluation_shows_its_progress_and_then_leaves(clock) -> None:
    terminal = open_terminal()
    console = Console(terminal=terminal)
    console.start([], total_steps=1000)
    with console.evaluating(3) as evaluation:
        evaluation.advance()
        assert re.search(r"evaluating.* 1/3", seen(terminal))
        evaluation.advance()
        assert not re.search(r"evaluating.* 2/3", seen(terminal))
    drawn = len(terminal.file.getvalue())
    console.note("after")
    assert "evaluating" not in terminal.file.getvalue()[drawn:]
    console.close()


@pytest.mark.parametrize("width", [1, 2, 10, 40, 500])
def test_any_width_shows_something_and_figures_never_wrap(clock, width) -> None:
    terminal = open_terminal(width)
    console = Console(terminal=terminal)
    console.start([], total_steps=10**9)
    console.train({**FIELDS, "step": 10**8})
    console.close()
    assert seen(terminal).strip()
    lines = seen(terminal).splitlines()
    assert all(len(line) <= width for line in lines)
    figures = [line for line in lines if re.search(r"grad|scale|skip|12,", line)]
    assert all(line.startswith("loss") for line in figures)


def test_what_user_code_prints_stands_above_the_bar_too(clock, monkeypatch) -> None:
    terminal = open_terminal()
    console = Console(terminal=terminal)
    console.start([], total_steps=10)
    print("from a model's forward")
    console.close()
    assert "from a model's forward\n" in seen(terminal)


def test_warnings_stay_in_the_file_that_stderr_is_sent_to(clock, capsys) -> None:
    terminal = open_terminal()
    console = Console(terminal=terminal)
    console.start([], total_steps=10)
    console.warn("a fall-back")
    print("from user code", file=sys.stderr)
    console.close()
    assert capsys.readouterr().err == "warning: a fall-back\nfrom user code\n"
    assert "fall-back" not in seen(terminal)


def test_warnings_stand_above_the_bar_where_stderr_is_the_same_screen(
    clock, capsys, monkeypatch
) -> None:
    terminal = open_terminal()
    monkeypatch.setattr(sys.stderr, "isatty", lambda: True)
    console = Console(terminal=terminal)
    console.start([], total_steps=10)
    console.warn("a fall-back")
    console.close()
    assert "warning: a fall-back\n" in seen(terminal)
    assert capsys.readouterr().err == ""
