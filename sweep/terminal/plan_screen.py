"""What `sweep plan` shows: one screen that says what to run, and with --details all the rest."""

from __future__ import annotations

import math
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from qlora_sweep.reports import format as units
from qlora_sweep.reports.words import capacity, cut_in_words
from qlora_sweep.search_spaces.config import CAPACITY_KEYS, TrialConfig
from qlora_sweep.search_spaces.costs import Bill, Range
from qlora_sweep.search_spaces.errors import listed
from qlora_sweep.search_spaces.gpus import Interconnect
from qlora_sweep.search_spaces.linears import standard_capacity, unquantized
from qlora_sweep.search_spaces.prices import PRICE_OPTION
from qlora_sweep.search_spaces.quality import quality_in_words
from qlora_sweep.search_spaces.rules import torch_for
from qlora_sweep.search_spaces.trainers import trainer_of
from qlora_sweep.sweep.export.grpo import grpo_config
from qlora_sweep.sweep.planning import candidates
from qlora_sweep.sweep.planning.backwards import LENGTH_STEP, Cheapest, JobCard, Longest, Outcome
from qlora_sweep.sweep.planning.calibrating import Lessons
from qlora_sweep.sweep.planning.documents import pairs_of
from qlora_sweep.sweep.planning.plan import CardComparison, CardPlan, Use, few, perhaps_fastest
from qlora_sweep.sweep.planning.survey import Survey
from qlora_sweep.sweep.predict.forecast import Forecast
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.predict.speed.predictor import NINE_IN_TEN
from qlora_sweep.sweep.predict.speed.steps import LINK_SHARES, link_of
from qlora_sweep.sweep.terminal import plan_details
from qlora_sweep.sweep.terminal.drawing import Fact, facts, grid, section

_DETAILS = ("details", "add --details for every size, rank, change, price and source")
GENERATION = "is not in these numbers: neither its time nor its memory (the KV cache, or vLLM's)"
_LINES_SHOWN = 4
"""Micro-batches of all GPUs, or GPUs, that one screen has room for."""
_SPACE_WORDS = {
    "preset": "preset {}",
    "file": "file {}",
    "standard": "the space that `sweep init --gpu {}` writes",
}


def _answer(
    sentence: str,
    table: Sequence[RenderableType],
    said: Sequence[Fact],
    shown: Iterable[Forecast | None] = (),
) -> Group:
    """Return a sentence that stands alone, a table where there is one, and facts; before them why
    the speed of any that is shown is not known."""
    title = Text(f"{sentence}\n", style="bold")
    return Group(*_unknown_speeds(shown), title, *table, facts(said))


def _unknown_speeds(shown: Iterable[Forecast | None]) -> list[RenderableType]:
    """Return why the speeds of configurations are not known, once each."""
    told = (forecast.speed_unknown for forecast in shown if forecast is not None)
    return [Text(words, style="bold") for words in dict.fromkeys(filter(None, told))]


def one_gpu(plan: CardPlan, *, is_detailed: bool) -> RenderableType:
    """Return the plan of one GPU: the recommendation, what decides, and what to do next."""
    shown, model, gpu = plan.shown, plan.forecaster.model.name, plan.gpu.name
    where, said = f"for {model} on the {gpu}", list[Fact]()
    if plan.asked.grpo:
        where = f"for GRPO's training step alone, of {model} on the {gpu}"
    if shown is None:
        sentence = f"Nothing fits {where}: {_too_small(plan)}"
    elif shown.broken is not None:
        sentence = f"{_what(shown.config)} is not possible {where}: {shown.broken.reason}"
    else:
        bill = plan.bills[0] if plan.bills and shown.fit is not Fit.NO else None
        what, numbers = _what(shown.config), _numbers(shown, bill)
        sentence = f"{what} {plan_details.FIT_WORDS[shown.fit]} {where}: {numbers}"
        if plan.survey is not None:
            sentence = f"Recommended {where}: {what}: {numbers}"
        said += _facts(plan, shown, bill)
    said += [*_searched([plan]), *_next(plan), _DETAILS]
    answer = _answer(sentence, (), said, [shown])
    return Group(answer, *(plan_details.details(plan) if is_detailed else ()))


def several_gpus(
    plans: Sequence[CardPlan], comparison: CardComparison | None, *, is_detailed: bool
) -> RenderableType:
    """Return which GPU to take, the same training on each, and what differs."""
    own = {plan.gpu.name: plan.shown for plan in plans if plan.shown and plan.fits}
    chosen = own if comparison is None else comparison.chosen
    able = [plan for plan in plans if plan.gpu.name in chosen]
    best = max(
        able, key=lambda plan: candidates.speed_order(chosen[plan.gpu.name]), default=plans[0]
    )
    bills = None if comparison is None else comparison.bills
    bill = None if bills is None else bills.cheapest
    if comparison is not None:
        best = next(plan for plan in able if plan.gpu.name == comparison.perhaps_best[0])
    model, name = best.forecaster.model.name, best.gpu.name
    if chosen:
        which = f"the {name}" if bill is None else _offer_words(bill)
        why = "which alone has room" if len(chosen) == 1 else "chosen by its predicted speed"
        if comparison is not None:
            why = _why(comparison.perhaps_best, by="speed" if bills is None else "cost")
        what = f"{_what(chosen[name].config)}: {_numbers(chosen[name], bill)}"
        sentence = f"Recommended for {model}: {which}, {why}: {what}"
    else:
        sentence = f"Nothing fits for {model} on the {listed(plan.gpu.name for plan in plans)}"
    said = [] if comparison is None else [*_compared(comparison)]
    said += _settings_facts(chosen) if chosen else ()
    said += [(plan.gpu.name, _why_not(plan)) for plan in plans if plan not in able]
    said += [*_searched(plans), *_next(best), _DETAILS]
    rows = []
    for gpu, forecast in ((plan.gpu.name, chosen[plan.gpu.name]) for plan in able):
        cost = next((b for b in (bills.bills if bills else ()) if b.offer.gpu == gpu), None)
        rows.append(_row(gpu, forecast, cost))
    table = [grid(_HEADER, rows)] if rows else []
    parts: list[RenderableType] = [_answer(sentence, table, said, chosen.values())]
    if is_detailed and bills is not None:
        parts += section(
            "Prices", plan_details.offers(bills.bills), *plan_details.break_even_lines(bills)
        )
    for plan in plans if is_detailed else ():
        title = Text(f"\n== {plan.gpu.name}\n", style="bold")
        parts += [title, one_gpu(plan, is_detailed=True)]
    return Group(*parts)


def ways(
    plans: Sequence[CardPlan],
    comparison: CardComparison | None,
    refused: Mapping[str, str],
    *,
    devices: int,
    is_detailed: bool,
) -> RenderableType:
    """Return what one GPU of a host, all of them and shards come to, and which is the fastest."""
    able = {plan.name: plan for plan in plans if plan.fits}
    shown = {name: plan.shown for name, plan in able.items() if plan.shown is not None}
    where = f"for {plans[0].forecaster.model.name} on {devices} x {plans[0].gpu.name}"
    sentence, best, said = f"Nothing fits {where}", plans[0], list[Fact]()
    if shown:
        tied = perhaps_fastest(shown if comparison is None else comparison.chosen)
        alone = "has room" if len(plans) > 1 else "is possible"
        why = f"which alone {alone}" if len(shown) == 1 else _why(tied, by="speed")
        best, chosen = able[tied[0]], shown[tied[0]]
        what = f"{_what(chosen.config)}: {_numbers(chosen, next(iter(best.bills), None))}"
        sentence = f"Recommended {where}: {tied[0]}, {why}: {what}"
        said += _settings_facts(shown)
    if comparison is not None and best.survey is not None:
        said.append(("same batch", _at_one_batch(comparison)))
    said += [(plan.name, _why_not(plan)) for plan in plans if plan.name not in able]
    said += [*refused.items(), ("link", _link_words(link_of(best.gpu)))]
    said += [*_searched(plans), *_next(best), _DETAILS]
    rows = [_row(name, of, next(iter(able[name].bills), None)) for name, of in shown.items()]
    table = [grid(_HEADER, rows)] if rows else []
    parts: list[RenderableType] = [_answer(sentence, table, said, shown.values())]
    for plan in plans if is_detailed else ():
        title = Text(f"\n== {plan.name}\n", style="bold")
        parts += [title, one_gpu(plan, is_detailed=True)]
    return Group(*parts)


def _at_one_batch(comparison: CardComparison) -> str:
    """Return how fast each way is in steps of one size, beside the first."""
    (first, alone), *others = comparison.chosen.items()
    words = [f"{first} {units.rate(alone.tokens_per_second)} tokens/s"]
    for name, forecast in others:
        times = candidates.speed_ratio(forecast, alone)
        ratio = f", {_times(times)} as fast" if times else ""
        words.append(f"{name} {units.rate(forecast.tokens_per_second)}{ratio}")
    size = f"{comparison.effective_batch_size:,} x {comparison.seq_len:,}"
    return f"{size} a step: {'; '.join(words)}"


def _link_words(link: Interconnect) -> str:
    name, rate = {"nvlink": "NVLink", "pcie": "PCIe"}[link.kind], link.bytes_per_second / 1e9
    known = "steps of several GPUs were measured between two H200 through NVLink alone"
    share = units.percent(LINK_SHARES[link.kind])
    return f"{name}, {rate:.1f} GB/s each way, of which {share} is counted on; {known}"


_HEADER = ("", ">tokens/s", ">between", ">size", ">peak", ">1M tokens", "")


def _row(name: str, forecast: Forecast, bill: Bill | None) -> tuple[str, ...]:
    return (
        name,
        units.rate(forecast.tokens_per_second),
        units.rate_interval(forecast.tokens_per_second_range),
        units.size(forecast.config),
        units.gib(forecast.peak_allocated_bytes),
        _per_million(bill) if bill else units.DASH,
        "" if forecast.fit is Fit.YES else "may not fit",
    )


def _what(config: TrialConfig) -> str:
    """Return size and capacity: ``micro-batch 10, length 512, rank 16 on q,k,v,o, fp8 compute``."""
    size = f"micro-batch {config.micro_batch_size:,}, length {config.seq_len:,}"
    compute = [units.phrase("compute_dtype", config.compute_dtype)] * config.is_8bit_compute
    return ", ".join([size, capacity(config), *compute])


def _numbers(forecast: Forecast, bill: Bill | None) -> str:
    """Return speed, memory and price, as far as they are known."""
    ends = forecast.tokens_per_second_range
    parts = [f"{pairs:.3g} pairs/s" for pairs in pairs_of(forecast).values()]
    if forecast.tokens_per_second is not None:
        between = "" if ends is None else f", {units.rate(ends[0])} to {units.rate(ends[1])}"
        speed = units.rate(forecast.tokens_per_second)
        parts.append(f"{speed} tokens/s ({forecast.speed_basis}{between})")
    if forecast.memory is not None:
        peak = units.gib(forecast.memory.peak_allocated_bytes)
        error = units.error(forecast.memory.uncertainty)
        budget = units.gib(forecast.forecaster.budget_bytes)
        doubt = ", too close to be sure" if forecast.fit is Fit.UNCERTAIN else ""
        parts.append(f"{peak} (within {error}) of the {budget} budget{doubt}")
    if bill is not None:
        parts.append(f"{_per_million(bill)} per million tokens")
    return ", ".join(parts)


def _why(tied: Sequence[str], *, by: Literal["speed", "cost"]) -> str:
    """Return what a GPU is recommended by, the first of those that may lead by that."""
    if len(tied) == 1:
        return f"predicted the {'fastest' if by == 'speed' else 'cheapest at known prices'}"
    others = listed(tied[1:])
    return f"chosen by its predicted {by}, statistically indistinguishable from the {others}'s"


def _offer_words(bill: Bill) -> str:
    """Return a GPU and who rents it out: ``the l4 at Modal``."""
    gpu = bill.offer.gpu
    return f"the {gpu} at {bill.offer.label.removeprefix(gpu).strip()}"


def _cost(bill: Bill) -> str:
    """Return dollars and what they may come to: ``$0.848 ($0.315 to $1.38)``."""
    return f"{units.usd(bill.usd)} ({' to '.join(units.usd(end.usd) for end in bill.extremes)})"


def _per_million(bill: Bill) -> str:
    """Return dollars per million tokens with their ends: ``$0.138 ($0.0469–0.229)``."""
    usd, *ends = bill.range_of(attrgetter("usd_per_million_tokens"))
    return f"{units.usd(usd)} ({units.usd_interval((ends[0], ends[1]))})"


def _took(bill: Bill) -> str:
    return units.duration(3600 * bill.wall_hours)


def _too_small(plan: CardPlan) -> str:
    assert plan.survey is not None, "of one configuration something is shown"
    least = plan.survey.found.least_bytes
    if least is None:
        what = "every configuration is forbidden for this model and GPU"
        return ": ".join([what, *plan.obstacles])
    budget, left = units.gib(plan.forecaster.budget_bytes), unquantized(plan.forecaster.model)
    why = f", of which no quantization saves any: {left}" if left else ""
    return f"the smallest configuration needs {units.gib(least)}{why}, and the budget is {budget}"


def _why_not(plan: CardPlan) -> str:
    """Return why a GPU does not do what others do."""
    if plan.shown is None:
        return _too_small(plan)
    if plan.shown.broken is not None:
        return plan.shown.broken.reason
    return "has no configuration in common" if plan.fits else "does not fit"


def _facts(plan: CardPlan, shown: Forecast, bill: Bill | None) -> Iterator[Fact]:
    """Yield what a person needs to decide about one GPU."""
    survey, epoch, speed = plan.survey, shown.epoch, shown.tokens_per_second
    yield "settings", _but(plan_details.settings(shown.config))
    whole = plan.forecaster.model.part_of
    if whole is not None:
        beside = "its other parts, as a vision tower, are not loaded and not counted"
        yield "model", f"the text decoder of a {whole}: {beside}"
    by = "by rank, alpha, batch and model" if shown.config.method == "sft" else "published advice"
    yield "learning", f"rate {shown.learning_rate.brief}, {by}"
    if epoch is not None and speed:
        tokens = f"{epoch.loss_tokens:,} loss tokens in {units.plural(epoch.steps, 'step')}"
        cut = cut_in_words(epoch, shown.config)
        yield "one epoch", f"{units.duration(epoch.loss_tokens / speed)}, {tokens}; {cut}"
    if plan.asked.grpo:
        yield "generation", GENERATION
        rate = shown.learning_rate.value
        settings = grpo_config(shown.config, plan.asked.grpo, learning_rate=rate)
        yield "for TRL", f"GRPOConfig({', '.join(f'{k}={v!r}' for k, v in settings.items())})"
    elif bill is not None:
        what = f"{_cost(bill)}, {_took(bill)}, {bill.offer.label}"
        yield "cost", f"{plan_details.work_words(bill.workload)}: {what}"
    elif not plan.bills and speed is not None:
        yield "cost", f"no price is known: {PRICE_OPTION} {plan.gpu.name}=DOLLARS an hour gives one"
    for use, label, most in ((Use.FASTER, "faster", 1), (Use.LEANER, "memory", 2)):
        useful = [change for change in few(plan.what_ifs) if change.use is use][:most]
        if useful:
            yield label, " or ".join(map(plan_details.change_words, useful))
    if survey is not None:
        yield from _choices(survey, shown)
        yield from _numerics(plan, survey)
    yield from _quality(shown, survey)


def _but(words: Sequence[str]) -> str:
    """Return in how far settings are not the standard recipe's."""
    recipe = "the standard QLoRA recipe"
    return f"{recipe}, but {', '.join(words)}" if words else recipe


def _choices(survey: Survey, best: Forecast) -> Iterator[Fact]:
    """Yield what other lengths and capacities come to, and what was passed over."""
    rivals = survey.fastest_by_class
    lengths = {n: f for (capacity, n), f in rivals.items() if capacity == survey.capacity}
    if len(lengths) > 1 and best.tokens_per_second is not None:
        compute = best.config.compute_dtype
        speeds = (f"{n:,}: {_rate(lengths[n], beside=compute)}" for n in sorted(lengths))
        yield "by length", f"{', '.join(speeds)} tokens/s (--seq-len)"
    searched = math.prod(len(survey.space.values_of(key)) for key in CAPACITY_KEYS)
    if searched > 1:
        why = "the nearest to the standard recipe's of those that fit"
        if len({capacity for capacity, _ in rivals}) == 1:
            why = f"the only one of {searched} searched that may fit"
        elif survey.capacity == standard_capacity(survey.model):
            why = "the standard recipe's"
        length = best.config.seq_len
        others = [f for (c, n), f in rivals.items() if c != survey.capacity and n == length]
        others = [f for f in others if f.tokens_per_second is not None]
        ends = [pick(others, key=candidates.speed_order) for pick in (min, max) if others]
        compute = best.config.compute_dtype
        told = {capacity(f.config): _rate(f, beside=compute) for f in ends}
        rates = ", ".join(f"{name}: {speed}" for name, speed in told.items())
        predicted = f"; predicted are {rates} tokens/s" if rates else ""
        yield "capacity", f"{capacity(best.config)} is {why}{predicted}"
    other = survey.alternative
    if other and other.memory and (times := candidates.speed_ratio(other, best)):
        peak = units.gib(other.peak_allocated_bytes)
        error = units.error(other.memory.uncertainty)
        change = units.changes(other.config, baseline=best.config)
        fits = f"its {peak} (within {error}) may not fit"
        yield "riskier", f"{change} is predicted {_times(times)} as fast, and {fits}"


def _rate(forecast: Forecast, *, beside: str) -> str:
    """Return a speed, and its compute dtype where that is not the one it stands beside."""
    dtype = forecast.config.compute_dtype
    compute = f" ({units.phrase('compute_dtype', dtype)})" if dtype != beside else ""
    return f"{units.rate(forecast.tokens_per_second)}{compute}"


def _numerics(plan: CardPlan, survey: Survey) -> Iterator[Fact]:
    """Yield how fast other classes of numerics are beside 16-bit compute, where a space has
    several: the plainest of those that may be the fastest is recommended."""
    classes = survey.fastest_by_numerics
    wide = classes.get("16-bit")
    if wide is None:
        return
    gains = {n: plan.times_16_bit(f) for n, f in classes.items() if n != "16-bit"}
    told = [f"{numerics} compute is {_times(of)}" for numerics, of in gains.items() if of]
    if not told:
        return
    compute = units.phrase("compute_dtype", wide.config.compute_dtype)
    speed = f"{compute} at {units.rate(wide.tokens_per_second)} tokens/s"
    words = f"by prediction {' and '.join(told)} as fast as {speed}"
    if plan.shown is not None and plan.shown.config.is_8bit_compute:
        yield "numerics", f"{words} (--set numerics=16-bit)"
    else:
        settled = f"`sweep run` on the {plan.gpu.name} itself settles it"
        yield "numerics", f"{words}: not sure to gain; {settled}"


def _quality(shown: Forecast, survey: Survey | None) -> Iterator[Fact]:
    """Yield what is known of what the answer's numerics cost in loss, and those of the fastest of
    each class."""
    answers = [shown]
    if survey is not None:
        answers += survey.fastest_by_numerics.values()
    quality = quality_in_words(forecast.config for forecast in answers)
    if quality:
        yield "quality", quality


def _times(ratio: Range) -> str:
    """Return how many times, and whether that is a tie: ``1.47 times (0.94 to 2.32, a tie)``."""
    tie = ", a tie" if ratio.low <= 1.0 <= ratio.high else ""
    return f"{ratio.value:.2f} times ({ratio.low:.2f} to {ratio.high:.2f}{tie})"


def _searched(plans: Sequence[CardPlan]) -> Iterator[Fact]:
    """Yield which spaces were searched, which settings are free in them, and which fixed."""
    looked = [(plan, plan.survey) for plan in plans if plan.survey is not None]
    if not looked:
        yield "asked", "this configuration alone; without --exact what you do not fix is searched"
        return
    spaces, free = dict[str, None](), dict[str, None]()
    for plan, survey in looked:
        total = survey.total
        whole = "a continuous space" if total is None else units.plural(total, "configuration")
        which = _SPACE_WORDS[plan.asked.kind or "file"].format(survey.space.name)
        how = _how_searched(survey) if len(looked) == 1 else ""
        spaces[f"{which}, {whole}{how}"] = None
        space = survey.space
        free |= dict.fromkeys(key for key in space.dimensions if len(space.values_of(key)) != 1)
    yield "searched", "; ".join(spaces)
    yield "free", f"{', '.join(free) or 'nothing'}; all else is fixed"
    plan, survey = looked[0]
    if held := {key: survey.space.fixed[key] for key in plan.asked.held}:
        yield "you fixed", _in_words(held)


def _how_searched(survey: Survey) -> str:
    """Return how many of a space fit; of a large one, how the fastest was found."""
    found = survey.found
    if not found.is_whole:
        return ", of which bounds rule out all that is slower"
    cannot = found.looked_at - found.fit - found.uncertain
    return f"; {found.fit:,} surely fit, {found.uncertain:,} may fit, {cannot:,} cannot"


def _in_words(held: Mapping[str, Any]) -> str:
    return ", ".join(units.phrase(key, value) for key, value in held.items())


def _next(plan: CardPlan) -> Iterator[Fact]:
    """Yield what a person has to know before they go on, and the command to go on with."""
    if (needed := torch_for(plan.gpu.compute_capability)) is not None:
        yield "torch", needed
    if (caveat := plan.fp16_caveat) is not None:
        yield "fp16", caveat
    if (about := plan.about_trainer) is not None:
        yield "trainer", about
    if plan.shown is None:
        model = plan.forecaster.model.name
        yield "next", f"`sweep plan --cheapest --model {model}` says which GPUs can train it"
    elif trainer_of(plan.shown.config).measured is not None:
        yield "next", "no trial of ours runs its kernels, so no study measures it"
    elif plan.survey is not None and not plan.asked.grpo:
        seconds = plan.survey.study_seconds()
        took = f" ({' to '.join(map(units.duration, seconds))})" if seconds else ""
        yield "next", f"`{plan.asked.run_command}` measures it{took}"


def _settings_facts(chosen: Mapping[str, Forecast]) -> Iterator[Fact]:
    """Yield the settings that the GPUs have in common, and what each has of its own."""
    words = {gpu: plan_details.settings(forecast.config) for gpu, forecast in chosen.items()}
    first, *others = words.values()
    common = [word for word in first if all(word in other for other in others)]
    yield "settings", _but(common)
    own = {gpu: [word for word in of if word not in common] for gpu, of in words.items()}
    if more := "; ".join(f"{gpu}: also {', '.join(of)}" for gpu, of in own.items() if of):
        yield "", more


def _compared(comparison: CardComparison) -> Iterator[Fact]:
    """Yield which GPU is the cheapest and which the fastest, as far as that is known."""
    size = f"{comparison.effective_batch_size:,} x {comparison.seq_len:,}"
    yield "compared", f"{plan_details.work_words(comparison.workload)}, {size} a step"
    costs = comparison.bills
    if costs is None:
        yield "cheapest", f"no price is known: give one with {PRICE_OPTION} a10=0.75"
    else:
        of_gpu = {bill.offer.gpu: bill for bill in reversed(costs.perhaps_cheapest)}
        tied = (of_gpu[gpu] for gpu in comparison.perhaps_best)
        yield "cheapest", _tied([f"{b.offer.gpu} {_cost(b)}, {_took(b)}" for b in tied])
    yield "fastest", _tied(comparison.perhaps_fastest)


def _tied(leaders: Sequence[str]) -> str:
    """Return what leads, and that several do as far as is known."""
    return f"{listed(leaders)}{', statistically indistinguishable' * (len(leaders) > 1)}"


def calibrating(answers: Sequence[Lessons]) -> RenderableType:
    """Return the trials that would teach most of each GPU's speed, and what to type there."""
    parts: list[RenderableType] = []
    for answer in answers:
        known = answer.survey.forecaster
        now, times = answer.ranges[0], [f"{high / low:.2g}" for low, high in answer.ranges]
        cost = "" if answer.usd is None else f", {units.usd(answer.usd)}"
        sentence = (
            f"{units.plural(len(answer.lessons), 'trial')} on the {known.gpu.name} "
            f"({units.duration(answer.seconds)}{cost}) would narrow the predicted speed of "
            f"{known.model.name} from {times[0]} times, end to end, to {times[1]}, as is expected"
        )
        header = (">seconds", "teaches", ">known within", "configuration")
        rows = [
            (
                f"{lesson.seconds:.0f}",
                lesson.factor.replace("_", "-"),
                " -> ".join(f"{math.expm1(NINE_IN_TEN * of):.0%}" for of in lesson.log_spreads),
                _what(lesson.forecast.config),
            )
            for lesson in answer.lessons
        ]
        said = [
            ("answer", _what(answer.answer.config)),
            ("predicted", f"{' to '.join(map(units.rate, now))} tokens/s"),
            ("seconds", "of one trial, without the worker's start"),
            ("known", "how far off nine in ten GPUs are in that part, before -> after the trial"),
        ]
        parts += [_answer(sentence, [grid(header, rows), Text("")], said), Text("")]
        parts += [Text(f"$ {c}", no_wrap=True, overflow="ignore") for c in answer.commands]
    return Group(*parts)


def longest(answers: Sequence[Longest], *, is_detailed: bool) -> RenderableType:
    """Return the longest sequences on each GPU, by micro-batch."""
    most = max(3, _LINES_SHOWN // len(answers))
    if is_detailed:
        most = candidates.VALUES_SHOWN
    parts: list[RenderableType] = []
    for answer in answers:
        best = answer.best
        where = f"{answer.forecaster.model.name} on the {answer.forecaster.gpu.name}"
        if answer.asked.grpo:
            where = f"GRPO's training step alone, of {where}"
        sentence = f"No sequence of {LENGTH_STEP} tokens surely fits for {where}"
        if best is not None and best.forecast is not None:
            what = f"{best.seq_len:,} tokens at micro-batch {best.micro_batch_size}"
            numbers = _numbers(best.forecast, None)
            sentence = f"The longest sequences that surely fit for {where}: {what}: {numbers}"
        parts += _unknown_speeds(row.forecast for row in answer.rows)
        parts.append(Text(f"{sentence}\n", style="bold"))
        shown = candidates.evenly_spaced((row.micro_batch_size for row in answer.rows), most=most)
        rows = [
            (
                f"{row.micro_batch_size:,}",
                f"{row.seq_len:,}" if row.seq_len else "-",
                f"{row.possible:,}" if row.possible > row.seq_len else "",
                units.rate(row.forecast.tokens_per_second if row.forecast else None),
                units.gib(row.forecast.peak_allocated_bytes if row.forecast else None),
            )
            for row in answer.rows
            if row.micro_batch_size in shown
        ]
        header = (">micro-batch", ">longest", ">perhaps", ">tokens/s", ">peak")
        parts += [grid(header, rows), Text("")] if rows else ()
    first, rows_of_all = answers[0], [row for answer in answers for row in answer.rows]
    found = {a.forecaster.gpu.name: a.best.forecast for a in answers if a.best and a.best.forecast}
    said = [*_settings_facts(found)] if found else []
    tried = units.plural(first.configurations, "configuration")
    said += [("generation", GENERATION)] if first.asked.grpo else []
    said += [("searched", f"lengths in steps of {LENGTH_STEP} tokens, {tried} at each size")]
    if first.asked.held:
        said += [("you fixed", _in_words(first.asked.held))]
    if any(row.possible > row.seq_len for row in rows_of_all):
        said += [("perhaps", "is too close to the budget to be sure")]
    if any(row.possible == first.limit for row in rows_of_all):
        said += [("limit", f"the model has positions for {first.limit:,} tokens")]
    if first.best is not None:
        option = f"--seq-len {first.best.seq_len}"
        said += [("next", f"{option} in place of --longest plans such a training")]
    return Group(*parts, facts([*said, *([] if is_detailed else [_DETAILS])]))


def cheapest(answer: Cheapest, *, is_detailed: bool) -> RenderableType:
    """Return which GPUs do a job, the cheapest first."""
    model, best = answer.model.name, answer.cheapest
    shown = answer.able if is_detailed else answer.able[:_LINES_SHOWN]
    others = [card for card in answer.cards if not card.is_able]
    tied = [card.gpu.name for card in answer.perhaps_cheapest]
    sentence, said = f"No GPU of a known price is predicted to do it for {model}", list[Fact]()
    if best is not None and best.forecast is not None:
        what = f"{_what(best.forecast.config)}: {_numbers(best.forecast, best.bill)}"
        which = f"{_offer_words(best.bill)}, {_why(tied, by='cost')}"
        sentence = f"Recommended for {model}: {which}: {what}"
        said.append(("settings", _but(plan_details.settings(best.forecast.config))))
    work = "a training" if answer.workload is None else plan_details.work_words(answer.workload)
    limit = answer.deadline_seconds
    by = "" if limit is None else f" within {units.duration(limit)}"
    said.append(("the job", f"{work}{by}; on every GPU {_in_words(answer.held)}"))
    if late := [c.gpu.name for c in shown if c.outcome is Outcome.PERHAPS_LATE]:
        said.append(("may be late", ", ".join(late)))
    least = answer.smallest
    if least is not None and least is not best:
        cost = f"{_cost(least.bill)} in {_took(least.bill)}"
        said.append(("smallest", f"{_offer_words(least.bill)}, {cost}"))
    if is_detailed:
        said += [(card.gpu.name, f"{card.outcome.value}: {_why_unable(card)}") for card in others]
        said += [("price", plan_details.price_source(card.bill.offer)) for card in answer.able[:1]]
    else:
        more = len(answer.able) - len(shown)
        words = [f"{more} more do it"] if more else []
        by_outcome: dict[str, list[str]] = {}
        for card in others:
            by_outcome.setdefault(card.outcome.value, []).append(card.gpu.name)
        words += [f"{outcome}: {', '.join(names)}" for outcome, names in by_outcome.items()]
        said.append(("others", "; ".join(words) or "none"))
        if best is not None:
            said.append(("next", f"`sweep plan {best.gpu.name} --model {model}` plans it there"))
        said.append(_DETAILS)
    table = [plan_details.offers([card.bill for card in shown]), Text("")] if shown else []
    return _answer(sentence, table, said, [card.forecast for card in answer.cards])


def _why_unable(card: JobCard) -> str:
    if card.outcome is Outcome.TOO_SMALL:
        need, has = units.gib(card.least_bytes), units.gib(card.gpu.budget_bytes)
        return f"needs {need} at least, has {has} for a training"
    if card.outcome in (Outcome.TOO_SLOW, Outcome.PERHAPS_IN_TIME):
        soonest, latest = map(_took, card.bill.extremes)
        price = f"{units.usd(card.bill.usd)} at {card.bill.offer.label}"
        return f"{_took(card.bill)} ({soonest} to {latest}), {price}"
    return card.reason or f"give one with {PRICE_OPTION} {card.gpu.name}=DOLLARS"
