"""Runs first in every interpreter that a test starts: it sees the CPU of the test, not this one."""

import contextlib
import os
from pathlib import Path

with contextlib.suppress(ImportError, KeyError):  # an interpreter without ampctl, or no test's
    from ampctl import environment

    environment.CPUINFO = Path(os.environ["CPUINFO_OF_TESTS"])
