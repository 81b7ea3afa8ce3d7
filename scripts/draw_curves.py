"""Draw a run's loss and loss scale as an SVG picture, from its ``metrics.jsonl``.

    python scripts/draw_curves.py RUN_DIR OUT.svg

Above: training loss of each logged step and evaluation loss, on a logarithmic axis. Below: the loss
scale, in powers of two; a red line through both marks a skipped step.
"""

from __future__ import annotations

import math
import sys
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any
from xml.sax.saxutils import escape

from ampctl.track.metrics import read_metrics

WIDTH, LEFT, RIGHT = 760, 62, 16
LOSS, SCALE = (34, 236), (276, 376)  # top and bottom of each panel
HEIGHT = 414
BLUE, ORANGE, GREEN, RED, GREY = "#1f6feb", "#d9730d", "#1a7f37", "#cf222e", "#6e7781"

Points = Sequence[tuple[float, float]]


class Panel:
    """One pair of axes: steps across, logarithms of values up."""

    def __init__(self, top: int, bottom: int, last_step: int, values: Sequence[float]) -> None:
        self.top, self.bottom, self.last_step = top, bottom, last_step
        logs = [math.log2(value) for value in values]
        self.low, self.high = min(logs) - 0.3, max(logs) + 0.3

    def x(self, step: float) -> float:
        """Return where a step stands."""
        return LEFT + (WIDTH - LEFT - RIGHT) * step / self.last_step

    def y(self, value: float) -> float:
        """Return where a value stands."""
        part = (math.log2(value) - self.low) / (self.high - self.low)
        return self.bottom - part * (self.bottom - self.top)

    def curve(self, points: Points, colour: str, *, dots: bool = False) -> str:
        """Return a line through the points."""
        places = [(self.x(step), self.y(value)) for step, value in points]
        text = " ".join(f"{x:.1f},{y:.1f}" for x, y in places)
        line = f'<polyline points="{text}" fill="none" stroke="{colour}" stroke-width="1.6"/>'
        marks = [f'<circle cx="{x:.1f}" cy="{y:.1f}" r="2.6" fill="{colour}"/>' for x, y in places]
        return "\n".join([line, *(marks if dots else [])])

    def grid(self, ticks: Sequence[tuple[float, str]]) -> str:
        """Return the frame, and a grey line with its label for each tick."""
        right = WIDTH - RIGHT
        parts = [
            f'<rect x="{LEFT}" y="{self.top}" width="{right - LEFT}" '
            f'height="{self.bottom - self.top}" fill="none" stroke="{GREY}"/>'
        ]
        for value, label in ticks:
            if self.low <= math.log2(value) <= self.high:
                y = self.y(value)
                parts.append(
                    f'<line x1="{LEFT}" y1="{y:.1f}" x2="{right}" y2="{y:.1f}" '
                    f'stroke="{GREY}" stroke-opacity="0.25"/>'
                )
                parts.append(words(LEFT - 6, y + 4, label, anchor="end"))
        return "\n".join(parts)


def words(x: float, y: float, text: str, *, colour: str = GREY, anchor: str = "start") -> str:
    """Return a piece of text."""
    place = f'x="{x:.1f}" y="{y:.1f}" text-anchor="{anchor}"'
    return f'<text {place} fill="{colour}">{escape(text)}</text>'


def draw(run_dir: Path) -> str:
    """Return the picture of a run."""
    events = read_metrics(run_dir / "metrics.jsonl")
    train = [event for event in events if event["event"] == "train"]
    losses = positive((event["step"], event["loss"]) for event in train)
    evaluated = positive(
        (event["step"], event["eval/loss"]) for event in events if event["event"] == "eval"
    )
    scales = steps_of_scale(events)
    skips = [event["step"] for event in events if event["event"] == "skip"]
    last = max(event["step"] for event in events)
    scales = [(0, scales[0][1]), *scales, (last, scales[-1][1])]
    loss = Panel(*LOSS, last, [value for _, value in [*losses, *evaluated]])
    scale = Panel(*SCALE, last, [value for _, value in scales])
    decades = [(10.0**n, f"{10.0**n:g}") for n in range(-8, 5)]
    powers = [(2.0**n, f"{2.0**n:.0f}") for n in range(0, 40)]
    parts = [
        f'<svg xmlns="http://www.w3.org/2000/svg" viewBox="0 0 {WIDTH} {HEIGHT}" '
        f'width="{WIDTH}" height="{HEIGHT}" font-family="sans-serif" font-size="12">',
        f'<rect width="{WIDTH}" height="{HEIGHT}" fill="white"/>',
        words(LEFT, 22, "training loss", colour=BLUE),
        words(LEFT + 90, 22, "evaluation loss", colour=ORANGE),
        words(LEFT + 196, 22, "skipped step", colour=RED),
        words(LEFT, 264, "loss scale", colour=GREEN),
        loss.grid(decades),
        scale.grid(powers),
        *(
            f'<line x1="{loss.x(step):.1f}" y1="{panel.top}" x2="{loss.x(step):.1f}" '
            f'y2="{panel.bottom}" stroke="{RED}" stroke-opacity="0.6"/>'
            for step in skips
            for panel in (loss, scale)
        ),
        loss.curve(losses, BLUE),
        loss.curve(evaluated, ORANGE, dots=True) if evaluated else "",
        scale.curve(scales, GREEN),
        *(words(loss.x(s), 392, str(s), anchor="middle") for s in range(0, last + 1, tick(last))),
        words((LEFT + WIDTH - RIGHT) / 2, 408, "step", anchor="middle"),
        "</svg>",
    ]
    return "\n".join(part for part in parts if part) + "\n"


def positive(points: Iterable[tuple[int, float | str]]) -> Points:
    """Leave out what a logarithmic axis cannot show; "nan" and "inf" are written as text."""
    numbers = [(step, float(value)) for step, value in points]
    return [(step, value) for step, value in numbers if math.isfinite(value) and value > 0]


def steps_of_scale(events: Sequence[dict[str, Any]]) -> Points:
    """Return the corners of the scale's stairs."""
    corners: list[tuple[float, float]] = []
    for event in events:
        value = {"train": "scale", "skip": "scale_after"}.get(event["event"])
        if value is None:
            continue
        step, now = event["step"], float(event[value])
        before = float(event["scale_before"]) if event["event"] == "skip" else None
        previous = before or (corners[-1][1] if corners else now)
        corners += [(step, previous), (step, now)]
    return corners


def tick(last: int) -> int:
    """Return a round distance for about seven marks."""
    rough = last / 7
    size = 10 ** math.floor(math.log10(max(rough, 1)))
    return int(next(n * size for n in (1, 2, 5, 10) if n * size >= rough))


def main() -> None:
    """Draw what the command line names."""
    if len(sys.argv) != 3:
        sys.exit("usage: python scripts/draw_curves.py RUN_DIR OUT.svg")
    run_dir, out = Path(sys.argv[1]), Path(sys.argv[2])
    out.write_text(draw(run_dir), encoding="utf-8")
    print(f"{out} written")


if __name__ == "__main__":
    main()
