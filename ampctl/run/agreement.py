"""What all ranks must have alike before they train together: command, recipe, versions, data.

Each found difference is an error on every rank, with the same words, so that it is told once.
"""

from __future__ import annotations

import platform
import socket
from collections.abc import Mapping, Sequence
from typing import Any

import torch

from ampctl import __version__
from ampctl.builder.job import Job
from ampctl.distributed.ranks import Ranks
from ampctl.errors import MachineError, UsageError, first_of
from ampctl.recipe.load import LoadedRecipe, parse_recipe, recipe_changes


def require_one_job(loaded: LoadedRecipe, ranks: Ranks, **command: object) -> list[str]:
    """Compare what ranks were started with; return what is to be warned of.

    ``command``: the options that must be the same, by name. Raises UsageError for another command
    or recipe, MachineError for another version of ampctl.
    """
    if ranks.size == 1:
        return []
    options = {
        name.replace("_", "-"): value if value is None else f"{value}"
        for name, value in command.items()
    }
    versions = {"torch": f"{torch.__version__}", "Python": platform.python_version()}
    own = (socket.gethostname(), loaded.digest, {"ampctl": __version__}, options, versions)
    every = ranks.gather(own)
    hosts = [each[0] for each in every]
    different = _different([each[2] for each in every], hosts)
    if different:
        raise MachineError(f"{different}. Install one version of ampctl on all nodes.")
    different = _different([each[3] for each in every], hosts)
    if different:
        raise UsageError(
            f"the ranks were not started by one command: {different}. Run the same on every node."
        )
    if any(each[1] != every[0][1] for each in every):
        raise UsageError(_other_recipe(ranks.gather(loaded.text), hosts))
    different = _different([each[4] for each in every], hosts)
    return [f"{different}: results may differ in their last digits"] if different else []


def require_same_data(job: Job) -> None:
    """Raise UsageError if data sets have other lengths on other ranks: each takes its part of one.

    See ``StreamData`` for those without a length.
    """
    ranks, train, evaluation = job.state.ranks, job.train_data, job.eval_data
    if ranks.size == 1:
        return
    lengths = {"data.train": train.state_dict().get("num_samples") or "no fixed number of"}
    if evaluation is not None:
        lengths["data.eval"] = evaluation.num_samples
    every = ranks.gather((socket.gethostname(), lengths))
    hosts = [host for host, _ in every]
    for key in lengths:
        found = [each.get(key) for _, each in every]
        if len(set(found)) > 1:
            told = [f"{n} on {_who(r, hosts)}" for r, n in enumerate(found)]
            raise UsageError(
                f"{key} has not the same length on all ranks: {first_of(told, 8)}. Every rank "
                "must be given the whole data set, the same one: ampctl deals its samples to the "
                "ranks, and each reads its own part alone."
            )


def _other_recipe(texts: Sequence[str], hosts: Sequence[str]) -> str:
    rank = next(rank for rank, text in enumerate(texts) if text != texts[0])
    ours, theirs = (parse_recipe(texts[r], where=f"recipe of rank {r}") for r in (0, rank))
    changes = first_of(recipe_changes(ours, theirs), 8)
    return (
        f"the recipe differs between ranks. From {_who(0, hosts)} to {_who(rank, hosts)}: "
        f"{changes}. Give every node the same recipe and the same overrides."
    )


def _different(every: Sequence[Mapping[str, Any]], hosts: Sequence[str]) -> str:
    """Describe each entry that is not the same on all ranks; "" if all are."""
    told = []
    for name, value in every[0].items():
        rank = next((r for r, each in enumerate(every) if each.get(name) != value), None)
        if rank is not None:
            other = every[rank].get(name)
            told.append(f"{name} is {value} on {_who(0, hosts)} and {other} on {_who(rank, hosts)}")
    return "; ".join(told)


def _who(rank: int, hosts: Sequence[str]) -> str:
    return f"rank {rank}" if len(set(hosts)) == 1 else f"rank {rank} ({hosts[rank]})"
