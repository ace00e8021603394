"""What follows a search: its winner is measured again, beside what may be as fast, and soaked.

Which run is next is `confirmation_plan`'s to say.
"""

from __future__ import annotations

from qlora_sweep.search_spaces.space import ConfirmBudget
from qlora_sweep.storage.confirmations import Confirmations
from qlora_sweep.storage.ledger import next_number
from qlora_sweep.storage.ranking import Ranking, rank
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.sweep.planning.evidence import target_speeds
from qlora_sweep.sweep.running.runner import Lane
from qlora_sweep.sweep.study.confirmation_plan import ConfirmationPlan
from qlora_sweep.sweep.study.driver import Driver, TrialSource, Wanted, tokens_of
from qlora_sweep.sweep.study.events import ConfirmationStarted, StopReason


def ranking_of(study: OpenStudy) -> Ranking:
    """Return the order of a study's trials as it stands, the same that every reader sees."""
    records = study.records()
    confirmations = study.confirmations()
    speeds = target_speeds(study.definition, records + confirmations)
    return rank(records, study.definition, confirmations, target_speeds=speeds)


class Confirmation(TrialSource):
    """Wants a study's winner measured again, soaked and trained with several seeds.

    On one lane while nothing runs on the others, so that what is compared is measured on the same
    GPU, with no other job on it. Nothing is run where the space says so, where nothing fits, or
    where it was all done before. It takes what is left of the run's time, with fewer rounds, a
    shorter soak or none.

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
        self._budget = driver.space.confirm
        if is_anew and self._budget is None:
            self._budget = ConfirmBudget()
        self._lane: Lane | None = None
        """Where it is measured; None before anything is."""
        self._since = 0
        self._series = 0

    def next(self, lane: Lane) -> Wanted | StopReason | None:
        """Return the next run, or that all is done."""
        if self._budget is None:
            return self._then
        if lane is not self._driver.lanes.working[0]:
            return None
        is_first = lane is not self._lane
        if is_first:
            self._since = next_number(self._study.ledger.all)
            self._series = self._series_on(lane, self._budget)
        plan = self._plan(self._series, self._budget).within(self._driver.time.left_seconds)
        wanted = plan.next_run()
        if wanted is None:
            return self._then
        reason = self._driver.reason_to_stop()
        if reason is not None:
            return reason
        wanted = plan.in_time(wanted, self._driver.time.left_seconds)
        if wanted is None:
            return self._driver.time.reason
        if is_first:
            self._lane = lane
            self._announce(plan)
        return wanted

    def _announce(self, plan: ConfirmationPlan) -> None:
        numbers = []
        recipes = []
        for contender in plan.contenders:
            if contender.number is None:
                recipes.append(contender.config)
            else:
                numbers.append(contender.number)
        event = ConfirmationStarted(self._series, tuple(numbers), tuple(recipes))
        self._driver.on_event(event)

    def _plan(self, series: int, budget: ConfirmBudget) -> ConfirmationPlan:
        tokens = tokens_of(self._study)
        return ConfirmationPlan(ranking_of(self._study), budget, series, self._since, tokens)

    def _series_on(self, lane: Lane, budget: ConfirmBudget) -> int:
        """Return which series is continued, or begun: after a further search, on another GPU (no
        two are as fast), or anew."""
        confirmations = Confirmations(self._study.confirmations())
        newest = confirmations.newest
        if not newest:
            return 1
        run = self._plan(newest, budget).next_run()
        if run is None and self._is_anew:
            return newest + 1
        if run is None:
            return newest
        if run.run_kind.purpose != "quality" and self._was_elsewhere(lane, confirmations):
            return newest + 1
        last_search = max(record.number for record in self._study.records())
        last_run = max(record.number for record in confirmations.records)
        if last_search > last_run:
            return newest + 1
        return newest

    def _was_elsewhere(self, lane: Lane, confirmations: Confirmations) -> bool:
        """Whether a run of the newest series was measured on another GPU than a lane's."""
        if not lane.name:
            return False
        return any(
            record.ran_on not in ("", None, lane.name)
            for record in confirmations.records
            if record.series == confirmations.newest and record.measurement
        )
