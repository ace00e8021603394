"""What a study may cost holds for all that its command does, at the price of the GPU there is."""

from __future__ import annotations

import threading
from collections.abc import Iterator
from contextlib import contextmanager
from pathlib import Path
from typing import Any

import pytest

from search_spaces.config import TrialConfig
from search_spaces.prices import load_prices
from storage.records import Outcome, Verdict
from storage.study import OpenStudy
from sweep.cli import main
from sweep.running.replay import ReplayRunner
from sweep.running.runner import Lane, Lanes
from sweep.study import session
from sweep.study.driver import Driver
from sweep.study.events import Interruption, Listener, StopReason
from sweep.study.session import prepare, prepare_again
from sweep.study.stopping import Stopping
from tests.sweep.imagined_memory import ImaginedPredictor
from tests.sweep.simulated_device import a_study, train
from tests.sweep.study.driven import a_forecaster, a_grid, drive
from tests.sweep.study.test_confirmation import SPACE, soaking
from tests.sweep.study.test_session import run, small_a10
from tests.sweep.study.test_targets import a_card

SECONDS = 20.0
"""No test waits so long unless it fails."""
A_DOLLAR_A_SECOND = 3600.0


class Clock:
    """Stands still until a trial of hours is begun."""

    def __init__(self) -> None:
        self.seconds = 0.0

    def __call__(self) -> float:
        return self.seconds


class WaitsForItsEnd(ReplayRunner):
    """Answers so many trials at once; the next takes all the time there is, until it is cancelled.

    Args:
        answered: at once.
        clock: of the study.
    """

    def __init__(self, answered: int, clock: Clock) -> None:
        super().__init__(otherwise=self._answer, soaking=soaking)
        self._left = answered
        self._clock = clock
        self._cancelled = threading.Event()

    def cancel(self) -> None:
        super().cancel()
        self._cancelled.set()

    def _answer(self, config: TrialConfig) -> Outcome:
        self._left -= 1
        if self._left < 0:
            self._clock.seconds += 3600.0
            assert self._cancelled.wait(SECONDS), "nobody ended it"
        return train(config)


def driven(study: OpenStudy, runner: Any, clock: Clock, *, is_anew: bool = False) -> StopReason:
    space = study.definition.space.model_copy(update={"max_dollars": 0.1})
    study.definition = study.definition.model_copy(update={"space": space})
    stopping = Stopping(space, usd_per_hour=A_DOLLAR_A_SECOND)
    return drive(study, runner, is_anew=is_anew, stopping=stopping, clock=clock)


@pytest.mark.parametrize("lanes", [1, 2])
def test_a_running_trial_ends_with_the_money(tmp_path: Path, lanes: int) -> None:
    clock = Clock()
    where = Lanes([Lane(WaitsForItsEnd(1, clock), name=f"GPU {at}") for at in range(lanes)])
    with a_study(tmp_path) as study:
        study.cards = lanes
        assert driven(study, where, clock) is StopReason.DOLLARS_SPENT
        records = study.records()
        retried = study.recover()
    ended = {record.config for record in records if record.is_interrupted}
    assert ended == set(retried)
    assert 1 <= len(ended) <= lanes
    assert {record.verdict for record in records if record.config not in ended} == {Verdict.FITS}


def test_a_confirmation_ends_with_the_money_and_what_is_known_stays(tmp_path: Path) -> None:
    with a_grid(tmp_path, **SPACE) as study:
        clock = Clock()
        assert driven(study, WaitsForItsEnd(3 + 2, clock), clock) is StopReason.DOLLARS_SPENT
        known = study.confirmations()
        assert len(study.records()) == 3
    assert [r.config.micro_batch_size for r in known if r.measurement] == [10, 8]
    assert [r.is_interrupted for r in known] == [False, False, True]


@pytest.mark.parametrize("is_anew", [False, True])
def test_where_the_money_is_spent_nothing_is_measured_again(tmp_path: Path, is_anew: bool) -> None:
    runner = ReplayRunner(otherwise=train, soaking=soaking)
    with a_grid(tmp_path, **SPACE | {"confirm": False}) as study:
        drive(study, runner)
    with a_grid(tmp_path, **SPACE) as study:
        study.add_wall_seconds(10.0)
        assert driven(study, runner, Clock(), is_anew=is_anew) is StopReason.DOLLARS_SPENT
        assert study.confirmations() == ()
    assert len(runner.ran) == 3


@pytest.mark.parametrize(("seconds", "is_over"), [(3599.0, False), (3600.0, True)])
def test_dollars_are_spent_by_all_runs_at_the_price_of_the_gpu(
    tmp_path: Path, seconds: float, is_over: bool
) -> None:
    with a_study(tmp_path, max_dollars=0.5) as study:
        study.add_wall_seconds(seconds)
        stopping = Stopping(study.definition.space, usd_per_hour=0.5)
        runner = ReplayRunner(otherwise=train)
        driver = Driver(study, runner, a_forecaster(), stopping=stopping, clock=Clock())
        assert (driver.reason_to_stop() is StopReason.DOLLARS_SPENT) is is_over


def test_money_is_that_of_the_gpu_that_is_there_and_not_of_the_one_it_stands_in_for(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    monkeypatch.setattr(session, "TracingPredictor", lambda *_, **__: ImaginedPredictor())
    cheapest = {gpu: offers[0].usd_per_hour for gpu, offers in load_prices().items()}
    assert cheapest["h200"] > 2 * cheapest["a10"]

    @contextmanager
    def after_an_hour(study: OpenStudy, _: Interruption) -> Iterator[Listener]:
        study.add_wall_seconds(3600.0)
        yield lambda _event: None

    def after_an_hour_on(host: str) -> tuple[StopReason, int]:
        overrides = {"max_dollars": 2 * cheapest["a10"], "trials": 2, "confirm": False}
        card, runner = a_card(host), ReplayRunner(otherwise=train)
        what = prepare(small_a10(tmp_path), overrides=overrides, study=host, card=lambda: card)
        url = f"sqlite:///{tmp_path}/runs/sweep.db"
        reason = run(what, url, watch=after_an_hour, new_runner=lambda _: runner)
        return reason, len(runner.ran)

    assert after_an_hour_on("h200") == (StopReason.DOLLARS_SPENT, 0)
    assert after_an_hour_on("a10") == (StopReason.TRIALS_SPENT, 2)


def test_what_measuring_a_winner_again_may_cost_can_be_raised(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setenv("SWEEP_HOME", str(tmp_path))
    card = a_card("a10")
    spent = prepare("a10", overrides={"max_dollars": 1.0}, study="paid", card=lambda: card)
    dollars = [
        prepare_again("paid", spent.definition, confirm={}, max_dollars=typed, card=lambda: card)
        for typed in (None, 2.0)
    ]
    assert [what.space.max_dollars for what in dollars] == [1.0, 2.0]
    with a_study(tmp_path):
        pass
    words = ["confirm", "study", "--storage", f"sqlite:///{tmp_path}/sweep.db"]
    assert main([*words, "--max-dollars", "0"]) == 2
    assert "--max-dollars must be greater than 0, got 0" in capsys.readouterr().err
