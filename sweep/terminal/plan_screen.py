"""What `sweep plan` shows: one screen that says what to run, and with --details all the rest."""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from typing import Any, Literal

from rich.console import Group, RenderableType
from rich.text import Text

from qlora_sweep.reports import format as units
from qlora_sweep.reports.words import capacity, cut_in_words
from qlora_sweep.search_spaces.config import CAPACITY_KEYS, TrialConfig, as_options
from qlora_sweep.search_spaces.costs import Bill
from qlora_sweep.search_spaces.errors import listed
from qlora_sweep.search_spaces.estimates import Estimate
from qlora_sweep.search_spaces.gpus import GpuSpec, Interconnect
from qlora_sweep.search_spaces.linears import standard_capacity, unquantized
from qlora_sweep.search_spaces.prices import PRICE_OPTION
from qlora_sweep.search_spaces.quality import quality_in_words
from qlora_sweep.search_spaces.rules import torch_for
from qlora_sweep.search_spaces.trainers import trainer_of
from qlora_sweep.sweep.planning import candidates
from qlora_sweep.sweep.planning.answers import GpuPlans, HostPlans
from qlora_sweep.sweep.planning.backwards import (
    LENGTH_STEP,
    Cheapest,
    GpuForJob,
    Longest,
    LongestRow,
    Outcome,
)
from qlora_sweep.sweep.planning.calibrating import CalibrationTrial, Lessons
from qlora_sweep.sweep.planning.documents import pairs_per_second
from qlora_sweep.sweep.planning.images import ImagePlan
from qlora_sweep.sweep.planning.plan import (
    GENERATION,
    GpuPlan,
    PlanComparison,
    Use,
    few,
    perhaps_fastest,
)
from qlora_sweep.sweep.planning.survey import ShapeTable, Survey
from qlora_sweep.sweep.predict.forecast import Forecast
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.predict.speed.predictor import NINE_IN_TEN
from qlora_sweep.sweep.predict.speed.steps import HOST_SHARE, LINK_SHARES, link_of
from qlora_sweep.sweep.terminal import plan_details
from qlora_sweep.sweep.terminal.drawing import Fact, facts, grid, section

_DETAILS = ("details", "add --details for every size, rank, change, price and source")
_LINES_SHOWN = 4
"""Micro-batches of all GPUs, or GPUs, that one screen has room for."""
_SPACE_WORDS = {
    "preset": "preset {}",
    "file": "file {}",
    "standard": "the space that `sweep init --gpu {}` writes",
}


def _answer(
    sentence: str,
    said: Sequence[Fact],
    *,
    table: RenderableType | None = None,
    shown: Iterable[Forecast | None] = (),
) -> Group:
    """Return a sentence that stands alone, a table where there is one, and facts; before them why
    the speed of any that is shown is not known."""
    parts = _unknown_speeds(shown)
    parts.append(Text(f"{sentence}\n", style="bold"))
    if table is not None:
        parts.append(table)
    parts.append(facts(said))
    return Group(*parts)


def _unknown_speeds(shown: Iterable[Forecast | None]) -> list[RenderableType]:
    """Return why the speeds of configurations are not known, once each."""
    reasons: dict[str, None] = {}
    for forecast in shown:
        if forecast is not None and forecast.speed_unknown:
            reasons[forecast.speed_unknown] = None
    return [Text(reason, style="bold") for reason in reasons]


def _needed(plan: GpuPlan) -> list[RenderableType]:
    """Return, as the first line, what has to be installed for what is shown to hold."""
    if plan.kernels_needed is None:
        return []
    return [Text(units.capitalized(plan.kernels_needed))]


def one_gpu(plan: GpuPlan, *, is_detailed: bool) -> RenderableType:
    """Return the plan of one GPU: the recommendation, what decides, and what to do next."""
    shown = plan.shown
    where = f"for {plan.forecaster.model.name} on the {plan.gpu.name}"
    if plan.asked.grpo:
        where = f"for GRPO's training step alone, of {where.removeprefix('for ')}"
    said: list[Fact] = []
    if shown is None:
        sentence = f"Nothing fits {where}: {_too_small(plan)}"
    elif shown.violation is not None:
        sentence = f"{_what(shown.config)} is not possible {where}: {shown.violation.reason}"
    else:
        bill = None
        if plan.bills and shown.fit is not Fit.NO:
            bill = plan.bills[0]
        what = _what(shown.config)
        numbers = _numbers(shown, bill)
        if plan.survey is None:
            sentence = f"{what} {plan_details.FIT_WORDS[shown.fit]} {where}: {numbers}"
        else:
            sentence = f"Recommended {where}: {what}: {numbers}"
        said += _facts(plan, shown, bill)
    said += _searched([plan])
    said += _next(plan)
    said.append(_DETAILS)
    parts = _needed(plan)
    parts.append(_answer(sentence, said, shown=[shown]))
    if is_detailed:
        parts += plan_details.details(plan)
    return Group(*parts)


def several_gpus(answer: GpuPlans, *, is_detailed: bool) -> RenderableType:
    """Return which GPU to take, the same training on each, and what differs."""
    comparison = answer.comparison
    chosen: Mapping[str, Forecast] = _shown_by_name(answer.plans)
    by: Literal["speed", "cost"] = "speed"
    bills: Sequence[Bill] = ()
    bill = None
    if comparison is not None:
        chosen = comparison.chosen
        if comparison.bills is not None:
            by = "cost"
            bills = comparison.bills.bills
            bill = comparison.bills.cheapest
    able = {plan.name: plan for plan in answer.plans if plan.name in chosen}
    best = answer.plans[0]
    model = best.forecaster.model.name
    sentence = f"Nothing fits for {model} on the {listed(plan.name for plan in answer.plans)}"
    said: list[Fact] = []
    if chosen:
        if comparison is not None:
            best = able[comparison.perhaps_best[0]]
            why = _why(comparison.perhaps_best, by=by)
            said += _compared(comparison)
        elif len(chosen) == 1:
            (best,) = able.values()
            why = "which alone has room"
        else:
            best = able[max(able, key=lambda name: candidates.speed_order(chosen[name]))]
            why = "chosen by its predicted speed"
        which = _offer_words(bill) if bill else f"the {best.name}"
        forecast = chosen[best.name]
        what = f"{_what(forecast.config)}: {_numbers(forecast, bill)}"
        sentence = f"Recommended for {model}: {which}, {why}: {what}"
        said += _settings_facts(chosen)
    cheapest_of = {bill.offer.gpu: bill for bill in reversed(bills)}
    rows = [_row(name, chosen[name], cheapest_of.get(name)) for name in able]
    parts = _needed(best)
    parts.append(_several(sentence, said, best, answer.plans, rows, chosen))
    if is_detailed:
        if comparison is not None and comparison.bills is not None:
            lines = plan_details.break_even_lines(comparison.bills)
            parts += section("Prices", plan_details.offers(bills), *lines)
        parts += _each_in_detail(answer.plans)
    return Group(*parts)


def ways(answer: HostPlans, *, is_detailed: bool) -> RenderableType:
    """Return what one GPU of a host, all of them and shards come to, and which is the fastest."""
    plans = answer.plans
    comparison = answer.comparison
    shown = _shown_by_name(plans)
    able = {plan.name: plan for plan in plans if plan.name in shown}
    best = plans[0]
    where = f"for {best.forecaster.model.name} on {answer.devices} x {best.gpu.name}"
    sentence = f"Nothing fits {where}"
    said: list[Fact] = []
    if shown:
        tied = perhaps_fastest(shown if comparison is None else comparison.chosen)
        fastest = tied[0]
        best = able[fastest]
        why = _why(tied, by="speed")
        if len(shown) == 1:
            why = "which alone has room" if len(plans) > 1 else "which alone is possible"
        numbers = _numbers(shown[fastest], next(iter(best.bills), None))
        what = f"{_what(shown[fastest].config)}: {numbers}"
        sentence = f"Recommended {where}: {fastest}, {why}: {what}"
        said += _settings_facts(shown)
    if comparison is not None and best.survey is not None:
        said.append(("same batch", _at_one_batch(comparison)))
    rows = [_row(name, of, next(iter(able[name].bills), None)) for name, of in shown.items()]
    more = list(answer.refused.items())
    more.append(("link", _link_words(link_of(best.gpu))))
    parts = [_several(sentence, said, best, plans, rows, shown, more)]
    if is_detailed:
        parts += _each_in_detail(plans)
    return Group(*parts)


def _shown_by_name(plans: Sequence[GpuPlan]) -> dict[str, Forecast]:
    """Return what is shown of each plan of which it fits."""
    shown: dict[str, Forecast] = {}
    for plan in plans:
        if plan.shown is not None and plan.fits:
            shown[plan.name] = plan.shown
    return shown


def _several(
    sentence: str,
    said: list[Fact],
    best: GpuPlan,
    plans: Sequence[GpuPlan],
    rows: Sequence[Sequence[str]],
    chosen: Mapping[str, Forecast],
    more: Sequence[Fact] = (),
) -> RenderableType:
    """Return an answer of several plans with a row for each that can do it, and why others
    cannot."""
    for plan in plans:
        if plan.name not in chosen:
            said.append((plan.name, _why_not(plan)))
    said += more
    said += _searched(plans)
    said += _next(best)
    said.append(_DETAILS)
    table = grid(_HEADER, rows) if rows else None
    return _answer(sentence, said, table=table, shown=chosen.values())


def _each_in_detail(plans: Sequence[GpuPlan]) -> Iterator[RenderableType]:
    for plan in plans:
        yield Text(f"\n== {plan.name}\n", style="bold")
        yield one_gpu(plan, is_detailed=True)


def _at_one_batch(comparison: PlanComparison) -> str:
    """Return how fast each way is in steps of one size, beside the first."""
    words: list[str] = []
    first = next(iter(comparison.chosen.values()))
    for name, forecast in comparison.chosen.items():
        word = f"{name} {units.rate(forecast.tokens_per_second)}"
        if forecast is first:
            word += " tokens/s"
        elif times := candidates.speed_ratio(forecast, first):
            word += f", {_times(times)} as fast"
        words.append(word)
    return f"{_step_size(comparison)} a step: {'; '.join(words)}"


def _step_size(comparison: PlanComparison) -> str:
    return f"{comparison.effective_batch_size:,} x {comparison.seq_len:,}"


def _link_words(link: Interconnect) -> str:
    name = {"nvlink": "NVLink", "pcie": "PCIe"}[link.kind]
    rate = link.bytes_per_second / 1e9
    share = units.percent(LINK_SHARES[link.kind])
    known = "steps of several GPUs were measured between two H200 through NVLink alone"
    return f"{name}, {rate:.1f} GB/s each way, of which {share} is counted on; {known}"


_HEADER = ("", ">tokens/s", ">between", ">size", ">peak", ">1M tokens", "")


def _row(name: str, forecast: Forecast, bill: Bill | None) -> tuple[str, ...]:
    return (
        name,
        units.rate(forecast.tokens_per_second),
        units.rate_interval(forecast.speed_estimate and forecast.speed_estimate.ends),
        units.size(forecast.config),
        units.gib(forecast.peak_allocated_bytes),
        _per_million(bill) if bill else units.DASH,
        "" if forecast.fit is Fit.YES else "may not fit",
    )


def _what(config: TrialConfig) -> str:
    """Return size and capacity: ``micro-batch 10, length 512, rank 16 on q,k,v,o, fp8 compute``."""
    size = f"micro-batch {config.micro_batch_size:,}, length {config.seq_len:,}"
    what = f"{size}, {capacity(config)}"
    if config.is_8bit_compute:
        what += f", {units.phrase('compute_dtype', config.compute_dtype)}"
    return what


def _numbers(forecast: Forecast, bill: Bill | None) -> str:
    """Return speed, memory and price, as far as they are known."""
    parts: list[str] = []
    pairs = pairs_per_second(forecast)
    if pairs is not None:
        parts.append(f"{pairs:.3g} pairs/s")
    if forecast.tokens_per_second is not None:
        basis = str(forecast.speed_basis)
        estimate = forecast.speed_estimate
        if estimate is not None:
            low, high = map(units.rate, estimate.ends)
            basis += f", {low} to {high}"
        parts.append(f"{units.rate(forecast.tokens_per_second)} tokens/s ({basis})")
    if forecast.memory is not None:
        peak = units.gib(forecast.memory.peak_allocated_bytes)
        error = units.error(forecast.memory.uncertainty)
        budget = units.gib(forecast.forecaster.budget_bytes)
        parts.append(f"{peak} (within {error}) of the {budget} budget")
        if forecast.fit is Fit.UNCERTAIN:
            parts.append("too close to be sure")
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
    least, most = bill.extremes
    return f"{units.usd(bill.usd)} ({units.usd(least.usd)} to {units.usd(most.usd)})"


def _per_million(bill: Bill) -> str:
    """Return dollars per million tokens with their ends: ``$0.138 ($0.0469–0.229)``."""
    usd = bill.range_of(attrgetter("usd_per_million_tokens"))
    return f"{units.usd(usd.value)} ({units.usd_interval((usd.low, usd.high))})"


def _took(bill: Bill) -> str:
    return units.duration(3600 * bill.wall_hours)


def _too_small(plan: GpuPlan) -> str:
    assert plan.survey is not None, "of one configuration something is shown"
    least = plan.survey.found.least_bytes
    if least is None:
        words = "every configuration is forbidden for this model and GPU"
        for obstacle in plan.obstacles:
            words += f": {obstacle}"
        return words
    needed = units.gib(least)
    left = unquantized(plan.forecaster.model)
    if left:
        needed += f", of which no quantization saves any: {left}"
    budget = units.gib(plan.forecaster.budget_bytes)
    return f"the smallest configuration needs {needed}, and the budget is {budget}"


def _why_not(plan: GpuPlan) -> str:
    """Return why a GPU does not do what others do."""
    if plan.shown is None:
        return _too_small(plan)
    if plan.shown.violation is not None:
        return plan.shown.violation.reason
    return "has no configuration in common" if plan.fits else "does not fit"


def _facts(plan: GpuPlan, shown: Forecast, bill: Bill | None) -> Iterator[Fact]:
    """Yield what a person needs to decide about one GPU."""
    epoch = shown.epoch
    speed = shown.tokens_per_second
    yield "settings", _but(plan_details.settings(shown.config))
    whole = plan.forecaster.model.part_of
    if plan.images is not None:
        yield from _images(plan.images)
    elif whole is not None:
        beside = "its other parts, as a vision tower, are not loaded and not counted"
        yield "model", f"the text decoder of a {whole}: {beside}"
    if shown.memory is not None and shown.memory.host_bytes:
        yield "host", _host_words(plan.gpu, shown.memory.host_bytes)
    by = "published advice"
    if shown.config.method == "sft":
        by = "by rank, alpha, batch and model"
    yield "learning", f"rate {shown.learning_rate.brief}, {by}"
    if epoch is not None and speed:
        tokens = f"{epoch.loss_tokens:,} loss tokens in {units.plural(epoch.steps, 'step')}"
        cut = cut_in_words(epoch, shown.config)
        yield "one epoch", f"{units.duration(epoch.loss_tokens / speed)}, {tokens}; {cut}"
    if plan.grpo_config is not None:
        yield "generation", GENERATION
        arguments = ", ".join(f"{key}={value!r}" for key, value in plan.grpo_config.items())
        yield "for TRL", f"GRPOConfig({arguments})"
    elif bill is not None:
        cost = f"{_cost(bill)}, {_took(bill)}, {bill.offer.label}"
        yield "cost", f"{plan_details.work_words(bill.workload)}: {cost}"
    elif not plan.bills and speed is not None:
        yield "cost", f"no price is known: {PRICE_OPTION} {plan.gpu.name}=DOLLARS an hour gives one"
    for use, label, most in ((Use.FASTER, "faster", 1), (Use.LEANER, "memory", 2)):
        useful = [change for change in few(plan.what_ifs) if change.use is use]
        if useful:
            yield label, " or ".join(map(plan_details.change_words, useful[:most]))
    answers = [shown]
    if plan.survey is None and plan.table is not None and shown.fit is not Fit.YES:
        yield "smaller", _smaller(plan.table, shown.config.seq_len)
    if plan.survey is not None:
        yield from _choices(plan.survey, shown)
        yield from _numerics(plan, plan.survey)
        answers += plan.survey.fastest_by_numerics.values()
    # Of the answer, and of the fastest of each class of numerics.
    quality = quality_in_words(forecast.config for forecast in answers)
    if quality:
        yield "quality", quality


def _smaller(table: ShapeTable, asked_length: int) -> str:
    """Return the largest micro-batch that surely fits at the length that was asked about, or at the
    longest shorter one that is looked at of which any does."""
    fitting = [
        length
        for length in table.lengths
        if length <= asked_length and table.largest[length].sure > 0
    ]
    if not fitting:
        return "none surely fits at any length up to this one; without --exact all is searched"
    length = max(fitting)
    batch = f"micro-batch {table.largest[length].sure}"
    if length == asked_length:
        return f"{batch} surely fits"
    of_length = table.largest.get(asked_length)
    none = "none surely fits" if of_length and of_length.possible else "none fits"
    return f"{none} at this length; at {length:,}, the next that was looked at, {batch} surely does"


def _host_words(gpu: GpuSpec, size: int) -> str:
    """Return what lies in the host's memory, and what it comes through."""
    if gpu.shares_host_memory:
        return (
            f"{units.gib(size)} of its memory is pinned, which is the GPU's own: nothing is saved"
        )
    rate = gpu.host_bytes_per_second / 1e9
    share = units.percent(HOST_SHARE)
    link = f"it comes through PCIe, {rate:.1f} GB/s, of which {share} is counted on"
    seen = "such steps were measured on an H200 alone"
    return f"{units.gib(size)} of its memory is pinned, which has to be free: {link}; {seen}"


def _images(images: ImagePlan) -> Iterator[Fact]:
    """Yield what a row's image is, and what others would take in its place."""
    seen = images.seen
    patches = f"{seen.patches:,} patches go through a frozen vision tower in 16 bits"
    tokens = f"{seen.tokens:,} tokens of its row; its {patches}"
    if images.is_fixed:
        yield "images", f"each is resized to {seen.side:,} px, {tokens}"
    else:
        yield "images", f"one of {seen.side:,} px is {tokens}"
    words: list[str] = []
    too_large: list[int] = []
    for side, forecast in images.by_side.items():
        if forecast.fit is Fit.NO:
            too_large.append(side)
            continue
        size = f"{side:,} px: {units.gib(forecast.peak_allocated_bytes)}"
        if forecast.fit is Fit.UNCERTAIN:
            size += " (may not fit)"
        words.append(size)
    if too_large:
        words.append(f"from {min(too_large):,} px on nothing fits")
    if words:
        yield "by image", f"{', '.join(words)} (--image-size; as much text beside it)"
    if images.largest is not None:
        sure, possible = images.largest
        fits = f"{sure:,} px fits" if sure else "none fits"
        if possible > sure:
            fits += f", {possible:,} px may"
        yield "largest", f"image of this batch, on a row with as much text: {fits}"


def _but(words: Sequence[str]) -> str:
    """Return how settings differ from the standard recipe."""
    if not words:
        return "the standard QLoRA recipe"
    return f"the standard QLoRA recipe, but {', '.join(words)}"


def _choices(survey: Survey, best: Forecast) -> Iterator[Fact]:
    """Yield what other lengths and capacities come to, and what was passed over."""
    compute = best.config.compute_dtype
    lengths: dict[int, Forecast] = {}
    others: list[Forecast] = []
    capacities = set()
    for (of_capacity, length), forecast in survey.fastest_by_class.items():
        capacities.add(of_capacity)
        if of_capacity == survey.capacity:
            lengths[length] = forecast
        elif length == best.config.seq_len and forecast.tokens_per_second is not None:
            others.append(forecast)
    if len(lengths) > 1 and best.tokens_per_second is not None:
        speeds: list[str] = []
        for length in sorted(lengths):
            speeds.append(f"{length:,}: {_rate(lengths[length], beside=compute)}")
        yield "by length", f"{', '.join(speeds)} tokens/s (--seq-len)"
    searched = math.prod(len(survey.space.values_of(key)) for key in CAPACITY_KEYS)
    if searched > 1:
        why = "the nearest to the standard recipe's of those that fit"
        if len(capacities) == 1:
            why = f"the only one of {searched} searched that may fit"
        elif survey.capacity == standard_capacity(survey.model):
            why = "the standard recipe's"
        words = f"{capacity(best.config)} is {why}"
        if others:
            slowest = min(others, key=candidates.speed_order)
            fastest = max(others, key=candidates.speed_order)
            rates = f"{capacity(slowest.config)}: {_rate(slowest, beside=compute)}"
            if fastest is not slowest:
                rates += f", {capacity(fastest.config)}: {_rate(fastest, beside=compute)}"
            words += f"; predicted are {rates} tokens/s"
        yield "capacity", words
    other = survey.alternative
    if other and other.memory and (times := candidates.speed_ratio(other, best)):
        peak = units.gib(other.peak_allocated_bytes)
        error = units.error(other.memory.uncertainty)
        change = units.changes(other.config, baseline=best.config)
        fits = f"its {peak} (within {error}) may not fit"
        yield "riskier", f"{change} is predicted {_times(times)} as fast, and {fits}"


def _rate(forecast: Forecast, *, beside: str) -> str:
    """Return a speed, and its compute dtype where that is not the one it stands beside."""
    rate = units.rate(forecast.tokens_per_second)
    dtype = forecast.config.compute_dtype
    if dtype == beside:
        return rate
    return f"{rate} ({units.phrase('compute_dtype', dtype)})"


def _numerics(plan: GpuPlan, survey: Survey) -> Iterator[Fact]:
    """Yield how fast other classes of numerics are beside 16-bit compute, where a space has
    several: the plainest of those that may be the fastest is recommended."""
    classes = survey.fastest_by_numerics
    wide = classes.get("16-bit")
    if wide is None:
        return
    gains: list[str] = []
    for numerics, forecast in classes.items():
        times = plan.times_16_bit(forecast)
        if numerics != "16-bit" and times is not None:
            gains.append(f"{numerics} compute is {_times(times)}")
    if not gains:
        return
    compute = units.phrase("compute_dtype", wide.config.compute_dtype)
    speed = f"{compute} at {units.rate(wide.tokens_per_second)} tokens/s"
    words = f"by prediction {' and '.join(gains)} as fast as {speed}"
    if plan.shown is not None and plan.shown.config.is_8bit_compute:
        yield "numerics", f"{words} (--set numerics=16-bit)"
    else:
        settled = f"`sweep run` on the {plan.gpu.name} itself settles it"
        yield "numerics", f"{words}: not sure to gain; {settled}"


def _times(ratio: Estimate) -> str:
    """Return how many times, and whether that is a tie: ``1.47 times (0.94 to 2.32, a tie)``."""
    tie = ", a tie" if ratio.holds(1.0) else ""
    return f"{ratio.value:.2f} times ({ratio.low:.2f} to {ratio.high:.2f}{tie})"


def _searched(plans: Sequence[GpuPlan]) -> Iterator[Fact]:
    """Yield which spaces were searched, which settings are free in them, and which fixed."""
    spaces: dict[str, None] = {}
    free: dict[str, None] = {}
    fixed = ""
    for plan in plans:
        survey = plan.survey
        if survey is None:
            continue
        space = survey.space
        size = "a continuous space"
        if survey.total is not None:
            size = units.plural(survey.total, "configuration")
        words = f"{_SPACE_WORDS[plan.asked.kind or 'file'].format(space.name)}, {size}"
        if len(plans) == 1:
            words += _how_searched(survey)
        if not spaces:
            # They are the same on every GPU.
            fixed = _in_words({key: space.fixed[key] for key in plan.asked.fixed_settings})
        spaces[words] = None
        for key in space.dimensions:
            if len(space.values_of(key)) != 1:
                free[key] = None
    if not spaces:
        yield "asked", "this configuration alone; without --exact what you do not fix is searched"
        return
    yield "searched", "; ".join(spaces)
    yield "free", f"{', '.join(free) or 'nothing'}; all else is fixed"
    if fixed:
        yield "you fixed", fixed


def _how_searched(survey: Survey) -> str:
    """Return how many of a space fit; of a large one, how the fastest was found."""
    found = survey.found
    if not found.is_whole:
        return ", of which bounds rule out all that is slower"
    cannot = found.looked_at - found.fit - found.uncertain
    return f"; {found.fit:,} surely fit, {found.uncertain:,} may fit, {cannot:,} cannot"


def _in_words(fixed_settings: Mapping[str, Any]) -> str:
    return ", ".join(units.phrase(key, value) for key, value in fixed_settings.items())


def _next(plan: GpuPlan) -> Iterator[Fact]:
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
        words = f"`{plan.asked.run_command}` measures it"
        seconds = plan.survey.study_seconds()
        if seconds is not None:
            words += f" ({' to '.join(map(units.duration, seconds))})"
        yield "next", words


def _settings_facts(chosen: Mapping[str, Forecast]) -> Iterator[Fact]:
    """Yield the settings that the GPUs have in common, and what each has of its own."""
    settings = {name: plan_details.settings(forecast.config) for name, forecast in chosen.items()}
    first, *others = settings.values()
    shared = set(first).intersection(*others)
    yield "settings", _but(list(filter(shared.__contains__, first)))
    own: list[str] = []
    for name, words in settings.items():
        more = [word for word in words if word not in shared]
        if more:
            own.append(f"{name}: also {', '.join(more)}")
    if own:
        yield "", "; ".join(own)


def _compared(comparison: PlanComparison) -> Iterator[Fact]:
    """Yield which GPU is the cheapest and which the fastest, as far as that is known."""
    work = plan_details.work_words(comparison.workload)
    yield "compared", f"{work}, {_step_size(comparison)} a step"
    costs = comparison.bills
    if costs is None:
        yield "cheapest", f"no price is known: give one with {PRICE_OPTION} a10=0.75"
    else:
        of_gpu: dict[str, str] = {}
        for bill in costs.perhaps_cheapest:
            gpu = bill.offer.gpu
            of_gpu.setdefault(gpu, f"{gpu} {_cost(bill)}, {_took(bill)}")
        yield "cheapest", _tied(list(of_gpu.values()))
    yield "fastest", _tied(comparison.perhaps_fastest)


def _tied(leaders: Sequence[str]) -> str:
    """Return what leads, and that several do as far as is known."""
    if len(leaders) == 1:
        return leaders[0]
    return f"{listed(leaders)}, statistically indistinguishable"


def calibrating(answers: Sequence[Lessons]) -> RenderableType:
    """Return the trials that would teach most of each GPU's speed, and what to type there."""
    parts: list[RenderableType] = []
    for answer in answers:
        known = answer.survey.forecaster
        before, after = answer.ranges
        took = units.duration(answer.seconds)
        if answer.usd is not None:
            took += f", {units.usd(answer.usd)}"
        sentence = (
            f"{units.plural(len(answer.lessons), 'trial')} on the {known.gpu.name} "
            f"({took}) would narrow the predicted speed of {known.model.name} from "
            f"{before[1] / before[0]:.2g} times, end to end, to {after[1] / after[0]:.2g}, as is "
            "expected"
        )
        said = [
            ("answer", _what(answer.answer.config)),
            ("predicted", f"{' to '.join(map(units.rate, before))} tokens/s"),
            ("seconds", "of one trial, without the worker's start"),
            ("known", "how far off nine in ten GPUs are in that part, before -> after the trial"),
        ]
        header = (">seconds", "teaches", ">known within", "configuration")
        table = grid(header, map(_lesson_row, answer.lessons))
        parts.append(_answer(sentence, said, table=Group(table, "")))
        parts.append("")
        for command in answer.commands:
            parts.append(Text(f"$ {command}", no_wrap=True, overflow="ignore"))
    return Group(*parts)


def _lesson_row(lesson: CalibrationTrial) -> tuple[str, ...]:
    before, after = lesson.log_spreads
    return (
        f"{lesson.seconds:.0f}",
        lesson.factor.replace("_", "-"),
        f"{math.expm1(NINE_IN_TEN * before):.0%} -> {math.expm1(NINE_IN_TEN * after):.0%}",
        _what(lesson.forecast.config),
    )


def longest(answers: Sequence[Longest], *, is_detailed: bool) -> RenderableType:
    """Return the longest sequences on each GPU, by micro-batch."""
    most = max(3, _LINES_SHOWN // len(answers))
    if is_detailed:
        most = candidates.VALUES_SHOWN
    parts: list[RenderableType] = []
    found: dict[str, Forecast] = {}
    is_unsure = False
    is_at_limit = False
    for answer in answers:
        best = answer.best
        if best is not None and best.forecast is not None:
            found[answer.forecaster.gpu.name] = best.forecast
        by_batch = {row.micro_batch_size: row for row in answer.rows}
        for row in answer.rows:
            is_unsure |= row.possible > row.seq_len
            is_at_limit |= row.possible == answer.limit
        parts += _unknown_speeds(row.forecast for row in answer.rows)
        parts.append(Text(f"{_longest_sentence(answer)}\n", style="bold"))
        shown = candidates.evenly_spaced(by_batch, most=most)
        if shown:
            header = (">micro-batch", ">longest", ">perhaps", ">tokens/s", ">peak")
            rows = [_longest_row(by_batch[batch]) for batch in shown]
            parts += [grid(header, rows), Text("")]
    said: list[Fact] = []
    if found:
        said += _settings_facts(found)
    first = answers[0]
    if first.asked.grpo:
        said.append(("generation", GENERATION))
    tried = units.plural(first.configurations, "configuration")
    said.append(("searched", f"lengths in steps of {LENGTH_STEP} tokens, {tried} at each size"))
    if first.asked.fixed_settings:
        said.append(("you fixed", _in_words(first.asked.fixed_settings)))
    if is_unsure:
        said.append(("perhaps", "is too close to the budget to be sure"))
    if is_at_limit:
        said.append(("limit", f"the model has positions for {first.limit:,} tokens"))
    if first.best is not None:
        option = f"--seq-len {first.best.seq_len}"
        said.append(("next", f"{option} in place of --longest plans such a training"))
    if not is_detailed:
        said.append(_DETAILS)
    return Group(*parts, facts(said))


def _longest_sentence(answer: Longest) -> str:
    where = f"{answer.forecaster.model.name} on the {answer.forecaster.gpu.name}"
    if answer.asked.grpo:
        where = f"GRPO's training step alone, of {where}"
    best = answer.best
    if best is None or best.forecast is None:
        return f"No sequence of {answer.shortest:,} tokens surely fits for {where}"
    what = f"{best.seq_len:,} tokens at micro-batch {best.micro_batch_size}"
    numbers = _numbers(best.forecast, None)
    return f"The longest sequences that surely fit for {where}: {what}: {numbers}"


def _longest_row(row: LongestRow) -> tuple[str, ...]:
    perhaps = f"{row.possible:,}" if row.possible > row.seq_len else ""
    if row.forecast is None:
        return (f"{row.micro_batch_size:,}", "-", perhaps, units.rate(None), units.gib(None))
    return (
        f"{row.micro_batch_size:,}",
        f"{row.seq_len:,}",
        perhaps,
        units.rate(row.forecast.tokens_per_second),
        units.gib(row.forecast.peak_allocated_bytes),
    )


def cheapest(answer: Cheapest, *, is_detailed: bool) -> RenderableType:
    """Return which GPUs do a job, the cheapest first."""
    model = answer.model.name
    best = answer.cheapest
    sentence = f"No GPU of a known price is predicted to do it for {model}"
    said: list[Fact] = []
    if best is not None and best.forecast is not None:
        what = f"{_what(best.forecast.config)}: {_numbers(best.forecast, best.bill)}"
        tied = [for_job.gpu.name for for_job in answer.perhaps_cheapest]
        which = f"{_offer_words(best.bill)}, {_why(tied, by='cost')}"
        sentence = f"Recommended for {model}: {which}: {what}"
        said.append(("settings", _but(plan_details.settings(best.forecast.config))))
    work = "a training"
    if answer.workload is not None:
        work = plan_details.work_words(answer.workload)
    if answer.deadline_seconds is not None:
        work += f" within {units.duration(answer.deadline_seconds)}"
    said.append(("the job", f"{work}; on every GPU {_in_words(answer.fixed_settings)}"))
    shown = answer.able
    if not is_detailed:
        shown = shown[:_LINES_SHOWN]
    bills: list[Bill] = []
    late: list[str] = []
    for for_job in shown:
        bills.append(for_job.bill)
        if for_job.outcome is Outcome.PERHAPS_LATE:
            late.append(for_job.gpu.name)
    if late:
        said.append(("may be late", ", ".join(late)))
    least = answer.smallest
    if least is not None and least is not best:
        cost = f"{_cost(least.bill)} in {_took(least.bill)}"
        said.append(("smallest", f"{_offer_words(least.bill)}, {cost}"))
    others = answer.gpus[len(answer.able) :]
    if is_detailed:
        for for_job in others:
            said.append((for_job.gpu.name, f"{for_job.outcome.value}: {_why_unable(for_job)}"))
        if best is not None:
            said.append(("price", plan_details.price_source(best.bill.offer)))
    else:
        said.append(("others", _others_words(others, more=len(answer.able) - len(shown))))
        rules = {one.reason for one in others if one.outcome is Outcome.FORBIDDEN}
        if len(rules) == 1:
            said.append(("reason", rules.pop()))
        if best is not None:
            command = ["sweep", "plan", best.gpu.name, "--model", model]
            command += as_options(answer.fixed_settings)
            said.append(("next", f"`{shlex.join(command)}` plans it there"))
        said.append(_DETAILS)
    table = Group(plan_details.offers(bills), "") if bills else None
    forecasts = (for_job.forecast for for_job in answer.gpus)
    return _answer(sentence, said, table=table, shown=forecasts)


def _others_words(others: Sequence[GpuForJob], *, more: int) -> str:
    """Return how many more GPUs do a job, and which do not, by why."""
    by_outcome: dict[str, list[str]] = {}
    for for_job in others:
        by_outcome.setdefault(for_job.outcome.value, []).append(for_job.gpu.name)
    words: list[str] = []
    if more:
        words.append(f"{more} more do it")
    for outcome, names in by_outcome.items():
        words.append(f"{outcome}: {', '.join(names)}")
    return "; ".join(words) or "none"


def _why_unable(for_job: GpuForJob) -> str:
    if for_job.outcome is Outcome.TOO_SMALL:
        need = units.gib(for_job.least_bytes)
        return f"needs {need} at least, has {units.gib(for_job.gpu.budget_bytes)} for a training"
    if for_job.outcome in (Outcome.TOO_SLOW, Outcome.PERHAPS_IN_TIME):
        soonest, latest = map(_took, for_job.bill.extremes)
        price = f"{units.usd(for_job.bill.usd)} at {for_job.bill.offer.label}"
        return f"{_took(for_job.bill)} ({soonest} to {latest}), {price}"
    return for_job.reason or f"give one with {PRICE_OPTION} {for_job.gpu.name}=DOLLARS"
