"""What each trial of a search reached, and the best so far."""

from __future__ import annotations

from collections.abc import Sequence
from itertools import accumulate

import plotly.graph_objects as go

from qlora_sweep.reports.document import AXES, TrialTable
from qlora_sweep.reports.figures import GREEN, MARKS, PageFigure, framed, wrapped
from qlora_sweep.reports.words import VERDICT_LABELS
from qlora_sweep.storage.records import Verdict


def history_of(document: TrialTable, key: str, rows: Sequence[int]) -> PageFigure:
    """Return what trials reached in the order in which they ran.

    Args:
        document: the trials.
        key: the column of what they reached.
        rows: of the trials that reached something.
    """
    column = document.columns[key]
    better = min
    if AXES[key]:
        better = max
    figure = go.Figure(layout=framed(300))
    for verdict in (Verdict.FITS, Verdict.PRUNED_SLOW):
        numbers = []
        values = []
        for row in rows:
            record = document.records[row]
            if record.verdict is verdict:
                numbers.append(record.number)
                values.append(column.values[row])
        if verdict is Verdict.FITS:
            figure.add_scatter(
                x=numbers,
                y=list(accumulate(values, better)),
                mode="lines",
                name="best so far",
                line={"color": GREEN, "width": 2, "shape": "hv"},
                hoverinfo="skip",
            )
        if numbers:
            figure.add_scatter(
                x=numbers,
                y=values,
                customdata=numbers,
                mode="markers",
                name=VERDICT_LABELS[verdict],
                marker=MARKS[verdict].marker(7),
                hovertemplate="trial %{customdata}: %{y:,.4~r}<extra></extra>",
            )
    figure.update_xaxes(title="trial")
    figure.update_yaxes(title=wrapped(column.label, 24), tickformat=",~r")
    return PageFigure(
        "history",
        "Optimization history",
        "What each trial reached, and the best so far. What was stopped as too slow is hollow, and "
        "never the best.",
        figure,
    )
