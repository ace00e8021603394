"""The order of a study's trials, what is measured again, what the best gained, what did not fit."""

from __future__ import annotations

import gc
import math
import random
import weakref
from collections.abc import Iterator, Mapping
from dataclasses import replace
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.space import Objective
from qlora_sweep.storage.confirmations import (
    BETWEEN_RUNS,
    ERRORS_OF_STEPS,
    Confirmations,
    Ratio,
    Spread,
    pool,
    scaled,
)
from qlora_sweep.storage.definition import StudySnapshot, TargetSpeed
from qlora_sweep.storage.ranking import (
    RankedGain,
    Ranking,
    measured_of,
    rank,
    rank_study,
    undominated,
    verdict_counts,
)
from qlora_sweep.storage.records import (
    Crashed,
    Diverged,
    DominatedOutOfMemory,
    Measured,
    Measurement,
    Need,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    PredictionRecord,
    PrunedSlow,
    TrialRecord,
    Verdict,
    need_of,
    predicted_need,
)
from tests.storage.builders import (
    BUDGET,
    SOAKED,
    a_definition,
    a_measurement,
    a_record,
    confirmed,
    fits,
)

OOM = OutOfMemory(stage="backward")
SPEED: tuple[Objective, ...] = ("tokens_per_second",)
MEMORY: tuple[Objective, ...] = ("peak_memory",)
BOTH: tuple[Objective, ...] = (*SPEED, *MEMORY)
FEW = {"step_seconds_ci95": None}


def ranked(*records: TrialRecord, **space: Any) -> Ranking:
    """Rank by micro-batch sizes of 1 to 8, unless the space says otherwise."""
    values = {"dimensions": {"micro_batch_size": {"choices": list(range(1, 9))}}} | space
    return rank(records, a_definition(**values))


def numbers(records: tuple[TrialRecord, ...]) -> list[int]:
    return [record.number for record in records]


def pruned(speed: float) -> PrunedSlow:
    return PrunedSlow(measurement=a_measurement(speed))


def trials(*outcomes: Outcome) -> tuple[TrialRecord, ...]:
    """Return a trial of each outcome, each with a micro-batch size of its own."""
    return tuple(a_record(n, outcome, batch=n + 1) for n, outcome in enumerate(outcomes))


def at(speed: float, gib: float, **changes: Any) -> Measured:
    return fits(speed, peak=int(gib * GIB), **changes)


def classed(number: int, outcome: Outcome, **config: object) -> TrialRecord:
    return TrialRecord(number=number, config=TrialConfig.model_validate(config), outcome=outcome)


ENDS = trials(at(100, 4), at(200, 12))
COUNTED = trials(
    at(300, 9, trainable_parameters=10),
    at(200, 4, trainable_parameters=10),
    at(100, 6, trainable_parameters=30),
)
ORDERS: dict[str, tuple[tuple[TrialRecord, ...], tuple[Objective, ...], list[int], list[int]]] = {
    # records, objectives, their order, the front of several objectives
    "the fastest that fits": (
        trials(fits(100.0), pruned(900.0), fits(300.0), fits(200.0), OOM),
        *(SPEED, [2, 3, 0], []),
    ),
    "less memory of equal speeds, then the earlier": (
        trials(at(100, 9), at(100, 8), at(100, 8))[::-1],
        *(SPEED, [1, 2, 0], []),
    ),
    "once, by its last measurement": (
        (
            a_record(0, fits(500.0), batch=1),
            a_record(1, fits(300.0), batch=2),
            a_record(2, fits(200.0), batch=1),
        ),
        *(SPEED, [1, 2], []),
    ),
    "out of memory after it fitted": (
        (a_record(0, batch=1), a_record(1, OOM, batch=1), a_record(2, batch=2)),
        *(SPEED, [2], []),
    ),
    "diverged after it fitted": ((a_record(0), a_record(1, Diverged(step=2))), SPEED, [], []),
    "crashed after it fitted": (
        (a_record(0), a_record(1, Crashed(phase="build")), a_record(2, pruned(10.0))),
        *(SPEED, [0], []),
    ),
    "nothing": ((), BOTH, [], []),
    "nothing that fits": (trials(OOM, pruned(10.0)), BOTH, [], []),
    "memory": (COUNTED, MEMORY, [1, 2, 0], []),
    "equal counts by speed": (COUNTED, ("trainable_parameters",), [2, 0, 1], []),
    "the knee of several, and the front first": (
        # The least memory, the fastest, the nearest to both, and what that one beats in both.
        trials(at(100, 4), at(200, 12), at(180, 6), at(170, 7)),
        *(BOTH, [2, 1, 0, 3], [2, 1, 0]),
    ),
    "of two ends the objective that was named first": (ENDS, BOTH, [1, 0], [1, 0]),
    "of two ends the other": (ENDS, BOTH[::-1], [0, 1], [0, 1]),
    "an objective in which all are equal": (
        trials(at(100, 8), at(200, 8)),
        *(("trainable_parameters", *BOTH), [1, 0], [1]),
    ),
}


@pytest.mark.parametrize(("records", "objectives", "order", "front"), ORDERS.values(), ids=ORDERS)
def test_trials_are_ordered_by_what_is_asked_for(
    records: tuple[TrialRecord, ...],
    objectives: tuple[Objective, ...],
    order: list[int],
    front: list[int],
) -> None:
    ranking = ranked(*records, objectives=objectives)
    assert numbers(ranking.ranked) == order
    assert sorted(numbers(ranking.front)) == sorted(front)
    assert ranking.winner == next(iter(ranking.ranked), None)


def test_the_front_of_any_trials_is_what_comparing_all_pairs_gives() -> None:
    rng = random.Random(0)
    for _ in range(50):
        points = {n: tuple(float(rng.randint(1, 5)) for _ in range(3)) for n in range(12)}
        beaten = {
            n
            for n, point in points.items()
            if any(o != point and min(np.subtract(o, point)) >= 0 for o in points.values())
        }
        assert undominated(points) == set(points) - beaten


def test_what_overlaps_the_winner_is_close_and_a_tie_once_measured_beside_it() -> None:
    speeds = ((1000.0, 0.02), (985.0, 0.04), (900.0, 0.02), (960.0, 0.07))
    records = trials(*(fits(speed, spread=spread) for speed, spread in speeds), pruned(999.0))
    ranking = ranked(*records)
    assert (numbers(ranking.close), ranking.tied) == ([1, 3], ())
    assert rank(records, ranking.definition, confirmed(*records[:3])).tied == (1,)
    # A speed without an interval is close to nothing.
    assert ranked(*trials(fits(1000.0, spread=0.02), fits(999.0, spread=0.5, **FEW))).close == ()


@pytest.mark.parametrize(
    ("objectives", "expected"),
    [(MEMORY, (2,)), (("trainable_parameters",), (1, 2)), (BOTH, (2,)), (SPEED, (1, 2))],
)
def test_ties_are_in_what_is_ranked_by(
    objectives: tuple[Objective, ...], expected: tuple[int, ...]
) -> None:
    peaks = (4 * GIB, 4 * GIB + 1, 4 * GIB)
    speeds = zip((1000.0, 999.0, 990.0), peaks, strict=True)
    records = trials(*(fits(speed, peak=peak, spread=0.04) for speed, peak in speeds))
    searched = ranked(*records, objectives=objectives)
    assert tuple(numbers(searched.close)) == expected
    assert searched.tied == (() if "tokens_per_second" in objectives else expected)
    ranking = rank(records, searched.definition, confirmed(*records))
    assert (numbers(ranking.ranked)[0], ranking.tied) == (0, expected)


def test_every_verdict_is_counted_zero_included() -> None:
    counts = verdict_counts(trials(OOM, fits(), fits()))
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


# The baseline, and classes of capacity

CLASSES = {
    "lora_rank": {"choices": [8, 16, 64, 128]},
    "micro_batch_size": {"choices": [4, 8]},
    "seq_len": {"choices": [512, 1024]},
    "target_modules": {"choices": ["qv", "attention", ["q_proj", "v_proj"]]},
}


def as_baseline(record: TrialRecord) -> TrialRecord:
    return record.model_copy(update={"is_baseline": True})


def test_a_baseline_outside_the_space_is_a_reference_and_never_ranked() -> None:
    outside = as_baseline(classed(0, fits(900.0), lora_rank=16))
    inside = classed(1, fits(100.0), lora_rank=64, micro_batch_size=2)
    for objectives in (SPEED, MEMORY, BOTH):
        ranking = ranked(outside, inside, fixed={"lora_rank": 64}, objectives=objectives)
        assert (numbers(ranking.ranked), ranking.tied) == ([1], ())
        assert [best.number for best in ranking.fastest_by_class] == [1]
        assert (ranking.baseline.record, ranking.is_baseline_in_space) == (outside, False)
    again = [as_baseline(a_record(n, outcome)) for n, outcome in enumerate((fits(), fits(), OOM))]
    assert ranked(*again).baseline.record == again[1], "as it was last measured"


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
        # What was stopped stands for a class only where nothing was finished.
        classed(7, pruned(900.0), lora_rank=8),
        classed(8, pruned(50.0), lora_rank=16),
        classed(9, pruned(70.0), lora_rank=16, micro_batch_size=8),
        dimensions=CLASSES,
    )
    found = [
        (b.lora_rank, b.target_modules, b.seq_len, b.number, b.is_partial)
        for b in ranking.fastest_by_class
    ]
    assert found == [
        (8, "attention", 512, 1, False),
        (8, "attention", 1024, 4, False),
        (8, "qv", 512, 2, False),
        (16, "attention", 512, 9, True),
        (64, ("q_proj", "v_proj"), 512, 3, False),
    ]


def test_the_baseline_has_a_recipe_in_every_class_and_is_its_own() -> None:
    base = as_baseline(classed(0, fits(100.0), lora_rank=16))
    own = classed(1, fits(200.0), lora_rank=16, micro_batch_size=8)
    other = classed(2, fits(300.0), lora_rank=64, target_modules="qv", micro_batch_size=8)
    ranking = ranked(base, own, other, dimensions=CLASSES)
    assert ranking.recipe_for(own.config) == TrialConfig()
    assert ranking.recipe_for(other.config) == TrialConfig(lora_rank=64, target_modules="qv")
    assert ranking.reference_for(own.config).record == base
    assert ranking.reference_for(other.config) is None
    recipe = classed(3, fits(150.0), lora_rank=64, target_modules="qv")
    ranking = ranked(base, other, recipe, dimensions=CLASSES)
    assert ranking.reference_for(other.config).record == recipe


# Classes of numerics, where another GPU may stand in for the target

NUMERICS = {
    "micro_batch_size": {"choices": [4, 8]},
    "compute_dtype": {"choices": ["bf16", "fp16", "fp8", "int8"]},
    "quantization": {"choices": ["nf4"]},
}
FOUR = (
    classed(0, at(100, 10, spread=0.01)),
    classed(1, at(200, 10, spread=0.01), micro_batch_size=8),
    classed(2, at(150, 10, spread=0.01), compute_dtype="int8"),
    classed(3, at(190, 10, spread=0.01), compute_dtype="int8", micro_batch_size=8),
)


def predicted(speed: float, *common: float, own: float = 0.05) -> TargetSpeed:
    """A speed whose own part is off by so much, beside what all have in common."""
    spread = math.hypot(own, *common)
    return TargetSpeed(speed, speed * 0.8, speed * 1.25, "predicted", spread, own, common)


SPEEDS = {0: predicted(500.0), 1: predicted(550.0), 2: predicted(900.0), 3: predicted(800.0)}


def for_a_target(
    *records: TrialRecord,
    emulated_on: str | None = "NVIDIA H200",
    runs: tuple[TrialRecord, ...] = (),
    speeds: Mapping[int, TargetSpeed] = SPEEDS,
    **space: Any,
) -> Ranking:
    definition = a_definition(**({"dimensions": NUMERICS} | space))
    target = definition.target.model_copy(update={"emulated_on": emulated_on})
    definition = definition.model_copy(update={"target": target})
    return rank(records, definition, runs, target_speeds=speeds)


def test_the_target_itself_measures_which_class_of_numerics_is_faster() -> None:
    ranking = for_a_target(*FOUR, emulated_on=None)
    assert (numbers(ranking.ranked), ranking.numerics_choice) == ([1, 3, 2, 0], "measured")
    assert ranking.other_numerics is None, "it is slower for sure"
    found = [(b.numerics, b.number) for b in ranking.fastest_by_class]
    assert found == [("16-bit", 1), ("int8", 3)]
    # Where one is not predicted, all are compared as measured.
    some = for_a_target(*FOUR, speeds={1: SPEEDS[1]})
    assert (numbers(some.ranked), some.numerics_choice) == ([1, 3, 2, 0], "measured")


def test_where_another_gpu_stands_in_what_is_predicted_of_the_target_decides() -> None:
    ranking = for_a_target(*FOUR)
    assert (numbers(ranking.ranked), ranking.numerics_choice) == ([2, 3, 1, 0], "predicted")
    assert ranking.ranked[0].measurement == FOUR[2].measurement, "its measurement is its own"
    assert ranking.other_numerics.record == FOUR[1]
    # Intervals on the stand-in say nothing of the target.
    assert ranking.close == ()
    assert numbers(for_a_target(FOUR[1], FOUR[3], objectives=BOTH).front) == [3]
    # Nor does it count which were measured again.
    again = for_a_target(*FOUR, runs=confirmed(FOUR[0], FOUR[3]))
    assert (numbers(again.ranked), again.is_confirmed, again.tied) == ([2, 3, 1, 0], False, ())
    assert for_a_target(*FOUR, runs=confirmed(FOUR[0], FOUR[2])).is_confirmed


def test_a_gain_is_the_targets_and_the_stand_ins_is_named_beside_it() -> None:
    baseline = as_baseline(FOUR[0])
    gain = for_a_target(baseline, *FOUR[1:2]).gain
    assert gain.reason == "not_shown", "1.1 times, give or take 0.12"
    surer = {0: predicted(500.0, 0.3, own=0.01), 1: predicted(550.0, 0.3, own=0.01)}
    gain = for_a_target(baseline, *FOUR[1:2], speeds=surer).gain
    assert gain.ratio is not None
    assert gain.measured is not None
    assert gain.ratio.value == pytest.approx(1.1)
    # What both are off by in common cancels.
    assert gain.ratio.high == pytest.approx(1.1 * math.exp(1.645 * math.hypot(0.01, 0.01)))
    assert gain.measured.value == pytest.approx(2.0)
    assert for_a_target(baseline, *FOUR[1:2], emulated_on=None).gain.measured is None


@pytest.mark.parametrize(
    ("int8", "is_chosen"),
    # Its products are off by as much as 0.34; 1.47 times (0.92 to 2.37) is not sure.
    [(predicted(735.0, 0.28), False), (predicted(1000.0, 0.28), True)],
)
def test_8_bits_have_to_be_sure_to_gain_on_the_target(int8: TargetSpeed, is_chosen: bool) -> None:
    speeds = {1: predicted(500.0, 0.0), 3: int8}
    ranking = for_a_target(FOUR[1], FOUR[3], speeds=speeds)
    assert numbers(ranking.ranked) == ([3, 1] if is_chosen else [1, 3])
    assert ranking.other_numerics.record == (FOUR[1] if is_chosen else FOUR[3])


@pytest.mark.parametrize(("speed", "first"), [(205.0, 1), (230.0, 3)])
def test_8_bits_have_to_be_sure_to_gain_where_the_gpu_itself_runs(speed: float, first: int) -> None:
    int8 = classed(3, at(speed, 10, spread=0.03), compute_dtype="int8")
    ranking = for_a_target(FOUR[1], int8, emulated_on=None)
    assert ranking.winner is not None
    assert ranking.winner.number == first
    assert ranking.other_numerics is not None
    # Runs in turns may tell.
    assert numbers(ranking.close) == ([3] if first == 1 else [])


def test_of_a_tie_the_plainer_is_recommended() -> None:
    def best(*records: TrialRecord) -> int:
        ranking = for_a_target(*records, emulated_on=None)
        assert ranking.winner is not None
        return ranking.winner.number

    fp16 = classed(0, at(203, 10), compute_dtype="fp16", micro_batch_size=8)
    bf16 = classed(1, at(200, 10), micro_batch_size=8)
    less = classed(2, at(199.5, 8), micro_batch_size=4)
    assert best(fp16, bf16) == 1
    assert best(fp16, bf16, less) == 2
    faster = fp16.model_copy(update={"outcome": at(206, 10)})
    assert best(faster, bf16) == 0, "more than a tie"
    # Beaten in memory by more than a tie, and no faster: it lies under the front.
    assert best(fp16.model_copy(update={"outcome": at(203, 8)}), bf16) == 0
    gave_back = classed(1, at(200, 8, allocator_retries=3), micro_batch_size=8)
    assert best(fp16, gave_back) == 0


def test_the_recommendation_is_of_the_class_nearest_to_the_standard_recipes() -> None:
    small = classed(0, fits(300.0), lora_rank=8, target_modules="qv")
    standard = classed(1, fits(100.0), lora_rank=16)
    double = classed(2, fits(90.0), lora_rank=64)
    ranking = ranked(small, standard, double, dimensions=CLASSES)
    assert numbers(ranking.ranked) == [1, 0, 2]
    assert numbers(ranking.by_speed) == [0, 1, 2]
    # What does not fit is not recommended.
    lost = classed(1, OOM, lora_rank=16)
    assert numbers(ranked(small, lost, double, dimensions=CLASSES).ranked) == [2, 0]
    assert numbers(ranked(small, dimensions=CLASSES).ranked) == [0]


# Runs that measure again: their pooled speed and its interval


def ends(measured: Measurement) -> tuple[float, float]:
    assert measured.step_seconds_ci95 is not None
    return measured.step_seconds_ci95


def test_the_interval_covers_the_truth_between_runs_95_times_in_100() -> None:
    """Runs differ by 3 %, the steps within one by a tenth of that."""
    rng = np.random.default_rng(0)

    def drawn() -> Measurement:
        return a_measurement(1000.0 * math.exp(rng.normal(0, 0.03)), spread=0.003)

    covered = alone = 0
    for _ in range(400):
        groups = [[drawn(), drawn()] for _ in range(3)]
        low, high = ends(pool(groups[0], spread=Spread.of_runs(groups)))
        covered += low <= 4.096 <= high
        one_low, one_high = ends(groups[0][0])
        alone += one_low <= 4.096 <= one_high
    assert covered / 400 >= 0.94
    assert alone / 400 < 0.2, "an interval of one run would have missed it most of the time"


def test_what_spreads_more_keeps_its_own_spread_and_what_agrees_is_no_surer_than_its_runs() -> None:
    steady = [a_measurement(1000.0), a_measurement(1001.0)]
    wild = [a_measurement(900.0), a_measurement(1100.0)]
    spread = Spread.of_runs([steady, steady, steady, wild])
    widths = [high / low for low, high in (ends(pool(g, spread=spread)) for g in (steady, wild))]
    assert widths[1] > widths[0] ** 1.5
    same = [a_measurement(1000.0, spread=0.04)] * 2
    low, high = ends(pool(same, spread=Spread.of_runs([same, same])))
    error = math.hypot(math.log(1.04 / 0.96) / 2 / ERRORS_OF_STEPS, BETWEEN_RUNS)
    assert math.log(high / low) / 2 == pytest.approx(1.96 * error / math.sqrt(2), rel=1e-6)


def test_what_runs_spent_adds_up_and_their_energy_is_a_mean() -> None:
    spent = {"setup_seconds": 2.0, "measured_seconds": 3.0, "training_seconds": 4.0}
    one = a_measurement(**spent, joules_per_token=0.04, compile_seconds=5.0, flags=("noisy", "x"))
    two = a_measurement(**spent, joules_per_token=0.05, compile_seconds=0.5, flags=("x",))
    both = pool([one, two], spread=Spread(0.001, 4))
    assert (both.setup_seconds, both.measured_seconds, both.training_seconds) == (4, 6, 8)
    assert (both.compile_seconds, both.joules_per_token) == (5.5, pytest.approx(0.045))
    # Runs that disagree are noisy, and uneven steps alone are not.
    assert (both.flags, both.is_noisy) == (("x",), False)
    plain = pool([a_measurement()] * 2, spread=Spread(0.0, 1))
    assert (plain.joules_per_token, plain.compile_seconds) == (None, None)
    busy = [a_measurement(1000.0), a_measurement(300.0)]
    assert pool(busy, spread=Spread.of_runs([busy])).is_noisy


def trial(number: int, speed: float, **changes: Any) -> TrialRecord:
    record = a_record(number, fits(speed, **changes), batch=2**number)
    return as_baseline(record) if number == 0 else record


class Runs:
    """Collects what measures trials again."""

    def __init__(self) -> None:
        self.records: list[TrialRecord] = []

    def add(self, of: TrialRecord, outcome: Outcome, **changes: Any) -> Runs:
        ran = sum(r.config == of.config for r in self.records)
        values = {
            # In turns: the first runs of all come before the second ones.
            "number": 1000 * (1 + ran) + len(self.records),
            "config": of.config,
            "outcome": outcome,
            "purpose": "confirm",
            "series": 1,
            "confirms": of.number,
        }
        self.records.append(TrialRecord.model_validate(values | changes))
        return self

    def runs(self, of: TrialRecord, *speeds: float, series: int = 1, **changes: Any) -> Runs:
        for speed in speeds:
            self.add(of, fits(speed, **changes), series=series)
        return self

    def soak(self, of: TrialRecord, outcome: Outcome | None = None, **changes: Any) -> Runs:
        return self.add(of, outcome or fits(soak=SOAKED, **changes), purpose="soak")


def measured_again(*records: TrialRecord, runs: Runs, **space: Any) -> Ranking:
    return rank(records, a_definition(**space), runs.records)


BASE, SLOW, FAST = trial(0, 100.0), trial(1, 200.0, spread=0.01), trial(2, 210.0, spread=0.01)
THREE = (BASE, SLOW, FAST)


def test_the_speed_of_several_runs_is_their_middle_and_one_run_confirms_nothing() -> None:
    runs = Runs().runs(FAST, 190.0, 200.0, peak=11 * GIB)
    measured = measured_again(SLOW, FAST, runs=runs).trials[2].measurement
    assert measured.tokens_per_second == pytest.approx(math.sqrt(190.0 * 200.0))
    assert measured.step_seconds == pytest.approx(4096 / measured.tokens_per_second)
    assert (measured.steps_measured, measured.peak_allocated_bytes) == (12, 11 * GIB)
    once = measured_again(FAST, runs=Runs().runs(FAST, 190.0))
    assert once.trials[2].measurement.tokens_per_second == 210.0
    assert not once.is_measured_again(once.trials[2])


def test_confirmed_is_measured_again_and_soaked() -> None:
    again = Runs().runs(FAST, 209.0, 210.0)
    assert not measured_again(FAST, runs=again).is_confirmed
    assert measured_again(FAST, runs=again, confirm={"soak_seconds": 0}).is_confirmed
    soaked = measured_again(FAST, runs=again.soak(FAST))
    assert (soaked.is_confirmed, len(soaked.runs_of(FAST.config)), soaked.soak is None) == (
        True,
        2,
        False,
    )
    # What a further search finds faster wins until it is measured again.
    further = measured_again(BASE, FAST, trial(3, 220.0), runs=again)
    assert (numbers(further.ranked)[0], further.is_confirmed) == (3, False)


NOISE = 0.02
MIDDLE = 0.2674
"""The median of a product of an exponential and a uniform draw."""
CONFIGS = [TrialConfig(micro_batch_size=n) for n in range(1, 6)]
"""The first is twice as fast as the second."""


def in_turns(
    rng: np.random.Generator, *, configs: int, rounds: int, drift: float
) -> Iterator[TrialRecord]:
    """Runs of several configurations, whose speed drifts from round to round."""
    (run,) = Runs().runs(BASE, 1.0).records
    measured = measured_of(run)
    for n in range(rounds):
        drifted = rng.normal(0, drift)
        for config in CONFIGS[:configs]:
            faster = math.exp(drifted + rng.normal(0, NOISE)) * (1 + (config is CONFIGS[0]))
            outcome = Measured.model_construct(measurement=scaled(measured, faster))
            yield run.model_copy(update={"number": n, "config": config, "outcome": outcome})


@pytest.mark.parametrize(
    ("configs", "rounds", "drift"),
    [(2, 2, 0.0), (2, 2, 3 * NOISE), (2, 4, NOISE), (3, 2, NOISE), (3, 3, 0.0), (5, 4, 3 * NOISE)],
)
def test_the_interval_of_a_ratio_covers_the_truth_95_times_in_100(
    configs: int, rounds: int, drift: float
) -> None:
    """Where rounds drift it is narrower than the intervals of both."""
    rng, covered, widths, apart = np.random.default_rng(0), 0, list[float](), list[float]()
    for _ in range(300):
        known = Confirmations(tuple(in_turns(rng, configs=configs, rounds=rounds, drift=drift)))
        ratio = known.ratio(CONFIGS[0], CONFIGS[1])
        assert ratio is not None
        assert ratio.low is not None
        assert ratio.high is not None
        covered += ratio.low <= 2.0 <= ratio.high
        widths.append(math.log(ratio.high / ratio.low))
        both = [ends(pooled) for c in CONFIGS[:2] if (pooled := known.pooled(c)) is not None]
        apart.append(math.hypot(*(math.log(high / low) for low, high in both)))
    assert covered / 300 >= 0.93
    if drift == 3 * NOISE and rounds > 2:
        assert np.median(widths) < 0.8 * np.median(apart)
    if (rounds, drift) == (2, 0.0):
        assert np.quantile(widths, 0.9) < 16 * NOISE, "two rounds on a quiet GPU tell it closely"


@pytest.mark.parametrize(
    ("between", "uneven", "drift"),
    [
        (0.005, 0.06, 0.0),
        (0.005, 0.06, 0.02),
        (0.02, 0.06, 0.01),
        (0.02, 0.004, 0.0),
        (0.005, 0.01, 0.04),
    ],
)
def test_the_interval_at_which_a_confirmation_ends_covers_the_truth_95_times_in_100(
    between: float, uneven: float, drift: float
) -> None:
    """Of a winner whose steps are even and a baseline whose steps are held up now and then, in two
    rounds where that says enough, and three where it does not; the GPU gets slower all the time."""
    rng, (run,) = np.random.default_rng(0), Runs().runs(BASE, 1.0).records
    covered, ended, own = 0, 0, list[float]()
    for _ in range(300):
        records: list[TrialRecord] = []
        for number in range(6):
            # In the order A B B A A B.
            which = (number + 1) // 2 % 2
            config, spread = CONFIGS[which], (0.004, uneven)[which]
            luck = rng.normal(0, between) + drift * number / 2 - math.log(2 - which)
            steps = np.sort(np.exp(luck + spread * rng.exponential(size=8) * rng.random(8)))
            median, low, high = float(np.median(steps)), float(steps[0]), float(steps[-1])
            ran = scaled(measured_of(run), run.measurement.step_seconds / median)
            ran = ran.model_copy(update={"step_seconds_ci95": (low, high)})
            outcome = Measured.model_construct(measurement=ran)
            changes = {"number": number, "config": config, "outcome": outcome}
            records.append(run.model_copy(update=changes))
            known = Confirmations(tuple(records), looks=2)
            ratio = known.ratio(*CONFIGS[:2]) if number % 2 else None
            if ratio is not None and ratio.low and ratio.high - ratio.low < 0.1 * ratio.value:
                break
        middle = np.exp(np.array((0.004, uneven)) * MIDDLE)
        assert ratio is not None
        covered += ratio.low <= 2.0 * middle[1] / middle[0] <= ratio.high
        ended += number < 5
        low, high = ends(known.pooled(CONFIGS[0]))
        own.append(math.log(high / low))
    assert covered / 300 >= 0.94
    if (between, drift) == (0.005, 0.0):
        assert ended / 300 > 0.3
        assert np.median(own) < 0.03, "what is uneven about the baseline is not the winner's"


def test_what_joins_later_is_paired_with_what_ran_beside_it() -> None:
    """The GPU is half as fast from the third round on."""
    runs = Runs().runs(FAST, 200.0, 202.0, 101.0, 100.0).runs(BASE, 100.0, 100.0)
    third, fourth = (r.number for r in runs.records[2:4])
    for number, speed in ((third, 80.0), (fourth, 81.0)):
        runs.add(SLOW, fits(speed), number=number + 500)
    known = Confirmations(tuple(sorted(runs.records, key=lambda r: r.number)))
    beside, before = known.ratio(FAST.config, SLOW.config), known.ratio(BASE.config, SLOW.config)
    assert beside is not None
    assert beside.value == pytest.approx(100.5 / 80.5, rel=1e-3)
    assert before is None
    # They never ran in one round: all that drifted is in the interval of their speeds.
    ranking = measured_again(*THREE, runs=runs)
    assert ranking.ratio(ranking.trials[0], ranking.trials[1]).is_open


def test_noise_takes_no_gain_away_that_is_sure_and_leaves_none_that_may_not_be() -> None:
    sure = Runs().runs(FAST, 210.0, 130.0, 300.0).runs(BASE, 20.0, 11.0, 26.0).soak(FAST)
    ranking = measured_again(BASE, FAST, runs=sure)
    assert ranking.ranked[0].measurement.is_noisy
    assert ranking.is_confirmed
    ratio = ranking.gain.ratio
    assert ratio is not None
    assert ratio.low is not None
    assert 5.0 < ratio.low < 10.0 < ratio.value
    unsure = Runs().runs(FAST, 210.0, 20.0, 300.0).runs(BASE, 100.0, 90.0, 8.0).soak(FAST)
    ranking = measured_again(BASE, FAST, runs=unsure)
    assert (ranking.is_confirmed, ranking.tied) == (True, (BASE.number,))
    assert (ranking.gain.ratio, ranking.gain.reason) == (None, "not_shown")


@pytest.mark.parametrize(
    ("fast", "slow", "soak", "order", "tied", "fallen"),
    [
        # The fastest is recommended, and of what is as fast what needs less memory.
        ((205.0, 206.0), (204.0, 206.5), {}, [1, 2, 0], (2,), []),
        ((230.0, 231.0), (204.0, 205.0), {}, [2, 1, 0], (), []),
        # An allocator that gave memory back counts against a tie.
        ((205.0, 206.0), (204.0, 206.5), {"allocator_retries": 3}, [1, 2, 0], (2,), []),
        # What runs out in its soak does not fit; a crash of the machine takes nothing away.
        ((230.0, 231.0), (204.0, 205.0), OOM, [1, 0], (), [2]),
        ((230.0, 231.0), (204.0, 205.0), Crashed(phase="measure"), [2, 1, 0], (), []),
    ],
)
def test_what_was_measured_again_and_soaked_is_ranked_by_that(
    fast: tuple[float, ...],
    slow: tuple[float, ...],
    soak: Any,
    order: list[int],
    tied: tuple[int, ...],
    fallen: list[int],
) -> None:
    runs = Runs().runs(FAST, *fast, peak=19 * GIB).runs(SLOW, *slow, peak=11 * GIB)
    runs = runs.soak(FAST, **soak) if isinstance(soak, dict) else runs.soak(FAST, soak)
    ranking = measured_again(*THREE, runs=runs.runs(FAST, fast[0]))
    assert (numbers(ranking.ranked), ranking.tied, list(ranking.fallen)) == (order, tied, fallen)
    assert ranking.is_confirmed is (isinstance(soak, dict) and order[0] == 2)
    if soak == {"allocator_retries": 3}:
        measured = ranking.trials[2].measurement
        assert (measured.allocator_retries, "allocator_retries" in measured.flags) == (3, True)


def test_on_a_machine_that_got_slower_all_speeds_are_of_the_confirmation() -> None:
    third, fourth = trial(3, 205.0, spread=0.01), trial(4, 413.0)
    stopped = fourth.model_copy(update={"outcome": pruned(413.0)})
    runs = Runs().runs(FAST, 104.0, 106.0, 105.0).runs(SLOW, 99.0, 100.0, 99.5)
    ranking = measured_again(*THREE, third, stopped, runs=runs)
    assert numbers(ranking.ranked) == [2, 1, 3, 0]
    speeds = {n: trial.measurement.tokens_per_second for n, trial in ranking.trials.items()}
    expected = {0: 50.0, 1: 99.5, 2: 105.0, 3: 102.5, 4: 206.5}
    assert speeds == pytest.approx(expected, rel=1e-3)
    # It was never measured beside the winner, and the search told them apart.
    assert (ranking.tied, ranking.close) == ((), ())
    # The scale is that of the fastest of the space and not of a faster baseline.
    outside = as_baseline(a_record(0, fits(300.0), batch=64))
    runs = Runs().runs(FAST, 105.0, 105.0).runs(outside, 300.0, 300.0)
    ranking = measured_again(outside, trial(1, 190.0), FAST, runs=runs)
    assert (numbers(ranking.ranked), ranking.scale) == ([2, 1], pytest.approx(0.5))


def test_speeds_are_those_of_the_newest_series_in_which_anything_ran_twice() -> None:
    runs = Runs().runs(FAST, 205.0, 206.0).runs(FAST, 150.0, series=2)
    assert Confirmations(tuple(runs.records)).series == 1
    known = Confirmations(tuple(runs.runs(FAST, 152.0, series=2).records))
    assert known.series == known.newest == 2
    pooled = known.pooled(FAST.config)
    assert pooled is not None
    assert pooled.tokens_per_second == pytest.approx(math.sqrt(150.0 * 152.0))
    # Running out in an earlier series still counts.
    lost = Runs().soak(FAST, OOM).runs(SLOW, 1.0, 1.0, series=2)
    assert measured_again(SLOW, FAST, runs=lost).fallen.keys() == {FAST.number}


# Gains: within one capacity class, with an interval that noise widens

SPACE: dict[str, Any] = {
    "dimensions": {
        "lora_rank": {"choices": [16, 64]},
        "micro_batch_size": {"choices": [1, 2, 4]},
    }
}
LARGER: dict[str, Any] = {
    "dimensions": SPACE["dimensions"] | {"lora_rank": {"choices": [64, 128]}},
    "baseline": {"lora_rank": 16},
}
"""The baseline is of a class that the space does not hold."""
TWO = {"micro_batch_size": 2}
BY_NAME = ["q_proj", "k_proj", "v_proj", "o_proj"]
MODULES = {"dimensions": {"target_modules": {"choices": ["qv", BY_NAME]}}}


def searched(*found: tuple[Outcome, dict[str, Any]]) -> list[TrialRecord]:
    """Return trials of a search, of which the first is the baseline."""
    records = [classed(number, outcome, **config) for number, (outcome, config) in enumerate(found)]
    return [as_baseline(records[0]), *records[1:]]


def noisy(speed: float, flag: str = "noisy") -> Measured:
    return fits(speed, spread=0.3, flags=(flag,))


@pytest.mark.parametrize(
    ("baseline", "winner", "config", "space", "gain"),
    [
        (fits(100.0, spread=0.01), fits(250.0, spread=0.02), TWO, SPACE, (2.4, 2.5, 2.6)),
        # Noise widens the interval; only where it may have made all of it there is no gain.
        (noisy(100.0), noisy(250.0), TWO, SPACE, (1.0, 2.5, 6.0)),
        (noisy(100.0), noisy(250.0, "neighbour"), TWO, SPACE, (1.0, 2.5, 6.0)),
        (noisy(100.0), noisy(120.0), TWO, SPACE, "not_shown"),
        # Runs of a few steps have a gain where they agree.
        (fits(100.0), fits(250.0, **FEW), TWO, SPACE, (2.4, 2.5, 2.6)),
        # So has a GPU that its power limit slows down steadily.
        (fits(100.0), fits(250.0, flags=("emulated", "throttled")), TWO, SPACE, (2.4, 2.5, 2.6)),
        # Another spelling of the target modules is no other class.
        (fits(100.0), fits(200.0), {"target_modules": BY_NAME}, MODULES, (1.9, 2.0, 2.1)),
        (OutOfMemory(stage="load"), fits(), TWO, SPACE, "not_measured"),
        (fits(100.0), fits(300.0), {"lora_rank": 64, **TWO}, LARGER, "not_measured"),
    ],
)
def test_a_gain_is_over_the_baseline_with_the_ends_of_both_intervals(
    baseline: Outcome,
    winner: Outcome,
    config: dict[str, Any],
    space: dict[str, Any],
    gain: tuple[float, float, float] | str,
) -> None:
    records = searched((baseline, {}), (winner, config))
    found = rank(records, a_definition(**space), confirmed(*records)).gain
    if isinstance(gain, str):
        assert (found.ratio, found.reason) == (None, gain)
        return
    least, value, most = gain
    assert found.ratio is not None
    assert found.ratio.low is not None
    assert found.ratio.high is not None
    assert found.ratio.value == pytest.approx(value)
    assert least < found.ratio.low <= value <= found.ratio.high < most


@pytest.mark.parametrize("again", [[], [0], [1]])
def test_the_gain_of_what_was_not_measured_again_is_that_of_the_search(again: list[int]) -> None:
    records = searched((fits(100.0, spread=0.02), {}), (fits(200.0, spread=0.02), TWO))
    runs = confirmed(*(records[number] for number in again), soak=False)
    found = rank(records, a_definition(**SPACE), runs).gain
    assert found.ratio is not None
    assert found.ratio.low is not None
    assert 1.8 < found.ratio.low < found.ratio.value == pytest.approx(2.0)


def test_a_gain_without_intervals_has_none_and_the_baseline_gained_nothing_for_sure() -> None:
    bare = searched((fits(100.0), {}), (fits(250.0, **FEW), TWO))
    assert rank(bare, a_definition(**SPACE)).gain.ratio == Ratio(2.5, None, None)
    alone = rank(searched((fits(100.0, spread=0.02), {})), a_definition(**SPACE)).gain.ratio
    assert alone is not None
    assert (alone.value, alone.low, alone.high) == (1.0, 1.0, 1.0)
    lost = searched((fits(100.0), {"lora_rank": 8}), (OOM, {}))
    assert rank(lost, a_definition(**SPACE)).gain.reason == "no_winner"
    other = searched((fits(100.0), {}), (fits(200.0), {"target_modules": "qv"}))
    only = {"dimensions": {"target_modules": {"choices": ["qv", "all-linear"]}}}
    over = rank(other, a_definition(**only), confirmed(*other)).gain.over
    assert over is not None
    assert over.number == 1, "the winner is the baseline's recipe on q,v itself"


def test_across_capacity_classes_the_baselines_own_class_has_its_gain() -> None:
    records = searched(
        (fits(100.0), {"lora_rank": 64}),
        (fits(300.0), {"lora_rank": 16, **TWO}),
        (fits(150.0), {"lora_rank": 64, **TWO}),
        (fits(140.0), {"lora_rank": 64, "micro_batch_size": 1}),
    )
    space = a_definition(**SPACE, baseline={"lora_rank": 64})
    ranking = rank(records, space, confirmed(*records))
    assert (ranking.gain.ratio, ranking.gain.reason) == (None, "not_measured")
    fastest = ranking.fastest_of_baselines_class
    assert fastest is not None
    assert fastest.number == 2
    of_class = ranking.gain_of(fastest).ratio
    assert of_class is not None
    assert of_class.value == pytest.approx(1.5)


def in_another_class(config: dict[str, Any], *outcomes: Outcome) -> RankedGain:
    """Return the gain of a winner of rank 64 where a confirmation ran another recipe as well."""
    records = searched((fits(100.0), {}), (fits(300.0, spread=0.01), {"lora_rank": 64, **TWO}))
    run_kind = {"purpose": "confirm", "series": 1, "confirms": None}
    recipe = [
        TrialRecord.model_validate({"number": 2000 + n, "config": config, "outcome": o} | run_kind)
        for n, o in enumerate(outcomes)
    ]
    return rank(records, a_definition(**LARGER), (*confirmed(records[1]), *recipe)).gain


@pytest.mark.parametrize(
    ("config", "outcomes", "reason"),
    [
        # Run once, of a third class, or out of memory.
        ({"lora_rank": 64}, (fits(150.0),), "not_measured"),
        ({"lora_rank": 32}, (fits(150.0), fits(150.0)), "not_measured"),
        ({"lora_rank": 64}, (OOM,), "did_not_fit"),
        ({"lora_rank": 64}, (fits(148.0), fits(152.0)), None),
    ],
)
def test_in_another_class_the_gain_is_over_the_recipe_in_that_class(
    config: dict[str, Any], outcomes: tuple[Outcome, ...], reason: str | None
) -> None:
    found = in_another_class(config, *outcomes)
    assert found.reason == reason
    assert (found.ratio is None) is (found.over is None) is (reason is not None)
    if found.ratio is not None and found.over is not None:
        # One of its runs alone had the winner beside it.
        assert found.ratio.value == pytest.approx(300 / 148, rel=0.001)
        assert found.ratio.low < 2.0 < found.ratio.high
        assert found.over.config == TrialConfig(lora_rank=64)


def test_a_recipe_that_the_search_measured_is_what_a_gain_is_over_before_a_confirmation() -> None:
    records = searched(
        (fits(100.0), {"lora_rank": 16}),
        (fits(300.0, spread=0.01), {"lora_rank": 64, **TWO}),
        (fits(150.0, spread=0.01), {"lora_rank": 64}),
    )
    found = rank(records, a_definition(**LARGER)).gain
    assert found.over.record == records[2]
    assert found.ratio is not None
    assert found.ratio.value == pytest.approx(2.0)


# What did not fit needs more than the budget


def ran_out(gib: float | None = None) -> OutOfMemory:
    peak = None if gib is None else int(gib * GIB)
    return OutOfMemory(stage="forward", peak_allocated_bytes=peak, requested_bytes=GIB)


@pytest.mark.parametrize(
    ("outcome", "predicted", "expected"),
    [
        (ran_out(), None, (20, False)),
        # Below the budget is where it was, not what it needs.
        (ran_out(15), None, (20, False)),
        (ran_out(22), None, (22, False)),
        (ran_out(19), 23, (23, True)),
        (ran_out(19), 18, (20, False)),
        (ran_out(24), 23, (24, False)),
        (DominatedOutOfMemory(by=0), None, (20, False)),
        (DominatedOutOfMemory(by=0), 30, (30, True)),
        (fits(), 30, None),
        (Crashed(phase="build"), 30, None),
    ],
)
def test_what_ran_out_needs_at_least_the_budget_what_was_seen_and_what_was_predicted(
    outcome: Outcome, predicted: int | None, expected: tuple[int, bool] | None
) -> None:
    record = a_record(0, outcome)
    if predicted is not None:
        size = {"peak_allocated_bytes": predicted * GIB, "peak_reserved_bytes": 0}
        record = record.model_copy(update={"prediction": PredictionRecord(**size)})
    found = need_of(record, budget_bytes=BUDGET)
    if expected is None:
        assert found is None
    else:
        gib, is_predicted = expected
        assert found == Need(gib * GIB, is_lower_bound=True, is_predicted=is_predicted)


def test_what_was_never_launched_has_a_prediction_and_no_bound() -> None:
    record = a_record(0, PredictedOutOfMemory(predicted_bytes=25 * GIB))
    expected = Need(25 * GIB, is_lower_bound=False, is_predicted=True)
    assert need_of(record, budget_bytes=BUDGET) == expected
    assert predicted_need(record) == 25 * GIB
