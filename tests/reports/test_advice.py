"""What a study says about going faster follows from its records alone."""

from __future__ import annotations

from reports.advice import how_to_go_faster
from reports.view import view_of
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.records import (
    Crashed,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
)
from tests.reports.synthetic import definition, fits, record, snapshot

FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
LARGE = TrialConfig(micro_batch_size=12, checkpoint_fraction=0.0)


def _prediction(gib: float, tokens_per_second: float) -> PredictionRecord:
    need = int(gib * GIB)
    return PredictionRecord(
        peak_allocated_bytes=need, peak_reserved_bytes=need, tokens_per_second=tokens_per_second
    )


def _said(*records: object, **values: object) -> str:
    return "\n".join(how_to_go_faster(view_of(snapshot(records, **values))))  # type: ignore[arg-type]


def test_a_faster_configuration_that_did_not_fit_is_named_with_its_speed_and_its_excess() -> None:
    too_large = record(
        2, OutOfMemory(stage="backward"), LARGE, prediction=_prediction(23.0, 17_000.0)
    )
    said = _said(fits(0, 8_000.0), fits(1, 16_000.0, FAST), too_large)
    assert "trial 2 (micro-batch 12, no checkpointing) is expected at 17,000 tokens/s" in said
    assert "needs at least 1.50 GiB more than the budget by prediction" in said


def test_a_slower_configuration_that_did_not_fit_is_no_way_to_go_faster() -> None:
    too_large = record(2, PredictedOutOfMemory(predicted_bytes=30 * GIB), LARGE)
    too_large = too_large.model_copy(update={"prediction": _prediction(30.0, 15_000.0)})
    assert "trial 2" not in _said(fits(0, 8_000.0), fits(1, 16_000.0, FAST), too_large)


def _predicted(gib: float) -> PredictionRecord:
    need = int(gib * GIB)
    return PredictionRecord(peak_allocated_bytes=need, peak_reserved_bytes=need)


def test_the_nearest_to_fitting_is_so_by_prediction_and_not_by_what_happened_to_fail() -> None:
    late = OutOfMemory(stage="optimizer", peak_allocated_bytes=21 * GIB, requested_bytes=GIB // 8)
    early = OutOfMemory(stage="load", peak_allocated_bytes=5 * GIB, requested_bytes=4 * GIB)
    said = _said(
        fits(0, 8_000.0),
        record(1, late, LARGE, prediction=_predicted(25.0)),
        record(2, early, FAST, prediction=_predicted(23.0)),
    )
    assert "Predicted nearest to fitting: trial 2" in said
    assert "it needs at least 1.50 GiB more than the budget by prediction" in said


def test_without_predictions_nobody_is_said_to_be_nearest() -> None:
    failed = OutOfMemory(stage="forward", peak_allocated_bytes=21 * GIB, requested_bytes=GIB)
    said = _said(fits(0, 8_000.0), record(1, failed, LARGE), record(2, failed, FAST))
    assert "nearest" not in said
    assert "2 trials did not fit; by how much is not known" in said
    assert "22.00 GiB" not in said


def test_a_need_below_the_budget_is_never_said_of_what_ran_out() -> None:
    failed = OutOfMemory(stage="forward", peak_allocated_bytes=20 * GIB, requested_bytes=GIB)
    said = _said(fits(0, 8_000.0), record(1, failed, LARGE, prediction=_predicted(20.5)))
    assert "it needs more than the budget, by how much is not known" in said


def test_a_winner_with_the_largest_micro_batch_of_the_space_asks_for_a_wider_one() -> None:
    widest = TrialConfig(micro_batch_size=32)
    said = _said(fits(0, 8_000.0), fits(1, 16_000.0, widest))
    assert "the largest micro-batch that the space 'a10' offers (32)" in said
    assert "A wider space" not in _said(fits(0, 8_000.0), fits(1, 16_000.0, FAST))


def test_a_micro_batch_that_is_the_whole_effective_batch_asks_for_no_wider_space() -> None:
    whole = TrialConfig(micro_batch_size=32, effective_batch_size=32)
    fixed = {"lora_rank": 16, "target_modules": "attention", "effective_batch_size": 32}
    about = definition(space={"fixed": fixed})
    assert "A wider space" not in _said(fits(1, 16_000.0, whole), definition=about)


def test_where_speed_was_not_asked_for_nothing_is_said_of_it() -> None:
    frugal = definition(space={"objectives": ["peak_memory"]})
    too_large = record(2, OutOfMemory(stage="backward"), LARGE, prediction=_prediction(23.0, 9e9))
    trials = (
        fits(0, 8_000.0, peak_allocated_bytes=9 * GIB),
        fits(1, 16_000.0, FAST, peak_allocated_bytes=9 * GIB),
        too_large,
    )
    said = _said(*trials, definition=frugal)
    assert "expected at" not in said


def test_trials_that_may_be_retried_are_counted_as_unknown() -> None:
    said = _said(fits(0, 8_000.0), record(1, Crashed(phase="build"), FAST))
    assert "1 trial crashed" in said


def test_how_much_of_the_space_was_looked_at_is_said() -> None:
    assert "2 of the 360 configurations" in _said(fits(0, 8_000.0), fits(1, 9_000.0, FAST))


def test_a_study_where_nothing_fits_says_so_and_what_came_nearest() -> None:
    said = _said(
        record(0, PredictedOutOfMemory(predicted_bytes=30 * GIB)),
        record(1, PredictedOutOfMemory(predicted_bytes=25 * GIB), LARGE),
    )
    assert "Predicted nearest to fitting: trial 1" in said
    assert "it is predicted to need 3.50 GiB more" in said
