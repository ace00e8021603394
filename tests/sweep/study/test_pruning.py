from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from search_spaces.config import TrialConfig
from search_spaces.gpus import GIB
from search_spaces.space import Objective
from storage.ranking import rank
from storage.records import Crashed, Measured, OutOfMemory, PrunedSlow, TrialRecord
from sweep.running.wire import Progress
from sweep.study.stopping import Rival, Rivals, is_hopeless
from tests.sweep.simulated_device import (
    a_definition,
    a_measurement,
    a_record,
    at_speed,
)

CONFIG = TrialConfig()
OTHER = TrialConfig(micro_batch_size=8)
RIVAL = Rival(config=CONFIG, tokens_per_second=1000.0, peak_allocated_bytes=10 * GIB)
WARMING_UP = Progress(phase="warmup", step=6, tokens_per_second_high=1.0)
SPREAD = {
    "micro_batch_size": {"choices": [4, 8]},
    "lora_rank": {"choices": [16, 64]},
    "kernels": {"choices": ["hf", "liger"]},
}


def measuring(high: float | None, gib: float | None = None) -> Progress:
    allocated = None if gib is None else int(gib * GIB)
    return Progress(phase="measure", step=6, tokens_per_second_high=high, allocated_bytes=allocated)


@pytest.mark.parametrize(
    ("progress", "objectives", "rank", "expected"),
    [
        (measuring(500.0), [], 16, True),
        # A tie is shown, and before there is an interval nothing is known.
        (measuring(985.0), [], 16, False),
        (measuring(1500.0), [], 16, False),
        (measuring(None), [], 16, False),
        (WARMING_UP, [], 16, False),
        # A rival has to win in every objective.
        (measuring(500.0, 11), ["peak_memory"], 16, True),
        (measuring(500.0, 9), ["peak_memory"], 16, False),
        (measuring(500.0), ["peak_memory"], 16, False),
        (measuring(500.0), ["trainable_parameters"], 16, True),
        (measuring(500.0), ["trainable_parameters"], 64, False),
        # A slow one may learn more: only what is less than half as fast goes untrained.
        (measuring(450.0), ["eval_loss"], 64, True),
        (measuring(550.0), ["eval_loss"], 64, False),
    ],
)
def test_a_trial_is_hopeless_once_its_best_case_is_behind(
    progress: Progress, objectives: list[Any], rank: int, expected: bool
) -> None:
    config = TrialConfig(lora_rank=rank)
    both = ("tokens_per_second", *objectives)
    assert is_hopeless(progress, config=config, rivals=[RIVAL], objectives=both) is expected
    assert not is_hopeless(progress, config=config, rivals=[], objectives=both)
    # Where speed is not asked for none is stopped.
    assert not is_hopeless(progress, config=config, rivals=[RIVAL], objectives=objectives)


def test_rivals_are_the_trials_that_ran_to_the_end_within_the_budget() -> None:
    measurement = a_measurement(CONFIG)
    fits = a_record(CONFIG, Measured(measurement=measurement))
    slow = a_record(OTHER, PrunedSlow(measurement=measurement), number=1)
    lost = a_record(OTHER, OutOfMemory(stage="forward"), number=2)
    (rival,) = Rivals(a_definition(), [fits, slow, lost]).of(TrialConfig())
    # What it reached for sure: a rival that was lucky stops nobody.
    assert rival.tokens_per_second == measurement.speed_interval[0]
    outside = a_record(TrialConfig(lora_rank=4), is_baseline=True)
    unsure = a_record(CONFIG, Measured(measurement=a_measurement(CONFIG, step_seconds_ci95=None)))
    assert Rivals(a_definition(), [outside, unsure]).of(TrialConfig()) == ()


@pytest.mark.parametrize(("emulated_on", "count"), [("NVIDIA H200", 0), (None, 1)])
def test_a_trial_is_stopped_by_another_class_on_the_target_alone(
    emulated_on: str | None, count: int
) -> None:
    fast = TrialConfig(kernels="fused-loss")
    rivals = Rivals(a_definition(emulated_on=emulated_on), [a_record(fast)])
    assert len(rivals.of(fast.model_copy(update={"compute_dtype": "int8"}))) == count
    assert len(rivals.of(fast)) == 1


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
                        *(
                            at_speed(config, speed, spread=0.01, peak_allocated_bytes=peak * GIB)
                            for speed in (1_000.0, 2_000.0, 3_000.0)
                            for peak in (1, 2)
                        ),
                    )
                )
            ),
            number=number,
        )
        for number in range(draw(st.integers(0, 12)))
    ]


@settings(max_examples=150, deadline=None)
@given(
    told=trials(),
    known=st.integers(0, 12),
    again=trials(),
    config=st.sampled_from(CONFIGS),
    high=st.sampled_from((500.0, 970.0, 1500.0, 2500.0)),
    allocated=st.sampled_from((None, 1.0, 1.5)),
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
    allocated: float | None,
    objectives: tuple[Objective, ...],
) -> None:
    definition = a_definition(objectives=list(objectives), dimensions=SPREAD, fixed={})
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
        progress = measuring(high, allocated)
        return is_hopeless(progress, config=config, rivals=those, objectives=objectives)

    kept = rivals.of(config)
    assert stopped_by(kept) == stopped_by(everything)
    assert set(kept) <= set(everything)
