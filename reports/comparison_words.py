"""A comparison of several GPUs in words, rows and a figure, and what a training takes and costs."""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from html import escape
from operator import attrgetter

import plotly.graph_objects as go

from qlora_sweep.reports import format as units
from qlora_sweep.reports.comparison import (
    JOB_TOKENS,
    ComparedGpu,
    GpuComparison,
    GpuEntry,
    Group,
    Option,
    entry_of,
    of_study,
    priced,
)
from qlora_sweep.reports.figures import MARKS, PageFigure, Section, framed, whiskers
from qlora_sweep.search_spaces import costs
from qlora_sweep.search_spaces.config import TrialConfig, as_typed, targets_in_words
from qlora_sweep.search_spaces.estimates import Estimate
from qlora_sweep.storage.definition import StudySnapshot

_usd: Callable[[costs.Bill], float] = attrgetter("usd")


def training_words(snapshot: StudySnapshot, number: int, work: costs.AskedWork) -> str:
    """Return what a training as a trial ran takes and costs; empty where its speed is unknown."""
    candidate = of_study(snapshot)
    options = {option.number: option for option in candidate.options}
    option = options.get(number)
    if option is None:
        return ""
    entry = entry_of(candidate, option, priced(work))
    seconds = units.duration(entry.seconds.value)
    if option.has_interval:
        seconds = _range(entry.seconds, units.duration)
    if entry.bill is None:
        return f"{_work(work)}: {seconds}"
    usd = units.usd(entry.bill.usd)
    if option.has_interval:
        usd = _range(entry.bill.range_of(_usd), units.usd)
    return f"{_work(work)}: {seconds}, {usd} in all"


def comparison_words(comparison: GpuComparison) -> Section:
    """Return the words and figures of a comparison."""
    candidates = comparison.candidates
    names = [units.gpu_name(candidate.gpu) for candidate in candidates]
    if len(set(names)) < len(names):
        names = [candidate.label for candidate in candidates]
    groups = []
    figures = []
    for group in comparison.groups:
        groups.append(
            Section(
                title=f"{group.ground.name}, {_ground(group.entries[0].option)}",
                verdicts=list(_verdicts(group)) + list(_absent(group, candidates)),
                rows=list(map(_row, group.entries)),
            )
        )
    if comparison.groups and any(map(attrgetter("bill"), comparison.groups[0].entries)):
        figures.append(_prices(comparison.groups[0]))
    return Section(
        title=f"{', '.join(names[:-1])} or {names[-1]}?",
        work=_work(comparison.work),
        groups=groups,
        apart=list(_apart(comparison)),
        figures=figures,
    )


def _work(work: costs.AskedWork) -> str:
    amount = f"{work.tokens or JOB_TOKENS:,.0f} tokens"
    if work.dataset_samples is not None:
        amount = f"{work.dataset_samples:,.0f} sequences of full length"
    if work.epochs in (None, 1):
        return amount
    return f"{work.epochs:g} epochs of {amount}"


def _ground(option: Option) -> str:
    """Return what configurations have in common: ``rank 16 on q,k,v,o, 512 tokens a sequence``."""
    targets = targets_in_words(option.config.target_modules)
    length = units.count(option.ground.seq_len)
    ground = f"rank {option.config.lora_rank} on {targets}, {length} tokens a sequence"
    if option.config.is_on_pairs:
        return f"{units.phrase('method', option.config.method)}, {ground}"
    return ground


def _verdicts(group: Group) -> Iterator[str]:
    """Yield who is the cheapest and who the fastest, as far as that is sure, and break-evens."""
    labels: dict[int, str] = {}
    unpriced = []
    for entry in group.entries:
        if entry.bill is None:
            unpriced.append(entry.candidate.label)
        else:
            labels[id(entry.bill)] = entry.candidate.label
    offered = group.offered
    if offered is not None:
        tied: dict[str, str] = {}
        behind: dict[str, Estimate] = {}
        for bill in offered.bills:
            label = labels[id(bill)]
            if bill in offered.perhaps_cheapest:
                tied[label] = _range(bill.range_of(_usd), units.usd)
            else:
                behind[label] = costs.ratio(bill, offered.cheapest)
        yield _leader("Cheapest", tied, behind)
    if unpriced:
        yield f"No price is known of {', '.join(unpriced)}: write one into runs/prices.yaml."
    ranked = sorted(group.entries, key=lambda entry: entry.seconds.value)
    as_fast = costs.ties(ranked, lambda entry, other: entry.seconds.over(other.seconds))
    tied = {}
    behind = {}
    for entry in ranked:
        if entry in as_fast:
            tied[entry.candidate.label] = _range(entry.seconds, units.duration)
        else:
            behind[entry.candidate.label] = entry.seconds.over(ranked[0].seconds)
    yield _leader("Fastest", tied, behind)
    if offered is not None:
        for point in offered.break_evens:
            amount, low, high = map(_two_digits, point.samples)
            yield (
                f"{labels[id(point.below)]} is cheaper below about {amount} sequences (between "
                f"{low} and {high}), {labels[id(point.above)]} above."
            )


def _two_digits(number: float) -> str:
    return units.count(round(float(f"{number:.2g}")))


def _leader(what: str, tied: Mapping[str, str], behind: Mapping[str, Estimate]) -> str:
    """Return who leads, or that no one does for sure.

    Args:
        what: they are compared by.
        tied: the number of each label that may lead, the likeliest first.
        behind: those that surely take more, with how many times as much.
    """
    leaders = list(map(" ".join, tied.items()))
    if len(leaders) > 1:
        return f"{what}: statistically indistinguishable are {'; '.join(leaders)}."
    others = ", ".join(
        f"{label} takes {times.value:.1f}x as much ({times.low:.1f}–{times.high:.1f}x)"
        for label, times in behind.items()
    )
    return f"{what}: {leaders[0]}; {others}."


def _range(number: Estimate, words: Callable[[float], str]) -> str:
    return f"{words(number.value)} ({words(number.low)} to {words(number.high)})"


def _absent(group: Group, candidates: Sequence[ComparedGpu]) -> Iterator[str]:
    """Yield which GPUs are not in a comparison, and what would bring them in."""
    present = {entry.candidate.label for entry in group.entries}
    option = group.entries[0].option
    for candidate in candidates:
        if candidate.label not in present:
            command = ["sweep", "run", candidate.gpu, "--model", option.ground.name]
            command += ["--rank", str(option.config.lora_rank)]
            command += ["--target-modules", as_typed(option.config.target_modules)]
            command += ["--seq-len", str(option.ground.seq_len)]
            if option.config.is_on_pairs:
                command += ["--method", option.config.method]
            why = f"it has nothing of {_ground(option)}"
            to_compare = f"To compare: {shlex.join(command)}"
            yield f"{candidate.label} is not compared here: {why}. {to_compare}"


def _row(entry: GpuEntry) -> tuple[str, ...]:
    """Return GPU, tokens/s, dollars per million tokens, time, bill, price, peak memory and
    configuration."""
    option = entry.option
    candidate = entry.candidate
    per_million = units.DASH
    cost = units.DASH
    price = units.DASH
    bill = entry.bill
    if bill is not None:
        per_million = _range(bill.range_of(attrgetter("usd_per_million_tokens")), units.usd)
        cost = _range(bill.range_of(_usd), units.usd)
        price = f"{units.usd(bill.usd_per_hour)} an hour, {bill.offer.label}, {bill.offer.date}"
    ends = "no interval"
    if option.has_interval:
        ends = units.rate_interval((option.speed.low, option.speed.high))
    share = option.peak_bytes / candidate.budget_bytes
    config = option.config
    standard = TrialConfig(
        micro_batch_size=config.micro_batch_size,
        seq_len=config.seq_len,
        lora_rank=config.lora_rank,
        target_modules=config.target_modules,
    )
    return (
        f"{candidate.label} ({candidate.source})",
        f"{units.rate(option.speed.value)} ({ends}), {option.basis}",
        per_million,
        _range(entry.seconds, units.duration),
        cost,
        price,
        f"{units.gib(option.peak_bytes)}, {units.percent(share)} of the budget",
        f"trial {option.number}: {units.size(config)}, {units.changes(config, baseline=standard)}",
    )


def _apart(comparison: GpuComparison) -> Iterator[str]:
    """Yield what is not compared: nothing is left out silently."""
    models: dict[str, None] = {}
    for candidate in comparison.candidates:
        models |= dict.fromkeys(option.ground.name for option in candidate.options)
    if len(models) > 1:
        yield f"Different models are never compared: {', '.join(models)} each stand alone."
    for candidate in comparison.candidates:
        if not candidate.options:
            yield f"{candidate.label} has nothing that fits."
    if models and not comparison.groups:
        yield (
            "No two of these have a configuration of the same model, rank, target modules and "
            "length: their speeds do not compare."
        )
    for entry in comparison.alone:
        _, speed, *_ = _row(entry)
        yield f"Only {entry.candidate.label} has {_ground(entry.option)}: {speed} tokens/s."


def _prices(group: Group) -> PageFigure:
    """Return what tokens cost on each GPU against its speed."""
    figure = go.Figure(layout=framed(420))
    for entry, mark in zip(group.entries, itertools.cycle(MARKS.values()), strict=False):
        if entry.bill is None:
            continue
        usd = entry.bill.range_of(_usd)
        speed = entry.option.speed
        label = escape(entry.candidate.label)
        figure.add_scatter(
            name=label,
            x=[usd.value],
            y=[speed.value],
            error_x=whiskers([usd.value], [usd[1:]]),
            error_y=whiskers([speed.value], [speed[1:]]),
            mode="markers+text",
            text=[label],
            textposition="top left",
            marker=mark.marker(12),
            hovertemplate="%{text}: $%{x:.3g}, %{y:,.4~r} tokens/s<extra></extra>",
            showlegend=False,
        )
    figure.update_xaxes(title="dollars for the work", rangemode="tozero", tickprefix="$")
    figure.update_yaxes(title="tokens/s", rangemode="tozero", tickformat=",~r")
    caption = (
        f"The bill against tokens/s, of the fastest with {_ground(group.entries[0].option)} on "
        "each GPU. Left is cheaper, up is faster; whiskers are the speeds' uncertainty."
    )
    return PageFigure("prices", "What it costs, and how fast it is", caption, figure)
