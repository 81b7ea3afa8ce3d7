"""What a model is made of: its parameters, and the buffers that a checkpoint holds."""

from __future__ import annotations

from collections.abc import Iterator, Mapping

from torch import Tensor, nn

from ampctl.distributed.shard import is_sharded, regather
from ampctl.torch_private import passing_buffers

Layout = Mapping[str, tuple[Tensor, tuple[int, ...]]]
"""Each tensor with the shape that it had, by name."""


def layout(model: nn.Module) -> Layout:
    """Return what a model is made of now."""
    return {name: (tensor, tuple(tensor.shape)) for name, tensor in _held(model)}


def changes(built: Layout, model: nn.Module) -> list[str]:
    """Describe what of a model is no longer as it was built, as a resume builds it."""
    regather(model)  # else what FSDP still holds whole after a pass seems to be another parameter
    now = layout(model)
    said = [f"{name} is gone" for name in built if name not in now]
    for name, (tensor, shape) in now.items():
        kind = "parameter" if isinstance(tensor, nn.Parameter) else "buffer"
        if name not in built:
            said.append(f"{name} is a new {kind}")
            continue
        was, size = built[name]
        if shape != size:
            said.append(f"{name} has the shape {list(shape)}, and had {list(size)}")
        elif kind == "parameter" and tensor is not was and not is_sharded(tensor):
            said.append(f"{name} is another parameter than the one that was there")
        elif kind == "parameter" and tensor.dtype != was.dtype:
            said.append(f"{name} is {tensor.dtype}, and was {was.dtype}".replace("torch.", ""))
    return said


def _held(model: nn.Module) -> Iterator[tuple[str, Tensor]]:
    yield from model.named_parameters(remove_duplicate=False)
    for prefix, module in model.named_modules(remove_duplicate=False):
        for name, buffer in module.named_buffers(recurse=False, remove_duplicate=False):
            if name not in passing_buffers(module):
                yield f"{prefix}.{name}".lstrip("."), buffer
