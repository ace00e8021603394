from __future__ import annotations

import json
import random

import pytest

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from search_spaces.space import Objective
from storage.definition import StudySnapshot
from storage.ranking import (
    best_document,
    fastest_by_class,
    gain_over_baseline,
    pareto_front,
    runners_up,
    speed_interval,
    tied,
    verdict_counts,
    winner,
)
from storage.records import (
    Crashed,
    Diverged,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PrunedSlow,
    TrialRecord,
    Verdict,
)
from tests.storage.builders import a_definition, a_measurement, a_record, fits

OOM = OutOfMemory(stage="backward")


def pruned(speed: float) -> PrunedSlow:
    return PrunedSlow(measurement=a_measurement(speed))


def classed(number: int, outcome: Outcome, **config: object) -> TrialRecord:
    return TrialRecord(number=number, config=TrialConfig.model_validate(config), outcome=outcome)


def test_the_winner_is_the_fastest_that_fits() -> None:
    records = [
        a_record(0, fits(100.0), batch=1),
        a_record(1, pruned(900.0), batch=2),
        a_record(2, fits(300.0), batch=3),
        a_record(3, fits(200.0), batch=4),
        a_record(4, OOM, batch=5),
    ]
    best = winner(records)
    assert best is not None
    assert best.number == 2
    assert [record.number for record in runners_up(records)] == [3, 0]
    assert [record.number for record in runners_up(records, limit=1)] == [3]


def test_equal_speeds_are_won_by_less_memory_and_then_by_the_earlier_trial() -> None:
    records = [
        a_record(0, fits(100.0, peak=9 * GIB), batch=1),
        a_record(1, fits(100.0, peak=8 * GIB), batch=2),
        a_record(2, fits(100.0, peak=8 * GIB), batch=3),
    ]
    for seed in range(6):
        shuffled = random.Random(seed).sample(records, 3)
        best = winner(shuffled)
        assert best is not None
        assert best.number == 1
        assert [record.number for record in runners_up(shuffled)] == [2, 0]


@pytest.mark.parametrize("records", [[], [a_record(0, OOM)], [a_record(0, pruned(10.0))]])
def test_where_nothing_fits_nothing_wins(records: list[TrialRecord]) -> None:
    assert winner(records) is None
    assert runners_up(records) == ()
    assert tied(records) == ()
    assert gain_over_baseline(records) is None
    assert pareto_front(records, ("tokens_per_second",)) == ()


def test_a_configuration_counts_once_by_its_last_measurement() -> None:
    records = [
        a_record(0, fits(500.0), batch=1),
        a_record(1, fits(300.0), batch=2),
        a_record(2, fits(200.0), batch=1),
    ]
    best = winner(records)
    assert best is not None
    assert best.number == 1
    assert [record.number for record in runners_up(records)] == [2]


@pytest.mark.parametrize("later", [OOM, Diverged(step=2)])
def test_a_configuration_that_failed_after_it_fitted_no_longer_fits(later: Outcome) -> None:
    assert winner([a_record(0, fits(), batch=1), a_record(1, later, batch=1)]) is None


@pytest.mark.parametrize("later", [Crashed(phase="build"), pruned(10.0)])
def test_a_later_trial_that_says_nothing_about_the_fit_leaves_it(later: Outcome) -> None:
    best = winner([a_record(0, fits(), batch=1), a_record(1, later, batch=1)])
    assert best is not None
    assert best.number == 0


def test_trials_whose_intervals_overlap_the_winners_are_tied_with_it() -> None:
    records = [
        a_record(0, fits(1000.0, spread=0.02), batch=1),
        a_record(1, fits(985.0, spread=0.001), batch=2),
        a_record(2, fits(970.0, spread=0.001), batch=3),
        a_record(3, fits(960.0, spread=0.05), batch=4),
        a_record(4, pruned(999.0), batch=5),
    ]
    assert tied(records) == (1, 3)


def test_the_speed_interval_is_the_step_interval_turned_over() -> None:
    measurement = a_measurement(1000.0, step_seconds=2.0, step_seconds_ci95=(1.6, 2.5))
    assert speed_interval(measurement) == (800.0, 1250.0)


def test_every_class_of_capacity_has_its_fastest_trial() -> None:
    records = [
        classed(0, fits(100.0), lora_rank=8),
        classed(1, fits(200.0), lora_rank=8, micro_batch_size=8),
        classed(2, fits(150.0), lora_rank=8, target_modules="qv"),
        classed(3, fits(90.0), lora_rank=64, target_modules=["v_proj", "q_proj"]),
        classed(4, fits(120.0), lora_rank=8, seq_len=1024),
        classed(5, OOM, lora_rank=128),
    ]
    found = [
        (b.lora_rank, b.target_modules, b.seq_len, b.number) for b in fastest_by_class(records)
    ]
    assert found == [
        (8, "attention", 512, 1),
        (8, "attention", 1024, 4),
        (8, "qv", 512, 2),
        (64, ("q_proj", "v_proj"), 512, 3),
    ]


def test_a_partial_measurement_stands_for_a_class_only_where_nothing_was_finished() -> None:
    records = [
        classed(0, fits(100.0), lora_rank=8),
        classed(1, pruned(900.0), lora_rank=8, micro_batch_size=8),
        classed(2, pruned(50.0), lora_rank=16),
        classed(3, pruned(70.0), lora_rank=16, micro_batch_size=8),
    ]
    found = [(b.lora_rank, b.number, b.is_partial) for b in fastest_by_class(records)]
    assert found == [(8, 0, False), (16, 3, True)]


def test_the_gain_is_over_the_baseline_as_it_was_last_measured() -> None:
    records = [
        a_record(0, fits(100.0), batch=1, is_baseline=True),
        a_record(1, fits(125.0), batch=1, is_baseline=True),
        a_record(2, fits(250.0), batch=2),
    ]
    assert gain_over_baseline(records) == 2.0
    assert gain_over_baseline([a_record(0, OOM, is_baseline=True), records[2]]) is None


def test_the_front_keeps_what_nothing_beats() -> None:
    objectives: tuple[Objective, ...] = ("tokens_per_second", "peak_memory")
    records = [
        a_record(0, fits(100.0, peak=4 * GIB), batch=1),
        a_record(1, fits(200.0, peak=8 * GIB), batch=2),
        a_record(2, fits(150.0, peak=9 * GIB), batch=3),
        a_record(3, fits(200.0, peak=8 * GIB), batch=4),
        a_record(4, fits(90.0, peak=4 * GIB), batch=5),
    ]
    assert [record.number for record in pareto_front(records, objectives)] == [1, 3, 0]
    assert [r.number for r in pareto_front(records, ("tokens_per_second", "cost"))] == [1, 3]


def test_more_trainable_parameters_are_worth_a_slower_step() -> None:
    records = [
        a_record(0, fits(200.0, trainable_parameters=10), batch=1),
        a_record(1, fits(100.0, trainable_parameters=20), batch=2),
    ]
    front = pareto_front(records, ("tokens_per_second", "trainable_parameters"))
    assert [record.number for record in front] == [0, 1]


def a_snapshot(*records: TrialRecord) -> StudySnapshot:
    return StudySnapshot("study", a_definition(), {}, records, wall_seconds=12.5)


def test_the_best_document_is_the_promised_one() -> None:
    records = (
        a_record(0, fits(100.0), batch=1, is_baseline=True, device_seconds=2.0),
        a_record(1, fits(210.0, spread=0.01), batch=2, device_seconds=3.0),
        a_record(2, fits(209.0, spread=0.01), batch=4),
        a_record(3, OOM, batch=8, device_seconds=0.5),
    )
    document = best_document(a_snapshot(*records))
    assert json.loads(json.dumps(document)) == document
    assert document["study"] == "study"
    assert document["gpu"] == {"name": "a10", "budget_bytes": 20 * GIB, "emulated_on": None}
    assert document["model"] == "mistral-7b-v0.3"
    assert document["objective"] == "tokens_per_second"
    assert document["seconds"] == {"wall": 12.5, "device": 5.5}
    assert document["trials"]["total"] == 4
    assert {k for k, v in document["trials"].items() if v} == {"total", "fits", "oom"}
    assert set(document["trials"]) == {"total", *map(str, Verdict)}
    assert document["best"]["number"] == 1
    assert document["best"]["config"]["micro_batch_size"] == 2
    assert document["best"]["measurement"]["tokens_per_second"] == 210.0
    assert document["tied"] == [2]
    assert document["baseline"] == {"number": 0, "tokens_per_second": 100.0, "gain": 2.1}
    (fastest,) = document["fastest_by_class"]
    assert (fastest["number"], fastest["lora_rank"], fastest["seq_len"]) == (1, 16, 512)


def test_the_best_document_of_a_study_where_nothing_fits_has_no_best() -> None:
    document = best_document(a_snapshot(a_record(0, PredictedOutOfMemory(predicted_bytes=1))))
    assert (document["best"], document["baseline"], document["tied"]) == (None, None, [])
    assert document["fastest_by_class"] == []
    assert document["trials"]["predicted_oom"] == 1


def test_every_verdict_is_counted_zero_included() -> None:
    counts = verdict_counts([a_record(0, OOM), a_record(1), a_record(2)])
    assert counts == dict.fromkeys(map(str, Verdict), 0) | {"oom": 1, "fits": 2}
