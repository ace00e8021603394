"""Owns what a report says of held-out losses: their words, and what a claim about rank is worth.

Pure: a study's snapshot in, finished text out. Knows nothing of HTML.
"""

from __future__ import annotations

from reports import units
from storage.objectives import measured_of
from storage.ranking import Ranking
from storage.records import Measurement, QualityReport, TrialRecord

CLAIMED_RANK = 16
"""What articles about QLoRA recommend, as a rule without a loss beside it."""


def loss_words(measured: Measurement) -> str:
    """Return a held-out loss with its interval over seeds, where it has one."""
    quality = measured.quality
    return units.DASH if quality is None else quality_words(quality)


def quality_words(quality: QualityReport) -> str:
    """Return a loss and its interval: ``1.9512 (1.948–1.954)``."""
    ends = quality.eval_loss_ci95
    within = "" if ends is None else f" ({ends[0]:.4g}–{ends[1]:.4g})"
    return f"{quality.eval_loss:.4f}{within}"


def lowest_by_rank(ranking: Ranking) -> dict[int, TrialRecord]:
    """Return the trial with the lowest held-out loss of each rank, the smallest rank first.

    Of one rank a trial with several seeds stands before one that was lucky with one.
    """
    judged = [r for r in ranking.ranked if measured_of(r).quality is not None]
    lowest: dict[int, TrialRecord] = {}
    for record in sorted(judged, key=lambda r: (not _seeds(r), _quality(r).eval_loss)):
        lowest.setdefault(record.config.lora_rank, record)
    return dict(sorted(lowest.items()))


def rank_claim(ranking: Ranking) -> str:
    """Return what "rank 16 is the best" is worth on these texts, as far as was measured."""
    lowest = lowest_by_rank(ranking)
    own = lowest.pop(CLAIMED_RANK, None)
    claim = f'"Rank {CLAIMED_RANK} is the best", as articles have it'
    if own is None or not lowest:
        missing = f"rank {CLAIMED_RANK}" if own is None else "any other rank"
        return f"{claim}: not judged, as {missing} was not trained here."
    other = min(lowest.values(), key=lambda r: _quality(r).eval_loss)
    mine, theirs = _quality(own), _quality(other)
    return (
        f"{claim}: {_verdict(mine, theirs)} on these texts. After "
        f"{mine.train_tokens:,} tokens its lowest held-out loss is {_at(own)}; of the other ranks "
        f"rank {other.config.lora_rank} has the lowest, {_at(other)}."
    )


def _verdict(mine: QualityReport, theirs: QualityReport) -> str:
    ends, others = mine.eval_loss_ci95, theirs.eval_loss_ci95
    if ends is None or others is None:
        return "not judged, as not both were trained with several seeds,"
    if ends[0] <= others[1] and others[0] <= ends[1]:
        return "not to be told, as the intervals over seeds overlap,"
    return "confirmed" if mine.eval_loss < theirs.eval_loss else "refuted"


def _at(record: TrialRecord) -> str:
    speed = units.rate(measured_of(record).tokens_per_second)
    return f"{quality_words(_quality(record))} (trial {record.number}, {speed} tokens/s)"


def _seeds(record: TrialRecord) -> int:
    return len(_quality(record).seeds)


def _quality(record: TrialRecord) -> QualityReport:
    quality = measured_of(record).quality
    assert quality is not None, "only judged trials are compared by loss"
    return quality
