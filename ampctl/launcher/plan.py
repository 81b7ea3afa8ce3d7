"""How many processes the command line, the recipe and the machine make, in torchrun's options.

Starting them is left to `launch`.
"""

from __future__ import annotations

import os
import stat
import uuid
from dataclasses import dataclass, fields, replace
from typing import TYPE_CHECKING, Any

from ampctl.distributed.launched import VARIABLES, is_of_torchrun, is_rank
from ampctl.errors import MachineError, UsageError

if TYPE_CHECKING:
    from ampctl.recipe.schema import Recipe


@dataclass(frozen=True)
class Options:
    """Torchrun's options under its own names; None where the command line does not say.

    See https://docs.pytorch.org/docs/stable/elastic/run.html.
    """

    nproc_per_node: str | None = None
    nnodes: str | None = None
    node_rank: int | None = None
    rdzv_backend: str | None = None
    rdzv_endpoint: str | None = None
    rdzv_id: str | None = None
    max_restarts: int | None = None

    def given(self) -> list[str]:
        """Return the options that the command line has, as they are written there."""
        return [
            f"--{entry.name.replace('_', '-')}"
            for entry in fields(self)
            if getattr(self, entry.name) is not None
        ]


@dataclass(frozen=True)
class Plan:
    """A job of several processes: its options for torchrun, and how long its nodes wait."""

    processes: int
    nodes: int
    torchrun: tuple[str, ...]
    timeout_s: int


def with_variables(options: Options) -> Options:
    """Take what the command line does not say from torchrun's variables: PET_NNODES and its kin.

    An operator of Kubernetes sets them in each pod. See torch.distributed.argparse_util, and for
    PET_MASTER_ADDR torch.distributed.run. Raises UsageError for one that is no number.
    """
    if is_rank():  # they are inherited from its launcher
        return options
    found: dict[str, Any] = {
        entry.name: os.environ[f"PET_{entry.name.upper()}"]
        for entry in fields(options)
        if getattr(options, entry.name) is None and os.environ.get(f"PET_{entry.name.upper()}")
    }
    for name in found.keys() & {"node_rank", "max_restarts"}:
        if not found[name].isdecimal():
            variable = f"PET_{name.upper()}"
            raise UsageError(f"{variable}: got {found[name]!r}; allowed: a whole number from 0")
        found[name] = int(found[name])
    given = replace(options, **found)
    if "node_rank" in found and given.rdzv_backend not in (None, "static"):
        return replace(given, node_rank=None)  # torchrun does not look at it there either
    if "node_rank" in found and given.rdzv_endpoint is None:
        host, port = os.environ.get("PET_MASTER_ADDR"), os.environ.get("PET_MASTER_PORT", "29500")
        return replace(given, rdzv_endpoint=f"{host}:{port}" if host else None)
    return given


def plan_for(options: Options, recipe: Recipe) -> Plan | None:
    """Settle how many processes there are; None: this one alone.

    Raises UsageError for options that do not go together, MachineError for too few GPUs.
    """
    refuse_in_rank(options)
    if is_rank():
        return None
    given = options.given()
    lowest, highest = _nodes(options.nnodes)
    processes = _processes(options.nproc_per_node, recipe.train.device)
    if processes == 1 and highest == 1 and {"--nproc-per-node", "--nnodes"}.issuperset(given):
        return None
    backend = options.rdzv_backend or ("c10d" if options.node_rank is None else "static")
    endpoint = options.rdzv_endpoint or ""
    _require_endpoint(options, backend, highest)
    torchrun = (
        f"--nnodes={lowest}:{highest}",
        f"--nproc-per-node={processes}",
        f"--node-rank={options.node_rank or 0}",
        f"--rdzv-backend={backend}",
        # Port 0: a free one, so that two jobs on a machine do not meet.
        f"--rdzv-endpoint={endpoint or 'localhost:0'}",
        f"--rdzv-id={options.rdzv_id or ('none' if endpoint else uuid.uuid4().hex)}",
        f"--max-restarts={options.max_restarts or 0}",
    )
    timeout_s = max(1, round(recipe.distributed.timeout_minutes * 60))
    return Plan(processes, highest, torchrun, timeout_s)


def refuse_in_rank(options: Options) -> None:
    """Raise UsageError where a rank is given options that are its launcher's."""
    given = options.given()
    if given and is_rank():
        names = [name for name in VARIABLES if name in os.environ]
        raise UsageError(
            f"{', '.join(given)}: this process is a rank of a job already ({', '.join(names)} "
            "set). Give these options to the launcher that started it; or, if none did, unset "
            "the variables."
        )


def refuse_shared_pipe(source: str) -> None:
    """Raise UsageError where ranks would each get a part of the recipe in their one pipe."""
    from ampctl.recipe.reading import STDIN  # with yaml, which --help does without

    if source == STDIN and is_of_torchrun() and not stat.S_ISREG(os.fstat(0).st_mode):
        raise UsageError(
            "the ranks of torchrun have one standard input, and each would get a part of a pipe: "
            "name a file, or send it itself (`- < recipe.yaml`)"
        )


def _require_endpoint(options: Options, backend: str, nodes: int) -> None:
    if nodes > 1 and not options.rdzv_endpoint:
        raise UsageError(
            f"--nnodes {options.nnodes} needs --rdzv-endpoint HOST:PORT: the address of one of the "
            "nodes, the same on all of them; see `ampctl docs two-machines`"
        )
    if backend == "static":
        if not (options.rdzv_endpoint or "").rpartition(":")[2].isdigit():
            found = options.rdzv_endpoint or "none"
            raise UsageError(
                f"--rdzv-backend static needs --rdzv-endpoint HOST:PORT, of the node with "
                f"--node-rank 0; got {found}"
            )
        if nodes > 1 and options.node_rank is None:
            raise UsageError("--rdzv-backend static needs --node-rank: 0, 1, ... on each node")
    elif options.node_rank is not None:
        raise UsageError(
            f"--node-rank is for --rdzv-backend static alone; with {backend} the nodes are "
            "numbered as they come. Leave one of the two out."
        )


def highest_nnodes(options: Options) -> int:
    """Return the most nodes that the job may have. Raises UsageError."""
    return _nodes(options.nnodes)[1]


def _nodes(wanted: str | None) -> tuple[int, int]:
    """Read ``N`` or ``MIN:MAX``."""
    numbers = (wanted or "1").split(":")
    if len(numbers) <= 2 and all(each.isdecimal() for each in numbers):
        lowest, highest = int(numbers[0]), int(numbers[-1])
        if 0 < lowest <= highest:
            return lowest, highest
    raise UsageError(f"--nnodes: got {wanted!r}; allowed: a number from 1, or MIN:MAX")


def _processes(wanted: str | None, device: str) -> int:
    """Return the ranks of this node; ``auto`` is one for each GPU, and one where there is none."""
    if wanted not in (None, "auto") and not (wanted.isdecimal() and int(wanted)):
        raise UsageError(f"--nproc-per-node: got {wanted!r}; allowed: a number from 1, or auto")
    asked = None if wanted == "auto" else int(wanted or 1)
    if asked == 1:
        return 1
    import torch

    from ampctl.distributed.env import choose_device, is_one_accelerator, one_for_several

    if is_one_accelerator(device):
        if asked is None:
            return 1
        raise one_for_several(device, f"--nproc-per-node asks for {asked} processes")
    kind = choose_device(device).type
    if kind == "cpu":
        return asked or 1
    here = 1 if kind == "mps" else torch.get_device_module(kind).device_count()
    if asked is not None and asked > here:
        raise MachineError(
            f"--nproc-per-node {asked}: {here} of {kind} are here, and each process needs one of "
            f"its own. Ask for {here}, or for auto; train.device=cpu needs none."
        )
    return asked or here
