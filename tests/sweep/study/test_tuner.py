from __future__ import annotations

from collections import Counter
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import EnvironmentFault
from search_spaces.gpus import GIB
from search_spaces.rules import Violation
from search_spaces.space import SamplerName
from storage.ledger import Ledger
from storage.ranking import rank
from storage.records import (
    Crashed,
    Lost,
    Measured,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    TrialRecord,
    Verdict,
)
from storage.study import OpenStudy
from sweep.predict.forecast import Forecaster
from sweep.predict.memory.prediction import WholeMemory
from sweep.running.replay import ReplayRunner
from sweep.sampling.samplers import make_sampler
from sweep.study.driver import Driver
from sweep.study.events import (
    Event,
    Interruption,
    StopReason,
    StudyFinished,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from sweep.study.tuner import Search, tune
from tests.sweep.imagined_memory import one_by_one
from tests.sweep.simulated_device import (
    BUDGET,
    MODEL,
    Exact,
    StopsWhen,
    a_measurement,
    a_record,
    a_space,
    a_study,
    best_speed,
    peak_bytes,
    tokens_per_second,
    train,
)

BASELINE = a_space().baseline_config()
TWO = {"dimensions": {"micro_batch_size": {"choices": [4, 8]}}, "fixed": {}}


class Clock:
    """Gains a second each time it is read."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        self.seconds += 1.0
        return self.seconds


def a_forecaster(**changes: Any) -> Forecaster:
    values: dict[str, Any] = {
        "model": MODEL,
        "budget_bytes": BUDGET,
        "violation": lambda _: None,
    }
    return Forecaster(**(values | changes))


def run(study: OpenStudy, **changes: Any) -> StopReason:
    values: dict[str, Any] = {
        "runner": ReplayRunner(otherwise=train),
        "forecaster": a_forecaster(),
        "clock": Clock(),
    }
    return tune(Driver(study, **(values | changes)))


def crashing(*configs: TrialConfig, times: int = 1000) -> Callable[[TrialConfig], Outcome]:
    """A GPU on which some configurations (or all) crash so many times before they run."""
    left: dict[TrialConfig, int] = {}

    def answer(config: TrialConfig) -> Outcome:
        if configs and config not in configs:
            return train(config)
        left[config] = left.get(config, times) - 1
        return train(config) if left[config] < 0 else Crashed(phase="attach", detail="segfault")

    return answer


def test_a_study_runs_its_trials_and_says_why_it_stopped(tmp_path: Path) -> None:
    with a_study(tmp_path, trials=5) as study:
        assert run(study) is StopReason.TRIALS_SPENT
        records = study.records()
    assert [record.number for record in records] == [0, 1, 2, 3, 4]
    assert all(record.started_at and record.wall_seconds > 0 for record in records)


def test_the_first_trial_is_the_baseline_and_is_marked(tmp_path: Path) -> None:
    with a_study(tmp_path, trials=3) as study:
        run(study)
        first, *others = study.records()
    assert first.config == BASELINE
    assert first.is_baseline
    assert not any(record.is_baseline for record in others)


def test_a_baseline_in_the_space_teaches_the_sampler_and_one_outside_does_not(
    tmp_path: Path,
) -> None:
    inside = {"baseline": {"micro_batch_size": 8, "target_modules": "attention"}}
    with a_study(tmp_path / "inside", trials=1, **inside) as study:
        run(study)
        assert study.study.trials[0].params["micro_batch_size"] == 8
    with a_study(tmp_path / "outside", trials=1, baseline={"micro_batch_size": 3}) as study:
        run(study)
        assert study.study.trials[0].params == {}
        assert study.records()[0].config.micro_batch_size == 3


def test_the_baseline_is_never_stopped_as_slow(tmp_path: Path) -> None:
    with a_study(tmp_path, trials=5) as study:
        # The baseline crashes twice, so that faster trials are known when it is measured.
        run(study, runner=ReplayRunner(otherwise=crashing(BASELINE, times=2)))
        records = study.records()
    baseline = [record for record in records if record.is_baseline]
    assert [record.verdict for record in baseline[:2]] == [Verdict.CRASHED, Verdict.CRASHED]
    assert baseline[2].verdict is Verdict.FITS
    rivals = [r.measurement for r in records[: baseline[2].number] if r.measurement]
    assert baseline[2].measurement is not None
    fastest = max(rival.tokens_per_second for rival in rivals)
    assert fastest > 1.1 * baseline[2].measurement.tokens_per_second


def test_a_study_goes_on_where_it_was(tmp_path: Path) -> None:
    with a_study(tmp_path, trials=3) as study:
        run(study)
    runner = ReplayRunner(otherwise=train)
    with a_study(tmp_path, trials=8) as study:
        run(study, runner=runner)
        assert len(study.records()) == 8
        assert len(runner.ran) == 5
    with a_study(tmp_path, trials=8) as study:
        assert run(study, runner=runner) is StopReason.TRIALS_SPENT
    assert len(runner.ran) == 5


def test_a_study_ends_when_the_whole_space_has_been_tried(tmp_path: Path) -> None:
    with a_study(tmp_path, trials=40, **TWO, baseline={"micro_batch_size": 8}) as study:
        sampler = make_sampler("random", study.definition.space, seed=0)
        study.study.sampler = sampler
        assert run(study) is StopReason.EXHAUSTED
        assert sorted(r.config.micro_batch_size for r in study.records()) == [4, 8]


def test_the_time_budget_is_for_this_run_alone(tmp_path: Path) -> None:
    with a_study(tmp_path, trials=100, time_budget_seconds=30) as study:
        assert run(study) is StopReason.TIME_SPENT
        first = len(study.records())
        assert run(study) is StopReason.TIME_SPENT
        assert len(study.records()) > first > 0


def test_an_interrupted_study_stops_after_the_running_trial(tmp_path: Path) -> None:
    finished: list[TrialRecord] = []

    def on_event(event: Event) -> None:
        if isinstance(event, TrialFinished):
            finished.append(event.record)

    with a_study(tmp_path) as study:
        reason = run(study, on_event=on_event, interruption=StopsWhen(lambda: len(finished) == 3))
        assert reason is StopReason.INTERRUPTED
        assert len(study.records()) == 3


def test_a_trial_that_was_cut_off_is_tried_again_on_the_next_run(tmp_path: Path) -> None:
    runner = ReplayRunner(otherwise=train)
    interruption = Interruption(cancel=runner.cancel)

    def on_event(event: Event) -> None:
        if isinstance(event, TrialProgress) and event.number == 2:
            interruption.request()

    with a_study(tmp_path, trials=5) as study:
        run(study, runner=runner, on_event=on_event, interruption=interruption)
        lost = study.records()[-1]
        assert isinstance(lost.outcome, Lost)
        assert lost.is_interrupted
    with a_study(tmp_path, trials=5) as study:
        run(study)
        again = study.records()[3]
        assert again.config == lost.config
        assert again.attempt == 1
        assert study.ledger.trials_spent() == 5
        assert len(study.records()) == 6


def test_what_crashed_is_tried_twice_more_and_counts_once(tmp_path: Path) -> None:
    bad = TrialConfig(micro_batch_size=4)
    runner = ReplayRunner(otherwise=crashing(bad))
    with a_study(tmp_path, trials=2, **TWO, baseline={"micro_batch_size": 8}) as study:
        study.study.sampler = make_sampler("random", study.definition.space, seed=0)
        assert run(study, runner=runner) is StopReason.TRIALS_SPENT
        records = study.records()
    assert [record.attempt for record in records if record.config == bad] == [1, 2, 3]
    assert Ledger(records).trials_spent() == 2


def test_after_a_crash_another_configuration_goes_first(tmp_path: Path) -> None:
    runner = ReplayRunner(otherwise=crashing(BASELINE, times=1))
    with a_study(tmp_path, trials=3) as study:
        run(study, runner=runner)
    assert [config == BASELINE for config in runner.ran] == [True, False, True, False]


def test_a_machine_on_which_everything_crashes_stops_the_study_with_the_cause(
    tmp_path: Path,
) -> None:
    runner = ReplayRunner(otherwise=crashing())
    with a_study(tmp_path) as study:
        with pytest.raises(EnvironmentFault, match="segfault"):
            run(study, runner=runner)
        assert len(study.records()) == 5
    assert len(set(runner.ran)) == 5


def test_a_baseline_that_a_rule_forbids_is_recorded_and_the_study_goes_on(tmp_path: Path) -> None:
    def violation(config: TrialConfig) -> Violation | None:
        return Violation("no-baseline", "here") if config == BASELINE else None

    with a_study(tmp_path, trials=3) as study:
        run(study, forecaster=a_forecaster(violation=violation))
        verdicts = [record.verdict for record in study.records()]
    assert verdicts[0] is Verdict.INVALID
    assert len(verdicts) == 3


def test_what_was_predicted_stays_beside_what_was_measured(tmp_path: Path) -> None:
    with a_study(tmp_path, trials=6) as study:
        run(study, forecaster=a_forecaster(predictor=Exact()))
        for record in study.records():
            assert record.prediction is not None
            assert record.prediction.peak_allocated_bytes == peak_bytes(record.config)


def test_what_cannot_fit_is_not_launched(tmp_path: Path) -> None:
    runner = ReplayRunner(otherwise=train)
    with a_study(tmp_path, trials=25) as study:
        run(study, runner=runner, forecaster=a_forecaster(predictor=Exact()))
        refused = [r for r in study.records() if isinstance(r.outcome, PredictedOutOfMemory)]
    assert refused
    assert not {record.config for record in refused} & set(runner.ran)
    assert all(record.device_seconds == 0.0 for record in refused)


def test_a_study_that_goes_on_knows_what_ran_out_of_memory_before(tmp_path: Path) -> None:
    with a_study(
        tmp_path, trials=1, baseline={"micro_batch_size": 32, "checkpoint_fraction": 0}
    ) as s:
        run(s)
        ran_out = s.records()[0]
        assert isinstance(ran_out.outcome, OutOfMemory)
        forecaster = a_forecaster()
        run(s, forecaster=forecaster)
    larger = ran_out.config.model_copy(update={"lora_rank": 64})
    assert forecaster.expect(larger).refusal is not None


def test_a_slow_trial_is_stopped_early_and_keeps_what_was_measured(tmp_path: Path) -> None:
    with a_study(tmp_path, trials=25) as study:
        run(study)
        pruned = [r for r in study.records() if r.verdict is Verdict.PRUNED_SLOW]
    assert pruned
    for record in pruned:
        assert record.measurement is not None
        assert record.measurement.steps_measured < a_measurement(record.config).steps_measured


def test_a_baseline_that_the_space_does_not_hold_stops_no_trial_of_it(tmp_path: Path) -> None:
    fast = {"micro_batch_size": 16, "kernels": "liger", "upcast_fp32": False}
    with a_study(tmp_path, trials=3, baseline=fast, **TWO) as study:
        run(study)
        records = study.records()
        ranking = rank(records, study.definition)
    assert records[0].is_baseline
    assert Verdict.FITS in {record.verdict for record in records[1:]}
    assert ranking.winner is not None
    assert not ranking.winner.is_baseline


def test_several_objectives_are_told_as_they_were_measured(tmp_path: Path) -> None:
    objectives = ["tokens_per_second", "peak_memory"]
    with a_study(tmp_path, trials=12, objectives=objectives) as study:
        run(study)
        for record in study.records():
            if isinstance(record.outcome, Measured):
                measured = record.outcome.measurement
                expected = [measured.tokens_per_second, measured.peak_allocated_bytes / GIB]
                assert study.study.trials[record.number].values == expected


def test_listeners_hear_every_trial_from_start_to_end(tmp_path: Path) -> None:
    heard: list[Event] = []
    with a_study(tmp_path, trials=2) as study:
        run(study, on_event=heard.append)
    kinds = [type(event) for event in heard if not isinstance(event, TrialProgress)]
    assert kinds == [TrialStarted, TrialFinished] * 2 + [StudyFinished]
    assert any(isinstance(e, TrialProgress) and e.progress.phase == "measure" for e in heard)


def test_the_drivers_time_adds_up_over_runs(tmp_path: Path) -> None:
    for trials in (2, 4):
        with a_study(tmp_path, trials=trials) as study:
            run(study)
            total = study.study.user_attrs["wall_seconds"]
    with a_study(tmp_path, trials=4) as study:
        assert total > sum(record.wall_seconds for record in study.records())


class Counted:
    """Counts what it is asked, in each state of knowledge."""

    def __init__(self, answer: Callable[[TrialConfig], Any]) -> None:
        self._answer = answer
        self._learned = 0
        self.asked: Counter[tuple[TrialConfig, int]] = Counter()

    def predict(self, config: TrialConfig) -> Any:
        self.asked[config, self._learned] += 1
        return self._answer(config)

    def predict_all(self, configs: Sequence[TrialConfig], **_: Any) -> WholeMemory:
        return WholeMemory(configs, one_by_one(self.predict, configs))

    def learn(self, record: TrialRecord) -> None:
        self._learned += 1


def test_over_a_whole_study_nothing_is_predicted_twice(
    tmp_path: Path,
) -> None:
    memory, speed = Counted(Exact().predict), Counted(tokens_per_second)
    forecaster = a_forecaster(predictor=memory, speed=speed)
    sampler = make_sampler("tpe", a_space(), seed=1, forecaster=forecaster)
    with a_study(tmp_path, trials=12, sampler=sampler) as study:
        run(study, forecaster=forecaster)
        records = study.records()
    # A further trial makes speed another one, and leaves what a configuration needs as it is.
    assert max(speed.asked.values()) == 1
    assert max(memory.asked.values()) == 1
    for record in records:
        assert record.prediction is not None
        assert record.prediction.peak_allocated_bytes == peak_bytes(record.config)
        assert record.prediction.tokens_per_second == tokens_per_second(record.config)


@pytest.mark.parametrize("name", ["guided", "tpe", "random"])
def test_a_sampler_that_knows_what_fits_finds_a_near_optimal_configuration(
    tmp_path: Path, name: SamplerName
) -> None:
    space = a_space()
    forecaster = a_forecaster(predictor=Exact())
    sampler = make_sampler(name, space, seed=1, forecaster=forecaster)
    with a_study(tmp_path, sampler=sampler) as study:
        run(study, forecaster=forecaster)
        speeds = [r.measurement.tokens_per_second for r in study.records() if r.measurement]
    assert max(speeds) >= {"guided": 0.98, "tpe": 0.95, "random": 0.75}[name] * best_speed(space)


def test_trials_spent_counts_what_is_not_tried_again() -> None:
    crash, config = Crashed(phase="build"), TrialConfig()
    fits = a_record(TrialConfig(lora_rank=8), number=4)
    crashes = [a_record(config, crash, number=n) for n in range(3)]
    assert Ledger([fits]).trials_spent() == 1
    assert Ledger([fits, *crashes[:1]]).trials_spent() == 1
    assert Ledger([fits, *crashes]).trials_spent() == 2
    assert Ledger([fits, *crashes[:2], a_record(config, number=3)]).trials_spent() == 2


ONE = {"trials": 1, "baseline": {"micro_batch_size": 8}}


def test_a_study_whose_only_trial_crashes_is_the_machines_fault_and_a_resume_tries_it_again(
    tmp_path: Path,
) -> None:
    runner = ReplayRunner(otherwise=crashing(times=4))
    with a_study(tmp_path, **ONE) as study:
        with pytest.raises(EnvironmentFault, match=r"nothing is known.*'attach'.*segfault"):
            run(study, runner=runner)
        assert [record.attempt for record in study.records()] == [1, 2, 3]
    with a_study(tmp_path, **ONE) as study:
        assert run(study, runner=runner) is StopReason.TRIALS_SPENT
        records = study.records()
    assert [record.attempt for record in records] == [1, 2, 3, 4, 5]
    assert records[-1].verdict is Verdict.FITS
    assert Ledger(records).trials_spent() == 1


def test_what_failed_in_an_earlier_run_is_tried_three_times_more_in_every_run(
    tmp_path: Path,
) -> None:
    bad = a_space().baseline_config()
    runner = ReplayRunner(otherwise=crashing(bad))
    for runs in (1, 2, 3):
        with a_study(tmp_path, trials=4) as study:
            assert run(study, runner=runner) is StopReason.TRIALS_SPENT
            records = study.records()
        assert sum(record.config == bad for record in records) == 3 * runs
        assert len(records) == 3 + 3 * runs


def test_a_configuration_that_took_its_driver_along_three_times_is_left_alone(
    tmp_path: Path,
) -> None:
    config = a_space().baseline_config()
    for _ in range(3):
        with a_study(tmp_path, trials=2) as study:
            study.recover()
            study.begin(study.ask({}), config, "2026-01-01T00:00:00Z")
    runner = ReplayRunner(otherwise=train)
    with a_study(tmp_path, trials=2) as study:
        run(study, runner=runner)
    assert config not in runner.ran


def test_what_was_refused_before_it_ran_does_not_make_a_failed_study_known(tmp_path: Path) -> None:
    def violation(config: TrialConfig) -> Violation | None:
        return None if config == BASELINE else Violation("no", "not here")

    runner = ReplayRunner(otherwise=crashing())
    with a_study(tmp_path, trials=4) as study, pytest.raises(EnvironmentFault, match="segfault"):
        run(study, runner=runner, forecaster=a_forecaster(violation=violation))


def test_one_trial_that_concluded_is_an_answer(tmp_path: Path) -> None:
    def answer(config: TrialConfig) -> Outcome:
        if config == BASELINE:
            return Crashed(phase="measure", detail="segfault")
        return OutOfMemory(stage="forward")

    with a_study(tmp_path, trials=3) as study:
        assert run(study, runner=ReplayRunner(otherwise=answer)) is StopReason.TRIALS_SPENT


def test_an_interrupted_study_of_failures_is_interrupted(tmp_path: Path) -> None:
    runner = ReplayRunner(otherwise=crashing())
    with a_study(tmp_path, **ONE) as study:
        stops = StopsWhen(lambda: len(runner.ran) == 1)
        reason = run(study, runner=runner, interruption=stops)
    assert reason is StopReason.INTERRUPTED


def test_nothing_that_was_measured_above_the_budget_enters_a_study_as_fitting(
    tmp_path: Path,
) -> None:
    over = Measured(measurement=a_measurement(BASELINE, peak_allocated_bytes=BUDGET + 1))
    with a_study(tmp_path, **ONE) as study:
        run(study, runner=ReplayRunner(otherwise=lambda _: over))
        outcome = study.records()[0].outcome
    assert isinstance(outcome, OutOfMemory)
    assert outcome.peak_allocated_bytes == BUDGET + 1
    assert f"{BUDGET + 1:,} bytes, over the budget of {BUDGET:,}" in outcome.detail


def disturbed(speed: float) -> Outcome:
    values = {"tokens_per_second": speed, "flags": ("neighbour",)}
    return Measured(measurement=a_measurement(BASELINE, **values))


ROBBED = OutOfMemory(stage="forward", flags=("neighbour",), detail="CUDA out of memory")


@pytest.mark.parametrize(
    ("outcomes", "runs", "verdict", "flags"),
    [
        ([train(BASELINE)], 1, Verdict.FITS, ()),
        ([disturbed(1.0), train(BASELINE)], 2, Verdict.FITS, ("remeasured",)),
        ([disturbed(1.0)] * 9, 3, Verdict.FITS, ("neighbour", "remeasured")),
        ([disturbed(1.0), Crashed(phase="measure")], 2, Verdict.FITS, ("neighbour", "remeasured")),
        ([ROBBED, train(BASELINE)], 2, Verdict.FITS, ("remeasured",)),
        ([ROBBED, OutOfMemory(stage="forward")], 2, Verdict.OOM, None),
    ],
    ids=["alone", "once", "always", "and a crash", "robbed once", "truly too large"],
)
def test_a_trial_that_another_process_disturbed_is_measured_again_at_most_twice(
    tmp_path: Path,
    outcomes: list[Outcome],
    runs: int,
    verdict: Verdict,
    flags: tuple[str, ...] | None,
) -> None:
    left = list(outcomes)
    runner = ReplayRunner(otherwise=lambda _: left.pop(0))
    with a_study(tmp_path, **ONE) as study:
        run(study, runner=runner)
        (record,) = study.records()
    assert len(runner.ran) == runs
    assert record.verdict is verdict
    if flags is not None:
        assert record.measurement is not None
        assert record.measurement.flags == flags


def test_of_disturbed_measurements_the_fastest_is_kept(tmp_path: Path) -> None:
    left = [disturbed(speed) for speed in (1.0, 3.0, 2.0)]
    with a_study(tmp_path, **ONE) as study:
        run(study, runner=ReplayRunner(otherwise=lambda _: left.pop(0)))
        measurement = study.records()[0].measurement
    assert measurement is not None
    assert measurement.tokens_per_second == 3.0


def test_memory_that_a_neighbour_held_all_the_time_is_no_verdict_on_the_configuration(
    tmp_path: Path,
) -> None:
    with a_study(tmp_path, **ONE) as study:
        with pytest.raises(EnvironmentFault, match="another process held memory"):
            run(study, runner=ReplayRunner(otherwise=lambda _: ROBBED))
        assert {record.verdict for record in study.records()} == {Verdict.CRASHED}


def test_a_worker_that_cannot_start_again_beside_a_neighbour_loses_no_measurement(
    tmp_path: Path,
) -> None:
    left = [disturbed(1.0)]

    def answer(_: TrialConfig) -> Outcome:
        if left:
            return left.pop()
        raise EnvironmentFault("the worker cannot use the device: out of memory")

    with a_study(tmp_path, **ONE) as study:
        run(study, runner=ReplayRunner(otherwise=answer))
        (record,) = study.records()
    assert record.measurement is not None
    assert record.measurement.flags == ("neighbour",)


def test_a_request_between_the_check_and_the_launch_launches_nothing(tmp_path: Path) -> None:
    runner = ReplayRunner(otherwise=train)
    checked: list[TrialConfig] = []

    def violation(config: TrialConfig) -> Violation | None:
        checked.append(config)
        return None

    class Late(Interruption):
        @contextmanager
        def interruptible(self) -> Iterator[None]:
            yield
            if checked and not self.is_requested():
                self.request()

    with a_study(tmp_path) as study:
        reason = run(
            study,
            runner=runner,
            forecaster=a_forecaster(violation=violation),
            interruption=Late(cancel=runner.cancel),
        )
        (record,) = study.records()
    assert reason is StopReason.INTERRUPTED
    assert record.verdict is Verdict.LOST
    assert runner.ran == []


def test_a_request_while_a_trial_is_chosen_waits_for_nothing(tmp_path: Path) -> None:
    runner = ReplayRunner(otherwise=train)
    interruption = Interruption(cancel=runner.cancel)

    def violation(_: TrialConfig) -> Violation | None:
        interruption.request()
        return None

    with a_study(tmp_path, **ONE) as study:
        forecaster = a_forecaster(violation=violation)
        reason = run(study, runner=runner, forecaster=forecaster, interruption=interruption)
        assert reason is StopReason.INTERRUPTED
        assert (runner.ran, study.records()) == ([], ())
    with a_study(tmp_path, **ONE) as study:
        run(study)
        (record,) = study.records()
    assert (record.verdict, record.is_baseline, record.attempt) == (Verdict.FITS, True, 1)


def test_a_trial_that_was_interrupted_before_it_ran_is_no_attempt(tmp_path: Path) -> None:
    def interrupted(_: TrialConfig) -> Violation | None:
        raise KeyboardInterrupt

    for _ in range(3):
        with a_study(tmp_path, **ONE) as study:
            events: list[Event] = []
            forecaster = a_forecaster(violation=interrupted)
            assert (
                run(study, forecaster=forecaster, on_event=events.append) is StopReason.INTERRUPTED
            )
            assert events[-1] == StudyFinished(StopReason.INTERRUPTED)
            assert study.records() == ()
    with a_study(tmp_path, **ONE) as study:
        run(study)
        (record,) = study.records()
    assert (record.verdict, record.is_baseline, record.attempt) == (Verdict.FITS, True, 1)


def test_whether_anything_is_left_to_try_costs_no_copy_of_all_that_was_tried(
    tmp_path: Path,
) -> None:
    class Tried(set[str]):
        """What was tried, which may be much."""

        def __iter__(self) -> Iterator[str]:
            raise AssertionError("all that was tried is gone through")

        def __or__(self, other: Any) -> Any:
            raise AssertionError("all that was tried is copied")

    with a_study(tmp_path, trials=3) as study:
        driver = Driver(study, runner=ReplayRunner(otherwise=train), forecaster=a_forecaster())
        search = Search(driver)
        search._tried = Tried()
        assert driver.run(search) is StopReason.TRIALS_SPENT
