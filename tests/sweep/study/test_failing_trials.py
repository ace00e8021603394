from __future__ import annotations

import pytest

from search_spaces.errors import EnvironmentFault
from storage.records import Crashed, Outcome, OutOfMemory, TimedOut
from sweep.study.failures import FAILURES_IN_A_ROW, FailureStreak

CRASH = Crashed(phase="build", detail="no kernel image")
TIMEOUT = TimedOut(phase="warmup", detail="no sign of life")


@pytest.mark.parametrize("failure", [CRASH, TIMEOUT])
def test_failing_alike_again_and_again_is_the_machines_fault(failure: Crashed | TimedOut) -> None:
    streak = FailureStreak()
    for _ in range(FAILURES_IN_A_ROW - 1):
        streak.count(failure)
    with pytest.raises(EnvironmentFault, match=failure.detail):
        streak.count(failure)


@pytest.mark.parametrize(
    "between", [OutOfMemory(stage="forward"), TIMEOUT, Crashed(phase="measure")]
)
def test_anything_else_in_between_begins_the_count_anew(between: Outcome) -> None:
    streak = FailureStreak()
    for outcome in [CRASH] * 4 + [between] + [CRASH] * 4:
        streak.count(outcome)
    assert streak


def test_a_model_that_cannot_be_built_is_suspected_beside_the_machine() -> None:
    streak = FailureStreak()
    for _ in range(FAILURES_IN_A_ROW - 1):
        streak.count(CRASH)
    with pytest.raises(EnvironmentFault, match=r"model cannot be built.*said: no kernel image"):
        streak.count(CRASH)
