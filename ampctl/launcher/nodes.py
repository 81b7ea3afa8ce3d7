"""What the launchers on several nodes tell each other: where their ranks meet, and how they ended.

They do it in the store of the rendezvous, which is new in each round of the c10d backend.
"""

from __future__ import annotations

import json
import socket
import time
from contextlib import suppress
from dataclasses import dataclass
from typing import Any

from torch.distributed import DistError, Store  # type: ignore[attr-defined]
from torch.distributed.elastic.rendezvous import RendezvousHandler, RendezvousInfo
from torch.distributed.elastic.rendezvous.api import RendezvousStoreInfo

from ampctl.distributed.failure import FOLLOWS, RankFailedError
from ampctl.errors import AmpctlError, MachineError, first_of

LINGER_S = 15
"""How long a launcher whose ranks have failed waits for the word of the others; one that is killed
gives none."""

_PAUSE_S = 0.1


@dataclass(frozen=True)
class Round:
    """A round of the rendezvous: its store, the number of this node in it, and of how many."""

    store: Store
    node: int
    size: int

    @property
    def others(self) -> list[int]:
        """The numbers of the other nodes."""
        return [node for node in range(self.size) if node != self.node]


class Rendezvous(RendezvousHandler):
    """Torch's rendezvous, in which every round tells all nodes where their ranks meet.

    Torch's own tells it in its first round alone. Later a node that is new waits for it for ever,
    and one that was the first node before takes its own place for that of all.
    """

    def __init__(self, own: RendezvousHandler) -> None:
        self._own = own

    def next_rendezvous(self) -> RendezvousInfo:
        """See base class."""
        info: Any = self._own.next_rendezvous()
        place, store = info.bootstrap_store_info, info.store
        if info.rank == 0:
            store.set(RendezvousStoreInfo.MASTER_ADDR_KEY, place.master_addr)
            store.set(RendezvousStoreInfo.MASTER_PORT_KEY, f"{place.master_port}")
        address = store.get(RendezvousStoreInfo.MASTER_ADDR_KEY).decode()
        port = int(store.get(RendezvousStoreInfo.MASTER_PORT_KEY))
        place = RendezvousStoreInfo(address, port)
        return RendezvousInfo(store, info.rank, info.world_size, place)

    @property
    def use_agent_store(self) -> bool:
        """See base class."""
        return self._own.use_agent_store

    def get_backend(self) -> str:
        """See base class."""
        return self._own.get_backend()

    def is_closed(self) -> bool:
        """See base class."""
        return self._own.is_closed()

    def set_closed(self) -> None:
        """See base class."""
        self._own.set_closed()  # type: ignore[no-untyped-call]

    def num_nodes_waiting(self) -> int:
        """See base class."""
        return self._own.num_nodes_waiting()

    def get_run_id(self) -> str:
        """See base class."""
        return self._own.get_run_id()

    def shutdown(self) -> bool:
        """See base class."""
        return self._own.shutdown()


# Of ranks that lost the others: with an error of torch's, or in words of their own.
_CUT_OFF = (AmpctlError.exit_code, MachineError.exit_code)


def has_failed_elsewhere(now: Round) -> bool:
    """Return whether another node's ranks have failed for good."""
    try:
        return any(now.store.check([_key(node)]) for node in now.others)
    except DistError:  # the node that holds the store is gone
        return False


def first_of_all(now: Round, own: RankFailedError) -> RankFailedError:
    """Send the other nodes how the ranks of this one ended; return the error that ends the job.

    It is told in full where it happened; elsewhere the user learns where that is.
    """
    if now.size == 1:
        return own
    node = f"{now.node} ({socket.gethostname()})"
    said: dict[str, Any] = {"place": list(own.place), "text": f"{own}", "node": node}
    said["exit_code"] = own.exit_code
    every = {now.node: said}
    with suppress(DistError):  # the node that holds the store is gone
        now.store.set(_key(now.node), json.dumps(said))
        deadline = time.monotonic() + LINGER_S
        while len(every) < now.size and time.monotonic() < deadline:
            for other in now.others:
                if other not in every and now.store.check([_key(other)]):
                    every[other] = json.loads(now.store.get(_key(other)))
            time.sleep(_PAUSE_S)
    first = min(every.values(), key=lambda each: tuple(each["place"]))
    is_cut_off = first["place"][0] >= FOLLOWS and first["exit_code"] in _CUT_OFF
    if is_cut_off and len(every) < now.size:
        return _gone([node for node in now.others if node not in every], own)
    is_as_own = first["exit_code"] == own.exit_code and (
        first["text"] == said["text"] or not own.follows
    )
    if first is said or is_as_own:
        return own
    return RankFailedError(
        f"the job ended because of node {first['node']}, where all is told: "
        f"{_last_line(first['text'])}",
        first["exit_code"],
        place=tuple(first["place"]),
    )


def _gone(nodes: list[int], own: RankFailedError) -> RankFailedError:
    named = (
        f"node {nodes[0]} is"
        if len(nodes) == 1
        else f"nodes {first_of([f'{node}' for node in nodes])} are"
    )
    return RankFailedError(
        f"{named} gone, or cut off: ranks lost the connection, and their launcher says nothing "
        f"({_last_line(f'{own}')})",
        MachineError.exit_code,
        place=own.place,
        unsaid=True,
    )


def _last_line(text: str) -> str:
    return text.rstrip().rpartition("\n")[2]


def _key(node: int) -> str:
    return f"ampctl/failed-{node}"
