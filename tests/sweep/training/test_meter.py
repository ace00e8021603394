"""From step times to a measurement."""

from __future__ import annotations

import os
import statistics
from typing import Any

import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from sweep.nvml import card_at
from tests.lazy import lazily
from tests.sweep.pretend_nvml import PretendNvml, memory, processes

meter = lazily("sweep.training.meter")


@given(st.lists(st.floats(0.01, 10.0), min_size=6, max_size=40))
def test_the_interval_of_the_median_holds_the_median(times: list[float]) -> None:
    low, high = meter.median_interval(times)
    assert low <= statistics.median(times) <= high


@pytest.mark.parametrize("count", [6, 9, 15, 30])
def test_the_interval_covers_the_true_median_at_least_95_times_in_100(count: int) -> None:
    draws = np.random.default_rng(0).lognormal(size=(2000, count))
    ends = (meter.median_interval(list(row)) for row in draws)
    assert np.mean([low <= 1.0 <= high for low, high in ends]) >= 0.94


@pytest.mark.parametrize(
    ("times", "is_precise"),
    [([1.0] * 5, False), ([1.0] * 9 + [5.0], True), ([1.0, 1.1] * 5, False)],
    ids=["fewer than six", "one slow among many", "uneven"],
)
def test_a_measurement_is_precise_by_the_interval_of_its_median(
    times: list[float], is_precise: bool
) -> None:
    assert (meter.median_interval(times) is None) == (len(times) < 6)
    assert meter.is_precise(times, relative=0.02) is is_precise


@pytest.mark.parametrize(
    ("times", "steady"),
    [([1.0], False), ([3.0, 1.0], False), ([3.0, 1.0, 1.02], True), ([1.0, 1.2], False)],
)
def test_warm_up_ends_when_two_steps_agree(times: list[float], steady: bool) -> None:
    assert meter.is_steady(times) is steady


def reader(**answers: Any) -> tuple[Any, PretendNvml]:
    nvml = PretendNvml(**answers)
    return meter.CardReader(card_at("0000:01:00.0", nvml)), nvml


@pytest.mark.parametrize(
    ("before", "now", "is_neighbour"),
    [([7], [7], False), ([7], [7, os.getpid()], False), ([7], [7, 8], True), ([7], [8], True)],
)
def test_who_was_there_before_is_no_neighbour_and_who_comes_is(
    before: list[int], now: list[int], is_neighbour: bool
) -> None:
    card, nvml = reader(nvmlDeviceGetComputeRunningProcesses=processes(*before))
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = processes(*now)
    assert card.read().has_neighbour is is_neighbour


def test_in_a_container_this_process_under_the_hosts_number_is_no_neighbour() -> None:
    card, nvml = reader(nvmlDeviceGetComputeRunningProcesses=[])
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = processes(314159)
    card.remember()
    assert not card.read().has_neighbour


def test_what_a_driver_or_a_machine_without_one_does_not_tell_is_empty() -> None:
    reading = reader(nvmlDeviceGetMemoryInfo=memory(24, 20))[0].read()
    assert (reading.has_neighbour, reading.used_bytes, reading.sm_clock_mhz) == (False, 4, None)
    reading = meter.CardReader(None).read()
    assert (reading.used_bytes, reading.throttle_reasons) == (None, ())


@pytest.mark.parametrize(
    ("counts", "seconds", "joules_per_token"),
    [
        ([(5_000, 305_000), (900_000, 1_000_000)], 2.0, 0.4),
        # The time is short; the GPU does not tell.
        ([(5_000, 9_000)], 0.0, None),
        ([(None, None)], 9.0, None),
    ],
)
def test_the_energy_of_a_token_is_what_the_card_used_while_it_counted(
    counts: list[tuple[int | None, int | None]], seconds: float, joules_per_token: float | None
) -> None:
    card, nvml = reader()
    count = meter.EnergyCount(card)

    def tells(millijoules: int | None) -> None:
        if millijoules is not None:
            nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] = millijoules

    for begun, ended in counts:
        tells(begun)
        count.begin()
        tells(ended)
        count.end()
    count.seconds += seconds
    found = count.per_token(1_000)
    assert found == (None if joules_per_token is None else pytest.approx(joules_per_token))


@pytest.mark.parametrize(
    ("ended", "gradients", "micro_steps", "seconds"),
    [
        ([1.0], None, 1, 1.0),
        ([1.0, 2.5], None, 2, 2.5),
        # The micro-step with the optimizer is counted once.
        ([1.0, 2.5], None, 16, 15 * 1.0 + 1.5),
        ([1.0, 2.0, 3.5], None, 16, 15 * 1.0 + 1.5),
        # Two steps of two micro-batches of 1, 3, 2 and 4 seconds, half a second for the optimizer.
        ([1.0, 4.5, 6.5, 11.0], [4.0, 10.5], 2, 5.5),
        # A long accumulation of uneven micro-batches has their mean and one update.
        ([1.0, 4.5, 6.5, 11.0], [4.0, 10.5], 8, 8 * 2.5 + 0.5),
        ([4.0, 5.5, 6.5, 11.0], [5.0, 10.5], 3, 3 * 2.5 + 0.5),
    ],
)
def test_a_step_is_made_of_the_micro_steps_that_were_run(
    ended: list[float], gradients: list[float] | None, micro_steps: int, seconds: float
) -> None:
    given = (ended,) if gradients is None else (ended, gradients)
    assert meter.mean_step_seconds(*given, micro_steps=micro_steps) == pytest.approx(seconds)
