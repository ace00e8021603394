"""Owns which of several GPUs is the cheapest and which the soonest, and what cannot be told. Pure.

Speeds are compared on one ground: a model, a capacity class, a length. Nothing is claimed inside
the uncertainty of the speeds: not who is cheaper, and not where two GPUs change places. Knows
nothing of pages.
"""

from __future__ import annotations

import math
from collections.abc import Callable, Sequence
from dataclasses import dataclass

from reports.cards import Card, Ground, Option, Range
from reports.decision import Job
from search_spaces.errors import InputError

SECONDS_PER_HOUR = 3600.0


@dataclass(frozen=True)
class Entry:
    """What a GPU is recommended to run on a ground, and what the work takes with it."""

    card: Card
    option: Option
    seconds: Range
    """Of training alone."""
    usd_per_million_tokens: Range | None
    """Of training alone; None where no price is known."""
    usd: Range | None
    """Of the work, with what is billed before the first step."""


@dataclass(frozen=True)
class Leader:
    """Who leads a comparison, surely or not."""

    tied: tuple[Entry, ...]
    """Those of which none is surely behind the first, the likeliest first; alone it leads."""
    behind: tuple[tuple[Entry, Range], ...]
    """The others, each with how many times as much it takes."""

    @property
    def is_sure(self) -> bool:
        """Whether one is ahead of all others beyond the uncertainty of the speeds."""
        return len(self.tied) == 1


@dataclass(frozen=True)
class BreakEven:
    """Where two GPUs change places, in tokens trained."""

    small: Entry
    """The cheaper one below: it costs less before the first step."""
    large: Entry
    """The cheaper one above."""
    tokens: Range


@dataclass(frozen=True)
class Group:
    """The GPUs that can be compared on one ground."""

    ground: Ground
    entries: tuple[Entry, ...]
    """The cheapest first; those without a price last, the fastest of them first."""
    cheapest: Leader | None
    """None where fewer than two prices are known."""
    soonest: Leader
    break_evens: tuple[BreakEven, ...]


@dataclass(frozen=True)
class Comparison:
    """Several GPUs beside each other."""

    cards: tuple[Card, ...]
    job: Job
    groups: tuple[Group, ...]
    """Of at least two GPUs, the one with the most GPUs first."""
    alone: tuple[Entry, ...]
    """The fastest on each ground that a single GPU has."""


def is_asked(job: Job) -> bool:
    """Whether a training was named; else a million tokens are compared."""
    return job.tokens is not None or job.dataset_samples is not None


def tokens_of(job: Job, ground: Ground) -> float:
    """Return how many tokens a training is, over all epochs; its rows are of full length."""
    if job.dataset_samples is not None:
        return job.dataset_samples * ground.seq_len * (job.epochs or 1.0)
    return 1e6 if job.tokens is None else job.tokens * (job.epochs or 1.0)


def compare_cards(cards: Sequence[Card], *, job: Job) -> Comparison:
    """Return what can be told of several GPUs.

    Raises:
        InputError: there are fewer than two.
    """
    if len(cards) < 2:
        raise InputError("comparing takes at least two studies or plans")
    named = _named_apart(cards)
    grounds = dict.fromkeys(option.ground for card in named for option in card.options)
    found = [(ground, _entries(named, ground, job)) for ground in grounds]
    shared = [_group(ground, entries, job) for ground, entries in found if len(entries) > 1]
    return Comparison(
        named,
        job,
        tuple(sorted(shared, key=lambda group: -len(group.entries))),
        tuple(entries[0] for _, entries in found if len(entries) == 1),
    )


def _named_apart(cards: Sequence[Card]) -> tuple[Card, ...]:
    """Return the GPUs, those of one label numbered."""
    labels = [card.label for card in cards]
    return tuple(
        card
        if labels.count(card.label) == 1
        else Card(
            **{**vars(card), "label": f"{card.label} {labels[: place + 1].count(card.label)}"}
        )
        for place, card in enumerate(cards)
    )


def _entries(cards: Sequence[Card], ground: Ground, job: Job) -> tuple[Entry, ...]:
    options = ((card, card.best(ground)) for card in cards)
    entries = [_entry(card, option, job) for card, option in options if option is not None]

    def order(entry: Entry) -> tuple[bool, float]:
        return entry.usd is None, (entry.usd or entry.seconds).value

    return tuple(sorted(entries, key=order))


def _entry(card: Card, option: Option, job: Job) -> Entry:
    tokens, speed = tokens_of(job, option.ground), option.tokens_per_second
    seconds = Range(
        tokens / speed.value,
        tokens / speed.high,
        tokens / speed.low if speed.low > 0 else math.inf,
    )
    if card.rent is None:
        return Entry(card, option, seconds, None, None)
    hour = option.config.data_parallel * card.rent.usd_per_hour
    rate, fixed = hour / SECONDS_PER_HOUR, card.rent.fixed_seconds
    return Entry(
        card,
        option,
        seconds,
        _scaled(seconds, rate * 1e6 / tokens),
        _scaled(seconds, rate, plus=rate * fixed),
    )


def _scaled(known: Range, by: float, *, plus: float = 0.0) -> Range:
    return Range(known.value * by + plus, known.low * by + plus, known.high * by + plus)


def _group(ground: Ground, entries: tuple[Entry, ...], job: Job) -> Group:
    priced = [entry for entry in entries if entry.usd is not None]
    return Group(
        ground,
        entries,
        cheapest=_leader(priced, lambda entry: _dollars(entry, job)) if len(priced) > 1 else None,
        soonest=_leader(entries, lambda entry: entry.seconds),
        break_evens=_break_evens(priced),
    )


def _dollars(entry: Entry, job: Job) -> Range:
    """Return what GPUs are compared by: the bill of the work, of none typed the price of tokens.

    What is paid before the first step is next to nothing for much work and most of it for little.
    """
    known = entry.usd_per_million_tokens if not is_asked(job) else entry.usd
    assert known is not None, "only entries with a price are compared by it"
    return known


def _leader(entries: Sequence[Entry], quantity: Callable[[Entry], Range]) -> Leader:
    """Return who takes the least; whoever may take less than the first is tied with it."""
    ranked = sorted(entries, key=lambda entry: quantity(entry).value)
    first = quantity(ranked[0])
    tied = tuple(entry for entry in ranked if not first.is_below(quantity(entry)))
    behind = tuple((e, quantity(e).over(first)) for e in ranked if first.is_below(quantity(e)))
    return Leader(tied, behind)


def _break_evens(priced: Sequence[Entry]) -> tuple[BreakEven, ...]:
    """Return where the GPU that is cheapest for much work and another one change places.

    A bill is what is paid before the first step and so much a token. The two cross only where the
    one that starts for less surely costs more a token; inside the speeds' uncertainty none is told.
    """
    if len(priced) < 2:
        return ()
    large = min(priced, key=lambda entry: _per_token(entry).value)
    points = (_break_even(small, large) for small in priced if small is not large)
    return tuple(point for point in points if point is not None)


def _per_token(entry: Entry) -> Range:
    assert entry.usd_per_million_tokens is not None, "only entries with a price have a bill"
    return _scaled(entry.usd_per_million_tokens, 1e-6)


def start_usd(entry: Entry) -> float:
    """Return what is paid before the first step."""
    rent = entry.card.rent
    assert rent is not None, "only entries with a price have a bill"
    hour = entry.option.config.data_parallel * rent.usd_per_hour
    return hour / SECONDS_PER_HOUR * rent.fixed_seconds


def _break_even(small: Entry, large: Entry) -> BreakEven | None:
    ahead = start_usd(large) - start_usd(small)
    dear, cheap = _per_token(small), _per_token(large)
    if ahead <= 0 or not cheap.is_below(dear):
        return None
    return BreakEven(
        small,
        large,
        Range(
            ahead / (dear.value - cheap.value),
            ahead / (dear.high - cheap.low),
            ahead / (dear.low - cheap.high),
        ),
    )
