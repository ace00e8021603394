"""Owns how what a study was asked for is put into words: names, superlatives, values.

Knows nothing of how trials are ordered; that is `storage.ranking`.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from reports import quality, units
from search_spaces.space import Objective
from storage.records import Measurement

NAMES: Mapping[Objective, str] = {
    "tokens_per_second": "speed",
    "peak_memory": "peak memory",
    "trainable_parameters": "trainable parameters",
    "eval_loss": "held-out loss",
}
"""What each objective is called for people."""

COLUMNS: Mapping[Objective, str] = {
    "tokens_per_second": "tokens/s",
    "peak_memory": "peak",
    "trainable_parameters": "trainable",
    "eval_loss": "held-out loss",
}
"""What heads a column of each objective's values."""

BEST: Mapping[Objective, str] = {
    "tokens_per_second": "The fastest configuration",
    "peak_memory": "The configuration with the lowest peak memory",
    "trainable_parameters": "The configuration with the most trainable parameters",
    "eval_loss": "The configuration with the lowest held-out loss",
}
"""What the best by each objective is, as the beginning of a sentence."""


def names(objectives: Sequence[Objective]) -> str:
    """Return what a study is ranked by: ``speed``, ``speed and peak memory``."""
    *first, last = [NAMES[objective] for objective in objectives]
    return f"{', '.join(first)} and {last}" if first else last


def best(objectives: Sequence[Objective], *, is_confirmed: bool) -> str:
    """Return what the best trial of a study is, as the beginning of a sentence."""
    named = (
        BEST[objectives[0]]
        if len(objectives) == 1
        else f"The best compromise between {names(objectives)} (the knee of the Pareto front)"
    )
    return f"{named} that fits" if is_confirmed else f"{named} measured so far"


def value(objective: Objective, measured: Measurement) -> str:
    """Return what was measured of an objective, in its unit."""
    match objective:
        case "tokens_per_second":
            return units.rate(measured.tokens_per_second)
        case "peak_memory":
            return units.gib(measured.peak_allocated_bytes)
        case "trainable_parameters":
            return units.count(measured.trainable_parameters)
        case "eval_loss":
            return quality.loss_words(measured)
