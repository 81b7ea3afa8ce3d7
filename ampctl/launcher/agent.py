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
import time
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import Future, wait
from types import FrameType
from typing import Any

from torch.distributed import DistError
from torch.distributed.elastic.agent.server.api import (
    RunResult,
    WorkerGroup,
    WorkerSpec,
    WorkerState,
)
from torch.distributed.elastic.multiprocessing import LogsSpecs
from torch.distributed.elastic.rendezvous import RendezvousError, RendezvousParameters
from torch.distributed.elastic.rendezvous.api import RendezvousClosedError, RendezvousTimeoutError
from torch.distributed.elastic.rendezvous.registry import get_rendezvous_handler
from torch.distributed.elastic.rendezvous.utils import parse_rendezvous_endpoint
from torch.distributed.launcher.api import LaunchConfig
from torch.distributed.run import config_from_args, get_args_parser

from ampctl.distributed.address import is_here, towards
from ampctl.distributed.failure import RankFailedError, cause
from ampctl.distributed.launched import AGENT, STARTS, handled_signals
from ampctl.errors import (
    AmpctlError,
    InterruptedRunError,
    MachineError,
    PreemptedError,
    UsageError,
)
from ampctl.launcher import nodes
from ampctl.torch_private.agent import Agent

_C10D_PORT = 29400
_TIME_TO_SAVE_S = 3600
_WORD_AFTER_S = 10
_LONGER_THAN_TORCH_S = 2
"""After its own limit torch knows better why there is no rendezvous, where it has one."""

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
            outcome = _in_thread(lambda: agent.run_ranks(config, words))
            _await_rendezvous(outcome, agent, config, timeout_s)
            result = outcome.result()
    if result is None:
        raise MachineError("the rendezvous was ended by another node; see what was said there")


class _Agent:
    """Torchrun's agent once there is one, and what the launcher knows of its ranks."""

    def __init__(self, notify: Callable[[str], None]) -> None:
        self.notify = notify
        self._elastic: _ElasticAgent | None = None
        self.has_store = threading.Event()
        self.has_met = threading.Event()
        self.received: signal.Signals | None = None

    def run_ranks(self, config: LaunchConfig, words: tuple[str, ...]) -> RunResult | None:
        """Run all ranks of this node to their end; raise the error of the one that failed first."""
        with _in_words(config):
            spec = _spec(config, words)
            if config.rdzv_backend != "static":  # which has it once it has met
                self.has_store.set()
            try:
                self._elastic = _ElasticAgent(spec, config.logs_specs, self)
                result: RunResult | None = self._elastic.run()
                if result is not None and result.is_failed():
                    raise self._elastic.first_of_all(cause(result.failures))
                return result
            except RendezvousClosedError:
                if self._elastic is None or not self._elastic.starts:
                    raise
                ended = RankFailedError("another node ended the job", MachineError.exit_code)
                raise self._elastic.first_of_all(ended) from None
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
            told = f"{error}".rstrip()
            if error.follows:  # why, another node says
                told = told.rpartition("\n")[2]
            self.notify(
                f"{told}\nstarting all ranks anew from the newest checkpoint "
                f"({restarts_left - 1} more restarts are left)"
            )
        return True


class _ElasticAgent(Agent):
    """An agent that starts ranks anew after a crash alone, not after a stop that was meant."""

    def __init__(self, spec: WorkerSpec, logs_specs: LogsSpecs | None, owner: _Agent) -> None:
        assert logs_specs is not None
        super().__init__(spec, logs_specs)
        self._owner = owner
        self._failed_elsewhere: float | None = None
        self._round: nodes.Round | None = None
        self.starts = 0

    def first_of_all(self, own: RankFailedError) -> RankFailedError:
        """Return the error that ends the job, of this node's own and those of the others."""
        return nodes.first_of_all(self._round, own) if self._round else own

    def meet(self, group: Any) -> None:
        super().meet(group)
        self._owner.has_store.set()
        self._owner.has_met.set()
        now = nodes.Round(group.store, group.group_rank, group.group_world_size)
        os.environ[STARTS] = f"{self.starts}"
        self.starts += 1
        if self._round and self._round.size != now.size:
            self._owner.notify(
                f"nodes: {now.size}, and not {self._round.size} any more; all ranks start anew "
                "from the newest checkpoint"
            )
        self._round = now

    def stop(self, group: WorkerGroup) -> None:
        """Stop the ranks; healthy ones, for a node that has come, have all the time to save."""
        if group.state is WorkerState.HEALTHY and not self._failed_elsewhere:
            self.stop_within(_TIME_TO_SAVE_S)
        else:
            super().stop(group)

    def look(self, group: WorkerGroup) -> RunResult:
        result = super().look(group)
        if result.is_failed():
            error = cause(result.failures)
            if error.follows and self._owner.received is None and self.num_nodes_waiting:
                # Another node's launcher has seen the node that waits, and stopped its ranks.
                return RunResult(state=WorkerState.HEALTHY)
            if not self._owner.may_restart(error, self.restarts_left):
                self.restarts_left = 0
        elif result.state is WorkerState.HEALTHY and self._is_abandoned():
            self.restarts_left = 0
            return RunResult(state=WorkerState.FAILED)
        return result

    def _is_abandoned(self) -> bool:
        """Return whether another node ended the job, and the ranks here do not notice."""
        assert self._round is not None
        if self._failed_elsewhere is None and nodes.has_failed_elsewhere(self._round):
            self._failed_elsewhere = time.monotonic()
        since = self._failed_elsewhere
        return since is not None and time.monotonic() > since + nodes.LINGER_S / 2


def _config(options: Sequence[str], logs: str, timeout_s: int) -> LaunchConfig:
    """Read torchrun's options with its own parser; PET_* variables count for what is not given."""
    arguments = get_args_parser().parse_args([*options, "ampctl"])
    arguments.log_dir = arguments.log_dir or logs
    host, port = parse_rendezvous_endpoint(arguments.rdzv_endpoint, default_port=_C10D_PORT)
    is_c10d, is_alone = arguments.rdzv_backend == "c10d", host == "localhost"
    if not is_alone:
        # Rather than the host's name, which the other nodes may not be able to look up.
        arguments.local_addr = arguments.local_addr or towards(host, port)
    config, _, _ = config_from_args(arguments)
    waits = ("join_timeout", "read_timeout") if is_c10d else ("timeout",)
    for name in waits:
        if f"{name}=" not in arguments.rdzv_conf:
            config.rdzv_configs[name] = timeout_s
    if is_c10d and not is_alone and is_here(host, port):
        # Torch itself knows the addresses of the host's name alone.
        config.rdzv_configs.setdefault("is_host", True)
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
        rdzv_handler=nodes.Rendezvous(handler),
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
    """Raise MachineError, which describes why the nodes did not meet."""
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
            "and port? distributed.timeout_minutes is how long they wait for each other. See "
            "`ampctl docs two-machines`."
        ) from error


def _await_rendezvous(
    outcome: Future[Any], agent: _Agent, config: LaunchConfig, timeout_s: int
) -> None:
    """Wait for the nodes to meet, or for the end, and say so if it lasts.

    Torch has no limit for what answers nothing where the store should be. Raises MachineError.
    """
    begin, is_said, where = time.monotonic(), False, config.rdzv_endpoint
    while not agent.has_met.is_set() and not outcome.done():
        waited = time.monotonic() - begin
        if waited > timeout_s + _LONGER_THAN_TORCH_S and not agent.has_store.is_set():
            raise MachineError(
                f"no rendezvous at {where}: nothing that answers as one was there for {timeout_s} "
                "s. Is it another program that listens there, or a firewall? Give the address of "
                "one of the nodes and a port that is free there with --rdzv-endpoint, the same on "
                "every node. distributed.timeout_minutes is how long they wait for each other."
            )
        if waited > _WORD_AFTER_S and not is_said:
            is_said = True
            what = "the other nodes" if agent.has_store.is_set() else "an answer from there"
            agent.notify(
                f"waiting for the rendezvous at {where}, for {what}: up to {timeout_s} s in all"
            )
        wait([outcome], timeout=0.1)


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

    numbers = (*handled_signals(), signal.SIGINT)
    previous = {number: signal.signal(number, receive) for number in numbers}
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

    threading.Thread(target=target, name=AGENT, daemon=True).start()
    return outcome
