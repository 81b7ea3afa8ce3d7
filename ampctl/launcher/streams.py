"""What a process is started with: its three streams and its current folder."""

from __future__ import annotations

import os
import sys

from ampctl.errors import MachineError


def require() -> None:
    """End the process with 5, in words, if stdout or stderr is closed or the folder is gone.

    A file that is opened later would get the number of a closed stream, and with it what is said
    there. Nothing is read from stdin: in the place of a closed one stands an empty one.
    """
    if sys.stdin is None:
        os.open(os.devnull, os.O_RDONLY)  # the lowest number that is free: 0
    closed = [name for name in ("stdout", "stderr") if getattr(sys, name) is None]
    if closed:
        _end(
            f"{' and '.join(closed)} closed (>&- in a shell): what a run says would be lost; send "
            "it to a file, or to /dev/null"
        )
    try:
        os.getcwd()
    except OSError as error:
        _end(
            f"the current folder cannot be used ({error.strerror}): someone may have removed it; "
            "change to one that is there (cd)"
        )


def _end(reason: str) -> None:
    for stream, number in ((sys.stderr, 2), (sys.stdout, 1)):
        if stream is not None:
            os.write(number, f"error: {reason}\n".encode())
            break
    os._exit(MachineError.exit_code)
