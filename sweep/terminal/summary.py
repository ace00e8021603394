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
    lines = [*_answer(view, width), *_next(view, storage_option=storage_option, report=report)]
    return folded("\n".join(lines), width, indent=2)


def best_text(snapshot: StudySnapshot, *, width: int | None = None) -> str:
    """Return the winner on one screen, with what comes next to it; the rest is in ``--json``."""
    view = view_of(snapshot)
    host = ""
    if view.gpu.emulated_on is not None:
        told = "predicted on" if view.is_predicted else "measured on"
        name = view.gpu.name if view.is_predicted else view.gpu.emulated_on
        host = f" ({told} {name})"
    others, fastest = list(answer.runners_up(view)), list(answer.classes(view))
    named = "Runners-up"
    if view.front[1:]:
        named = f"The Pareto front ({len(view.front)}) of {words.names_of(view.objectives)}"
    if len(fastest) > _CLASSES_SHOWN:
        fastest[_CLASSES_SHOWN:] = [f"and {len(fastest) - _CLASSES_SHOWN} more in --json"]
    if len(view.fastest_by_class) < 2 and not any(answer.unmeasured_classes(view)):
        # That is the winner.
        fastest = []
    lines = [
        *_answer(view, width),
        *_section(f"{named}{host}, by what they change", others),
        *_section(f"Fastest of each class in tokens/s{host}", fastest),
        *_next(view),
    ]
    return folded("\n".join(lines), width, indent=2)


def status_text(snapshot: StudySnapshot, *, width: int | None = None) -> str:
    """Return the best so far, what ran and what is running, within so many columns."""
    lines = _answer(view_of(snapshot), width)
    is_driven = snapshot.holder is not None
    if is_driven:
        lines.append(f"Driven by {snapshot.holder}{_since(snapshot.driven_since)}.")
    for trial in snapshot.running:
        state = "running" if is_driven else "left unfinished; resuming retries it"
        began = _since(trial.started_at)
        what = f"{units.shape(trial.config)}{_DOING[trial.purpose]}"
        lines.append(f"Trial {trial.number} ({what}){began}: {state}.")
    return folded("\n".join(lines), width, indent=2)


def _answer(view: StudyView, width: int | None) -> list[str]:
    """Return the answer in a sentence, and below it each fact behind its name."""
    about = f"{view.study} ({view.model} on {view.gpu.name}): {answer.headline(view)}"
    facts = (folded(f"  {name:<7} {fact}", width, indent=8) for name, fact in answer.facts(view))
    return [about, *facts]


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
    shown = [f"  {line}" for line in lines]
    yield from ("", f"{title}:", *shown) if shown else ()


def _since(moment: str | None) -> str:
    return f" since {moment}" if moment else ""


def studies_text(
    studies: Sequence[StudySnapshot | UnreadableStudy], *, width: int | None = None
) -> str:
    """Return a table of studies, within so many columns, and what of them cannot be read."""
    header = ("study", "gpu", "model", "trials", "best", "ranked by", "time", "driven by")
    unread = (
        folded(f"Study {quote(study.name)} cannot be read: {study.reason}.", width)
        for study in studies
        if isinstance(study, UnreadableStudy)
    )
    return "\n".join([table(header, map(_study_row, studies), width=width), *unread])


def _study_row(study: StudySnapshot | UnreadableStudy) -> tuple[str, ...]:
    name, nothing = redaction.shown(study.name), units.DASH
    if isinstance(study, UnreadableStudy):
        return name, nothing, nothing, units.count(study.trials), "cannot be read", *[nothing] * 3
    view, driver = view_of(study), nothing
    if study.holder is not None:
        numbers = ", ".join(str(trial.number) for trial in study.running)
        doing = f", trial{'s' if len(study.running) > 1 else ''} {numbers}" if numbers else ""
        driver = f"{study.holder}{_since(study.driven_since)}{doing}"
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
    measured, predicted = view.winner.measurement, view.target_tokens_per_second
    speed = words.speed(measured)
    if predicted is not None and predicted.basis == "predicted":
        ends = (predicted.low, predicted.high)
        within = "" if None in ends else f" {units.rate_interval(ends)}"
        speed = f"{units.rate(predicted.value)} tokens/s (predicted{within})"
    parts = [words.value(o, measured) for o in view.objectives if o != "tokens_per_second"]
    return ", ".join([speed, *parts, "confirmed" if view.confirmed else "not confirmed"])


def why_invalid(snapshot: StudySnapshot) -> Invalid | None:
    """Return why the space's first configuration is not valid, where none that was tried is."""
    space = snapshot.definition.space
    tried = [r.outcome for r in snapshot.records if space.params_of(r.config) is not None]
    invalid = [outcome for outcome in tried if isinstance(outcome, Invalid)]
    return invalid[0] if invalid and len(invalid) == len(tried) else None
