from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from search_spaces.space import Objective
from storage.definition import StudyDefinition, Target
from storage.ranking import rank
from storage.records import Crashed, Measured, OutOfMemory, PrunedSlow, TrialRecord
from sweep.running.wire import Progress
from sweep.study.stopping import Rival, Rivals, is_hopeless
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
    unsure = a_record(CONFIG, Measured(measurement=a_measurement(CONFIG, step_seconds_ci95=None)))
    assert Rivals(a_definition(), [outside, unsure]).of(TrialConfig()) == ()


CONFIGS = [
    TrialConfig(micro_batch_size=batch, lora_rank=lora_rank, kernels=kernels)
    for batch in (4, 8)
    for lora_rank in (16, 4)
    for kernels in ("hf", "liger")
]


@st.composite
def trials(draw: st.DrawFn) -> list[TrialRecord]:
    """Trials by number, of which some try again what was tried, and some lie outside the space."""
    return [
        a_record(
            config := draw(st.sampled_from(CONFIGS)),
            draw(
                st.sampled_from(
                    (
                        OutOfMemory(stage="forward"),
                        Crashed(phase="attach"),
                        PrunedSlow(measurement=a_measurement(config)),
                        *(_measured(config, speed, peak) for speed in (1, 2, 3) for peak in (1, 2)),
                    )
                )
            ),
            number=number,
        )
        for number in range(draw(st.integers(0, 12)))
    ]


def _measured(config: TrialConfig, speed: int, peak: int) -> Measured:
    step = config.tokens_per_step / (1000.0 * speed)
    changes = {"step_seconds": step, "step_seconds_ci95": (0.99 * step, 1.01 * step)}
    return Measured(
        measurement=a_measurement(
            config, tokens_per_second=1000.0 * speed, peak_allocated_bytes=peak * GIB, **changes
        )
    )


@settings(max_examples=150, deadline=None)
@given(
    told=trials(),
    known=st.integers(0, 12),
    again=trials(),
    config=st.sampled_from(CONFIGS),
    high=st.sampled_from((500.0, 970.0, 1500.0, 2500.0)),
    allocated=st.sampled_from((None, GIB, 3 * GIB // 2)),
    objectives=st.sampled_from(
        (
            ("tokens_per_second",),
            ("tokens_per_second", "peak_memory"),
            ("tokens_per_second", "trainable_parameters"),
        )
    ),
)
def test_the_rivals_stop_what_any_trial_of_the_ranking_stops(
    told: list[TrialRecord],
    known: int,
    again: list[TrialRecord],
    config: TrialConfig,
    high: float,
    allocated: int | None,
    objectives: tuple[Objective, ...],
) -> None:
    space = a_space(objectives=list(objectives), dimensions=SPREAD, fixed={})
    definition = a_definition().model_copy(update={"space": space})
    confirmations = [
        record.model_copy(update={"purpose": "confirm", "series": 1, "number": 100 + record.number})
        for record in again
    ]
    rivals = Rivals(definition, told[:known], confirmations=confirmations)
    rivals.of(config)
    for record in told[known:]:
        rivals.learn([record])
    ranking = rank(told, definition, confirmations)
    is_of_class = ranking.is_of_baselines_class

    as_told = {record.number: record for record in told}
    ranked = [as_told[record.number] for record in ranking.ranked]
    everything = [
        Rival(
            config=record.config,
            tokens_per_second=record.measurement.speed_interval[0],
            peak_allocated_bytes=record.measurement.peak_allocated_bytes,
        )
        for record in ranked
        if record.measurement is not None and record.measurement.speed_interval is not None
        if not is_of_class(config) or is_of_class(record.config)
    ]

    def stopped_by(those: Sequence[Rival]) -> bool:
        progress = measuring(high, allocated_bytes=allocated)
        return is_hopeless(progress, config=config, rivals=those, objectives=objectives)

    kept = rivals.of(config)
    assert stopped_by(kept) == stopped_by(everything)
    assert set(kept) <= set(everything)


SPREAD = {
    "micro_batch_size": {"choices": [4, 8]},
    "lora_rank": {"choices": [16, 64]},
    "kernels": {"choices": ["hf", "liger"]},
}
