"""Check ampctl on one device: parity, skips, resume, findings, synchronisations and speed.

    scripts/gpu_check [--device cuda|cuda:N|cpu] [--tiny] [--json FILE] [--only NAME] [--wheels DIR]

One table, and JSON beside it; exit 1 if a check failed. ``--device cpu --tiny`` is its rehearsal.
Start it by ``scripts/gpu_check``, which puts this checkout on the path.
"""

from __future__ import annotations

import argparse
import gc
import json
import os
import re
import sys
import time
import traceback
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from datetime import datetime
from pathlib import Path
from typing import Any

import torch
from gpu_checks import features, findings, parity, parts, processes, ranks, steps
from gpu_checks.check import Check, CheckFailed, CheckSkipped, Setup
from gpu_checks.speed import gpt124m, resnet50, speed
from rich.console import Console
from rich.table import Column, Table
from rich.text import Text

from ampctl.environment import collect

ROOT = Path(__file__).resolve().parents[1]
COLOURS = {"pass": "green", "fail": "red", "skipped": "yellow"}

CHECKS: Mapping[str, Check] = {
    **{f"parity-{dtype}": parity.parity(dtype) for dtype in parts.DTYPES},
    "skips": steps.skips,
    "buffers": steps.buffers,
    "host-copy": steps.host_copy,
    "resume": processes.resume,
    "bce": findings.bce,
    "bfloat16-gradients": findings.bfloat16_gradients,
    "sync": steps.sync,
    **{name: features.feature(name) for name in features.FEATURES},
    "compile": features.compiled,
    "compile-graphs": features.compiled_graphs,
    "asynchronous-saves": features.saves,
    "one-rank": ranks.one_rank,
    "two-ranks-ddp": ranks.two_ranks("ddp"),
    "two-ranks-fsdp": ranks.two_ranks("fsdp"),
    **{f"resnet50-{dtype}": speed(resnet50, dtype) for dtype in parts.DTYPES},
    **{f"gpt124m-{dtype}": speed(gpt124m, dtype) for dtype in parts.DTYPES},
}


@dataclass(frozen=True)
class Row:
    """How one check ended."""

    name: str
    result: str
    seconds: float
    detail: str
    figures: Mapping[str, Any] = field(default_factory=dict)
    traceback: str | None = None


def run_check(name: str, check: Check, setup: Setup) -> Row:
    """Run one check; whatever it raises, the others shall go on."""
    begin = time.perf_counter()
    figures: Mapping[str, Any] = {}
    trace = None
    try:
        finding = check(setup)
        result, detail, figures = "pass", finding.detail, finding.figures
    except CheckSkipped as reason:
        result, detail = "skipped", f"{reason}"
    except CheckFailed as failure:
        result, detail = "fail", f"{failure}"
    except Exception as error:
        result, detail = "fail", f"{type(error).__name__}: {error}"
        trace = traceback.format_exc()
    torch.use_deterministic_algorithms(False)  # recipes of checks set it
    gc.collect()  # what the check held on the device shall be free for the next
    if setup.device.type == "cuda":
        torch.cuda.empty_cache()
    return Row(name, result, round(time.perf_counter() - begin, 2), detail, figures, trace)


def table(rows: Sequence[Row]) -> Table:
    """Lay out the rows for a person."""
    laid_out = Table("check", "result", Column("s", justify="right"), "what was found")
    for row in rows:
        colour = COLOURS[row.result]
        cells = Text(row.result, style=colour), f"{row.seconds:.1f}", Text(row.detail)
        laid_out.add_row(row.name, *cells)
    return laid_out


def options_of(argv: Sequence[str] | None) -> argparse.Namespace:
    """Read the command line."""
    parser = argparse.ArgumentParser(
        prog="scripts/gpu_check",
        description=__doc__.splitlines()[0],
        epilog="--wheels DIR: install what this Python lacks from the wheels there, offline",
    )
    parser.add_argument("--device", type=device, default=torch.device("cuda"))
    parser.add_argument("--tiny", action="store_true", help="small models, few steps: a rehearsal")
    parser.add_argument(
        "--json", type=Path, metavar="FILE", help="default: runs/gpu_check-TIME.json"
    )
    parser.add_argument(
        "--only", action="append", metavar="NAME", help="a check, or how several names begin"
    )
    options = parser.parse_args(argv)
    unknown = [only for only in options.only or () if not chosen([only])]
    if unknown:
        parser.error(f"no check is called {unknown[0]}; there are {', '.join(CHECKS)}")
    count = torch.cuda.device_count()
    if options.device.type == "cuda" and (options.device.index or 0) >= count:
        parser.error(
            f"--device {options.device}: torch finds {count} CUDA devices here; "
            "--device cpu --tiny is the rehearsal"
        )
    return options


def device(text: str) -> torch.device:
    """Read a device; only those that the checks know."""
    if not re.fullmatch(r"cpu|cuda(:\d+)?", text):
        raise argparse.ArgumentTypeError(f"{text!r} is not one of cuda, cuda:N, cpu")
    return torch.device(text)


def chosen(only: Sequence[str] | None) -> list[str]:
    """Return the names of the checks to run, in their order."""
    return [name for name in CHECKS if only is None or name.startswith(tuple(only))]


def main(argv: Sequence[str] | None = None) -> int:
    """Run the checks, print the table, write the JSON; return the exit code."""
    options = options_of(argv)
    # cuBLAS reads it once, at its first use; parity and resuming need it.
    os.environ.setdefault("CUBLAS_WORKSPACE_CONFIG", ":4096:8")
    file = options.json or ROOT / "runs" / f"gpu_check-{datetime.now():%Y%m%d-%H%M%S}.json"
    setup = Setup(options.device, options.tiny)
    begin = time.perf_counter()
    rows = []
    for name in chosen(options.only):
        rows.append(run_check(name, CHECKS[name], setup))
        print(f"{name}: {rows[-1].result}, {rows[-1].seconds:.1f} s", file=sys.stderr, flush=True)
    seconds = time.perf_counter() - begin
    failed = [row.name for row in rows if row.result == "fail"]
    facts = {
        "device": f"{options.device}",
        "tiny": options.tiny,
        "seconds": round(seconds, 1),
        "failed": failed,
        "checks": [asdict(row) for row in rows],
        "environment": collect(f"{options.device}"),
    }
    file.parent.mkdir(parents=True, exist_ok=True)
    file.write_text(json.dumps(facts, indent=1) + "\n", encoding="utf-8")
    Console().print(table(rows))
    print(f"{len(rows)} checks, {len(failed)} failed, {seconds:.0f} s; figures: {file}")
    return 1 if failed else 0


if __name__ == "__main__":
    sys.exit(main())
