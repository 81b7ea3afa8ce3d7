"""The CPU that a test sees: one of three, whatever the machine has on which the tests run.

``ampctl.environment`` reads one file to know what a CPU computes natively. ``conftest`` puts
another one in its place, in this process and, by ``startup/sitecustomize.py``, in each interpreter
that a test starts.
"""

from __future__ import annotations

import os
import re
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import pytest

STARTUP = Path(__file__).parent / "startup"
EMULATED = re.compile(r"^warning: dtype-not-in-hardware: .*\n    .*\n", re.MULTILINE)


@dataclass(frozen=True)
class Cpu:
    """A CPU by the half-precision dtypes that it computes in natively."""

    name: str
    flags: str

    @property
    def bfloat16(self) -> bool:
        return "avx512_bf16" in self.flags

    @property
    def float16(self) -> bool:
        return "avx512_fp16" in self.flags

    def rest(self, said: str) -> str:
        """Return what a float16 run said but for the warning of a CPU that lacks it, told once."""
        rest, count = EMULATED.subn("", said)
        assert count == (not self.float16), said
        return rest

    def write(self, file: Path) -> None:
        """Write what Linux would tell of two cores of it."""
        cores = (
            f"processor\t: {core}\nmodel name\t: CPU {self.name}\nflags\t\t: fpu {self.flags}\n"
            for core in range(2)
        )
        file.write_text("\n".join(cores))


WITH_FLOAT16 = Cpu("with float16", "avx2 avx512f avx512_bf16 avx512_fp16")
WITHOUT_FLOAT16 = Cpu("without float16", "avx2 avx512f avx512_bf16")
WITHOUT_EITHER = Cpu("without bfloat16 and float16", "avx2 f16c")


def on_cpus(*cpus: Any) -> pytest.MarkDecorator:
    """Mark a test that runs on these CPUs; it may take the one that it sees as ``cpu``."""
    return pytest.mark.parametrize("cpu", cpus, indirect=True, ids=lambda cpu: cpu.name)


on_each_cpu = on_cpus(WITH_FLOAT16, WITHOUT_FLOAT16, WITHOUT_EITHER)


def python_path(*folders: Path | str) -> str:
    """Return a ``PYTHONPATH`` for the interpreters that a test starts; use it, not a bare one."""
    return os.pathsep.join(f"{folder}" for folder in (STARTUP, *folders))
