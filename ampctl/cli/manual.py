"""The command ``docs``: the pages of the manual, which travel with the package as Markdown."""

from __future__ import annotations

import sys
from pathlib import Path
from typing import Annotated

import typer

from ampctl.cli import screen
from ampctl.errors import UsageError
from ampctl.recipe.suggest import nearest

_PAGES = Path(__file__).parents[1] / "docs"


def docs(
    topic: Annotated[
        str | None, typer.Argument(metavar="TOPIC", help="A page; without one they are listed.")
    ] = None,
    search: Annotated[
        str | None,
        typer.Option(metavar="WORD", help="List the lines with this text, of all pages or of one."),
    ] = None,
) -> None:
    """Show a page of the manual, list its topics, or search it."""
    with screen.told():
        pages = {path.stem: path.read_text(encoding="utf-8") for path in _PAGES.glob("*.md")}
        if topic is not None:
            pages = {topic: _page(pages, topic)}
        if search is not None:
            screen.echo("\n".join(_found(pages, search)) or f"no page says {search!r}")
        elif topic is not None:
            _render(pages[topic])
        else:
            rows = [[name, _answers(text)] for name, text in sorted(pages.items())]
            screen.table(("topic", "what it answers"), rows)


def _page(pages: dict[str, str], topic: str) -> str:
    """Return the text of a page. Raises UsageError if there is none of that name."""
    if topic not in pages:
        close = nearest(topic, pages)
        advice = f"did you mean {close}?" if close else f"there are: {', '.join(sorted(pages))}"
        raise UsageError(f"the manual has no page {topic!r}\n    {advice}")
    return pages[topic]


def _found(pages: dict[str, str], word: str) -> list[str]:
    """Return the lines that hold a text in upper or lower case, each with its page and number."""
    return [
        f"{name}:{number}: {line}"
        for name, text in sorted(pages.items())
        for number, line in enumerate(text.splitlines(), 1)
        if word.casefold() in line.casefold()
    ]


def _answers(text: str) -> str:
    """Return the first sentence of a page; what stands there in italics is about the page."""
    _, *paragraphs = text.split("\n\n")
    first = next(each for each in paragraphs if not each.startswith("*"))
    return " ".join(first.split()).partition(". ")[0].rstrip(".") + "."


def _render(text: str) -> None:
    """Print a page: drawn on a terminal, elsewhere as it is written."""
    if sys.stdout.isatty():
        from rich.console import Console
        from rich.markdown import Markdown

        Console().print(Markdown(text))
    else:
        screen.echo(text.rstrip())
