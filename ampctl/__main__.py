"""Entry point of the ``ampctl`` command, of ``python -m ampctl`` and so of each rank."""

import faulthandler

from ampctl.cli import app
from ampctl.distributed import member


def main() -> None:
    """Run the command line."""
    if member.is_rank():
        faulthandler.enable()
        member.end_with_launcher()
    app(prog_name="ampctl")


if __name__ == "__main__":
    main()
