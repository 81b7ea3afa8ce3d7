"""One run under way, as the loop and the saves of it know it."""

from __future__ import annotations

import time
from collections import deque
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from ampctl.build import Job
from ampctl.checkpoint.elsewhere import Elsewhere
from ampctl.checkpoint.store import Store
from ampctl.distributed.attendance import Attendance
from ampctl.distributed.heed import Heed
from ampctl.errors import as_argument
from ampctl.host_memory import HostMemory
from ampctl.state import Progress
from ampctl.train.log import RunLog

SCALES_SHOWN = 8


@dataclass
class Run:
    """One run under way: the job, where it is saved and told, and what the loop must remember.

    ``not_finite`` names what of the state was so at the last save, and ``set_aside`` counts how
    many in a row were set aside for that. ``memory``: where a checkpoint's copy of the state waits
    to be written, if training goes on.
    ``step_began`` is when the last step did, ``step_seconds`` how long the host was busy with it.
    ``is_savable``: a step was taken, and a checkpoint can hold what it has made. ``is_bound``: its
    passes bring weights into bounds, which was said.
    """

    job: Job
    run_dir: Path
    store: Store | Elsewhere
    log: RunLog
    heed: Heed
    attendance: Attendance
    environment: dict[str, Any]
    memory: HostMemory | None = None
    is_savable: bool = False
    is_bound: bool = False
    step_began: float = 0.0
    step_seconds: float = 0.0
    saved_step: int = -1
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
    def resume_command(self) -> str:
        """The command that goes on with the run, on as many ranks."""
        return f"ampctl resume {as_argument(self.run_dir)}{self.job.state.ranks.option}"
