"""Owns how a plan looks to a person: the answer first, then what it rests on.

Knows nothing of how it was worked out or where it goes.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence

from rich.console import Group, RenderableType
from rich.padding import Padding
from rich.text import Text

from reports import uncertainty, units
from search_spaces.config import TrialConfig
from search_spaces.knobs import targets_in_words
from search_spaces.linears import CapacityClass, parameters
from search_spaces.models import ModelSpec
from search_spaces.space import SearchSpace
from sweep.planning.comparison import CardComparison
from sweep.planning.forecast import Forecast
from sweep.planning.plan import CardPlan
from sweep.planning.recommendation import STANDARD, certainty
from sweep.planning.survey import Survey
from sweep.planning.table import ShapeTable
from sweep.planning.whatif import WhatIf, few
from sweep.predict.memory.predictor import Fit
from sweep.terminal.plan.costs import bill_lines, comparison_lines, offers_view, work_words
from sweep.terminal.plan.forecast import (
    FIT_STYLES,
    FORBIDDEN,
    answer_view,
    describe,
    knobs,
    shared_line,
    shared_words,
    structure,
)
from sweep.terminal.plan.layout import empty_grid, lines, section
from sweep.terminal.plan.verdict import (
    comparison_verdict,
    one_pass,
    speed_words,
    verdict_lines,
    verdict_title,
    what_if_row,
)

LEGEND = "'?' is too close to the budget to be sure, '-' does not fit"
SPACE_LEGEND = "the fastest of the {whole} that fits, of any rank and target modules; " + LEGEND


def plan_view(plan: CardPlan) -> RenderableType:
    """Return the plan of one card."""
    return Group(*_sections(plan))


def plans_view(plans: Sequence[CardPlan], comparison: CardComparison | None) -> RenderableType:
    """Return the verdict across cards, the same training on each, and then each card's plan."""
    views = [part for plan in plans for part in (Text(""), plan_view(plan))]
    return Group(*_comparison(comparison), *views)


def _comparison(comparison: CardComparison | None) -> Iterator[RenderableType]:
    title = "The same work on each card"
    if comparison is None:
        yield Text(title, style="bold")
        yield Padding(Text("nothing to compare: fewer than two can do it"), (0, 0, 0, 2))
        return
    yield Text(f"{title}: {_training(comparison)}", style="bold")
    yield Padding(lines(comparison_verdict(comparison)), (0, 0, 0, 2))
    content = [lines(_contestants(comparison))]
    if comparison.bills is not None:
        content += [offers_view(comparison.bills.bills), lines(comparison_lines(comparison.bills))]
    yield from section("How each card does it", *content)


def _training(comparison: CardComparison) -> str:
    work = comparison.workload
    return (
        f"{work.tokens / 1e6:,.1f} M tokens in {units.plural(work.steps, 'step')} of "
        f"{comparison.effective_batch_size:,} x {comparison.seq_len:,}"
    )


def _contestants(comparison: CardComparison) -> Iterator[str]:
    """Yield how each card makes the effective batch."""
    for name, forecast in comparison.chosen.items():
        times = forecast.config.accumulation_steps
        how = "" if times == 1 else f", accumulated {times} times"
        doubt = "" if forecast.fit is Fit.YES else " (perhaps fits)"
        yield (
            f"{name}: {speed_words(forecast)} with "
            f"{describe(one_pass(forecast.config))}{how}{doubt}"
        )


def _sections(plan: CardPlan) -> Iterator[RenderableType]:
    """Yield the answer first, then what else could be done, then what it rests on."""
    yield Text(verdict_title(plan), style="bold")
    yield Padding(lines(verdict_lines(plan)), (0, 0, 0, 2))
    changes = few(plan.what_ifs)
    if changes:
        title = "What if: one change each, against that configuration"
        yield from section(title, _what_ifs(changes, of=len(plan.what_ifs)))
    if plan.shown is not None and plan.shown.broken is None:
        answer = answer_view(plan.shown, gpu=plan.gpu, budget_bytes=plan.budget_bytes)
        yield from section("Where its memory and time go", answer)
    if plan.survey is not None and plan.shown is not None:
        yield from section("Why this one", lines(_reasons(plan.survey, plan.shown)))
    if plan.table is not None:
        yield from section("What fits, in tokens/s", _table(plan.table, plan))
    if plan.survey is not None:
        yield from section("The space", lines(_space_lines(plan.survey, plan)))
        yield from _classes_section(plan.survey, plan.shown)
    if plan.bills:
        title = f"Cost of {work_words(plan.bills[0].workload)}"
        yield from section(title, offers_view(plan.bills), lines(bill_lines(plan.bills[0])))
    yield from section("Grounds", lines(_grounds(plan)))


def _what_ifs(changes: Sequence[WhatIf], *, of: int) -> RenderableType:
    grid = empty_grid("", "", "", "", right=("speed", "memory"))
    grid.show_header = False
    for change in changes:
        grid.add_row(*what_if_row(change))
    return Group(grid, Text(f"all {units.plural(of, 'change')} of a knob: --json", style="dim"))


def _classes_section(survey: Survey, shown: Forecast | None) -> Iterator[RenderableType]:
    if shown is not None and len(survey.fastest_by_class) > 1:
        yield from section("Fastest of each capacity class", _classes(survey, shown))


def _grounds(plan: CardPlan) -> Iterator[str]:
    yield (
        f"{plan.gpu.name} ({plan.gpu.product}): {units.gib(plan.gpu.memory_bytes)} usable, a "
        f"training may take {units.gib(plan.budget_bytes)}"
    )
    yield _model_line(plan.model)
    if plan.shown is not None:
        yield from _sure_lines(plan, plan.shown)


def _model_line(model: ModelSpec) -> str:
    count = parameters(model)
    size = "" if count is None else f"{_in_words(count)} parameters, "
    return f"{model.name}: {size}{model.hidden_layers} layers, a vocabulary of {model.vocab_size:,}"


def _in_words(count: int) -> str:
    return f"{count / 1e9:.2f} B" if count >= 1e8 else f"{count / 1e6:.1f} M"


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
        words = f"'{FORBIDDEN}' is forbidden on this model and card: {', '.join(rules)}"
        yield Text(words, style="dim")


def _shown_batches(table: ShapeTable) -> Iterator[int]:
    """Yield the micro-batches up to the first from which on nothing fits at any length."""
    most = max((largest.possible for largest in table.largest.values()), default=0)
    for batch in table.batches:
        yield batch
        if batch > most:
            return


def _cell(cell: Forecast, shown: TrialConfig | None) -> Text:
    is_shown = shown is not None and _shape(cell.config) == _shape(shown)
    style = FIT_STYLES[cell.fit] + (" reverse" if is_shown else "")
    if cell.fit is Fit.NO:
        return Text("-" if cell.broken is None else FORBIDDEN, style=style)
    known = "fits" if cell.tokens_per_second is None else units.rate(cell.tokens_per_second)
    return Text(f"{known}?" if cell.fit is Fit.UNCERTAIN else known, style=style)


def _shape(config: TrialConfig) -> tuple[int, int]:
    return config.micro_batch_size, config.seq_len


def _largest(table: ShapeTable, length: int) -> str:
    if all(table.cells[batch, length].broken is not None for batch in table.batches):
        return FORBIDDEN
    largest = table.largest[length]
    perhaps = f" ({largest.possible:,}?)" if largest.possible > largest.sure else ""
    return f"{f'{largest.sure:,}' if largest.sure else '-'}{perhaps}"


def _reasons(survey: Survey, best: Forecast) -> Iterator[str]:
    """Yield why that class, that length and that certainty."""
    config, capacity = best.config, survey.capacity
    assert capacity is not None, "what is recommended has a class"
    standard = uncertainty.capacity(STANDARD)
    fits = "fits" if best.fit is Fit.YES else "may fit"
    if len({key[0] for key in survey.fastest_by_class}) == 1:
        yield f"{uncertainty.capacity(config)} is the only capacity class here that {fits}"
    elif capacity == CapacityClass.of(STANDARD, survey.model):
        yield f"{standard} is the published recipe's capacity; others are for you to name"
    else:
        yield f"{uncertainty.capacity(config)} is the nearest to {standard} here that {fits}"
    if len({length for known, length in survey.fastest_by_class if known == capacity}) > 1:
        yield f"{config.seq_len:,} is the length of most tokens/s: hold yours with --seq-len"
    other = survey.alternative
    if other is not None and certainty(other) > certainty(best):
        speed = f"{units.rate(other.tokens_per_second)} tokens/s"
        yield f"surer to fit, and slower beyond doubt: {describe(other.config)}, {speed}"


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


def _space_lines(survey: Survey, plan: CardPlan) -> Iterator[str]:
    counts, total = survey.counts, survey.total
    whole = "no end of configurations" if total is None else units.plural(total, "configuration")
    yield f"{_space_words(survey, plan)}: {whole}"
    if survey.is_sampled:
        yield f"of a sample of {units.plural(counts.looked_at, 'configuration')}:"
    yield (
        f"{counts.fit:,} surely fit, {counts.uncertain:,} are too close to say, "
        f"{counts.too_large:,} cannot fit"
    )
    for rule, number in sorted(counts.invalid.items()):
        yield f"{number:,} are forbidden on this model and card: {rule}"
    for reason, number in sorted(counts.unpredicted.items()):
        yield f"{number:,} are not predicted: {reason}"
    seconds = survey.study_seconds()
    if seconds is not None:
        yield (
            f"a study of {units.plural(survey.trials, 'trial')} takes about "
            f"{units.duration(seconds[0])} to {units.duration(seconds[1])} on the {plan.gpu.name}"
            f"{_sooner(survey.space)}"
        )


def _sooner(space: SearchSpace) -> str:
    """Return that a search may end before its last trial, where it may."""
    may_end = space.sampler == "guided" and space.stop_below_gain > 0
    return "; it ends sooner, once no trial is expected to gain enough" if may_end else ""


def _space_words(survey: Survey, plan: CardPlan) -> str:
    """Return which space was taken, and what of it was held: one letter must not decide that."""
    name = survey.space.name
    words = {
        "preset": f"preset {name}",
        "standard": f"the {name}'s standard space",
        "file": f"file {name}",
        "fitted": f"the same knobs, with micro-batches for the {name}",
    }
    held = ", ".join(units.phrase(key, survey.space.fixed[key]) for key in plan.asked.held)
    return words.get(plan.asked.kind or "", name) + (f", held at {held}" if held else "")


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
        return (
            f"predicted from the card's data sheet, within "
            f"{units.percent(forecast.speed.uncertainty)}; --study NAME calibrates it"
        )
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
