"""How far predictions were off: each was made before its trial ran."""

from __future__ import annotations

from dataclasses import dataclass
from statistics import median
from typing import Literal

import plotly.graph_objects as go

from qlora_sweep.reports import format as units
from qlora_sweep.reports.document import TrialTable
from qlora_sweep.reports.figures import BLUE, ORANGE, PageFigure, digits, framed
from qlora_sweep.storage.records import Verdict

Quantity = Literal["memory", "speed"]


@dataclass(frozen=True)
class Accuracy:
    """How far predictions of what fitted were off."""

    quantity: Quantity
    trials: tuple[tuple[int, float, float], ...]
    """Numbers with what was predicted and what was measured."""

    @property
    def errors(self) -> dict[int, float]:
        """Relative to what was measured; positive where too much was predicted."""
        return {number: predicted / measured - 1 for number, predicted, measured in self.trials}

    @property
    def median(self) -> float:
        """The error that half of the trials are within, without its sign."""
        return median(map(abs, self.errors.values()))

    def __str__(self) -> str:
        number, worst = max(self.errors.items(), key=lambda pair: abs(pair[1]))
        what, more, less = {
            "memory": ("Peak memory", "too much", "too little"),
            "speed": ("Speed on the GPU that ran it", "too fast", "too slow"),
        }[self.quantity]
        direction = less
        if worst > 0:
            direction = more
        return (
            f"{what} was predicted with a median error of {units.error(self.median)} over "
            f"{units.plural(len(self.trials), 'trial')} that fitted; the worst, trial {number}, "
            f"was predicted {units.error(abs(worst))} {direction}."
        )


def accuracy_of(document: TrialTable, quantity: Quantity) -> Accuracy | None:
    """Return how far predictions were off; None where none was made.

    What was stopped early has no speed to hold one against, and what ran out has no peak.
    """
    key = {"memory": "peak_allocated_bytes", "speed": "tokens_per_second"}[quantity]
    trials = []
    for record in document.records:
        predicted = getattr(record.prediction, key, None)
        if record.verdict is Verdict.FITS and predicted is not None:
            measured = getattr(record.measurement, key)
            trials.append((record.number, float(predicted), float(measured)))
    if not trials:
        return None
    return Accuracy(quantity, tuple(trials))


def accuracy_figure(document: TrialTable, accuracy: Accuracy) -> PageFigure:
    """Return what was predicted against what was measured, a mark a trial."""
    unit = 1
    title = "tokens/s"
    if accuracy.quantity == "memory":
        unit = document.unit.bytes
        title = f"peak allocated memory ({document.unit.name})"
    numbers, predicted, measured = zip(*accuracy.trials, strict=True)
    x = digits(value / unit for value in predicted)
    y = digits(value / unit for value in measured)
    low = 0.95 * min(x + y)
    high = 1.05 * max(x + y)
    figure = go.Figure(layout=framed(380))
    figure.add_scatter(
        x=x,
        y=y,
        customdata=numbers,
        mode="markers",
        marker={"color": BLUE, "size": 9},
        hovertemplate="trial %{customdata}: %{y:,.4~r}, predicted %{x:,.4~r}<extra></extra>",
    )
    line = {"color": ORANGE, "width": 1, "dash": "dash"}
    figure.add_shape(type="line", line=line, x0=low, y0=low, x1=high, y1=high)
    figure.update_xaxes(range=[low, high], tickformat=",~r", title=f"predicted {title}")
    figure.update_yaxes(range=[low, high], tickformat=",~r", title=f"measured {title}")
    return PageFigure(
        f"predicted-{accuracy.quantity}",
        f"Predicted against measured {accuracy.quantity}",
        "Each mark is a trial that fitted; on the line it measured what was predicted before.",
        figure,
    )
