"""The command line: commands, options, exit codes and words on the screen.

Nothing here imports torch until a command needs it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ampctl import __version__
from ampctl.cli import checkpoints, recipes, runs, screen, verification
from ampctl.cli.options import Command, Json

app = typer.Typer(
    name="ampctl",
    help="Train PyTorch models in mixed precision from one YAML recipe, and resume them exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)


def _version(asked: bool) -> None:
    if asked:
        typer.echo(f"ampctl {__version__}")
        raise typer.Exit


@app.callback()
def _root(
    version: Annotated[
        bool, typer.Option("--version", callback=_version, is_eager=True, help="Print the version.")
    ] = False,
) -> None:
    """Hold the options that come before a command."""


def env(as_json: Json = False) -> None:
    """Describe the machine, the versions, the devices, and what each precision can do here."""
    with screen.told():
        from ampctl import environment

        facts, rows = environment.collect(), environment.precisions()
        screen.show({**facts, "precisions": rows}, environment.describe(facts, rows), as_json)


app.command(cls=Command)(runs.train)
app.command(cls=Command)(runs.resume)
app.command(cls=Command)(runs.check)
app.command("inspect", cls=Command)(checkpoints.inspect)
app.command("eval", cls=Command)(checkpoints.evaluate)
app.command(cls=Command)(verification.verify)
app.command("export", cls=Command)(checkpoints.export)
app.command(cls=Command)(recipes.show)
app.command(cls=Command)(recipes.schema)
app.command(cls=Command)(env)
app.add_typer(recipes.app, name="recipes")
