"""Owns how far a study's numbers can be trusted: what was predicted against what was measured, how
steady the steps of the best are, where the device's seconds went, what the winner's memory is.

Pure: a study's snapshot in, a value of numbers out. What is an estimate says what it is made of.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass
from statistics import median
from typing import Literal

from storage.definition import StudySnapshot
from storage.ranking import Ranking, measured_of, rank_study, rankable
from storage.records import OUT_OF_MEMORY, Measurement, PredictionRecord, TrialRecord, Verdict

TOP_SHOWN = 5
_LAUNCHED_FOR_NOTHING = OUT_OF_MEMORY - {Verdict.OOM}
"""Verdicts that spared the device a trial."""


@dataclass(frozen=True)
class Accuracy:
    """How far predictions were off; errors are relative to what was measured, signed."""

    quantity: Literal["memory", "speed"]
    errors: tuple[tuple[int, float], ...]
    """Trial numbers with their errors; positive where too much was predicted."""

    @property
    def median(self) -> float:
        """The error that half of the trials are within, without its sign."""
        return median(abs(error) for _, error in self.errors)

    @property
    def worst(self) -> tuple[int, float]:
        """The trial that was furthest off, with its error."""
        return max(self.errors, key=lambda pair: abs(pair[1]))


@dataclass(frozen=True)
class Steps:
    """The steps of one of the best trials, as far as they are stored."""

    record: TrialRecord
    searched: Measurement
    """Of the search."""
    runs: tuple[Measurement, ...]
    """That measured it again."""


@dataclass(frozen=True)
class Saving:
    """Device time that was not spent, by estimate."""

    trials: int
    seconds: float
    basis: int
    """How many trials the price of each is the median of."""
    each: float
    """Of steps that a trial was measured less; or seconds that one would have taken."""


@dataclass(frozen=True)
class Spent:
    """What the trials of one verdict took."""

    verdict: Verdict
    trials: int
    device_seconds: float


@dataclass(frozen=True)
class Course:
    """Where a study's time went."""

    spent: tuple[Spent, ...]
    confirming_seconds: float
    """Of the device, for measuring winners again."""
    pruned: Saving | None
    """By stopping early what could not be the fastest."""
    refused: Saving | None
    """By not launching what was known not to fit."""
    refused_by_setup: bool
    """Whether nothing ran out, so that what was not launched is priced by setting up alone."""


@dataclass(frozen=True)
class WinnerMemory:
    """What the winner's memory was measured as, and is predicted to be made of."""

    number: int
    measured: Measurement
    parts: tuple[tuple[str, int], ...]
    """Bytes by prediction, the largest first; empty where the prediction is not at hand."""


@dataclass(frozen=True)
class Trust:
    """What there is to judge a study's numbers by."""

    memory: Accuracy | None
    speed: Accuracy | None
    steps: tuple[Steps, ...]
    course: Course
    winner: WinnerMemory | None


def trust_of(snapshot: StudySnapshot) -> Trust:
    """Return what there is to judge a study's numbers by."""
    ranking = rank_study(snapshot)
    return Trust(
        memory=accuracy_of(snapshot.records, "memory"),
        speed=accuracy_of(snapshot.records, "speed"),
        steps=tuple(_steps(record, snapshot, ranking) for record in ranking.ranked[:TOP_SHOWN]),
        course=_course(snapshot),
        winner=_winner(snapshot, ranking),
    )


def accuracy_of(
    records: Iterable[TrialRecord], quantity: Literal["memory", "speed"]
) -> Accuracy | None:
    """Return how far predictions were off, over trials that fit; None where none was made.

    Each prediction is the one made before its trial ran. What was stopped early has no speed to
    hold one against, and what ran out of memory has no peak.
    """
    fits = (record for record in rankable(records) if record.verdict is Verdict.FITS)
    errors = tuple(
        (record.number, error)
        for record in fits
        if record.prediction is not None
        and (error := _error(record.prediction, measured_of(record), quantity)) is not None
    )
    return Accuracy(quantity, errors) if errors else None


def _error(
    prediction: PredictionRecord, measured: Measurement, quantity: Literal["memory", "speed"]
) -> float | None:
    if quantity == "memory":
        return prediction.peak_allocated_bytes / measured.peak_allocated_bytes - 1
    if prediction.tokens_per_second is None:
        return None
    return prediction.tokens_per_second / measured.tokens_per_second - 1


def _steps(record: TrialRecord, snapshot: StudySnapshot, ranking: Ranking) -> Steps:
    searched = {r.number: r.measurement for r in snapshot.records}[record.number]
    assert searched is not None, "only measured trials are ranked"
    known = ranking.confirmations
    return Steps(record, searched, tuple(known.runs(record.config, series=known.series)))


def _course(snapshot: StudySnapshot) -> Course:
    by_verdict: dict[Verdict, list[TrialRecord]] = {verdict: [] for verdict in Verdict}
    for record in snapshot.records:
        by_verdict[record.verdict].append(record)
    return Course(
        spent=tuple(
            Spent(verdict, len(records), sum(record.device_seconds for record in records))
            for verdict, records in by_verdict.items()
            if records
        ),
        confirming_seconds=sum(record.device_seconds for record in snapshot.confirmations),
        pruned=_saved_by_pruning(snapshot, by_verdict[Verdict.PRUNED_SLOW]),
        refused=_saved_by_refusing(snapshot),
        refused_by_setup=not _ran_out(snapshot),
    )


def _saved_by_pruning(snapshot: StudySnapshot, pruned: Sequence[TrialRecord]) -> Saving | None:
    """Return what stopping early saved: each trial's own steps, up to as many as others took."""
    whole = [
        measured_of(record).steps_measured
        for record in snapshot.records
        if record.verdict is Verdict.FITS
    ]
    if not whole or not pruned:
        return None
    steps, longest = median(whole), snapshot.definition.space.steps.seconds_max
    least = snapshot.definition.space.steps.measured_min
    seconds = 0.0
    for record in pruned:
        measured = measured_of(record)
        is_on_texts = measured.loss_tokens_per_step is not None
        # On texts what is timed as one is several steps.
        each = (
            measured.measured_seconds / measured.steps_measured
            if is_on_texts
            else measured.step_seconds
        )
        # A trial of slow steps is ended by the clock, once it has the fewest steps there are.
        end = min(each * steps, max(longest, least * each))
        seconds += max(0.0, end - each * measured.steps_measured)
    return Saving(len(pruned), seconds, len(whole), steps)


def _saved_by_refusing(snapshot: StudySnapshot) -> Saving | None:
    """Return what not launching saved: each as long as those took that did run out.

    Where none did, as long as setting up took: nothing runs out before that.
    """
    refused = sum(record.verdict in _LAUNCHED_FOR_NOTHING for record in snapshot.records)
    prices = _ran_out(snapshot) or [
        r.measurement.setup_seconds for r in snapshot.records if r.measurement
    ]
    if not refused or not prices:
        return None
    each = median(prices)
    return Saving(refused, refused * each, len(prices), each)


def _ran_out(snapshot: StudySnapshot) -> list[float]:
    """Return the device's seconds of each trial that ran out here; what was carried took none."""
    return [
        record.device_seconds
        for record in snapshot.records
        if record.verdict is Verdict.OOM and record.carried is None
    ]


def _winner(snapshot: StudySnapshot, ranking: Ranking) -> WinnerMemory | None:
    winner = ranking.winner
    if winner is None:
        return None
    forecast = snapshot.memory_forecasts.get(winner.config)
    parts = {} if forecast is None else forecast.parts
    ordered = sorted(parts.items(), key=lambda part: -part[1])
    return WinnerMemory(winner.number, measured_of(winner), tuple(ordered))
