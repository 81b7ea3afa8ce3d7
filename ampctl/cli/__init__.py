"""The command line: commands, options, exit codes and words on the screen.

Nothing here imports torch until a command needs it.
"""

from __future__ import annotations

from typing import Annotated

import typer

from ampctl import __version__
from ampctl.cli import checkpoints, manual, recipes, runs, screen, verification
from ampctl.cli.options import Command, Json

app = typer.Typer(
    name="ampctl",
    help="Train PyTorch models in mixed precision from one YAML recipe, and resume them exactly.",
    no_args_is_help=True,
    epilog="The manual: ampctl docs",
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


def _see(topic: str) -> str:
    """Return the last line of a command's help, which names a page of the manual."""
    return f"More about this: ampctl docs {topic}"


def env(as_json: Json = False) -> None:
    """Describe the machine, the versions, the devices, and what each precision can do here."""
    with screen.told():
        from ampctl import environment

        facts, rows = environment.collect(), environment.precisions()
        screen.show({**facts, "precisions": rows}, environment.describe(facts, rows), as_json)


app.command(cls=Command, epilog=_see("recipes"))(runs.train)
app.command(cls=Command, epilog=_see("resuming"))(runs.resume)
app.command(cls=Command, epilog=_see("diagnosis"))(runs.check)
app.command("inspect", cls=Command, epilog=_see("checkpoints"))(checkpoints.inspect)
app.command("eval", cls=Command, epilog=_see("checkpoints"))(checkpoints.evaluate)
app.command(cls=Command, epilog=_see("checkpoints"))(verification.verify)
app.command("export", cls=Command, epilog=_see("checkpoints"))(checkpoints.export)
app.command(cls=Command, epilog=_see("recipes"))(recipes.show)
app.command(cls=Command, epilog=_see("reference-recipe"))(recipes.schema)
app.command(cls=Command, epilog=_see("float16-on-a-cpu"))(env)
app.command(cls=Command)(manual.docs)
app.add_typer(recipes.app, name="recipes", epilog=_see("recipes"))
