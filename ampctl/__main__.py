"""Entry point of the ``ampctl`` command, of ``python -m ampctl`` and so of each rank."""

import faulthandler
import sys

from ampctl.cli import app
from ampctl.distributed import early, member


def main() -> None:
    """Run the command line."""
    if sys.argv[1:2] in (["train"], ["resume"]):
        early.heed()
    if member.is_rank():
        faulthandler.enable()
        member.end_with_launcher()
    app(prog_name="ampctl")


if __name__ == "__main__":
    main()
