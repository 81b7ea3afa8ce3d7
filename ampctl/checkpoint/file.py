"""One checkpoint file: written whole, and read as data that may be damaged or hostile.

Which files a run has is left to `store`.
"""

from __future__ import annotations

import hashlib
import os
import pickle
import re
import struct
import zipfile
from collections.abc import Callable, Collection, Mapping
from dataclasses import dataclass
from io import BufferedReader
from pathlib import Path
from types import NoneType
from typing import IO, Any, BinaryIO, cast

import torch

from ampctl import files
from ampctl.checkpoint import archive, disk, other_formats
from ampctl.checkpoint.opcodes import ForgedError
from ampctl.errors import CheckpointError, MachineError, printable
from ampctl.recipe.fault import is_out_of_memory

FORMAT = "ampctl"
VERSION = 1

_TYPES: dict[str, tuple[type, ...]] = {
    "format": (str,),
    "version": (int,),
    "model": (dict,),
    "optimizer": (dict,),
    "scheduler": (dict, NoneType),
    "ema": (dict, NoneType),
    "scaler": (dict,),
    "progress": (dict,),
    "rng": (dict, list, tuple),
    "data": (dict, list, tuple, NoneType),
    "recipe": (str,),
    "dtype": (str,),
    "world_size": (int,),
    "environment": (dict,),
}
REQUIRED_KEYS = tuple(_TYPES)

# torch.save writes a zip archive. Its comment, the last bytes of the file, holds the SHA-256 of all
# that precedes it, so that a file proves itself wherever it is copied to. The CRC of each record
# would not do: it leaves out headers and padding, and torch.load does not look at it.
_SEAL = b"ampctl sha256 "
_SEAL_SIZE = len(_SEAL) + 64
_ZIP_HEAD = b"PK\x03\x04"
_BEFORE_ZIP = b"\x80\x02\x8a\nl\xfc\x9cF"  # a pickled number
_ZIP_END = b"PK\x05\x06"
_ZIP_END_SIZE = 22

_BLOCK = 1 << 22

Passed = Callable[[int, int], None]
"""Is told how many bytes have been read, of how many."""


def unseen(done: int, total: int) -> None:
    """Show nobody how far it is."""


@dataclass(frozen=True)
class Written:
    """A file as it was written: its size in bytes and its SHA-256 in hexadecimal."""

    size: int
    sha256: str


class UnusableCheckpointError(CheckpointError):
    """A file that cannot be used; ``reason`` is what is wrong with it, ``advice`` what to do."""

    def __init__(self, path: Path, reason: str, advice: str) -> None:
        self.path = path
        self.reason = printable(reason)  # names in it come from the file
        self.advice = advice
        super().__init__(f"checkpoint {path} cannot be used: {self.reason}; {advice}")


class ForeignFileError(UnusableCheckpointError):
    """A file that another program saved; ``content`` is what torch decodes it to, if it does."""

    def __init__(self, path: Path, reason: str, advice: str, content: Any = None) -> None:
        super().__init__(path, reason, advice)
        self.content = content


def write(path: Path, payload: Mapping[str, Any]) -> Written:
    """Write to ``disk.temporary(path)``, down to the disk; `disk.publish` gives it its name.

    ``payload`` is a snapshot: plain types and CPU tensors. ``format`` and ``version`` are added.
    Raises ``MachineError`` when the disk is full or cannot be written; nothing is left then.
    """
    tmp = disk.temporary(path)
    needed = 0
    try:
        with files.create(tmp) as file:
            sink = _Sink(file)
            torch.save({"format": FORMAT, "version": VERSION, **payload}, cast(IO[bytes], sink))
            written = sink.seal()
            needed = written.size
            if sink.error is not None:
                raise sink.error
            file.flush()
            os.fsync(file.fileno())
    except OSError as error:
        disk.discard(tmp)
        raise disk.fault(path, error, needed) from error
    except BaseException:
        disk.discard(tmp)
        raise
    return written


def digest(path: Path) -> str:
    """Return the SHA-256 of a file in hexadecimal."""
    with files.open_to_read(path) as file:
        return hashlib.file_digest(file, "sha256").hexdigest()


def is_sealed(path: Path) -> bool:
    """Return whether a file ends with its own SHA-256; one that was saved anew has lost it."""
    with files.open_to_read(path, follow=True) as file:
        file.seek(-_SEAL_SIZE, os.SEEK_END)
        return file.read(len(_SEAL)) == _SEAL


def read(
    path: Path,
    digests: Collection[str] | None,
    *,
    mmap: bool = False,
    passed: Passed = unseen,
    follow: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint with all tensors on the CPU, building plain types and tensors alone.

    The file's SHA-256 must be one of ``digests`` and agree with the one that the file itself ends
    with. A file without that one, because the user saved it anew, must have intact records. With
    ``mmap`` the tensors stay in the file: for a look, not to go on with. ``follow``: the path may
    be a link. Raises ``UnusableCheckpointError`` for all that is not a whole ampctl checkpoint of
    this version.
    """
    with open_regular(path, follow=follow) as file:
        sealed = _check_bytes(path, file, digests, passed)
        file.seek(0)
        # Every byte sequence must end in words, and zipfile and torch.load raise a dozen types for
        # hostile ones: all of them are the file's fault, named here with the cause chained.
        try:
            archive.examine(file, comment=_SEAL_SIZE if sealed else 0)
            record = None if sealed else zipfile.ZipFile(file).testzip()
            if record is not None:
                raise damaged(path, f"its record {record} fails its CRC-32")
            file.seek(0)
            source = _itself(file, path) if mmap else file
            # Asked for, since torch 2.10 would take any index of a sparse tensor for a good one.
            with torch.sparse.check_sparse_tensor_invariants():  # type: ignore[no-untyped-call]
                loaded = torch.load(source, map_location="cpu", weights_only=True, mmap=mmap)
            payload = archive.settled(loaded)
        except CheckpointError:
            raise
        except ForgedError as error:
            raise damaged(path, f"{error}") from error
        except pickle.UnpicklingError as error:
            raise _unsafe(path, error) from error
        except Exception as error:
            if is_out_of_memory(error):
                raise MachineError(f"there is not enough memory to read {path}") from error
            raise damaged(path, f"torch cannot decode it ({type(error).__name__})") from error
    return _check_content(path, payload)


class _Sink:
    """The file as ``torch.save`` sees it: hashes what passes, and holds back the zip end record."""

    def __init__(self, file: BinaryIO) -> None:
        self._file = file
        self._digest = hashlib.sha256()
        self._size = 0
        self._held = b""
        self.error: OSError | None = None

    def write(self, data: Any) -> int:
        view = memoryview(data).cast("B")
        if len(view) >= _ZIP_END_SIZE:
            self._put(self._held)
            self._put(view[:-_ZIP_END_SIZE])
            self._held = bytes(view[-_ZIP_END_SIZE:])
        else:
            held = self._held + bytes(view)
            self._put(held[:-_ZIP_END_SIZE])
            self._held = held[-_ZIP_END_SIZE:]
        return len(view)

    def flush(self) -> None:
        """Do nothing: `write` above syncs the file once, at its end."""

    def seal(self) -> Written:
        """Write the end record with its comment."""
        assert self._held.startswith(_ZIP_END), "torch.save did not end with a zip end record"
        self._put(self._held[:-2] + struct.pack("<H", _SEAL_SIZE))
        self._put(_SEAL + self._digest.hexdigest().encode())
        return Written(self._size, self._digest.hexdigest())

    def _put(self, data: bytes | memoryview) -> None:
        self._size += len(data)
        if self.error is not None:
            return
        # An exception does not pass through torch's C++ writer unharmed: it is kept for the caller,
        # and the rest is only counted, which tells how much room the file needs.
        try:
            self._file.write(data)
        except OSError as error:
            self.error = error
            return
        self._digest.update(data)


def open_regular(path: Path, *, follow: bool) -> BufferedReader:
    """Open a file to read it; raise UnusableCheckpointError if it is none, or cannot be opened."""
    try:
        return files.open_to_read(path, follow=follow)
    except IsADirectoryError as error:
        advice = "name a checkpoint file or a run folder"
        raise UnusableCheckpointError(path, "it is a folder", advice) from error
    except files.UnfitFileError as error:
        raise UnusableCheckpointError(path, f"{error.strerror}", NAME_ANOTHER) from error
    except FileNotFoundError as error:
        raise UnusableCheckpointError(
            path, "there is no such file", "check the path, or name the run folder"
        ) from error
    except OSError as error:
        raise UnusableCheckpointError(
            path, f"it cannot be opened ({error.strerror})", NAME_ANOTHER
        ) from error


def _itself(file: BufferedReader, path: Path) -> str:
    """Return a path of an open file to open it anew: its own path may lead to another by now."""
    name = f"/proc/self/fd/{file.fileno()}"
    return name if os.path.exists(name) else f"{path}"


NAME_ANOTHER = "name another checkpoint file, or the run folder for its newest intact one"


def damaged(path: Path, detail: str) -> UnusableCheckpointError:
    """Return the error that a checkpoint is damaged, and how."""
    return UnusableCheckpointError(path, f"it is damaged: {detail}", NAME_ANOTHER)


def _unsafe(path: Path, error: pickle.UnpicklingError) -> UnusableCheckpointError:
    name = re.search(r"GLOBAL (\S+)", str(error))
    what = f"would import {name[1]}" if name else "holds more than plain types and tensors"
    return ForeignFileError(
        path, f"it {what}, so it is no ampctl checkpoint and may be hostile", NAME_ANOTHER
    )


def _check_bytes(
    path: Path, file: BufferedReader, digests: Collection[str] | None, passed: Passed
) -> bool:
    """Raise if the bytes are not those that were written; tell if the file itself proves it."""
    size = os.fstat(file.fileno()).st_size
    if size == 0:
        raise damaged(path, "it is empty")
    body, whole, tail = _fingerprint(file, size, passed)
    if digests is not None and whole not in digests:
        raise damaged(path, "its SHA-256 is not the one that index.json holds")
    if tail.startswith(_SEAL):
        if tail != _SEAL + body.encode():
            raise damaged(path, "its SHA-256 is not the one that it ends with")
        return True
    file.seek(0)
    head = file.read(9)
    if other_formats.is_safetensors(path, head, size):
        reason = "it is a safetensors file (weights alone), of which no run can go on"
        raise ForeignFileError(path, reason, other_formats.start_from(path))
    if head.startswith(_BEFORE_ZIP):
        reason = "it has the format that torch.save had before 1.6, which cannot be examined"
        raise UnusableCheckpointError(path, reason, "load it and save it anew")
    if not _ZIP_HEAD.startswith(head[: len(_ZIP_HEAD)]):
        raise ForeignFileError(path, "it is not a checkpoint file", NAME_ANOTHER)
    end = tail[-_ZIP_END_SIZE:]
    if not end.startswith(_ZIP_END) or not end.endswith(b"\0\0"):
        raise damaged(path, archive.WRONG_END)
    return False


def _fingerprint(file: BufferedReader, size: int, passed: Passed) -> tuple[str, str, bytes]:
    """Return the SHA-256 of all but the tail, that of all, and the tail, as long as a seal is."""
    hashed = hashlib.sha256()
    left = max(size - _SEAL_SIZE, 0)
    block = memoryview(bytearray(min(_BLOCK, max(left, 1))))
    while left and (count := file.readinto(block[: min(left, len(block))])):
        hashed.update(block[:count])
        left -= count
        passed(size - left, size)
    body = hashed.hexdigest()
    tail = file.read(_SEAL_SIZE)
    hashed.update(tail)
    return body, hashed.hexdigest(), tail


def _check_content(path: Path, payload: Any) -> dict[str, Any]:
    if not isinstance(payload, dict) or payload.get("format") != FORMAT:
        advice = "name a file that `ampctl train` saved"
        if other_formats.state_dict_in(payload) is not None:
            advice = other_formats.start_from(path)
        raise ForeignFileError(path, f"it is {other_formats.describe(payload)}", advice, payload)
    version = payload.get("version")
    if isinstance(version, int) and version > VERSION:
        raise UnusableCheckpointError(
            path,
            f"it has version {version} and this ampctl reads up to {VERSION}",
            "install a newer ampctl",
        )
    missing = [key for key in REQUIRED_KEYS if key not in payload]
    if missing:
        raise UnusableCheckpointError(path, _lacks(missing), NAME_ANOTHER)
    for key, types in _TYPES.items():
        if not isinstance(payload[key], types):
            found = type(payload[key]).__name__
            allowed = " or ".join("None" if kind is NoneType else kind.__name__ for kind in types)
            raise UnusableCheckpointError(
                path, f"its `{key}` is of type {found}, not {allowed}", NAME_ANOTHER
            )
    return payload


def _lacks(missing: list[str]) -> str:
    names = ", ".join(f"`{key}`" for key in missing)
    if "scaler" in missing:
        return f"it lacks {names}: without `scaler` the loss scale would start again"
    return f"it lacks {names}, without which a run cannot go on exactly"
