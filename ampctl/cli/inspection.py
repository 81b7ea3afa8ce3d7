"""The facts of ``inspect`` in words and rows."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from ampctl.cli.screen import aligned
from ampctl.errors import first_of

_SHOWN = 30
_LONGEST = 500
_VERSIONS = ("ampctl", "torch", "python", "numpy", "device", "hostname", "started")

Facts = Mapping[str, Any]


def lines_of(facts: Facts) -> list[str]:
    """Describe what is in a checkpoint, but for the sizes of its parts."""
    progress = _mapping(facts["progress"])
    name = facts["recipe"]["name"] or "that this version of ampctl cannot read"
    lines = {
        "checkpoint": facts["path"],
        "file": f"{facts['bytes']:,} bytes, format version {facts['version']}",
        "sha256": f"{facts['sha256'] or 'none: it is a folder'}",
        "recipe": f"{name}, digest {facts['recipe']['digest']}",
        "step": _place(progress),
        "updates": f"{progress.get('updates')}; {progress.get('skipped')} steps skipped, "
        f"{progress.get('consecutive_skips')} in a row at the end",
        "trained": f"in {facts['dtype']} on {_ranks(facts['world_size'])}",
        "scale": _scale(_mapping(facts["scaler"])),
    }
    for optimizer, updates in _mapping(progress.get("optimizer_updates")).items():
        skips = _mapping(progress.get("optimizer_skips")).get(optimizer)
        lines[optimizer] = f"{updates} updates, {skips} skipped"
    if progress.get("best") is not None:
        monitor = facts["recipe"]["monitor"] or "unknown"
        best = _figure(progress["best"])
        lines["best"] = f"{monitor} {best} at step {progress.get('best_step')}"
    if progress.get("metrics"):
        figures = _mapping(progress["metrics"]).items()
        lines["metrics"] = "  ".join(f"{name} {_figure(value)}" for name, value in figures)
        lines["metrics"] += f"  (step {progress.get('evaluated_step')})"
    environment = _mapping(facts["environment"])
    found = [f"{name} {environment[name]}" for name in _VERSIONS if environment.get(name)]
    lines["saved with"] = ", ".join(found) or "not told"
    bad = facts["nonfinite"]
    lines["finite"] = f"no: NaN or infinity in {first_of(bad)}" if bad else "yes"
    if facts["strange"]:
        lines["strange"] = f"not plain tensors: {first_of(facts['strange'])}"
    return aligned(lines)


def part_rows(facts: Facts) -> list[list[str]]:
    """Return a row for each part: its name, tensors, values, bytes and values by dtype."""
    rows = []
    for name, part in facts["parts"].items():
        by_dtype = part["values"]
        dtypes = ", ".join(f"{count:,} {dtype}" for dtype, count in by_dtype.items())
        total = sum(by_dtype.values())
        rows.append([name, f"{part['tensors']}", f"{total:,}", f"{part['bytes']:,}", dtypes])
    return rows


def difference_lines(both: Facts) -> list[str]:
    """Describe what differs between two checkpoints, but for the weights that moved."""
    change = both["difference"]
    moved, same = change["moved"], change["same"]
    lines = {"from": both["first"]["path"], "to": both["second"]["path"]}
    for section in ("progress", "scaler", "training"):
        for key, (old, new) in change[section].items():
            label = key.strip("_").replace("_", " ")
            lines[label] = f"{_figure(old)} -> {_figure(new)}"
    lines["recipe"] = "; ".join(change["recipe"]) or "the same"
    lines["weights"] = f"{len(moved)} moved, {same} the same"
    for name in ("appeared", "vanished", "other"):
        if change[name]:
            lines[name] = first_of(change[name], 10)
    bad = both["second"]["nonfinite"]
    if bad:
        lines["not finite"] = first_of(bad)
    return aligned(lines)


def moved_rows(change: Facts) -> list[list[str]]:
    """Return a row for each weight that moved most: its name, relative and absolute change."""
    moved = change["moved"]
    rows = [[r["weight"], _figure(r["relative"]), _figure(r["change"])] for r in moved[:_SHOWN]]
    if len(moved) > _SHOWN:
        rows.append([f"... and {len(moved) - _SHOWN} more; --json has all", "", ""])
    return rows


def _place(progress: Facts) -> str:
    return (
        f"{progress.get('step')}, after {progress.get('batch_in_epoch')} steps of epoch "
        f"{progress.get('epoch')}, {_figure(progress.get('samples'))} samples in all"
    )


def _scale(scaler: Facts) -> str:
    if not scaler.get("enabled", True):
        return "none: this dtype needs no loss scaling"
    return (
        f"{_figure(scaler.get('scale'))}, growth tracker {scaler.get('_growth_tracker')} of "
        f"{scaler.get('growth_interval')}, hysteresis {scaler.get('hysteresis_tracker')} of "
        f"{scaler.get('hysteresis')}"
    )


def _ranks(count: Any) -> str:
    return "1 rank" if count == 1 else f"{count} ranks"


def _figure(value: Any) -> str:
    if isinstance(value, float):
        return f"{value:.4g}" if abs(value) < 1e4 else f"{value:.8g}"
    if isinstance(value, int) and not isinstance(value, bool):
        return f"{value:,}"
    if isinstance(value, Mapping):
        return "  ".join(f"{name} {_figure(item)}" for name, item in value.items())
    text = f"{value}"
    return text if len(text) <= _LONGEST else f"{text[:_LONGEST]}..."


def _mapping(value: Any) -> Facts:
    """Return a mapping; what a damaged file has in its place says nothing."""
    return value if isinstance(value, Mapping) else {}
