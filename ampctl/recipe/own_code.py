"""The user's own code in a traceback: the frames that its author looks for, none of ours above.

What is the user's own file is for ``recipe.fault`` to say.
"""

from __future__ import annotations

import pickle
import traceback

from ampctl.recipe.fault import is_users_own_file


class InWorker(Exception):  # noqa: N818 (it is the cause of an error, and holds its traceback)
    """The traceback, as text, of an error that another process has raised."""


def own_frames(error: BaseException) -> traceback.StackSummary:
    """Return the frames from the first one in a file of the user's own on; none if it has none."""
    frames = traceback.extract_tb(error.__traceback__)
    own = (i for i, each in enumerate(frames) if is_users_own_file(each.filename))
    start = next(own, len(frames))
    return traceback.StackSummary.from_list(frames[start:])


def as_text(error: BaseException) -> str:
    """Return the traceback of an error as the interpreter prints it, from the user's own line on.

    It is whole if no file of the user's own is in it. Of an error that another process has raised
    it is the traceback there.
    """
    if isinstance(error.__cause__, InWorker):
        above = f"{error.__cause__}"
    elif own_frames(error):
        above = frames_as_text(error)
    else:
        return "".join(traceback.format_exception(error)).rstrip()
    notes = [f"  ({note})\n" for note in getattr(error, "__notes__", ())]
    return "".join([above, *notes, _said(error)]).rstrip()


def frames_as_text(error: BaseException) -> str:
    """Return the traceback of an error above its last lines, from the user's own line on."""
    frames = own_frames(error) or traceback.extract_tb(error.__traceback__)
    return "".join(["Traceback (most recent call last):\n", *frames.format()])


def _said(error: BaseException) -> str:
    """Return the last line of an error's traceback, or lines, without its notes."""
    last = traceback.TracebackException.from_exception(error)
    last.__notes__ = None
    return "".join(last.format_exception_only())


def as_exception(error: BaseException) -> Exception:
    """Return an error that ends nothing quietly: neither a loop over what raised it, nor a process.

    ``sys.exit()`` in the midst of a run would look like its end.
    """
    if isinstance(error, SystemExit):
        told = RuntimeError(f"sys.exit({error.code!r}) was called in the midst of it")
    elif isinstance(error, StopIteration) or not isinstance(error, Exception):
        said = f": {error}" if error.args else ""
        told = RuntimeError(f"{type(error).__name__} was raised{said}")
    else:
        return error
    told.__suppress_context__ = True
    return told.with_traceback(error.__traceback__)


def carried(error: Exception) -> Exception:
    """Return an error as it can go to another process, or one that says the same."""
    try:
        if type(pickle.loads(pickle.dumps(error))) is type(error):
            return error
        why = "its class gives another one back"
    except Exception as fault:  # its class is somebody's own: anything can go wrong
        why = f"{fault}"
    other = RuntimeError(f"{type(error).__name__}: {error} (which pickle cannot carry: {why})")
    for note in getattr(error, "__notes__", ()):
        other.add_note(f"{note}")
    return other
