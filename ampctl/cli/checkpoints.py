"""The commands about a checkpoint: ``inspect``, ``eval`` and ``export``."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ampctl.cli import screen
from ampctl.cli.inspection import difference_lines, lines_of, moved_rows, part_rows
from ampctl.cli.options import (
    Averaged,
    CheckpointArgument,
    Json,
    Nnodes,
    NodeRank,
    NprocPerNode,
    Overrides,
    RdzvBackend,
    RdzvEndpoint,
    RdzvId,
    Trust,
)
from ampctl.errors import UsageError
from ampctl.launcher import launch
from ampctl.launcher.plan import Options


class Dtype(StrEnum):
    """What the floating tensors of an exported file can be."""

    float32 = "float32"
    bfloat16 = "bfloat16"
    float16 = "float16"


def inspect(
    checkpoint: CheckpointArgument,
    other: Annotated[
        Path | None,
        typer.Argument(metavar="[OTHER]", help="A second one: describe what differs in it."),
    ] = None,
    recipe: Annotated[
        bool, typer.Option("--recipe", help="Print the recipe inside, and nothing else.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Describe a checkpoint, or what differs between two; builds nothing."""
    with screen.told():
        if recipe and (other is not None or as_json):
            raise UsageError("--recipe prints the recipe of one checkpoint alone")
        from ampctl.checkpoint.contents import describe, recipe_text
        from ampctl.checkpoint.difference import difference
        from ampctl.checkpoint.store import load

        with screen.reading("reading") as shown:
            found = load(checkpoint, notify=shown.warning, look=True, passed=shown.passed)
        if recipe:
            screen.echo(recipe_text(found))
            return
        facts = describe(found)
        if other is None:
            screen.show(facts, lines_of(facts), as_json)
            if not as_json:
                screen.table(("part", "tensors", "values", "bytes", "dtypes"), part_rows(facts))
            return
        with screen.reading("reading") as shown:
            second = load(other, notify=shown.warning, look=True, passed=shown.passed)
        change = difference(found, second)
        both = {"first": facts, "second": describe(second), "difference": change}
        screen.show(both, difference_lines(both), as_json)
        if not as_json and change["moved"]:
            screen.table(("weight", "relative", "change"), moved_rows(change))


def evaluate(
    checkpoint: CheckpointArgument,
    overrides: Overrides = None,
    ema: Averaged = None,
    as_json: Json = False,
    trust: Trust = False,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    rdzv_backend: RdzvBackend = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
) -> None:
    """Evaluate a checkpoint on data.eval, as training does it; writes nothing."""
    with screen.told():
        meeting = (node_rank, rdzv_backend, rdzv_endpoint, rdzv_id)
        facts = launch.evaluate(
            checkpoint,
            overrides or (),
            Options(nproc_per_node, nnodes, *meeting),
            ema=ema,
            trusted=trust,
            flags=["--json"] if as_json else [],
            notify=screen.warning,
            shown=screen.progress,
        )
        if facts is None:  # the first rank tells it
            return
        ranks = f" on {facts['world_size']} ranks" if facts["world_size"] > 1 else ""
        stored = facts["stored"] or {}
        figures = {
            name: f"{value}" + (f" (in training {stored[name]})" if name in stored else "")
            for name, value in facts["metrics"].items()
        }
        lines = {
            "checkpoint": f"{facts['checkpoint']}, step {facts['step']}",
            "weights": "averaged (EMA)" if facts["weights"] == "ema" else "as trained (raw)",
            "evaluated": f"{facts['samples']:,} samples in {facts['dtype']} ({facts['reason']}) "
            f"on {facts['device']}{ranks}",
            **figures,
        }
        screen.show(facts, screen.aligned(lines), as_json)


def export(
    checkpoint: CheckpointArgument,
    out: Annotated[
        Path,
        typer.Argument(metavar="OUT", help="NAME.safetensors, or NAME.pt for a state dict."),
    ],
    ema: Averaged = None,
    dtype: Annotated[
        Dtype | None,
        typer.Option(help="The dtype of floating tensors.", show_default="as they were saved"),
    ] = None,
    force: Annotated[bool, typer.Option("--force", help="Replace OUT if it is there.")] = False,
    as_json: Json = False,
) -> None:
    """Write the weights alone, in one file that other tools read; builds nothing."""
    with screen.told():
        from ampctl.checkpoint.export import export as write

        with screen.reading("reading") as shown:
            facts = write(
                checkpoint,
                out,
                ema=ema,
                dtype=None if dtype is None else dtype.value,
                force=force,
                notify=shown.warning,
                passed=shown.passed,
            )
        lines = {
            "checkpoint": f"{facts['checkpoint']}, step {facts['step']}",
            "weights": "averaged (EMA)" if facts["weights"] == "ema" else "as trained (raw)",
            "written": f"{facts['file']}: {facts['tensors']} tensors, {facts['values']:,} values "
            f"in {', '.join(facts['dtypes'])}, {facts['bytes']:,} bytes",
        }
        if facts["tied"]:
            tied = ", ".join(f"{name} is {kept}" for name, kept in facts["tied"].items())
            lines["tied"] = f"{tied}; one tensor holds both"
        screen.show(facts, screen.aligned(lines), as_json)
