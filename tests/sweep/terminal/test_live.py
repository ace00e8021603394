from __future__ import annotations

import io
import re

import pytest
from rich.console import Console

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.records import Errand, OutOfMemory
from sweep.running.runner import Progress
from sweep.study.events import (
    ConfirmationStarted,
    SpaceTraced,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from sweep.terminal.live import STOPPING, panel, watching
from tests.storage.builders import confirmed
from tests.sweep.terminal.test_progress import a_board, finished

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
    assert "night: a10, 21.50 GiB; 2 of 40 trials" in text
    assert re.search(r"best +trial 0: fits, [\d,]+ tokens/s", text)
    assert "trial 1, measure step 4" in text
    assert "18.00 GiB of 21.50 GiB" in text
    assert "1 fits, 1 ran out of memory" in text
    assert STOPPING[:20] not in text


def test_the_panel_says_that_the_study_is_stopping() -> None:
    board = a_board()
    board.is_stopping = True
    assert "Ctrl-C again stops now" in shown(panel(board))


def test_the_panel_shows_how_far_tracing_is_until_it_is_done() -> None:
    board = a_board()
    board.take(SpaceTraced(done=12, of=36))
    assert "12 of 36 structures traced" in shown(panel(board))
    board.take(SpaceTraced(done=36, of=36))
    assert "choosing the next configuration" in shown(panel(board))


def test_without_a_terminal_tracing_is_said_in_some_lines(
    capsys: pytest.CaptureFixture[str],
) -> None:
    with watching(a_board(), is_stopping=lambda: False, stream=io.StringIO()) as listener:
        for done in range(37):
            listener(SpaceTraced(done=done, of=36))
    out, err = capsys.readouterr()
    assert out == ""
    assert re.findall(r"(\d+) of 36 structures", err) == ["0", "9", "18", "27", "36"]


def test_an_empty_board_can_be_shown() -> None:
    assert "nothing fits yet" in shown(panel(a_board()))


def test_without_a_terminal_there_is_a_line_per_trial_and_no_control_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    board = a_board(trials=9)
    stopping: list[bool] = []
    with watching(board, is_stopping=lambda: bool(stopping), stream=io.StringIO()) as listener:
        for event in (STARTED, PROGRESS, finished(1, attempt=2), STARTED):
            listener(event)
        stopping.append(True)
        listener(PROGRESS)
        listener(PROGRESS)
    out, err = capsys.readouterr()
    assert out == ""
    start, trial, stop = err.splitlines()
    assert "trial 1 starts the worker" in start
    assert re.match(r"\d\d:\d\d:\d\d trial 1, attempt 2 \(1 of 9\): fits, ", trial)
    assert stop == STOPPING
    assert "\x1b" not in err


def test_a_terminal_keeps_a_line_for_each_finished_trial() -> None:
    stream = Terminal()
    board = a_board(trials=9)
    with watching(board, is_stopping=lambda: False, stream=stream) as listener:
        for event in (STARTED, PROGRESS, finished(1)):
            listener(event)
    assert "trial 1 (1 of 9): fits" in stream.getvalue()


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
    assert lines[0].startswith("trial 1 (1 of 9): fits, ")
    assert lines[1] == (
        "the search has ended: measuring trials 1, 0 again, in turns in a fresh worker"
    )
    assert lines[2].startswith("again trial 1: fits, ")
    assert lines[4].startswith("soak of trial 1: fits, ")


def test_the_panel_shows_what_is_measured_again() -> None:
    board = a_board(trials=9)
    for event in (finished(1), AGAIN, RUNNING_AGAIN, PROGRESS):
        board.take(event)
    text = shown(panel(board))
    assert "trial 1 again, measure step 4" in text
    assert "1 of 9 trials" in text


def test_a_terminal_keeps_a_line_for_what_is_measured_again() -> None:
    stream = Terminal()
    with watching(a_board(trials=9), is_stopping=lambda: False, stream=stream) as listener:
        for event in (finished(1), AGAIN):
            listener(event)
    assert "the search has ended: measuring trials 1, 0 again" in stream.getvalue()
