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
from collections import Counter
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass, field
from functools import cached_property
from types import MappingProxyType
from typing import Literal, assert_never
from weakref import WeakKeyDictionary

import numpy as np
from pydantic import BaseModel, ConfigDict

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.estimates import Estimate
from qlora_sweep.search_spaces.frozen import replaced
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
from qlora_sweep.storage.records import (
    EpochRecord,
    Measurement,
    QualityReport,
    TrialRecord,
    Verdict,
)

CONCLUSIVE = frozenset({Verdict.FITS, Verdict.OOM, Verdict.DIVERGED, Verdict.INEFFECTIVE})
"""How a trial ends that says what becomes of its configuration: the last of them counts."""
LESS_IS_BETTER: frozenset[Objective] = frozenset({"peak_memory", "eval_loss"})
NoGain = Literal["no_winner", "not_measured", "did_not_fit", "not_shown"]
"""Why a gain is not stated: nothing fits, what it would be over was not measured or did not fit,
or the interval of the ratio holds 1."""

Basis = Literal["searched", "confirmed", "predicted"]
"""What a trial's speed comes from: its own run, several runs that measured its configuration again,
or a prediction of the target where another GPU stood in."""


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
            if measured.quality is None:
                return math.inf
            return measured.quality.eval_loss
        case _:
            assert_never(objective)


def turned(objective: Objective, value: float) -> float:
    """Return an objective's value, turned so that larger is better."""
    if objective in LESS_IS_BETTER:
        return -float(value)
    return float(value)


def measured_of(record: TrialRecord) -> Measurement:
    """Return the measurement of a trial that has one."""
    assert record.measurement is not None, "it was measured"
    return record.measurement


def fitting(records: Iterable[TrialRecord]) -> tuple[TrialRecord, ...]:
    """Return the trials that fit, each configuration once, fastest first.

    Equal speeds are ordered by less memory, then by number.
    """
    return tuple(sorted(_fits(records), key=lambda r: _speed_order(r.number, measured_of(r))))


def _fits(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return the trials that fit, each configuration once, by its last conclusive trial."""
    return [r for r in last_conclusive(records).values() if r.verdict is Verdict.FITS]


def last_conclusive(records: Iterable[TrialRecord]) -> dict[TrialConfig, TrialRecord]:
    """Return the last trial of each canonical configuration that came to a conclusion."""
    last = {}
    for record in _by_number(records):
        if record.verdict in CONCLUSIVE:
            last[canonical(record.config)] = record
    return last


def undominated(points: Mapping[int, tuple[float, ...]]) -> set[int]:
    """Return the numbers of the points that no other beats in one and matches in every value.

    Args:
        points: by number, where more is better in each value.
    """
    front: set[tuple[float, ...]] = set()
    # In falling order whatever dominates a point comes before it, and what dominates that as well.
    for point in sorted(set(points.values()), reverse=True):
        if not any(all(map(float.__ge__, other, point)) for other in front):
            front.add(point)
    return {number for number in points if points[number] in front}


def verdict_counts(records: Iterable[TrialRecord]) -> dict[str, int]:
    """Return the number of trials of every verdict, zero included."""
    counts = Counter(record.verdict for record in records)
    return {str(verdict): counts[verdict] for verdict in Verdict}


@dataclass(frozen=True)
class RankedTrial:
    """A measured trial as a study ranks it; its record stays as storage has it."""

    record: TrialRecord
    """The trial; where the confirmation alone measured its configuration, the first run of that."""
    measurement: Measurement
    """What its configuration came to: where that was measured again all those runs together, else
    what the search measured, its speed times `Ranking.scale`."""
    estimate: Estimate
    """Tokens/s that decide, with the interval: 95 % of what was measured, of what is predicted
    where nine in ten are; from 0 to infinity where nothing bounds it."""
    basis: Basis

    @property
    def number(self) -> int:
        """The trial's number."""
        return self.record.number

    @property
    def config(self) -> TrialConfig:
        """Its configuration."""
        return self.record.config

    @property
    def epoch(self) -> EpochRecord | None:
        """What an epoch of the study's dataset is to it; None without a dataset."""
        return self.record.epoch


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
class RankedGain:
    """How many times as fast a trial is as the baseline in its capacity class."""

    ratio: Ratio | None = None
    """None where `reason` says why."""
    reason: NoGain | None = None
    over: RankedTrial | None = None
    """What it is over: the baseline, or its recipe in the trial's class; None where that was not
    measured."""
    measured: Ratio | None = None
    """The same on the GPU that stood in for the target, where one did."""


@dataclass(frozen=True)
class Ranking:
    """A study's trials, ordered by its objectives."""

    definition: StudyDefinition
    searched: tuple[TrialRecord, ...]
    """Every trial of the search, the baseline included, by number, as the search measured it."""
    confirmations: Confirmations = field(default_factory=Confirmations)
    target_speeds: Mapping[int, TargetSpeed] = field(default_factory=dict)
    """What is predicted of the target where another GPU stood in, by trial number."""

    @property
    def objectives(self) -> tuple[Objective, ...]:
        """What was asked for, in the order in which it was named."""
        return self.definition.space.objectives

    @property
    def is_for_speed_alone(self) -> bool:
        """Whether nothing but speed is asked for."""
        return self.objectives == ("tokens_per_second",)

    # What the trials came to.

    @cached_property
    def fallen(self) -> Mapping[int, TrialRecord]:
        """Trials that fitted in the search and did not hold, by number, each with the run that says
        so."""
        fallen = {}
        for record in self.searched:
            if record.verdict is Verdict.FITS:
                run = self.confirmations.fallen.get(canonical(record.config))
                if run is not None:
                    fallen[record.number] = run
        return fallen

    @cached_property
    def records(self) -> tuple[TrialRecord, ...]:
        """The trials of the search, by number; what did not hold in the confirmation with how it
        ended there."""
        records = []
        for record in self.searched:
            run = self.fallen.get(record.number)
            if run is not None:
                record = replaced(record, outcome=run.outcome)
            records.append(record)
        return tuple(records)

    @cached_property
    def of_space(self) -> tuple[TrialRecord, ...]:
        """Those of them whose configuration the space holds."""
        return tuple(record for record in self.records if self.holds(record.config))

    @cached_property
    def _searched(self) -> Mapping[int, Measurement]:
        """What the search measured, by number; of a held-out loss that of all seeds."""
        qualities: Mapping[TrialConfig, QualityReport] = {}
        if "eval_loss" in self.objectives and self.confirmations.records:
            qualities = pooled_qualities(self.searched, self.confirmations.records)
        found = {}
        for record in self.records:
            measured = record.measurement
            if measured is None:
                continue
            quality = qualities.get(canonical(record.config))
            if quality is not None and record.verdict is Verdict.FITS:
                measured = replaced(measured, quality=quality)
            found[record.number] = measured
        return found

    @cached_property
    def _repeated(self) -> Mapping[int, Measurement]:
        """What was measured again: all runs of a trial's configuration together, by number."""
        repeated: dict[int, Measurement] = {}
        if not self.confirmations.records:
            return repeated
        for record in self.records:
            if record.verdict is not Verdict.FITS:
                continue
            pooled = self.confirmations.pooled(record.config)
            if pooled is not None:
                quality = self._searched[record.number].quality
                repeated[record.number] = replaced(pooled, quality=quality)
        return repeated

    @cached_property
    def scale(self) -> float:
        """Speed in the confirmation over speed in the search, of the fastest of the space that ran
        in both: what the search saw slower than it stays slower."""
        again = [record for record in self.records if record.number in self._repeated]
        if not again:
            return 1.0

        def order(record: TrialRecord) -> tuple[bool, float]:
            return self.holds(record.config), self._searched[record.number].tokens_per_second

        number = max(again, key=order).number
        confirmed = self._repeated[number].tokens_per_second
        return confirmed / self._searched[number].tokens_per_second

    @cached_property
    def _measurements(self) -> Mapping[int, Measurement]:
        """What the configuration of each measured trial came to, by number."""
        measurements = {}
        for number, measured in self._searched.items():
            if self.scale != 1.0:
                measured = scaled(measured, self.scale)
            measurements[number] = self._repeated.get(number, measured)
        return measurements

    @cached_property
    def trials(self) -> Mapping[int, RankedTrial]:
        """Every measured trial of the search, by number, in the space or not."""
        trials = {}
        for record in self.records:
            if record.number in self._measurements:
                measured = self._measurements[record.number]
                trials[record.number] = self._ranked_trial(record, measured)
        return trials

    def _ranked_trial(self, record: TrialRecord, measured: Measurement) -> RankedTrial:
        on_target = self.target_speeds.get(record.number)
        if on_target is not None and self.is_predicted:
            low = on_target.low or 0.0
            high = on_target.high or math.inf
            speed = Estimate(on_target.tokens_per_second, low, high)
            return RankedTrial(record, measured, speed, "predicted")
        low, high = measured.speed_interval or (0.0, math.inf)
        speed = Estimate(measured.tokens_per_second, low, high)
        if record.number in self._repeated or record.purpose == "confirm":
            return RankedTrial(record, measured, speed, "confirmed")
        return RankedTrial(record, measured, speed, "searched")

    def is_measured_again(self, trial: RankedTrial) -> bool:
        """Whether a trial of the search has the speed of several runs which confirm it."""
        return trial.number in self._repeated

    @cached_property
    def is_predicted(self) -> bool:
        """Whether what is predicted of the target decides, as another GPU stood in for it."""
        if self.definition.target.emulated_on is None:
            return False
        return all(record.number in self.target_speeds for record in self._fitting_of_space)

    @property
    def numerics_choice(self) -> Literal["measured", "predicted"]:
        """How the winner and its class of numerics were chosen."""
        if self.is_predicted:
            return "predicted"
        return "measured"

    def target_speed(self, trial: RankedTrial) -> TargetSpeed | None:
        """Return how fast a trial is on the GPU that the study is for: as measured where that ran
        it, else as predicted; None where nothing can be predicted."""
        if self.definition.target.emulated_on is not None:
            return self.target_speeds.get(trial.number)
        low, high = trial.measurement.speed_interval or (None, None)
        return TargetSpeed(trial.measurement.tokens_per_second, low, high, "measured")

    def expected_speed(self, record: TrialRecord) -> float | None:
        """Return the tokens/s that are predicted of a trial that was not measured, on the GPU whose
        speeds decide; None where nothing is."""
        if self.is_predicted:
            on_target = self.target_speeds.get(record.number)
            if on_target is None:
                return None
            return on_target.tokens_per_second
        if record.prediction is None:
            return None
        return record.prediction.tokens_per_second

    # Capacity classes.

    def capacity_class(self, config: TrialConfig) -> CapacityClass:
        """Return the class in which the speed of ``config`` compares."""
        spelled = (config.lora_rank, config.target_modules)
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
        wanted = self.capacity_class(config)
        for spelling in space.values_of("target_modules"):
            same = config.changed(target_modules=spelling)
            if self.capacity_class(same) == wanted and space.holds(same):
                return True
        return False

    @cached_property
    def asked_class(self) -> CapacityClass | None:
        """The capacity class that is recommended from: the nearest to the standard recipe's of
        those in which anything fits; None where nothing does."""
        classes = [self.capacity_class(record.config) for record in self._fitting_of_space]
        return nearest_capacity(classes, self._model)

    def is_asked(self, config: TrialConfig) -> bool:
        """Whether a configuration is of the capacity class that is recommended from."""
        return self.capacity_class(config) == self.asked_class

    # The order.

    @cached_property
    def _fitting_of_space(self) -> tuple[TrialRecord, ...]:
        """The trials of the space that fit, each configuration once, fastest as measured first."""

        def order(record: TrialRecord) -> tuple[float, int, int]:
            return _speed_order(record.number, self._measurements[record.number])

        return tuple(sorted(_fits(self.of_space), key=order))

    @cached_property
    def by_speed(self) -> tuple[RankedTrial, ...]:
        """The trials of the space that fit, each configuration once, fastest first."""

        def order(trial: RankedTrial) -> tuple[int, float, int, int]:
            peak = trial.measurement.peak_allocated_bytes
            return self._place(trial), -trial.estimate.value, peak, trial.number

        trials = [self.trials[record.number] for record in self._fitting_of_space]
        return tuple(sorted(trials, key=order))

    def _place(self, trial: RankedTrial) -> int:
        """Return whether a trial comes before (0), among (1) or after (2) those measured again.

        Within the search all speeds compare, and within a confirmation. What is predicted of the
        target compares in both. Of several objectives speed is only one, and all are taken as they
        are.
        """
        limit = self._outrun_from
        if limit is None or self.is_measured_again(trial):
            return 1
        if trial.measurement.tokens_per_second > limit:
            return 0
        return 2

    @cached_property
    def _outrun_from(self) -> float | None:
        """What a trial has to reach that outruns all that were measured again; None where that
        makes no difference."""
        if self.is_predicted or not self.is_for_speed_alone:
            return None
        fastest = 0.0
        for record in self._fitting_of_space:
            if record.number in self._repeated:
                fastest = max(fastest, self._searched[record.number].tokens_per_second)
        if not fastest:
            return None
        return self.scale * fastest

    @cached_property
    def _turned_values(self) -> Mapping[int, tuple[float, ...]]:
        """The value of each objective, turned so that larger is better, by number; of the trials in
        which all of them were measured.

        A held-out loss that is not told from the lowest counts as that.
        """
        judged = []
        best = None
        for trial in self.by_speed:
            if not _is_judged(trial, self.objectives):
                continue
            judged.append(trial)
            quality = trial.measurement.quality
            if quality and (best is None or quality.eval_loss < best.eval_loss):
                best = quality
        turned_values = {}
        for trial in judged:
            values = []
            for objective in self.objectives:
                value = objective_value(objective, trial.measurement)
                quality = trial.measurement.quality
                if objective == "tokens_per_second":
                    value = trial.estimate.value
                if objective == "eval_loss" and quality and best:
                    value = _leveled(quality, best)
                values.append(turned(objective, value))
            turned_values[trial.number] = tuple(values)
        return turned_values

    @cached_property
    def _on_front(self) -> set[int]:
        """Numbers of the trials that no other beats in one and matches in every objective."""
        return undominated(self._turned_values)

    @cached_property
    def _best_first(self) -> tuple[RankedTrial, ...]:
        """The trials of the space that fit, each configuration once, best first; of speed alone
        those of the asked capacity class first.

        Of several objectives the front comes first, and in both parts what is nearest to the best
        of every objective at once. Equals are ordered by speed, less memory, and number. A fit
        without the held-out loss that was asked for says nothing of that, and is left out.
        """
        if self.is_for_speed_alone:
            return tuple(sorted(self.by_speed, key=lambda trial: not self.is_asked(trial.config)))
        front = np.array(
            [self._turned_values[number] for number in self._on_front]
        )  # (trials, objectives)

        def order(trial: RankedTrial) -> tuple[bool, float, tuple[float, ...]]:
            turned_values = np.array(self._turned_values[trial.number])  # (objectives,)
            best = front.max(axis=0)
            extent = best - front.min(axis=0)
            # An objective in which all of the front are equal says nothing.
            differs = extent > 0
            away = (best - turned_values)[differs] / extent[differs]
            return trial.number not in self._on_front, math.hypot(*away), tuple(-turned_values)

        judged = [trial for trial in self.by_speed if trial.number in self._turned_values]
        return tuple(sorted(judged, key=order))

    @cached_property
    def ranked(self) -> tuple[RankedTrial, ...]:
        """The trials of the space that fit, each configuration once, the recommended one first."""
        recommended = self._recommended
        return tuple(sorted(self._best_first, key=lambda trial: trial is not recommended))

    @property
    def winner(self) -> RankedTrial | None:
        """The best trial of the space that fits, of several objectives the knee; None for none."""
        if not self.ranked:
            return None
        return self.ranked[0]

    @cached_property
    def front(self) -> tuple[RankedTrial, ...]:
        """Of several objectives, the trials that none beats, the knee first; of one, none."""
        if len(self.objectives) == 1:
            return ()
        return tuple(trial for trial in self.ranked if trial.number in self._on_front)

    # The recommendation.

    @cached_property
    def _recommended(self) -> RankedTrial | None:
        """The trial that is recommended; None where nothing fits."""
        ordered = self._best_first
        if not ordered:
            return None
        if self.is_for_speed_alone:
            return min(self._alternatives, key=self._preference)
        best = ordered[0]
        alike = [trial for trial in ordered if trial is best or self._is_tied(best, trial)]
        return min(alike, key=_gave_back)

    def _preference(self, trial: RankedTrial) -> tuple[object, ...]:
        """Return what sorts trials that tie, the one to recommend first."""
        plain = plainness(trial.config, trial.measurement.peak_allocated_bytes)
        return (_gave_back(trial),) + plain

    @cached_property
    def _alternatives(self) -> list[RankedTrial]:
        """What ties with the fastest of the class of numerics that is chosen, that among it, less
        what another one beats."""
        fastest = self._fastest_of_numerics[self._chosen_numerics]
        rivals = []
        for trial in self.by_speed:
            is_alike = trial.config.numerics == fastest.config.numerics
            is_beside = self._place(trial) == self._place(fastest)
            if self.is_asked(trial.config) and is_alike and is_beside:
                rivals.append(trial)
        least = fastest.estimate.value / (1.0 + TIE)
        alternatives = []
        for trial in rivals:
            is_beaten = any(_beats(other, trial) for other in rivals)
            if trial.estimate.value >= least and not is_beaten:
                alternatives.append(trial)
        return alternatives

    @cached_property
    def _fastest_of_numerics(self) -> Mapping[Numerics, RankedTrial]:
        """The fastest trial of the asked capacity class in each class of numerics, fastest first;
        of several objectives, of all capacity classes."""
        fastest: dict[Numerics, RankedTrial] = {}
        for trial in self.by_speed:
            if not self.is_for_speed_alone or self.is_asked(trial.config):
                fastest.setdefault(trial.config.numerics, trial)
        return fastest

    @cached_property
    def _chosen_numerics(self) -> Numerics:
        """The fastest class of numerics that surely outruns 16-bit compute, else that."""
        plain = self._fastest_of_numerics.get("16-bit")
        for numerics, trial in self._fastest_of_numerics.items():
            if plain is None or trial is plain or self._is_surely_faster(trial, plain):
                return numerics
        raise AssertionError("something fits")

    def _is_surely_faster(self, trial: RankedTrial, over: RankedTrial) -> bool:
        ratio = self.ratio(trial, over)
        if ratio.low is None:
            return ratio.value > 1.0 + TIE
        return ratio.low > 1.0

    @property
    def other_numerics(self) -> RankedTrial | None:
        """What is named beside a winner: where that computes in 8 bits the fastest trial with
        16-bit compute, else the fastest in 8 bits that may be faster, as their ratio's interval
        does not lie below 1; None where there is none."""
        winner = self.winner
        if winner is None:
            return None
        if winner.config.is_8bit_compute:
            return self._fastest_of_numerics.get("16-bit")
        for numerics, trial in self._fastest_of_numerics.items():
            if numerics == "16-bit":
                continue
            ratio = self.ratio(trial, winner)
            best_case = ratio.high
            if best_case is None:
                best_case = ratio.value
            if best_case > 1.0:
                return trial
        return None

    # Ties and ratios.

    @cached_property
    def tied(self) -> tuple[int, ...]:
        """Numbers of the other trials that are statistically indistinguishable from the best in
        what is ranked by: measured side by side with it, where that is speed.

        Memory repeats to the byte: only equals are tied.
        """
        rivals = self.ranked[1:]
        return tuple(trial.number for trial in rivals if self._is_tied(self.ranked[0], trial))

    def _is_tied(self, best: RankedTrial, trial: RankedTrial) -> bool:
        if "tokens_per_second" in self.objectives:
            both = self.is_measured_again(best) and self.is_measured_again(trial)
            if self.is_predicted or not both or not self.ratio(best, trial).is_open:
                return False
        others = [name for name in self.objectives if name != "tokens_per_second"]
        return all(_overlap(name, best.measurement, trial.measurement) for name in others)

    @cached_property
    def close(self) -> tuple[RankedTrial, ...]:
        """The other trials that at best are faster, by more than a tie, than what the best reached
        in the search, and an 8-bit one that may be faster: what measuring side by side may tell
        apart. None where what is predicted of the target decides."""
        winner = self.winner
        if winner is None or (self.is_predicted and "tokens_per_second" in self.objectives):
            return ()
        best = self._as_searched(winner)
        # Beside a loss, equal speeds are no reason to leave a trial out.
        margin = 0.0
        if len(self.objectives) == 1:
            margin = TIE
        other = None
        if not winner.config.is_8bit_compute:
            other = self.other_numerics
        close = []
        for trial in self.ranked[1:]:
            is_alike = trial.config.numerics == winner.config.numerics or trial is other
            if self.is_for_speed_alone and not (self.is_asked(trial.config) and is_alike):
                continue
            rival = self._as_searched(trial)
            if all(_overlap(name, best, rival, margin) for name in self.objectives):
                close.append(trial)
        return tuple(close)

    def _as_searched(self, trial: RankedTrial) -> Measurement:
        """Return what the search measured of a trial, on the scale of what was measured again."""
        if not self.is_measured_again(trial):
            return trial.measurement
        return scaled(self._searched[trial.number], self.scale)

    def searched_speed(self, trial: RankedTrial) -> float:
        """Return the tokens/s that the search measured of a trial."""
        return self._searched[trial.number].tokens_per_second

    def ratio(self, trial: RankedTrial, over: RankedTrial) -> Ratio:
        """Return how much faster a trial is than another: as predicted of the target where that
        decides, else as measured."""
        if self.is_predicted and canonical(trial.config) != canonical(over.config):
            mine = self.target_speeds.get(trial.number)
            theirs = self.target_speeds.get(over.number)
            if mine is not None and theirs is not None:
                return Ratio(*mine.ratio(theirs), is_predicted=True)
        return self.measured_ratio(trial, over)

    def measured_ratio(self, trial: RankedTrial, over: RankedTrial) -> Ratio:
        """Return how much faster a trial ran than another: by the rounds in which both were
        measured again, else by the interval of each."""
        if canonical(trial.config) == canonical(over.config):
            return Ratio(1.0, 1.0, 1.0)
        paired = self.confirmations.ratio(trial.config, over.config)
        if paired is not None:
            return paired
        mine = trial.measurement
        theirs = over.measurement
        value = mine.tokens_per_second / theirs.tokens_per_second
        if mine.speed_interval is None or theirs.speed_interval is None:
            return Ratio(value, None, None)
        low, high = mine.speed_interval
        over_low, over_high = theirs.speed_interval
        return Ratio(value, low / over_high, high / over_low)

    # The confirmation.

    @property
    def is_confirmed(self) -> bool:
        """Whether the winner was measured again, and soaked for as long as was asked."""
        if self.winner is None or not self.is_measured_again(self.winner):
            return False
        budget = self.definition.space.confirm
        if self.soak is None:
            return budget is not None and not budget.soak_seconds
        if budget is None:
            return True
        return soaked_long_enough(self.soak, seconds=budget.soak_seconds, steps=budget.soak_steps)

    @property
    def is_settled(self) -> bool:
        """Whether nothing is left to measure: it is confirmed, or its trials were recorded."""
        return self.is_confirmed or self.definition.target.recorded is not None

    @cached_property
    def soak(self) -> TrialRecord | None:
        """The soak that the winner stood; None where it stood none."""
        if self.winner is None:
            return None
        return self.confirmations.soak(self.winner.config, series=self.confirmations.series)

    def runs_of(self, config: TrialConfig) -> Sequence[Measurement]:
        """Return the runs that measured a configuration again, in order."""
        return self.confirmations.runs(config, series=self.confirmations.series)

    # The baseline and gains over it.

    @cached_property
    def baseline(self) -> RankedTrial | None:
        """The last trial of the baseline that was measured to the end, where none was what the
        confirmation measured of it; None where neither did."""
        for record in reversed(self.records):
            if record.is_baseline and record.verdict is Verdict.FITS:
                return self.trials[record.number]
        return self._confirmed(self.baseline_config)

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
    def fastest_of_baselines_class(self) -> RankedTrial | None:
        """The fastest trial of the space in the baseline's capacity class."""
        for trial in self.by_speed:
            if self.is_of_baselines_class(trial.config):
                return trial
        return None

    def baseline_for(self, config: TrialConfig) -> TrialConfig:
        """Return the baseline in the capacity class of ``config``: itself in its own, however that
        spells its modules."""
        if self.is_of_baselines_class(config):
            return self.baseline_config
        return self.baseline_config.changed(
            lora_rank=config.lora_rank, target_modules=config.target_modules
        )

    def reference_for(self, config: TrialConfig) -> RankedTrial | None:
        """Return what the gain of ``config`` is stated over: the measured baseline, in another
        class what was measured of the recipe there; None where it was not."""
        if self.is_of_baselines_class(config):
            return self.baseline
        baseline = self.baseline_for(config)
        return self._fitting.get(canonical(baseline)) or self._confirmed(baseline)

    def _confirmed(self, config: TrialConfig) -> RankedTrial | None:
        """Return what the confirmation measured of a configuration that no trial was of."""
        wanted = canonical(config)
        pooled = self.confirmations.pooled(wanted)
        if pooled is None or wanted in self.confirmations.fallen:
            return None
        for run in self.confirmations.records:
            is_run = run.series == self.confirmations.series and run.purpose == "confirm"
            if is_run and run.verdict is Verdict.FITS and canonical(run.config) == wanted:
                return self._ranked_trial(run, pooled)
        raise AssertionError("its runs are pooled")

    @cached_property
    def _fitting(self) -> Mapping[TrialConfig, RankedTrial]:
        """What fits, in the space or not, by canonical configuration."""
        fits = _fits(self.records)
        return {canonical(record.config): self.trials[record.number] for record in fits}

    @cached_property
    def gain(self) -> RankedGain:
        """What the winner gained within its capacity class."""
        if self.winner is None:
            return RankedGain(reason="no_winner")
        return self.gain_of(self.winner)

    def gain_of(self, trial: RankedTrial) -> RankedGain:
        """Return what a trial gained within its capacity class, or why that is not stated."""
        over = self.reference_for(trial.config)
        if over is None:
            if canonical(self.baseline_for(trial.config)) in self.confirmations.fallen:
                return RankedGain(reason="did_not_fit")
            return RankedGain(reason="not_measured")
        ratio = self.ratio(trial, over)
        measured = None
        if self.is_predicted:
            measured = self.measured_ratio(trial, over)
        is_itself = canonical(trial.config) == canonical(over.config)
        if ratio.is_open and not is_itself:
            return RankedGain(reason="not_shown", over=over, measured=measured)
        return RankedGain(ratio, over=over, measured=measured)

    @cached_property
    def fastest_by_class(self) -> tuple[ClassBest, ...]:
        """The fastest trial of the space per rank, target modules, numerics and length, in that
        order.

        Where nothing of a class was measured to the end, its fastest partial measurement stands for
        it, marked as such.
        """
        stopped = []
        for record in self.of_space:
            if record.verdict is Verdict.PRUNED_SLOW:
                stopped.append(self.trials[record.number])
        stopped.sort(key=lambda trial: _speed_order(trial.number, trial.measurement))
        best: dict[tuple[CapacityClass, Numerics, int], ClassBest] = {}
        for trial in list(self.by_speed) + stopped:
            config = trial.config
            on_target = None
            if trial.basis == "predicted":
                on_target = trial.estimate.value
            found = ClassBest(
                lora_rank=config.lora_rank,
                target_modules=config.target_modules,
                numerics=config.numerics,
                seq_len=config.seq_len,
                number=trial.number,
                tokens_per_second=trial.measurement.tokens_per_second,
                target_tokens_per_second=on_target,
                is_partial=trial.record.verdict is Verdict.PRUNED_SLOW,
            )
            best.setdefault((self.capacity_class(config), config.numerics, config.seq_len), found)

        def order(found: ClassBest) -> tuple[int, str, str, int]:
            return found.lora_rank, str(found.target_modules), found.numerics, found.seq_len

        return tuple(sorted(best.values(), key=order))


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
    looks = 1
    budget = definition.space.confirm
    if budget is not None:
        looks = budget.repeats - RUNS_TO_CONFIRM + 1
    repeated = Confirmations(tuple(_by_number(confirmations)), looks)
    return Ranking(definition, tuple(_by_number(records)), repeated, target_speeds)


_RANKINGS: WeakKeyDictionary[StudySnapshot, Ranking] = WeakKeyDictionary()
"""Of each snapshot for as long as that is in use: a page asks dozens of times."""


def rank_study(snapshot: StudySnapshot) -> Ranking:
    """Return the order of a study's trials as it stands, the same value each time."""
    if snapshot not in _RANKINGS:
        _RANKINGS[snapshot] = rank(
            snapshot.records,
            snapshot.definition,
            snapshot.confirmations,
            target_speeds=snapshot.target_speeds,
        )
    return _RANKINGS[snapshot]


def _is_judged(trial: RankedTrial, objectives: Sequence[Objective]) -> bool:
    """Whether everything that is asked for was measured: a held-out loss takes a training."""
    return all(math.isfinite(objective_value(name, trial.measurement)) for name in objectives)


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
        mine = best.quality.eval_loss_ci95
        theirs = other.quality.eval_loss_ci95
        if mine and theirs and mine[0] <= theirs[1] and theirs[0] <= mine[1]:
            return True
        return not is_told_apart(best.quality, other.quality)
    return objective_value(objective, best) == objective_value(objective, other)


def _leveled(quality: QualityReport, best: QualityReport) -> float:
    """Return a held-out loss; the lowest where it is not told from that."""
    if is_told_apart(quality, best):
        return quality.eval_loss
    return best.eval_loss


def _beats(trial: RankedTrial, other: RankedTrial) -> bool:
    """Whether a trial is no worse than another in speed and memory and better in one of them, one
    of a less plain compute dtype by more than a tie. One that made the allocator give memory back
    beats none that did not, and one with more experts on the host is faster by more than a tie:
    what it needs less of the GPU's memory it needs of the host's."""
    if _gave_back(trial) > _gave_back(other):
        return False
    margin = 0.0
    if compute_order(trial.config) > compute_order(other.config):
        margin = TIE
    faster = trial.estimate.value / other.estimate.value
    mine = trial.measurement.peak_allocated_bytes
    theirs = other.measurement.peak_allocated_bytes
    is_no_worse = faster >= 1.0 and mine <= theirs
    if trial.config.offload_fraction > other.config.offload_fraction:
        return is_no_worse and faster > 1.0 + TIE
    return is_no_worse and (faster > 1.0 + margin or mine * (1.0 + margin) < theirs)


def _gave_back(trial: RankedTrial) -> bool:
    """Whether a trial made the allocator give memory back."""
    return trial.measurement.allocator_retries > 0


def _by_number(records: Iterable[TrialRecord]) -> list[TrialRecord]:
    """Return trials in the order in which they were asked for."""
    return sorted(records, key=lambda record: record.number)


def _speed_order(number: int, measured: Measurement) -> tuple[float, int, int]:
    """Return what sorts trials by falling speed; equals by less memory, then by number."""
    return -measured.tokens_per_second, measured.peak_allocated_bytes, number
