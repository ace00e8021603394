"""Owns how a trial looks in every figure: its verdict's mark, its hover text, and the two themes.

Knows nothing of axes. No verdict is told by colour alone: each has a symbol or a lane of its own.
Colours are from the palettes of Okabe and Ito and of Paul Tol, which colour-blind readers can tell
apart, and legible on white and on near-black.
"""

from __future__ import annotations

from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from html import escape
from typing import Any, assert_never

from reports import uncertainty, units
from reports.measured import measured_trials
from reports.tables import VERDICT_LABELS
from search_spaces.config import TrialConfig
from storage.records import (
    Crashed,
    Diverged,
    DominatedOutOfMemory,
    Ineffective,
    Invalid,
    Lost,
    Measured,
    OutOfMemory,
    PredictedOutOfMemory,
    PrunedSlow,
    TimedOut,
    TrialRecord,
    Verdict,
    need_of,
)

FRONT_COLOUR = "#009E73"
LIMIT_COLOUR = "#D55E00"
WINNER_COLOUR = "#E69F00"
OUTLINE = {"width": 1, "color": "#1c2128"}
HOVER_TEMPLATE = "%{hovertext}<extra></extra>"
"""Shows `hover`'s text and nothing of plotly's own."""
_PAIRS_PER_LINE = 2
_DETAIL_CHARACTERS = 160


@dataclass(frozen=True)
class Mark:
    """How one verdict is drawn."""

    colour: str
    symbol: str
    """plotly's marker symbol."""
    lane: str
    """The short name of its lane, in at most two lines."""


MARKS: Mapping[Verdict, Mark] = {
    Verdict.FITS: Mark("#0072B2", "circle", "fits"),
    Verdict.PRUNED_SLOW: Mark("#56B4E9", "circle-open", "stopped<br>as slow"),
    Verdict.OOM: Mark("#D55E00", "x", "ran out of<br>memory"),
    Verdict.PREDICTED_OOM: Mark("#E69F00", "triangle-right-open", "predicted<br>not to fit"),
    Verdict.DOMINATED_OOM: Mark("#CC79A7", "triangle-up-open", "larger than<br>an OOM"),
    Verdict.DIVERGED: Mark("#AA4499", "diamond", "diverged"),
    Verdict.INVALID: Mark("#8A8F98", "square-open", "invalid"),
    Verdict.INEFFECTIVE: Mark("#999933", "hexagon-open", "had no<br>effect"),
    Verdict.TIMED_OUT: Mark("#44AA99", "hourglass", "timed out"),
    Verdict.CRASHED: Mark("#C2455C", "cross", "crashed"),
    Verdict.LOST: Mark("#8A8F98", "circle-x-open", "lost"),
}


def hover(record: TrialRecord, *, budget_bytes: int) -> str:
    """Return a trial's verdict, numbers and whole configuration as plotly's text, escaped."""
    lines = [f"<b>Trial {record.number}: {VERDICT_LABELS[record.verdict]}</b>"]
    if record.is_baseline:
        lines.append("the baseline")
    lines += [
        escape(line)
        for line in (
            *_numbers(record),
            *_reason(record),
            *_need(record, budget_bytes),
            *_settings(record.config),
        )
    ]
    return "<br>".join(lines)


def _numbers(record: TrialRecord) -> Iterator[str]:
    for _, measured in measured_trials([record]):
        rate, doubts = units.rate(measured.tokens_per_second), uncertainty.doubts(measured)
        marked = f", marked {doubts}" if doubts else ""
        yield f"{rate} tokens/s ({uncertainty.interval_words(measured)}{marked})"
        yield (
            f"peak {units.gib(measured.peak_allocated_bytes)} allocated, "
            f"{units.gib(measured.peak_reserved_bytes)} reserved"
        )
        yield f"{units.step_time(measured.step_seconds)} a step"


def _reason(record: TrialRecord) -> Iterator[str]:
    """Yield what is known of why it was not measured."""
    match record.outcome:
        case OutOfMemory(stage=stage):
            yield f"stage {stage}"
        case DominatedOutOfMemory(by=by):
            yield f"at least as large as trial {by}"
        case Diverged(step=step):
            yield f"at step {step}"
        case Invalid(rule=words, detail=detail) | Ineffective(knob=words, detail=detail):
            yield f"{words} {detail}"[:_DETAIL_CHARACTERS]
        case TimedOut(phase=phase, detail=detail) | Crashed(phase=phase, detail=detail):
            yield f"in phase {phase}: {detail}"[:_DETAIL_CHARACTERS]
        case Lost(detail=detail):
            yield detail[:_DETAIL_CHARACTERS]
        case Measured() | PrunedSlow() | PredictedOutOfMemory():
            return
        case _:
            assert_never(record.outcome)


def _need(record: TrialRecord, budget_bytes: int) -> Iterator[str]:
    need = need_of(record, budget_bytes=budget_bytes)
    if need is not None:
        yield f"needs {uncertainty.need(need)}"


def _settings(config: TrialConfig) -> Iterator[str]:
    pairs = [
        f"{key}: {units.short(value)}" for key, value in config.model_dump(mode="json").items()
    ]
    for start in range(0, len(pairs), _PAIRS_PER_LINE):
        yield ", ".join(pairs[start : start + _PAIRS_PER_LINE])


def themes() -> dict[str, dict[str, Any]]:
    """Return plotly templates ``light`` and ``dark``, of which the page picks the system's."""
    return {
        "light": _theme(ink="#1c2128", grid="#e2e6ea", paper="#ffffff"),
        "dark": _theme(ink="#e3e7ec", grid="#343b44", paper="#1c2128"),
    }


def _theme(*, ink: str, grid: str, paper: str) -> dict[str, Any]:
    axis = {"gridcolor": grid, "linecolor": grid, "zerolinecolor": grid, "automargin": True}
    return {
        "layout": {
            "font": {"family": "system-ui, sans-serif", "size": 13, "color": ink},
            "paper_bgcolor": "rgba(0,0,0,0)",
            "plot_bgcolor": "rgba(0,0,0,0)",
            "hoverlabel": {
                "bgcolor": paper,
                "font": {"color": ink},
                "bordercolor": grid,
                "align": "left",
            },
            "modebar": {"bgcolor": "rgba(0,0,0,0)", "color": "#8a8f98", "activecolor": ink},
            "xaxis": axis,
            "yaxis": axis,
        }
    }
