"""The memory prediction on what it was not made with: random configurations, and the edge."""

from __future__ import annotations

import statistics
from collections import Counter

import pytest

from sweep.predict.memory.predictor import Fit
from tests.sweep.predict.rows import (
    EDGES,
    HELD_OUT,
    NEW_MODELS,
    TABLE,
    Predict,
    Row,
    describe,
    is_compiled,
)

GIB = 2**30
BUDGETS = tuple(size * GIB for size in (6, 8, 10, 12, 16, 20, 24, 32))
"""Of GPUs of many sizes, for rows that were measured without a cap."""


@pytest.mark.parametrize("key", ["peak_allocated_bytes", "peak_reserved_bytes"])
def test_random_configurations_are_half_a_percent_off_in_the_median(
    predict_row: Predict, key: str
) -> None:
    plain = [row for row in HELD_OUT if not is_compiled(row)]
    assert len(plain) >= 50
    errors = [abs(getattr(predict_row(row), key) / row[key] - 1) for row in plain]
    assert statistics.median(errors) <= 0.005


@pytest.mark.parametrize(
    "rows",
    [
        pytest.param(HELD_OUT, id="held out"),
        pytest.param(
            NEW_MODELS,
            id="new models",
            marks=pytest.mark.skipif(not NEW_MODELS, reason="not measured yet"),
        ),
    ],
)
def test_every_configuration_it_was_not_made_with_is_within_the_uncertainty_that_it_states(
    predict_row: Predict, rows: list[Row]
) -> None:
    outside = []
    for row in rows:
        prediction = predict_row(row)
        allocated = row["peak_allocated_bytes"] / prediction.peak_allocated_bytes - 1
        reserved = row["peak_reserved_bytes"] / prediction.peak_reserved_bytes - 1
        is_within = abs(allocated) <= prediction.uncertainty
        if not is_within or abs(reserved) > prediction.reserved_uncertainty:
            outside.append((describe(row), allocated, reserved))
    assert outside == []


def _judged(row: Row, verdict: Fit) -> str:
    if verdict is Fit.UNCERTAIN:
        return "uncertain"
    return "right" if (verdict is Fit.YES) is (row["verdict"] == "fits") else "wrong"


def test_at_the_edge_of_a_budget_no_sure_verdict_is_wrong_and_most_are_sure(
    predict_row: Predict,
) -> None:
    """Only configurations that were tried close to a budget, under it."""
    verdicts = {
        index: predict_row(row).fits(row["budget_bytes"]) for index, row in enumerate(EDGES)
    }
    judged = Counter(_judged(row, verdicts[index]) for index, row in enumerate(EDGES))
    assert judged["wrong"] == 0
    assert judged["right"] >= 0.6 * len(EDGES)
    assert judged.total() == len(EDGES) >= 29


def test_the_best_guess_at_the_edge_is_right_nine_times_in_ten(predict_row: Predict) -> None:
    right = [
        predict_row(row).is_likely(row["budget_bytes"]) is (row["verdict"] == "fits")
        for row in EDGES
    ]
    assert sum(right) >= 0.85 * len(right)


@pytest.mark.parametrize("budget", BUDGETS, ids=lambda budget: f"{budget // GIB} GiB")
def test_far_from_an_edge_no_sure_verdict_is_wrong_and_nearly_all_are_sure(
    predict_row: Predict, budget: int
) -> None:
    """Budgets that a measurement without a cap settles: easy ones, so all are to be right."""
    settled = [
        (describe(row), row["peak_reserved_bytes"] <= budget, predict_row(row).fits(budget))
        for row in (*TABLE, *HELD_OUT)
        if row["peak_reserved_bytes"] <= budget or row["peak_allocated_bytes"] > budget
    ]
    assert [
        (name, fits, verdict)
        for name, fits, verdict in settled
        if verdict is (Fit.NO if fits else Fit.YES)
    ] == []
    unsure = sum(verdict is Fit.UNCERTAIN for *_, verdict in settled)
    assert unsure <= 0.03 * len(settled)
