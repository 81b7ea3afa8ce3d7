"""The archive that a checkpoint file is, examined before torch decodes it: it may be a forgery.

A forged file can carry any digest, so what is in it must be harmless by itself: records as large as
they say, in one directory that every reader reads alike, and a pickle that names nothing but plain
types and tensors, each tensor inside its own record. Nothing is imported or built here, and nothing
inflated: what torch writes is not compressed.
"""

from __future__ import annotations

import io
import math
import pickle
import struct
import types
import zipfile
from collections import Counter, OrderedDict
from typing import IO, Any

import torch
from torch import Tensor

from ampctl import torch_private
from ampctl.checkpoint.opcodes import Budget, ForgedError, walk

DEEPEST = 100
"""How deep the content of a checkpoint may nest."""

WRONG_END = "it is cut off, or something was added at its end"
"""An archive is known by its end, so that the two look alike."""

_PICKLE = "data.pkl"
_END, _LOCATOR, _END_64 = b"PK\x05\x06", b"PK\x06\x07", b"PK\x06\x06"
_RECORD, _LEAST_OF_RECORD = b"PK\x01\x02", 30 + 46
_END_SIZE, _LOCATOR_SIZE, _END_64_SIZE = 22, 20, 56

_TENSORS = frozenset(
    f"torch._utils.{name}"
    for name in (
        "_rebuild_meta_tensor_no_storage",
        "_rebuild_parameter",
        "_rebuild_qtensor",
        "_rebuild_sparse_tensor",
        "_rebuild_tensor_v2",
        "_rebuild_tensor_v3",
    )
)
_QUANTIZED = "torch._utils._rebuild_qtensor"
_ENCODE = "_codecs.encode"  # as bytes are written
_ORDERED = "collections.OrderedDict"
_BYTES = "torch.storage.UntypedStorage"
_OTHERS = frozenset(
    [
        _ORDERED,
        _ENCODE,
        "builtins.complex",
        "torch.Size",
        "torch.device",
        "torch.serialization._get_layout",
        _BYTES,
    ]
)

_ELEMENT_SIZES = types.MappingProxyType(
    {
        "BFloat16": 2,
        "Bool": 1,
        "Byte": 1,
        "Char": 1,
        "ComplexDouble": 16,
        "ComplexFloat": 8,
        "Double": 8,
        "Float": 4,
        "Half": 2,
        "Int": 4,
        "Long": 8,
        "QInt32": 4,
        "QInt8": 1,
        "QUInt2x4": 1,
        "QUInt4x2": 1,
        "QUInt8": 1,
        "Short": 2,
    }
)


def examine(file: IO[bytes], *, comment: int) -> None:
    """Raise ForgedError, or pickle.UnpicklingError, if torch should not decode a file.

    ``comment``: the length of what follows the archive's end record. An archive that no program
    wrote makes zipfile and pickle raise a dozen other types as well.
    """
    count = _require_one_reading(file, comment)
    archive = zipfile.ZipFile(file)
    records = archive.infolist()
    size = file.seek(0, io.SEEK_END)
    if len(records) != count or len({each.filename.lower() for each in records}) != count:
        raise ForgedError("its directory names a record twice")
    for record in records:
        if record.compress_type != zipfile.ZIP_STORED or record.compress_size != record.file_size:
            raise ForgedError(f"its record {record.filename} is compressed")
        if record.orig_filename != record.filename or not record.filename.isascii():
            raise ForgedError(f"its record {record.filename} has no proper name")
    if sum(record.file_size for record in records) > size:
        raise ForgedError("its records are larger than itself")
    sizes = {record.filename.partition("/")[2]: record.file_size for record in records}
    folders = {record.filename.partition("/")[0] for record in records}
    if len(folders) != 1 or _PICKLE not in sizes:
        raise ForgedError(f"it holds no {_PICKLE} in its one folder")
    content = archive.read(f"{folders.pop()}/{_PICKLE}")
    _Examiner(io.BytesIO(content), sizes, walk(content)).load()


def settled(value: Any) -> Any:
    """Return content that torch decoded in dicts, lists and tuples alone, with bare tensors.

    An ``OrderedDict`` of a pickle can have attributes that hide its methods. Raises ForgedError for
    content that nests too deep.
    """
    return _settled(value, 0, {})


def _settled(value: Any, depth: int, done: dict[int, Any]) -> Any:
    if isinstance(value, Tensor):
        is_bare = not (value.requires_grad or torch_private.has_backward_hooks(value))
        return value if is_bare else value.detach()
    if not isinstance(value, dict | list | tuple) or isinstance(value, torch.Size):
        return value
    if id(value) in done:
        return done[id(value)][0]
    if depth > DEEPEST:
        raise ForgedError(f"its content nests deeper than {DEEPEST}")
    if isinstance(value, tuple):
        items = [_settled(item, depth + 1, done) for item in value]
        same = all(new is old for new, old in zip(items, value, strict=True))
        done[id(value)] = (value if same else tuple(items), value)
        return done[id(value)][0]
    found = dict(dict.items(value)) if isinstance(value, OrderedDict | Counter) else value
    done[id(value)] = (found, value)  # the value too, or another could get its id
    places = list(found.items() if isinstance(found, dict) else enumerate(found))
    for place, item in places:
        new = _settled(item, depth + 1, done)
        if new is not item:
            found[place] = new
    return found


def _require_one_reading(file: IO[bytes], comment: int) -> int:
    """Return how many records there are; raise if another reader could find another directory.

    Python's zipfile looks for the end records where they should be, torch's reader where they say;
    and what precedes an archive shifts the places for one of them alone.
    """
    size = file.seek(0, io.SEEK_END)
    end = size - comment - _END_SIZE
    head, tail = _at(file, 0, 4), _at(file, end, _END_SIZE)
    if (
        head != b"PK\x03\x04"
        or not tail.startswith(_END)
        or tail[-2:] != struct.pack("<H", comment)
    ):
        raise ForgedError(WRONG_END)
    disk, disk_start, here, count, length, start = struct.unpack("<4H2L", tail[4:-2])
    locator = _at(file, end - _LOCATOR_SIZE, _LOCATOR_SIZE)
    if locator.startswith(_LOCATOR):
        end -= _LOCATOR_SIZE + _END_64_SIZE
        wide = _at(file, end, _END_64_SIZE)
        if struct.unpack("<Q", locator[8:16])[0] != end or not wide.startswith(_END_64):
            raise ForgedError("its end is not where it says")
        disk, disk_start, here, count, length, start = struct.unpack("<2L4Q", wide[16:])
    if disk or disk_start or here != count or start + length != end:
        raise ForgedError("its directory is not where it says")
    # zipfile makes an object of each record as it reads the directory.
    if _at(file, start, length).count(_RECORD) != count or count * _LEAST_OF_RECORD > size:
        raise ForgedError("its directory has other records than it says")
    return int(count)


def _at(file: IO[bytes], place: int, length: int) -> bytes:
    if place < 0:
        return b""
    file.seek(place)
    return file.read(length)


class _Name:
    """What a pickle names, and what comes of calling it: nothing that can do anything."""

    __slots__ = ("_budget", "full")

    def __init__(self, full: str, budget: Budget) -> None:
        self.full = full
        self._budget = budget

    def __call__(self, *args: Any) -> _Made:
        self._budget.spend(*args)
        if self.full == _ENCODE and (type(args[0]) is not str or args[1:] != ("latin1",)):
            raise pickle.UnpicklingError("an encoding that is not that of bytes")
        if self.full == _QUANTIZED and math.prod(args[2]) > args[0].count:
            raise ForgedError("a tensor is larger than its storage")
        return _Made(self.full, self._budget)

    def __setstate__(self, state: Any) -> None:
        raise pickle.UnpicklingError("it changes what it names")


class _Made:
    """Stands for an object of a pickle."""

    __slots__ = ("_budget", "count", "full")

    def __init__(self, full: str, budget: Budget, count: int = 0) -> None:
        self.full = full
        self.count = count
        self._budget = budget

    def __setitem__(self, key: Any, value: Any) -> None:
        self._require_dict()

    def __setstate__(self, state: Any) -> None:
        self._budget.spend(state)
        self._require_dict()

    def _require_dict(self) -> None:
        if self.full != _ORDERED:
            raise pickle.UnpicklingError(f"it changes a {self.full}")


class _Examiner(pickle.Unpickler):
    """Goes through a pickle as if it were loaded, with stand-ins for all that it names."""

    def __init__(self, file: IO[bytes], sizes: dict[str, int], budget: Budget) -> None:
        super().__init__(file, encoding="utf-8")
        self._sizes = sizes
        self._budget = budget

    def find_class(self, module: str, name: str) -> Any:
        full = f"{module}.{name}"
        if full in _OTHERS or full in _TENSORS or (module == "torch" and _is_plain(name)):
            return _Name(full, self._budget)
        raise pickle.UnpicklingError(f"GLOBAL {full}")

    def persistent_load(self, pid: Any) -> Any:
        kind, named, key, where, count = pid
        if kind != "storage" or not isinstance(named, _Name) or type(key) is not str:
            raise pickle.UnpicklingError("a reference that is no storage")
        if type(where) is not str or type(count) is not int or count < 0:
            raise pickle.UnpicklingError("a storage that has no size")
        width = 1 if named.full == _BYTES else _element_size(named.full.removeprefix("torch."))
        if not width:
            raise pickle.UnpicklingError(f"a storage of {named.full}")
        if count * width > self._sizes.get(f"data/{key}", -1):
            raise ForgedError(f"a tensor is larger than its record data/{key}")
        return _Made("storage", self._budget, count)


def _is_plain(name: str) -> bool:
    found = torch.__dict__.get(name)  # its own __getattr__ imports
    return isinstance(found, torch.dtype | torch.qscheme) or _element_size(name) > 0


def _element_size(name: str) -> int:
    """Return the bytes of an element of a storage class of torch; 0 if it is none."""
    return _ELEMENT_SIZES.get(name.removesuffix("Storage"), 0) if name.endswith("Storage") else 0
