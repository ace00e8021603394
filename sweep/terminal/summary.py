"""Owns what the terminal says of a study: at the end of a run, and for `status` and `best`.

Pure: a study's snapshot in, finished text out.
"""

from __future__ import annotations

import shlex
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from reports import objectives, tables, uncertainty, units
from reports.advice import advice_title, how_to_go_faster
from reports.confirmation import (
    as_fast,
    confirmation_rows,
    status_words,
)
from reports.outcomes import verdict_words
from reports.quality import loss_words
from reports.summary import answer, emulation_note, gain_words, summary_of
from reports.texts import epoch_words
from search_spaces import redaction
from search_spaces.config import TrialConfig
from search_spaces.errors import quote
from storage.definition import StudySnapshot, StudySummary, UnreadableStudy
from storage.gain import compare
from storage.objectives import measured_of
from storage.ranking import Ranking, rank_study
from storage.records import Invalid, Measurement, Purpose, TrialRecord
from sweep.terminal.console import folded, table

_REASONS_SHOWN = 3
_DOING: Mapping[Purpose, str] = {
    "search": "",
    "confirm": ", measured again",
    "soak": ", a soak",
    "quality": ", trained with another seed",
}
_CONFIGURATION_COLUMNS = ("trial", "tokens/s", "95 % interval", "peak", "budget", "configuration")


def last_screen(
    snapshot: StudySnapshot,
    *,
    report: Path | None = None,
    storage_option: str = "",
    width: int | None = None,
) -> str:
    """Return the end of a run, short enough to be pasted into a chat; `best_text` has all of it.

    Args:
        snapshot: the study.
        report: where its report was written.
        storage_option: what the next commands need to find the database again.
        width: columns of the terminal; None for lines without end.
    """
    ranking, summary = rank_study(snapshot), summary_of(snapshot)
    winner = ranking.winner
    if winner is None:
        lines = [f"{_about(snapshot)}: {summary.sentence}", *_facts(_counted(snapshot), width)]
        lines += _bullets(list(how_to_go_faster(snapshot))[:_REASONS_SHOWN])
    else:
        facts = _winner_facts(snapshot, ranking, winner)
        lines = [f"{_about(snapshot)}: {answer(snapshot, ranking)}", *_facts(facts, width)]
    commands = [f"  {command}{storage_option}" for command in _next(snapshot, ranking)]
    if report is not None:
        commands.append(f"  report: {report}")
    return folded("\n".join([*lines, *_section("Next", commands)]), width, indent=2)


def _about(snapshot: StudySnapshot) -> str:
    target = snapshot.definition.target
    return f"{snapshot.name} ({snapshot.definition.model['name']} on {target.gpu})"


def _winner_facts(
    snapshot: StudySnapshot, ranking: Ranking, winner: TrialRecord
) -> Iterator[tuple[str, str]]:
    """Yield what a person asks of a winner, in the order in which they do."""
    target, measured = snapshot.definition.target, measured_of(winner)
    yield "speed", uncertainty.speed_on_target(snapshot, winner)
    if measured.quality is not None:
        yield "loss", f"{loss_words(measured)} on held-out texts"
    share = units.percent(measured.peak_allocated_bytes / target.budget_bytes)
    peak = units.gib(measured.peak_allocated_bytes)
    yield "memory", f"{peak} of {units.gib(target.budget_bytes)} ({share})"
    yield "gain", _gain(ranking)
    if numerics := uncertainty.numerics_words(snapshot, ranking):
        yield "compute", numerics
    cost = snapshot.usd_per_million_tokens(winner)
    if cost is not None and snapshot.offer is not None:
        hour = f"{snapshot.offer.label} at ${snapshot.offer.usd_per_hour:.2f} an hour"
        yield "cost", f"${cost:.3g} per million tokens ({hour}, {snapshot.offer.date})"
    epoch = epoch_words(snapshot, winner)
    if epoch is not None:
        yield "epoch", epoch
    yield "sure", _sureness(snapshot, ranking)
    yield from _counted(snapshot)


def _gain(ranking: Ranking) -> str:
    comparison, winner = compare(ranking), ranking.winner
    if comparison is None or winner is None:
        return "none stated: the baseline was not measured"
    faster = uncertainty.faster_and_no_answer(ranking, winner)
    beside = f"; {faster}" if faster else ""
    over = uncertainty.reference_of(ranking, winner.config)
    gained = gain_words(ranking) or "none"
    if comparison.gain is None:
        gained = f"none stated: {uncertainty.why_no_gain(comparison.reason, over)}"
    return f"{gained}{beside}"


def _sureness(snapshot: StudySnapshot, ranking: Ranking) -> str:
    known = status_words(ranking, study=snapshot.name, is_driven=snapshot.holder is not None)
    measured = None if ranking.soak is None else ranking.soak.measurement
    soak = None if measured is None else measured.soak
    stood = f"; a soak of {units.plural(soak.steps, 'step')} stood" if soak else ""
    alike = as_fast(ranking)
    return f"{known}{stood if ranking.is_confirmed else ''}{f'. {alike}' if alike else ''}"


def _counted(snapshot: StudySnapshot) -> Iterator[tuple[str, str]]:
    counted = verdict_words(snapshot.records)
    carried = sum(record.carried is not None for record in snapshot.records)
    over = f", {carried} of them carried over" if carried else ""
    yield (
        "trials",
        f"{len(snapshot.trials):,} in {units.duration(snapshot.wall_seconds)}{over}"
        + (f": {counted}" if counted else ""),
    )
    for warning in snapshot.warnings:
        yield "warning", warning


def _facts(facts: Iterable[tuple[str, str]], width: int | None) -> Iterator[str]:
    """Yield each with its name before it, the further lines of one below its first."""
    return (folded(f"  {name:<7} {fact}", width, indent=8) for name, fact in facts)


def _next(snapshot: StudySnapshot, ranking: Ranking) -> tuple[str, ...]:
    name = shlex.quote(snapshot.name)
    if ranking.winner is None:
        return (f"sweep status {name}",)
    again = () if ranking.is_settled else (f"sweep confirm {name}",)
    return (*again, f"sweep best {name}", f"sweep export {name} --format script")


def status_text(snapshot: StudySnapshot, *, width: int | None = None) -> str:
    """Return what ran, what is running and the best so far, within so many columns."""
    lines = [_opening(snapshot)]
    if snapshot.holder is not None:
        lines.append(f"Driven by {snapshot.holder}{_since(snapshot.driven_since)}.")
    for trial in snapshot.running:
        what = "not yet chosen" if trial.config is None else units.shape(trial.config)
        state = "running" if snapshot.holder is not None else "left unfinished; resuming retries it"
        doing = _DOING[trial.purpose]
        began = _since(trial.started_at)
        lines.append(f"Trial {trial.number} ({what}{doing}){began}: {state}.")
    return folded("\n".join([*lines, *_lines("", _winner(snapshot))]), width, indent=2)


def _since(moment: str | None) -> str:
    return f" since {moment}" if moment else ""


def best_text(snapshot: StudySnapshot, *, width: int | None = None) -> str:
    """Return all that is known of the best: the winner with its whole configuration, what was
    measured again, runners-up or front, the fastest of each class, and how to go faster.
    """
    summary = summary_of(snapshot)
    lines = [_opening(snapshot), *_lines("", _winner(snapshot))]
    there = _where_measured(snapshot)
    lines += _section(f"Measured again{there}", _measured_again(snapshot, width))
    lines += _front(snapshot, width) or _section(f"Runners-up{there}", _runners_up(snapshot, width))
    if summary.configuration:
        lines += _section("Configuration", [summary.configuration])
    classes = [
        (r.lora_rank, r.target_modules, r.compute, r.seq_len, f"{r.number}", r.tokens_per_second)
        for r in tables.class_rows(snapshot)
    ]
    header = ("rank", "target modules", "compute", "length", "trial", "tokens/s")
    shown = [table(header, classes, width=width)] if classes else []
    lines += _section(f"Fastest of each capacity class{there}", shown)
    lines += _section(advice_title(snapshot), _bullets(how_to_go_faster(snapshot)))
    return folded("\n".join(lines), width, indent=2)


def _where_measured(snapshot: StudySnapshot) -> str:
    """Return whose speeds a table has, where they are not those of the target GPU."""
    other = snapshot.definition.target.emulated_on
    return "" if other is None else f" (speeds measured on {other})"


def studies_text(
    studies: Sequence[StudySummary | UnreadableStudy], *, width: int | None = None
) -> str:
    """Return a table of studies, within so many columns, and what of them cannot be read."""
    header = ("study", "gpu", "model", "trials", "best", "ranked by", "time", "driven by")
    lines = [table(header, [_study_row(study) for study in studies], width=width)]
    lines += [folded(words, width) for study in studies for words in _unreadable(study)]
    return "\n".join(lines)


def _study_row(study: StudySummary | UnreadableStudy) -> tuple[str, ...]:
    name, trials = redaction.shown(study.name), units.count(study.trials)
    if isinstance(study, UnreadableStudy):
        return name, units.DASH, units.DASH, trials, "cannot be read", *[units.DASH] * 3
    return (
        name,
        study.gpu,
        study.model,
        trials,
        _best_of(study),
        objectives.names(study.objectives),
        units.duration(study.wall_seconds),
        _driver_of(study),
    )


def _driver_of(study: StudySummary) -> str:
    """Return who drives a study, wherever that is, since when, and what it is at."""
    if study.holder is None:
        return units.DASH
    numbers = ", ".join(map(str, study.running))
    doing = f", trial{'s' if len(study.running) > 1 else ''} {numbers}" if numbers else ""
    return f"{study.holder}{_since(study.driven_since)}{doing}"


def _unreadable(study: StudySummary | UnreadableStudy) -> Iterator[str]:
    if isinstance(study, UnreadableStudy):
        yield f"Study {quote(study.name)} cannot be read: {study.reason}."
    elif study.unreadable:
        trials = units.plural(study.unreadable, "trial")
        yield (
            f"Study {quote(study.name)} has {trials} that cannot be read; "
            f"`sweep status {study.name}` names them."
        )


def has_fit(snapshot: StudySnapshot) -> bool:
    """Whether anything of the space was measured to fit."""
    return rank_study(snapshot).winner is not None


def not_ruled_out(snapshot: StudySnapshot) -> str | None:
    """Return what the search could not rule out; None where that is nothing, or is not known."""
    promising = (snapshot.ended or {}).get("most_promising")
    if snapshot.ended is None or promising is None:
        return None
    config, gain = TrialConfig.model_validate(promising["config"]), promising["gain"]
    count, chance = snapshot.ended["open"], promising["chance"]
    opening = (
        f"Not ruled out: {units.plural(count, 'configuration')} with a chance of one in twenty or "
        "more of being better"
        if count
        else "Nothing that is left has a chance of one in twenty of being better"
    )
    promise = f"{units.shape(config)}, has a chance of {units.percent(chance)}"
    likeliest = f"{opening}; the most promising, {promise}"
    if gain is None or chance <= 0:
        return f"{likeliest}."
    # Expected over all cases is the chance times what is gained where it comes true.
    then = units.share(gain / chance)
    return f"{likeliest}, and would then be {then} better: {units.share(gain)} is expected of it."


def _best_of(summary: StudySummary) -> str:
    """Return the best trial's speed and, where it is ranked by more or else, that as well."""
    if summary.best is None:
        return units.DASH
    asked = summary.objectives
    parts = [_speed_of(summary, summary.best)]
    if "peak_memory" in asked:
        parts.append(units.gib(summary.best.peak_allocated_bytes))
    if "trainable_parameters" in asked:
        parts.append(f"{units.count(summary.best.trainable_parameters)} trainable")
    parts.append("confirmed" if summary.is_confirmed else "not confirmed")
    return ", ".join(parts)


def _speed_of(summary: StudySummary, measured: Measurement) -> str:
    """Return the best's speed on the target GPU: measured, or predicted where another ran it."""
    speed = summary.speed
    if speed is None or speed.basis == "measured":
        return uncertainty.speed(measured)
    known = None if speed.low is None or speed.high is None else (speed.low, speed.high)
    ends = "" if known is None else f" {units.rate_interval(known)}"
    return f"{units.rate(speed.tokens_per_second)} tokens/s (predicted{ends})"


def why_invalid(snapshot: StudySnapshot) -> Invalid | None:
    """Return why the space's first configuration is not valid, where none that was tried is."""
    space = snapshot.definition.space
    tried = [r.outcome for r in snapshot.records if space.params_of(r.config) is not None]
    invalid = [outcome for outcome in tried if isinstance(outcome, Invalid)]
    return invalid[0] if invalid and len(invalid) == len(tried) else None


def _opening(snapshot: StudySnapshot) -> str:
    target = snapshot.definition.target
    counted = verdict_words(snapshot.records)
    lines = [
        f"Study {snapshot.name}: {units.plural(len(snapshot.trials), 'trial')} in "
        f"{units.duration(snapshot.wall_seconds)} for {snapshot.definition.model['name']} on "
        f"{target.gpu}, budget {units.gib(target.budget_bytes)}",
        f"  {counted}" if counted else "",
        emulation_note(target) or "",
        *(f"Warning: {warning}" for warning in snapshot.warnings),
    ]
    return "\n".join(line for line in lines if line)


def _winner(snapshot: StudySnapshot) -> Iterator[str]:
    summary = summary_of(snapshot)
    yield summary.sentence
    if summary.configuration:
        for fact in summary.facts:
            yield f"  {fact.value} {fact.label} ({fact.detail})"


def _measured_again(snapshot: StudySnapshot, width: int | None) -> list[str]:
    rows = [
        (
            f"  {row.number}",
            row.runs,
            row.tokens_per_second,
            row.interval,
            row.peak_allocated,
            row.result,
        )
        for row in confirmation_rows(snapshot)
    ]
    header = ("  trial", "tokens/s of each run", "tokens/s", "95 % interval", "peak", "result")
    return [table(header, rows, width=width)] if rows else []


def _runners_up(snapshot: StudySnapshot, width: int | None) -> list[str]:
    rows = [
        (
            f"  {row.number}",
            row.tokens_per_second,
            row.interval,
            row.peak_allocated,
            row.budget_share,
            row.changes,
        )
        for row in tables.runners_up(snapshot)
    ]
    header = (f"  {_CONFIGURATION_COLUMNS[0]}", *_CONFIGURATION_COLUMNS[1:])
    return [table(header, rows, width=width)] if rows else []


def _front(snapshot: StudySnapshot, width: int | None) -> list[str]:
    """Return the trade-off of a study of several objectives, the knee first."""
    rows = [
        (f"  {row.number}", *row.values, row.interval, row.changes)
        for row in tables.front_rows(snapshot)
    ]
    if not rows:
        return []
    names = objectives.names(snapshot.definition.space.objectives)
    header = ("  trial", *tables.value_columns(snapshot), "95 % interval", "configuration")
    shown = table(header, rows, width=width)
    return _section(f"The front of {names}, the knee first", [shown])


def _bullets(sentences: Iterable[str]) -> list[str]:
    return [f"  - {sentence}" for sentence in sentences]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return _lines(f"{title}:", lines) if lines else []


def _lines(title: str, lines: Iterable[str]) -> list[str]:
    """Return lines after an empty one and a title."""
    return ["", *([title] if title else []), *lines]
