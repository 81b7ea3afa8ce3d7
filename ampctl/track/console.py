"""What a person sees while a run trains: a live bar on a terminal, plain lines elsewhere.

Shows what it is given; what is measured, and how often, is the training loop's.
"""

from __future__ import annotations

import math
import os
import sys
import time
from collections.abc import Mapping, Sequence
from numbers import Integral, Real
from typing import TYPE_CHECKING, Any, TextIO, cast

if TYPE_CHECKING:
    from rich.console import Console as Terminal
    from rich.text import Text

REDRAW_SECONDS = 0.25


class Console:
    """Show one run to a person; the bar, while there is one, stays below all other lines.

    Lines go to stdout and warnings to stderr. Quiet leaves the warnings and the last lines.
    `terminal` is where the bar is drawn; by default stdout, if that is a terminal which can.
    Of several ranks the first speaks; the others only warn, with their number. Rich is imported for
    a bar only. Not for several threads.
    """

    def __init__(
        self, *, quiet: bool = False, rank: int = 0, terminal: Terminal | None = None
    ) -> None:
        self._quiet = quiet or rank > 0
        self._rank = rank
        self._terminal = terminal if terminal is not None else _find_terminal()
        self._total: int | None = None
        self._bar: _Bar | None = None
        self._next_draw = math.inf

    def start(self, lines: Sequence[str], *, step: int = 0, total_steps: int | None = None) -> None:
        """Print what is about to run, from which step to which, and open the bar."""
        self._total = total_steps
        self._tell(lines)
        if self._terminal is not None and not self._quiet:
            self._bar = _Bar(self._terminal, step, total_steps)
            self._next_draw = time.monotonic() + REDRAW_SECONDS

    def advance(self, step: int) -> None:
        """Move the bar to a step; costs one look at the clock unless a redraw is due."""
        if time.monotonic() >= self._next_draw and self._bar is not None:
            self._bar.move(step)
            self._next_draw = time.monotonic() + REDRAW_SECONDS

    def train(self, fields: Mapping[str, Any]) -> None:
        """Show the figures of a `train` event; `total_steps` may be among them."""
        self._total = fields.get("total_steps", self._total)
        fields = {**fields, "total_steps": self._total}
        if self._bar is not None:
            self._bar.show(fields)
        else:
            self._tell([train_line(fields)])

    def skip(
        self,
        step: int,
        scale_before: float,
        scale_after: float,
        consecutive: int,
        optimizers: Sequence[str] = (),
    ) -> None:
        """Print that a step was skipped for the non-finite gradient of these optimizers."""
        self._tell([skip_line(step, scale_before, scale_after, consecutive, optimizers)])

    def evaluating(self, total: int | None) -> Evaluating:
        """Return a context in which `advance()` counts the batches of an evaluation."""
        return Evaluating(self._bar, total)

    def evaluation(self, step: int, metrics: Mapping[str, Any], best: bool) -> None:
        """Print the metrics of an evaluation, and whether they are the best so far."""
        self._tell([evaluation_line(step, metrics, best)])

    def note(self, text: str) -> None:
        """Print a note."""
        self._tell([text])

    def warn(self, text: str) -> None:
        """Print a warning on stderr, quiet or not."""
        line = f"warning: rank {self._rank}: {text}" if self._rank else f"warning: {text}"
        if self._bar is not None and sys.stderr.isatty():  # the same screen: keep the bar whole
            self._print(line, style="yellow")
        else:
            _print_plain(line, sys.stderr)

    def finish(self, lines: Sequence[str]) -> None:
        """Close the bar and tell how the run ended, quiet or not."""
        self.close()
        self._tell(lines, even_quiet=True)

    def close(self) -> None:
        """Take the bar away and give the terminal back; closing twice is allowed."""
        if self._bar is not None:
            self._bar.close()
            self._bar = None
            self._next_draw = math.inf

    def _tell(self, lines: Sequence[str], *, even_quiet: bool = False) -> None:
        if not self._quiet or (even_quiet and not self._rank):
            for line in lines:
                self._print(line)

    def _print(self, line: str, style: str = "") -> None:
        if self._terminal is None:
            _print_plain(line, sys.stdout)
        else:  # above the bar, if there is one: Rich sees to that
            text = _marked(_encodable(line, self._terminal.encoding), style)
            self._terminal.print(text, soft_wrap=True)


class Evaluating:
    """The progress of one evaluation, shown while its context is open."""

    def __init__(self, bar: _Bar | None, total: int | None) -> None:
        self._bar = bar
        self._total = total
        self._done = 0
        self._next_draw = math.inf if bar is None else 0.0

    def __enter__(self) -> Evaluating:
        return self

    def advance(self) -> None:
        """Count one batch; costs one look at the clock unless a redraw is due."""
        self._done += 1
        if time.monotonic() >= self._next_draw and self._bar is not None:
            self._bar.move_evaluation(self._done, self._total)
            self._next_draw = time.monotonic() + REDRAW_SECONDS

    def __exit__(self, *exception: object) -> None:
        if self._bar is not None:
            self._bar.end_evaluation()


class _Bar:
    """Two lines at the bottom of a terminal: progress, and the last figures below it."""

    def __init__(self, terminal: Terminal, step: int, total: int | None) -> None:
        from rich.live import Live
        from rich.progress import (
            BarColumn,
            MofNCompleteColumn,
            Progress,
            TextColumn,
            TimeRemainingColumn,
        )

        # Drawn from the training thread alone: a thread that redraws would contend with it.
        self._progress = Progress(
            TextColumn("{task.description}"),
            BarColumn(),
            MofNCompleteColumn(),
            TimeRemainingColumn(),
            console=terminal,
            auto_refresh=False,
        )
        self._training = self._progress.add_task("training", completed=step, total=total)
        self._evaluation = self._progress.add_task("evaluating", visible=False, total=None)
        self._live = Live(
            self._progress,
            console=terminal,
            auto_refresh=False,
            transient=True,
            redirect_stderr=sys.stderr.isatty(),  # else it is a file, and stays one
        )
        self._next_show = 0.0
        self._live.start(refresh=True)

    def move(self, step: int) -> None:
        self._progress.update(self._training, completed=step)
        self._live.refresh()

    def show(self, fields: Mapping[str, Any]) -> None:
        from rich.console import Group

        description = "training" if fields.get("epoch") is None else f"epoch {fields['epoch']}"
        self._progress.update(
            self._training,
            completed=fields["step"],
            total=fields["total_steps"],
            description=description,
        )
        figures = _marked("  ".join(figure_words(fields)))
        figures.no_wrap, figures.overflow = True, "ellipsis"
        # Events may come at every step of 300 us, so that drawing each is out of the question.
        due = time.monotonic() >= self._next_show
        self._live.update(Group(self._progress, figures), refresh=due)
        if due:
            self._next_show = time.monotonic() + REDRAW_SECONDS

    def move_evaluation(self, done: int, total: int | None) -> None:
        self._progress.update(self._evaluation, completed=done, total=total, visible=True)
        self._live.refresh()

    def end_evaluation(self) -> None:
        self._progress.reset(self._evaluation, visible=False)
        self._live.refresh()

    def close(self) -> None:
        self._live.stop()


def train_line(fields: Mapping[str, Any]) -> str:
    """Word a `train` event as one line; a figure that is missing or None is left out."""
    step, total = fields["step"], fields.get("total_steps")
    place = f"step {step}" if total is None else f"step {step:>{len(str(total))}}/{total}"
    epoch = [] if fields.get("epoch") is None else [f"epoch {fields['epoch']}"]
    return "  ".join([place, *epoch, *figure_words(fields)])


def figure_words(fields: Mapping[str, Any]) -> list[str]:
    """Word the figures of a `train` event, those that it has, in as little room as they need.

    Nothing is said of skips until there is one.
    """
    words = []
    several = {name: value for name, value in fields.items() if name.startswith("loss/")}
    if several:
        words += [f"{name} {significant(value, 4)}" for name, value in several.items()]
    elif (loss := fields.get("loss")) is not None:
        words.append(f"loss {significant(loss, 4)}")
    if (lr := fields.get("lr")) is not None:
        words.append(f"lr {lr:.1e}")
    if (norm := fields.get("grad_norm")) is not None:
        words.append(f"grad {significant(norm, 2)}")
    if (scale := fields.get("scale")) is not None:
        words.append(f"scale {scale:.8g}")
    if skipped := fields.get("skipped"):
        words.append(f"skipped {skipped}")
    if (speed := fields.get("samples_per_s")) is not None:
        words.append(f"{speed:.1f}/s" if speed < 10 else f"{speed:,.0f}/s")
    return words


def skip_line(
    step: int,
    scale_before: float,
    scale_after: float,
    consecutive: int,
    optimizers: Sequence[str] = (),
) -> str:
    """Word a `skip` event; the scale is told only if it moved."""
    moved = (
        f", scale {scale_before:.8g} -> {scale_after:.8g}" if scale_before != scale_after else ""
    )
    row = f", {consecutive} in a row" if consecutive > 1 else ""
    of = f" of {', '.join(optimizers)}" if optimizers else ""
    return f"step {step}  skipped: non-finite gradient{of}{moved}{row}"


def evaluation_line(step: int, metrics: Mapping[str, Any], best: bool) -> str:
    """Word an `eval` event, with each `eval/NAME` as NAME."""
    words = [f"{name.removeprefix('eval/')} {_figure(value)}" for name, value in metrics.items()]
    return "  ".join([f"step {step}  eval", *words, *(["best so far"] if best else [])])


def significant(value: float, digits: int) -> str:
    """Round to so many significant digits, but never to fewer than whole numbers below a million.

    `nan`, `inf` and `-inf` are shown as such.
    """
    text = f"{value:#.{digits}g}".removesuffix(".")
    return f"{value:.0f}" if "e+" in text and abs(value) < 1e6 else text


def _figure(value: Any) -> str:
    if isinstance(value, Real) and not isinstance(value, Integral):
        return significant(float(value), 4)
    return f"{value}"


def _find_terminal() -> Terminal | None:
    """Return stdout as a terminal for a bar, or None if it is a file or cannot move the cursor."""
    if not sys.stdout.isatty() or os.environ.get("TERM", "dumb") in ("dumb", "unknown"):
        return None
    from rich.console import Console as RichConsole

    return RichConsole(file=cast(TextIO, _MayHangUp(sys.stdout)))


class _MayHangUp:
    """A terminal to draw on, which goes on taking what is written when it has been closed."""

    def __init__(self, stream: TextIO) -> None:
        self._stream = stream

    def __getattr__(self, name: str) -> Any:
        return getattr(self._stream, name)

    def write(self, text: str) -> int:
        try:
            return self._stream.write(text)
        except OSError:
            silence(self._stream)
            return len(text)

    def flush(self) -> None:
        try:
            self._stream.flush()
        except OSError:
            silence(self._stream)


def _marked(line: str, style: str = "") -> Text:
    """Return the line for a terminal, with figures that are not finite in red."""
    from rich.text import Text

    text = Text(line, style)
    text.highlight_regex(r"(?<=\s)-?(?:nan|inf)\b", "bold red")
    return text


def _print_plain(line: str, stream: TextIO) -> None:
    try:
        print(_encodable(line, stream.encoding), file=stream, flush=True)
    except BrokenPipeError:
        # Whoever read has gone (`ampctl train ... | head`); the run goes on without them.
        silence(stream)
    except OSError as error:  # a file on a full disk, a terminal that was hung up
        silence(stream)
        if stream is not sys.stderr:
            told = f"warning: nothing more is told here ({error.strerror}), and the run goes on"
            _print_plain(f"{told}: metrics.jsonl has it all", sys.stderr)


def silence(stream: TextIO) -> None:
    """Discard what is printed from here on; else it would fail again at the very end."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), stream.fileno())


def _encodable(line: str, encoding: str | None) -> str:
    """Spell out the letters that a stream cannot show, which would end the run otherwise."""
    encoding = encoding or "utf-8"
    return line.encode(encoding, "backslashreplace").decode(encoding)
