"""The memory table says what fits at which size, and never takes a bound for a need."""

from __future__ import annotations

from collections.abc import Iterator

from reports.boundary import Boundary, Cell, boundary_of
from reports.document import document_of
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.definition import MemoryForecast, StudySnapshot
from storage.records import (
    Crashed,
    DominatedOutOfMemory,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    PrunedSlow,
    TrialRecord,
)
from tests.reports.synthetic import fits, measurement, record, snapshot

LEAN = TrialConfig(micro_batch_size=8, upcast_fp32=False)


def _boundary(study: StudySnapshot) -> Boundary:
    boundary = boundary_of(document_of(study))
    assert boundary is not None
    return boundary


def _cells(boundary: Boundary) -> Iterator[Cell]:
    return (cell for panel in boundary.panels for _, cells in panel.rows for cell in cells)


def _only_cell(*records: TrialRecord) -> Cell:
    """Return the cell of trials that are all of one size."""
    (cell,) = [one for one in _cells(_boundary(snapshot(records))) if one.kind != "untried"]
    return cell


def _predicted(gib: float) -> PredictionRecord:
    size = int(gib * GIB)
    return PredictionRecord(peak_allocated_bytes=size, peak_reserved_bytes=size)


def test_a_cell_has_the_fastest_trial_of_its_size_and_says_how_many_others_did_not_fit() -> None:
    fast = fits(1, 9_000.0, LEAN)
    cell = _only_cell(fits(0, 8_000.0), fast)
    assert (cell.kind, cell.text, cell.memory, cell.trial) == ("fits", "9.0k", "10.0", 1)
    torn = _only_cell(fast, record(2, OutOfMemory(stage="forward")))
    assert torn.text == "9.0k ◩"
    assert "1 of 2 trials here did not fit" in torn.words


def test_what_ran_out_needs_at_least_the_budget_and_what_was_predicted_needs_that() -> None:
    ran_out = OutOfMemory(stage="backward", peak_allocated_bytes=18 * GIB)
    cell = _only_cell(record(0, ran_out, prediction=_predicted(22.3)))
    assert (cell.kind, cell.text, cell.memory) == ("oom", "✕", "≥ 22.3")
    refused = _only_cell(record(0, PredictedOutOfMemory(predicted_bytes=25 * GIB)))
    assert (refused.kind, refused.text, refused.memory) == ("refused", "△", "25.0")
    larger = _only_cell(record(0, DominatedOutOfMemory(by=7)))
    assert (larger.kind, larger.memory) == ("refused", "≥ 21.5")
    both = _only_cell(
        record(0, PredictedOutOfMemory(predicted_bytes=25 * GIB)),
        record(1, OutOfMemory(stage="forward"), LEAN),
    )
    assert (both.kind, both.trial) == ("oom", 1)


def test_a_speed_that_was_not_measured_to_the_end_is_marked() -> None:
    cell = _only_cell(record(0, PrunedSlow(measurement=measurement(3_000.0))))
    assert (cell.kind, cell.text) == ("partial", "~3.0k")
    lost = _only_cell(record(0, Crashed(phase="build")))
    assert (lost.kind, lost.text) == ("unknown", "?")


def test_panels_are_of_the_checkpointing_and_kernels_that_were_tried() -> None:
    configs = (
        TrialConfig(micro_batch_size=8),
        TrialConfig(micro_batch_size=8, kernels="liger"),
        TrialConfig(micro_batch_size=8, checkpoint_fraction=0.0),
    )
    boundary = _boundary(snapshot([fits(n, 8_000.0 + n, c) for n, c in enumerate(configs)]))
    assert {(panel.title, panel.is_open) for panel in boundary.panels} == {
        ("full checkpointing, standard kernels", False),
        ("full checkpointing, Liger kernels", False),
        ("no checkpointing, standard kernels", True),
    }
    assert [panel.title for panel in _boundary(snapshot([fits(0, 8_000.0)])).panels] == [
        "all trials"
    ]


def test_nearest_to_fitting_goes_by_prediction_not_by_where_the_allocation_failed() -> None:
    near, far = TrialConfig(micro_batch_size=10), TrialConfig(micro_batch_size=32)
    early = OutOfMemory(stage="forward", peak_allocated_bytes=5 * GIB)
    late = OutOfMemory(stage="backward", peak_allocated_bytes=21 * GIB)
    records = [
        record(0, early, far, prediction=_predicted(60)),
        record(1, late, near, prediction=_predicted(22)),
        record(2, OutOfMemory(stage="forward"), TrialConfig(micro_batch_size=24)),
    ]
    nearest = _boundary(snapshot(records)).nearest
    assert [row[0] for row in nearest] == ["1", "0"]
    assert nearest[0][2] == "at least 22.00 GiB by prediction"


def test_a_baseline_outside_the_space_is_no_cell_and_an_empty_study_has_no_table() -> None:
    assert boundary_of(document_of(snapshot())) is None
    outside = fits(0, 8_000.0, TrialConfig(micro_batch_size=8, lora_rank=64))
    assert boundary_of(document_of(snapshot([outside]))) is None


def test_what_was_not_tried_is_predicted_where_that_is_at_hand() -> None:
    def forecast(fits: str) -> MemoryForecast:
        return MemoryForecast(12 * GIB, {}, fits)  # type: ignore[arg-type]

    # At each micro-batch and length one was tried, and as the fastest nothing else.
    long = LEAN.model_copy(update={"micro_batch_size": 4, "seq_len": 1024})
    untried = {
        LEAN.model_copy(update={"micro_batch_size": 4}): forecast("yes"),
        LEAN.model_copy(update={"seq_len": 1024}): forecast("no"),
    }
    study = snapshot([fits(0, 9_000.0, LEAN), fits(1, 8_000.0, long)], memory_forecasts=untried)
    shown = {
        (batch, length): (cell.kind, cell.text)
        for panel in _boundary(study).panels
        for batch, cells in panel.rows
        for length, cell in zip((512, 1024), cells, strict=True)
    }
    assert shown == {
        (4, 512): ("expected", "○"),
        (8, 512): ("fits", "9.0k"),
        (4, 1024): ("fits", "8.0k"),
        (8, 1024): ("expected", "△"),
    }
