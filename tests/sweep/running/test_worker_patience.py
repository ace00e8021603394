"""A worker gets the time that is its due, and none that its driver was away for."""

from __future__ import annotations

import pytest

from search_spaces.space import StepBudget
from storage.records import Phase
from sweep.running.child import AttentiveClock
from sweep.running.supervisor import Deadlines, Patience
from sweep.running.wire import Progress

STEPS = StepBudget()
DEADLINES = Deadlines()


class Driver:
    """Looks every fifth of a second, as the real one does, and may be away in between."""

    def __init__(self, steps: StepBudget = STEPS, **patience: int) -> None:
        self.seconds = 1000.0
        self.clock = AttentiveClock(clock=lambda: self.seconds)
        self.patience = Patience(DEADLINES, self.clock, steps, **patience)

    def wait(self, seconds: float) -> bool:
        """Look for so long, and return whether time was up on the way."""
        until = self.seconds + seconds
        while self.seconds < until:
            self.seconds += 0.2
            self.clock.look()
            if self.patience.exceeded() is not None:
                return True
        return False

    def be_away(self, seconds: float) -> None:
        self.seconds += seconds
        self.clock.look()

    def hear(self, phase: Phase, step: int = 0) -> None:
        self.patience.hear(Progress(phase=phase, step=step))


@pytest.mark.parametrize("phase", ["build", "attach", "warmup", "measure", "detach", "quality"])
def test_silence_is_up_at_the_deadline_of_its_phase(phase: Phase) -> None:
    driver, deadline = Driver(), DEADLINES.of(phase)
    driver.hear(phase)
    assert not driver.wait(deadline - 1)
    assert driver.wait(2)
    assert driver.patience.exceeded() == f"no sign of life for {deadline:g} s"


@pytest.mark.parametrize("away", [30.0, 8 * 3600.0])
def test_a_driver_that_was_away_counts_the_silence_anew(away: float) -> None:
    driver = Driver()
    driver.hear("measure", 1)
    assert not driver.wait(DEADLINES.measure - 1)
    driver.be_away(away)
    assert not driver.wait(DEADLINES.measure - 1)
    assert driver.wait(2)


def test_a_driver_that_is_slow_to_look_lays_no_more_than_a_second_a_look_to_the_worker() -> None:
    driver = Driver()
    driver.hear("measure", 1)
    for _ in range(int(DEADLINES.measure) - 1):
        driver.be_away(4.0)
        assert driver.patience.exceeded() is None
    driver.be_away(4.0)
    assert driver.patience.exceeded() is not None


@pytest.mark.parametrize("micro_steps", [2, 4])
def test_beats_without_a_step_are_no_progress_whichever_phase_they_name(micro_steps: int) -> None:
    """A step of more micro-batches gets the time of all of them."""
    driver, limit = Driver(micro_steps=micro_steps), DEADLINES.of_progress("measure")
    begun = driver.seconds
    driver.hear("measure", 5)
    while not driver.wait(10):
        driver.hear("warmup", 99)
        driver.hear("measure", 5)
    assert driver.seconds - begun == pytest.approx(limit * micro_steps / 2, abs=1)
    assert "no step further" in (driver.patience.exceeded() or "")


def test_a_soak_of_hours_has_them_as_long_as_a_step_now_and_then_is_done() -> None:
    seconds = 10 * 3600.0
    soak = StepBudget(measured_max=10**6, seconds_max=seconds)
    assert seconds < DEADLINES.of_trial(soak) < seconds + 7200
    driver = Driver(soak)
    for step in range(int(seconds / 100)):
        assert not driver.wait(100)
        driver.hear("measure", step)


def test_the_limit_of_a_trial_leaves_the_slowest_that_is_legal_its_time() -> None:
    """Every micro-step may take as long as a silence may last; two of each step are run."""
    slowest = 2 * DEADLINES.measure * (STEPS.warmup_max + STEPS.measured_min)
    whole = DEADLINES.build + DEADLINES.attach + DEADLINES.detach
    assert DEADLINES.of_trial(STEPS) > whole + slowest


@pytest.mark.parametrize(("phase", "tokens"), [("measure", 0), ("quality", 50_000)])
def test_a_trial_as_a_whole_has_an_end_however_lively_it_is(phase: Phase, tokens: int) -> None:
    driver, steps = Driver(quality_tokens=tokens), iter(range(10_000))
    begun = driver.seconds
    while not driver.wait(10):
        driver.hear(phase, next(steps))
    whole = DEADLINES.of_trial(STEPS) + (DEADLINES.of_quality(tokens) if tokens else 0)
    assert driver.seconds - begun == pytest.approx(whole, abs=1)
    assert "the trial as a whole" in (driver.patience.exceeded() or "")
    assert DEADLINES.of_quality(tokens) > tokens
