"""Checkpoint files that somebody forged: any pickle, any records, and the digest that fits them.

An attacker can compute a SHA-256 as well as ampctl can, so that the seal of a forged file holds.
"""

from __future__ import annotations

import hashlib
import io
import struct
import zipfile
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch

from ampctl.checkpoint import file

MARK = "@@ here @@"
"""Stands in a payload for what `forge` puts in its place."""

Change = Callable[[dict[str, bytes]], None]


def records_of(payload: Mapping[str, Any]) -> dict[str, bytes]:
    """Return the records of the archive that ``torch.save`` makes of a payload, by name."""
    out = io.BytesIO()
    torch.save({"format": file.FORMAT, "version": file.VERSION, **payload}, out)
    with zipfile.ZipFile(out) as archive:
        return {name: archive.read(name) for name in archive.namelist()}


def name_of(records: Mapping[str, bytes], end: str) -> str:
    """Return the full name of a record: all lie in one folder of the archive."""
    return next(name for name in records if name.endswith(f"/{end}"))


def text(value: str) -> bytes:
    """Return the opcodes that push a text."""
    data = value.encode()
    return b"X" + struct.pack("<I", len(data)) + data


def call(function: str, *arguments: bytes) -> bytes:
    """Return the opcodes that call ``module.name`` with what each argument pushes."""
    module, _, name = function.rpartition(".")
    return f"c{module}\n{name}\n".encode() + b"(" + b"".join(arguments) + b"tR"


def storage(kind: str, key: str, count: int) -> bytes:
    """Return the opcodes that push a storage of so many elements."""
    pushed = f"ctorch\n{kind}\n".encode()
    return b"(" + text("storage") + pushed + text(key) + text("cpu") + number(count) + b"tQ"


def number(value: int) -> bytes:
    """Return the opcodes that push a whole number."""
    data = value.to_bytes(value.bit_length() // 8 + 1, "little", signed=True)
    return b"\x8a" + bytes([len(data)]) + data


def numbers(*values: int) -> bytes:
    """Return the opcodes that push a tuple of whole numbers."""
    return b"(" + b"".join(map(number, values)) + b"t"


def forge(
    path: Path, payload: Mapping[str, Any], pushes: bytes, change: Change | None = None
) -> Path:
    """Write a file in which opcodes that push one object stand where ``MARK`` stood."""
    records = records_of(payload)
    name = name_of(records, "data.pkl")
    mark = text(MARK)
    assert records[name].count(mark) == 1
    records[name] = records[name].replace(mark, pushes)
    if change is not None:
        change(records)
    return write(path, records)


def write(path: Path, records: Mapping[str, bytes], compression: int = zipfile.ZIP_STORED) -> Path:
    """Write an archive of records with the seal that proves it."""
    out = io.BytesIO()
    with zipfile.ZipFile(out, "w", compression) as archive:
        for name, data in records.items():
            archive.writestr(name, data)
    path.write_bytes(sealed(out.getvalue()))
    return path


def sealed(archive: bytes) -> bytes:
    """Return an archive with the SHA-256 of all that precedes it as its comment."""
    body = archive[:-2] + struct.pack("<H", file._SEAL_SIZE)
    return body + file._SEAL + hashlib.sha256(body).hexdigest().encode()
