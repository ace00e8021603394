from __future__ import annotations

import pytest

from search_spaces.config import TrialConfig
from search_spaces.space import StepBudget
from storage.records import (
    Crashed,
    Invalid,
    Lost,
    Measured,
    Outcome,
    OutOfMemory,
    PrunedSlow,
)
from sweep.running.replay import ReplayRunner
from sweep.running.runner import keep_going
from sweep.running.wire import Progress, TrialRequest
from tests.sweep.simulated_device import a_record, train

CONFIG = TrialConfig()
STEPS = StepBudget()


@pytest.mark.parametrize(
    "outcome", [train(CONFIG), OutOfMemory(stage="forward"), Crashed(phase="build")]
)
def test_a_recorded_trial_ends_as_it_did(outcome: Outcome) -> None:
    runner = ReplayRunner([a_record(CONFIG, outcome)])
    assert runner.run(TrialRequest(config=CONFIG, steps=STEPS)) == outcome
    assert runner.run(TrialRequest(config=CONFIG, steps=STEPS)) == outcome


def test_several_trials_of_one_configuration_are_answered_in_turn() -> None:
    crashed, fits = Crashed(phase="build"), train(CONFIG)
    runner = ReplayRunner([a_record(CONFIG, crashed), a_record(CONFIG, fits)])
    assert [runner.run(TrialRequest(config=CONFIG, steps=STEPS)) for _ in range(3)] == [
        crashed,
        fits,
        fits,
    ]


def test_what_was_not_recorded_is_said_to_be_so() -> None:
    match ReplayRunner().run(TrialRequest(config=CONFIG, steps=STEPS)):
        case Invalid(rule=rule):
            assert rule == "not_recorded"
        case other:
            pytest.fail(f"a number was made up: {other}")


def test_the_interval_is_there_from_the_fewest_measured_steps_on() -> None:
    seen: list[Progress] = []

    def watch(progress: Progress) -> bool:
        seen.append(progress)
        return False

    ReplayRunner(otherwise=train).run(TrialRequest(config=CONFIG, steps=STEPS), observe=watch)
    with_interval = [p.step for p in seen if p.tokens_per_second_high is not None]
    assert with_interval[0] == STEPS.measured_min
    assert with_interval == sorted(with_interval)


def test_a_trial_that_is_stopped_keeps_what_was_measured_so_far() -> None:
    runner = ReplayRunner(otherwise=train)
    outcome = runner.run(
        TrialRequest(config=CONFIG, steps=STEPS),
        observe=lambda p: p.tokens_per_second_high is not None,
    )
    whole = train(CONFIG)
    assert isinstance(outcome, PrunedSlow)
    assert isinstance(whole, Measured)
    assert outcome.measurement.steps_measured == STEPS.measured_min
    assert outcome.measurement.tokens_per_second == whole.measurement.tokens_per_second


def test_a_cancelled_trial_is_interrupted_and_so_is_every_later_one() -> None:
    runner = ReplayRunner(otherwise=train)

    def cancel(_: Progress) -> bool:
        runner.cancel()
        return False

    for observe in (cancel, keep_going):
        outcome = runner.run(TrialRequest(config=CONFIG, steps=STEPS), observe=observe)
        assert isinstance(outcome, Lost)
        assert outcome.is_interrupted
    assert runner.ran == [CONFIG]
