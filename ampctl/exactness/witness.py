"""One run that is looked at step by step: digests of its state, its samples, and what is hidden.

Each runs in a process of its own, so that nothing goes from one run to another but by the
checkpoint; `proof` starts them and compares what they have noted.
"""

from __future__ import annotations

import hashlib
import json
import random
import sys
from collections.abc import Iterator, Mapping, Sized
from dataclasses import replace
from pathlib import Path
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn

from ampctl import torch_private
from ampctl.builder.job import Job
from ampctl.data.loader import TrainData, Window, unwrapped
from ampctl.data.stream import StreamData
from ampctl.errors import AmpctlError
from ampctl.recipe.fault import is_users_own_file
from ampctl.recipe.load import load_recipe
from ampctl.rng import DrawProbe
from ampctl.run import worker
from ampctl.state_dict.optimizers import is_torchs_own
from ampctl.tasks.task import as_written

PARTS = (
    "weights",
    "buffers",
    "optimizer",
    "scheduler",
    "ema",
    "scaler",
    "progress",
    "random numbers",
    "data set",
)
"""The parts of a state, in the order in which a difference is told."""

_DEEPEST = 20
_LARGEST = 10_000
_ATOMS = (type(None), bool, int, float, str, bytes)
_OF_A_MODULE = frozenset(vars(nn.Module()))
# What torch.optim keeps for itself, and makes anew: it steers no step.
_OF_AN_OPTIMIZER = frozenset(
    {"defaults", "state", "param_groups", "_need_device_dtype_check_for_fused", "_opt_called"}
)
_OF_A_SCHEDULER = frozenset(
    {"_get_lr_called_within_step", "_is_initial", "_last_lr", "_step_count"}
)

Digests = dict[str, str]


def main(path: str) -> int:
    """Make the run that a file describes, and leave there what was seen, or the error.

    Returns the exit code; what is no AmpctlError passes through, with its traceback.
    """
    told = Path(path)
    spec = json.loads(told.read_text(encoding="utf-8"))
    found: dict[str, Any] = {}
    code = 0

    def watch(job: Job) -> Job:
        return replace(job, train_data=Witness(job, found))

    try:
        if spec["source"] is None:
            loaded = load_recipe(spec["recipe"], spec["overrides"])
            run_dir = Path(spec["run_dir"])
            worker.train(loaded, run_dir=run_dir, resume=False, quiet=True, watch=watch)
        else:
            source, run_dir = Path(spec["source"]), Path(spec["run_dir"])
            worker.resume(source, (), run_dir=run_dir, trusted=True, quiet=True, watch=watch)
    except AmpctlError as error:
        found, code = {"error": f"{error}"}, error.exit_code
    told.with_suffix(".found").write_text(json.dumps(found), encoding="utf-8")
    return code


class Witness:
    """Training data that notes, whenever a step is asked for, where the run stands.

    ``found`` has, by step: ``states`` after so many steps, ``samples`` of the step, ``hidden``
    values that no checkpoint holds, and ``places`` (epoch, steps in it); and ``steps_per_epoch``,
    as far as known.
    """

    def __init__(self, job: Job, found: dict[str, Any]) -> None:
        self._job = job
        self._data = job.train_data
        self._buffers = {name for name, _ in job.state.bare.named_buffers()}
        self._found = found
        found |= {"states": {}, "samples": {}, "hidden": {}, "places": {}}
        found["kind"] = _kind(job.train_data)
        found["steps_per_epoch"] = job.train_data.steps_per_epoch

    @property
    def dataset(self) -> Any:
        """What is read."""
        return getattr(self._data, "dataset", None)

    @property
    def steps_per_epoch(self) -> int | None:
        """Optimizer steps in an epoch."""
        return self._data.steps_per_epoch

    @property
    def probe(self) -> DrawProbe:
        """What follows the generators of Python and NumPy while data is read."""
        return self._data.probe

    def windows(self, epoch: int, first_step: int) -> Iterator[tuple[Window, int]]:
        """Yield each step's micro-batches, and note the state before and the samples of it."""
        windows = self._data.windows(epoch, first_step)
        while True:
            self._note_state()
            try:
                window, samples = next(windows)
            except StopIteration:
                return
            step = f"{self._job.state.progress.step + 1}"
            self._found["samples"][step] = digests(unwrapped(window))
            yield window, samples

    def state_dict(self) -> dict[str, Any]:
        """Return what a checkpoint keeps of the data."""
        return self._data.state_dict()

    def load_state_dict(self, state: Mapping[str, Any]) -> None:
        """Restore it."""
        self._data.load_state_dict(state)

    def close(self) -> None:
        """Note the last state, and end worker processes."""
        if self._job.state.pending is None:  # else the run is not at a step's end: it has failed
            self._note_state()
        self._data.close()

    def _note_state(self) -> None:
        state = self._job.state
        saved = state.state_dict()
        model = digests(saved["model"])
        parts: dict[str, Digests] = {
            "weights": {n: d for n, d in model.items() if n not in self._buffers},
            "buffers": {n: d for n, d in model.items() if n in self._buffers},
            "random numbers": digests(saved["rng"]),
            "data set": digests(self._data.state_dict()),
        }
        for name in ("optimizer", "scheduler", "ema", "scaler", "progress"):
            parts[name] = digests(saved[name])
        step = f"{state.progress.step}"
        self._found["states"][step] = {name: parts[name] for name in PARTS}
        self._found["hidden"][step] = self._hidden()
        self._found["places"][step] = [state.progress.epoch, state.progress.batch_in_epoch]

    def _hidden(self) -> Digests:
        """Return the values in Python attributes of the user's parts, which nothing saves."""
        state = self._job.state
        found: Digests = {}
        for name, module in state.bare.named_modules():
            where = f"model.{name}" if name else "model"
            found |= _attributes(where, module, _OF_A_MODULE)
            for own in torch_private.passing_buffers(module):
                buffer = torch_private.own_buffers(module)[own]
                _take(buffer, f"{where}.{own} (persistent=False)", found, 0, _LARGEST)
        for updater in state.updaters:
            suffix = f".{updater.name}" if updater.name else ""
            if not is_torchs_own(updater.optimizer):
                found |= _attributes(f"optimizer{suffix}", updater.optimizer, _OF_AN_OPTIMIZER)
            schedule = updater.learning_rate.source
            found |= _attributes(f"scheduler{suffix}", schedule, _OF_A_SCHEDULER)
            for i, inner in enumerate(torch_private.inner_schedulers(schedule)):  # SequentialLR's
                found |= _attributes(f"scheduler{suffix}._schedulers.{i}", inner, _OF_A_SCHEDULER)
        found |= _attributes("task", as_written(state.task), frozenset())
        dataset = self.dataset
        where = "data.train"
        for _ in range(_DEEPEST):  # a Subset and the like hold another one
            if dataset is None:
                break
            found |= _attributes(where, dataset, frozenset({"dataset"}))
            dataset, where = getattr(dataset, "dataset", None), f"{where}.dataset"
        return found | _globals()


def digests(value: Any, name: str = "") -> Digests:
    """Return a digest of each tensor and each plain value in a nest, by dotted name."""
    found: Digests = {}
    _take(value, name, found, 0, None)
    return found


def _take(value: Any, name: str, found: Digests, depth: int, largest: int | None) -> None:
    if depth > _DEEPEST or (largest is not None and _count(value) > largest):
        return
    items: Any = ()
    if isinstance(value, Mapping):
        items = value.items()
    elif isinstance(value, list | tuple) and not all(isinstance(v, _ATOMS) for v in value):
        items = enumerate(value)
    else:
        digest = _digest(value)
        if digest is not None:
            found[name or "value"] = digest
        return
    for key, item in items:
        _take(item, f"{name}.{key}" if name else f"{key}", found, depth + 1, largest)


def _count(value: Any) -> int:
    if isinstance(value, Tensor):
        return value.numel()
    if isinstance(value, np.ndarray):
        return value.size
    return len(value) if isinstance(value, Sized) else 0


def _digest(value: Any) -> str | None:
    """Return a few letters that tell values apart; None for what has no value to be told by."""
    if isinstance(value, Tensor):
        plain = value.detach().cpu()
        plain = plain if plain.layout == torch.strided else plain.to_dense()
        data = plain.reshape(-1).contiguous().view(torch.uint8).numpy().data
        return _hashed(data, f"{plain.dtype} {list(plain.shape)}")
    if isinstance(value, np.ndarray) and value.dtype != object:
        return _hashed(np.ascontiguousarray(value).tobytes(), f"{value.dtype} {value.shape}")
    if isinstance(value, _ATOMS):
        text = repr(value)
        return text if len(text) <= 40 else _hashed(text.encode(), type(value).__name__)
    if isinstance(value, list | tuple | set | frozenset):
        if not all(isinstance(v, _ATOMS) for v in value):
            return None
        items = sorted(value, key=repr) if isinstance(value, set | frozenset) else value
        return _hashed(repr(items).encode(), type(value).__name__)
    return _digest_of_generator(value)


def _digest_of_generator(value: Any) -> str | None:
    state: Any = None
    if isinstance(value, random.SystemRandom):
        return None
    if isinstance(value, random.Random):
        state = value.getstate()
    elif isinstance(value, np.random.Generator):
        state = value.bit_generator.state
    elif isinstance(value, np.random.RandomState):
        state = [part if isinstance(part, _ATOMS) else part.tolist() for part in value.get_state()]
    elif isinstance(value, torch.Generator):
        state = value.get_state().tolist()
    return None if state is None else _hashed(repr(state).encode(), type(value).__name__)


def _hashed(data: Any, what: str) -> str:
    return f"{what} {hashlib.sha256(data).hexdigest()[:16]}"


def _attributes(where: str, thing: Any, known: frozenset[str]) -> Digests:
    """Return digests of an object's own small values: counters, generators, lists."""
    found: Digests = {}
    for name, value in list(getattr(thing, "__dict__", {}).items()):
        if name not in known and not isinstance(value, nn.Module):
            _take(value, f"{where}.{name}", found, 0, _LARGEST)
    return found


def _globals() -> Digests:
    """Return digests of the globals of the user's own modules, and of what their classes share."""
    found: Digests = {}
    for name, module in list(sys.modules.items()):
        file = getattr(module, "__file__", None)
        if not file or not is_users_own_file(file):
            continue
        for key, value in _not_dunder(vars(module)):
            where = f"global {name}.{key}"
            if isinstance(value, type) and value.__module__ == name:
                for own, shared in _not_dunder(vars(value)):
                    _take(shared, f"{where}.{own}", found, 0, _LARGEST)
            elif not isinstance(value, nn.Module):
                _take(value, where, found, 0, _LARGEST)
    return found


def _not_dunder(names: Mapping[str, Any]) -> list[tuple[str, Any]]:
    return [each for each in names.items() if not each[0].startswith("__")]


def _kind(data: TrainData) -> str:
    """Describe how a run finds its place in the data again."""
    if not isinstance(data, StreamData):
        return "by index"
    return "by its state_dict" if data.keeps_state else "read from its beginning"


if __name__ == "__main__":
    sys.exit(main(sys.argv[1]))
