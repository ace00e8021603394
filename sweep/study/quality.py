"""On how many tokens the trials of a study train, where it asks what configurations learn.

Every trial that fits and is not far behind trains on the same tokens in the same order, so that
their held-out losses compare.
"""

from __future__ import annotations

from math import floor, log10

from search_spaces.config import TrialConfig
from search_spaces.space import SearchSpace
from storage.records import EpochRecord, Measured, Outcome
from storage.study import OpenStudy
from sweep.running.wire import QualityCommand

SECONDS = 60.0
"""What a trial's training is to take where nobody said on how many tokens."""
TOKENS_MIN = 256


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


def quality_command(space: SearchSpace, *, tokens: int, seed: int) -> QualityCommand:
    """Return what a trial is asked to learn with the seed of its adapters and order."""
    return QualityCommand(tokens=tokens, seed=seed, eval_seq_len=eval_seq_len(space))


class Quality:
    """What the trials of one study are asked to learn."""

    def __init__(self, study: OpenStudy) -> None:
        self._study = study
        self._space = study.definition.space
        self.is_asked = is_asked(self._space)
        """Whether anything is asked at all."""
        self.tokens = tokens_of(study) if self.is_asked else None
        """Tokens that carry loss that every trial trains on; None before that is known."""

    def command(self) -> QualityCommand | None:
        """Return what a trial of the search is asked; None where nothing is, or before the tokens
        are known."""
        if self.tokens is None:
            return None
        return quality_command(self._space, tokens=self.tokens, seed=self._space.seed)

    def choose(self, outcome: Outcome, epoch: EpochRecord | None) -> bool:
        """Fix the tokens by the first configuration that fits; return whether that was done now."""
        if not self.is_asked or self.tokens is not None or not isinstance(outcome, Measured):
            return False
        self.tokens = default_tokens(outcome.measurement.tokens_per_second, epoch)
        self._study.note_quality_tokens(self.tokens)
        return True


def tokens_of(study: OpenStudy) -> int | None:
    """Return the tokens of a study's trials, as typed or as chosen; None before that."""
    data = study.definition.space.data
    return (data.quality_tokens if data is not None else None) or study.quality_tokens()
