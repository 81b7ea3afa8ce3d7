"""The file `metrics.jsonl` of a run: one strict JSON object a line, written and read back.

What the events mean and when they are written is the training loop's; this module owns the format.
"""

from __future__ import annotations

import errno
import json
import math
import os
import time
from collections.abc import Mapping
from numbers import Integral, Real
from pathlib import Path, PurePath
from typing import Any

from ampctl import commands, files
from ampctl.errors import MachineError, UsageError

_LONGEST = 1 << 22
"""How many bytes a line may have: an event with thousands of metrics has fewer."""


class MetricsFile:
    """Append events to a `metrics.jsonl`, each with one system call.

    A process that is killed leaves at most a torn last line, which the next one to open the file
    cuts off. A float that is not finite is written as the text "nan", "inf" or "-inf".
    Raises MachineError when the file cannot be opened or written, for want of room for instance.
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self.path = Path(path)
        self._file = -1
        self._encode = json.JSONEncoder(allow_nan=False, default=_plain).encode
        try:
            self._file = files.descriptor(self.path, os.O_RDWR | os.O_CREAT | os.O_APPEND)
            _cut_torn_line(self._file)
        except OSError as error:
            self.close()
            raise self._fault(error) from error

    def write(self, /, event: str, step: int, **fields: Any) -> None:
        """Append one event, with the Unix time in seconds as its last field."""
        record = {"event": event, "step": step, **fields, "time": time.time()}
        try:
            text = self._encode(record)
        except ValueError:  # a float that is not finite: rare, so that only then is each value seen
            text = self._encode(_plain(record))
        self._append(f"{text}\n".encode("ascii"))

    def close(self) -> None:
        """Close the file; closing twice is allowed."""
        if self._file >= 0:
            os.close(self._file)
            self._file = -1

    def __enter__(self) -> MetricsFile:
        return self

    def __exit__(self, *exception: object) -> None:
        self.close()

    def _append(self, line: bytes) -> None:
        written = 0
        try:
            while written < len(line):  # a disk that fills up takes a part of the line first
                written += os.write(self._file, line[written:])
        except OSError as error:
            if written:  # a later line must not be glued to this part
                os.ftruncate(self._file, os.fstat(self._file).st_size - written)
            raise self._fault(error) from error

    def _fault(self, error: OSError) -> MachineError:
        mend = "Make room or give the right to write there"
        if isinstance(error, files.UnfitFileError):
            mend = "Move it away"
        if error.errno == errno.EFBIG:
            mend = "Raise the limit to the size of a file (`ulimit -f`)"
        return MachineError(
            f"{self.path}: the metrics cannot be written: {error.strerror}.\n"
            f"    {mend}, then go on with `{commands.resume(self.path.parent)}`."
        )


def read_metrics(path: str | os.PathLike[str]) -> list[dict[str, Any]]:
    """Read the events of a `metrics.jsonl`, in the order in which they were written.

    A value that was not finite is still its text: `float(value)` gives the number back. A torn
    last line is left out; any other line that is not a JSON object raises UsageError.
    """
    events: list[dict[str, Any]] = []
    wrong: tuple[int, bytes] | None = None
    try:
        with files.open_to_read(Path(path), follow=True) as file:
            for number, line in enumerate(iter(lambda: file.readline(_LONGEST), b""), start=1):
                if wrong is not None and line.endswith(b"\n"):
                    break
                event = _parse(line) if line.endswith(b"\n") else None
                if event is not None:
                    events.append(event)
                else:
                    wrong = wrong or (number, line[:60].rstrip(b"\n"))
            else:
                wrong = None  # it is the torn end
    except OSError as error:
        raise UsageError(
            f"{path}: the metrics cannot be read: {error.strerror}.\n"
            "    Name the metrics.jsonl of a run folder."
        ) from error
    if wrong is not None:
        number, start = wrong
        raise UsageError(
            f"{path}:{number}: not a JSON object: {start.decode(errors='replace')!r}.\n"
            "    Each line of a metrics.jsonl is one; remove this line to read the others."
        )
    return events


def _cut_torn_line(file: int) -> None:
    """Cut off a last line that does not end, or is not a JSON object.

    Raises UnfitFileError if it is longer than any that a run writes.
    """
    size = os.fstat(file).st_size
    tail = os.pread(file, _LONGEST, max(size - _LONGEST, 0))
    end = tail.rfind(b"\n") + 1
    if end == len(tail):
        start = tail.rfind(b"\n", 0, -1) + 1
        end = start if _parse(tail[start:]) is None else end
    if end == 0 and size > len(tail):
        raise files.UnfitFileError(errno.EINVAL, f"its last line has {_LONGEST:,} bytes or more")
    if end < len(tail):
        os.ftruncate(file, size - len(tail) + end)


def _parse(line: bytes) -> dict[str, Any] | None:
    try:
        value = json.loads(line)
    except (ValueError, RecursionError):  # that of brackets in brackets
        return None
    return value if isinstance(value, dict) else None


def _plain(value: Any) -> Any:
    """Return the value as strict JSON can hold it; raise TypeError for what it cannot."""
    if value is None or isinstance(value, str | bool | int):
        return value
    if isinstance(value, Integral):
        return int(value)
    if isinstance(value, Real):
        number = float(value)
        return number if math.isfinite(number) else repr(number)
    if isinstance(value, Mapping):
        return {str(key): _plain(item) for key, item in value.items()}
    if isinstance(value, list | tuple):
        return [_plain(item) for item in value]
    if isinstance(value, PurePath):
        return str(value)
    if hasattr(value, "tolist"):  # arrays and tensors; NumPy's bool is no Integral
        return _plain(value.tolist())
    raise TypeError(f"a metric must be a number, text, list or mapping, not {type(value).__name__}")
