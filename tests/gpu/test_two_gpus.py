"""Two GPUs that train one configuration: each trains it, holds what it was to hold, and is no
slower for it than the link between them explains."""

from __future__ import annotations

import os
import signal
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest
import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import GIB
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.records import (
    Crashed,
    Measurement,
    OutOfMemory,
)
from qlora_sweep.sweep.finetuning import checkpoints
from qlora_sweep.sweep.finetuning.protocol import Event, Saved
from qlora_sweep.sweep.finetuning.training import follow
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import DatasetSettings, Progress, QualityCommand, TrialRequest
from tests.gpu.rig import SMALL, predicting, small_config
from tests.sweep.data.prepared import prepared_settings
from tests.sweep.finetuning.trainings import finished, interrupted_and_resumed, job
from tests.sweep.running.teams import assert_learned_alike, ranks
from tests.sweep.training.tiny import TINY, measured
from tests.sweep.training.two_processes import told_by_two

pytestmark = [
    pytest.mark.gpu,
    pytest.mark.timeout(400),
    pytest.mark.skipif(
        torch.cuda.is_available() and torch.cuda.device_count() < 2,
        reason="needs two GPUs in one machine",
    ),
]
STEPS = StepBudget(warmup_min=2, warmup_max=4, measured_min=6, measured_max=12)
LEAN = {"upcast_fp32": False, "optimizer": "adamw_torch_fused", "micro_batch_size": 8}
SHARDED = {**LEAN, "data_parallel": 2, "sharding": "fsdp"}
DEEP = ModelSpec(
    name="deep",
    source="shipped",
    config={**SMALL.config, "num_hidden_layers": 24, "vocab_size": 2048},
)
"""Most of it is in its layers, as of a model that one GPU cannot hold."""
CLOSE = 0.015
"""As predictions of memory state of what one GPU trains."""
CLOSE_SHARDED = 0.15
SCALES = 1.6
"""Times the tokens of one GPU, at least, that two of a host make in the same time."""


def a_runner(
    log: Path, *, model: ModelSpec = SMALL, budget_bytes: int = 40 * GIB, **settings: Any
) -> SupervisedRunner:
    target = Target(gpu="two", device="cuda", budget_bytes=budget_bytes)
    return SupervisedRunner(model, target=target, log_path=log, **settings)


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedRunner]:
    with a_runner(tmp_path_factory.mktemp("logs") / "worker.log") as runner:
        yield runner


@pytest.fixture(scope="module")
def predictor(tmp_path_factory: pytest.TempPathFactory) -> Iterator[TracingPredictor]:
    with predicting(tmp_path_factory.mktemp("structures")) as predictor:
        yield predictor


def trained(runner: SupervisedRunner, config: TrialConfig, **request: Any) -> Measurement:
    return measured(runner.run(TrialRequest(config=config, steps=STEPS, **request)))


@pytest.mark.parametrize(
    "settings",
    [
        {**LEAN},
        {**LEAN, "kernels": "liger", "checkpoint_fraction": 0.0},
        {**LEAN, "kernels": "fused-loss", "compile": True, "checkpoint_fraction": 0.0},
        {**LEAN, "effective_batch_size": 64},
        {"upcast_fp32": True},
    ],
    ids=lambda settings: "-".join(f"{value}" for value in settings.values()),
)
def test_each_of_two_gpus_needs_what_is_predicted(
    runner: SupervisedRunner, predictor: TracingPredictor, settings: dict[str, Any]
) -> None:
    config = small_config(**settings, data_parallel=2)
    if config.compile:
        # To tune kernels takes memory once in a process: little, and much of a small model's.
        runner.run(TrialRequest(config=config, steps=STEPS))
    together = trained(runner, config)
    assert together.gpus == 2
    predicted = predictor.predict(config)
    close = predicted.uncertainty if config.compile else CLOSE
    assert together.peak_allocated_bytes == pytest.approx(predicted.peak_allocated_bytes, rel=close)


def test_two_gpus_train_nearly_as_fast_as_two(runner: SupervisedRunner) -> None:
    # Steps long enough for what their hosts do between them not to count.
    settings = {**LEAN, "kernels": "liger", "seq_len": 2048}
    alone = trained(runner, small_config(**settings))
    together = trained(runner, small_config(**settings, data_parallel=2))
    assert together.tokens_per_second > SCALES * alone.tokens_per_second


@pytest.mark.parametrize(
    "settings",
    [{"kernels": "hf"}, {"kernels": "liger"}, {"checkpoint_fraction": 0.0}],
    ids=lambda settings: f"{next(iter(settings.values()))}",
)
def test_two_gpus_share_a_model_and_need_what_is_predicted(
    runner: SupervisedRunner, predictor: TracingPredictor, settings: dict[str, Any]
) -> None:
    config = small_config(**{**SHARDED, **settings})
    shared = trained(runner, config)
    predicted = predictor.predict(config).peak_allocated_bytes
    assert shared.peak_allocated_bytes == pytest.approx(predicted, rel=CLOSE_SHARDED)


def test_a_model_that_one_gpu_has_no_room_for_is_trained_by_two(tmp_path: Path) -> None:
    config = small_config(**{**SHARDED, "micro_batch_size": 1, "seq_len": 128})
    whole = config.model_copy(update={"data_parallel": 1, "sharding": "none"})
    with a_runner(tmp_path / "free.log", model=DEEP) as runner:
        shared = trained(runner, config).peak_allocated_bytes
        alone = trained(runner, whole).peak_allocated_bytes
    assert shared < alone
    budget = (shared + alone) // 2
    with a_runner(tmp_path / "capped.log", model=DEEP, budget_bytes=budget) as capped:
        assert isinstance(capped.run(TrialRequest(config=whole, steps=STEPS)), OutOfMemory)


def test_a_process_that_is_killed_in_the_middle_of_a_step_holds_nobody_up(tmp_path: Path) -> None:
    config = small_config(**LEAN, data_parallel=2)

    def kill(progress: Progress) -> bool:
        if progress.phase == "measure":
            for _, number in ranks():
                os.kill(number, signal.SIGKILL)
        return False

    with a_runner(tmp_path / "worker.log") as runner:
        long = StepBudget(measured_min=200, measured_max=2000, seconds_max=60)
        assert isinstance(
            runner.run(TrialRequest(config=config, steps=long), observe=kill), Crashed
        )
        assert trained(runner, config).gpus == 2


def test_no_bit_of_a_4_bit_weight_is_lost_and_a_head_that_is_read_is_whole_in_every_step(
    tmp_path: Path,
) -> None:
    for no_numbers, *told in told_by_two("sharded_by_two", directory=tmp_path, device="cuda"):
        assert int(no_numbers) > 0
        assert told == ["True", "True", "True", "0.5", "True", "0.5"]


# On texts

ACCUMULATING = {"micro_batch_size": 2, "effective_batch_size": 4}


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> DatasetSettings:
    lengths = [20 + row * 37 % 480 for row in range(160)]
    return prepared_settings(tmp_path_factory.mktemp("texts"), lengths)


def test_two_gpus_train_on_texts_and_learn_what_one_does(
    dataset: DatasetSettings, tmp_path: Path
) -> None:
    quality = QualityCommand(tokens=8000, eval_seq_len=512, eval_tokens=4000)
    two = {**LEAN, **ACCUMULATING, "data_parallel": 2, "packing": "grouped"}
    with a_runner(tmp_path / "worker.log", dataset=dataset) as runner:
        together = trained(runner, small_config(**two), quality=quality)
        alone = trained(runner, small_config(**two | {"data_parallel": 1}), quality=quality)
        packed = two | {"sharding": "fsdp", "packing": "packed"}
        shared = trained(runner, small_config(**packed), quality=quality)
    assert [one.gpus for one in (together, alone, shared)] == [2, 1, 2]
    assert shared.documents_apart
    assert_learned_alike(together, alone, rel=1e-2)


def on_two(output: Path, data: Path, **changes: Any) -> Any:
    values = {**ACCUMULATING, "data_parallel": 2, "seq_len": 512, "device": "cuda", **changes}
    return job(output, data, model=SMALL.to_json(), learning_rate=2e-4, **values)


def test_two_gpus_train_what_one_does_stop_together_and_are_resumed(
    dataset: DatasetSettings, tmp_path: Path
) -> None:
    data, exact = Path(dataset.directory), {"lora_dropout": 0.0, "checkpoint_steps": 5}
    whole = finished(follow(on_two(tmp_path / "two", data, **exact)))
    one = on_two(tmp_path / "one", data, **exact, data_parallel=1, gpus=("0",))
    alone = finished(follow(one))
    assert whole.tokens == alone.tokens
    for key in ("train_loss", "eval_loss"):
        assert getattr(whole, key) == pytest.approx(getattr(alone, key), rel=5e-3)

    begun = on_two(tmp_path / "resumed", data, **exact)
    newest, again = interrupted_and_resumed(begun, at=5)
    assert {path.name for path in newest.glob("rng_state*")} == {
        "rng_state_0.pth",
        "rng_state_1.pth",
    }
    for key in ("train_loss", "eval_loss"):
        assert getattr(again, key) == pytest.approx(getattr(whole, key), rel=1e-3)


def test_a_rank_that_is_killed_as_it_trains_ends_the_training(
    dataset: DatasetSettings, tmp_path: Path
) -> None:
    def kill(event: Event) -> None:
        if isinstance(event, Saved) and event.step == 2:
            os.kill(ranks("qlora_sweep.sweep.finetuning")[0][1], signal.SIGKILL)

    begun = on_two(tmp_path, Path(dataset.directory), checkpoint_steps=2, epochs=50)
    end = follow(begun, observe=kill)
    assert isinstance(end, Crashed), end
    assert "GPU 1" in end.detail
    assert checkpoints.newest(tmp_path) is not None


# Sharded layers that are compiled, and a model from a file


def test_two_gpus_share_a_compiled_model(
    runner: SupervisedRunner, predictor: TracingPredictor
) -> None:
    compiled = {"kernels": "fused-loss", "compile": True, "checkpoint_fraction": 0.0}
    config = small_config(**SHARDED, **compiled)
    runner.run(TrialRequest(config=config, steps=STEPS))
    shared = trained(runner, config)
    assert shared.gpus == 2
    predicted = predictor.predict(config)
    close = predicted.uncertainty
    assert shared.peak_allocated_bytes == pytest.approx(predicted.peak_allocated_bytes, rel=close)


def test_a_model_from_a_file_trains_sharded_and_compiled_as_it_does_whole(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**TINY.config)
    AutoModelForCausalLM.from_config(config).save_pretrained(tmp_path / "model")
    for told in told_by_two("loaded_by_two", directory=tmp_path, device="cuda", compiles=True):
        whole, sharded, compiled = (list(map(float, told[at : at + 3])) for at in (0, 4, 8))
        assert sharded == pytest.approx(whole, rel=2e-2)
        assert compiled == pytest.approx(sharded, rel=2e-2)


def test_a_trial_of_a_sharded_model_takes_its_weights_from_a_file(tmp_path: Path) -> None:
    from transformers import AutoConfig, AutoModelForCausalLM

    config = AutoConfig.for_model(**SMALL.config)
    model = AutoModelForCausalLM.from_config(config, dtype=torch.bfloat16)
    model.save_pretrained(tmp_path / "model")
    spec = ModelSpec("small", "directory", SMALL.config, path=tmp_path / "model")
    with a_runner(tmp_path / "worker.log", model=spec, weights="pretrained") as loading:
        found = trained(loading, small_config(**SHARDED))
    assert found.gpus == 2
