"""The launcher of several ranks: torchrun's own agent starts them, and signals go on to them.

How many there are, and whether they may start at all, is settled in `launch`.
"""

from __future__ import annotations

import contextlib
import logging
import os
import signal
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup, WorkerSpec
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from ampctl.distributed.failure import RankFailedError, cause
from ampctl.errors import (
    AmpctlError,
    InterruptedRunError,
    MachineError,
    PreemptedError,
    UsageError,
)

_FORWARDED = (signal.SIGTERM, signal.SIGUSR1, signal.SIGINT)
_WORTH_A_RESTART = (AmpctlError.exit_code, MachineError.exit_code)


def run(
    options: Sequence[str],
    argv: Sequence[str],
    *,
    timeout_s: int,
    notify: Callable[[str], None],
) -> None:
    """Run ``python -m ampctl ARGV`` as the ranks of a job, to its end.

    ``options`` are torchrun's. Raises RankFailedError with words and exit code of the rank that
    failed first, MachineError if the nodes do not meet within ``timeout_s`` seconds, UsageError for
    options that torchrun does not know, and PreemptedError or InterruptedRunError if a signal comes
    before there are ranks. See torch.distributed.run and torch.distributed.elastic.agent.
    """
    if "LOGLEVEL" not in os.environ:  # with which torchelastic is asked to tell its doings
        # For good: the agent's thread may go on logging while the launcher ends.
        logging.disable(logging.ERROR)
    with tempfile.TemporaryDirectory(prefix="ampctl-") as logs:
        config = _config(options, logs, timeout_s)
        # Escaped: the agent fills in ${local_rank} in arguments, and halves each $$.
        words = tuple(word.replace("$", "$$") for word in ("-u", "-m", "ampctl", *argv))
        agent = _Agent(notify)
        with _forwarding(agent):
            # In a thread of its own: in a rendezvous it waits in native code, which no signal ends.
            result = _in_thread(lambda: agent.run_ranks(config, words)).result()
    if result is None:
        raise MachineError("the rendezvous was ended by another node; see what was said there")
    if result.is_failed():
        raise cause(result.failures)


class _Agent:
    """Torchrun's agent once there is one, and what the launcher knows of its ranks."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self._notify = notify
        self._elastic: _ElasticAgent | None = None
        self.received: signal.Signals | None = None

    def run_ranks(self, config: LaunchConfig, words: tuple[str, ...]) -> RunResult | None:
        with _in_words(config):
            spec = _spec(config, words)
            try:
                self._elastic = _ElasticAgent(spec, config.logs_specs, self)
                result: RunResult | None = self._elastic.run()
                return result
            finally:
                spec.rdzv_handler.shutdown()

    def pids(self) -> list[int]:
        """Return the processes of the ranks; none before they are started."""
        if self._elastic is None:
            return []
        return [each.id for each in self._elastic.get_worker_group().workers if each.id is not None]

    def may_restart(self, error: RankFailedError, restarts_left: int) -> bool:
        """Return whether a failure may be cured by starting anew, and say so if that is done."""
        if self.received is not None or error.exit_code not in _WORTH_A_RESTART:
            return False
        if restarts_left:
            self._notify(
                f"{error}\nstarting all ranks anew from the newest checkpoint "
                f"({restarts_left - 1} more restarts are left)"
            )
        return True


class _ElasticAgent(LocalElasticAgent):
    """An agent that starts ranks anew after a crash alone, not after a stop that was meant."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs | None, owner: _Agent) -> None:
        assert logs_specs is not None
        super().__init__(spec, logs_specs)
        self._owner = owner

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        result: RunResult = super()._monitor_workers(worker_group)
        if result.is_failed() and not self._owner.may_restart(
            cause(result.failures), self._remaining_restarts
        ):
            self._remaining_restarts = 0
        return result


def _config(options: Sequence[str], logs: str, timeout_s: int) -> LaunchConfig:
    """Read torchrun's options with its own parser; PET_* variables count for what is not given."""
    arguments = get_args_parser().parse_args([*options, "ampctl"])
    arguments.log_dir = arguments.log_dir or logs
    config, _, _ = config_from_args(arguments)
    waits = ("join_timeout", "read_timeout") if config.rdzv_backend == "c10d" else ("timeout",)
    for name in waits:
        if f"{name}=" not in arguments.rdzv_conf:
            config.rdzv_configs[name] = timeout_s
    return config


def _spec(config: LaunchConfig, words: tuple[str, ...]) -> WorkerSpec:
    """Join the rendezvous's store and describe the ranks. Raises UsageError for what is unknown."""
    try:
        address, port = None, None
        if config.rdzv_backend == "static":
            address, port = parse_rendezvous_endpoint(config.rdzv_endpoint, default_port=-1)
        handler = get_rendezvous_handler(
            RendezvousParameters(
                backend=config.rdzv_backend,
                endpoint=config.rdzv_endpoint,
                run_id=config.run_id,
                min_nodes=config.min_nodes,
                max_nodes=config.max_nodes,
                local_addr=config.local_addr,
                **config.rdzv_configs,
            )
        )
    except ValueError as error:
        raise UsageError(f"torchrun does not take these options: {error}") from error
    return WorkerSpec(
        role=config.role,
        local_world_size=config.nproc_per_node,
        entrypoint=os.environ.get("PYTHON_EXEC", sys.executable),
        args=words,
        rdzv_handler=handler,
        max_restarts=config.max_restarts,
        monitor_interval=config.monitor_interval,
        master_addr=address,
        master_port=port,
        local_addr=config.local_addr,
        event_log_handler=config.event_log_handler,
        numa_options=config.numa_options,
    )


@contextlib.contextmanager
def _in_words(config: LaunchConfig) -> Iterator[None]:
    """Say why the nodes did not meet. Raises MachineError."""
    where = config.rdzv_endpoint
    try:
        yield
    except (RendezvousError, DistError, TimeoutError) as error:
        told = "fewer nodes than --nnodes came in time"
        if not isinstance(error, RendezvousTimeoutError):
            told = f"{error.__cause__ or error}".partition("\n")[0].rstrip(". ")
        if "EADDRINUSE" in told or "address already in use" in told.lower():
            raise MachineError(
                f"no rendezvous at {where}: another process listens there. Give another port "
                "with --rdzv-endpoint, the same on every node."
            ) from error
        raise MachineError(
            f"no rendezvous at {where}: {told}. Is --rdzv-endpoint the same on every node, do all "
            "nodes start with the same --nnodes and --rdzv-id, and may they connect to that host "
            "and port? distributed.timeout_minutes is how long they wait for each other."
        ) from error


@contextlib.contextmanager
def _forwarding(agent: _Agent) -> Iterator[None]:
    """Send the signals of this process on to the ranks, which agree, save and end.

    A second Ctrl-C kills them. Before there are ranks a signal ends the launcher.
    """

    def receive(number: int, _: FrameType | None) -> None:
        name, again = signal.Signals(number), agent.received is signal.SIGINT
        agent.received = name
        pids = agent.pids()
        if name is signal.SIGINT and again:
            for pid in pids:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(pid, signal.SIGKILL)  # each rank leads a group: its data workers
            raise InterruptedRunError("interrupted twice: ended at once, without a last checkpoint")
        for pid in pids:
            with contextlib.suppress(ProcessLookupError):
                os.kill(pid, name)
        if not pids:
            kind = InterruptedRunError if name is signal.SIGINT else PreemptedError
            raise kind(f"{name.name} received before the ranks had started")

    previous = {number: signal.signal(number, receive) for number in _FORWARDED}
    try:
        yield
    finally:
        for number, handler in previous.items():
            signal.signal(number, handler)


def _in_thread(work: Callable[[], Any]) -> Future[Any]:
    """Run something in a thread that does not keep the process alive."""
    outcome: Future[Any] = Future()

    def target() -> None:
        try:
            outcome.set_result(work())
        except BaseException as error:
            outcome.set_exception(error)
            raise SystemExit from None  # whoever waits for the outcome raises it

    threading.Thread(target=target, name="agent", daemon=True).start()
    return outcome
