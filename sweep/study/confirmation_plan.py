"""Which run is next of a confirmation: read from the runs that are stored, and from nothing else.

So a study that is killed at any moment resumes with the run after the last one that ended.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.frozen import replaced
from qlora_sweep.search_spaces.preference import TIE
from qlora_sweep.search_spaces.space import ConfirmBudget, StepBudget
from qlora_sweep.storage.confirmations import (
    RUNS_TO_CONFIRM,
    Ratio,
    soaked_long_enough,
)
from qlora_sweep.storage.ledger import MAX_ATTEMPTS, attempts
from qlora_sweep.storage.ranking import RankedTrial, Ranking
from qlora_sweep.storage.records import Measurement, Purpose, RunKind, TrialRecord
from qlora_sweep.sweep.planning.survey import TRIAL_SECONDS
from qlora_sweep.sweep.study.driver import Wanted, quality_command

CONTENDERS_MAX = 4
"""Of all whose intervals overlap the winner's, so many are measured again at a time."""
BEGUN_MAX = 8
"""So many in all: where more take the lead one after the other, the machine cannot tell them."""
GAIN_WIDTH = 0.1
"""Of a gain that is above 1 for sure and needs no further runs, relative."""
RUNS_MAX = 2
"""Times its repeats that a configuration runs at most, however often others take the lead."""
SOAKS_MAX = 3
"""Where so many lose in their soaks, another budget or another study is what helps."""


@dataclass(frozen=True)
class Contender:
    """A configuration that is measured again; equal where it trains the same way."""

    canonical: TrialConfig
    config: TrialConfig = field(compare=False)
    number: int | None = field(default=None, compare=False)
    """Of its trial; None for the baseline in a winner's class that none was of."""

    @classmethod
    def of(cls, record: TrialRecord | RankedTrial) -> Contender:
        """Return the configuration of a trial."""
        return cls(canonical(record.config), record.config, record.number)


@dataclass(frozen=True)
class ConfirmationPlan:
    """What a confirmation has still to run, as far as it has come.

    The winner, what its gain is stated over, and what may be as fast as it are run in turns, so
    that whatever drifts in the machine drifts for all of them.

    Attributes:
        series: of the runs that count.
        since: number of the first run of this driver; what failed before is tried anew.
        tokens: on which a run with another seed trains; None where no loss is asked for.
    """

    ranking: Ranking
    budget: ConfirmBudget
    series: int
    since: int = 0
    tokens: int | None = None

    def next_run(self) -> Wanted | None:
        """Return the next run; None where all that the budget allows is known."""
        repeated = self._turn(self._unconfirmed()) or self._turn(self._undecided())
        if repeated is not None:
            run_kind = RunKind(purpose="confirm", series=self.series, confirms=repeated.number)
            return Wanted(self._steps, repeated.config, run_kind)
        faster = self._faster_baseline()
        if faster is not None:
            return Wanted(self.ranking.definition.space.steps, faster.config)
        winner = self.ranking.winner
        if winner is not None and self._is_to_soak(winner):
            return self._soak_of(winner)
        return self._next_seed()

    def _soak_of(self, winner: RankedTrial) -> Wanted:
        budget = self.budget
        steps = replaced(
            self._steps,
            measured_min=min(self._steps.measured_min, budget.soak_steps),
            measured_max=budget.soak_steps,
            seconds_max=budget.soak_seconds,
        )
        run_kind = RunKind(purpose="soak", series=self.series, confirms=winner.number)
        return Wanted(steps, winner.config, run_kind)

    def _faster_baseline(self) -> RankedTrial | None:
        """Return the baseline where it outran the winner and the space holds it: no trial was of
        it, and as one it can win."""
        ranking = self.ranking
        winner = ranking.winner
        if winner is None:
            return None
        baseline = ranking.reference_for(winner.config)
        if baseline is None or baseline.record.purpose == "search":
            return None
        high = ranking.ratio(winner, baseline).high
        if high is None or high >= 1.0 or not ranking.holds(baseline.config):
            return None
        if self._newest_of(canonical(baseline.config)) is not None:
            return None
        return baseline

    def _newest_of(self, baseline: TrialConfig) -> TrialRecord | None:
        """Return the last trial of a canonical configuration; None where it had none."""
        newest = None
        for record in self.ranking.records:
            if canonical(record.config) == baseline:
                newest = record
        return newest

    @property
    def _steps(self) -> StepBudget:
        """How long one run measures: as a trial does, but no more than its share of the time."""
        steps = self.ranking.definition.space.steps
        share = self.budget.seconds / self.budget.repeats
        return replaced(steps, seconds_max=min(steps.seconds_max, share))

    def _next_seed(self) -> Wanted | None:
        """Return the next training with another seed, where losses are asked for: all take one seed
        before any takes the next.
        """
        space = self.ranking.definition.space
        if self.tokens is None:
            return None
        # Speed is known: what it learns is what is asked.
        least = replaced(self._steps, measured_max=self._steps.measured_min)
        tried = [r for r in self.ranking.confirmations.records if r.purpose == "quality"]
        for seed in range(space.seed + 1, space.seed + self.budget.quality_seeds):
            for trial in self._to_seed():
                quality = trial.measurement.quality
                is_done = quality is not None and seed in (quality.seeds or (quality.seed,))
                if is_done or self._has_failed(trial.config, tried):
                    continue
                run_kind = RunKind(purpose="quality", series=self.series, confirms=trial.number)
                asked = quality_command(space, tokens=self.tokens, seed=seed)
                return Wanted(least, trial.config, run_kind, asked)
        return None

    def _to_seed(self) -> tuple[RankedTrial, ...]:
        """Return the few that the choice is between: the knee, the lowest loss and the fastest of
        the front."""
        ranking = self.ranking
        front = ranking.front or ranking.ranked[:1]
        if not front:
            return ()
        knee = front[0]
        lowest = min(ranking.ranked, key=_loss)
        fastest = max(front, key=lambda trial: trial.measurement.tokens_per_second)
        # Each once, where one is the same as another.
        chosen = {knee.number: knee, lowest.number: lowest, fastest.number: fastest}
        return tuple(chosen.values())

    @cached_property
    def contenders(self) -> tuple[Contender, ...]:
        """What is measured again: the winner, what its gain is over, its ties, what was begun, and
        what the gain of the baseline's class takes. Cut short, the gain is known first."""
        ranking = self.ranking
        begun = set(map(Contender.of, self._of("confirm")))
        rivals = list(map(Contender.of, ranking.ranked[:1] + ranking.close))[:CONTENDERS_MAX]
        rivals += filter(begun.__contains__, map(Contender.of, ranking.ranked))
        if len(begun) >= BEGUN_MAX:
            rivals = list(filter(begun.__contains__, rivals))
        order = rivals[:1]
        order += self._references[:1]
        order += rivals
        order += self._references
        # Each where it comes first, as it comes last: of what is equal, a reference has the number
        # that its runs are stored with.
        return tuple(dict(zip(order, order, strict=True)).values())

    @cached_property
    def _references(self) -> tuple[Contender, ...]:
        """What gains are stated over: the winner's, and in another class than the baseline's that
        of the fastest of the baseline's own, with it."""
        ranking = self.ranking
        winner = ranking.winner
        if winner is None:
            return ()
        references = self._baseline_of(winner)
        fastest = ranking.fastest_of_baselines_class
        if fastest is not None and not ranking.is_of_baselines_class(winner.config):
            references.append(Contender.of(fastest))
            references += self._baseline_of(fastest)
        return tuple(references)

    def _baseline_of(self, trial: RankedTrial) -> list[Contender]:
        """Return the baseline in a trial's class; none where that is known not to run."""
        config = self.ranking.baseline_for(trial.config)
        baseline = canonical(config)
        newest = self._newest_of(baseline)
        if newest is not None and newest.measurement is None:
            return []
        if newest is not None:
            return [Contender.of(newest)]
        if baseline in self.ranking.confirmations.fallen:
            return []
        return [Contender(baseline, config)]

    @cached_property
    def _winner(self) -> Contender | None:
        winner = self.ranking.winner
        if winner is None:
            return None
        return Contender.of(winner)

    def _unconfirmed(self) -> list[Contender]:
        """Return what ran too seldom beside the winner; past the budget only what there is no
        answer without, and what was begun: a single run counts for nothing.
        """
        wanted = []
        for contender in self.contenders:
            is_affordable = self._spent < self.budget.seconds or self._is_needed(contender)
            if is_affordable and self._rounds_of(contender) < RUNS_TO_CONFIRM:
                wanted.append(contender)
        return wanted

    def _is_needed(self, contender: Contender) -> bool:
        is_asked = contender in self._references or contender == self._winner
        return is_asked or len(self._runs(contender)) == 1

    @cached_property
    def run_seconds(self) -> float:
        """Expected seconds of a run; 0 where nothing was measured."""
        measured = _mean([run.measured_seconds for run in self._like_its_runs])
        return self.setup_seconds + measured

    @cached_property
    def setup_seconds(self) -> float:
        """Those of them that go by before anything is measured."""
        mean = _mean([run.setup_seconds for run in self._like_its_runs])
        if self.has_begun:
            return mean
        # The search also built the model and compiled its layers, which is done once.
        return min(mean, TRIAL_SECONDS)

    @cached_property
    def _like_its_runs(self) -> Sequence[Measurement]:
        """The runs of this series that were measured; before there are any, the contenders as the
        search measured them."""
        measured = [run.measurement for run in self._of("confirm") if run.measurement is not None]
        if measured:
            return measured
        ranked = self.ranking.ranked
        return [trial.measurement for trial in ranked if Contender.of(trial) in self.contenders]

    @property
    def has_begun(self) -> bool:
        """Whether a run of it was measured."""
        return any(run.measurement is not None for run in self._of("confirm"))

    @property
    def least_seconds(self) -> float:
        """Expected seconds of the runs that are still to come, whatever they take."""
        owed = 0
        for contender in filter(self._is_needed, self.contenders):
            owed += max(0, RUNS_TO_CONFIRM - self._rounds_of(contender))
        return owed * self.run_seconds

    @property
    def soak_seconds(self) -> float:
        """Expected seconds of the soak that is still to come; 0 for none. Evaluating and saving
        take about as long as the steps of a run."""
        if self._of("soak") or not self.budget.soak_seconds:
            return 0.0
        return self.run_seconds + self.budget.soak_seconds

    @property
    def expected_seconds(self) -> float:
        """Expected seconds of all that is still to come; those of trainings with further seeds are
        not predicted."""
        of_runs = max(self.budget.seconds - self._spent, self.least_seconds)
        return of_runs + self.soak_seconds

    def within(self, left_seconds: float) -> ConfirmationPlan:
        """Return the plan that leaves time for the soak, where so much is left: its further rounds,
        and its ties, take no more than the rest."""
        rest = left_seconds - self.least_seconds - self.soak_seconds
        # A share of it is what a run may measure for at most, so it is never nothing.
        seconds = max(self._spent + rest, 1.0)
        if seconds >= self.budget.seconds:
            return self
        return replace(self, budget=replaced(self.budget, seconds=seconds))

    def in_time(self, wanted: Wanted, left_seconds: float) -> Wanted | None:
        """Return a run as far as there is time for it, a soak perhaps a shorter one; None where
        there is too little. Rounds are begun where the fewest that count can be whole."""
        needed = self.run_seconds
        if wanted.run_kind.purpose == "soak":
            seconds = min(wanted.steps.seconds_max, left_seconds - self.setup_seconds)
            shorter = replaced(wanted.steps, seconds_max=seconds)
            wanted = replace(wanted, steps=shorter)
        if wanted.run_kind.purpose == "confirm" and not self.has_begun:
            needed = self.least_seconds
        if wanted.quality is not None:
            longest = 0.0
            for trial in self.ranking.ranked:
                if trial.measurement.quality is not None:
                    longest = max(longest, trial.measurement.quality.seconds)
            needed += longest
        return wanted if needed <= left_seconds else None

    def _undecided(self) -> list[Contender]:
        """Return what a further round may tell apart: ties, and what an unsure gain is between. One
        that is not begun takes place where the budget lasts until its end: half of it says nothing.
        """
        winner = self.ranking.winner
        if winner is None:
            return []
        undecided = self._ties_of(winner) | self._unsure_pair_of(winner)
        wanted = []
        for contender in self.contenders:
            if contender in undecided and self._rounds_of(contender) < self.budget.repeats:
                wanted.append(contender)
        is_begun = len(set(map(self._newest_round, wanted))) > 1
        if is_begun or self._spent + self._round_seconds(wanted) <= self.budget.seconds:
            return wanted
        return []

    def _ties_of(self, winner: RankedTrial) -> set[Contender]:
        """Return a winner and what further runs may tell from it; nothing where that is nothing."""
        ranking = self.ranking
        open_ties = set()
        for record in ranking.ranked:
            if record.number in ranking.tied and not _is_enough(ranking.ratio(winner, record)):
                open_ties.add(Contender.of(record))
        if open_ties:
            open_ties.add(Contender.of(winner))
        return open_ties

    def _unsure_pair_of(self, winner: RankedTrial) -> set[Contender]:
        """Return a winner and what its gain is stated over, where further runs may say more of that
        gain; nothing where they may not."""
        reference = self.ranking.reference_for(winner.config) or winner
        pair = {Contender.of(winner), Contender.of(reference)}
        if len(pair) == 1:
            # Without a gain its own speed is to be known closely.
            is_unsure = winner.measurement.is_noisy
        elif _is_enough(self.ranking.ratio(winner, reference), width=GAIN_WIDTH):
            is_unsure = False
        else:
            is_unsure = bool(self._runs(Contender.of(reference)))
        if is_unsure:
            return pair
        return set()

    def _round_seconds(self, contenders: Sequence[Contender]) -> float:
        """Return the expected seconds of a round of contenders; 0 where none of them ran."""
        seconds = []
        for contender in contenders:
            for run in self._runs(contender).values():
                seconds.append(run.setup_seconds + run.measured_seconds)
        return _mean(seconds) * len(contenders)

    def _is_to_soak(self, winner: RankedTrial) -> bool:
        budget = self.budget
        soaks = self._of("soak")
        if not budget.soak_seconds or not self.ranking.is_measured_again(winner):
            return False
        stood = self.ranking.confirmations.soaks(winner.config, series=self.series)
        if any(record.number >= self.since for record in stood):
            # However long it was: a longer one has no time in this run.
            return False
        if stood and soaked_long_enough(
            stood[0], seconds=budget.soak_seconds, steps=budget.soak_steps
        ):
            return False
        concluded = set()
        for record in soaks:
            if record.config != winner.config and not record.is_interrupted:
                concluded.add(canonical(record.config))
        return len(concluded) < SOAKS_MAX and not self._has_failed(winner.config, soaks)

    def _turn(self, wanted: Sequence[Contender]) -> Contender | None:
        """Return whose turn it is of those and the winner, beside which they run, in this round;
        None where nothing may run beside it."""
        turns = [c for c in self.contenders if self._may_run(c, wanted)]
        if self._winner is None or turns[:1] != [self._winner]:
            return None
        if not set(turns).intersection(wanted):
            return None
        newest_rounds = set(map(self._newest_round, turns))
        number = max(newest_rounds)
        if len(newest_rounds) == 1:
            # All had their turn: the next round begins.
            number += 1
        if number % 2:
            # Every other round the first two change places: A B B A changes half as often as
            # A B A B, and what drifts steadily cancels.
            turns[:2] = reversed(turns[:2])
        return next(c for c in turns if self._newest_round(c) < number)

    def _newest_round(self, contender: Contender) -> int:
        """Return the last round in which a contender ran; -1 where it did not."""
        return max(self._runs(contender), default=-1)

    def _may_run(self, contender: Contender, wanted: Sequence[Contender]) -> bool:
        """Whether a contender may have a run of a round that is of those and the winner."""
        if contender not in wanted and contender != self.contenders[0]:
            return False
        if self._has_failed(contender.config, self._of("confirm")):
            return False
        return len(self._runs(contender)) < RUNS_MAX * self.budget.repeats

    def _runs(self, contender: Contender) -> Mapping[int, Measurement]:
        """Return what was measured of a contender, by round."""
        return self.ranking.confirmations.rounds(series=self.series).get(contender.canonical, {})

    def _rounds_of(self, contender: Contender) -> int:
        """Return in how many rounds a contender ran beside the winner."""
        beside = self._runs(self._winner or contender)
        return len(self._runs(contender).keys() & beside.keys())

    def _has_failed(self, config: TrialConfig, tried: Sequence[TrialRecord]) -> bool:
        return attempts(tried, config, since=self.since) >= MAX_ATTEMPTS

    @cached_property
    def _spent(self) -> float:
        """Seconds of the winner and its ties; what gains are stated over is needed."""
        needed = {c.canonical for c in self._references if c != self._winner}
        return self.ranking.confirmations.repeat_seconds(series=self.series, besides=needed)

    def _of(self, purpose: Purpose) -> list[TrialRecord]:
        records = self.ranking.confirmations.records
        return [r for r in records if r.series == self.series and r.purpose == purpose]


def _mean(seconds: Sequence[float]) -> float:
    """Return the mean of seconds; 0 of none."""
    if not seconds:
        return 0.0
    return statistics.fmean(seconds)


def _is_enough(ratio: Ratio, *, width: float = math.inf) -> bool:
    """Whether runs need not tell more of a winner's speed over that of another: it is faster, to
    within ``width``, or at most `TIE` slower, which is a tie and enough."""
    if ratio.low is None or ratio.high is None:
        return False
    if ratio.low <= 1.0:
        return ratio.low * (1.0 + TIE) >= 1.0
    return ratio.high - ratio.low < width * ratio.value


def _loss(trial: RankedTrial) -> float:
    quality = trial.measurement.quality
    if quality is None:
        return math.inf
    return quality.eval_loss
