"""Owns how the confirmation of a winner is put into words: whether it was measured again, and what
that came to.

Pure: a ranking in, finished text out. Knows nothing of where the words go.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterator
from dataclasses import dataclass

from reports import uncertainty, units
from storage.confirmations import fell_in_words
from storage.definition import StudySnapshot
from storage.objectives import measured_of
from storage.ranking import Ranking, rank_study
from storage.records import TrialRecord

AS_FAST = 1.05
"""A tie whose speeds differ by more says that the runs were too few, and not that it is as fast."""


@dataclass(frozen=True)
class ConfirmationRow:
    """One configuration that was measured again, as text."""

    number: str
    """Of the trial; a dash for the baseline in the winner's class, which is none."""
    changes: str
    runs: str
    """Tokens/s of each run, in order."""
    tokens_per_second: str
    interval: str
    """Between the runs."""
    peak_allocated: str
    result: str


def measure_again(study: str) -> str:
    """Return the command that measures a study's winner again, quoted for a shell."""
    return f"sweep confirm {shlex.quote(study)}"


def status_words(ranking: Ranking, *, study: str, is_driven: bool = False) -> str:
    """Return how sure the winner is, and what to type where it is not.

    ``confirmed (3 runs)``, ``not confirmed: sweep confirm a10``.

    Args:
        ranking: has a winner.
        study: its name.
        is_driven: whether it is running, so that it may be about to be confirmed.
    """
    if ranking.definition.target.recorded is not None:
        return "recorded once, and not measured again"
    if ranking.is_confirmed:
        return f"confirmed ({units.plural(ranking.runs, 'run')})"
    if is_driven:
        return "not confirmed yet"
    return f"not confirmed: {measure_again(study)}"


def sentences(snapshot: StudySnapshot, ranking: Ranking) -> Iterator[str]:
    """Yield what is to be said of the winner's confirmation, a sentence each."""
    known = status_words(ranking, study=snapshot.name, is_driven=snapshot.holder is not None)
    yield f"It is {known}{_soak_words(ranking)}."
    for number, run in ranking.fallen.items():
        yield f"Trial {number} fitted in the search and {fell_in_words(run)}, so it lost."


def as_fast(ranking: Ranking) -> str:
    """Return what is statistically indistinguishable from the winner, as a sentence, with the one
    that has the most memory to spare; empty for none."""
    alike = [r for r in ranking.ranked if r.number in ranking.tied]
    if ranking.winner is None or not alike:
        return ""
    is_speed = ranking.objectives == ("tokens_per_second",)
    word = "fast" if is_speed else "good"
    count = units.plural(len(alike), "other")
    if is_speed and any(ranking.ratio(ranking.winner, r).value > AS_FAST for r in alike):
        return f"In these runs {count} cannot be told from it for sure."
    frugal = min(alike, key=lambda r: measured_of(r).peak_allocated_bytes)
    peak = measured_of(frugal).peak_allocated_bytes
    spare = f"has memory to spare ({units.gib(peak)})"
    is_frugal = peak < measured_of(ranking.winner).peak_allocated_bytes
    if len(alike) == 1:
        return f"Trial {frugal.number} is as {word}{f' and {spare}' if is_frugal else ''}."
    named = f"; of these trial {frugal.number} {spare}" if is_frugal else ""
    return f"{len(alike)} others are as {word}{named}."


def _soak_words(ranking: Ranking) -> str:
    """Return what the soak was, as the end of a sentence; nothing without one."""
    record = ranking.soak
    if record is None or record.measurement is None:
        return ""
    measured, soak = record.measurement, record.measurement.soak
    steps = measured.steps_measured if soak is None else soak.steps
    seconds = measured.measured_seconds if soak is None else soak.seconds
    retries = measured.allocator_retries
    strain = (
        f", in which the allocator gave memory back {units.plural(retries, 'time')}"
        if retries
        else ""
    )
    return (
        f", and stood a soak of {units.plural(steps, 'step')} in {units.duration(seconds)} with an "
        f"evaluation and a checkpoint, at {units.gib(measured.peak_allocated_bytes)}{strain}"
    )


def confirmation_rows(snapshot: StudySnapshot) -> tuple[ConfirmationRow, ...]:
    """Return what was measured again, in the order of the answer; what gains are over among it."""
    ranking = rank_study(snapshot)
    listed = [r for r in ranking.ranked if ranking.is_measured_again(r)]
    shown, base = {record.number for record in listed}, ranking.baseline
    others: list[TrialRecord] = []
    if base is not None and ranking.is_measured_again(base) and base.number not in shown:
        others.append(base)
    fallen = [r for r in snapshot.records if r.number in ranking.fallen]
    return tuple(_row(r, ranking) for r in (*listed, *_recipe(ranking), *others, *fallen))


def _recipe(ranking: Ranking) -> Iterator[TrialRecord]:
    """Yield what was measured of the baseline in the winner's class where no search tried it."""
    winner = ranking.winner
    over = None if winner is None else ranking.reference_for(winner.config)
    if over is not None and over.purpose == "confirm":
        yield over


def _row(record: TrialRecord, ranking: Ranking) -> ConfirmationRow:
    known, measured = ranking.confirmations, measured_of(record)
    runs = known.runs(record.config, series=known.series)
    baseline = ranking.definition.space.baseline_config()
    has_fallen = record.number in ranking.fallen
    return ConfirmationRow(
        number=str(record.number) if record.purpose == "search" else units.DASH,
        changes=units.changes(record.config, baseline=baseline),
        runs=", ".join(units.rate(run.tokens_per_second) for run in runs) or units.DASH,
        tokens_per_second=units.DASH if has_fallen else units.rate(measured.tokens_per_second),
        interval=units.DASH if has_fallen else uncertainty.interval(measured),
        peak_allocated=units.gib(measured.peak_allocated_bytes),
        result=_result(record, ranking),
    )


def _result(record: TrialRecord, ranking: Ranking) -> str:
    fell = ranking.fallen.get(record.number)
    if fell is not None:
        return fell_in_words(fell)
    if ranking.winner is not None and record.number == ranking.winner.number:
        return "recommended"
    if record.number in ranking.tied:
        return "as fast"
    if record.purpose != "search":
        return uncertainty.at_capacity(record.config).removeprefix("the ")
    return "baseline" if record.is_baseline else "slower"
