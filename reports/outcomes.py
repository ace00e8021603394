"""Owns how the ends of trials are put into words: each verdict's name, meaning and reason.

Knows nothing of where the words go; the terminal, the tables and the figures share them.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import assert_never

from reports import uncertainty, units
from reports.quality import quality_words
from storage.ranking import verdict_counts
from storage.records import (
    Crashed,
    Diverged,
    DominatedOutOfMemory,
    Ineffective,
    Invalid,
    Lost,
    Measured,
    OutOfMemory,
    PredictedOutOfMemory,
    PrunedSlow,
    TimedOut,
    TrialRecord,
    Verdict,
    need_of,
    without_repeated,
)

_REASON_CHARACTERS = 160
"""A worker's last words can be long; its log has them all."""

VERDICT_LABELS: Mapping[Verdict, str] = {
    Verdict.FITS: "fits",
    Verdict.OOM: "ran out of memory",
    Verdict.PREDICTED_OOM: "predicted not to fit",
    Verdict.DOMINATED_OOM: "larger than one that ran out",
    Verdict.PRUNED_SLOW: "stopped as too slow",
    Verdict.DIVERGED: "diverged",
    Verdict.INVALID: "invalid",
    Verdict.INEFFECTIVE: "had no effect",
    Verdict.TIMED_OUT: "timed out",
    Verdict.CRASHED: "crashed",
    Verdict.LOST: "lost",
}
"""What each verdict is called for people."""

VERDICT_MEANINGS: Mapping[Verdict, str] = {
    Verdict.FITS: "It trained within the budget and was measured.",
    Verdict.OOM: "A real allocation failed while it trained.",
    Verdict.PREDICTED_OOM: "It was predicted not to fit, surely; it was not launched.",
    Verdict.DOMINATED_OOM: "It is at least as large in every dimension as one that ran out of "
    "memory; it was not launched.",
    Verdict.PRUNED_SLOW: "It fits, and was stopped once it could no longer be the fastest.",
    Verdict.DIVERGED: "The loss was not finite, so its speed does not count.",
    Verdict.INVALID: "A rule forbids it on this model or GPU; it was not launched.",
    Verdict.INEFFECTIVE: "A setting did not take effect, so this is not what was run.",
    Verdict.TIMED_OUT: "A phase outlasted its deadline; it may be retried.",
    Verdict.CRASHED: "The worker ended, not for want of memory; it may be retried.",
    Verdict.LOST: "The driver ended while it ran, so nothing is known of it; it may be retried.",
}
"""One sentence on each verdict."""


def outcome_line(record: TrialRecord, *, budget_bytes: int) -> str:
    """Return how a trial ended: ``fits, 7,006 tokens/s, 6.65 GiB``, ``crashed (attach: ...)``.

    Where it trained for its held-out loss, that stands behind.
    """
    measured, label = record.measurement, VERDICT_LABELS[record.verdict]
    if measured is not None:
        peak = units.gib(measured.peak_allocated_bytes)
        quality = measured.quality
        loss = "" if quality is None else f", held-out loss {quality_words(quality)}"
        return f"{label}, {uncertainty.speed(measured)}, {peak}{loss}"
    why = reason(record, budget_bytes=budget_bytes)
    return f"{label} ({why})" if why else label


def reason(record: TrialRecord, *, budget_bytes: int) -> str:
    """Return what is known of why a trial was not measured, in one line; empty for one that was."""
    need = need_of(record, budget_bytes=budget_bytes)
    unit = units.memory_unit(budget_bytes)
    known = (_cause(record), "" if need is None else f"needs {uncertainty.need(need, unit)}")
    line = " ".join(", ".join(part for part in known if part).split())
    return line if len(line) <= _REASON_CHARACTERS else f"{line[:_REASON_CHARACTERS]}..."


def _cause(record: TrialRecord) -> str:
    match record.outcome:
        case OutOfMemory(stage=stage):
            return stage
        case DominatedOutOfMemory(by=number):
            return f"trial {number}"
        case Diverged(step=step, detail=detail):
            return detail or f"at step {step}"
        case Invalid(rule=rule, detail=detail):
            return detail or rule
        case Ineffective(knob=where, detail=detail):
            return f"{where}: {detail}" if detail else where
        case TimedOut(phase=where, detail=detail) | Crashed(phase=where, detail=detail):
            return f"{where}: {detail}" if detail else where
        case Lost(detail=detail):
            return detail
        case Measured() | PrunedSlow() | PredictedOutOfMemory():
            return ""
        case _:
            assert_never(record.outcome)


def verdict_words(records: Iterable[TrialRecord]) -> str:
    """Return how many trials ended in each way: ``5 fits, 3 ran out of memory``.

    An attempt that came to nothing and was repeated is no trial of its own, and is said so.
    """
    records = tuple(records)
    trials = without_repeated(records)
    counts = verdict_counts(trials)
    ended = ((counts[verdict], VERDICT_LABELS[verdict]) for verdict in Verdict)
    words = ", ".join(f"{count} {label}" for count, label in ended if count)
    again = len(records) - len(trials)
    return f"{words} (after {units.plural(again, 'failed attempt')})" if again else words
