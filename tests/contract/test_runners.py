"""One suite over every runner: whatever runs configurations must keep these promises.

A new runner is one more entry of `CASES`.
"""

from __future__ import annotations

import threading
import time
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass, replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.records import (
    Lost,
    Measured,
    Outcome,
    OutOfMemory,
    PrunedSlow,
)
from qlora_sweep.sweep.running.ray_nodes import joined
from qlora_sweep.sweep.running.ray_runner import RayRunner
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.running.runner import Runner
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import Progress, TrialRequest
from tests.storage.builders import SOAKED, changed
from tests.sweep.running.ray_cluster import LocalCluster
from tests.sweep.simulated_device import BUDGET, a_measurement, train
from tests.sweep.training.tiny import measured

STEPS = StepBudget(warmup_max=3, measured_min=6, measured_max=8, seconds_max=5)
SMALL = TrialConfig(micro_batch_size=2, seq_len=64, lora_rank=4, compute_dtype="fp32")
PHASES = ["start", "build", "attach", "warmup", "measure", "detach"]


@dataclass(frozen=True)
class Case:
    """A runner to hold to the contract, with what fits its budget and what does not."""

    start: Callable[[Path, int], Runner]
    """Starts it under a budget in bytes."""
    budget_bytes: int
    fits: TrialConfig
    too_large: TrialConfig
    end: Callable[[], None] = lambda: None
    """Ends what all its runners share."""


def start_replay(_: Path, budget_bytes: int) -> Runner:
    def soaking(config: TrialConfig) -> Outcome:
        return Measured(measurement=a_measurement(config, soak=SOAKED))

    return ReplayRunner(otherwise=train, budget_bytes=budget_bytes, soaking=soaking)


def start_worker_on_cpu(directory: Path, budget_bytes: int) -> Runner:
    return SupervisedRunner(
        load_model_spec("demo"),
        target=Target(gpu="cpu", device="cpu", budget_bytes=budget_bytes),
        weights="random",
        log_path=directory / "worker.log",
        seed=0,
    )


class OnRay:
    """Starts runners on a cluster of one node, which it begins with the first."""

    def __init__(self) -> None:
        self._stack = ExitStack()
        self._ray: Any = None
        self._node_id = ""

    def __call__(self, directory: Path, budget_bytes: int) -> Runner:
        pytest.importorskip("ray")
        if self._ray is None:
            # Several runners at a time.
            cluster = self._stack.enter_context(LocalCluster({"num_cpus": 3}, home=directory))
            self._ray = self._stack.enter_context(joined(cluster.address))
            (self._node_id,) = cluster.ids
        target = Target(gpu="cpu", device="cpu", budget_bytes=budget_bytes)
        return RayRunner(
            self._ray,
            partial(SupervisedRunner, load_model_spec("demo"), target=target),
            home=f"contract/{directory.name}",
            device="cpu",
            node_id=self._node_id,
            address="here",
        )

    def close(self) -> None:
        self._stack.close()
        self._ray = None


ON_RAY = OnRay()
CASES = {
    "replay": Case(start_replay, BUDGET, SMALL, changed(SMALL, micro_batch_size=4096)),
    "worker-on-cpu": Case(
        start_worker_on_cpu,
        GIB // 8,
        SMALL,
        changed(SMALL, micro_batch_size=16, seq_len=256, checkpoint_fraction=0.0),
    ),
}
CASES["worker-on-ray"] = replace(CASES["worker-on-cpu"], start=ON_RAY, end=ON_RAY.close)
PARAMS = [pytest.param(name, marks=[pytest.mark.integration] * ("ray" in name)) for name in CASES]


@pytest.fixture(scope="module", params=PARAMS, ids=str)
def case(request: pytest.FixtureRequest) -> Iterator[Case]:
    case = CASES[request.param]
    yield case
    case.end()


@pytest.fixture(scope="module")
def runner(case: Case, tmp_path_factory: pytest.TempPathFactory) -> Iterator[Runner]:
    with case.start(tmp_path_factory.mktemp("runner"), case.budget_bytes) as runner:
        yield runner


def is_interrupted(outcome: Outcome) -> bool:
    return isinstance(outcome, Lost) and outcome.is_interrupted


@contextmanager
def at_once() -> Iterator[None]:
    began = time.monotonic()
    yield
    assert time.monotonic() - began < 3


def test_a_fitting_configuration_is_measured_and_its_progress_comes_in_order(
    case: Case, runner: Runner
) -> None:
    seen: list[Progress] = []

    def watch(progress: Progress) -> bool:
        seen.append(progress)
        return False

    measurement = measured(runner.run(TrialRequest(config=case.fits, steps=STEPS), observe=watch))
    low, high = measurement.step_seconds_ci95
    assert low <= measurement.step_seconds <= high
    assert STEPS.measured_min <= measurement.steps_measured
    assert measurement.peak_allocated_bytes > 0
    assert measurement.soak is None
    tokens = measurement.tokens_per_second * measurement.step_seconds
    # The first token of a row has nothing before it to be predicted from, so it may not count.
    assert 0.95 * case.fits.tokens_per_step <= tokens <= 1.01 * case.fits.tokens_per_step
    order = [PHASES.index(progress.phase) for progress in seen]
    assert order == sorted(order)
    steps = [progress.step for progress in seen if progress.phase == "measure"]
    assert steps == sorted(steps)
    # Before there is an interval the bound is generous.
    bounds = [
        (progress.tokens_per_second, progress.tokens_per_second_high)
        for progress in seen
        if progress.phase != "measure" or progress.step < STEPS.measured_min
    ]
    assert any(progress.tokens_per_second_high is not None for progress in seen)
    assert all(high is None or (rate is not None and high > 1.1 * rate) for rate, high in bounds)


def test_a_trial_that_runs_out_of_memory_leaves_no_trace_in_the_next(
    case: Case, runner: Runner
) -> None:
    fitting = TrialRequest(config=case.fits, steps=STEPS)
    before = measured(runner.run(fitting))
    for is_soak in (False, True):
        large = TrialRequest(config=case.too_large, steps=STEPS, is_soak=is_soak)
        assert isinstance(runner.run(large), OutOfMemory)
    after = measured(runner.run(fitting))
    assert after.peak_allocated_bytes == before.peak_allocated_bytes
    assert after.trainable_parameters == before.trainable_parameters


# What a trial does under such a budget is tested without a process (test_trial.py).
@pytest.mark.parametrize(
    "case",
    ["replay", pytest.param("worker-on-cpu", marks=pytest.mark.integration)],
    indirect=True,
)
def test_a_byte_less_than_the_peak_is_out_of_memory_and_the_peak_itself_fits(
    case: Case, runner: Runner, tmp_path: Path
) -> None:
    fitting = TrialRequest(config=case.fits, steps=STEPS)
    peak = measured(runner.run(fitting)).peak_allocated_bytes
    with case.start(tmp_path, peak) as exact:
        measured(exact.run(fitting))
    with case.start(tmp_path, peak - 1) as tight:
        outcome = tight.run(fitting)
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.peak_allocated_bytes == peak
    assert f"{peak - 1:,}" in outcome.detail


def test_a_trial_that_an_observer_stops_keeps_its_measurement(case: Case, runner: Runner) -> None:
    # So many that the interval is not given up as one that would never be narrow enough.
    changes = {"measured_max": 1_000_000, "relative_interval": 1e-3, "seconds_max": 60}
    outcome = runner.run(
        TrialRequest(config=case.fits, steps=STEPS.model_copy(update=changes)),
        observe=lambda p: p.tokens_per_second_high is not None,
    )
    assert isinstance(outcome, PrunedSlow), outcome
    assert outcome.measurement.steps_measured < 1000
    assert outcome.measurement.tokens_per_second > 0


def test_a_trial_without_time_is_interrupted_and_the_next_is_measured(
    case: Case, runner: Runner
) -> None:
    for is_soak in (False, True):
        request = TrialRequest(config=case.fits, steps=STEPS, is_soak=is_soak, seconds_left=0.0)
        with at_once():
            assert is_interrupted(runner.run(request))
    timed = TrialRequest(config=case.fits, steps=STEPS, seconds_left=600.0)
    assert measured(runner.run(timed)).steps_measured >= STEPS.measured_min


@pytest.mark.parametrize(
    "case", ["worker-on-cpu", PARAMS[-1]], indirect=True, ids=["worker-on-cpu", "worker-on-ray"]
)
def test_a_trial_whose_time_ends_keeps_its_measurement(case: Case, runner: Runner) -> None:
    measured(runner.run(TrialRequest(config=case.fits, steps=STEPS)))
    changes = {"measured_max": 100_000, "relative_interval": 1e-9, "seconds_max": 600}
    endless = STEPS.model_copy(update=changes)
    for seconds in (1.0, 8.0, 40.0):
        # On a busy machine the first steps may take longer.
        outcome = runner.run(TrialRequest(config=case.fits, steps=endless, seconds_left=seconds))
        if not is_interrupted(outcome):
            break
    cut = measured(outcome)
    assert STEPS.measured_min <= cut.steps_measured < endless.measured_max
    assert cut.step_seconds_ci95 is not None
    assert cut.measured_seconds < seconds + cut.step_seconds


def test_a_soak_evaluates_and_saves(case: Case, runner: Runner) -> None:
    steps = changed(STEPS, measured_max=20, seconds_max=2.0)
    soaked = measured(runner.run(TrialRequest(config=case.fits, steps=steps, is_soak=True))).soak
    assert soaked.steps >= 20 or soaked.seconds >= 2.0
    assert soaked.evaluation_seconds > 0
    assert soaked.checkpoint_bytes > 0


@pytest.mark.parametrize(
    ("case", "is_of_another_thread"),
    [
        ("replay", True),
        ("replay", False),
        ("worker-on-cpu", True),
        pytest.param("worker-on-cpu", False, marks=pytest.mark.integration),
        pytest.param("worker-on-ray", True, marks=pytest.mark.integration),
    ],
    indirect=["case"],
)
def test_a_cancel_ends_the_trial_and_every_later_one(
    case: Case, tmp_path: Path, is_of_another_thread: bool
) -> None:
    fitting = TrialRequest(config=case.fits, steps=STEPS)
    large = TrialRequest(config=case.too_large, steps=STEPS, is_soak=True)
    seen: list[Progress] = []

    def cancel(_: Progress) -> bool:
        if is_of_another_thread:
            thread = threading.Thread(target=runner.cancel)
            thread.start()
            thread.join()
        else:
            runner.cancel()
        return False

    def watch(progress: Progress) -> bool:
        seen.append(progress)
        return False

    with case.start(tmp_path, case.budget_bytes) as runner:
        with at_once():
            runner.start()
            runner.start()
        if not is_of_another_thread:
            measured(runner.run(fitting))
            runner.start()
        assert is_interrupted(runner.run(fitting, observe=cancel))
        with at_once():
            for undo in (runner.start, runner.cancel, runner.close, lambda: None):
                undo()
                assert is_interrupted(runner.run(fitting, observe=watch))
                assert is_interrupted(runner.run(large, observe=watch))
    assert seen == []


@pytest.mark.parametrize("is_started", [True, False])
def test_a_cancel_before_the_first_trial_ends_every_one(
    case: Case, tmp_path: Path, is_started: bool
) -> None:
    runner = case.start(tmp_path, case.budget_bytes)
    if is_started:
        runner.start()
    with at_once():
        runner.cancel()
        for _ in range(2):
            assert is_interrupted(runner.run(TrialRequest(config=case.fits, steps=STEPS)))
    with at_once():
        runner.close()
        runner.close()
