from __future__ import annotations

import pytest

from search_spaces.config import TrialConfig
from search_spaces.space import StepBudget
from storage.records import Crashed, Invalid, Outcome, OutOfMemory, PrunedSlow
from sweep.running.replay import ReplayRunner
from sweep.running.wire import TrialRequest
from tests.sweep.simulated_device import a_record, train

CONFIG, STEPS = TrialConfig(), StepBudget()
REQUEST = TrialRequest(config=CONFIG, steps=STEPS)
FITS, CRASHED = train(CONFIG), Crashed(phase="build")


@pytest.mark.parametrize(
    "outcomes", [[FITS], [OutOfMemory(stage="forward")], [CRASHED], [CRASHED, FITS]]
)
def test_recorded_trials_of_a_configuration_end_in_turn_as_they_did(
    outcomes: list[Outcome],
) -> None:
    runner = ReplayRunner([a_record(CONFIG, outcome) for outcome in outcomes])
    assert [runner.run(REQUEST) for _ in range(3)] == (outcomes + 2 * outcomes[-1:])[:3]


def test_what_was_not_recorded_is_said_to_be_so() -> None:
    outcome = ReplayRunner().run(REQUEST)
    assert isinstance(outcome, Invalid)
    assert outcome.rule == "not_recorded"


def test_the_interval_is_there_from_the_fewest_measured_steps_on_and_ends_a_slow_trial() -> None:
    outcome = ReplayRunner(otherwise=train).run(
        REQUEST, observe=lambda progress: progress.tokens_per_second_high is not None
    )
    assert isinstance(outcome, PrunedSlow)
    assert outcome.measurement.steps_measured == STEPS.measured_min
    assert outcome.measurement.tokens_per_second == FITS.measurement.tokens_per_second
