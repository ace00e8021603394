"""The section on what is given up for less memory, money or rank: one figure and its choices."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports import units
from reports.document import document_of
from reports.figures.figure import DataTable, PageFigure
from reports.figures.front import front_controls, front_drawing, front_names
from storage.definition import StudySnapshot
from storage.ranking import fitting, rank_study
from storage.records import Verdict

_QUESTION = "What do I give up for less memory, money or rank?"
_UNMEASURED = "How far is each from fitting?"
_CAPTION = (
    "Every trial. The line joins what nothing else beats in both numbers; what was stopped as too "
    "slow is hollow and counts; whiskers are intervals of measured speeds. Below, in lanes, what "
    "was not measured, at the memory that it needs: an arrow where it needs at least that, a "
    "question mark where nothing is known. A box drawn around marks lists them alone in the table "
    "of all trials."
)


@dataclass(frozen=True)
class FrontSection:
    """The front, and by what it may be drawn."""

    title: str
    figures: tuple[PageFigure, ...]
    columns: Mapping[str, str]
    """What an axis may show, with its words; fewer than two leave nothing to choose."""
    classes: tuple[str, ...]
    x: str
    y: str


def front_of(snapshot: StudySnapshot) -> FrontSection | None:
    """Return the section of the front; None where nothing was tried."""
    document = document_of(snapshot)
    if not document["trials"]:
        return None
    ranking = rank_study(snapshot)
    slow = (r for r in ranking.of_space if r.verdict is Verdict.PRUNED_SLOW)
    known = {record.number for record in (*fitting(ranking.of_space), *slow)}
    candidates = [row for row, t in enumerate(document["trials"]) if t["number"] in known]
    controls = front_controls(document, candidates)
    drawing = front_drawing(document, candidates)
    view = controls["views"].get(f"{controls['y']}|{controls['x']}|", {"rows": ()})
    figure = PageFigure(
        "front-figure",
        "Speed, memory, money, capacity",
        _CAPTION,
        drawing,
        _table(document, view["rows"]),
        controls=controls,
        names=front_names(document, view["rows"]),
    )
    columns = {key: column["label"] for key, column in document["columns"].items()}
    return FrontSection(
        _QUESTION if candidates else _UNMEASURED,
        (figure,),
        columns,
        tuple(document["classes"]),
        x=controls["x"],
        y=controls["y"],
    )


def _table(document: Mapping[str, Any], rows: Sequence[int]) -> DataTable | None:
    """Return the front by the numbers that the figure opens with, and all else known of it."""
    if not rows:
        return None
    columns = document["columns"]
    heads = ("on the front: trial", "against the baseline", *(c["label"] for c in columns.values()))
    shown = []
    for trial in (document["trials"][row] for row in rows):
        values = (
            _words(trial.get(key), column["unit"], document["memory_unit"])
            for key, column in columns.items()
        )
        shown.append((str(trial["number"]), trial["changes"], *values))
    return DataTable(heads, tuple(shown))


def _words(value: float | None, unit: str, memory_unit: str) -> str:
    if value is None:
        return units.DASH
    match unit:
        case "rate":
            return units.rate(value)
        case "memory":
            return f"{value:.2f} {memory_unit}"
        case "usd":
            return units.usd(value)
        case "count":
            return units.count(int(value))
        case _:
            return f"{value:.4g}"
