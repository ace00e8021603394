"""Commands as a person sees them: on a terminal of the system's own."""

from __future__ import annotations

import codecs
import fcntl
import os
import pty
import signal
import struct
import subprocess
import sys
import termios
from pathlib import Path
from typing import Any

import pytest

from tests.sweep.terminal.screen import Screen

SIMULATED = [sys.executable, "-m", "tests.sweep.launching.replayed_sweep"]
"""The command itself, whose device answers after half a second."""


def take_terminal() -> None:
    os.setsid()
    # Whoever runs this test may ignore it.
    signal.signal(signal.SIGHUP, signal.SIG_DFL)
    fcntl.ioctl(0, termios.TIOCSCTTY, 0)


def start(*words: str, width: int, home: Path) -> tuple[subprocess.Popen[Any], int]:
    """Start a command whose three streams are a terminal; return it and the terminal's other end.

    Paths are left whole on screens, so they are short ones.
    """
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    others = ("COLUMNS", "LINES", "NO_COLOR")
    kept = {name: value for name, value in os.environ.items() if name not in others}
    kept |= {
        "SWEEP_HOME": ".",
        "PYTHONPATH": str(Path(__file__).parents[3]),
        "TERM": "xterm-256color",
    }
    process = subprocess.Popen(
        [*SIMULATED, *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        cwd=home,
        env={**kept, "CUDA_VISIBLE_DEVICES": "", "TRIAL_SECONDS": "0.5"},
        preexec_fn=take_terminal,
    )
    os.close(slave)
    return process, master


def read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        # Linux says so where whoever wrote is gone.
        return b""


def shown(*words: str, width: int, home: Path) -> Screen:
    """Return what a terminal shows of a command at its end; it refuses lines that are too long."""
    process, master = start(*words, width=width, home=home)
    screen, decode = Screen(width), codecs.getincrementaldecoder("utf-8")("replace").decode
    while text := read(master):
        screen.write(decode(text))
    os.close(master)
    assert process.wait(timeout=60) == 0, screen.seen
    return screen


@pytest.mark.integration
def test_a_study_is_drawn_and_leaves_its_trials_and_its_answer(tmp_path: Path) -> None:
    command = ("run", "cpu-demo", "--trials", "2", "--sampler", "random", "--no-confirm")
    screen = shown(*command, width=80, home=tmp_path)
    drawn = [picture for picture in screen.pictures if "now  " in picture]
    assert any("trial 0, starting the worker" in picture for picture in drawn)
    assert all(picture.count("best  ") == 1 for picture in drawn)
    assert "now  " not in screen.seen
    assert screen.seen.count("trial 0 (1 of 2): ") == screen.seen.count("trial 1 (2 of 2): ") == 1
    assert "Next:" in screen.seen


def test_a_study_whose_terminal_is_closed_is_interrupted(tmp_path: Path) -> None:
    command = ("run", "cpu-demo", "--sampler", "random", "--no-confirm")
    process, master = start(*command, width=80, home=tmp_path)
    said = b""
    while b"trial 0" not in said and (more := read(master)):
        said += more
    os.close(master)
    assert process.wait(timeout=60) == 130, said
    assert (tmp_path / "runs" / "cpu-demo" / "report.html").exists()
