"""Whether a recipe resumes exactly: a few steps straight, and the same stopped and resumed.

The runs are those of ``train`` and ``resume``, each in a process of its own under a `witness`; what
they noted is compared here, step by step, and the first thing that differs is named.
"""

from __future__ import annotations

import json
import subprocess
import sys
import tempfile
from collections.abc import Callable, Mapping, Sequence
from contextlib import suppress
from dataclasses import asdict
from pathlib import Path
from typing import Any

from ampctl.checkpoint.contents import Facts
from ampctl.checkpoint.difference import difference
from ampctl.checkpoint.index import FOLDER, file_name
from ampctl.checkpoint.store import load
from ampctl.distributed import launched
from ampctl.distributed.env import ended_at_once
from ampctl.errors import AmpctlError, CheckpointError, UsageError
from ampctl.exactness.verdict import Difference, Noted, advice, no_boundary, words
from ampctl.exactness.witness import PARTS
from ampctl.recipe.load import LoadedRecipe, load_recipe
from ampctl.recipe.reading import STDIN

STEPS = 6

Notify = Callable[[str], None]


class RunFailedError(AmpctlError):
    """One of the runs ended early; message and exit code are its own."""

    def __init__(self, message: str, exit_code: int) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def prove(source: str, overrides: Sequence[str], *, steps: int, notify: Notify) -> Facts:
    """Train a recipe straight, and resume it from where it was stopped; return what differs.

    It is stopped in the middle, and at an epoch's end if there is one in these steps. ``exact``
    tells the outcome; ``epoch_ends`` the steps after which an epoch ended within the run,
    ``difference`` the first thing that differs, ``repeatable`` whether two straight runs agree up
    to there, ``hidden`` attributes and globals that no checkpoint holds and that differ after
    resuming, ``advice`` what to do. The runs are in a temporary folder, which is removed.
    Raises RecipeError, UsageError, and what a run ends with if it fails.
    """
    if launched.is_rank():
        raise UsageError("`verify --resume` runs as one process: start it without a launcher")
    ours = [
        f"train.max_steps={steps}",
        "checkpoint.every_steps=1",
        "checkpoint.every_minutes=null",
        f"checkpoint.keep_last={steps}",
        "checkpoint.asynchronous=false",
    ]
    changed = [*overrides, *ours]
    loaded = load_recipe(source, changed)
    limits = loaded.recipe.train
    ended = ended_at_once("before it was proved: nothing is left behind")
    with tempfile.TemporaryDirectory(prefix="ampctl-verify-") as place, ended:
        facts = _prove(Path(place), loaded, steps, notify)
    if facts["exact"] and facts["steps"] == steps and limits.max_epochs != 1:
        facts["found"] += no_boundary(facts)
    return facts


def require_exact(facts: Facts) -> None:
    """Raise CheckpointError if the resumed run was another one: its checkpoint was not enough."""
    if not facts["exact"]:
        raise CheckpointError(f"the recipe does not resume exactly: {facts['found']}")


def _prove(place: Path, loaded: LoadedRecipe, steps: int, notify: Notify) -> Facts:
    notify(f"training {steps} steps straight")
    straight = _train(place, "straight", loaded)
    last = max(map(int, straight["states"]))
    if last < 2:
        raise UsageError(f"the run is over after {last} step: it takes two to stop in between")
    stops = _stops(straight, last)
    facts: Facts = {
        "steps": last,
        "stops": stops,
        "steps_per_epoch": straight["steps_per_epoch"],
        "epoch_ends": _ends(straight, last),
        "exact": True,
        "difference": None,
    }
    for stop in stops:
        notify(f"resuming after step {stop}")
        checkpoint = place / "straight" / FOLDER / file_name(stop, True)
        if not checkpoint.exists():
            raise CheckpointError(f"the state after step {stop} is not finite: nothing to resume")
        resumed = _run(place, f"resumed-{stop}", {"source": f"{checkpoint}"})
        found = compare(straight, resumed, stop, last)
        if found is None:
            continue
        notify("training straight once more, to tell whether that repeats")
        again = _train(place, "again", loaded)
        other = compare(straight, again, 0, last)
        repeats = other is None or other.step > found.step
        hidden = _hidden(straight, resumed, stop)
        shown = found if repeats or other is None else other
        runs = (place / "straight", place / (f"resumed-{stop}" if repeats else "again"))
        return {
            **facts,
            "exact": False,
            "difference": asdict(shown),
            "stopped": stop,
            "repeatable": repeats,
            "largest": _largest(*runs, shown),
            "hidden": hidden if repeats else {},
            "data": straight["kind"],
            "found": words(shown, stop, repeats),
            "advice": advice(shown, repeats, hidden, straight, resumed),
        }
    return {**facts, "found": "the resumed run is the straight one, bit for bit"}


def compare(straight: Noted, other: Noted, start: int, last: int) -> Difference | None:
    """Return the first thing that differs between two runs from ``start`` steps on."""
    for step in range(start, last + 1):
        key = f"{step}"
        ours, theirs = straight["states"].get(key), other["states"].get(key)
        if ours is None or theirs is None:
            if ours is None and theirs is None:
                continue
            return Difference(step, "progress", ("its end",), ("progress",), False)
        parts = tuple(part for part in PARTS if ours[part] != theirs[part])
        if parts:
            names = _differing(ours[parts[0]], theirs[parts[0]])
            return Difference(step, parts[0], names, parts, step == start)
        key = f"{step + 1}"
        samples, read = straight["samples"].get(key), other["samples"].get(key)
        if step < last and samples != read:
            names = _differing(samples or {}, read or {})
            return Difference(step + 1, "samples", names, ("samples",), False)
    return None


def _differing(ours: Mapping[str, str], theirs: Mapping[str, str]) -> tuple[str, ...]:
    names = [*ours, *(name for name in theirs if name not in ours)]
    return tuple(name for name in names if ours.get(name) != theirs.get(name))


def _stops(straight: Noted, last: int) -> list[int]:
    """Return after which steps to stop: in the middle, and at the first epoch's end."""
    return sorted({last // 2, *_ends(straight, last)[:1]})


def _ends(straight: Noted, last: int) -> list[int]:
    """Return after which steps an epoch ended and another one began."""
    ends = [int(step) for step, (_, batch) in straight["places"].items() if batch == 0]
    return [step for step in ends if 0 < step < last]


def _hidden(straight: Noted, resumed: Noted, stop: int) -> dict[str, list[str | None]]:
    """Return the attributes that moved in training, and that resuming does not bring back."""
    begun, ours = straight["hidden"]["0"], straight["hidden"][f"{stop}"]
    theirs = resumed["hidden"].get(f"{stop}", {})
    return {
        name: [value, theirs.get(name)]
        for name, value in ours.items()
        if value != theirs.get(name) and value != begun.get(name)
    }


def _largest(straight: Path, other: Path, found: Difference) -> dict[str, Any] | None:
    """Return the weight that differs most after the step, if weights do and were saved."""
    name = file_name(found.step, True)
    paths = [run / FOLDER / name for run in (straight, other)]
    if found.part not in ("weights", "buffers") or not all(path.exists() for path in paths):
        return None
    with suppress(CheckpointError):
        moved = difference(*(load(path, notify=_unheard, look=True) for path in paths))["moved"]
        return dict(moved[0]) if moved else None
    return None


def _train(place: Path, name: str, loaded: LoadedRecipe) -> Noted:
    words = {"recipe": loaded.source or STDIN, "overrides": loaded.overrides, "source": None}
    return _run(place, name, words, loaded.sent)


def _run(place: Path, name: str, words: Mapping[str, Any], sent: str | None = None) -> Noted:
    """Make one run in a process of its own; return what its witness noted."""
    spec = place / f"{name}.json"
    spec.write_text(json.dumps({**words, "run_dir": f"{place / name}"}), encoding="utf-8")
    code, said = _in_process(spec, sent)
    noted = spec.with_suffix(".found")
    found = json.loads(noted.read_text(encoding="utf-8")) if noted.exists() else {}
    if "error" in found:
        raise RunFailedError(f"the {name} run: {found['error']}", code)
    if code:
        how = f"was ended by signal {-code}" if code < 0 else "failed"
        raise RunFailedError(f"the {name} run {how}\n{said}".rstrip(), 1)
    return dict(found)


def _in_process(spec: Path, sent: str | None) -> tuple[int, str]:
    """Run a witness in a new interpreter; return its exit code and what it said on stderr.

    ``sent``: a text for its standard input.
    """
    command = [sys.executable, "-m", "ampctl.exactness.witness", f"{spec}"]
    done = subprocess.run(
        command,
        input=sent or "",
        stdout=subprocess.DEVNULL,
        stderr=subprocess.PIPE,
        encoding="utf-8",
        errors="replace",
    )
    return done.returncode, done.stderr


def _unheard(text: str) -> None:
    """Ignore it: a comparison is not about that."""
