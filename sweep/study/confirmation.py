"""What follows a search: its winner is measured again, beside what may be as fast, and soaked.

What to run next is read from the runs that are stored, and from nothing else: a study that is
killed at any moment goes on with the run after the last one that ended.
"""

from __future__ import annotations

import math
import statistics
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from functools import cached_property

from qlora_sweep.search_spaces.config import TrialConfig, canonical
from qlora_sweep.search_spaces.preference import TIE
from qlora_sweep.search_spaces.space import ConfirmBudget, StepBudget
from qlora_sweep.storage.confirmations import (
    RUNS_TO_CONFIRM,
    Confirmations,
    Ratio,
    soaked_long_enough,
)
from qlora_sweep.storage.ledger import MAX_ATTEMPTS, attempts, next_number
from qlora_sweep.storage.ranking import Ranking, measured_of, rank
from qlora_sweep.storage.records import Errand, Measurement, Purpose, TrialRecord
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.sweep.planning.evidence import target_speeds
from qlora_sweep.sweep.planning.survey import TRIAL_SECONDS
from qlora_sweep.sweep.running.runner import Lane
from qlora_sweep.sweep.study.driver import Driver, Source, Wanted, quality_command, tokens_of
from qlora_sweep.sweep.study.events import ConfirmationStarted, StopReason

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
    def of(cls, record: TrialRecord) -> Contender:
        """Return the configuration of a trial."""
        return cls(canonical(record.config), record.config, record.number)


@dataclass(frozen=True)
class Plan:
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
        again = self._turn(self._unconfirmed()) or self._turn(self._undecided())
        if again is not None:
            errand = Errand(purpose="confirm", series=self.series, confirms=again.number)
            return Wanted(self._steps, again.config, errand)
        winner, budget = self.ranking.winner, self.budget
        if (faster := self._faster_baseline()) is not None:
            return Wanted(self.ranking.definition.space.steps, faster.config)
        if winner is None or not self._is_to_soak(winner):
            return self._next_seed()
        changes = {
            "measured_min": min(self._steps.measured_min, budget.soak_steps),
            "measured_max": budget.soak_steps,
            "seconds_max": budget.soak_seconds,
        }
        errand = Errand(purpose="soak", series=self.series, confirms=winner.number)
        return Wanted(self._steps.model_copy(update=changes), winner.config, errand)

    def _faster_baseline(self) -> TrialRecord | None:
        """Return the baseline where it outran the winner and the space holds it: no trial was of
        it, and as one it can win."""
        ranking, winner = self.ranking, self.ranking.winner
        over = None if winner is None else ranking.reference_for(winner.config)
        if winner is None or over is None or over.purpose == "search":
            return None
        high = ranking.ratio(winner, over).high
        is_faster = high is not None and high < 1.0
        tried = {canonical(record.config) for record in ranking.records}
        is_new = ranking.holds(over.config) and canonical(over.config) not in tried
        return over if is_faster and is_new else None

    @property
    def _steps(self) -> StepBudget:
        """How long one run measures: as a trial does, but no more than its share of the time."""
        steps = self.ranking.definition.space.steps
        share = self.budget.seconds / self.budget.repeats
        return steps.model_copy(update={"seconds_max": min(steps.seconds_max, share)})

    def _next_seed(self) -> Wanted | None:
        """Return the next training with another seed, where losses are asked for: all take one seed
        before any takes the next.
        """
        space = self.ranking.definition.space
        if self.tokens is None:
            return None
        # Speed is known: what it learns is what is asked.
        least = self._steps.model_copy(update={"measured_max": self._steps.measured_min})
        tried = [r for r in self.ranking.confirmations.records if r.purpose == "quality"]
        for seed in range(space.seed + 1, space.seed + self.budget.quality_seeds):
            for record in self._to_seed():
                quality = measured_of(record).quality
                is_done = quality is not None and seed in (quality.seeds or (quality.seed,))
                if is_done or self._has_failed(record.config, tried):
                    continue
                errand = Errand(purpose="quality", series=self.series, confirms=record.number)
                asked = quality_command(space, tokens=self.tokens, seed=seed)
                return Wanted(least, record.config, errand, asked)
        return None

    def _to_seed(self) -> tuple[TrialRecord, ...]:
        """Return the few that the choice is between: the knee, the lowest loss and the fastest of
        the front."""
        ranking = self.ranking
        front = ranking.front or ranking.ranked[:1]
        if not front:
            return ()
        chosen = (
            front[0],
            min(ranking.ranked, key=_loss),
            max(front, key=lambda r: measured_of(r).tokens_per_second),
        )
        return tuple({record.number: record for record in chosen}.values())

    @cached_property
    def contenders(self) -> tuple[Contender, ...]:
        """What is measured again: the winner, what its gain is over, its ties, what was begun, and
        what the gain of the baseline's class takes. Cut short, the gain is known first."""
        ranking = self.ranking
        begun = {Contender.of(r) for r in self._of("confirm")}
        alike = [*ranking.ranked[:1], *ranking.close][:CONTENDERS_MAX]
        kept = [r for r in ranking.ranked if Contender.of(r) in begun]
        rivals = dict.fromkeys(map(Contender.of, (*alike, *kept)))
        named = [c for c in rivals if c in begun or len(begun) < BEGUN_MAX]
        over = self._references
        known = {c: c for c in named} | {c: c for c in over}
        return tuple(known[c] for c in dict.fromkeys((*named[:1], *over[:1], *known)))

    @cached_property
    def _references(self) -> tuple[Contender, ...]:
        """What gains are stated over: the winner's, and in another class than the baseline's that
        of the fastest of the baseline's own, with it."""
        ranking, winner = self.ranking, self.ranking.winner
        own = ranking.fastest_of_baselines_class
        if winner is None:
            return ()
        found = self._recipe_of(winner)
        if own is not None and not ranking.is_of_baselines_class(winner.config):
            found += [Contender.of(own), *self._recipe_of(own)]
        return tuple(found)

    def _recipe_of(self, record: TrialRecord) -> list[Contender]:
        """Return the baseline in a trial's class; none where that is known not to run."""
        config = self.ranking.recipe_for(record.config)
        recipe = canonical(config)
        tried = [r for r in self.ranking.records if canonical(r.config) == recipe]
        if not tried:
            fell = recipe in self.ranking.confirmations.fallen
            return [] if fell else [Contender(recipe, config)]
        return [Contender.of(r) for r in tried[-1:] if r.measurement is not None]

    @cached_property
    def _winner(self) -> Contender | None:
        winner = self.ranking.winner
        return None if winner is None else Contender.of(winner)

    def _unconfirmed(self) -> list[Contender]:
        """Return what ran too seldom beside the winner; past the budget only what there is no
        answer without, and what was begun: a single run counts for nothing.
        """
        return [
            contender
            for contender in self.contenders
            if self._rounds_of(contender) < RUNS_TO_CONFIRM
            and (self._spent < self.budget.seconds or self._is_needed(contender))
        ]

    def _is_needed(self, contender: Contender) -> bool:
        is_asked = contender in self._references or contender == self._winner
        return is_asked or len(self._runs(contender)) == 1

    @cached_property
    def run_seconds(self) -> float:
        """Expected seconds of a run; 0 where nothing was measured."""
        known = [measured_of(record).measured_seconds for record in self._like_its_runs]
        return self.setup_seconds + statistics.fmean(known) if known else 0.0

    @cached_property
    def setup_seconds(self) -> float:
        """Those of them that go by before anything is measured."""
        known = [measured_of(record).setup_seconds for record in self._like_its_runs]
        if not known:
            return 0.0
        took = statistics.fmean(known)
        # The search also built the model and compiled its layers, which is done once.
        return took if self.has_begun else min(took, TRIAL_SECONDS)

    @cached_property
    def _like_its_runs(self) -> Sequence[TrialRecord]:
        """The runs of this series that were measured; before there are any, the contenders as the
        search measured them."""
        ran = [record for record in self._of("confirm") if record.measurement is not None]
        return ran or [r for r in self.ranking.ranked if Contender.of(r) in self.contenders]

    @property
    def has_begun(self) -> bool:
        """Whether a run of it was measured."""
        return any(record.measurement is not None for record in self._of("confirm"))

    @property
    def least_seconds(self) -> float:
        """Expected seconds of the runs that are still to come, whatever they take."""
        needed = [contender for contender in self.contenders if self._is_needed(contender)]
        owed = sum(max(0, RUNS_TO_CONFIRM - self._rounds_of(contender)) for contender in needed)
        return owed * self.run_seconds

    @property
    def soak_seconds(self) -> float:
        """Expected seconds of the soak that is still to come; 0 for none. Evaluating and saving
        take about as long as the steps of a run."""
        is_soaked = bool(self._of("soak")) or not self.budget.soak_seconds
        return 0.0 if is_soaked else self.run_seconds + self.budget.soak_seconds

    @property
    def expected_seconds(self) -> float:
        """Expected seconds of all that is still to come; those of trainings with further seeds are
        not foreseen."""
        of_runs = max(self.budget.seconds - self._spent, self.least_seconds)
        return of_runs + self.soak_seconds

    def within(self, left_seconds: float) -> Plan:
        """Return the plan that leaves time for the soak, where so much is left: its further rounds,
        and its ties, take no more than the rest."""
        rest = left_seconds - self.least_seconds - self.soak_seconds
        # A share of it is what a run may measure for at most, so it is never nothing.
        seconds = max(self._spent + rest, 1.0)
        if seconds >= self.budget.seconds:
            return self
        return replace(self, budget=self.budget.model_copy(update={"seconds": seconds}))

    def in_time(self, wanted: Wanted, left_seconds: float) -> Wanted | None:
        """Return a run as far as there is time for it, a soak perhaps a shorter one; None where
        there is too little. Rounds are begun where the fewest that count can be whole."""
        needed = self.run_seconds
        if wanted.errand.purpose == "soak":
            seconds = min(wanted.steps.seconds_max, left_seconds - self.setup_seconds)
            shorter = wanted.steps.model_copy(update={"seconds_max": seconds})
            wanted = replace(wanted, steps=shorter)
        if wanted.errand.purpose == "confirm" and not self.has_begun:
            needed = self.least_seconds
        if wanted.quality is not None:
            trained = [measured_of(record).quality for record in self.ranking.ranked]
            needed += max((quality.seconds for quality in trained if quality), default=0.0)
        return wanted if needed <= left_seconds else None

    def _undecided(self) -> list[Contender]:
        """Return what a further round may tell apart: ties, and what an unsure gain is between. One
        that is not begun takes place where the budget lasts until its end: half of it says nothing.
        """
        ranking, winner = self.ranking, self.ranking.winner
        if winner is None:
            return []
        others = [record for record in ranking.ranked if record.number in ranking.tied]
        tied = [r for r in others if not _is_enough(ranking.ratio(winner, r))]
        over = ranking.reference_for(winner.config) or winner
        pair = [winner, over]
        if Contender.of(winner) == Contender.of(over):
            # Without a gain its own speed is to be known closely.
            is_unsure = measured_of(winner).is_noisy
        else:
            is_enough = _is_enough(ranking.ratio(winner, over), width=GAIN_WIDTH)
            is_unsure = not is_enough and bool(self._runs(Contender.of(over)))
        open_ = {Contender.of(r) for r in (*pair * is_unsure, *[winner, *tied] * bool(tied))}
        wanted = [
            c for c in self.contenders if c in open_ and self._rounds_of(c) < self.budget.repeats
        ]
        is_begun = len({max(self._runs(c), default=-1) for c in wanted}) > 1
        ran = [run for c in wanted for run in self._runs(c).values()]
        took = sum(run.setup_seconds + run.measured_seconds for run in ran)
        end = self._spent + took * len(wanted) / max(1, len(ran))
        return wanted if is_begun or end <= self.budget.seconds else []

    def _is_to_soak(self, winner: TrialRecord) -> bool:
        budget, soaks = self.budget, self._of("soak")
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
        others = (r for r in soaks if r.config != winner.config and not r.is_interrupted)
        concluded = {canonical(r.config) for r in others}
        return len(concluded) < SOAKS_MAX and not self._has_failed(winner.config, soaks)

    def _turn(self, wanted: Sequence[Contender]) -> Contender | None:
        """Return whose turn it is of those and the winner, beside which they run, in this round;
        None where nothing may run beside it."""
        tried = self._of("confirm")
        possible = [
            contender
            for contender in self.contenders
            if (contender in wanted or contender == self.contenders[0])
            and not self._has_failed(contender.config, tried)
            and len(self._runs(contender)) < RUNS_MAX * self.budget.repeats
        ]
        if self._winner is None or possible[:1] != [self._winner] or not {*wanted} & {*possible}:
            return None
        newest = [max(self._runs(c), default=-1) for c in possible]
        left = [c for c, number in zip(possible, newest, strict=True) if number < max(newest)]
        number = max(newest) + (not left)
        # Every other round the first two change places: A B B A changes half as often as A B A B,
        # and what drifts steadily cancels.
        turns = (possible[1::-1] if number % 2 else possible[:2]) + possible[2:]
        return next(c for c in turns if c in (left or turns))

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
        known = self.ranking.confirmations.records
        return [r for r in known if r.series == self.series and r.purpose == purpose]


def _is_enough(ratio: Ratio, *, width: float = math.inf) -> bool:
    """Whether runs need not tell more of a winner's speed over that of another: it is faster, to
    within ``width``, or at most `TIE` slower, which is a tie and enough."""
    if ratio.low is None or ratio.high is None:
        return False
    if ratio.low <= 1.0:
        return ratio.low * (1.0 + TIE) >= 1.0
    return ratio.high - ratio.low < width * ratio.value


def _loss(record: TrialRecord) -> float:
    quality = measured_of(record).quality
    return float("inf") if quality is None else quality.eval_loss


def ranking_of(study: OpenStudy) -> Ranking:
    """Return the order of a study's trials as it stands, the same that every reader sees."""
    records, confirmations = study.records(), study.confirmations()
    speeds = target_speeds(study.definition, (*records, *confirmations))
    return rank(records, study.definition, confirmations, target_speeds=speeds)


class Confirmation(Source):
    """Wants a study's winner measured again, soaked and trained with several seeds.

    On one lane while nothing runs on the others, so that what is compared is measured on the same
    GPU and beside nobody. Nothing is run where the space says so, where nothing fits, or where it
    was all done before. It takes what is left of the run's time, with fewer rounds, a shorter soak
    or none.

    Args:
        driver: of this run.
        then: what the study has come to once all of it is done.
        is_anew: whether all of it is done once more, whatever the space says.
    """

    def __init__(self, driver: Driver, *, then: StopReason, is_anew: bool) -> None:
        self._driver = driver
        self._study = driver.study
        self._then = then
        self._is_anew = is_anew
        self._budget = driver.space.confirm or (ConfirmBudget() if is_anew else None)
        self._lane: Lane | None = None
        """Where it is measured; None before anything is."""
        self._since = self._series = 0

    def next(self, lane: Lane) -> Wanted | StopReason | None:
        """Return the next run, or that all is done."""
        if self._budget is None:
            return self._then
        if lane is not self._driver.lanes.working[0]:
            return None
        is_first = lane is not self._lane
        if is_first:
            self._since = next_number((*self._study.records(), *self._study.confirmations()))
            self._series = self._series_on(lane, self._budget)
        plan = self._plan(self._series, self._budget).within(self._driver.time.left_seconds)
        wanted = plan.next_run()
        if wanted is None:
            return self._then
        if (reason := self._driver.reason_to_stop()) is not None:
            return reason
        wanted = plan.in_time(wanted, self._driver.time.left_seconds)
        if wanted is None:
            return self._driver.time.reason
        if is_first:
            self._lane = lane
            numbers = tuple(c.number for c in plan.contenders if c.number is not None)
            recipes = tuple(c.config for c in plan.contenders if c.number is None)
            self._driver.on_event(ConfirmationStarted(self._series, numbers, recipes))
        return wanted

    def _plan(self, series: int, budget: ConfirmBudget) -> Plan:
        tokens = tokens_of(self._study)
        return Plan(ranking_of(self._study), budget, series, self._since, tokens)

    def _series_on(self, lane: Lane, budget: ConfirmBudget) -> int:
        """Return which series goes on, or is begun: after a further search, on another GPU (no two
        are as fast), or anew."""
        known = Confirmations(self._study.confirmations())
        if not known.newest:
            return 1
        run = self._plan(known.newest, budget).next_run()
        if run is None:
            return known.newest + self._is_anew
        newest = (r for r in known.records if r.series == known.newest and r.measurement)
        elsewhere = {r.ran_on for r in newest if r.ran_on} - {lane.name}
        if run.errand.purpose != "quality" and lane.name and elsewhere:
            return known.newest + 1
        searched = max(record.number for record in self._study.records())
        return known.newest + (searched > max(record.number for record in known.records))
