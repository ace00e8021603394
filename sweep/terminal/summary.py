"""Owns what the terminal says of a study: at the end of a run, and for `status` and `best`.

Pure: a study's snapshot in, finished text out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from reports import objectives, tables, uncertainty, units
from reports.advice import advice_title, how_to_go_faster
from reports.confirmation import confirmation_rows
from reports.outcomes import verdict_words
from reports.summary import emulation_note, summary_of
from search_spaces.config import TrialConfig
from storage.definition import StudySnapshot, StudySummary
from storage.ranking import rank_study
from storage.records import Invalid, Measurement
from sweep.terminal.console import table

_CONFIGURATION_COLUMNS = ("trial", "tokens/s", "95 % interval", "peak", "budget", "configuration")


def study_summary(
    snapshot: StudySnapshot, *, report: Path | None = None, storage_option: str = ""
) -> str:
    """Return the end of a run: the winner, the runners-up, how to go faster, what to type next.

    Args:
        snapshot: the study.
        report: where its report was written.
        storage_option: what the next commands need to find the database again.
    """
    summary = summary_of(snapshot)
    sections = [_opening(snapshot), *_lines("", _winner(snapshot))]
    sections += _section("Measured again", _measured_again(snapshot))
    sections += _front(snapshot) or _section("Runners-up", _runners_up(snapshot))
    sections += _section(advice_title(snapshot), _bullets(how_to_go_faster(snapshot)))
    commands = [f"  {command}{storage_option}" for command in summary.commands]
    if report is not None:
        commands.append(f"  report: {report}")
    return "\n".join([*sections, *_section("Next", commands)])


def status_text(snapshot: StudySnapshot) -> str:
    """Return what ran, what is running and the best so far."""
    lines = [_opening(snapshot)]
    if snapshot.holder is not None:
        lines.append(f"Driven by {snapshot.holder}.")
    for trial in snapshot.running:
        since = f" since {trial.started_at}" if trial.started_at else ""
        what = "not yet chosen" if trial.config is None else units.shape(trial.config)
        state = "running" if snapshot.holder is not None else "left unfinished; resuming retries it"
        doing = {"search": "", "confirm": ", measured again", "soak": ", a soak"}[trial.purpose]
        lines.append(f"Trial {trial.number} ({what}{doing}){since}: {state}.")
    return "\n".join([*lines, *_lines("", _winner(snapshot))])


def best_text(snapshot: StudySnapshot) -> str:
    """Return the winner, the front, its whole configuration, and the fastest of each class."""
    summary = summary_of(snapshot)
    lines = [_opening(snapshot), *_lines("", _winner(snapshot))]
    lines += _section("Measured again", _measured_again(snapshot))
    lines += _front(snapshot)
    if summary.configuration:
        lines += _section("Configuration", [summary.configuration])
    classes = [
        (row.lora_rank, row.target_modules, row.seq_len, f"{row.number}", row.tokens_per_second)
        for row in tables.class_rows(snapshot)
    ]
    header = ("rank", "target modules", "length", "trial", "tokens/s")
    lines += _section("Fastest of each capacity class", [table(header, classes)] if classes else [])
    return "\n".join(lines)


def studies_text(summaries: Sequence[StudySummary]) -> str:
    """Return a table of studies."""
    rows = [
        (
            summary.name,
            summary.gpu,
            summary.model,
            units.count(summary.trials),
            _best_of(summary),
            objectives.names(summary.objectives),
            units.duration(summary.wall_seconds),
            summary.holder or units.DASH,
        )
        for summary in summaries
    ]
    return table(
        ("study", "gpu", "model", "trials", "best", "ranked by", "time", "driven by"), rows
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
    likeliest = (
        f"{opening}; the most promising, {units.shape(config)}, has a chance of {chance:.0%}"
    )
    if gain is None or chance <= 0:
        return f"{likeliest}."
    # Expected over all cases is the chance times what is gained where it comes true.
    return f"{likeliest}, and would then be {gain / chance:.1%} better."


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
    """Return the best's speed on the target card: measured, or predicted where another ran it."""
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
        f"Study {snapshot.name}: {units.plural(len(snapshot.records), 'trial')} in "
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


def _measured_again(snapshot: StudySnapshot) -> list[str]:
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
    return [table(header, rows)] if rows else []


def _runners_up(snapshot: StudySnapshot) -> list[str]:
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
    return [table(header, rows)] if rows else []


def _front(snapshot: StudySnapshot) -> list[str]:
    """Return the trade-off of a study of several objectives, the knee first."""
    rows = [
        (f"  {row.number}", *row.values, row.interval, row.changes)
        for row in tables.front_rows(snapshot)
    ]
    if not rows:
        return []
    names = objectives.names(snapshot.definition.space.objectives)
    header = ("  trial", *tables.value_columns(snapshot), "95 % interval", "configuration")
    return _section(f"The front of {names}, the knee first", [table(header, rows)])


def _bullets(sentences: Iterable[str]) -> list[str]:
    return [f"  - {sentence}" for sentence in sentences]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return _lines(f"{title}:", lines) if lines else []


def _lines(title: str, lines: Iterable[str]) -> list[str]:
    """Return lines after an empty one and a title."""
    return ["", *([title] if title else []), *lines]
