"""Words on the screen: what a command prints, and errors with their exit codes."""

from __future__ import annotations

import json
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from typing import TYPE_CHECKING, Any, NamedTuple, cast

import typer

from ampctl.distributed import failure, launched
from ampctl.errors import AmpctlError, InterruptedRunError, MachineError, in_full
from ampctl.recipe.fault import memory_told
from ampctl.recipe.own_code import as_exception, as_text
from ampctl.track.console import silence

if TYPE_CHECKING:
    from ampctl.data.loader import EvalData


@contextmanager
def told() -> Iterator[None]:
    """Print an error of ours in words on stderr, and end with its exit code.

    A rank leaves its error, of whatever kind, to its launcher, which tells the first of all ranks.
    """
    try:
        with _no_sys_exit(), memory_told():
            yield
    except AmpctlError as error:
        if failure.record(error):
            warn(f"error: {in_full(error)}")
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        if failure.record(InterruptedRunError("interrupted")):
            warn("interrupted")
        raise typer.Exit(InterruptedRunError.exit_code) from None
    except Exception as error:
        if not launched.is_rank():
            raise
        if failure.record(error):
            warn(as_text(error))
        raise typer.Exit(AmpctlError.exit_code) from error


@contextmanager
def with_own_lines() -> Iterator[None]:
    """Show the traceback of a fault from the user's own code on, and end with code 1."""
    try:
        yield
    except Exception as error:
        warn(as_text(error))
        raise SystemExit(AmpctlError.exit_code) from error


@contextmanager
def _no_sys_exit() -> Iterator[None]:
    """Raise if the user's own code ends a run, which would look as if it were done."""
    try:
        yield
    except SystemExit as error:
        raise as_exception(error) from None


def show(facts: Any, lines: list[str], as_json: bool) -> None:
    """Print lines, or the facts behind them as JSON."""
    echo(json.dumps(facts, indent=2, default=str) if as_json else "\n".join(lines))


def aligned(facts: Mapping[str, str]) -> list[str]:
    """Return ``name:  value`` lines with the values below each other."""
    width = max(map(len, facts), default=0) + 1
    return [f"{name + ':':<{width}} {value}" for name, value in facts.items()]


def table(headers: Sequence[str], rows: Sequence[Sequence[str]]) -> None:
    """Print a table: drawn on a terminal, elsewhere columns that stay as they are."""
    if sys.stdout.isatty():
        from rich import box
        from rich.console import Console
        from rich.table import Table
        from rich.text import Text

        drawn = Table(*headers, box=box.SIMPLE_HEAD)
        for row in rows:
            drawn.add_row(*(Text(cell) for cell in row))  # names are no markup
        Console().print(drawn)
        return
    widths = [max(map(len, column)) for column in zip(headers, *rows, strict=True)]
    for row in (headers, *rows):
        cells = (f"{cell:<{width}}" for cell, width in zip(row, widths, strict=True))
        echo("  ".join(cells).rstrip())


def progress(batches: EvalData) -> Iterable[Any]:
    """Go through the batches of an evaluation; see :func:`bar_over`."""
    return bar_over(batches, "evaluating")


def bar_over(items: Any, doing: str) -> Iterable[Any]:
    """Go through what has a length with a bar on stderr, if that is a terminal."""
    if not sys.stderr.isatty():
        return cast(Iterable[Any], items)
    from rich.console import Console
    from rich.progress import track

    bar = Console(stderr=True)
    return track(items, doing, total=len(items), console=bar, transient=True)


class Reading(NamedTuple):
    """Shows how many bytes are read, of how many (``passed``), and tells a warning above that."""

    passed: Callable[[int, int], None]
    warning: Callable[[str], None]


@contextmanager
def reading(doing: str) -> Iterator[Reading]:
    """Show with a bar on stderr, if that is a terminal, how far it is within large files."""
    if not sys.stderr.isatty():
        yield Reading(lambda done, total: None, warning)
        return
    from rich.console import Console
    from rich.progress import BarColumn, DownloadColumn, Progress, TextColumn
    from rich.text import Text

    columns = (TextColumn(doing), BarColumn(), DownloadColumn())
    with Progress(*columns, console=Console(stderr=True), transient=True) as bar:
        task = bar.add_task(doing, total=None)
        yield Reading(
            lambda done, total: bar.update(task, completed=done, total=total),
            lambda text: bar.console.print(Text(f"warning: {text}"), soft_wrap=True),
        )


def echo(text: str) -> None:
    """Print to stdout. Raises MachineError if that cannot be written, a file on a full disk say."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        # The reader of a pipe has what it wanted (`ampctl show digits | head`).
        silence(sys.stdout)
    except OSError as error:
        silence(sys.stdout)
        raise MachineError(f"cannot write the output: {error.strerror}") from error


def warn(text: str) -> None:
    """Print to stderr, if that can be written."""
    with suppress(OSError):
        typer.echo(text, err=True)


def warning(text: str) -> None:
    """Print a warning on stderr, as a run does."""
    warn(f"warning: {text}")
