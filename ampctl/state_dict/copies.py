"""Copies of state that a checkpoint can hold: plain types and CPU tensors that own their memory.

Also finds the tensors that are not finite. Files are left to `checkpoint`.
"""

from __future__ import annotations

from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass
from enum import Enum
from pathlib import PurePath
from types import NoneType
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.nn.parameter import is_lazy

from ampctl.distributed.shard import is_sharded, local
from ampctl.errors import CheckpointError
from ampctl.state_dict.host_memory import HostMemory

_ATOMS = frozenset({NoneType, bool, int, float, str, bytes, torch.dtype, torch.Size})


def snapshot(
    value: Any,
    path: str = "",
    shards: dict[str, Tensor] | None = None,
    memory: HostMemory | None = None,
) -> Any:
    """Copy a nest of state into plain types and CPU tensors that share nothing with it.

    Every tensor of the copy owns exactly its own elements, in the strides of the original where
    these are dense (channels-last stays so: fused optimizers need state in their parameter's
    strides). Tensors that are one in ``value``, such as tied weights, are one in the copy.
    ``path`` names ``value`` in a ``CheckpointError`` about something that cannot be copied.

    Tensors that are spread over ranks go to ``shards`` by their dotted path, with this rank's part
    on the CPU; an empty one of the meta device stands in their place.

    ``memory``: where dense copies go, which holds until the next one is made there.
    """
    copied = _copy(value, path, _Copies({}, shards, None if memory is None else memory.copy))
    if memory is not None:
        memory.settle()
    return copied


def copied_tensors(value: Any, path: str = "") -> dict[str, Tensor]:
    """Return by dotted path the dense tensors that `snapshot` copies, without copying them.

    Raises CheckpointError for what it cannot copy.
    """
    found: dict[str, Tensor] = {}

    def note(place: str, tensor: Tensor) -> Tensor:
        found[place] = tensor
        return tensor

    _copy(value, path, _Copies({}, {}, note))
    return found


def nonfinite(value: Any, path: str = "", *, by_design: Collection[str] = ()) -> list[str]:
    """Return the names of tensors in a nest that hold a NaN or an infinity, in their order.

    Of one that is spread over ranks this rank's part is looked at. ``by_design``: names, without
    the first part of their path, that may (masks do from the start).
    """
    found = [(name, _values(tensor)) for name, tensor in _tensors(value, path)]
    groups: dict[tuple[torch.device, torch.dtype], list[int]] = {}
    for i, (_, values) in enumerate(found):
        if values.is_floating_point() or values.is_complex():
            groups.setdefault((values.device, values.dtype), []).append(i)
    suspects: list[int] = []
    for group in groups.values():
        # A sum is ten times as fast as a test of each element, and a NaN or an infinity always
        # makes it non-finite; so may an overflow, which the exact test below tells apart.
        finite = torch.isfinite(torch.stack([found[i][1].sum() for i in group])).tolist()  # sync:
        suspects += [i for i, is_finite in zip(group, finite, strict=True) if not is_finite]
    bad = [found[i][0] for i in sorted(suspects) if not torch.isfinite(found[i][1]).all()]
    return [name for name in bad if name.split(".", 1)[-1] not in by_design]


def num_bytes(value: Any) -> int:
    """Return how much memory the tensors of a nest take, what two of them share counted twice."""
    return sum(_values(tensor).nbytes for _, tensor in _tensors(value, ""))


def masks(model: nn.Module) -> frozenset[str]:
    """Return what of a new model is not finite and may be so: buffers, and frozen infinities."""
    parameters = dict(model.named_parameters(remove_duplicate=False))
    lost = {n for n, p in parameters.items() if p.requires_grad or bool(p.isnan().any())}
    return frozenset(nonfinite(model.state_dict())) - lost


@dataclass(frozen=True)
class _Copies:
    """What has been copied: whole tensors by their memory, and parts of sharded ones by path."""

    whole: dict[tuple[Any, ...], Tensor]
    shards: dict[str, Tensor] | None
    place: Callable[[str, Tensor], Tensor] | None

    def dense(self, path: str, value: Tensor) -> Tensor:
        """Copy a tensor of strided layout to the CPU."""
        if self.place is None or value.is_conj() or value.is_neg():
            return value.to("cpu", copy=True).resolve_conj().resolve_neg()
        return self.place(path, value)


def _copy(value: Any, path: str, copies: _Copies) -> Any:
    if type(value) in _ATOMS:
        return value
    if isinstance(value, Tensor):
        return _copy_tensor(value, path, copies)
    if isinstance(value, dict):
        return {_key(k, path): _copy(v, _join(path, k), copies) for k, v in value.items()}
    if isinstance(value, list | tuple):
        items = [_copy(item, _join(path, i), copies) for i, item in enumerate(value)]
        return items if isinstance(value, list) else tuple(items)
    if isinstance(value, set | frozenset):
        return _copy(_sorted(value, path), path, copies)
    if type(value) is np.ndarray:
        return _copy_array(value, path)
    if isinstance(value, np.longdouble):  # its item() is itself
        return float(value)
    if isinstance(value, np.generic):
        return _copy(value.item(), path, copies)
    if isinstance(value, Enum):
        return _copy(value.value, path, copies)
    if isinstance(value, PurePath):
        return str(value)
    raise _refusal(value, path)


def _copy_tensor(value: Tensor, path: str, copies: _Copies) -> Tensor:
    if is_lazy(value) or value.is_meta:
        raise _refusal(value, path, "a tensor without memory")
    value = value.detach()
    if copies.shards is not None and is_sharded(value):
        copies.shards[path] = copies.dense(path, value)
        return torch.empty(value.shape, dtype=value.dtype, device="meta")
    if type(value) is not Tensor:  # DTensor and the like: their parts are elsewhere
        raise _refusal(value, path)
    if value.layout != torch.strided or value.numel() == 0:
        return value.to("cpu", copy=True)
    # state_dict() makes a new Tensor object at each call: tied weights are known by their memory.
    same = (
        value.device,
        value.data_ptr(),
        value.dtype,
        value.shape,
        value.stride(),
        value.is_conj(),
        value.is_neg(),
    )
    copied = copies.whole.get(same)
    if copied is None:
        copied = copies.dense(path, value)
        copies.whole[same] = copied
    return copied


def _copy_array(value: np.ndarray[Any, Any], path: str) -> Tensor:
    try:
        return torch.from_numpy(value.copy())
    except (TypeError, ValueError) as error:  # object, text, foreign byte order
        raise _refusal(value, path, f"a NumPy array of {value.dtype}") from error


def _key(key: Any, path: str) -> str | int:
    if type(key) is str or type(key) is int:
        return key
    if isinstance(key, np.generic):
        key = key.item()
    elif isinstance(key, Enum):
        key = key.value
    if isinstance(key, str | int):
        return key
    raise _refusal(key, path, f"a dict key of type {_type_name(key)}")


def _sorted(value: set[Any] | frozenset[Any], path: str) -> list[Any]:
    try:
        return sorted(value)
    except TypeError as error:
        raise _refusal(value, path, "a set whose elements have no order") from error


def _refusal(value: Any, path: str, what: str = "") -> CheckpointError:
    return CheckpointError(
        f"cannot save {path or 'the state'}: it holds {what or f'a {_type_name(value)}'}, and a "
        "checkpoint holds numbers, text, bytes, lists, tuples, dicts and tensors alone; "
        "let the state_dict() that it comes from return those"
    )


def _type_name(value: Any) -> str:
    kind = type(value)
    return (
        kind.__qualname__
        if kind.__module__ == "builtins"
        else f"{kind.__module__}.{kind.__qualname__}"
    )


def _join(path: str, key: Any) -> str:
    return f"{path}.{key}" if path else str(key)


def _tensors(value: Any, path: str) -> Iterator[tuple[str, Tensor]]:
    if isinstance(value, Tensor):
        if not value.is_meta:  # its values are elsewhere
            yield path, value
    elif isinstance(value, dict):
        for key, item in value.items():
            yield from _tensors(item, _join(path, key))
    elif isinstance(value, list | tuple):
        for i, item in enumerate(value):
            yield from _tensors(item, _join(path, i))


def _values(tensor: Tensor) -> Tensor:
    """Return the stored elements of a tensor in a dtype that has reductions (float8 has none).

    Of a sharded one these are this rank's.
    """
    values = local(tensor.detach())
    if values.layout == torch.sparse_coo:
        values = values.coalesce().values()
    elif values.layout != torch.strided:
        values = values.values()
    return values.float() if values.is_floating_point() and values.element_size() == 1 else values
