"""Owns a running study on stderr: what a person wants to see of it, gathered from the tuner's
events, as a live panel on a terminal and as a line per trial elsewhere.

Knows nothing of the tuner but its events.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from datetime import datetime
from typing import TextIO, cast

from rich.console import Console, Group, RenderableType
from rich.live import Live
from rich.progress_bar import ProgressBar
from rich.table import Table
from rich.text import Text

from reports import uncertainty, units
from reports.outcomes import outcome_line, verdict_words
from search_spaces.config import TrialConfig
from storage.definition import StudyDefinition
from storage.gain import Gain, compare
from storage.ranking import Ranking, rank
from storage.records import TrialRecord
from storage.recovery import next_number
from sweep.planning.forecast import TRACED
from sweep.running.runner import Progress
from sweep.study.events import (
    ConfirmationStarted,
    Event,
    Listener,
    SpaceTraced,
    StudyFinished,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from sweep.study.tuner import trials_spent
from sweep.terminal.console import Unfailing, note
from sweep.terminal.working import progress_words

_REFRESHES_PER_SECOND = 4
_BAR_WIDTH = 40
STOPPING = "stopping after this trial; Ctrl-C again stops now, and the study can go on either way"


@dataclass
class Board:
    """A study as it stands, kept up to date by `take`.

    It is drawn several times a second, and ranked once a trial.
    """

    name: str
    definition: StudyDefinition
    records: list[TrialRecord]
    """Finished trials of the search, those of earlier runs included."""
    clock: Callable[[], float]
    current: TrialStarted | None = None
    progress: Progress | None = None
    tracing: SpaceTraced | None = None
    """How far tracing the space is, while it is traced."""
    is_stopping: bool = False
    confirmations: list[TrialRecord] = field(default_factory=list)
    """Finished runs that measure winners again."""
    confirming: ConfirmationStarted | None = None
    """What is measured again, once the search has ended."""
    _started_seconds: float = field(init=False)
    _finished_here: int = field(default=0, init=False)
    _since: int = field(init=False)
    _ranking: Ranking = field(init=False)

    def __post_init__(self) -> None:
        self._since = next_number(self.records)
        self._started_seconds = self.clock()
        self._ranking = rank(self.records, self.definition, self.confirmations)

    def take(self, event: Event) -> None:
        """Take in one event."""
        match event:
            case SpaceTraced():
                self.tracing = event if event.done < event.of else None
            case TrialStarted():
                self.current, self.progress = event, None
            case TrialProgress(progress=progress):
                self.progress = progress
            case TrialFinished(record=record):
                is_searched = record.purpose == "search"
                (self.records if is_searched else self.confirmations).append(record)
                self._ranking = rank(self.records, self.definition, self.confirmations)
                self._finished_here += is_searched
                self.current = self.progress = None
            case ConfirmationStarted():
                self.confirming = event
            case StudyFinished():
                self.current = self.progress = None

    @property
    def best(self) -> TrialRecord | None:
        """The best trial of the space that fits so far, by the study's objectives."""
        return self._ranking.winner

    @property
    def gain(self) -> Gain | None:
        """The best's speed over the baseline's in its class, where it can be stated."""
        comparison = compare(self._ranking)
        return None if comparison is None else comparison.gain

    @property
    def reference(self) -> str:
        """What that is over."""
        best = self._ranking.winner
        return "" if best is None else uncertainty.reference_of(self._ranking, best.config)

    @property
    def is_first(self) -> bool:
        """Whether no trial has finished in this run."""
        return self._finished_here == 0

    @property
    def trials_done(self) -> int:
        """Trials that count towards the study's total."""
        return trials_spent(self.records, since=self._since)

    @property
    def elapsed_seconds(self) -> float:
        """Seconds of this run."""
        return self.clock() - self._started_seconds

    @property
    def remaining_seconds(self) -> float | None:
        """Seconds left at the pace of this run, or of its time budget; None where unknown."""
        if self.confirming is not None:
            return None
        limit = self.definition.space.time_budget_seconds
        left = None if limit is None else max(0.0, limit - self.elapsed_seconds)
        if self.is_first:
            return left
        trials_left = max(0, self.definition.space.trials - self.trials_done)
        at_pace = trials_left * self.elapsed_seconds / self._finished_here
        return at_pace if left is None else min(left, at_pace)

    def describe(self, config: TrialConfig) -> str:
        """Return what a configuration changes over the baseline."""
        return units.changes(config, baseline=self.definition.space.baseline_config())


@contextmanager
def watching(
    board: Board, *, is_stopping: Callable[[], bool], stream: TextIO
) -> Iterator[Listener]:
    """Show a study while it runs; yields what the tuner's events go to.

    Args:
        board: kept up to date with every event.
        is_stopping: whether somebody asked to stop.
        stream: where to; a terminal gets the live panel.
    """
    if stream.isatty():
        with _panel(board, is_stopping=is_stopping, stream=stream) as listener:
            yield listener
    else:
        yield _plain(board, is_stopping=is_stopping)


def _plain(board: Board, *, is_stopping: Callable[[], bool]) -> Listener:
    def listen(event: Event) -> None:
        board.take(event)
        if is_stopping() and not board.is_stopping:
            board.is_stopping = True
            note(STOPPING)
        if isinstance(event, SpaceTraced) and _is_worth_a_line(event.done, event.of):
            note(f"{_time()} {progress_words(TRACED, event.done, event.of)}")
        if isinstance(event, ConfirmationStarted):
            note(f"{_time()} {confirming_line(event)}")
        if isinstance(event, TrialStarted) and board.is_first and board.confirming is None:
            note(f"{_time()} trial {event.number} starts the worker and builds the model")
        if isinstance(event, TrialFinished):
            note(f"{_time()} {trial_line(board, event)}")

    return listen


def _is_worth_a_line(done: int, of: int) -> bool:
    """Whether to say so where each time takes a line: at the start, and after each quarter."""
    return 4 * done // of > 4 * (done - 1) // of


def _time() -> str:
    return f"{datetime.now():%H:%M:%S}"


def confirming_line(event: ConfirmationStarted) -> str:
    """Return what is measured again, in one line."""
    listed = ", ".join(map(str, event.numbers))
    noun = "trials" if len(event.numbers) > 1 else "trial"
    recipe = f" beside {uncertainty.at_capacity(event.recipe)}" if event.recipe else ""
    return (
        f"the search has ended: measuring {noun} {listed} again{recipe}, in turns in a fresh worker"
    )


def trial_line(board: Board, event: TrialFinished) -> str:
    """Return a finished trial in one line."""
    record = event.record
    if record.purpose != "search":
        return _again_line(board, record)
    again = f", attempt {record.attempt}" if record.attempt > 1 else ""
    ended = outcome_line(record, budget_bytes=board.definition.target.budget_bytes)
    count = units.out_of(board.trials_done, board.definition.space.trials)
    return f"trial {record.number}{again} ({count}): {ended}: {board.describe(record.config)}"


def _again_line(board: Board, record: TrialRecord) -> str:
    """Return a run that measured a trial again in one line."""
    ended = outcome_line(record, budget_bytes=board.definition.target.budget_bytes)
    soak = None if record.measurement is None else record.measurement.soak
    what = "soak of trial" if record.purpose == "soak" else "again trial"
    steps = f" ({soak.steps} steps in {units.duration(soak.seconds)})" if soak else ""
    if record.confirms is None:
        return f"{uncertainty.at_capacity(record.config)}: {ended}"
    return f"{what} {record.confirms}{steps}: {ended}"


@contextmanager
def _panel(board: Board, *, is_stopping: Callable[[], bool], stream: TextIO) -> Iterator[Listener]:
    console = Console(file=cast(TextIO, Unfailing(stream)), highlight=False)

    def render() -> RenderableType:
        board.is_stopping = is_stopping()
        return panel(board)

    with Live(
        get_renderable=render,
        console=console,
        refresh_per_second=_REFRESHES_PER_SECOND,
        transient=True,
    ):

        def listen(event: Event) -> None:
            board.take(event)
            if isinstance(event, ConfirmationStarted):
                console.print(Text(confirming_line(event)), soft_wrap=False, overflow="ellipsis")
            if isinstance(event, TrialFinished):
                console.print(Text(trial_line(board, event)), soft_wrap=False, overflow="ellipsis")

        yield listen


def panel(board: Board) -> RenderableType:
    """Return the live view of a study."""
    grid = Table.grid(padding=(0, 2))
    grid.add_column(style="dim", no_wrap=True)
    grid.add_column(overflow="ellipsis")
    for label, content in _rows(board):
        grid.add_row(label, content)
    lines: list[RenderableType] = [Text(_headline(board), style="bold"), grid]
    if board.is_stopping:
        lines.append(Text(STOPPING, style="yellow"))
    return Group(*lines)


def _headline(board: Board) -> str:
    target = board.definition.target
    on = f" (on {target.emulated_on})" if target.emulated_on else ""
    left = board.remaining_seconds
    return (
        f"{board.name}: {target.gpu}{on}, {units.gib(target.budget_bytes)}; "
        f"{units.out_of(board.trials_done, board.definition.space.trials)} trials; "
        f"{units.duration(board.elapsed_seconds)} so far"
        + ("" if left is None else f", about {units.duration(left)} left")
    )


def _rows(board: Board) -> Iterator[tuple[str, RenderableType]]:
    yield "best", Text(_best(board))
    yield "now", Text(_now(board))
    yield "memory", _memory(board)
    yield "trials", Text(verdict_words(board.records) or "none finished yet")


def _best(board: Board) -> str:
    best = board.best
    if best is None:
        return "nothing fits yet"
    budget_bytes = board.definition.target.budget_bytes
    gain = ""
    if board.gain is not None:
        gain = f", {uncertainty.factor(board.gain)} {board.reference}"
    ended = outcome_line(best, budget_bytes=budget_bytes)
    return f"trial {best.number}: {ended}{gain}: {board.describe(best.config)}"


def _now(board: Board) -> str:
    if board.tracing is not None:
        return progress_words(TRACED, board.tracing.done, board.tracing.of)
    if board.current is None:
        return "choosing the next configuration"
    number, config = board.current.number, board.current.config
    phase = "checking" if board.progress is None else board.progress.phase
    step = f" step {board.progress.step}" if board.progress and board.progress.step else ""
    errand = board.current.errand
    confirmed = (
        uncertainty.at_capacity(config)
        if errand.confirms is None
        else f"trial {errand.confirms} again"
    )
    again = {
        "search": f"trial {number}",
        "confirm": confirmed,
        "soak": f"trial {errand.confirms}, soak",
    }[errand.purpose]
    return f"{again}, {phase}{step}: {board.describe(config)}"


def _memory(board: Board) -> RenderableType:
    """Return the running trial's memory against the budget."""
    budget = board.definition.target.budget_bytes
    used = board.progress.allocated_bytes if board.progress else None
    row = Table.grid(padding=(0, 1))
    row.add_row(
        ProgressBar(total=budget, completed=used or 0, width=_BAR_WIDTH),
        Text(f"{units.gib(used)} of {units.gib(budget)}"),
    )
    return row
