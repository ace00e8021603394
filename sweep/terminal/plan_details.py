"""What a plan rests on, for --details, and how configurations and offers are put into words."""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from qlora_sweep.reports import format as units
from qlora_sweep.search_spaces.config import CAPACITY_KEYS, SIZE_KEYS, TrialConfig, targets_in_words
from qlora_sweep.search_spaces.costs import Bill, OfferComparison, Workload
from qlora_sweep.search_spaces.linears import parameters
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.sweep.planning.answers import PlannedFile
from qlora_sweep.sweep.planning.plan import GpuPlan, WhatIf, few
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
    phrases: list[str] = []
    if with_capacity:
        phrases += [units.phrase(key, getattr(config, key)) for key in CAPACITY_KEYS]
    for key, value in units.differing(config, TrialConfig()).items():
        if key not in SIZE_KEYS and key not in CAPACITY_KEYS:
            phrases.append(units.phrase(key, value))
    return phrases


def change_words(change: WhatIf) -> str:
    """Return one change and what it brings: ``micro-batch 6 (-3.4 % speed, -7.37 GiB)``."""
    brings: list[str] = []
    if change.speed_change is not None:
        brings.append(f"{100 * change.speed_change:+.1f} % speed")
    memory = change.memory_change_bytes
    if memory:
        sign = "+" if memory > 0 else "-"
        brings.append(f"{sign}{units.gib(abs(memory))}")
    else:
        brings.append("same memory")
    if change.forecast.fit is not Fit.YES:
        brings.append(FIT_WORDS[change.forecast.fit])
    return f"{units.phrase(change.key, change.value)} ({', '.join(brings)})"


def work_words(work: Workload) -> str:
    """Return an amount of work: ``1,000 steps (8,000 samples, 4.1 M tokens)``."""
    samples = units.plural(work.samples, work.noun)
    return f"{units.plural(work.steps, 'step')} ({samples}, {work.tokens / 1e6:,.1f} M tokens)"


def price_source(offer: Offer) -> str:
    """Return where a price was read, and when."""
    return f"{offer.provider}, read on {offer.date}, {offer.source}"


def configurations(planned: PlannedFile) -> RenderableType:
    """Return the configurations of a file in their order, each with its cheapest bill."""
    rows = map(_configuration_row, itertools.count(1), planned.forecasts, planned.bills)
    header = ("", "fits", ">peak", ">tokens/s", ">1,000 steps", "configuration")
    return Group(grid(header, rows), Text(UNSURE, style="dim"))


def _configuration_row(
    number: int, forecast: Forecast, bills: Sequence[Bill]
) -> Sequence[str | Text]:
    fits = {Fit.YES: "yes", Fit.NO: "no", Fit.UNCERTAIN: "?"}[forecast.fit]
    words = [units.size(forecast.config)]
    words += settings(forecast.config, with_capacity=True)
    what = ", ".join(words)
    if forecast.fits is None:
        fits = units.DASH
    if forecast.violation is not None:
        fits = _FORBIDDEN
        what += f": {forecast.violation.reason}"
    elif forecast.memory is None and forecast.notes:
        what += f": {forecast.notes[0]}"
    return (
        f"{number:,}",
        Text(fits, _FIT_STYLES[forecast.fit]),
        units.gib(forecast.peak_allocated_bytes),
        units.rate(forecast.tokens_per_second),
        units.usd(bills[0].usd_per_1000_steps if bills else None),
        what,
    )


def details(plan: GpuPlan) -> Iterator[RenderableType]:
    """Yield what else could be done, then what the answer rests on."""
    shown = plan.shown
    survey = plan.survey
    if changes := few(plan.what_ifs):
        more = f"all {units.plural(len(plan.what_ifs), 'change')} of a setting: --json"
        title = "What if: one change each, against that configuration"
        yield from section(title, *map(change_words, changes), Text(more, style="dim"))
    if shown is not None and shown.violation is None:
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
    memory = forecast.memory
    speed = forecast.speed
    if memory is not None:
        parts = [f"{part} {units.gib(memory.breakdown[part])}" for part in PARTS]
        peak = units.gib(memory.peak_allocated_bytes)
        reserved = units.gib(memory.peak_reserved_bytes)
        yield f"peak {peak} allocated, reached in {memory.moment}; {reserved} reserved"
        yield f"of the peak: {', '.join(parts)}"
    if forecast.step_seconds is not None:
        yield f"{units.step_time(forecast.step_seconds)} per step ({forecast.speed_basis})"
    if speed is not None:
        ranked = sorted(speed.terms.items(), key=lambda term: -term[1])[:_TERMS_SHOWN]
        shares = [
            f"{term.replace('_', '-')} {units.percent(seconds / speed.step_seconds)}"
            for term, seconds in ranked
        ]
        used = units.percent(speed.flops_utilization)
        dtype = forecast.config.compute_dtype
        yield f"bound by {speed.bottleneck}; of a step: {', '.join(shares)}"
        yield f"{used} of the {forecast.forecaster.gpu.name}'s {dtype} peak is put to use"


def _sizes(table: ShapeTable, plan: GpuPlan) -> Iterator[RenderableType]:
    """Yield what fits by micro-batch and sequence length."""
    # Up to the first micro-batch from which on nothing fits at any length.
    most = max((size.possible for size in table.largest.values()), default=0)
    header = ["micro-batch"]
    largest: list[str | Text] = ["largest"]
    for length in table.lengths:
        header.append(f">{length:,}")
        largest.append(_largest(table, length))
    rows: list[list[str | Text]] = []
    for batch in table.batches:
        row: list[str | Text] = [f"{batch:,}"]
        row += [_cell(table.cells.get((batch, length))) for length in table.lengths]
        rows.append(row)
        if batch > most:
            break
    rows.append(largest)
    legend = f"{UNSURE}, '-' does not fit"
    if table.base is None:
        legend = f"the fastest of the space that fits, of the recommended class; {legend}"
    else:
        what = ", ".join(settings(table.base, with_capacity=True))
        yield Text(f"{what}, at other sizes: by micro-batch and sequence length", style="dim")
    yield grid(header, rows)
    yield Text(legend, style="dim")
    rules = {cell.violation.rule for cell in table.cells.values() if cell.violation}
    if rules:
        words = f"'{_FORBIDDEN}' is forbidden on this model and GPU: {', '.join(sorted(rules))}"
        yield Text(words, style="dim")


def _cell(forecast: Forecast | None) -> Text:
    """Return what is known of one size."""
    if forecast is None:
        return Text("")
    words = "fits"
    if forecast.tokens_per_second is not None:
        words = units.rate(forecast.tokens_per_second)
    match forecast.fit:
        case Fit.UNCERTAIN:
            words += "?"
        case Fit.NO:
            words = "-" if forecast.violation is None else _FORBIDDEN
    return Text(words, _FIT_STYLES[forecast.fit])


def _largest(table: ShapeTable, length: int) -> str:
    """Return the largest micro-batch at a length."""
    cells = [table.cells.get((batch, length)) for batch in table.batches]
    if all(cell is not None and cell.violation is not None for cell in cells):
        return _FORBIDDEN
    size = table.largest[length]
    words = f"{size.sure:,}" if size.sure else "-"
    if size.possible > size.sure:
        words += f" ({size.possible:,}?)"
    return words


def _classes(survey: Survey, length: int) -> RenderableType:
    """Return the fastest of each rank and target modules at one length."""
    rows: list[Sequence[str]] = []
    for forecast in survey.fastest_by_class.values():
        config = forecast.config
        if config.seq_len != length or not forecast.memory:
            continue
        speed = units.rate(forecast.tokens_per_second)
        if forecast.fit is Fit.UNCERTAIN:
            speed += "?"
        rows.append(
            (
                str(config.lora_rank),
                targets_in_words(config.target_modules),
                speed,
                units.gib(forecast.peak_allocated_bytes),
                units.size(config),
            )
        )
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
        where = f"break-even at {round(point.samples.value):,} samples"
        if point.steps is not None:
            where += f" ({units.plural(round(point.steps), 'step')})"
        low = f"{round(point.samples.low):,}"
        high = f"{round(point.samples.high):,}"
        if low != high:
            where += f", between {low} and {high} for all that is known"
        yield (
            f"{where}: {point.below.offer.label} is cheaper below, {point.above.offer.label} above"
        )
    if len(comparison.bills) > 1 and not comparison.break_evens:
        yield "no break-even is claimed within the speeds' uncertainty"


def _grounds(plan: GpuPlan) -> Iterator[str]:
    shown = plan.shown
    gpu = plan.gpu
    model = plan.forecaster.model
    evidence = plan.forecaster.evidence
    usable = units.gib(gpu.memory_bytes)
    budget = units.gib(plan.forecaster.budget_bytes)
    yield f"{gpu.name} ({gpu.product}): {usable} usable, a training may take {budget}"
    size = f"{model.hidden_layers} layers, a vocabulary of {model.vocab_size:,}"
    count = parameters(model)
    if count is not None:
        size = f"{count:,} parameters, {size}"
    yield f"{model.name}: {size}"
    if plan.survey is not None:
        found = plan.survey.found
        for rule, number in sorted(found.invalid.items()):
            yield f"{number:,} configurations are forbidden on this model and GPU: {rule}"
        for reason, number in sorted(found.unpredicted.items()):
            yield f"{number:,} configurations are not predicted: {reason}"
    if shown is None:
        return
    if shown.memory is not None:
        within = units.error(shown.memory.uncertainty)
        known = f"within {within} (reserved: {units.error(shown.memory.reserved_uncertainty)})"
        if evidence.memory_error is not None:
            trials = units.plural(len(evidence.memory_errors), "trial")
            error = f"{100 * evidence.memory_error:.1f} %"
            known += f"; off by {error} in the median over {trials} of study {evidence.study}"
        yield f"memory: predicted from the model's own code, {known}"
    if (speed := _speed_ground(plan, shown)) is not None:
        yield f"speed: {speed}"
    yield f"learning rate: {shown.learning_rate.words}"
    if plan.bills:
        yield f"price: {price_source(plan.bills[0].offer)}"
    yield from plan.notes if shown.violation is None else evidence.notes


def _speed_ground(plan: GpuPlan, shown: Forecast) -> str | None:
    evidence = plan.forecaster.evidence
    gpu = plan.gpu
    if shown.trial is not None:
        return f"measured by trial {shown.trial.number} of study {evidence.study}"
    if shown.speed is None:
        return None
    if evidence.calibration is not None:
        trials = units.plural(evidence.calibration.trials, "trial")
        error = f"{100 * evidence.calibration.relative_error:.1f} %"
        return f"calibrated by {trials} of study {evidence.study}, met within {error} in the median"
    products = "FLOP/s by its data sheet"
    if shown.config.compute_dtype in gpu.matrix_flops:
        products = "measured matrix products"
    copies = "bandwidth by its data sheet"
    if gpu.copy_bytes_per_second:
        copies = "measured copies"
    files, count = shown.speed.contributed
    if files:
        copies += f", and {units.plural(count, 'trial')} of {units.plural(files, 'contribution')}"
    factor = shown.speed.step_estimate.high / shown.speed.step_seconds
    known = f"nine in ten within a factor of {factor:.2f}; --from STUDY calibrates it"
    return f"predicted from the {gpu.name}'s {products} and {copies}, {known}"
