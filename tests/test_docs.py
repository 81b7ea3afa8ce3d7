"""``ampctl docs``: the pages of the manual are listed, shown and searched in the terminal."""

from __future__ import annotations

import subprocess
import sys
from pathlib import Path

import pytest
from typer.testing import CliRunner, Result

from ampctl.cli import app, manual

DOCS = Path(manual.__file__).parents[1] / "docs"
PAGES = {path.stem: path.read_text(encoding="utf-8") for path in sorted(DOCS.glob("*.md"))}


def docs(*words: str, code: int = 0) -> Result:
    result = CliRunner().invoke(app, ["docs", *words])
    assert result.exit_code == code, (result.output, result.exc_info)
    return result


def test_without_a_topic_every_topic_is_listed_with_a_line() -> None:
    _, *lines = docs().stdout.splitlines()
    listed = dict(line.split(maxsplit=1) for line in lines)
    assert list(listed) == list(PAGES)
    assert listed["trust"].startswith("What is built from a checkpoint")
    for topic, answer in listed.items():
        assert answer.endswith("."), topic


@pytest.mark.parametrize("topic", PAGES)
def test_each_page_has_a_title_says_what_it_answers_and_is_shown_as_it_is(topic: str) -> None:
    title, empty, answer = PAGES[topic].splitlines()[:3]
    assert title.startswith("# ")
    assert not empty
    assert answer.endswith((".", ".*"))
    assert docs(topic).stdout == PAGES[topic]


@pytest.mark.parametrize(
    ("wrong", "near"),
    [("resume", "resuming"), ("SLURM", "slurm"), ("two_machines", "two-machines")],
)
def test_an_unknown_topic_is_told_with_the_nearest(wrong: str, near: str) -> None:
    told = docs(wrong, code=2).stderr
    assert f"the manual has no page {wrong!r}\n    did you mean {near}?" in told


@pytest.mark.parametrize("wrong", ["xyzzy", "../docs/trust", "trust.md/", "\udcff"])
def test_a_topic_that_is_near_to_none_lists_them_or_names_one(wrong: str) -> None:
    told = docs(wrong, code=2).stderr
    assert "resuming, " in told or "did you mean trust?" in told


def test_a_search_gives_topic_line_number_and_line_in_either_case() -> None:
    found = docs("--search", "sigusr1").stdout.splitlines()
    assert found
    for line in found:
        topic, number, text = line.split(":", 2)
        assert PAGES[topic].splitlines()[int(number) - 1] == text.removeprefix(" ")
        assert "SIGUSR1" in text
    assert found == docs("--search", "SIGUSR1").stdout.splitlines()
    here = docs("resuming", "--search", "SIGUSR1").stdout.splitlines()
    assert here == [line for line in found if line.startswith("resuming:")]


@pytest.mark.parametrize("word", ["xyzzy", "[", "a.*b", "\udcff"])
def test_a_search_is_for_text_and_says_if_nothing_is_found(word: str) -> None:
    said = docs("--search", word).stdout
    assert said == f"no page says {word!r}\n" or all(word in line for line in said.splitlines())
    assert said


def test_an_empty_word_is_refused() -> None:
    assert "--search is empty" in docs("--search", "", code=2).stderr


def test_a_terminal_gets_the_page_drawn(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    manual.docs("slurm")
    drawn = capsys.readouterr().out
    assert "SLURM" in drawn
    assert "# SLURM" not in drawn
    assert "```" not in drawn
    assert "sbatch" in drawn


def test_no_page_needs_torch() -> None:
    program = (
        "import sys\nfrom ampctl.cli import app\n"
        "app(['docs', 'trust'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


@pytest.mark.parametrize(
    ("command", "topic"),
    [("resume", "resuming"), ("check", "diagnosis"), ("export", "checkpoints")],
)
def test_the_help_of_a_command_names_its_page(command: str, topic: str) -> None:
    shown = CliRunner().invoke(app, [command, "--help"]).stdout
    assert f"ampctl docs {topic}" in shown
    assert topic in PAGES
