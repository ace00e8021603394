"""Owns what a study's winner gained over its baseline, or why that is not stated. Pure.

Rank and target modules cost speed and buy capacity, so a gain is stated within one capacity class,
and only where both were measured again and both speeds are sure enough. What a winner of another
class than the baseline's gained is stated over the baseline's recipe in the winner's class. Knows
nothing of words.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from search_spaces.config import canonical
from storage.objectives import measured_of
from storage.ranking import Ranking
from storage.records import TrialRecord

NoGain = Literal[
    "no_winner",
    "not_confirmed",
    "baseline_not_confirmed",
    "another_class",
    "recipe_did_not_fit",
    "noisy_winner",
    "noisy_baseline",
    "noisy_both",
]
"""Why a gain is not stated."""


@dataclass(frozen=True)
class Gain:
    """The speed of one trial over that of the baseline."""

    trial: TrialRecord
    ratio: float
    low: float
    """The trial's slow end over the baseline's fast one."""
    high: float
    """The trial's fast end over the baseline's slow one."""


@dataclass(frozen=True)
class Comparison:
    """A study's winner, set against its baseline."""

    baseline: TrialRecord
    gain: Gain | None
    """The winner's, within its capacity class; None where `reason` says why."""
    reason: NoGain | None
    over: TrialRecord | None = None
    """What that is over: the baseline, or its recipe in the winner's class; None where the recipe
    was not measured beside the winner."""
    fastest_of_class: TrialRecord | None = None
    """The fastest trial of the space in the baseline's class, where the winner is in another."""
    class_gain: Gain | None = None
    """That trial's; None where its speed or the baseline's is too unsure, or not confirmed."""

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
    class_gain = gain_of(ranking, fastest)[0] if fastest and ranking.is_confirmed else None
    return Comparison(baseline, gain, reason, over, fastest, class_gain)


def gain_of(ranking: Ranking, trial: TrialRecord) -> tuple[Gain | None, NoGain | None]:
    """Return what a trial gained within its capacity class, or why that is not stated."""
    over = ranking.reference_for(trial.config)
    reason = _doubt(ranking, trial, over)
    if reason is not None or over is None:
        return None, reason
    return _gain(trial, over), None


def _doubt(ranking: Ranking, trial: TrialRecord, over: TrialRecord | None) -> NoGain | None:
    """Return why a trial's gain is not stated; None where it is."""
    is_winner = ranking.winner is not None and trial.number == ranking.winner.number
    if over is None and not ranking.is_of_baselines_class(trial.config):
        has_fallen = canonical(ranking.recipe_for(trial.config)) in ranking.confirmations.fallen
        return "recipe_did_not_fit" if has_fallen else "another_class"
    if over is None or not ranking.is_measured_again(trial):
        return "not_confirmed"
    noise = _noise(trial, over)
    if noise is not None:
        return noise
    if is_winner and not ranking.is_confirmed:
        return "not_confirmed"
    # A recipe that no search asked for was measured beside the winner and at no other time.
    is_again = over.purpose == "confirm" or ranking.is_measured_again(over)
    return None if is_again else "baseline_not_confirmed"


def _noise(trial: TrialRecord, baseline: TrialRecord) -> NoGain | None:
    match measured_of(trial).is_noisy, measured_of(baseline).is_noisy:
        case True, True:
            return "noisy_winner" if trial.number == baseline.number else "noisy_both"
        case True, False:
            return "noisy_winner"
        case False, True:
            return "noisy_baseline"
        case _:
            return None


def _gain(trial: TrialRecord, baseline: TrialRecord) -> Gain | None:
    mine, theirs = measured_of(trial), measured_of(baseline)
    if mine.is_noisy or theirs.is_noisy:
        return None
    if trial.number == baseline.number:
        return Gain(trial, 1.0, 1.0, 1.0)
    my_ends, their_ends = mine.speed_interval, theirs.speed_interval
    if my_ends is None or their_ends is None:
        return None
    return Gain(
        trial,
        ratio=mine.tokens_per_second / theirs.tokens_per_second,
        low=my_ends[0] / their_ends[1],
        high=my_ends[1] / their_ends[0],
    )
