"""A terminal that is closed while a run trains in it."""

from __future__ import annotations

import os
import pty
import shutil
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest
import torch
from processes import DEADLINE_S, read_events
from test_srun import RECIPE

LONG = ("train.max_steps=100000", "log.every_steps=1", "data.train.delay_s=0.01")
LINE = ("train", "recipe.yaml", "--run-dir", "d", *LONG)


@pytest.fixture(autouse=True)
def _here(folder: Path) -> None:
    (folder / "recipe.yaml").write_text(RECIPE)
    shutil.copy(Path(__file__).with_name("own_parts.py"), folder)


def until_trained(process: subprocess.Popen[bytes]) -> None:
    deadline = time.monotonic() + DEADLINE_S
    while not any(event["event"] == "train" for event in read_events(Path("d"))):
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)


@pytest.mark.parametrize("options", [(), ("--nproc-per-node", "2")])
def test_c12_a_terminal_that_is_closed_leaves_a_saved_run(options: tuple[str, ...]) -> None:
    """What is written there fails from then on; the bar is drawn there too."""
    ours, theirs = pty.openpty()
    process = subprocess.Popen(
        [sys.executable, "-c", IN_TERMINAL, *LINE, *options],
        stdin=theirs,
        stdout=theirs,
        stderr=theirs,
        start_new_session=True,
        env={**os.environ, "TERM": "xterm"},
    )
    os.close(theirs)
    until_trained(process)
    os.close(ours)
    assert process.wait(DEADLINE_S) == 75
    stop = read_events(Path("d"))[-1]
    assert (stop["event"], stop["reason"], stop["exit_code"]) == ("stop", "preempted", 75)
    saved = torch.load("d/checkpoints/latest.pt", weights_only=True)
    assert saved["progress"]["step"] == stop["step"] > 0


IN_TERMINAL = """
import fcntl, sys, termios
fcntl.ioctl(0, termios.TIOCSCTTY, 0)
from ampctl.__main__ import main
main()
"""


def test_c12_nohup_keeps_a_run_going() -> None:
    """So do its data workers, and it still stops for SIGTERM."""
    program = ("nohup", sys.executable, "-m", "ampctl", *LINE, "data.num_workers=1")
    process = subprocess.Popen(program, stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL)
    until_trained(process)
    process.send_signal(signal.SIGHUP)
    before = len(read_events(Path("d")))
    deadline = time.monotonic() + DEADLINE_S
    while len(read_events(Path("d"))) < before + 5:
        assert process.poll() is None
        assert time.monotonic() < deadline
        time.sleep(0.05)
    process.send_signal(signal.SIGTERM)
    assert process.wait(DEADLINE_S) == 75
