"""The decision to stop a running trial that can no longer matter.

A function of values rather than an Optuna pruner: those read reported values back from storage and
refuse studies with several objectives.
"""

from __future__ import annotations

from collections.abc import Iterable, Sequence
from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.space import Objective
from storage.definition import StudyDefinition
from storage.objectives import CONCLUSIVE
from storage.ranking import rank
from storage.records import TrialRecord, Verdict
from sweep.running.wire import Progress
from sweep.sampling.encoding import identity

SPEED_MARGIN = 0.02
"""A trial whose best case is this close to a rival goes on: that is a tie, and ties are shown."""


LOSS_MARGIN = 1.0
"""The same where a held-out loss is asked for as well: only what is less than half as fast goes
untrained. A slow configuration may learn more, and nobody takes one that takes twice as long."""


@dataclass(frozen=True)
class Rival:
    """A finished trial that fits: what a running one would have to beat."""

    config: TrialConfig
    tokens_per_second: float
    """The slow end of its 95 % interval: what it reached for sure."""
    peak_allocated_bytes: int


class Rivals:
    """The trials of a space that ran to the end within the budget, at a known speed: what a running
    one has to beat. Told each trial once.

    A configuration counts by the last trial of it that came to a conclusion, as in the ranking.

    Args:
        definition: the study's.
        records: trials of the search so far.
        confirmations: what measured some of them again, before this search.
    """

    def __init__(
        self,
        definition: StudyDefinition,
        records: Iterable[TrialRecord] = (),
        *,
        confirmations: Sequence[TrialRecord] = (),
    ) -> None:
        self._definition = definition
        self._confirmations = tuple(confirmations)
        self._space = rank((), definition)
        self._known: dict[str, Rival] = {}
        """By the identity of what they were of."""
        self._learn(records)

    def learn(self, record: TrialRecord) -> None:
        """Take in a finished trial of the search, later than every one before."""
        self._learn((record,))

    def _learn(self, records: Iterable[TrialRecord]) -> None:
        """Take in trials as they are ranked, but with the speed that the search measured: what runs
        is measured by the search as well."""
        told = {record.number: record for record in records}
        ranking = rank(told.values(), self._definition, self._confirmations)
        for ranked in ranking.records:
            record = ranked if ranked.number in ranking.fallen else told[ranked.number]
            if record.verdict not in CONCLUSIVE or not self._space.holds(record.config):
                continue
            key, measured = identity(record.config), record.measurement
            self._known.pop(key, None)
            interval = None if measured is None else measured.speed_interval
            if record.verdict is Verdict.FITS and measured is not None and interval is not None:
                peak = measured.peak_allocated_bytes
                self._known[key] = Rival(record.config, interval[0], peak)

    def of(self, config: TrialConfig) -> tuple[Rival, ...]:
        """Return what a running trial has to beat.

        A baseline outside the space cannot win it, so it stops nothing either. A speed without an
        interval beats nobody for sure. What is of the baseline's capacity class is stopped by its
        like alone: the fastest of that class is asked for though smaller adapters are faster. Where
        another GPU stands in for the target, speeds compare within a class of numerics alone.
        """
        is_own = self._space.is_of_baselines_class(config)
        is_target = self._definition.target.emulated_on is None
        return tuple(
            rival
            for rival in self._known.values()
            if (is_target or rival.config.numerics == config.numerics)
            and (not is_own or self._space.is_of_baselines_class(rival.config))
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
    needed = max(margin, LOSS_MARGIN) if "eval_loss" in objectives else margin
    return any(
        rival.tokens_per_second > high * (1.0 + needed)
        and all(_is_as_good(rival, objective, progress, config) for objective in objectives)
        for rival in rivals
    )


def _is_as_good(
    rival: Rival, objective: Objective, progress: Progress, config: TrialConfig
) -> bool:
    """Whether a faster ``rival`` is as good as the trial can become; doubt is for the trial."""
    if objective == "peak_memory":
        # What is allocated by now bounds the peak from below: it can only get worse.
        known = progress.allocated_bytes
        return known is not None and rival.peak_allocated_bytes <= known
    if objective == "trainable_parameters":
        # A running trial does not report its count; equal adapters have equal counts.
        return config.capacity() == rival.config.capacity()
    # In speed the rival is ahead already. What a trial would learn nobody knows: how far behind it
    # is decides, by `LOSS_MARGIN`.
    return True
