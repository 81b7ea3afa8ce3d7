"""How the ranks of one start find each other in a store that earlier starts of the job have used.

Torchelastic's store outlives a restart, with all that ranks which are gone have written there. What
it tells the ranks does not tell one start from another: each node counts its own restarts, and does
not count those for a node that came or went.
"""

from __future__ import annotations

import time
import uuid
from collections.abc import Iterator
from dataclasses import dataclass

from torch.distributed import PrefixStore, Store  # type: ignore[attr-defined]

from ampctl.errors import MachineError, first_of

_PAUSE_S = 0.02
_BEGUN = "ampctl/begun"


@dataclass(frozen=True)
class Rendezvous:
    """The ranks of one start: their own part of the store, and whether the job had begun before.

    ``run_dir`` is the folder that an earlier start of the job has taken, "" where none has.
    """

    store: Store
    run_dir: str
    _whole: Store

    def begin(self, run_dir: str) -> None:
        """Record the run folder of this job for later starts of it."""
        self._whole.set(_BEGUN, run_dir)


def meet(store: Store, rank: int, size: int, *, seconds: float) -> Rendezvous:
    """Wait for all ranks of this start; raise MachineError, naming those that do not come.

    Each rank makes up a word. Rank 0 answers each with the name of the part of the store that they
    use; words of ranks that are gone are answered too, but nobody is there to say so. It waits in
    Python, so that a signal ends it.
    """
    own = uuid.uuid4().hex
    store.set(f"ampctl/word-of-{rank}", own)
    name = _gather(store, own, size, seconds) if rank == 0 else _follow(store, own, rank, seconds)
    before = store.get(_BEGUN).decode() if store.check([_BEGUN]) else ""
    return Rendezvous(PrefixStore(name, store), before, store)


def _gather(store: Store, name: str, size: int, seconds: float) -> str:
    missing, answered = set(range(1, size)), set()
    for _ in _until(seconds):
        for rank in sorted(missing):
            key = f"ampctl/word-of-{rank}"
            word = store.get(key).decode() if store.check([key]) else ""
            if word and word not in answered:
                answered.add(word)
                store.set(f"ampctl/answer-to-{word}", name)
            if store.check([f"{name}/came-{rank}"]):
                missing.discard(rank)
        if not missing:
            store.set(f"{name}/all-came", "")
            return name
    told = first_of([f"{rank}" for rank in sorted(missing)])
    raise MachineError(
        f"{len(missing)} of {size} ranks did not come within {seconds:g} s: rank {told}. See what "
        "was said there; distributed.timeout_minutes is how long ranks wait for each other."
    )


def _follow(store: Store, own: str, rank: int, seconds: float) -> str:
    name = ""
    for _ in _until(seconds):
        if not name and store.check([f"ampctl/answer-to-{own}"]):
            name = store.get(f"ampctl/answer-to-{own}").decode()
            store.set(f"{name}/came-{rank}", "")
        if name and store.check([f"{name}/all-came"]):
            return name
    absent = "the other ranks" if name else "rank 0"
    raise MachineError(
        f"rank {rank} waited {seconds:g} s in vain for {absent}. See what was said there; "
        "distributed.timeout_minutes is how long ranks wait for each other."
    )


def _until(seconds: float) -> Iterator[None]:
    deadline = time.monotonic() + seconds
    while time.monotonic() < deadline:
        yield
        time.sleep(_PAUSE_S)
