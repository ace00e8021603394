"""The page of a training's loss: what was trained on, what was held out, the learning rate.

One HTML file that needs nothing else, no network included.
"""

from __future__ import annotations

import base64
import hashlib
import html
from collections.abc import Sequence
from importlib.resources import files
from typing import Any

import plotly.graph_objects as go
from plotly.io.json import to_json_plotly

from reports.figures import BLUE, GREEN, ORANGE, themes
from search_spaces.redaction import shown

POINTS_MAX = 2000
"""Of a curve: more are put together, and nobody could see them."""
_SCRIPT = """"use strict";
const page = JSON.parse(document.getElementById("page-data").textContent);
const dark = matchMedia("(prefers-color-scheme: dark)");
const draw = () => Plotly.react("loss", page.data,
  {...page.layout, template: page.themes[dark.matches ? "dark" : "light"]},
  {responsive: true, displaylogo: false, showSendToCloud: false, plotlyServerURL: ""});
dark.addEventListener("change", draw);
draw();
"""
_STYLE = """:root { color-scheme: light dark; font-family: system-ui, sans-serif; }
body { margin: 2rem auto; max-width: 70rem; padding: 0 1rem; }
@media (prefers-color-scheme: dark) { body { background: #14181d; color: #e3e7ec; } }
"""


def loss_page(
    *,
    title: str,
    losses: Sequence[float],
    learning_rates: Sequence[float],
    evaluations: Sequence[tuple[int, float]],
    final: tuple[int, float] | None,
) -> str:
    """Return the page.

    Args:
        title: of what was trained.
        losses: of each step.
        learning_rates: of each step.
        evaluations: step and loss of those on the way, over the first of the held-out rows.
        final: step and loss over all of them; None where nothing was held out.
    """
    figure = _figure(losses, learning_rates, evaluations, final)
    values = figure.to_plotly_json()
    layout = {key: part for key, part in values["layout"].items() if key != "template"}
    data = str(to_json_plotly({"data": values["data"], "layout": layout, "themes": themes()}))
    plotly = files("reports").joinpath("vendor", "plotly-cartesian.min.js").read_text("utf-8")
    hashes = " ".join(map(_csp_hash, (plotly, _SCRIPT)))
    words = html.escape(shown(title))
    return f"""<!DOCTYPE html>
<html lang="en">
<head>
<meta charset="utf-8">
<meta http-equiv="Content-Security-Policy" content="default-src 'none'; script-src {hashes}; \
style-src 'unsafe-inline'; img-src data: blob:; base-uri 'none'; form-action 'none'">
<meta name="viewport" content="width=device-width, initial-scale=1">
<title>{words}</title>
<style>
{_STYLE}</style>
</head>
<body>
<h1>{words}</h1>
<div id="loss"></div>
<script id="page-data" type="application/json">{data}</script>
<script>{plotly}</script>
<script>{_SCRIPT}</script>
</body>
</html>
"""


def _figure(
    losses: Sequence[float],
    learning_rates: Sequence[float],
    evaluations: Sequence[tuple[int, float]],
    final: tuple[int, float] | None,
) -> go.Figure:
    steps, thinned = _thinned(losses)
    _, rates = _thinned(learning_rates)
    figure = go.Figure()
    figure.add_scatter(x=steps, y=thinned, name="training loss", line={"color": BLUE, "width": 1.5})
    if evaluations:
        figure.add_scatter(
            x=[step for step, _ in evaluations],
            y=[loss for _, loss in evaluations],
            name="held-out loss, some rows",
            mode="lines+markers",
            line={"color": ORANGE},
        )
    if final is not None:
        figure.add_scatter(
            x=[final[0]],
            y=[final[1]],
            name="held-out loss, all rows",
            mode="markers",
            marker={"color": ORANGE, "symbol": "diamond", "size": 11},
        )
    figure.add_scatter(x=steps, y=rates, name="learning rate", yaxis="y2", line={"color": GREEN})
    figure.update_layout(
        height=640,
        xaxis={"title": {"text": "optimizer step"}, "anchor": "y2"},
        yaxis={"title": {"text": "loss"}, "domain": [0.32, 1.0]},
        yaxis2={"title": {"text": "learning rate"}, "domain": [0.0, 0.24], "exponentformat": "e"},
        hovermode="x unified",
        legend={"orientation": "h", "y": 1.08},
    )
    return figure


def _thinned(values: Sequence[float]) -> tuple[list[int], list[float]]:
    """Return the steps and the means of stretches of steps, as many as can be seen."""
    length = -(-len(values) // POINTS_MAX) or 1
    parts = [values[at : at + length] for at in range(0, len(values), length)]
    ends = [min(at + length, len(values)) for at in range(0, len(values), length)]
    return ends, [_mean(part) for part in parts]


def _mean(values: Sequence[float]) -> Any:
    return sum(values) / len(values)


def _csp_hash(script: str) -> str:
    """Return what a content security policy calls a script by."""
    digest = hashlib.sha256(script.encode("utf-8")).digest()
    return f"'sha256-{base64.b64encode(digest).decode('ascii')}'"
