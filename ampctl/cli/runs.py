"""The commands that train: ``train``, ``resume``, and ``check``, which only tries."""

from __future__ import annotations

from enum import StrEnum
from pathlib import Path
from typing import Annotated

import typer

from ampctl.cli import screen
from ampctl.cli.options import (
    Json,
    MaxRestarts,
    Nnodes,
    NodeRank,
    NprocPerNode,
    Overrides,
    Quiet,
    RdzvBackend,
    RdzvEndpoint,
    RdzvId,
    RecipeArgument,
    RunDir,
    Trust,
)
from ampctl.errors import UsageError
from ampctl.launcher import launch
from ampctl.launcher.plan import Options, refuse_shared_pipe


class Resume(StrEnum):
    """What ``train`` does where the run folder holds a run already."""

    auto = "auto"
    never = "never"


def train(
    recipe: RecipeArgument,
    overrides: Overrides = None,
    run_dir: RunDir = None,
    resume: Annotated[
        Resume,
        typer.Option(
            help="auto: continue from the newest intact checkpoint in --run-dir, or start there; "
            "never: refuse a folder that holds a run."
        ),
    ] = Resume.never,
    init_from: Annotated[
        Path | None,
        typer.Option(
            metavar="CHECKPOINT",
            help="Start a new run from the weights of a checkpoint, a run, a .safetensors file or "
            "a state dict of torch.save.",
        ),
    ] = None,
    allow_missing: Annotated[
        list[str] | None,
        typer.Option(
            metavar="GLOB",
            help="With --init-from: weights that may be missing, not fit, or not be in the model.",
        ),
    ] = None,
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
    with screen.told():
        from ampctl.recipe.load import load_recipe

        meeting = (node_rank, rdzv_backend, rdzv_endpoint, rdzv_id)
        options = Options(nproc_per_node, nnodes, *meeting, max_restarts)
        if resume is Resume.auto and run_dir is None:
            raise UsageError("--resume auto looks for the run in --run-dir: give one")
        if allow_missing and init_from is None:
            raise UsageError("--allow-missing is about the weights of --init-from: give both")
        refuse_shared_pipe(recipe)
        loaded = load_recipe(recipe, overrides or ())
        launch.train(
            loaded,
            options,
            run_dir=run_dir,
            resume=resume is Resume.auto,
            quiet=quiet,
            notify=screen.warn,
            init_from=init_from,
            allow_missing=allow_missing or (),
        )


def resume(
    checkpoint: Annotated[
        Path, typer.Argument(metavar="CHECKPOINT|RUN_DIR", help="A checkpoint, or a run's folder.")
    ],
    overrides: Overrides = None,
    run_dir: Annotated[
        Path | None,
        typer.Option(
            "--run-dir",
            metavar="DIR",
            help="A new folder to continue in.",
            show_default="the run's",
        ),
    ] = None,
    quiet: Quiet = False,
    trust: Trust = False,
    nproc_per_node: NprocPerNode = None,
    nnodes: Nnodes = None,
    node_rank: NodeRank = None,
    rdzv_backend: RdzvBackend = None,
    rdzv_endpoint: RdzvEndpoint = None,
    rdzv_id: RdzvId = None,
    max_restarts: MaxRestarts = None,
) -> None:
    """Continue a run from a checkpoint, exactly; nothing else is needed."""
    with screen.told():
        meeting = (node_rank, rdzv_backend, rdzv_endpoint, rdzv_id)
        options = Options(nproc_per_node, nnodes, *meeting, max_restarts)
        launch.resume(
            checkpoint,
            overrides or (),
            options,
            run_dir=run_dir,
            trusted=trust,
            quiet=quiet,
            notify=screen.warn,
        )


def check(recipe: RecipeArgument, overrides: Overrides = None, as_json: Json = False) -> None:
    """Find what is wrong before any time is spent; trains nothing."""
    with screen.told():
        from ampctl.recipe.load import load_recipe

        loaded = load_recipe(recipe, overrides or ())
        from ampctl.doctor.check import check_recipe

        facts = check_recipe(loaded)
        shown = {name: value for name, value in facts.items() if name != "findings"}
        screen.show(facts, [f"{name + ':':<12} {value}" for name, value in shown.items()], as_json)
