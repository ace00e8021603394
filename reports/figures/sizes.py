"""Owns the figure of micro-batch against sequence length: what fits, how fast, and what does not.

Pure: a study's snapshot in, a plotly figure out. A cell has a speed, or says why not, or is blank.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import plotly.graph_objects as go

from reports import units
from reports.figures.style import HOVER_TEMPLATE, hover, measured_trials
from reports.outcomes import VERDICT_LABELS
from storage.definition import StudySnapshot
from storage.ranking import fitting, rank_study
from storage.records import OUT_OF_MEMORY, TrialRecord, Verdict

ROW_PIXELS = 30
PIXELS_MAX = 900
# Light enough at both ends for dark letters, in either theme.
_SPEED_COLOURS = [[0, "#e6f1fa"], [1, "#4ba3dd"]]
_INK = "#1c2128"
_REFUSED_COLOUR = "#c9cdd3"
_TRIALS_NAMED = 8


@dataclass(frozen=True)
class Cell:
    """What the trials of one micro-batch and sequence length came to."""

    text: str
    tokens_per_second: float | None
    """The best that fitted, measured to the end or in part; None where nothing did."""
    hovertext: str


def sizes_figure(snapshot: StudySnapshot) -> go.Figure:
    """Draw the best tokens/s of each micro-batch and sequence length that was tried."""
    cells = cells_of(snapshot)
    lengths = sorted({length for length, _ in cells})
    batches = sorted({batch for _, batch in cells})
    figure = go.Figure()
    for has_speed in (True, False):
        chosen = {
            k: cell
            for k, cell in cells.items()
            if (cell.tokens_per_second is not None) is has_speed
        }
        if chosen:
            _add_cells(figure, chosen, lengths=lengths, batches=batches, has_speed=has_speed)
    figure.update_layout(
        height=max(240, 100 + min(ROW_PIXELS * len(batches), PIXELS_MAX)),
        margin={"l": 8, "r": 8, "t": 16, "b": 52},
        xaxis=_axis("sequence length", lengths),
        yaxis=_axis("micro-batch", batches),
    )
    return figure


def cells_of(snapshot: StudySnapshot) -> dict[tuple[int, int], Cell]:
    """Return the cell of each (sequence length, micro-batch) that a trial of the space was at.

    A baseline that the space does not hold differs in what the space fixes: its speed would be
    taken for that of another configuration.
    """
    budget_bytes = snapshot.definition.target.budget_bytes
    trials: dict[tuple[int, int], list[TrialRecord]] = defaultdict(list)
    for record in rank_study(snapshot).of_space:
        trials[record.config.seq_len, record.config.micro_batch_size].append(record)
    return {size: _cell(records, budget_bytes) for size, records in trials.items()}


def _cell(records: Sequence[TrialRecord], budget_bytes: int) -> Cell:
    best = next(iter(fitting(records)), None)
    if best is not None and best.measurement is not None:
        rate = best.measurement.tokens_per_second
        tried = f"best of {units.plural(len(records), 'trial')}"
        hovertext = f"{tried}<br>{hover(best, budget_bytes=budget_bytes)}"
        return Cell(units.short_rate(rate), rate, hovertext)
    partial = measured_trials(records)
    if partial:
        slow, measured = max(partial, key=lambda pair: pair[1].tokens_per_second)
        rate = measured.tokens_per_second
        hovertext = f"{VERDICT_LABELS[slow.verdict]}<br>{hover(slow, budget_bytes=budget_bytes)}"
        return Cell(f"~{units.short_rate(rate)}", rate, hovertext)
    verdicts = {record.verdict for record in records}
    names = "<br>".join(
        f"trial {r.number}: {VERDICT_LABELS[r.verdict]}" for r in records[:_TRIALS_NAMED]
    )
    if verdicts <= OUT_OF_MEMORY:
        text = "✕ OOM" if Verdict.OOM in verdicts else "✕ over budget"
        return Cell(text, None, f"does not fit<br>{names}")
    return Cell("no result", None, f"no measurement<br>{names}")


def _add_cells(
    figure: go.Figure,
    cells: Mapping[tuple[int, int], Cell],
    *,
    lengths: Sequence[int],
    batches: Sequence[int],
    has_speed: bool,
) -> None:
    rows = [[cells.get((length, batch)) for length in lengths] for batch in batches]
    figure.add_heatmap(
        x=[str(length) for length in lengths],
        y=[str(batch) for batch in batches],
        z=[[_level(cell, has_speed=has_speed) for cell in row] for row in rows],
        text=[[cell.text if cell else "" for cell in row] for row in rows],
        hovertext=[[cell.hovertext if cell else "" for cell in row] for row in rows],
        texttemplate="%{text}",
        hovertemplate=HOVER_TEMPLATE,
        hoverongaps=False,
        xgap=2,
        ygap=2,
        textfont={"color": _INK},
        colorscale=_SPEED_COLOURS if has_speed else [[0, _REFUSED_COLOUR], [1, _REFUSED_COLOUR]],
        showscale=False,
    )


def _level(cell: Cell | None, *, has_speed: bool) -> float | None:
    if cell is None:
        return None
    return cell.tokens_per_second if has_speed else 1.0


def _axis(title: str, values: Sequence[int]) -> dict[str, object]:
    return {
        "type": "category",
        "title": {"text": title},
        "showgrid": False,
        "categoryorder": "array",
        "categoryarray": [str(value) for value in values],
    }
