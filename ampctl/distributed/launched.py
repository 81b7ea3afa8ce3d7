"""What a process is to the launcher that started it: a rank that ends when the launcher does."""

from __future__ import annotations

import atexit
import os
import signal
import sys
import threading
import time
from collections.abc import Iterator
from contextlib import contextmanager, suppress

LAUNCHER = "AMPCTL_LAUNCHER"
"""Set for the ranks of ``ampctl``'s own launcher: its process id."""

STARTS = "AMPCTL_STARTS"
"""Set for the ranks of ``ampctl``'s own launcher: how often it has started ranks before."""

VARIABLES = ("TORCHELASTIC_RUN_ID", "RANK", "WORLD_SIZE")
"""What launchers set for ranks; the first alone will do, or the other two."""

AGENT = "agent"
"""The thread of a launcher in which torchrun's agent runs."""

STOPPING = (signal.SIGTERM, signal.SIGUSR1, signal.SIGHUP)
"""What ends a job that will go on later: a scheduler's signals, and a terminal that is closed."""

_GRACE_S = 30
"""How long a rank without a launcher has to save: as long as torchrun gives it."""


_TORCHRUN_S = 30


def is_rank() -> bool:
    """Return whether a launcher, torchrun or another one, has started this process as a rank.

    A Kubernetes operator counts pods in RANK; where it sets PET_NODE_RANK it waits for a launcher.
    """
    if is_of_torchrun():
        return True
    return {"RANK", "WORLD_SIZE"} <= os.environ.keys() and "PET_NODE_RANK" not in os.environ


def is_of_torchrun() -> bool:
    """Return whether torchrun, or ampctl's own launcher, has started this process as a rank."""
    return "TORCHELASTIC_RUN_ID" in os.environ


def end_with_launcher() -> None:
    """Watch the launcher of this rank: where it is gone, stop as if SIGTERM had come.

    All ranks do so at once, hence they can still agree and save; one that cannot is killed. Only
    torchelastic is watched: of another launcher the parent may be a shell that comes and goes.
    """
    if not is_of_torchrun():
        return
    launcher = os.getppid()
    if launcher == 1:  # it may have ended before this line was reached
        launcher = int(os.environ.get(LAUNCHER, launcher))

    def watch() -> None:
        while os.getppid() == launcher:
            time.sleep(1)
        os.kill(os.getpid(), signal.SIGTERM)
        time.sleep(_GRACE_S)
        os.kill(os.getpid(), signal.SIGKILL)

    threading.Thread(target=watch, name="launcher-watch", daemon=True).start()


@contextmanager
def leaving_at_its_end() -> Iterator[None]:
    """End a rank where what runs in this context ends well, and tear nothing down.

    All that the interpreter does first is done. But a native thread of a process group that wakes
    up while the interpreter is torn down aborts it: a job that is done would end with SIGABRT. A
    rank that fails has left its error and its code for the launcher, which go before a signal. A
    launcher whose agent still waits in native code ends in this way too, with whatever code.
    """
    try:
        yield
    except SystemExit as end:
        waits = any(thread.name == AGENT for thread in threading.enumerate())
        if not waits and (end.code or not is_rank()):  # which it may have become meanwhile
            raise
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        for stream in (sys.stdout, sys.stderr):
            with suppress(OSError, ValueError):
                stream.flush()
        os._exit(end.code if isinstance(end.code, int) else 0)


def is_restarted() -> bool:
    """Return whether this rank's launcher is known to have started ranks of the job before.

    Torchelastic counts failures alone, and those of its own node. Where ranks have a store of its
    agents in common, that tells it for certain: see `meet`.
    """
    if STARTS in os.environ:
        return int(os.environ[STARTS]) > 0
    if os.environ.get("TORCHELASTIC_USE_AGENT_STORE") == "True":
        return False
    return int(os.environ.get("TORCHELASTIC_RESTART_COUNT") or 0) > 0


def seconds_to_save() -> float | None:
    """Return how long after SIGTERM the launcher of this rank kills it; None: it waits, or is none.

    Ours waits for a save however long it takes.
    """
    if not is_of_torchrun() or os.environ.get(LAUNCHER) == f"{os.getppid()}":
        return None
    return float(os.environ.get("TORCH_ELASTIC_SHUTDOWN_TIMEOUT") or _TORCHRUN_S)


def handled_signals() -> list[signal.Signals]:
    """Return which of `STOPPING` to heed: not SIGHUP where nohup has let it be ignored."""
    is_ignored = signal.getsignal(signal.SIGHUP) is signal.SIG_IGN
    return [each for each in STOPPING if each is not signal.SIGHUP or not is_ignored]


def speaks_on_terminal() -> bool:
    """Return whether this process is the one of its machine that tells a signal on the terminal."""
    return os.environ.get("LOCAL_RANK") in (None, "", "0")
