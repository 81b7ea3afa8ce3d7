"""What a run tells while it goes on: each event once, in ``metrics.jsonl`` and on the screen."""

from __future__ import annotations

import logging
import math
import os
import resource
import sys
from collections.abc import Iterator, Mapping, Sequence
from contextlib import contextmanager, suppress
from io import TextIOWrapper
from pathlib import Path
from typing import Any

import torch

from ampctl import files
from ampctl.checkpoint import disk
from ampctl.checkpoint.background_save import FinishedSave
from ampctl.checkpoint.disk_space import shortage
from ampctl.engine.state import Progress, StepReport
from ampctl.engine.updater import key
from ampctl.errors import first_of
from ampctl.run.folder import LOGS
from ampctl.run.speed import Moment, Speed
from ampctl.track.console import Console
from ampctl.track.metrics import MetricsFile

FLOAT16_MAX = 65504.0
LOW_HEADROOM = 1.0  # doublings

_FORMAT = "%(asctime)s %(levelname)s %(name)s: %(message)s"


class RunLog:
    """Write events of one run: every so many steps one of them, and the last in any case.

    Without ``metrics`` nothing is written: another rank does it.
    """

    def __init__(
        self,
        metrics: MetricsFile | None,
        console: Console,
        *,
        every_steps: int,
        total_steps: int | None,
        device: torch.device,
        scaling: bool,
        seconds_to_save: float | None = None,
        files_kept: int | None = None,
    ) -> None:
        self.console = console
        self._scaling = scaling
        self._metrics = metrics
        self._every = every_steps
        self._total = total_steps
        self._device = device
        self._warned_of_loss = False
        self._warned: set[str] = set()
        self._warned_of_no_items = False
        self._marks: dict[int, tuple[int, Moment]] = {}
        self._unlogged: tuple[StepReport, int, Moment] | None = None
        self._speed = Speed(every_steps)
        self._stalls: dict[int, float] = {}
        self._seconds_to_save = seconds_to_save
        self._files_kept = files_kept

    def begin(self, event: str, step: int, lines: Sequence[str], **fields: Any) -> None:
        """Log that a run starts or resumes."""
        self._write(event, step, **fields)
        self.console.start(lines, step=step, total_steps=self._total)

    def is_due(self, step: int) -> bool:
        """Return whether a step is one to be logged, so that its gradient norm is measured."""
        return step % self._every == 0 or step == self._total

    def go(self, progress: Progress) -> None:
        """Count throughput: from the start on, and after anything that is not training."""
        self._speed.go(progress.step, progress.samples)

    def pause(self) -> None:
        """Count no throughput: what comes is not training."""
        self._speed.pause()

    def mark(self, progress: Progress, epoch: int) -> None:
        """Keep what a ``train`` event needs of this moment; the step's own figures come later."""
        self.console.advance(progress.step)
        self._marks[progress.step] = epoch, self._speed.now(progress.step, progress.samples)

    def report(self, report: StepReport, progress: Progress) -> None:
        """Log a step: a skip always, its figures if the step is one to be logged."""
        if report.skipped:
            names = [name for name, own in report.optimizers.items() if own["skipped"]]
            self._write(
                "skip",
                report.step,
                scale_before=report.scale_before,
                scale_after=report.scale_after,
                consecutive=report.consecutive_skips,
                **({"optimizers": names} if names else {}),
            )
            self.console.skip(
                report.step,
                report.scale_before,
                report.scale_after,
                report.consecutive_skips,
                names,
            )
        elif report.loss is None:
            self._warn_of_no_items(report.step)
        elif not math.isfinite(report.loss) and not self._warned_of_loss:
            self._warned_of_loss = True
            overflow = "; float16 ends at 65504: compute the loss from `model(...).float()`"
            self.console.warn(
                f"step {report.step}: the loss is {report.loss} and every gradient is finite, so "
                "the step was made. Part of the loss is not finite, and no gradient depends on it"
                f"{overflow if self._scaling else ''}"
            )
        mark = self._marks.pop(report.step, None)
        if mark is None:
            return
        self._unlogged = (report, *mark)
        if self.is_due(report.step):
            self.log_last(progress)

    @property
    def unlogged(self) -> StepReport | None:
        """The last step, if there was no ``train`` event of it."""
        return self._unlogged[0] if self._unlogged is not None else None

    def log_last(self, progress: Progress, *, loss: float | None = None) -> None:
        """Write the ``train`` event of the last step, if there was none; ``loss``: of all ranks."""
        if self._unlogged is None:
            return
        (report, epoch, moment), self._unlogged = self._unlogged, None
        samples_per_s, step_s = self._speed.rates(moment)
        fields: dict[str, Any] = {
            "step": report.step,
            "epoch": epoch,
            "loss": report.loss if loss is None else loss,
            "lr": report.lr,
            "grad_norm": report.grad_norm,
            "underflow": report.underflow,
            "headroom": _headroom(report.largest),
            "activation_headroom": _headroom(report.activation),
            "scale": report.scale_after,
            "skipped": progress.skipped,
            "updates": progress.updates,
            **_of_each(report, progress),
            "samples": moment.samples,
            "samples_per_s": samples_per_s,
            "step_ms": None if step_s is None else step_s * 1e3,
            "memory_mb": _memory_mb(self._device),
        }
        self._write("train", **fields)
        self._warn_of_overflow(report)
        # A scale that is always 1 says nothing to a person.
        self.console.train(fields if self._scaling else fields | {"scale": None})

    def _warn_of_no_items(self, step: int) -> None:
        """Warn, once, of a step that changes nothing."""
        if not self._warned_of_no_items and self._metrics is not None:
            self._warned_of_no_items = True
            self.console.warn(
                f"step {step} has no items: no label counts, or the task gave no loss. Such a step "
                "makes no update and is no skip; it is told once"
            )

    def _warn_of_overflow(self, report: StepReport) -> None:
        """Warn, once for each module, before its output overflows."""
        headroom, name = _headroom(report.activation), report.activation_module
        if headroom is None or headroom >= LOW_HEADROOM or name is None or name in self._warned:
            return
        self._warned.add(name)
        where = f"model.{name}" if name else "the model"
        island = f'amp.modules={{"{name}": float32}} or ' if name else ""
        self.console.warn(
            f"step {report.step}: the output of {where} reaches {report.activation:.0f}, and "
            f"float16 ends at {FLOAT16_MAX:.0f}: it is about to overflow. Set "
            f"{island}amp.dtype=bfloat16, or look at why it grows."
        )

    def evaluation(
        self, progress: Progress, epoch: int, metrics: Mapping[str, float], *, best: bool
    ) -> None:
        """Log the metrics of an evaluation."""
        self._write("eval", progress.step, epoch=epoch, **metrics)
        self.console.evaluation(progress.step, metrics, best)

    def stalled(self, step: int, seconds: float) -> None:
        """Take note of how long training stood still for a checkpoint."""
        self._stalls[step] = seconds

    def saved(self, files: Sequence[FinishedSave], run_dir: Path) -> None:
        """Log the checkpoints that are on the disk by now."""
        for saved in files:
            path = saved.path.relative_to(run_dir)
            self._write(
                "checkpoint",
                saved.step,
                path=str(path),
                seconds=self._stalls.pop(saved.step, None),
                bytes=saved.size,
            )
            if saved.gone:
                self.console.warn(
                    f"someone has removed {first_of(saved.gone)} from {saved.path.parent}: the run "
                    f"goes on, and {saved.path.name} is saved"
                )
            self._warn_of_slow_save(saved)
            self._warn_of_little_room(saved)

    def _warn_of_slow_save(self, saved: FinishedSave) -> None:
        """Warn, once, before a save at the last moment is cut off by the launcher."""
        limit = self._seconds_to_save
        if limit is None or saved.seconds <= limit / 2:
            return
        self._seconds_to_save = None
        self.console.warn(
            f"the checkpoint of step {saved.step} took {saved.seconds:.0f} s to write, and "
            f"torchrun kills ranks {limit:g} s after SIGTERM: what is not written by then is lost, "
            "and the run goes on from the one before it. `ampctl train --nproc-per-node N` waits "
            "for it; or set TORCH_ELASTIC_SHUTDOWN_TIMEOUT to the seconds that it needs"
        )

    def _warn_of_little_room(self, saved: FinishedSave) -> None:
        """Warn after the first save, once, if the disk has no room for all that will be kept."""
        kept, self._files_kept = self._files_kept, None
        if kept is not None:
            text = shortage(saved.path.parent, saved.size, kept)
            if text is not None:
                self.console.warn(text)

    def diagnosis(self, step: int, **fields: Any) -> None:
        """Log what is at fault."""
        self._write("diagnosis", step, **fields)

    def stop(self, step: int, reason: str, exit_code: int) -> None:
        """Log how the run ended."""
        self._write("stop", step, reason=reason, exit_code=exit_code)

    def close(self) -> None:
        """Give the screen back and close the file."""
        self.console.close()
        if self._metrics is not None:
            self._metrics.close()

    def _write(self, /, event: str, step: int, **fields: Any) -> None:
        if self._metrics is not None:
            self._metrics.write(event, step, **fields)


def _of_each(report: StepReport, progress: Progress) -> dict[str, float | None]:
    """Return the figures of each of several optimizers, as ``loss/NAME`` and the like."""
    figures: dict[str, float | None] = {}
    for name in progress.optimizer_updates:
        own = report.optimizers.get(name, {})
        figures |= {
            key(what, name): own[what] for what in ("loss", "lr", "grad_norm") if what in own
        }
        figures[key("skipped", name)] = progress.optimizer_skips[name]
        figures[key("updates", name)] = progress.optimizer_updates[name]
    return figures


def _headroom(largest: float | None) -> float | None:
    """Return how often a value could still double before it overflows float16."""
    if not largest or not math.isfinite(largest):
        return None
    return round(math.log2(FLOAT16_MAX / largest), 2)


def _memory_mb(device: torch.device) -> float:
    """Return the peak memory so far, in MiB: of CUDA or XPU, or else of the process."""
    if device.type in ("cuda", "xpu"):
        module = torch.get_device_module(device)
        return float(module.max_memory_allocated(device)) / 2**20
    peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
    return peak / (2**20 if sys.platform == "darwin" else 2**10)


class _LogFile(logging.FileHandler):
    """A log that loses lines where there is no room for them; what matters is told elsewhere."""

    def _open(self) -> TextIOWrapper:
        flags = os.O_WRONLY | os.O_CREAT | os.O_APPEND
        file = files.descriptor(Path(self.baseFilename), flags)
        return os.fdopen(file, "a", encoding="utf-8", errors="replace")

    def handleError(self, record: logging.LogRecord) -> None:  # noqa: N802
        """Print no traceback for a disk that is full; the next event stops the run in words."""
        if not isinstance(sys.exception(), OSError):
            super().handleError(record)


@contextmanager
def log_file(run_dir: Path, rank: int) -> Iterator[None]:
    """Keep what libraries and ampctl log in a file of each rank.

    Raises MachineError where it cannot be written.
    """
    path = run_dir / LOGS / f"rank-{rank}.log"
    try:
        path.parent.mkdir(parents=True, exist_ok=True)  # a node may have a file system of its own
        handler = _LogFile(path)
    except OSError as error:
        raise disk.fault(path, error, 0) from error
    handler.setFormatter(logging.Formatter(_FORMAT))
    root = logging.getLogger()
    root.addHandler(handler)
    try:
        yield
    finally:
        root.removeHandler(handler)
        with suppress(OSError):  # it still holds the lines that found no room
            handler.close()
