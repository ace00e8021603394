"""Processes that train one configuration together, on the CPU, each as on a GPU of its own."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.records import (
    OUT_OF_TIME,
    Crashed,
    Invalid,
    Measured,
    Outcome,
    OutOfMemory,
)
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import DatasetSettings, Progress, QualityCommand, TrialRequest
from tests.sweep.data.prepared import prepared_settings
from tests.sweep.running.teams import LEARNED, a_cpu_runner, assert_learned_alike, ranks
from tests.sweep.training.tiny import TINY, measured
from tests.sweep.training.two_processes import told_by_two

pytestmark = [pytest.mark.integration, pytest.mark.usefixtures("our_own_code")]
STEPS = StepBudget(warmup_min=1, warmup_max=2, measured_min=3, measured_max=3)
DEEP = ModelSpec(
    name="deep",
    source="shipped",
    config={
        "model_type": "mistral",
        "hidden_size": 256,
        "intermediate_size": 1024,
        "num_hidden_layers": 8,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 128,
        "max_position_embeddings": 256,
        "sliding_window": None,
    },
)
"""Most of it is in its layers, as of a model that one GPU cannot hold."""
ALONE = TrialConfig(
    micro_batch_size=1,
    seq_len=32,
    lora_rank=2,
    target_modules="qv",
    optimizer="adamw_torch_fused",
    upcast_fp32=False,
)
TOGETHER = ALONE.model_copy(update={"data_parallel": 2})
SHARED = TOGETHER.model_copy(update={"sharding": "fsdp"})
PAIRS = TOGETHER.model_copy(update={"method": "dpo", "reference": "precomputed"})
A_GRADIENT_BYTES = 4


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetSettings:
    lengths = [4 + row * 7 % 25 for row in range(60)]
    return prepared_settings(tmp_path_factory.mktemp("texts"), lengths)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedRunner]:
    with a_cpu_runner(tmp_path_factory.mktemp("logs") / "worker.log", model=DEEP) as runner:
        yield runner


def run(runner: SupervisedRunner, config: TrialConfig, **request: Any) -> Outcome:
    outcome = runner.run(TrialRequest(config=config, steps=STEPS, **request))
    if isinstance(outcome, Crashed) and "SIGSEGV" in outcome.detail:
        # gloo or torch ends a rank on a CPU so once in some hundred trials, on a busy machine. A
        # study tries a crash again too.
        outcome = runner.run(TrialRequest(config=config, steps=STEPS, **request))
    return outcome


def kill_idle(number: int) -> None:
    os.kill(number, signal.SIGKILL)
    # Until the first process has reaped it: before, all of its threads need not be gone.
    while Path(f"/proc/{number}").exists():
        time.sleep(0.01)


def test_one_two_and_two_that_share_the_model_take_turns(runner: SupervisedRunner) -> None:
    configs = [SHARED, TOGETHER, ALONE, SHARED]
    found = [measured(run(runner, config)) for config in configs]
    assert [one.gpus for one in found] == [2, 2, 1, 2]
    # It is the speed of both.
    tokens = found[1].tokens_per_second * found[1].step_seconds
    assert tokens == pytest.approx(2 * ALONE.tokens_per_step)
    # What was attached is counted as a whole, whatever a GPU holds of it.
    assert len({one.trainable_parameters for one in found}) == 1
    shared, together, alone, again = (one.peak_allocated_bytes for one in found)
    assert shared < alone < together
    # What is on its way between the processes differs from run to run.
    assert again == pytest.approx(shared, rel=0.2)
    # Each has the gradients in buckets, and beside them where it accumulates.
    gradients = A_GRADIENT_BYTES * found[1].trainable_parameters
    assert together - alone == pytest.approx(gradients, abs=4096)
    longer = measured(run(runner, TOGETHER.model_copy(update={"effective_batch_size": 4})))
    assert longer.peak_allocated_bytes - alone == pytest.approx(2 * gradients, abs=4096)


def test_processes_that_train_together_stop_in_the_same_step_when_their_time_ends(
    runner: SupervisedRunner,
) -> None:
    measured(run(runner, TOGETHER))
    assert run(runner, TOGETHER, seconds_left=0.0) == OUT_OF_TIME
    changes = {"measured_max": 100_000, "relative_interval": 1e-9, "seconds_max": 600}
    endless = STEPS.model_copy(update=changes)
    for seconds in (3.0, 12.0, 60.0):
        # On a busy machine the first steps may take longer.
        request = TrialRequest(config=TOGETHER, steps=endless, seconds_left=seconds)
        outcome = runner.run(request)
        if outcome != OUT_OF_TIME:
            break
    cut = measured(outcome)
    assert STEPS.measured_min <= cut.steps_measured < endless.measured_max
    assert measured(run(runner, TOGETHER)).gpus == 2


@pytest.mark.parametrize("config", [TOGETHER, SHARED, PAIRS], ids=["together", "shared", "pairs"])
def test_a_soak_of_two_gpus_evaluates_and_saves(
    runner: SupervisedRunner, config: TrialConfig
) -> None:
    soak = measured(run(runner, config, is_soak=True)).soak
    assert soak is not None
    assert soak.checkpoint_bytes > 0


def test_two_gpus_train_on_texts_and_learn_what_one_does(
    dataset: DatasetSettings, tmp_path: Path
) -> None:
    quality = QualityCommand(tokens=150, eval_seq_len=32, eval_tokens=60)
    packed = SHARED.model_copy(update={"packing": "packed"})
    accumulating = ALONE.model_copy(update={"effective_batch_size": 2})
    with a_cpu_runner(tmp_path / "worker.log", model=TINY, dataset=dataset) as runner:
        found = [
            measured(run(runner, config, quality=quality))
            for config in (TOGETHER, packed, accumulating)
        ]
    together, shared, alone = found
    assert [one.gpus for one in found] == [2, 2, 1]
    for one in found:
        assert one.loss_tokens_per_step == pytest.approx(one.tokens_per_second * one.step_seconds)
        assert one.quality is not None
    assert shared.documents_apart
    assert_learned_alike(together, alone, rel=1e-3, keys=(*LEARNED, "train_tokens"))


def test_what_one_gpu_has_no_memory_for_does_not_fit_unless_two_hold_it_together(
    runner: SupervisedRunner, tmp_path: Path
) -> None:
    # One alone needs about the same in each run; of two more is on its way on a busy machine.
    budget = int(0.99 * measured(run(runner, ALONE)).peak_allocated_bytes)
    with a_cpu_runner(tmp_path / "worker.log", model=DEEP, budget_bytes=budget) as capped:
        for config, verdict in ((TOGETHER, OutOfMemory), (ALONE, OutOfMemory), (SHARED, Measured)):
            outcome = run(capped, config)
            assert isinstance(outcome, verdict), outcome
    assert isinstance(outcome, Measured)
    assert outcome.measurement.peak_allocated_bytes <= budget


def test_a_process_of_the_team_that_is_killed_is_the_trials_verdict_and_the_next_has_a_fresh_team(
    runner: SupervisedRunner,
) -> None:
    killed: list[int] = []

    def kill(progress: Progress) -> bool:
        if progress.phase == "measure" and not killed:
            killed.extend(number for _, number in ranks())
            os.kill(killed[0], signal.SIGKILL)
        return False

    steps = STEPS.model_copy(update={"measured_max": 500})
    outcome = runner.run(TrialRequest(config=TOGETHER, steps=steps), observe=kill)
    assert isinstance(outcome, Crashed), outcome
    assert "GPU 1" in outcome.detail
    assert measured(run(runner, TOGETHER)).gpus == 2
    assert killed[0] not in [number for _, number in ranks()]


def test_a_rank_that_dies_idle_is_no_trials_verdict_and_replaced_alone_and_none_outlives_its_runner(
    tmp_path: Path,
) -> None:
    three, others = TOGETHER.model_copy(update={"data_parallel": 3}), ranks()
    with a_cpu_runner(tmp_path / "worker.log", model=DEEP) as runner:
        assert measured(run(runner, three)).gpus == 3
        (_, dead), (_, alive) = (found for found in ranks() if found not in others)
        kill_idle(dead)
        assert measured(run(runner, three)).gpus == 3
        now = [found for found in ranks() if found not in others]
        assert [rank for rank, _ in now] == [1, 2]
        assert now[1] == (2, alive)
    assert ranks() == others


def test_modules_that_the_model_has_not_are_refused_in_a_team_too(runner: SupervisedRunner) -> None:
    outcome = run(runner, TOGETHER.model_copy(update={"target_modules": ("q_pro",)}))
    assert isinstance(outcome, Invalid), outcome
    assert outcome.rule == "target_modules"
    assert measured(run(runner, TOGETHER)).gpus == 2


def test_no_bit_of_a_4_bit_weight_is_lost_and_a_head_that_is_read_is_there_in_every_step(
    tmp_path: Path,
) -> None:
    for no_numbers, *told in told_by_two("sharded_by_two", directory=tmp_path, device="cpu"):
        assert int(no_numbers) > 0
        assert told == ["True", "True", "True", "0.5", "True", "0.5"]


def test_a_model_from_a_file_trains_sharded_and_compiled_as_it_does_whole(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**TINY.config)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for told in told_by_two("loaded_by_two", directory=tmp_path, device="cpu", compiles=True):
        *whole, none = map(float, told[:4])
        assert none == 0
        *sharded, _ = map(float, told[4:8])
        *compiled, calls = map(float, told[8:])
        assert sharded == pytest.approx(whole, rel=2e-2)
        assert sharded[0] == pytest.approx(whole[0], rel=1e-5)
        assert compiled == pytest.approx(sharded, rel=1e-3)
        # Two layers, three steps, each forward and once more to recompute.
        assert calls == 12
