"""The errors that a user can meet, each with the exit code of the command that it ends."""

from __future__ import annotations

import shlex
from collections.abc import Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any


def first_of(names: Sequence[str], limit: int = 5) -> str:
    """List names for a message: the first few, and how many more there are."""
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def as_argument(path: Path | str) -> str:
    """Return a path as it is written in a command, so that a shell, and ampctl, take it for one."""
    name = f"{path}"
    return shlex.quote(f"./{name}" if name.startswith("-") else name)


def printable(text: str) -> str:
    """Return text out of a file without line breaks and what else would steer a terminal."""
    return "".join(c if c.isprintable() else "\N{REPLACEMENT CHARACTER}" for c in text)


class AmpctlError(Exception):
    """Base of every error that is told in words rather than as a traceback.

    The message says what was found, where, what is allowed and what to do.
    """

    exit_code = 1


def in_full(error: AmpctlError) -> str:
    """Return an error's message, and what was added to it on its way."""
    return "\n    ".join([f"{error}", *getattr(error, "__notes__", ())])


class UsageError(AmpctlError):
    """The command line, or a folder it names, cannot be used as asked."""

    exit_code = 2


@dataclass(frozen=True)
class Problem:
    """One mistake in a recipe: where it stands, what is wrong and what to do.

    ``where`` is ``file:line`` (or ``command line``), ``key`` the dotted key, ``message`` what was
    found and what is allowed, ``advice`` what to do, or "".
    """

    where: str
    key: str
    message: str
    advice: str = ""

    def __str__(self) -> str:
        place = f"{self.where}: " if self.where else ""
        key = f"{self.key}: " if self.key else ""
        advice = f"\n    {self.advice}" if self.advice else ""
        return f"{place}{key}{self.message}{advice}"


class RecipeError(UsageError):
    """A recipe cannot be used; holds all of its problems, not only the first."""

    def __init__(self, problems: Sequence[Problem]) -> None:
        self.problems = tuple(problems)
        count = len(self.problems)
        head = "" if count == 1 else f"{count} problems in the recipe\n"
        super().__init__(head + "\n".join(f"{problem}" for problem in self.problems))

    def __reduce__(self) -> tuple[Any, ...]:
        """Return what pickle makes the same error of, in another process say."""
        return type(self), (self.problems,), self.__dict__


class NumericsError(AmpctlError):
    """Training stopped itself: non-finite for too long, or asked to stop at the first."""

    exit_code = 3


class CheckpointError(AmpctlError):
    """A checkpoint is missing, damaged, non-finite, not trusted, or does not fit the recipe."""

    exit_code = 4


class MachineError(AmpctlError):
    """The machine or the launch is at fault: no such device, no room on the disk."""

    exit_code = 5


class PreemptedError(AmpctlError):
    """SIGTERM, SIGUSR1 or SIGHUP ended the run; its state is saved."""

    exit_code = 75


class InterruptedRunError(AmpctlError):
    """Ctrl-C ended the run; its state is saved."""

    exit_code = 130
