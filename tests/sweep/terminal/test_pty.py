"""Commands as a person sees them: on a terminal of the system's own, 80 and 200 columns wide."""

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

import pytest

from sweep.predict.forecast import Forecaster
from sweep.running.replay import ReplayRunner
from sweep.study.driver import Driver
from sweep.study.tuner import tune
from tests.sweep.simulated_device import BUDGET, MODEL, a_study, train
from tests.sweep.terminal.screen import Screen

ROOT = Path(__file__).parents[3]


SWEEP = ("-c", "from sweep.cli import main; raise SystemExit(main())")
SIMULATED = ("-m", "tests.sweep.terminal.driver_of_many")
"""The same command, whose device answers after half a second."""


def on_a_terminal(
    *arguments: str,
    width: int,
    home: Path,
    term: str = "xterm-256color",
    program: tuple[str, ...] = SWEEP,
) -> Screen:
    """Run a command whose three streams are a terminal, and return what that shows at the end."""
    master, slave = pty.openpty()
    fcntl.ioctl(slave, termios.TIOCSWINSZ, struct.pack("HHHH", 50, width, 0, 0))
    kept = {k: v for k, v in os.environ.items() if k not in ("COLUMNS", "LINES", "NO_COLOR")}
    process = subprocess.Popen(
        [sys.executable, *program, *arguments],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        # Paths are left whole, so they are short ones.
        cwd=home,
        env={
            **kept,
            "SWEEP_HOME": ".",
            "PYTHONPATH": str(ROOT),
            "TERM": term,
            "CUDA_VISIBLE_DEVICES": "",
            "TRIAL_SECONDS": "0.5",
        },
    )
    os.close(slave)
    screen, decode = Screen(width), codecs.getincrementaldecoder("utf-8")("replace").decode
    with open(master, "rb", buffering=0) as terminal:
        while text := _read(terminal.fileno()):
            screen.write(decode(text))
    assert process.wait(timeout=60) == 0, screen.seen
    return screen


def _read(descriptor: int) -> bytes:
    try:
        return os.read(descriptor, 65536)
    except OSError:
        # Linux says so where whoever wrote is gone.
        return b""


@pytest.fixture(scope="module")
def home(tmp_path_factory: pytest.TempPathFactory) -> Path:
    home = tmp_path_factory.mktemp("home")
    forecaster = Forecaster(model=MODEL, budget_bytes=BUDGET, violation=lambda _: None)
    with a_study(home / "runs", trials=12) as study:
        tune(Driver(study, runner=ReplayRunner(otherwise=train), forecaster=forecaster))
    return home


@pytest.mark.parametrize("width", [80, 200])
@pytest.mark.parametrize(
    "command", [["status"], ["status", "study"], ["best", "study"], ["gpus"], ["presets"]]
)
def test_a_result_goes_into_the_terminal(command: list[str], width: int, home: Path) -> None:
    screen = on_a_terminal(*command, width=width, home=home)
    # The screen refuses lines that are too long for it.
    assert len(screen.seen.splitlines()) > 1
    assert "…" not in screen.seen
    assert "\x1b" not in screen.getvalue()


@pytest.mark.slow
@pytest.mark.parametrize(
    ("width", "program"), [(80, SWEEP), (200, SIMULATED)], ids=["80", "200-simulated"]
)
def test_a_study_is_drawn_and_leaves_its_trials_and_its_answer(
    width: int, program: tuple[str, ...], tmp_path: Path
) -> None:
    command = ("run", "cpu-demo", "--trials", "2", "--no-confirm")
    screen = on_a_terminal(*command, width=width, home=tmp_path, program=program)
    drawn = [picture for picture in screen.pictures if "now  " in picture]
    assert any("trial 0, starting the worker" in picture for picture in drawn)
    assert all(picture.count("best  ") == 1 for picture in drawn)
    assert "now  " not in screen.seen
    assert screen.seen.count("trial 0 (1 of 2): ") == screen.seen.count("trial 1 (2 of 2): ") == 1
    assert "Next:" in screen.seen


@pytest.mark.slow
def test_a_dumb_terminal_gets_lines_and_no_escapes(tmp_path: Path) -> None:
    command = ("run", "cpu-demo", "--trials", "1", "--no-confirm")
    screen = on_a_terminal(*command, width=80, home=tmp_path, term="dumb", program=SIMULATED)
    assert "\x1b" not in screen.getvalue()
    assert "trial 0 (1 of 1): fits" in screen.seen


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_study_whose_terminal_is_closed_is_interrupted(tmp_path: Path, term: str) -> None:
    master, slave = pty.openpty()

    def take_terminal() -> None:
        os.setsid()
        # Whoever runs this test may ignore it.
        signal.signal(signal.SIGHUP, signal.SIG_DFL)
        fcntl.ioctl(0, termios.TIOCSCTTY, 0)

    words = ["run", "cpu-demo", "--sampler", "random", "--no-confirm"]
    study = subprocess.Popen(
        [sys.executable, *SIMULATED, *words],
        stdin=slave,
        stdout=slave,
        stderr=slave,
        preexec_fn=take_terminal,
        env={**os.environ, "SWEEP_HOME": str(tmp_path), "TERM": term, "TRIAL_SECONDS": "0.5"},
    )
    os.close(slave)
    said = b""
    while b"trial 0" not in said and (more := _read(master)):
        said += more
    os.close(master)
    assert study.wait(timeout=60) == 130, said
    assert (tmp_path / "runs" / "cpu-demo" / "report.html").exists()
