from __future__ import annotations

import io
import re
import threading
import time
from dataclasses import replace
from itertools import count, pairwise

import pytest
from rich.console import Console

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.records import Crashed, Errand, Measured, OutOfMemory
from sweep.running.wire import Progress
from sweep.study.events import (
    ConfirmationStarted,
    SpaceTraced,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from sweep.terminal.board import Board
from sweep.terminal.live import STOPPING, PlainLines, panel, watching
from tests.storage.builders import confirmed
from tests.sweep.simulated_device import a_measurement, a_record
from tests.sweep.terminal.screen import Screen
from tests.sweep.terminal.test_progress import Clock, a_board, finished

STARTED = TrialStarted(number=1, config=TrialConfig(), is_baseline=False, attempt=1)
PROGRESS = TrialProgress(
    number=1, progress=Progress(phase="measure", step=4, allocated_bytes=18 * GIB)
)


class Terminal(io.StringIO):
    def isatty(self) -> bool:
        return True


def shown(board: object) -> str:
    console = Console(file=io.StringIO(), width=120)
    with console.capture() as capture:
        console.print(board)
    return capture.get()


def test_the_panel_shows_best_memory_verdicts_and_what_runs() -> None:
    board = a_board(trials=40)
    for event in (
        finished(0, batch=8),
        finished(2, outcome=OutOfMemory(stage="forward")),
        STARTED,
        PROGRESS,
    ):
        board.take(event)
    text = shown(panel(board))
    assert "night: a10, 21.50 GiB" in text
    assert re.search(r"trials +2 of at most 40 trials: 1 fits, 1 ran out of memory", text)
    assert re.search(r"best +trial 0: fits, [\d,]+ tokens/s", text)
    assert "trial 1, measuring step 4, 0 s: 4 x 512" in text
    assert "18.00 GiB of 21.50 GiB" in text
    assert "1 fits, 1 ran out of memory" in text
    assert STOPPING[:20] not in text


def test_the_panel_says_that_the_study_is_stopping_and_what_ends() -> None:
    clock = Clock()
    board = a_board(clock=clock)
    board.take(STARTED)
    clock.seconds = 60.0
    board.stop()
    clock.seconds = 61.0
    board.take(finished(1))
    clock.seconds = 62.0
    text = shown(panel(board))
    assert "Ctrl-C again waits for nothing" in text
    assert "stopping the study, 2 s" in text
    assert " left" not in text


def test_without_a_terminal_tracing_is_said_in_some_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with watching(a_board(), is_stopping=lambda: False, stream=io.StringIO()) as listener:
        for done in range(37):
            listener(SpaceTraced(done=done, of=36))
    out, err = capsys.readouterr()
    assert out == ""
    assert re.findall(r"(\d+) of 36 structures", err) == ["0", "9", "18", "27", "36"]


def test_without_a_terminal_there_is_a_line_per_trial_and_no_control_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    board = a_board(trials=9)
    with watching(board, is_stopping=lambda: False, stream=io.StringIO()) as listener:
        for event in (STARTED, PROGRESS, finished(1, attempt=2), STARTED):
            listener(event)
    out, err = capsys.readouterr()
    assert out == ""
    start, trial = err.splitlines()
    assert "trial 1 starts the worker" in start
    assert re.match(r"\d\d:\d\d:\d\d trial 1, attempt 2: fits, .* GiB: 4 x 512", trial)
    assert "\x1b" not in err


def test_who_asks_to_stop_hears_so_at_once_and_then_every_two_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, stopping = Clock(), False
    lines = PlainLines(a_board(clock=clock), is_stopping=lambda: stopping)
    lines.listen(STARTED)
    for _ in range(60):
        clock.seconds += 1.0
        lines.tick()
    capsys.readouterr()
    stopping = True
    for _ in range(9):
        lines.tick()
        clock.seconds += 1.0
    first, *waits = capsys.readouterr().err.splitlines()
    assert STOPPING in first
    assert [wait.partition("... ")[2] for wait in waits] == [
        f"stopping trial 1, {seconds} s" for seconds in (2, 4, 6, 8)
    ]


AGAIN = ConfirmationStarted(series=1, numbers=(1, 0))
RUNNING_AGAIN = TrialStarted(
    number=2,
    config=TrialConfig(),
    is_baseline=False,
    attempt=1,
    errand=Errand(purpose="confirm", series=1, confirms=1),
)


def test_what_is_measured_again_has_its_lines(capsys: pytest.CaptureFixture[str]) -> None:
    board = a_board(trials=9)
    first = finished(1)
    with watching(board, is_stopping=lambda: False, stream=io.StringIO()) as listener:
        for event in (first, AGAIN, RUNNING_AGAIN):
            listener(event)
        for run in confirmed(first.record):
            listener(TrialFinished(record=run))
    lines = [line.partition(" ")[2] for line in capsys.readouterr().err.splitlines()]
    assert lines[0].startswith("trial 1: fits, ")
    assert lines[1] == (
        "the search has ended: measuring trials 1, 0 again, in turns in a fresh worker"
    )
    assert lines[2].startswith("again trial 1: fits, ")
    assert lines[4].startswith("soak of trial 1: fits, ")


def test_the_panel_shows_what_is_measured_again() -> None:
    board = a_board(trials=9)
    measuring = replace(PROGRESS, number=RUNNING_AGAIN.number)
    for event in (finished(1), AGAIN, RUNNING_AGAIN, measuring):
        board.take(event)
    text = shown(panel(board))
    assert "again trial 1, measuring step 4" in text
    assert "1 of at most 9 trials" in text


LONG = TrialConfig(
    micro_batch_size=10, lora_rank=64, checkpoint_fraction=0.0, upcast_fp32=False, kernels="liger"
)


def a_long_board(clock: Clock | None = None) -> Board:
    return a_board(
        clock=clock,
        trials=40,
        fixed={"target_modules": "all-linear"},
        dimensions={
            "lora_rank": {"choices": [8, 64]},
            "micro_batch_size": {"choices": [8, 10]},
            "checkpoint_fraction": {"choices": [0.0, 1.0]},
            "upcast_fp32": {"choices": [True, False]},
            "kernels": {"choices": ["hf", "liger"]},
        },
    )


@pytest.mark.parametrize("width", [80, 200])
def test_the_panel_redraws_itself_in_place_within_the_terminals_width(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    screen = Screen(width)
    config = LONG.model_copy(update={"target_modules": "all-linear"})
    with watching(a_long_board(), is_stopping=lambda: False, stream=screen) as listener:
        listener(TrialStarted(number=0, config=config, is_baseline=False, attempt=1))
        drawn = screen.seen
        for number in (0, 1):
            measured = Measured(measurement=a_measurement(config))
            listener(TrialFinished(record=a_record(config, measured, number=number)))
        again = screen.seen
    assert [drawn.count("now  "), again.count("now  ")] == [1, 1]
    flat = " ".join(again.split())
    assert "trial 0: fits, " in flat
    assert "rank 64 on all linear layers, no checkpointing, no fp32 upcast, Liger kernels" in flat
    assert "2 of at most 40 trials: 2 fits" in flat
    assert "…" not in again
    assert "now  " not in screen.seen, "the panel goes, the trials' lines stay"
    assert screen.seen.count("trial 1: fits") == 1
    assert all("memory" in picture for picture in screen.pictures[1:-2] if "best" in picture)


def test_what_is_written_at_once_is_shown_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(100)
    with watching(a_board(), is_stopping=lambda: False, stream=screen) as listener:
        listener(STARTED)
        listener(finished(1))
    text = screen.getvalue()
    begun, ended = text.count("\x1b[?2026h"), text.count("\x1b[?2026l")
    assert begun == ended > 0
    moves = [at.start() for at in re.finditer(r"\x1b\[\d*A", text)]
    assert moves
    assert all(text.rfind("?2026h", 0, at) > text.rfind("?2026l", 0, at) for at in moves)


def test_signs_of_life_are_not_drawn_one_by_one(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm")
    screen = Screen(100)
    with watching(a_board(), is_stopping=lambda: False, stream=screen) as listener:
        listener(STARTED)
        before = len(screen.getvalue())
        for _ in range(50):
            listener(PROGRESS)
        assert len(screen.getvalue()) - before <= 2 * before


def test_no_color_is_heeded(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    colour = re.compile(r"\x1b\[[\d;]*(3[0-7]|38;5;\d+|9[0-7])m")
    shown = []
    for variables in ({}, {"NO_COLOR": "1"}):
        with monkeypatch.context() as patch:
            for name, value in variables.items():
                patch.setenv(name, value)
            screen = Screen(100)
            with watching(a_board(), is_stopping=lambda: True, stream=screen) as listener:
                listener(STARTED)
                listener(PROGRESS)
            shown.append(bool(colour.search(screen.getvalue())))
    assert shown == [True, False]


def test_a_dumb_terminal_gets_lines(
    monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", "dumb")
    with watching(a_board(), is_stopping=lambda: False, stream=Screen(80)) as listener:
        listener(finished(1))
    err = capsys.readouterr().err
    assert "trial 1: fits" in err
    assert "\x1b" not in err


def test_in_a_pipe_a_long_silence_is_broken_by_what_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    lines = PlainLines(a_board(clock=clock), is_stopping=lambda: False)
    lines.listen(STARTED)
    for _ in range(100):
        clock.seconds += 1.0
        lines.tick()
    said = capsys.readouterr().err.splitlines()
    waits = [line.partition("... ")[2] for line in said if "..." in line]
    seconds = [int(re.findall(r"(\d+) s", wait)[0]) for wait in waits]
    assert seconds[:10] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    later = [after - before for before, after in pairwise(seconds[9:])]
    assert later == sorted(later), "less and less is said of one wait"
    assert len(seconds) < 17
    assert all(wait.startswith("trial 1, starting the worker") for wait in waits)
    lines.listen(finished(1))
    for _ in range(2):
        clock.seconds += 1.0
        lines.tick()
    assert "choosing the next configuration, 2 s" in capsys.readouterr().err


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_workers_last_words_cannot_steer_the_terminal(
    term: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", term)
    screen = Screen(200)
    crashed = Crashed(phase="attach", detail="\x1b]0;owned\x07 \u202eabc")
    with watching(a_board(), is_stopping=lambda: False, stream=screen) as listener:
        listener(finished(1, outcome=crashed))
    shown = screen.getvalue() + capsys.readouterr().err
    assert "\\x1b]0;owned" in shown
    assert "\x1b]0" not in shown
    assert "\u202e" not in shown


def test_what_runs_may_change_while_it_is_shown() -> None:
    class Slow(Board):
        def describe(self, config: TrialConfig) -> str:
            time.sleep(0.002)
            return super().describe(config)

    # Every look at the clock is ten seconds later, so that each tick has something to say.
    seconds = count(step=10)
    made = a_board()
    board = Slow(made.name, made.definition, clock=lambda: float(next(seconds)))
    lines = PlainLines(board, is_stopping=lambda: False)
    failed: list[Exception] = []

    def show() -> None:
        try:
            for _ in range(10):
                lines.tick()
        except RuntimeError as error:
            failed.append(error)

    for number in range(5):
        lines.listen(replace(STARTED, number=number))
    shown = threading.Thread(target=show)
    shown.start()
    number = 5
    while shown.is_alive():
        lines.listen(replace(STARTED, number=number))
        number += 1
        time.sleep(0.001)
    shown.join()
    assert not failed
