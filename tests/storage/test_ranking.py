from __future__ import annotations

import gc
import random
import weakref
from collections.abc import Mapping
from dataclasses import replace
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from search_spaces.space import Objective
from storage.definition import StudySnapshot, TargetSpeed
from storage.ranking import Ranking, pareto_front, rank, rank_study, verdict_counts
from storage.records import (
    Crashed,
    Diverged,
    Outcome,
    OutOfMemory,
    PrunedSlow,
    TrialRecord,
    Verdict,
)
from tests.storage.builders import a_definition, a_measurement, a_record, confirmed, fits

OOM = OutOfMemory(stage="backward")
CLASSES = {
    "lora_rank": {"choices": [8, 16, 64, 128]},
    "micro_batch_size": {"choices": [4, 8]},
    "seq_len": {"choices": [512, 1024]},
    "target_modules": {"choices": ["qv", "attention", ["q_proj", "v_proj"]]},
}
SPEED_AND_MEMORY: tuple[Objective, ...] = ("tokens_per_second", "peak_memory")


def ranked(*records: TrialRecord, **space: Any) -> Ranking:
    """Rank by micro-batch sizes of 1 to 8, unless the space says otherwise."""
    values = {"dimensions": {"micro_batch_size": {"choices": list(range(1, 9))}}} | space
    return rank(records, a_definition(**values))


def numbers(records: tuple[TrialRecord, ...]) -> list[int]:
    return [record.number for record in records]


def pruned(speed: float) -> PrunedSlow:
    return PrunedSlow(measurement=a_measurement(speed))


def classed(number: int, outcome: Outcome, **config: object) -> TrialRecord:
    return TrialRecord(number=number, config=TrialConfig.model_validate(config), outcome=outcome)


def test_the_winner_is_the_fastest_that_fits() -> None:
    ranking = ranked(
        a_record(0, fits(100.0), batch=1),
        a_record(1, pruned(900.0), batch=2),
        a_record(2, fits(300.0), batch=3),
        a_record(3, fits(200.0), batch=4),
        a_record(4, OOM, batch=5),
    )
    assert numbers(ranking.ranked) == [2, 3, 0]
    assert ranking.winner == ranking.ranked[0]
    assert ranking.front == ()


def test_equal_speeds_are_won_by_less_memory_and_then_by_the_earlier_trial() -> None:
    records = [
        a_record(0, fits(100.0, peak=9 * GIB), batch=1),
        a_record(1, fits(100.0, peak=8 * GIB), batch=2),
        a_record(2, fits(100.0, peak=8 * GIB), batch=3),
    ]
    for seed in range(6):
        shuffled = random.Random(seed).sample(records, 3)
        assert numbers(ranked(*shuffled).ranked) == [1, 2, 0]


@pytest.mark.parametrize("records", [[], [a_record(0, OOM)], [a_record(0, pruned(10.0))]])
@pytest.mark.parametrize("objectives", [["tokens_per_second"], SPEED_AND_MEMORY])
def test_where_nothing_fits_nothing_wins(
    records: list[TrialRecord], objectives: list[Objective]
) -> None:
    ranking = ranked(*records, objectives=objectives)
    assert (ranking.winner, ranking.ranked, ranking.tied, ranking.front) == (None, (), (), ())


def test_a_configuration_counts_once_by_its_last_measurement() -> None:
    ranking = ranked(
        a_record(0, fits(500.0), batch=1),
        a_record(1, fits(300.0), batch=2),
        a_record(2, fits(200.0), batch=1),
    )
    assert numbers(ranking.ranked) == [1, 2]


@pytest.mark.parametrize("later", [OOM, Diverged(step=2)])
def test_a_configuration_that_failed_after_it_fitted_no_longer_fits(later: Outcome) -> None:
    assert ranked(a_record(0, fits(), batch=1), a_record(1, later, batch=1)).winner is None


@pytest.mark.parametrize("later", [Crashed(phase="build"), pruned(10.0)])
def test_a_later_trial_that_says_nothing_about_the_fit_leaves_it(later: Outcome) -> None:
    ranking = ranked(a_record(0, fits(), batch=1), a_record(1, later, batch=1))
    assert numbers(ranking.ranked) == [0]


@pytest.mark.parametrize("broken", [float("nan"), float("inf"), 0.0, -1.0])
def test_a_speed_that_is_not_a_finite_positive_number_is_never_ranked(broken: float) -> None:
    odd = a_measurement().model_copy(update={"tokens_per_second": broken})
    odd_record = a_record(1, batch=2).model_copy(
        update={"outcome": fits().model_copy(update={"measurement": odd})}
    )
    assert numbers(ranked(a_record(0, fits(10.0), batch=1), odd_record).ranked) == [0]


BY_OBJECTIVE = (
    a_record(0, fits(300.0, peak=9 * GIB, trainable_parameters=10), batch=1),
    a_record(1, fits(200.0, peak=4 * GIB, trainable_parameters=10), batch=2),
    a_record(2, fits(100.0, peak=6 * GIB, trainable_parameters=30), batch=3),
)


@pytest.mark.parametrize(
    ("objective", "expected"),
    [
        ("tokens_per_second", [0, 1, 2]),
        ("peak_memory", [1, 2, 0]),
        # Equal counts are ordered by speed.
        ("trainable_parameters", [2, 0, 1]),
    ],
)
def test_one_objective_is_what_trials_are_ordered_by(
    objective: Objective, expected: list[int]
) -> None:
    assert numbers(ranked(*BY_OBJECTIVE, objectives=[objective]).ranked) == expected


def test_of_several_objectives_the_knee_of_the_front_wins_and_the_front_comes_first() -> None:
    ranking = ranked(
        a_record(0, fits(100.0, peak=4 * GIB), batch=1),  # the least memory
        a_record(1, fits(200.0, peak=12 * GIB), batch=2),  # the fastest
        a_record(2, fits(180.0, peak=6 * GIB), batch=3),  # nearest to both
        a_record(3, fits(170.0, peak=7 * GIB), batch=4),  # beaten by 2 in both
        objectives=SPEED_AND_MEMORY,
    )
    assert numbers(ranking.front) == [2, 1, 0]
    assert numbers(ranking.ranked) == [2, 1, 0, 3]
    assert ranking.winner == ranking.front[0]


@pytest.mark.parametrize(
    ("objectives", "expected"),
    [(SPEED_AND_MEMORY, 1), (("peak_memory", "tokens_per_second"), 0)],
)
def test_of_two_ends_the_objective_that_was_named_first_decides(
    objectives: tuple[Objective, ...], expected: int
) -> None:
    ends = (
        a_record(0, fits(100.0, peak=4 * GIB), batch=1),
        a_record(1, fits(200.0, peak=12 * GIB), batch=2),
    )
    winner = ranked(*ends, objectives=objectives).winner
    assert winner is not None
    assert winner.number == expected


def test_an_objective_in_which_all_are_equal_leaves_the_knee_to_the_others() -> None:
    objectives = ("trainable_parameters", *SPEED_AND_MEMORY)
    ranking = ranked(
        a_record(0, fits(100.0, peak=8 * GIB), batch=1),
        a_record(1, fits(200.0, peak=8 * GIB), batch=2),
        objectives=objectives,
    )
    assert numbers(ranking.front) == [1]
    assert numbers(ranking.ranked) == [1, 0]


def test_what_overlaps_the_winner_is_close_and_a_tie_once_measured_beside_it() -> None:
    records = [
        a_record(0, fits(1000.0, spread=0.02), batch=1),
        a_record(1, fits(985.0, spread=0.02), batch=2),
        a_record(2, fits(900.0, spread=0.02), batch=3),
        a_record(3, fits(960.0, spread=0.05), batch=4),
        a_record(4, pruned(999.0), batch=5),
    ]
    ranking = ranked(*records)
    assert (numbers(ranking.close), ranking.tied) == ([1, 3], ())
    again = confirmed(*records[:3])
    assert rank(records, ranking.definition, again).tied == (1,)


def test_a_speed_without_an_interval_is_close_to_nothing() -> None:
    few = {"step_seconds_ci95": None}
    ranking = ranked(
        a_record(0, fits(1000.0, spread=0.02), batch=1),
        a_record(1, fits(999.0, spread=0.5, **few), batch=2),
    )
    assert ranking.close == ()
    sure_second = a_record(1, fits(999.0, spread=0.5), batch=2)
    unsure_first = a_record(0, fits(1000.0, spread=0.02, **few), batch=1)
    assert ranked(unsure_first, sure_second).close == ()


@pytest.mark.parametrize(
    ("objectives", "expected"),
    [
        (["peak_memory"], (2,)),
        (["trainable_parameters"], (1, 2)),
        (SPEED_AND_MEMORY, (2,)),
        (["tokens_per_second"], (1, 2)),
    ],
)
def test_ties_are_in_what_is_ranked_by(
    objectives: list[Objective], expected: tuple[int, ...]
) -> None:
    records = [
        a_record(0, fits(1000.0, peak=4 * GIB, spread=0.02), batch=1),
        a_record(1, fits(999.0, peak=4 * GIB + 1, spread=0.02), batch=2),
        a_record(2, fits(990.0, peak=4 * GIB, spread=0.02), batch=3),
    ]
    searched = ranked(*records, objectives=objectives)
    assert tuple(numbers(searched.close)) == expected
    has_speed = "tokens_per_second" in objectives
    assert searched.tied == (() if has_speed else expected)
    ranking = rank(records, searched.definition, confirmed(*records))
    assert ranking.winner is not None
    assert ranking.winner.number == 0
    assert ranking.tied == expected


def test_a_baseline_outside_the_space_is_a_reference_and_never_ranked() -> None:
    outside = classed(0, fits(900.0), lora_rank=16).model_copy(update={"is_baseline": True})
    inside = classed(1, fits(100.0), lora_rank=64, micro_batch_size=2)
    for objectives in (["tokens_per_second"], ["peak_memory"], SPEED_AND_MEMORY):
        ranking = ranked(outside, inside, fixed={"lora_rank": 64}, objectives=objectives)
        assert numbers(ranking.ranked) == [1]
        assert ranking.tied == ()
        assert [best.number for best in ranking.fastest_by_class] == [1]
        assert ranking.baseline == outside
        assert not ranking.is_baseline_in_space
    assert ranked(outside, fixed={"lora_rank": 64}).winner is None


@pytest.mark.parametrize(
    ("baseline", "space"),
    [
        ({"lora_alpha": 32}, {}),
        ({}, {"fixed": {"lora_alpha": 32}}),
        ({"effective_batch_size": 4}, {}),
        ({"target_modules": ["o_proj", "q_proj", "k_proj", "v_proj"]}, {}),
        ({}, {"fixed": {"target_modules": ["q_proj", "k_proj", "v_proj", "o_proj"]}}),
    ],
)
def test_a_baseline_that_trains_as_the_space_does_is_held_however_it_is_spelled(
    baseline: dict[str, Any], space: dict[str, Any]
) -> None:
    record = classed(0, fits(), **baseline).model_copy(update={"is_baseline": True})
    assert numbers(ranked(record, **space).ranked) == [0]


def test_every_class_of_capacity_has_its_fastest_trial() -> None:
    ranking = ranked(
        classed(0, fits(100.0), lora_rank=8),
        classed(1, fits(200.0), lora_rank=8, micro_batch_size=8),
        classed(2, fits(150.0), lora_rank=8, target_modules="qv"),
        classed(3, fits(90.0), lora_rank=64, target_modules=["v_proj", "q_proj"]),
        classed(4, fits(120.0), lora_rank=8, seq_len=1024),
        classed(5, OOM, lora_rank=128),
        # The same modules by their names: no class of its own.
        classed(6, fits(110.0), lora_rank=8, target_modules=["q_proj", "v_proj"]),
        dimensions=CLASSES,
    )
    found = [(b.lora_rank, b.target_modules, b.seq_len, b.number) for b in ranking.fastest_by_class]
    assert found == [
        (8, "attention", 512, 1),
        (8, "attention", 1024, 4),
        (8, "qv", 512, 2),
        (64, ("q_proj", "v_proj"), 512, 3),
    ]


def test_a_partial_measurement_stands_for_a_class_only_where_nothing_was_finished() -> None:
    ranking = ranked(
        classed(0, fits(100.0), lora_rank=8),
        classed(1, pruned(900.0), lora_rank=8, micro_batch_size=8),
        classed(2, pruned(50.0), lora_rank=16),
        classed(3, pruned(70.0), lora_rank=16, micro_batch_size=8),
        dimensions=CLASSES,
    )
    found = [(b.lora_rank, b.number, b.is_partial) for b in ranking.fastest_by_class]
    assert found == [(8, 0, False), (16, 3, True)]


def test_the_baseline_is_as_it_was_last_measured() -> None:
    ranking = ranked(
        a_record(0, fits(100.0), is_baseline=True),
        a_record(1, fits(125.0), is_baseline=True),
        a_record(2, fits(250.0), batch=2),
        a_record(3, OOM, is_baseline=True),
    )
    assert ranking.baseline is not None
    assert ranking.baseline.number == 1


def test_the_front_keeps_what_nothing_beats() -> None:
    records = [
        a_record(0, fits(100.0, peak=4 * GIB), batch=1),
        a_record(1, fits(200.0, peak=8 * GIB), batch=2),
        a_record(2, fits(150.0, peak=9 * GIB), batch=3),
        a_record(3, fits(200.0, peak=8 * GIB), batch=4),
        a_record(4, fits(90.0, peak=4 * GIB), batch=5),
    ]
    assert numbers(pareto_front(records, SPEED_AND_MEMORY)) == [1, 3, 0]
    assert numbers(pareto_front(records, ("tokens_per_second",))) == [1, 3]


def test_the_front_of_any_trials_is_what_comparing_all_pairs_gives() -> None:
    rng = random.Random(0)
    objectives: tuple[Objective, ...] = (*SPEED_AND_MEMORY, "trainable_parameters")
    for _ in range(50):
        points = [tuple(rng.randint(1, 5) for _ in range(3)) for _ in range(12)]
        records = [
            a_record(n, fits(s, peak=p, trainable_parameters=t), batch=n + 1)
            for n, (s, p, t) in enumerate(points)
        ]
        beaten = {
            n
            for n, (s, p, t) in enumerate(points)
            if any(o != (s, p, t) and o[0] >= s and o[1] <= p and o[2] >= t for o in points)
        }
        assert set(numbers(pareto_front(records, objectives))) == set(range(12)) - beaten


def test_more_trainable_parameters_are_worth_a_slower_step() -> None:
    records = [
        a_record(0, fits(200.0, trainable_parameters=10), batch=1),
        a_record(1, fits(100.0, trainable_parameters=20), batch=2),
    ]
    front = pareto_front(records, ("tokens_per_second", "trainable_parameters"))
    assert numbers(front) == [0, 1]


def test_every_verdict_is_counted_zero_included() -> None:
    counts = verdict_counts([a_record(0, OOM), a_record(1), a_record(2)])
    assert counts == dict.fromkeys(map(str, Verdict), 0) | {"oom": 1, "fits": 2}


def test_a_study_is_ranked_once_and_a_changed_one_anew() -> None:
    study = StudySnapshot("study", a_definition(), {}, (a_record(0),))
    assert rank_study(study) is rank_study(study)
    grown = replace(study, records=(a_record(0), a_record(1, fits(2_000.0), batch=2)))
    assert numbers(rank_study(grown).ranked) == [1, 0]
    kept = weakref.ref(study)
    del study
    gc.collect()
    assert kept() is None, "a ranking keeps no study that nobody reads any more"


def test_the_baseline_has_a_recipe_in_every_class_and_is_its_own() -> None:
    base = classed(0, fits(100.0), lora_rank=16).model_copy(update={"is_baseline": True})
    own = classed(1, fits(200.0), lora_rank=16, micro_batch_size=8)
    space = {"dimensions": CLASSES}
    other = classed(2, fits(300.0), lora_rank=64, target_modules="qv", micro_batch_size=8)
    ranking = ranked(base, own, other, **space)
    assert ranking.recipe_for(own.config) == TrialConfig()
    assert ranking.recipe_for(other.config) == TrialConfig(lora_rank=64, target_modules="qv")
    assert ranking.reference_for(own.config) == base
    assert ranking.reference_for(other.config) is None
    own_recipe = classed(3, fits(150.0), lora_rank=64, target_modules="qv")
    assert ranked(base, other, own_recipe, **space).reference_for(other.config) == own_recipe


NUMERICS = {
    "micro_batch_size": {"choices": [4, 8]},
    "compute_dtype": {"choices": ["bf16", "fp8", "int8"]},
    "quantization": {"choices": ["nf4"]},
}
PREDICTED = {
    number: TargetSpeed(speed, None, None, "predicted")
    for number, speed in {0: 500.0, 1: 550.0, 2: 900.0, 3: 800.0}.items()
}
BOTH_CLASSES = (
    classed(0, fits(100.0, spread=0.01)),
    classed(1, fits(200.0, spread=0.01), micro_batch_size=8),
    classed(2, fits(150.0, spread=0.01), compute_dtype="int8"),
    classed(3, fits(190.0, spread=0.01), compute_dtype="int8", micro_batch_size=8),
)


def for_a_target(
    *records: TrialRecord,
    emulated_on: str | None = "NVIDIA H200",
    runs: tuple[TrialRecord, ...] = (),
    speeds: Mapping[int, TargetSpeed] = PREDICTED,
    **space: Any,
) -> Ranking:
    definition = a_definition(**({"dimensions": NUMERICS} | space))
    target = definition.target.model_copy(update={"emulated_on": emulated_on})
    definition = definition.model_copy(update={"target": target})
    return rank(records, definition, runs, target_speeds=speeds)


def test_the_target_itself_measures_which_class_of_numerics_is_faster() -> None:
    ranking = for_a_target(*BOTH_CLASSES, emulated_on=None)
    assert numbers(ranking.ranked) == [1, 3, 2, 0]
    assert ranking.numerics_choice == "measured"
    assert ranking.fastest_with_16_bits is None
    found = [(b.numerics, b.number) for b in ranking.fastest_by_class]
    assert found == [("16-bit", 1), ("int8", 3)]


def test_where_another_gpu_stands_in_the_target_is_predicted_between_classes() -> None:
    # The best of each was measured: 200 on the stand-in is 550 on the target, and 190 is 800. That
    # trial 2 is predicted to be faster there than trial 3 does not count: both were measured.
    ranking = for_a_target(*BOTH_CLASSES)
    assert numbers(ranking.ranked) == [3, 2, 1, 0]
    assert ranking.numerics_choice == "predicted"
    assert ranking.winner is not None
    assert ranking.winner.measurement == BOTH_CLASSES[3].measurement
    assert ranking.fastest_with_16_bits == BOTH_CLASSES[1]
    # Overlapping intervals on the stand-in say nothing of the target.
    assert ranking.close == ()


def test_a_class_without_a_prediction_is_compared_as_measured() -> None:
    ranking = for_a_target(*BOTH_CLASSES, speeds={1: PREDICTED[1]})
    assert numbers(ranking.ranked) == [1, 3, 2, 0]
    assert ranking.numerics_choice == "measured"


def test_confirming_the_predicted_class_leaves_the_answer_as_it_was() -> None:
    winner, baseline = BOTH_CLASSES[3], BOTH_CLASSES[0]
    ranking = for_a_target(*BOTH_CLASSES, runs=confirmed(baseline, winner))
    # Trial 1 outran the baseline, which was measured again, and stays the best of its class.
    assert numbers(ranking.ranked)[0] == 3
    assert ranking.is_confirmed
    assert ranking.tied == ()
    assert ranking.fastest_with_16_bits is not None
    assert ranking.fastest_with_16_bits.number == 1


def test_several_objectives_weigh_speed_as_it_is_predicted_between_classes() -> None:
    records = (
        classed(1, fits(200.0, peak=9 * GIB), micro_batch_size=8),
        classed(3, fits(190.0, peak=9 * GIB), compute_dtype="int8", micro_batch_size=8),
    )
    ranking = for_a_target(*records, objectives=SPEED_AND_MEMORY)
    assert numbers(ranking.front) == [3]
