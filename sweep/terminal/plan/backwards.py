"""Owns how the backward questions are answered: the longest rows, and the cards for a job."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from reports import units
from search_spaces.gpus import GIB
from search_spaces.prices import PRICE_OPTION
from sweep.planning.cheapest import Cheapest, JobCard, Outcome
from sweep.planning.longest import LENGTH_STEP, Longest, LongestRow
from sweep.terminal.plan.costs import short_usd_range, usd_range, work_words
from sweep.terminal.plan.forecast import knobs, shared_line, shared_words, structure
from sweep.terminal.plan.layout import empty_grid, lines, section
from sweep.terminal.plan.verdict import one_pass, speed_words


def longest_views(answers: Sequence[Longest]) -> RenderableType:
    """Return the longest rows on each card."""
    views = [part for answer in answers for part in (Text(""), Group(*_longest(answer)))]
    return Group(*views[1:])


def _longest(answer: Longest) -> Iterator[RenderableType]:
    where = f"the {answer.gpu.name} for {answer.model.name}"
    best = answer.best
    if best is None or best.forecast is None:
        yield Text(f"No row of {LENGTH_STEP} tokens surely fits {where}", style="bold")
    else:
        size = f"{best.micro_batch_size} x {best.seq_len:,}"
        yield Text(f"The longest rows that surely fit {where}: {size}", style="bold")
        yield Padding(lines(_longest_lines(best, answer)), (0, 0, 0, 2))
    if answer.rows:
        yield from section("By micro-batch", _longest_table(answer), lines(_longest_notes(answer)))


def _longest_lines(best: LongestRow, answer: Longest) -> Iterator[str]:
    forecast = best.forecast
    assert forecast is not None, "what surely fits has a forecast"
    yield structure(one_pass(forecast.config))
    peak = None if forecast.memory is None else forecast.memory.peak_allocated_bytes
    speed = f"{speed_words(forecast)}; " if forecast.tokens_per_second is not None else ""
    yield f"{speed}peak {units.gib(peak)} of {units.gib(answer.budget_bytes)}"


def _longest_table(answer: Longest) -> RenderableType:
    forecasts = [row.forecast for row in answer.rows if row.forecast is not None]
    shared = shared_words([knobs(one_pass(forecast.config)) for forecast in forecasts])
    numbers = ("micro-batch", "longest", "perhaps", "tokens/s", "peak")
    grid = empty_grid(*numbers, "", right=numbers)
    for row in answer.rows:
        forecast = row.forecast
        memory = None if forecast is None else forecast.memory
        words = [] if forecast is None else knobs(one_pass(forecast.config))
        grid.add_row(
            f"{row.micro_batch_size:,}",
            f"{row.seq_len:,}" if row.seq_len else "-",
            f"{row.possible:,}" if row.possible > row.seq_len else "",
            units.rate(None if forecast is None else forecast.tokens_per_second),
            units.gib(None if memory is None else memory.peak_allocated_bytes),
            ", ".join(word for word in words if word not in shared),
        )
    return Group(grid, *shared_line(shared))


def _longest_notes(answer: Longest) -> Iterator[str]:
    tried = units.plural(answer.configurations, "configuration")
    yield (
        f"found to a multiple of {LENGTH_STEP} tokens, of {tried} at each size{_held(answer)}; "
        "'perhaps' is too close to the budget to be sure"
    )
    if any(row.possible == answer.limit for row in answer.rows):
        yield f"{answer.limit:,} is as far as the model has positions for"


def _held(answer: Longest) -> str:
    held = _in_words(answer.asked.held)
    return f", held at {held}" if held else ""


def _in_words(held: Mapping[str, Any]) -> str:
    return ", ".join(units.phrase(key, value) for key, value in held.items())


def cheapest_view(answer: Cheapest) -> RenderableType:
    """Return which cards do a job, the answer first."""
    parts: list[RenderableType] = [Text(_cheapest_title(answer), style="bold")]
    parts.append(Padding(lines(_cheapest_lines(answer)), (0, 0, 0, 2)))
    if answer.able:
        parts += section("Cards that do it, the cheapest first", _cards_table(answer))
    others = [card for card in answer.cards if not card.is_able]
    if others:
        parts += section("The others", lines(map(_why_not, others)))
    parts += section("The job", lines(_job_lines(answer)))
    return Group(*parts)


def _cheapest_title(answer: Cheapest) -> str:
    work = "the job" if answer.workload is None else work_words(answer.workload)
    by = ""
    if answer.deadline_seconds is not None:
        by = f" within {units.duration(answer.deadline_seconds)}"
    return f"{work} of {answer.model.name}{by}"


def _cheapest_lines(answer: Cheapest) -> Iterator[str]:
    cheapest, smallest = answer.cheapest, answer.smallest
    if cheapest is None or smallest is None:
        yield "no card of a known price does it, by what is predicted"
        return
    yield f"cheapest: {_card_words(cheapest)}"
    if len(answer.able) > 1:
        second = answer.able[1]
        share = second.bill.usd / cheapest.bill.usd - 1.0
        yield f"runner-up: {_card_words(second)}, {units.percent(share)} more"
    tied = ", ".join(card.gpu.name for card in answer.perhaps_cheapest)
    if tied:
        yield f"not told apart from the cheapest inside the speeds' uncertainty: {tied}"
    yield (
        f"smallest: {_card_words(smallest)}"
        if smallest is not cheapest
        else (f"smallest: the {smallest.gpu.name} as well")
    )


def _card_words(card: JobCard) -> str:
    bill = card.bill
    late = " (perhaps late)" if card.outcome is Outcome.PERHAPS_LATE else ""
    return (
        f"{bill.offer.label}, {units.usd(bill.usd)} ({usd_range(bill)}) in "
        f"{units.duration(3600 * bill.wall_hours)}{late}"
    )


def _cards_table(answer: Cheapest) -> RenderableType:
    numbers = ("memory", "tokens/s", "hours", "in all", "between")
    grid = empty_grid("card", "at", *numbers, right=("card", *numbers))
    grid.columns[0].justify = "left"
    for card in answer.able:
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
    late = any(card.outcome is Outcome.PERHAPS_LATE for card in answer.able)
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


def _job_lines(answer: Cheapest) -> Iterator[str]:
    yield f"the same on every card: {_in_words(answer.held)}"
    yield "what is not typed of rank, target modules and length is the standard recipe's"
    for card in answer.able[:1]:
        offer = card.bill.offer
        yield f"price: {offer.provider}, read on {offer.date}, {offer.source}"
