"""Owns the section that asks what is given up for less memory, money or rank: one figure and what
may be chosen of it.

Pure: a study's snapshot in, a value for the page out. The figure itself is `figures.front`.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass

from reports.document import document_of
from reports.figures.figure import PageFigure
from reports.figures.front import front_controls, front_drawing
from storage.definition import StudySnapshot
from storage.objectives import fitting
from storage.ranking import rank_study
from storage.records import Verdict

_CAPTION = (
    "Every trial. The line joins what nothing else beats in both numbers; what was stopped as too "
    "slow is hollow and counts. Below, in lanes, what was not measured, at the memory that it "
    "needs: an arrow where it needs at least that, a question mark where nothing is known."
)


@dataclass(frozen=True)
class FrontSection:
    """The front, and by what it may be drawn."""

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
    figure = PageFigure(
        "front-figure", "Speed, memory, money, capacity", _CAPTION, drawing, controls=controls
    )
    columns = {key: column["label"] for key, column in document["columns"].items()}
    return FrontSection(
        (figure,), columns, tuple(document["classes"]), x=controls["x"], y=controls["y"]
    )
