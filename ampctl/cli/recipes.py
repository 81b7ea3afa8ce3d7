"""The commands about recipes: ``show``, ``schema``, and the recipes that come with ampctl."""

from __future__ import annotations

import json
import os
from pathlib import Path
from typing import Annotated

import typer

from ampctl import commands
from ampctl.cli import screen
from ampctl.cli.options import Command, Json, Overrides, RecipeArgument
from ampctl.errors import UsageError

app = typer.Typer(help="List, show and copy the recipes that come with ampctl.")


def show(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Print where each value came from.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the resolved recipe."""
    with screen.told():
        from ampctl.recipe.load import load_recipe, to_plain

        loaded = load_recipe(recipe, overrides or ())
        if origin:
            width = max(map(len, loaded.origins))
            lines = [f"{key:<{width}}  {where}" for key, where in loaded.origins.items()]
            screen.show(dict(loaded.origins), lines, as_json)
        else:
            screen.show(to_plain(loaded.recipe), [loaded.text.rstrip()], as_json)


def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    with screen.told():
        from ampctl.recipe.json_schema import json_schema

        screen.echo(json.dumps(json_schema(), indent=2))


@app.callback(invoke_without_command=True)
def _recipes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_recipes()


@app.command("list", cls=Command)
def list_recipes(as_json: Json = False) -> None:
    """List the built-in recipes."""
    with screen.told():
        from ampctl.recipe import builtin

        found = {name: builtin.describe(name) for name in builtin.builtin_names()}
        width = max(map(len, found), default=0)
        screen.show(found, [f"{name:<{width}}  {text}" for name, text in found.items()], as_json)


@app.command("show", cls=Command)
def show_recipe(name: Annotated[str, typer.Argument(help="The recipe's name.")]) -> None:
    """Print a built-in recipe."""
    with screen.told():
        from ampctl.recipe import builtin

        screen.echo(builtin.builtin_path(name).read_text(encoding="utf-8").rstrip())


@app.command("copy", cls=Command)
def copy_recipe(
    name: Annotated[str, typer.Argument(help="The recipe's name.")],
    destination: Annotated[
        Path, typer.Argument(metavar="[DEST]", help="A file or a folder.")
    ] = Path("."),
) -> None:
    """Copy a built-in recipe, to be changed; an existing file is left alone."""
    with screen.told():
        from ampctl.recipe import builtin

        source = builtin.builtin_path(name)
        target = destination / source.name if os.path.isdir(destination) else destination
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(source.read_text(encoding="utf-8"))
        except FileExistsError as error:
            raise UsageError(f"{target} exists already; give another name") from error
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}") from error
        typer.echo(f"{target} written; train it with: {commands.train(target)}")
