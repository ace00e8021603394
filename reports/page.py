"""The report: one HTML file that needs nothing else, no network included.

A section is one value, made from a study by one function, and the template of its name in
`templates/sections`; `SECTIONS` is their order, and nothing else of the page knows of one. A value
with a ``figures`` attribute brings those figures with it. Every trial is in the page once, as
`document` has it; the scripts in `templates/scripts` draw, sort and explain from there.

Everything from a study is escaped: in markup by the template, in scripts by the JSON encoder, and
in both it is without secrets and what works unseen (`redaction.shown`). A content security policy
allows the page's own scripts by their hashes and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import dataclass
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.io.json import to_json_plotly

from reports.comparison import Comparison
from reports.decision import decision_of
from reports.document import document_of, no_document, title_of
from reports.figures.comparison import words_of
from reports.figures.effects import knobs_of
from reports.figures.figure import PageFigure
from reports.figures.quality import quality_of
from reports.figures.search import search_of
from reports.figures.style import themes
from reports.figures.trust import trust_section
from reports.front import front_of
from reports.sections import next_steps_of, texts_of, trials_of
from reports.wall import wall_of
from search_spaces.errors import EnvironmentFault
from search_spaces.redaction import redacted, shown
from storage.definition import StudySnapshot
from storage.files import replace


@dataclass(frozen=True)
class Section:
    """A part of the page: what it says, and by the same name its template and its anchor."""

    name: str
    make: Callable[[StudySnapshot], Any]
    """Returns the value that the template renders as ``value``; None leaves the section out."""


SECTIONS: tuple[Section, ...] = (
    Section("decision", decision_of),
    Section("texts", texts_of),
    Section("front", front_of),
    Section("quality", quality_of),
    Section("wall", wall_of),
    Section("knobs", knobs_of),
    Section("search", search_of),
    Section("next", next_steps_of),
    Section("trials", trials_of),
    Section("trust", trust_section),
)
"""The page, from top to bottom."""

_CODE = re.compile(r"`([^`]*)`")
_STYLES = ("report.css", "decision.css", "analysis.css")
_SCRIPTS = (
    "document.js",
    "words.js",
    "copy.js",
    "selection.js",
    "figures.js",
    "front.js",
    "table.js",
    "decision.js",
    "wall.js",
    "search.js",
    "folds.js",
    "start.js",
)
"""Files of `templates/scripts`, in the order in which they run."""


def write_report(snapshot: StudySnapshot, path: Path) -> None:
    """Write a study's report to ``path``, as `write_page` does."""
    write_page(render(snapshot), path)


def write_page(page: str, path: Path) -> None:
    """Write a page where sweep keeps it: for its owner alone, in the place of a link.

    Raises:
        EnvironmentFault: it cannot be written there; what was there before is untouched.
    """
    try:
        replace(path, page.encode("utf-8", errors="replace"))
    except OSError as error:
        raise EnvironmentFault(f"cannot write the report {path}: {error.strerror}") from error


def render(snapshot: StudySnapshot) -> str:
    """Return a study's report as HTML."""
    sections = _sections(snapshot)
    return _page(title_of(snapshot), sections, document=document_of(snapshot), snapshot=snapshot)


def figures_of(snapshot: StudySnapshot) -> tuple[PageFigure, ...]:
    """Return the figures of a study's report, in the order of the page."""
    return _figures(_sections(snapshot))


def _sections(snapshot: StudySnapshot) -> list[tuple[str, Any]]:
    """Return the name and the value of every section that has something to say."""
    made = [(section.name, section.make(snapshot)) for section in SECTIONS]
    return [(name, value) for name, value in made if value is not None]


def _figures(sections: Iterable[tuple[str, Any]]) -> tuple[PageFigure, ...]:
    return tuple(figure for _, value in sections for figure in getattr(value, "figures", ()))


def render_comparison(comparison: Comparison) -> str:
    """Return the page of several GPUs as HTML. Its figures are of GPUs, not of trials."""
    words = words_of(comparison)
    return _page(words.title, [("comparison", words)], document=no_document(), snapshot=None)


def _page(
    title: str,
    sections: Sequence[tuple[str, Any]],
    *,
    document: Mapping[str, Any],
    snapshot: StudySnapshot | None,
) -> str:
    scripts = [_plotly(), *(_source(f"scripts/{name}") for name in _SCRIPTS)]
    return (
        _environment()
        .get_template("report.html.j2")
        .render(
            title=title,
            snapshot=snapshot,
            sections=sections,
            styles=Markup("".join(map(_source, _STYLES))),
            page_data=Markup(_page_data(document, _figures(sections))),
            scripts=[Markup(script) for script in scripts],
            script_hashes=[_csp_hash(script) for script in scripts],
        )
    )


def _page_data(document: Mapping[str, Any], figures: Iterable[PageFigure]) -> str:
    """Return trials, figures and themes as JSON that is safe inside a script element."""
    drawings = {figure.id: {**figure.plain, "controls": figure.controls} for figure in figures}
    data = {"document": document, "figures": drawings, "themes": themes()}
    # The same words come again and again in the trials of a study.
    return str(to_json_plotly(redacted(data, clean=cache(shown))))


def _finalized(value: Any) -> Any:
    """Return what a template prints: markup of ours as it is, of all other text what is seen.

    What stands between backticks is code.
    """
    if isinstance(value, Markup):
        return value
    return Markup(_CODE.sub(r"<code>\1</code>", str(escape(shown(str(value))))))


@cache
def _environment() -> Environment:
    return Environment(
        loader=PackageLoader("reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _source(name: str) -> str:
    """Return the text of a file that templates include as it is."""
    source, _, _ = PackageLoader("reports").get_source(_environment(), name)
    return source


@cache
def _plotly() -> str:
    """Return plotly's bundle of flat figures, a third of the one that its Python package has."""
    return files("reports").joinpath("vendor", "plotly-cartesian.min.js").read_text("utf-8")


@cache
def _csp_hash(script: str) -> str:
    """Return what a content security policy calls a script by."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
