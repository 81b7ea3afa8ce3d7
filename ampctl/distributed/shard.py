"""A model whose parameters FSDP2 spreads over the ranks: its blocks, and this rank's part of each.

Source: https://docs.pytorch.org/docs/stable/distributed.fsdp.fully_shard.html
"""

from __future__ import annotations

import struct
from collections.abc import Iterable, Sequence
from fnmatch import fnmatchcase
from typing import Any, cast

import torch
from torch import Tensor, nn

from ampctl.distributed.ranks import Ranks
from ampctl.errors import first_of
from ampctl.recipe.suggest import names_near


def shard_(
    model: nn.Module, ranks: Ranks, device: torch.device, globs: Sequence[str] = ()
) -> list[str]:
    """Spread a model's parameters over the ranks in place; return the names of its blocks.

    ``globs`` of dotted module names choose the blocks, which are gathered one at a time when they
    run; without one they are the members of the largest list of repeated modules, if there is one.
    What is in no block is gathered for the whole of a pass. The model may still be on the host:
    each part goes to ``device`` as it is sharded, so that a device never holds the whole. All ranks
    start from rank 0's values.

    Of modules inside each other a glob chooses the outermost. Raises ValueError in words for a glob
    that no module has, and for parameters that cannot be sharded.
    """
    from torch.distributed.device_mesh import init_device_mesh
    from torch.distributed.fsdp import fully_shard

    names = _chosen(model, globs) if globs else _largest_list(model)
    _refuse_unfit(model, names)
    for parameter in model.parameters():
        if not parameter.is_contiguous():  # FSDP deals out rows as they lie in memory
            parameter.data = parameter.data.contiguous()
    _begin_alike(model, ranks)
    mesh = init_device_mesh(device.type, (ranks.size,))
    modules = dict(model.named_modules())
    for name in names:
        fully_shard(modules[name], mesh=mesh)
    fully_shard(model, mesh=mesh)
    return names


def is_sharded(tensor: Tensor) -> bool:
    """Return whether a tensor is spread over the ranks."""
    return type(tensor) not in (Tensor, nn.Parameter) and hasattr(tensor, "placements")


def local(tensor: Tensor) -> Tensor:
    """Return this rank's part of a tensor, in the same memory; the tensor itself if it is whole."""
    if not is_sharded(tensor):
        return tensor
    with torch.no_grad():
        return cast(Tensor, cast(Any, tensor).to_local())


def spread(whole: Tensor, like: Tensor) -> Tensor:
    """Return a tensor that this rank has all of spread as another one is, which is sharded."""
    from torch.distributed.tensor import distribute_tensor

    own = cast(Any, like)
    # Each rank takes its part of what it has itself: nothing is sent.
    return distribute_tensor(
        whole.to(like.device), own.device_mesh, own.placements, src_data_rank=None
    )


def whole(tensor: Tensor) -> Tensor:
    """Return a tensor with the parts of all ranks; every rank must ask."""
    if not is_sharded(tensor):
        return tensor
    return cast(Tensor, cast(Any, tensor).full_tensor())  # all ranks: a diagnosis


def regather(model: nn.Module) -> None:
    """Make the next pass gather parameters anew: their values were changed in place.

    What is in no block stays gathered after a pass that has no backward.
    """
    for module in model.modules():
        if hasattr(module, "reshard"):
            cast(Any, module).reshard()


def await_unused(model: nn.Module) -> None:
    """Use a gradient of 0 for a parameter without one, which other ranks may have.

    For lack of it they would add up gradients of different parameters. Not in torch before 2.14,
    where all ranks must leave out the same ones.
    """
    for module in model.modules():
        if hasattr(module, "set_reduce_scatter_unused_params"):
            cast(Any, module).set_reduce_scatter_unused_params(True, recurse=False)


def _chosen(model: nn.Module, globs: Sequence[str]) -> list[str]:
    names = [name for name, _ in model.named_modules() if name]
    for glob in globs:
        if not any(fnmatchcase(name, glob) for name in names):
            kind = type(model).__name__
            near = names_near(glob, names, what="submodule")
            raise ValueError(f"{glob!r} is no module of {kind}; {near}")
    chosen: list[str] = []
    for name in names:  # a module before its parts, which `*` matches too
        inside = any(name.startswith(f"{other}.") for other in chosen)
        if inside or not any(fnmatchcase(name, glob) for glob in globs):
            continue
        if isinstance(model.get_submodule(name), nn.ModuleList | nn.ModuleDict):
            raise ValueError(f"{name!r} is a list, which does not run itself; choose '{name}.*'")
        chosen.append(name)
    return chosen


def _largest_list(model: nn.Module) -> list[str]:
    """Return the names of the members of the list of like modules that has most parameters."""
    best: list[str] = []
    most = 0
    for name, module in model.named_modules():
        if not isinstance(module, nn.ModuleList | nn.Sequential | nn.ModuleDict):
            continue
        members = dict(module.named_children())
        kinds = {type(member) for member in members.values()}
        size = sum(parameter.numel() for parameter in module.parameters())
        if len(members) > 1 and len(kinds) == 1 and size > most:
            most, best = size, [f"{name}.{key}" if name else key for key in members]
    return best


def _refuse_unfit(model: nn.Module, names: Sequence[str]) -> None:
    """Raise ValueError for parameters that FSDP cannot shard."""
    scalars = [name for name, parameter in model.named_parameters() if parameter.ndim == 0]
    if scalars:
        raise ValueError(
            f"parameters without a dimension cannot be sharded: {first_of(scalars)}; give them one "
            "(torch.ones(1)), or use ddp"
        )
    owners: dict[int, set[str]] = {}
    called: dict[int, list[str]] = {}
    for name, parameter in model.named_parameters(remove_duplicate=False):
        block = next((each for each in names if name.startswith(f"{each}.")), "")
        owners.setdefault(id(parameter), set()).add(block)
        called.setdefault(id(parameter), []).append(name)
    tied = [called[key] for key, blocks in owners.items() if len(blocks) > 1]
    if tied:
        raise ValueError(
            f"{' and '.join(tied[0])} are one parameter in two blocks, which cannot be sharded "
            "apart; choose blocks that hold all of its places or none"
        )


@torch.no_grad()
def _begin_alike(model: nn.Module, ranks: Ranks) -> None:
    """Give every rank the values of rank 0 if they differ: a model need not follow the seed."""
    tensors = [*model.parameters(), *model.buffers()]
    if len(set(ranks.gather(_fingerprint(tensors)))) > 1:
        ranks.follow_first_([tensor.data for tensor in tensors])


def _fingerprint(tensors: Iterable[Tensor]) -> bytes:
    """Return a few bytes for each tensor that differ where values do."""
    sums = [float(_numbers(tensor).sum(dtype=torch.float64)) for tensor in tensors]
    return struct.pack(f"{len(sums)}d", *sums)


def _numbers(tensor: Tensor) -> Tensor:
    return torch.view_as_real(tensor) if tensor.is_complex() else tensor
