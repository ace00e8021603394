"""Owns what a report opens with: the winner, its gain, its memory and cost, how far to trust it.

Pure: a study's snapshot in, finished text out. Knows nothing of HTML or of the terminal.
"""

from __future__ import annotations

import json
import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from reports import confirmation, objectives, uncertainty, units
from search_spaces.config import canonical
from storage.definition import StudySnapshot, Target
from storage.gain import compare
from storage.ranking import Ranking, measured_of, rank_study
from storage.records import RETRYABLE, Measurement, TrialRecord, Verdict


@dataclass(frozen=True)
class Tile:
    """One number of the summary, with what it is and what it is measured against."""

    value: str
    label: str
    detail: str
    share: float | None = None
    """Share of a whole, 0 to 1, where the number is one."""


@dataclass(frozen=True)
class Summary:
    """What a reader wants to know first."""

    sentence: str
    tiles: tuple[Tile, ...]
    configuration: str
    """The winner's configuration as JSON, every key; empty where nothing fits."""
    commands: tuple[str, ...]
    """What to type next."""


def summary_of(snapshot: StudySnapshot) -> Summary:
    """Return what is to be said of a study as it stands."""
    ranking = rank_study(snapshot)
    winner = ranking.winner
    if winner is None or winner.measurement is None:
        return Summary(_no_winner(snapshot, ranking), (_trials_tile(snapshot),), "", ())
    return Summary(
        sentence=_winner_sentence(snapshot, ranking, winner),
        tiles=tuple(_tiles(snapshot, ranking, winner, winner.measurement)),
        configuration=json.dumps(winner.config.model_dump(mode="json"), indent=2),
        commands=(
            *(() if ranking.is_confirmed else (confirmation.measure_again(snapshot.name),)),
            *next_commands(snapshot.name),
        ),
    )


def next_commands(study: str) -> tuple[str, ...]:
    """Return the commands that go on from a study with a winner, quoted for a shell."""
    name = shlex.quote(study)
    return (f"sweep best {name} --json", f"sweep export {name} --format script")


def notes(snapshot: StudySnapshot) -> tuple[str, ...]:
    """Return what a reader must know before believing a number: emulation, progress, warnings."""
    emulation = emulation_note(snapshot.definition.target)
    running = (
        "The study is still being driven: this is how it stood when the report was written."
        if snapshot.holder is not None
        else None
    )
    return tuple(note for note in (emulation, running, *snapshot.warnings) if note)


def emulation_note(target: Target) -> str | None:
    """Return what is real and what is not where another card stood in; else None."""
    if target.emulated_on is None:
        return None
    return (
        f"Measured on {target.emulated_on} with its memory capped to the budget of {target.gpu}: "
        f"the fit is real, the speed is that of {target.emulated_on}."
    )


def _winner_sentence(snapshot: StudySnapshot, ranking: Ranking, winner: TrialRecord) -> str:
    baseline = ranking.definition.space.baseline_config()
    ties = len(ranking.tied)
    what = objectives.names(ranking.objectives)
    memory = "; it leaves the most memory" if ranking.is_measured_again(winner) else ""
    tie = (
        f" {units.plural(ties, 'other')} cannot be told from it by {what}{memory}." if ties else ""
    )
    differing = (
        "It is the baseline itself."
        if canonical(winner.config) == canonical(baseline)
        else f"Against the baseline: {units.changes(winner.config, baseline=baseline)}."
    )
    front = f" {len(ranking.front)} are on the front." if len(ranking.front) > 1 else ""
    sure = " ".join(confirmation.sentences(snapshot, ranking))
    if ranking.is_unclear:
        return (
            f"{confirmation.no_clear_winner(snapshot, ranking)} {differing}{front} {sure}".strip()
        )
    return (
        f"{objectives.best(ranking.objectives)} is trial {winner.number}. "
        f"{differing}{tie}{front} {sure}"
    )


def _no_winner(snapshot: StudySnapshot, ranking: Ranking) -> str:
    if not snapshot.records:
        return "No trial has finished yet."
    if all(record.verdict in RETRYABLE for record in snapshot.records):
        return "No trial has come to a conclusion yet: the same command tries them again."
    budget = units.gib(snapshot.definition.target.budget_bytes)
    if ranking.baseline is None or ranking.is_baseline_in_space:
        return f"Nothing that was tried was measured to fit in {budget}."
    reached = uncertainty.speed(measured_of(ranking.baseline))
    return (
        f"Nothing of the space that was tried was measured to fit in {budget}. Its baseline was, "
        f"at {reached}: a reference that the space does not hold, and so no answer."
    )


def _tiles(
    snapshot: StudySnapshot, ranking: Ranking, winner: TrialRecord, measured: Measurement
) -> Iterator[Tile]:
    """Yield what was asked for first, then what else a reader wants to know."""
    speed = _speed_tile(measured)
    memory = _memory_tile(measured, snapshot.definition.target)
    if "tokens_per_second" not in ranking.objectives and "peak_memory" in ranking.objectives:
        yield from (memory, speed, _gain_tile(ranking))
    else:
        yield from (speed, _gain_tile(ranking), memory)
    if "trainable_parameters" in ranking.objectives:
        yield _parameters_tile(winner, measured)
    yield from _cost_tile(snapshot, winner)
    yield _trials_tile(snapshot)


def _parameters_tile(winner: TrialRecord, measured: Measurement) -> Tile:
    detail = uncertainty.capacity(winner.config)
    return Tile(units.count(measured.trainable_parameters), "trainable parameters", detail)


def _cost_tile(snapshot: StudySnapshot, winner: TrialRecord) -> Iterator[Tile]:
    dollars, offer = snapshot.usd_per_million_tokens(winner), snapshot.offer
    if dollars is not None and offer is not None:
        hour = f"{offer.label} at ${offer.usd_per_hour:.2f} an hour, as of {offer.date}"
        yield Tile(f"${dollars:.3g}", "per million tokens", hour)


def _speed_tile(measured: Measurement) -> Tile:
    doubts = uncertainty.doubts(measured) if measured.is_noisy else ""
    details = (
        uncertainty.interval_words(measured),
        f"{units.step_time(measured.step_seconds)} a step",
        f"marked {doubts}: it may be more or less" if doubts else "",
    )
    shown = ", ".join(detail for detail in details if detail)
    return Tile(units.rate(measured.tokens_per_second), "tokens/s", shown)


def _gain_tile(ranking: Ranking) -> Tile:
    """Return the gain within one capacity class; a dash, and why, where none can be stated."""
    comparison, winner = compare(ranking), ranking.winner
    if comparison is None or winner is None:
        return Tile(units.DASH, "gain over the baseline", "the baseline was not measured")
    baseline = comparison.baseline
    reached = uncertainty.speed(measured_of(baseline))
    reference = f"baseline: {reached} ({units.shape(baseline.config)})"
    if comparison.gain is None:
        why = uncertainty.why_no_gain(comparison, winner.config)
        return Tile(units.DASH, "gain over the baseline", f"{why}; {reference}")
    sure = confirmation.status_words(ranking, study="")
    is_itself = comparison.gain.trial.number == baseline.number
    ends = "" if is_itself else f"interval {uncertainty.factor_interval(comparison.gain)}; "
    factor = uncertainty.factor(comparison.gain)
    return Tile(factor, "the baseline's speed", f"{sure}; {ends}{reference}")


def _memory_tile(measured: Measurement, target: Target) -> Tile:
    share = measured.peak_allocated_bytes / target.budget_bytes
    budget = units.gib(target.budget_bytes)
    return Tile(
        units.gib(measured.peak_allocated_bytes),
        "peak allocated memory",
        f"{units.percent(share)} of the {budget} budget of {target.gpu}",
        share=min(share, 1.0),
    )


def _trials_tile(snapshot: StudySnapshot) -> Tile:
    fitting = sum(record.verdict is Verdict.FITS for record in snapshot.records)
    return Tile(
        f"{len(snapshot.records):,}",
        "trials",
        f"{fitting:,} fitted; {units.duration(snapshot.wall_seconds)} of wall time",
    )
