"""What is shown of a study while it runs: a panel on a terminal, lines elsewhere."""

from __future__ import annotations

import io
import re
import time
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from itertools import count, pairwise
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.storage.records import Crashed, Measured, OutOfMemory, RunKind
from qlora_sweep.sweep.running.wire import Progress
from qlora_sweep.sweep.study.events import (
    ConfirmationStarted,
    LaneLost,
    SpaceTraced,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from qlora_sweep.sweep.terminal.board import Board
from qlora_sweep.sweep.terminal.drawing import rendered
from qlora_sweep.sweep.terminal.live import STOPPING, PlainLines, panel, time_line, watching
from tests.storage.builders import changed, confirmed
from tests.sweep.simulated_device import a_definition, a_measurement, a_record
from tests.sweep.terminal.screen import Screen


class Clock:
    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


def a_board(*, clock: Any = None, records: Sequence[Any] = (), **changes: Any) -> Board:
    return Board("night", a_definition(**changes), tuple(records), clock=clock or Clock())


def started(number: int = 1, **changes: Any) -> TrialStarted:
    values = {"config": TrialConfig(), "is_baseline": False, "attempt": 1}
    return TrialStarted(number=number, **values | changes)


def beat(number: int = 1, **progress: Any) -> TrialProgress:
    return TrialProgress(number=number, progress=Progress(phase="measure", **progress))


def finished(
    number: int, batch: int = 4, seconds: float | None = None, **changes: Any
) -> TrialFinished:
    record = a_record(TrialConfig(micro_batch_size=batch), number=number, **changes)
    return TrialFinished(record=changed(record, wall_seconds=seconds or 0.0))


def drawn(board: Board) -> str:
    return rendered(panel(board), is_terminal=False)


def seen(*events: Any, board: Board, screen: Screen | None = None, stopping: bool = False) -> None:
    """Show a study that comes to some events, on a screen or in a pipe."""
    stream = screen or io.StringIO()
    with watching(board, is_stopping=lambda: stopping, stream=stream) as listener:
        for event in events:
            listener(event)


AGAIN = ConfirmationStarted(series=1, numbers=(1, 0))
RUNNING_AGAIN = started(2, run_kind=RunKind(purpose="confirm", series=1, confirms=1))


def test_the_panel_shows_best_memory_verdicts_and_what_runs() -> None:
    board = a_board(trials=40)
    ran_out = finished(2, outcome=OutOfMemory(stage="forward"))
    for event in (finished(0, batch=8), ran_out, started(), beat(step=4, allocated_bytes=18 * GIB)):
        board.take(event)
    text = drawn(board)
    for words in (
        "2 of at most 40 trials: 1 fits, 1 ran out of memory",
        "trial 0: fits",
        "trial 1, measuring step 4, 0 s: 4 x 512",
        "18.00 GiB of 21.50 GiB",
    ):
        assert words in text
    assert STOPPING[:20] not in text


def test_the_panel_says_what_is_measured_again_and_not_what_was_traced_before() -> None:
    board = a_board(trials=9)
    for event in (finished(1), AGAIN, RUNNING_AGAIN, beat(2, step=4)):
        board.take(event)
    board.take(SpaceTraced(done=36, of=36))
    assert "again trial 1, measuring step 4" in drawn(board)
    assert "1 of at most 9 trials" in drawn(board)
    assert "structures" not in drawn(board)


def test_the_panel_says_that_the_study_is_stopping_and_what_ends() -> None:
    clock = Clock()
    board = a_board(clock=clock)
    board.take(started())
    clock.seconds = 60.0
    board.stop()
    clock.seconds = 61.0
    board.take(finished(1))
    clock.seconds = 62.0
    text = " ".join(drawn(board).split())
    assert "Ctrl-C again waits for nothing" in text
    assert "stopping the study, 2 s" in text
    assert " left" not in text


# Without a terminal


def test_without_a_terminal_there_is_a_line_per_trial_and_no_control_codes(
    capsys: pytest.CaptureFixture[str],
) -> None:
    first = finished(1, attempt=2)
    runs = [TrialFinished(record=run) for run in confirmed(first.record)]
    traced = [SpaceTraced(done=done, of=36) for done in range(37)]
    events = (*traced, started(), beat(step=4), first, AGAIN, RUNNING_AGAIN, *runs)
    seen(*events, board=a_board(trials=9))
    out, err = capsys.readouterr()
    assert (out, "\x1b" in err) == ("", False)
    assert re.findall(r"(\d+) of 36 structures", err) == ["0", "9", "18", "27", "36"]
    _, trial, again, *confirming = err.splitlines()[5:]
    assert re.match(r"\d\d:\d\d:\d\d trial 1, attempt 2: fits, ", trial)
    assert "trials 1, 0 again" in again
    for line, words in zip(confirming, ["again trial 1", "again trial 1", "soak of"], strict=True):
        assert words in line
        assert ": fits, " in line


def test_who_asks_to_stop_hears_so_at_once_and_then_every_two_seconds(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock, stopping = Clock(), False
    lines = PlainLines(a_board(clock=clock), is_stopping=lambda: stopping)
    lines.listen(started())
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


def test_in_a_pipe_a_long_silence_is_broken_by_what_is_waited_for(
    capsys: pytest.CaptureFixture[str],
) -> None:
    clock = Clock()
    lines = PlainLines(a_board(clock=clock), is_stopping=lambda: False)
    lines.listen(started())
    for _ in range(1200):
        clock.seconds += 1.0
        lines.tick()
    seconds = list(map(int, re.findall(r"starting the worker, (\d+) s", capsys.readouterr().err)))
    assert seconds[:10] == [2, 4, 6, 8, 10, 12, 14, 16, 18, 20]
    later = [after - before for before, after in pairwise(seconds[9:])]
    assert later == sorted(later), "less and less is said of one wait"
    assert 59 <= later[-1] <= 61
    lines.listen(finished(1))
    clock.seconds += 2.0
    lines.tick()
    assert "choosing the next configuration, 2 s" in capsys.readouterr().err


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
    lines.listen(started())

    def show() -> None:
        for _ in range(10):
            lines.tick()

    with ThreadPoolExecutor() as pool:
        shown = pool.submit(show)
        for number in count(2):
            lines.listen(started(number))
            if shown.done():
                break
            time.sleep(0.001)
    shown.result()


# On a terminal

LONG = TrialConfig(
    micro_batch_size=10,
    seq_len=1024,
    checkpoint_fraction=0.0,
    upcast_fp32=False,
    kernels="liger",
    optimizer="paged_adamw_8bit",
)


@pytest.mark.parametrize("width", [80, 200])
def test_the_panel_redraws_itself_in_place_within_the_terminals_width(
    width: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("COLUMNS", str(width))
    monkeypatch.setenv("TERM", "xterm-256color")
    screen, measured = Screen(width), Measured(measurement=a_measurement(LONG))
    board = a_board(trials=40)
    with watching(board, is_stopping=lambda: False, stream=screen) as listener:
        listener(started(0, config=LONG))
        first = screen.seen
        for number in (0, 1):
            listener(TrialFinished(record=a_record(LONG, measured, number=number)))
        again = screen.seen
    assert [first.count("now  "), again.count("now  ")] == [1, 1]
    assert "2 of at most 40 trials: 2 fits" in " ".join(again.split())
    assert "…" not in again
    assert "now  " not in screen.seen, "the panel goes, the trials' lines stay"
    assert screen.seen.count("trial 1: fits") == 1
    # What is written at once is shown at once.
    text = screen.getvalue()
    assert text.count("\x1b[?2026h") == text.count("\x1b[?2026l") > 0
    moves = [at.start() for at in re.finditer(r"\x1b\[\d*A", text)]
    assert moves
    assert all(text.rfind("?2026h", 0, at) > text.rfind("?2026l", 0, at) for at in moves)


@pytest.mark.parametrize(("no_color", "is_coloured"), [("", True), ("1", False)])
def test_no_color_is_heeded(
    no_color: str, is_coloured: bool, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("TERM", "xterm-256color")
    monkeypatch.setenv("NO_COLOR", no_color)
    screen = Screen(100)
    seen(started(), beat(step=4), board=a_board(), screen=screen, stopping=True)
    colour = re.compile(r"\x1b\[[\d;]*(3[0-7]|38;5;\d+|9[0-7])m")
    assert bool(colour.search(screen.getvalue())) is is_coloured


@pytest.mark.parametrize("term", ["xterm", "dumb"])
def test_a_dumb_terminal_gets_lines_and_a_workers_last_words_steer_none(
    term: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("TERM", term)
    screen = Screen(200)
    crashed = Crashed(phase="attach", detail="\x1b]0;owned\x07 \u202eabc")
    seen(finished(1, outcome=crashed), board=a_board(), screen=screen)
    text = screen.getvalue() + capsys.readouterr().err
    assert "\\x1b]0;owned" in text
    assert "\x1b]0" not in text
    assert "\u202e" not in text
    assert "trial 1: " in text
    assert ("\x1b" in text) is (term == "xterm")


# What the board knows


CONFIRM = {"seconds": 20, "soak_seconds": 10}


@pytest.mark.parametrize(
    ("changes", "events", "left"),
    [
        (
            {"trials": 4, "sampler": "random"},
            [*(finished(n, seconds=s) for n, s in enumerate((10.0, 10.0, 40.0))), started(3)],
            {0: "20 s", 5: "15 s", 11: "30 s", 35: "5 s", 41: None, 240: None},
        ),
        (
            {"trials": 40, "sampler": "random", "time_budget_seconds": 60},
            [finished(0, seconds=30.0), started()],
            {20: "40 s", 240: None},
        ),
        (
            {"trials": 9, "confirm": CONFIRM},
            [
                finished(1, seconds=10.0),
                ConfirmationStarted(series=1, numbers=(1,)),
                started(2),
                beat(2),
            ],
            {10: "25 s", 20: "15 s", 240: None},
        ),
    ],
    ids=["longer than others", "beyond the time budget", "a confirmation"],
)
def test_what_takes_longer_than_expected_is_not_said_to_end_soon(
    changes: dict[str, Any], events: list[Any], left: dict[int, str | None]
) -> None:
    clock = Clock()
    board = a_board(clock=clock, **changes)
    for event in events:
        board.take(event)
    for second, words in left.items():
        clock.seconds = float(second)
        line = time_line(board)
        assert f"about {words} left" in line if words else " left" not in line


def test_what_a_lost_gpu_left_in_the_middle_does_not_run_beside_what_is_measured_again() -> None:
    board = a_board(confirm={"seconds": 20})
    lost = LaneLost(name="GPU 0", reason="it fell off the bus", left=1)
    for event in (AGAIN, started(9), lost, replace(AGAIN, series=2), started(10)):
        board.take(event)
    assert list(board.running) == [10]
