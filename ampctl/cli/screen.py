"""Words on the screen: what a command prints, and errors with their exit codes."""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import typer

from ampctl.distributed import failure, member
from ampctl.errors import AmpctlError, InterruptedRunError


@contextmanager
def told() -> Iterator[None]:
    """Tell an error of ours in words on stderr, and end with its exit code.

    A rank leaves its error, of whatever kind, to its launcher, which tells the first of all ranks.
    """
    try:
        with _no_sys_exit():
            yield
    except AmpctlError as error:
        if failure.record(error):
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        if failure.record(InterruptedRunError("interrupted")):
            typer.echo("interrupted", err=True)
        raise typer.Exit(InterruptedRunError.exit_code) from None
    except Exception as error:
        if not member.is_rank():
            raise
        if failure.record(error):
            typer.echo(failure.as_traceback(error), err=True)
        raise typer.Exit(AmpctlError.exit_code) from error


@contextmanager
def _no_sys_exit() -> Iterator[None]:
    """Let a run that the user's own code ends not look like one that is done."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called in the midst of it") from error


def show(facts: Any, lines: list[str], as_json: bool) -> None:
    """Print lines, or the facts behind them as JSON."""
    echo(json.dumps(facts, indent=2, default=str) if as_json else "\n".join(lines))


def echo(text: str) -> None:
    """Print to stdout."""
    try:
        typer.echo(text)
    except BrokenPipeError:
        # The reader of a pipe has what it wanted (`ampctl show digits | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def warn(text: str) -> None:
    """Print to stderr."""
    typer.echo(text, err=True)
