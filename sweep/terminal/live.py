"""A study shown on stderr while it runs: a live panel on a terminal, lines elsewhere.

Both show what is being done, with its seconds.
"""

from __future__ import annotations

import math
import time
from collections.abc import Callable, Iterator
from contextlib import contextmanager, nullcontext
from datetime import datetime
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.text import Text

from qlora_sweep.reports import format as units
from qlora_sweep.reports import words
from qlora_sweep.reports.words import outcome_line, verdict_words
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.records import Phase, Purpose, RunKind, TrialRecord, Verdict
from qlora_sweep.sweep.predict.forecast import TRACED
from qlora_sweep.sweep.study import events
from qlora_sweep.sweep.terminal import console
from qlora_sweep.sweep.terminal.board import Board, ShownTrial
from qlora_sweep.sweep.terminal.drawing import Shown, facts
from qlora_sweep.sweep.terminal.summary import status_text

_TICK_SECONDS = 0.2
"""Between two looks at whether somebody asked to stop."""
_LOOK_SECONDS = 1.0
"""Between two looks at a study that another process drives."""
_SHARE_READING = 0.2
"""Of the time that may go into reading: a study of thousands of trials is looked at less often."""
STOPPING = "stopping: the same command resumes the study; Ctrl-C again waits for nothing"
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
_AGAIN: dict[Purpose, str] = {
    "confirm": "again trial {}",
    "soak": "soak of trial {}",
    "quality": "another seed of trial {}",
}


@contextmanager
def watching(
    board: Board, *, is_stopping: Callable[[], bool], stream: TextIO
) -> Iterator[events.Listener]:
    """Show a study while it runs; yields what the tuner's events go to.

    Args:
        board: kept up to date with every event.
        is_stopping: whether somebody asked to stop.
        stream: where to; a terminal that can be drawn on gets the live panel.
    """
    console.cancel_announced()
    screen = Console(file=cast(TextIO, console.Synchronized(stream)), highlight=False)
    if screen.is_terminal and not screen.is_dumb_terminal:
        yield from _drawn(board, is_stopping=is_stopping, screen=screen)
        return
    lines = PlainLines(board, is_stopping=is_stopping)
    with console.ticking(lines.tick, seconds=_TICK_SECONDS):
        yield lines.listen


class PlainLines:
    """A line for each thing that happened, and now and then one for what is waited for."""

    def __init__(self, board: Board, *, is_stopping: Callable[[], bool]) -> None:
        self._board = board
        self._is_stopping = is_stopping
        self._rhythm = console.Rhythm(board.clock)

    def listen(self, event: events.Event) -> None:
        """Take in an event, and say what is worth a line."""
        with self._board.lock:
            line = _taken(self._board, event, is_redrawn=False)
        if line:
            self._rhythm.begin()
            self._say(line)

    def tick(self) -> None:
        """Say that the study stops, and what is being done where nothing was said for long."""
        with self._board.lock:
            stops_now = self._is_stopping() and not self._board.is_stopping
            if stops_now:
                self._board.stop()
            now = ""
            if self._rhythm.is_due:
                now = "; ".join(now_lines(self._board))
        if stops_now:
            self._rhythm.begin()
            self._say(STOPPING)
        elif now:
            self._rhythm.go_on()
            self._say(f"... {now}")

    def _say(self, line: str) -> None:
        console.note_folded(f"{datetime.now():%H:%M:%S} {line}", indent=2)


def _drawn(
    board: Board, *, is_stopping: Callable[[], bool], screen: Console
) -> Iterator[events.Listener]:
    def render() -> RenderableType:
        with board.lock:
            if is_stopping() and not board.is_stopping:
                board.stop()
            return Shown(panel(board))

    def listen(event: events.Event) -> None:
        with board.lock:
            line = _taken(board, event, is_redrawn=True)
        if line:
            screen.print(Text(console.folded(line, screen.width - 1, indent=2)))
        if not isinstance(event, events.TrialProgress):
            live.refresh()

    # Drawn when something happened and once a second: more is flicker and traffic over ssh.
    with Live(get_renderable=render, console=screen, refresh_per_second=1, transient=True) as live:
        yield listen


def _taken(board: Board, event: events.Event, *, is_redrawn: bool) -> str:
    """Take in an event; return the line that stays of it, empty for none."""
    is_first = board.is_first and board.starts_a_worker
    board.take(event)
    match event:
        case events.ConfirmationStarted(numbers=numbers, recipes=recipes):
            noun = "trials" if len(numbers) > 1 else "trial"
            what = f"{noun} {', '.join(map(str, numbers))} again"
            if recipes:
                over = (words.reference_of(board.ranking, recipe) for recipe in recipes)
                what += f" beside {' and '.join(over)}"
            return f"the search has ended: measuring {what}, in turns"
        case events.LanesOpened(names=names):
            return f"trials run on {', '.join(names)}; the winner is measured again on one of them"
        case events.LaneLost(name=name, reason=reason, left=left):
            again = f"What ran there is tried again elsewhere: {units.plural(left, 'place')} left"
            return f"{name} is lost: {reason.rstrip('.')}. {again}"
        case events.TrialFinished(record=record):
            return _trial_line(board, record)
        case events.SpaceTraced(done=done, of=of) if (
            not is_redrawn and 4 * done // of > 4 * (done - 1) // of
        ):
            return console.progress_words(TRACED, done, of)
        case events.TrialStarted(number=number) if not is_redrawn and is_first:
            return f"trial {number} starts the worker and builds the model"
        case _:
            return ""


def _trial_line(board: Board, record: TrialRecord) -> str:
    """Return a finished trial in one line: how it ended, and what was searched of it."""
    ended = outcome_line(record, budget_bytes=board.definition.target.budget_bytes)
    line = _named(board, record, record.number, record.config)
    if record.purpose != "search":
        soak = record.measurement and record.measurement.soak
        if soak:
            line += f" ({soak.steps} steps in {units.duration(soak.seconds)})"
        return f"{line}: {ended}"
    if record.ran_on:
        line += f" on {record.ran_on}"
    if record.attempt > 1:
        line += f", attempt {record.attempt}"
    if not board.may_end_sooner:
        line += f" ({units.out_of(board.trials_done, board.definition.space.trials)})"
    line += f": {ended}"
    if board.is_best(record):
        line += " (best so far)"
    return f"{line}: {board.describe(record.config)}"


def _named(board: Board, run_kind: RunKind, number: int, config: TrialConfig) -> str:
    """Return what a trial is called, by what it is for."""
    if run_kind.purpose == "search":
        return f"trial {number}"
    if run_kind.confirms is None:
        return words.reference_of(board.ranking, config)
    return _AGAIN[run_kind.purpose].format(run_kind.confirms)


def panel(board: Board) -> RenderableType:
    """Return the live view of a study."""
    target = board.definition.target
    headline = f"{board.name}: {target.gpu}"
    if target.emulated_on:
        headline += f" (on {target.emulated_on})"
    headline += f", {units.gib(target.budget_bytes)}"
    beats = [running.progress for running in board.running.values() if running.progress]
    used = max((beat.allocated_bytes or 0 for beat in beats), default=0)
    total = board.definition.space.trials
    done = board.trials_done
    count = units.out_of(done, total)
    if done <= total:
        most = "at most " if board.may_end_sooner else ""
        count = f"{done:,} of {most}{total:,}"
    ended = verdict_words(board.ledger.records) or "none finished yet"
    rows = {
        "best": _best(board),
        "now": "\n".join(now_lines(board)),
        "memory": f"{units.gib(used or None)} of {units.gib(target.budget_bytes)}",
        "trials": f"{count} trials: {ended}",
        "time": time_line(board),
    }
    parts: list[RenderableType] = [Text(headline, style="bold"), facts(rows.items())]
    if board.is_stopping:
        parts.append(Text(STOPPING, style="yellow"))
    return Group(*parts)


def _best(board: Board) -> str:
    best = board.ranking.winner
    if best is None:
        return "nothing fits yet"
    ended = f"{words.VERDICT_LABELS[Verdict.FITS]}, {words.measured_line(best.measurement)}"
    line = f"trial {best.number}: {ended}"
    ratio = board.ranking.gain.ratio
    if ratio is not None and ratio.value != 1:
        line += f", {words.factor(ratio)} {words.reference_of(board.ranking, best.config)}"
    return f"{line}: {board.describe(best.config)}"


def now_lines(board: Board) -> list[str]:
    """Return what is being done, a line for each trial that runs."""
    seconds = f"{board.clock() - board.since_seconds:,.0f} s"
    if board.is_stopping:
        what = ", ".join(f"trial {number}" for number in board.running) or "the study"
        return [f"stopping {what}, {seconds}"]
    if board.tracing is not None:
        return [
            f"{console.progress_words(TRACED, board.tracing.done, board.tracing.of)}, {seconds}"
        ]
    if not board.running:
        return [f"choosing the next configuration, {seconds}"]
    return [_running_line(board, running) for running in board.running.values()]


def _running_line(board: Board, running: ShownTrial) -> str:
    started = running.started
    what = _named(board, started.run_kind, started.number, started.config)
    if running.progress is not None:
        phase = _PHASES[running.progress.phase]
        if running.progress.step:
            phase += f" step {running.progress.step}"
    else:
        phase = "starting the worker" if board.starts_a_worker else "getting ready"
    seconds = f"{board.clock() - running.since_seconds:,.0f} s"
    return f"{what}, {phase}, {seconds}: {board.describe(started.config)}"


def time_line(board: Board) -> str:
    """Return how long it took so far, and what is known of the time that is left."""
    done = f"{units.duration(board.elapsed_seconds)} so far"
    if board.is_stopping:
        return done
    search = board.search_seconds
    confirm = board.confirm_seconds
    # A time budget holds for both.
    most = board.left_seconds or math.inf
    if confirm is not None:
        confirm = min(confirm, most)
    if board.confirming is not None:
        if confirm is None:
            return done
        return f"{done}, about {_roughly(confirm)} left"
    if search is None:
        if confirm is None:
            return done
        return f"{done}, then some {_roughly(confirm)} to measure the winner again"
    whole = _roughly(min(search + (confirm or 0.0), most))
    of_it = ""
    if confirm is not None:
        of_it = f", {_roughly(confirm)} of it to measure the winner again"
    if not board.may_end_sooner:
        return f"{done}, about {whole} left{of_it}"
    least = units.error(board.definition.space.stop_below_gain)
    sooner = f"the search ends once less than {least} is expected to be gained"
    if board.predicted_gain is not None and board.predicted_gain.gain != math.inf:
        gain = units.share(board.predicted_gain.gain)
        sooner = f"{gain} expected of the next trial, the search ends below {least}"
    return f"{done}, at most some {whole} more{of_it}: {sooner}"


def _roughly(seconds: float) -> str:
    """Return a time that is not known to the second: ``25 s``, ``4 min``, ``1 h 10 min``."""
    if seconds < 55:
        return f"{max(5, 5 * round(seconds / 5))} s"
    hours, minutes = divmod(max(1, round(seconds / 60)), 60)
    if hours:
        return f"{hours} h {minutes} min"
    return f"{minutes} min"


def follow(
    read: Callable[[], StudySnapshot],
    *,
    stream: TextIO,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> None:
    """Show how a study stands until it is no longer driven.

    Args:
        read: returns the study as it stands.
        stream: where it is shown; a terminal that can be drawn on is redrawn, any other is told
            whenever a trial has ended.
        clock: seconds; only differences count.
        sleep: waits between two looks.
    """
    screen = Console(file=cast(TextIO, console.Synchronized(stream)), highlight=False)
    is_drawn = screen.is_terminal and not screen.is_dumb_terminal
    drawn = Live(console=screen, auto_refresh=False, transient=True)
    done_before = -1
    with drawn if is_drawn else nullcontext() as live:
        while True:
            before = clock()
            snapshot = read()
            if snapshot.holder is None:
                return
            done = len(snapshot.records) + len(snapshot.confirmations)
            if live is not None:
                text = Text(status_text(snapshot, width=screen.width))
                live.update(Shown(text), refresh=True)
            elif done != done_before:
                console.note_folded(status_text(snapshot))
            done_before = done
            sleep(max(_LOOK_SECONDS, (clock() - before) / _SHARE_READING))
