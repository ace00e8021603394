"""Owns which figures the page has, in their order, each with its words."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass

import plotly.graph_objects as go

from reports.figures.figure import PageFigure
from reports.figures.pareto import pareto_figure
from reports.figures.settings import settings_figure
from reports.figures.sizes import sizes_figure
from reports.figures.timeline import timeline_figure
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
    (
        "shapes",
        "Micro-batch and sequence length",
        "Best tokens/s of what fitted in each cell, whatever the other settings. ✕ OOM: no trial "
        "there fits, and one at least ran out of memory for real; ✕ over budget: by prediction or "
        "comparison alone. ~: stopped as too slow, measured in part. A blank cell was not tried.",
        sizes_figure,
    ),
    (
        "timeline",
        "Course of the study",
        "Above, the speeds as they were measured, with the fastest so far; below, when each trial "
        "ran, in the lane of how it ended. Pauses of the study are cut out and marked.",
        timeline_figure,
    ),
    (
        "effects",
        "Settings",
        "Speed of what fitted, by the value of each dimension that was searched. Values were not "
        "tried in equal company, so a difference of medians is a hint and not an effect.",
        settings_figure,
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
