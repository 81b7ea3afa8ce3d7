"""Arguments and options that several commands share."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Annotated, Any

import typer
from typer.core import TyperCommand, TyperOption


class Command(TyperCommand):
    """A command that takes no empty words: they are variables of the shell that are not set."""

    def parse_args(self, ctx: Any, args: list[str]) -> list[str]:
        """Refuse an empty argument, or value of an option, by name; then read them."""
        for place, word in enumerate(args):
            if not word.strip() or re.fullmatch(r"--[\w-]+=\s*", word):
                before = args[place - 1] if place and args[place - 1] in self._with_value() else ""
                name = word.partition("=")[0].strip() or before or f"argument {place + 1}"
                raise typer.BadParameter(f"{name} is empty; is a variable of the shell unset?")
        return super().parse_args(ctx, args)

    def _with_value(self) -> set[str]:
        """Return the options that take the next word for their value."""
        options = (each for each in self.params if isinstance(each, TyperOption))
        return {name for each in options if not each.is_flag for name in each.opts}


RecipeArgument = Annotated[
    str,
    typer.Argument(
        metavar="RECIPE|-",
        help="A recipe file, the name of a built-in recipe, or - for standard input.",
    ),
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
    bool, typer.Option("--trust", help="Build whatever the recipe in the checkpoint names.")
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
    _torchrun(
        "--rdzv-backend",
        metavar="NAME",
        help="How nodes find each other: c10d (the default) or static.",
    ),
]
RdzvEndpoint = Annotated[
    str | None,
    _torchrun(
        "--rdzv-endpoint",
        metavar="HOST:PORT",
        help="Where nodes find each other: the host and port of one of them.",
    ),
]
RdzvId = Annotated[
    str | None, _torchrun("--rdzv-id", metavar="ID", help="The job's name, the same on each node.")
]
MaxRestarts = Annotated[
    int | None,
    _torchrun(
        "--max-restarts",
        metavar="N",
        help="How often to start again, from the newest checkpoint, after a process has crashed.",
    ),
]
