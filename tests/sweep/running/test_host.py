"""What an actor's host says of the trials that it runs, without a cluster."""

from __future__ import annotations

import os
import threading

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import CardLost
from search_spaces.space import StepBudget
from storage.records import Measured, Outcome, PrunedSlow
from sweep.running.ray_runner import Host
from sweep.running.replay import ReplayRunner
from sweep.running.wire import TrialRequest
from tests.sweep.simulated_device import train

REQUEST = TrialRequest(config=TrialConfig(), steps=StepBudget())


def hosting(runner: ReplayRunner) -> Host:
    return Host(lambda log_path, cards: runner, home="study/0", device="cpu")


def test_a_trial_with_nothing_to_say_says_that_it_lives_and_a_stop_prunes_it_alone() -> None:
    may_go_on = threading.Event()
    host = hosting(ReplayRunner(otherwise=train, pause=lambda: may_go_on.wait(60) and None))
    stream = host.run(REQUEST, is_fresh=False)
    assert next(stream) == []
    host.stop()
    may_go_on.set()
    *_, outcome = stream
    assert isinstance(outcome, PrunedSlow)
    *_, outcome = host.run(REQUEST, is_fresh=False)
    assert isinstance(outcome, Measured)
    host.close()


def test_a_lost_card_goes_over_as_what_it_is() -> None:
    def answer(_: TrialConfig) -> Outcome:
        raise CardLost("it fell off the bus")

    host = hosting(ReplayRunner(otherwise=answer))
    with pytest.raises(CardLost, match="fell off the bus"):
        list(host.run(REQUEST, is_fresh=False))
    host.close()


def test_a_host_has_the_threads_that_its_node_has_and_not_those_that_ray_sets(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", "7")
    hosting(ReplayRunner()).close()
    # This process's parent stands in for the raylet.
    with open(f"/proc/{os.getppid()}/environ", "rb") as file:
        known = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    expected = known.get(b"OMP_NUM_THREADS")
    assert os.environ.get("OMP_NUM_THREADS") == (expected and expected.decode())
