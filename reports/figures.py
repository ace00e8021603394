"""What the figures of a page share: their type, each verdict's mark, the two themes, small parts.

No verdict is told by colour alone: each has a symbol or a lane of its own. Colours are from the
palettes of Okabe and Ito and of Paul Tol, which colour-blind readers can tell apart, and legible on
white and on near-black.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from types import SimpleNamespace
from typing import Any, NamedTuple

import plotly.graph_objects as go

from qlora_sweep.storage.records import Verdict

BLUE = "#0072B2"
GREEN = "#008F68"
ORANGE = "#CC5500"
AMBER = "#B07800"
FADED = "#8192A6"
"""What stands back still has three times the lightness of the page, or a third of it."""


class VerdictMark(NamedTuple):
    """How one verdict is drawn."""

    colour: str
    symbol: str
    """plotly's marker symbol."""

    def marker(self, size: int) -> dict[str, Any]:
        """Return what plotly draws a mark by."""
        return {"color": self.colour, "symbol": self.symbol, "size": size}


MARKS: Mapping[Verdict, VerdictMark] = {
    Verdict.FITS: VerdictMark(BLUE, "circle"),
    Verdict.PRUNED_SLOW: VerdictMark("#2E86C8", "circle-open"),
    Verdict.OOM: VerdictMark(ORANGE, "x"),
    Verdict.PREDICTED_OOM: VerdictMark(AMBER, "square-open"),
    Verdict.DOMINATED_OOM: VerdictMark("#C0609A", "triangle-up-open"),
    Verdict.DIVERGED: VerdictMark("#AA4499", "diamond"),
    Verdict.INVALID: VerdictMark("#7D8691", "asterisk-open"),
    Verdict.INEFFECTIVE: VerdictMark("#868613", "hexagon-open"),
    Verdict.TIMED_OUT: VerdictMark("#2F9384", "hourglass"),
    Verdict.CRASHED: VerdictMark("#C2455C", "cross"),
    Verdict.LOST: VerdictMark("#7D8691", "circle-x-open"),
}


@dataclass(frozen=True)
class PageFigure:
    """A figure with its words. The ``customdata`` of marks that are trials are their numbers."""

    id: str
    """Of its element on the page, and its name for `sweep report --figure`."""
    title: str
    caption: str
    figure: go.Figure
    heads: tuple[str, ...] = ()
    rows: tuple[tuple[str, ...], ...] = ()
    """The figure as a table, where no other table of the page has it."""


class Section(SimpleNamespace):
    """What a part of the page says, under the names that its template has for it."""


def digits(values: Iterable[float]) -> list[float]:
    """Return numbers with the six digits that a figure can show."""
    return [float(f"{value:.6g}") for value in values]


def wrapped(label: str, width: int) -> str:
    """Return a label in lines of so many letters, as a figure shows it."""
    return "<br>".join(map(escape, wrap(label, width)))


def framed(height: int) -> dict[str, Any]:
    """Return the layout of a figure of so many pixels, with its legend above it."""
    legend = {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"}
    margin = {"l": 8, "r": 12, "t": 40, "b": 52}
    return {"height": height, "margin": margin, "hovermode": "closest", "legend": legend}


def whiskers(values: Sequence[float], ends: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return error bars from the low to the high end of each value."""
    return {
        "type": "data",
        "symmetric": False,
        "array": digits(high - value for value, (_, high) in zip(values, ends, strict=True)),
        "arrayminus": digits(value - low for value, (low, _) in zip(values, ends, strict=True)),
        "thickness": 1.5,
        "width": 4,
    }


def dashed(x: float) -> dict[str, Any]:
    """Return a dashed vertical line across a figure."""
    line = {"color": ORANGE, "width": 2, "dash": "dash"}
    return {"type": "line", "x0": x, "x1": x, "y0": 0, "y1": 1, "yref": "paper", "line": line}


def themes() -> dict[str, dict[str, Any]]:
    """Return plotly templates ``light`` and ``dark``, of which the page picks the reader's."""
    return {
        "light": _theme(ink="#1c2128", grid="#e2e6ea", paper="#ffffff"),
        "dark": _theme(ink="#e3e7ec", grid="#343b44", paper="#1c2128"),
    }


def _theme(*, ink: str, grid: str, paper: str) -> dict[str, Any]:
    axis = {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid, "automargin": True}
    hover = {"bgcolor": paper, "font": {"color": ink}, "bordercolor": grid, "align": "left"}
    layout = go.Layout(
        font={"family": "system-ui, sans-serif", "size": 13, "color": ink},
        paper_bgcolor="rgba(0,0,0,0)",
        plot_bgcolor="rgba(0,0,0,0)",
        hoverlabel=hover,
        modebar={"bgcolor": "rgba(0,0,0,0)", "color": "#8a8f98", "activecolor": ink},
        xaxis=axis,
        yaxis=axis,
    )
    return {"layout": layout.to_plotly_json()}
