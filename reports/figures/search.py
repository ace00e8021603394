"""The section on the course of the search: history, slices and parallel coordinates."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from html import escape
from textwrap import wrap
from typing import Any

from reports import units
from reports.document import document_of
from reports.figures.figure import PageFigure, trace_of
from reports.figures.style import FADED_COLOUR, FRONT_COLOUR, MARKS, WINNER_COLOUR, framed
from reports.words import VERDICT_LABELS
from storage.definition import StudySnapshot
from storage.ranking import rank_study
from storage.records import Verdict

_BLUE = MARKS[Verdict.FITS].colour
_SHARES = (
    (1.0, "the other half", {"color": FADED_COLOUR, "width": 1}, 0.35),
    (0.5, "the best half", {"color": "#56A0D3", "width": 1}, 0.7),
    (0.25, "the best quarter", {"color": _BLUE, "width": 1.5}, 0.9),
    (0.1, "the best tenth", {"color": WINNER_COLOUR, "width": 2.5}, 1.0),
)
"""Groups of lines, the last drawn on top: share of the trials, name, line, opacity."""
_TICKS_MOST = 8
_ACROSS = 4
_LETTERS = 13
"""In a line of an axis's name."""


@dataclass(frozen=True)
class SearchSection:
    """The figures on how a search went, by the first of its objectives."""

    figures: tuple[PageFigure, ...]


def search_of(snapshot: StudySnapshot) -> SearchSection | None:
    """Return the section on the search; None where fewer than two trials fitted."""
    document = document_of(snapshot)
    objective = snapshot.definition.space.objectives[0]
    column = "peak_allocated" if objective == "peak_memory" else objective
    of_space = {record.number for record in rank_study(snapshot).of_space}
    rows = [
        row
        for row, trial in enumerate(document["trials"])
        if trial["number"] in of_space and column in trial
    ]
    fitting = [row for row in rows if document["trials"][row]["verdict"] == Verdict.FITS]
    if len(fitting) < 2:
        return None
    history = PageFigure(
        "history",
        "Optimization history",
        "What each trial reached, and the best so far. What was stopped as too slow is hollow, and "
        "counts for nothing.",
        _history(document, column, rows),
    )
    slices = PageFigure(
        "slice",
        "Slice plot",
        "Every trial that fitted, by each setting that varies: the first are amber, the last blue.",
        _slices(document, column, fitting),
    )
    parallel = PageFigure(
        "parallel",
        "Parallel coordinates",
        "Every trial that fitted is a line from what it reached through its settings. A click on a "
        "name hides its lines or shows them.",
        _parallel(document, column, fitting),
    )
    return SearchSection((history, slices, parallel) if document["axes"] else (history,))


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
    # The line goes on to the last trial: what was best stayed so.
    x = [*(trials[row]["number"] for row in best), trials[rows[-1]]["number"]]
    y = [trials[row][column] for row in (*best, best[-1])]
    line = {"color": FRONT_COLOUR, "width": 2, "shape": "hv"}
    so_far: dict[str, Any] = {"type": "scatter", "mode": "lines", "name": "best so far"}
    data = [{**so_far, "x": x, "y": y, "line": line, "hoverinfo": "skip"}]
    for verdict in (Verdict.FITS, Verdict.PRUNED_SLOW):
        shown = [row for row in rows if trials[row]["verdict"] == verdict]
        marker = {"color": MARKS[verdict].colour, "symbol": MARKS[verdict].symbol, "size": 7}
        data += [trace_of(VERDICT_LABELS[verdict], shown, "@number", f"@{column}", marker=marker)]
    title = {"text": escape(document["columns"][column]["label"]), "standoff": 10}
    across = {"title": {"text": "trial"}, "dtick": 1 if len(trials) <= 10 else None}
    axes = {"xaxis": across, "yaxis": {"title": title, "tickformat": ",~r"}}
    return {
        "data": [trace for trace in data if trace.get("rows", True)],
        "layout": framed(300) | axes,
    }


def _slices(document: Mapping[str, Any], column: str, rows: Sequence[int]) -> dict[str, Any]:
    down = -(-len(document["axes"]) // _ACROSS)
    grid = {"columns": _ACROSS, "rows": down, "pattern": "independent", "xgap": 0.22, "ygap": 0.42}
    layout: dict[str, Any] = framed(90 + 230 * down) | {"showlegend": False, "grid": grid}
    marker = {"color": "@number", "colorscale": [[0, WINNER_COLOUR], [1, _BLUE]], "size": 6}
    data = []
    for place, axis in enumerate(document["axes"]):
        own = "" if place == 0 else str(place + 1)
        name, ticks = escape(axis["label"]), _ticks(axis)
        layout[f"xaxis{own}"] = {
            "title": {"text": name, "standoff": 6},
            "range": [-0.5, len(axis["values"]) - 0.5],
            "tickvals": list(ticks),
            "ticktext": list(ticks.values()),
        }
        layout[f"yaxis{own}"] = {"tickformat": "~s", "matches": "y" if own else None}
        on = {"xaxis": f"x{own}", "yaxis": f"y{own}", "marker": marker}
        data.append(trace_of(name, rows, f"@at.{place}", f"@{column}", **on))
    first = layout.setdefault("yaxis", {})
    first["title"] = {"text": _in_lines(document["columns"][column]["label"])}
    return {"data": data, "layout": layout}


def _in_lines(label: str) -> str:
    return "<br>".join(map(escape, wrap(label, _LETTERS)))


def _ticks(axis: Mapping[str, Any]) -> dict[int, str]:
    """Return the places on a setting's axis that are named, not too many, with their names."""
    values = axis["values"]
    places = range(0, len(values), -(-len(values) // _TICKS_MOST))
    return {place: escape(_value_words(values[place])) for place in places}


def _value_words(value: Any) -> str:
    match value:
        case None:
            return units.DASH
        case bool():
            return str(value).lower()
        case float():
            return f"{value:g}"
        case _:
            return units.short(value)


def _parallel(document: Mapping[str, Any], column: str, rows: Sequence[int]) -> dict[str, Any]:
    """Return lines through an axis for the value and one for each setting, the best on top."""
    axes, trials = document["axes"], document["trials"]
    rows = sorted(rows, key=lambda row: _merit(document, column, row))
    reached = [trials[row][column] for row in rows]
    # All may have reached the same.
    low, span = min(reached), max(reached) - min(reached) or 1.0
    spans = [len(axis["values"]) - 1 for axis in axes]
    path = [{"of": f"@{column}", "low": low, "span": span}]
    path += [{"of": f"@at.{place}", "low": 0, "span": last} for place, last in enumerate(spans)]
    starts = [round((1 - share) * (len(rows) - 1)) for share, *_ in _SHARES]
    data = [
        trace_of(name, rows[start:end], mode="lines", path=path, line=line, opacity=opacity)
        for (_, name, line, opacity), start, end in zip(
            _SHARES, starts, [*starts[1:], len(rows)], strict=True
        )
        if start < end
    ]
    values = [low + quarter * span / 4 for quarter in range(5)]
    named = [{n / 4: units.rate(v) if low >= 100 else f"{v:.3g}" for n, v in enumerate(values)}]
    named += [
        {n / last: text for n, text in _ticks(axis).items()}
        for axis, last in zip(axes, spans, strict=True)
    ]
    text = {"xanchor": "left", "xshift": 3, "yshift": 7, "showarrow": False, "font": {"size": 11}}
    names = [document["columns"][column]["label"], *(axis["label"] for axis in axes)]
    across = {"tickvals": list(range(len(names))), "ticktext": list(map(_in_lines, names))}
    across |= {"range": [-0.5, len(names) - 0.5], "tickangle": 0, "zeroline": False}
    layout = framed(420) | {
        "xaxis": across,
        "yaxis": {"visible": False, "range": [-0.05, 1.05]},
        "annotations": [
            {"x": place, "y": y, "text": words, **text}
            for place, ticks in enumerate(named)
            for y, words in ticks.items()
        ],
    }
    return {"data": data, "layout": layout}
