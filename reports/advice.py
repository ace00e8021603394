"""Owns what a study says it would take to go faster than its winner, or to fit at all.

Pure: a study's snapshot in, sentences out. Says only what the records show; knows nothing of where
it is printed.
"""

from __future__ import annotations

from collections.abc import Iterator

from reports import units
from reports.measured import measured_trials, rankable
from search_spaces.space import Choices, SearchSpace
from storage import ranking
from storage.definition import StudySnapshot
from storage.records import (
    OUT_OF_MEMORY,
    RETRYABLE,
    Measurement,
    OutOfMemory,
    PredictedOutOfMemory,
    TrialRecord,
)

SPEED_KEYS = ("checkpoint_fraction", "kernels", "upcast_fp32", "compile")
"""Settings that change the speed and leave the trained model what it is."""
SIZE_KEYS = ("micro_batch_size", "seq_len")
"""Dimensions in which a larger value does more work per launch."""
_SUSPECT_FLAGS = ("throttled", "noisy", "neighbour")
_NEAREST_SHOWN = 2
_TIED_SHOWN = 5


def how_to_go_faster(snapshot: StudySnapshot) -> list[str]:
    """Return sentences on what stands between the winner and more speed, most useful first."""
    winner = ranking.winner(rankable(snapshot.records))
    if winner is None or winner.measurement is None:
        return [*_why_nothing_fits(snapshot), *_retryable(snapshot)]
    return [
        *_ties(snapshot, winner.measurement),
        *_too_large(snapshot, winner.measurement),
        *_edges(snapshot, winner),
        *_untried(snapshot),
        *_not_searched(snapshot.definition.space),
        *_suspect(winner),
        *_retryable(snapshot),
    ]


def needed_bytes(record: TrialRecord) -> int | None:
    """Return the memory that a trial which did not fit is known or predicted to need, else None.

    A prediction is the need itself, but never less than what was seen allocated. Without one it is
    what was allocated plus the request that failed; both can be below the budget.
    """
    predicted = record.prediction.peak_allocated_bytes if record.prediction is not None else None
    match record.outcome:
        case PredictedOutOfMemory(predicted_bytes=need):
            return need
        case OutOfMemory(peak_allocated_bytes=peak, requested_bytes=asked) if peak is not None:
            return peak + (asked or 0) if predicted is None else max(predicted, peak)
        case _:
            return predicted


def _out_of_memory(snapshot: StudySnapshot) -> list[TrialRecord]:
    return [record for record in snapshot.records if record.verdict in OUT_OF_MEMORY]


def _named(record: TrialRecord, space: SearchSpace) -> str:
    return (
        f"trial {record.number} ({units.changes(record.config, baseline=space.baseline_config())})"
    )


def _excess(record: TrialRecord, budget_bytes: int) -> str:
    need = needed_bytes(record)
    if need is None:
        return "by how much is not known"
    if need <= budget_bytes:
        return "it ran out close to the budget, by how much is not known"
    return f"it needs about {units.gib(need - budget_bytes)} more than the budget"


def _too_large(snapshot: StudySnapshot, best: Measurement) -> Iterator[str]:
    """Yield what more memory would buy, by expected speed; without any, what missed narrowly."""
    expected = [
        (record.prediction.tokens_per_second, record)
        for record in _out_of_memory(snapshot)
        if record.prediction is not None and record.prediction.tokens_per_second is not None
    ]
    if not expected:
        yield from _nearest_to_fitting(snapshot)
    faster = [(rate, record) for rate, record in expected if rate > best.tokens_per_second]
    nearest = sorted(faster, key=lambda pair: (needed_bytes(pair[1]) or 0, pair[1].number))
    for rate, record in nearest[:_NEAREST_SHOWN]:
        yield (
            f"More memory: {_named(record, snapshot.definition.space)} is expected at "
            f"{units.rate(rate)} tokens/s and did not fit; "
            f"{_excess(record, snapshot.definition.target.budget_bytes)}."
        )


def _nearest_to_fitting(snapshot: StudySnapshot) -> Iterator[str]:
    needs = [(need, r) for r in _out_of_memory(snapshot) if (need := needed_bytes(r)) is not None]
    if needs:
        _, nearest = min(needs, key=lambda pair: (pair[0], pair[1].number))
        yield (
            f"Nearest to fitting: {_named(nearest, snapshot.definition.space)}; "
            f"{_excess(nearest, snapshot.definition.target.budget_bytes)}."
        )


def _ties(snapshot: StudySnapshot, best: Measurement) -> Iterator[str]:
    numbers = ranking.tied(rankable(snapshot.records))
    if not numbers:
        return
    shown = ", ".join(str(number) for number in numbers[:_TIED_SHOWN])
    more = f" and {len(numbers) - _TIED_SHOWN} more" if len(numbers) > _TIED_SHOWN else ""
    peak, frugal = min(
        (measured.peak_allocated_bytes, record.number)
        for record, measured in measured_trials(snapshot.records)
        if record.number in numbers
    )
    winner_peak = best.peak_allocated_bytes
    saving = (
        f"; trial {frugal} takes {units.gib(peak)} against the winner's {units.gib(winner_peak)}"
        if peak < winner_peak
        else ""
    )
    trials = "trials" if len(numbers) > 1 else "trial"
    yield f"A tie: {trials} {shown}{more} cannot be told from the winner by speed{saving}."


def _edges(snapshot: StudySnapshot, winner: TrialRecord) -> Iterator[str]:
    space, budget_bytes = snapshot.definition.space, snapshot.definition.target.budget_bytes
    for key in SIZE_KEYS:
        dimension = space.dimensions.get(key)
        if dimension is None:
            continue
        largest = max(dimension.choices) if isinstance(dimension, Choices) else dimension.high
        if getattr(winner.config, key) >= largest and winner.measurement is not None:
            share = units.percent(winner.measurement.peak_allocated_bytes / budget_bytes)
            yield (
                f"A wider space: the winner has the largest {units.KEY_LABELS[key]} that the space "
                f"'{space.name}' offers ({largest:g}) and uses {share} of the budget. "
                f"Offer larger values of {key}."
            )


def _untried(snapshot: StudySnapshot) -> Iterator[str]:
    size = snapshot.definition.space.size()
    tried = len({record.config for record in snapshot.records})
    if size is not None and tried < size:
        yield (
            f"More trials: {tried:,} of the {size:,} configurations of the space have been looked "
            "at; the same command with more --trials goes on from here."
        )


def _not_searched(space: SearchSpace) -> Iterator[str]:
    fixed = [key for key in SPEED_KEYS if key not in space.dimensions]
    if fixed:
        names = ", ".join(fixed)
        yield f"Settings that were not searched and can change the speed, not the model: {names}."


def _suspect(winner: TrialRecord) -> Iterator[str]:
    flags = winner.measurement.flags if winner.measurement is not None else ()
    suspect = [flag for flag in flags if flag in _SUSPECT_FLAGS]
    if suspect:
        yield (
            f"A calmer machine: the winner's measurement is marked {', '.join(suspect)}; "
            "its speed may be more than was seen."
        )


def _retryable(snapshot: StudySnapshot) -> Iterator[str]:
    failed = [record for record in snapshot.records if record.verdict in RETRYABLE]
    if failed:
        yield (
            f"Unknown so far: {units.plural(len(failed), 'trial')} crashed, timed out or got lost, "
            "so their speed is not known."
        )


def _why_nothing_fits(snapshot: StudySnapshot) -> Iterator[str]:
    if not snapshot.records:
        yield "No trial has finished yet."
        return
    budget = units.gib(snapshot.definition.target.budget_bytes)
    yield f"No configuration was measured within {budget}."
    yield from _nearest_to_fitting(snapshot)
    if _out_of_memory(snapshot):
        yield (
            "Less memory: smaller micro-batches, shorter sequences, full checkpointing, no fp32 "
            "upcast, or a smaller model."
        )
