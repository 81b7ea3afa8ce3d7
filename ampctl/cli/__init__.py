"""The command line: commands, options, exit codes and words on the screen.

Nothing here imports torch until a command needs it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ampctl import __version__
from ampctl.cli import checkpoints, recipes, runs, screen, verification
from ampctl.cli.options import Json

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
    """Tell the machine, the versions, the devices, and what each precision can do here."""
    with screen.told():
        from ampctl import environment

        facts, rows = environment.collect(), environment.precisions()
        screen.show({**facts, "precisions": rows}, environment.describe(facts, rows), as_json)


app.command()(runs.train)
app.command()(runs.resume)
app.command()(runs.check)
app.command("inspect")(checkpoints.inspect)
app.command("eval")(checkpoints.evaluate)
app.command()(verification.verify)
app.command("export")(checkpoints.export)
app.command()(recipes.show)
app.command()(recipes.schema)
app.command()(env)
app.add_typer(recipes.app, name="recipes")
