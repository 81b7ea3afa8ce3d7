"""Entry point of the ``ampctl`` command and of ``python -m ampctl``."""

from ampctl.cli import app


def main() -> None:
    """Run the command line."""
    app(prog_name="ampctl")


if __name__ == "__main__":
    main()
