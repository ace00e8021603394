"""What a study's winner gained over its baseline. Pure.

Rank and target modules cost speed and buy capacity, so a gain is stated within one capacity class.
What a winner of another class than the baseline's gained is stated over the baseline's recipe in
the winner's class. Noise widens its interval; only where that holds 1 is no gain stated.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from search_spaces.config import canonical
from storage.confirmations import Ratio
from storage.ranking import Ranking
from storage.records import TrialRecord

NoGain = Literal["no_winner", "not_measured", "did_not_fit", "not_shown"]
"""Why a gain is not stated: nothing fits, what it would be over was not measured or did not fit,
or the interval of the ratio holds 1."""


@dataclass(frozen=True)
class Comparison:
    """A study's winner, set against its baseline."""

    baseline: TrialRecord
    gain: Ratio | None
    """The winner's, within its capacity class; None where `reason` says why."""
    reason: NoGain | None
    over: TrialRecord | None = None
    """What that is over: the baseline, or its recipe in the winner's class; None where the recipe
    was not measured beside the winner."""
    fastest_of_class: TrialRecord | None = None
    """The fastest trial of the space in the baseline's class, where the winner is in another."""
    class_gain: Ratio | None = None
    """That trial's; None where it is not stated."""

    @property
    def is_over_the_baseline(self) -> bool:
        """Whether the gain is over the baseline itself, not its recipe in the winner's class."""
        return self.over is not None and self.over.number == self.baseline.number


def compare(ranking: Ranking) -> Comparison | None:
    """Return what the winner gained over the baseline; None where that was not measured."""
    baseline, winner = ranking.baseline, ranking.winner
    if baseline is None:
        return None
    if winner is None:
        return Comparison(baseline, None, "no_winner")
    over = ranking.reference_for(winner.config)
    gain, reason = gain_of(ranking, winner)
    if ranking.is_in_baselines_class(winner):
        return Comparison(baseline, gain, reason, over)
    fastest = ranking.fastest_of_baselines_class
    class_gain = None if fastest is None else gain_of(ranking, fastest)[0]
    return Comparison(baseline, gain, reason, over, fastest, class_gain)


def gain_of(ranking: Ranking, trial: TrialRecord) -> tuple[Ratio | None, NoGain | None]:
    """Return what a trial gained within its capacity class, or why that is not stated."""
    over = ranking.reference_for(trial.config)
    if over is None:
        fell = canonical(ranking.recipe_for(trial.config)) in ranking.confirmations.fallen
        return None, "did_not_fit" if fell else "not_measured"
    ratio = ranking.ratio(trial, over)
    is_itself = canonical(trial.config) == canonical(over.config)
    return (None, "not_shown") if ratio.is_open and not is_itself else (ratio, None)
