"""The pickled index of the parts of a sharded checkpoint, read as data that may be hostile."""

from __future__ import annotations

import io
import pickle
from collections.abc import Collection
from typing import Any, ClassVar, cast

import torch

from ampctl.checkpoint.opcodes import Budget, walk

_CLASSES = {
    "torch.distributed.checkpoint.metadata": {
        "ChunkStorageMetadata",
        "Metadata",
        "MetadataIndex",
        "StorageMeta",
        "TensorProperties",
        "TensorStorageMetadata",
        "_MEM_FORMAT_ENCODING",
    },
    "torch.distributed.checkpoint.filesystem": {"_StorageInfo"},
    "torch.serialization": {"_get_layout"},
    "pathlib": {"PosixPath", "PurePosixPath"},
    "pathlib._local": {"PosixPath", "PurePosixPath"},
}
_UNUSED = (pickle.INST, pickle.OBJ, pickle.NEWOBJ_EX)


def read_metadata(content: bytes, parts: Collection[str]) -> Any:
    """Return the index of the parts: where each piece of each tensor lies.

    Nothing but tensors is let in (torch would unpickle anything else), and no other file. What is
    not an index makes pickle and torch raise a dozen types.
    """
    from torch.distributed.checkpoint.metadata import Metadata, StorageMeta, TensorStorageMetadata

    metadata = _Unpickler(io.BytesIO(content), walk(content)).load()
    if not isinstance(metadata, Metadata):
        raise ValueError("the index is not one")
    for kind in metadata.state_dict_metadata.values():
        if type(kind) is not TensorStorageMetadata:
            raise ValueError("the index has something that is no tensor")
    for info in cast(Any, metadata.storage_data).values():
        if info.relative_path not in parts or getattr(info, "transform_descriptors", None):
            raise ValueError("the index points at another file")
    metadata.storage_meta = StorageMeta()
    return metadata


class _Unpickler(pickle._Unpickler):
    """Builds objects of an index, and nothing else; the classes themselves stay as they are.

    A pickle may give a state to all that it names, and one of `PosixPath` would be that of every
    path here. Only the unpickler in Python can be told so.
    """

    dispatch: ClassVar[dict[int, Any]] = {
        code: load
        for code, load in pickle._Unpickler.dispatch.items()
        if code not in {each[0] for each in _UNUSED}
    }

    def __init__(self, file: io.BytesIO, budget: Budget) -> None:
        super().__init__(file)
        self._budget = budget

    def load_build(self) -> None:
        if callable(self.stack[-2]):  # type: ignore[attr-defined]
            raise pickle.UnpicklingError("it changes what it names")
        self._budget.spend(self.stack[-1])  # type: ignore[attr-defined]
        super().load_build()  # type: ignore[misc]

    def load_reduce(self) -> None:
        self._budget.spend(*self.stack[-1])  # type: ignore[attr-defined]
        super().load_reduce()  # type: ignore[misc]

    def load_newobj(self) -> None:
        self._budget.spend(*self.stack[-1])  # type: ignore[attr-defined]
        super().load_newobj()  # type: ignore[misc]

    dispatch[pickle.BUILD[0]] = load_build
    dispatch[pickle.REDUCE[0]] = load_reduce
    dispatch[pickle.NEWOBJ[0]] = load_newobj

    def find_class(self, module: str, name: str) -> Any:
        is_dtype = module == "torch" and isinstance(getattr(torch, name, None), torch.dtype)
        if is_dtype or (module, name) == ("torch", "Size") or name in _CLASSES.get(module, ()):
            return super().find_class(module, name)
        raise pickle.UnpicklingError(f"it would import {module}.{name}")
