"""Owns the two-panel frame that figures share: speeds above, one lane per verdict below.

Knows nothing of what is drawn in it. The lanes give what has no speed a place that cannot be read
as one.
"""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import plotly.graph_objects as go

from reports.marks import MARKS
from storage.records import TrialRecord, Verdict

MAIN_PIXELS = 360
LANE_PIXELS = 40
GAP_PIXELS = 18
MARGIN = {"l": 8, "r": 12, "t": 72, "b": 52}


def lanes_of(
    records: Iterable[TrialRecord], *, without: Iterable[Verdict] = ()
) -> tuple[Verdict, ...]:
    """Return the verdicts that occur, in the order of `Verdict`, less those drawn elsewhere."""
    wanted = {record.verdict for record in records} - set(without)
    return tuple(verdict for verdict in Verdict if verdict in wanted)


def frame(figure: go.Figure, *, lanes: tuple[Verdict, ...], x_axis: dict[str, Any]) -> None:
    """Give ``figure`` its panels: speeds on ``y``, lanes on ``y2``, one x axis under both."""
    below = LANE_PIXELS * len(lanes)
    gap = GAP_PIXELS if lanes else 0
    inner = MAIN_PIXELS + gap + below
    figure.update_layout(
        height=inner + MARGIN["t"] + MARGIN["b"],
        margin=MARGIN,
        hovermode="closest",
        # Lanes are places, not groups: bars of several lanes must not make room for each other.
        barmode="overlay",
        legend={"orientation": "h", "x": 0, "y": 1.06, "yanchor": "bottom", "xanchor": "left"},
        xaxis={**x_axis, "anchor": "y2" if lanes else "y"},
        yaxis={
            "domain": [(below + gap) / inner, 1.0],
            "rangemode": "tozero",
            "tickformat": ",~r",
            "title": {"text": "tokens/s"},
        },
    )
    if lanes:
        figure.update_layout(yaxis2=_lane_axis(lanes, top=below / inner))


def _lane_axis(lanes: tuple[Verdict, ...], *, top: float) -> dict[str, Any]:
    return {
        "domain": [0.0, top],
        "range": [len(lanes) - 0.5, -0.5],
        "tickmode": "array",
        "tickvals": list(range(len(lanes))),
        "ticktext": [MARKS[verdict].lane for verdict in lanes],
        "zeroline": False,
        "fixedrange": True,
    }
