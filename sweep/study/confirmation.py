"""Owns what follows a search: its winner is measured again, beside what may be as fast, and soaked.

What to run next is read from the runs that are stored, and from nothing else: a study that is
killed at any moment goes on with the run after the last one that ended. Knows nothing of how a
search chooses or stops.
"""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from datetime import UTC, datetime

from search_spaces.config import TrialConfig, canonical
from search_spaces.space import ConfirmBudget, StepBudget
from storage.confirmations import RUNS_TO_CONFIRM, Confirmations, soaked_long_enough
from storage.ranking import Ranking, is_sound, measured_of, rank
from storage.records import (
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
from sweep.running.runner import Progress, Runner
from sweep.study.events import (
    ConfirmationStarted,
    Listener,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from sweep.study.machine_faults import run_undisturbed
from sweep.study.preflight import Preflight

CONTENDERS_MAX = 4
"""Of all that cannot be told from the winner, so many are measured again at a time."""
BEGUN_MAX = 8
"""So many in all: where more take the lead one after the other, the machine cannot tell them."""
SOAKS_MAX = 3
"""Where so many lose in their soaks, another budget or another study is what helps."""


@dataclass(frozen=True)
class NextRun:
    """What is to be run."""

    config: TrialConfig
    errand: Errand


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
        again = self._fewest(self._unconfirmed()) or self._fewest(self._undecided())
        if again is not None:
            return self._run(again, "confirm")
        winner = self.ranking.winner
        return (
            self._run(winner, "soak") if winner is not None and self._is_to_soak(winner) else None
        )

    def contenders(self) -> tuple[TrialRecord, ...]:
        """Return what is measured again: the winner, its ties, and what was begun; the baseline
        last.
        """
        ranking = self.ranking
        begun = {canonical(r.config) for r in self._of("confirm")}
        alike = [r for r in ranking.ranked if r is ranking.winner or r.number in ranking.tied]
        kept = [r for r in ranking.ranked if canonical(r.config) in begun]
        named = (*alike[:CONTENDERS_MAX], *kept, *self._references())
        unique = {canonical(r.config): r for r in named}
        is_full = len(begun) >= BEGUN_MAX
        return tuple(r for key, r in unique.items() if key in begun or not is_full)

    def _references(self) -> Iterator[TrialRecord]:
        """Yield what a gain is stated over and, where the winner's cannot be, whose it is then."""
        ranking, winner = self.ranking, self.ranking.winner
        if winner is None or ranking.baseline is None:
            return
        if ranking.is_in_baselines_class(winner):
            yield ranking.baseline
        elif ranking.fastest_of_baselines_class is not None:
            yield from (ranking.fastest_of_baselines_class, ranking.baseline)

    def _unconfirmed(self) -> list[TrialRecord]:
        """Return what ran too seldom; past the budget only what there is no answer without."""
        winner = self.ranking.winner
        needed = {r.number for r in self._references()} | ({winner.number} if winner else set())
        return [
            record
            for record in self.contenders()
            if self._runs(record) < RUNS_TO_CONFIRM
            and (not self._is_spent or record.number in needed)
        ]

    def _undecided(self) -> list[TrialRecord]:
        """Return what more runs may tell apart, or tell at all."""
        if self._is_spent:
            return []
        ranking = self.ranking
        again = [r for r in self.contenders() if ranking.is_measured_again(r)]
        alike = [r for r in again if r is ranking.winner or r.number in ranking.tied]
        unsure = [r for r in again if measured_of(r).is_noisy]
        chosen = (*(alike if len(alike) > 1 else ()), *unsure)
        return [r for r in chosen if self._runs(r) < self.budget.repeats]

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
        concluded = {canonical(r.config) for r in soaks if r.config != winner.config}
        return len(concluded) < SOAKS_MAX and self._may_try(winner, "soak")

    def _fewest(self, records: Iterable[TrialRecord]) -> TrialRecord | None:
        """Return the one that ran least; of equals the first."""
        possible = [r for r in records if self._may_try(r, "confirm")]
        return min(possible, key=self._runs, default=None)

    def _runs(self, record: TrialRecord) -> int:
        return len(self.ranking.confirmations.runs(record.config, series=self.series))

    def _may_try(self, record: TrialRecord, purpose: Purpose) -> bool:
        failed = attempts(self._of(purpose), record.config, since=self.since)
        return failed < MAX_ATTEMPTS

    @property
    def _is_spent(self) -> bool:
        spent = self.ranking.confirmations.repeat_seconds(series=self.series)
        return spent >= self.budget.seconds

    def _of(self, purpose: Purpose) -> list[TrialRecord]:
        known = self.ranking.confirmations.records
        return [r for r in known if r.series == self.series and r.purpose == purpose]

    def _run(self, record: TrialRecord, purpose: Purpose) -> NextRun:
        errand = Errand(purpose=purpose, series=self.series, confirms=record.number)
        return NextRun(record.config, errand)


def confirm(
    study: OpenStudy,
    *,
    runner: Runner,
    preflight: Preflight,
    clock: Callable[[], float] = time.monotonic,
    on_event: Listener = lambda _: None,
    should_stop: Callable[[], bool] = lambda: False,
    is_anew: bool = False,
) -> bool:
    """Measure a study's winner again and soak it; return False where somebody asked to stop.

    Nothing is run where the space says so, where nothing fits, or where it was all done before.

    Args:
        study: open, under its lease, its search at an end.
        runner: runs a configuration, the first one in a fresh process.
        preflight: learns what did not hold.
        clock: seconds; only differences count.
        on_event: hears of every run.
        should_stop: asked before each run.
        is_anew: whether all of it is done once more, whatever the space says.

    Raises:
        EnvironmentFault: the device or the database is not to be had. What was measured is stored.
    """
    budget = study.definition.space.confirm
    if budget is None and is_anew:
        budget = ConfirmBudget()
    if budget is None:
        return True
    return _Confirming(study, runner, preflight, clock, on_event, should_stop, budget).all(is_anew)


@dataclass
class _Confirming:
    """One driver's part of a confirmation."""

    study: OpenStudy
    runner: Runner
    preflight: Preflight
    clock: Callable[[], float]
    on_event: Listener
    should_stop: Callable[[], bool]
    budget: ConfirmBudget

    def all(self, is_anew: bool) -> bool:
        """Run everything that is still to be run."""
        since = next_number((*self.study.records(), *self.study.confirmations()))
        series = self._series(since, is_anew)
        is_first = True
        while (run := self._plan(series, since).next_run()) is not None:
            if self.should_stop():
                return False
            if is_first:
                self._begin(self._plan(series, since))
            self._perform(run)
            is_first = False
        return True

    def _plan(self, series: int, since: int) -> Plan:
        study = self.study
        ranking = rank(study.records(), study.definition, study.confirmations())
        return Plan(ranking, self.budget, series, since)

    def _series(self, since: int, is_anew: bool) -> int:
        """Return which series goes on, or is begun: after a further search, or anew."""
        known = Confirmations(self.study.confirmations())
        if not known.newest:
            return 1
        if self._plan(known.newest, since).next_run() is None:
            return known.newest + is_anew
        searched = max(record.number for record in self.study.records())
        return known.newest + (searched > max(record.number for record in known.records))

    def _begin(self, plan: Plan) -> None:
        self.runner.renew()
        numbers = tuple(record.number for record in plan.contenders())
        self.on_event(ConfirmationStarted(series=plan.series, numbers=numbers))

    def _perform(self, run: NextRun) -> None:
        """Run one configuration and store how that ended, before anything else happens."""
        begun, started_at = self.clock(), datetime.now(UTC).isoformat(timespec="milliseconds")
        handle = self.study.ask_again()
        self.study.begin(handle, run.config, started_at, errand=run.errand)
        attempt = attempts(self.study.on_errand(run.errand), run.config) + 1
        is_baseline = run.config == self.study.definition.space.baseline_config()
        self.on_event(TrialStarted(handle.number, run.config, is_baseline, attempt, run.errand))
        launched = self.clock()
        outcome = _sound(self._measure(run, handle.number))
        record = TrialRecord(
            number=handle.number,
            config=run.config,
            outcome=outcome,
            is_baseline=is_baseline,
            attempt=attempt,
            started_at=started_at,
            wall_seconds=self.clock() - begun,
            device_seconds=self.clock() - launched,
            **run.errand.model_dump(),
        )
        self.study.tell(handle, record)
        self.study.add_wall_seconds(self.clock() - begun)
        if isinstance(outcome, OutOfMemory):
            self.preflight.learn(record)
        self.on_event(TrialFinished(record=record))

    def _measure(self, run: NextRun, number: int) -> Outcome:
        space = self.study.definition.space
        is_soak = run.errand.purpose == "soak"
        steps = (soak_steps if is_soak else run_steps)(space.steps, self.budget)

        def observe(progress: Progress) -> bool:
            self.on_event(TrialProgress(number=number, progress=progress))
            return False

        return run_undisturbed(
            lambda: held_to_budget(
                self.runner.run(run.config, steps=steps, observe=observe, is_soak=is_soak),
                budget_bytes=self.study.definition.target.budget_bytes,
            ),
            should_stop=self.should_stop,
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


def soak_steps(steps: StepBudget, budget: ConfirmBudget) -> StepBudget:
    """Return how long a soak trains."""
    return steps.model_copy(
        update={
            "measured_min": min(steps.measured_min, budget.soak_steps),
            "measured_max": budget.soak_steps,
            "seconds_max": budget.soak_seconds,
        }
    )
