"""Owns the report: one HTML file that needs nothing else, no network included.

Everything from a study is escaped, in markup by the template and in scripts by the JSON encoder; a
content security policy allows the page's own two scripts by their hashes and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import os
from collections.abc import Callable
from dataclasses import dataclass
from functools import cache
from pathlib import Path
from typing import Any

import plotly.graph_objects as go
from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from reports import tables
from reports.advice import advice_title, how_to_go_faster
from reports.confirmation import confirmation_rows
from reports.figures.pareto import pareto_figure
from reports.figures.settings import settings_figure
from reports.figures.sizes import sizes_figure
from reports.figures.style import themes
from reports.figures.timeline import timeline_figure
from reports.summary import notes, summary_of
from search_spaces.errors import EnvironmentFault
from storage.definition import StudySnapshot


@dataclass(frozen=True)
class ReportFigure:
    """A figure with its words."""

    id: str
    """Identifier of its element on the page."""
    title: str
    caption: str
    figure: go.Figure


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


def write_report(snapshot: StudySnapshot, path: Path) -> None:
    """Write a study's report to ``path``, whole or not at all; missing directories are made.

    Raises:
        EnvironmentFault: it cannot be written there; what was there before is untouched.
    """
    page = render(snapshot).encode("utf-8", errors="replace")
    try:
        write_whole(path, page)
    except OSError as error:
        raise EnvironmentFault(f"cannot write the report {path}: {error.strerror}") from error


def render(snapshot: StudySnapshot) -> str:
    """Return a study's report as HTML."""
    figures = all_figures(snapshot)
    return _template().render(
        snapshot=snapshot,
        answer=summary_of(snapshot),
        notes=notes(snapshot),
        figures=figures,
        top=tables.top_configurations(snapshot),
        classes=tables.class_rows(snapshot),
        confirmations=confirmation_rows(snapshot),
        front=tables.front_rows(snapshot),
        value_columns=tables.value_columns(snapshot),
        advice=how_to_go_faster(snapshot),
        advice_title=advice_title(snapshot),
        verdicts=tables.verdict_rows(snapshot),
        environment=tables.environment_rows(snapshot),
        figure_data=Markup(_figure_data(figures)),
        plotly_script=Markup(_plotly_script()),
        draw_script=Markup(_draw_script()),
        script_hashes=[_csp_hash(_plotly_script()), _csp_hash(_draw_script())],
    )


def all_figures(snapshot: StudySnapshot) -> tuple[ReportFigure, ...]:
    """Return the figures that have something to show, in the order of the page."""
    drawn = (
        ReportFigure(id, title, caption, draw(snapshot)) for id, title, caption, draw in _FIGURES
    )
    return tuple(figure for figure in drawn if figure.figure.data)


def _figure_data(figures: tuple[ReportFigure, ...]) -> str:
    """Return figures and themes as JSON that is safe inside a script element."""
    plain = {figure.id: _without_theme(figure) for figure in figures}
    return str(to_json_plotly({"figures": plain, "themes": themes()}))


def _without_theme(figure: ReportFigure) -> dict[str, Any]:
    values: dict[str, Any] = figure.figure.to_plotly_json()
    values["layout"].pop("template", None)
    return values


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        trim_blocks=True,
        lstrip_blocks=True,
    )


def _template() -> Template:
    return _environment().get_template("report.html.j2")


@cache
def _plotly_script() -> str:
    return str(get_plotlyjs())


@cache
def _draw_script() -> str:
    source, _, _ = PackageLoader("reports").get_source(_environment(), "draw.js")
    return source


@cache
def _csp_hash(script: str) -> str:
    """Return what a content security policy calls a script by."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"


def write_whole(path: Path, data: bytes) -> None:
    """Write a file, whole or not at all; missing directories are made.

    A link stays one, and a device or a pipe, ``/dev/null`` say, is written to: putting a file in
    its place, as is done otherwise, would take it from everybody else.

    Raises:
        OSError: it cannot be written there; what was there before is untouched.
    """
    path.parent.mkdir(parents=True, exist_ok=True)
    if path.exists() and not path.is_file():
        path.write_bytes(data)
        return
    target = path.resolve()
    temporary = target.parent / f".{target.name}.{os.getpid()}.tmp"
    try:
        temporary.write_bytes(data)
        temporary.replace(target)
    finally:
        temporary.unlink(missing_ok=True)
