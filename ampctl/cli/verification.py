"""The command ``verify``: whether checkpoints are what was saved, and whether a recipe resumes."""

from __future__ import annotations

import os
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Annotated, Any

import typer

from ampctl.cli import screen
from ampctl.cli.options import Json, Overrides
from ampctl.errors import UsageError, as_argument
from ampctl.recipe import builtin

_RECIPES = (".yaml", ".yml")
_CHECKPOINTS = (".pt", ".dist")


def verify(
    source: Annotated[
        str,
        typer.Argument(
            metavar="CHECKPOINT|RUN_DIR",
            help="A checkpoint, or a run's folder for all of its; a recipe with --resume.",
        ),
    ],
    overrides: Overrides = None,
    resume: Annotated[
        bool,
        typer.Option(
            "--resume",
            help="Train a few steps of a RECIPE straight, and stopped and resumed: is it the same?",
        ),
    ] = False,
    steps: Annotated[
        int | None,
        typer.Option(help="With --resume: how many steps.", min=2, show_default="6"),
    ] = None,
    as_json: Json = False,
) -> None:
    """Check checksums, loadability and finiteness of checkpoints; builds and changes nothing."""
    with screen.told():
        if resume:
            _resume(source, overrides or (), steps, as_json)
            return
        others = [each for each in overrides or () if "=" not in each or Path(each).exists()]
        if others:
            raise UsageError(
                "verify takes one checkpoint or run folder at a time: "
                f"`ampctl verify {as_argument(source)}`, then "
                f"`ampctl verify {as_argument(others[0])}`"
            )
        if overrides or steps is not None:
            raise UsageError(
                "KEY=VALUE and --steps are for a recipe: `ampctl verify RECIPE --resume`"
            )
        path = Path(source)
        is_named = source in builtin.builtin_names() and not path.exists()
        if is_named or path.suffix in _RECIPES:
            raise UsageError(
                f"{source} is a recipe: `ampctl verify {as_argument(source)} --resume` tries "
                "whether it resumes exactly; without --resume a checkpoint or a run folder is "
                "verified"
            )
        from ampctl.checkpoint.verify import require_sound
        from ampctl.checkpoint.verify import verify as examine

        with screen.reading("verifying") as shown:
            facts = examine(path, passed=shown.passed)
        screen.show(facts, _lines(facts), as_json)
        require_sound(facts)


def _resume(source: str, overrides: Sequence[str], steps: int | None, as_json: bool) -> None:
    """Prove that a recipe resumes exactly, or name the first thing that differs."""
    if os.path.isdir(source) or Path(source).suffix in _CHECKPOINTS:
        raise UsageError(
            f"{source} is no recipe: `ampctl verify RECIPE --resume` tries a recipe, and "
            f"`ampctl verify {as_argument(source)}` examines what is saved; a run has its recipe "
            "in recipe.yaml"
        )
    from ampctl.exactness import proof

    notify = screen.warn if sys.stderr.isatty() else _unheard
    facts = proof.prove(source, overrides, steps=steps or proof.STEPS, notify=notify)
    stops = " and ".join(f"{stop}" for stop in facts["stops"])
    lines = {"trained": f"{facts['steps']} steps straight, and resumed after step {stops}"}
    lines["verdict"] = "exact" if facts["exact"] else "not exact"
    lines["found"] = facts["found"]
    if not facts["exact"]:
        differing = facts["difference"]["parts"]
        if len(differing) > 1:
            lines["differing"] = ", ".join(differing)
        if facts["largest"]:
            largest = facts["largest"]
            relative = largest["relative"]
            share = f"{relative:.2g}" if isinstance(relative, float) else relative
            lines["largest"] = f"{largest['weight']}, by {share} of its norm"
    advice = [f"advice: {line}" for line in facts.get("advice", ())]
    screen.show(facts, [*screen.aligned(lines), *advice], as_json)
    proof.require_exact(facts)


def _unheard(text: str) -> None:
    """Leave a pipe without words about what is going on."""


def _lines(facts: dict[str, Any]) -> list[str]:
    """Return a line for each file with its verdict, and one for each link and each note."""
    lines = []
    files = facts["files"]
    width = max((len(each["file"]) for each in files), default=0)
    for each in files:
        size = f"{each['bytes']:,} bytes"
        reason = f": {each['reason']}" if each["reason"] else f", {size}"
        if each["verdict"] == "intact" and each["proof"] == "CRC-32":
            reason += "; by its CRC-32 sums alone: it was saved anew, without ampctl's SHA-256"
        lines.append(f"{each['file']:<{width}}  {each['verdict']}{reason}")
    lines += [f"{name} -> {target}" for name, target in facts["links"].items()]
    lines += [f"note: {note}" for note in facts["notes"]]
    count = len(facts["problems"])
    intact = sum(each["verdict"] == "intact" for each in files)
    lines.append(f"{intact} of {len(files)} intact, {count or 'no'} problem{'s'[: count != 1]}")
    return lines
