"""Jobs of several real ranks without a launcher's cost: forked ranks, and its verdict on them.

Torchelastic's agent starts an interpreter for each rank, which imports torch for seconds. Here each
rank is forked from the server of ``processes`` with what the agent would set; when one fails the
others get its SIGTERM, and ``failure.cause`` says, as in the launcher, what the job is told to have
died of. That the launcher itself does so is tested in ``test_launch``.
"""

from __future__ import annotations

import contextlib
import signal
import socket
import time
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from multiprocessing import forkserver
from pathlib import Path

from cpus import python_path
from processes import DEADLINE_S, Ended, Running
from torch.distributed import TCPStore
from torch.distributed.elastic.multiprocessing.errors import ProcessFailure

from ampctl.distributed import failure
from ampctl.distributed.launched import LAUNCHER

GRACE_S = 30
"""How long torchelastic lets ranks save after its SIGTERM."""

TESTS = Path(__file__).parent


@dataclass(frozen=True)
class JobEnded:
    """How a job ended: exit code and error as its launcher has them, and what its ranks said."""

    code: int
    error: str
    out: str
    err: str
    killed: tuple[int, ...]
    """Ranks that did not end by themselves after the SIGTERM."""


class Job:
    """Ranks under way."""

    def __init__(self, folder: Path, size: int, argvs: Sequence[Sequence[str]]) -> None:
        self._store = TCPStore("127.0.0.1", _free_port(), is_master=True, wait_for_workers=False)
        self._killed: list[int] = []
        self._errors = [
            folder / f".errors-{time.monotonic_ns()}/{r}/error.json" for r in range(size)
        ]
        common = {
            "WORLD_SIZE": f"{size}",
            "MASTER_ADDR": "127.0.0.1",
            "MASTER_PORT": f"{self._store.port}",
            "TORCHELASTIC_USE_AGENT_STORE": "True",  # it outlives the ranks, as the agent's does
            "OMP_NUM_THREADS": "1",
            "PYTHONPATH": python_path(TESTS),
        }
        self.ranks: list[Running] = []
        for rank, (file, argv) in enumerate(zip(self._errors, argvs, strict=True)):
            file.parent.mkdir(parents=True)
            own = {"RANK": f"{rank}", "LOCAL_RANK": f"{rank}", failure._ERROR_FILE: f"{file}"}
            own[LAUNCHER] = f"{_server_pid()}"
            self.ranks.append(Running(folder, argv, {**common, **own}))

    def wait(self) -> JobEnded:
        """Wait for the end of all ranks, the way a launcher does."""
        deadline = time.monotonic() + DEADLINE_S
        failures: dict[int, ProcessFailure] = {}
        while any(rank.is_alive() for rank in self.ranks):
            self._note(failures)
            if failures:
                time.sleep(0.1)  # as often as an agent looks, or so
                self._note(failures)
                for rank in self.ranks:
                    if rank.is_alive():
                        with contextlib.suppress(ProcessLookupError):
                            rank.send(signal.SIGTERM)
                break
            assert time.monotonic() < deadline, "\n".join(rank.said() for rank in self.ranks)
            time.sleep(0.02)
        ended = [self._wait(rank) for rank in range(len(self.ranks))]
        self._note(failures)
        code, error = 0, ""
        if failures:
            told = failure.cause(failures)
            code, error = told.exit_code, f"{told}"
        out, err = "".join(each.out for each in ended), "".join(each.err for each in ended)
        return JobEnded(code, error, out, err, tuple(self._killed))

    def _wait(self, rank: int) -> Ended:
        running, deadline = self.ranks[rank], time.monotonic() + GRACE_S
        while running.is_alive() and time.monotonic() < deadline:
            time.sleep(0.02)
        if running.is_alive():
            self._killed.append(rank)
            running.send(signal.SIGKILL)
        return running.wait()

    def _note(self, failures: dict[int, ProcessFailure]) -> None:
        for rank, running in enumerate(self.ranks):
            if rank not in failures and not running.is_alive():
                code = running.wait().code
                if code:
                    file = f"{self._errors[rank]}"
                    failures[rank] = ProcessFailure(rank, running.pid, code, file)

    def close(self) -> None:
        for rank in self.ranks:
            rank.close()


@contextlib.contextmanager
def job(
    folder: Path, *argv: str, size: int = 2, own: Mapping[int, Sequence[str]] | None = None
) -> Iterator[Job]:
    """Start ``ampctl ARGV`` as so many ranks; ``own``: what one is told beyond the others."""
    started = Job(folder, size, [(*argv, *(own or {}).get(rank, ())) for rank in range(size)])
    try:
        yield started
    finally:
        started.close()


def _free_port() -> int:
    with socket.socket() as server:
        server.bind(("127.0.0.1", 0))
        return int(server.getsockname()[1])


def _server_pid() -> int:
    forkserver.ensure_running()
    pid: int = forkserver._forkserver._forkserver_pid  # type: ignore[attr-defined]
    return pid
