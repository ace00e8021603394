"""Owns the first lines of a plan: what to take, how fast and dear it is, and how sure that is.

They stand alone: a person sends them to another who saw nothing of the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from reports import uncertainty, units
from reports.texts import cut_in_words
from search_spaces.config import TrialConfig
from sweep.planning.comparison import CardComparison
from sweep.planning.forecast import Forecast
from sweep.planning.plan import CardPlan
from sweep.planning.recommendation import certainty
from sweep.planning.whatif import WhatIf
from sweep.predict.cost import Bill
from sweep.predict.memory.prediction import Fit
from sweep.predict.offers import OfferComparison
from sweep.terminal.plan.costs import usd_range, work_words
from sweep.terminal.plan.forecast import describe

_FIT_WORDS = {
    Fit.YES: "fits",
    Fit.UNCERTAIN: "is too close to the budget to say, on",
    Fit.NO: "does not fit",
}


def verdict_title(plan: CardPlan) -> str:
    """Return what is answered of a card in one line."""
    where = f"the {plan.gpu.name} for {plan.model.name}"
    if plan.shown is None:
        return f"Nothing fits {where}"
    config, fit = plan.shown.config, plan.shown.fit
    if plan.survey is None:
        verdict = "is not possible on" if plan.shown.broken is not None else _FIT_WORDS[fit]
        return f"{units.size(config)} {verdict} {where}"
    what = "largest" if plan.shown.tokens_per_second is None else "fastest"
    doubt = "surely" if fit is Fit.YES else "perhaps"
    return (
        f"Recommended on {where}: the {what} that {doubt} fits, of {uncertainty.capacity(config)}"
    )


def verdict_lines(plan: CardPlan) -> Iterator[str]:
    """Yield the answer of a card: configuration, speed, memory, cost, and how sure."""
    if plan.shown is None:
        yield _too_small(plan)
        return
    yield describe(plan.shown.config)
    if plan.shown.broken is not None:
        yield f"{plan.shown.broken.rule}: {plan.shown.broken.reason}"
        return
    numbers = [*_speed(plan.shown), *_memory(plan.shown, plan.budget_bytes)]
    if numbers:
        yield "; ".join(numbers)
    if plan.bills and plan.shown.fit is not Fit.NO:
        yield _cost(plan.bills[0])
    yield from _epoch(plan, plan.shown)
    yield from _passed_over(plan, plan.shown)
    grounds = [*_speed_ground(plan.shown), *_memory_ground(plan.shown)]
    if grounds:
        yield f"how sure: {'; '.join(grounds)}"


def _epoch(plan: CardPlan, shown: Forecast) -> Iterator[str]:
    """Yield what one pass over the texts is, and what the length leaves out of it."""
    epoch, speed = plan.epoch, shown.tokens_per_second
    if epoch is None or not speed:
        return
    tokens = f"{epoch.loss_tokens:,} tokens that carry loss in {epoch.steps:,} steps"
    cut = cut_in_words(epoch, shown.config.seq_len)
    yield f"one epoch of the texts: {units.duration(epoch.loss_tokens / speed)}, {tokens}; {cut}"


def _passed_over(plan: CardPlan, shown: Forecast) -> Iterator[str]:
    """Yield what is predicted to be faster than what is recommended, and why that is not."""
    other = None if plan.survey is None else plan.survey.alternative
    if other is None or other.memory is None or certainty(other) > certainty(shown):
        return
    doubt = (
        f"its memory is predicted within {units.error(other.memory.uncertainty)} alone"
        if other.fit is Fit.YES
        else "it is too close to the budget to say that it fits"
    )
    change = units.changes(other.config, baseline=shown.config)
    speed = f"{units.rate(other.tokens_per_second)} tokens/s predicted"
    yield f"passed over: {change}, {speed}, not surely faster, and {doubt}"


def _too_small(plan: CardPlan) -> str:
    least = None if plan.survey is None else plan.survey.least_bytes
    if least is None:
        return "every configuration is forbidden on this model and card"
    return (
        f"the smallest configuration needs {units.gib(least)} and the budget is "
        f"{units.gib(plan.budget_bytes)}: name a larger card or a smaller model"
    )


def _speed(forecast: Forecast) -> Iterator[str]:
    if forecast.tokens_per_second is not None:
        yield speed_words(forecast)


def speed_words(forecast: Forecast) -> str:
    """Return a speed with its interval: ``1,579 tokens/s (1,053 to 3,159)``."""
    ends = forecast.tokens_per_second_range
    between = "" if ends is None else f" ({units.rate(ends[0])} to {units.rate(ends[1])})"
    return f"{units.rate(forecast.tokens_per_second)} tokens/s{between}"


def _memory(forecast: Forecast, budget_bytes: int) -> Iterator[str]:
    if forecast.memory is None:
        return
    peak = forecast.memory.peak_allocated_bytes
    left = budget_bytes - peak
    margin = f"{units.gib(left)} to spare" if left >= 0 else f"{units.gib(-left)} too much"
    yield f"peak {units.gib(peak)} of {units.gib(budget_bytes)}, {margin}"


def _cost(bill: Bill) -> str:
    tokens = units.usd(bill.usd_per_million_tokens)
    return (
        f"{work_words(bill.workload)}: {units.usd(bill.usd)} ({usd_range(bill)}) in "
        f"{units.duration(3600 * bill.wall_hours)} on {bill.offer.label}; {tokens} a million tokens"
    )


def _speed_ground(forecast: Forecast) -> Iterator[str]:
    error = forecast.speed_uncertainty
    if forecast.speed_basis is not None:
        within = "" if error is None else f" within {units.percent(error)}"
        yield f"speed {forecast.speed_basis}{within}"


def _memory_ground(forecast: Forecast) -> Iterator[str]:
    if forecast.memory is not None:
        yield f"memory predicted within {units.error(forecast.memory.uncertainty)}"


def what_if_row(change: WhatIf) -> tuple[str, str, str, str]:
    """Return a change in words, in speed, in memory, and whether it fits."""
    speed = "" if change.speed_change is None else f"{_signed_percent(change.speed_change)} speed"
    fits = "" if change.forecast.fit is Fit.YES else _fits(change.forecast.fit)
    return units.phrase(change.key, change.value), speed, _bytes(change.memory_change_bytes), fits


def _fits(fit: Fit) -> str:
    return "perhaps fits" if fit is Fit.UNCERTAIN else "does not fit"


def _signed_percent(share: float) -> str:
    return "same" if abs(share) < 0.0005 else f"{100 * share:+.1f} %"


def _bytes(change: int) -> str:
    sign = "+" if change > 0 else "-" if change < 0 else ""
    return f"{sign}{units.gib(abs(change))}" if change else "same memory"


def comparison_verdict(comparison: CardComparison) -> Iterator[str]:
    """Yield which card is the fastest and which the cheapest, as far as that can be told."""
    yield _fastest(comparison)
    if comparison.bills is None:
        yield "cheapest: no price of any of these cards is known; give one with --price a10=0.75"
        return
    yield _cheapest(comparison.bills)
    soonest = comparison.bills.soonest
    others = _open(other.offer.gpu for other in comparison.bills.perhaps_soonest)
    yield (
        f"soonest done: {soonest.offer.label}, {units.duration(3600 * soonest.wall_hours)}, "
        f"{units.usd(soonest.usd)}{others}"
    )


def _fastest(comparison: CardComparison) -> str:
    first = comparison.chosen[comparison.fastest]
    others = [gpu for gpu in comparison.chosen if gpu != comparison.fastest]
    second = max(others, key=lambda gpu: comparison.chosen[gpu].tokens_per_second or 0.0)
    words = f"fastest: {comparison.fastest}, {speed_words(first)}"
    ratio = _ratio(first, comparison.chosen[second])
    return f"{words}{ratio and f', {ratio} the {second}'}{_open(comparison.perhaps_fastest)}"


def _ratio(first: Forecast, second: Forecast) -> str:
    """Return how many times as fast one is as another, with all that their intervals leave open."""
    speeds = first.tokens_per_second, second.tokens_per_second
    ends, others = first.tokens_per_second_range, second.tokens_per_second_range
    if not speeds[0] or not speeds[1]:
        return ""
    ratio = f"{speeds[0] / speeds[1]:.2f}x"
    if ends is None or others is None:
        return ratio
    return f"{ratio} ({ends[0] / others[1]:.2f} to {ends[1] / others[0]:.2f}x)"


def _cheapest(offers: OfferComparison) -> str:
    first = offers.cheapest
    next_card = next((b for b in offers.bills if b.offer.gpu != first.offer.gpu), None)
    more = ""
    if next_card is not None:
        times = next_card.usd_per_sample / first.usd_per_sample
        more = f"; {next_card.offer.label} {times:.2f} times that"
    words = f"cheapest: {first.offer.label}, {units.usd(first.usd)} ({usd_range(first)}){more}"
    return words + _open(bill.offer.label for bill in offers.perhaps_cheapest)


def _open(names: Iterable[str]) -> str:
    """Return what cannot be told apart from the first; nothing where all of it can."""
    listed = list(dict.fromkeys(names))
    if not listed:
        return ""
    return f"; not told apart inside the speeds' uncertainty: {', '.join(listed)}"


def one_pass(config: TrialConfig) -> TrialConfig:
    """Return a configuration without what it accumulates."""
    return config.model_copy(update={"effective_batch_size": None})
