"""README and manual are true: their commands are run, outputs, tables and examples compared."""

from __future__ import annotations

import os
import re
import shlex
import shutil
import signal
import stat
import subprocess
import sys
import time
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path

import pytest
import typer.main
import yaml
from cpus import EMULATED, WITH_FLOAT16, WITHOUT_FLOAT16, Cpu, on_cpus, on_each_cpu, python_path

from ampctl import errors
from ampctl.cli import app
from ampctl.doctor.finding import MEANINGS
from ampctl.recipe.hints import default_values, schema_keys
from ampctl.recipe.load import load_recipe
from ampctl.track.metrics import read_metrics

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "ampctl" / "docs"
# The README comes first, for other pages look at the runs of its session.
PAGES = [
    ROOT / "README.md",
    *(path for path in sorted(DOCS.glob("*.md")) if not path.name.startswith("reference-")),
]
TEXTS = {path: path.read_text(encoding="utf-8") for path in PAGES}
MARK = re.compile(r"<!-- not run: (.*?) -->\n")
FENCE = re.compile(rf"^((?:{MARK.pattern})?)```(\w*)\n(.*?)^```$", re.MULTILINE | re.DOTALL)

# What a test cannot have; the blocks are still read by the tests below and by test_kubernetes.
NOT_RUN = ("needs a GPU", "needs Kubernetes", "needs SLURM", "needs two machines")

# The run of the README in half the time, with the same words on the screen; the whole of it, and
# what it reaches, is in test_recipes.
SHORTER = ("train digits ", "train digits train.max_epochs=8 amp.growth_interval=20 ")
SKIPPED = "skipped: non-finite gradient"
KILLED_AFTER = "step-00000069.pt"

# Commands that install, check all of the repository or are covered by a test of their own.
ELSEWHERE = {
    "scripts/quickstart",
    "source .venv/bin/activate",
    "scripts/test",
    "scripts/test --slow",
    "scripts/test --oldest",
    "scripts/gpu_check --device cpu --tiny",
    "scripts/mutants",
}


@dataclass(frozen=True)
class Command:
    """One command of a ``console`` block, and the output that is shown below it."""

    text: str
    shown: tuple[str, ...]


def page(topic: str) -> str:
    return TEXTS[DOCS / f"{topic}.md"]


def blocks(language: str, *, run: bool = True) -> list[str]:
    """Return the blocks of a language on all pages: those to run, or those marked as not run."""
    found = (block for text in TEXTS.values() for block in FENCE.findall(text))
    return [text for mark, _, name, text in found if name == language and run == (not mark)]


def commands() -> list[Command]:
    """Return what stands behind ``$`` in all console blocks, with lines of open quotes joined."""
    found: list[Command] = []
    for block in blocks("console"):
        text, shown = "", []
        is_open = False
        for line in block.splitlines():
            if is_open or line.startswith("$ "):
                if text and not is_open:
                    found.append(Command(text, tuple(shown)))
                    text, shown = "", []
                text = f"{text}\n{line}" if is_open else line.removeprefix("$ ")
                is_open = text.count("'") % 2 == 1
            else:
                shown.append(line)
        found.append(Command(text, tuple(shown)))
    return found


def normalised(lines: Sequence[str]) -> list[str]:
    """Replace what may differ from run to run and from machine to machine; drop repeated lines."""
    kept: list[str] = []
    for line in lines:
        line = re.sub(r"\(asked for by the recipe[^)]*\)", "(asked for by the recipe)", line)
        line = re.sub(r"-?\b\d[\d.,]*(e[+-]?\d+)?|\b(inf|nan)\b", "#", line)
        line = line.replace("  best so far", "").replace("  skipped #", "")
        line = re.sub(r"\s+", " ", line).strip()
        if not kept or line != kept[-1] or line == "...":
            kept.append(line)
    return [line for line in kept if line]


def parted(lines: Sequence[str]) -> tuple[list[str], list[str]]:
    """Return the lines of skipped steps, and the others, both normalised."""
    skips = [line for line in lines if SKIPPED in line]
    return normalised(skips), normalised([line for line in lines if SKIPPED not in line])


def assert_shown(command: Command, output: str, cpu: Cpu) -> None:
    """Check that the output is what is shown; ``...`` stands for any number of lines."""
    if not cpu.float16:  # as the README tells below its first session
        output = EMULATED.sub("", output, count=1)
    # Where a gradient overflows differs from machine to machine, so these lines may stand anywhere.
    shown_skips, wanted = parted(command.shown)
    given_skips, lines = parted(output.splitlines())
    assert set(shown_skips) <= set(given_skips)
    given = "".join(f"{line}\n" for line in lines)
    pattern = "".join(r"(?:.*\n)*" if line == "..." else re.escape(line) + r"\n" for line in wanted)
    shown = "\n".join(command.shown)
    told = f"{command.text}\n-- shown:\n{shown}\n-- given:\n{output}"
    assert re.fullmatch(pattern, given), told


def write_files(folder: Path) -> list[str]:
    """Write each code block that opens with ``# NAME``; return the names. Twice is once."""
    names: list[str] = []
    for language in ("python", "yaml"):
        for block in blocks(language):
            name = re.match(r"# (\w+\.(?:py|yaml))\b", block)
            if name and name[1] in names:
                assert (folder / name[1]).read_text(encoding="utf-8") == block, name[1]
            elif name:
                (folder / name[1]).write_text(block, encoding="utf-8")
                names.append(name[1])
    return names


def script(path: Path, text: str) -> Path:
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_text(f"#!/usr/bin/env bash\n{text}\n", encoding="utf-8")
    path.chmod(path.stat().st_mode | stat.S_IXUSR)
    return path


@pytest.fixture
def environment(folder: Path) -> dict[str, str]:
    """An environment in which ``ampctl`` and ``python`` are the ones under test."""
    script(folder / "bin" / "ampctl", f'exec "{sys.executable}" -m ampctl "$@"')
    script(folder / "bin" / "python", f'exec "{sys.executable}" "$@"')
    path = f"{folder / 'bin'}{os.pathsep}{os.environ['PATH']}"
    # No GPU: the README shows a CPU. The checkout comes first, wherever ampctl is installed.
    return {
        **os.environ,
        "PATH": path,
        "PYTHONPATH": python_path(ROOT),
        "CUDA_VISIBLE_DEVICES": "",
        "OMP_NUM_THREADS": "1",
        "LC_ALL": "C.UTF-8",
    }


def shell(text: str, environment: dict[str, str]) -> str:
    """Run a command line, stderr and stdout together, as they would be seen."""
    done = subprocess.run(
        ["bash", "-c", text],
        env=environment,
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=280,
    )
    assert "Traceback" not in done.stdout, done.stdout
    return done.stdout


def kill_in_the_middle(text: str, environment: dict[str, str]) -> None:
    """Run the README's ``timeout --signal=KILL`` line, but kill at a place and not at a time."""
    words = text.split()
    assert words[:2] == ["timeout", "--signal=KILL"]
    marker = Path(words[words.index("--run-dir") + 1]) / "checkpoints" / KILLED_AFTER
    program = [sys.executable, "-m", *words[3:]]
    with subprocess.Popen(program, env=environment, stdout=subprocess.DEVNULL) as process:
        while not marker.exists() and process.poll() is None:
            time.sleep(0.02)
        process.kill()
    assert process.returncode == -signal.SIGKILL
    assert "stop" not in {
        event["event"] for event in read_metrics(marker.parents[1] / "metrics.jsonl")
    }


@pytest.mark.timeout(900)  # some thirty processes that import torch, one after the other
@on_cpus(WITHOUT_FLOAT16, pytest.param(WITH_FLOAT16, marks=pytest.mark.slow))
def test_every_command_shown_with_output_gives_that_output(
    folder: Path, environment: dict[str, str], cpu: Cpu
) -> None:
    write_files(folder)
    seen = []
    for command in commands():
        text = command.text.replace(*SHORTER)
        if command.text.startswith("timeout "):
            kill_in_the_middle(text, environment)
        else:
            assert_shown(command, shell(text, environment), cpu)
        seen.append(command.text.split()[0])
    assert seen.count("ampctl") >= 6
    assert "timeout" in seen
    assert "python" in seen
    events = read_metrics("runs/quantile/metrics.jsonl")
    below = [event["eval/below"] for event in events if event["event"] == "eval"]
    assert abs(below[-1] - 0.9) < 0.03
    events = read_metrics("runs/ring/metrics.jsonl")
    assert [event["eval/loss"] for event in events if event["event"] == "eval"][-1] < 0.1
    for recipe in ("quantile.yaml", "ring.yaml"):
        assert "ready to train" in shell(f"ampctl check {recipe}", environment)


@on_each_cpu
def test_a_check_shows_the_same_on_each_cpu(
    folder: Path, environment: dict[str, str], cpu: Cpu
) -> None:
    (command,) = (each for each in commands() if each.text == "ampctl check digits")
    assert_shown(command, shell(command.text, environment), cpu)


def test_every_other_command_is_one_that_a_test_knows(
    folder: Path, environment: dict[str, str]
) -> None:
    lines = [line for block in blocks("bash") for line in block.splitlines()]
    assert set(lines) >= ELSEWHERE
    others = [line for line in lines if line not in ELSEWHERE]
    (folder / "scripts").symlink_to(ROOT / "scripts")
    for line in others:
        few = "train digits train.max_epochs=2 amp.init_scale=1e9"
        short = line.replace("train digits", few).replace("step 253", "step 23")
        output = shell(f"set -e; {short}", environment)
        assert "error" not in output, output
    kinds = {line.split(maxsplit=2)[0] for line in others}
    assert kinds == {"ampctl", "python"}
    assert Path("runs/queued/recipe.yaml").is_file()
    drawn = Path("digits.svg").read_text(encoding="utf-8")
    # The picture is of the moment after the evaluation: with the bar, and its figures below it.
    for words in ("train&#160;digits", "step&#160;23&#160;&#160;eval", "/46", "&#160;grad&#160;"):
        assert words in drawn
    curves = Path("digits_curves.svg").read_text(encoding="utf-8")
    assert curves.count("<polyline") == 3
    assert 'stroke="#cf222e"' in curves


def test_the_commands_for_several_machines_are_good_command_lines() -> None:
    lines = [line for block in blocks("bash", run=False) for line in block.splitlines()]
    words = {line.split()[0]: shlex.split(line) for line in lines}
    assert list(words) == ["scripts/gpu_check", "sbatch", "ampctl"]
    train = typer.main.get_command(app).commands["train"]  # type: ignore[attr-defined]
    assert train.make_context("train", words["ampctl"][2:]).params["nnodes"] == "2"
    script = words["sbatch"].index("scripts/slurm.sbatch")
    of_train = words["sbatch"][script + 1 :]
    assert train.make_context("train", of_train).params["recipe"] == "my.yaml"


def test_what_is_not_run_is_marked_and_counted() -> None:
    marks = [mark for text in TEXTS.values() for mark in MARK.findall(text)]
    of_blocks = [why for text in TEXTS.values() for _, why, _, _ in FENCE.findall(text) if why]
    assert sorted(of_blocks) == sorted(marks) == sorted(NOT_RUN)


def test_no_command_stands_where_it_is_not_run() -> None:
    for path, text in TEXTS.items():
        assert text.count("```") == 2 * len(FENCE.findall(text)), path
        languages = {language for _, _, language, _ in FENCE.findall(text)}
        assert languages <= {"console", "bash", "python", "yaml", "text"}, path
    for block in blocks("text"):
        assert not re.search(r"^(\$|ampctl|python|scripts/)", block, re.MULTILINE), block


def test_the_readme_is_short_links_to_every_page_and_prose_is_narrow() -> None:
    readme = TEXTS[PAGES[0]]
    assert len(readme.splitlines()) <= 200
    for path in DOCS.glob("*.md"):
        assert f"(ampctl/docs/{path.name})" in readme, path.name
    for path, text in TEXTS.items():
        for line in FENCE.sub("", text).splitlines():
            assert len(line) <= 110 or line.startswith(("|", "![")), f"{path.name}: {line}"


def test_the_own_example_is_a_dozen_lines_and_is_there(folder: Path) -> None:
    names = {"quantile.py", "ring.py", "counting.py", "mistakes.yaml", "quantile.yaml", "ring.yaml"}
    assert set(write_files(folder)) == names
    assert "# quantile.yaml: " in TEXTS[PAGES[0]]
    recipe = (folder / "quantile.yaml").read_text(encoding="utf-8")
    assert len(recipe.splitlines()) <= 12
    source = (folder / "quantile.py").read_text(encoding="utf-8")
    task = source[source.index("class Quantile") :].splitlines()
    assert len([line for line in task if line.strip()]) <= 13


def test_the_keys_and_defaults_shown_are_those_of_the_schema(folder: Path) -> None:
    whole = next(block for block in blocks("yaml") if block.startswith("name: "))
    (folder / "whole.yaml").write_text(whole, encoding="utf-8")
    load_recipe("whole.yaml")
    shown, defaults = yaml.safe_load(whole), default_values()
    limits = page("limits")
    for key in schema_keys():
        section, _, name = key.partition(".")
        if "." in name:  # of early_stop, which is shown on one line in a comment
            assert name.rpartition(".")[2] in whole
        elif not name:
            assert key in shown or key in limits, key
        elif name not in shown[section]:
            assert f"`{key}" in limits, f"{key} is neither shown nor listed as a limit"
    for section in ("amp", "train", "checkpoint", "distributed", "log"):
        for name, value in shown[section].items():
            if (section, name) != ("train", "max_epochs"):
                assert value == defaults[section][name], f"{section}.{name}"


def test_every_key_that_a_page_names_is_one_of_the_schema() -> None:
    sections = "amp|train|checkpoint|distributed|data|log"
    named = re.findall(rf"`((?:{sections})\.\w+)(?=[`:=])", "\n".join(TEXTS.values()))
    assert len(named) > 40
    assert set(named) <= set(schema_keys()), set(named) - set(schema_keys())


def test_the_exit_codes_are_those_of_the_errors() -> None:
    table = page("resuming").partition("| code | meaning |")[2].split("\n\n")[0]
    listed = {int(code) for code in re.findall(r"^\| (\d+) \|", table, re.MULTILINE)}
    kinds = [kind for kind in vars(errors).values() if isinstance(kind, type)]
    raised = {kind.exit_code for kind in kinds if issubclass(kind, errors.AmpctlError)}
    assert listed == raised | {0}


def test_every_guarantee_names_a_test_that_is_there() -> None:
    guarantees = re.split(r"^\* ", page("guarantees"), flags=re.MULTILINE)[1:]
    sources = "".join(path.read_text(encoding="utf-8") for path in ROOT.glob("tests/test_*.py"))
    assert len(guarantees) > 15
    for guarantee in guarantees:
        name = re.search(r":\n  `(test_\w+)`$", guarantee)
        assert name, guarantee
        assert f"def {name[1]}(" in sources, name[1]


def test_the_findings_listed_are_those_there_are() -> None:
    table = page("diagnosis").partition("| finding |")[2].split("\n\n")[0]
    listed = dict(re.findall(r"^\| `([\w-]+)` \| (.*) \|$", table, re.MULTILINE))
    assert listed == dict(MEANINGS)


def test_what_is_named_exists() -> None:
    for page_path, text in TEXTS.items():
        for name, target in re.findall(r"!?\[([^\]]*)\]\(([^)#]+)\)", FENCE.sub("", text)):
            assert name
            assert "://" not in target, "the manual points into the repository alone"
            assert (page_path.parent / target).is_file(), f"{page_path.name}: {target}"
    whole = "\n".join(TEXTS.values())
    for path in re.findall(r"`((?:scripts|recipes|ampctl|\.ci)/[\w./]+)`", whole):
        assert (ROOT / path).is_file(), path
    program = [sys.executable, "-m", "ampctl", "--help"]
    told = subprocess.run(program, capture_output=True, text=True, check=True).stdout
    there = set(re.findall(r"^. (\w+) ", told, re.MULTILINE))
    assert {"train", "resume", "check"} <= there
    missing = re.search(r"There is no (.*?) yet\.", whole, re.DOTALL)
    assert missing
    assert not there & set(re.findall(r"(\w+)`", missing[1])), "a limit is lifted: tell so"
    for command in re.findall(r"`ampctl (\w+)[^`]*`", whole.replace(missing[0], "")):
        assert command in there, command


@pytest.mark.parametrize("name", ["digits.svg", "digits_curves.svg"])
def test_the_pictures_are_small_and_load_nothing(name: str) -> None:
    from xml.etree import ElementTree

    file = ROOT / "recipes" / name
    assert f"(recipes/{name})" in TEXTS[PAGES[0]]
    assert file.stat().st_size < 60_000
    text = file.read_text(encoding="utf-8")
    ElementTree.fromstring(text)
    assert not re.search(r"https?://", text.replace("http://www.w3.org/2000/svg", ""))


# The scripts, with stand-ins for what installs and for the tools.


@pytest.fixture
def checkout(folder: Path) -> Path:
    """A copy of what the scripts need, and a Python that installs stand-ins and tells of it."""
    copy = folder / "checkout"
    copy.mkdir()
    for name in ("scripts", ".ci"):
        shutil.copytree(ROOT / name, copy / name)
    shutil.copy(ROOT / "pyproject.toml", copy)
    path = python_path(ROOT)
    ampctl = f'PYTHONPATH="{path}" CUDA_VISIBLE_DEVICES= exec "{sys.executable}" -m ampctl "$@"'
    script(folder / "stand-ins" / "ampctl", ampctl)
    for tool in ("ruff", "mypy", "pytest"):
        script(
            folder / "stand-ins" / tool,
            f'echo "{tool} ran: $*"; [[ "$FAILING" != "{tool}" ]]',
        )
    installing = f"""
    echo "$*" >> "{folder}/calls"
    case "$*" in
        "-c "*) exit 0 ;;
        "-m venv "*) mkdir -p "$3/bin"; cp "$0" "$3/bin/python" ;;
        scripts/*) exec "{sys.executable}" "$@" ;;
        *"pip install"*)
            [[ -z "${{NO_NETWORK:-}}" ]] || exit 1
            echo "${{PIP_CONSTRAINT:-}}" >> "{folder}/constraints"
            cp "{folder}/stand-ins/"* "$(dirname "$0")" ;;
    esac
    """
    script(folder / "python", installing)
    return copy


def run_script(checkout: Path, *words: str, **variables: str) -> subprocess.CompletedProcess[str]:
    environment = {"FAILING": "", "PYTHON": f"{checkout.parent / 'python'}", **variables}
    return subprocess.run(
        ["bash", *words],
        cwd=checkout.parent,
        env={**os.environ, **environment},
        stdout=subprocess.PIPE,
        stderr=subprocess.STDOUT,
        text=True,
        timeout=120,
    )


def installs(checkout: Path) -> list[str]:
    calls = (checkout.parent / "calls").read_text(encoding="utf-8").splitlines()
    return [call.split()[-1] for call in calls if "pip install" in call]


def test_quickstart_installs_once_trains_each_time_and_says_how_to_go_on(checkout: Path) -> None:
    for count in (1, 2):
        # Called from another folder, as a person may.
        done = run_script(checkout, "checkout/scripts/quickstart", "train.max_steps=2")
        assert done.returncode == 0, done.stdout
        assert installs(checkout) == ["."]
        runs = sorted((checkout / "runs" / "digits").iterdir())
        assert len(runs) == count
        lies = re.search(r"the run lies in: +(\S+)", done.stdout)
        assert lies
        assert Path(lies[1]) in runs
    resume = re.search(r"to go on with it: +(.*)", done.stdout)
    assert resume
    again = shell(resume[1], dict(os.environ))
    assert "already complete (2 of 2 steps)" in again
    pyproject = checkout / "pyproject.toml"
    pyproject.write_text(pyproject.read_text(encoding="utf-8") + "\n# changed\n", encoding="utf-8")
    run_script(checkout, "checkout/scripts/quickstart", "train.max_epochs=0")
    assert installs(checkout) == [".", "."]


def test_quickstart_ends_with_the_code_of_the_run(checkout: Path) -> None:
    done = run_script(checkout, "checkout/scripts/quickstart", "train.max_epochs=0")
    assert done.returncode == 2
    assert "train.max_epochs" in done.stdout
    assert "lies in" not in done.stdout


def test_an_install_that_failed_is_tried_again(checkout: Path) -> None:
    done = run_script(checkout, "checkout/scripts/quickstart", NO_NETWORK="1")
    assert done.returncode != 0
    assert "lies in" not in done.stdout
    done = run_script(checkout, "checkout/scripts/quickstart", "train.max_epochs=0")
    assert installs(checkout) == [".", "."]
    assert done.returncode == 2


def test_a_python_that_is_too_old_is_told_in_words(checkout: Path) -> None:
    pretend = "import sys; sys.version_info = (3, 10, 9); ${2#import sys;}"
    ages = f'exec "{sys.executable}" -c "{pretend}"'
    old = script(
        checkout.parent / "old",
        f'if [[ "$1" == --version ]]; then echo "Python 3.10.9"; else {ages}; fi',
    )
    done = run_script(checkout, "checkout/scripts/quickstart", PYTHON=str(old))
    assert done.returncode == 1
    assert "ampctl needs Python 3.11 or newer; found: Python 3.10.9" in done.stdout
    assert not (checkout / ".venv").exists()


LEFT_OUT = " ".join(
    f"--deselect tests/test_{search}"
    for search in (
        "kill_at_random.py::test_ck2_200_kills_at_random_moments_lose_nothing",
        "kill_at_random.py::test_ck2_50_kills_of_ranks_that_write_together_lose_nothing",
        "disk_faults.py::test_a_disk_of_every_small_size_ends_a_run_in_words",
        "wrong_content.py::test_all_that_can_be_wrong_is_told_or_changes_nothing",
        "fuzz_recipes.py::test_thousands_of_recipes_and_overrides_end_in_words",
    )
)


@pytest.mark.parametrize(
    ("call", "tests"),
    [
        ("scripts/test", "pytest ran: -n 2 --dist loadfile -m not slow"),
        (".ci/run", f"pytest ran: -n 2 --dist loadfile {LEFT_OUT}"),
    ],
)
def test_the_test_script_runs_all_four_tools_and_pytest_last(
    checkout: Path, call: str, tests: str
) -> None:
    done = run_script(checkout, f"checkout/{call}")
    assert done.returncode == 0, done.stdout
    ran = [line for line in done.stdout.splitlines() if " ran: " in line]
    assert ran == [
        "ruff ran: check .",
        "ruff ran: format --check .",
        "mypy ran: ",
        tests,
    ]
    assert done.stdout.splitlines()[-1] == ran[-1]
    assert installs(checkout) == [".[dev]"]
    run_script(checkout, f"checkout/{call}")
    assert installs(checkout) == [".[dev]"]


@pytest.mark.parametrize("failing", ["ruff", "mypy", "pytest"])
def test_the_test_script_fails_with_any_of_its_tools_and_runs_the_others(
    checkout: Path, failing: str
) -> None:
    done = run_script(checkout, "checkout/scripts/test", FAILING=failing)
    assert done.returncode == 1
    assert done.stdout.count(" ran: ") == 4


def test_the_test_script_takes_slow_and_arguments_for_pytest(checkout: Path) -> None:
    done = run_script(checkout, "checkout/scripts/test", "--slow", "tests/test_x.py", "-k", "a b")
    assert done.stdout.splitlines()[-1] == (
        "pytest ran: -n 2 --dist loadfile tests/test_x.py -k a b"
    )


def test_d21_the_oldest_versions_have_an_environment_of_their_own(checkout: Path) -> None:
    run_script(checkout, "checkout/scripts/test")
    for _ in range(2):
        done = run_script(checkout, "checkout/scripts/test", "--oldest", "--slow", "-x")
        assert done.returncode == 0, done.stdout
        ran = [line for line in done.stdout.splitlines() if " ran: " in line]
        assert ran == ["pytest ran: -n 2 --dist loadfile -x"]
    assert installs(checkout) == [".[dev]", ".[dev]"]
    constraints = (checkout.parent / "constraints").read_text(encoding="utf-8").splitlines()
    assert constraints == ["", ".venv-oldest/lower-bounds.txt"]
    given = (checkout / constraints[1]).read_text(encoding="utf-8").splitlines()
    pyproject = (checkout / "pyproject.toml").read_text(encoding="utf-8")
    bounds = re.findall(r"^.*\"([\w-]+)>=([\d.]+)\"", pyproject, re.MULTILINE)
    wanted = [f"{name}=={version}" for name, version in bounds]
    assert len(wanted) > 12
    assert sorted(given) == sorted(wanted)
    assert ".venv-oldest/" in (ROOT / ".gitignore").read_text(encoding="utf-8").splitlines()


def test_the_development_install_serves_quickstart_too(checkout: Path) -> None:
    run_script(checkout, "checkout/scripts/test")
    run_script(checkout, "checkout/scripts/quickstart", "train.max_epochs=0")
    assert installs(checkout) == [".[dev]"]
    shutil.rmtree(checkout / ".venv")
    run_script(checkout, "checkout/scripts/quickstart", "train.max_epochs=0")
    run_script(checkout, "checkout/scripts/test")
    assert installs(checkout) == [".[dev]", ".", ".[dev]"]


def test_a_checkout_that_was_moved_is_installed_again(checkout: Path) -> None:
    run_script(checkout, "checkout/scripts/test")
    checkout.rename(checkout.parent / "moved")
    run_script(checkout, "moved/scripts/test")
    assert installs(checkout) == [".[dev]", ".[dev]"]


def test_the_scripts_can_be_executed_and_the_hooks_download_nothing() -> None:
    for name in ("scripts/quickstart", "scripts/test", ".ci/run"):
        assert os.access(ROOT / name, os.X_OK), name
    hooks = yaml.safe_load((ROOT / ".pre-commit-config.yaml").read_text(encoding="utf-8"))
    assert [repo["repo"] for repo in hooks["repos"]] == ["local"]
