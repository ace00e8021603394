"""What is given up for what: the Pareto front of any two numbers of a trial.

What has no speed is never drawn as if it had one: it is in the lane of how it ended, at the memory
that it needs. The page lets two axes and a class be chosen; of a study of speed alone it begins
with the class of the winner, as that is recommended within it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Mapping, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from qlora_sweep.reports.document import AXES, TrialTable
from qlora_sweep.reports.figures import (
    AMBER,
    BLUE,
    FADED,
    GREEN,
    MARKS,
    PageFigure,
    Section,
    dashed,
    digits,
    framed,
    whiskers,
)
from qlora_sweep.reports.words import VERDICT_LABELS
from qlora_sweep.storage.ranking import fitting
from qlora_sweep.storage.records import TrialRecord, Verdict, predicted_need

MEMORY = "peak_allocated"
_MEASURED = (Verdict.FITS, Verdict.PRUNED_SLOW)
_CAPTION = (
    "The line joins the trials of the class that no other of it beats in both numbers, and the "
    "winner; its labels are trial numbers. "
    "What was stopped as too slow is hollow. Below, in lanes, what was not measured, at the "
    "memory that it needs: an arrow where it needs at least that, a question mark where nothing "
    "is known. A box drawn around marks lists them alone in the table of all trials."
)


def front_of(document: TrialTable) -> Section | None:
    """Return the section of the front; None where nothing was tried."""
    view = document.view
    columns = document.columns
    if not document.records:
        return None
    candidates = _candidates(document)
    y = next(filter(columns.__contains__, AXES), "tokens_per_second")
    names = columns["class"].values
    classes = sorted(set(names))
    chosen = ""
    if view.winner is not None and view.is_for_speed_alone and len(classes) > 1:
        chosen = names[document.rows[view.winner.number]]
    # The trials on the front of ``first axis|second|class``; the class is empty for all.
    views = {}
    front: list[int] = []
    for axes in itertools.combinations(document.axes, 2):
        for name in [""] + classes:
            of_class = [row for row in candidates if name in ("", names[row])]
            rows = pareto(document, of_class, axes)
            views["|".join(axes + (name,))] = [document.records[row].number for row in rows]
            if axes == (y, MEMORY) and name == chosen:
                front = rows
    title = "How far is each from fitting?"
    if candidates:
        title = "What do I give up for less memory, money or rank?"
    return Section(
        title=title,
        figures=[_page_figure(document, front, y)],
        chosen=chosen,
        axes=document.axes,
        classes=classes,
        x=MEMORY,
        y=y,
        views=views,
    )


def _candidates(document: TrialTable) -> list[int]:
    """Return the rows of what fits, each configuration once, and of what was stopped as slow."""
    of_space = document.view.of_space
    rows = [document.rows[record.number] for record in fitting(of_space)]
    for record in of_space:
        if record.verdict is Verdict.PRUNED_SLOW:
            rows.append(document.rows[record.number])
    return rows


def _page_figure(document: TrialTable, front: Sequence[int], y: str) -> PageFigure:
    """Return the drawing and its table, which begins with the winner."""
    columns = []
    heads = []
    for key, column in document.columns.items():
        if key in ("number", "changes") or key in AXES:
            columns.append(column)
            heads.append(column.label)
    rows = list(front)
    winner = document.view.winner
    if winner is not None:
        rows.sort(key=lambda row: row != document.rows[winner.number])
    return PageFigure(
        "front",
        "Speed, memory, money, capacity",
        _CAPTION,
        _figure(document, front[::-1], y),
        heads=tuple(heads),
        rows=tuple(tuple(column.pairs[row][1] for column in columns) for row in rows),
    )


def pareto(document: TrialTable, rows: Sequence[int], axes: tuple[str, str]) -> list[int]:
    """Return the rows that no other beats in one column and matches in both, the best first.

    The winner is among them in speed and memory: what beats it there is as good but for a tie, and
    less plain, or was not measured again.
    """
    first = document.columns[axes[0]].values
    second = document.columns[axes[1]].values
    points = []
    for row in rows:
        if first[row] is not None and second[row] is not None:
            points.append((_cost(axes[0], first[row]), _cost(axes[1], second[row]), row))
    winner = document.view.winner
    kept = None
    if winner is not None and axes == (document.speed_key, MEMORY):
        kept = document.rows[winner.number]
    front: list[int] = []
    newest = None
    least = math.inf
    for x, y, row in sorted(points):
        # What is better in the second column than all that are better in the first, and its equals.
        if y < least:
            newest = (x, y)
            least = y
        if (x, y) == newest or row == kept:
            front.append(row)
    return front


def _cost(axis: str, value: float) -> float:
    """Return a value turned so that less is better."""
    if AXES[axis]:
        return -value
    return value


def _figure(document: TrialTable, front: Sequence[int], y: str) -> go.Figure:
    """Return the chart: above what was measured, below a lane for each way to end without."""
    unmeasured: dict[Verdict, list[TrialRecord]] = {}
    for verdict in Verdict:
        of_verdict = [r for r in document.records if r.verdict is verdict and not r.measurement]
        if of_verdict:
            unmeasured[verdict] = of_verdict
    is_measured = y in document.columns
    height = 10
    if is_measured:
        height = 360
    lanes_height = 40 * len(unmeasured)
    lanes_share = lanes_height / (lanes_height + height)
    left, right = _edges(document, unmeasured)

    figure = go.Figure(layout=framed(height + lanes_height + 110))
    if is_measured:
        figure.add_traces(list(_measured(document, front, y)))
    for lane, (verdict, records) in enumerate(unmeasured.items()):
        figure.add_trace(_lane(document, lane, verdict, records, left))

    bottom = lanes_share
    anchor = "y"
    if unmeasured:
        bottom = lanes_share + 0.04
        anchor = "y2"
        figure.update_layout(yaxis2=_lanes_axis(unmeasured, lanes_share))
    title = {}
    if is_measured:
        title = {"text": escape(document.columns[y].label)}
    figure.update_layout(
        # In ratios, so that what is far beyond the budget stays apart.
        xaxis={
            "type": "log",
            "title": {"text": f"peak allocated memory ({document.unit.name})"},
            "range": [math.log10(left), math.log10(right)],
            "tickvals": [n * 10.0**power for power in range(-3, 7) for n in (1, 2, 5)],
            "anchor": anchor,
        },
        yaxis={
            "domain": [bottom, 1],
            "rangemode": "tozero",
            "tickformat": ",~r",
            "title": title,
            "visible": is_measured,
        },
        dragmode="select",
        shapes=[dashed(_budget(document))],
        annotations=[_budget_label(document, left, right, bottom)],
    )
    return figure


def _budget(document: TrialTable) -> float:
    return document.in_unit(document.view.gpu.budget_bytes)


def _edges(
    document: TrialTable, unmeasured: Mapping[Verdict, Sequence[TrialRecord]]
) -> tuple[float, float]:
    """Return the left and the right edge of the chart, in its unit of memory."""
    sizes = [_budget(document)]
    if MEMORY in document.columns:
        sizes += filter(None, document.columns[MEMORY].values)
    for records in unmeasured.values():
        for record in records:
            size, _ = _need(document, record)
            if size:
                sizes.append(size)
    return 0.85 * min(sizes), 1.08 * max(sizes)


def _lanes_axis(
    unmeasured: Mapping[Verdict, Sequence[TrialRecord]], share: float
) -> dict[str, Any]:
    """Return the axis of the lanes, each with its verdict and count; they have a share of the
    chart's height."""
    ticks = [f"{VERDICT_LABELS[verdict]}: {len(of):,}" for verdict, of in unmeasured.items()]
    return {
        "tickvals": list(range(len(ticks))),
        "ticktext": ticks,
        "zeroline": False,
        "range": [len(ticks) - 0.5, -0.5],
        "domain": [0, share],
        "fixedrange": True,
    }


def _budget_label(document: TrialTable, left: float, right: float, bottom: float) -> dict[str, Any]:
    """Return what stands beside the line of the budget, on the side with more room."""
    budget = _budget(document)
    anchor = "left"
    shift = 4
    if math.log(budget / left) > 0.7 * math.log(right / left):
        anchor = "right"
        shift = -4
    return {
        "x": math.log10(budget),
        # Where speeds are nothing no mark is.
        "y": bottom,
        "yref": "paper",
        "yanchor": "bottom",
        "text": f"budget {budget:.2f} {document.unit.name}",
        "showarrow": False,
        "xanchor": anchor,
        "xshift": shift,
    }


def _lane(
    document: TrialTable, lane: int, verdict: Verdict, records: Sequence[TrialRecord], left: float
) -> go.Scatter:
    """Return the marks of what ended in one way without a measurement, by what it needs.

    Args:
        document: the trials.
        lane: its place from above.
        verdict: how they ended.
        records: those trials.
        left: the left edge of the figure, in its unit: at it is what is not known.
    """
    numbers = []
    needs = []
    heights = []
    marks = []
    hovers = []
    for place, record in enumerate(records):
        size, is_lower_bound = _need(document, record)
        if size is None:
            size = 1.03 * left
            mark = "?"
            hover = "what it needs is not known"
        elif is_lower_bound:
            mark = "→"
            hover = f"needs at least {size:.4g} {document.unit.name}"
        else:
            mark = ""
            hover = f"needs {size:.4g} {document.unit.name}"
        offset = 0.0
        if len(records) > 1:
            # Side by side where they need the same.
            offset = ((place * 0.618034) % 1 - 0.5) * 0.62
        numbers.append(record.number)
        needs.append(size)
        heights.append(lane + offset)
        marks.append(mark)
        hovers.append(hover)
    return go.Scatter(
        x=digits(needs),
        y=digits(heights),
        yaxis="y2",
        name=VERDICT_LABELS[verdict],
        customdata=numbers,
        meta="lane",
        mode="markers+text",
        text=marks,
        textposition="middle right",
        marker=MARKS[verdict].marker(9),
        hovertext=hovers,
        hovertemplate="trial %{customdata}: %{hovertext}<extra>%{fullData.name}</extra>",
        showlegend=False,
    )


def _need(document: TrialTable, record: TrialRecord) -> tuple[float | None, bool]:
    """Return what a trial without a speed needs, and whether that is a lower bound."""
    need = document.view.need_of(record)
    if need is not None:
        return document.in_unit(need.allocated_bytes), need.is_lower_bound
    predicted = predicted_need(record)
    if predicted is not None:
        return document.in_unit(predicted), False
    return None, False


def _intervals(document: TrialTable, rows: Sequence[int]) -> dict[str, Any]:
    """Return the 95 % intervals of measured speeds as error bars; none where there are none."""
    speeds = []
    ends = []
    for row in rows:
        trial = document.view.measured_trials[document.records[row].number]
        measured = trial.measurement
        speed = measured.tokens_per_second
        speeds.append(speed)
        ends.append(measured.speed_interval or (speed, speed))
    return whiskers(speeds, ends)


def _apart(front: Sequence[int], across: Sequence[Any], up: Sequence[Any]) -> list[int]:
    """Return the rows whose numbers have room beside each other, the fastest first."""
    named: list[int] = []
    for row in reversed(front):
        for other in named:
            is_near = abs(math.log(across[row] / across[other])) < 0.2
            if is_near and abs(up[row] - up[other]) <= 0.08 * max(up[row], up[other]):
                break
        else:
            named.append(row)
    return named


def _measured(document: TrialTable, front: Sequence[int], y: str) -> Iterator[go.Scatter]:
    """Yield what was measured: all of it faded, the front joined, winner and baseline marked."""
    records = document.records
    view = document.view
    across = document.columns[MEMORY].values
    up = document.columns[y].values

    def trace(
        name: str, rows: Sequence[int], meta: str, *, mode: str = "markers", **look: Any
    ) -> go.Scatter:
        drawn = []
        numbers = []
        for row in rows:
            if across[row] is not None and up[row] is not None:
                drawn.append(row)
                numbers.append(records[row].number)
        return go.Scatter(
            x=list(map(across.__getitem__, drawn)),
            y=list(map(up.__getitem__, drawn)),
            customdata=numbers,
            name=name,
            meta=meta,
            mode=mode,
            hovertemplate="trial %{customdata}<br>%{y:,.4~r} at %{x:,.4~r}<extra></extra>",
            **look,
        )

    for verdict in _MEASURED:
        rows = [row for row, record in enumerate(records) if record.verdict is verdict]
        if rows:
            marker = {"color": FADED, "symbol": MARKS[verdict].symbol, "size": 7}
            yield trace(VERDICT_LABELS[verdict], rows, "others", marker=marker)
    named = _apart(front, across, up)
    symbols = []
    numbers = []
    for row in front:
        symbols.append(MARKS[records[row].verdict].symbol)
        number = ""
        if row in named:
            number = str(records[row].number)
        numbers.append(number)
    intervals = None
    if y == "tokens_per_second":
        intervals = _intervals(document, front)
    yield trace(
        "front: none is better in both",
        front,
        "front",
        mode="lines+markers+text",
        line={"color": GREEN, "width": 2, "shape": "hv"},
        marker={"color": BLUE, "size": 10, "symbol": symbols},
        text=numbers,
        textposition="top left",
        error_y=intervals,
    )
    star = {"symbol": "star", "size": 17, "color": AMBER}
    diamond = {"symbol": "diamond-open", "size": 14, "color": AMBER}
    looks = (("winner", view.winner, star), ("baseline", view.measured_baseline, diamond))
    for name, trial, marker in looks:
        if trial is not None:
            yield trace(name, [document.rows[trial.number]], "others", marker=marker)
