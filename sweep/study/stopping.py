"""When the search of a study ends: its trials, its time or its money are spent, nothing is left to
try, or nothing that is left is worth a trial.
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.knobs import EIGHT_BIT
from search_spaces.prices import load_prices
from search_spaces.space import SearchSpace
from storage.ranking import Ranking
from storage.records import TrialRecord, Verdict
from sweep.paths import own_price_file
from sweep.sampling.guided import Outlook
from sweep.study.events import StopReason

CLASS_TRIALS_MAX = 2
"""Of a class that is owed a trial, where nothing of it was measured to the end."""


@dataclass(frozen=True)
class Spent:
    """What a search has used up so far."""

    trials: int
    seconds: float
    """Of this run."""


@dataclass(frozen=True)
class Stopping:
    """When a search ends.

    Args:
        space: says how many trials, how long, for how much, and down to what gain.
        usd_per_hour: price of the GPU that runs it; None where nothing is to be limited by it.
        outlook: says what is still to be gained by what all trials say, or all but that of a
            number; None from samplers that cannot tell.
        fastest_of: says what is expected to be the fastest of some configurations that were not
            tried; None from samplers that cannot tell, and where none is left.
    """

    space: SearchSpace
    usd_per_hour: float | None = None
    outlook: Callable[[int | None], Outlook | None] = lambda _: None
    fastest_of: Callable[[Callable[[TrialConfig], bool]], TrialConfig | None] = lambda _: None

    def out_of_time(self, spent: Spent) -> StopReason | None:
        """Return why even a failed trial is not tried again; None where time is left."""
        limit = self.space.time_budget_seconds
        return StopReason.TIME_SPENT if limit is not None and spent.seconds >= limit else None

    def out_of_trials(
        self, spent: Spent, *, is_exhausted: Callable[[], bool], records: Sequence[TrialRecord]
    ) -> StopReason | None:
        """Return why no further configuration is tried; None where one should be."""
        if spent.trials >= self.space.trials:
            return StopReason.TRIALS_SPENT
        if is_exhausted():
            return StopReason.EXHAUSTED
        # The baseline alone says little, and where nothing can fit one verdict has to say so.
        is_begun = any(not record.is_baseline for record in records)
        # Twice in a row: one trial may make believe that there is nothing left, and the next may
        # show otherwise. On 24 replays that left 0.02 % to be found instead of 0.3 %.
        if is_begun and self._is_little_left(None) and self._is_little_left(records[-1].number):
            return StopReason.GAIN_SPENT
        return None

    def still_owed(self, ranking: Ranking) -> TrialConfig | None:
        """Return what is tried before a search ends for want of gain; None for nothing.

        Whoever asked with a rank and target modules in mind wants the fastest of them, though those
        of less capacity are faster: the most promising of the baseline's class is measured, or a
        second one where that came to nothing. So is that of each class of numerics where another
        GPU stands in for the target: which of them is faster there is not measured here.
        """
        winner, searched = ranking.winner, [r for r in ranking.of_space if not r.is_baseline]
        if winner is None or self.space.objectives != ("tokens_per_second",):
            return None
        wanted: list[Callable[[TrialConfig], bool]] = []
        if not ranking.is_of_baselines_class(winner.config):
            wanted.append(ranking.is_of_baselines_class)
        if ranking.definition.target.emulated_on is not None:
            others = sorted({"16-bit", *EIGHT_BIT} - {winner.config.numerics})
            wanted += map(_computing_in, others)
        for is_wanted in wanted:
            tried = [record for record in searched if is_wanted(record.config)]
            is_measured = any(record.verdict is Verdict.FITS for record in tried)
            if is_measured or len(tried) >= CLASS_TRIALS_MAX:
                continue
            if (owed := self.fastest_of(is_wanted)) is not None:
                return owed
        return None

    def _is_little_left(self, besides: int | None) -> bool:
        """Whether too little is to be gained by what the trials say, one of them apart."""
        outlook = self.outlook(besides) if self.space.stop_below_gain > 0 else None
        return outlook is not None and outlook.gain < self.space.stop_below_gain


def _computing_in(numerics: str) -> Callable[[TrialConfig], bool]:
    return lambda config: config.numerics == numerics


def outlook_document(reason: StopReason, outlook: Outlook | None) -> dict[str, Any]:
    """Return what a study keeps of why its search ended, in plain JSON values.

    ``gain`` is expected over all cases: the chance that the most promising is better, times what is
    gained where it is, which is ``gain_if_better``.
    """
    if outlook is None or outlook.config is None:
        return {
            "reason": str(reason),
            "open": None if outlook is None else 0,
            "most_promising": None,
        }
    return {
        "reason": str(reason),
        "open": outlook.open,
        "looked_at": outlook.looked_at,
        "most_promising": {
            "config": outlook.config.model_dump(mode="json"),
            "chance": outlook.chance,
            # Infinite where nothing fits yet, which JSON has no number for.
            "gain": outlook.gain if outlook.gain < float("inf") else None,
            "gain_if_better": _gain_if_better(outlook),
        },
    }


def _gain_if_better(outlook: Outlook) -> float | None:
    if outlook.chance <= 0 or outlook.gain == float("inf"):
        return None
    return outlook.gain / outlook.chance


def price_of(space: SearchSpace, *, gpu: str) -> float | None:
    """Return what an hour of a GPU costs at least; None where nobody set a limit.

    Raises:
        InputError: a limit in dollars is set, and no price is known.
    """
    if space.max_dollars is None:
        return None
    offers = load_prices(own_price_file()).get(gpu)
    if not offers:
        raise InputError(
            f"space '{space.name}': max_dollars {space.max_dollars:g}: no price is known for "
            f"'{gpu}': put one into runs/prices.yaml, or set a time_budget instead"
        )
    return min(offer.usd_per_hour for offer in offers)
