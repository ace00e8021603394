"""What a plan rests on, for --details, and how configurations and offers are put into words."""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.config import CAPACITY_KEYS, SIZE_KEYS, TrialConfig, targets_in_words
from qlora_sweep.search_spaces.costs import Bill, OfferComparison, Workload
from qlora_sweep.search_spaces.linears import parameters
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.sweep.planning.plan import CardPlan, WhatIf, few
from qlora_sweep.sweep.planning.survey import ShapeTable, Survey
from qlora_sweep.sweep.predict.forecast import Forecast
from qlora_sweep.sweep.predict.memory.peaks import PARTS
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.terminal.drawing import grid, section

FIT_WORDS = {Fit.YES: "fits", Fit.UNCERTAIN: "may not fit", Fit.NO: "does not fit"}
UNSURE = "'?' is too close to the budget to be sure"
_FORBIDDEN = "invalid"
"""What a rule forbids is not a question of memory, and no table may call it too large."""
_FIT_STYLES = {Fit.YES: "green", Fit.UNCERTAIN: "yellow", Fit.NO: "dim"}
_TERMS_SHOWN = 3


def settings(config: TrialConfig, *, with_capacity: bool = False) -> list[str]:
    """Return in words what differs from the standard recipe, beside the size."""
    changed = units.differing(config, TrialConfig())
    capacity = CAPACITY_KEYS if with_capacity else ()
    return [units.phrase(key, getattr(config, key)) for key in capacity] + [
        units.phrase(key, value)
        for key, value in changed.items()
        if key not in (*SIZE_KEYS, *CAPACITY_KEYS)
    ]


def change_words(change: WhatIf) -> str:
    """Return one change and what it brings: ``micro-batch 6 (-3.4 % speed, -7.37 GiB)``."""
    speed, memory = change.speed_change, change.memory_change_bytes
    brings = [] if speed is None else [f"{100 * speed:+.1f} % speed"]
    sign = "+" if memory > 0 else "-"
    brings.append(f"{sign}{units.gib(abs(memory))}" if memory else "same memory")
    brings += [] if change.forecast.fit is Fit.YES else [FIT_WORDS[change.forecast.fit]]
    return f"{units.phrase(change.key, change.value)} ({', '.join(brings)})"


def work_words(work: Workload) -> str:
    """Return an amount of work: ``1,000 steps (8,000 samples, 4.1 M tokens)``."""
    samples = units.plural(work.samples, work.noun)
    return f"{units.plural(work.steps, 'step')} ({samples}, {work.tokens / 1e6:,.1f} M tokens)"


def price_source(offer: Offer) -> str:
    """Return where a price was read, and when."""
    return f"{offer.provider}, read on {offer.date}, {offer.source}"


def configurations(forecasts: Sequence[Forecast], bills: Sequence[Bill | None]) -> RenderableType:
    """Return the configurations of a file in their order, each with its cheapest bill."""
    rows, fits = [], {Fit.YES: "yes", Fit.NO: "no", Fit.UNCERTAIN: "?"}
    for number, (forecast, bill) in enumerate(zip(forecasts, bills, strict=True), start=1):
        broken, known = forecast.broken, units.DASH if forecast.fits is None else fits[forecast.fit]
        what = [units.size(forecast.config), *settings(forecast.config, with_capacity=True)]
        why = [broken.reason] if broken else list(forecast.notes[:1]) * (forecast.memory is None)
        rows.append(
            (
                f"{number:,}",
                Text(_FORBIDDEN if broken else known, _FIT_STYLES[forecast.fit]),
                units.gib(forecast.peak_allocated_bytes),
                units.rate(forecast.tokens_per_second),
                units.usd(bill.usd_per_1000_steps if bill else None),
                ": ".join([", ".join(what), *why]),
            )
        )
    header = ("", "fits", ">peak", ">tokens/s", ">1,000 steps", "configuration")
    return Group(grid(header, rows), Text(UNSURE, style="dim"))


def details(plan: CardPlan) -> Iterator[RenderableType]:
    """Yield what else could be done, then what the answer rests on."""
    shown, survey = plan.shown, plan.survey
    if changes := few(plan.what_ifs):
        more = f"all {units.plural(len(plan.what_ifs), 'change')} of a setting: --json"
        title = "What if: one change each, against that configuration"
        yield from section(title, *map(change_words, changes), Text(more, style="dim"))
    if shown is not None and shown.broken is None:
        yield from section("Where its memory and time go", *_memory_and_time(shown))
    if plan.table is not None:
        yield from section("What fits, in tokens/s", *_sizes(plan.table, plan))
    if survey is not None and shown is not None and len(survey.fastest_by_class) > 1:
        length = shown.config.seq_len
        yield from section("Fastest of each capacity class", _classes(survey, length))
    if plan.bills:
        title = f"Cost of {work_words(plan.bills[0].workload)}"
        yield from section(title, offers(plan.bills), *_bill_lines(plan.bills[0]))
    yield from section("Grounds", *_grounds(plan))


def _memory_and_time(forecast: Forecast) -> Iterator[str]:
    """Yield where a configuration's memory and time go."""
    memory, speed = forecast.memory, forecast.speed
    if memory is not None:
        parts = (f"{part} {units.gib(memory.breakdown[part])}" for part in PARTS)
        peak, reserved = map(units.gib, (memory.peak_allocated_bytes, memory.peak_reserved_bytes))
        yield f"peak {peak} allocated, reached in {memory.moment}; {reserved} reserved"
        yield f"of the peak: {', '.join(parts)}"
    if forecast.step_seconds is not None:
        yield f"{units.step_time(forecast.step_seconds)} per step ({forecast.speed_basis})"
    if speed is not None:
        ranked = sorted(speed.terms.items(), key=lambda term: -term[1])[:_TERMS_SHOWN]
        shares = (
            f"{term.replace('_', '-')} {units.percent(seconds / speed.step_seconds)}"
            for term, seconds in ranked
        )
        used, dtype = units.percent(speed.flops_utilization), forecast.config.compute_dtype
        yield f"bound by {speed.bottleneck}; of a step: {', '.join(shares)}"
        yield f"{used} of the {forecast.forecaster.gpu.name}'s {dtype} peak is put to use"


def _sizes(table: ShapeTable, plan: CardPlan) -> Iterator[RenderableType]:
    """Yield what fits by micro-batch and sequence length."""

    def cell(forecast: Forecast | None) -> Text:
        if forecast is None:
            return Text("")
        speed, fit = forecast.tokens_per_second, forecast.fit
        words = "fits" if speed is None else units.rate(speed)
        if fit is Fit.NO:
            words = "-" if forecast.broken is None else _FORBIDDEN
        return Text(f"{words}?" if fit is Fit.UNCERTAIN else words, _FIT_STYLES[fit])

    def largest(length: int) -> str:
        known = [table.cells.get((batch, length)) for batch in table.batches]
        if all(one is not None and one.broken is not None for one in known):
            return _FORBIDDEN
        sure, possible = table.largest[length].sure, table.largest[length].possible
        words = f"{sure:,}" if sure else "-"
        if possible > sure:
            words += f" ({possible:,}?)"
        return words

    # Up to the first micro-batch from which on nothing fits at any length.
    most = max((size.possible for size in table.largest.values()), default=0)
    batches = table.batches[: sum(batch <= most for batch in table.batches) + 1]
    rows: list[list[str | Text]] = [
        [f"{batch:,}", *(cell(table.cells.get((batch, length))) for length in table.lengths)]
        for batch in batches
    ]
    rows.append(["largest", *map(largest, table.lengths)])
    if table.base is not None:
        what = ", ".join(settings(table.base, with_capacity=True))
        yield Text(f"{what}, at other sizes: by micro-batch and sequence length", style="dim")
    yield grid(("micro-batch", *(f">{length:,}" for length in table.lengths)), rows)
    legend = f"{UNSURE}, '-' does not fit"
    if table.base is None:
        legend = f"the fastest of the space that fits, of the recommended class; {legend}"
    yield Text(legend, style="dim")
    if rules := sorted({cell.broken.rule for cell in table.cells.values() if cell.broken}):
        words = f"'{_FORBIDDEN}' is forbidden on this model and GPU: {', '.join(rules)}"
        yield Text(words, style="dim")


def _classes(survey: Survey, length: int) -> RenderableType:
    """Return the fastest of each rank and target modules at one length."""
    known = [f for f in survey.fastest_by_class.values() if f.config.seq_len == length and f.memory]
    rows = [
        (
            str(forecast.config.lora_rank),
            targets_in_words(forecast.config.target_modules),
            units.rate(forecast.tokens_per_second) + "?" * (forecast.fit is Fit.UNCERTAIN),
            units.gib(forecast.peak_allocated_bytes),
            units.size(forecast.config),
        )
        for forecast in known
    ]
    return grid(("rank", "target modules", ">tokens/s", ">peak", ">size"), rows)


def offers(bills: Sequence[Bill]) -> RenderableType:
    """Return offers in a table, in their order."""
    rows = [
        (
            bill.offer.label,
            units.usd(bill.usd_per_hour),
            units.usd(bill.usd),
            units.usd_interval((bill.extremes[0].usd, bill.extremes[1].usd)),
            units.usd(bill.usd_per_million_tokens),
            f"{bill.wall_hours:.2f}",
        )
        for bill in bills
    ]
    header = ("offer", ">per hour", ">in all", ">between", ">1M tokens", ">hours")
    return grid(header, rows)


def _bill_lines(bill: Bill) -> Iterator[str]:
    yield f"{bill.offer.label}, item by item:"
    for item in bill.items:
        if item.seconds > 0:
            took = units.duration(item.seconds)
            yield f"  {item.name:<12}{took:>14}  {units.usd(item.usd)}"
    if bill.usd_per_epoch is not None:
        samples = f"{bill.workload.dataset_samples:,} {bill.workload.noun}s"
        yield f"an epoch of {samples}: {units.usd(bill.usd_per_epoch)}"


def break_even_lines(comparison: OfferComparison) -> Iterator[str]:
    """Yield where the cheapest offer changes, as far as the speeds are known well enough."""
    for point in comparison.break_evens:
        steps = "" if point.steps is None else f" ({units.plural(round(point.steps), 'step')})"
        low, high = (f"{round(end):,}" for end in point.samples[1:])
        between = "" if low == high else f", between {low} and {high} for all that is known"
        yield (
            f"break-even at {round(point.samples.value):,} samples{steps}{between}: "
            f"{point.below.offer.label} is cheaper below, {point.above.offer.label} above"
        )
    if len(comparison.bills) > 1 and not comparison.break_evens:
        yield "no break-even is claimed within the speeds' uncertainty"


def _grounds(plan: CardPlan) -> Iterator[str]:
    forecaster, shown, evidence = plan.forecaster, plan.shown, plan.forecaster.evidence
    model, gpu = forecaster.model, plan.gpu
    usable, budget = map(units.gib, (gpu.memory_bytes, forecaster.budget_bytes))
    yield f"{gpu.name} ({gpu.product}): {usable} usable, a training may take {budget}"
    count = parameters(model)
    size = "" if count is None else f"{count:,} parameters, "
    yield f"{model.name}: {size}{model.hidden_layers} layers, a vocabulary of {model.vocab_size:,}"
    if plan.survey is not None:
        found = plan.survey.found
        for rule, number in sorted(found.invalid.items()):
            yield f"{number:,} configurations are forbidden on this model and GPU: {rule}"
        for reason, number in sorted(found.unpredicted.items()):
            yield f"{number:,} configurations are not predicted: {reason}"
    if shown is None:
        return
    if shown.memory is not None:
        off = ""
        if evidence.memory_error is not None:
            trials = units.plural(len(evidence.memory_errors), "trial")
            error = f"{100 * evidence.memory_error:.1f} %"
            off = f"; off by {error} in the median over {trials} of study {evidence.study}"
        errors = shown.memory.uncertainty, shown.memory.reserved_uncertainty
        within, reserved = map(units.error, errors)
        known = f"within {within} (reserved: {reserved}){off}"
        yield f"memory: predicted from the model's own code, {known}"
    if (speed := _speed_ground(plan, shown)) is not None:
        yield f"speed: {speed}"
    yield f"learning rate: {shown.learning_rate.words}"
    for bill in plan.bills[:1]:
        yield f"price: {price_source(bill.offer)}"
    yield from plan.notes if shown.broken is None else evidence.notes


def _speed_ground(plan: CardPlan, shown: Forecast) -> str | None:
    evidence, gpu, dtype = plan.forecaster.evidence, plan.gpu, shown.config.compute_dtype
    if shown.trial is not None:
        return f"measured by trial {shown.trial.number} of study {evidence.study}"
    if shown.speed is None:
        return None
    if evidence.calibration is not None:
        trials = units.plural(evidence.calibration.trials, "trial")
        error = f"{100 * evidence.calibration.relative_error:.1f} %"
        return f"calibrated by {trials} of study {evidence.study}, met within {error} in the median"
    sheet = "by its data sheet"
    products = "measured matrix products" if dtype in gpu.matrix_flops else f"FLOP/s {sheet}"
    copies = "measured copies" if gpu.copy_bytes_per_second else f"bandwidth {sheet}"
    files, count = shown.speed.contributed
    if files:
        copies += f", and {units.plural(count, 'trial')} of {units.plural(files, 'contribution')}"
    factor = shown.speed.step_seconds_range[1] / shown.speed.step_seconds
    known = f"nine in ten within a factor of {factor:.2f}; --from STUDY calibrates it"
    return f"predicted from the {gpu.name}'s {products} and {copies}, {known}"
