"""What trials reached by each setting that varied, a panel a setting."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from typing import Any

from plotly.subplots import make_subplots

from qlora_sweep.reports import format as units
from qlora_sweep.reports.document import TrialTable, setting_words
from qlora_sweep.reports.figures import AMBER, BLUE, PageFigure, framed, wrapped
from qlora_sweep.search_spaces.config import SETTINGS, TrialConfig

_TICKS_MOST = 8
_PANELS_A_ROW = 4


@dataclass(frozen=True)
class _Axis:
    """A setting with its values in order: numbers rising, words the lean first."""

    label: str
    values: Sequence[Any]
    places: Sequence[int]
    """Of each trial's value among them."""

    @classmethod
    def of(cls, document: TrialTable, key: str) -> _Axis:
        def order(value: Any) -> tuple[float, str]:
            if isinstance(value, bool | int | float):
                return float(value), ""
            return units.lean_order(key, value)

        of_trials = document.columns[key].values
        values = sorted(set(of_trials), key=order)
        at = {repr(value): place for place, value in enumerate(values)}
        return cls(SETTINGS[key].label, values, list(map(at.__getitem__, map(repr, of_trials))))

    @property
    def ticks(self) -> dict[int, str]:
        """The places that are named, not too many, with their names."""
        named = range(0, len(self.values), -(-len(self.values) // _TICKS_MOST))
        return {place: escape(setting_words(self.values[place])) for place in named}


def slices_of(document: TrialTable, key: str, rows: Sequence[int]) -> PageFigure | None:
    """Return what trials reached by each setting; None where none varied.

    Args:
        document: the trials.
        key: the column of what they reached.
        rows: of the trials that fitted.
    """
    axes = []
    for setting in TrialConfig.model_fields:
        axis = _Axis.of(document, setting)
        if len(axis.values) > 1:
            axes.append(axis)
    if not axes:
        return None
    column = document.columns[key]
    down = -(-len(axes) // _PANELS_A_ROW)
    figure = make_subplots(
        down, _PANELS_A_ROW, shared_yaxes="all", vertical_spacing=0.5 / down / 1.5
    )
    numbers = [document.records[row].number for row in rows]
    reached = list(map(column.values.__getitem__, rows))
    for place, axis in enumerate(axes):
        at = {"row": place // _PANELS_A_ROW + 1, "col": place % _PANELS_A_ROW + 1}
        figure.add_scatter(
            x=list(map(axis.places.__getitem__, rows)),
            y=reached,
            customdata=numbers,
            mode="markers",
            marker={"color": numbers, "colorscale": [[0, AMBER], [1, BLUE]], "size": 6},
            hovertemplate="trial %{customdata}: %{y:,.4~r}<extra></extra>",
            **at,
        )
        ticks = {"tickvals": list(axis.ticks), "ticktext": list(axis.ticks.values())}
        figure.update_xaxes(**ticks, title=escape(axis.label), **at)
    figure.update_layout(framed(90 + 230 * down), showlegend=False)
    figure.update_yaxes(tickformat="~s")
    figure.update_yaxes(title=wrapped(column.label, 18), row=1, col=1)
    return PageFigure(
        "slice",
        "Slice plot",
        "Every trial that fitted, by each setting that varies: the first are amber, the last blue.",
        figure,
    )
