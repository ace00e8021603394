"""Owns how a plan looks to a person. Knows nothing of how it was worked out or where it goes."""

from __future__ import annotations

import io
from collections.abc import Iterator, Sequence

from rich.console import Console, Group, RenderableType
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from reports import units
from search_spaces.config import TrialConfig
from search_spaces.linears import parameters
from search_spaces.models import ModelSpec
from search_spaces.space import SearchSpace
from sweep.plan_bills import bill_lines, usd
from sweep.planning.documents import PARTS
from sweep.planning.forecast import Forecast
from sweep.planning.plan import CardPlan
from sweep.planning.survey import Survey
from sweep.planning.table import LargestBatch, ShapeTable
from sweep.predict.cost import Bill
from sweep.predict.memory import Fit, MemoryPrediction
from sweep.predict.speed import SpeedPrediction

BAR_WIDTH = 60
PLAIN_WIDTH = 120
"""Columns where the width is nobody's: a pipe or a file."""
FIT_STYLES = {Fit.YES: "green", Fit.UNCERTAIN: "yellow", Fit.NO: "dim"}
PART_MARKS = {
    "weights": ("█", "blue"),
    "adapters": ("◆", "magenta"),
    "gradients": ("▲", "cyan"),
    "optimizer": ("●", "yellow"),
    "activations": ("▓", "green"),
    "loss": ("▒", "red"),
}
"""A glyph and a colour for each part of a peak, so that either alone tells them apart."""
TERM_WORDS = {
    "matmul": "matrix products",
    "lora": "adapters",
    "attention": "attention",
    "dequant": "dequantisation",
    "elementwise": "norms, casts and activations",
    "loss": "the loss",
    "optimizer": "the optimizer",
    "launch": "waiting for launches",
    "overhead": "fixed work of the host",
}
LEGEND = "tokens/s; '?' is too close to the budget to be sure, '-' does not fit"


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


def _sections(plan: CardPlan) -> Iterator[RenderableType]:
    yield Text(
        f"{plan.gpu.name} ({plan.gpu.product}): {units.gib(plan.gpu.memory_bytes)} usable, a "
        f"training may take {units.gib(plan.budget_bytes)}",
        style="bold",
    )
    yield Text(_model_line(plan.model))
    if plan.table is not None:
        yield from _section("What fits", _table(plan.table))
    if plan.survey is not None:
        yield from _section("The space", _lines(_space_lines(plan.survey)))
    if plan.shown is None:
        yield from _section("Nothing fits", _lines(_too_small(plan)))
        return
    yield from _section(_title(plan), _answer(plan))
    if plan.survey is not None and len(plan.survey.fastest_by_class) > 1:
        yield from _section("Fastest of each capacity class", _classes(plan.survey))
    if plan.bills:
        yield from _section(f"Cost of {work_words(plan.bills[0])}", _lines(bill_lines(plan.bills)))
    yield from _section("How sure", _lines(_sure_lines(plan)))


def _section(title: str, content: RenderableType) -> Iterator[RenderableType]:
    yield Text(f"\n{title}", style="bold")
    yield Padding(content, (0, 0, 0, 2))


def _lines(lines: Iterator[str] | Sequence[str]) -> RenderableType:
    return Group(*map(Text, lines))


def _model_line(model: ModelSpec) -> str:
    count = parameters(model)
    size = "" if count is None else f"{count / 1e9:.2f} B parameters, "
    return f"{model.name}: {size}{model.hidden_layers} layers, {model.vocab_size:,} words"


def _table(table: ShapeTable) -> RenderableType:
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    grid.add_column("micro-batch", no_wrap=True)
    for length in table.lengths:
        grid.add_column(f"{length:,}", justify="right", no_wrap=True)
    for batch in table.batches:
        cells = [table.cells[batch, length] for length in table.lengths]
        grid.add_row(f"{batch:,}", *(_cell(cell, table.base) for cell in cells))
    largest = (_largest(table.largest[length]) for length in table.lengths)
    grid.add_row("largest", *largest, style="bold")
    return Group(
        Text(f"{_structure(table.base)}; columns are sequence lengths", style="dim"),
        grid,
        Text(LEGEND, style="dim"),
    )


def _cell(cell: Forecast, base: TrialConfig) -> Text:
    style = FIT_STYLES[cell.fit] + (" reverse" if cell.config == base else "")
    if cell.fit is Fit.NO:
        return Text("-", style=style)
    known = units.rate(cell.tokens_per_second) if cell.tokens_per_second else "fits"
    return Text(f"{known}?" if cell.fit is Fit.UNCERTAIN else known, style=style)


def _largest(largest: LargestBatch) -> str:
    perhaps = f" ({largest.possible:,}?)" if largest.possible > largest.sure else ""
    return f"{largest.sure or '-'}{perhaps}"


def _structure(config: TrialConfig) -> str:
    """Return everything but micro-batch and length, as far as it is not the recipe's default."""
    shape = {"micro_batch_size": config.micro_batch_size, "seq_len": config.seq_len}
    recipe = TrialConfig().model_copy(update=shape)
    said = [units.phrase(key, getattr(config, key)) for key in ("lora_rank", "target_modules")]
    changed = config.changes_from(recipe)
    said += [units.phrase(k, v) for k, v in changed.items() if k not in _SAID]
    return ", ".join(said)


_SAID = ("lora_rank", "target_modules", "micro_batch_size", "seq_len")


def _title(plan: CardPlan) -> str:
    assert plan.shown is not None, "only called where something is shown"
    forecast = plan.shown
    if plan.survey is None:
        words = {Fit.YES: "fits", Fit.UNCERTAIN: "is too close to say", Fit.NO: "does not fit"}
        verdict = "is not possible" if forecast.broken is not None else words[forecast.fit]
        return f"{units.shape(forecast.config)}: {verdict}"
    if forecast.tokens_per_second is None:
        return "Recommended: the largest that surely fits"
    sure = "surely fits" if forecast.fit is Fit.YES else "perhaps fits; nothing does surely"
    return f"Recommended: the fastest that {sure}"


def _answer(plan: CardPlan) -> RenderableType:
    assert plan.shown is not None, "only called where something is shown"
    forecast = plan.shown
    parts: list[RenderableType] = [
        Text(f"{units.shape(forecast.config)}; {_structure(forecast.config)}")
    ]
    if forecast.broken is not None:
        parts.append(Text(f"{forecast.broken.rule}: {forecast.broken.reason}", style="red"))
    if forecast.step_seconds is not None:
        parts.append(
            Text(
                f"{units.rate(forecast.tokens_per_second)} tokens/s, "
                f"{units.step_time(forecast.step_seconds)} per step ({forecast.speed_basis})"
            )
        )
    if forecast.memory is not None:
        parts += _memory(forecast.memory, plan.budget_bytes)
    if forecast.speed is not None:
        parts += map(Text, _bottleneck_lines(forecast.speed, forecast.config, plan.gpu.name))
    return Group(*parts)


def _memory(memory: MemoryPrediction, budget_bytes: int) -> Iterator[RenderableType]:
    share = memory.peak_allocated_bytes / budget_bytes
    yield Text(
        f"peak {units.gib(memory.peak_allocated_bytes)} allocated, {units.percent(share)} of the "
        f"budget, reached in {memory.moment}; {units.gib(memory.peak_reserved_bytes)} reserved"
    )
    yield memory_bar(memory, budget_bytes)
    yield _legend(memory)


def memory_bar(memory: MemoryPrediction, budget_bytes: int) -> Text:
    """Return the peak's parts along the budget; where they exceed it, along themselves."""
    whole = max(budget_bytes, memory.peak_allocated_bytes)
    bar, done, drawn = Text(), 0, 0
    for part in PARTS:
        done += memory.breakdown[part]
        # Ends are rounded, not widths, so that the bar is as long as the sum.
        end = round(BAR_WIDTH * done / whole)
        mark, style = PART_MARKS[part]
        bar.append(mark * (end - drawn), style=style)
        drawn = end
    bar.append("·" * (BAR_WIDTH - drawn), style="dim")
    return bar


def _legend(memory: MemoryPrediction) -> RenderableType:
    legend = Text()
    for part in PARTS:
        mark, style = PART_MARKS[part]
        legend.append(mark, style=style)
        legend.append(f" {part} {units.gib(memory.breakdown[part])}   ")
    return legend


def _bottleneck_lines(speed: SpeedPrediction, config: TrialConfig, gpu: str) -> Iterator[str]:
    ranked = sorted(speed.terms.items(), key=lambda term: -term[1])[:3]
    shares = ", ".join(
        f"{TERM_WORDS[term]} {units.percent(seconds / speed.step_seconds)}"
        for term, seconds in ranked
    )
    yield (
        f"bound by {speed.bottleneck}: {shares} of a step; "
        f"{units.percent(speed.flops_utilization)} of the {gpu}'s {config.compute_dtype} peak"
    )
    yield f"to go faster: {_advice(speed, config)}"


def _advice(speed: SpeedPrediction, config: TrialConfig) -> str:
    match speed.bottleneck:
        case "launch":
            return "a larger micro-batch, or compiled layers, as the card waits for the host"
        case "bandwidth":
            return "fused kernels, compiled layers or no fp32 upcast, which move fewer bytes"
        case "compute" if config.checkpoint_fraction > 0:
            return "recompute fewer layers, if the memory allows it"
        case _:
            return "a card with more FLOP/s; the rest of the step is small"


def _classes(survey: Survey) -> RenderableType:
    """The fastest per rank and target modules at the length of the fastest of all."""
    best = survey.recommended
    assert best is not None, "only called where something fits"
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("rank", "target modules", "tokens/s", "peak", "configuration"):
        grid.add_column(header, justify="right" if header in ("tokens/s", "peak") else "left")
    for (rank, targets, length), forecast in survey.fastest_by_class.items():
        if length != best.config.seq_len or forecast.memory is None:
            continue
        grid.add_row(
            str(rank),
            units.targets(targets),
            units.rate(forecast.tokens_per_second) + ("?" if forecast.fit is not Fit.YES else ""),
            units.gib(forecast.memory.peak_allocated_bytes),
            units.changes(forecast.config, baseline=_same_class(survey.space, forecast.config)),
        )
    return grid


def _same_class(space: SearchSpace, config: TrialConfig) -> TrialConfig:
    """Return the space's baseline with the configuration's capacity, which has its own columns."""
    kept = {key: getattr(config, key) for key in ("lora_rank", "target_modules", "lora_alpha")}
    return space.baseline_config().model_copy(update=kept)


def _space_lines(survey: Survey) -> Iterator[str]:
    counts, total = survey.counts, survey.total
    whole = "no end of configurations" if total is None else units.plural(total, "configuration")
    yield f"{survey.space.name}: {whole}"
    if survey.is_sampled:
        yield f"of {units.plural(counts.looked_at, 'configuration')} drawn at random:"
    yield (
        f"{counts.fit:,} surely fit, {counts.uncertain:,} are too close to say, "
        f"{counts.too_large:,} cannot fit"
    )
    for rule, number in sorted(counts.invalid.items()):
        yield f"{number:,} are forbidden on this model and card: {rule}"
    seconds = survey.study_seconds()
    if seconds is not None:
        yield (
            f"a study of {units.plural(survey.space.trials, 'trial')} takes about "
            f"{units.duration(seconds[0])} to {units.duration(seconds[1])}"
        )


def _too_small(plan: CardPlan) -> Iterator[str]:
    least = None if plan.survey is None else plan.survey.least_bytes
    if least is None:
        yield "every configuration is forbidden on this model and card"
    else:
        yield (
            f"the smallest configuration needs {units.gib(least)}, the budget is "
            f"{units.gib(plan.budget_bytes)}: name a larger card or a smaller model"
        )


def _sure_lines(plan: CardPlan) -> Iterator[str]:
    forecast, evidence = plan.shown, plan.evidence
    assert forecast is not None, "only called where something is shown"
    if forecast.memory is not None:
        yield (
            "memory: predicted from the model's own code, within "
            f"{units.percent(forecast.memory.uncertainty)}{_memory_record(plan)}"
        )
    trial, calibration = forecast.trial, evidence.calibration
    if trial is not None:
        yield f"speed: measured by trial {trial.number} of study {evidence.study}"
    elif calibration is not None:
        yield (
            f"speed: calibrated by {units.plural(calibration.trials, 'trial')} of study "
            f"{evidence.study}, which it meets within "
            f"{100 * calibration.relative_error:.1f} % in the median"
        )
    elif forecast.speed is not None:
        yield "speed: predicted from the card's data sheet, within 25 %; --study calibrates it"
    for bill in plan.bills[:1]:
        yield f"price: {bill.offer.provider}, read on {bill.offer.date} ({bill.offer.source})"
    if not plan.bills and forecast.step_seconds is not None:
        yield f"cost: no price of the {plan.gpu.name} is known; name a file with --prices"
    yield from plan.evidence.notes
    if forecast.broken is None:
        yield from forecast.notes


def _memory_record(plan: CardPlan) -> str:
    evidence = plan.evidence
    if evidence.memory_error is None:
        return ""
    trials = units.plural(len(evidence.memory_errors), "trial")
    error = f"{100 * evidence.memory_error:.1f} %"
    return f"; off by {error} in the median over {trials} of study {evidence.study}"


def work_words(bill: Bill) -> str:
    """Return an amount of work: ``1,000 steps (8,000 samples, 4.1 M tokens)``."""
    work = bill.workload
    return (
        f"{units.plural(work.steps, 'step')} ({work.samples:,} samples, "
        f"{work.tokens / 1e6:,.1f} M tokens)"
    )


def configurations_view(
    forecasts: Sequence[Forecast], cheapest: Sequence[Bill | None]
) -> RenderableType:
    """Return a table of many configurations, in their order."""
    grid = Table(box=None, pad_edge=False, padding=(0, 2, 0, 0), header_style="dim")
    for header in ("", "fits", "peak", "tokens/s", "bound by", "1,000 steps", "configuration"):
        grid.add_column(header, no_wrap=header != "configuration")
    for number, (forecast, bill) in enumerate(zip(forecasts, cheapest, strict=True), start=1):
        grid.add_row(
            str(number),
            Text(_fits_word(forecast), style=FIT_STYLES[forecast.fit]),
            units.gib(forecast.memory.peak_allocated_bytes if forecast.memory else None),
            units.rate(forecast.tokens_per_second),
            forecast.speed.bottleneck if forecast.speed else units.DASH,
            usd(bill.usd_per_1000_steps) if bill else units.DASH,
            forecast.broken.reason
            if forecast.broken
            else f"{units.shape(forecast.config)}; {_structure(forecast.config)}",
        )
    return Group(grid, Text(LEGEND.split("; ")[1], style="dim"))


def _fits_word(forecast: Forecast) -> str:
    if forecast.broken is not None:
        return "invalid"
    return {Fit.YES: "yes", Fit.NO: "no", Fit.UNCERTAIN: "?"}[forecast.fit]
