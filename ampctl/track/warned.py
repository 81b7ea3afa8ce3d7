"""Warnings of libraries and of the user's own code, on the screen: each once, whoever gives it."""

from __future__ import annotations

import contextlib
import logging
from collections.abc import Callable, Iterator
from pathlib import Path


@contextlib.contextmanager
def warnings_told(tell: Callable[[str], None]) -> Iterator[None]:
    """Print warnings of ``warnings`` and ``logging`` while the context is open."""
    handler = _Warned(tell)
    root = logging.getLogger()
    root.addHandler(handler)
    logging.captureWarnings(True)
    try:
        yield
    finally:
        logging.captureWarnings(False)
        root.removeHandler(handler)


class _Warned(logging.Handler):
    """Print each text once. Errors that ampctl logs are told otherwise."""

    def __init__(self, tell: Callable[[str], None]) -> None:
        super().__init__(logging.WARNING)
        self._tell = tell
        self._told: set[str] = set()

    def emit(self, record: logging.LogRecord) -> None:
        if record.name == "ampctl" and record.levelno > logging.WARNING:
            return
        text = record.getMessage().rstrip()
        if record.name == "py.warnings":  # with its place, and with the line of code below
            *lines, last = text.split("\n")
            text = "\n".join(lines if lines and last.startswith("  ") else [*lines, last])
            text = text.removeprefix(f"{Path.cwd()}/")
        elif record.name != "ampctl":
            text = f"{record.name}: {text}"
        if text not in self._told:
            self._told.add(text)
            self._tell(text)
