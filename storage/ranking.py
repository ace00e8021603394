"""The order of a study's trials by what the study asks for, and what each gained over the baseline.

Every place that names a best trial (`best`, the terminal, the report, an export) reads it here.

A configuration counts once: by the last trial of it that came to a conclusion (fits, out of memory,
diverged, ineffective). Running out of memory later retracts a fit. Only what the study's space
holds is ranked: its baseline may lie outside, and is then a reference and never an answer.

Several objectives have no one order. Their Pareto front is every trial that no other beats in one
and matches in all. Each objective is scaled to 0 at the worst of the front and 1 at its best; the
trial nearest to the corner where all are 1 is the knee, and stands for the best. Where two are as
near, the objective that was named first decides. A held-out loss that the held-out examples do not
tell from the lowest counts as the lowest: a few examples decide nothing.

A configuration that was measured again is ranked by those runs (`confirmations`), and one that did
not hold in them does not fit. What was not measured again comes after them, unless it was the
fastest of the search. Its speed is scaled by the fastest that ran in both, as speeds of two
processes do not compare as those of one do.

Where another GPU stands in for the target, one speed decides, of what is best, of ties, gains and
fronts: what is predicted of the target, corrected by what was measured (`TargetSpeed`). Where that
is not known of all that fits, measured speeds decide.

Asked for speed alone, the recommendation is of one capacity class: of those in which anything fits,
the one nearest to the standard recipe's. A space that holds one class asks for that. In it 16-bit
compute comes first, unless 8 bits are sure to be faster: the interval of the ratio to the fastest
with 16-bit compute lies above 1. Of the fastest and what is within `TIE` of it, the plainer is
recommended (`search_spaces.preference`), one that never made the allocator give memory back before
all others. What another one beats in speed and memory is never recommended, but for one of a less
plain compute dtype that is no more than `TIE` better: so the recommended one lies on the front of
its class, or within a tie of it.

What was measured side by side and is not distinguishable, as the interval of the ratio of the two
holds 1, is named as a tie.

Rank and target modules cost speed and buy capacity, so a gain is stated within one capacity class:
over the baseline, and in another class than its own over the baseline's recipe in that class. Noise
widens its interval; only where that holds 1 is no gain stated.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property
from types import MappingProxyType
from typing import Literal
from weakref import WeakKeyDictionary

from pydantic import BaseModel, ConfigDict

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.kinds import Numerics
from qlora_sweep.search_spaces.linears import CapacityClass, nearest_capacity
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.preference import TIE, compute_order, plainness
from qlora_sweep.search_spaces.space import Objective
from qlora_sweep.storage.confirmations import (
    RUNS_TO_CONFIRM,
    Confirmations,
    Ratio,
    is_told_apart,
    pooled_qualities,
    scaled,
    soaked_long_enough,
)
from qlora_sweep.storage.definition import StudyDefinition, StudySnapshot, TargetSpeed
from qlora_sweep.storage.records import Measurement, TrialRecord, Verdict

CONCLUSIVE = frozenset({Verdict.FITS, Verdict.OOM, Verdict.DIVERGED, Verdict.INEFFECTIVE})
"""How a trial ends that says what becomes of its configuration: the last of them counts."""
LESS_IS_BETTER: frozenset[Objective] = frozenset({"peak_memory", "eval_loss"})
NoGain = Literal["no_winner", "not_measured", "did_not_fit", "not_shown"]
"""Why a gain is not stated: nothing fits, what it would be over was not measured or did not fit,
or the interval of the ratio holds 1."""

_VALUES: Mapping[Objective, Callable[[Measurement], float]] = {
    "tokens_per_second": lambda measured: measured.tokens_per_second,
    "peak_memory": lambda measured: measured.peak_allocated_bytes,
    "trainable_parameters": lambda measured: measured.trainable_parameters,
    "eval_loss": lambda m: math.inf if m.quality is None else m.quality.eval_loss,
}


def objective_value(objective: Objective, measured: Measurement) -> float:
    """Return what was measured of an objective: tokens/s, bytes, a count, or a loss per token.

    A held-out loss that was not measured is infinite.
    """
    return _VALUES[objective](measured)


def measured_of(record: TrialRecord) -> Measurement:
    """Return the measurement of a trial that has one, as every ranked trial does."""
    assert record.measurement is not None, "only measured trials are ranked"
    return record.measurement


def fitting(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the trials that fit, each configuration once, fastest first.

    Equal speeds are ordered by less memory, then by number.
    """
    concluded = (record for record in _by_number(records) if record.verdict in CONCLUSIVE)
    last = {canonical(record.config): record for record in concluded}
    return _fastest_first(record for record in last.values() if record.verdict is Verdict.FITS)


def pareto_front(
    records: Iterable[TrialRecord], objectives: Sequence[Objective]
) -> tuple[TrialRecord, ...]:
    """Return the fitting trials that no other beats in one and matches in every objective.

    Fastest first, as `fitting` orders them.
    """
    fit = fitting(records)
    points = {r.number: merits_of(r, objectives) for r in fit if _is_judged(r, objectives)}
    front: set[tuple[float, ...]] = set()
    # In falling order whatever dominates a point comes before it, and what dominates that as well.
    for point in sorted(set(points.values()), reverse=True):
        if not any(all(map(float.__ge__, other, point)) for other in front):
            front.add(point)
    return tuple(record for record in fit if points.get(record.number) in front)


def merits_of(record: TrialRecord, objectives: Sequence[Objective]) -> tuple[float, ...]:
    """Return the value of each objective, turned so that larger is better."""
    measured = measured_of(record)
    values = ((o, float(objective_value(o, measured))) for o in objectives)
    return tuple(-value if o in LESS_IS_BETTER else value for o, value in values)


def verdict_counts(records: Iterable[TrialRecord]) -> dict[str, int]:
    """Return the number of trials of every verdict, zero included."""
    verdicts = [record.verdict for record in records]
    return {str(verdict): verdicts.count(verdict) for verdict in Verdict}


class ClassBest(BaseModel):
    """The fastest trial of one capacity class and one class of numerics at one length."""

    model_config = ConfigDict(frozen=True)

    lora_rank: int
    target_modules: str | tuple[str, ...]
    numerics: Numerics
    seq_len: int
    number: int
    tokens_per_second: float
    """Measured."""
    target_tokens_per_second: float | None
    """What is predicted of the target, where another GPU stood in for it: the fastest by that."""
    is_partial: bool
    """Stopped early as slow, in a class where nothing was measured to the end."""


@dataclass(frozen=True)
class Gain:
    """How many times as fast a trial is as the baseline in its capacity class."""

    ratio: Ratio | None = None
    """None where `reason` says why."""
    reason: NoGain | None = None
    over: TrialRecord | None = None
    """What it is over: the baseline, or its recipe in the trial's class; None where that was not
    measured."""
    measured: Ratio | None = None
    """The same on the GPU that stood in for the target, where one did."""


@dataclass(frozen=True)
class Ranking:
    """A study's trials, ordered by its objectives."""

    definition: StudyDefinition
    records: tuple[TrialRecord, ...]
    """Every trial, the baseline included, by number; what was measured again with the speed of
    those runs, what did not hold in them with how it ended, and the rest with its speed times
    `scale`."""
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
        return tuple(sorted(self._by_merit, key=lambda record: record is not self._recommended))

    @cached_property
    def _fitting_of_space(self) -> tuple[TrialRecord, ...]:
        """The trials of the space that fit, each configuration once, fastest as measured first."""
        return fitting(self.of_space)

    @property
    def is_for_speed_alone(self) -> bool:
        """Whether nothing but speed is asked for."""
        return self.objectives == ("tokens_per_second",)

    @cached_property
    def asked_class(self) -> CapacityClass | None:
        """The capacity class that is recommended from: the nearest to the standard recipe's of
        those in which anything fits; None where nothing does."""
        return nearest_capacity(
            (self.capacity_class(record.config) for record in self._fitting_of_space), self._model
        )

    def is_asked(self, config: TrialConfig) -> bool:
        """Whether a configuration is of the capacity class that is recommended from."""
        return self.capacity_class(config) == self.asked_class

    @cached_property
    def _recommended(self) -> TrialRecord | None:
        """The trial that is recommended; None where nothing fits."""
        ordered = self._by_merit
        if not ordered:
            return None
        alike = [r for r in ordered if r is ordered[0] or self._is_tied(ordered[0], r)]
        if self.is_for_speed_alone:
            alike = self._alternatives
        return min(alike, key=self._preference)

    def _preference(self, record: TrialRecord) -> tuple[object, ...]:
        """Return what sorts trials that tie, the one to recommend first."""
        if not self.is_for_speed_alone:
            return (_gave_back(record),)
        peak = measured_of(record).peak_allocated_bytes
        return _gave_back(record), *plainness(record.config, peak)

    @cached_property
    def _alternatives(self) -> list[TrialRecord]:
        """What ties with the fastest of the class of numerics that is chosen, that among it, less
        what another one beats."""
        of_class = self._fastest_of_numerics
        fastest = of_class[self._chosen_numerics]
        rivals = [
            record
            for record in self.by_speed
            if self.is_asked(record.config)
            and record.config.numerics == fastest.config.numerics
            and self._place(record) == self._place(fastest)
        ]
        least = self.speed_of(fastest) / (1.0 + TIE)
        tied = [record for record in rivals if self.speed_of(record) >= least]
        return [one for one in tied if not any(self._beats(other, one) for other in rivals)]

    def _beats(self, one: TrialRecord, other: TrialRecord) -> bool:
        """Whether a trial is no worse than another in speed and memory and better in one of them,
        one of a less plain compute dtype by more than a tie. One that made the allocator give
        memory back beats none that did not."""
        if _gave_back(one) > _gave_back(other):
            return False
        margin = TIE if compute_order(one.config) > compute_order(other.config) else 0.0
        faster = self.speed_of(one) / self.speed_of(other)
        mine, theirs = (measured_of(record).peak_allocated_bytes for record in (one, other))
        is_no_worse = faster >= 1.0 and mine <= theirs
        return is_no_worse and (faster > 1.0 + margin or mine * (1.0 + margin) < theirs)

    @cached_property
    def _fastest_of_numerics(self) -> Mapping[Numerics, TrialRecord]:
        """The fastest trial of the asked capacity class in each class of numerics, fastest first;
        of several objectives, of all capacity classes."""
        found: dict[Numerics, TrialRecord] = {}
        for record in self.by_speed:
            if not self.is_for_speed_alone or self.is_asked(record.config):
                found.setdefault(record.config.numerics, record)
        return found

    @cached_property
    def _chosen_numerics(self) -> Numerics:
        """The fastest class of numerics that surely outruns 16-bit compute, else that."""
        plain = self._fastest_of_numerics.get("16-bit")
        for numerics, record in self._fastest_of_numerics.items():
            if plain is None or record is plain or self._is_surely_faster(record, plain):
                return numerics
        raise AssertionError("something fits")

    def _is_surely_faster(self, one: TrialRecord, over: TrialRecord) -> bool:
        ratio = self.ratio(one, over)
        return ratio.value > 1.0 + TIE if ratio.low is None else ratio.low > 1.0

    @property
    def other_numerics(self) -> TrialRecord | None:
        """What is named beside a winner: where that computes in 8 bits the fastest trial with
        16-bit compute, else the fastest in 8 bits that may be faster, as their ratio's interval
        does not lie below 1; None where there is none."""
        winner = self.winner
        if winner is None:
            return None
        plain = self._fastest_of_numerics.get("16-bit")
        if winner.config.is_8bit_compute:
            return plain
        for numerics, record in self._fastest_of_numerics.items():
            ratio = self.ratio(record, winner)
            if numerics != "16-bit" and (ratio.value if ratio.high is None else ratio.high) > 1.0:
                return record
        return None

    @cached_property
    def _by_merit(self) -> tuple[TrialRecord, ...]:
        """The trials of the space that fit, each configuration once, best first; of speed alone
        those of the asked capacity class first.

        Of several objectives the front comes first, and in both parts what is nearest to the best
        of every objective at once. Equals are ordered by speed, less memory, and number.
        """
        if self.is_for_speed_alone:
            return tuple(sorted(self.by_speed, key=lambda r: not self.is_asked(r.config)))
        # A fit without the held-out loss that was asked for says nothing of that.
        candidates = self.compared(r for r in self.by_speed if _is_judged(r, self.objectives))
        front = pareto_front(candidates, self.objectives)
        columns = zip(*(merits_of(record, self.objectives) for record in front), strict=True)
        scales = [(max(column), max(column) - min(column)) for column in columns]
        on_front = {record.number for record in front}

        def order(record: TrialRecord) -> tuple[bool, float, tuple[float, ...]]:
            merits = merits_of(record, self.objectives)
            # An objective in which all of the front are equal says nothing.
            away = [
                (best - merit) / extent
                for merit, (best, extent) in zip(merits, scales, strict=True)
                if extent > 0
            ]
            return record.number not in on_front, math.hypot(*away), tuple(-m for m in merits)

        measured = {record.number: record for record in self.by_speed}
        return tuple(measured[record.number] for record in sorted(candidates, key=order))

    @cached_property
    def by_speed(self) -> tuple[TrialRecord, ...]:
        """The trials of the space that fit, each configuration once, fastest first."""
        fits = {record.number: record for record in self._fitting_of_space}
        ordered = (fits[record.number] for record in self.compared(fits.values()))
        return tuple(sorted(ordered, key=self._place))

    def compared(self, records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
        """Return measured trials with the speeds that decide, fastest first; of several objectives
        the losses are those that are told apart."""
        records = tuple(records)
        if len(self.objectives) > 1 and "eval_loss" in self.objectives:
            records = _leveled(records)
        return _fastest_first(self._as_decided(record) for record in records)

    def _as_decided(self, record: TrialRecord) -> TrialRecord:
        measured = measured_of(record)
        faster = self.speed_of(record) / measured.tokens_per_second
        return record if faster == 1.0 else _with(record, scaled(measured, faster))

    @cached_property
    def is_predicted(self) -> bool:
        """Whether what is predicted of the target decides, as another GPU stood in for it."""
        if self.definition.target.emulated_on is None:
            return False
        return all(record.number in self.target_speeds for record in self._fitting_of_space)

    def speed_of(self, record: TrialRecord) -> float:
        """Return the tokens/s of a measured trial that decide, and are shown first."""
        known = self.target_speeds.get(record.number) if self.is_predicted else None
        return measured_of(record).tokens_per_second if known is None else known.tokens_per_second

    def expected_speed(self, record: TrialRecord) -> float | None:
        """Return the tokens/s that are predicted of a trial that was not measured, on the GPU whose
        speeds decide; None where nothing is."""
        if self.is_predicted:
            on_target = self.target_speeds.get(record.number)
            return None if on_target is None else on_target.tokens_per_second
        return None if record.prediction is None else record.prediction.tokens_per_second

    @property
    def numerics_choice(self) -> Literal["measured", "predicted"]:
        """How the winner and its class of numerics were chosen."""
        return "predicted" if self.is_predicted else "measured"

    def _place(self, record: TrialRecord) -> int:
        """Return whether a trial comes before (0), among (1) or after (2) those measured again.

        Within the search all speeds compare, and within a confirmation. What is predicted of the
        target compares in both. Of several objectives speed is only one, and all are taken as they
        are.
        """
        limit = self._outrun_from
        if limit is None or self.is_measured_again(record):
            return 1
        return 0 if measured_of(record).tokens_per_second > limit else 2

    @cached_property
    def _outrun_from(self) -> float | None:
        """What a trial has to reach that outruns all that were measured again; None where that
        makes no difference."""
        searched = [
            self.searched[record.number].tokens_per_second
            for record in self._fitting_of_space
            if self.is_measured_again(record)
        ]
        if not searched or self.is_predicted or not self.is_for_speed_alone:
            return None
        return self.scale * max(searched)

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
            if self.is_predicted or not both or not self.ratio(best, record).is_open:
                return False
        return all(_overlap(o, measured_of(best), measured_of(record)) for o in others)

    @cached_property
    def close(self) -> tuple[TrialRecord, ...]:
        """The other trials that at best are faster, by more than a tie, than what the best reached
        in the search, and an 8-bit one that may be faster: what measuring side by side may tell
        apart. None where what is predicted of the target decides."""
        winner = self.winner
        if winner is None or (self.is_predicted and "tokens_per_second" in self.objectives):
            return ()
        best = self._as_searched(winner)
        # Beside a loss, equal speeds are no reason to leave a trial out.
        margin = TIE if len(self.objectives) == 1 else 0.0
        rivals = self.ranked[1:]
        if self.is_for_speed_alone:
            own = winner.config.numerics
            of_class = [r for r in rivals if self.is_asked(r.config)]
            other = None if winner.config.is_8bit_compute else self.other_numerics
            rivals = tuple(r for r in of_class if r.config.numerics == own or r is other)
        return tuple(
            record
            for record in rivals
            if all(_overlap(o, best, self._as_searched(record), margin) for o in self.objectives)
        )

    def _as_searched(self, record: TrialRecord) -> Measurement:
        """Return what the search measured of a trial, on the scale of what was measured again."""
        searched = self.searched.get(record.number)
        return measured_of(record) if searched is None else scaled(searched, self.scale)

    def ratio(self, record: TrialRecord, over: TrialRecord) -> Ratio:
        """Return how much faster a trial is than another: as predicted of the target where that
        decides, else as measured."""
        if canonical(record.config) == canonical(over.config):
            return Ratio(1.0, 1.0, 1.0)
        if self.is_predicted:
            mine, theirs = (self.target_speeds.get(each.number) for each in (record, over))
            if mine is not None and theirs is not None:
                return Ratio(*mine.ratio(theirs), is_predicted=True)
        return self.measured_ratio(record, over)

    def measured_ratio(self, record: TrialRecord, over: TrialRecord) -> Ratio:
        """Return how much faster a trial ran than another: by the rounds in which both were
        measured again, else by the interval of each."""
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

    @property
    def is_confirmed(self) -> bool:
        """Whether the winner was measured again, and soaked for as long as was asked."""
        if self.winner is None or not self.is_measured_again(self.winner):
            return False
        budget = self.definition.space.confirm
        if budget is None or self.soak is None:
            return self.soak is not None or (budget is not None and not budget.soak_seconds)
        return soaked_long_enough(self.soak, seconds=budget.soak_seconds, steps=budget.soak_steps)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to measure: it is confirmed, or its trials were recorded."""
        return self.is_confirmed or self.definition.target.recorded is not None

    @cached_property
    def soak(self) -> TrialRecord | None:
        """The soak that the winner stood; None where it stood none."""
        known = self.confirmations
        return self.winner and known.soak(self.winner.config, series=known.series)

    @property
    def runs(self) -> int:
        """How often the winner was measured again."""
        known = self.confirmations
        return len(known.runs(self.winner.config, series=known.series)) if self.winner else 0

    @cached_property
    def baseline(self) -> TrialRecord | None:
        """The last trial of the baseline that was measured to the end, where none was what the
        confirmation measured of it; None where neither did."""
        measured = [r for r in self.records if r.is_baseline and r.verdict is Verdict.FITS]
        return measured[-1] if measured else self._confirmed(self.baseline_config)

    @cached_property
    def baseline_config(self) -> TrialConfig:
        """The baseline's configuration, measured or not."""
        return self.definition.space.baseline_config()

    @property
    def is_baseline_in_space(self) -> bool:
        """Whether the space holds the measured baseline."""
        return self.baseline is not None and self.holds(self.baseline.config)

    def is_of_baselines_class(self, config: TrialConfig) -> bool:
        """Whether a configuration can learn as much as the baseline, be that measured or not."""
        return self.capacity_class(config) == self.capacity_class(self.baseline_config)

    @cached_property
    def fastest_of_baselines_class(self) -> TrialRecord | None:
        """The fastest trial of the space in the baseline's capacity class."""
        return next((r for r in self.by_speed if self.is_of_baselines_class(r.config)), None)

    def recipe_for(self, config: TrialConfig) -> TrialConfig:
        """Return the baseline in the capacity class of ``config``: itself in its own, however that
        spells its modules."""
        if self.is_of_baselines_class(config):
            return self.baseline_config
        return self.baseline_config.changed(
            lora_rank=config.lora_rank, target_modules=config.target_modules
        )

    def reference_for(self, config: TrialConfig) -> TrialRecord | None:
        """Return what the gain of ``config`` is stated over: the measured baseline, in another
        class what was measured of the recipe there; None where it was not."""
        if self.is_of_baselines_class(config):
            return self.baseline
        recipe = self.recipe_for(config)
        return self._fitting.get(canonical(recipe)) or self._confirmed(recipe)

    def _confirmed(self, config: TrialConfig) -> TrialRecord | None:
        """Return what the confirmation measured of a configuration that no trial was of."""
        wanted, known = canonical(config), self.confirmations
        pooled = None if wanted in known.fallen else known.pooled(wanted)
        if pooled is None:
            return None
        runs = (r for r in known.records if r.series == known.series and r.purpose == "confirm")
        ran = (r for r in runs if r.verdict is Verdict.FITS and canonical(r.config) == wanted)
        return _with(next(ran), pooled)

    @cached_property
    def _fitting(self) -> Mapping[TrialConfig, TrialRecord]:
        """What fits, in the space or not, by canonical configuration."""
        return {canonical(record.config): record for record in fitting(self.records)}

    @cached_property
    def gain(self) -> Gain:
        """What the winner gained within its capacity class."""
        return Gain(reason="no_winner") if self.winner is None else self.gain_of(self.winner)

    def gain_of(self, trial: TrialRecord) -> Gain:
        """Return what a trial gained within its capacity class, or why that is not stated."""
        over = self.reference_for(trial.config)
        if over is None:
            fell = canonical(self.recipe_for(trial.config)) in self.confirmations.fallen
            return Gain(reason="did_not_fit" if fell else "not_measured")
        ratio = self.ratio(trial, over)
        measured = self.measured_ratio(trial, over) if self.is_predicted else None
        is_itself = canonical(trial.config) == canonical(over.config)
        if ratio.is_open and not is_itself:
            return Gain(reason="not_shown", over=over, measured=measured)
        return Gain(ratio, over=over, measured=measured)

    @cached_property
    def fastest_by_class(self) -> tuple[ClassBest, ...]:
        """The fastest trial of the space per rank, target modules, numerics and length, in that
        order.

        Where nothing of a class was measured to the end, its fastest partial measurement stands for
        it, marked as such.
        """
        stopped = (r for r in self.of_space if r.verdict is Verdict.PRUNED_SLOW)
        best: dict[tuple[CapacityClass, Numerics, int], ClassBest] = {}
        for record in (*self.by_speed, *_fastest_first(stopped)):
            config = record.config
            on_target = self.target_speeds.get(record.number) if self.is_predicted else None
            found = ClassBest(
                lora_rank=config.lora_rank,
                target_modules=config.target_modules,
                numerics=config.numerics,
                seq_len=config.seq_len,
                number=record.number,
                tokens_per_second=measured_of(record).tokens_per_second,
                target_tokens_per_second=on_target and on_target.tokens_per_second,
                is_partial=record.verdict is Verdict.PRUNED_SLOW,
            )
            key = self.capacity_class(config), config.numerics, config.seq_len
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
        """By rank and spelling of the modules."""
        return {}

    @cached_property
    def _model(self) -> ModelSpec:
        return ModelSpec.from_json(self.definition.model)

    def holds(self, config: TrialConfig) -> bool:
        """Whether the space holds ``config``, in this or in another spelling of its modules."""
        space = self.definition.space
        if space.holds(config):
            return True
        spellings = space.values_of("target_modules")
        same = (config.changed(target_modules=value) for value in spellings)
        wanted = self.capacity_class(config)
        return any(self.capacity_class(one) == wanted and space.holds(one) for one in same)


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
    budget = definition.space.confirm
    looks = 1 if budget is None else budget.repeats - RUNS_TO_CONFIRM + 1
    known = Confirmations(tuple(_by_number(confirmations)), looks)
    found = _by_number(records)
    if not known.records:
        return Ranking(definition, tuple(found), known, target_speeds=target_speeds)
    is_judged = "eval_loss" in definition.space.objectives
    qualities = pooled_qualities(found, known.records) if is_judged else {}
    effective: list[TrialRecord] = []
    searched: dict[int, Measurement] = {}
    fallen: dict[int, TrialRecord] = {}
    for record in found:
        config = canonical(record.config)
        if record.verdict is Verdict.FITS and config in known.fallen:
            fell = fallen[record.number] = known.fallen[config]
            record = record.model_copy(update={"outcome": fell.outcome})
        elif record.verdict is Verdict.FITS:
            mine, pooled = measured_of(record), known.pooled(config)
            quality = {"quality": qualities.get(config, mine.quality)}
            if pooled is not None:
                searched[record.number] = mine.model_copy(update=quality)
            record = _with(record, (pooled or mine).model_copy(update=quality))
        effective.append(record)
    ranking = Ranking(definition, tuple(effective), known, searched, fallen, target_speeds)
    again = [record for record in effective if record.number in searched]
    if not again:
        return ranking
    # The fastest of the space: what the search saw slower than it stays slower.
    speeds = {number: measured.tokens_per_second for number, measured in searched.items()}
    fastest = max(again, key=lambda r: (ranking.holds(r.config), speeds[r.number]))
    scale = measured_of(fastest).tokens_per_second / speeds[fastest.number]
    on_one_scale = (
        record
        if record.measurement is None or record.number in searched
        else _with(record, scaled(record.measurement, scale))
        for record in effective
    )
    return replace(ranking, records=tuple(on_one_scale), scale=scale)


_RANKINGS: WeakKeyDictionary[StudySnapshot, Ranking] = WeakKeyDictionary()
"""Of each snapshot for as long as that is in use: a page asks dozens of times."""


def rank_study(snapshot: StudySnapshot) -> Ranking:
    """Return the order of a study's trials as it stands, the same value each time."""
    if snapshot not in _RANKINGS:
        known = snapshot.records, snapshot.definition, snapshot.confirmations
        _RANKINGS[snapshot] = rank(*known, target_speeds=snapshot.target_speeds)
    return _RANKINGS[snapshot]


def _is_judged(record: TrialRecord, objectives: Sequence[Objective]) -> bool:
    """Whether everything that is asked for was measured: a held-out loss takes a training."""
    return all(math.isfinite(objective_value(o, measured_of(record))) for o in objectives)


def _overlap(
    objective: Objective, best: Measurement, other: Measurement, margin: float = TIE
) -> bool:
    """Whether two are alike in an objective: speeds and losses where 95 % intervals overlap."""
    if objective == "tokens_per_second":
        ends = other.speed_interval
        # What seems faster and comes after it was measured in another process, not beside it. What
        # is faster by less than a tie at the most is not worth telling apart. How unsure the best
        # is counts for nothing: it is measured again whoever runs beside it.
        return ends is not None and best.tokens_per_second * (1.0 + margin) <= ends[1]
    if objective == "eval_loss" and best.quality and other.quality:
        mine, theirs = best.quality.eval_loss_ci95, other.quality.eval_loss_ci95
        if mine and theirs and mine[0] <= theirs[1] and theirs[0] <= mine[1]:
            return True
        return not is_told_apart(best.quality, other.quality)
    return objective_value(objective, best) == objective_value(objective, other)


def _leveled(records: tuple[TrialRecord, ...]) -> tuple[TrialRecord, ...]:
    """Return trials with the lowest held-out loss wherever their own is not told from it."""
    qualities = [quality for record in records if (quality := measured_of(record).quality)]
    if not qualities:
        return records
    least = min(qualities, key=lambda quality: quality.eval_loss)

    def leveled(record: TrialRecord) -> TrialRecord:
        measured = measured_of(record)
        if measured.quality is None or is_told_apart(measured.quality, least):
            return record
        quality = measured.quality.model_copy(update={"eval_loss": least.eval_loss})
        return _with(record, measured.model_copy(update={"quality": quality}))

    return tuple(leveled(record) for record in records)


def _gave_back(record: TrialRecord) -> bool:
    """Whether a trial made the allocator give memory back."""
    return measured_of(record).allocator_retries > 0


def _with(record: TrialRecord, measured: Measurement) -> TrialRecord:
    outcome = record.outcome.model_copy(update={"measurement": measured})
    return record.model_copy(update={"outcome": outcome})


def _by_number(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return trials in the order in which they were asked for."""
    return sorted(records, key=lambda record: record.number)


def _fastest_first(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return measured trials by falling speed; equals by less memory, then by number."""

    def order(record: TrialRecord) -> tuple[float, int, int]:
        measured = measured_of(record)
        return -measured.tokens_per_second, measured.peak_allocated_bytes, record.number

    return tuple(sorted(records, key=order))
