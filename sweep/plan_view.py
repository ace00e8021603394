"""Owns how a plan looks to a person. Knows nothing of how it was worked out or where it goes."""

from __future__ import annotations

import io
from collections.abc import Iterable, Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reports import units
from search_spaces.config import TrialConfig
from search_spaces.linears import parameters
from search_spaces.models import ModelSpec
from sweep.plan_answer import FIT_STYLES, answer_view, describe, knobs, structure
from sweep.plan_bills import bill_lines, comparison_lines, usd, work_words
from sweep.planning.forecast import Forecast
from sweep.planning.plan import CardPlan
from sweep.planning.survey import Survey
from sweep.planning.table import LargestBatch, ShapeTable
from sweep.predict.cost import Bill, Comparison
from sweep.predict.memory import Fit

PLAIN_WIDTH = 140
"""Columns where the width is nobody's: a pipe or a file."""
FIT_WORDS = {
    Fit.YES: "fits",
    Fit.UNCERTAIN: "is too close to the budget to say",
    Fit.NO: "does not fit",
}
LEGEND = "'?' is too close to the budget to be sure, '-' does not fit"


def rendered(content: RenderableType, *, is_terminal: bool, width: int | None = None) -> str:
    """Return what ``content`` looks like: coloured and as wide as the terminal, or plain."""
    console = Console(
        file=io.StringIO(),
        force_terminal=is_terminal,
        width=width if is_terminal else PLAIN_WIDTH,
        highlight=False,
    )
    with console.capture() as captured:
        console.print(content)
    return "\n".join(line.rstrip() for line in captured.get().rstrip("\n").split("\n"))


def plan_view(plan: CardPlan) -> RenderableType:
    """Return the plan of one card."""
    return Group(*_sections(plan))


def plans_view(plans: Sequence[CardPlan], comparison: Comparison | None) -> RenderableType:
    """Return the plans of several cards, and the same work on each."""
    lines = ["nothing to compare: fewer than two can do it, or no price is known"]
    if comparison is not None:
        lines = list(comparison_lines(comparison))
    views = [part for one in plans for part in (Text(""), plan_view(one))]
    return Group(*views[1:], *_section("The same work on each card", _lines(lines)))


def _sections(plan: CardPlan) -> Iterator[RenderableType]:
    yield Text(
        f"{plan.gpu.name} ({plan.gpu.product}): {units.gib(plan.gpu.memory_bytes)} usable, a "
        f"training may take {units.gib(plan.budget_bytes)}",
        style="bold",
    )
    yield Text(_model_line(plan.model))
    if plan.table is not None:
        yield from _section("What fits, in tokens/s", _table(plan.table))
    if plan.survey is not None:
        yield from _section("The space", _lines(_space_lines(plan.survey)))
    if plan.shown is None:
        yield from _section("Nothing fits", Text(_too_small(plan)))
        return
    answer = answer_view(plan.shown, budget_bytes=plan.budget_bytes, gpu=plan.gpu.name)
    yield from _section(_title(plan.shown, plan.survey), answer)
    if plan.survey is not None and len(plan.survey.fastest_by_class) > 1:
        yield from _section("Fastest of each capacity class", _classes(plan.survey, plan.shown))
    if plan.bills:
        yield from _section(f"Cost of {work_words(plan.bills[0])}", _lines(bill_lines(plan.bills)))
    grounds = list(_sure_lines(plan, plan.shown))
    if grounds:
        yield from _section("How sure", _lines(grounds))


def _section(title: str, content: RenderableType) -> Iterator[RenderableType]:
    yield Text(f"\n{title}", style="bold")
    yield Padding(content, (0, 0, 0, 2))


def _lines(lines: Iterable[str]) -> RenderableType:
    return Group(*map(Text, lines))


def _grid(*headers: str, right: Sequence[str] = ()) -> Table:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in headers:
        grid.add_column(header, justify="right" if header in right else "left")
    return grid


def _model_line(model: ModelSpec) -> str:
    count = parameters(model)
    size = "" if count is None else f"{_in_words(count)} parameters, "
    return f"{model.name}: {size}{model.hidden_layers} layers, a vocabulary of {model.vocab_size:,}"


def _in_words(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"


def _table(table: ShapeTable) -> RenderableType:
    lengths = [f"{length:,}" for length in table.lengths]
    grid = _grid("micro-batch", *lengths, right=lengths)
    for batch in table.batches:
        cells = [table.cells[batch, length] for length in table.lengths]
        grid.add_row(f"{batch:,}", *(_cell(cell, table.base) for cell in cells))
    largest = (_largest(table.largest[length]) for length in table.lengths)
    grid.add_row("largest", *largest, style="bold")
    return Group(
        Text(f"{structure(table.base)}; by micro-batch and sequence length", style="dim"),
        grid,
        Text(LEGEND, style="dim"),
    )


def _cell(cell: Forecast, base: TrialConfig) -> Text:
    style = FIT_STYLES[cell.fit] + (" reverse" if cell.config == base else "")
    if cell.fit is Fit.NO:
        return Text("-", style=style)
    known = "fits" if cell.tokens_per_second is None else units.rate(cell.tokens_per_second)
    return Text(f"{known}?" if cell.fit is Fit.UNCERTAIN else known, style=style)


def _largest(largest: LargestBatch) -> str:
    perhaps = f" ({largest.possible:,}?)" if largest.possible > largest.sure else ""
    return f"{f'{largest.sure:,}' if largest.sure else '-'}{perhaps}"


def _title(forecast: Forecast, survey: Survey | None) -> str:
    if survey is None:
        config = forecast.config
        verdict = "is not possible" if forecast.broken is not None else FIT_WORDS[forecast.fit]
        return f"{config.micro_batch_size} x {config.seq_len} {verdict}"
    if forecast.tokens_per_second is None:
        return "Recommended: the largest that surely fits"
    certainty = "surely fits" if forecast.fit is Fit.YES else "perhaps fits, as nothing does surely"
    return f"Recommended: the fastest that {certainty}"


def _classes(survey: Survey, best: Forecast) -> RenderableType:
    """The fastest per rank and target modules, at the length of the fastest of all."""
    numbers = ("tokens/s", "peak")
    grid = _grid("rank", "target modules", *numbers, "configuration", right=numbers)
    for (rank, targets, length), forecast in survey.fastest_by_class.items():
        if length != best.config.seq_len or forecast.memory is None:
            continue
        doubt = "?" if forecast.fit is Fit.UNCERTAIN else ""
        grid.add_row(
            str(rank),
            units.targets(targets),
            units.rate(forecast.tokens_per_second) + doubt,
            units.gib(forecast.memory.peak_allocated_bytes),
            knobs(forecast.config),
        )
    return grid


def _space_lines(survey: Survey) -> Iterator[str]:
    counts, total = survey.counts, survey.total
    whole = "no end of configurations" if total is None else units.plural(total, "configuration")
    yield f"{survey.space.name}: {whole}"
    if survey.is_sampled:
        yield f"of a sample of {units.plural(counts.looked_at, 'configuration')}:"
    yield (
        f"{counts.fit:,} surely fit, {counts.uncertain:,} are too close to say, "
        f"{counts.too_large:,} cannot fit"
    )
    for rule, number in sorted(counts.invalid.items()):
        yield f"{number:,} are forbidden on this model and card: {rule}"
    seconds = survey.study_seconds()
    if seconds is not None:
        yield (
            f"a study of {units.plural(survey.trials, 'trial')} takes about "
            f"{units.duration(seconds[0])} to {units.duration(seconds[1])}"
        )


def _too_small(plan: CardPlan) -> str:
    least = None if plan.survey is None else plan.survey.least_bytes
    if least is None:
        return "every configuration is forbidden on this model and card"
    return (
        f"the smallest configuration needs {units.gib(least)} and the budget is "
        f"{units.gib(plan.budget_bytes)}: name a larger card or a smaller model"
    )


def _sure_lines(plan: CardPlan, forecast: Forecast) -> Iterator[str]:
    if forecast.memory is not None:
        yield (
            "memory: predicted from the model's own code, within "
            f"{units.percent(forecast.memory.uncertainty)}{_memory_record(plan)}"
        )
    speed = _speed_ground(plan, forecast)
    if speed is not None:
        yield f"speed: {speed}"
    for bill in plan.bills[:1]:
        yield f"price: {bill.offer.provider}, read on {bill.offer.date}, {bill.offer.source}"
    if not plan.bills and forecast.step_seconds is not None:
        yield f"cost: no price of the {plan.gpu.name} is known; name a file with --prices"
    yield from plan.evidence.notes
    if forecast.broken is None:
        yield from forecast.notes


def _speed_ground(plan: CardPlan, forecast: Forecast) -> str | None:
    evidence = plan.evidence
    if forecast.trial is not None:
        return f"measured by trial {forecast.trial.number} of study {evidence.study}"
    if forecast.speed is None:
        return None
    if evidence.calibration is None:
        return "predicted from the card's data sheet, within 25 %; --study NAME calibrates it"
    trials = units.plural(evidence.calibration.trials, "trial")
    error = f"{100 * evidence.calibration.relative_error:.1f} %"
    return f"calibrated by {trials} of study {evidence.study}, met within {error} in the median"


def _memory_record(plan: CardPlan) -> str:
    evidence = plan.evidence
    if evidence.memory_error is None:
        return ""
    trials = units.plural(len(evidence.memory_errors), "trial")
    error = f"{100 * evidence.memory_error:.1f} %"
    return f"; off by {error} in the median over {trials} of study {evidence.study}"


def configurations_view(
    forecasts: Sequence[Forecast], cheapest: Sequence[Bill | None]
) -> RenderableType:
    """Return a table of many configurations in their order, each with its cheapest bill."""
    numbers = ("peak", "tokens/s", "1,000 steps")
    grid = _grid("", "fits", *numbers, "bound by", "configuration", right=numbers)
    for number, (forecast, bill) in enumerate(zip(forecasts, cheapest, strict=True), start=1):
        memory, speed, broken = forecast.memory, forecast.speed, forecast.broken
        grid.add_row(
            f"{number:,}",
            Text("invalid" if broken else _SHORT_WORDS[forecast.fit], FIT_STYLES[forecast.fit]),
            units.gib(memory.peak_allocated_bytes if memory else None),
            units.rate(forecast.tokens_per_second),
            usd(bill.usd_per_1000_steps) if bill else units.DASH,
            speed.bottleneck if speed else units.DASH,
            f"{describe(forecast.config)}{f': {broken.reason}' if broken else ''}",
        )
    return Group(grid, Text("'?' is too close to the budget to be sure", style="dim"))


_SHORT_WORDS = {Fit.YES: "yes", Fit.NO: "no", Fit.UNCERTAIN: "?"}
