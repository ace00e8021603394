"""Owns the decision to stop a running trial that can no longer matter.

A function of values rather than an Optuna pruner: those read reported values back from storage and
refuse studies with several objectives. Knows nothing of runners, processes or storage.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.space import Objective
from storage.ranking import Ranking
from storage.records import TrialRecord
from sweep.running.runner import Progress

SPEED_MARGIN = 0.02
"""A trial whose best case is this close to a rival goes on: that is a tie, and ties are shown."""


@dataclass(frozen=True)
class Rival:
    """A finished trial that fits: what a running one would have to beat."""

    config: TrialConfig
    tokens_per_second: float
    """The slow end of its 95 % interval: what it reached for sure."""
    peak_allocated_bytes: int


def rivals_among(ranking: Ranking, *, of: TrialConfig) -> tuple[Rival, ...]:
    """Return the trials of the space that ran to the end within the budget, at a known speed.

    A baseline outside the space cannot win it, so it stops nothing either. A speed without an
    interval beats nobody for sure. What is of the baseline's capacity class is stopped by its like
    alone: the fastest of that class is asked for though smaller adapters are faster.
    """
    is_of_class = ranking.is_of_baselines_class
    among = [r for r in ranking.ranked if not is_of_class(of) or is_of_class(r.config)]
    rivals = (_rival(record) for record in among)
    return tuple(rival for rival in rivals if rival is not None)


def _rival(record: TrialRecord) -> Rival | None:
    interval = None if record.measurement is None else record.measurement.speed_interval
    if record.measurement is None or interval is None:
        return None
    return Rival(
        config=record.config,
        tokens_per_second=interval[0],
        peak_allocated_bytes=record.measurement.peak_allocated_bytes,
    )


def is_hopeless(
    progress: Progress,
    *,
    config: TrialConfig,
    rivals: Iterable[Rival],
    objectives: Sequence[Objective] = ("tokens_per_second",),
    margin: float = SPEED_MARGIN,
) -> bool:
    """Return whether a rival beats the trial in every objective even in the trial's best case.

    Only where speed is among what is asked for: a slow trial may still need the least memory.

    The best case is the fast end of the median's 95 % interval. Before there are steps enough for
    one it is a generous guess, so that only a trial that is far behind is stopped by it; during the
    warm-up there is none, as those steps are not the rate.

    Args:
        progress: the newest sign of life; `tokens_per_second_high` is the trial's best case.
        config: what is running.
        rivals: what has been measured so far.
        objectives: the study's; where there are several, a rival has to dominate (Pareto).
        margin: share by which a rival must be faster than the best case.
    """
    high = progress.tokens_per_second_high
    if progress.phase != "measure" or high is None or "tokens_per_second" not in objectives:
        return False
    return any(
        rival.tokens_per_second > high * (1.0 + margin)
        and all(_is_as_good(rival, objective, progress, config) for objective in objectives)
        for rival in rivals
    )


def _is_as_good(
    rival: Rival, objective: Objective, progress: Progress, config: TrialConfig
) -> bool:
    """Whether a faster ``rival`` is as good as the trial can become; doubt is for the trial."""
    match objective:
        case "tokens_per_second":
            return True
        case "peak_memory":
            # What is allocated by now bounds the peak from below: it can only get worse.
            known = progress.allocated_bytes
            return known is not None and rival.peak_allocated_bytes <= known
        case "trainable_parameters":
            # A running trial does not report its count; equal adapters have equal counts.
            return config.capacity() == rival.config.capacity()
        case _:
            return True  # Speed, in which the rival is ahead already.
