"""Which checkpoints of a run are kept: the newest and the best of those that are finite."""

from __future__ import annotations

from collections.abc import Sequence

from ampctl.checkpoint.index import Entry
from ampctl.monitor import Mode, is_better, monitored


def ranked(entries: Sequence[Entry], monitor: str, mode: Mode) -> list[Entry]:
    """Return the finite entries with an evaluation that counts, best first, then earliest."""
    having = [
        e for e in entries if e.finite and is_better(monitored(e.metrics, monitor), None, mode)
    ]
    return sorted(having, key=lambda e: e.metrics[monitor], reverse=mode == "max")


def retained(
    entries: Sequence[Entry], *, keep_last: int, keep_best: int, monitor: str, mode: Mode
) -> list[Entry]:
    """Return the entries to keep, in their order, which is that of saving.

    The newest ``keep_last`` and the best ``keep_best`` of the finite ones, and the newest other.
    """
    finite = [e for e in entries if e.finite]
    others = [e for e in entries if not e.finite]
    kept = {e.file for e in [*finite[-keep_last:], *others[-1:]]}
    kept |= {e.file for e in ranked(finite, monitor, mode)[:keep_best]}
    return [e for e in entries if e.file in kept]


def newest(entries: Sequence[Entry]) -> Entry | None:
    """Return the finite entry that was saved last, if there is one."""
    return next((e for e in reversed(entries) if e.finite), None)
