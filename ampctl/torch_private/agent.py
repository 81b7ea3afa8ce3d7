"""Torchelastic's agent with public names for what ampctl changes in it: there is no other way in.

Apart from the others, for it takes a fifth of a second to load, which a run itself has no use for.
"""

from __future__ import annotations

from torch.distributed.elastic.agent.server.api import RunResult, WorkerGroup
from torch.distributed.elastic.agent.server.local_elastic_agent import LocalElasticAgent


class Agent(LocalElasticAgent):
    """Starts the ranks of a node, watches and stops them; each of these can be overridden."""

    def meet(self, group: WorkerGroup) -> None:
        """Wait for the other nodes, and give the group its place among them."""
        super()._rendezvous(group)

    def stop(self, group: WorkerGroup) -> None:
        """Stop the ranks; those that go on after half a minute are killed."""
        super()._stop_workers(group)

    def stop_within(self, seconds: int) -> None:
        """Stop the ranks; those that go on after so long are killed."""
        self._shutdown(timeout=seconds)

    def look(self, group: WorkerGroup) -> RunResult:
        """Return how the ranks are."""
        result: RunResult = super()._monitor_workers(group)
        return result

    @property
    def num_nodes_waiting(self) -> int:
        """How many nodes wait to be taken in."""
        return int(self._rdzv_handler.num_nodes_waiting())

    @property
    def restarts_left(self) -> int:
        """How often the ranks may be started anew."""
        return int(self._remaining_restarts)

    @restarts_left.setter
    def restarts_left(self, value: int) -> None:
        self._remaining_restarts = value

    def _rendezvous(self, worker_group: WorkerGroup) -> None:
        self.meet(worker_group)

    def _stop_workers(self, worker_group: WorkerGroup) -> None:
        self.stop(worker_group)

    def _monitor_workers(self, worker_group: WorkerGroup) -> RunResult:
        return self.look(worker_group)
