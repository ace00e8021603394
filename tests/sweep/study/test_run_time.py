"""A run ends with its time budget, whatever it is at: search, confirmation or soak; what was cut is
tried again, and what was measured counts."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.reports.view import view_of
from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.storage.ranking import rank_study
from qlora_sweep.storage.records import INTERRUPTED, Measured, Outcome, Verdict
from qlora_sweep.sweep.paths import runs_directory
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.running.runner import Lane, Lanes, Observer, keep_going
from qlora_sweep.sweep.running.wire import Progress, TrialRequest
from qlora_sweep.sweep.study.events import StopReason
from qlora_sweep.sweep.study.prepared import prepare_again
from qlora_sweep.sweep.study.run_time import CommandStart
from qlora_sweep.sweep.study.stopping import Stopping
from qlora_sweep.sweep.terminal.summary import last_screen
from tests.storage.builders import read_it
from tests.sweep.simulated_device import a_measurement, a_study, peak_bytes, tokens_per_second
from tests.sweep.study.driven import (
    WAIT_SECONDS,
    StandingClock,
    WaitsForItsEnd,
    a_forecaster,
    a_grid,
    drive,
)
from tests.sweep.study.test_session import prepared, run
from tests.sweep.study.timed_device import TimedRunner

SPACE: dict[str, Any] = {
    "dimensions": {
        "micro_batch_size": [1, 2, 4, 6, 8, 10, 12, 16],
        "checkpoint_fraction": [0.5, 0.75, 1.0],
    },
    "fixed": {"kernels": "liger", "lora_rank": 16, "target_modules": "attention"},
    "baseline": {"micro_batch_size": 4},
    "trials": 24,
    "confirm": {"seconds": 15.0, "repeats": 3, "soak_seconds": 6.0},
}
ALL = 300.0
"""Seconds that are enough for all of it."""


def step_seconds(config: TrialConfig) -> float:
    return config.tokens_per_step / tokens_per_second(config)


def a_device() -> TimedRunner:
    return TimedRunner(step_seconds, peak_bytes)


def on_a_budget(
    home: Path, seconds: float | None, **changes: Any
) -> tuple[StopReason, TimedRunner]:
    """Drive a study on a GPU whose clock is the run's; return why it ended, and the GPU."""
    device = a_device()
    with a_grid(home, **SPACE | {"time_budget_seconds": seconds} | changes) as study:
        reason = drive(study, device, clock=lambda: device.seconds)
    return reason, device


def stored(home: Path) -> Any:
    return read_it(f"sqlite:///{home}/sweep.db", home)


@pytest.mark.parametrize("seconds", [12.0, 35.0, 130.0])
def test_a_run_takes_its_time_budget_and_a_step_at_most(tmp_path: Path, seconds: float) -> None:
    reason, device = on_a_budget(tmp_path, seconds)
    longest = max(step_seconds(config) for config, _, _ in device.ran)
    assert reason is StopReason.TIME_SPENT
    assert device.seconds <= seconds + longest
    study = stored(tmp_path)
    assert rank_study(study).winner is not None
    assert len(study.records) + len(study.confirmations) >= len(device.ran)


def test_the_end_of_a_run_is_kept_for_its_confirmation(tmp_path: Path) -> None:
    reason, _ = on_a_budget(tmp_path / "whole", ALL)
    whole = stored(tmp_path / "whole")
    assert reason is StopReason.TRIALS_SPENT
    assert rank_study(whole).is_confirmed
    reason, _ = on_a_budget(tmp_path / "half", 90.0)
    half = stored(tmp_path / "half")
    assert reason is StopReason.TIME_SPENT
    assert len(half.records) < len(whole.records)
    assert rank_study(half).is_confirmed
    assert view_of(half).document()["gain"]["ratio"] > 1.0


def test_where_the_end_is_too_short_for_a_confirmation_none_is_begun(tmp_path: Path) -> None:
    on_a_budget(tmp_path, 20.0)
    study = stored(tmp_path)
    assert study.confirmations == ()
    assert view_of(study).document()["confirmed"] is False
    assert "not confirmed" in last_screen(study)


def test_a_soak_that_time_makes_shorter_confirms_nothing_and_is_made_up_for(
    tmp_path: Path,
) -> None:
    confirm = {**SPACE["confirm"], "soak_seconds": 60.0}
    on_a_budget(tmp_path, 90.0, confirm=confirm)
    (soak,) = [r for r in stored(tmp_path).confirmations if r.purpose == "soak"]
    assert 0.0 < soak.measurement.soak.seconds < 60.0
    assert not rank_study(stored(tmp_path)).is_confirmed
    on_a_budget(tmp_path, None, confirm=confirm)
    assert rank_study(stored(tmp_path)).is_confirmed


def test_what_was_cut_is_no_verdict_and_is_tried_first_when_the_study_resumes(
    tmp_path: Path,
) -> None:
    cut: list[TrialConfig] = []
    for seconds in range(15, 60):
        home = tmp_path / str(seconds)
        on_a_budget(home, float(seconds), confirm=None)
        records = stored(home).records
        cut = [record.config for record in records if record.is_interrupted]
        if cut and len(records) > 1:
            break
    assert len(cut) == 1
    assert all(r.verdict is Verdict.FITS for r in records if r.config != cut[0])
    before = len(records)
    _, device = on_a_budget(home, None, confirm=None)
    assert device.ran[0][0] == cut[0]
    after = stored(home).records
    assert [r.attempt for r in after if r.config == cut[0]] == [1, 1]
    known = {r.config for r in records} - {*cut}
    assert not known & {config for config, _, _ in device.ran}
    assert len(after) > before


def test_a_run_that_resumes_has_its_time_budget_to_itself(tmp_path: Path) -> None:
    first, second = (on_a_budget(tmp_path, 30.0, confirm=None)[1].seconds for _ in range(2))
    assert min(first, second) > 15.0
    assert max(first, second) < 40.0


@pytest.mark.parametrize("budget", [{"time_budget_seconds": 50.0}, {"max_dollars": 0.05}])
@pytest.mark.parametrize("lanes", [1, 2])
def test_what_does_not_stop_by_itself_is_ended(
    tmp_path: Path, budget: dict[str, float], lanes: int
) -> None:
    """A compiler, say, which looks at no clock."""

    clock = StandingClock()
    where = Lanes([Lane(WaitsForItsEnd(1, clock), f"GPU {at}") for at in range(lanes)])
    with a_grid(tmp_path, **SPACE | {"confirm": None} | budget) as study:
        stopping = Stopping(study.definition.space, usd_per_hour=1.0)
        reason = drive(study, where, clock=clock, stopping=stopping)
        records = study.records()
    expected = StopReason.TIME_SPENT if "time_budget_seconds" in budget else None
    assert reason is (expected or StopReason.DOLLARS_SPENT)
    assert 1 <= sum(record.is_interrupted for record in records) <= lanes
    assert {r.verdict for r in records if not r.is_interrupted} <= {Verdict.FITS}


def test_a_step_that_is_being_measured_is_waited_for(tmp_path: Path) -> None:
    """It is ended a step after the end, and not before."""
    ended: list[float] = []

    class Measures(ReplayRunner):
        def cancel(self) -> None:
            ended.append(clock[0])
            super().cancel()

        def run(self, request: TrialRequest, *, observe: Observer = keep_going) -> Outcome:
            tokens = request.config.tokens_per_step / 10.0
            observe(Progress(phase="measure", step=3, tokens_per_second=tokens))
            for clock[0] in (5.0, 29.0, 31.0, 39.0):
                time.sleep(0.1)
                assert not ended
            clock[0] = 41.0
            until = time.monotonic() + WAIT_SECONDS
            while not ended:
                assert time.monotonic() < until, "nobody ended it"
                time.sleep(0.01)
            return INTERRUPTED

    clock = [0.0]
    with a_study(tmp_path, time_budget_seconds=30.0) as study:
        assert drive(study, Measures(), clock=lambda: clock[0]) is StopReason.TIME_SPENT
    assert ended[0] == 41.0


# Before it starts


@pytest.fixture
def home(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Path:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    return tmp_path


def started(seconds: float, imports: float = 1.5) -> CommandStart:
    return CommandStart(time.monotonic() - seconds, imports)


@pytest.mark.parametrize(
    ("space", "spent", "budget"),
    [("cpu-demo", 1.5, 5.0), ("cpu-demo", 60.0, 61.0), ("a10", 2.0, 20.0)],
)
def test_a_budget_too_short_for_one_trial_says_so_and_begins_nothing(
    home: Path, space: str, spent: float, budget: float
) -> None:
    runner = ReplayRunner()
    url = f"sqlite:///{home}/sweep.db"
    what = prepared(space, time_budget_seconds=budget)
    options: dict[str, Any] = {"new_runner": lambda _: runner}
    with pytest.raises(InputError, match=r"too short for one trial.*--time-budget \d+s") as short:
        run(what, url, start=started(spent), **options)
    assert short.value.exit_code == 2
    assert runner.ran == []
    assert not runs_directory().exists()


def test_a_busy_machine_needs_more_than_an_idle_one() -> None:
    what = prepared("cpu-demo")
    forecaster = a_forecaster(model=what.model)
    idle, busy = (started(0.0, imports).least_seconds(what.space, forecaster) for imports in (1, 6))
    assert busy > 2 * idle


def test_a_study_that_has_nothing_left_to_run_needs_no_time(home: Path) -> None:
    url = f"sqlite:///{home}/sweep.db"
    done = {"trials": 2, "confirm": False, "sampler": "random"}
    runner = ReplayRunner(otherwise=fits)
    run(prepared(**done), url, new_runner=lambda _: runner)
    again = prepared(**done, time_budget_seconds=1.0)
    reason = run(again, url, start=started(30.0), new_runner=lambda _: runner)
    assert reason is StopReason.TRIALS_SPENT
    for budget, spent in ((4.0, 2.0), (1.0, 30.0)):
        more = prepared(**done | {"trials": 3}, time_budget_seconds=budget)
        with pytest.raises(InputError, match="too short"):
            run(more, url, start=started(spent), new_runner=lambda _: runner)
    assert len(runner.ran) == 2


def fits(config: TrialConfig) -> Outcome:
    return Measured(measurement=a_measurement(config, peak_allocated_bytes=1000))


def test_measuring_a_winner_again_is_no_run_of_the_time_budget(home: Path) -> None:
    definition = prepared(time_budget_seconds=5.0).definition
    again = prepare_again("demo", definition, confirm={}, read_gpu=lambda: None)
    assert again.space.time_budget_seconds is None
