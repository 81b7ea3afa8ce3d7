"""What reading data raises: in the training process and in a data worker it is told alike."""

from __future__ import annotations

from asyncio import CancelledError
from typing import NoReturn

from ampctl.errors import AmpctlError
from ampctl.recipe.fault import failure, is_out_of_memory, out_of_memory, users_lines
from ampctl.recipe.own_code import as_exception

FAULTS = (Exception, SystemExit, CancelledError)
"""What the code of a data set raises by mistake; a ``SystemExit`` would end a worker in silence."""


def raise_told(error: BaseException, reading: str, key: str) -> NoReturn:
    """Raise an error that came of reading something of a data set, as the user is to see it.

    In words where no line of the user's own has a part in it: a mistake in the recipe's block
    ``key`` then. Otherwise itself, with a note; or another one, if it would end what is around.
    """
    if isinstance(error, AmpctlError):
        raise error
    if isinstance(error.__cause__, StopIteration):  # a generator of theirs, whose lines it has not
        error = error.__cause__
    if is_out_of_memory(error):
        raise out_of_memory(error) from error
    if not users_lines(error):
        raise failure(error, f"reading {reading} failed", "", key) from error
    raised = as_exception(error)
    raised.add_note(f"reading {reading} of {key}")
    raise raised
