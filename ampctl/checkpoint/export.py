"""The weights of a checkpoint alone, in a file that other tools read.

The recipe inside is not built: all that is needed lies in the checkpoint, so that there is nothing
to trust.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import stat
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import Any

import torch
from torch import Tensor

from ampctl import __version__, files
from ampctl.checkpoint import disk
from ampctl.checkpoint.contents import (
    Facts,
    fact,
    is_whole,
    nonfinite_by_design,
    recipe_digest,
    word,
)
from ampctl.checkpoint.file import Passed, unseen
from ampctl.checkpoint.index import FOLDER, INDEX
from ampctl.checkpoint.other_formats import SAFETENSORS
from ampctl.checkpoint.store import load
from ampctl.errors import CheckpointError, MachineError, RecipeError, UsageError, first_of
from ampctl.recipe.load import parse_recipe
from ampctl.state_dict.checks import place
from ampctl.state_dict.copies import nonfinite

TORCH = ".pt"
DTYPES = {"float32": torch.float32, "bfloat16": torch.bfloat16, "float16": torch.float16}

Notify = Callable[[str], None]


def export(
    source: Path,
    out: Path,
    *,
    ema: bool | None,
    dtype: str | None,
    force: bool,
    notify: Notify,
    passed: Passed = unseen,
) -> Facts:
    """Write the weights of a checkpoint, or of a run folder's newest, to ``out``; say what it is.

    ``out`` is a ``.safetensors`` file with metadata, or a ``.pt`` file with a state dict. ``ema``:
    the averaged weights or the raw ones; None is the average where there is one, as in evaluation.
    ``dtype`` is that of all floating tensors, None what they have. Tied weights are one tensor: in
    safetensors under the first of their names. Raises UsageError for an ``out`` that cannot be,
    CheckpointError for weights that cannot be used or do not fit the dtype, MachineError for a
    disk that does not take them. ``passed`` is told how far the checkpoint is read.
    """
    _require_place(source, out, force=force)
    found = load(source, notify=notify, passed=passed)
    which, weights = chosen_weights(found.payload, found.path, ema=ema)
    _refuse_odd(weights, found.path)
    tell_nonfinite(found.payload, weights, found.path, notify)
    tensors = _cast(weights, dtype, notify)
    tied = _tied(weights)
    facts = {
        "checkpoint": f"{found.path}",
        "file": f"{out}",
        "weights": which,
        "step": fact(found.payload["progress"].get("step")),
        "tensors": len(tensors) - len(tied),
        "values": sum(value.numel() for name, value in tensors.items() if name not in tied),
        "dtypes": sorted({f"{value.dtype}".removeprefix("torch.") for value in tensors.values()}),
        "tied": tied,
    }
    if out.suffix == SAFETENSORS:
        metadata = _metadata(found.payload["recipe"], facts)
        alone = {n: value.contiguous() for n, value in tensors.items() if n not in tied}
        _write(out, lambda tmp: _save_safetensors(alone, tmp, metadata))
    else:
        _write(out, lambda tmp: _save_torch(tensors, tmp))
    return {**facts, "bytes": out.stat().st_size}


def chosen_weights(
    payload: Mapping[str, Any], path: Path, *, ema: bool | None
) -> tuple[str, dict[str, Any]]:
    """Return ``ema`` or ``raw``, and those weights; None is the average where there is one.

    Raises CheckpointError if an average is asked for that is not there.
    """
    if ema and payload["ema"] is None:
        raise CheckpointError(
            f"checkpoint {path} holds no EMA, as its run had no train.ema_decay: leave --ema out"
        )
    if payload["ema"] is None or ema is False:
        return "raw", payload["model"]
    return "ema", payload["ema"]


def tell_nonfinite(
    payload: dict[str, Any], weights: Mapping[str, Any], path: Path, notify: Notify
) -> None:
    """Warn of weights that hold a NaN or an infinity, but for those that did from the start."""
    bad = nonfinite(dict(weights), "weights", by_design=nonfinite_by_design(payload))
    if bad:
        names = [word(name.split(".", 1)[1]) for name in bad]
        notify(f"{path} holds NaN or infinity in {first_of(names)}")


def _require_place(source: Path, out: Path, *, force: bool) -> None:
    if out.suffix not in (SAFETENSORS, TORCH):
        raise UsageError(
            f"{out}: the name of the file says its format; allowed: NAME{SAFETENSORS}, or "
            f"NAME{TORCH} for a state dict that torch.load reads"
        )
    if not os.path.isdir(out.parent):
        raise UsageError(f"{out}: there is no folder {out.parent}; make it first")
    if os.path.isdir(out):
        raise UsageError(f"{out} is a folder; name a file")
    folder = out.parent.resolve()
    is_source = all(map(os.path.exists, (out, source))) and out.samefile(source)
    if is_source or (folder.name == FOLDER and os.path.exists(folder / INDEX)):
        raise UsageError(f"{out} is in the checkpoints of a run; write the weights elsewhere")
    if os.path.lexists(out) and not force:
        raise UsageError(f"{out} exists already; give another name, or --force to replace it")
    if out.suffix == SAFETENSORS and importlib.util.find_spec("safetensors") is None:
        raise UsageError(
            f'safetensors is not installed\n    pip install "ampctl[export]", or name a {TORCH} '
            "file"
        )


def _refuse_odd(weights: Mapping[Any, Any], path: Path) -> None:
    """Raise CheckpointError for what is no weight with a name and values."""
    odd = [
        word(name)
        for name, value in weights.items()
        if not isinstance(name, str)
        or not isinstance(value, Tensor)
        or not is_whole(value)
        or name == "__metadata__"
        or any("\ud800" <= letter <= "\udfff" for letter in name)
    ]
    if odd:
        raise CheckpointError(
            f"the weights of {path} cannot be exported: no plain tensors are {first_of(odd)}. "
            "Build the model (ampctl.load_model) and save it as its own library does."
        )


def _cast(weights: Mapping[str, Tensor], dtype: str | None, notify: Notify) -> dict[str, Tensor]:
    """Bring floating tensors to a dtype; raise CheckpointError where it is too small for them."""
    if dtype is None:
        return dict(weights)
    wanted = DTYPES[dtype]
    done: dict[tuple[Any, ...], Tensor] = {}
    cast: dict[str, Tensor] = {}
    too_large, lost, nonzero = [], 0, 0
    for name, value in weights.items():
        if not value.is_floating_point():
            cast[name] = value
            continue
        if place(value) in done:
            cast[name] = done[place(value)]
            continue
        cast[name] = done[place(value)] = value.to(wanted)
        if wanted.itemsize >= value.dtype.itemsize > 1:
            continue
        wide = value.float() if value.element_size() == 1 else value
        was_finite = torch.isfinite(wide)
        if not torch.equal(torch.isfinite(cast[name]), was_finite):
            too_large.append(f"{word(name)} (up to {wide[was_finite].abs().max().item():.4g})")
        lost += int(((cast[name] == 0) & (wide != 0)).sum())
        nonzero += int((wide != 0).sum())
    if too_large:
        raise CheckpointError(
            f"values are out of the range of {dtype}, up to {torch.finfo(wanted).max:g}, in "
            f"{first_of(too_large)}. Export in bfloat16 or float32."
        )
    if lost:
        notify(f"{lost:,} of {nonzero:,} values that are not 0 are too small for {dtype}: 0 there")
    return cast


def _tied(weights: Mapping[str, Tensor]) -> dict[str, str]:
    """Return the names that share the tensor of one before them, and its name."""
    first: dict[tuple[Any, ...], str] = {}
    tied = {}
    for name, value in weights.items():
        kept = first.setdefault(place(value), name)
        if kept != name:
            tied[name] = kept
    return tied


def _metadata(recipe: str, facts: Facts) -> dict[str, str]:
    """Return what a reader of the file should know, as safetensors has it: texts by name."""
    try:
        name = word(parse_recipe(recipe, where="recipe").recipe.name)
    except RecipeError:
        name = ""
    return {
        "format": "pt",
        "ampctl": __version__,
        "name": name,
        "step": f"{facts['step']}",
        "recipe_digest": recipe_digest(recipe),
        "weights": facts["weights"],
        "dtype": ", ".join(facts["dtypes"]),
        "tied": json.dumps(facts["tied"]),
    }


def _save_torch(tensors: dict[str, Tensor], tmp: Path) -> None:
    with files.create(tmp) as file:
        try:
            torch.save(tensors, file)
        except RuntimeError as error:  # of its C++ writer, on top of what the disk said
            cause = error.__context__
            raise (cause if isinstance(cause, OSError) else OSError(0, f"{error}")) from error


def _save_safetensors(tensors: dict[str, Tensor], tmp: Path, metadata: dict[str, str]) -> None:
    from safetensors import SafetensorError
    from safetensors.torch import save_file

    mode = stat.S_IMODE(tmp.stat().st_mode)
    try:
        save_file(tensors, tmp, metadata=metadata)
    except SafetensorError as error:
        number = re.search(r"(?:os error|code:) (\d+)", f"{error}")
        raise OSError(int(number[1]) if number else 0, f"{error}") from error
    except KeyError as error:  # a dtype that it has no name for
        names = [word(n) for n, value in tensors.items() if value.dtype == error.args[0]]
        raise CheckpointError(
            f"safetensors has no {error.args[0]}, in which are {first_of(names)}; give --dtype, or "
            f"name a {TORCH} file"
        ) from error
    _in_order(tmp)
    tmp.chmod(mode)  # it has made a file of its own, which only its owner may read


def _in_order(path: Path) -> None:
    """Sort the metadata, which safetensors writes in any order: one export is always one file.

    The header is JSON behind its length in 8 bytes; see https://huggingface.co/docs/safetensors.
    """
    with os.fdopen(files.descriptor(path, os.O_RDWR), "r+b") as file:
        length = int.from_bytes(file.read(8), "little")
        header = json.loads(file.read(length))
        header["__metadata__"] = dict(sorted(header["__metadata__"].items()))
        text = json.dumps(header, separators=(",", ":"), ensure_ascii=False).encode()
        if len(text) <= length:
            file.seek(8)
            file.write(text.ljust(length))


def _write(out: Path, save: Callable[[Path], object]) -> None:
    """Write a file that is whole or absent."""
    tmp = disk.temporary(out)
    try:
        files.create(tmp).close()
        save(tmp)
        with files.open_to_read(tmp) as file:
            os.fsync(file.fileno())
        disk.publish(tmp, out)
    except OSError as error:
        disk.discard(tmp)
        reason = os.strerror(error.errno) if error.errno else f"{error}"
        raise MachineError(
            f"cannot write {out}: {reason}; make room or name another place"
        ) from error
    except BaseException:
        disk.discard(tmp)
        raise
