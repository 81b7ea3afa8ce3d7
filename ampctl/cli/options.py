"""Arguments and options that several commands share."""

from __future__ import annotations

from pathlib import Path
from typing import Annotated, Any

import typer

RecipeArgument = Annotated[
    str, typer.Argument(metavar="RECIPE", help="A recipe file, or the name of a built-in recipe.")
]
Overrides = Annotated[
    list[str] | None,
    typer.Argument(metavar="KEY=VALUE", help="Values that win over the recipe's."),
]
RunDir = Annotated[
    Path | None,
    typer.Option(
        "--run-dir", metavar="DIR", help="The run's folder.", show_default="runs/NAME/TIME"
    ),
]
Quiet = Annotated[bool, typer.Option("--quiet", help="Warnings and the last lines only.")]
CheckpointArgument = Annotated[
    Path,
    typer.Argument(
        metavar="CHECKPOINT|RUN_DIR", help="A checkpoint, or a run's folder for its newest."
    ),
]
Averaged = Annotated[
    bool | None,
    typer.Option(
        "--ema/--raw",
        help="The averaged weights, or those that were trained.",
        show_default="--ema if train.ema_decay was set",
    ),
]
Trust = Annotated[
    bool, typer.Option("--trust", help="Build what the recipe in the checkpoint names.")
]
Json = Annotated[bool, typer.Option("--json", help="Print JSON.")]


def _torchrun(*names: str, metavar: str, help: str) -> Any:
    panel = "Several processes (torchrun's own options)"
    return typer.Option(*names, metavar=metavar, help=help, rich_help_panel=panel)


NprocPerNode = Annotated[
    str | None,
    _torchrun(
        "--nproc-per-node", metavar="N|auto", help="Processes on this node; auto: one for each GPU."
    ),
]
Nnodes = Annotated[
    str | None, _torchrun("--nnodes", metavar="N|MIN:MAX", help="Nodes; each runs this command.")
]
NodeRank = Annotated[
    int | None,
    _torchrun("--node-rank", metavar="N", help="This node's number, for the static backend."),
]
RdzvBackend = Annotated[
    str | None,
    _torchrun("--rdzv-backend", metavar="NAME", help="How nodes meet: c10d (as it is), static."),
]
RdzvEndpoint = Annotated[
    str | None,
    _torchrun("--rdzv-endpoint", metavar="HOST:PORT", help="Where nodes meet: one of them."),
]
RdzvId = Annotated[
    str | None, _torchrun("--rdzv-id", metavar="ID", help="The job's name, the same on each node.")
]
MaxRestarts = Annotated[
    int | None,
    _torchrun(
        "--max-restarts",
        metavar="N",
        help="Starts anew, from the newest checkpoint, after a crash of a process.",
    ),
]
