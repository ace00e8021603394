"""What is given up for what: the Pareto front of any two numbers of a trial.

What has no speed is never drawn as if it had one: it is in the lane of how it ended, at the memory
that it needs. The page lets two axes and a class be chosen; of a study of speed alone it begins
with the class of the winner, as that is recommended within it.
"""

from __future__ import annotations

import itertools
import math
from collections.abc import Iterator, Sequence
from html import escape
from typing import Any

import plotly.graph_objects as go

from qlora_sweep.reports.document import AXES, Document
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
from qlora_sweep.storage.ranking import fitting, measured_of
from qlora_sweep.storage.records import TrialRecord, Verdict, need_of, predicted_need

MEMORY = "peak_allocated"
_MEASURED = (Verdict.FITS, Verdict.PRUNED_SLOW)
_CAPTION = (
    "The line joins the trials of the class that no other of it beats in both numbers, and the "
    "winner; its labels are trial numbers. "
    "What was stopped as too slow is hollow. Below, in lanes, what was not measured, at the "
    "memory that it needs: an arrow where it needs at least that, a question mark where nothing "
    "is known. A box drawn around marks lists them alone in the table of all trials."
)


def front_of(document: Document) -> Section | None:
    """Return the section of the front; None where nothing was tried."""
    columns = document.columns
    if not document.records:
        return None
    slow = (r for r in document.view.ranking.of_space if r.verdict is Verdict.PRUNED_SLOW)
    numbers = {record.number for record in (*fitting(document.view.ranking.of_space), *slow)}
    candidates = [row for number, row in document.rows.items() if number in numbers]
    y = next((key for key in AXES if key in columns), "tokens_per_second")
    names = columns["class"].values
    classes = sorted(set(names))
    winner = document.view.ranking.winner
    chosen = ""
    if winner is not None and document.view.ranking.is_for_speed_alone and len(classes) > 1:
        chosen = names[document.rows[winner.number]]
    # The trials on the front of ``first axis|second|class``; the class is empty for all.
    views = {}
    for axes in itertools.combinations(document.axes, 2):
        for name in ("", *classes):
            own = [row for row in candidates if name in ("", names[row])]
            found = pareto(document, own, axes)
            views["|".join((*axes, name))] = [document.records[row].number for row in found]
    rows = [document.rows[number] for number in views.get(f"{y}|{MEMORY}|{chosen}", ())]
    first = None if winner is None else document.rows[winner.number]
    shown = [key for key in columns if key in ("number", "changes", *AXES)]
    figure = PageFigure(
        "front",
        "Speed, memory, money, capacity",
        _CAPTION,
        _figure(document, rows[::-1], y),
        heads=tuple(columns[key].label for key in shown),
        rows=tuple(
            tuple(columns[key].pairs[row][1] for key in shown)
            for row in sorted(rows, key=lambda row: row != first)
        ),
    )
    title = "What do I give up for less memory, money or rank?"
    title = title if candidates else "How far is each from fitting?"
    drawn = {"axes": document.axes, "classes": classes, "x": MEMORY, "y": y, "views": views}
    return Section(title=title, figures=[figure], chosen=chosen, **drawn)


def pareto(document: Document, rows: Sequence[int], axes: tuple[str, str]) -> list[int]:
    """Return the rows that no other beats in one column and matches in both, the best first.

    The winner is among them in speed and memory: what beats it there is as good but for a tie, and
    less plain, or was not measured again.
    """
    signs = [-1 if AXES[axis] else 1 for axis in axes]
    columns = [document.columns[axis].values for axis in axes]
    known = (row for row in rows if all(of[row] is not None for of in columns))
    points = [(*(s * of[row] for s, of in zip(signs, columns, strict=True)), row) for row in known]
    winner = document.view.ranking.winner
    kept = None
    if winner is not None and axes == (document.speed_key, MEMORY):
        kept = document.rows[winner.number]
    found, newest, least = list[int](), None, math.inf
    for x, y, row in sorted(points):
        # What is better in the second column than all that are better in the first, and its equals.
        if y < least:
            newest, least = (x, y), y
        if (x, y) == newest or row == kept:
            found.append(row)
    return found


def _figure(document: Document, front: Sequence[int], y: str) -> go.Figure:
    records, columns = document.records, document.columns
    budget = document.view.gpu.budget_bytes / document.unit.bytes
    ended = {record.verdict for record in records if record.measurement is None}
    lanes = [verdict for verdict in Verdict if verdict in ended]
    below, tall = 40 * len(lanes), 360 if y in columns else 10
    figure = go.Figure(layout=framed(tall + below + 110))
    if y in columns:
        figure.add_traces(list(_measured(document, front, y)))
    peaks = [size for size in columns[MEMORY].values if size] if MEMORY in columns else []
    needs = {r.number: _need(document, r) for r in records if r.measurement is None}
    known = [*peaks, *(size for size, _ in needs.values() if size), budget]
    left = 0.85 * min(known)
    for lane, verdict in enumerate(lanes):
        here = [r for r in records if r.verdict is verdict and r.measurement is None]
        sizes = [needs[record.number] for record in here]
        # Side by side where they need the same.
        spread = (((n * 0.618034) % 1 - 0.5) * 0.62 for n in range(len(here)))
        figure.add_scatter(
            x=digits(1.03 * left if size is None else size for size, _ in sizes),
            y=digits(lane + (offset if len(here) > 1 else 0) for offset in spread),
            yaxis="y2",
            name=VERDICT_LABELS[verdict],
            customdata=[record.number for record in here],
            meta="lane",
            mode="markers+text",
            text=["?" if size is None else "→" if bound else "" for size, bound in sizes],
            textposition="middle right",
            marker={"color": MARKS[verdict].colour, "symbol": MARKS[verdict].symbol, "size": 9},
            hovertext=[
                "what it needs is not known"
                if size is None
                else f"needs {'at least ' if bound else ''}{size:.4g} {document.unit.name}"
                for size, bound in sizes
            ],
            hovertemplate="trial %{customdata}: %{hovertext}<extra>%{fullData.name}</extra>",
            showlegend=False,
        )
    share = below / (below + tall)
    is_right = math.log(budget / left) > 0.7 * math.log(1.08 * max(known) / left)
    up = {"text": escape(columns[y].label)} if y in columns else {}
    figure.update_layout(
        # In ratios, so that what is far beyond the budget stays apart.
        xaxis={
            "type": "log",
            "title": {"text": f"peak allocated memory ({document.unit.name})"},
            "range": [math.log10(left), math.log10(1.08 * max(known))],
            "tickvals": [n * 10.0**power for power in range(-3, 7) for n in (1, 2, 5)],
            "anchor": "y2" if lanes else "y",
        },
        yaxis={
            "domain": [share + (0.04 if lanes else 0), 1],
            "rangemode": "tozero",
            "tickformat": ",~r",
            "title": up,
            "visible": y in columns,
        },
        dragmode="select",
        shapes=[dashed(budget)],
        annotations=[
            {
                "x": math.log10(budget),
                # Where speeds are nothing no mark is.
                "y": share + (0.04 if lanes else 0),
                "yref": "paper",
                "yanchor": "bottom",
                "xanchor": "right" if is_right else "left",
                "xshift": -4 if is_right else 4,
                "text": f"budget {budget:.2f} {document.unit.name}",
                "showarrow": False,
            }
        ],
    )
    if lanes:
        counts = [sum(r.verdict is v and r.measurement is None for r in records) for v in lanes]
        ticks = [f"{VERDICT_LABELS[v]}: {n:,}" for v, n in zip(lanes, counts, strict=True)]
        rows = {"tickvals": list(range(len(lanes))), "ticktext": ticks, "zeroline": False}
        rows |= {"range": [len(lanes) - 0.5, -0.5], "domain": [0, share], "fixedrange": True}
        figure.update_layout(yaxis2=rows)
    return figure


def _need(document: Document, record: TrialRecord) -> tuple[float | None, bool]:
    """Return what a trial without a speed needs, and whether that is a lower bound."""
    need = need_of(record, budget_bytes=document.view.gpu.budget_bytes)
    if need is not None:
        return need.allocated_bytes / document.unit.bytes, need.is_lower_bound
    predicted = predicted_need(record)
    return None if predicted is None else predicted / document.unit.bytes, False


def _intervals(document: Document, rows: Sequence[int]) -> dict[str, Any]:
    """Return the 95 % intervals of measured speeds as error bars; none where there are none."""
    # What was measured again has the speed and the interval of those runs.
    effective = {record.number: record for record in document.view.ranking.records}
    searched = (document.records[row] for row in rows)
    measured = [measured_of(effective.get(record.number, record)) for record in searched]
    speeds = [one.tokens_per_second for one in measured]
    ends = [one.speed_interval or (one.tokens_per_second,) * 2 for one in measured]
    return whiskers(speeds, ends)


def _apart(front: Sequence[int], across: Sequence[Any], up: Sequence[Any]) -> list[int]:
    """Return the rows whose numbers have room beside each other, the fastest first."""
    named: list[int] = []
    for row in reversed(front):
        near = (other for other in named if abs(math.log(across[row] / across[other])) < 0.2)
        if all(abs(up[row] - up[other]) > 0.08 * max(up[row], up[other]) for other in near):
            named.append(row)
    return named


def _measured(document: Document, front: Sequence[int], y: str) -> Iterator[go.Scatter]:
    """Yield what was measured: all of it faded, the front joined, winner and baseline marked."""
    columns = document.columns
    records = document.records
    rows = document.rows
    ranking = document.view.ranking
    across, up = (columns[key].values for key in (MEMORY, y))

    def trace(name: str, chosen: Sequence[int], meta: str, **look: Any) -> go.Scatter:
        chosen = [row for row in chosen if across[row] is not None and up[row] is not None]
        return go.Scatter(
            x=[across[row] for row in chosen],
            y=[up[row] for row in chosen],
            customdata=[records[row].number for row in chosen],
            name=name,
            meta=meta,
            hovertemplate="trial %{customdata}<br>%{y:,.4~r} at %{x:,.4~r}<extra></extra>",
            **({"mode": "markers"} | look),
        )

    for verdict in _MEASURED:
        chosen = [row for row, record in enumerate(records) if record.verdict is verdict]
        marker = {"color": FADED, "symbol": MARKS[verdict].symbol, "size": 7}
        if chosen:
            yield trace(VERDICT_LABELS[verdict], chosen, "others", marker=marker)
    symbols = [MARKS[records[row].verdict].symbol for row in front]
    named = _apart(front, across, up)
    yield trace(
        "front: none is better in both",
        front,
        "front",
        mode="lines+markers+text",
        line={"color": GREEN, "width": 2, "shape": "hv"},
        marker={"color": BLUE, "size": 10, "symbol": symbols},
        text=[str(records[row].number) if row in named else "" for row in front],
        textposition="top left",
        error_y=_intervals(document, front) if y == "tokens_per_second" else None,
    )
    looks = (
        ("winner", ranking.winner, {"symbol": "star", "size": 17, "color": AMBER}),
        ("baseline", ranking.baseline, {"symbol": "diamond-open", "size": 14, "color": AMBER}),
    )
    for name, record, marker in looks:
        if record is not None:
            yield trace(name, [rows[record.number]], "others", marker=marker)
