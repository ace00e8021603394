"""What an actor's host says of the trials that it runs, without a cluster."""

from __future__ import annotations

import os
import threading
from collections.abc import Callable, Iterator

import pytest

from search_spaces.config import TrialConfig
from search_spaces.errors import CardLost
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.definition import Target
from storage.records import Crashed, Measured, Outcome, PrunedSlow
from sweep.running.on_ray.host import Broken, Ended, Faulted, Host, HostSettings, Trial, Word
from sweep.running.replay import ReplayRunner
from sweep.running.runner import Runner
from sweep.running.wire import Progress, TrialRequest
from tests.sweep.simulated_device import train

SETTINGS = HostSettings(
    model=load_model_spec("demo").to_json(),
    target=Target(gpu="cpu", device="cpu", budget_bytes=2**30),
    weights="random",
    seed=0,
    texts=None,
    study="study",
)
STEPS = StepBudget()


@pytest.fixture(autouse=True)
def _own_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("OMP_NUM_THREADS", os.environ.get("OMP_NUM_THREADS", "1"))


def a_trial(run_id: str = "1") -> Trial:
    return Trial(run_id=run_id, request=TrialRequest(config=TrialConfig(), steps=STEPS))


def hosting(runner: Runner) -> Host:
    return Host(SETTINGS, new_runner=lambda _: runner)


def heard(host: Host, run_id: str = "1") -> Iterator[Word]:
    count = 0
    while True:
        words = host.hear(run_id, count)
        assert words is not None
        yield from words
        count += len(words)
        if words and not isinstance(words[-1], Progress):
            return


def test_a_trial_is_told_beat_by_beat_and_ends_with_its_outcome() -> None:
    host = hosting(ReplayRunner(otherwise=train))
    host.begin(a_trial(), is_fresh=False)
    *beats, last = heard(host)
    assert len(beats) > 3
    assert all(isinstance(beat, Progress) for beat in beats)
    assert isinstance(last, Ended)
    assert isinstance(last.outcome, Measured)
    host.close()


def test_what_was_not_acknowledged_is_said_again() -> None:
    host = hosting(ReplayRunner(otherwise=train))
    host.begin(a_trial(), is_fresh=False)
    words = list(heard(host))
    again = host.hear("1", len(words) - 2)
    assert again is not None
    assert [type(word) for word in again] == [Progress, Ended]
    host.close()


def test_an_order_that_comes_twice_is_one() -> None:
    runner = ReplayRunner(otherwise=train)
    host = hosting(runner)
    host.begin(a_trial(), is_fresh=True)
    host.begin(a_trial(), is_fresh=True)
    list(heard(host))
    host.begin(a_trial("2"), is_fresh=False)
    list(heard(host, "2"))
    assert (len(runner.ran), runner.renewals) == (2, 1)
    host.close()


def test_a_stop_prunes_the_running_trial_and_not_the_next() -> None:
    may_go_on = threading.Event()
    host = hosting(ReplayRunner(otherwise=train, pause=lambda: may_go_on.wait(60) and None))
    host.begin(a_trial(), is_fresh=False)
    host.stop()
    may_go_on.set()
    *_, last = heard(host)
    assert isinstance(last, Ended)
    assert isinstance(last.outcome, PrunedSlow)
    host.begin(a_trial("2"), is_fresh=False)
    *_, last = heard(host, "2")
    assert isinstance(last, Ended)
    assert isinstance(last.outcome, Measured)
    host.close()


def raising(error: BaseException) -> Callable[[TrialConfig], Outcome]:
    def answer(_: TrialConfig) -> Outcome:
        raise error

    return answer


def test_a_lost_card_goes_over_as_what_it_is_and_a_mistake_with_its_trace() -> None:
    host = hosting(ReplayRunner(otherwise=raising(CardLost("it fell off the bus"))))
    host.begin(a_trial(), is_fresh=False)
    (word,) = heard(host)
    assert isinstance(word, Faulted)
    assert isinstance(word.fault, CardLost)
    host.close()
    host = hosting(ReplayRunner(otherwise=raising(ZeroDivisionError("ours"))))
    host.begin(a_trial(), is_fresh=False)
    (word,) = heard(host)
    assert isinstance(word, Broken)
    assert "ZeroDivisionError: ours" in word.trace
    host.close()


def test_a_crash_that_the_card_had_a_hand_in_is_the_cards() -> None:
    crash = Crashed(phase="measure", detail="the worker ended")
    host = Host(
        SETTINGS,
        new_runner=lambda _: ReplayRunner(otherwise=lambda _: crash),
        fault=lambda: "the driver reported Xid 79",
    )
    host.begin(a_trial(), is_fresh=False)
    *_, word = heard(host)
    assert isinstance(word, Faulted)
    assert isinstance(word.fault, CardLost)
    assert "Xid 79" in str(word.fault)
    host.close()


def test_a_host_has_the_threads_that_its_node_has_and_not_those_that_ray_sets() -> None:
    hosting(ReplayRunner()).close()
    # This process's parent stands in for the raylet.
    with open(f"/proc/{os.getppid()}/environ", "rb") as file:
        known = dict(entry.split(b"=", 1) for entry in file.read().split(b"\0") if b"=" in entry)
    expected = known.get(b"OMP_NUM_THREADS")
    assert os.environ.get("OMP_NUM_THREADS") == (expected and expected.decode())
