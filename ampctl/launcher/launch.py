"""A recipe and a number of processes: train here, or start that many ranks and wait for them.

What must be right before any rank starts is checked here, once; `plan` says how many there are,
`agent` has them, `ampctl.run.worker` what each does. Nothing imports torch until then.
"""

from __future__ import annotations

import os
import tempfile
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ampctl import commands
from ampctl.distributed import failure
from ampctl.distributed.launched import LAUNCHER, STARTS
from ampctl.errors import UsageError
from ampctl.launcher.plan import Options, Plan, plan_for, refuse_in_rank, with_variables
from ampctl.launcher.srun import become_rank

if TYPE_CHECKING:
    from ampctl.checkpoint.contents import Facts
    from ampctl.data.loader import EvalData
    from ampctl.recipe.load import LoadedRecipe

_CPP_LOG_LEVEL = "TORCH_CPP_LOG_LEVEL"

Notify = Callable[[str], None]


def train(
    loaded: LoadedRecipe,
    options: Options,
    *,
    run_dir: Path | None,
    resume: bool,
    quiet: bool,
    notify: Notify,
    init_from: Path | None = None,
    allow_missing: Sequence[str] = (),
) -> None:
    """Train a recipe here, or in ranks that each read it, from where it was read or was sent.

    Raises UsageError and MachineError for options that cannot be, RankFailedError for a rank that
    failed, and what :func:`ampctl.run.worker.train` raises. ``notify`` is told of restarts.
    ``init_from``: a checkpoint whose weights a new run starts from.
    """
    from ampctl.recipe.reading import STDIN  # with yaml, which --help does without

    options = with_variables(options)
    become_rank(options, notify)
    _import_torch(options)
    plan = plan_for(options, loaded.recipe)
    if plan is None:
        from ampctl.run import worker
        from ampctl.run.init_from import InitFrom

        first = InitFrom(init_from, tuple(allow_missing)) if init_from else None
        worker.train(loaded, run_dir=run_dir, resume=resume, quiet=quiet, init_from=first)
        return
    if run_dir is None and plan.nodes > 1 and options.max_restarts:
        raise UsageError(
            "--max-restarts on several nodes goes on from the checkpoints in --run-dir: give one "
            "that all nodes can read"
        )
    with _run_folder(run_dir, loaded.recipe.name, plan, resume=resume) as where:
        flags = [*_if_any("--run-dir", where), *_if(resume, "--resume=auto")]
        flags += _if_any("--init-from", init_from)
        flags += [f"--allow-missing={glob}" for glob in allow_missing]
        words = [loaded.source or STDIN, *loaded.overrides]
        argv = ["train", *flags, *_if(quiet, "--quiet"), "--", *words]
        with _sent(loaded.sent):
            _start(plan, argv, notify, lambda: _way_on(where, plan))


def resume(
    source: Path,
    overrides: Sequence[str],
    options: Options,
    *,
    run_dir: Path | None,
    trusted: bool,
    quiet: bool,
    notify: Notify,
) -> None:
    """Go on from a checkpoint here or in ranks. Raises as :func:`train`, and CheckpointError."""
    refuse_in_rank(options)
    options = with_variables(options)
    become_rank(options, notify)
    _import_torch(options)
    plan = None
    if options.given():  # without any, the worker alone reads the checkpoint
        from ampctl.run.restore import read

        found, _, loaded = read(source, overrides, trusted=trusted, notify=_unheard, in_parts=True)
        plan = plan_for(options, loaded.recipe)
    if plan is None:
        from ampctl.run import worker

        worker.resume(source, overrides, run_dir=run_dir, trusted=trusted, quiet=quiet)
        return
    goes_on = run_dir is None or run_dir == found.run_dir
    name = loaded.recipe.name
    with _run_folder(run_dir or found.run_dir, name, plan, resume=goes_on) as where:
        flags = [*_if_any("--run-dir", where), *_if(trusted, "--trust"), *_if(quiet, "--quiet")]
        argv = ["resume", *flags, "--", f"{source}", *overrides]
        _start(plan, argv, notify, lambda: _way_on(where, plan))


def evaluate(
    source: Path,
    overrides: Sequence[str],
    options: Options,
    *,
    ema: bool | None,
    trusted: bool,
    flags: Sequence[str],
    notify: Notify,
    shown: Callable[[EvalData], Iterable[Any]],
) -> Facts | None:
    """Evaluate a checkpoint here or in ranks, of which the first tells the outcome itself.

    ``flags`` are those of the command line that say how. Returns what
    :func:`ampctl.run.from_checkpoint.evaluate_checkpoint` does, or None where ranks did it.
    """
    refuse_in_rank(options)
    options = with_variables(options)
    become_rank(options, notify)
    _import_torch(options)
    plan = None
    if options.given():
        from ampctl.run.from_checkpoint import require_split
        from ampctl.run.restore import read

        _, _, loaded = read(source, overrides, trusted=trusted, notify=_unheard, in_parts=True)
        require_split(loaded)
        plan = plan_for(options, loaded.recipe)
    if plan is None:
        from ampctl.run.from_checkpoint import evaluate_checkpoint

        return evaluate_checkpoint(
            source, overrides, ema=ema, trusted=trusted, notify=notify, shown=shown
        )
    which = [] if ema is None else ["--ema" if ema else "--raw"]
    words = ["eval", *which, *_if(trusted, "--trust"), *flags, "--", f"{source}", *overrides]
    _start(plan, words, notify, lambda: "Run the command again: an evaluation changes nothing.")
    return None


def _unheard(text: str) -> None:
    """Leave it to rank 0, which reads the checkpoint too, to say this."""


@contextmanager
def _run_folder(
    run_dir: Path | None, name: str, plan: Plan, *, resume: bool
) -> Iterator[Path | None]:
    """Settle the run folder once for all ranks; on several nodes rank 0 makes a new one."""
    from ampctl.run import folder

    if run_dir is not None or plan.nodes > 1:
        # A node may come late, or come back, when the run is there already: rank 0 knows.
        if run_dir is not None and not resume and plan.nodes == 1:
            folder.refuse_to_overwrite(run_dir)
        yield run_dir
        return
    made = folder.new_run_dir(name)
    try:
        yield made
    finally:
        folder.discard_unused(made)


def _start(plan: Plan, argv: Sequence[str], notify: Notify, way_on: Callable[[], str]) -> None:
    """Start ranks and wait for them; ``way_on`` says what can be done about a rank that is lost."""
    from ampctl.launcher import agent

    cores = len(os.sched_getaffinity(0))
    variables = {
        LAUNCHER: f"{os.getpid()}",
        STARTS: "0",
        # Torchrun's own choice is 1, which leaves cores idle where the work is on the CPU.
        "OMP_NUM_THREADS": os.environ.get("OMP_NUM_THREADS")
        or f"{max(1, cores // plan.processes)}",
    }
    if plan.nodes > 1 and _CPP_LOG_LEVEL not in os.environ:
        # Below that it tells of each address that has no name.
        variables[_CPP_LOG_LEVEL] = "ERROR"
    try:
        with _environment(variables):  # which the ranks inherit
            agent.run(plan.torchrun, argv, timeout_s=plan.timeout_s, notify=notify)
    except failure.RankFailedError as error:
        if error.unsaid:
            raise error.with_advice(way_on()) from error
        raise


def _way_on(run_dir: Path | None, plan: Plan) -> str:
    """Describe where the newest checkpoint is, and with which command to go on from it."""
    if run_dir is None:
        return "`ampctl resume RUN_DIR` goes on from the newest checkpoint, if there is one."
    links = (run_dir / "checkpoints" / name for name in ("latest.pt", "latest.dist"))
    latest = next((link for link in links if link.exists()), None)
    if latest is None:
        return f"No checkpoint had been saved in {run_dir}."
    ranks = f" --nproc-per-node {plan.processes}" if plan.nodes == 1 else " ..."
    name = Path(os.path.realpath(latest)).name
    return (
        f"The newest checkpoint is {run_dir / 'checkpoints' / name}: "
        f"`{commands.resume(run_dir, ranks=ranks)}` goes on from it."
    )


def _import_torch(options: Options) -> None:
    """Keep torch's native code from printing stack frames while nodes wait for each other.

    It reads how much it may say once, when it is loaded. The ranks are not bound by it.
    """
    if options.rdzv_endpoint and _CPP_LOG_LEVEL not in os.environ:
        with _environment({_CPP_LOG_LEVEL: "FATAL"}):
            import torch  # noqa: F401


@contextmanager
def _sent(text: str | None) -> Iterator[None]:
    """Send a text to the standard input of the ranks: a file, so that each can read all of it."""
    if text is None:
        yield
        return
    with tempfile.TemporaryFile() as file:
        file.write(text.encode())
        file.seek(0)
        before = os.dup(0)
        os.dup2(file.fileno(), 0)
        try:
            yield
        finally:
            os.dup2(before, 0)
            os.close(before)


@contextmanager
def _environment(variables: Mapping[str, str]) -> Iterator[None]:
    before = {name: os.environ.get(name) for name in variables}
    os.environ.update(variables)
    try:
        yield
    finally:
        for name, value in before.items():
            os.environ.pop(name)
            if value is not None:
                os.environ[name] = value


def _if(condition: bool, flag: str) -> list[str]:
    return [flag] if condition else []


def _if_any(flag: str, value: Path | None) -> list[str]:
    return [] if value is None else [f"{flag}={value}"]
