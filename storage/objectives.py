"""Owns how trials compare by objectives: what fits, what it is worth, ties, and the front. Pure.

A configuration counts once: by the last trial of it that came to a conclusion (fits, out of memory,
diverged, ineffective). Knows nothing of a study, of its space or of what was measured again.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Sequence

from search_spaces.config import canonical
from search_spaces.space import Objective
from storage.records import Measurement, TrialRecord, Verdict

CONCLUSIVE = frozenset({Verdict.FITS, Verdict.OOM, Verdict.DIVERGED, Verdict.INEFFECTIVE})
"""How a trial ends that says what becomes of its configuration: the last of them counts."""


def objective_value(objective: Objective, measured: Measurement) -> float:
    """Return what was measured of an objective: tokens/s, bytes, a count, or a loss per token.

    A held-out loss that was not measured is infinite.
    """
    match objective:
        case "tokens_per_second":
            return measured.tokens_per_second
        case "peak_memory":
            return measured.peak_allocated_bytes
        case "trainable_parameters":
            return measured.trainable_parameters
        case "eval_loss":
            return math.inf if measured.quality is None else measured.quality.eval_loss


LESS_IS_BETTER: frozenset[Objective] = frozenset({"peak_memory", "eval_loss"})


def is_judged(measured: Measurement, objectives: Sequence[Objective]) -> bool:
    """Whether everything that is asked for was measured: a held-out loss takes a training."""
    return all(math.isfinite(objective_value(objective, measured)) for objective in objectives)


def measured_of(record: TrialRecord) -> Measurement:
    """Return the measurement of a trial that has one, as every ranked trial does."""
    assert record.measurement is not None, "only measured trials are ranked"
    return record.measurement


def rankable(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the trials less those whose measured speed or interval is not finite and positive.

    Such numbers come from a broken clock or a damaged record; nothing can be ranked by them.
    """
    return tuple(r for r in records if r.measurement is None or r.measurement.is_sound)


def fitting(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the trials that fit, each configuration once, fastest first.

    Equal speeds are ordered by less memory, then by number.
    """
    last = {
        canonical(record.config): record
        for record in by_number(records)
        if record.verdict in CONCLUSIVE
    }
    return fastest_first(record for record in last.values() if record.verdict is Verdict.FITS)


def pareto_front(
    records: Iterable[TrialRecord], objectives: Sequence[Objective]
) -> tuple[TrialRecord, ...]:
    """Return the fitting trials that no other beats in one and matches in every objective.

    Fastest first, as `fitting` orders them.
    """
    points = {
        record.number: merits_of(record, objectives)
        for record in fitting(records)
        if is_judged(measured_of(record), objectives)
    }
    kept: list[tuple[float, ...]] = []
    # In falling order whatever dominates a point comes before it, and what dominates that as well.
    for point in sorted(set(points.values()), reverse=True):
        if not any(_dominates(other, point) for other in kept):
            kept.append(point)
    on_front = set(kept)
    return tuple(r for r in fitting(records) if points.get(r.number) in on_front)


def merits_of(record: TrialRecord, objectives: Sequence[Objective]) -> tuple[float, ...]:
    """Return the value of each objective, turned so that larger is better."""
    measured = measured_of(record)
    values = ((objective, objective_value(objective, measured)) for objective in objectives)
    return tuple(-value if objective in LESS_IS_BETTER else value for objective, value in values)


def _dominates(other: Sequence[float], point: Sequence[float]) -> bool:
    return other != point and all(theirs >= ours for theirs, ours in zip(other, point, strict=True))


def distance_to_the_corner(
    front: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> Callable[[TrialRecord], float]:
    """Return what measures how far a trial is from the best of every objective at once.

    In units of the front's extent; an objective in which all of the front are equal says nothing.
    """
    columns = list(zip(*(merits_of(record, objectives) for record in front), strict=True))
    scales = [(max(column), max(column) - min(column)) for column in columns]

    def distance(record: TrialRecord) -> float:
        return math.hypot(
            *(
                (best - merit) / extent
                for merit, (best, extent) in zip(merits_of(record, objectives), scales, strict=True)
                if extent > 0
            )
        )

    return distance


def is_tied(objective: Objective, best: Measurement, other: Measurement) -> bool:
    """Whether two are tied in an objective: speeds and losses where 95 % intervals overlap."""
    if objective == "eval_loss":
        return _is_loss_tied(best, other)
    if objective != "tokens_per_second":
        return objective_value(objective, best) == objective_value(objective, other)
    best_ends, ends = best.speed_interval, other.speed_interval
    if best_ends is None or ends is None:
        return False
    # One that seems faster and comes after it was measured in another process, and never beside it.
    return best_ends[0] <= ends[1]


def _is_loss_tied(best: Measurement, other: Measurement) -> bool:
    """Whether the intervals of two held-out losses overlap; without intervals only equals do."""
    mine, theirs = best.quality, other.quality
    if mine is None or theirs is None:
        return False
    ends, others = mine.eval_loss_ci95, theirs.eval_loss_ci95
    if ends is None or others is None:
        return mine.eval_loss == theirs.eval_loss
    return ends[0] <= others[1] and others[0] <= ends[1]


def by_number(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return trials in the order in which they were asked for."""
    return sorted(records, key=lambda record: record.number)


def fastest_first(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return measured trials by falling speed; equals by less memory, then by number."""

    def order(record: TrialRecord) -> tuple[float, int, int]:
        measured = measured_of(record)
        return -measured.tokens_per_second, measured.peak_allocated_bytes, record.number

    return tuple(sorted(records, key=order))
