"""Processes that train one configuration together, on the CPU, each as on a GPU of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from functools import partial
from pathlib import Path

import pytest

from search_spaces.config import TrialConfig
from search_spaces.models import load_model_spec
from search_spaces.space import StepBudget
from storage.records import Crashed, Invalid, OutOfMemory
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import Progress, TrialRequest
from tests.sweep.running.teams import a_cpu_runner, measured

pytestmark = pytest.mark.usefixtures("our_own_code")
STEPS = StepBudget(warmup_min=1, warmup_max=2, measured_min=3, measured_max=3)
SMALL = TrialConfig(micro_batch_size=2, seq_len=32, optimizer="adamw_torch_fused")
TOGETHER = SMALL.model_copy(update={"data_parallel": 2})
A_GRADIENT_BYTES = 4


a_runner = partial(a_cpu_runner, load_model_spec("demo"))


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedRunner]:
    with a_runner(tmp_path_factory.mktemp("logs") / "worker.log") as runner:
        yield runner


def ranks() -> list[tuple[int, int]]:
    """Return the processes below this one that are not the first of their ranks: rank, number."""
    found = []
    for name in filter(str.isdecimal, os.listdir("/proc")):
        try:
            words = Path(f"/proc/{name}/cmdline").read_bytes().split(b"\0")
            mark = b"QLORA_SWEEP_CHILD" in Path(f"/proc/{name}/environ").read_bytes()
        except OSError:
            continue
        is_rank = words[3:4] == [b"sweep.running"] and words[6:7] not in ([], [b""])
        if is_rank and mark and _is_below_this(int(name)):
            found.append((int(words[6]), int(name)))
    return sorted(found)


def followers() -> list[int]:
    return [process for _, process in ranks()]


def _is_below_this(number: int) -> bool:
    while number > 1:
        if number == os.getpid():
            return True
        try:
            number = int(Path(f"/proc/{number}/stat").read_bytes().rpartition(b")")[2].split()[1])
        except OSError:
            return False
    return False


def test_two_cards_train_one_configuration_and_it_is_the_speed_of_both(
    runner: SupervisedRunner,
) -> None:
    measurement = measured(runner.run(TrialRequest(config=TOGETHER, steps=STEPS)))
    assert measurement.cards == 2
    tokens = measurement.tokens_per_second * measurement.step_seconds
    assert tokens == pytest.approx(2 * SMALL.tokens_per_step)
    assert len(followers()) == 1


def test_each_card_has_the_gradients_in_buckets_and_beside_them_where_it_accumulates(
    runner: SupervisedRunner,
) -> None:
    alone, together = (
        measured(runner.run(TrialRequest(config=c, steps=STEPS))) for c in (SMALL, TOGETHER)
    )
    gradients = A_GRADIENT_BYTES * together.trainable_parameters
    more = together.peak_allocated_bytes - alone.peak_allocated_bytes
    assert more == pytest.approx(gradients, abs=4096)
    longer = TOGETHER.model_copy(update={"effective_batch_size": 8})
    accumulated = measured(runner.run(TrialRequest(config=longer, steps=STEPS)))
    more = accumulated.peak_allocated_bytes - alone.peak_allocated_bytes
    assert more == pytest.approx(2 * gradients, abs=4096)


def test_one_card_trains_alone_after_a_team_and_a_team_after_it(runner: SupervisedRunner) -> None:
    outcomes = [
        runner.run(TrialRequest(config=config, steps=STEPS))
        for config in (TOGETHER, SMALL, TOGETHER)
    ]
    assert [measured(outcome).cards for outcome in outcomes] == [2, 1, 2]


def test_a_soak_of_two_cards_evaluates_and_saves(runner: SupervisedRunner) -> None:
    soaked = measured(runner.run(TrialRequest(config=TOGETHER, steps=STEPS, is_soak=True))).soak
    assert soaked is not None
    assert soaked.checkpoint_bytes > 0


def test_a_process_of_the_team_that_is_killed_is_the_trials_verdict_and_the_next_has_a_fresh_team(
    runner: SupervisedRunner,
) -> None:
    killed: list[int] = []

    def kill(progress: Progress) -> bool:
        if progress.phase == "measure" and not killed:
            killed.extend(followers())
            os.kill(killed[0], signal.SIGKILL)
        return False

    outcome = runner.run(
        TrialRequest(config=TOGETHER, steps=STEPS.model_copy(update={"measured_max": 500})),
        observe=kill,
    )
    assert isinstance(outcome, Crashed), outcome
    assert "GPU 1" in outcome.detail
    assert measured(runner.run(TrialRequest(config=TOGETHER, steps=STEPS))).cards == 2
    assert killed[0] not in followers()


def test_what_one_card_of_several_has_no_memory_for_does_not_fit(tmp_path: Path) -> None:
    with a_runner(tmp_path / "one.log") as runner:
        enough = measured(runner.run(TrialRequest(config=SMALL, steps=STEPS))).peak_allocated_bytes
    with a_runner(tmp_path / "two.log", budget_bytes=enough + 4096) as runner:
        outcome = runner.run(TrialRequest(config=TOGETHER, steps=STEPS))
        if isinstance(outcome, Crashed) and "SIGSEGV" in outcome.detail:
            # torch itself ends once in some hundred trials on a CPU, while it takes its wrapper
            # of the model apart. A study tries a crash again too.
            outcome = runner.run(TrialRequest(config=TOGETHER, steps=STEPS))
        assert isinstance(outcome, OutOfMemory), outcome
        assert (
            measured(runner.run(TrialRequest(config=SMALL, steps=STEPS))).peak_allocated_bytes
            <= enough + 4096
        )


def test_nothing_of_a_team_is_left_once_its_runner_is_closed(tmp_path: Path) -> None:
    before = followers()
    with a_runner(tmp_path / "worker.log") as runner:
        measured(runner.run(TrialRequest(config=TOGETHER, steps=STEPS)))
        assert len(followers()) == len(before) + 1
    assert followers() == before


def test_a_process_that_dies_with_nothing_to_do_is_no_trials_verdict(
    runner: SupervisedRunner,
) -> None:
    measured(runner.run(TrialRequest(config=TOGETHER, steps=STEPS)))
    (idle,) = followers()
    os.kill(idle, signal.SIGKILL)
    # Until the first process has reaped it: before, all of its threads need not be gone.
    while Path(f"/proc/{idle}").exists():
        time.sleep(0.01)
    assert measured(runner.run(TrialRequest(config=TOGETHER, steps=STEPS))).cards == 2


def test_of_three_ranks_one_that_died_idle_is_replaced_and_the_others_stay(
    tmp_path: Path,
) -> None:
    three, others = SMALL.model_copy(update={"data_parallel": 3}), ranks()
    with a_runner(tmp_path / "worker.log") as runner:
        assert measured(runner.run(TrialRequest(config=three, steps=STEPS))).cards == 3
        (_, dead), (_, alive) = (found for found in ranks() if found not in others)
        os.kill(dead, signal.SIGKILL)
        while Path(f"/proc/{dead}").exists():
            time.sleep(0.01)
        assert measured(runner.run(TrialRequest(config=three, steps=STEPS))).cards == 3
        now = [found for found in ranks() if found not in others]
        assert [rank for rank, _ in now] == [1, 2]
        assert now[1] == (2, alive)


def test_modules_that_the_model_has_not_are_refused_in_a_team_too(runner: SupervisedRunner) -> None:
    outcome = runner.run(
        TrialRequest(config=TOGETHER.model_copy(update={"target_modules": ("q_pro",)}), steps=STEPS)
    )
    assert isinstance(outcome, Invalid), outcome
    assert outcome.rule == "target_modules"
    assert measured(runner.run(TrialRequest(config=TOGETHER, steps=STEPS))).cards == 2
