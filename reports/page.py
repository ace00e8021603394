"""The report: one HTML file that needs nothing else, no network included.

The templates lay out the values of `sections`; the scripts select, sort, filter and copy.

Everything from a study is escaped: in markup by the template, in scripts by the JSON encoder, and
in both it is without secrets and what works unseen (`redaction.shown`). A content security policy
allows the page's own scripts by their hashes and no connection at all.
"""

from __future__ import annotations

import base64
import hashlib
import re
from collections.abc import Iterable, Mapping
from functools import cache
from importlib.resources import files
from pathlib import Path
from typing import Any

from jinja2 import Environment, PackageLoader, StrictUndefined
from markupsafe import Markup, escape
from plotly.io.json import to_json_plotly

from qlora_sweep.reports import format as units
from qlora_sweep.reports.boundary import boundary_of
from qlora_sweep.reports.comparison import GpuComparison
from qlora_sweep.reports.comparison_words import comparison_words
from qlora_sweep.reports.decision import decision_of
from qlora_sweep.reports.document import TrialTable, document_of
from qlora_sweep.reports.effects import effects_of
from qlora_sweep.reports.figures import PageFigure, Section, themes
from qlora_sweep.reports.front import front_of
from qlora_sweep.reports.quality import quality_of
from qlora_sweep.reports.search import search_of
from qlora_sweep.reports.sections import next_steps_of, texts_of, trials_of
from qlora_sweep.reports.trust import trust_of
from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.costs import AskedWork
from qlora_sweep.search_spaces.redaction import redacted, shown
from qlora_sweep.storage.definition import StudySnapshot
from qlora_sweep.storage.files import replace, writing

_CODE = re.compile(r"`([^`]*)`")
_SCRIPTS = ("page.js", "table.js", "figures.js", "front.js")
"""In the order in which they run."""


def title_of(snapshot: StudySnapshot) -> str:
    """Return what a study is about: ``Mistral-7B-v0.3 on an A10: 23 trials``."""
    model = units.model_name(str(snapshot.definition.model["name"]))
    gpu = units.with_article(units.gpu_name(snapshot.definition.target.gpu))
    return f"{model} on {gpu}: {units.plural(len(snapshot.trials), 'trial')}"


def sections(document: TrialTable, work: AskedWork) -> dict[str, Any]:
    """Return the value of each section of a study's report; None where it has nothing to say."""
    view = document.view
    return {
        "decision": decision_of(view, work),
        "texts": texts_of(view),
        "front": front_of(document),
        "quality": quality_of(document),
        "boundary": boundary_of(document),
        "effects": effects_of(document),
        "search": search_of(document),
        "next": next_steps_of(view),
        "trials": trials_of(document),
        "trust": trust_of(document),
    }


def figures_of(made: Mapping[str, Any]) -> list[PageFigure]:
    """Return the figures of sections, in the order of the page."""
    return [figure for value in made.values() for figure in getattr(value, "figures", ())]


def render(snapshot: StudySnapshot, *, work: AskedWork | None = None) -> str:
    """Return a study's report as HTML.

    Args:
        snapshot: the study.
        work: the training that is to be priced.
    """
    document = document_of(view_of(snapshot))
    made = sections(document, work or AskedWork())
    front = made["front"]
    controls = None
    if front is not None:
        controls = {"x": front.x, "y": front.y, "class": front.chosen, "views": front.views}
    data = document.to_json() | {"front": controls}
    return _page("study.html.j2", title_of(snapshot), made, data, snapshot=snapshot)


def render_comparison(comparison: GpuComparison) -> str:
    """Return the page of several GPUs as HTML. Its figures are of GPUs, not of trials."""
    words = comparison_words(comparison)
    return _page("comparison.html.j2", words.title, {"comparison": words}, {"columns": {}})


def render_figure(title: str, figure: PageFigure) -> str:
    """Return the page of one figure as HTML. It is of no trials."""
    made = {"page": Section(figures=[figure])}
    return _page("figure.html.j2", title, made, {"columns": {}})


def write_page(page: str, path: Path) -> None:
    """Write a page where sweep keeps it: for its owner alone, in the place of a link.

    Raises:
        EnvironmentFault: it cannot be written there; what was there before is untouched.
    """
    with writing(path, "the report "):
        replace(path, page.encode("utf-8", errors="replace"))


def _page(
    template: str,
    title: str,
    made: Mapping[str, Any],
    data: Mapping[str, Any],
    *,
    snapshot: StudySnapshot | None = None,
) -> str:
    scripts = [plotly_script()]
    for name in _SCRIPTS:
        scripts.append(_source(name))
    return (
        _environment()
        .get_template(template)
        .render(
            made,
            title=title,
            snapshot=snapshot,
            styles=Markup(_source("report.css")),
            page_data=Markup(_page_data(data, figures_of(made))),
            scripts=list(map(Markup, scripts)),
            script_hashes=list(map(script_hash, scripts)),
        )
    )


def _page_data(data: Mapping[str, Any], figures: Iterable[PageFigure]) -> str:
    """Return trials, figures and themes as JSON that is safe inside a script element."""
    drawn = {one.id: one.figure.to_plotly_json() for one in figures}
    for figure in drawn.values():
        # The reader's theme takes the place of plotly's own.
        figure["layout"].pop("template", None)
    # The same words come again and again in the trials of a study.
    page_data = dict(data, figures=drawn, themes=themes())
    return str(to_json_plotly(redacted(page_data, clean=cache(shown))))


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
        loader=PackageLoader("qlora_sweep.reports"),
        autoescape=True,
        undefined=StrictUndefined,
        finalize=_finalized,
        trim_blocks=True,
        lstrip_blocks=True,
    )


@cache
def _source(name: str) -> str:
    """Return the text of a file that templates include as it is."""
    return PackageLoader("qlora_sweep.reports").get_source(_environment(), name)[0]


@cache
def plotly_script() -> str:
    """Return plotly's bundle of flat figures, a third of the one that its Python package has."""
    return (
        files("qlora_sweep.reports")
        .joinpath("vendor", "plotly-cartesian.min.js")
        .read_text("utf-8")
    )


@cache
def script_hash(script: str) -> str:
    """Return what a content security policy calls a script by."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
