from __future__ import annotations

import pytest

from search_spaces.errors import EnvironmentFault
from storage.records import Crashed, Lost, Outcome, OutOfMemory, TimedOut
from sweep.study.stopping import FAILURES_IN_A_ROW, ConsecutiveFailures

CRASH = Crashed(phase="build", detail="no kernel image")
TIMEOUT = TimedOut(phase="warmup", detail="no sign of life")


@pytest.mark.parametrize("failure", [CRASH, TIMEOUT])
def test_failing_alike_again_and_again_is_the_machines_fault(failure: Crashed | TimedOut) -> None:
    failures = ConsecutiveFailures()
    for _ in range(FAILURES_IN_A_ROW - 1):
        failures.count(failure)
    with pytest.raises(EnvironmentFault, match=failure.detail):
        failures.count(failure)


@pytest.mark.parametrize(
    "between", [OutOfMemory(stage="forward"), TIMEOUT, Crashed(phase="measure")]
)
def test_anything_else_in_between_begins_the_count_anew(between: Outcome) -> None:
    failures = ConsecutiveFailures()
    for outcome in [CRASH] * 4 + [between] + [CRASH] * 4:
        failures.count(outcome)
    assert failures


def test_what_somebody_interrupted_neither_counts_nor_begins_the_count_anew() -> None:
    failures, interrupted = ConsecutiveFailures(), Lost(is_interrupted=True)
    for _ in range(FAILURES_IN_A_ROW):
        failures.count(interrupted)
    assert not failures
    for outcome in [CRASH] * 4 + [interrupted]:
        failures.count(outcome)
    with pytest.raises(EnvironmentFault):
        failures.count(CRASH)


def test_a_model_that_cannot_be_built_is_suspected_beside_the_machine() -> None:
    failures = ConsecutiveFailures()
    for _ in range(FAILURES_IN_A_ROW - 1):
        failures.count(CRASH)
    with pytest.raises(EnvironmentFault, match=r"model cannot be built.*said: no kernel image"):
        failures.count(CRASH)
