"""Owns how a study is followed on stderr: a live panel on a terminal, lines elsewhere.

Neither is ever silent for long: what is being done is said with its seconds. Knows nothing of the
tuner but its events.
"""

from __future__ import annotations

import sys
import threading
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reports import uncertainty, units
from reports.outcomes import outcome_line, verdict_words
from storage.records import Phase, Purpose, TrialRecord
from sweep.predict.forecast import TRACED
from sweep.study.events import (
    ConfirmationStarted,
    Event,
    LaneLost,
    LanesOpened,
    Listener,
    SpaceTraced,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from sweep.terminal.board import Board, Running
from sweep.terminal.console import Synchronized, cancel_announced, folded, note, width_of
from sweep.terminal.drawing import Shown
from sweep.terminal.working import Rhythm, progress_words

_BAR_WIDTH = 30
_LOOK_SECONDS = 0.2
"""Between two looks at whether somebody asked to stop."""
STOPPING = (
    "stopping now: what was measured is kept, and the same command resumes the study; Ctrl-C "
    "again waits for nothing"
)

_PHASES: dict[Phase, str] = {
    "start": "starting the worker",
    "build": "building the model",
    "attach": "attaching the adapters",
    "warmup": "warming up",
    "measure": "measuring",
    "compare": "comparing with 16-bit compute",
    "detach": "cleaning up",
    "quality": "training for the loss",
}
_ERRANDS: dict[Purpose, str] = {
    "search": "trial",
    "confirm": "again trial",
    "soak": "soak of trial",
    "quality": "another seed of trial",
}


@contextmanager
def watching(
    board: Board, *, is_stopping: Callable[[], bool], stream: TextIO
) -> Iterator[Listener]:
    """Show a study while it runs; yields what the tuner's events go to.

    Args:
        board: kept up to date with every event.
        is_stopping: whether somebody asked to stop.
        stream: where to; a terminal that can be drawn on gets the live panel.
    """
    cancel_announced()
    console = Console(file=cast(TextIO, Synchronized(stream)), highlight=False)
    if console.is_terminal and not console.is_dumb_terminal:
        with _panel(board, is_stopping=is_stopping, console=console) as listener:
            yield listener
        return
    lines = PlainLines(board, is_stopping=is_stopping)
    with _every_second(lines.tick, is_stopping=is_stopping):
        yield lines.listen


@contextmanager
def _every_second(action: Callable[[], None], *, is_stopping: Callable[[], bool]) -> Iterator[None]:
    """Do something each second, and at once where somebody asks to stop, beside what is in the
    ``with``, which may be busy for minutes.
    """
    over = threading.Event()

    def go_on() -> None:
        was_stopping, turns = False, 0
        while not over.wait(_LOOK_SECONDS):
            turns += 1
            if turns % round(1 / _LOOK_SECONDS) == 0 or is_stopping() != was_stopping:
                was_stopping = is_stopping()
                action()

    thread = threading.Thread(target=go_on, daemon=True)
    thread.start()
    try:
        yield
    finally:
        over.set()
        thread.join()


class PlainLines:
    """A line for each thing that happened, and now and then one for what is waited for."""

    def __init__(self, board: Board, *, is_stopping: Callable[[], bool]) -> None:
        self._board = board
        self._is_stopping = is_stopping
        self._rhythm = Rhythm(board.clock)

    def listen(self, event: Event) -> None:
        """Take in an event, and say what is worth a line."""
        board = self._board
        with board.lock:
            line = _line_of(board, event)
            board.take(event)
            if isinstance(event, TrialFinished):
                line = trial_line(board, event)
        if line:
            self._rhythm.begin()
            self._say(line)

    def tick(self) -> None:
        """Say that the study stops, and what is being done where nothing was said for long."""
        if self._is_stopping() and not self._board.is_stopping:
            self._board.stop()
            self._rhythm.begin()
            self._say(STOPPING)
        elif self._rhythm.is_due:
            self._rhythm.go_on()
            with self._board.lock:
                now = now_line(self._board)
            self._say(f"... {now}")

    def _say(self, line: str) -> None:
        # A terminal that cannot be drawn on has a width all the same.
        said = f"{datetime.now():%H:%M:%S} {line}"
        note(folded(said, width_of(sys.stderr), indent=2))


def _line_of(board: Board, event: Event) -> str:
    """Return the line that an event is worth before it is taken in; empty for none."""
    match event:
        case SpaceTraced(done=done, of=of) if 4 * done // of > 4 * (done - 1) // of:
            return progress_words(TRACED, done, of)
        case ConfirmationStarted() | LanesOpened() | LaneLost():
            return told_line(event)
        case TrialStarted() if board.is_first and board.starts_a_worker:
            return f"trial {event.number} starts the worker and builds the model"
        case _:
            return ""


def told_line(event: Event) -> str:
    """Return what is told of an event on every kind of terminal; empty where that is nothing."""
    match event:
        case ConfirmationStarted():
            return confirming_line(event)
        case LanesOpened(names=names):
            return (
                f"trials run on {', '.join(names)} at a time; the winner is measured again on one "
                "of them while the others are idle"
            )
        case LaneLost(name=name, reason=reason, left=left):
            return (
                f"{name} is lost: {reason.rstrip('.')}. What ran there is tried again elsewhere: "
                f"{units.plural(left, 'place')} left"
            )
        case _:
            return ""


def confirming_line(event: ConfirmationStarted) -> str:
    """Return what is measured again, in one line."""
    if not event.numbers:
        return "the search has ended: measuring its winner again"
    listed = ", ".join(map(str, event.numbers))
    noun = "trials" if len(event.numbers) > 1 else "trial"
    recipe = f" beside {uncertainty.at_capacity(event.recipe)}" if event.recipe else ""
    return (
        f"the search has ended: measuring {noun} {listed} again{recipe}, in turns in a fresh worker"
    )


def trial_line(board: Board, event: TrialFinished) -> str:
    """Return a finished trial in one line: how it ended, and what was searched of it."""
    record = event.record
    if record.purpose != "search":
        return _again_line(board, record)
    again = f", attempt {record.attempt}" if record.attempt > 1 else ""
    ended = outcome_line(record, budget_bytes=board.definition.target.budget_bytes)
    count = units.out_of(board.trials_done, board.definition.space.trials)
    done = "" if board.may_end_sooner else f" ({count})"
    is_best = board.best is not None and board.best.number == record.number
    best = " (best so far)" if is_best and len(board.records) > 1 else ""
    where = f" on {record.ran_on}" if record.ran_on else ""
    return (
        f"trial {record.number}{where}{again}{done}: {ended}{best}: {board.describe(record.config)}"
    )


def _again_line(board: Board, record: TrialRecord) -> str:
    """Return a run that measured a trial again in one line."""
    ended = outcome_line(record, budget_bytes=board.definition.target.budget_bytes)
    soak = None if record.measurement is None else record.measurement.soak
    what = _ERRANDS[record.purpose]
    steps = f" ({soak.steps} steps in {units.duration(soak.seconds)})" if soak else ""
    if record.confirms is None:
        return f"{uncertainty.at_capacity(record.config)}: {ended}"
    return f"{what} {record.confirms}{steps}: {ended}"


@contextmanager
def _panel(
    board: Board, *, is_stopping: Callable[[], bool], console: Console
) -> Iterator[Listener]:
    def render() -> RenderableType:
        if is_stopping() and not board.is_stopping:
            board.stop()
        with board.lock:
            return Shown(panel(board, width=console.width))

    def keep(line: str) -> None:
        console.print(Text(folded(line, console.width - 1, indent=2)))

    # Drawn when something happened and once a second: more is flicker and traffic over ssh.
    live = Live(get_renderable=render, console=console, auto_refresh=False, transient=True)
    with live, _every_second(live.refresh, is_stopping=is_stopping):

        def listen(event: Event) -> None:
            with board.lock:
                board.take(event)
                line = told_line(event)
                if isinstance(event, TrialFinished):
                    line = trial_line(board, event)
            # Not under the lock, which what is drawn waits for.
            if line:
                keep(line)
            if not isinstance(event, TrialProgress):
                live.refresh()

        yield listen


def panel(board: Board, *, width: int) -> RenderableType:
    """Return the live view of a study."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="fold")
    for label, content in _rows(board, width=width):
        grid.add_row(label, content)
    lines: list[RenderableType] = [Text(_headline(board), style="bold"), grid]
    if board.is_stopping:
        lines.append(Text(STOPPING, style="yellow"))
    return Group(*lines)


def _headline(board: Board) -> str:
    target = board.definition.target
    on = f" (on {target.emulated_on})" if target.emulated_on else ""
    return f"{board.name}: {target.gpu}{on}, {units.gib(target.budget_bytes)}"


def _rows(board: Board, *, width: int) -> Iterator[tuple[str, RenderableType]]:
    yield "best", Text(_best(board))
    yield "now", Text("\n".join(now_lines(board)))
    if board.is_driven_here:
        yield "memory", _memory(board, width=width)
    yield "trials", Text(_trials(board))
    yield "time", Text(time_line(board))


def _trials(board: Board) -> str:
    total = board.definition.space.trials
    most = "at most " if board.may_end_sooner and board.trials_done <= total else ""
    ended = verdict_words(board.records) or "none finished yet"
    if board.trials_done > total:
        return f"{units.out_of(board.trials_done, total)} trials: {ended}"
    return f"{board.trials_done:,} of {most}{total:,} trials: {ended}"


def _best(board: Board) -> str:
    best = board.best
    if best is None:
        return "nothing fits yet"
    budget_bytes = board.definition.target.budget_bytes
    gain = ""
    if board.gain is not None and board.gain.value != 1:
        gain = f", {uncertainty.factor(board.gain)} {board.reference}"
    ended = outcome_line(best, budget_bytes=budget_bytes)
    return f"trial {best.number}: {ended}{gain}: {board.describe(best.config)}"


def now_line(board: Board) -> str:
    """Return what is being done, since when, and of what trials."""
    return "; ".join(now_lines(board))


def now_lines(board: Board) -> list[str]:
    """Return what is being done, a line for each trial that runs."""
    if board.is_stopping:
        what = ", ".join(f"trial {number}" for number in tuple(board.running)) or "the study"
        return [f"stopping {what}, {board.doing_seconds:,.0f} s"]
    if board.tracing is not None or not board.running:
        seconds = f"{board.doing_seconds:,.0f} s"
        if board.tracing is None:
            return [f"choosing the next configuration, {seconds}"]
        return [f"{progress_words(TRACED, board.tracing.done, board.tracing.of)}, {seconds}"]
    return [_running_line(board, running) for running in board.running.values()]


def _running_line(board: Board, running: Running) -> str:
    errand, config = running.started.errand, running.started.config
    what = {
        "search": f"trial {running.started.number}",
        "confirm": uncertainty.at_capacity(config)
        if errand.confirms is None
        else f"trial {errand.confirms} again",
        "soak": f"trial {errand.confirms}, soak",
        "quality": f"trial {errand.confirms}, another seed",
    }[errand.purpose]
    seconds = f"{board.clock() - running.since_seconds:,.0f} s"
    return f"{what}, {_phase(board, running)}, {seconds}: {board.describe(config)}"


def _phase(board: Board, running: Running) -> str:
    if not board.is_driven_here:
        return "running"
    progress = running.progress
    if progress is None:
        is_fresh = board.is_first or (board.confirming is not None and not board.confirmations)
        return "starting the worker" if is_fresh else "getting ready"
    step = f" step {progress.step}" if progress.step else ""
    return f"{_PHASES[progress.phase]}{step}"


def time_line(board: Board) -> str:
    """Return how long it took so far, and what is known of the time that is left."""
    left, done = board.remaining, f"{units.duration(board.elapsed_seconds)} so far"
    confirm, again = left.confirm_seconds, "to measure the winner again"
    if board.is_stopping:
        return done
    if board.confirming is not None:
        return done if confirm is None else f"{done}, about {roughly(confirm)} left"
    if left.search_seconds is None:
        return done if confirm is None else f"{done}, then some {roughly(confirm)} {again}"
    whole = roughly(left.search_seconds + (confirm or 0.0))
    of_it = "" if confirm is None else f", {roughly(confirm)} of it {again}"
    if not left.may_end_sooner:
        return f"{done}, about {whole} left{of_it}"
    return f"{done}, at most some {whole} more{of_it}{_sooner(board)}"


def _sooner(board: Board) -> str:
    """Return when a search ends that ends when it knows, and how near it is to that."""
    least = board.definition.space.stop_below_gain
    if board.foreseen is None or board.foreseen.gain == float("inf"):
        return f": the search ends once less than {units.error(least)} is expected to be gained"
    gain = units.share(board.foreseen.gain)
    return f": {gain} expected of the next trial, the search ends below {units.error(least)}"


def roughly(seconds: float) -> str:
    """Return a time that is not known to the second: ``25 s``, ``4 min``, ``1 h 10 min``."""
    if seconds < 55:
        return f"{max(5, 5 * round(seconds / 5))} s"
    minutes = max(1, round(seconds / 60))
    return f"{minutes} min" if minutes < 60 else f"{minutes // 60} h {minutes % 60} min"


def _memory(board: Board, *, width: int) -> RenderableType:
    """Return the running trial's memory against the budget: the most of several trials'."""
    budget = board.definition.target.budget_bytes
    known = [r.progress.allocated_bytes for r in board.running.values() if r.progress]
    used = max((bytes_ for bytes_ in known if bytes_ is not None), default=None)
    row = Table.grid(padding=(0, 1))
    bar = max(10, min(_BAR_WIDTH, width - 50))
    row.add_row(
        ProgressBar(total=budget, completed=used or 0, width=bar),
        Text(f"{units.gib(used)} of {units.gib(budget)}"),
    )
    return row
