"""Owns the order of a study's trials by what the study was asked for. Pure functions over records.

Every place that names a best trial (`best`, the terminal, the report, an export) reads it here.
Knows nothing of words, figures or gains.

A configuration counts once: by the last trial of it that came to a conclusion (fits, out of memory,
diverged, ineffective). Running out of memory later retracts a fit. Only what the study's space
holds is ranked: its baseline may lie outside, and is then a reference and never an answer.

Several objectives have no one order. Their front is every trial that no other beats in one and
matches in all. Each objective is scaled to 0 at the worst of the front and 1 at its best; the trial
nearest to the corner where all are 1 is the knee, and stands for the best. Where two are as near,
the objective that was named first decides.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cached_property
from typing import Any

from search_spaces.config import TrialConfig, canonical
from search_spaces.linears import resolve_targets
from search_spaces.models import ModelSpec
from search_spaces.space import Objective, SearchSpace
from storage.definition import StudyDefinition, StudySnapshot
from storage.records import Measurement, TrialRecord, Verdict

_CONCLUSIVE = frozenset({Verdict.FITS, Verdict.OOM, Verdict.DIVERGED, Verdict.INEFFECTIVE})

_MERIT: Mapping[Objective, Callable[[Measurement], float]] = {
    "tokens_per_second": lambda m: m.tokens_per_second,
    "peak_memory": lambda m: -m.peak_allocated_bytes,
    # A study has one card and so one price: what a token costs falls with the speed alone.
    "cost": lambda m: m.tokens_per_second,
    "trainable_parameters": lambda m: m.trainable_parameters,
}
"""Of each objective, what is larger the better."""

SPEED_OBJECTIVES = frozenset[Objective]({"tokens_per_second", "cost"})
"""Objectives that follow the speed alone, and share its uncertainty."""


@dataclass(frozen=True)
class CapacityClass:
    """What decides how much an adapter can learn, and costs speed: speeds compare within one."""

    lora_rank: int
    modules: tuple[str, ...]
    """Names of the layers with an adapter, however the configuration spells them."""


@dataclass(frozen=True)
class ClassBest:
    """The fastest trial of one capacity class at one length."""

    lora_rank: int
    target_modules: str | tuple[str, ...]
    seq_len: int
    number: int
    tokens_per_second: float
    is_partial: bool
    """Stopped early as slow, in a class where nothing was measured to the end."""


@dataclass(frozen=True)
class Ranking:
    """A study's trials, ordered by its objectives."""

    definition: StudyDefinition
    records: tuple[TrialRecord, ...]
    """Every trial whose numbers can be ranked, the baseline included, by number."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """What was asked for, in the order in which it was named."""
        return self.definition.space.objectives

    @cached_property
    def of_space(self) -> tuple[TrialRecord, ...]:
        """The trials whose configuration the space holds, by number."""
        return tuple(record for record in self.records if self._holds(record.config))

    @cached_property
    def ranked(self) -> tuple[TrialRecord, ...]:
        """The trials of the space that fit, each configuration once, best first.

        Of several objectives the front comes first, and in both parts what is nearest to the best
        of every objective at once. Equals are ordered by speed, less memory, and number.
        """
        candidates = fitting(self.of_space)
        if len(self.objectives) == 1:
            return tuple(sorted(candidates, key=lambda r: -_merits(r, self.objectives)[0]))
        front = pareto_front(candidates, self.objectives)
        distance = _distance_to_the_corner(front, self.objectives)
        on_front = {record.number for record in front}

        def order(record: TrialRecord) -> tuple[bool, float, tuple[float, ...]]:
            merits = tuple(-merit for merit in _merits(record, self.objectives))
            return record.number not in on_front, distance(record), merits

        return tuple(sorted(candidates, key=order))

    @cached_property
    def front(self) -> tuple[TrialRecord, ...]:
        """Of several objectives, the trials that none beats, the knee first; of one, none."""
        if len(self.objectives) == 1:
            return ()
        front = {record.number for record in pareto_front(self.ranked, self.objectives)}
        return tuple(record for record in self.ranked if record.number in front)

    @property
    def winner(self) -> TrialRecord | None:
        """The best trial of the space that fits, of several objectives the knee; None for none."""
        return self.ranked[0] if self.ranked else None

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """Numbers of the other trials that cannot be told from the winner in what is ranked by.

        Speeds cannot be told apart where their 95 % intervals overlap, and those without an
        interval are not compared. Memory repeats to the byte: only equals are tied.
        """
        if self.winner is None:
            return ()
        best = measured_of(self.winner)
        return tuple(
            record.number
            for record in self.ranked[1:]
            if all(_is_tied(o, best, measured_of(record)) for o in self.objectives)
        )

    @cached_property
    def baseline(self) -> TrialRecord | None:
        """The last trial of the baseline that was measured to the end; None where none was."""
        found = [r for r in self.records if r.is_baseline and r.verdict is Verdict.FITS]
        return found[-1] if found else None

    @property
    def is_baseline_in_space(self) -> bool:
        """Whether the space holds the measured baseline."""
        return self.baseline is not None and self._holds(self.baseline.config)

    @cached_property
    def fastest_by_class(self) -> tuple[ClassBest, ...]:
        """The fastest trial of the space per rank, target modules and length, in that order.

        Where nothing of a class was measured to the end, its fastest partial measurement stands for
        it, marked as such.
        """
        stopped = (r for r in self.of_space if r.verdict is Verdict.PRUNED_SLOW)
        best: dict[tuple[CapacityClass, int], ClassBest] = {}
        for record in (*fitting(self.of_space), *_fastest_first(stopped)):
            key = self.capacity_class(record.config), record.config.seq_len
            best.setdefault(key, _class_best(record))
        return tuple(
            sorted(best.values(), key=lambda b: (b.lora_rank, str(b.target_modules), b.seq_len))
        )

    def capacity_class(self, config: TrialConfig) -> CapacityClass:
        """Return the class in which the speed of ``config`` compares."""
        return CapacityClass(config.lora_rank, self._modules(config))

    def _modules(self, config: TrialConfig) -> tuple[str, ...]:
        return tuple(sorted(resolve_targets(config, self._model)))

    @cached_property
    def _model(self) -> ModelSpec:
        return ModelSpec.from_json(self.definition.model)

    def _holds(self, config: TrialConfig) -> bool:
        """Whether the space holds ``config``, in this or in another spelling of its modules."""
        space = self.definition.space
        if space.params_of(config) is not None:
            return True
        wanted = self._modules(config)
        spellings = (
            config.model_copy(update={"target_modules": spelling})
            for spelling in self._spellings
            if spelling != config.target_modules
        )
        return any(
            self._modules(same) == wanted and space.params_of(same) is not None
            for same in spellings
        )

    @cached_property
    def _spellings(self) -> tuple[str | tuple[str, ...], ...]:
        return _target_modules_of(self.definition.space)


def rank(records: Iterable[TrialRecord], definition: StudyDefinition) -> Ranking:
    """Return the order of ``records`` by what the study's space asks for."""
    return Ranking(definition, tuple(_by_number(rankable(records))))


def rank_study(snapshot: StudySnapshot) -> Ranking:
    """Return the order of a study's trials as it stands."""
    return rank(snapshot.records, snapshot.definition)


def rankable(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the trials less those whose measured speed or interval is not finite and positive.

    Such numbers come from a broken clock or a damaged record; nothing can be ranked by them.
    """
    return tuple(r for r in records if r.measurement is None or _is_sound(r.measurement))


def fitting(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the trials that fit, each configuration once, fastest first.

    Equal speeds are ordered by less memory, then by number.
    """
    last = {
        canonical(record.config): record
        for record in _by_number(records)
        if record.verdict in _CONCLUSIVE
    }
    return _fastest_first(record for record in last.values() if record.verdict is Verdict.FITS)


def pareto_front(
    records: Iterable[TrialRecord], objectives: Sequence[Objective]
) -> tuple[TrialRecord, ...]:
    """Return the fitting trials that no other beats in one and matches in every objective.

    Fastest first, as `fitting` orders them.
    """
    points = {record.number: _merits(record, objectives) for record in fitting(records)}
    kept: list[tuple[float, ...]] = []
    # In falling order whatever dominates a point comes before it, and what dominates that as well.
    for point in sorted(set(points.values()), reverse=True):
        if not any(_dominates(other, point) for other in kept):
            kept.append(point)
    on_front = set(kept)
    return tuple(r for r in fitting(records) if points[r.number] in on_front)


def verdict_counts(records: Iterable[TrialRecord]) -> dict[str, int]:
    """Return the number of trials of every verdict, zero included."""
    verdicts = [record.verdict for record in records]
    return {str(verdict): verdicts.count(verdict) for verdict in Verdict}


def _merits(record: TrialRecord, objectives: Sequence[Objective]) -> tuple[float, ...]:
    measured = measured_of(record)
    return tuple(_MERIT[objective](measured) for objective in objectives)


def _dominates(other: Sequence[float], point: Sequence[float]) -> bool:
    return other != point and all(theirs >= ours for theirs, ours in zip(other, point, strict=True))


def _distance_to_the_corner(
    front: Sequence[TrialRecord], objectives: Sequence[Objective]
) -> Callable[[TrialRecord], float]:
    """Return what measures how far a trial is from the best of every objective at once.

    In units of the front's extent; an objective in which all of the front are equal says nothing.
    """
    columns = list(zip(*(_merits(record, objectives) for record in front), strict=True))
    scales = [(max(column), max(column) - min(column)) for column in columns]

    def distance(record: TrialRecord) -> float:
        return math.hypot(
            *(
                (best - merit) / extent
                for merit, (best, extent) in zip(_merits(record, objectives), scales, strict=True)
                if extent > 0
            )
        )

    return distance


def _is_tied(objective: Objective, one: Measurement, other: Measurement) -> bool:
    if objective not in SPEED_OBJECTIVES:
        return _MERIT[objective](one) == _MERIT[objective](other)
    mine, theirs = one.speed_interval, other.speed_interval
    if mine is None or theirs is None:
        return False
    return mine[0] <= theirs[1] and theirs[0] <= mine[1]


def _class_best(record: TrialRecord) -> ClassBest:
    config = record.config
    return ClassBest(
        config.lora_rank,
        config.target_modules,
        config.seq_len,
        record.number,
        measured_of(record).tokens_per_second,
        is_partial=record.verdict is Verdict.PRUNED_SLOW,
    )


def _target_modules_of(space: SearchSpace) -> tuple[str | tuple[str, ...], ...]:
    """Return how the space spells the layers that it puts adapters on."""
    dimension = space.dimensions.get("target_modules")
    default = TrialConfig.model_fields["target_modules"].default
    fixed = space.fixed.get("target_modules", default)
    declared: tuple[Any, ...] = (fixed,) if dimension is None else dimension.values() or ()
    return tuple(
        value if isinstance(value, str) else tuple(sorted(set(value))) for value in declared
    )


def _by_number(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    return sorted(records, key=lambda record: record.number)


def _fastest_first(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    def order(record: TrialRecord) -> tuple[float, int, int]:
        measured = measured_of(record)
        return -measured.tokens_per_second, measured.peak_allocated_bytes, record.number

    return tuple(sorted(records, key=order))


def _is_sound(measured: Measurement) -> bool:
    interval = measured.step_seconds_ci95 or ()
    numbers = (measured.tokens_per_second, measured.step_seconds, *interval)
    return all(math.isfinite(number) and number > 0 for number in numbers)


def measured_of(record: TrialRecord) -> Measurement:
    """Return the measurement of a trial that has one, as every ranked trial does."""
    assert record.measurement is not None, "only measured trials are ranked"
    return record.measurement
