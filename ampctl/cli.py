"""The command line: commands, options, exit codes and words on the screen.

Nothing here imports torch until a command needs it.
"""

from __future__ import annotations

import json
import os
import sys
from collections.abc import Iterator
from contextlib import contextmanager
from enum import StrEnum
from pathlib import Path
from typing import Annotated, Any

import typer

from ampctl import __version__
from ampctl.distributed import failure, launch, member
from ampctl.distributed.plan import Options
from ampctl.errors import AmpctlError, InterruptedRunError, UsageError

app = typer.Typer(
    name="ampctl",
    help="Train PyTorch models in mixed precision from one YAML recipe, and resume them exactly.",
    no_args_is_help=True,
    pretty_exceptions_enable=False,
    context_settings={"help_option_names": ["-h", "--help"]},
)
recipes_app = typer.Typer(help="List, show and copy the recipes that come with ampctl.")
app.add_typer(recipes_app, name="recipes")


class Resume(StrEnum):
    """What ``train`` does where the run folder holds a run already."""

    auto = "auto"
    never = "never"


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


@contextmanager
def told() -> Iterator[None]:
    """Tell an error of ours in words on stderr, and end with its exit code.

    A rank leaves its error, of whatever kind, to its launcher, which tells the first of all ranks.
    """
    try:
        with _no_sys_exit():
            yield
    except AmpctlError as error:
        if failure.record(error):
            typer.echo(f"error: {error}", err=True)
        raise typer.Exit(error.exit_code) from error
    except KeyboardInterrupt:
        if failure.record(InterruptedRunError("interrupted")):
            typer.echo("interrupted", err=True)
        raise typer.Exit(InterruptedRunError.exit_code) from None
    except Exception as error:
        if not member.is_rank():
            raise
        if failure.record(error):
            typer.echo(failure.as_traceback(error), err=True)
        raise typer.Exit(AmpctlError.exit_code) from error


@contextmanager
def _no_sys_exit() -> Iterator[None]:
    """Let a run that the user's own code ends not look like one that is done."""
    try:
        yield
    except SystemExit as error:
        raise RuntimeError(f"sys.exit({error.code!r}) was called in the midst of it") from error


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


@app.command()
def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    resume: Annotated[
        Resume,
        typer.Option(
            help="auto: go on from the newest intact checkpoint in --run-dir, or start there."
        ),
    ] = Resume.never,
    quiet: Quiet = False,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    rdzv_backend: RdzvBackend = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    max_restarts: MaxRestarts = None,
) -> None:
    """Train a recipe."""
    with told():
        from ampctl.recipe.load import load_recipe

        meeting = (node_rank, rdzv_backend, rdzv_endpoint, rdzv_id)
        options = Options(nproc_per_node, nnodes, *meeting, max_restarts)
        if resume is Resume.auto and run_dir is None:
            raise UsageError("--resume auto looks for the run in --run-dir: give one")
        loaded = load_recipe(recipe, overrides or ())
        launch.train(
            loaded,
            [recipe, *(overrides or ())],
            options,
            run_dir=run_dir,
            resume=resume is Resume.auto,
            quiet=quiet,
            notify=_warn,
        )


@app.command()
def resume(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT|RUN_DIR", help="A checkpoint, or a run's folder.")
    ],
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir", metavar="DIR", help="A new folder to go on in.", show_default="the run's"
        ),
    ] = None,
    quiet: Quiet = False,
    trust: Annotated[
        bool, typer.Option("--trust", help="Build what the recipe in the checkpoint names.")
    ] = False,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    rdzv_backend: RdzvBackend = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    max_restarts: MaxRestarts = None,
) -> None:
    """Go on with a run from a checkpoint, exactly; nothing else is needed."""
    with told():
        meeting = (node_rank, rdzv_backend, rdzv_endpoint, rdzv_id)
        options = Options(nproc_per_node, nnodes, *meeting, max_restarts)
        launch.resume(
            checkpoint,
            overrides or (),
            options,
            run_dir=run_dir,
            trusted=trust,
            quiet=quiet,
            notify=_warn,
        )


@app.command()
def check(recipe: RecipeArgument, overrides: Overrides = None, as_json: Json = False) -> None:
    """Find what is wrong before any time is spent; trains nothing."""
    with told():
        from ampctl.recipe.load import load_recipe

        loaded = load_recipe(recipe, overrides or ())
        from ampctl.train.check import check_recipe

        facts = check_recipe(loaded)
        shown = {name: value for name, value in facts.items() if name != "findings"}
        _print(facts, [f"{name + ':':<12} {value}" for name, value in shown.items()], as_json)


@app.command()
def show(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    origin: Annotated[
        bool, typer.Option("--origin", help="Say where each value came from.")
    ] = False,
    as_json: Json = False,
) -> None:
    """Print the resolved recipe."""
    with told():
        from ampctl.recipe.load import load_recipe, to_plain

        loaded = load_recipe(recipe, overrides or ())
        if origin:
            width = max(map(len, loaded.origins))
            lines = [f"{key:<{width}}  {where}" for key, where in loaded.origins.items()]
            _print(dict(loaded.origins), lines, as_json)
        else:
            _print(to_plain(loaded.recipe), [loaded.text.rstrip()], as_json)


@app.command()
def schema() -> None:
    """Print the JSON Schema of a recipe, for editors."""
    with told():
        from ampctl.recipe.json_schema import json_schema

        _echo(json.dumps(json_schema(), indent=2))


@app.command()
def env(as_json: Json = False) -> None:
    """Tell the machine, the versions, the devices, and what each precision can do here."""
    with told():
        from ampctl import environment

        facts, rows = environment.collect(), environment.precisions()
        _print({**facts, "precisions": rows}, environment.describe(facts, rows), as_json)


@recipes_app.callback(invoke_without_command=True)
def _recipes(context: typer.Context) -> None:
    if context.invoked_subcommand is None:
        list_recipes()


@recipes_app.command("list")
def list_recipes(as_json: Json = False) -> None:
    """List the built-in recipes."""
    with told():
        from ampctl.recipe import builtin

        found = {name: builtin.describe(name) for name in builtin.builtin_names()}
        width = max(map(len, found), default=0)
        _print(found, [f"{name:<{width}}  {text}" for name, text in found.items()], as_json)


@recipes_app.command("show")
def show_recipe(name: Annotated[str, typer.Argument(help="The recipe's name.")]) -> None:
    """Print a built-in recipe."""
    with told():
        from ampctl.recipe import builtin

        _echo(builtin.builtin_path(name).read_text(encoding="utf-8").rstrip())


@recipes_app.command("copy")
def copy_recipe(
    name: Annotated[str, typer.Argument(help="The recipe's name.")],
    destination: Annotated[
        Path, typer.Argument(metavar="[DEST]", help="A file or a folder.")
    ] = Path("."),
) -> None:
    """Copy a built-in recipe, to be changed; an existing file is left alone."""
    with told():
        from ampctl.recipe import builtin

        source = builtin.builtin_path(name)
        target = destination / source.name if destination.is_dir() else destination
        try:
            with target.open("x", encoding="utf-8") as file:
                file.write(source.read_text(encoding="utf-8"))
        except FileExistsError as error:
            raise UsageError(f"{target} exists already; give another name") from error
        except OSError as error:
            raise UsageError(f"{target} cannot be written: {error.strerror}") from error
        typer.echo(f"{target} written; train it with: ampctl train {target}")


def _print(facts: Any, lines: list[str], as_json: bool) -> None:
    _echo(json.dumps(facts, indent=2, default=str) if as_json else "\n".join(lines))


def _echo(text: str) -> None:
    try:
        typer.echo(text)
    except BrokenPipeError:
        # The reader of a pipe has what it wanted (`ampctl show digits | head`).
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def _warn(text: str) -> None:
    typer.echo(text, err=True)
