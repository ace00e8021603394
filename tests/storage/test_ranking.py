"""The order of a study's trials, what is measured again, what the best gained, what did not fit."""

from __future__ import annotations

import math
import random
from collections.abc import Mapping
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.space import Objective
from qlora_sweep.storage.confirmations import (
    Confirmations,
    Ratio,
    Spread,
    pool,
    scaled,
)
from qlora_sweep.storage.definition import TargetSpeed
from qlora_sweep.storage.ranking import (
    RankedGain,
    Ranking,
    measured_of,
    rank,
    undominated,
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
    PrunedSlow,
    TrialRecord,
    need_of,
)
from tests.storage.builders import (
    BUDGET,
    SOAKED,
    a_definition,
    a_measurement,
    a_record,
    changed,
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
    values = {"dimensions": {"micro_batch_size": list(range(1, 9))}} | space
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


@pytest.mark.parametrize(
    ("records", "objectives", "order", "front"),
    [
        # Pruned trials and those out of memory are not ranked.
        (trials(fits(100.0), pruned(900.0), fits(300.0), OOM), SPEED, [2, 0], []),
        # Of equal speeds less memory comes first, then the earlier trial.
        (trials(at(100, 9), at(100, 8), at(100, 8))[::-1], SPEED, [1, 2, 0], []),
        # A configuration counts once, by its last measurement.
        ((a_record(0, fits(500.0)), a_record(1, fits(200.0))), SPEED, [1], []),
        ((a_record(0), a_record(1, OOM)), SPEED, [], []),
        ((a_record(0), a_record(1, Diverged(step=2))), SPEED, [], []),
        ((a_record(0), a_record(1, Crashed(phase="build"))), SPEED, [0], []),
        (trials(OOM, pruned(10.0)), BOTH, [], []),
        (COUNTED, MEMORY, [1, 2, 0], []),
        # Equal counts are ordered by speed.
        (COUNTED, ("trainable_parameters",), [2, 0, 1], []),
        # The knee of two objectives comes first, then the rest of the front.
        (trials(at(100, 4), at(200, 12), at(180, 6), at(170, 7)), BOTH, [2, 1, 0, 3], [2, 1, 0]),
        # Of two ends that of the objective that was named first.
        (ENDS, BOTH, [1, 0], [1, 0]),
        (ENDS, BOTH[::-1], [0, 1], [0, 1]),
        # All are equal in one objective.
        (trials(at(100, 8), at(200, 8)), ("trainable_parameters", *BOTH), [1, 0], [1]),
    ],
)
def test_trials_are_ordered_by_the_objectives(
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


def test_a_trial_whose_interval_overlaps_the_winners_is_close_and_a_tie_once_confirmed() -> None:
    speeds = ((1000.0, 0.02), (985.0, 0.04), (900.0, 0.02), (960.0, 0.07))
    records = trials(*(fits(speed, spread=spread) for speed, spread in speeds), pruned(999.0))
    ranking = ranked(*records)
    assert (numbers(ranking.close), ranking.tied) == ([1, 3], ())
    assert rank(records, ranking.definition, confirmed(*records[:3])).tied == (1,)
    # A speed without an interval is close to nothing.
    assert ranked(*trials(fits(1000.0, spread=0.02), fits(999.0, spread=0.5, **FEW))).close == ()


@pytest.mark.parametrize(
    ("objectives", "expected"), [(MEMORY, (2,)), (("trainable_parameters",), (1, 2)), (BOTH, (2,))]
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


# The baseline, and classes of capacity

CLASSES = {
    "lora_rank": [8, 16, 64, 128],
    "micro_batch_size": [4, 8],
    "seq_len": [512, 1024],
    "target_modules": ["qv", "attention", ["q_proj", "v_proj"]],
}


def as_baseline(record: TrialRecord) -> TrialRecord:
    return changed(record, is_baseline=True)


def test_every_class_of_capacity_has_its_fastest_trial() -> None:
    ranking = ranked(
        classed(0, fits(100.0), lora_rank=8),
        classed(1, fits(200.0), lora_rank=8, micro_batch_size=8),
        classed(2, fits(150.0), lora_rank=8, target_modules="qv"),
        classed(3, fits(120.0), lora_rank=8, seq_len=1024),
        classed(4, OOM, lora_rank=128),
        # The same modules by their names are no class of their own.
        classed(5, fits(110.0), lora_rank=8, target_modules=["q_proj", "v_proj"]),
        # A pruned trial stands for a class only where no trial was finished.
        classed(6, pruned(900.0), lora_rank=8),
        classed(7, pruned(50.0), lora_rank=16),
        classed(8, pruned(70.0), lora_rank=16, micro_batch_size=8),
        dimensions=CLASSES,
    )
    found = [
        (best.lora_rank, best.target_modules, best.seq_len, best.number, best.is_partial)
        for best in ranking.fastest_by_class
    ]
    assert found == [
        (8, "attention", 512, 1, False),
        (8, "attention", 1024, 3, False),
        (8, "qv", 512, 2, False),
        (16, "attention", 512, 8, True),
    ]


def test_the_baseline_is_as_it_was_last_measured() -> None:
    again = [as_baseline(a_record(n, outcome)) for n, outcome in enumerate((fits(), fits(), OOM))]
    assert ranked(*again).baseline.record == again[1]


# Classes of numerics, where another GPU may stand in for the target

NUMERICS = {
    "micro_batch_size": [4, 8],
    "compute_dtype": ["bf16", "fp16", "fp8", "int8"],
    "quantization": ["nf4"],
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
    target = changed(definition.target, emulated_on=emulated_on)
    definition = changed(definition, target=target)
    return rank(records, definition, runs, target_speeds=speeds)


def test_where_another_gpu_stands_in_the_prediction_for_the_target_decides() -> None:
    ranking = for_a_target(*FOUR)
    assert (numbers(ranking.ranked), ranking.numerics_choice) == ([2, 3, 1, 0], "predicted")
    assert ranking.ranked[0].measurement == FOUR[2].measurement, "its measurement is its own"
    assert ranking.other_numerics.record == FOUR[1]
    # Intervals on the stand-in say nothing of the target.
    assert ranking.close == ()
    assert numbers(for_a_target(FOUR[1], FOUR[3], objectives=BOTH).front) == [3]
    # Where one is not predicted, all are compared as measured.
    some = for_a_target(*FOUR, speeds={1: SPEEDS[1]})
    assert (numbers(some.ranked), some.numerics_choice) == ([1, 3, 2, 0], "measured")
    # Nor does it count which were measured again.
    again = for_a_target(*FOUR, runs=confirmed(FOUR[0], FOUR[3]))
    assert (numbers(again.ranked), again.is_confirmed, again.tied) == ([2, 3, 1, 0], False, ())
    assert for_a_target(*FOUR, runs=confirmed(FOUR[0], FOUR[2])).is_confirmed


def test_a_gain_on_the_target_stands_beside_that_on_the_gpu_that_ran() -> None:
    trials = (as_baseline(FOUR[0]), FOUR[1])
    gain = for_a_target(*trials).gain
    assert gain.reason == "not_shown", "1.1 times, give or take 0.12"
    surer = {0: predicted(500.0, 0.3, own=0.01), 1: predicted(550.0, 0.3, own=0.01)}
    gain = for_a_target(*trials, speeds=surer).gain
    assert gain.ratio.value == pytest.approx(1.1)
    # The error that both predictions have in common cancels.
    assert gain.ratio.high == pytest.approx(1.1 * math.exp(1.645 * math.hypot(0.01, 0.01)))
    assert gain.measured.value == pytest.approx(2.0)
    assert for_a_target(*trials, emulated_on=None).gain.measured is None


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
    assert ranking.winner.number == first
    # Runs in turns may tell.
    assert numbers(ranking.close) == ([3] if first == 1 else [])


def test_of_a_tie_the_plainer_is_recommended() -> None:
    def best(*records: TrialRecord) -> int:
        ranking = for_a_target(*records, emulated_on=None)
        return ranking.winner.number

    fp16 = classed(0, at(203, 10), compute_dtype="fp16", micro_batch_size=8)
    bf16 = classed(1, at(200, 10), micro_batch_size=8)
    less = classed(2, at(199.5, 8), micro_batch_size=4)
    assert best(fp16, bf16) == 1
    assert best(fp16, bf16, less) == 2
    faster = changed(fp16, outcome=at(206, 10))
    assert best(faster, bf16) == 0, "more than a tie"
    # Beaten in memory by more than a tie, and no faster: it lies under the front.
    assert best(changed(fp16, outcome=at(203, 8)), bf16) == 0
    gave_back = classed(1, at(200, 8, allocator_retries=3), micro_batch_size=8)
    assert best(fp16, gave_back) == 0


@pytest.mark.parametrize(("times", "winner"), [(0.99, 0), (1.0, 0), (1.015, 0), (1.05, 1)])
def test_experts_go_to_the_host_for_more_than_a_tie(times: float, winner: int) -> None:
    space = {"dimensions": {"offload_fraction": [0.0, 1.0]}}
    here = classed(0, at(200, 10, **FEW), offload_fraction=0.0)
    there = classed(1, at(200 * times, 5, **FEW), offload_fraction=1.0)
    found = rank([here, there], a_definition(**space)).winner
    assert found is not None
    assert found.number == winner


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


def ends(measured: Measurement | None) -> tuple[float, float]:
    return measured.step_seconds_ci95


def ends_of(ratio: Ratio | None) -> tuple[float, float]:
    return ratio.low, ratio.high


def test_each_configuration_keeps_its_own_spread() -> None:
    steady = [a_measurement(1000.0), a_measurement(1001.0)]
    wild = [a_measurement(900.0), a_measurement(1100.0)]
    spread = Spread.of_runs([steady, steady, steady, wild])
    widths = [high / low for low, high in (ends(pool(g, spread=spread)) for g in (steady, wild))]
    assert widths[1] > widths[0] ** 1.5


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


def test_pooled_runs_add_up_their_seconds_and_average_their_energy() -> None:
    spent = {"setup_seconds": 2.0, "measured_seconds": 3.0, "training_seconds": 4.0}
    one = a_measurement(**spent, joules_per_token=0.04, compile_seconds=5.0, flags=("noisy", "x"))
    two = a_measurement(
        peak=11 * GIB, **spent, joules_per_token=0.05, compile_seconds=0.5, flags=("x",)
    )
    both = pool([one, two], spread=Spread(0.001, 4))
    assert (both.setup_seconds, both.measured_seconds, both.training_seconds) == (4, 6, 8)
    assert both.steps_measured == one.steps_measured + two.steps_measured
    assert both.peak_allocated_bytes == 11 * GIB
    assert both.compile_seconds == 5.5
    assert both.joules_per_token == pytest.approx(0.045)
    # Runs that disagree are noisy; uneven steps alone are not.
    assert both.flags == ("x",)
    assert not both.is_noisy
    busy = [a_measurement(1000.0), a_measurement(300.0)]
    assert pool(busy, spread=Spread.of_runs([busy])).is_noisy


STUDIES = 200
CONFIGS = [TrialConfig(micro_batch_size=n) for n in range(1, 6)]
"""The first is twice as fast as the second."""


EVEN, UNEVEN = 0.004, 0.06
"""How far steps are held up, of a winner and of a baseline."""
MIDDLE = 0.2674
"""The median of a product of an exponential and a uniform draw."""


def held_up_run(
    number: int, rng: np.random.Generator, *, between: float, drift: float
) -> TrialRecord:
    """A run of two configurations in the order A B B A A B, on a GPU that gets slower."""
    (run,) = Runs().runs(BASE, 1.0).records
    which = (number + 1) // 2 % 2
    luck = rng.normal(0, between) + drift * number / 2 - math.log(2 - which)
    delays = (EVEN, UNEVEN)[which] * rng.exponential(size=8) * rng.random(8)
    steps = np.sort(np.exp(luck + delays))
    measured = scaled(measured_of(run), run.measurement.step_seconds / float(np.median(steps)))
    interval = (float(steps[0]), float(steps[-1]))
    measured = changed(measured, step_seconds_ci95=interval)
    outcome = Measured.model_construct(measurement=measured)
    changes = {"number": number, "config": CONFIGS[which], "outcome": outcome}
    return run.model_copy(update=changes)


@pytest.mark.parametrize(("between", "drift"), [(0.005, 0.0), (0.02, 0.01)])
def test_an_interval_that_ends_a_confirmation_covers_the_truth_95_times_in_100(
    between: float, drift: float
) -> None:
    """It ends after two rounds where they say enough, and after three where they do not."""
    rng = np.random.default_rng(0)
    covered = ended_early = 0
    widths: list[float] = []
    for _ in range(STUDIES):
        records: list[TrialRecord] = []
        low = high = math.inf
        for rounds in (1, 2, 3):
            for number in (2 * rounds - 2, 2 * rounds - 1):
                records.append(held_up_run(number, rng, between=between, drift=drift))
            known = Confirmations(tuple(records), looks=2)
            ratio = known.ratio(*CONFIGS[:2])
            if ratio is not None and ratio.low is not None:
                low, high = ends_of(ratio)
                if high - low < 0.1 * ratio.value:
                    break
        true = 2.0 * math.exp((UNEVEN - EVEN) * MIDDLE)
        covered += low <= true <= high
        ended_early += rounds < 3
        low, high = ends(known.pooled(CONFIGS[0]))
        widths.append(math.log(high / low))
    assert covered / STUDIES >= 0.94
    if drift == 0.0:
        assert ended_early / STUDIES > 0.3
        assert np.median(widths) < 0.03, "the baseline's uneven steps do not widen the winner's"


def test_a_run_that_joins_later_is_paired_with_the_runs_beside_it() -> None:
    """The GPU is half as fast from the third round on."""
    runs = Runs().runs(FAST, 200.0, 202.0, 101.0, 100.0).runs(BASE, 100.0, 100.0)
    third, fourth = (r.number for r in runs.records[2:4])
    for number, speed in ((third, 80.0), (fourth, 81.0)):
        runs.add(SLOW, fits(speed), number=number + 500)
    known = Confirmations(tuple(sorted(runs.records, key=lambda r: r.number)))
    beside, before = known.ratio(FAST.config, SLOW.config), known.ratio(BASE.config, SLOW.config)
    assert beside.value == pytest.approx(100.5 / 80.5, rel=1e-3)
    assert before is None
    # They never ran in one round: all that drifted is in the interval of their speeds.
    ranking = measured_again(*THREE, runs=runs)
    assert ranking.ratio(ranking.trials[0], ranking.trials[1]).is_open


def test_on_a_machine_that_got_slower_all_speeds_are_those_of_the_confirmation() -> None:
    third = trial(3, 205.0, spread=0.01)
    stopped = changed(trial(4, 413.0), outcome=pruned(413.0))
    runs = Runs().runs(FAST, 104.0, 106.0, 105.0).runs(SLOW, 99.0, 100.0, 99.5)
    ranking = measured_again(*THREE, third, stopped, runs=runs)
    assert numbers(ranking.ranked) == [2, 1, 3, 0]
    speeds = {n: trial.measurement.tokens_per_second for n, trial in ranking.trials.items()}
    expected = {0: 50.0, 1: 99.5, 2: 105.0, 3: 102.5, 4: 206.5}
    assert speeds == pytest.approx(expected, rel=1e-3)
    # The third was never measured beside the winner, and the search told them apart.
    assert ranking.tied == ranking.close == ()
    # A faster baseline outside the space sets no scale.
    outside = as_baseline(a_record(0, fits(300.0), batch=64))
    runs = Runs().runs(FAST, 105.0, 105.0).runs(outside, 300.0, 300.0)
    assert measured_again(outside, trial(1, 190.0), FAST, runs=runs).scale == pytest.approx(0.5)


def test_speeds_are_those_of_the_newest_series_in_which_anything_ran_twice() -> None:
    runs = Runs().runs(FAST, 205.0, 206.0).runs(FAST, 150.0, series=2)
    assert Confirmations(tuple(runs.records)).series == 1
    known = Confirmations(tuple(runs.runs(FAST, 152.0, series=2).records))
    assert known.series == known.newest == 2
    pooled = known.pooled(FAST.config)
    assert pooled.tokens_per_second == pytest.approx(math.sqrt(150.0 * 152.0))
    # Running out in an earlier series still counts.
    lost = Runs().soak(FAST, OOM).runs(SLOW, 1.0, 1.0, series=2)
    assert measured_again(SLOW, FAST, runs=lost).fallen.keys() == {FAST.number}


# Gains: within one capacity class, with an interval that noise widens

SPACE: dict[str, Any] = {
    "dimensions": {
        "lora_rank": [16, 64],
        "micro_batch_size": [1, 2, 4],
    }
}
LARGER: dict[str, Any] = {
    "dimensions": SPACE["dimensions"] | {"lora_rank": [64, 128]},
    "baseline": {"lora_rank": 16},
}
"""The baseline is of a class that the space does not hold."""
TWO = {"micro_batch_size": 2}
BY_NAME = ["q_proj", "k_proj", "v_proj", "o_proj"]
MODULES = {"dimensions": {"target_modules": ["qv", BY_NAME]}}


def searched(*found: tuple[Outcome, dict[str, Any]]) -> list[TrialRecord]:
    """Return trials of a search, of which the first is the baseline."""
    records = [classed(number, outcome, **config) for number, (outcome, config) in enumerate(found)]
    return [as_baseline(records[0]), *records[1:]]


def gain_of(
    *found: tuple[Outcome, dict[str, Any]], space: dict[str, Any], again: tuple[int, ...] = (0, 1)
) -> RankedGain:
    """Return the gain of a search of which some trials were measured again."""
    records = searched(*found)
    runs = confirmed(*(records[number] for number in again))
    return rank(records, a_definition(**space), runs).gain


@pytest.mark.parametrize(
    ("baseline", "winner", "config", "space", "ends"),
    [
        (fits(100.0, spread=0.01), fits(250.0, spread=0.02), TWO, SPACE, (2.4, 2.6)),
        # Noise widens the interval.
        (fits(100.0, spread=0.3), fits(250.0, spread=0.3, flags=("noisy",)), TWO, SPACE, (1, 6)),
        # Two runs that agree give an interval, however few steps they have.
        (fits(100.0), fits(250.0, **FEW), TWO, SPACE, (2.4, 2.6)),
        # Another spelling of the target modules is no other class.
        (fits(100.0), fits(250.0), {"target_modules": BY_NAME}, MODULES, (2.4, 2.6)),
    ],
)
def test_a_gain_is_over_the_baseline_within_an_interval(
    baseline: Outcome,
    winner: Outcome,
    config: dict[str, Any],
    space: dict[str, Any],
    ends: tuple[float, float],
) -> None:
    ratio = gain_of((baseline, {}), (winner, config), space=space).ratio
    assert ratio.value == pytest.approx(2.5)
    low, high = ends_of(ratio)
    assert ends[0] < low <= 2.5 <= high < ends[1]


@pytest.mark.parametrize(
    ("baseline", "winner", "config", "space", "reason"),
    [
        (fits(100.0, spread=0.3), fits(120.0, spread=0.3), TWO, SPACE, "not_shown"),
        (OutOfMemory(stage="load"), fits(), TWO, SPACE, "not_measured"),
        (fits(100.0), fits(300.0), {"lora_rank": 64, **TWO}, LARGER, "not_measured"),
        (fits(100.0), OOM, {}, LARGER, "no_winner"),
    ],
)
def test_without_a_gain_there_is_a_reason(
    baseline: Outcome, winner: Outcome, config: dict[str, Any], space: dict[str, Any], reason: str
) -> None:
    gain = gain_of((baseline, {}), (winner, config), space=space)
    assert gain.ratio is None
    assert gain.reason == reason


def test_unless_both_were_measured_again_a_gain_is_that_of_the_search() -> None:
    for again in ((), (1,)):
        found = (fits(100.0, spread=0.02), {}), (fits(200.0, spread=0.02), TWO)
        low, high = ends_of(gain_of(*found, space=SPACE, again=again).ratio)
        assert 1.8 < low < 2.0 < high
    bare = gain_of((fits(100.0), {}), (fits(250.0, **FEW), TWO), space=SPACE, again=())
    assert bare.ratio == Ratio(2.5, None, None)
    alone = gain_of((fits(100.0, spread=0.02), {}), space=SPACE, again=())
    assert alone.ratio.value == 1.0
    assert ends_of(alone.ratio) == (1.0, 1.0)


def test_in_another_class_a_gain_is_over_the_recipe_in_that_class() -> None:
    recipe = (fits(150.0, spread=0.01), {"lora_rank": 64})
    trials = ((fits(100.0), {}), (fits(300.0, spread=0.01), {"lora_rank": 64, **TWO}))
    searched_too = gain_of(*trials, recipe, space=LARGER, again=())
    assert searched_too.over.record.number == 2
    assert searched_too.ratio.value == pytest.approx(2.0)

    def of_runs(*speeds: float) -> RankedGain:
        records = searched(*trials)
        recipe = Runs()
        for speed in speeds:
            values = {"number": 2000 + len(recipe.records), "confirms": None}
            recipe.add(classed(2, fits(speed), lora_rank=64), fits(speed), **values)
        runs = (*confirmed(records[1]), *recipe.records)
        return rank(records, a_definition(**LARGER), runs).gain

    assert of_runs(150.0).reason == "not_measured", "one run confirms nothing"
    gain = of_runs(148.0, 152.0)
    assert gain.over.config == TrialConfig(lora_rank=64)
    # Only one of its runs was beside the winner's.
    assert gain.ratio.value == pytest.approx(300 / 148, rel=0.001)


# What did not fit needs more than the budget


def ran_out(gib: float | None = None) -> OutOfMemory:
    peak = None if gib is None else int(gib * GIB)
    return OutOfMemory(stage="forward", peak_allocated_bytes=peak, requested_bytes=GIB)


def needed(gib: float, *, is_lower_bound: bool = True, is_predicted: bool = False) -> Need:
    return Need(int(gib * GIB), is_lower_bound=is_lower_bound, is_predicted=is_predicted)


@pytest.mark.parametrize(
    ("outcome", "predicted", "need"),
    [
        (ran_out(), None, needed(20)),
        # A peak below the budget is no bound of the need.
        (ran_out(15), None, needed(20)),
        (ran_out(22), None, needed(22)),
        (ran_out(19), 23, needed(23, is_predicted=True)),
        (ran_out(19), 18, needed(20)),
        (ran_out(24), 23, needed(24)),
        (DominatedOutOfMemory(by=0), 30, needed(30, is_predicted=True)),
        # One that was never launched has a prediction and no bound.
        (
            PredictedOutOfMemory(predicted_bytes=25 * GIB),
            None,
            needed(25, is_lower_bound=False, is_predicted=True),
        ),
        (fits(), 23, None),
        (Crashed(phase="build"), 23, None),
    ],
)
def test_what_did_not_fit_needs_the_largest_of_budget_peak_and_prediction(
    outcome: Outcome, predicted: int | None, need: Need | None
) -> None:
    prediction = None
    if predicted is not None:
        prediction = {"peak_allocated_bytes": predicted * GIB, "peak_reserved_bytes": 0}
    assert need_of(a_record(0, outcome, prediction=prediction), budget_bytes=BUDGET) == need
