"""The command line: every command, its words, its exit codes, and that nothing else is printed."""

from __future__ import annotations

import contextlib
import json
import os
import re
import shlex
import shutil
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest
import torch
from processes import read_events, spawn, starting
from test_resume_exact import assert_same
from typer.testing import CliRunner, Result

from ampctl import __version__
from ampctl.cli import app

TESTS = Path(__file__).parent
COMMANDS = (
    *("train", "resume", "check", "inspect", "eval", "export"),
    *("show", "schema", "env", "docs", "recipes"),
)
RECIPE = """\
name: small
seed: 1
model: {_target_: own_parts.Net}
task: {_target_: ampctl.tasks.Classification}
data:
  train: {_target_: own_parts.Augmented}
  eval: {_target_: own_parts.Augmented, size: 9}
  batch_size: 8
optimizer: {_target_: torch.optim.AdamW, lr: 1e-2}
amp: {dtype: bfloat16}
train: {max_epochs: 2}
log: {every_steps: 2}
"""


@pytest.fixture(autouse=True)
def _here(folder: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(str(TESTS))
    for name in ("own_parts.py", "faulty_parts.py"):
        shutil.copy(TESTS / name, folder)
    (folder / "recipe.yaml").write_text(RECIPE)


def ampctl(*argv: str, code: int = 0) -> Result:
    """Run a command in this process and see its exit code; an error is told once, on stderr."""
    result = CliRunner().invoke(app, argv)
    assert result.exit_code == code, (result.stdout, result.stderr, result.exc_info)
    told = result.stderr.count("error: ")
    if code in (0, 1):
        assert told == 0
    else:
        assert told == 1, result.stderr
        said = [line for line in result.stderr.splitlines() if not line.startswith("warning: ")]
        assert said[0].startswith("error: ")
        assert "error: " not in result.stdout
        assert not Path("runs").exists()  # no folder is left of a run that never began
    assert "Traceback" not in result.stderr
    return result


def train(run_dir: str = "d", *overrides: str) -> Path:
    ampctl("train", "recipe.yaml", "--run-dir", run_dir, "--quiet", *overrides)
    return Path(run_dir)


def last(run_dir: Path) -> dict[str, Any]:
    return torch.load(run_dir / "checkpoints" / "latest.pt", weights_only=True)


def without_style(text: str) -> str:
    return re.sub(r"\x1b\[[0-9;]*m", "", text)


# Help


@pytest.mark.parametrize("command", COMMANDS)
def test_every_command_has_help(command: str) -> None:
    for flag in ("--help", "-h"):
        result = CliRunner().invoke(app, [command, flag])
        assert result.exit_code == 0
        assert f"Usage: ampctl {command}" in without_style(result.stdout)


def test_help_lists_every_command_and_so_does_no_command_at_all() -> None:
    for argv, code in (["--help"], 0), ([], 2):
        result = CliRunner().invoke(app, argv)
        assert result.exit_code == code
        listed = re.findall(r"│ (\w+) ", without_style(result.output))
        assert set(COMMANDS) <= set(listed)


def test_the_folder_of_a_resumed_run_is_its_own_in_the_help_too() -> None:
    assert "[default: (the run's)]" in ampctl("resume", "--help").stdout
    assert "[default: (runs/NAME/TIME)]" in ampctl("train", "--help").stdout


@pytest.mark.parametrize("argv", [("--help",), ("--version",), ("train", "--help")])
def test_help_imports_neither_torch_nor_the_reading_of_recipes(argv: tuple[str, ...]) -> None:
    program = f"""
import sys
sys.argv = ["ampctl", *{argv!r}]
from ampctl.__main__ import main
try:
    main()
except SystemExit as ended:
    assert not ended.code
heavy = {{"torch", "omegaconf", "yaml", "numpy"}} & sys.modules.keys()
assert not heavy, heavy
"""
    done = spawn("-c", program)
    assert (done.returncode, done.stderr) == (0, "")


def test_version() -> None:
    assert ampctl("--version").stdout == f"ampctl {__version__}\n"


# Real processes: the module, and the script that is installed


def test_the_module_trains_and_shows_in_a_process_of_its_own(folder: Path) -> None:
    done = spawn("-m", "ampctl", "train", "recipe.yaml", "--run-dir", "d")
    assert (done.returncode, done.stderr) == (0, "")
    assert "complete: 6 steps, 6 updates" in done.stdout
    assert done.stdout.endswith("to go on: ampctl resume d train.max_epochs=4\n")
    done = spawn("-m", "ampctl", "check", "recipe.yaml", "optimizer.lrr=0")
    assert (done.returncode, done.stdout) == (2, "")
    assert done.stderr.startswith("error: command line: optimizer.lrr:")


def test_the_script_is_the_same_program(folder: Path) -> None:
    script = Path(sys.executable).with_name("ampctl")
    if not script.exists():
        pytest.skip("the console script is not installed beside this interpreter")
    done = subprocess.run([script, "--version"], capture_output=True, text=True)
    assert (done.returncode, done.stdout) == (0, f"ampctl {__version__}\n")
    done = subprocess.run([script, "env", "--json"], capture_output=True, text=True)
    assert (done.returncode, done.stderr) == (0, "")
    assert json.loads(done.stdout)["torch"] == str(torch.__version__)


@pytest.mark.parametrize("argv", ["show digits", "schema", "recipes list", "recipes show digits"])
def test_light_commands_in_a_process_of_their_own(argv: str) -> None:
    done = spawn("-m", "ampctl", *argv.split())
    assert (done.returncode, done.stderr) == (0, "")
    assert len(done.stdout) > 10


def test_a_reader_that_has_seen_enough_is_no_fault(folder: Path) -> None:
    (folder / "long.yaml").write_text(RECIPE + f"# {'x' * 300}\n")
    for argv in ("show digits --origin", "schema", "show long.yaml --json"):
        with subprocess.Popen(
            [sys.executable, "-m", "ampctl", *argv.split()],
            stdout=subprocess.PIPE,
            stderr=subprocess.PIPE,
        ) as process:
            assert process.stdout is not None
            assert process.stderr is not None
            process.stdout.close()
            assert process.stderr.read() == b""
        assert process.returncode == 0


# Exit code 2: usage and recipe


@pytest.mark.parametrize(
    ("argv", "words"),
    [
        ("train nope", "no such file or built-in recipe: nope"),
        ("train recipe.yml", "did you mean recipe.yaml?"),
        ("train recipe.yaml optimizer.lrr=1", "torch.optim.AdamW has no argument 'lrr'"),
        ("train recipe.yaml amp.dtyp=float16", "did you mean amp.dtype?"),
        ("train recipe.yaml amp.dtype=float8", "command line: amp.dtype: got 'float8'"),
        ("train recipe.yaml optimizer", "optimizer"),
        ("train recipe.yaml --resume auto", "--resume auto looks for the run in --run-dir"),
        ("train recipe.yaml --run-dir own_parts.py", "own_parts.py is a file"),
        ("train recipe.yaml train.device=tpu", "'tpu' is no device; allowed: auto, cpu"),
        ("recipes show nope", "no built-in recipe is called 'nope'"),
        ("recipes copy digist", "did you mean digits?"),
    ],
)
def test_usage_errors_end_with_2_and_say_what_is_allowed(argv: str, words: str) -> None:
    assert words in ampctl(*argv.split(), code=2).stderr


@pytest.mark.parametrize("argv", ["train", "train recipe.yaml --bogus", "bogus", "resume"])
def test_what_the_command_line_itself_refuses_ends_with_2(argv: str) -> None:
    result = CliRunner().invoke(app, argv.split())
    assert (result.exit_code, result.stdout) == (2, "")
    assert "Usage: ampctl" in without_style(result.stderr)


@pytest.mark.parametrize("command", ["train", "check", "show"])
def test_five_mistakes_are_listed_with_their_lines(command: str) -> None:
    text = RECIPE.replace("seed: 1", "seed: -1").replace("batch_size: 8", "batch_size: eight")
    text = text.replace("lr: 1e-2}", "lr: 1e-2}\noptimiser: {}").replace("bfloat16", "bf17")
    Path("bad.yaml").write_text(text.replace("max_epochs: 2", "max_epoch: 2"))
    lines = ampctl(command, "bad.yaml", code=2).stderr.splitlines()
    assert re.fullmatch(r"error: [56] problems in the recipe", lines[0])
    listed = re.findall(r"^(bad\.yaml:\d+): ([\w.]+): ", "\n".join(lines), re.MULTILINE)
    expected = {
        ("bad.yaml:2", "seed"),
        ("bad.yaml:8", "data.batch_size"),
        ("bad.yaml:10", "optimiser"),
        ("bad.yaml:11", "amp.dtype"),
        ("bad.yaml:12", "train.max_epoch"),
    }
    assert expected <= set(listed)


def test_wrong_targets_are_listed_with_their_lines_at_once() -> None:
    text = RECIPE.replace("own_parts.Net", "own_parts.Nett").replace("lr: 1e-2", "lrr: 1e-2")
    Path("bad.yaml").write_text(text)
    message = ampctl("train", "bad.yaml", code=2).stderr
    assert "bad.yaml:3: model._target_: own_parts has no attribute 'Nett'" in message
    assert "bad.yaml:9: optimizer.lrr: torch.optim.AdamW has no argument 'lrr'" in message


def test_unsupported_keys_say_so_with_their_lines() -> None:
    Path("soon.yaml").write_text(
        RECIPE.replace("batch_size: 8", "batch_size: 8\n  micro_batch_size: auto").replace(
            "log: {every_steps: 2}", "log: {every_steps: 2, trackers: [tensorboard]}"
        )
    )
    message = ampctl("train", "soon.yaml", code=2).stderr
    assert "soon.yaml:9: data.micro_batch_size: not supported yet: 'auto'" in message
    assert "soon.yaml:13: log.trackers: not supported yet: " in message


def test_a_folder_that_holds_a_run_is_never_written_over() -> None:
    run_dir = train()
    before = {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()}
    message = ampctl("train", "recipe.yaml", "--run-dir", "d", code=2).stderr
    assert "d already holds a run" in message
    assert "`ampctl resume d`" in message
    assert {path: path.read_bytes() for path in run_dir.rglob("*") if path.is_file()} == before


def test_a_second_run_in_one_folder_is_refused_and_the_first_is_named(folder: Path) -> None:
    with starting(folder) as start:
        task = "task={_target_: faulty_parts.Watched, hold_at: 3}"
        first = start("train", "recipe.yaml", "--run-dir", "d", task)
        first.until((folder / "held").exists)
        words = f"error: d is in use: process {first.pid} on "
        line = ("train", "recipe.yaml", "--run-dir", "d", "--resume", "auto")
        assert ampctl(*line, code=2).stderr.startswith(words)
        assert ampctl("resume", "d", code=2).stderr.startswith(words)
        (folder / "go").touch()
        assert first.wait().code == 0
    assert [e["event"] for e in read_events(folder / "d")].count("start") == 1


# Exit code 4: checkpoints


@pytest.fixture
def run_dir() -> Path:
    return train()


def test_a_checkpoint_that_is_missing(run_dir: Path) -> None:
    assert "there is no such file" in ampctl("resume", "nowhere", code=4).stderr
    assert "there is no such file" in ampctl("resume", "d/checkpoints/x.pt", code=4).stderr
    Path("empty").mkdir()
    assert "empty holds no checkpoint" in ampctl("resume", "empty", code=4).stderr


def test_a_checkpoint_that_is_damaged(run_dir: Path) -> None:
    newest = (run_dir / "checkpoints" / "latest.pt").resolve()
    content = bytearray(newest.read_bytes())
    content[len(content) // 2] ^= 1
    newest.write_bytes(content)
    message = ampctl("resume", f"{newest}", code=4).stderr
    assert newest.name in message
    # The folder has an older one that is whole, and says so.
    result = ampctl("resume", "d", "train.max_epochs=3")
    assert result.stderr.startswith(f"warning: checkpoint {newest.name} cannot be used (")
    assert "going on from step-00000003.pt: step 3" in result.stdout
    assert_same(last(run_dir), last(train("whole", "train.max_epochs=3")))
    for path in (run_dir / "checkpoints").glob("step-*.pt"):
        path.write_bytes(path.read_bytes()[:1000])
    message = ampctl("resume", "d", code=4).stderr
    assert "no checkpoint of d can be used" in message


def test_a_text_file_is_no_checkpoint() -> None:
    assert "it is not a checkpoint file" in ampctl("resume", "recipe.yaml", code=4).stderr


def test_a_checkpoint_that_does_not_fit(run_dir: Path) -> None:
    message = ampctl("resume", "d", "model.width=24", "train.max_epochs=3", code=4).stderr
    assert "first.weight: [16, 8] saved, [24, 8] in the model" in message


def test_a_strangers_recipe_needs_trust(run_dir: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", f"{Path.cwd() / 'fresh'}")
    message = ampctl("resume", "d", "train.max_epochs=3", code=4).stderr
    assert "model: own_parts.Net" in message
    assert "data.train: own_parts.Augmented" in message
    assert "--trust" in message
    result = ampctl("resume", "d", "--trust", "train.max_epochs=3")
    assert "trusted: model: own_parts.Net" in result.stderr
    # It has been trained here now.
    assert ampctl("resume", "d", "train.max_epochs=4").stderr == ""


def test_an_older_file_of_a_run_folder_goes_on_from_there(run_dir: Path) -> None:
    whole = last(run_dir)
    result = ampctl("resume", "d/checkpoints/step-00000003.pt")
    assert "going on from step-00000003.pt: step 3, epoch 1" in result.stdout
    assert_same(last(run_dir), whole)
    steps = [e["step"] for e in read_events(run_dir) if e["event"] == "eval"]
    assert steps == [3, 6, 6]
    assert not list(run_dir.rglob("*.tmp"))


@pytest.mark.parametrize("there", [False, True])
def test_a_folder_in_which_no_run_could_begin_is_left_as_it_was(
    run_dir: Path, folder: Path, there: bool
) -> None:
    shutil.copy("d/checkpoints/latest.pt", "lone.pt")
    if there:
        (folder / "a/b").mkdir(parents=True)
    before = sorted(folder.rglob("*"))
    for line in (
        ("resume", "d", "data.batch_size=4"),
        ("resume", "lone.pt", "model.width=17"),
        ("train", "recipe.yaml", "--init-from", "lone.pt", "model.width=17"),
    ):
        ampctl(*line, "--run-dir", "a/b", code=4)
        assert sorted(folder.rglob("*")) == before
    ampctl("resume", "lone.pt", "model.width=17", code=4)
    assert sorted(folder.rglob("*")) == before


LONG = ("x" * 300, f"{'x' * 99}/" * 45)


@pytest.mark.parametrize("name", LONG)
def test_a_path_that_is_too_long_is_told_in_words(run_dir: Path, name: str) -> None:
    reason = "it cannot be opened (File name too long)"
    for command in ("inspect", "verify", "eval", "resume"):
        assert reason in ampctl(command, name, code=4).stderr
    ampctl("export", name, "out.pt", code=4)
    told = ampctl("export", "d", f"{name}x.pt", code=2 if "/" in name else 5).stderr
    assert "there is no folder" in told or "File name too long" in told
    ampctl("train", "recipe.yaml", "--init-from", name, "--run-dir", "e", code=4)
    for line in (("train", "recipe.yaml"), ("resume", "d")):
        told = ampctl(*line, "--run-dir", name, code=5).stderr
        assert told.endswith(": File name too long; give another --run-dir\n")
    for line in (("verify", f"{name}.yaml", "--resume"), ("recipes", "copy", "digits", name)):
        ampctl(*line, code=2)


# Exit codes 5 and 1


def test_a_device_that_is_not_here_ends_with_5() -> None:
    if torch.cuda.is_available():
        pytest.skip("there is a CUDA device")
    message = ampctl("train", "recipe.yaml", "train.device=cuda", code=5).stderr
    assert "cuda was asked for and none is here (devices: cpu" in message
    assert "`ampctl env`" in message


def test_half_a_launch_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("WORLD_SIZE", "2")
    for argv in (("train", "recipe.yaml"), ("resume", "d")):
        assert "RANK, LOCAL_RANK, MASTER_ADDR" in ampctl(*argv, code=5).stderr


def test_a_read_only_disk_ends_with_5(mount: Any) -> None:
    disk = mount("ro,size=1m")
    message = ampctl("train", "recipe.yaml", "--run-dir", f"{disk}/d", code=5).stderr
    assert f"cannot write in {disk}/d: Read-only file system" in message


@pytest.mark.parametrize("asynchronous", ["true", "false"])
def test_a_full_disk_ends_with_5_and_what_is_saved_stays(mount: Any, asynchronous: str) -> None:
    disk = mount("size=300k")
    options = (
        *("model.width=400", "checkpoint.every_steps=1", "checkpoint.keep_last=100"),
        f"checkpoint.asynchronous={asynchronous}",
    )
    result = ampctl("train", "recipe.yaml", "--run-dir", f"{disk}/d", *options, code=5)
    assert "no room to write" in result.stderr
    assert "bytes are free (No space left on device)" in result.stderr
    warning = result.stderr.splitlines()[0]
    assert result.stderr.count("warning: the disk of ") == 1
    assert "and up to 102 of them will be there at once" in warning
    assert re.search(r"which takes [0-9,]+ bytes more; [0-9,]+ bytes are free$", warning)
    assert not list((disk / "d").rglob("*.tmp"))
    saved = last(disk / "d")["progress"]["step"]
    # With room again, it goes on from there.
    (stop,) = [e for e in read_events(disk / "d") if e["event"] == "stop"]
    assert (stop["reason"], stop["exit_code"]) == ("error", 5)
    subprocess.run(["mount", "-o", "remount,size=10m", disk], check=True)
    result = ampctl("resume", f"{disk}/d")
    assert f"going on from step-{saved:08d}.pt" in result.stdout
    assert_same(last(disk / "d"), last(train("whole", *options)))


def test_a_full_disk_is_left_by_keeping_fewer_files(mount: Any) -> None:
    disk = mount("size=300k")
    options = ("model.width=250", "checkpoint.every_steps=1", "checkpoint.keep_best=0")
    line = ("train", "recipe.yaml", "--run-dir", f"{disk}/d", *options, "checkpoint.keep_last=100")
    told = ampctl(*line, code=5).stderr
    assert "`ampctl resume RUN checkpoint.keep_last=1` removes older checkpoints before" in told
    with contextlib.suppress(OSError), (disk / "filler").open("wb", buffering=0) as file:
        while True:  # not a byte is left
            file.write(b"x" * 4096)
    ampctl("resume", f"{disk}/d", "checkpoint.keep_last=1")
    assert len(list((disk / "d/checkpoints").glob("step-*.pt"))) == 1
    assert not list((disk / "d").rglob("*.tmp"))
    assert_same(last(disk / "d"), last(train("whole", *options)))


def test_requeued_past_a_damaged_file_keeps_the_one_it_goes_on_from(run_dir: Path) -> None:
    newest = (run_dir / "checkpoints" / "latest.pt").resolve()
    newest.write_bytes(newest.read_bytes()[:1000])
    options = ("train.max_epochs=3", "checkpoint.keep_last=1", "checkpoint.keep_best=0")
    line = ("train", "recipe.yaml", "--run-dir", "d", "--resume", "auto", *options)
    result = ampctl(*line)
    assert result.stderr.count("\n") == 1
    assert f"checkpoint {newest.name} cannot be used (it is damaged" in result.stderr
    assert result.stderr.endswith("; step-00000003.pt is taken instead\n")
    aside = f"abandoned-{newest.name}"
    assert f"{newest.name} is put aside as {aside}; remove it when you like" in result.stdout
    assert (run_dir / "checkpoints" / aside).stat().st_size == 1000
    assert_same(last(run_dir), last(train("whole", *options)))


def test_a_fault_of_the_users_own_code_is_a_traceback_and_1(folder: Path) -> None:
    with starting(folder) as start:
        ended = start(
            *("train", "recipe.yaml", "--run-dir", "d"), "model={_target_: faulty_parts.Raises}"
        ).wait()
    assert ended.code == 1
    assert ended.err.startswith("Traceback (most recent call last):")
    assert ended.err.endswith("KeyError: 'my own mistake'\n")
    assert ended.err.count("my own mistake") == 2  # the line that raised it, and the last
    stop = read_events(folder / "d")[-1]
    assert (stop["event"], stop["reason"], stop["exit_code"]) == ("stop", "error", 1)


# check


def test_check_tells_what_would_run_and_writes_nothing(folder: Path) -> None:
    before = sorted(folder.iterdir())
    text = ampctl("check", "recipe.yaml").stdout
    assert "dtype:       bfloat16" in text
    assert "steps:       6" in text
    assert text.endswith("verdict:     ready to train\n")
    facts = json.loads(ampctl("check", "recipe.yaml", "--json").stdout)
    assert (facts["parameters"], facts["steps"]) == (244, 6)
    assert sorted(folder.iterdir()) == before


@pytest.mark.parametrize(
    ("override", "code", "words"),
    [
        ("optimizer={_target_: torch.optim.LBFGS}", 2, "LBFGS .* float16"),
        ("model={_target_: faulty_parts.Frozen}", 2, "got no trainable parameter of Frozen"),
        ("checkpoint.monitor=eval/acc", 2, "checkpoint.monitor.*'eval/acc'.*eval/accuracy"),
        ("train.early_stop={monitor: eval/acc}", 2, "early_stop.monitor.*'eval/acc'"),
        ("data.train.size=0", 2, "data.train: the Augmented has no samples"),
        ("task={_target_: ampctl.tasks.Regression}", 2, "predictions have shape"),
    ],
)
def test_check_names_what_is_wrong(override: str, code: int, words: str) -> None:
    message = ampctl("check", "recipe.yaml", override, "amp.dtype=float16", code=code).stderr
    assert re.search(words, message, re.DOTALL), message


@pytest.mark.parametrize("model", ["WrongShape", "Raises"])
def test_check_lets_a_fault_of_the_users_model_through(model: str) -> None:
    result = ampctl("check", "recipe.yaml", f"model={{_target_: faulty_parts.{model}}}", code=1)
    assert "ready" not in result.stdout
    assert isinstance(result.exception, KeyError if model == "Raises" else RuntimeError)


# show, schema, env, recipes


def test_show_prints_a_recipe_that_can_be_trained(folder: Path) -> None:
    shown = ampctl("show", "recipe.yaml", "optimizer.lr=3e-4").stdout
    (folder / "again.yaml").write_text(shown)
    assert ampctl("show", "again.yaml").stdout == shown
    facts = json.loads(ampctl("show", "again.yaml", "--json").stdout)
    assert facts["optimizer"] == {"_target_": "torch.optim.AdamW", "lr": 3e-4}


def test_show_origin_names_file_line_command_line_and_default() -> None:
    lines = ampctl("show", "recipe.yaml", "optimizer.lr=3e-4", "--origin").stdout.splitlines()
    origins = dict(line.split(maxsplit=1) for line in lines)
    assert origins["optimizer.lr"] == "command line"
    assert origins["data.batch_size"] == "recipe.yaml:8"
    assert origins["amp.init_scale"] == "default"
    as_json = ampctl("show", "recipe.yaml", "optimizer.lr=3e-4", "--origin", "--json").stdout
    assert json.loads(as_json) == origins


def test_schema_is_json_schema_of_every_section() -> None:
    schema = json.loads(ampctl("schema").stdout)
    assert {"name", "model", "task", "data", "optimizer", "amp"} <= schema["properties"].keys()


def test_env_tells_the_machine() -> None:
    assert "torch" in ampctl("env").stdout
    facts = json.loads(ampctl("env", "--json").stdout)
    assert {row["precision"] for row in facts["precisions"]} >= {"float32", "bfloat16", "float16"}


def test_recipes_are_listed_shown_and_copied(folder: Path) -> None:
    names = json.loads(ampctl("recipes", "list", "--json").stdout)
    assert "digits" in names
    assert ampctl("recipes").stdout == ampctl("recipes", "list").stdout
    assert [line.split()[0] for line in ampctl("recipes").stdout.splitlines()] == list(names)
    shown = ampctl("recipes", "show", "digits").stdout
    assert "train it with: ampctl train digits.yaml" in ampctl("recipes", "copy", "digits").stdout
    assert (folder / "digits.yaml").read_text().rstrip() == shown.rstrip()
    (folder / "digits.yaml").write_text("mine")
    assert "exists already" in ampctl("recipes", "copy", "digits", code=2).stderr
    assert (folder / "digits.yaml").read_text() == "mine"
    ampctl("recipes", "copy", "digits", "other.yaml")
    assert ampctl("show", "other.yaml").stdout == ampctl("show", "digits").stdout
    assert "cannot be written" in ampctl("recipes", "copy", "digits", "no/x.yaml", code=2).stderr


# What train says


def test_quiet_leaves_the_last_lines_and_the_warnings() -> None:
    loud = ampctl("train", "recipe.yaml", "--run-dir", "a").stdout.splitlines()
    quiet = ampctl("train", "recipe.yaml", "--run-dir", "b", "--quiet").stdout.splitlines()
    assert "small: 244 parameters, 6 steps of 8 samples" in loud
    assert quiet[0].startswith("complete: 6 steps, 6 updates")
    assert [line.replace("run folder: b", "run folder: a") for line in quiet[:-1]] == loud[
        -len(quiet) : -1
    ]
    assert len(quiet) < len(loud) - 3


def test_without_a_run_dir_the_folder_is_named_after_recipe_and_time(folder: Path) -> None:
    for _ in range(2):
        ampctl("train", "recipe.yaml", "--quiet")
    made = sorted((folder / "runs" / "small").iterdir())
    assert len(made) == 2
    for run_dir in made:
        assert re.fullmatch(r"\d{8}-\d{6}(-\d+)?", run_dir.name)
        for name in ("recipe.yaml", "environment.json", "metrics.jsonl", "logs/rank-0.log"):
            assert (run_dir / name).exists()
        assert json.loads((run_dir / "environment.json").read_text())["command"]
        assert (run_dir / "checkpoints" / "best.pt").exists()
        again = ampctl("show", f"{run_dir / 'recipe.yaml'}").stdout
        assert again.rstrip() == (run_dir / "recipe.yaml").read_text().rstrip()


def test_a_complete_run_says_so_and_names_how_to_go_on(run_dir: Path) -> None:
    result = ampctl("resume", "d", "--quiet")
    assert result.stdout == (
        "already complete (2 of 2 epochs); nothing is changed\n"
        "to go on: ampctl resume d train.max_epochs=4\n"
    )
    assert os.path.lexists(run_dir / "checkpoints" / "latest.pt")


@pytest.mark.parametrize("name", ["it's a run", "-run", "line\nbreak"])
def test_the_command_that_goes_on_is_one_for_a_shell(
    name: str, folder: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.syspath_prepend(f"{Path(__file__).parent}")
    given = ("train", "recipe.yaml", f"--run-dir={name}")
    told = ampctl(*given).stdout.partition("to go on: ampctl ")[2]
    assert ampctl(*shlex.split(told)).exit_code == 0
    told = ampctl("resume", f"--run-dir={name}", f"./{name}", "train.max_epochs=1").stdout
    told = told.partition("to go on: ampctl ")[2]  # a limit that the run is past
    assert "complete: " in ampctl(*shlex.split(told)).stdout


def test_a_resume_of_a_complete_run_removes_nothing_whatever_it_would_keep(run_dir: Path) -> None:
    before = sorted(path.name for path in run_dir.rglob("*"))
    assert len([name for name in before if name.startswith("step-")]) == 2
    said = ampctl("resume", "d", "checkpoint.keep_last=1", "checkpoint.keep_best=0").stdout
    assert "nothing is changed" in said
    assert sorted(path.name for path in run_dir.rglob("*")) == before


@pytest.mark.parametrize("more", [(), ("train.max_epochs=3",)])
def test_a_lost_index_is_told_once_and_is_there_again(run_dir: Path, more: tuple[str, ...]) -> None:
    index = run_dir / "checkpoints" / "index.json"
    index.unlink()
    told = "d/checkpoints/index.json is missing or damaged; examining the 2 checkpoint files"
    assert ampctl("resume", "d", *more).stderr == f"warning: {told}\n"
    assert len(json.loads(index.read_text())) == (3 if more else 2)
