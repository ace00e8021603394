"""What a study says about going faster follows from its records alone."""

from __future__ import annotations

from reports.advice import how_to_go_faster, needed_bytes
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.records import (
    Crashed,
    DominatedOutOfMemory,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
)
from tests.reports.synthetic import fits, record, snapshot

FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)
LARGE = TrialConfig(micro_batch_size=12, checkpoint_fraction=0.0)


def _prediction(gib: float, tokens_per_second: float) -> PredictionRecord:
    need = int(gib * GIB)
    return PredictionRecord(
        peak_allocated_bytes=need, peak_reserved_bytes=need, tokens_per_second=tokens_per_second
    )


def _said(*records: object, **values: object) -> str:
    return "\n".join(how_to_go_faster(snapshot(records, **values)))  # type: ignore[arg-type]


def test_a_faster_configuration_that_did_not_fit_is_named_with_its_speed_and_its_excess() -> None:
    too_large = record(
        2, OutOfMemory(stage="backward"), LARGE, prediction=_prediction(23.0, 17_000.0)
    )
    said = _said(fits(0, 8_000.0), fits(1, 16_000.0, FAST), too_large)
    assert "trial 2 (micro-batch 12, no checkpointing) is expected at 17,000 tokens/s" in said
    assert "needs about 1.50 GiB more than the budget" in said


def test_a_slower_configuration_that_did_not_fit_is_no_way_to_go_faster() -> None:
    too_large = record(2, PredictedOutOfMemory(predicted_bytes=30 * GIB), LARGE)
    too_large = too_large.model_copy(update={"prediction": _prediction(30.0, 15_000.0)})
    assert "trial 2" not in _said(fits(0, 8_000.0), fits(1, 16_000.0, FAST), too_large)


def test_without_any_expected_speed_the_nearest_to_fitting_is_named() -> None:
    near = OutOfMemory(stage="forward", peak_allocated_bytes=21 * GIB, requested_bytes=GIB)
    said = _said(fits(0, 8_000.0), record(1, near, LARGE))
    assert "Nearest to fitting: trial 1" in said
    assert "0.50 GiB more" in said


def test_a_tie_is_named_with_the_memory_that_it_would_save() -> None:
    said = _said(
        fits(0, 8_000.0),
        fits(1, 16_000.0, FAST, peak_allocated_bytes=20 * GIB),
        fits(2, 15_950.0, LARGE, peak_allocated_bytes=15 * GIB),
    )
    assert "trial 2 cannot be told from the winner" in said
    assert "15.00 GiB against the winner's 20.00 GiB" in said


def test_a_tie_that_takes_more_memory_saves_nothing() -> None:
    said = _said(
        fits(1, 16_000.0, FAST, peak_allocated_bytes=15 * GIB),
        fits(2, 15_950.0, LARGE, peak_allocated_bytes=20 * GIB),
    )
    assert "trial 2 cannot be told from the winner by speed." in said


def test_a_winner_with_the_largest_micro_batch_of_the_space_asks_for_a_wider_one() -> None:
    widest = TrialConfig(micro_batch_size=32)
    said = _said(fits(0, 8_000.0), fits(1, 16_000.0, widest))
    assert "the largest micro-batch that the space 'a10' offers (32)" in said
    assert "A wider space" not in _said(fits(0, 8_000.0), fits(1, 16_000.0, FAST))


def test_a_noisy_winner_is_not_passed_off_as_certain() -> None:
    said = _said(fits(0, 8_000.0), fits(1, 16_000.0, FAST, flags=("emulated", "throttled")))
    assert "marked throttled" in said


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
    assert "No configuration was measured within 21.50 GiB" in said
    assert "Nearest to fitting: trial 1" in said
    assert "3.50 GiB more" in said


def test_an_empty_study_says_that_nothing_has_finished() -> None:
    assert how_to_go_faster(snapshot()) == ["No trial has finished yet."]


def test_the_need_of_a_trial_is_never_below_what_it_was_seen_to_hold() -> None:
    seen = OutOfMemory(stage="backward", peak_allocated_bytes=21 * GIB, requested_bytes=GIB)
    assert needed_bytes(record(0, seen)) == 22 * GIB
    assert needed_bytes(record(0, seen, prediction=_prediction(20.0, 1.0))) == 21 * GIB
    assert needed_bytes(record(0, seen, prediction=_prediction(23.0, 1.0))) == 23 * GIB
    assert needed_bytes(record(0, OutOfMemory(stage="load"))) is None
    assert needed_bytes(record(0, DominatedOutOfMemory(by=0))) is None
