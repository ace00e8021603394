"""Owns the order of a study's trials by what the study was asked for. Pure.

Every place that names a best trial (`best`, the terminal, the report, an export) reads it here.
Knows nothing of words or figures.

A configuration counts once: by the last trial of it that came to a conclusion (fits, out of memory,
diverged, ineffective). Running out of memory later retracts a fit. Only what the study's space
holds is ranked: its baseline may lie outside, and is then a reference and never an answer.

Several objectives have no one order. Their front is every trial that no other beats in one and
matches in all. Each objective is scaled to 0 at the worst of the front and 1 at its best; the trial
nearest to the corner where all are 1 is the knee, and stands for the best. Where two are as near,
the objective that was named first decides.

A configuration that was measured again is ranked by those runs (`confirmations`), and one that did
not hold in them does not fit. What was not measured again comes after them, unless it was the
fastest of the search. Its speed is scaled by the fastest that ran in both, as speeds of two
processes do not compare as those of one do.

Where another GPU stands in for the target, its measured speeds compare within one class of numerics
(16-bit, FP8 or INT8 compute). Classes compare by what is predicted of the fastest of each on the
target, where that is known of all: no two GPUs have units for 8 bits that are alike.

The fastest is recommended; of a tie, one that never made the allocator give memory back. Only what
was measured side by side is a tie: where the interval of the ratio of the two holds 1.
"""

from __future__ import annotations

from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal
from weakref import WeakKeyDictionary

from search_spaces.config import TrialConfig, canonical
from search_spaces.knobs import Numerics
from search_spaces.linears import CapacityClass
from search_spaces.models import ModelSpec
from search_spaces.space import Objective
from storage.confirmations import Confirmations, Ratio, scaled
from storage.definition import StudyDefinition, StudySnapshot, TargetSpeed
from storage.objectives import (
    by_number,
    distance_to_the_corner,
    fastest_first,
    fitting,
    is_judged,
    is_tied,
    measured_of,
    merits_of,
    pareto_front,
    rankable,
)
from storage.qualities import pooled_qualities
from storage.records import Measured, Measurement, TrialRecord, Verdict


@dataclass(frozen=True)
class ClassBest:
    """The fastest trial of one capacity class and one class of numerics at one length."""

    lora_rank: int
    target_modules: str | tuple[str, ...]
    numerics: Numerics
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
    """Every trial whose numbers can be ranked, the baseline included, by number; what was measured
    again with the speed of those runs, what did not hold in them with how it ended, and the rest
    with its speed times `scale`."""
    confirmations: Confirmations = field(default_factory=Confirmations)
    searched: Mapping[int, Measurement] = field(default_factory=dict)
    """What the search measured of the trials that were measured again, by number."""
    fallen: Mapping[int, TrialRecord] = field(default_factory=dict)
    """Trials that fitted in the search and did not hold, by number, each with the run that says
    so."""
    target_speeds: Mapping[int, TargetSpeed] = field(default_factory=dict)
    """What is predicted of the target where another GPU stood in, by trial number."""
    scale: float = 1.0
    """Speed in the confirmation over speed in the search, of the fastest of the space that ran in
    both."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """What was asked for, in the order in which it was named."""
        return self.definition.space.objectives

    @cached_property
    def of_space(self) -> tuple[TrialRecord, ...]:
        """The trials whose configuration the space holds, by number."""
        return tuple(record for record in self.records if self.holds(record.config))

    @cached_property
    def ranked(self) -> tuple[TrialRecord, ...]:
        """The trials of the space that fit, each configuration once, the recommended one first."""
        if not self._by_merit:
            return ()
        best = self._by_merit[0]
        alike = (best, *(r for r in self._by_merit[1:] if self._is_tied(best, r)))
        recommended = min(alike, key=lambda r: measured_of(r).allocator_retries > 0)
        others = (r for r in self._by_merit if r.number != recommended.number)
        return (recommended, *others)

    @cached_property
    def _by_merit(self) -> tuple[TrialRecord, ...]:
        """The trials of the space that fit, each configuration once, best first.

        Of several objectives the front comes first, and in both parts what is nearest to the best
        of every objective at once. Equals are ordered by speed, less memory, and number.
        """
        if self.objectives == ("tokens_per_second",):
            # The front is whatever is as fast as the first.
            return self.by_speed
        # A fit without the held-out loss that was asked for says nothing of that.
        judged = (r for r in self.by_speed if is_judged(measured_of(r), self.objectives))
        candidates = self.compared(judged)
        front = pareto_front(candidates, self.objectives)
        distance = distance_to_the_corner(front, self.objectives)
        on_front = {record.number for record in front}

        def order(record: TrialRecord) -> tuple[bool, float, tuple[float, ...]]:
            merits = tuple(-merit for merit in merits_of(record, self.objectives))
            return record.number not in on_front, distance(record), merits

        ordered = sorted(candidates, key=order)
        measured = {record.number: record for record in self.by_speed}
        return tuple(measured[record.number] for record in ordered)

    @cached_property
    def by_speed(self) -> tuple[TrialRecord, ...]:
        """The trials of the space that fit, each configuration once, fastest first."""
        fits = {record.number: record for record in fitting(self.of_space)}
        compared = self.compared(fits.values())
        place = self._outran_the_confirmed(compared, self._class_factors)
        return tuple(fits[record.number] for record in sorted(compared, key=place))

    def compared(self, records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
        """Return measured trials with speeds that compare between classes of numerics, fastest
        first."""
        factors = self._class_factors
        if not factors:
            return tuple(records)
        return fastest_first(
            _with(r, scaled(measured_of(r), factors[r.config.numerics])) for r in records
        )

    @cached_property
    def _fastest(self) -> Mapping[Numerics, TrialRecord]:
        """The fastest trial of the space of each class of numerics."""
        classes: dict[Numerics, list[TrialRecord]] = {}
        for record in fitting(self.of_space):
            classes.setdefault(record.config.numerics, []).append(record)
        return {n: min(of, key=self._outran_the_confirmed(of, {})) for n, of in classes.items()}

    @cached_property
    def _class_factors(self) -> Mapping[Numerics, float]:
        """By class of numerics, what is predicted of its fastest on the target over what the GPU
        that stood in reached; nothing where measured speeds compare as they are."""
        factors: dict[Numerics, float] = {}
        if self.definition.target.emulated_on is None or len(self._fastest) == 1:
            return factors
        for numerics, record in self._fastest.items():
            speed = self.target_speeds.get(record.number)
            if speed is None:
                return {}
            factors[numerics] = speed.tokens_per_second / measured_of(record).tokens_per_second
        return factors

    @property
    def numerics_choice(self) -> Literal["measured", "predicted"]:
        """How the winner's class of numerics was chosen: by what is predicted of the target where
        another GPU stood in and several classes fit."""
        return "predicted" if self._class_factors else "measured"

    @cached_property
    def fastest_with_16_bits(self) -> TrialRecord | None:
        """The fastest trial with 16-bit compute, where the winner computes in 8 bits."""
        is_8bit = self.winner is not None and self.winner.config.is_8bit_compute
        return self._fastest.get("16-bit") if is_8bit else None

    def _outran_the_confirmed(
        self, candidates: Sequence[TrialRecord], factors: Mapping[Numerics, float]
    ) -> Callable[[TrialRecord], int]:
        """Return what puts a trial before (0), among (1) or after (2) those measured again.

        Within the search all speeds compare, and within a confirmation. Of several objectives speed
        is only one, and all are taken as they are.
        """
        searched = [
            self.searched[r.number].tokens_per_second * factors.get(r.config.numerics, 1.0)
            for r in candidates
            if self.is_measured_again(r)
        ]
        if not searched or self.objectives != ("tokens_per_second",):
            return lambda _: 1

        def place(record: TrialRecord) -> int:
            if self.is_measured_again(record):
                return 1
            limit = self.scale * max(searched)
            return 0 if measured_of(record).tokens_per_second > limit else 2

        return place

    @cached_property
    def front(self) -> tuple[TrialRecord, ...]:
        """Of several objectives, the trials that none beats, the knee first; of one, none."""
        if len(self.objectives) == 1:
            return ()
        compared = self.compared(self.ranked)
        front = {record.number for record in pareto_front(compared, self.objectives)}
        return tuple(record for record in self.ranked if record.number in front)

    @property
    def winner(self) -> TrialRecord | None:
        """The best trial of the space that fits, of several objectives the knee; None for none."""
        return self.ranked[0] if self.ranked else None

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """Numbers of the other trials that are statistically indistinguishable from the best in
        what is ranked by: measured side by side with it, where that is speed.

        Memory repeats to the byte: only equals are tied.
        """
        return tuple(r.number for r in self.ranked[1:] if self._is_tied(self.ranked[0], r))

    def _is_tied(self, best: TrialRecord, record: TrialRecord) -> bool:
        others = [o for o in self.objectives if o != "tokens_per_second"]
        if len(others) < len(self.objectives):
            both = self.is_measured_again(best) and self.is_measured_again(record)
            if not (both and self.compares(best, record) and self.ratio(best, record).is_open):
                return False
        return all(is_tied(o, measured_of(best), measured_of(record)) for o in others)

    @cached_property
    def close(self) -> tuple[TrialRecord, ...]:
        """The other trials whose intervals overlapped the best's in the search: what measuring
        side by side may tell apart."""
        if self.winner is None:
            return ()
        best = self._as_searched(self.winner)
        return tuple(
            record
            for record in self.ranked[1:]
            if self.compares(self.winner, record)
            and all(is_tied(o, best, self._as_searched(record)) for o in self.objectives)
        )

    def compares(self, one: TrialRecord, other: TrialRecord) -> bool:
        """Whether the measured speeds of two trials say which is the faster on the target."""
        return not self._class_factors or one.config.numerics == other.config.numerics

    def _as_searched(self, record: TrialRecord) -> Measurement:
        """Return what the search measured of a trial, on the scale of what was measured again."""
        searched = self.searched.get(record.number)
        return measured_of(record) if searched is None else scaled(searched, self.scale)

    def ratio(self, record: TrialRecord, over: TrialRecord) -> Ratio:
        """Return how much faster a trial is than another: by the rounds in which both were measured
        again, else by the interval of each."""
        if canonical(record.config) == canonical(over.config):
            return Ratio(1.0, 1.0, 1.0)
        paired = self.confirmations.ratio(record.config, over.config)
        if paired is not None:
            return paired
        mine, theirs = measured_of(record), measured_of(over)
        value = mine.tokens_per_second / theirs.tokens_per_second
        ends, others = mine.speed_interval, theirs.speed_interval
        if ends is None or others is None:
            return Ratio(value, None, None)
        return Ratio(value, ends[0] / others[1], ends[1] / others[0])

    def is_measured_again(self, record: TrialRecord) -> bool:
        """Whether a trial's speed is that of several runs which confirm it."""
        return record.number in self.searched

    @cached_property
    def is_confirmed(self) -> bool:
        """Whether the winner was measured again, and soaked where asked."""
        if self.winner is None or not self.is_measured_again(self.winner):
            return False
        budget = self.definition.space.confirm
        return (budget is not None and not budget.soak_seconds) or self.soak is not None

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to measure: it is confirmed, or its trials were recorded."""
        return self.is_confirmed or self.definition.target.recorded is not None

    @cached_property
    def soak(self) -> TrialRecord | None:
        """The soak that the winner stood; None where it stood none."""
        if self.winner is None:
            return None
        known = self.confirmations
        return known.soak(self.winner.config, series=known.series)

    @property
    def runs(self) -> int:
        """How often the winner was measured again."""
        known = self.confirmations
        return (
            0 if self.winner is None else len(known.runs(self.winner.config, series=known.series))
        )

    @cached_property
    def baseline(self) -> TrialRecord | None:
        """The last trial of the baseline that was measured to the end; None where none was."""
        measured = [r for r in self.records if r.is_baseline and r.verdict is Verdict.FITS]
        return measured[-1] if measured else None

    def is_of_baselines_class(self, config: TrialConfig) -> bool:
        """Whether a configuration can learn as much as the baseline, be that measured or not."""
        return self.capacity_class(config) == self.capacity_class(self._recipe)

    @cached_property
    def _recipe(self) -> TrialConfig:
        return self.definition.space.baseline_config()

    @cached_property
    def recipe(self) -> TrialConfig | None:
        """The baseline in the winner's capacity class, over which a gain compares; None for none.

        It is the baseline itself where the winner is in its class, however that spells its modules.
        """
        return None if self.winner is None else self.recipe_for(self.winner.config)

    def recipe_for(self, config: TrialConfig) -> TrialConfig:
        """Return the baseline in the capacity class of ``config``."""
        if self.is_of_baselines_class(config):
            return self._recipe
        return self._recipe.model_copy(
            update={"lora_rank": config.lora_rank, "target_modules": config.target_modules}
        )

    def reference_for(self, config: TrialConfig) -> TrialRecord | None:
        """Return what the gain of ``config`` is stated over: the measured baseline, in another
        class what was measured of the recipe there; None where it was not."""
        if self.is_of_baselines_class(config):
            return self.baseline
        wanted, known = canonical(self.recipe_for(config)), self.confirmations
        if wanted in known.fallen:
            return None
        pooled = known.pooled(wanted)
        if wanted in self._fitting or pooled is None:
            return self._fitting.get(wanted)
        runs = (r for r in known.records if r.series == known.series and r.purpose == "confirm")
        found = next(r for r in runs if canonical(r.config) == wanted)
        return found.model_copy(update={"outcome": Measured(measurement=pooled)})

    @cached_property
    def _fitting(self) -> Mapping[TrialConfig, TrialRecord]:
        """What fits, in the space or not, by canonical configuration."""
        return {canonical(record.config): record for record in fitting(self.records)}

    @property
    def is_baseline_in_space(self) -> bool:
        """Whether the space holds the measured baseline."""
        return self.baseline is not None and self.holds(self.baseline.config)

    def is_in_baselines_class(self, record: TrialRecord) -> bool:
        """Whether a trial's speed compares with that of the measured baseline."""
        base = self.baseline
        return base is not None and self.capacity_class(record.config) == self.capacity_class(
            base.config
        )

    @cached_property
    def fastest_of_baselines_class(self) -> TrialRecord | None:
        """The fastest trial of the space whose speed compares with that of the baseline."""
        return next(filter(self.is_in_baselines_class, self.by_speed), None)

    @cached_property
    def fastest_by_class(self) -> tuple[ClassBest, ...]:
        """The fastest trial of the space per rank, target modules, numerics and length, in that
        order.

        Where nothing of a class was measured to the end, its fastest partial measurement stands for
        it, marked as such.
        """
        stopped = (r for r in self.of_space if r.verdict is Verdict.PRUNED_SLOW)
        best: dict[tuple[CapacityClass, Numerics, int], ClassBest] = {}
        for record in (*fitting(self.of_space), *fastest_first(stopped)):
            config = record.config
            key = self.capacity_class(config), config.numerics, config.seq_len
            found = ClassBest(
                config.lora_rank,
                config.target_modules,
                config.numerics,
                config.seq_len,
                record.number,
                measured_of(record).tokens_per_second,
                is_partial=record.verdict is Verdict.PRUNED_SLOW,
            )
            best.setdefault(key, found)

        def order(known: ClassBest) -> tuple[int, str, str, int]:
            return known.lora_rank, str(known.target_modules), known.numerics, known.seq_len

        return tuple(sorted(best.values(), key=order))

    def capacity_class(self, config: TrialConfig) -> CapacityClass:
        """Return the class in which the speed of ``config`` compares."""
        spelled = config.lora_rank, config.target_modules
        if spelled not in self._classes:
            self._classes[spelled] = CapacityClass.of(config, self._model)
        return self._classes[spelled]

    @cached_property
    def _classes(self) -> dict[tuple[int, str | tuple[str, ...]], CapacityClass]:
        """Those that were asked for: a study has few, and thousands of trials."""
        return {}

    @cached_property
    def _model(self) -> ModelSpec:
        return ModelSpec.from_json(self.definition.model)

    def holds(self, config: TrialConfig) -> bool:
        """Whether the space holds ``config``, in this or in another spelling of its modules."""
        space = self.definition.space
        if space.holds(config):
            return True
        wanted = self.capacity_class(config)
        spellings = (
            config.model_copy(update={"target_modules": spelling})
            for spelling in self._spellings
            if spelling != config.target_modules
        )
        return any(self.capacity_class(same) == wanted and space.holds(same) for same in spellings)

    @cached_property
    def _spellings(self) -> tuple[str | tuple[str, ...], ...]:
        """How the space spells the layers that it puts adapters on."""
        return tuple(
            value if isinstance(value, str) else tuple(sorted(set(value)))
            for value in self.definition.space.values_of("target_modules")
        )


def rank(
    records: Iterable[TrialRecord],
    definition: StudyDefinition,
    confirmations: Iterable[TrialRecord] = (),
    target_speeds: Mapping[int, TargetSpeed] = MappingProxyType({}),
) -> Ranking:
    """Return the order of ``records`` by what the study's space asks for.

    Args:
        records: trials of the search.
        definition: the study's.
        confirmations: what measured some of them again.
        target_speeds: what is predicted of the target by number, where another GPU stands in.
    """
    records = tuple(records)
    known = Confirmations(tuple(by_number(rankable(confirmations))))
    if not known.records:
        found = tuple(by_number(rankable(records)))
        return Ranking(definition, found, known, {}, {}, target_speeds)
    if "eval_loss" in definition.space.objectives:
        records = _with_qualities(records, known.records)
    effective: list[TrialRecord] = []
    searched: dict[int, Measurement] = {}
    fallen: dict[int, TrialRecord] = {}
    for record in by_number(rankable(records)):
        fell, pooled = known.fallen.get(canonical(record.config)), known.pooled(record.config)
        if record.verdict is not Verdict.FITS or (fell is None and pooled is None):
            effective.append(record)
        elif fell is not None:
            fallen[record.number] = fell
            effective.append(record.model_copy(update={"outcome": fell.outcome}))
        elif pooled is not None:
            mine = searched[record.number] = measured_of(record)
            effective.append(_with(record, pooled.model_copy(update={"quality": mine.quality})))
    return _on_one_scale(
        Ranking(definition, tuple(effective), known, searched, fallen, target_speeds)
    )


def _on_one_scale(ranking: Ranking) -> Ranking:
    """Return the ranking with every speed of the search times `Ranking.scale`."""
    again = [r for r in ranking.records if ranking.is_measured_again(r)]
    if not again:
        return ranking
    searched = {r.number: ranking.searched[r.number].tokens_per_second for r in again}
    # The fastest of the space: what the search saw slower than it stays slower.
    fastest = max(again, key=lambda r: (ranking.holds(r.config), searched[r.number]))
    scale = measured_of(fastest).tokens_per_second / searched[fastest.number]
    records = (
        record
        if record.measurement is None or ranking.is_measured_again(record)
        else _with(record, scaled(record.measurement, scale))
        for record in ranking.records
    )
    return replace(ranking, records=tuple(records), scale=scale)


def _with(record: TrialRecord, measured: Measurement) -> TrialRecord:
    outcome = record.outcome.model_copy(update={"measurement": measured})
    return record.model_copy(update={"outcome": outcome})


def _with_qualities(
    records: Iterable[TrialRecord], confirmations: Iterable[TrialRecord]
) -> tuple[TrialRecord, ...]:
    """Return the trials, each with the loss of all seeds that it was trained with."""
    records = tuple(records)
    known = pooled_qualities(records, confirmations)

    def judged(record: TrialRecord) -> TrialRecord:
        quality = known.get(canonical(record.config))
        if record.verdict is not Verdict.FITS or quality is None:
            return record
        measured = measured_of(record).model_copy(update={"quality": quality})
        return record.model_copy(update={"outcome": Measured(measurement=measured)})

    return tuple(map(judged, records))


_RANKINGS: WeakKeyDictionary[StudySnapshot, Ranking] = WeakKeyDictionary()
"""Of each snapshot for as long as that is in use: a page asks dozens of times."""


def rank_study(snapshot: StudySnapshot) -> Ranking:
    """Return the order of a study's trials as it stands, the same value each time."""
    if snapshot not in _RANKINGS:
        known = snapshot.records, snapshot.definition, snapshot.confirmations
        _RANKINGS[snapshot] = rank(*known, target_speeds=snapshot.target_speeds)
    return _RANKINGS[snapshot]


def verdict_counts(records: Iterable[TrialRecord]) -> dict[str, int]:
    """Return the number of trials of every verdict, zero included."""
    verdicts = [record.verdict for record in records]
    return {str(verdict): verdicts.count(verdict) for verdict in Verdict}
