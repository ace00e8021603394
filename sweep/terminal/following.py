"""Owns following a study that another process drives, from what storage says of it alone.

What changed since the last look becomes the events that a driver's own view is fed with. Knows
nothing of databases: reading is handed in.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator
from contextlib import suppress
from datetime import UTC, datetime
from typing import TextIO

from storage.definition import RunningTrial, StudySnapshot
from storage.records import Errand
from sweep.study.events import ConfirmationStarted, Event, TrialFinished, TrialStarted
from sweep.terminal.board import Board
from sweep.terminal.live import watching

_LOOK_SECONDS = 1.0
_SHARE_READING = 0.2
"""Of the time that may go into reading: a study of thousands of trials is looked at less often."""


def follow(
    read: Callable[[], StudySnapshot],
    *,
    stream: TextIO,
    clock: Callable[[], float] = time.monotonic,
    sleep: Callable[[float], None] = time.sleep,
) -> StudySnapshot:
    """Show a study until nobody drives it any more; return how it then stands.

    Args:
        read: returns the study as it stands.
        stream: where it is shown.
        clock: seconds; only differences count.
        sleep: waits between two looks.
    """
    snapshot = read()
    if snapshot.holder is None:
        return snapshot
    board = _board(snapshot, clock)
    with watching(board, is_stopping=lambda: False, stream=stream) as listener:
        while snapshot.holder is not None:
            for event in changes(board, snapshot):
                listener(event)
                if isinstance(event, TrialStarted):
                    seconds = _running_seconds(snapshot, event.number)
                    with board.lock:
                        board.began_before(event.number, seconds)
            with board.lock:
                board.keep_running({trial.number for trial in snapshot.running})
            before = clock()
            snapshot = read()
            sleep(max(_LOOK_SECONDS, (clock() - before) / _SHARE_READING))
        # Who drove it is looked at after its trials, and may have ended the last one in between.
        snapshot = read()
        for event in changes(board, snapshot):
            listener(event)
    return snapshot


def _board(snapshot: StudySnapshot, clock: Callable[[], float]) -> Board:
    return Board(
        name=snapshot.name,
        definition=snapshot.definition,
        records=list(snapshot.records),
        confirmations=list(snapshot.confirmations),
        clock=clock,
        is_driven_here=False,
        earlier_seconds=snapshot.wall_seconds,
    )


def changes(board: Board, snapshot: StudySnapshot) -> Iterator[Event]:
    """Yield what happened since the board was fed last, in the order in which it did."""
    known = {record.number for record in (*board.records, *board.confirmations)}
    new = [r for r in (*snapshot.records, *snapshot.confirmations) if r.number not in known]
    running = [trial for trial in snapshot.running if trial.config is not None]
    is_confirming = any(trial.purpose != "search" for trial in running)
    if board.confirming is None and (is_confirming or any(r.purpose != "search" for r in new)):
        yield from (TrialFinished(r) for r in new if r.purpose == "search")
        new = [r for r in new if r.purpose != "search"]
        series = max((r.series for r in snapshot.confirmations), default=1)
        yield ConfirmationStarted(series=series, numbers=())
    yield from (TrialFinished(record) for record in sorted(new, key=lambda r: r.number))
    for trial in sorted(running, key=lambda trial: trial.number):
        if trial.number not in board.running:
            yield from _started(trial)


def _running_seconds(snapshot: StudySnapshot, number: int) -> float:
    """Return how long a trial has run, by this machine's clock."""
    began = next((t.started_at for t in snapshot.running if t.number == number), None)
    if began is None:
        return 0.0
    # By whatever wrote it: a time that is none, or of no zone, says nothing.
    with suppress(ValueError, TypeError):
        return (datetime.now(UTC) - datetime.fromisoformat(began)).total_seconds()
    return 0.0


def _started(running: RunningTrial) -> Iterator[TrialStarted]:
    if running.config is None:
        return
    errand = Errand(purpose=running.purpose, confirms=running.confirms)
    yield TrialStarted(running.number, running.config, False, 1, errand)
