"""Owns the report: one HTML file that needs nothing else, no network included.

Everything from a study is escaped, in markup by the template and in scripts by the JSON encoder; a
content security policy allows the page's own two scripts by their hashes and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
from functools import cache
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined, Template
from markupsafe import Markup
from plotly.io.json import to_json_plotly
from plotly.offline import get_plotlyjs

from reports import tables
from reports.answer import answer, notes
from reports.figures import ReportFigure, all_figures
from reports.files import write_whole
from reports.marks import themes
from search_spaces.errors import EnvironmentFault
from storage.definition import StudySnapshot


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
        answer=answer(snapshot),
        notes=notes(snapshot),
        figures=figures,
        top=tables.top_configurations(snapshot),
        classes=tables.class_rows(snapshot),
        front=tables.front_rows(snapshot),
        value_columns=tables.value_columns(snapshot),
        advice=tables.how_to_go_faster(snapshot),
        advice_title=tables.advice_title(snapshot),
        verdicts=tables.verdict_rows(snapshot),
        environment=tables.environment_rows(snapshot),
        figure_data=Markup(_figure_data(figures)),
        plotly_script=Markup(_plotly_script()),
        draw_script=Markup(_draw_script()),
        script_hashes=[_csp_hash(_plotly_script()), _csp_hash(_draw_script())],
    )


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
