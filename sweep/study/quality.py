"""Owns how a study asks what configurations learn: on how many tokens each trains, and which few
with several seeds.

Every trial that fits and is not far behind trains on the same tokens in the same order, so that
their held-out losses compare. Knows nothing of how a training is run.
"""

from __future__ import annotations

from collections.abc import Collection, Iterator
from dataclasses import dataclass
from math import floor, log10

from search_spaces.config import TrialConfig, canonical
from search_spaces.space import SearchSpace
from storage.objectives import measured_of
from storage.qualities import claimed_pair
from storage.ranking import Ranking
from storage.records import EpochRecord, Measured, TrialRecord
from storage.study import OpenStudy
from sweep.running.wire import QualityCommand

SECONDS = 60.0
"""What a trial's training is to take where nobody said on how many tokens."""
TOKENS_MIN = 256
CONTENDERS_MAX = 5
"""Configurations that are trained with several seeds."""


def is_asked(space: SearchSpace) -> bool:
    """Whether a study asks for held-out losses."""
    return "eval_loss" in space.objectives


def eval_seq_len(space: SearchSpace) -> int:
    """Return the tokens to which held-out texts are cut: the longest that any configuration trains
    at.

    One for all, so that a configuration that trains on short rows answers for long ones too.
    """
    longest = max(space.values_of("seq_len"), default=TrialConfig().seq_len)
    return max(2, longest, space.baseline_config().seq_len)


def default_tokens(tokens_per_second: float, epoch: EpochRecord | None) -> int:
    """Return the tokens of about a minute at a speed, in two digits; no more than an epoch has.

    Args:
        tokens_per_second: of the first configuration that fits, as a rule the baseline.
        epoch: of the texts as that trains on them; None where that is not known.
    """
    wanted = max(TOKENS_MIN, tokens_per_second * SECONDS)
    most = wanted if epoch is None else min(wanted, max(TOKENS_MIN, epoch.loss_tokens))
    unit = 10 ** max(0, floor(log10(most)) - 1)
    return int(most // unit * unit)


@dataclass
class Quality:
    """What the trials of one study are asked to learn."""

    study: OpenStudy
    _tokens: int | None = None

    def __post_init__(self) -> None:
        self._space = self.study.definition.space
        self._data = self._space.data

    @property
    def is_asked(self) -> bool:
        """Whether anything is asked at all."""
        return is_asked(self._space)

    @property
    def tokens(self) -> int | None:
        """Tokens that carry loss that every trial trains on; None before that is known."""
        if self._tokens is None:
            named = None if self._data is None else self._data.quality_tokens
            self._tokens = named or self.study.quality_tokens()
        return self._tokens

    def command(self, *, seed: int | None = None) -> QualityCommand | None:
        """Return what a trial is asked; None where nothing is, or before the tokens are known.

        Args:
            seed: of adapters and order; the study's own for every trial of the search.
        """
        if not self.is_asked or self.tokens is None:
            return None
        own = self._space.seed if seed is None else seed
        length = eval_seq_len(self._space)
        return QualityCommand(tokens=self.tokens, seed=own, eval_seq_len=length)

    def choose(self, outcome: object, epoch: EpochRecord | None) -> bool:
        """Fix the tokens by the first configuration that fits; return whether that was done now."""
        if not self.is_asked or self.tokens is not None or not isinstance(outcome, Measured):
            return False
        self._tokens = default_tokens(outcome.measurement.tokens_per_second, epoch)
        self.study.note_quality_tokens(self._tokens)
        return True


@dataclass(frozen=True)
class Seeds:
    """Which configurations are trained with which further seeds."""

    ranking: Ranking
    first: int
    """The seed of the search."""
    count: int
    """Seeds in all."""

    def next_run(self, failed: Collection[TrialConfig]) -> tuple[TrialRecord, int] | None:
        """Return the next configuration and the seed; None where all is known.

        All configurations take one seed before any takes the next.

        Args:
            failed: canonical configurations whose trainings came to nothing too often.
        """
        for seed in range(self.first + 1, self.first + self.count):
            for record in self.contenders():
                is_failed = canonical(record.config) in failed
                if seed not in self._known(record) and not is_failed:
                    return record, seed
        return None

    def contenders(self) -> tuple[TrialRecord, ...]:
        """Return the few that the choice is between: the knee, the lowest loss, the two over which
        an article's claim about rank is judged, and the fastest of the front."""
        chosen = {record.number: record for record in self._candidates()}
        return tuple(chosen.values())[:CONTENDERS_MAX]

    def _candidates(self) -> Iterator[TrialRecord]:
        front = self.ranking.front or self.ranking.ranked[:1]
        if not front:
            return
        yield front[0]
        yield min(front, key=_loss)
        yield from claimed_pair(self.ranking.ranked) or ()
        yield max(front, key=lambda r: measured_of(r).tokens_per_second)

    def _known(self, record: TrialRecord) -> tuple[int, ...]:
        quality = measured_of(record).quality
        return () if quality is None else quality.seeds or (quality.seed,)


def _loss(record: TrialRecord) -> float:
    quality = measured_of(record).quality
    return float("inf") if quality is None else quality.eval_loss
