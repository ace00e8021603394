"""How the questions backwards are answered: the longest sequences, and the GPUs for a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.text import Text

from reports import units
from search_spaces.gpus import GIB
from search_spaces.prices import PRICE_OPTION
from sweep.planning.backwards import LENGTH_STEP, Cheapest, JobCard, Longest, Outcome
from sweep.planning.candidates import BATCHES_MAX, evenly_spaced
from sweep.terminal.plan.costs import short_usd_range, source_words, usd_range, work_words
from sweep.terminal.plan.forecast import knobs, shared_line, shared_words
from sweep.terminal.plan.layout import Fact, empty_grid, facts
from sweep.terminal.plan.verdict import (
    DETAILS,
    numbers_of,
    offer_words,
    one_pass,
    settings_facts,
    settings_words,
    what_words,
)

LINES_SHOWN = 4
"""Micro-batches of all GPUs, or GPUs, that one screen has room for."""


def longest_views(answers: Sequence[Longest], *, is_detailed: bool) -> RenderableType:
    """Return the longest sequences on each GPU."""
    most = BATCHES_MAX if is_detailed else max(3, LINES_SHOWN // len(answers))
    parts: list[RenderableType] = []
    for answer in answers:
        parts += [Text(f"{_longest_sentence(answer)}\n", style="bold")]
        if answer.rows:
            parts += [_longest_table(answer, most=most, is_detailed=is_detailed), Text("")]
    return Group(*parts, facts([*_longest_facts(answers), *([] if is_detailed else [DETAILS])]))


def _longest_sentence(answer: Longest) -> str:
    forecaster, best = answer.forecaster, answer.best
    where = f"{forecaster.model.name} on the {forecaster.gpu.name}"
    if best is None or best.forecast is None:
        return f"No sequence of {LENGTH_STEP} tokens surely fits for {where}"
    numbers = numbers_of(best.forecast, forecaster.budget_bytes, None)
    what = f"{best.seq_len:,} tokens at micro-batch {best.micro_batch_size}"
    return f"The longest sequences that surely fit for {where}: {what}: {numbers}"


def _longest_table(answer: Longest, *, most: int, is_detailed: bool) -> RenderableType:
    """Return the longest sequence by micro-batch, of at most so many of them."""
    forecasts = [row.forecast for row in answer.rows if row.forecast is not None]
    shared = shared_words([knobs(one_pass(forecast.config)) for forecast in forecasts])
    numbers = ("micro-batch", "longest", "perhaps", "tokens/s", "peak")
    grid = empty_grid(*numbers, "", right=numbers)
    shown = evenly_spaced([row.micro_batch_size for row in answer.rows], most=most)
    for row in (row for row in answer.rows if row.micro_batch_size in shown):
        forecast = row.forecast
        memory = None if forecast is None else forecast.memory
        words = [] if forecast is None else knobs(one_pass(forecast.config))
        grid.add_row(
            f"{row.micro_batch_size:,}",
            f"{row.seq_len:,}" if row.seq_len else "-",
            f"{row.possible:,}" if row.possible > row.seq_len else "",
            units.rate(None if forecast is None else forecast.tokens_per_second),
            units.gib(None if memory is None else memory.peak_allocated_bytes),
            ", ".join(word for word in words if is_detailed and word not in shared),
        )
    return Group(grid, *(shared_line(shared) if is_detailed else ()))


def _longest_facts(answers: Sequence[Longest]) -> Iterator[Fact]:
    found = {a.forecaster.gpu.name: a.best.forecast for a in answers if a.best and a.best.forecast}
    if found:
        yield from settings_facts(found)
    first, rows = answers[0], [row for answer in answers for row in answer.rows]
    tried = units.plural(first.configurations, "configuration")
    yield "searched", f"lengths in steps of {LENGTH_STEP} tokens, {tried} at each size"
    if first.asked.held:
        yield "you fixed", _in_words(first.asked.held)
    if any(row.possible > row.seq_len for row in rows):
        yield "perhaps", "is too close to the budget to be sure"
    if any(row.possible == first.limit for row in rows):
        yield "limit", f"the model has positions for {first.limit:,} tokens"
    if first.best is not None:
        yield "next", f"--seq-len {first.best.seq_len} in place of --longest plans such a training"


def _in_words(held: Mapping[str, Any]) -> str:
    return ", ".join(units.phrase(key, value) for key, value in held.items())


def cheapest_view(answer: Cheapest, *, is_detailed: bool) -> RenderableType:
    """Return which GPUs do a job, the cheapest first."""
    shown = answer.able if is_detailed else answer.able[:LINES_SHOWN]
    parts: list[RenderableType] = [Text(f"{_cheapest_sentence(answer)}\n", style="bold")]
    if shown:
        parts += [_cards_table(shown), Text("")]
    others = [card for card in answer.cards if not card.is_able]
    rows = [*_cheapest_facts(answer)]
    if is_detailed:
        rows += [(card.gpu.name, f"{card.outcome.value}: {_why_not(card)}") for card in others]
        rows += [("price", source_words(card.bill.offer)) for card in answer.able[:1]]
    else:
        rows.append(("others", _others(others, dearer=len(answer.able) - len(shown))))
        if answer.cheapest is not None:
            name, model = answer.cheapest.gpu.name, answer.model.name
            rows.append(("next", f"`sweep plan {name} --model {model}` plans it there"))
        rows.append(DETAILS)
    return Group(*parts, facts(rows))


def _cheapest_sentence(answer: Cheapest) -> str:
    cheapest = answer.cheapest
    if cheapest is None or cheapest.forecast is None:
        return f"No GPU of a known price is predicted to do it for {answer.model.name}"
    numbers = numbers_of(cheapest.forecast, cheapest.gpu.budget_bytes, cheapest.bill)
    which = f"{offer_words(cheapest.bill)}, predicted the cheapest"
    what = what_words(cheapest.forecast.config)
    return f"Recommended for {answer.model.name}: {which}: {what}: {numbers}"


def _cheapest_facts(answer: Cheapest) -> Iterator[Fact]:
    cheapest = answer.cheapest
    if cheapest is not None and cheapest.forecast is not None:
        yield "settings", settings_words(knobs(cheapest.forecast.config))
    work = "a training" if answer.workload is None else work_words(answer.workload)
    limit = answer.deadline_seconds
    by = "" if limit is None else f" within {units.duration(limit)}"
    yield "the job", f"{work}{by}; on every GPU {_in_words(answer.held)}"
    tied = ", ".join(card.gpu.name for card in answer.perhaps_cheapest)
    if tied:
        yield "or perhaps", tied
    if answer.smallest is not None and answer.smallest is not cheapest:
        yield "smallest", f"{offer_words(answer.smallest.bill)}, {_bill_words(answer.smallest)}"


def _others(cards: Sequence[JobCard], *, dearer: int) -> str:
    """Return how many GPUs do it at higher prices, and which do not, by the reason."""
    by_outcome: dict[str, list[str]] = {}
    for card in cards:
        by_outcome.setdefault(card.outcome.value, []).append(card.gpu.name)
    words = [f"{outcome}: {', '.join(names)}" for outcome, names in by_outcome.items()]
    more = [f"{dearer} more do it at higher prices"] if dearer else []
    return "; ".join([*more, *words]) or "none"


def _bill_words(card: JobCard) -> str:
    bill = card.bill
    late = " (perhaps late)" if card.outcome is Outcome.PERHAPS_LATE else ""
    took = units.duration(3600 * bill.wall_hours)
    return f"{units.usd(bill.usd)} ({usd_range(bill)}) in {took}{late}"


def _cards_table(cards: Sequence[JobCard]) -> RenderableType:
    numbers = ("memory", "tokens/s", "hours", "in all", "between")
    grid = empty_grid("GPU", "at", *numbers, right=("GPU", *numbers))
    grid.columns[0].justify = "left"
    for card in cards:
        forecast, bill = card.forecast, card.bill
        is_late = card.outcome is Outcome.PERHAPS_LATE
        grid.add_row(
            card.gpu.name,
            bill.offer.label.removeprefix(f"{card.gpu.name} "),
            f"{card.gpu.memory_bytes / GIB:.0f} GiB",
            units.rate(None if forecast is None else forecast.tokens_per_second),
            f"{bill.wall_hours:.2f}{'?' if is_late else ''}",
            units.usd(bill.usd),
            short_usd_range(bill),
        )
    late = any(card.outcome is Outcome.PERHAPS_LATE for card in cards)
    return Group(grid, *([Text("'?' may be late", style="dim")] if late else []))


def _why_not(card: JobCard) -> str:
    match card.outcome:
        case Outcome.TOO_SMALL:
            need, has = units.gib(card.least_bytes), units.gib(card.gpu.budget_bytes)
            why = f"needs {need} at least, has {has} for a training"
        case Outcome.TOO_SLOW | Outcome.PERHAPS_IN_TIME:
            soonest, latest = (units.duration(3600 * b.wall_hours) for b in card.bill.extremes)
            took = units.duration(3600 * card.bill.wall_hours)
            price = f"{units.usd(card.bill.usd)} at {card.bill.offer.label}"
            why = f"{took} ({soonest} to {latest}), {price}"
        case Outcome.NO_PRICE:
            why = card.reason or f"give one with {PRICE_OPTION} {card.gpu.name}=DOLLARS"
        case _:
            why = card.reason
    return f"{card.gpu.name}: {card.outcome.value}: {why}"
