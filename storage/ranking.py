"""Owns which trial is best and what may be said of it. Pure functions over records.

A configuration counts once: by the last trial of it that came to a conclusion (fits, out of memory,
diverged, ineffective). Running out of memory later retracts a fit.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence
from dataclasses import asdict, dataclass
from typing import Any

from search_spaces.space import Objective
from storage.definition import StudySnapshot
from storage.records import Measurement, TrialRecord, Verdict

_CONCLUSIVE = frozenset({Verdict.FITS, Verdict.OOM, Verdict.DIVERGED, Verdict.INEFFECTIVE})

_BETTER: dict[Objective, Callable[[Measurement], float]] = {
    "tokens_per_second": lambda m: m.tokens_per_second,
    "peak_memory": lambda m: -m.peak_allocated_bytes,
    # A study has one card and so one price: what a token costs falls with the speed alone.
    "cost": lambda m: m.tokens_per_second,
    "trainable_parameters": lambda m: m.trainable_parameters,
}


@dataclass(frozen=True)
class ClassBest:
    """The fastest trial of one capacity class."""

    lora_rank: int
    target_modules: str | tuple[str, ...]
    seq_len: int
    number: int
    tokens_per_second: float
    is_partial: bool
    """Stopped early as slow, in a class where nothing was measured to the end."""


def fitting(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the trials that fit, each configuration once, fastest first.

    Equal speeds are ordered by less memory, then by number.
    """
    last = {
        record.config.key(): record
        for record in _by_number(records)
        if record.verdict in _CONCLUSIVE
    }
    return _fastest_first(record for record in last.values() if record.verdict is Verdict.FITS)


def winner(records: Iterable[TrialRecord]) -> TrialRecord | None:
    """Return the fastest trial that fits; None where nothing fits."""
    return next(iter(fitting(records)), None)


def runners_up(records: Iterable[TrialRecord], *, limit: int = 5) -> tuple[TrialRecord, ...]:
    """Return up to ``limit`` trials behind the winner, fastest first."""
    return fitting(records)[1 : limit + 1]


def tied(records: Iterable[TrialRecord]) -> tuple[int, ...]:
    """Return the numbers of the other trials whose 95 % speed interval overlaps the winner's."""
    ranked = fitting(records)
    if not ranked:
        return ()
    low, high = speed_interval(_measured(ranked[0]))
    intervals = [(record.number, *speed_interval(_measured(record))) for record in ranked[1:]]
    return tuple(
        number
        for number, their_low, their_high in intervals
        if their_high >= low and their_low <= high
    )


def speed_interval(measurement: Measurement) -> tuple[float, float]:
    """Return the tokens per second at both ends of the median step's 95 % interval, low first."""
    tokens = measurement.tokens_per_second * measurement.step_seconds
    low, high = measurement.step_seconds_ci95
    return tokens / high, tokens / low


def fastest_by_class(records: Iterable[TrialRecord]) -> tuple[ClassBest, ...]:
    """Return the fastest trial per rank, target modules and sequence length, in that order.

    Where nothing of a class was measured to the end, its fastest partial measurement stands for it,
    marked as such.
    """
    known = tuple(records)
    partial = _fastest_first(record for record in known if record.verdict is Verdict.PRUNED_SLOW)
    best: dict[str, ClassBest] = {}
    for record in (*fitting(known), *partial):
        found = _class_best(record)
        best.setdefault(str((found.lora_rank, found.target_modules, found.seq_len)), found)
    return tuple(
        sorted(best.values(), key=lambda b: (b.lora_rank, str(b.target_modules), b.seq_len))
    )


def _class_best(record: TrialRecord) -> ClassBest:
    config = record.config
    return ClassBest(
        config.lora_rank,
        config.target_modules,
        config.seq_len,
        record.number,
        _measured(record).tokens_per_second,
        is_partial=record.verdict is Verdict.PRUNED_SLOW,
    )


def verdict_counts(records: Iterable[TrialRecord]) -> dict[str, int]:
    """Return the number of trials of every verdict, zero included."""
    verdicts = [record.verdict for record in records]
    return {str(verdict): verdicts.count(verdict) for verdict in Verdict}


def baseline(records: Iterable[TrialRecord]) -> TrialRecord | None:
    """Return the last measured trial of the baseline; None where it was not measured to the end."""
    return next(
        (r for r in reversed(_by_number(records)) if r.is_baseline and r.verdict is Verdict.FITS),
        None,
    )


def gain_over_baseline(records: Iterable[TrialRecord]) -> float | None:
    """Return the winner's speed over the baseline's; None where either was not measured."""
    known = tuple(records)
    best, base = winner(known), baseline(known)
    if best is None or base is None:
        return None
    return _measured(best).tokens_per_second / _measured(base).tokens_per_second


def pareto_front(
    records: Iterable[TrialRecord], objectives: Sequence[Objective]
) -> tuple[TrialRecord, ...]:
    """Return the fitting trials that no other beats in one and matches in every objective."""
    points = [
        (record, [_BETTER[o](_measured(record)) for o in objectives]) for record in fitting(records)
    ]
    return tuple(
        record
        for record, point in points
        if not any(_dominates(other, point) for _, other in points)
    )


def _dominates(other: Sequence[float], point: Sequence[float]) -> bool:
    return other != point and all(theirs >= ours for theirs, ours in zip(other, point, strict=True))


def best_document(snapshot: StudySnapshot) -> dict[str, Any]:
    """Return the document of ``sweep best --json``; ``best`` is null where nothing fits."""
    records, target = snapshot.records, snapshot.definition.target
    return {
        "study": snapshot.name,
        "gpu": {
            "name": target.gpu,
            "budget_bytes": target.budget_bytes,
            "emulated_on": target.emulated_on,
        },
        "model": snapshot.definition.model.get("name"),
        "objective": "tokens_per_second",
        "seconds": {
            "wall": snapshot.wall_seconds,
            "device": sum(record.device_seconds for record in records),
        },
        "trials": {"total": len(records), **verdict_counts(records)},
        "best": _best(winner(records)),
        "baseline": _baseline(records),
        "tied": list(tied(records)),
        "fastest_by_class": [asdict(best) for best in fastest_by_class(records)],
    }


def _best(record: TrialRecord | None) -> dict[str, Any] | None:
    if record is None:
        return None
    values = record.to_json()
    return {
        "number": record.number,
        "config": values["config"],
        "measurement": values["outcome"]["measurement"],
    }


def _baseline(records: Sequence[TrialRecord]) -> dict[str, Any] | None:
    base = baseline(records)
    if base is None:
        return None
    speed, gain = _measured(base).tokens_per_second, gain_over_baseline(records)
    return {"number": base.number, "tokens_per_second": speed, "gain": gain}


def _by_number(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    return sorted(records, key=lambda record: record.number)


def _fastest_first(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    def order(record: TrialRecord) -> tuple[float, int, int]:
        measured = _measured(record)
        return -measured.tokens_per_second, measured.peak_allocated_bytes, record.number

    return tuple(sorted(records, key=order))


def _measured(record: TrialRecord) -> Measurement:
    assert record.measurement is not None, "only measured trials are ranked"
    return record.measurement
