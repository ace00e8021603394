"""The tables say what the records say, in the words and units of the report."""

from __future__ import annotations

import math

import pytest

from reports import tables
from reports.trials import trials_of
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.records import Measured, OutOfMemory, PrunedSlow, Verdict
from tests.reports.synthetic import (
    BASELINE,
    definition,
    fits,
    measurement,
    one_of_each,
    plausible_study,
    record,
    snapshot,
)

FAST = TrialConfig(micro_batch_size=10, checkpoint_fraction=0.0)


def test_the_fastest_configuration_is_first_with_its_numbers_in_words() -> None:
    study = snapshot([fits(0, 8_000.0), fits(1, 16_000.0, FAST, peak_allocated_bytes=20 * GIB)])
    first, second = tables.top_configurations(study)
    assert (first.rank, first.number, second.rank, second.number) == (1, 1, 2, 0)
    assert first.changes == "micro-batch 10, no checkpointing"
    assert first.tokens_per_second == "16,000"
    assert first.interval == "15,842–16,162"
    assert first.peak_allocated == "20.00 GiB"
    assert first.budget_share == "93 %"


def test_runners_up_leave_the_winner_out() -> None:
    study = plausible_study()
    top = tables.top_configurations(study)
    assert tables.runners_up(study, limit=3) == top[1:4]


def test_only_what_fits_is_ranked() -> None:
    rows = tables.top_configurations(snapshot(one_of_each()))
    assert [row.number for row in rows] == [0]


@pytest.mark.parametrize("broken", [math.nan, math.inf, 0.0, -1.0])
def test_a_speed_that_is_not_a_finite_positive_number_is_never_ranked(broken: float) -> None:
    study = snapshot([fits(0, 8_000.0), fits(1, broken, FAST)])
    assert [row.number for row in tables.top_configurations(study)] == [0]


def test_a_step_interval_that_is_not_finite_is_never_ranked() -> None:
    study = snapshot([fits(0, 8_000.0), fits(1, 9_000.0, FAST, step_seconds_ci95=(0.0, math.inf))])
    assert [row.number for row in tables.top_configurations(study)] == [0]


def test_each_capacity_class_has_its_fastest_and_says_when_it_was_stopped_early() -> None:
    wide = TrialConfig(micro_batch_size=8, lora_rank=64, target_modules="all-linear")
    partial = PrunedSlow(measurement=measurement(4_000.0))
    free = {
        "lora_rank": {"choices": [16, 64]},
        "target_modules": {"choices": ["attention", "all-linear"]},
        "micro_batch_size": {"choices": [8, 10]},
        "checkpoint_fraction": {"choices": [0.0, 1.0]},
    }
    study = snapshot(
        [fits(0, 8_000.0), fits(1, 9_000.0, FAST), record(2, partial, wide)],
        definition=definition(space={"dimensions": free, "fixed": {}}),
    )
    narrow_row, wide_row = tables.class_rows(study)
    assert (narrow_row.lora_rank, narrow_row.number) == ("16", 1)
    assert narrow_row.tokens_per_second == "9,000"
    assert (wide_row.lora_rank, wide_row.target_modules) == ("64", "all linear layers")
    assert wide_row.tokens_per_second == "4,000 (stopped early)"


def test_every_verdict_has_a_label_and_one_sentence() -> None:
    section = trials_of(snapshot(one_of_each()))
    assert section is not None
    assert list(section.verdicts) == [str(verdict) for verdict in Verdict]
    assert len(section.meanings) == len(Verdict)
    assert all(meaning.endswith(".") for meaning in section.meanings.values())


def test_the_trials_can_be_filtered_by_the_verdicts_that_occurred_with_their_counts() -> None:
    study = snapshot([fits(0, 8_000.0), record(1, OutOfMemory(stage="forward"))])
    section = trials_of(study)
    assert section is not None
    assert list(section.verdicts.values()) == ["fits (1)", "ran out of memory (1)"]
    assert trials_of(snapshot()) is None


def test_the_environment_names_target_host_and_every_stored_version() -> None:
    rows = {row.name: row.value for row in tables.environment_rows(snapshot())}
    assert rows["target GPU"] == "a10"
    assert rows["measured on"] == "NVIDIA H200"
    assert rows["memory budget"] == "21.50 GiB"
    assert rows["torch"] == "2.13.0"
    assert rows["commit"] == "4f2c1d9"


def test_a_retracted_fit_is_not_ranked() -> None:
    study = snapshot(
        [
            fits(0, 8_000.0),
            fits(1, 16_000.0, FAST),
            record(2, OutOfMemory(stage="backward"), FAST),
        ]
    )
    assert [row.number for row in tables.top_configurations(study)] == [0]


def test_a_configuration_measured_twice_counts_once() -> None:
    again = record(1, Measured(measurement=measurement(8_100.0)), BASELINE)
    assert len(tables.top_configurations(snapshot([fits(0, 8_000.0), again]))) == 1
