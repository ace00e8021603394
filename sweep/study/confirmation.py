"""Owns what follows a search: its winner is measured again, beside what may be as fast, and soaked.

What to run next is read from the runs that are stored, and from nothing else: a study that is
killed at any moment goes on with the run after the last one that ended. Knows nothing of how a
search chooses or stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Collection, Iterator, Sequence
from contextlib import contextmanager, suppress
from dataclasses import dataclass
from datetime import UTC, datetime

from optuna.trial import Trial

from search_spaces.config import TrialConfig, canonical
from search_spaces.errors import CardLost, EnvironmentFault
from search_spaces.space import ConfirmBudget, StepBudget
from storage.confirmations import RUNS_TO_CONFIRM, Confirmations, soaked_long_enough
from storage.objectives import is_sound, measured_of
from storage.ranking import Ranking, rank
from storage.records import (
    Attempt,
    Crashed,
    Errand,
    Measured,
    Outcome,
    OutOfMemory,
    Purpose,
    TrialRecord,
    held_to_budget,
)
from storage.recovery import MAX_ATTEMPTS, attempts, next_number
from storage.study import OpenStudy
from sweep.planning.target_speed import target_speeds
from sweep.running.runner import Runner
from sweep.running.wire import Progress, TrialRequest
from sweep.study.events import (
    ConfirmationStarted,
    Listener,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from sweep.study.interruption import Interruption
from sweep.study.machine_faults import lost_with_the_card, run_undisturbed
from sweep.study.preflight import Preflight
from sweep.study.quality import Quality, Seeds, is_asked

CONTENDERS_MAX = 4
"""Of all whose intervals overlap the winner's, so many are measured again at a time."""
BEGUN_MAX = 8
"""So many in all: where more take the lead one after the other, the machine cannot tell them."""
GAIN_WITHIN = 1.1
"""A gain that is known this closely needs no further runs."""
RUNS_MAX = 2
"""Times its repeats that a configuration runs at most, however often others take the lead."""
SOAKS_MAX = 3
"""Where so many lose in their soaks, another budget or another study is what helps."""


@dataclass(frozen=True)
class Contender:
    """A configuration that is measured again."""

    config: TrialConfig
    number: int | None
    """Of its trial; None for the baseline's recipe in the winner's class, which none was."""


@dataclass(frozen=True)
class NextRun:
    """What is to be run."""

    config: TrialConfig
    errand: Errand
    seed: int | None = None
    """With which it is trained for its loss; None where it is not."""


@dataclass(frozen=True)
class Plan:
    """What a confirmation has still to run, as far as it has come.

    The winner, what its gain is stated over, and what may be as fast as it are run in turns, so
    that whatever drifts in the machine drifts for all of them.

    Attributes:
        series: of the runs that count.
        since: number of the first run of this driver; what failed before is tried anew.
    """

    ranking: Ranking
    budget: ConfirmBudget
    series: int
    since: int = 0

    def next_run(self) -> NextRun | None:
        """Return the next run; None where all that the budget allows is known."""
        again = self._turn(self._unconfirmed()) or self._turn(self._undecided())
        if again is not None:
            return self._run(again, "confirm")
        winner = self.ranking.winner
        if winner is not None and self._is_to_soak(winner):
            return self._run(_contender(winner), "soak")
        return self._next_seed()

    def _next_seed(self) -> NextRun | None:
        """Return the next training with another seed, where losses are asked for."""
        space = self.ranking.definition.space
        if not is_asked(space):
            return None
        tried = [r for r in self.ranking.confirmations.records if r.purpose == "quality"]
        failed = {
            canonical(r.config)
            for r in tried
            if attempts(tried, r.config, since=self.since) >= MAX_ATTEMPTS
        }
        seeds = Seeds(self.ranking, first=space.seed, count=self.budget.quality_seeds)
        found = seeds.next_run(failed)
        if found is None:
            return None
        record, seed = found
        errand = Errand(purpose="quality", series=self.series, confirms=record.number)
        return NextRun(record.config, errand, seed)

    def contenders(self) -> tuple[Contender, ...]:
        """Return what is measured again: the winner, what its gain is over, its ties, what was
        begun, and what the gain of the baseline's class takes. Cut short, the gain is known first.
        """
        ranking = self.ranking
        begun = {canonical(r.config) for r in self._of("confirm")}
        alike = [*ranking.ranked[:1], *ranking.close]
        kept = [r for r in ranking.ranked if begun and canonical(r.config) in begun]
        is_full = len(begun) >= BEGUN_MAX
        rivals = {canonical(r.config): _contender(r) for r in (*alike[:CONTENDERS_MAX], *kept)}
        named = {key: c for key, c in rivals.items() if key in begun or not is_full}
        over = {canonical(c.config): c for c in self._references()}
        known, first = named | over, (*list(named)[:1], *list(over)[:1])
        return tuple(known[key] for key in dict.fromkeys((*first, *known)))

    def _references(self) -> Iterator[Contender]:
        """Yield what gains are stated over: the winner's, and in another class than the baseline's
        that of the fastest of the baseline's own, with it.
        """
        ranking, winner = self.ranking, self.ranking.winner
        if winner is None or ranking.baseline is None:
            return
        if ranking.is_in_baselines_class(winner):
            yield _contender(ranking.baseline)
            return
        recipe = ranking.recipe
        if recipe is not None and canonical(recipe) not in ranking.confirmations.fallen:
            yield self._recipe(recipe)
        if ranking.fastest_of_baselines_class is not None:
            yield _contender(ranking.fastest_of_baselines_class)
            yield _contender(ranking.baseline)

    def _recipe(self, config: TrialConfig) -> Contender:
        tried = [r for r in self.ranking.records if canonical(r.config) == canonical(config)]
        return _contender(tried[-1]) if tried else Contender(config, None)

    def _unconfirmed(self) -> list[Contender]:
        """Return what ran too seldom beside the winner; past the budget only what there is no
        answer without, and what was begun: a single run counts for nothing.
        """
        return [
            contender
            for contender in self.contenders()
            if self._rounds(contender) < RUNS_TO_CONFIRM
            and (not self._is_spent or self._is_needed(contender))
        ]

    def _is_needed(self, contender: Contender) -> bool:
        winner = self.ranking.winner
        needed = {canonical(c.config) for c in self._references()}
        needed |= set() if winner is None else {canonical(winner.config)}
        return canonical(contender.config) in needed or self._runs(contender) == 1

    def owed(self) -> int:
        """Return how many runs are still to come, whatever they take."""
        needed = [contender for contender in self.contenders() if self._is_needed(contender)]
        return sum(max(0, RUNS_TO_CONFIRM - self._rounds(contender)) for contender in needed)

    def _undecided(self) -> list[Contender]:
        """Return what more runs may tell apart: ties, and what an unsure gain is between."""
        ranking, winner = self.ranking, self.ranking.winner
        if self._is_spent or winner is None:
            return []
        tied = {winner.number, *ranking.tied} if ranking.tied else set()
        over = ranking.reference_for(winner.config) or winner
        unsure = {canonical(r.config) for r in (winner, over) if self._is_unsure(winner, over)}
        return [
            c
            for c in self.contenders()
            if (c.number in tied or canonical(c.config) in unsure)
            and self._rounds(c) < self.budget.repeats
        ]

    def _is_unsure(self, winner: TrialRecord, over: TrialRecord) -> bool:
        """Whether the winner's gain, or its own speed where it has none, is not known closely."""
        if canonical(winner.config) == canonical(over.config):
            return measured_of(winner).is_noisy
        gain = self.ranking.ratio(winner, over)
        return gain.low is None or gain.value > GAIN_WITHIN * gain.low

    def _is_to_soak(self, winner: TrialRecord) -> bool:
        budget, soaks = self.budget, self._of("soak")
        if not budget.soak_seconds or not self.ranking.is_measured_again(winner):
            return False
        known = self.ranking.confirmations.soak(winner.config, series=self.series)
        if known is not None and (
            known.number >= self.since
            or soaked_long_enough(known, seconds=budget.soak_seconds, steps=budget.soak_steps)
        ):
            return False
        others = (r for r in soaks if r.config != winner.config and not r.is_interrupted)
        concluded = {canonical(r.config) for r in others}
        return len(concluded) < SOAKS_MAX and self._may_try(winner.config, "soak")

    def _turn(self, wanted: Sequence[Contender]) -> Contender | None:
        """Return whose turn it is: of those and the winner, beside which they run, the one that
        ran longest ago; None where nothing may run beside it."""
        known = self.contenders()
        possible = [
            contender
            for contender in known
            if (contender in wanted or contender == known[0])
            and self._may_try(contender.config, "confirm")
            and self._runs(contender) < RUNS_MAX * self.budget.repeats
        ]
        winner = self.ranking.winner
        if winner is None or possible[:1] != [_contender(winner)]:
            return None
        if not set(wanted) & set(possible):
            return None
        rounds = self.ranking.confirmations.rounds(series=self.series)
        return min(possible, key=lambda c: max(rounds.get(canonical(c.config), {}), default=-1))

    def _rounds(self, contender: Contender) -> int:
        """Return in how many rounds a contender ran beside the winner."""
        rounds = self.ranking.confirmations.rounds(series=self.series)
        winner = self.ranking.winner
        both = (contender.config, contender.config if winner is None else winner.config)
        mine, beside = (rounds.get(canonical(config), {}).keys() for config in both)
        return len(mine & beside)

    def _runs(self, contender: Contender) -> int:
        return len(self.ranking.confirmations.runs(contender.config, series=self.series))

    def _may_try(self, config: TrialConfig, purpose: Purpose) -> bool:
        failed = attempts(self._of(purpose), config, since=self.since)
        return failed < MAX_ATTEMPTS

    @property
    def _is_spent(self) -> bool:
        """Whether the winner and its ties took their time; what gains are stated over is needed."""
        winner = self.ranking.winner
        needed = {canonical(c.config) for c in self._references()}
        needed -= set() if winner is None else {canonical(winner.config)}
        spent = self.ranking.confirmations.repeat_seconds(series=self.series, besides=needed)
        return spent >= self.budget.seconds

    def _of(self, purpose: Purpose) -> list[TrialRecord]:
        known = self.ranking.confirmations.records
        return [r for r in known if r.series == self.series and r.purpose == purpose]

    def _run(self, contender: Contender, purpose: Purpose) -> NextRun:
        errand = Errand(purpose=purpose, series=self.series, confirms=contender.number)
        return NextRun(contender.config, errand)


def _contender(record: TrialRecord) -> Contender:
    return Contender(record.config, record.number)


def ranking_of(study: OpenStudy) -> Ranking:
    """Return the order of a study's trials as it stands, the same that every reader sees."""
    records = study.records()
    speeds = target_speeds(study.definition, records)
    return rank(records, study.definition, study.confirmations(), target_speeds=speeds)


def confirm(
    study: OpenStudy,
    *,
    runner: Runner,
    preflight: Preflight,
    clock: Callable[[], float] = time.monotonic,
    on_event: Listener = lambda _: None,
    interruption: Interruption | None = None,
    is_anew: bool = False,
    place: str = "",
) -> bool:
    """Measure a study's winner again and soak it; return False where somebody asked to stop.

    Nothing is run where the space says so, where nothing fits, or where it was all done before.

    Args:
        study: open, under its lease, its search at an end.
        runner: runs a configuration, the first one in a fresh process.
        preflight: learns what did not hold.
        clock: seconds; only differences count.
        on_event: hears of every run.
        interruption: whether somebody asked to stop, as in `tune`.
        is_anew: whether all of it is done once more, whatever the space says.
        place: where it runs, where there are several.

    Raises:
        EnvironmentFault: the device or the database is not to be had. What was measured is stored.
    """
    budget = study.definition.space.confirm
    if budget is None and is_anew:
        budget = ConfirmBudget()
    if budget is None:
        return True
    stops = interruption or Interruption()
    confirming = _Confirming(study, runner, preflight, clock, on_event, stops, budget, place)
    return confirming.all(is_anew)


@dataclass
class _Begun:
    """A run between ask and tell."""

    run: NextRun
    handle: Trial
    is_baseline: bool
    attempt: int
    identity: Attempt
    began: float
    """By the driver's clock."""
    device_seconds: float = 0.0


@contextmanager
def closing_what_never_ran(
    study: OpenStudy, *, besides: Callable[[], Collection[int]] = tuple
) -> Iterator[None]:
    """Close what was begun inside the ``with`` where it is left without an outcome: somebody asked
    to stop, or the device or the database is not to be had. That was no attempt of a configuration.

    Args:
        study: under its lease.
        besides: returns the numbers of the trials that run meanwhile.
    """
    try:
        yield
    except (KeyboardInterrupt, EnvironmentFault):
        with suppress(EnvironmentFault):
            study.abandon(besides=besides())
        raise


@dataclass
class _Confirming:
    """One driver's part of a confirmation."""

    study: OpenStudy
    runner: Runner
    preflight: Preflight
    clock: Callable[[], float]
    on_event: Listener
    interruption: Interruption
    budget: ConfirmBudget
    place: str

    def __post_init__(self) -> None:
        self.quality = Quality(self.study)

    def all(self, is_anew: bool) -> bool:
        """Run everything that is still to be run; return False where somebody asked to stop."""
        since = next_number((*self.study.records(), *self.study.confirmations()))
        series = self._series(since, is_anew)
        is_first = True
        while True:
            try:
                with closing_what_never_ran(self.study):
                    with self.interruption.interruptible():
                        begun = self._next(self._plan(series, since), is_first=is_first)
                    if begun is None:
                        return True
                    outcome = self._outcome_of(begun)
                with self.interruption.settling():
                    self._tell(begun, outcome)
            except KeyboardInterrupt:
                return False
            is_first = False

    def _next(self, plan: Plan, *, is_first: bool) -> _Begun | None:
        """Begin the next run; None where all of it is done.

        Raises:
            KeyboardInterrupt: somebody asked to stop, and nothing runs that is to be waited for.
        """
        run = plan.next_run()
        if run is None:
            return None
        if self.interruption.is_requested():
            raise KeyboardInterrupt
        if is_first:
            self._begin(plan)
        return self._ask(run)

    def _plan(self, series: int, since: int) -> Plan:
        return Plan(ranking_of(self.study), self.budget, series, since)

    def _series(self, since: int, is_anew: bool) -> int:
        """Return which series goes on, or is begun: after a further search, or anew."""
        known = Confirmations(self.study.confirmations())
        if not known.newest:
            return 1
        run = self._plan(known.newest, since).next_run()
        if run is None:
            return known.newest + is_anew
        if run.errand.purpose != "quality" and self._was_elsewhere(known):
            return known.newest + 1
        searched = max(record.number for record in self.study.records())
        return known.newest + (searched > max(record.number for record in known.records))

    def _was_elsewhere(self, known: Confirmations) -> bool:
        """Whether the newest series was begun on another card: no two cards are as fast."""
        newest = (r for r in known.records if r.series == known.newest and r.measurement)
        places = {r.ran_on for r in newest if r.ran_on}
        return bool(self.place) and bool(places - {self.place})

    def _begin(self, plan: Plan) -> None:
        self.runner.renew()
        known = plan.contenders()
        numbers = tuple(c.number for c in known if c.number is not None)
        recipe = next((c.config for c in known if c.number is None), None)
        self.on_event(ConfirmationStarted(series=plan.series, numbers=numbers, recipe=recipe))

    def _ask(self, run: NextRun) -> _Begun:
        """Ask storage for a run and mark it begun."""
        began, started_at = self.clock(), datetime.now(UTC).isoformat(timespec="milliseconds")
        handle = self.study.ask_again()
        identity = self.study.begin(handle, run.config, started_at, errand=run.errand)
        attempt = attempts(self.study.on_errand(run.errand), run.config) + 1
        is_baseline = run.config == self.study.definition.space.baseline_config()
        self.on_event(TrialStarted(handle.number, run.config, is_baseline, attempt, run.errand))
        return _Begun(run, handle, is_baseline, attempt, identity, began)

    def _outcome_of(self, begun: _Begun) -> Outcome:
        """Run one configuration."""
        launched = self.clock()
        try:
            return _sound(self._measure(begun))
        except CardLost as lost:
            # The database matters less now, and the spool has it.
            with suppress(EnvironmentFault):
                self._tell(begun, lost_with_the_card(lost))
            raise
        finally:
            begun.device_seconds = self.clock() - launched

    def _tell(self, begun: _Begun, outcome: Outcome) -> None:
        """Store how a run ended, before anything else happens."""
        record = TrialRecord(
            number=begun.handle.number,
            config=begun.run.config,
            outcome=outcome,
            is_baseline=begun.is_baseline,
            attempt=begun.attempt,
            attempt_id=begun.identity.id,
            started_at=begun.identity.started_at,
            wall_seconds=self.clock() - begun.began,
            device_seconds=begun.device_seconds,
            epoch=self.preflight.epoch_of(begun.run.config),
            ran_on=self.place or None,
            **begun.run.errand.model_dump(),
        )
        stored = self.study.tell(begun.handle, record)
        self.study.add_wall_seconds(self.clock() - begun.began)
        if isinstance(outcome, OutOfMemory):
            self.preflight.learn(record)
        self.on_event(TrialFinished(record=stored))

    def _measure(self, begun: _Begun) -> Outcome:
        space, run = self.study.definition.space, begun.run
        is_soak = run.errand.purpose == "soak"
        steps = (soak_steps if is_soak else run_steps)(space.steps, self.budget)
        if run.seed is not None:
            steps = fewest_steps(steps)

        def observe(progress: Progress) -> bool:
            self.on_event(TrialProgress(number=begun.handle.number, progress=progress))
            return False

        return run_undisturbed(
            lambda: held_to_budget(
                self.runner.run(
                    TrialRequest(
                        config=run.config,
                        steps=steps,
                        is_soak=is_soak,
                        attempt=begun.identity,
                        quality=None if run.seed is None else self.quality.command(seed=run.seed),
                    ),
                    observe=observe,
                ),
                budget_bytes=self.study.definition.target.budget_bytes,
            ),
            should_stop=self.interruption.is_requested,
        )


def _sound(outcome: Outcome) -> Outcome:
    """Return an outcome, or a failure where nothing can be ranked by it: such runs have an end."""
    if isinstance(outcome, Measured) and not is_sound(outcome.measurement):
        return Crashed(phase="measure", detail="a speed was measured that is not a finite number")
    return outcome


def run_steps(steps: StepBudget, budget: ConfirmBudget) -> StepBudget:
    """Return how long one run measures: as a trial does, but no more than its share of the time."""
    share = budget.seconds / budget.repeats
    return steps.model_copy(update={"seconds_max": min(steps.seconds_max, share)})


def fewest_steps(steps: StepBudget) -> StepBudget:
    """Return the least that a run measures, where what it learns is what is asked."""
    return steps.model_copy(update={"measured_max": steps.measured_min})


def soak_steps(steps: StepBudget, budget: ConfirmBudget) -> StepBudget:
    """Return how long a soak trains."""
    return steps.model_copy(
        update={
            "measured_min": min(steps.measured_min, budget.soak_steps),
            "measured_max": budget.soak_steps,
            "seconds_max": budget.soak_seconds,
        }
    )
