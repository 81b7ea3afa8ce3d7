"""Real processes that run ``ampctl``, to be watched, stopped and killed by tests.

``start`` forks from a server that has torch imported already, so that a process costs a tenth of
a second; the process then runs ``python -m ampctl`` as the interpreter would, in a session of its
own. ``spawn`` is the plain thing: a new interpreter.
"""

from __future__ import annotations

import contextlib
import json
import multiprocessing
import os
import runpy
import signal
import subprocess
import sys
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

DEADLINE_S = 120.0
"""How long a test waits for what must come; only a broken program makes it wait that long."""

PRELOADED = [
    "torch",
    "torch._dynamo",
    "torch.distributed.checkpoint",
    "torch.distributed.fsdp",
    "ampctl.run.worker",
    "ampctl.doctor.check",
]

_server = multiprocessing.get_context("forkserver")
_server.set_forkserver_preload(PRELOADED)


@dataclass(frozen=True)
class Ended:
    """How a process ended: its exit code (-9 if it was killed by SIGKILL) and what it said."""

    code: int
    out: str
    err: str


class Running:
    """A process under way; the pid is its session and process group too, data workers and all."""

    def __init__(self, folder: Path, argv: Sequence[str], env: Mapping[str, str]) -> None:
        stem = f".process-{time.monotonic_ns()}"
        self._out, self._err = folder / f"{stem}.out", folder / f"{stem}.err"
        whole = {**os.environ, **env}
        self._process = _server.Process(
            target=_main, args=(str(folder), list(argv), whole, str(self._out), str(self._err))
        )
        self._process.start()
        assert self._process.pid is not None
        self.pid: int = self._process.pid

    def is_alive(self) -> bool:
        return self._process.is_alive()

    def send(self, number: signal.Signals) -> None:
        os.kill(self.pid, number)

    def send_to_group(self, number: signal.Signals) -> None:
        """Signal the whole process group, as a terminal and many schedulers do."""
        os.killpg(self.pid, number)

    def kill(self) -> Ended:
        self.send(signal.SIGKILL)
        return self.wait()

    def wait(self) -> Ended:
        self._process.join(DEADLINE_S)
        assert self._process.exitcode is not None, f"still running:\n{self.said()}"
        said = (file.read_text() if file.exists() else "" for file in (self._out, self._err))
        return Ended(self._process.exitcode, *said)

    def said(self) -> str:
        files = (file for file in (self._out, self._err) if file.exists())
        return "".join(file.read_text() for file in files)

    def until(self, condition: Callable[[], Any], pause_s: float = 0.005) -> Any:
        """Wait until a condition holds, while the process lives; return what it returned."""
        deadline = time.monotonic() + DEADLINE_S
        while True:
            value = condition()
            if value:
                return value
            assert self.is_alive(), f"it ended before that:\n{self.said()}"
            assert time.monotonic() < deadline, f"it never came to that:\n{self.said()}"
            time.sleep(pause_s)

    def until_event(self, run_dir: Path, event: str, step: int) -> dict[str, Any]:
        """Wait until ``metrics.jsonl`` has an event of this kind at this step or a later one."""

        def found() -> dict[str, Any] | None:
            events = read_events(run_dir)
            return next((e for e in events if e["event"] == event and e["step"] >= step), None)

        return self.until(found)

    def members(self) -> list[int]:
        """Return the live processes of its session: itself and its data workers."""
        return session_members(self.pid)

    def close(self) -> None:
        for pid in self.members():
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, signal.SIGKILL)
        self._process.join()


def read_events(run_dir: Path) -> list[dict[str, Any]]:
    """Read the whole lines of ``metrics.jsonl`` as they are now; each must be a JSON object."""
    path = run_dir / "metrics.jsonl"
    text = path.read_text() if path.exists() else ""
    return [json.loads(line) for line in text.split("\n")[:-1]]


def session_members(session: int) -> list[int]:
    members = []
    for entry in Path("/proc").iterdir():
        if not entry.name.isdigit():
            continue
        try:
            fields = (entry / "stat").read_text().rpartition(")")[2].split()
        except OSError:  # it has just ended
            continue
        if fields[0] != "Z" and int(fields[3]) == session:
            members.append(int(entry.name))
    return members


@contextlib.contextmanager
def starting(folder: Path, **env: str) -> Iterator[Callable[..., Running]]:
    """Give a function that starts ``ampctl ARGUMENTS`` in a folder; all are ended on leaving."""
    started: list[Running] = []

    def start(*argv: str) -> Running:
        started.append(Running(folder, argv, env))
        return started[-1]

    try:
        yield start
    finally:
        for running in started:
            running.close()


def spawn(*argv: str, **options: Any) -> subprocess.CompletedProcess[str]:
    """Run ``python ARGUMENTS`` in a new interpreter to its end."""
    return subprocess.run(
        [sys.executable, *argv], capture_output=True, text=True, timeout=DEADLINE_S, **options
    )


def _main(folder: str, argv: list[str], env: dict[str, str], out: str, err: str) -> None:
    """Be ``python -m ampctl`` in a folder, with output to files and signals as they are by default.

    Runs in the new process.
    """
    os.setsid()
    os.chdir(folder)
    os.environ.clear()
    os.environ.update(env)
    for path, descriptor in ((out, 1), (err, 2)):
        file = os.open(path, os.O_WRONLY | os.O_CREAT | os.O_APPEND, 0o600)
        os.dup2(file, descriptor)
        os.close(file)
    nothing = os.open(os.devnull, os.O_RDONLY)
    os.dup2(nothing, 0)
    os.close(nothing)
    # Its own data workers start as a plain interpreter starts them, not from the server.
    multiprocessing.set_start_method(multiprocessing.get_all_start_methods()[0], force=True)
    signal.signal(signal.SIGINT, signal.default_int_handler)
    signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    tests = str(Path(__file__).parent)
    given = [path for path in env.get("PYTHONPATH", "").split(os.pathsep) if path]
    sys.path[:] = ["", *given, *(path for path in sys.path if path not in ("", tests, *given))]
    sys.argv = ["ampctl", *argv]
    try:
        runpy.run_module("ampctl", run_name="__main__", alter_sys=True)
    except Exception:
        sys.excepthook(*sys.exc_info())
        raise SystemExit(1) from None
