"""Owns the answer that a report opens with: the winner, its gain, its memory, how far to trust it.

Pure: a study's snapshot in, finished text out. Knows nothing of HTML or of the terminal.
"""

from __future__ import annotations

import json
import shlex
from dataclasses import dataclass

from reports import units
from reports.measured import rankable
from storage import ranking
from storage.definition import StudySnapshot, Target
from storage.records import Measurement, TrialRecord, Verdict


@dataclass(frozen=True)
class Tile:
    """One number of the answer, with what it is and what it is measured against."""

    value: str
    label: str
    detail: str
    share: float | None = None
    """Share of a whole, 0 to 1, where the number is one."""


@dataclass(frozen=True)
class Answer:
    """What a reader wants to know first."""

    sentence: str
    tiles: tuple[Tile, ...]
    configuration: str
    """The winner's configuration as JSON, every key; empty where nothing fits."""
    commands: tuple[str, ...]
    """What to type next."""


def answer(snapshot: StudySnapshot) -> Answer:
    """Return the answer of a study as it stands."""
    winner = ranking.winner(rankable(snapshot.records))
    trials = _trials_tile(snapshot)
    if winner is None or winner.measurement is None:
        return Answer(_no_winner(snapshot), (trials,), "", ())
    return Answer(
        sentence=_winner_sentence(snapshot, winner),
        tiles=(
            _speed_tile(winner.measurement),
            _gain_tile(snapshot),
            _memory_tile(winner.measurement, snapshot.definition.target),
            trials,
        ),
        configuration=json.dumps(winner.config.model_dump(mode="json"), indent=2),
        commands=next_commands(snapshot.name),
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


def _winner_sentence(snapshot: StudySnapshot, winner: TrialRecord) -> str:
    baseline = snapshot.definition.space.baseline_config()
    ties = len(ranking.tied(rankable(snapshot.records)))
    tie = f" {units.plural(ties, 'other')} cannot be told from it by speed." if ties else ""
    differing = (
        "It is the baseline itself."
        if winner.config == baseline
        else f"Against the baseline: {units.changes(winner.config, baseline=baseline)}."
    )
    return f"The fastest configuration that fits is trial {winner.number}. {differing}{tie}"


def _no_winner(snapshot: StudySnapshot) -> str:
    if not snapshot.records:
        return "No trial has finished yet."
    budget = units.gib(snapshot.definition.target.budget_bytes)
    return f"Nothing that was tried was measured to fit in {budget}."


def _speed_tile(measured: Measurement) -> Tile:
    interval = units.rate_interval(ranking.speed_interval(measured))
    detail = f"95 % interval {interval}, {units.step_time(measured.step_seconds)} a step"
    return Tile(units.rate(measured.tokens_per_second), "tokens/s", detail)


def _gain_tile(snapshot: StudySnapshot) -> Tile:
    records = rankable(snapshot.records)
    baseline = ranking.baseline(records)
    if baseline is None or baseline.measurement is None:
        return Tile(units.DASH, "gain over the baseline", "the baseline was not measured")
    speed = units.rate(baseline.measurement.tokens_per_second)
    shape = units.shape(baseline.config)
    detail = f"baseline: {speed} tokens/s ({shape})"
    return Tile(units.factor(ranking.gain_over_baseline(records)), "the baseline's speed", detail)


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
