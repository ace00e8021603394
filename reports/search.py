"""How the search went and what was learned: history, slices, held-out losses."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from html import escape
from itertools import accumulate
from textwrap import wrap
from typing import Any

import plotly.graph_objects as go
from plotly.subplots import make_subplots

from qlora_sweep.reports.document import AXES, Document, setting_words
from qlora_sweep.reports.figures import (
    AMBER,
    BLUE,
    GREEN,
    MARKS,
    PageFigure,
    Section,
    digits,
    framed,
    whiskers,
)
from qlora_sweep.reports.sentences import rank_claim
from qlora_sweep.reports.words import VERDICT_LABELS, held_out
from qlora_sweep.search_spaces.config import KNOBS, TrialConfig
from qlora_sweep.storage.ranking import measured_of
from qlora_sweep.storage.records import Verdict

_TICKS_MOST = 8


def search_of(document: Document) -> Section | None:
    """Return how a search went, by the first of its objectives; None where fewer than two trials
    fitted."""
    objective = document.view.objectives[0]
    known = {"peak_memory": "peak_allocated", "tokens_per_second": document.speed_key}
    key: str = known.get(objective, objective)
    column = document.columns.get(key)
    if column is None:
        return None
    records, of_space = document.records, {r.number for r in document.view.ranking.of_space}
    rows = [
        row
        for row, value in enumerate(column.values)
        if value is not None and records[row].number in of_space
    ]
    fitting = [row for row in rows if records[row].verdict is Verdict.FITS]
    if len(fitting) < 2:
        return None
    axes = [_Axis.of(document, setting) for setting in TrialConfig.model_fields]
    axes = [axis for axis in axes if len(axis.values) > 1]
    figures = [_history(document, key, rows)]
    if axes:
        figures.append(_slices(document, key, fitting, axes))
    return Section(figures=figures)


@dataclass(frozen=True)
class _Axis:
    """A setting with its values in order: numbers rising, words the lean first."""

    label: str
    values: Sequence[Any]
    places: Sequence[int]
    """Of each trial's value among them."""

    @classmethod
    def of(cls, document: Document, key: str) -> _Axis:
        lean, known = KNOBS[key].lean_first, document.columns[key].values

        def order(value: Any) -> tuple[float, str]:
            if isinstance(value, bool | int | float):
                return float(value), ""
            return float(lean.index(value) if value in lean else len(lean)), str(value)

        values = sorted(set(known), key=order)
        at = {repr(value): place for place, value in enumerate(values)}
        return cls(KNOBS[key].label, values, [at[repr(value)] for value in known])

    @property
    def ticks(self) -> dict[int, str]:
        """The places that are named, not too many, with their names."""
        shown = range(0, len(self.values), -(-len(self.values) // _TICKS_MOST))
        return {place: escape(setting_words(self.values[place])) for place in shown}


def _history(document: Document, key: str, rows: Sequence[int]) -> PageFigure:
    column, records = document.columns[key], document.records
    figure = go.Figure(layout=framed(300))
    fitting = [row for row in rows if records[row].verdict is Verdict.FITS]
    better = max if AXES[key] else min
    best = list(accumulate((column.values[row] for row in fitting), better))
    figure.add_scatter(
        x=[records[row].number for row in fitting],
        y=best,
        mode="lines",
        name="best so far",
        line={"color": GREEN, "width": 2, "shape": "hv"},
        hoverinfo="skip",
    )
    for verdict in (Verdict.FITS, Verdict.PRUNED_SLOW):
        shown = [row for row in rows if records[row].verdict is verdict]
        if shown:
            figure.add_scatter(
                x=[records[row].number for row in shown],
                y=[column.values[row] for row in shown],
                customdata=[records[row].number for row in shown],
                mode="markers",
                name=VERDICT_LABELS[verdict],
                marker={"color": MARKS[verdict].colour, "symbol": MARKS[verdict].symbol, "size": 7},
                hovertemplate="trial %{customdata}: %{y:,.4~r}<extra></extra>",
            )
    figure.update_xaxes(title="trial")
    figure.update_yaxes(title="<br>".join(map(escape, wrap(column.label, 24))), tickformat=",~r")
    return PageFigure(
        "history",
        "Optimization history",
        "What each trial reached, and the best so far. What was stopped as too slow is hollow, and "
        "never the best.",
        figure,
    )


def _slices(document: Document, key: str, rows: Sequence[int], axes: Sequence[_Axis]) -> PageFigure:
    column, records = document.columns[key], document.records
    down = -(-len(axes) // 4)
    figure = make_subplots(down, 4, shared_yaxes="all", vertical_spacing=0.5 / down / 1.5)
    numbers = [records[row].number for row in rows]
    reached = [column.values[row] for row in rows]
    for place, axis in enumerate(axes):
        at = {"row": place // 4 + 1, "col": place % 4 + 1}
        figure.add_scatter(
            x=[axis.places[row] for row in rows],
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
    figure.update_yaxes(title="<br>".join(map(escape, wrap(column.label, 18))), row=1, col=1)
    return PageFigure(
        "slice",
        "Slice plot",
        "Every trial that fitted, by each setting that varies: the first are amber, the last blue.",
        figure,
    )


def quality_of(document: Document) -> Section | None:
    """Return the section on held-out losses; None of a study that has none."""
    ranking = document.view.ranking
    judged = [r for r in ranking.ranked if measured_of(r).quality is not None]
    if "eval_loss" not in ranking.objectives or not judged:
        return None
    quality = measured_of(judged[0]).quality
    assert quality is not None, "a judged trial has a loss"
    of_tokens = f"{quality.eval_tokens:,} tokens of " if quality.eval_wins is None else ""
    how = (
        f"Every trial that fits and is at least half as fast as the fastest trained on "
        f"{quality.train_tokens:,} supervised tokens, in the same order. The loss is the "
        f"mean over {of_tokens}{held_out(quality)}, cut at "
        f"{quality.eval_seq_len:,} each. A loss that these do not tell from the lowest (paired "
        "bootstrap, 95 %) counts as the lowest. The few that the choice is between were trained "
        "with several seeds; their interval is Student's, at 95 %, of the mean over those."
    )
    known = [one for record in judged if (one := measured_of(record).quality)]
    losses = [one.eval_loss for one in known]
    ends = [one.eval_loss_ci95 or (one.eval_loss, one.eval_loss) for one in known]
    figure = make_subplots(1, 2, shared_yaxes=True)
    speeds = digits(measured_of(record).tokens_per_second for record in judged)
    ranks = [record.config.lora_rank for record in judged]
    is_winner = [record is ranking.winner for record in judged]
    for at, x in enumerate((speeds, ranks), start=1):
        figure.add_scatter(
            x=x,
            y=losses,
            customdata=[record.number for record in judged],
            mode="markers",
            error_y=whiskers(losses, ends) | {"color": BLUE},
            marker={
                "color": [AMBER if wins else BLUE for wins in is_winner],
                "symbol": ["star" if wins else "circle" for wins in is_winner],
                "size": 10,
            },
            hovertemplate="trial %{customdata}: %{y:.4f}<extra></extra>",
            row=1,
            col=at,
        )
    figure.update_layout(framed(360), showlegend=False)
    figure.update_xaxes(title="supervised tokens/s", tickformat=",~r", row=1, col=1)
    figure.update_xaxes(title="LoRA rank", type="log", tickvals=sorted(set(ranks)), row=1, col=2)
    figure.update_yaxes(title="held-out loss (nats a token)", row=1, col=1)
    shown = PageFigure(
        "loss",
        "Held-out loss against speed and rank",
        "Each mark is a trial that trained; lower is better. Whiskers are 95 % intervals over "
        "seeds, where there are several.",
        figure,
    )
    return Section(claim=rank_claim(ranking), how=how, figures=[shown])
