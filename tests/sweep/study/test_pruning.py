from __future__ import annotations

from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from search_spaces.space import Objective
from storage.definition import StudyDefinition, Target
from storage.records import Measured, OutOfMemory, PrunedSlow
from sweep.running.runner import Progress
from sweep.study.pruning import Rival, Rivals, is_hopeless
from tests.sweep.simulated_device import BUDGET, MODEL, a_measurement, a_record, a_space

CONFIG = TrialConfig()
OTHER = TrialConfig(micro_batch_size=8)
RIVAL = Rival(config=CONFIG, tokens_per_second=1000.0, peak_allocated_bytes=10 * GIB)


def a_definition() -> StudyDefinition:
    return StudyDefinition(
        space=a_space(),
        model=MODEL.to_json(),
        model_fingerprint=MODEL.fingerprint,
        target=Target(gpu="a10", device="cuda", budget_bytes=BUDGET),
    )


def measuring(high: float | None, **changes: Any) -> Progress:
    return Progress(phase="measure", step=6, tokens_per_second_high=high, **changes)


@pytest.mark.parametrize(
    ("progress", "expected"),
    [
        pytest.param(measuring(500.0), True, id="slow"),
        pytest.param(measuring(985.0), False, id="within-the-margin"),
        pytest.param(measuring(1500.0), False, id="fast"),
        pytest.param(measuring(None), False, id="no-interval-yet"),
        pytest.param(
            Progress(phase="warmup", step=6, tokens_per_second_high=1.0), False, id="warming-up"
        ),
    ],
)
def test_a_trial_is_hopeless_once_its_best_case_is_behind(
    progress: Progress, expected: bool
) -> None:
    assert is_hopeless(progress, config=CONFIG, rivals=[RIVAL]) is expected


def test_nothing_is_hopeless_before_something_fits() -> None:
    assert not is_hopeless(measuring(1.0), config=CONFIG, rivals=[])


@pytest.mark.parametrize(
    ("objectives", "allocated", "rank", "expected"),
    [
        (["tokens_per_second", "peak_memory"], 11 * GIB, 16, True),
        (["tokens_per_second", "peak_memory"], 9 * GIB, 16, False),
        (["tokens_per_second", "peak_memory"], None, 16, False),
        (["tokens_per_second", "trainable_parameters"], None, 16, True),
        (["tokens_per_second", "trainable_parameters"], None, 64, False),
        (["peak_memory"], 11 * GIB, 16, False),
        (["trainable_parameters"], 11 * GIB, 16, False),
    ],
)
def test_with_several_objectives_a_rival_has_to_win_in_all_of_them(
    objectives: list[Objective], allocated: int | None, rank: int, expected: bool
) -> None:
    hopeless = is_hopeless(
        measuring(500.0, allocated_bytes=allocated),
        config=TrialConfig(lora_rank=rank),
        rivals=[RIVAL],
        objectives=objectives,
    )
    assert hopeless is expected


def test_rivals_are_the_trials_that_ran_to_the_end_within_the_budget() -> None:
    measurement = a_measurement(CONFIG)
    records = [
        a_record(CONFIG, Measured(measurement=measurement)),
        a_record(OTHER, PrunedSlow(measurement=measurement), number=1),
        a_record(OTHER, OutOfMemory(stage="forward"), number=2),
    ]
    rivals = Rivals(a_definition(), records)
    assert measurement.speed_interval is not None
    # What it reached for sure: a rival that was lucky stops nobody.
    assert [r.tokens_per_second for r in rivals.of(TrialConfig())] == [
        measurement.speed_interval[0]
    ]


def test_a_baseline_outside_the_space_stops_nothing_and_neither_does_a_speed_unsure() -> None:
    outside = a_record(TrialConfig(lora_rank=4), is_baseline=True)
    unsure = a_record(CONFIG, Measured(measurement=a_measurement(CONFIG, steps_measured=3)))
    assert Rivals(a_definition(), [outside, unsure]).of(TrialConfig()) == ()
