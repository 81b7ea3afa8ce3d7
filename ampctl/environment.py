"""Facts about this machine: versions, devices, git commit, and how it does each precision.

Only reads; which precision a run takes is decided where the run is built.
"""

from __future__ import annotations

import os
import platform
import socket
import subprocess
import sys
from collections.abc import Mapping, Sequence
from datetime import datetime
from pathlib import Path
from typing import Any, Literal, get_args

Precision = Literal["float32", "tf32", "bfloat16", "float16"]
Support = Literal["native", "emulated", "none"]
Verdict = tuple[Support, str]
"""How well a device does a precision, and why in words."""
CPUINFO = Path("/proc/cpuinfo")
"""Where Linux describes the CPU: the only place from which its features are read."""


def collect(device: str | None = None, *, with_git: bool = True) -> dict[str, Any]:
    """Return the facts that are stored with a run, as plain types.

    `device` is the one that the run uses, if there is a run. A fact that cannot be had is None.
    ``with_git``: ask git of the current folder, whose settings can make it run any program.
    Memory is in bytes; `started` is local time in ISO 8601.
    """
    import numpy
    import torch

    from ampctl import __version__

    return {
        "ampctl": __version__,
        "python": platform.python_version(),
        "torch": str(torch.__version__),
        "cuda": torch.version.cuda,
        "hip": torch.version.hip,
        "cudnn": _cudnn(),
        "numpy": numpy.__version__,
        "platform": platform.platform(),
        "hostname": socket.gethostname(),
        "cpu": {
            "model": _cpuinfo().get("model name") or platform.processor() or platform.machine(),
            "cores": usable_cores(),
            "capability": torch.backends.cpu.get_cpu_capability(),
        },
        "devices": _accelerators(),
        "device": device,
        "git": _git() if with_git else None,
        "command": list(sys.argv),
        "started": datetime.now().astimezone().isoformat(timespec="seconds"),
    }


def precisions() -> list[dict[str, str]]:
    """Describe how each device type of this machine does each precision.

    One row for each pair, with `device`, `precision`, `support` (native, emulated or none) and
    `reason`.
    """
    rows = []
    for device_type in _device_types():
        for precision in get_args(Precision):
            support, reason = _support(device_type, precision)
            rows.append(
                {
                    "device": device_type,
                    "precision": precision,
                    "support": support,
                    "reason": reason,
                }
            )
    return rows


def _cudnn() -> int | None:
    """Return the version of cuDNN where it is used; to ask elsewhere would load all of it."""
    import torch

    if not torch.cuda.is_available():
        return None
    version: int | None = torch.backends.cudnn.version()  # type: ignore[no-untyped-call]
    return version


def bfloat16_is_native(device_type: str) -> tuple[bool, str]:
    """Return whether this machine's devices of a type compute in bfloat16, and why."""
    support, reason = _support(device_type, "bfloat16")
    return support == "native", reason


def float16_is_native(device_type: str) -> tuple[bool, str]:
    """Return whether this machine's devices of a type compute in float16, and why."""
    support, reason = _support(device_type, "float16")
    return support == "native", reason


def describe(facts: Mapping[str, Any], rows: Sequence[Mapping[str, str]]) -> list[str]:
    """Lay out the results of `collect` and `precisions` as aligned lines for a person."""
    cpu, git = facts["cpu"], facts["git"]
    builds = [f"CUDA {facts['cuda']}" if facts["cuda"] else ""]
    builds += [f"ROCm {facts['hip']}" if facts["hip"] else ""]
    builds += [f"cuDNN {facts['cudnn']}" if facts["cudnn"] else ""]
    build = ", ".join(part for part in builds if part)
    table = [
        ("ampctl", facts["ampctl"]),
        ("python", facts["python"]),
        ("torch", facts["torch"] + (f" ({build})" if build else "")),
        ("numpy", facts["numpy"]),
        ("platform", facts["platform"]),
        ("host", facts["hostname"]),
        ("cpu", f"{cpu['model']}, {cpu['cores']} usable cores, {cpu['capability']}"),
    ]
    for found in facts["devices"]:
        memory = f"{found['memory'] / 2**30:.1f} GiB" if found["memory"] else ""
        capability = f"capability {found['capability']}" if found["capability"] else ""
        words = [found["name"], memory, capability]
        table.append((found["device"], ", ".join(word for word in words if word)))
    if git is None:
        table.append(("git", "no commit: this folder is in no repository"))
    else:
        table.append(("git", git["commit"] + (" and changes" if git["dirty"] else "")))
    table += [("command", " ".join(facts["command"])), ("started", facts["started"])]
    lines = _aligned(table)
    heading = [("device", "precision", "support", "reason")]
    cells = [(row["device"], row["precision"], row["support"], row["reason"]) for row in rows]
    return [*lines, "", *_aligned(heading + cells)]


def _aligned(table: Sequence[tuple[str, ...]]) -> list[str]:
    widths = [max(len(row[column]) for row in table) for column in range(len(table[0]))]
    return [
        "  ".join(cell.ljust(width) for cell, width in zip(row, widths, strict=True)).rstrip()
        for row in table
    ]


def _cpu_support(precision: Precision, flags: frozenset[str] | None) -> Verdict:
    """Judge a CPU by the feature flags of its kernel; None: they cannot be read."""
    if precision == "float32":
        return "native", "every CPU has it"
    if precision == "tf32":
        return "none", "a format of tensor cores"
    if flags is None:
        return "emulated", "this system does not tell the features of its CPU; taken as without"
    if precision == "bfloat16":
        names = {"amx_bf16": "AMX-BF16", "avx512_bf16": "AVX512-BF16", "bf16": "Arm BF16"}
        cost = "converted to float32 and back"
    else:
        names = {"amx_fp16": "AMX-FP16", "avx512_fp16": "AVX512-FP16", "asimdhp": "Arm FP16"}
        cost = "10 to 150 times slower than float32, for rehearsal only"
    found = [name for flag, name in names.items() if flag in flags]
    if found:
        return "native", f"this CPU has {' and '.join(found)}"
    return "emulated", f"this CPU has none of {', '.join(names.values())}: {cost}"


def _cuda_support(precision: Precision, capability: tuple[int, int]) -> Verdict:
    """Judge an NVIDIA GPU by its compute capability."""
    here = f"compute capability {capability[0]}.{capability[1]}"
    if precision == "float32":
        return "native", "every GPU has it"
    if precision == "float16":
        if capability >= (7, 0):
            return "native", f"{here} has float16 tensor cores (7.0 and above)"
        return "emulated", f"{here} has no tensor cores (7.0 and above have): little or no gain"
    if capability >= (8, 0):
        return "native", f"{here} has {precision} tensor cores (8.0 and above)"
    if precision == "bfloat16":
        return "emulated", f"{here}: converted to float32 and back (8.0 and above compute in it)"
    return "none", f"{here}: tensor cores have it from 8.0 on"


def _support(device_type: str, precision: Precision) -> Verdict:
    """Judge the devices of a type here; of several unlike GPUs, the one that can do least."""
    import torch

    if device_type not in _device_types():
        return "none", f"this machine has no {device_type} device"
    if device_type == "cpu":
        return _cpu_support(precision, _cpu_flags())
    if device_type == "cuda":
        if torch.version.hip:
            return _rocm_support(precision)
        count = torch.cuda.device_count()
        return _cuda_support(
            precision, min(torch.cuda.get_device_capability(index) for index in range(count))
        )
    if device_type == "mps":
        if precision == "tf32":
            return "none", "a format of tensor cores"
        return "native", "a type of Metal since macOS 14"
    return _xpu_support(precision)


def _rocm_support(precision: Precision) -> Verdict:
    # torch reports tf32 on some AMD GPUs only, and by no public query.
    if precision == "tf32":
        return "none", "torch does not tell whether this AMD GPU has it"
    return "native", "torch takes every AMD GPU that it supports to have it"


def _xpu_support(precision: Precision) -> Verdict:
    import torch

    if precision == "bfloat16" and not torch.xpu.is_bf16_supported(including_emulation=False):
        return "emulated", "this Intel GPU has no bfloat16 conversions"
    if precision == "tf32" and not torch.xpu.is_tf32_supported():
        return "none", "this Intel GPU has no matrix units"
    return "native", "this Intel GPU has it"


def _device_types() -> list[str]:
    import torch

    present = {
        "cpu": True,
        "cuda": torch.cuda.is_available(),
        "mps": torch.backends.mps.is_available(),
        "xpu": torch.xpu.is_available(),
    }
    return [name for name, available in present.items() if available]


def _accelerators() -> list[dict[str, Any]]:
    """List every device but the CPU: its name, memory in bytes and capability, where it tells."""
    import torch

    found: list[dict[str, Any]] = []

    def add(device: str, name: str, memory: int, capability: str | None = None) -> None:
        found.append({"device": device, "name": name, "memory": memory, "capability": capability})

    if torch.cuda.is_available():
        for index in range(torch.cuda.device_count()):
            gpu = torch.cuda.get_device_properties(index)
            add(f"cuda:{index}", gpu.name, gpu.total_memory, f"{gpu.major}.{gpu.minor}")
    if torch.backends.mps.is_available():
        add("mps", "Apple GPU", torch.mps.recommended_max_memory())
    if torch.xpu.is_available():
        for index in range(torch.xpu.device_count()):
            xpu = torch.xpu.get_device_properties(index)
            add(f"xpu:{index}", xpu.name, xpu.total_memory)
    return found


def _cpuinfo() -> dict[str, str]:
    """Return the entries that Linux gives of the first core; empty on other systems."""
    try:
        text = CPUINFO.read_text(encoding="utf-8", errors="replace")
    except OSError:
        return {}
    first_core = text.split("\n\n", 1)[0]
    pairs = (line.split(":", 1) for line in first_core.splitlines() if ":" in line)
    return {name.strip(): value.strip() for name, value in pairs}


def _cpu_flags() -> frozenset[str] | None:
    info = _cpuinfo()
    flags = info.get("flags") or info.get("Features")  # x86 or Arm
    return frozenset(flags.split()) if flags else None


def usable_cores() -> int:
    """Count the cores that this process may run on, which a cluster often limits."""
    if hasattr(os, "sched_getaffinity"):
        return len(os.sched_getaffinity(0))
    return os.cpu_count() or 1


def _git() -> dict[str, Any] | None:
    """Return the commit of the current folder and whether tracked files differ from it.

    None without git, outside a repository, before the first commit and after five seconds.
    """
    command = ["git", "--no-optional-locks", "status", "--porcelain=v2", "--branch"]
    try:
        status = subprocess.run(
            [*command, "--untracked-files=no"],
            stdin=subprocess.DEVNULL,
            capture_output=True,
            timeout=5,
            check=True,
        )
    except (OSError, subprocess.SubprocessError):
        return None
    lines = status.stdout.decode(errors="replace").splitlines()
    commits = [line.split()[-1] for line in lines if line.startswith("# branch.oid ")]
    if not commits or commits[0] == "(initial)":
        return None
    return {"commit": commits[0], "dirty": any(not line.startswith("#") for line in lines)}
