"""The figure of what is given up for what: the Pareto front of any two numbers of a trial.

What has no speed is never drawn as if it had one: it is in the lane of how it ended, at the memory
that it needs. The page lets two axes and a capacity class be chosen; each choice is a `View`.
"""

from __future__ import annotations

import itertools
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import asdict, dataclass
from html import escape
from typing import Any

import numpy as np

from reports import units
from reports.figures.figure import MarkName, trace_of
from reports.figures.memory_scale import MEMORY, MemoryScale, Trial, need_of
from reports.figures.style import (
    FADED_COLOUR,
    FRONT_COLOUR,
    MAIN_PIXELS,
    MARKS,
    OUTLINE,
    WINNER_COLOUR,
    panels,
    whiskers,
)
from search_spaces.config import CAPACITY_KEYS, SIZE_KEYS
from search_spaces.redaction import shown
from storage.records import Verdict

MEASURED_SPEED = "tokens_per_second"
SPEEDS = ("target_tokens_per_second", MEASURED_SPEED)
"""What a front is about where it is known, the first of them before the second."""
LABEL_CHARACTERS = 34
_MEASURED = (Verdict.FITS, Verdict.PRUNED_SLOW)
_NAMED_MOST = 8
_CLOSE = (0.03, 0.05)
"""Of a picture's width and height: the names of two marks that are closer would meet."""
_EMPTY_PIXELS = 10
"""Of the upper panel where nothing was measured."""
_JITTER = 0.62
_GOLDEN = 0.618034


@dataclass(frozen=True)
class View:
    """The front of two columns within a capacity class, or within all."""

    rows: tuple[int, ...]
    """Indices of its trials, from the best in the first column on."""
    labels: tuple[str, ...]
    """What sets each apart from the others of the front, in few words."""
    shared: str
    """What they have in common and the baseline has not; empty where that is nothing."""


def front_drawing(document: Mapping[str, Any], candidates: Sequence[int]) -> dict[str, Any]:
    """Return the front of speed and memory, with every trial that has no speed in a lane below.

    Args:
        document: `document_of` a study.
        candidates: indices of the trials that may be on a front.
    """
    trials: Sequence[Trial] = document["trials"]
    y = _speed_of(document)
    view = _view(document, candidates, (MEMORY, y))
    scale = MemoryScale.of(document)
    lanes = lanes_of(trials)
    is_measured = y in document["columns"]
    counts = [len(_rows_of(trials, verdict, is_measured=False)) for verdict in lanes]
    names = [f"{MARKS[v].lane}: {n:,}" for v, n in zip(lanes, counts, strict=True)]
    layout = panels(lanes=names, tall=MAIN_PIXELS if is_measured else _EMPTY_PIXELS)
    layout["xaxis"] |= scale.axis()
    if is_measured:
        layout["yaxis"]["title"] = {
            "text": escape(document["columns"][y]["label"]),
            "standoff": 10,
        }
    layout["shapes"], layout["annotations"] = scale.marks()
    return {
        "data": [
            *_measured_traces(trials, view, y=y),
            *_named_traces(document, y=y),
            *(_lane_trace(trials, verdict, lane, scale) for lane, verdict in enumerate(lanes)),
        ],
        "layout": layout,
    }


def front_names(document: Mapping[str, Any], rows: Sequence[int]) -> tuple[MarkName, ...]:
    """Return the marks of a front that a picture explains: its ends, and evenly between them.

    Up and to the left of a mark of the front there is room: nothing is better in both.
    """
    trials, y = document["trials"], _speed_of(document)
    wide = MemoryScale.of(document).budget
    tall = max((trials[row][y] for row in rows), default=0.0)
    settings = [document["recipe"] | trials[row]["config"] for row in rows]
    labels, _ = told_apart(settings, recipe=document["recipe"])
    step = max(1.0, (len(rows) - 1) / (_NAMED_MOST - 1))
    names: list[MarkName] = []
    for place in dict.fromkeys(round(n * step) for n in range(min(len(rows), _NAMED_MOST))):
        trial = trials[rows[place]]
        reached = f"{units.rate(trial[y])} tokens/s, {trial[MEMORY]:.2f} {document['memory_unit']}"
        words = f"trial {trial['number']}: {labels[place]}: {reached}"
        name = MarkName(trial[MEMORY], trial[y], str(trial["number"]), words)
        gaps = ((abs(name.x - other.x) / wide, abs(name.y - other.y) / tall) for other in names)
        if all(across >= _CLOSE[0] or up >= _CLOSE[1] for across, up in gaps):
            names.append(name)
    return tuple(names)


def front_controls(document: Mapping[str, Any], candidates: Sequence[int]) -> dict[str, Any]:
    """Return what the page needs to draw the figure by other axes or for one class.

    ``views`` by the two columns in the order of the document, and the class (empty for all).
    """
    scale = MemoryScale.of(document)
    shapes, annotations = scale.marks()
    in_class: dict[str, list[int]] = {name: [] for name in document["classes"]}
    for row in candidates:
        in_class[document["trials"][row]["class"]].append(row)
    of_class: dict[str, Sequence[int]] = {"": candidates, **in_class}
    return {
        "x": MEMORY,
        "y": _speed_of(document),
        "memory": MEMORY,
        "measured": {
            _name_of(verdict): _rows_of(document["trials"], verdict, is_measured=True)
            for verdict in _MEASURED
        },
        "symbols": {str(verdict): MARKS[verdict].symbol for verdict in _MEASURED},
        "memory_axis": scale.axis(),
        "shapes": shapes,
        "annotations": annotations,
        "lanes": [
            {"verdict": str(v), "label": MARKS[v].lane} for v in lanes_of(document["trials"])
        ],
        "views": {
            f"{a}|{b}|{name}": asdict(_view(document, rows, (a, b)))
            for a, b in itertools.combinations(document["columns"], 2)
            for name, rows in of_class.items()
        },
    }


def _speed_of(document: Mapping[str, Any]) -> str:
    return next((speed for speed in SPEEDS if speed in document["columns"]), SPEEDS[-1])


def _view(document: Mapping[str, Any], candidates: Sequence[int], columns: tuple[str, str]) -> View:
    trials: Sequence[Trial] = document["trials"]
    signs = [1 if _is_more_better(document, column) else -1 for column in columns]
    rows = pareto_rows(trials, candidates, columns, signs)
    settings = [document["recipe"] | trials[row]["config"] for row in rows]
    labels, shared = told_apart(settings, recipe=document["recipe"])
    most = LABEL_CHARACTERS
    short = [text if len(text) <= most else f"{text[: most - 1]}…" for text in labels]
    return View(tuple(rows), tuple(short), shared)


def _is_more_better(document: Mapping[str, Any], column: str) -> bool:
    known = document["columns"].get(column)
    return column != MEMORY if known is None else bool(known["more_is_better"])


def pareto_rows(
    trials: Sequence[Trial], rows: Sequence[int], columns: tuple[str, str], signs: Sequence[int]
) -> list[int]:
    """Return the rows that no other beats in one column and matches in both.

    Args:
        trials: all of the page's.
        rows: indices of those that may be on the front.
        columns: what they are compared by; who lacks one is left out.
        signs: 1 where more of a column is better, -1 where less is.
    """
    first, second = columns
    known = [row for row in rows if first in trials[row] and second in trials[row]]
    if not known:
        return []
    x = -signs[0] * np.array([trials[row][first] for row in known], dtype=float)
    y = -signs[1] * np.array([trials[row][second] for row in known], dtype=float)
    order = np.lexsort((np.array(known), y, x))
    x, y = x[order], y[order]
    # What is better in the second column than all that are better in the first, and its equals.
    is_new = y < np.concatenate(([np.inf], np.minimum.accumulate(y)[:-1]))
    newest = np.maximum.accumulate(np.where(is_new, np.arange(len(x)), 0))
    is_on_front = (x == x[newest]) & (y == y[newest])
    return [known[index] for index in order[is_on_front]]


def told_apart(
    settings: Sequence[Mapping[str, Any]], *, recipe: Mapping[str, Any]
) -> tuple[list[str], str]:
    """Return a short label for each configuration, and what all of them share over the recipe."""
    if not settings:
        return [], ""
    varying = [key for key in recipe if any(s[key] != settings[0][key] for s in settings)]
    common = [k for k in recipe if k not in varying and settings[0][k] != recipe[k]]
    shared = ", ".join(units.phrase(key, settings[0][key]) for key in common)
    keys = varying or common
    return [_label(one, keys) or "as the baseline" for one in settings], shared if varying else ""


def _label(setting: Mapping[str, Any], keys: Sequence[str]) -> str:
    is_sized = any(key in keys for key in SIZE_KEYS)
    size = [f"{setting['micro_batch_size']} × {setting['seq_len']}"] if is_sized else []
    first = [key for key in CAPACITY_KEYS if key in keys]
    rest = [key for key in keys if key not in (*SIZE_KEYS, *CAPACITY_KEYS)]
    # As a class is called: rank 8 on q,v.
    capacity = [units.phrase(key, setting[key]).removeprefix("adapters ") for key in first]
    others = [units.phrase(key, setting[key]) for key in rest]
    words = [*size, *([" ".join(capacity)] if capacity else []), *others]
    return shown(", ".join(words))


def _measured_traces(trials: Sequence[Trial], view: View, *, y: str) -> Iterator[dict[str, Any]]:
    """Yield what was measured: the others stand back, the front is joined and stands out."""
    place = (f"@{MEMORY}", f"@{y}")
    for verdict in _MEASURED:
        rows = _rows_of(trials, verdict, is_measured=True)
        marker = {"color": FADED_COLOUR, "symbol": MARKS[verdict].symbol, "size": 7}
        if rows:
            others = [row for row in rows if row not in view.rows]
            yield trace_of(_name_of(verdict), others, *place, meta="others", marker=marker)
    line = {"color": FRONT_COLOUR, "width": 2, "shape": "hv"}
    look: dict[str, Any] = {"meta": "line", "mode": "lines", "line": line, "hoverinfo": "skip"}
    yield trace_of("front: none is better in both", view.rows, *place, **look)
    symbols = [MARKS[Verdict(trials[row]["verdict"])].symbol for row in view.rows]
    marker = {"color": MARKS[Verdict.FITS].colour, "size": 10, "symbol": symbols}
    look = {"meta": "front", "showlegend": False, "marker": marker}
    front = trace_of("on the front", view.rows, *place, **look)
    yield front | ({"error_y": _whiskers(trials, view)} if y == MEASURED_SPEED else {})


def _whiskers(trials: Sequence[Trial], view: View) -> dict[str, Any]:
    """Return the intervals of measured speeds; a prediction's are wide, and alike for all."""
    measured = [(trials[row], trials[row][MEASURED_SPEED]) for row in view.rows]
    low, high = f"{MEASURED_SPEED}_low", f"{MEASURED_SPEED}_high"
    ends = [(trial.get(low, speed), trial.get(high, speed)) for trial, speed in measured]
    return whiskers([speed for _, speed in measured], ends)


def _rows_of(trials: Sequence[Trial], verdict: Verdict, *, is_measured: bool) -> list[int]:
    """Return the trials of a verdict that have a speed, or those that have none."""
    return [
        row
        for row, trial in enumerate(trials)
        if trial["verdict"] == verdict and (MEASURED_SPEED in trial) == is_measured
    ]


def _name_of(verdict: Verdict) -> str:
    return MARKS[verdict].lane.replace("<br>", " ")


def _named_traces(document: Mapping[str, Any], *, y: str) -> Iterator[dict[str, Any]]:
    rows = {trial["number"]: row for row, trial in enumerate(document["trials"])}
    looks = {
        "winner": {"symbol": "star", "size": 17, "color": WINNER_COLOUR, "line": OUTLINE},
        "baseline": {"symbol": "diamond-open", "size": 14, "color": WINNER_COLOUR},
    }
    for name, marker in looks.items():
        named = [rows[number] for number in document["named"][name]]
        if named:
            yield trace_of(name, named, f"@{MEMORY}", f"@{y}", meta="named", marker=marker)


def lanes_of(trials: Sequence[Trial]) -> tuple[Verdict, ...]:
    """Return how the trials without a speed ended, in the order of `Verdict`."""
    ended = {trial["verdict"] for trial in trials if MEASURED_SPEED not in trial}
    return tuple(verdict for verdict in Verdict if verdict in ended)


def _lane_trace(
    trials: Sequence[Trial], verdict: Verdict, lane: int, scale: MemoryScale
) -> dict[str, Any]:
    """Return a lane's trials, side by side where they need the same; an arrow where it is more."""
    rows = _rows_of(trials, verdict, is_measured=False)
    needs = [need_of(trials[row]) for row in rows]
    bounds = [trials[row].get("need_is_lower_bound", False) for row in rows]
    mark = MARKS[verdict]
    pairs = zip(needs, bounds, strict=True)
    return trace_of(
        _name_of(verdict),
        rows,
        [scale.position(need) for need in needs],
        [lane + _offset(n, len(rows)) for n in range(len(rows))],
        meta="lane",
        mode="markers+text",
        showlegend=False,
        yaxis="y2",
        text=["?" if need is None else "→" if bound else "" for need, bound in pairs],
        textposition="middle right",
        textfont={"color": mark.colour, "size": 11},
        marker={"color": mark.colour, "symbol": mark.symbol, "size": 9},
    )


def _offset(index: int, count: int) -> float:
    """Return where in its lane a trial is, so that equals do not hide each other."""
    return ((index * _GOLDEN) % 1 - 0.5) * _JITTER if count > 1 else 0.0
