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
from sweep.training.meter import (
    CardReader,
    EnergyCount,
    is_precise,
    is_steady,
    mean_step_seconds,
    median_interval,
)
from tests.sweep.pretend_nvml import PretendNvml, memory, processes

seconds = st.lists(st.floats(0.01, 10.0), min_size=6, max_size=40)


@given(seconds)
def test_the_interval_of_the_median_holds_the_median(times: list[float]) -> None:
    interval = median_interval(times)
    assert interval is not None
    assert interval[0] <= statistics.median(times) <= interval[1]


@pytest.mark.parametrize("count", [6, 9, 15, 30])
def test_the_interval_covers_the_true_median_at_least_95_times_in_100(count: int) -> None:
    draws = np.random.default_rng(0).lognormal(size=(2000, count))
    covered = [low <= 1.0 <= high for low, high in map(_interval, draws)]
    assert np.mean(covered) >= 0.94


def _interval(row: np.ndarray) -> tuple[float, float]:
    interval = median_interval(list(row))
    assert interval is not None
    return interval


def test_fewer_than_six_steps_give_no_interval() -> None:
    assert median_interval([1.0] * 5) is None
    assert not is_precise([1.0] * 5, relative=0.02)


def test_one_slow_step_among_many_does_not_keep_a_measurement_from_being_precise() -> None:
    assert is_precise([1.0] * 9 + [5.0], relative=0.02)
    assert not is_precise([1.0, 1.1] * 5, relative=0.02)


@pytest.mark.parametrize(
    ("times", "steady"),
    [([1.0], False), ([3.0, 1.0], False), ([3.0, 1.0, 1.02], True), ([1.0, 1.2], False)],
)
def test_warm_up_ends_when_two_steps_agree(times: list[float], steady: bool) -> None:
    assert is_steady(times) is steady


def test_a_machine_without_nvml_gives_empty_readings() -> None:
    reading = CardReader(None).read()
    assert reading.used_bytes is None
    assert reading.throttle_reasons == ()


def reader(**answers: Any) -> tuple[CardReader, PretendNvml]:
    nvml = PretendNvml(**answers)
    return CardReader(card_at("0000:01:00.0", nvml)), nvml


def test_who_was_there_before_is_no_neighbour_and_who_comes_is() -> None:
    card, nvml = reader(nvmlDeviceGetComputeRunningProcesses=processes(7))
    assert not card.read().has_neighbour
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = processes(7, os.getpid())
    assert not card.read().has_neighbour
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = processes(7, 8)
    assert card.read().has_neighbour
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = processes(8)
    assert card.read().has_neighbour


def test_in_a_container_this_process_under_the_hosts_number_is_no_neighbour() -> None:
    card, nvml = reader(nvmlDeviceGetComputeRunningProcesses=[])
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = processes(314159)
    card.remember()
    assert not card.read().has_neighbour


def test_a_driver_that_shows_no_processes_shows_no_neighbours() -> None:
    card, _ = reader(nvmlDeviceGetMemoryInfo=memory(24, 20))
    reading = card.read()
    assert not reading.has_neighbour
    assert reading.used_bytes == 4
    assert reading.sm_clock_mhz is None


def test_the_energy_of_a_token_is_what_the_card_used_while_it_counted() -> None:
    nvml = PretendNvml(nvmlDeviceGetTotalEnergyConsumption=5_000)
    count = EnergyCount(CardReader(card_at("0", nvml)))
    for begun, ended in ((5_000, 305_000), (900_000, 1_000_000)):
        nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] = begun
        count.begin()
        nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] = ended
        count.end()
    count.seconds = 2.0
    assert count.joules == pytest.approx(400.0)
    assert count.per_token(1_000) == pytest.approx(0.4)


def test_energy_is_unknown_where_the_card_does_not_tell_or_the_time_is_short() -> None:
    silent = EnergyCount(CardReader(card_at("0", PretendNvml())))
    silent.begin()
    silent.end()
    silent.seconds = 9.0
    assert silent.per_token(1_000) is None
    nvml = PretendNvml(nvmlDeviceGetTotalEnergyConsumption=5_000)
    brief = EnergyCount(CardReader(card_at("0", nvml)))
    brief.begin()
    nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] = 9_000
    brief.end()
    assert brief.joules == pytest.approx(4.0)
    assert brief.per_token(1_000) is None


def test_a_round_of_whole_steps_counts_as_their_mean() -> None:
    # Two steps of two micro-batches of 1, 3, 2 and 4 seconds, the optimizer half a second each.
    ended, gradients = [1.0, 4.5, 6.5, 11.0], [4.0, 10.5]
    assert mean_step_seconds(ended, gradients, micro_steps=2) == pytest.approx(5.5)


@pytest.mark.parametrize("sizes", [(1.0, 3.0, 2.0, 4.0), (4.0, 1.0, 1.0, 4.0), (2.5,) * 4])
@pytest.mark.parametrize("micro_steps", [3, 8])
def test_a_long_accumulation_of_uneven_micro_batches_has_their_mean_and_one_update(
    sizes: tuple[float, ...], micro_steps: int
) -> None:
    update = 0.5
    ended, gradients, now = [], [], 0.0
    for index, size in enumerate(sizes):
        now += size
        if index % 2:
            gradients.append(now)
            now += update
        ended.append(now)
    expected = micro_steps * sum(sizes) / len(sizes) + update
    assert mean_step_seconds(ended, gradients, micro_steps=micro_steps) == pytest.approx(expected)
