"""Entry point of the ``ampctl`` command, of ``python -m ampctl`` and so of each rank."""

import sys

from ampctl.launcher import streams
from ampctl.recipe.current_folder import close_current_folder


def main() -> None:
    """Run the command line."""
    streams.require()
    close_current_folder()  # before anything is imported that is not Python's or ampctl's own
    import faulthandler

    from ampctl.cli import app, screen
    from ampctl.distributed import launched, startup_signal

    if sys.argv[1:2] in (["train"], ["resume"]):
        startup_signal.handle()
    if launched.is_rank():
        faulthandler.enable()
        launched.end_with_launcher()
    with launched.leaving_at_its_end(), screen.with_own_lines():
        app(prog_name="ampctl")


if __name__ == "__main__":
    main()
