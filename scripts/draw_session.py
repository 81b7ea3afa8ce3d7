"""Run a command in a pseudo-terminal and draw what its screen shows as an SVG picture.

    python scripts/draw_session.py [--until TEXT] OUT.svg COMMAND ...

The picture is taken when TEXT is first on the screen, or at the command's end. After TEXT the
command is left to go on to its end.
"""

from __future__ import annotations

import argparse
import codecs
import fcntl
import io
import os
import pty
import re
import shlex
import struct
import subprocess
import sys
import termios
from pathlib import Path

from rich.console import Console
from rich.text import Text

COLUMNS, ROWS = 96, 40
# Carriage return, line feed, an escape sequence, or a piece of text.
TOKEN = re.compile(r"\r|\n|\x1b\[[0-9;?]*[A-Za-z]|[^\r\n\x1b]+|\x1b")
CUT_ESCAPE = re.compile(r"(?:\x1b(?:\[[0-9;?]*)?)?\Z")
OUTSIDE = re.compile(r"\s*@font-face \{.*?\}|\s*<!--.*?-->", re.DOTALL)


class Screen:
    """The lines of a terminal, each with its colours; knows the few moves that Rich's bar makes."""

    def __init__(self) -> None:
        self.lines = [""]
        self.row = 0
        self._returned = False

    def feed(self, text: str) -> None:
        """Take what a program wrote."""
        for token in TOKEN.findall(text):
            if token == "\n":
                self.row += 1
                if self.row == len(self.lines):
                    self.lines.append("")
                self._returned = False
            elif token == "\r":
                self._returned = True
            elif token.endswith("A") and token.startswith("\x1b["):
                self.row = max(self.row - int(token[2:-1] or 1), 0)
            elif token == "\x1b[2K":
                self.lines[self.row] = ""
            elif not token.startswith("\x1b") or token.endswith("m"):
                if self._returned:
                    self.lines[self.row] = ""
                    self._returned = False
                self.lines[self.row] += token


def record(command: list[str], until: str | None) -> list[str]:
    """Run a command to its end; return the lines of its screen at the moment asked for."""
    ours, theirs = pty.openpty()
    fcntl.ioctl(theirs, termios.TIOCSWINSZ, struct.pack("HHHH", ROWS, COLUMNS, 0, 0))
    environment = {**os.environ, "TERM": "xterm-256color"}
    process = subprocess.Popen(
        command, stdin=theirs, stdout=theirs, stderr=theirs, env=environment, close_fds=True
    )
    os.close(theirs)
    screen, shown = Screen(), None
    decoder = codecs.getincrementaldecoder("utf-8")()
    held, found = "", False
    while True:
        try:
            chunk = os.read(ours, 65536)
        except OSError:  # how Linux tells the end of a pseudo-terminal
            break
        if not chunk:
            break
        text = held + decoder.decode(chunk)
        held = CUT_ESCAPE.search(text)[0]  # an escape sequence that the end of the read cut
        screen.feed(text.removesuffix(held))
        if found and shown is None:
            shown = list(screen.lines)  # one redraw later, so that the bar below is whole
        found = found or bool(until and any(until in plain(line) for line in screen.lines))
    process.wait()
    return shown or screen.lines


def plain(line: str) -> str:
    """Return a line without its colours."""
    return re.sub(r"\x1b\[[0-9;]*m", "", line)


def draw(command: list[str], lines: list[str], out: Path) -> None:
    """Write the picture: the command after a prompt, and the lines below it."""
    while lines and not plain(lines[-1]).strip():
        lines.pop()
    console = Console(record=True, width=COLUMNS, file=io.StringIO(), force_terminal=True)
    console.print(Text.assemble(("$ ", "bold green"), shlex.join(command)))
    for line in lines:
        console.print(Text.from_ansi(line), no_wrap=True)
    svg = console.export_svg(title=command[0], unique_id=out.stem)
    # Rich links web fonts; this picture loads nothing, and any monospace will do.
    out.write_text(OUTSIDE.sub("", svg), encoding="utf-8")


def main() -> None:
    """Record and draw."""
    parser = argparse.ArgumentParser(description=__doc__.splitlines()[0])
    parser.add_argument("out", type=Path)
    parser.add_argument("--until", metavar="TEXT")
    parser.add_argument("command", nargs=argparse.REMAINDER)
    options = parser.parse_args()
    if not options.command:
        parser.error("give a command")
    draw(options.command, record(options.command, options.until), options.out)
    print(f"{options.out} written", file=sys.stderr)


if __name__ == "__main__":
    main()
