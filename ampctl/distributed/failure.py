"""How a rank ended, carried to its launcher: its error, exit code, and which rank was first.

A rank leaves its error in the file that torchelastic names, in torchelastic's format, so that plain
`torchrun` shows it too. Saying it on the screen is left to the command line.
"""

from __future__ import annotations

import json
import math
import multiprocessing
import os
import re
import select
import signal
import time
from collections.abc import Iterator, Mapping
from contextlib import suppress
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from ampctl.distributed.launched import LAUNCHER
from ampctl.errors import (
    AmpctlError,
    InterruptedRunError,
    MachineError,
    PreemptedError,
    in_full,
)
from ampctl.recipe.own_code import as_text

if TYPE_CHECKING:
    from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

_ERROR_FILE = "TORCHELASTIC_ERROR_FILE"
_AGREED = (PreemptedError, InterruptedRunError)
_STOPPED = tuple(each.exit_code for each in _AGREED)
_STOPPING = {
    -signal.SIGTERM: PreemptedError.exit_code,
    -signal.SIGUSR1: PreemptedError.exit_code,
    -signal.SIGHUP: PreemptedError.exit_code,
    -signal.SIGINT: InterruptedRunError.exit_code,
}
_PEER_IS_GONE = re.compile(r"connection (was )?(closed|reset)|broken pipe", re.IGNORECASE)
_OF_GLOO = re.compile(r"gloo|pair\.cc", re.IGNORECASE)
_TIMEOUT = re.compile(r"timed out waiting \d+ms for|timeout caused pair closure", re.IGNORECASE)
_ATOMIC = select.PIPE_BUF  # a pipe that can be written to at all takes so much
_AT_ONCE_S = 5
"""A rank that was killed so long after the first failure was killed because of it."""


FOLLOWS = 2
"""From here on the places of errors are of ranks that did not fail by themselves."""


class RankFailedError(AmpctlError):
    """A rank ended; the words and the exit code are those of the rank that failed first.

    ``place`` orders such errors, the cause of the others first: see :func:`cause`. ``unsaid``: the
    rank left no word of its own, so that what is saved is for the launcher to say.
    """

    def __init__(
        self,
        message: str,
        exit_code: int,
        *,
        place: tuple[float, float] = (math.inf, math.inf),
        unsaid: bool = False,
    ) -> None:
        super().__init__(message)
        self.exit_code = exit_code
        self.place = place
        self.unsaid = unsaid

    def with_advice(self, text: str) -> RankFailedError:
        """Return the same error with one more sentence or two."""
        return RankFailedError(f"{self}. {text}", self.exit_code, place=self.place)

    @property
    def follows(self) -> bool:
        """Whether the rank stopped because it was asked to, or because another one was gone."""
        return self.place[0] >= FOLLOWS


class StuckError(MachineError):
    """Ranks have waited too long for others; every rank tells it in the same words."""


def record(error: BaseException) -> bool:
    """Leave an error for the launcher; return whether this process must tell it itself.

    It must where there is no launcher of ours to do it. Under plain ``torchrun`` the first rank of
    a machine tells it, before the summary that torchrun ends with. The format is that of
    torch.distributed.elastic.multiprocessing.errors.
    """
    name = os.environ.get(_ERROR_FILE)
    if not name:  # of srun, say: what all ranks agree on, the first one tells
        return not isinstance(error, _AGREED) or os.environ.get("RANK") in (None, "", "0")
    file = Path(name)
    text = in_full(error) if isinstance(error, AmpctlError) else as_text(error)
    of_peer = _follows_from_a_peer(error)
    content = {
        "message": {
            "message": f"{type(error).__name__}: {error}",
            "extraInfo": {"py_callstack": text, "timestamp": f"{int(time.time())}"},
        },
        "ampctl": {
            "text": text,
            "in_words": isinstance(error, AmpctlError),
            "exit_code": error.exit_code if isinstance(error, AmpctlError) else 1,
            "of_peer": of_peer,
            "of_all": isinstance(error, StuckError),
            "time": time.time(),
        },
    }
    part = file.with_suffix(".tmp")
    try:
        part.write_text(json.dumps(content), encoding="utf-8")
        os.replace(part, file)
    except OSError:  # no room, say: better told by each rank than by none
        return True
    if os.environ.get(LAUNCHER) == f"{os.getppid()}":
        return False
    return _claim(file.parent.parent / ("told-of-peer" if of_peer else "told"))


def leave(error: BaseException) -> NoReturn:
    """End this process with an error, whatever its threads are at, and with it its data workers."""
    if record(error):
        say(f"error: {error}\n" if isinstance(error, AmpctlError) else as_text(error))
    for child in multiprocessing.active_children():
        child.kill()
    os._exit(error.exit_code if isinstance(error, AmpctlError) else AmpctlError.exit_code)


def say(text: str) -> None:
    """Write to stderr, unless it is gone, or nobody reads what it is full of."""
    with suppress(OSError, ValueError):
        if select.select([], [2], [], 1.0)[1]:
            os.write(2, text.encode(errors="replace")[:_ATOMIC])


def cause(failures: Mapping[int, ProcessFailure]) -> RankFailedError:
    """Return the error of the rank that the others followed, of failures by global rank.

    First come errors of a rank's own, then ranks that were killed, then those that stopped because
    they were asked to or because another rank was gone; among equals the first in time.
    """
    if not failures:
        return RankFailedError("a rank ended and said nothing", MachineError.exit_code)
    started = min(failure.timestamp for failure in failures.values())
    rank = min(failures, key=lambda each: _order(failures[each], started))
    failure = failures[rank]
    place = _order(failure, started)
    told = _told(failure)  # with its own code: the agent's SIGTERM may find it on its way out
    if told is None:
        return RankFailedError(*_unsaid(rank, failure), place=place, unsaid=True)
    text = told["text"]
    if not told["in_words"]:
        text = f"rank {rank} failed\n{text}"
    elif rank and not told["of_all"]:
        others = [_told(other) for other in failures.values()]
        if not all(each and each["text"] == text for each in others):
            text = f"rank {rank}: {text}"
    return RankFailedError(text, told["exit_code"], place=place)


def _order(failure: ProcessFailure, started: float) -> tuple[float, float]:
    told = _told(failure)
    if told is not None:
        follows = told["of_peer"] or told["exit_code"] in _STOPPED
        return (FOLLOWS if follows else 0), told["time"]
    # Its time is that of its discovery in whole seconds, and comes after what was written down.
    was_asked = failure.exitcode in _STOPPING
    is_late = failure.timestamp > started + _AT_ONCE_S
    return (FOLLOWS if was_asked or is_late else 1), failure.timestamp + 1.0


def _told(failure: ProcessFailure) -> dict[str, Any] | None:
    told: dict[str, Any] | None = failure.error_file_data.get("ampctl")
    return told


def _unsaid(rank: int, failure: ProcessFailure) -> tuple[str, int]:
    """Describe how a rank ended that left no error, and return its exit code."""
    who, code = f"rank {rank} (process {failure.pid})", failure.exitcode
    if code in _STOPPING:
        name = signal.Signals(-code).name
        return f"{who} was ended by {name} before it could save", _STOPPING[code]
    if code == -signal.SIGKILL:
        return (
            f"{who} was killed (SIGKILL). Most often it is the kernel that does so, when memory "
            "runs out: the system log names the process then. Make data.micro_batch_size or "
            "data.num_workers smaller",
            MachineError.exit_code,
        )
    if code < 0:
        return (
            f"{who} crashed ({failure.signal_name()}), most often in native code; the stack "
            "above, if there is one, is where it was",
            AmpctlError.exit_code,
        )
    return f"{who} ended with code {code} and did not say why", code


def comes_of_others(error: BaseException) -> bool:
    """Return whether a collective has failed: another rank did not come, or is gone."""
    said = f"{error}"
    is_gone = bool(_PEER_IS_GONE.search(said) and _OF_GLOO.search(said))
    return _is_distributed(error) or is_gone or is_timeout(error)


def is_timeout(error: BaseException) -> bool:
    """Return whether a collective has failed because a rank has waited for too long."""
    said = f"{error}"
    if _is_distributed(error):
        return "timed out" in said.lower() or "timeout" in said.lower()
    return bool(_TIMEOUT.search(said))


def _is_distributed(error: BaseException) -> bool:
    return any(kind.__name__ == "DistError" for kind in type(error).__mro__)


def _follows_from_a_peer(error: BaseException) -> bool:
    """Return whether an error only says that another rank is gone."""
    return any(
        _is_distributed(each)
        or (isinstance(each, RuntimeError) and bool(_PEER_IS_GONE.search(f"{each}")))
        for each in _causes(error)
    )


def _causes(error: BaseException | None) -> Iterator[BaseException]:
    while error is not None:
        yield error
        error = error.__cause__


def _claim(path: Path) -> bool:
    """Return whether this process is the first to ask."""
    try:
        path.touch(exist_ok=False)
    except FileExistsError:
        return False
    return True
