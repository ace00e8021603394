"""Owns which figures the page has, in their order, each with its words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import plotly.graph_objects as go

from reports.figures.figure import PageFigure
from reports.figures.pareto import pareto_figure
from storage.definition import StudySnapshot

_FIGURES: tuple[tuple[str, str, str, Callable[[StudySnapshot], go.Figure]], ...] = (
    (
        "throughput",
        "Throughput against peak memory",
        "Every trial. Up is faster, left needs less memory; whiskers are 95 % intervals. Trials "
        "without a speed are in the lanes below, at the memory that they need at least or are "
        "predicted to need; what ran out needs more than the budget. Beyond 1.3 budgets they are "
        "drawn at 1.3, and a question mark means that no memory figure is known.",
        pareto_figure,
    ),
)


@dataclass(frozen=True)
class Figures:
    """The figures of a study that have something to show."""

    figures: tuple[PageFigure, ...]


def figures_of(snapshot: StudySnapshot) -> Figures:
    """Return the figures that have something to show, in the order of the page."""
    drawn = (
        PageFigure(id, title, caption, draw(snapshot)) for id, title, caption, draw in _FIGURES
    )
    return Figures(tuple(figure for figure in drawn if figure.plain["data"]))
