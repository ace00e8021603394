"""Owns what a report says of held-out losses: their words, and what a claim about rank is worth.

Pure: a study's snapshot in, finished text out. Knows nothing of HTML.
"""

from __future__ import annotations

from reports import units
from storage.objectives import measured_of
from storage.qualities import CLAIMED_RANK, claimed_pair, differences
from storage.ranking import Ranking
from storage.records import Measurement, QualityReport, TrialRecord


def loss_words(measured: Measurement) -> str:
    """Return a held-out loss with its interval over seeds, where it has one."""
    quality = measured.quality
    return units.DASH if quality is None else quality_words(quality)


def quality_words(quality: QualityReport) -> str:
    """Return a loss and its interval: ``1.9512 (1.948–1.954)``."""
    ends = quality.eval_loss_ci95
    within = "" if ends is None else f" ({ends[0]:.4g}–{ends[1]:.4g})"
    return f"{quality.eval_loss:.4f}{within}"


def rank_claim(ranking: Ranking) -> str:
    """Return what "rank 16 is the best" is worth on these texts, as far as was measured."""
    claim = f'"Rank {CLAIMED_RANK} is the best", as articles have it'
    pair = claimed_pair(ranking.ranked)
    if pair is None:
        judged = [r.config.lora_rank for r in ranking.ranked if measured_of(r).quality]
        missing = "any other rank" if CLAIMED_RANK in judged else f"rank {CLAIMED_RANK}"
        return f"{claim}: not judged, as {missing} was not trained here."
    own, other = pair
    which = "the others" if differences(own, other) else "those that differ in nothing else"
    return (
        f"{claim}: {_verdict(own, other)} on these texts. After {_quality(own).train_tokens:,} "
        f"tokens its held-out loss is {_at(own)}; that of rank {other.config.lora_rank}, the "
        f"lowest of {which}, is {_at(other)}."
    )


def _verdict(own: TrialRecord, other: TrialRecord) -> str:
    also = differences(own, other)
    if also:
        return f"not judged, as no two trials differ in rank alone, but in {', '.join(also)} too,"
    mine, theirs = _quality(own), _quality(other)
    ends, others = mine.eval_loss_ci95, theirs.eval_loss_ci95
    if ends is None or others is None:
        return "not judged, as not both were trained with several seeds,"
    if ends[0] <= others[1] and others[0] <= ends[1]:
        return "not to be told, as the intervals over seeds overlap,"
    return "confirmed" if mine.eval_loss < theirs.eval_loss else "refuted"


def _at(record: TrialRecord) -> str:
    speed = units.rate(measured_of(record).tokens_per_second)
    return f"{quality_words(_quality(record))} (trial {record.number}, {speed} tokens/s)"


def _quality(record: TrialRecord) -> QualityReport:
    quality = measured_of(record).quality
    assert quality is not None, "only judged trials are compared by loss"
    return quality
