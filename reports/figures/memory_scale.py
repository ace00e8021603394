"""The memory axis of the front: where a need is drawn, within the budget and beyond it."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from reports.figures.style import LIMIT_COLOUR

Trial = Mapping[str, Any]
MEMORY = "peak_allocated"
_BEYOND_SHARE = 0.5
"""Width of what is beyond the budget, of that of what is within."""


def need_of(trial: Trial) -> float | None:
    """Return what a trial without a speed needs, or is predicted to; None where unknown."""
    need = trial.get("need", trial.get("predicted_peak"))
    return None if need is None else float(need)


@dataclass(frozen=True)
class MemoryScale:
    """The memory axis: even up to the budget, by ratio beyond it, so that far needs stay apart."""

    left: float
    budget: float
    right: float
    """The most that anything needs; the budget where nothing needs more."""
    unit: str
    """Of all three."""

    @classmethod
    def of(cls, document: Mapping[str, Any]) -> MemoryScale:
        """Return the scale that every trial of a document is on."""
        budget = float(document["budget"])
        trials: Sequence[Trial] = document["trials"]
        places = (t.get(MEMORY, need_of(t)) for t in trials)
        known = [float(place) for place in places if place is not None]
        least, most = min([*known, budget]), max([*known, budget])
        air = 0.06 * (budget - least) or 0.1 * budget
        return cls(max(least - air, 0.0), budget, most, document["memory_unit"])

    @property
    def _width(self) -> float:
        return self.budget - self.left

    @property
    def _ratio(self) -> float:
        # A need just beyond the budget is not to look far from it.
        return max(self.right / self.budget, 1.5)

    def position(self, need: float | None) -> float:
        """Return where a need is drawn; at the left edge where it is not known."""
        if need is None:
            return self.left + 0.02 * self._width
        if need <= self.budget:
            return need
        share = math.log(need / self.budget) / math.log(self._ratio)
        return self.budget + share * _BEYOND_SHARE * self._width

    def axis(self) -> dict[str, Any]:
        """Return range, ticks and title of plotly's axis."""
        beyond = [(self.position(m * self.budget), f"{m:g}×") for m in self._multiples()]
        within = list(self._within())
        end = self.position(self._ratio * self.budget) if self._is_exceeded else self.budget
        past = ", beyond the budget in multiples of it" if beyond else ""
        return {
            "range": [self.left, end + 0.04 * self._width],
            "tickmode": "array",
            "tickvals": [place for place, _ in (*within, *beyond)],
            "ticktext": [text for _, text in (*within, *beyond)],
            "title": {"text": f"peak allocated memory ({self.unit}{past})"},
        }

    @property
    def _is_exceeded(self) -> bool:
        return self.right > self.budget

    def _multiples(self) -> list[float]:
        if not self._is_exceeded:
            return []
        top = math.log2(self._ratio)
        if top < 1:
            return [1.25, 1.5]
        step = math.ceil(top / 4)
        return [float(2**power) for power in range(step, int(top) + 1, step)]

    def _within(self) -> Iterator[tuple[float, str]]:
        """Yield ticks up to the budget, five or so."""
        step = _round_step(self._width / 5)
        for tick in range(math.ceil(self.left / step), int(self.budget / step) + 1):
            yield tick * step, f"{tick * step:g}"

    def marks(self) -> tuple[list[dict[str, Any]], list[dict[str, Any]]]:
        """Return the line of the budget with its name."""
        at = self.budget
        line = {
            "type": "line",
            "x0": at,
            "x1": at,
            "y0": 0,
            "y1": 1,
            "yref": "paper",
            "line": {"color": LIMIT_COLOUR, "width": 2, "dash": "dash"},
        }
        name = {
            "x": at,
            "y": 1,
            "yref": "paper",
            "yanchor": "bottom",
            "xanchor": "center" if self._is_exceeded else "right",
            "text": f"budget {at:.2f} {self.unit}",
            "showarrow": False,
        }
        return [line], [name]


def _round_step(rough: float) -> float:
    """Return 1, 2 or 5 times a power of ten, the next above."""
    power = 10.0 ** math.floor(math.log10(rough))
    return next(power * unit for unit in (1, 2, 5, 10) if power * unit >= rough)
