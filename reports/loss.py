"""The page of a training's loss: what was trained on, what was held out, the learning rate."""

from __future__ import annotations

from collections.abc import Sequence

import plotly.graph_objects as go

from qlora_sweep.reports.figures import BLUE, GREEN, ORANGE, PageFigure, digits, framed
from qlora_sweep.reports.page import render_figure

POINTS_MAX = 2000
"""Of a curve: more are put together, as they could not be seen."""
_CAPTION = (
    "Training loss is the mean over a step's tokens; of many steps, means of stretches are drawn."
)


def loss_page(
    *,
    title: str,
    losses: Sequence[float],
    learning_rates: Sequence[float],
    evaluations: Sequence[tuple[int, float]],
    final: tuple[int, float] | None,
) -> str:
    """Return the page as HTML.

    Args:
        title: of what was trained.
        losses: of each step.
        learning_rates: of each step.
        evaluations: step and loss of those on the way, over the first of the held-out examples.
        final: step and loss over all of them; None where nothing was held out.
    """
    figure = go.Figure()
    figure.add_scatter(**_curve(losses), name="training loss", line={"color": BLUE, "width": 1.5})
    held_out = (
        ("held-out loss, some examples", evaluations, "lines+markers", "circle"),
        ("held-out loss, all examples", [] if final is None else [final], "markers", "diamond"),
    )
    for name, points, mode, symbol in held_out:
        if points:
            steps, values = zip(*points, strict=True)
            marker = {"color": ORANGE, "symbol": symbol, "size": 9}
            figure.add_scatter(x=steps, y=values, name=name, mode=mode, marker=marker)
    line = {"color": GREEN}
    figure.add_scatter(**_curve(learning_rates), name="learning rate", yaxis="y2", line=line)
    figure.update_layout(
        **{**framed(640), "hovermode": "x unified"},
        xaxis={"title": {"text": "optimizer step"}, "anchor": "y2"},
        yaxis={"title": {"text": "loss"}, "domain": [0.32, 1.0]},
        yaxis2={"title": {"text": "learning rate"}, "domain": [0.0, 0.24], "exponentformat": "e"},
    )
    return render_figure(title, PageFigure("loss", title, _CAPTION, figure))


def _curve(values: Sequence[float]) -> dict[str, list[float]]:
    """Return steps and means of stretches of steps, as many as can be seen."""
    length = -(-len(values) // POINTS_MAX) or 1
    ends = []
    means = []
    for start in range(0, len(values), length):
        stretch = values[start : start + length]
        ends.append(float(start + len(stretch)))
        means.append(sum(stretch) / len(stretch))
    return {"x": ends, "y": digits(means)}
