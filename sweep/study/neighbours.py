"""Owns what becomes of a trial during which another process took the card: it is measured again.

Pure. Knows nothing of cards, runners or storage: whoever measures flags what was disturbed.
"""

from __future__ import annotations

from collections.abc import Sequence

from storage.records import (
    RETRYABLE,
    Crashed,
    Measured,
    Measurement,
    Outcome,
    OutOfMemory,
    PrunedSlow,
)

AGAIN_AT_MOST = 2
NEIGHBOUR = "neighbour"
REMEASURED = "remeasured"


def is_disturbed(outcome: Outcome) -> bool:
    """Whether another process had a hand in how a trial ended."""
    match outcome:
        case Measured(measurement=measurement) | PrunedSlow(measurement=measurement):
            return NEIGHBOUR in measurement.flags
        case OutOfMemory(flags=flags):
            return NEIGHBOUR in flags
        case _:
            return False


def settle(outcomes: Sequence[Outcome]) -> Outcome:
    """Return the outcome to keep of one configuration's outcomes, of which only the last may be
    undisturbed.

    Without such a one the fastest measurement is kept, since a neighbour only takes speed away. A
    failure of the machine does not replace a measurement. Memory that a neighbour held all the
    time says nothing of the configuration: that is a failure of the machine too.
    """
    last = outcomes[-1]
    measured = [one for one in outcomes if isinstance(one, Measured | PrunedSlow)]
    if not is_disturbed(last) and not (measured and last.verdict in RETRYABLE):
        return _marked(last) if len(outcomes) > 1 else last
    complete = [one for one in measured if isinstance(one, Measured)] or measured
    if complete:
        kept = max(complete, key=lambda one: one.measurement.tokens_per_second)
        return _marked(kept) if len(outcomes) > 1 else kept
    assert isinstance(last, OutOfMemory)
    return Crashed(
        phase="build" if last.stage == "load" else "warmup",
        detail=f"another process held memory that this trial was to have: {last.detail}",
    )


def _marked(outcome: Outcome) -> Outcome:
    """Say of a measurement that it is not the first of its configuration."""
    match outcome:
        case Measured() | PrunedSlow():
            return outcome.model_copy(update={"measurement": _flagged(outcome.measurement)})
        case _:
            return outcome


def _flagged(measurement: Measurement) -> Measurement:
    return measurement.model_copy(update={"flags": (*measurement.flags, REMEASURED)})
