"""What every test runs under, whatever machine and shell it is started from; no state is left."""

from __future__ import annotations

import os
import re
import signal
import subprocess
import time
from collections.abc import Iterator
from pathlib import Path
from types import FrameType
from typing import Any

import pytest
import torch
from cpus import WITH_FLOAT16, Cpu, python_path
from hypothesis import settings

from ampctl import environment

# What a shell, a terminal, a CI service or a launcher of jobs says of itself is not for the tests.
FOREIGN = re.compile(
    r"LC_\w+|LANGUAGE|COLUMNS|LINES|NO_COLOR|\w*FORCE_COLOR|CLICOLOR\w*|PY_COLORS|COLORTERM|CI|"
    r"GITHUB_ACTIONS|RANK|WORLD_SIZE|(LOCAL|GROUP|ROLE)_\w+|MASTER_(ADDR|PORT)|"
    r"(SLURM|OMPI|PMI|PMIX|PET|TORCHELASTIC|GIT)_\w+|PYTHONSAFEPATH|PYTHONWARNINGS|PYTHONUTF8"
)
DEADLINE_S = 120.0
FIXED = {
    "LC_ALL": "C.UTF-8",
    "TZ": "UTC",
    "TERM": "xterm",
    "GIT_CONFIG_GLOBAL": os.devnull,
    "GIT_CONFIG_NOSYSTEM": "1",
}
for name in filter(FOREIGN.fullmatch, list(os.environ)):
    del os.environ[name]
os.environ |= FIXED
time.tzset()
os.umask(0o022)

settings.register_profile("ampctl", deadline=None, print_blob=True)
settings.load_profile("ampctl")


@pytest.fixture(autouse=True, scope="session")
def _one_thread() -> None:
    # Two threads on two shared cores make tiny float16 runs several times slower.
    os.environ["OMP_NUM_THREADS"] = "1"
    torch.set_num_threads(1)


@pytest.fixture(autouse=True, scope="session")
def _cpuinfo(tmp_path_factory: pytest.TempPathFactory) -> Path:
    file = tmp_path_factory.mktemp("cpu") / "cpuinfo"
    WITH_FLOAT16.write(file)
    environment.CPUINFO = file
    paths = filter(None, [os.environ.get("PYTHONPATH")])
    os.environ |= {"CPUINFO_OF_TESTS": f"{file}", "PYTHONPATH": python_path(*paths)}
    return file


@pytest.fixture(autouse=True)
def _environment() -> Iterator[None]:
    """Keep what ampctl puts into the environment from the next test."""
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ |= before


@pytest.fixture(autouse=True)
def cpu(request: pytest.FixtureRequest, _cpuinfo: Path) -> Iterator[Cpu]:
    """The CPU that the test sees; one with both half-precision dtypes, unless `on_each_cpu`."""
    seen = getattr(request, "param", WITH_FLOAT16)
    seen.write(_cpuinfo)
    yield seen
    WITH_FLOAT16.write(_cpuinfo)


@pytest.fixture(autouse=True)
def _own_state_home(
    tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("XDG_STATE_HOME", str(tmp_path_factory.mktemp("state")))


@pytest.fixture
def folder(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    """An empty current folder."""
    monkeypatch.chdir(tmp_path)
    return tmp_path


@pytest.fixture
def deadline() -> Iterator[None]:
    """End a test that would never end, or would take all day."""

    def late(number: int, frame: FrameType | None) -> None:
        pytest.fail(f"it has not ended after {DEADLINE_S:g} s")

    before = signal.signal(signal.SIGALRM, late)
    signal.setitimer(signal.ITIMER_REAL, DEADLINE_S)
    yield
    signal.setitimer(signal.ITIMER_REAL, 0)
    signal.signal(signal.SIGALRM, before)


@pytest.fixture
def mount(folder: Path) -> Iterator[Any]:
    """Mount a tmpfs of its own as ``disk`` with the options given."""
    disk = folder / "disk"
    disk.mkdir()
    mounted = []

    def mount(options: str) -> Path:
        command = ["mount", "-t", "tmpfs", "-o", options, "tmpfs", disk]
        done = subprocess.run(command, capture_output=True, text=True)
        if done.returncode:
            pytest.skip(f"this user may not mount a tmpfs: {done.stderr.strip()}")
        mounted.append(disk)
        return disk

    yield mount
    for path in mounted:
        subprocess.run(["umount", path], check=True)
