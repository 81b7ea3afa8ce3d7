"""Operations that do not run in half precision where a run wants them to: found out, and cured.

That the dtype is at fault is no guess from what torch says: the same batch runs in float32. What is
advised has been tried on it too, unless other ranks would have to take part.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Sequence
from contextlib import nullcontext
from typing import Any

import torch

from ampctl.doctor.replay import (
    Replay,
    half_modules,
    in_dtype,
    in_float32,
    module_in_float32,
    replay,
    unchanged,
)
from ampctl.doctor.torch_errors import Steps, innermost_module
from ampctl.engine.state import TrainState
from ampctl.errors import UsageError
from ampctl.recipe.fault import own_place

# Of errors without any of these, another run of somebody's code would tell nothing.
_SPEAKS_OF_DTYPES = re.compile(
    r"(?i)half|float16|\bfloat\b|dtype|scalar ?type|not implemented for|create a primitive|"
    r"precision|autocast"
)


class HalfPrecisionError(UsageError):
    """An operation does not run in the dtype of the run on its device; in float32 it does."""


def explained(
    error: Exception, steps: Steps, state: TrainState, window: Sequence[Any]
) -> str | None:
    """Return what does not run in half precision, and what does; None if that is not the fault.

    ``window``: the micro-batches of the step that failed; none, if they cannot be had.
    """
    name = state.precision.name
    half = [name] if name != "float32" else [state.module_dtypes[m] for m in half_modules(state)]
    is_of_step = any(isinstance(f.f_locals.get("self"), torch.optim.Optimizer) for f, _ in steps)
    if not half or is_of_step or not _SPEAKS_OF_DTYPES.search(f"{error}"):
        return None
    layer = innermost_module(steps, state.bare)
    where, kind = layer or ("", "")
    place = f"model{'.' if where else ''}{where} ({kind})" if layer else own_place(error)
    place = place or "the backward pass"
    # Several ranks would have to run it together, and the others know nothing of it.
    can_try = bool(window) and state.ranks.size == 1
    if not can_try and "not implemented for" not in f"{error}" and "primitive" not in f"{error}":
        return None
    with unchanged(state) if can_try else nullcontext():
        if can_try and _fault(lambda: in_float32(state, window)):
            return None
        cures = [advice for advice, run in _cures(state, window, where) if not can_try or run()]
    if not where:
        cures.append("float32 for these lines: x.float() under torch.autocast(..., enabled=False)")
    tried = " (tried on this batch)" if can_try else ""
    return (
        f"{place} does not run in {half[0]} on this {state.device.type}, in float32 it does"
        f"{'' if can_try else ' as a rule'}. Set {' or '.join(cures)}{tried}."
    )


def _cures(
    state: TrainState, window: Sequence[Any], where: str
) -> Iterator[tuple[str, Callable[[], bool]]]:
    """Yield changes of a recipe, and functions that return whether a window runs with them."""

    def in_island() -> Replay:
        with module_in_float32(state, where):
            return replay(state, window)

    if where:
        yield f'amp.modules={{"{where}": float32}}', lambda: not _fault(in_island)
    for name in ("bfloat16", "float32"):
        if name != state.precision.name and (name, state.precision.name) != ("bfloat16", "float32"):
            other = in_dtype(state, name)
            yield (
                f"amp.dtype={name}",
                lambda other=other: (
                    not _fault(  # type: ignore[misc]
                        lambda: replay(other, window)
                    )
                ),
            )


def _fault(run: Callable[[], Replay | RuntimeError]) -> Exception | None:
    """Return the error that a run of a window ends in, the same as before or another one."""
    try:
        found = run()
    except Exception as error:
        return error
    return found if isinstance(found, RuntimeError) else None
