"""How far to trust a study: errors over fits alone, savings by a stated estimate, peaks as seen."""

from __future__ import annotations

from dataclasses import replace

import pytest

from reports.figures.trust import accuracy_words, trust_section
from reports.page import render
from reports.trust import trust_of
from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from storage.definition import MemoryForecast
from storage.records import (
    Carried,
    DominatedOutOfMemory,
    Measured,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    PrunedSlow,
    TrialRecord,
)
from tests.reports.synthetic import (
    fits,
    measurement,
    one_of_each,
    plausible_study,
    record,
    snapshot,
)


def _predicted(gib: float, speed: float | None = None) -> PredictionRecord:
    size = int(gib * GIB)
    return PredictionRecord(
        peak_allocated_bytes=size, peak_reserved_bytes=size, tokens_per_second=speed
    )


def _trial(number: int, gib: float, speed: float | None = None, **measured: object) -> TrialRecord:
    config = TrialConfig(micro_batch_size=number + 1)
    outcome = Measured(measurement=measurement(10_000.0, **measured))
    return record(number, outcome, config, prediction=_predicted(gib, speed))


def test_errors_are_of_trials_that_fit_with_their_median_and_their_worst() -> None:
    study = snapshot(
        [
            _trial(0, 10.0, 10_000.0),
            _trial(1, 10.2, 9_000.0),
            _trial(2, 9.0, None),
            # Neither is held against a prediction: the one has no whole speed, the other no peak.
            record(3, PrunedSlow(measurement=measurement(50.0)), prediction=_predicted(90, 1.0)),
            record(4, OutOfMemory(stage="forward"), prediction=_predicted(90, 1.0)),
        ]
    )
    known = trust_of(study)
    assert known.memory is not None
    assert known.speed is not None
    assert [number for number, _ in known.memory.errors] == [0, 1, 2]
    assert known.memory.median == pytest.approx(0.02)
    assert known.memory.worst == (2, pytest.approx(-0.1))
    assert [number for number, _ in known.speed.errors] == [0, 1]
    words = accuracy_words(known.memory)
    assert "median error of 2 % over 3 trials" in words
    assert "trial 2, was predicted 10 % too little" in words
    assert "10 % too slow" in accuracy_words(known.speed)


def test_nothing_is_said_of_predictions_that_were_not_made() -> None:
    known = trust_of(snapshot([fits(0, 9_000.0)]))
    assert known.memory is None
    assert known.speed is None
    assert trust_section(snapshot([fits(0, 9_000.0)])).accuracy == ()


def test_stopping_early_saved_the_steps_that_others_took_at_the_trial_s_own_pace() -> None:
    slow = measurement(1_000.0, step_seconds=0.5, step_seconds_ci95=None, steps_measured=2)
    study = snapshot(
        [
            fits(0, 9_000.0, steps_measured=10),
            fits(1, 9_000.0, TrialConfig(micro_batch_size=4), steps_measured=14),
            record(2, PrunedSlow(measurement=slow)),
        ]
    )
    saved = trust_of(study).course.pruned
    assert saved is not None
    assert (saved.trials, saved.basis, saved.each) == (1, 2, 12)
    assert saved.seconds == pytest.approx((12 - 2) * 0.5)


def test_steps_that_the_clock_would_have_ended_are_not_saved() -> None:
    """At 10 s a step a trial ends after its sixth, which is past its 30 s."""
    slow = measurement(1_000.0, step_seconds=10.0, step_seconds_ci95=None, steps_measured=2)
    study = snapshot([fits(0, 9_000.0, steps_measured=30), record(1, PrunedSlow(measurement=slow))])
    saved = trust_of(study).course.pruned
    assert saved is not None
    assert saved.seconds == pytest.approx((6 - 2) * 10.0)


def test_what_was_not_launched_is_priced_by_what_ran_out_or_else_by_setting_up() -> None:
    refused = [
        record(1, PredictedOutOfMemory(predicted_bytes=30 * GIB), device_seconds=0.0),
        record(2, DominatedOutOfMemory(by=3), device_seconds=0.0),
    ]
    alone = trust_of(snapshot([fits(0, 9_000.0, setup_seconds=1.5), *refused])).course
    assert alone.refused is not None
    assert alone.refused_by_setup
    assert alone.refused.seconds == pytest.approx(2 * 1.5)
    ran_out = record(3, OutOfMemory(stage="backward"), device_seconds=4.0)
    course = trust_of(snapshot([fits(0, 9_000.0), *refused, ran_out])).course
    assert course.refused is not None
    assert not course.refused_by_setup
    assert course.refused.seconds == pytest.approx(2 * 4.0)


def test_what_another_study_ran_is_no_price_of_what_was_not_launched() -> None:
    """It took none of this study's seconds, and running out takes some."""
    refused = record(1, PredictedOutOfMemory(predicted_bytes=30 * GIB), device_seconds=0.0)
    carried = record(
        2,
        OutOfMemory(stage="backward"),
        device_seconds=0.0,
        carried=Carried(study="narrow", identity="i", number=7),
    )
    course = trust_of(snapshot([fits(0, 9_000.0, setup_seconds=1.5), refused, carried])).course
    assert course.refused is not None
    assert course.refused_by_setup
    assert course.refused.seconds == pytest.approx(1.5)


def test_steps_of_the_best_are_those_of_the_search_with_each_run_that_measured_again() -> None:
    again = [
        fits(number, speed).model_copy(
            update={"purpose": "confirm", "series": 1, "confirms": 0, "is_baseline": False}
        )
        for number, speed in ((10, 8_900.0), (11, 9_100.0))
    ]
    study = snapshot([fits(0, 9_500.0)], confirmations=tuple(again))
    (row,) = trust_section(study).steps
    assert row.step == "0.431 s"
    assert row.runs == "0.460 s, 0.450 s"


def test_the_winner_s_memory_is_what_was_measured_and_its_parts_only_where_they_are_known() -> None:
    study = snapshot([fits(0, 9_000.0)])
    bare = trust_section(study)
    assert "10.00 GiB allocated, 12.00 GiB reserved" in bare.memory[0]
    assert bare.parts == ()
    assert "not known here" in bare.memory[1]
    parts = {"weights": 4 * GIB, "activations": 6 * GIB, "loss": 0}
    forecast = MemoryForecast(10 * GIB, parts, "yes")
    known = trust_section(replace(study, memory_forecasts={study.records[0].config: forecast}))
    assert [(part.name, part.share) for part in known.parts] == [
        ("activations", 0.6),
        ("weights", 0.4),
    ]


def test_figures_refer_to_trials_by_their_row_and_repeat_none_of_their_numbers() -> None:
    study = snapshot([record(0, OutOfMemory(stage="forward")), _trial(1, 10.0, 9_000.0)])
    memory, speed = trust_section(study).accuracy_figures
    (trace,) = memory.plain["data"]
    assert trace["rows"] == [1]
    assert (trace["x"], trace["y"]) == ("@predicted_peak", "@peak_allocated")
    assert speed.table is not None
    assert speed.table.rows == (("1", "9,000", "10,000", "-10 %"),)


def test_versions_that_changed_and_every_verdict_are_on_the_page() -> None:
    page = render(snapshot(one_of_each(), warnings=("run 2 changed torch 2.11.0 -> 2.12.0",)))
    trust = page[page.index('id="trust"') :]
    assert "run 2 changed torch 2.11.0 -&gt; 2.12.0" in trust
    assert "larger than one that ran out" in trust
    assert "driver" in trust


@pytest.mark.parametrize("trials", [0, 1, 60])
def test_any_study_has_the_section(trials: int) -> None:
    study = snapshot() if trials == 0 else plausible_study(1, trials=trials)
    section = trust_section(study)
    assert section.facts
    assert sum(row.trials for row in section.spent) == trials
