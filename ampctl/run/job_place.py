"""A process's place in its job: the ranks it has joined, and what the job has begun before."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path

from ampctl.distributed import ranks as job
from ampctl.distributed.env import choose_device, use_device
from ampctl.distributed.launched import is_restarted
from ampctl.distributed.ranks import Ranks
from ampctl.distributed.rendezvous import Rendezvous
from ampctl.distributed.watchdog import Watchdog
from ampctl.recipe.load import LoadedRecipe
from ampctl.run.folder import new_run_dir


class Begun:
    """Whether the launcher has started this job before, and in which run folder."""

    def __init__(self, meeting: Rendezvous | None, ranks: Ranks) -> None:
        self._meeting = meeting
        self.run_dir = Path(meeting.run_dir) if meeting and meeting.run_dir else None
        # A node that has come late knows nothing of it.
        (before,) = ranks.largest(float(self.run_dir is not None or is_restarted()))
        self.before = bool(before)

    def mark(self, run_dir: Path) -> None:
        """Note, for a start anew, that the run folder is the job's from here on."""
        if self._meeting is not None:
            self._meeting.begin(f"{run_dir}")


@dataclass(frozen=True)
class Place:
    """The ranks of the job, what it has begun before, and who of them is missing."""

    ranks: Ranks
    begun: Begun
    watchdog: Watchdog

    def folder(self, loaded: LoadedRecipe, run_dir: Path | None) -> Path:
        """Settle the run's folder on all ranks: that of the job, or one that rank 0 makes."""
        run_dir = run_dir or self.begun.run_dir
        if run_dir is None and self.ranks.is_first:
            run_dir = new_run_dir(loaded.recipe.name)
        return self.ranks.of_first(run_dir or Path())


@contextmanager
def joined(loaded: LoadedRecipe) -> Iterator[Place]:
    """Join the other processes of the job, if there are any, while the context is open."""
    ranks, config = job.from_environment(), loaded.recipe.distributed
    device = choose_device(loaded.recipe.train.device, ranks)
    if ranks.size > 1:
        use_device(device)
    minutes = config.timeout_minutes
    with job.joined(ranks, backend=config.backend, device=device, minutes=minutes) as meeting:
        # A connection of its own: what waits in the store does not hold up who asks it.
        store = meeting.store.clone() if meeting is not None and ranks.size > 1 else None
        watchdog = Watchdog(ranks, store, minutes, device)
        with watchdog.open():
            yield Place(ranks, Begun(meeting, ranks), watchdog)
