"""Several GPUs beside each other, as studies measured them.

Speeds are compared on one ground: a model, a capacity class, a length. Nothing is claimed inside
the uncertainty of the speeds: not who is cheaper, and not where two GPUs change places.
"""

from __future__ import annotations

import itertools
import shlex
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, replace
from html import escape
from operator import attrgetter
from typing import NamedTuple

import plotly.graph_objects as go

from qlora_sweep.reports import units
from qlora_sweep.reports.figures import MARKS, PageFigure, Section, framed, whiskers
from qlora_sweep.search_spaces import costs
from qlora_sweep.search_spaces.config import TrialConfig, targets_in_words
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.kinds import Method
from qlora_sweep.search_spaces.linears import CapacityClass
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.prices import Offer
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.ranking import measured_of, rank_study
from qlora_sweep.storage.records import TrialRecord

JOB_TOKENS = 10_000_000.0
"""What is priced until a reader says otherwise."""
_usd: Callable[[costs.Bill], float] = attrgetter("usd")


class Ground(NamedTuple):
    """What two configurations must have in common for their speeds to compare."""

    model: str
    """The fingerprint of its architecture."""
    name: str
    capacity: CapacityClass
    seq_len: int
    method: Method


@dataclass(frozen=True)
class Option:
    """A configuration on one GPU."""

    ground: Ground
    config: TrialConfig
    speed: costs.Range
    """Supervised tokens/s."""
    has_interval: bool
    basis: str
    peak_bytes: int
    number: int
    """Of the trial."""
    tokens_per_sample: float | None = None


@dataclass(frozen=True)
class Candidate:
    """One GPU, as a study knows it."""

    label: str
    """What it is called in a comparison; no two are called alike."""
    gpu: str
    source: str
    budget_bytes: int
    offer: Offer | None
    model_bytes: float
    options: tuple[Option, ...]
    """In the order in which they are recommended."""


@dataclass(frozen=True)
class Entry:
    """What a GPU is recommended to run on a ground, and what the work takes with it."""

    candidate: Candidate
    option: Option
    seconds: costs.Range
    """Of training alone."""
    bill: costs.Bill | None
    """None where no price is known."""


@dataclass(frozen=True)
class Group:
    """The GPUs that can be compared on one ground."""

    ground: Ground
    entries: tuple[Entry, ...]
    """The cheapest first; those without a price last, the fastest of them first."""
    offered: costs.OfferComparison | None
    """None where fewer than two prices are known."""


@dataclass(frozen=True)
class Comparison:
    """Several GPUs beside each other."""

    candidates: tuple[Candidate, ...]
    work: costs.AskedWork
    groups: tuple[Group, ...]
    """Of at least two GPUs, the one with the most GPUs first."""
    alone: tuple[Entry, ...]
    """The fastest on each ground that a single GPU has."""


def of_study(snapshot: StudySnapshot) -> Candidate:
    """Return the GPU that a study is for, with all that was measured to fit on it.

    Speeds are the target GPU's, predicted where another stood in, and which configuration stands
    for a GPU is the study's own answer.
    """
    target, model = snapshot.definition.target, ModelSpec.from_json(snapshot.definition.model)
    options = []
    for record in rank_study(snapshot).ranked:
        speed, measured = snapshot.target_speed(record), measured_of(record)
        if speed is None:
            continue
        capacity, length = CapacityClass.of(record.config, model), record.config.seq_len
        loss = measured.loss_tokens_per_step
        options.append(
            Option(
                Ground(
                    snapshot.definition.model_fingerprint,
                    model.name,
                    capacity,
                    length,
                    record.config.method,
                ),
                record.config,
                *_speed(speed.tokens_per_second, speed.low, speed.high),
                speed.basis,
                measured.peak_allocated_bytes,
                record.number,
                None if loss is None else loss / record.config.samples_per_step,
            )
        )
    ran = f", run on {target.emulated_on}" if target.emulated_on else ""
    return Candidate(
        label=snapshot.name,
        gpu=target.gpu,
        source=f"study {snapshot.name}{ran}",
        budget_bytes=target.budget_bytes,
        offer=snapshot.offer,
        model_bytes=costs.checkpoint_bytes(model),
        options=tuple(options),
    )


def _speed(value: float, low: float | None, high: float | None) -> tuple[costs.Range, bool]:
    """Return a speed with its ends, and whether they are known: else they are far."""
    ends = low or costs.SHORTEST_SHARE * value, high or value / costs.SHORTEST_SHARE
    return costs.Range(value, *ends), bool(low and high)


def compare(candidates: Sequence[Candidate], *, work: costs.AskedWork) -> Comparison:
    """Return what can be told of several GPUs.

    Raises:
        InputError: there are fewer than two.
    """
    if len(candidates) < 2:
        raise InputError("comparing takes at least two studies")
    labels = [one.label for one in candidates]
    named = tuple(
        one
        if labels.count(one.label) == 1
        else replace(one, label=f"{one.label} {labels[: at + 1].count(one.label)}")
        for at, one in enumerate(candidates)
    )
    grounds = dict.fromkeys(option.ground for one in named for option in one.options)
    asked = work if work.is_asked else costs.AskedWork(tokens=JOB_TOKENS)
    found = [(ground, _entries(named, ground, asked)) for ground in grounds]
    groups = []
    for ground, entries in found:
        bills = [entry.bill for entry in entries if entry.bill is not None]
        if len(entries) > 1:
            offered = costs.compare_offers(bills) if len(bills) > 1 else None
            groups.append(Group(ground, entries, offered))
    groups.sort(key=lambda group: -len(group.entries))
    alone = tuple(entries[0] for _, entries in found if len(entries) == 1)
    return Comparison(named, work, tuple(groups), alone)


def _entries(
    candidates: Sequence[Candidate], ground: Ground, work: costs.AskedWork
) -> tuple[Entry, ...]:
    options = (
        (one, next((o for o in one.options if o.ground == ground), None)) for one in candidates
    )
    entries = [_entry(one, option, work) for one, option in options if option is not None]
    entries.sort(key=lambda e: (e.bill is None, e.bill.usd if e.bill else e.seconds.value))
    return tuple(entries)


def _entry(candidate: Candidate, option: Option, work: costs.AskedWork) -> Entry:
    config, speed, offer = option.config, option.speed, candidate.offer
    amount = work.workload(
        config,
        tokens_per_sample=option.tokens_per_sample,
        download_bytes=candidate.model_bytes,
    )
    seconds = costs.Range(*(amount.tokens / rate for rate in (speed.value, speed.high, speed.low)))
    step, *ends = (time / amount.steps for time in seconds)
    gpus = config.data_parallel
    bill = None if offer is None else costs.Bill(amount, offer, step, (ends[0], ends[1]), gpus=gpus)
    return Entry(candidate, option, seconds, bill)


def training_words(snapshot: StudySnapshot, record: TrialRecord, work: costs.AskedWork) -> str:
    """Return what a training as a trial ran takes and costs; empty where its speed is unknown."""
    known = of_study(snapshot)
    option = next((option for option in known.options if option.number == record.number), None)
    if option is None:
        return ""
    entry = _entry(known, option, work if work.is_asked else costs.AskedWork(tokens=JOB_TOKENS))
    bill, took, cost = entry.bill, units.duration(entry.seconds.value), ""
    if option.has_interval:
        took = _range(entry.seconds, units.duration)
    if bill is not None:
        usd = bill.range_of(_usd)
        cost = f", {_range(usd, units.usd) if option.has_interval else units.usd(usd.value)} in all"
    return f"{_work(work)}: {took}{cost}"


def comparison_words(comparison: Comparison) -> Section:
    """Return the words and figures of a comparison."""
    gpus = [units.gpu_name(one.gpu) for one in comparison.candidates]
    labels = [one.label for one in comparison.candidates]
    names = gpus if len(set(gpus)) == len(gpus) else labels
    first = comparison.groups[:1]
    groups = [
        Section(
            title=f"{group.ground.name}, {_ground(group.entries[0].option)}",
            verdicts=[*_verdicts(group), *_absent(group, comparison.candidates)],
            rows=[_row(entry) for entry in group.entries],
        )
        for group in comparison.groups
    ]
    return Section(
        title=f"{', '.join(names[:-1])} or {names[-1]}?",
        work=_work(comparison.work),
        groups=groups,
        apart=list(_apart(comparison)),
        figures=[_prices(g) for g in first if any(e.bill for e in g.entries)],
    )


def _work(work: costs.AskedWork) -> str:
    times = f"{work.epochs:g} epochs of " if work.epochs not in (None, 1) else ""
    if work.dataset_samples is not None:
        return f"{times}{work.dataset_samples:,.0f} sequences of full length"
    return f"{times}{work.tokens or JOB_TOKENS:,.0f} tokens"


def _ground(option: Option) -> str:
    """Return what configurations have in common: ``rank 16 on q,k,v,o, 512 tokens a sequence``."""
    targets = targets_in_words(option.config.target_modules)
    length = units.count(option.ground.seq_len)
    method = ""
    if option.config.is_on_pairs:
        method = f"{units.phrase('method', option.config.method)}, "
    return f"{method}rank {option.config.lora_rank} on {targets}, {length} tokens a sequence"


def _verdicts(group: Group) -> Iterator[str]:
    """Yield who is the cheapest and who the fastest, as far as that is sure, and break-evens."""
    named = {id(entry.bill): entry.candidate.label for entry in group.entries}
    if (offered := group.offered) is not None:
        words = {named[id(b)]: _range(b.range_of(_usd), units.usd) for b in offered.bills}
        dearer = [bill for bill in offered.bills if bill not in offered.perhaps_cheapest]
        behind = [(named[id(bill)], costs.ratio(bill, offered.cheapest)) for bill in dearer]
        yield _leader("Cheapest", words, behind)
    if unpriced := [entry.candidate.label for entry in group.entries if entry.bill is None]:
        yield f"No price is known of {', '.join(unpriced)}: write one into runs/prices.yaml."
    ranked = sorted(group.entries, key=lambda entry: entry.seconds.value)
    words = {e.candidate.label: _range(e.seconds, units.duration) for e in ranked}
    tied = costs.ties(ranked, lambda one, other: one.seconds.over(other.seconds))
    slower = [entry for entry in ranked if entry not in tied]
    times = [(e.candidate.label, e.seconds.over(ranked[0].seconds)) for e in slower]
    yield _leader("Fastest", words, times)
    for point in offered.break_evens if offered else ():
        amount, *ends = (units.count(round(float(f"{n:.2g}"))) for n in point.samples)
        yield (
            f"{named[id(point.below)]} is cheaper below about {amount} sequences (between "
            f"{' and '.join(ends)}), {named[id(point.above)]} above."
        )


def _leader(what: str, words: Mapping[str, str], behind: Sequence[tuple[str, costs.Range]]) -> str:
    """Return who leads, or that no one does for sure.

    Args:
        what: they are compared by.
        words: each label's number, the likeliest leader first.
        behind: those that surely take more, with how many times as much.
    """
    tied = [f"{label} {known}" for label, known in words.items() if label not in dict(behind)]
    if len(tied) > 1:
        return f"{what}: statistically indistinguishable are {'; '.join(tied)}."
    others = ", ".join(
        f"{label} takes {times.value:.1f}x as much ({times.low:.1f}–{times.high:.1f}x)"
        for label, times in behind
    )
    return f"{what}: {tied[0]}; {others}."


def _range(known: costs.Range, words: Callable[[float], str]) -> str:
    return f"{words(known.value)} ({words(known.low)} to {words(known.high)})"


def _absent(group: Group, candidates: Sequence[Candidate]) -> Iterator[str]:
    """Yield which GPUs are not in a comparison, and what would bring them in."""
    present = {entry.candidate.label for entry in group.entries}
    option = group.entries[0].option
    targets = option.config.target_modules
    typed = targets if isinstance(targets, str) else ",".join(targets)
    for one in candidates:
        if one.label not in present:
            command = ["sweep", "run", one.gpu, "--model", option.ground.name]
            command += ["--rank", str(option.config.lora_rank), "--target-modules", typed]
            command += ["--seq-len", str(option.ground.seq_len)]
            if option.config.is_on_pairs:
                command += ["--method", option.config.method]
            why = f"it has nothing of {_ground(option)}"
            yield f"{one.label} is not compared here: {why}. To compare: {shlex.join(command)}"


def _row(entry: Entry) -> tuple[str, ...]:
    """Return GPU, tokens/s, dollars per million tokens, time, bill, price, peak memory and
    configuration."""
    option, bill, one = entry.option, entry.bill, entry.candidate
    tokens = cost = price = units.DASH
    if bill is not None:
        per_million = bill.range_of(attrgetter("usd_per_million_tokens"))
        tokens, cost = _range(per_million, units.usd), _range(bill.range_of(_usd), units.usd)
        price = f"{units.usd(bill.usd_per_hour)} an hour, {bill.offer.label}, {bill.offer.date}"
    ends = f"{units.rate(option.speed.low)}–{units.rate(option.speed.high)}"
    speed = f"{units.rate(option.speed.value)} ({ends if option.has_interval else 'no interval'})"
    share = option.peak_bytes / one.budget_bytes
    config = option.config
    kept = ("micro_batch_size", "seq_len", "lora_rank", "target_modules")
    standard = TrialConfig(**{key: getattr(config, key) for key in kept})
    return (
        f"{one.label} ({one.source})",
        f"{speed}, {option.basis}",
        tokens,
        _range(entry.seconds, units.duration),
        cost,
        price,
        f"{units.gib(option.peak_bytes)}, {units.percent(share)} of the budget",
        f"trial {option.number}: {units.size(config)}, {units.changes(config, baseline=standard)}",
    )


def _apart(comparison: Comparison) -> Iterator[str]:
    """Yield what is not compared: nothing is left out silently."""
    found = [option for one in comparison.candidates for option in one.options]
    models = dict.fromkeys(option.ground.name for option in found)
    if len(models) > 1:
        yield f"Different models are never compared: {', '.join(models)} each stand alone."
    for one in comparison.candidates:
        if not one.options:
            yield f"{one.label} has nothing that fits."
    if found and not comparison.groups:
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
        if (bill := entry.bill) is None:
            continue
        usd, speed = bill.range_of(_usd), entry.option.speed
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
            marker={"color": mark.colour, "symbol": mark.symbol, "size": 12},
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
