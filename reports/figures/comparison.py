"""Owns what the page of several GPUs says: the verdict, the table of each ground, the figures.

Pure: a comparison in, finished text and drawings out. What leads and what cannot be told is
`comparison`'s.
"""

from __future__ import annotations

import math
import shlex
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

import plotly.graph_objects as go

from reports import units
from reports.cards import Card, Ground, Option, Range
from reports.comparison import BreakEven, Comparison, Entry, Group, Leader, is_asked, start_usd
from reports.decision import Job
from reports.figures.figure import DataTable, PageFigure
from reports.figures.style import (
    FRONT_COLOUR,
    LIMIT_COLOUR,
    MARKS,
    OUTLINE,
    WINNER_COLOUR,
    framed,
    whiskers,
)
from search_spaces.config import TrialConfig, targets_in_words
from search_spaces.gpus import GIB
from storage.records import Verdict

_STYLES = (
    (MARKS[Verdict.FITS].colour, "circle", "solid"),
    (LIMIT_COLOUR, "square", "dash"),
    (FRONT_COLOUR, "diamond", "dot"),
    (MARKS[Verdict.DIVERGED].colour, "triangle-up", "dashdot"),
    (WINNER_COLOUR, "cross", "longdash"),
    (MARKS[Verdict.INVALID].colour, "x", "longdashdot"),
)
"""Colour, symbol and dash of each GPU, in the order in which they were named."""
_OTHERS_NAMED = 4
_LABEL_SHARE = 0.12
"""Of the fastest: names that are closer than this would stand on each other."""


@dataclass(frozen=True)
class CardRow:
    """One GPU on one ground, as text."""

    card: str
    source: str
    configuration: str
    speed: str
    price: str
    per_million_tokens: str
    time: str
    bill: str
    peak: str
    leads: tuple[str, ...]


@dataclass(frozen=True)
class GroupWords:
    """The GPUs of one ground."""

    title: str
    verdicts: tuple[str, ...]
    rows: tuple[CardRow, ...]


@dataclass(frozen=True)
class ComparisonWords:
    """All that the page of several GPUs says."""

    title: str
    work: str
    groups: tuple[GroupWords, ...]
    apart: tuple[str, ...]
    """What is not compared, and why."""
    figures: tuple[PageFigure, ...]


def words_of(comparison: Comparison) -> ComparisonWords:
    """Return the words and figures of a comparison."""
    gpus = [units.gpu_name(card.gpu) for card in comparison.cards]
    labels = [card.label for card in comparison.cards]
    names = gpus if len(set(gpus)) == len(gpus) else labels
    return ComparisonWords(
        title=f"{', '.join(names[:-1])} or {names[-1]}?",
        work=_job_words(comparison.job),
        groups=tuple(
            _group_words(group, comparison.job, comparison.cards) for group in comparison.groups
        ),
        apart=tuple(_apart(comparison)),
        figures=_figures(comparison),
    )


def _job_words(job: Job) -> str:
    if not is_asked(job):
        return "a million tokens"
    repeats = job.epochs or 1.0
    epochs = f"{repeats:g} epochs of " if repeats != 1 else ""
    if job.tokens is not None:
        return f"{epochs}{job.tokens:,.0f} tokens"
    return f"{epochs}{job.dataset_samples:,.0f} rows of full length"


def ground_words(ground: Ground, config: TrialConfig) -> str:
    """Return what configurations have in common: ``rank 16 on q,k,v,o, 512 tokens a row``."""
    targets = targets_in_words(config.target_modules)
    return f"rank {config.lora_rank} on {targets}, {units.count(ground.seq_len)} tokens a row"


def _group_words(group: Group, job: Job, cards: Sequence[Card]) -> GroupWords:
    first = group.entries[0].option
    return GroupWords(
        title=f"{group.ground.model_name}, {ground_words(group.ground, first.config)}",
        verdicts=(*_verdicts(group, job), *_absent(group, cards)),
        rows=tuple(_row(entry, group) for entry in group.entries),
    )


def _verdicts(group: Group, job: Job) -> Iterator[str]:
    unpriced = [entry.card.label for entry in group.entries if entry.usd is None]
    if group.cheapest is not None:
        yield _leader_words(
            "Cheapest", group.cheapest, [_bill_words(e, job) for e in group.cheapest.tied]
        )
    if unpriced:
        yield f"No price is known of {', '.join(unpriced)}: write one into runs/prices.yaml."
    yield _leader_words("Soonest", group.soonest, [_time_words(e, job) for e in group.soonest.tied])
    yield from (_break_even_words(point, group.ground) for point in group.break_evens)
    if group.cheapest is not None and group.cheapest.is_sure and not group.break_evens:
        yield _no_break_even(group.cheapest)


def _absent(group: Group, cards: Sequence[Card]) -> Iterator[str]:
    """Yield which GPUs are not in a comparison, and what would bring them in."""
    present = {entry.card.label for entry in group.entries}
    where = ground_words(group.ground, group.entries[0].option.config)
    for card in cards:
        if card.label not in present:
            yield (
                f"{card.label} is not compared here: it has nothing of {where}. To compare its "
                f"plan: {_plan_command(card, group.entries[0].option)}"
            )


def _plan_command(card: Card, option: Option) -> str:
    """Return the command whose answer is on the ground of a configuration."""
    targets = option.config.target_modules
    typed = targets if isinstance(targets, str) else ",".join(targets)
    words = ["sweep", "plan", card.gpu, "--model", option.ground.model_name]
    words += ["--rank", str(option.config.lora_rank), "--target-modules", typed]
    words += ["--seq-len", str(option.ground.seq_len), "--json"]
    return shlex.join(words)


def _no_break_even(leader: Leader) -> str:
    first = leader.tied[0]
    if all(start_usd(first) <= start_usd(entry) for entry, _ in leader.behind):
        return (
            f"{first.card.label} costs the least to start as well: no amount of work is too small."
        )
    return "At how little work another GPU is cheaper cannot be told: the speeds are too unsure."


def _leader_words(what: str, leader: Leader, numbers: Sequence[str]) -> str:
    first = leader.tied[0].card.label
    if not leader.is_sure:
        tied = "; ".join(
            f"{entry.card.label} {number}"
            for entry, number in zip(leader.tied, numbers, strict=True)
        )
        return f"{what} cannot be told within the uncertainty of the speeds: {tied}."
    others = ", ".join(
        f"{entry.card.label} takes {factor_words(ratio)}"
        for entry, ratio in leader.behind[:_OTHERS_NAMED]
    )
    return f"{what}: {first}, {numbers[0]}; {others}."


def factor_words(ratio: Range) -> str:
    """Return how many times as much: ``2.4x as much (1.9–3.1x)``."""
    ends = f"{ratio.low:.1f}–{ratio.high:.1f}x" if ratio.high < math.inf else f"{ratio.low:.1f}x up"
    return f"{ratio.value:.1f}x as much ({ends})"


def _bill_words(entry: Entry, job: Job) -> str:
    known = entry.usd_per_million_tokens if not is_asked(job) else entry.usd
    what = "" if is_asked(job) else " per million tokens"
    return f"{dollars(known)}{what}"


def _time_words(entry: Entry, job: Job) -> str:
    return f"{time_range(entry.seconds)} for {_job_words(job)}"


def dollars(known: Range | None) -> str:
    """Return dollars with their ends: ``$0.036 (0.027–0.046)``."""
    if known is None:
        return units.DASH
    if not known.is_bounded:
        return f"${known.value:.3g} (no interval)"
    return f"${known.value:.3g} ({known.low:.2g}–{known.high:.2g})"


def time_range(seconds: Range) -> str:
    """Return a time with its ends."""
    if not seconds.is_bounded:
        return f"{units.duration(seconds.value)} (no interval)"
    ends = f"{units.duration(seconds.low)} to {units.duration(seconds.high)}"
    return f"{units.duration(seconds.value)} ({ends})"


def speed_range(option: Option) -> str:
    """Return a speed with its ends and what they are: ``6,090 (4,871–8,122), predicted``."""
    speed = option.tokens_per_second
    ends = (
        f"{units.rate(speed.low)}–{units.rate(speed.high)}" if speed.is_bounded else "no interval"
    )
    return f"{units.rate(speed.value)} ({ends}), {option.basis}"


def _break_even_words(point: BreakEven, ground: Ground) -> str:
    rows = Range(
        *(end / ground.seq_len for end in (point.tokens.value, point.tokens.low, point.tokens.high))
    )
    ends = f"between {_amount(rows.low)} and {_amount(rows.high)}"
    return (
        f"{point.small.card.label} is cheaper below about {_amount(rows.value)} rows ({ends}), "
        f"{point.large.card.label} above: it starts for more, and takes less a row."
    )


def _amount(value: float) -> str:
    if not math.isfinite(value):
        return "any number"
    return units.count(round(float(f"{value:.2g}")))


def _row(entry: Entry, group: Group) -> CardRow:
    option, rent = entry.option, entry.card.rent
    share = None if option.peak_bytes is None else option.peak_bytes / entry.card.budget_bytes
    peak = units.gib(option.peak_bytes) if option.fits_surely else "may not fit"
    return CardRow(
        card=entry.card.label,
        source=entry.card.source,
        configuration=_configuration(option),
        speed=speed_range(option),
        price=(
            units.DASH
            if rent is None
            else f"${rent.usd_per_hour:.2f} an hour, {rent.provider}, {rent.date}"
        ),
        per_million_tokens=dollars(entry.usd_per_million_tokens),
        time=time_range(entry.seconds),
        bill=dollars(entry.usd),
        peak=peak if share is None else f"{peak}, {units.percent(share)} of the budget",
        leads=tuple(_leads(entry, group)),
    )


def _leads(entry: Entry, group: Group) -> Iterator[str]:
    for name, leader in (("cheapest", group.cheapest), ("soonest", group.soonest)):
        if leader is not None and entry.card.label in {e.card.label for e in leader.tied}:
            yield name if leader.is_sure else f"tied: {name}"


def _configuration(option: Option) -> str:
    trial = f"trial {option.number}: " if option.number is not None else ""
    changes = units.changes(option.config, baseline=_reference(option))
    return f"{trial}{units.size(option.config)}, {changes}"


def _reference(option: Option) -> TrialConfig:
    """Return the standard recipe at a configuration's size: what is told is the rest."""
    known = option.config
    return TrialConfig(
        micro_batch_size=known.micro_batch_size,
        seq_len=known.seq_len,
        lora_rank=known.lora_rank,
        target_modules=known.target_modules,
    )


def _apart(comparison: Comparison) -> Iterator[str]:
    """Yield what is not compared: nothing is left out silently."""
    models = dict.fromkeys(
        option.ground.model_name for card in comparison.cards for option in card.options
    )
    if len(models) > 1:
        yield f"Different models are never compared: {', '.join(models)} each stand alone."
    for card in comparison.cards:
        if not card.options:
            yield f"{card.label} has nothing that fits."
    if not comparison.groups and any(card.options for card in comparison.cards):
        yield (
            "No two of these have a configuration of the same model, rank, target modules and "
            "length: their speeds do not compare."
        )
    for entry in comparison.alone:
        where = ground_words(entry.option.ground, entry.option.config)
        yield f"Only {entry.card.label} has {where}: {speed_range(entry.option)} tokens/s."


def _figures(comparison: Comparison) -> tuple[PageFigure, ...]:
    if not comparison.groups:
        return ()
    group = comparison.groups[0]
    title = ground_words(group.ground, group.entries[0].option.config)
    drawn = [
        PageFigure(
            "fronts",
            "What memory buys on each GPU",
            f"Tokens/s on each GPU against peak memory, of {title}: what no other configuration "
            "of that GPU beats in both; a star is what is recommended. Whiskers are the speeds' "
            "uncertainty; a dashed line is a GPU's budget.",
            _fronts(comparison.cards, group.ground),
            _front_table(comparison.cards, group.ground),
        )
    ]
    if any(entry.usd is not None for entry in group.entries):
        drawn.append(
            PageFigure(
                "prices",
                "What it costs, and how long it takes",
                f"Dollars per million tokens against tokens/s, of the fastest with {title} on each "
                "GPU. Left is cheaper, up is sooner; whiskers are the speeds' uncertainty.",
                _prices(comparison.cards, group),
                None,
            )
        )
    return tuple(drawn)


def front_of(card: Card, ground: Ground) -> tuple[Option, ...]:
    """Return what no other configuration of a GPU beats, the one of least memory first."""
    known = [o for o in card.options if o.ground == ground and o.peak_bytes is not None]
    front: list[Option] = []
    for option in sorted(known, key=lambda o: (o.peak_bytes or 0, -o.tokens_per_second.value)):
        if not front or option.tokens_per_second.value > front[-1].tokens_per_second.value:
            front.append(option)
    return tuple(front)


def _fronts(cards: Sequence[Card], ground: Ground) -> go.Figure:
    figure = go.Figure()
    for place, card in enumerate(cards):
        front = front_of(card, ground)
        if not front:
            continue
        colour, symbol, dash = _STYLES[place % len(_STYLES)]
        figure.add_scatter(
            name=escape(card.label),
            mode="lines+markers",
            x=[(option.peak_bytes or 0) / GIB for option in front],
            y=[option.tokens_per_second.value for option in front],
            error_y=_whiskers([option.tokens_per_second for option in front]),
            line={"color": colour, "dash": dash, "shape": "hv", "width": 2},
            marker={"color": colour, "symbol": symbol, "size": 10},
            hovertext=[_hover(card, option) for option in front],
            hovertemplate="%{hovertext}<extra></extra>",
        )
        best = card.best(ground)
        if best is not None and best.peak_bytes is not None:
            figure.add_scatter(**_recommended(card, best, colour))
        figure.add_vline(
            x=card.budget_bytes / GIB, line={"color": colour, "width": 1, "dash": "dash"}
        )
    return _framed(figure, "peak allocated memory (GiB)")


def _recommended(card: Card, best: Option, colour: str) -> dict[str, Any]:
    """Return the mark of what is recommended on a GPU: measured again, it may be off the front."""
    return {
        "name": escape(f"recommended on {card.label}"),
        "mode": "markers",
        "x": [(best.peak_bytes or 0) / GIB],
        "y": [best.tokens_per_second.value],
        "marker": {"color": colour, "symbol": "star", "size": 16, "line": OUTLINE},
        "hovertext": [_hover(card, best)],
        "hovertemplate": "%{hovertext}<extra></extra>",
        "showlegend": False,
    }


def _front_table(cards: Sequence[Card], ground: Ground) -> DataTable:
    rows = (
        (card.label, _configuration(option), speed_range(option), units.gib(option.peak_bytes))
        for card in cards
        for option in front_of(card, ground)
    )
    return DataTable(("GPU", "configuration", "tokens/s", "peak allocated"), tuple(rows))


def _label_place(entry: Entry, group: Group) -> str:
    """Return where a GPU's name stands: off its whiskers, inside the figure, off the next GPU."""
    prices = [e.usd_per_million_tokens.value for e in group.entries if e.usd_per_million_tokens]
    own, speed = entry.usd_per_million_tokens, entry.option.tokens_per_second.value
    speeds = [e.option.tokens_per_second.value for e in group.entries]
    is_right = own is not None and 2 * own.value < max(prices)
    is_below_another = any(0 < other - speed < _LABEL_SHARE * max(speeds) for other in speeds)
    return f"{'bottom' if is_below_another else 'top'} {'right' if is_right else 'left'}"


def _prices(cards: Sequence[Card], group: Group) -> go.Figure:
    figure = go.Figure()
    places = {card.label: place for place, card in enumerate(cards)}
    for entry in group.entries:
        usd, speed = entry.usd_per_million_tokens, entry.option.tokens_per_second
        if usd is None:
            continue
        colour, symbol, _ = _STYLES[places[entry.card.label] % len(_STYLES)]
        figure.add_scatter(
            name=escape(entry.card.label),
            mode="markers+text",
            x=[usd.value],
            y=[speed.value],
            text=[escape(entry.card.label)],
            textposition=_label_place(entry, group),
            error_x=_whiskers([usd]),
            error_y=_whiskers([speed]),
            marker={"color": colour, "symbol": symbol, "size": 12},
            hovertext=[
                f"{_hover(entry.card, entry.option)}<br>{escape(dollars(usd))} per million tokens"
            ],
            hovertemplate="%{hovertext}<extra></extra>",
            showlegend=False,
        )
    ends = [e.usd_per_million_tokens for e in group.entries if e.usd_per_million_tokens is not None]
    most = max(one.high if one.is_bounded else one.value for one in ends)
    figure = _framed(figure, "dollars per million tokens", prefix="$")
    # Room for the name of the last.
    return figure.update_xaxes(range=[0, 1.15 * most])


def _whiskers(known: Sequence[Range]) -> dict[str, Any]:
    """Return error bars; a number without ends has none."""
    ends = [(one.low, one.high) if one.is_bounded else (one.value, one.value) for one in known]
    return whiskers([one.value for one in known], ends)


def _hover(card: Card, option: Option) -> str:
    lines = (
        f"{card.label}, {card.source}",
        _configuration(option),
        f"{speed_range(option)} tokens/s",
    )
    return "<br>".join(map(escape, lines))


def _framed(figure: go.Figure, title: str, *, prefix: str = "") -> go.Figure:
    figure.update_layout(
        **framed(420),
        xaxis={"title": {"text": title}, "rangemode": "tozero", "tickprefix": prefix},
        yaxis={"title": {"text": "tokens/s"}, "rangemode": "tozero", "tickformat": ",~r"},
    )
    return figure
