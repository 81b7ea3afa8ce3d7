"""A checkpoint that ranks write together: a folder with one part of the state from each of them.

``state.pt`` in it is a checkpoint file as `file` writes it, with the sharded tensors left empty,
and with size and SHA-256 of each part. The parts are written and read by
``torch.distributed.checkpoint``, so that any number of ranks can read them. The functions that
take a path know both forms.
"""

from __future__ import annotations

import io
import logging
import os
import re
import shutil
import warnings
from collections.abc import Callable, Collection, Mapping
from pathlib import Path
from typing import Any, cast

import torch
from torch import Tensor

from ampctl import files
from ampctl.checkpoint import archive, disk, file
from ampctl.checkpoint.file import Passed, UnusableCheckpointError, Written, unseen
from ampctl.checkpoint.sharded_index import read_metadata
from ampctl.distributed.failure import comes_of_others, is_timeout
from ampctl.distributed.ranks import Writers
from ampctl.distributed.shard import is_sharded, spread
from ampctl.errors import MachineError
from ampctl.recipe.fault import is_out_of_memory

SUFFIX = ".dist"
STATE = "state.pt"
PARTS = "parts"
"""The key of ``state.pt`` that tells of the parts."""

_METADATA = ".metadata"
_MOST_METADATA = 1 << 28
_TOO_LARGE = "the tensors are larger than its parts"
_PART = re.compile(r"__\d+_\d+\.distcp|\.metadata")


def is_folder(path: Path) -> bool:
    """Return whether a path is named as a checkpoint of parts."""
    return path.name.endswith(SUFFIX)


def write(
    path: Path, payload: Mapping[str, Any], shards: Mapping[str, Tensor], writers: Writers
) -> Written:
    """Write a checkpoint to ``disk.temporary(path)``, as rank 0, while the others `write_part`.

    ``payload``: what `file.write` takes, with tensors on the meta device in place of the shards;
    ``shards``: this rank's of each, by dotted key. Raises ``MachineError`` when a rank cannot
    write; nothing is left then. The digest is that of ``state.pt``.
    """
    folder = disk.temporary(path)
    try:
        parts = _write_parts(path, folder, shards, writers)
        told = {name: {"size": p.size, "sha256": p.sha256} for name, p in parts.items()}
        state = file.write(folder / STATE, {**payload, PARTS: told})
        disk.publish(disk.temporary(folder / STATE), folder / STATE)
    except BaseException:
        disk.discard(folder)
        raise
    return Written(state.size + sum(part.size for part in parts.values()), state.sha256)


def write_part(path: Path, shards: Mapping[str, Tensor], writers: Writers) -> None:
    """Write this rank's part of a checkpoint that rank 0 `write`\\ s. Raises as it does."""
    _write_parts(path, None, shards, writers)


def read(
    path: Path,
    digests: Collection[str] | None,
    *,
    mmap: bool = False,
    passed: Passed = unseen,
    follow: bool = False,
) -> dict[str, Any]:
    """Read a checkpoint of either form, as `file.read` does one file.

    Of a folder all parts are proved, and the sharded tensors stay empty (on the meta device) until
    `fill` fills them. Raises ``UnusableCheckpointError``.
    """
    try:
        if not is_folder(path):
            payload = file.read(path, digests, mmap=mmap, passed=passed, follow=follow)
            if PARTS in payload:
                reason = "it is the smaller part of a checkpoint that several ranks wrote"
                raise UnusableCheckpointError(path, reason, f"name its folder, step-N{SUFFIX}")
            return payload
        if path.is_symlink() and not follow:
            raise UnusableCheckpointError(path, "it is a link", file.NAME_ANOTHER)
        if not path.is_dir():
            raise UnusableCheckpointError(path, "there is no such folder", file.NAME_ANOTHER)
        if not (path / STATE).exists():
            raise file.damaged(path, f"its {STATE} is missing")
        payload = file.read(path / STATE, digests, mmap=mmap)
        done, total = (path / STATE).stat().st_size, size(path)
        for name, told in _parts(path, payload).items():
            part = path / name
            if part.is_symlink() or not part.is_file():
                raise file.damaged(path, f"its part {name} is missing")
            if part.stat().st_size != told.size or file.digest(part) != told.sha256:
                raise file.damaged(path, f"its part {name} is not the one that was written")
            done += told.size
            passed(done, total)
        return payload
    except OSError as error:  # a disk that fails, or what is given up while it is read
        raise file.damaged(path, f"it cannot be read ({error.strerror})") from error


def fill(
    payload: dict[str, Any], path: Path, like: Callable[[str], Tensor | None] | None = None
) -> None:
    """Bring the tensors of a payload that was read from ``path`` in place to what they should be.

    ``like`` returns the tensor that takes the one of a dotted key: where it is sharded, this rank
    gets its own part, and elsewhere (or without ``like``) the whole on the CPU. Raises
    ``UnusableCheckpointError``.
    """
    if like is None and not is_folder(path):
        return
    wanted: dict[str, Tensor] = {}
    room = size(path) if is_folder(path) else 0

    def target(key: str, tensor: Tensor) -> Tensor:
        nonlocal room
        if tensor.is_meta and like is None:
            room -= tensor.numel() * tensor.element_size()
            if room < 0:
                raise file.damaged(path, f"its parts cannot be read ({_TOO_LARGE})")
        return _target(key, tensor, like(key) if like else None, wanted)

    from torch.distributed.checkpoint.api import CheckpointException  # no Exception
    from torch.distributed.checkpoint.state_dict_loader import load

    try:
        _change_tensors(payload, target)
        if not wanted:
            return
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")  # that there is no process group, which none needs
            load(dict(wanted), storage_reader=_reader(path, _parts(path, payload)), no_dist=True)
    except UnusableCheckpointError:
        raise
    except CheckpointException as error:
        why = _first_line(next(iter(error.failures.values()))[0])
        raise file.damaged(path, f"its parts cannot be read ({why})") from error
    except Exception as error:  # as in `file.read`: the bytes are at fault, whatever they are
        if is_out_of_memory(error):
            raise MachineError(f"there is not enough memory to read {path}") from error
        raise file.damaged(path, f"its parts cannot be read ({_first_line(error)})") from error


def digest(path: Path) -> str:
    """Return the SHA-256 that an index has of a checkpoint of either form."""
    return file.digest(path / STATE if is_folder(path) else path)


def main_file(path: Path) -> Path:
    """Return the file of a checkpoint that proves the others, if it has several."""
    return path / STATE if is_folder(path) else path


def size(path: Path) -> int:
    """Return the size of a checkpoint of either form in bytes."""
    files = path.iterdir() if is_folder(path) else [path]
    return sum(each.stat().st_size for each in files)


def remove(path: Path) -> None:
    """Remove a checkpoint of either form, if it is there; of a folder never a part alone."""
    if not is_folder(path) or not path.is_dir() or path.is_symlink():
        path.unlink(missing_ok=True)
        return
    # Not by the name under which one is being written that will have this name.
    going = disk.temporary(path.with_name(f"{path.name}.old"))
    os.replace(path, going)
    shutil.rmtree(going)


def _write_parts(
    path: Path, folder: Path | None, shards: Mapping[str, Tensor], writers: Writers
) -> dict[str, Written]:
    """Write the parts of all ranks to the folder that rank 0 has made; return them all."""
    from torch.distributed.checkpoint.api import CheckpointException
    from torch.distributed.checkpoint.filesystem import FileSystemWriter
    from torch.distributed.checkpoint.state_dict_saver import save

    problem: OSError | None = None
    if folder is not None:
        try:
            folder.mkdir()
        except OSError as error:
            problem = error
    quiet = logging.getLogger("torch.distributed.checkpoint")
    try:
        told, problem = writers.of_first((folder, problem))
        if problem is not None:
            raise disk.fault(path, problem, 0)
        assert told is not None, "rank 0 has a folder"
        with warnings.catch_warnings():
            warnings.simplefilter("ignore")
            quiet.setLevel(logging.ERROR)
            save(
                dict(shards),
                # Copies ahead would go over a stream of the current device, and wait for the step.
                storage_writer=FileSystemWriter(told, thread_count=1, per_thread_copy_ahead=0),
                process_group=writers.group,
            )
        own = [*told.glob(f"__{writers.rank}_*.distcp"), *([told / _METADATA] if folder else [])]
        parts = {part.name: Written(part.stat().st_size, file.digest(part)) for part in own}
        every = writers.gather(parts)
    except CheckpointException as error:
        raise _fault(path, error) from error
    except RuntimeError as error:  # of a collective: the others are gone, and have their own words
        if not comes_of_others(error):
            raise MachineError(f"cannot write {path}: {_first_line(error)}") from error
        lost = "it took too long" if is_timeout(error) else "another rank was gone before it ended"
        raise MachineError(f"{path} is not saved: {lost}") from error
    return {name: part for parts in every for name, part in parts.items()}


def _fault(path: Path, error: Any) -> MachineError:
    """Describe which rank could not write, and why."""
    rank, (cause, _) = next(iter(error.failures.items()))
    if isinstance(cause, OSError):
        return disk.fault(path, cause, 0)
    if "inline_container" in f"{cause}":  # torch's writer, which forgets what the system said
        return MachineError(
            f"no room to write {path}, it seems: rank {rank} could not write its part to the end; "
            "the checkpoints before it are intact: make room, then resume"
        )
    return MachineError(f"cannot write {path}: rank {rank}: {_first_line(cause)}")


def _parts(path: Path, payload: Mapping[str, Any]) -> dict[str, Written]:
    """Return the parts that ``state.pt`` tells of, none of them outside of the folder."""
    told = payload.get(PARTS)
    if not isinstance(told, dict):
        raise file.damaged(path, f"its {STATE} does not tell of its parts")
    parts = {}
    for name, row in told.items():
        is_part = isinstance(name, str) and _PART.fullmatch(name) and isinstance(row, dict)
        if not is_part or not isinstance(row.get("size"), int):
            raise file.damaged(path, f"its {STATE} tells of a part {str(name)[:80]!r}")
        parts[name] = Written(row["size"], str(row.get("sha256")))
    if _METADATA not in parts:
        raise file.damaged(path, f"it has no {_METADATA}")
    return parts


def _change_tensors(payload: dict[str, Any], change: Callable[[str, Tensor], Tensor]) -> None:
    """Change the tensors in a nest of dicts and lists, in place; each dict and list once.

    A nest from a file may be deep, and may hold one list in many places.
    """
    left: list[tuple[str, Any]] = [("", payload)]
    seen: set[int] = set()
    while left:
        key, value = left.pop()
        if id(value) in seen:
            continue
        seen.add(id(value))
        for name, part in list(value.items() if isinstance(value, dict) else enumerate(value)):
            inner = f"{key}.{name}" if key else f"{name}"
            if isinstance(part, Tensor):
                value[name] = change(inner, part)
            elif isinstance(part, dict | list):
                left.append((inner, part))


def _target(key: str, tensor: Tensor, own: Tensor | None, wanted: dict[str, Tensor]) -> Tensor:
    fits = own is not None and is_sharded(own) and own.shape == tensor.shape
    if not tensor.is_meta:
        return spread(tensor, cast(Tensor, own)) if fits else tensor
    if fits:
        wanted[key] = torch.empty_like(cast(Tensor, own), dtype=tensor.dtype, requires_grad=False)
    else:
        wanted[key] = torch.empty(tensor.shape, dtype=tensor.dtype)
    return wanted[key]


def _reader(path: Path, parts: Collection[str]) -> Any:
    from torch.distributed.checkpoint.filesystem import FileSystemReader

    class Reader(FileSystemReader):
        """Torch's reader, whose index is data: torch would unpickle whatever stands in it."""

        def read_metadata(self, *args: Any, **kwargs: Any) -> Any:
            return read_metadata(files.read(path / _METADATA, most=_MOST_METADATA), parts)

        def _slice_file(self, file: Any, sinfo: Any) -> Any:
            piece = io.BytesIO(super()._slice_file(file, sinfo).read())
            archive.examine(piece, comment=0)
            piece.seek(0)
            return piece

    return Reader(path)


def _first_line(error: BaseException) -> str:
    return f"{type(error).__name__}: {error}".splitlines()[0][:200]
