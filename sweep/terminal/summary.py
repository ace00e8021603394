"""What the terminal says of a study: at the end of a run, and for `status` and `best`."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

from qlora_sweep.reports import answer, words
from qlora_sweep.reports import format as units
from qlora_sweep.reports.advice import how_to_go_faster
from qlora_sweep.reports.view import StudyView, view_of
from qlora_sweep.search_spaces import redaction
from qlora_sweep.search_spaces.errors import quote
from qlora_sweep.storage.definition import StudySnapshot, UnreadableStudy
from qlora_sweep.storage.records import Invalid, Purpose
from qlora_sweep.sweep.terminal.console import folded
from qlora_sweep.sweep.terminal.drawing import table

_ADVICE_SHOWN = 3
_CLASSES_SHOWN = 3
_DOING: Mapping[Purpose, str] = {
    "search": "",
    "confirm": ", measured again",
    "soak": ", a soak",
    "quality": ", trained with another seed",
}


def last_screen(
    snapshot: StudySnapshot,
    *,
    report: Path | None = None,
    storage_option: str = "",
    width: int | None = None,
) -> str:
    """Return the end of a run, short enough to be pasted into a chat.

    Args:
        snapshot: the study.
        report: where its report was written.
        storage_option: what the next commands need to find the database again.
        width: columns of the terminal; None for lines without end.
    """
    view = view_of(snapshot)
    lines = _answer(view, width)
    lines += _next(view, storage_option=storage_option, report=report)
    return folded("\n".join(lines), width, indent=2)


def best_text(snapshot: StudySnapshot, *, width: int | None = None) -> str:
    """Return the winner on one screen, with what comes next to it; the rest is in ``--json``."""
    view = view_of(snapshot)
    host = ""
    if view.gpu.emulated_on is not None:
        host = f" (measured on {view.gpu.emulated_on})"
        if view.is_predicted:
            host = f" (predicted on {view.gpu.name})"
    named = "Runners-up"
    if len(view.front) > 1:
        named = f"The Pareto front ({len(view.front)}) of {words.names_of(view.objectives)}"
    fastest: list[str] = []
    # One class alone is the winner's.
    if len(view.fastest_by_class) > 1 or any(answer.unmeasured_classes(view)):
        fastest = list(answer.classes(view))
    if len(fastest) > _CLASSES_SHOWN:
        fastest[_CLASSES_SHOWN:] = [f"and {len(fastest) - _CLASSES_SHOWN} more in --json"]
    lines = _answer(view, width)
    lines += _section(f"{named}{host}, by what they change", answer.runners_up(view))
    lines += _section(f"Fastest of each class in tokens/s{host}", fastest)
    lines += _next(view)
    return folded("\n".join(lines), width, indent=2)


def status_text(snapshot: StudySnapshot, *, width: int | None = None) -> str:
    """Return the best so far, what ran and what is running, within so many columns."""
    lines = _answer(view_of(snapshot), width)
    is_driven = snapshot.holder is not None
    if is_driven:
        lines.append(f"Driven by {snapshot.holder}{_since(snapshot.driven_since)}.")
    for trial in snapshot.running:
        state = "left unfinished; resuming retries it"
        if is_driven:
            state = "running"
        began = _since(trial.started_at)
        what = f"{units.shape(trial.config)}{_DOING[trial.purpose]}"
        lines.append(f"Trial {trial.number} ({what}){began}: {state}.")
    return folded("\n".join(lines), width, indent=2)


def _answer(view: StudyView, width: int | None) -> list[str]:
    """Return the answer in a sentence, and below it each fact behind its name."""
    lines = [f"{view.study} ({view.model} on {view.gpu.name}): {answer.headline(view)}"]
    for name, fact in answer.facts(view):
        lines.append(folded(f"  {name:<7} {fact}", width, indent=8))
    return lines


def _next(
    view: StudyView, *, storage_option: str = "", report: Path | None = None
) -> Iterator[str]:
    commands = [f"{command}{storage_option}" for command in answer.commands(view)]
    if report is not None:
        commands.append(f"report: {report}")
    if view.winner is None:
        yield from _section("What it would take", how_to_go_faster(view)[:_ADVICE_SHOWN])
    yield from _section("Next", commands)


def _section(title: str, lines: Iterable[str]) -> Iterator[str]:
    shown = list(lines)
    if shown:
        yield ""
        yield f"{title}:"
    for line in shown:
        yield f"  {line}"


def _since(moment: str | None) -> str:
    if moment is None:
        return ""
    return f" since {moment}"


def studies_text(
    studies: Sequence[StudySnapshot | UnreadableStudy], *, width: int | None = None
) -> str:
    """Return a table of studies, within so many columns, and which of them cannot be read."""
    header = ("study", "gpu", "model", "trials", "best", "ranked by", "time", "driven by")
    lines = [table(header, map(_study_row, studies), width=width)]
    for study in studies:
        if isinstance(study, UnreadableStudy):
            words = f"Study {quote(study.name)} cannot be read: {study.reason}."
            lines.append(folded(words, width))
    return "\n".join(lines)


def _study_row(study: StudySnapshot | UnreadableStudy) -> tuple[str, ...]:
    name = redaction.shown(study.name)
    if isinstance(study, UnreadableStudy):
        trials = units.count(study.trials)
        dash = units.DASH
        return (name, dash, dash, trials, "cannot be read", dash, dash, dash)
    view = view_of(study)
    driver = units.DASH
    if study.holder is not None:
        driver = f"{study.holder}{_since(study.driven_since)}"
        numbers = ", ".join(str(trial.number) for trial in study.running)
        if len(study.running) > 1:
            driver += f", trials {numbers}"
        elif numbers:
            driver += f", trial {numbers}"
    return (
        name,
        view.gpu.name,
        str(view.model),
        units.count(len(study.records)),
        _best_of(view),
        words.names_of(view.objectives),
        units.duration(study.wall_seconds),
        driver,
    )


def _best_of(view: StudyView) -> str:
    """Return the best trial's speed on the target GPU and, where it is ranked by more or else, that
    as well."""
    if view.winner is None:
        return units.DASH
    measured = view.winner.measurement
    speed = words.speed(measured)
    predicted = view.target_tokens_per_second
    if predicted is not None and predicted.basis == "predicted":
        basis = "predicted"
        if predicted.low is not None and predicted.high is not None:
            basis += f" {units.rate_interval((predicted.low, predicted.high))}"
        speed = f"{units.rate(predicted.value)} tokens/s ({basis})"
    parts = [speed]
    for objective in view.objectives:
        if objective != "tokens_per_second":
            parts.append(words.value(objective, measured))
    parts.append("confirmed" if view.confirmed else "not confirmed")
    return ", ".join(parts)


def why_invalid(snapshot: StudySnapshot) -> Invalid | None:
    """Return why the space's first configuration is not valid, where none that was tried is."""
    space = snapshot.definition.space
    invalid: list[Invalid] = []
    for record in snapshot.records:
        if space.params_of(record.config) is None:
            continue
        if not isinstance(record.outcome, Invalid):
            return None
        invalid.append(record.outcome)
    return invalid[0] if invalid else None
