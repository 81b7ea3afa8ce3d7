"""Which code is the user's own, which of its lines an error came from, and the error in words."""

from __future__ import annotations

import errno
import functools
import re
import sysconfig
import traceback
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path

from ampctl.errors import AmpctlError, MachineError, Problem, RecipeError, printable

_MOST_LINES = 10
_LONGEST_LINE = 300
_MOST_CALLS = 3
_MACHINES = (
    *(errno.ENOSPC, errno.EDQUOT, errno.EROFS, errno.EIO),
    *(errno.EMFILE, errno.ENFILE, errno.ENOMEM),
)
_NO_MEMORY = re.compile(r"can't allocate memory|not enough memory|out of memory", re.IGNORECASE)


@functools.cache
def is_users_own_file(name: str) -> bool:
    """Return whether a source file is neither the standard library's, installed, nor ampctl's."""
    if name.startswith("<"):  # made at run time
        return False
    file = Path(name).resolve()
    paths = sysconfig.get_paths()
    libraries = [Path(paths[name]).resolve() for name in ("stdlib", "purelib", "platlib")]
    is_installed = {"site-packages", "dist-packages"} & set(file.parts)
    ours = Path(__file__).resolve().parents[1]
    return not is_installed and not any(file.is_relative_to(p) for p in [*libraries, ours])


def users_lines(error: BaseException) -> list[str]:
    """Return the user's own lines that an error came through, the innermost first, with places."""
    lines = [f"{_place(step)}: {_short(step.line or '')}" for step in _own_steps(error)]
    return [f"{'called from ' if n else ''}{line}" for n, line in enumerate(lines[:_MOST_CALLS])]


def own_place(error: BaseException) -> str:
    """Return the place of the innermost of the user's own lines, or ""."""
    return next(map(_place, _own_steps(error)), "")


def _own_steps(error: BaseException) -> list[traceback.FrameSummary]:
    steps = reversed(traceback.extract_tb(error.__traceback__))
    return [step for step in steps if is_users_own_file(step.filename)]


def _place(step: traceback.FrameSummary) -> str:
    of = "" if step.name == "<module>" else f", in {step.name}"
    return f"{_shown(step.filename)}:{step.lineno}{of}"


def error_in_words(error: BaseException) -> str:
    """Return an error's class and message, and those of what it was raised from, without frames."""
    told = _one(error)
    cause = error.__cause__
    if cause is not None:
        told += f"\nfrom {_one(cause)}"
    return told.replace("\n", "\n    ")


def failure(error: BaseException, doing: str, where: str, key: str, *advice: str) -> AmpctlError:
    """Return a failure of what a recipe names, in words: what failed, where, by which own line.

    ``doing`` says what went wrong, ``where`` and ``key`` where the recipe names it. A MachineError
    where the disk or the memory is at fault, otherwise a RecipeError.
    """
    if isinstance(error, SystemExit):
        said = f"it called sys.exit({error.code!r}), which would end the run"
    else:
        said = error_in_words(error)
    lines = [*users_lines(error), *filter(None, advice)]
    if isinstance(error, FileNotFoundError) and not Path(f"{error.filename}").is_absolute():
        lines.append(f"A relative path begins at the current folder, {Path.cwd()}.")
    problem = Problem(where, key, f"{doing}: {said}", "\n    ".join(lines))
    if _is_machines(error):
        return MachineError(f"{problem}")
    return RecipeError([problem])


def _is_machines(error: BaseException) -> bool:
    if isinstance(error, OSError):
        return error.errno in _MACHINES
    return is_out_of_memory(error)


def is_out_of_memory(error: BaseException) -> bool:
    """Return whether an allocation has failed: of Python, torch, a device or a worker."""
    if isinstance(error, MemoryError) or type(error).__name__ == "OutOfMemoryError":
        return True
    return isinstance(error, RuntimeError) and bool(_NO_MEMORY.search(f"{error}"))


@contextmanager
def memory_told() -> Iterator[None]:
    """Raise MachineError for an allocation that fails; all else comes through."""
    try:
        yield
    except AmpctlError:
        raise
    except Exception as error:
        if not is_out_of_memory(error):
            raise
        raise out_of_memory(error) from error


def out_of_memory(error: BaseException) -> MachineError:
    """Return an allocation that has failed in words, with the user's own lines."""
    return MachineError(
        "\n    ".join(
            [
                f"out of memory: {_one(error)}",
                *users_lines(error),
                "Make model, samples or data.micro_batch_size smaller, or take another machine",
            ]
        )
    )


def _one(error: BaseException) -> str:
    lines = "".join(traceback.format_exception_only(error)).rstrip().splitlines()
    shown = [_short(line.rstrip()) for line in lines[:_MOST_LINES]]
    return "\n".join([*shown, *(["..."] if len(lines) > _MOST_LINES else [])])


def _short(line: str) -> str:
    line = printable(line)
    return line if len(line) <= _LONGEST_LINE else f"{line[:_LONGEST_LINE]}..."


def _shown(file: str) -> str:
    path = Path(file)
    return f"{path.relative_to(Path.cwd()) if path.is_relative_to(Path.cwd()) else path}"
