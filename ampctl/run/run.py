"""One run under way, as the loop and the saves of it know it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampctl import commands
from ampctl.builder.job import Job
from ampctl.checkpoint.index import NONFINITE
from ampctl.checkpoint.shard_writer import ShardWriter
from ampctl.checkpoint.store import Store
from ampctl.distributed.ranks import Ranks
from ampctl.distributed.stop_signal import StopSignal
from ampctl.distributed.watchdog import Watchdog
from ampctl.engine.state import Progress
from ampctl.recipe.load import LoadedRecipe
from ampctl.run.folder import RECIPE
from ampctl.run.init_from import InitFrom
from ampctl.run.log import RunLog
from ampctl.run.restore import Origin
from ampctl.state_dict.host_memory import HostMemory

SCALES_SHOWN = 8


@dataclass
class Run:
    """One run under way: the job, where it is saved and told, and what the loop must remember.

    ``not_finite`` names what of the state was so at the last save, and ``set_aside`` counts how
    many in a row were set aside for that. ``memory``: where a checkpoint's copy of the state waits
    to be written, if training goes on.
    ``step_began`` is when the last step did, ``step_seconds`` how long the host was busy with it.
    ``anew`` is the command that begins as this run has, for one that has saved nothing.
    ``is_savable``: a step was taken, and a checkpoint can hold what it has made. ``is_bound``: its
    passes bring weights into bounds, which was said.
    ``newest``: the newest finite checkpoint, of those that were told.
    """

    job: Job
    run_dir: Path
    store: Store | ShardWriter
    log: RunLog
    stop_signal: StopSignal
    watchdog: Watchdog
    environment: dict[str, Any]
    anew: str = ""
    memory: HostMemory | None = None
    is_savable: bool = False
    is_bound: bool = False
    step_began: float = 0.0
    step_seconds: float = 0.0
    saved_step: int = -1
    newest: Path | None = None
    saved_at: float = field(default_factory=time.monotonic)
    not_finite: list[str] = field(default_factory=list)
    set_aside: int = 0
    windows: deque[tuple[int, list[Any]]] = field(default_factory=lambda: deque(maxlen=2))
    scales: deque[tuple[int, float]] = field(default_factory=lambda: deque(maxlen=SCALES_SHOWN))

    @property
    def progress(self) -> Progress:
        """How far the run has come."""
        return self.job.state.progress

    @property
    def newest_on_disk(self) -> Path | None:
        """The newest finite checkpoint, as far as this rank knows; the disk is not asked."""
        paths = [each.path for each in self.store.saved if NONFINITE not in each.path.name]
        return paths[-1] if paths else self.newest

    @property
    def resume_command(self) -> str:
        """The command that goes on with the run, on as many ranks."""
        return commands.resume(self.run_dir, ranks=self.job.state.ranks.option)


def begun_anew(
    loaded: LoadedRecipe,
    run_dir: Path,
    origin: Origin | None,
    init_from: InitFrom | None,
    ranks: Ranks,
) -> str:
    """Return the command that begins a run as this one has begun, in another folder."""
    if origin is not None:
        beside = commands.beside(run_dir)
        given = loaded.overrides
        return commands.resume(origin.path, given, run_dir=beside, ranks=ranks.option)
    source = init_from.source if init_from else None
    allowed = init_from.allow_missing if init_from else ()
    return commands.train(
        run_dir / RECIPE, init_from=source, allow_missing=allowed, ranks=ranks.option
    )
