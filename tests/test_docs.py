"""``ampctl docs``: the pages of the manual are listed, shown and searched in the terminal."""

from __future__ import annotations

import re
import subprocess
import sys
from pathlib import Path

import pytest
import typer.main
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


@pytest.mark.parametrize("topic", PAGES)
def test_a_terminal_of_80_columns_gets_the_whole_page_drawn(
    topic: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("COLUMNS", "80")
    monkeypatch.setattr(sys.stdout, "isatty", lambda: True)
    manual.docs(topic)
    drawn = capsys.readouterr().out
    title = PAGES[topic].splitlines()[0]
    assert title not in drawn
    assert title.removeprefix("# ") in drawn
    assert "```" not in drawn
    assert "\N{HORIZONTAL ELLIPSIS}" not in drawn, "a table is too wide"


def test_no_page_needs_torch() -> None:
    program = (
        "import sys\nfrom ampctl.cli import app\n"
        "app(['docs', 'trust'], standalone_mode=False)\n"
        "assert 'torch' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", program], capture_output=True, text=True)
    assert done.returncode == 0, done.stderr


def test_the_help_of_each_command_names_a_page_that_is_there() -> None:
    commands = typer.main.get_command(app).commands  # type: ignore[attr-defined]
    for name, command in commands.items():
        if name != "docs":
            _, _, topic = command.epilog.rpartition("ampctl docs ")
            assert topic in PAGES, name
    shown = CliRunner().invoke(app, ["resume", "--help"]).stdout
    assert "ampctl docs resuming" in shown


def test_each_page_that_a_message_names_is_there() -> None:
    sources = "".join(path.read_text(encoding="utf-8") for path in DOCS.parent.rglob("*.py"))
    named = re.findall(r"`ampctl docs ([\w-]+)`", sources)
    assert len(named) >= 3
    assert set(named) <= set(PAGES)
