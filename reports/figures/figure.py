"""A figure of the page: its words, its drawing, and the table that says the same.

A drawing is plotly's JSON. Where its marks are trials it refers to them instead of repeating them:
a trace with ``rows`` (indices of the page's trials) may have ``"@column"`` in the place of any
array, which stands for that column of those trials, and ``"@at.2"`` for its third part. With a
``path`` each of its trials is a line through several columns, each less its ``low`` and over its
``span``. The page resolves it in `document.js`, an image by `resolved`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

import plotly.graph_objects as go


@dataclass(frozen=True)
class DataTable:
    """What a figure shows, in text."""

    columns: tuple[str, ...]
    rows: tuple[tuple[str, ...], ...]


@dataclass(frozen=True)
class MarkName:
    """A mark with a short name beside it, and what that stands for."""

    x: float
    y: float
    name: str
    words: str
    """The name too."""


@dataclass(frozen=True)
class PageFigure:
    """A figure with its words, and the table behind it for those who do not see it."""

    id: str
    """Identifier of its element on the page, and its name for `sweep report --figure`."""
    title: str
    caption: str
    drawing: go.Figure | Mapping[str, Any]
    """A plotly figure, or ``{"data": [...], "layout": {...}}`` that refers to trials."""
    table: DataTable | None = None
    """None where its marks are the trials, which the page's own table has."""
    controls: Mapping[str, Any] | None = None
    """What a script of the page needs to draw it as the reader chooses."""
    names: tuple[MarkName, ...] = ()
    """Marks that a picture explains; the page does so by itself."""

    @property
    def plain(self) -> dict[str, Any]:
        """Data and layout as plain values, without a theme: the page and the image have theirs."""
        drawing: Any = self.drawing
        values = drawing.to_plotly_json() if isinstance(drawing, go.Figure) else dict(drawing)
        layout = {key: part for key, part in values["layout"].items() if key != "template"}
        return {"data": list(values["data"]), "layout": layout}


def trace_of(
    name: str, rows: Sequence[int], x: Any = None, y: Any = None, **more: Any
) -> dict[str, Any]:
    """Return a trace whose marks are trials, which the page explains itself."""
    base = {"type": "scatter", "mode": "markers", "name": name, "rows": list(rows)}
    return {**base, "x": x, "y": y, "hoverinfo": "none", **more}


def resolved(
    drawing: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]
) -> dict[str, list[Any] | dict[str, Any]]:
    """Return a drawing with every reference to ``trials`` replaced by their values.

    What a trial has no value of is None. ``rows`` is left out: plotly knows nothing of it.
    """
    return {
        "data": [_trace(trace, trials) for trace in drawing["data"]],
        "layout": dict(drawing["layout"]),
    }


def _trace(trace: Mapping[str, Any], trials: Sequence[Mapping[str, Any]]) -> dict[str, Any]:
    if "rows" not in trace:
        return dict(trace)
    chosen = [trials[row] for row in trace["rows"]]
    rest = {key: part for key, part in trace.items() if key not in ("rows", "path")}
    plain = {key: _value(part, chosen) for key, part in rest.items()}
    return plain | (_path(trace["path"], chosen) if "path" in trace else {})


def _path(
    path: Sequence[Mapping[str, Any]], chosen: Sequence[Mapping[str, Any]]
) -> dict[str, list[float | None]]:
    """Return a line for each trial, with a gap between them."""
    columns = [(_value(stop["of"], chosen), stop["low"], stop["span"]) for stop in path]
    places = [[(value - low) / span for value in values] for values, low, span in columns]
    lines = zip(*places, [None] * len(chosen), strict=True)
    return {"x": [*range(len(path)), None] * len(chosen), "y": [y for line in lines for y in line]}


def _value(part: Any, chosen: Sequence[Mapping[str, Any]]) -> Any:
    match part:
        case str() if part.startswith("@"):
            key, _, place = part[1:].partition(".")
            return [trial[key][int(place)] if place else trial.get(key) for trial in chosen]
        case Mapping():
            return {key: _value(inner, chosen) for key, inner in part.items()}
        case _:
            return part
