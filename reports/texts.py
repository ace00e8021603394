"""Owns what a report says of a study's texts: what they are, and what the winner makes of them.

Pure: a study's snapshot in, finished text out. Knows nothing of HTML or of the terminal.
"""

from __future__ import annotations

from dataclasses import dataclass
from pathlib import Path

from reports import units
from search_spaces.texts import TextsSummary
from storage.definition import StudySnapshot
from storage.epochs import EpochCost, epoch_cost
from storage.objectives import measured_of
from storage.ranking import rank_study
from storage.records import EpochRecord, TrialRecord


@dataclass(frozen=True)
class TextsSection:
    """The texts of a study, as the page shows them."""

    title: str
    facts: tuple[tuple[str, str], ...]
    """Name and value of each."""
    cuts: tuple[tuple[str, str, str, str, str], ...]
    """Of each length that was measured: length, trial, tokens/s, share of the tokens that it cuts
    off or leaves out, epoch."""


def texts_of(snapshot: StudySnapshot) -> TextsSection | None:
    """Return what the report says of a study's texts; None of a study without."""
    texts = snapshot.definition.texts
    if texts is None:
        return None
    winner = rank_study(snapshot).winner
    cut = None if winner is None else cut_words(winner)
    facts = [
        ("texts", f"{texts.source}: {_kind(texts)}"),
        ("rows", _rows(texts)),
        ("tokens", f"{texts.tokens:,}, of which {texts.loss_tokens:,} carry loss"),
        ("lengths", lengths_words(texts)),
        ("held out", _held_out(snapshot)),
        ("tokenizer", texts.tokenizer),
        ("fingerprint", texts.fingerprint),
    ]
    if cut is not None:
        facts.append(("cut by the winner", cut))
    return TextsSection(f"Texts: {Path(texts.source).name}", tuple(facts), _by_length(snapshot))


def _kind(texts: TextsSummary) -> str:
    what = "loss on completions alone" if texts.completions_only else "loss on every token"
    return f"{texts.kind}, {what}"


def _rows(texts: TextsSummary) -> str:
    broken = f", and {texts.broken:,} that cannot be trained on" if texts.broken else ""
    return f"{texts.rows:,}{broken}"


def _held_out(snapshot: StudySnapshot) -> str:
    choice = snapshot.definition.space.data
    share = 0.0 if choice is None else choice.eval_fraction
    return f"{units.share(share)} of the rows; none of them is part of an epoch"


def lengths_words(texts: TextsSummary) -> str:
    """Return how long rows are: half of them up to so many tokens, and so on."""
    q = texts.quantiles
    return (
        f"half of the rows up to {q.p50:,} tokens, 95 % up to {q.p95:,}, 99 % up to {q.p99:,}, the "
        f"longest {q.max:,}"
    )


def cut_words(record: TrialRecord) -> str | None:
    """Return what a trial's length cuts off the texts; None without texts."""
    return None if record.epoch is None else cut_in_words(record.epoch, record.config.seq_len)


def cut_in_words(epoch: EpochRecord, seq_len: int) -> str:
    """Return what a length cuts off the texts, in tokens and in rows."""
    length, of = units.count(seq_len), epoch.rows + epoch.rows_left_out
    cut = (
        f"length {length} cuts off {units.share(epoch.tokens_cut)} of the tokens "
        f"({epoch.rows_cut:,} of {of:,} training rows)"
        if epoch.rows_cut
        else f"length {length} cuts nothing off"
    )
    if not epoch.rows_left_out:
        return cut
    tokens = f"{units.share(epoch.tokens_left_out)} of the tokens"
    what, them = ("row", "it") if epoch.rows_left_out == 1 else ("rows", "them")
    return (
        f"{cut}; {epoch.rows_left_out:,}{' more' if epoch.rows_cut else ''} {what}, {tokens}, left "
        f"out: nothing to learn is left of {them}"
    )


def epoch_words(snapshot: StudySnapshot, record: TrialRecord) -> str | None:
    """Return what an epoch of the texts takes as a trial trains: time, dollars, tokens.

    None of a study without texts, and where the speed on the target GPU is not known.
    """
    cost = epoch_cost(snapshot, record)
    if cost is None or cost.seconds is None:
        return None
    return f"{units.duration(cost.seconds)}, {epoch_details(cost, record)}"


def epoch_details(cost: EpochCost, record: TrialRecord) -> str:
    """Return what stands beside the time of an epoch: its ends, dollars, tokens and what is cut."""
    parts = []
    if cost.seconds_low is not None and cost.seconds_high is not None:
        parts.append(f"{units.duration(cost.seconds_low)}–{units.duration(cost.seconds_high)}")
    if cost.dollars is not None:
        parts.append(units.usd(cost.dollars))
    parts.append(f"{cost.record.loss_tokens:,} tokens that carry loss")
    return f"{', '.join(parts)}; {cut_words(record)}"


def _by_length(snapshot: StudySnapshot) -> tuple[tuple[str, str, str, str, str], ...]:
    """Return the fastest of each length, with what that length cuts off."""
    ranking = rank_study(snapshot)
    fastest: dict[int, TrialRecord] = {}
    for record in sorted(ranking.ranked, key=lambda r: -measured_of(r).tokens_per_second):
        if record.epoch is not None:
            fastest.setdefault(record.config.seq_len, record)
    return tuple(
        (
            units.count(length),
            str(record.number),
            units.rate(measured_of(record).tokens_per_second),
            _lost(record.epoch),
            _epoch_time(snapshot, record),
        )
        for length, record in sorted(fastest.items())
    )


def _lost(epoch: EpochRecord | None) -> str:
    return units.DASH if epoch is None else units.share(epoch.tokens_cut + epoch.tokens_left_out)


def _epoch_time(snapshot: StudySnapshot, record: TrialRecord) -> str:
    cost = epoch_cost(snapshot, record)
    if cost is None or cost.seconds is None:
        return units.DASH
    money = "" if cost.dollars is None else f", {units.usd(cost.dollars)}"
    return f"{units.duration(cost.seconds)}{money}"
