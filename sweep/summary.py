"""Owns what the terminal says of a study: at the end of a run, and for `status` and `best`.

Pure: a study's snapshot in, finished text out.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path

from reports import tables, units
from reports.answer import answer, emulation_note
from storage.definition import StudySnapshot, StudySummary
from storage.ranking import verdict_counts
from storage.records import Verdict
from sweep.board import verdict_words
from sweep.console import table

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
    said = answer(snapshot)
    sections = [_opening(snapshot), *_lines("", _winner(snapshot))]
    sections += _section("Runners-up", _runners_up(snapshot))
    sections += _section("To go faster", _bullets(tables.how_to_go_faster(snapshot)))
    commands = [f"  {command}{storage_option}" for command in said.commands]
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
        what = "not yet settled" if trial.config is None else units.shape(trial.config)
        state = "running" if snapshot.holder is not None else "left unfinished; resuming retries it"
        lines.append(f"Trial {trial.number} ({what}){since}: {state}.")
    return "\n".join([*lines, *_lines("", _winner(snapshot))])


def best_text(snapshot: StudySnapshot) -> str:
    """Return the winner, its whole configuration, and the fastest of each capacity class."""
    said = answer(snapshot)
    lines = [_opening(snapshot), *_lines("", _winner(snapshot))]
    if said.configuration:
        lines += _section("Configuration", [said.configuration])
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
            units.rate(summary.best_tokens_per_second),
            units.duration(summary.wall_seconds),
            summary.holder or units.DASH,
        )
        for summary in summaries
    ]
    return table(("study", "gpu", "model", "trials", "best tokens/s", "time", "driven by"), rows)


def has_fit(snapshot: StudySnapshot) -> bool:
    """Whether anything was measured to fit."""
    return any(record.verdict is Verdict.FITS for record in snapshot.records)


def _opening(snapshot: StudySnapshot) -> str:
    target = snapshot.definition.target
    counts = verdict_counts(snapshot.records)
    counted = verdict_words((verdict, counts[verdict]) for verdict in Verdict if counts[verdict])
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
    said = answer(snapshot)
    yield said.sentence
    if said.configuration:
        for tile in said.tiles:
            yield f"  {tile.value} {tile.label} ({tile.detail})"


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


def _bullets(sentences: Iterable[str]) -> list[str]:
    return [f"  - {sentence}" for sentence in sentences]


def _section(title: str, lines: Sequence[str]) -> list[str]:
    return _lines(f"{title}:", lines) if lines else []


def _lines(title: str, lines: Iterable[str]) -> list[str]:
    """Return lines after an empty one and a title."""
    return ["", *([title] if title else []), *lines]
