"""How a plan looks to a person: one screen, and with --details what it rests on."""

from __future__ import annotations

import math
from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.text import Text

from reports import units
from search_spaces.config import TrialConfig
from search_spaces.gpus import UNMEASURED_COPY_SHARE
from search_spaces.knobs import targets_in_words
from search_spaces.linears import parameters
from sweep.planning.plan import CardComparison, CardPlan, WhatIf, few
from sweep.planning.survey import ShapeTable, Survey
from sweep.predict.forecast import Forecast
from sweep.predict.memory.predictor import Fit
from sweep.terminal.plan.costs import (
    bill_lines,
    comparison_lines,
    offers_view,
    source_words,
    work_words,
)
from sweep.terminal.plan.forecast import (
    FIT_STYLES,
    FORBIDDEN,
    answer_view,
    knobs,
    shared_line,
    shared_words,
    structure,
)
from sweep.terminal.plan.layout import empty_grid, lines, section
from sweep.terminal.plan.verdict import byte_change, comparison_screen, percent, screen

LEGEND = "'?' is too close to the budget to be sure, '-' does not fit"
SPACE_LEGEND = "the fastest of the {whole} that fits, of any rank and target modules; " + LEGEND


def plan_view(plan: CardPlan, *, is_detailed: bool) -> RenderableType:
    """Return the plan of one GPU."""
    return Group(*screen(plan), *(_details(plan) if is_detailed else ()))


def plans_view(
    plans: Sequence[CardPlan], comparison: CardComparison | None, *, is_detailed: bool
) -> RenderableType:
    """Return the same training on each GPU; detailed, each one's own plan too."""
    parts = [*comparison_screen(plans, comparison)]
    if is_detailed and comparison is not None and comparison.bills is not None:
        offers = comparison.bills
        parts += section("Prices", offers_view(offers.bills), lines(comparison_lines(offers)))
    for plan in plans if is_detailed else ():
        parts += [Text(f"\n== {plan.gpu.name}\n", style="bold"), plan_view(plan, is_detailed=True)]
    return Group(*parts)


def _details(plan: CardPlan) -> Iterator[RenderableType]:
    """Yield what else could be done, then what the answer rests on."""
    changes = few(plan.what_ifs)
    if changes:
        title = "What if: one change each, against that configuration"
        yield from section(title, _what_ifs(changes, of=len(plan.what_ifs)))
    if plan.shown is not None and plan.shown.broken is None:
        answer = answer_view(plan.shown, gpu=plan.gpu, budget_bytes=plan.forecaster.budget_bytes)
        yield from section("Where its memory and time go", answer)
    if plan.table is not None:
        yield from section("What fits, in tokens/s", _table(plan.table, plan))
    if plan.survey is not None:
        yield from section("The study", lines(_study_lines(plan.survey, plan)))
        if plan.shown is not None and len(plan.survey.fastest_by_class) > 1:
            classes = _classes(plan.survey, plan.shown)
            yield from section("Fastest of each capacity class", classes)
    if plan.bills:
        title = f"Cost of {work_words(plan.bills[0].workload)}"
        yield from section(title, offers_view(plan.bills), lines(bill_lines(plan.bills[0])))
    yield from section("Grounds", lines(_grounds(plan)))


def _what_ifs(changes: Sequence[WhatIf], *, of: int) -> RenderableType:
    grid = empty_grid("", "", "", "", right=("speed", "memory"))
    grid.show_header = False
    fits = {Fit.YES: "", Fit.UNCERTAIN: "may not fit", Fit.NO: "does not fit"}
    for change in changes:
        speed = "" if change.speed_change is None else f"{percent(change.speed_change)} speed"
        memory = byte_change(change.memory_change_bytes)
        what = units.phrase(change.key, change.value)
        grid.add_row(what, speed, memory, fits[change.forecast.fit])
    return Group(grid, Text(f"all {units.plural(of, 'change')} of a setting: --json", style="dim"))


def _grounds(plan: CardPlan) -> Iterator[str]:
    yield (
        f"{plan.gpu.name} ({plan.gpu.product}): {units.gib(plan.gpu.memory_bytes)} usable, a "
        f"training may take {units.gib(plan.forecaster.budget_bytes)}"
    )
    model, count = plan.forecaster.model, parameters(plan.forecaster.model)
    size = "" if count is None else f"{count:,} parameters, "
    yield f"{model.name}: {size}{model.hidden_layers} layers, a vocabulary of {model.vocab_size:,}"
    if plan.shown is not None:
        yield from _sure_lines(plan, plan.shown)


def _table(table: ShapeTable, plan: CardPlan) -> RenderableType:
    lengths = [f"{length:,}" for length in table.lengths]
    grid = empty_grid("micro-batch", *lengths, right=lengths)
    shown = None if plan.shown is None else plan.shown.config
    for batch in _shown_batches(table):
        cells = [table.cells[batch, length] for length in table.lengths]
        grid.add_row(f"{batch:,}", *(_cell(cell, shown) for cell in cells))
    grid.add_row("largest", *(_largest(table, length) for length in table.lengths), style="bold")
    if table.base is None:
        is_sampled = plan.survey is not None and plan.survey.is_sampled
        legend = SPACE_LEGEND.format(whole="space's sample" if is_sampled else "space")
        return Group(grid, *_legend_lines(legend, table))
    head = f"{structure(table.base)}, at other sizes: by micro-batch and sequence length"
    return Group(Text(head, style="dim"), grid, *_legend_lines(LEGEND, table))


def _legend_lines(legend: str, table: ShapeTable) -> Iterator[RenderableType]:
    yield Text(legend, style="dim")
    rules = sorted({cell.broken.rule for cell in table.cells.values() if cell.broken is not None})
    if rules:
        words = f"'{FORBIDDEN}' is forbidden on this model and GPU: {', '.join(rules)}"
        yield Text(words, style="dim")


def _shown_batches(table: ShapeTable) -> Iterator[int]:
    """Yield the micro-batches up to the first from which on nothing fits at any length."""
    most = max((largest.possible for largest in table.largest.values()), default=0)
    for batch in table.batches:
        yield batch
        if batch > most:
            return


def _cell(cell: Forecast, shown: TrialConfig | None) -> Text:
    is_shown = shown is not None and units.size(cell.config) == units.size(shown)
    style = FIT_STYLES[cell.fit] + (" reverse" if is_shown else "")
    if cell.fit is Fit.NO:
        return Text("-" if cell.broken is None else FORBIDDEN, style=style)
    known = "fits" if cell.tokens_per_second is None else units.rate(cell.tokens_per_second)
    return Text(f"{known}?" if cell.fit is Fit.UNCERTAIN else known, style=style)


def _largest(table: ShapeTable, length: int) -> str:
    if all(table.cells[batch, length].broken is not None for batch in table.batches):
        return FORBIDDEN
    largest = table.largest[length]
    perhaps = f" ({largest.possible:,}?)" if largest.possible > largest.sure else ""
    return f"{f'{largest.sure:,}' if largest.sure else '-'}{perhaps}"


def _classes(survey: Survey, best: Forecast) -> RenderableType:
    """The fastest per rank and target modules, at the length of the fastest of all."""
    of_length = [
        forecast
        for forecast in survey.fastest_by_class.values()
        if forecast.config.seq_len == best.config.seq_len and forecast.memory is not None
    ]
    shared = shared_words([knobs(forecast.config) for forecast in of_length])
    numbers = ("tokens/s", "peak", "size")
    grid = empty_grid("rank", "target modules", *numbers, "", right=numbers)
    for forecast in of_length:
        config, memory = forecast.config, forecast.memory
        doubt = "?" if forecast.fit is Fit.UNCERTAIN else ""
        grid.add_row(
            str(config.lora_rank),
            targets_in_words(config.target_modules),
            units.rate(forecast.tokens_per_second) + doubt,
            units.gib(memory.peak_allocated_bytes if memory else None),
            units.size(config),
            ", ".join(word for word in knobs(config) if word not in shared),
        )
    return Group(grid, *shared_line(shared))


def _study_lines(survey: Survey, plan: CardPlan) -> Iterator[str]:
    """Yield what of the space is forbidden or not predicted, and how long a study takes."""
    for rule, number in sorted(survey.found.invalid.items()):
        yield f"{number:,} configurations are forbidden on this model and GPU: {rule}"
    for reason, number in sorted(survey.found.unpredicted.items()):
        yield f"{number:,} configurations are not predicted: {reason}"
    seconds = survey.study_seconds()
    if seconds is not None:
        yield (
            f"{units.plural(survey.trials, 'trial')} take about {units.duration(seconds[0])} to "
            f"{units.duration(seconds[1])} on the {plan.gpu.name}"
        )


def _sure_lines(plan: CardPlan, forecast: Forecast) -> Iterator[str]:
    if forecast.memory is not None:
        yield (
            "memory: predicted from the model's own code, within "
            f"{units.error(forecast.memory.uncertainty)} (reserved: "
            f"{units.error(forecast.memory.reserved_uncertainty)}){_memory_record(plan)}"
        )
    speed = _speed_ground(plan, forecast)
    if speed is not None:
        yield f"speed: {speed}"
    for bill in plan.bills[:1]:
        yield f"price: {source_words(bill.offer)}"
    if not plan.bills and forecast.step_seconds is not None:
        yield f"cost: no price of the {plan.gpu.name} is known; name a file with --prices"
    yield from plan.forecaster.evidence.notes
    if forecast.broken is None:
        yield from forecast.notes


def _speed_ground(plan: CardPlan, forecast: Forecast) -> str | None:
    evidence = plan.forecaster.evidence
    if forecast.trial is not None:
        return f"measured by trial {forecast.trial.number} of study {evidence.study}"
    if forecast.speed is None:
        return None
    if evidence.calibration is None:
        products, copies = "measured matrix products", "measured copies"
        dtype = forecast.config.compute_dtype
        if dtype not in plan.gpu.matrix_flops:
            share = (plan.gpu.matrix_rate(dtype) or math.nan) / plan.gpu.peak_flops[dtype]
            products = f"data sheet ({units.percent(share)} of its FLOP/s)"
        if plan.gpu.copy_bytes_per_second is None:
            copies = f"data sheet ({units.percent(UNMEASURED_COPY_SHARE)} of its bandwidth)"
        return (
            f"predicted from the {plan.gpu.name}'s {products} and {copies}, within "
            f"{units.percent(forecast.speed.uncertainty)}; --from STUDY calibrates it"
        )
    trials = units.plural(evidence.calibration.trials, "trial")
    error = f"{100 * evidence.calibration.relative_error:.1f} %"
    return f"calibrated by {trials} of study {evidence.study}, met within {error} in the median"


def _memory_record(plan: CardPlan) -> str:
    evidence = plan.forecaster.evidence
    if evidence.memory_error is None:
        return ""
    trials = units.plural(len(evidence.memory_errors), "trial")
    error = f"{100 * evidence.memory_error:.1f} %"
    return f"; off by {error} in the median over {trials} of study {evidence.study}"
