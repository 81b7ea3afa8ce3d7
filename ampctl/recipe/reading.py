"""The text of a recipe: out of a file, a pipe (``<(...)`` of a shell), or standard input."""

from __future__ import annotations

import os
import select
import stat
import time
from pathlib import Path

from ampctl import files
from ampctl.recipe.yaml_source import MAX_BYTES, refusal, too_big

STDIN = "-"
STANDARD_INPUT = "standard input"
"""What messages call it."""

FOR_A_WRITER_S = 5.0
FOR_A_WORD_S = 60.0
"""How long a pipe that nobody writes to is waited for, and one whose writer is silent."""

_PART = 65536


def read_file(path: Path, shown: str) -> str:
    """Read a regular file as UTF-8 text; ``shown`` is its name in messages."""
    return _decoded(_bytes_of(path, shown), shown)


def read_once(source: str, path: Path) -> str | None:
    """Return the text of what cannot be read again: standard input or a pipe; None for others.

    A pipe is read while somebody writes to it. One without a writer, or with a silent one, is not
    waited for longer than a program takes to start: that would be forever.
    """
    if source == STDIN:
        text = _decoded(_bytes_of_stdin(), STANDARD_INPUT)
        if not text.strip():
            advice = "send it the recipe: `ampctl ... - < recipe.yaml`, or name the file"
            raise refusal(STANDARD_INPUT, "is empty, or closed", advice)
        return text
    return _decoded(_bytes_of_pipe(path, source), source) if path.is_fifo() else None


def _bytes_of(path: Path, shown: str) -> bytes:
    try:
        with files.open_to_read(path, follow=True) as file:
            return file.read(MAX_BYTES + 1)
    except IsADirectoryError:
        raise refusal(shown, "is a folder, not a recipe file", "name the file") from None
    except PermissionError:
        raise refusal(shown, "may not be read", "give yourself read permission") from None
    except files.UnfitFileError as error:
        advice = f"name a file, or `{STDIN}` for standard input"
        raise refusal(shown, f"cannot be read: {error.strerror}", advice) from None
    except (OSError, ValueError) as error:  # ValueError: a NUL in the name
        reason = getattr(error, "strerror", None) or f"{error}"
        raise refusal(shown, f"cannot be read: {reason}") from None


def _bytes_of_stdin() -> bytes:
    """Read standard input, from where it stands; a file that is sent there stays as it is.

    So the ranks of a job, who have it together, can each read all of it.
    """
    data = b""
    try:
        at = os.lseek(0, 0, os.SEEK_CUR) if stat.S_ISREG(os.fstat(0).st_mode) else None
        while len(data) <= MAX_BYTES:
            select.select([0], [], [])  # it may be one that does not block
            part = os.read(0, _PART) if at is None else os.pread(0, _PART, at + len(data))
            if not part:
                break
            data += part
    except OSError as error:
        raise refusal(STANDARD_INPUT, f"cannot be read: {error.strerror}") from None
    return data


def _bytes_of_pipe(path: Path, shown: str) -> bytes:
    try:
        pipe = os.open(path, os.O_RDONLY | os.O_NONBLOCK | os.O_CLOEXEC)
    except OSError as error:
        raise refusal(shown, f"cannot be read: {error.strerror}") from None
    data, has_writer, since = b"", False, time.monotonic()
    try:
        while len(data) <= MAX_BYTES:
            try:
                part = os.read(pipe, _PART)
            except BlockingIOError:
                has_writer = True
            else:
                if not part and (data or has_writer):
                    break  # the writer is done
                if part:
                    data, since = data + part, time.monotonic()
                    continue
            limit = FOR_A_WORD_S if has_writer else FOR_A_WRITER_S
            if time.monotonic() - since > limit:
                message = f"is a pipe, and nothing came out of it in {limit:g} s"
                raise refusal(shown, message, "name a file, or start what writes the recipe")
            time.sleep(0.01)
    finally:
        os.close(pipe)
    return data


def _decoded(data: bytes, shown: str) -> str:
    if data.startswith((b"\xff\xfe", b"\xfe\xff")):
        raise refusal(shown, "is UTF-16 text, not UTF-8", "save it as UTF-8")
    try:
        return data.decode("utf-8-sig")
    except UnicodeDecodeError as error:
        if len(data) > MAX_BYTES:
            raise too_big(shown) from None
        line = data.count(b"\n", 0, error.start) + 1
        message = f"is not UTF-8 text (byte 0x{data[error.start]:02x})"
        raise refusal(f"{shown}:{line}", message, "save it as UTF-8") from None
