"""The command ``verify``: whether checkpoints are what was saved."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

from ampctl.cli import screen
from ampctl.cli.options import Json


def verify(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|RUN_DIR",
            help="A checkpoint, or a run's folder for all of its.",
        ),
    ],
    as_json: Json = False,
) -> None:
    """Check checksums, loadability and finiteness of checkpoints; builds and changes nothing."""
    with screen.told():
        path = Path(source)
        from ampctl.checkpoint.verify import require_sound
        from ampctl.checkpoint.verify import verify as examine

        facts = examine(path, shown=lambda files: screen.bar_over(files, "verifying"))
        screen.show(facts, _lines(facts), as_json)
        require_sound(facts)


def _lines(facts: dict[str, Any]) -> list[str]:
    """Return a line for each file with its verdict, and one for each link and each note."""
    lines = []
    files = facts["files"]
    width = max((len(each["file"]) for each in files), default=0)
    for each in files:
        size = f"{each['bytes']:,} bytes"
        reason = f": {each['reason']}" if each["reason"] else f", {size}"
        lines.append(f"{each['file']:<{width}}  {each['verdict']}{reason}")
    lines += [f"{name} -> {target}" for name, target in facts["links"].items()]
    lines += [f"note: {note}" for note in facts["notes"]]
    count = len(facts["problems"])
    intact = sum(each["verdict"] == "intact" for each in files)
    lines.append(f"{intact} of {len(files)} intact, {count or 'no'} problem{'s'[: count != 1]}")
    return lines
