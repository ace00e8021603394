"""The wall says what fits at which size, and never takes a bound for a need."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace

import pytest

from reports.page import render
from reports.wall import BATCHES_MAX, PANELS_MAX, Cell, Wall, wall_of
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.definition import MemoryForecast, StudySnapshot
from storage.ranking import rank_study
from storage.records import (
    Crashed,
    DominatedOutOfMemory,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    PrunedSlow,
    TrialRecord,
)
from tests.reports.synthetic import (
    definition,
    fits,
    measurement,
    plausible_study,
    record,
    snapshot,
)


def _wall(study: StudySnapshot) -> Wall:
    wall = wall_of(study)
    assert wall is not None
    return wall


def _only_cell(*records: TrialRecord) -> Cell:
    """Return the cell of trials that are all of one size."""
    (cell,) = [cell for cell in _cells(_wall(snapshot(records))) if cell.kind != "untried"]
    return cell


def _cells(wall: Wall) -> Iterator[Cell]:
    for panel in wall.panels:
        for _, cells in panel.rows:
            yield from cells


def _predicted(gib: float) -> PredictionRecord:
    size = int(gib * GIB)
    return PredictionRecord(peak_allocated_bytes=size, peak_reserved_bytes=size)


def test_a_cell_has_the_fastest_trial_of_its_size_and_says_how_many_others_did_not_fit() -> None:
    slow = fits(0, 8_000.0)
    fast = fits(1, 9_000.0, TrialConfig(micro_batch_size=8, upcast_fp32=False))
    cell = _only_cell(slow, fast)
    assert (cell.kind, cell.text, cell.trial) == ("fits", "9.0k", 1)
    torn = _only_cell(
        fast, record(2, OutOfMemory(stage="forward"), TrialConfig(micro_batch_size=8))
    )
    assert torn.text == "9.0k ◩"
    assert "1 of 2 trials here did not fit" in torn.words


def test_what_ran_out_needs_at_least_the_budget_and_what_was_predicted_needs_that() -> None:
    ran_out = OutOfMemory(stage="backward", peak_allocated_bytes=18 * GIB)
    cell = _only_cell(record(0, ran_out, prediction=_predicted(22.3)))
    assert (cell.kind, cell.text, cell.memory) == ("oom", "✕", "≥ 22.3")
    assert "needs at least 22.30 GiB by prediction" in cell.words
    refused = _only_cell(record(0, PredictedOutOfMemory(predicted_bytes=25 * GIB)))
    assert (refused.kind, refused.text, refused.memory) == ("refused", "△", "25.0")
    larger = _only_cell(record(0, DominatedOutOfMemory(by=7)))
    assert (larger.kind, larger.memory) == ("refused", "≥ 21.5")


def test_a_cell_where_one_ran_out_for_real_speaks_of_that_one() -> None:
    cell = _only_cell(
        record(0, PredictedOutOfMemory(predicted_bytes=25 * GIB)),
        record(1, OutOfMemory(stage="forward"), TrialConfig(micro_batch_size=8, upcast_fp32=False)),
    )
    assert (cell.kind, cell.trial) == ("oom", 1)


def test_a_speed_that_was_not_measured_to_the_end_is_marked() -> None:
    cell = _only_cell(record(0, PrunedSlow(measurement=measurement(3_000.0))))
    assert (cell.kind, cell.text) == ("partial", "~3.0k")
    lost = _only_cell(record(0, Crashed(phase="build")))
    assert (lost.kind, lost.text) == ("unknown", "?")


def test_panels_are_of_the_checkpointing_and_kernels_that_were_tried() -> None:
    study = snapshot(
        [
            fits(0, 8_000.0),
            fits(1, 9_000.0, TrialConfig(micro_batch_size=8, kernels="liger")),
            fits(2, 9_500.0, TrialConfig(micro_batch_size=8, checkpoint_fraction=0.0)),
        ]
    )
    wall = _wall(study)
    assert [panel.title for panel in wall.panels] == [
        "no checkpointing, standard kernels",
        "full checkpointing, Liger kernels",
        "full checkpointing, standard kernels",
    ]
    alone = _wall(snapshot([fits(0, 8_000.0)]))
    assert [panel.title for panel in alone.panels] == ["all trials"]
    assert alone.common == ("full checkpointing", "standard kernels")


def test_another_knob_parts_the_panels_where_it_divides_what_fits_from_what_does_not() -> None:
    records: list[TrialRecord] = []
    for size in (4, 8, 16):
        lean = TrialConfig(micro_batch_size=size, upcast_fp32=False)
        records.append(fits(len(records), 9_000.0, lean))
        heavy = TrialConfig(micro_batch_size=size, upcast_fp32=True)
        records.append(record(len(records), OutOfMemory(stage="forward"), heavy))
    wall = _wall(snapshot(records))
    assert [panel.title for panel in wall.panels] == ["no fp32 upcast", "fp32 upcast"]
    assert not any("◩" in cell.text for cell in _cells(wall))
    assert wall.best_over == ()


def test_nearest_to_fitting_goes_by_prediction_not_by_where_the_allocation_failed() -> None:
    near = TrialConfig(micro_batch_size=10)
    far = TrialConfig(micro_batch_size=32)
    records = [
        # The far one had the least allocated when it failed, and so did what nothing predicted.
        record(
            0,
            OutOfMemory(stage="forward", peak_allocated_bytes=5 * GIB),
            far,
            prediction=_predicted(60),
        ),
        record(
            1,
            OutOfMemory(stage="backward", peak_allocated_bytes=21 * GIB),
            near,
            prediction=_predicted(22),
        ),
        record(2, OutOfMemory(stage="forward"), TrialConfig(micro_batch_size=24)),
    ]
    wall = _wall(snapshot(records))
    assert [miss.number for miss in wall.nearest] == [1, 0]
    assert wall.nearest[0].need == "at least 22.00 GiB by prediction"
    assert wall.unpredicted == 1


def test_a_baseline_outside_the_space_is_no_cell_and_an_empty_study_has_no_wall() -> None:
    assert wall_of(snapshot()) is None
    outside = fits(0, 8_000.0, TrialConfig(micro_batch_size=8, lora_rank=64))
    assert wall_of(snapshot([outside])) is None


def test_many_sizes_share_rows() -> None:
    about = definition(space={"dimensions": {"micro_batch_size": {"low": 1, "high": 60}}})
    records = [fits(n, 8_000.0, TrialConfig(micro_batch_size=n + 1)) for n in range(60)]
    wall = _wall(snapshot(records, definition=about))
    rows = wall.panels[0].rows
    assert len(rows) <= BATCHES_MAX
    assert rows[0][0] == "1–5"


def test_what_was_not_tried_is_predicted_where_that_is_at_hand() -> None:
    fast = TrialConfig(micro_batch_size=8, upcast_fp32=False)
    sizes = {4: "yes", 8: "yes", 10: "uncertain", 12: "no"}
    forecasts = {
        fast.model_copy(update={"micro_batch_size": size}): MemoryForecast(size * 2 * GIB, {}, fits)
        for size, fits in sizes.items()
    }
    study = snapshot([fits(0, 8_000.0), fits(1, 9_000.0, fast)], memory_forecasts=forecasts)
    assert not _wall(replace(study, memory_forecasts={})).has_expected
    rows = dict(_wall(study).panels[0].rows)
    column = _wall(study).lengths.index("512")
    shown = {batch: (cells[column].kind, cells[column].text) for batch, cells in rows.items()}
    assert shown["8"] == ("fits", "9.0k")
    assert shown["4"] == ("expected", "○")
    assert shown["10"] == ("expected", "?")
    assert shown["12"] == ("expected", "△")
    assert shown["32"] == ("untried", "")
    assert rows["12"][column].trial is None
    assert "not tried, predicted not to fit: 24.00 GiB with the other settings of trial 1" in (
        rows["12"][column].words
    )


def test_a_cell_that_was_not_tried_fits_where_the_leanest_structure_of_its_panel_does() -> None:
    heavy = TrialConfig(micro_batch_size=8)
    lean = TrialConfig(micro_batch_size=4, upcast_fp32=False)
    forecasts = {
        heavy: MemoryForecast(20 * GIB, {}, "yes"),
        heavy.model_copy(update={"micro_batch_size": 10}): MemoryForecast(30 * GIB, {}, "no"),
        lean.model_copy(update={"micro_batch_size": 10}): MemoryForecast(15 * GIB, {}, "yes"),
    }
    trials = [fits(0, 9_000.0, heavy), fits(1, 8_000.0, lean, peak_allocated_bytes=2 * GIB)]
    study = snapshot(trials, memory_forecasts=forecasts)
    rows = dict(_wall(study).panels[0].rows)
    cell = rows["10"][_wall(study).lengths.index("512")]
    assert (cell.text, cell.memory) == ("○", "15.0")
    assert "trial 1" in cell.words


def test_the_winner_s_panel_is_shown_first_and_without_one_that_of_the_most_trials() -> None:
    study = plausible_study()
    wall, winner = _wall(study), rank_study(study).winner
    assert winner is not None
    shown = [cell.trial for _, cells in wall.panels[wall.first].rows for cell in cells]
    assert winner.number in shown
    lean = TrialConfig(micro_batch_size=8, kernels="liger")
    unfit = [record(n, OutOfMemory(stage="load"), lean) for n in range(2)]
    alone = _wall(snapshot([*unfit, record(2, OutOfMemory(stage="load"))]))
    assert alone.panels[alone.first].title == "Liger kernels"


@pytest.mark.parametrize("trials", [1, 9, 300])
def test_every_trial_of_the_space_is_in_one_panel(trials: int) -> None:
    wall = _wall(plausible_study(3, trials=trials))
    assert sum(panel.trials for panel in wall.panels) == trials
    assert len(wall.panels) <= PANELS_MAX


def test_the_page_tells_cells_by_words_and_marks_not_by_colour_alone() -> None:
    page = render(plausible_study(1, trials=60))
    assert 'class="cell oom"' in page
    assert "ran out of memory, needs at least" in page
    assert page.count("✕") > 1
