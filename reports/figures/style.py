"""What the figures share: each verdict's mark, the panels, and the two themes.

No verdict is told by colour alone: each has a symbol or a
lane of its own. Colours are from the palettes of Okabe and Ito and of Paul Tol, which colour-blind
readers can tell apart, and legible on white and on near-black.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from storage.records import TrialRecord, Verdict

FRONT_COLOUR = "#008F68"
LIMIT_COLOUR = "#CC5500"
WINNER_COLOUR = "#B07800"
FADED_COLOUR = "#8192A6"
"""What stands back still has three times the lightness of the page, or a third of it."""
OUTLINE = {"width": 1, "color": "#1c2128"}

MAIN_PIXELS = 360
LANE_PIXELS = 40
GAP_PIXELS = 18
MARGIN = {"l": 8, "r": 12, "t": 72, "b": 52}


@dataclass(frozen=True)
class Mark:
    """How one verdict is drawn."""

    colour: str
    symbol: str
    """plotly's marker symbol."""
    lane: str
    """The short name of its lane, in at most two lines."""


MARKS: Mapping[Verdict, Mark] = {
    Verdict.FITS: Mark("#0072B2", "circle", "fits"),
    Verdict.PRUNED_SLOW: Mark("#2E86C8", "circle-open", "stopped<br>as slow"),
    Verdict.OOM: Mark("#CC5500", "x", "ran out of<br>memory"),
    Verdict.PREDICTED_OOM: Mark("#B07800", "square-open", "predicted<br>not to fit"),
    Verdict.DOMINATED_OOM: Mark("#C0609A", "triangle-up-open", "larger than<br>an OOM"),
    Verdict.DIVERGED: Mark("#AA4499", "diamond", "diverged"),
    Verdict.INVALID: Mark("#7D8691", "asterisk-open", "invalid"),
    Verdict.INEFFECTIVE: Mark("#868613", "hexagon-open", "had no<br>effect"),
    Verdict.TIMED_OUT: Mark("#2F9384", "hourglass", "timed out"),
    Verdict.CRASHED: Mark("#C2455C", "cross", "crashed"),
    Verdict.LOST: Mark("#7D8691", "circle-x-open", "lost"),
}


def lanes_of(records: Iterable[TrialRecord]) -> tuple[Verdict, ...]:
    """Return the verdicts that occur, in the order of `Verdict`."""
    wanted = {record.verdict for record in records}
    return tuple(verdict for verdict in Verdict if verdict in wanted)


def framed(height: int) -> dict[str, Any]:
    """Return the layout of a figure of so many pixels, with its legend above it."""
    legend = {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"}
    margin = {**MARGIN, "t": 40}
    return {"height": height, "margin": margin, "hovermode": "closest", "legend": legend}


def whiskers(values: Sequence[float], ends: Sequence[tuple[float, float]]) -> dict[str, Any]:
    """Return error bars from the low to the high end of each value."""
    return {
        "type": "data",
        "symmetric": False,
        "array": [high - value for value, (_, high) in zip(values, ends, strict=True)],
        "arrayminus": [value - low for value, (low, _) in zip(values, ends, strict=True)],
        "thickness": 1.5,
        "width": 4,
    }


def panels(*, lanes: Sequence[str], tall: int = MAIN_PIXELS) -> dict[str, Any]:
    """Return a layout with speeds on ``y``, a lane of each name on ``y2``, one x axis under both.

    Args:
        lanes: the name of each, from the top.
        tall: pixels of the upper panel.
    """
    below = LANE_PIXELS * len(lanes)
    gap = GAP_PIXELS if lanes else 0
    inner = tall + gap + below
    layout: dict[str, Any] = {
        "height": inner + MARGIN["t"] + MARGIN["b"],
        "margin": dict(MARGIN),
        "hovermode": "closest",
        # Lanes are places, not groups: bars of several lanes must not make room for each other.
        "barmode": "overlay",
        "legend": {"orientation": "h", "x": 0, "y": 1.06, "yanchor": "bottom", "xanchor": "left"},
        "xaxis": {"anchor": "y2" if lanes else "y"},
        "yaxis": {
            "domain": [(below + gap) / inner, 1.0],
            "rangemode": "tozero",
            "tickformat": ",~r",
            "title": {"text": "tokens/s"},
        },
    }
    return layout | ({"yaxis2": _lane_axis(lanes, top=below / inner)} if lanes else {})


def _lane_axis(lanes: Sequence[str], *, top: float) -> dict[str, Any]:
    return {
        "domain": [0.0, top],
        "range": [len(lanes) - 0.5, -0.5],
        "tickmode": "array",
        "tickvals": list(range(len(lanes))),
        "ticktext": list(lanes),
        "zeroline": False,
        "fixedrange": True,
    }


def themes() -> dict[str, dict[str, Any]]:
    """Return plotly templates ``light`` and ``dark``, of which the page picks the system's."""
    return {
        "light": _theme(ink="#1c2128", grid="#e2e6ea", paper="#ffffff"),
        "dark": _theme(ink="#e3e7ec", grid="#343b44", paper="#1c2128"),
    }


def _theme(*, ink: str, grid: str, paper: str) -> dict[str, Any]:
    axis = {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid, "automargin": True}
    return {
        "layout": {
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": ink},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "hoverlabel": {
                "bgcolor": paper,
                "font": {"color": ink},
                "bordercolor": grid,
                "align": "left",
            },
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#8a8f98", "activecolor": ink},
            "xaxis": axis,
            "yaxis": axis,
        }
    }
