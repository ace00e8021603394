"""The first screen of a plan: what to run, what a person needs to decide, and what to do next."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence

from rich.console import RenderableType
from rich.text import Text

from reports import uncertainty, units
from reports.texts import cut_in_words
from search_spaces.config import TrialConfig
from search_spaces.errors import listed
from search_spaces.knobs import CAPACITY_KEYS
from search_spaces.linears import CapacityClass
from sweep.planning.candidates import STANDARD, certainty, speed_order
from sweep.planning.plan import CardComparison, CardPlan, Use, few
from sweep.planning.survey import Survey
from sweep.predict.cost import Bill, OfferComparison
from sweep.predict.forecast import Forecast
from sweep.predict.memory.prediction import Fit
from sweep.terminal.plan.costs import usd_range, work_words
from sweep.terminal.plan.forecast import knobs, shared_words
from sweep.terminal.plan.layout import Fact, empty_grid, facts

DETAILS = ("details", "add --details for every size, rank, change, price and source")
_FIT_WORDS = {Fit.YES: "fits", Fit.UNCERTAIN: "may not fit", Fit.NO: "does not fit"}
_SPACE_WORDS = {
    "preset": "preset {}",
    "file": "file {}",
    "standard": "the space that `sweep init --gpu {}` writes",
}


def screen(plan: CardPlan) -> Iterator[RenderableType]:
    """Yield the answer for one GPU: the recommendation, what decides, and what to do next."""
    yield Text(f"{_sentence(plan)}\n", style="bold")
    yield facts([*_facts(plan), *_numerics(plan), *_searched([plan]), *_next(plan)])


def _sentence(plan: CardPlan) -> str:
    """Return the answer for one GPU in a sentence that stands alone."""
    where, shown = f"{plan.forecaster.model.name} on the {plan.gpu.name}", plan.shown
    if shown is None:
        return f"Nothing fits for {where}: {_too_small(plan)}"
    what = what_words(shown.config)
    if shown.broken is not None:
        return f"{what} is not possible for {where}: {shown.broken.reason}"
    bill = plan.bills[0] if plan.bills and shown.fit is not Fit.NO else None
    numbers = numbers_of(shown, plan.forecaster.budget_bytes, bill)
    if plan.survey is None:
        return f"{what} {_FIT_WORDS[shown.fit]} for {where}: {numbers}"
    return f"Recommended for {where}: {what}: {numbers}"


def what_words(config: TrialConfig) -> str:
    """Return size and capacity: ``micro-batch 10, length 512, rank 16 on q,k,v,o, fp8 compute``."""
    size = f"micro-batch {config.micro_batch_size:,}, length {config.seq_len:,}"
    words = f"{size}, {uncertainty.capacity(config)}"
    if config.is_8bit_compute:
        words += f", {units.phrase('compute_dtype', config.compute_dtype)}"
    return words


def numbers_of(forecast: Forecast, budget_bytes: int, bill: Bill | None) -> str:
    """Return speed, memory and price, as far as they are known."""
    parts = []
    if forecast.tokens_per_second is not None:
        parts.append(speed_words(forecast))
    if forecast.memory is not None:
        peak = units.gib(forecast.memory.peak_allocated_bytes)
        error = units.error(forecast.memory.uncertainty)
        doubt = ", too close to be sure" if forecast.fit is Fit.UNCERTAIN else ""
        parts.append(f"{peak} (within {error}) of the {units.gib(budget_bytes)} budget{doubt}")
    if bill is not None:
        parts.append(f"{units.usd(bill.usd_per_million_tokens)} per million tokens")
    return ", ".join(parts)


def speed_words(forecast: Forecast) -> str:
    """Return a speed with its basis and interval: ``1,579 tokens/s (predicted, 1,053 to 3,159)``"""
    ends = forecast.tokens_per_second_range
    between = "" if ends is None else f", {units.rate(ends[0])} to {units.rate(ends[1])}"
    return f"{units.rate(forecast.tokens_per_second)} tokens/s ({forecast.speed_basis}{between})"


def offer_words(bill: Bill) -> str:
    """Return a GPU and who rents it out: ``the l4 at Modal``."""
    gpu = bill.offer.gpu
    return f"the {gpu} at {bill.offer.label.removeprefix(gpu).strip()}"


def _too_small(plan: CardPlan) -> str:
    assert plan.survey is not None, "of one configuration something is shown"
    least = plan.survey.found.least_bytes
    if least is None:
        what = "every configuration is forbidden for this model and GPU"
        return ": ".join([what, *plan.obstacles])
    return (
        f"the smallest configuration needs {units.gib(least)}, and the budget is "
        f"{units.gib(plan.forecaster.budget_bytes)}"
    )


def _facts(plan: CardPlan) -> Iterator[Fact]:
    shown = plan.shown
    if shown is None or shown.broken is not None:
        return
    yield "settings", settings_words(knobs(shown.config))
    yield from _epoch(plan, shown)
    if plan.bills and shown.fit is not Fit.NO:
        bill = plan.bills[0]
        took = units.duration(3600 * bill.wall_hours)
        cost = f"{units.usd(bill.usd)} ({usd_range(bill)}), {took}, {bill.offer.label}"
        yield "cost", f"{work_words(bill.workload)}: {cost}"
    elif not plan.bills and shown.tokens_per_second is not None:
        yield "cost", f"no price is known: --price {plan.gpu.name}=DOLLARS gives one for an hour"
    yield from _changes(plan)
    if plan.survey is not None:
        yield from _choices(plan.survey, shown)
    elif plan.table is not None:
        sizes = plan.table.largest.items()
        each = (f"{n:,}: {size.sure:,}" for n, size in sizes if size.possible)
        yield "largest", f"micro-batch that surely fits, by length: {', '.join(each) or 'none'}"


def settings_words(words: Sequence[str]) -> str:
    """Return in how far settings are not the standard recipe's."""
    recipe = "the standard QLoRA recipe"
    return f"{recipe}, but {', '.join(words)}" if words else recipe


def _epoch(plan: CardPlan, shown: Forecast) -> Iterator[Fact]:
    """Yield what one pass over the dataset takes, and what the length leaves out of it."""
    epoch, speed = shown.epoch, shown.tokens_per_second
    if epoch is not None and speed:
        tokens = f"{epoch.loss_tokens:,} loss tokens in {units.plural(epoch.steps, 'step')}"
        cut = cut_in_words(epoch, shown.config.seq_len)
        yield "one epoch", f"{units.duration(epoch.loss_tokens / speed)}, {tokens}; {cut}"


def _changes(plan: CardPlan) -> Iterator[Fact]:
    """Yield the single changes that would make it faster, and those that save most memory."""
    for use, label, most in ((Use.FASTER, "faster", 1), (Use.LEANER, "memory", 2)):
        useful = [change for change in few(plan.what_ifs) if change.use is use]
        words = []
        for change in useful[:most]:
            speed = "" if change.speed_change is None else f"{percent(change.speed_change)} speed, "
            doubt = "" if change.forecast.fit is Fit.YES else ", may not fit"
            memory = byte_change(change.memory_change_bytes)
            words.append(f"{units.phrase(change.key, change.value)} ({speed}{memory}{doubt})")
        if words:
            yield label, " or ".join(words)


def percent(share: float) -> str:
    """Return a change in speed: ``+1.3 %``."""
    return "same" if abs(share) < 0.0005 else f"{100 * share:+.1f} %"


def byte_change(change: int) -> str:
    """Return a change in memory: ``-0.30 GiB``."""
    return f"{'+' if change > 0 else '-'}{units.gib(abs(change))}" if change else "same memory"


def _choices(survey: Survey, best: Forecast) -> Iterator[Fact]:
    """Yield what other lengths and capacities come to, and what was passed over."""
    rivals = survey.fastest_by_class.items()
    lengths = {n: rival for (capacity, n), rival in rivals if capacity == survey.capacity}
    if len(lengths) > 1:
        speeds = (f"{n:,}: {units.rate(lengths[n].tokens_per_second)}" for n in sorted(lengths))
        yield "by length", f"{', '.join(speeds)} tokens/s (--seq-len)"
    capacities = math.prod(len(survey.space.values_of(key)) for key in CAPACITY_KEYS)
    if capacities > 1:
        yield "capacity", _capacity_words(survey, best, of=capacities)
    other = survey.alternative
    if other is not None and other.memory is not None:
        change = units.changes(other.config, baseline=best.config)
        words = f"{change}, {units.rate(other.tokens_per_second)} tokens/s"
        if certainty(other) > certainty(best):
            yield "surer fit", f"{words}, slower beyond the uncertainty"
        else:
            error = units.error(other.memory.uncertainty)
            peak = units.gib(other.memory.peak_allocated_bytes)
            yield "riskier", f"{words}, not surely faster; {peak} (within {error})"


def _numerics(plan: CardPlan) -> Iterator[Fact]:
    """Yield what 8 bits are expected to bring, where a space has several classes of numerics."""
    classes = {} if plan.survey is None else plan.survey.fastest_by_numerics
    gains = [(n, plan.times_16_bit(f)) for n, f in classes.items() if n != "16-bit"]
    told = [f"{n} {of[0]:.2f} ({of[1]:.2f} to {of[2]:.2f})" for n, of in gains if of is not None]
    if told:
        wide = classes["16-bit"]
        compute = units.phrase("compute_dtype", wide.config.compute_dtype)
        speed = units.rate(wide.tokens_per_second)
        wide_words = f"times {compute}'s {speed} tokens/s, predicted (--numerics 16-bit)"
        yield "numerics", f"{', '.join(told)} {wide_words}"


def _capacity_words(survey: Survey, best: Forecast, *, of: int) -> str:
    """Return why these ranks and modules, and what the slowest and fastest others come to."""
    rivals = survey.fastest_by_class
    why = "the nearest to the standard recipe's of those that fit"
    if len({capacity for capacity, _ in rivals}) == 1:
        why = f"the only one of {of} searched that may fit"
    elif survey.capacity == CapacityClass.of(STANDARD, survey.model):
        why = "the standard recipe's"
    others = [
        rival
        for (capacity, length), rival in rivals.items()
        if capacity != survey.capacity and length == best.config.seq_len
    ]
    ends = [pick(others, key=speed_order) for pick in (min, max) if others]
    speeds = {uncertainty.capacity(end.config): end.tokens_per_second for end in ends}
    told = (f"{name}: {units.rate(speed)} tokens/s" for name, speed in speeds.items())
    return "; ".join([why, *told])


def _searched(plans: Sequence[CardPlan]) -> Iterator[Fact]:
    """Yield which spaces were searched, which settings are free in them, and which fixed."""
    looked = [(plan, plan.survey) for plan in plans if plan.survey is not None]
    if not looked:
        yield "asked", "this configuration alone; without --exact what you do not fix is searched"
        return
    if len(looked) == 1:
        plan, survey = looked[0]
        counts = survey.found
        cannot = counts.looked_at - counts.fit - counts.uncertain
        fits = f"{counts.fit:,} surely fit, {counts.uncertain:,} may fit, {cannot:,} cannot"
        yield "searched", f"{_space_words(plan, survey)}; {fits}"
    else:
        yield "searched", "; ".join(dict.fromkeys(_space_words(*each) for each in looked))
    free: dict[str, list[str]] = {}
    for plan, survey in looked:
        for key in survey.space.dimensions:
            if len(survey.space.values_of(key)) != 1:
                free.setdefault(key, []).append(plan.gpu.name)
    words = (k if len(on) == len(looked) else f"{k} ({', '.join(on)})" for k, on in free.items())
    yield "free", f"{', '.join(words)}; all else is fixed"
    plan, survey = looked[0]
    held = ", ".join(units.phrase(key, survey.space.fixed[key]) for key in plan.asked.held)
    if held:
        yield "you fixed", held


def _space_words(plan: CardPlan, survey: Survey) -> str:
    total = survey.total
    whole = "no end of configurations" if total is None else units.plural(total, "configuration")
    if survey.is_sampled:
        whole = f"{survey.found.looked_at:,} drawn from {whole}"
    which = _SPACE_WORDS[plan.asked.kind or "file"].format(survey.space.name)
    return f"{which}, {whole}"


def _next(plan: CardPlan, *, is_timed: bool = True) -> Iterator[Fact]:
    """Yield the commands to go on with."""
    if plan.shown is None:
        model = plan.forecaster.model.name
        yield "next", f"`sweep plan --cheapest --model {model}` says which GPUs can train it"
    elif plan.survey is not None:
        seconds = plan.survey.study_seconds()
        ends = seconds if is_timed and seconds is not None else ()
        took = f" ({' to '.join(map(units.duration, ends))})" if ends else ""
        yield "next", f"`{plan.asked.run_command}` measures it{took}"
    yield DETAILS


def comparison_screen(
    plans: Sequence[CardPlan], comparison: CardComparison | None
) -> Iterator[RenderableType]:
    """Yield the answer across GPUs: which to take, the same training on each, what differs."""
    if comparison is None:
        chosen = {plan.gpu.name: plan.shown for plan in plans if plan.shown and plan.fits}
    else:
        chosen = dict(comparison.chosen)
    able = [plan for plan in plans if plan.gpu.name in chosen]
    best = max(able, key=lambda plan: speed_order(chosen[plan.gpu.name]), default=plans[0])
    offers = None if comparison is None else comparison.bills
    if offers is not None:
        best = next(plan for plan in able if plan.gpu.name == offers.cheapest.offer.gpu)
    yield Text(f"{_choice(plans, best, chosen, offers)}\n", style="bold")
    if able:
        yield _gpus_table(able, chosen, offers)
    rows = [] if comparison is None else [*comparison_facts(comparison)]
    if chosen:
        rows += settings_facts(chosen)
    rows += [(plan.gpu.name, _why_not(plan)) for plan in plans if plan not in able]
    yield facts([*rows, *_searched(plans), *_next(best, is_timed=False)])


def _choice(
    plans: Sequence[CardPlan],
    best: CardPlan,
    chosen: Mapping[str, Forecast],
    offers: OfferComparison | None,
) -> str:
    """Return which GPU to take, in a sentence that stands alone."""
    model, name = best.forecaster.model.name, best.gpu.name
    if not chosen:
        return f"Nothing fits for {model} on the {listed(plan.gpu.name for plan in plans)}"
    bill = None if offers is None else offers.cheapest
    which = f"the {name}" if bill is None else offer_words(bill)
    why = f"predicted the {'fastest' if bill is None else 'cheapest'}"
    why = why if len(chosen) > 1 else "which alone has room"
    numbers = numbers_of(chosen[name], best.forecaster.budget_bytes, bill)
    return f"Recommended for {model}: {which}, {why}: {what_words(chosen[name].config)}: {numbers}"


def _why_not(plan: CardPlan) -> str:
    """Return why a GPU does not do what others do."""
    if plan.shown is None:
        return _too_small(plan)
    if plan.shown.broken is not None:
        return plan.shown.broken.reason
    return "has no configuration in common" if plan.fits else "does not fit"


def _gpus_table(
    plans: Sequence[CardPlan], chosen: Mapping[str, Forecast], offers: OfferComparison | None
) -> RenderableType:
    numbers = ("tokens/s", "between", "size", "peak", "1M tokens")
    grid = empty_grid("", *numbers, "", right=numbers)
    for plan in plans:
        name, forecast = plan.gpu.name, chosen[plan.gpu.name]
        bills = () if offers is None else offers.bills
        bill = next((bill for bill in bills if bill.offer.gpu == name), None)
        grid.add_row(
            name,
            units.rate(forecast.tokens_per_second),
            units.rate_interval(forecast.tokens_per_second_range),
            units.size(one_pass(forecast.config)),
            units.gib(forecast.memory.peak_allocated_bytes if forecast.memory else None),
            units.usd(bill.usd_per_million_tokens if bill else None),
            "" if forecast.fit is Fit.YES else "may not fit",
        )
    return grid


def settings_facts(chosen: Mapping[str, Forecast]) -> Iterator[Fact]:
    """Yield the settings that the GPUs have in common, and what each has of its own."""
    words = {gpu: knobs(forecast.config) for gpu, forecast in chosen.items()}
    shared = next(iter(words.values())) if len(words) == 1 else shared_words([*words.values()])
    yield "settings", settings_words(shared)
    own = {gpu: [word for word in of if word not in shared] for gpu, of in words.items()}
    more = "; ".join(f"{gpu}: also {', '.join(of)}" for gpu, of in own.items() if of)
    if more:
        yield "", more


def comparison_facts(comparison: CardComparison) -> Iterator[Fact]:
    """Yield which GPU is the cheapest, the fastest and the soonest, as far as that is known."""
    bills, work = comparison.bills, comparison.workload
    size = f"{comparison.effective_batch_size:,} x {comparison.seq_len:,}"
    yield "compared", f"{work_words(work)}, {size} a step"
    if bills is None:
        yield "cheapest", "no price is known: give one with --price a10=0.75"
    else:
        yield "cheapest", _cheapest(bills)
    yield "fastest", _fastest(comparison)


def _fastest(comparison: CardComparison) -> str:
    """Return which is the fastest, and how many times as fast as the second, as far as is known."""
    chosen = sorted(comparison.chosen.items(), key=lambda each: speed_order(each[1]), reverse=True)
    (first, fast), (_, slow) = chosen[:2]
    ends, others = fast.tokens_per_second_range, slow.tokens_per_second_range
    ratio = ""
    if ends is not None and others is not None:
        times = f"{ends[0] / others[1]:.2f} to {ends[1] / others[0]:.2f} times"
        ratio = f" ({times} as fast as the next)"
    return f"{listed([first, *comparison.perhaps_fastest])}{ratio}"


def _cheapest(offers: OfferComparison) -> str:
    first = offers.cheapest
    next_card = next((b for b in offers.bills if b.offer.gpu != first.offer.gpu), None)
    more = ""
    if next_card is not None:
        times = next_card.usd_per_sample / first.usd_per_sample
        more = f"; {next_card.offer.label} {times:.2f} times that"
    took = units.duration(3600 * first.wall_hours)
    tied = dict.fromkeys([first.offer.gpu, *(b.offer.gpu for b in offers.perhaps_cheapest)])
    return f"{listed(tied)}: {units.usd(first.usd)} ({usd_range(first)}), {took}{more}"


def one_pass(config: TrialConfig) -> TrialConfig:
    """Return a configuration without what it accumulates."""
    return config.model_copy(update={"effective_batch_size": None})
