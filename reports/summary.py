"""Owns what is said first of a study: the winner, its gain, memory and cost, how far to trust it.

Pure: a study's snapshot in, finished text out. Knows nothing of HTML or of the terminal.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from reports import confirmation, objectives, uncertainty, units
from reports.texts import epoch_details
from search_spaces.config import TrialConfig, canonical
from search_spaces.knobs import CAPACITY_KEYS, SIZE_KEYS
from search_spaces.prices import Offer
from storage.definition import StudySnapshot, Target
from storage.epochs import epoch_cost
from storage.gain import compare
from storage.objectives import measured_of
from storage.ranking import Ranking, rank_study
from storage.records import RETRYABLE, Measurement, QualityReport, TrialRecord, Verdict


@dataclass(frozen=True)
class Fact:
    """One number of the summary, with what it is and what it is measured against."""

    value: str
    label: str
    detail: str


@dataclass(frozen=True)
class Summary:
    """What a reader wants to know first."""

    sentence: str
    facts: tuple[Fact, ...]
    configuration: str
    """The winner's configuration as JSON, every key; empty where nothing fits."""
    commands: tuple[str, ...]
    """What to type next."""


def summary_of(snapshot: StudySnapshot) -> Summary:
    """Return what is to be said of a study as it stands."""
    ranking = rank_study(snapshot)
    winner = ranking.winner
    if winner is None or winner.measurement is None:
        return Summary(_no_winner(snapshot, ranking), (_trials(snapshot),), "", ())
    return Summary(
        sentence=_winner_sentence(snapshot, ranking),
        facts=tuple(_facts(snapshot, ranking, winner, winner.measurement)),
        configuration=json.dumps(winner.config.model_dump(mode="json"), indent=2),
        commands=_commands(snapshot, ranking),
    )


def _commands(snapshot: StudySnapshot, ranking: Ranking) -> tuple[str, ...]:
    is_recorded = snapshot.definition.target.recorded is not None
    if is_recorded and not snapshot.identity:
        # A surface is no study.
        return ()
    again = () if ranking.is_settled else (confirmation.measure_again(snapshot.name),)
    name = shlex.quote(snapshot.name)
    return (*again, f"sweep best {name} --json", f"sweep export {name} --format script")


def notes(snapshot: StudySnapshot) -> tuple[str, ...]:
    """Return what a reader must know before believing a number: emulation, progress, warnings."""
    emulation = emulation_note(snapshot.definition.target)
    running = (
        "The study is still being driven: this is how it stood when the report was written."
        if snapshot.holder is not None
        else None
    )
    scale = rank_study(snapshot).scale
    scaled = (
        f"Speeds of trials that were not measured again are shown times {scale:.2f}, so that they "
        "compare with those that were measured side by side."
        if abs(scale - 1) >= 0.005
        else None
    )
    return tuple(note for note in (emulation, running, scaled, *snapshot.warnings) if note)


def emulation_note(target: Target) -> str | None:
    """Return what is real and what is not where trials were recorded, or another GPU stood in."""
    if target.recorded is not None:
        return f"Recorded on {target.recorded}: nothing is measured now."
    if target.emulated_on is None:
        return None
    return (
        f"Measured on {target.emulated_on} with its memory capped to the budget of {target.gpu}: "
        f"the fit is real; where it says measured, the speed is that of {target.emulated_on}."
    )


def _winner_sentence(snapshot: StudySnapshot, ranking: Ranking) -> str:
    front = f"{len(ranking.front)} are on the Pareto front." if len(ranking.front) > 1 else ""
    said = (
        answer(snapshot, ranking),
        uncertainty.numerics_words(snapshot, ranking),
        confirmation.as_fast(ranking),
        front,
        *confirmation.sentences(snapshot, ranking),
    )
    return " ".join(filter(None, said))


def _no_winner(snapshot: StudySnapshot, ranking: Ranking) -> str:
    if not snapshot.records:
        return "No trial has finished yet."
    if all(record.verdict in RETRYABLE for record in snapshot.records):
        return "No trial has come to a conclusion yet: the same command tries them again."
    budget = units.gib(snapshot.definition.target.budget_bytes)
    if ranking.baseline is None or ranking.is_baseline_in_space:
        return f"Nothing that was tried was measured to fit in {budget}."
    reached = uncertainty.speed(measured_of(ranking.baseline))
    if not ranking.of_space:
        return (
            f"Nothing of the space has been tried yet. Its baseline fits in {budget}, at {reached}:"
            " a reference that the space does not hold, and so no answer."
        )
    return (
        f"Nothing of the space that was tried was measured to fit in {budget}. Its baseline was, "
        f"at {reached}: a reference that the space does not hold, and so no answer."
    )


def answer(snapshot: StudySnapshot, ranking: Ranking) -> str:
    """Return the recommendation in one sentence: what to run, how fast, in how much memory, and
    its gain where one is stated."""
    winner = ranking.winner
    if winner is None:
        return _no_winner(snapshot, ranking)
    target, measured = snapshot.definition.target, measured_of(winner)
    peak, budget = units.gib(measured.peak_allocated_bytes), units.gib(target.budget_bytes)
    known = (
        uncertainty.short_speed_on_target(snapshot, winner),
        f"{peak} of {budget}",
        gain_words(ranking).partition(" (")[0],
    )
    baseline = ranking.definition.space.baseline_config()
    is_baseline = canonical(winner.config) == canonical(baseline)
    named = in_words(winner.config, baseline)
    what = f"the baseline itself, {named}" if is_baseline else named
    shown = ", ".join(filter(None, known))
    best = objectives.best(ranking.objectives, is_confirmed=ranking.is_settled)
    return f"{best} is trial {winner.number}, {what}: {shown}."


def in_words(config: TrialConfig, baseline: TrialConfig, *, has_capacity: bool = True) -> str:
    """Return the size, the capacity and the compute dtype of a configuration, and what else it
    changes over the baseline."""
    said = {"compute_dtype": config.compute_dtype} | units.differing(config, baseline)
    rest = (units.phrase(k, v) for k, v in said.items() if k not in SIZE_KEYS + CAPACITY_KEYS)
    capacity = [uncertainty.capacity(config)] if has_capacity else []
    return ", ".join([units.size(config), *capacity, *rest])


def gain_words(ranking: Ranking) -> str:
    """Return the winner's gain with what it is over: ``2.2x the baseline (2.1–2.3x)``; empty where
    none is stated, and for the baseline itself. Where its class of numerics was chosen by what is
    predicted of the target, it is named whose gain that is."""
    comparison, winner = compare(ranking), ranking.winner
    gain = None if comparison is None else comparison.gain
    if winner is None or gain is None or gain.value == 1:
        return ""
    over, target = uncertainty.reference_of(ranking, winner.config), ranking.definition.target
    if ranking.numerics_choice == "predicted" and target.emulated_on is not None:
        over = f"{over} on the {units.gpu_name(target.emulated_on)}"
    return uncertainty.gain(gain, over)


def _facts(
    snapshot: StudySnapshot, ranking: Ranking, winner: TrialRecord, measured: Measurement
) -> Iterator[Fact]:
    """Yield what was asked for first, then what else a reader wants to know."""
    speed, gain = _speed(snapshot, winner), _gain(ranking)
    memory = _memory(measured, snapshot.definition.target)
    if "tokens_per_second" not in ranking.objectives and "peak_memory" in ranking.objectives:
        yield from (memory, speed, gain)
    else:
        yield from (speed, gain, memory)
    if measured.quality is not None:
        yield Fact(*_loss(measured.quality))
    if "trainable_parameters" in ranking.objectives:
        detail = uncertainty.capacity(winner.config)
        yield Fact(units.count(measured.trainable_parameters), "trainable parameters", detail)
    yield from _cost(snapshot, winner)
    yield from _epoch(snapshot, winner)
    yield _trials(snapshot)


def _epoch(snapshot: StudySnapshot, winner: TrialRecord) -> Iterator[Fact]:
    cost = epoch_cost(snapshot, winner)
    if cost is not None and cost.seconds is not None:
        what = "one epoch of the texts"
        yield Fact(units.duration(cost.seconds), what, epoch_details(cost, winner))


def _loss(quality: QualityReport) -> tuple[str, str, str]:
    """Return a held-out loss, what it is, and after how much training over how many seeds."""
    ends, seeds = quality.eval_loss_ci95, len(quality.seeds) or 1
    within = "" if ends is None else f"{ends[0]:.4g}–{ends[1]:.4g} over {seeds} seeds, "
    after = f"after {quality.train_tokens:,} tokens; {quality.eval_tokens:,} held out"
    return f"{quality.eval_loss:.4f}", "held-out loss", within + after


def _cost(snapshot: StudySnapshot, winner: TrialRecord) -> Iterator[Fact]:
    dollars, offer = snapshot.usd_per_million_tokens(winner), snapshot.offer
    if dollars is not None and offer is not None:
        ends = snapshot.usd_interval(winner)
        between = "" if ends is None else f"{units.usd_interval(ends)}; "
        price = offer_words(offer)
        yield Fact(units.usd(dollars), "per million tokens", f"{between}{price}")


def offer_words(offer: Offer) -> str:
    """Return where a GPU is rented at what price, and when that was read."""
    return f"{offer.label} at ${offer.usd_per_hour:,.2f} an hour, as of {offer.date}"


def _speed(snapshot: StudySnapshot, winner: TrialRecord) -> Fact:
    """Return the speed on the target GPU, with what was measured beside it where it is another."""
    measured, target = measured_of(winner), snapshot.definition.target
    doubts = uncertainty.doubts(measured) if measured.is_noisy else ""
    details = (
        uncertainty.interval_words(measured),
        f"{units.step_time(measured.step_seconds)} a step",
        f"marked {doubts}: it may be more or less" if doubts else "",
    )
    shown = ", ".join(detail for detail in details if detail)
    own = units.rate(measured.tokens_per_second)
    if target.emulated_on is None:
        return Fact(own, "tokens/s", shown)
    beside = f"measured on {target.emulated_on}: {own}, {shown}"
    speed = snapshot.target_speed(winner)
    if speed is None:
        return Fact(units.DASH, f"tokens/s on {target.gpu}", f"not predicted; {beside}")
    known = None if speed.low is None or speed.high is None else (speed.low, speed.high)
    ends = "" if known is None else f" {units.rate_interval(known)}"
    label = f"tokens/s on {target.gpu}"
    return Fact(units.rate(speed.tokens_per_second), label, f"predicted{ends}; {beside}")


def _gain(ranking: Ranking) -> Fact:
    """Return the gain within one capacity class; a dash, and why, where none is stated."""
    comparison, winner = compare(ranking), ranking.winner
    if comparison is None or winner is None:
        return Fact(units.DASH, "gain over the baseline", "the baseline was not measured")
    over = comparison.over or comparison.baseline
    named = uncertainty.reference_of(ranking, winner.config if comparison.over else over.config)
    other = ranking.definition.target.emulated_on
    there = "" if other is None else f" on {other}"
    reached = f"{uncertainty.speed(measured_of(over))}{there} ({units.shape(over.config)})"
    faster = uncertainty.faster_and_no_answer(ranking, winner)
    own = ""
    if not ranking.is_in_baselines_class(winner):
        own = f"{uncertainty.within_the_baselines_class(comparison)}; "
    what = f"{own}{named.removeprefix('the ')}: {reached}{f'; {faster}' if faster else ''}"
    if comparison.gain is None:
        wanted = uncertainty.reference_of(ranking, winner.config)
        why = uncertainty.why_no_gain(comparison.reason, wanted)
        return Fact(units.DASH, "gain over the baseline", f"{why}; {what}")
    runs = units.plural(ranking.runs, "run")
    sure = f"confirmed ({runs})" if ranking.is_confirmed else "not confirmed"
    factor, ends = uncertainty.factor(comparison.gain), uncertainty.factor_interval(comparison.gain)
    label = "the baseline's speed" if comparison.is_over_the_baseline else f"the speed of {named}"
    kind = "95 % interval" if comparison.gain.is_paired else "by single runs"
    interval = f"{kind} {ends}; " if ends else ""
    return Fact(factor, label, f"{sure}; {interval}{what}")


def _memory(measured: Measurement, target: Target) -> Fact:
    share = measured.peak_allocated_bytes / target.budget_bytes
    budget = units.gib(target.budget_bytes)
    detail = f"{units.percent(share)} of the {budget} budget of {target.gpu}"
    return Fact(units.gib(measured.peak_allocated_bytes), "peak allocated memory", detail)


def _trials(snapshot: StudySnapshot) -> Fact:
    fitting = sum(record.verdict is Verdict.FITS for record in snapshot.records)
    return Fact(
        f"{len(snapshot.trials):,}",
        "trials",
        f"{fitting:,} fitted; {units.duration(snapshot.wall_seconds)} of wall time",
    )
