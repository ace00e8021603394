from __future__ import annotations

from collections import Counter
from collections.abc import Callable
from pathlib import Path

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import EnvironmentFault
from qlora_sweep.search_spaces.rules import Violation
from qlora_sweep.storage.ledger import MAX_ATTEMPTS, TrialLedger, attempts
from qlora_sweep.storage.records import (
    Crashed,
    Measured,
    Outcome,
    OutOfMemory,
    PredictedOutOfMemory,
    TrialRecord,
    Verdict,
)
from qlora_sweep.storage.study import OpenStudy
from qlora_sweep.sweep.running.replay import ReplayRunner
from qlora_sweep.sweep.sampling.samplers import make_sampler
from qlora_sweep.sweep.study.events import (
    Event,
    Interruption,
    StopReason,
    StudyFinished,
    TrialFinished,
    TrialProgress,
    TrialStarted,
)
from tests.storage.builders import changed
from tests.sweep.simulated_device import (
    BUDGET,
    Exact,
    a_measurement,
    a_space,
    a_study,
    at_speed,
    train,
)
from tests.sweep.study.driven import a_forecaster, a_grid, drive
from tests.sweep.study.test_confirmation import SPACE, soaking

BASELINE = a_space().baseline_config()
TWO = {"dimensions": {"micro_batch_size": [4, 8]}, "fixed": {}}


def crashing(*configs: TrialConfig, times: int = 1000) -> Callable[[TrialConfig], Outcome]:
    """A GPU on which some configurations (or all) crash so many times before they run."""
    left: dict[TrialConfig, int] = {}

    def answer(config: TrialConfig) -> Outcome:
        if configs and config not in configs:
            return train(config)
        left[config] = left.get(config, times) - 1
        return train(config) if left[config] < 0 else Crashed(phase="attach", detail="segfault")

    return answer


def test_a_study_runs_from_the_baseline_on_and_goes_on_where_it_was(tmp_path: Path) -> None:
    heard: list[Event] = []
    runner = ReplayRunner(otherwise=train)
    for trials in (3, 5, 5):
        with a_study(tmp_path, trials=trials) as study:
            assert drive(study, runner, on_event=heard.append) is StopReason.TRIALS_SPENT
            records = study.records()
            seconds = study.known.wall_seconds
    assert len(runner.ran) == 5
    assert [record.number for record in records] == [0, 1, 2, 3, 4]
    assert seconds > sum(record.wall_seconds for record in records)
    assert records[0].config == BASELINE
    assert [record.is_baseline for record in records] == [True, *[False] * 4]
    heard_of = Counter(type(event) for event in heard)
    assert heard_of[TrialStarted] == heard_of[TrialFinished] == 5
    assert heard_of[StudyFinished] == 3


@pytest.mark.parametrize(("batch", "params"), [(8, 8), (3, None)], ids=["inside", "outside"])
def test_a_baseline_in_the_space_alone_teaches_the_sampler(
    tmp_path: Path, batch: int, params: int | None
) -> None:
    with a_study(tmp_path, trials=1, baseline={"micro_batch_size": batch}) as study:
        drive(study)
        assert study.study.trials[0].params.get("micro_batch_size") == params


def test_the_baseline_is_never_stopped_as_slow(tmp_path: Path) -> None:
    with a_study(tmp_path, trials=5) as study:
        # The baseline crashes twice, so that faster trials are known when it is measured.
        drive(study, crashing(BASELINE, times=2))
        records = study.records()
    baseline = [record for record in records if record.is_baseline]
    assert [record.verdict for record in baseline[:2]] == [Verdict.CRASHED, Verdict.CRASHED]
    assert baseline[2].verdict is Verdict.FITS
    rivals = [r.measurement for r in records[: baseline[2].number] if r.measurement]
    fastest = max(rival.tokens_per_second for rival in rivals)
    assert fastest > 1.1 * baseline[2].measurement.tokens_per_second


def test_what_crashed_is_tried_twice_more_and_counts_once(tmp_path: Path) -> None:
    bad = TrialConfig(micro_batch_size=4)
    runner = ReplayRunner(otherwise=crashing(bad))
    with a_study(tmp_path, trials=2, **TWO, baseline={"micro_batch_size": 8}) as study:
        study.study.sampler = make_sampler("random", study.definition.space, seed=0)
        assert drive(study, runner) is StopReason.TRIALS_SPENT
        records = study.records()
    assert [record.attempt for record in records if record.config == bad] == [1, 2, 3]
    assert TrialLedger(records).trials_spent() == 2


def test_a_baseline_that_a_rule_forbids_is_recorded_and_the_study_goes_on(tmp_path: Path) -> None:
    forbidden = Violation("no-baseline", "here")
    forecaster = a_forecaster(violation=lambda c: forbidden if c == BASELINE else None)
    with a_study(tmp_path, trials=3) as study:
        drive(study, forecaster=forecaster)
        verdicts = [record.verdict for record in study.records()]
    assert verdicts[0] is Verdict.INVALID
    assert len(verdicts) == 3


def test_a_guided_search_ends_where_rules_forbid_the_rest_and_repeats_nothing(
    tmp_path: Path,
) -> None:
    forbidden = Violation("no-twos", "here")
    forecaster = a_forecaster(violation=lambda c: forbidden if c.micro_batch_size == 2 else None)
    sizes = {"micro_batch_size": [2, 4, 8]}
    with a_study(tmp_path, trials=6, stop_below_gain=0, dimensions=sizes, fixed={}) as study:
        space = study.definition.space
        study.study.sampler = make_sampler("guided", space, seed=0, forecaster=forecaster)
        assert drive(study, forecaster=forecaster) is StopReason.EXHAUSTED
        configs = [record.config for record in study.records()]
    assert len(configs) == len(set(configs))


def test_what_cannot_fit_is_not_launched(tmp_path: Path) -> None:
    runner = ReplayRunner(otherwise=train)
    with a_study(tmp_path, trials=10) as study:
        drive(study, runner, forecaster=a_forecaster(predictor=Exact()))
        refused = [r for r in study.records() if isinstance(r.outcome, PredictedOutOfMemory)]
    assert refused
    assert not {record.config for record in refused} & set(runner.ran)
    assert all(record.device_seconds == 0.0 for record in refused)


def test_a_study_that_goes_on_knows_what_ran_out_of_memory_before(tmp_path: Path) -> None:
    large, forecaster = {"micro_batch_size": 32, "checkpoint_fraction": 0}, a_forecaster()
    with a_study(tmp_path, trials=1, baseline=large) as study:
        drive(study)
        ran_out = study.records()[0]
        drive(study, forecaster=forecaster)
    assert ran_out.verdict is Verdict.OOM
    larger = changed(ran_out.config, lora_rank=64)
    assert forecaster.expect(larger).refusal is not None


def test_a_slow_trial_is_stopped_early_and_keeps_what_was_measured(tmp_path: Path) -> None:
    with a_study(tmp_path, trials=10) as study:
        drive(study)
        pruned = [r for r in study.records() if r.verdict is Verdict.PRUNED_SLOW]
    assert pruned
    for record in pruned:
        assert record.measurement.steps_measured < a_measurement(record.config).steps_measured


ONE = {"trials": 1, "baseline": {"micro_batch_size": 8}}


def test_an_only_trial_that_crashes_is_the_machines_fault_and_is_tried_anew_by_the_next_run(
    tmp_path: Path,
) -> None:
    runner = ReplayRunner(otherwise=crashing(times=4))
    with a_study(tmp_path, **ONE) as study:
        with pytest.raises(EnvironmentFault, match="segfault"):
            drive(study, runner)
        assert [record.attempt for record in study.records()] == [1, 2, 3]
    with a_study(tmp_path, **ONE) as study:
        assert drive(study, runner) is StopReason.TRIALS_SPENT
        records = study.records()
    assert len(records) == 5
    assert records[-1].verdict is Verdict.FITS


@pytest.mark.parametrize("is_known", [False, True])
def test_one_trial_that_concluded_is_an_answer(tmp_path: Path, is_known: bool) -> None:
    """What was refused before it ran is none."""
    refused = None if is_known else Violation("no", "not here")
    forecaster = a_forecaster(violation=lambda c: None if c == BASELINE else refused)

    def answer(config: TrialConfig) -> Outcome:
        crash = Crashed(phase="measure", detail="segfault")
        return crash if config == BASELINE else OutOfMemory(stage="forward")

    with a_study(tmp_path, trials=3) as study:
        if is_known:
            assert drive(study, answer, forecaster=forecaster) is StopReason.TRIALS_SPENT
        else:
            with pytest.raises(EnvironmentFault, match="segfault"):
                drive(study, answer, forecaster=forecaster)


def test_nothing_above_the_budget_enters_a_study_as_fitting(tmp_path: Path) -> None:
    over = Measured(measurement=a_measurement(BASELINE, peak_allocated_bytes=BUDGET + 1))
    with a_study(tmp_path, **ONE) as study:
        drive(study, lambda _: over)
        outcome = study.records()[0].outcome
    assert isinstance(outcome, OutOfMemory)
    assert outcome.peak_allocated_bytes == BUDGET + 1


def disturbed(speed: float) -> Outcome:
    return at_speed(BASELINE, speed, flags=("neighbour",))


DISTURBED = [disturbed(speed) for speed in (1.0, 3.0, 2.0)]
ROBBED = OutOfMemory(stage="forward", flags=("neighbour",), detail="CUDA out of memory")


@pytest.mark.parametrize(
    ("outcomes", "runs", "verdict", "flags"),
    [
        ([disturbed(1.0), train(BASELINE)], 2, Verdict.FITS, ("remeasured",)),
        (DISTURBED, 3, Verdict.FITS, ("neighbour", "remeasured")),
        ([disturbed(1.0), Crashed(phase="measure")], 2, Verdict.FITS, ("neighbour", "remeasured")),
        ([ROBBED, train(BASELINE)], 2, Verdict.FITS, ("remeasured",)),
        ([ROBBED, OutOfMemory(stage="forward")], 2, Verdict.OOM, None),
    ],
    ids=["once", "always", "and a crash", "robbed once", "truly too large"],
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
        drive(study, runner)
        (record,) = study.records()
    assert len(runner.ran) == runs
    assert record.verdict is verdict
    if flags is not None:
        assert record.measurement.flags == flags
    if outcomes is DISTURBED:
        assert record.measurement.tokens_per_second == 3.0


def test_memory_that_a_neighbour_held_all_the_time_is_no_verdict(tmp_path: Path) -> None:
    with a_study(tmp_path, **ONE) as study:
        with pytest.raises(EnvironmentFault, match="another process held memory"):
            drive(study, lambda _: ROBBED)
        assert {record.verdict for record in study.records()} == {Verdict.CRASHED}


# What ends a trial from outside is no attempt of its configuration, however often that happens

AGAIN = range(MAX_ATTEMPTS + 1)
"""So often that it would be given up, were it counted."""


def asked_in(study: OpenStudy, *, when: Callable[[Event], bool], times: int) -> StopReason:
    """Drive a study in which somebody asks to stop so often at once at an event."""
    runner = ReplayRunner(otherwise=train, soaking=soaking)
    interruption = Interruption(cancel=runner.cancel)

    def on_event(event: Event) -> None:
        if when(event) and not interruption.is_requested():
            for _ in range(times):
                interruption.request()

    try:
        return drive(study, runner, on_event=on_event, interruption=interruption)
    except KeyboardInterrupt:
        return StopReason.INTERRUPTED


def untried(records: tuple[TrialRecord, ...]) -> bool:
    return all(attempts(records, record.config) == 0 for record in records)


def is_measuring(event: Event) -> bool:
    return isinstance(event, TrialProgress) and event.progress.phase == "measure"


@pytest.mark.parametrize(
    ("when", "times"),
    [(is_measuring, 1), (lambda event: isinstance(event, TrialStarted), 4)],
    ids=["runs", "begins, often"],
)
def test_a_trial_that_somebody_stopped_is_tried_again_as_its_first_attempt(
    tmp_path: Path, times: int, when: Callable[[Event], bool]
) -> None:
    for _ in AGAIN:
        with a_study(tmp_path, **ONE) as study:
            assert asked_in(study, when=when, times=times) is StopReason.INTERRUPTED
    with a_study(tmp_path, **ONE) as study:
        drive(study)
        *interrupted, last = study.records()
    assert last.verdict is Verdict.FITS
    assert last.attempt == 1
    assert untried(tuple(interrupted))


@pytest.mark.parametrize(
    ("purpose", "moment"), [("confirm", TrialStarted), ("soak", TrialProgress)]
)
def test_a_confirmation_that_somebody_stopped_is_run_again(
    tmp_path: Path, purpose: str, moment: type[Event]
) -> None:
    run_kinds: list[str] = []

    def when(event: Event) -> bool:
        if isinstance(event, TrialStarted):
            run_kinds.append(event.run_kind.purpose)
        return isinstance(event, moment) and run_kinds[-1] == purpose

    for times in (1, 3):
        with a_grid(tmp_path, **SPACE) as study:
            assert asked_in(study, when=when, times=times) is StopReason.INTERRUPTED
    with a_grid(tmp_path, **SPACE) as study:
        drive(study, ReplayRunner(otherwise=train, soaking=soaking))
        known = study.confirmations()
    measured = [r for r in known if isinstance(r.outcome, Measured)]
    assert [r.config.micro_batch_size for r in measured] == [10, 8, 8, 10, 10]
    assert untried(tuple(r for r in known if r not in measured))
