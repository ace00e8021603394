"""The section on the course of the search: history, slices and parallel coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Any

from reports import units
from reports.document import document_of
from reports.figures.figure import PageFigure
from reports.figures.style import FADED_COLOUR, FRONT_COLOUR, MARGIN, MARKS, WINNER_COLOUR
from reports.outcomes import VERDICT_LABELS
from search_spaces.space import Objective
from storage.definition import StudySnapshot
from storage.ranking import rank_study
from storage.records import Verdict

_COLUMNS: Mapping[Objective, str] = {
    "tokens_per_second": "tokens_per_second",
    "peak_memory": "peak_allocated",
    "trainable_parameters": "trainable_parameters",
    "eval_loss": "eval_loss",
}
_SHARES = (
    (1.0, "the other half", FADED_COLOUR, 1, 0.35),
    (0.5, "the best half", "#56A0D3", 1, 0.7),
    (0.25, "the best quarter", "#0072B2", 1.5, 0.9),
    (0.1, "the best tenth", WINNER_COLOUR, 2.5, 1.0),
)
"""Groups of lines, the last drawn on top: share of the trials, name, colour, width, opacity."""
_TICKS_MOST = 7
_ACROSS, _SLICE_PIXELS = 4, 230


@dataclass(frozen=True)
class SearchSection:
    """The figures on how a search went, by the first of its objectives."""

    figures: tuple[PageFigure, ...]


def search_of(snapshot: StudySnapshot) -> SearchSection | None:
    """Return the section on the search; None where fewer than two trials fitted."""
    document = document_of(snapshot)
    of_space = {record.number for record in rank_study(snapshot).of_space}
    known = (_COLUMNS[objective] for objective in snapshot.definition.space.objectives)
    column = next((one for one in known if one in document["columns"]), "")
    rows = [
        row
        for row, trial in enumerate(document["trials"])
        if trial["number"] in of_space and column in trial
    ]
    fitting = [row for row in rows if document["trials"][row]["verdict"] == Verdict.FITS]
    if len(fitting) < 2:
        return None
    best_last = sorted(fitting, key=lambda row: _merit(document, column, row))
    history = PageFigure(
        "history",
        "Optimization history",
        "What each trial reached, and the best so far. What was stopped as too slow is hollow, and "
        "counts for nothing.",
        _history(document, column, rows),
    )
    if not document["axes"]:
        return SearchSection((history,))
    slices = PageFigure(
        "slice",
        "Slice plot",
        "Every trial that fitted, by each setting that varies; the darker, the later it ran.",
        _slices(document, column, fitting),
    )
    parallel = PageFigure(
        "parallel",
        "Parallel coordinates",
        "Every trial that fitted is a line from what it reached through its settings. A click on a "
        "name hides its lines or shows them.",
        _parallel(document, column, best_last),
    )
    return SearchSection((history, slices, parallel))


def _merit(document: Mapping[str, Any], column: str, row: int) -> float:
    value = float(document["trials"][row][column])
    return value if document["columns"][column]["more_is_better"] else -value


def _history(document: Mapping[str, Any], column: str, rows: Sequence[int]) -> dict[str, Any]:
    trials = document["trials"]
    best: list[int] = []
    for row in rows:
        is_better = not best or _merit(document, column, row) > _merit(document, column, best[-1])
        if trials[row]["verdict"] == Verdict.FITS and is_better:
            best.append(row)
    line = {
        "type": "scatter",
        "mode": "lines",
        "name": "best so far",
        # The line goes on to the last trial: what was best stayed so.
        "x": [*(trials[row]["number"] for row in best), trials[rows[-1]]["number"]],
        "y": [trials[row][column] for row in [*best, best[-1]]],
        "line": {"color": FRONT_COLOUR, "width": 2, "shape": "hv"},
        "hoverinfo": "skip",
    }
    marks = [
        {
            "type": "scatter",
            "mode": "markers",
            "name": VERDICT_LABELS[verdict],
            "rows": [row for row in rows if trials[row]["verdict"] == verdict],
            "x": "@number",
            "y": f"@{column}",
            "marker": {"color": MARKS[verdict].colour, "symbol": MARKS[verdict].symbol, "size": 7},
            "hoverinfo": "none",
        }
        for verdict in (Verdict.FITS, Verdict.PRUNED_SLOW)
    ]
    layout = _layout(300) | {
        "xaxis": {"title": {"text": "trial"}},
        "yaxis": _value_axis(document, column),
    }
    return {"data": [line, *(trace for trace in marks if trace["rows"])], "layout": layout}


def _layout(height: int) -> dict[str, Any]:
    legend = {"orientation": "h", "x": 0, "y": 1.0, "yanchor": "bottom"}
    margin = {**MARGIN, "t": 36}
    return {"height": height, "margin": margin, "hovermode": "closest", "legend": legend}


def _value_axis(document: Mapping[str, Any], column: str) -> dict[str, Any]:
    known = document["columns"][column]
    ticks = ",~r" if known["unit"] == "rate" else "~s" if known["unit"] == "count" else "~r"
    return {"title": {"text": escape(known["label"])}, "tickformat": ticks}


def _slices(document: Mapping[str, Any], column: str, rows: Sequence[int]) -> dict[str, Any]:
    axes = document["axes"]
    layout: dict[str, Any] = _layout(60 + _SLICE_PIXELS * -(-len(axes) // _ACROSS))
    layout["showlegend"] = False
    layout["grid"] = {
        "columns": _ACROSS,
        "rows": -(-len(axes) // _ACROSS),
        "pattern": "independent",
    }
    layout["grid"] |= {"xgap": 0.22, "ygap": 0.42}
    data = []
    for place, axis in enumerate(axes):
        own = "" if place == 0 else str(place + 1)
        ticks = {
            "tickvals": [n for n, _ in _ticks(axis)],
            "ticktext": [text for _, text in _ticks(axis)],
        }
        ends = [-0.5, len(axis["values"]) - 0.5]
        layout[f"xaxis{own}"] = {
            "title": {"text": escape(axis["label"]), "standoff": 6},
            "range": ends,
            **ticks,
        }
        layout[f"yaxis{own}"] = {"tickformat": "~s", **({"matches": "y"} if own else {})}
        data.append(
            {
                "type": "scatter",
                "mode": "markers",
                "name": escape(axis["label"]),
                "rows": list(rows),
                "x": f"@at.{place}",
                "y": f"@{column}",
                "xaxis": f"x{own}",
                "yaxis": f"y{own}",
                "marker": {
                    "color": "@number",
                    "colorscale": [[0, "#9CC7E4"], [1, "#00456B"]],
                    "size": 6,
                },
                "hoverinfo": "none",
            }
        )
    layout["yaxis"]["title"] = {"text": _in_lines(document["columns"][column]["label"])}
    return {"data": data, "layout": layout}


def _in_lines(label: str) -> str:
    return "<br>".join(map(escape, wrap(label, 13)))


def _ticks(axis: Mapping[str, Any]) -> list[tuple[int, str]]:
    """Return the places on a setting's axis that have a name, not too many, with the names."""
    last = len(axis["values"]) - 1
    step = max(1.0, last / (_TICKS_MOST - 1))
    places = dict.fromkeys(round(n * step) for n in range(min(last + 1, _TICKS_MOST)))
    return [(place, _value_words(axis["values"][place])) for place in places]


def _value_words(value: Any) -> str:
    match value:
        case None:
            return units.DASH
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case _:
            return escape(units.short(value))


def _parallel(document: Mapping[str, Any], column: str, rows: Sequence[int]) -> dict[str, Any]:
    """Return lines through an axis for the value and one for each setting, the best on top."""
    axes, trials = document["axes"], document["trials"]
    reached = [trials[row][column] for row in rows]
    low, high = min(reached), max(reached)
    # All may have reached the same.
    high = high if high > low else low + 1
    path = [{"of": f"@{column}", "low": low, "high": high}]
    path += [
        {"of": f"@at.{place}", "low": 0, "high": len(axis["values"]) - 1}
        for place, axis in enumerate(axes)
    ]
    bounds = [round((1 - share) * (len(rows) - 1)) for share, *_ in _SHARES] + [len(rows)]
    data = [
        {
            "type": "scatter",
            "mode": "lines",
            "name": name,
            "rows": list(rows[begin:end]),
            "path": path,
            "line": {"color": colour, "width": width},
            "opacity": opacity,
            "hoverinfo": "none",
        }
        for (_, name, colour, width, opacity), begin, end in zip(
            _SHARES, bounds[:-1], bounds[1:], strict=True
        )
        if begin < end
    ]
    values = [low + n * (high - low) / 4 for n in range(5)]
    named = [[(n / 4, units.rate(v) if high >= 100 else f"{v:.3g}") for n, v in enumerate(values)]]
    named += [[(n / (len(axis["values"]) - 1), text) for n, text in _ticks(axis)] for axis in axes]
    heads = [document["columns"][column]["label"], *(axis["label"] for axis in axes)]
    layout = _layout(420) | {
        "xaxis": {
            "tickvals": list(range(len(heads))),
            "ticktext": list(map(_in_lines, heads)),
            "range": [-0.5, len(heads) - 0.5],
            "zeroline": False,
        },
        "yaxis": {"visible": False, "range": [-0.05, 1.05]},
        "annotations": [
            {
                "x": place,
                "y": y,
                "text": text,
                "xanchor": "left",
                "xshift": 3,
                "yshift": 7,
                "showarrow": False,
                "font": {"size": 11},
            }
            for place, ticks in enumerate(named)
            for y, text in ticks
        ],
    }
    return {"data": data, "layout": layout}
