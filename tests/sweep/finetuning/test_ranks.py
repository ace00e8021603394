"""Trainings of two ranks, each a process on the CPU: as one that accumulates over the micro-batches
of both, stopped, resumed, and killed."""

from __future__ import annotations

import json
import os
import signal
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.storage.records import Crashed
from qlora_sweep.sweep.finetuning import checkpoints
from qlora_sweep.sweep.finetuning.protocol import Event, Saved, TrainingProgress
from qlora_sweep.sweep.finetuning.training import (
    TrainingRequest,
    fault_of,
    follow,
    on_devices,
    prepare_training,
)
from qlora_sweep.sweep.running.device_info import GpuInfo
from tests.sweep.data.prepared import prepared, prepared_pairs
from tests.sweep.finetuning.trainings import (
    adapter,
    assert_same,
    ended,
    finished,
    interrupted_and_resumed,
    job,
)
from tests.sweep.running.teams import ranks

LENGTHS = [5, 40, 12, 30, 9, 22, 17, 3, 28, 14, 33, 8, 19, 25, 6, 11, 21, 7, 16, 23]
"""Sixteen examples are trained on and four held out."""
EXACT = {"compute_dtype": "fp32", "quantization": "none", "lora_dropout": 0.0}
TOGETHER = {"data_parallel": 2, "micro_batch_size": 1, "checkpoint_steps": 1}

pytestmark = [pytest.mark.filterwarnings("default"), pytest.mark.usefixtures("our_own_code")]


@pytest.fixture(scope="module")
def dataset(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared(tmp_path_factory.mktemp("texts"), LENGTHS)


@pytest.fixture(scope="module")
def pairs(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return prepared_pairs(tmp_path_factory.mktemp("pairs"), count=20)


@pytest.mark.parametrize(
    ("kind", "changes"),
    [
        ("dataset", {"packing": "grouped"}),
        pytest.param("dataset", {"packing": "packed", "epochs": 2}, marks=pytest.mark.integration),
        pytest.param(
            "pairs",
            {"method": "dpo", "reference": "precomputed"},
            marks=pytest.mark.integration,
        ),
    ],
    ids=lambda value: str(value),
)
def test_two_ranks_train_as_one_that_accumulates_over_the_micro_batches_of_both(
    tmp_path: Path, request: pytest.FixtureRequest, kind: str, changes: dict[str, Any]
) -> None:
    data = request.getfixturevalue(kind)
    two = finished(follow(job(tmp_path / "two", data, **EXACT, **TOGETHER, **changes)))
    alone = {**TOGETHER, "data_parallel": 1}
    one = ended(job(tmp_path / "one", data, **EXACT, **alone, **changes))
    for key in ("train_loss", "eval_loss"):
        assert getattr(two, key) == pytest.approx(getattr(one, key), rel=1e-5)
    for key in ("steps", "tokens", "eval_tokens", "eval_pairs", "eval_wins", "epochs"):
        assert getattr(two, key) == getattr(one, key)
    first, second = adapter(two), adapter(one)
    assert first.keys() == second.keys()
    assert all(first[name].allclose(second[name], rtol=1e-3, atol=1e-6) for name in first)


@pytest.mark.integration
def test_a_stop_reaches_both_ranks_in_one_step_and_the_training_is_resumed_to_the_bit(
    tmp_path: Path, dataset: Path
) -> None:
    """Each drops elements of its own, so that its random state counts."""
    whole = finished(follow(job(tmp_path / "whole", dataset, epochs=2, **TOGETHER)))
    states = [Path(f"{whole.checkpoint}/rng_state_{rank}.pth") for rank in range(2)]
    assert states[0].read_bytes() != states[1].read_bytes()

    begun = job(tmp_path / "resumed", dataset, epochs=2, **TOGETHER)

    newest, again = interrupted_and_resumed(begun, at=3)
    assert 3 <= checkpoints.step_of(newest) < whole.steps
    assert_same(again, whole)


@pytest.mark.integration
@pytest.mark.parametrize("phase", ["build", "measure", "quality"])
def test_a_rank_that_is_killed_ends_the_training_with_one_message_and_its_checkpoints(
    tmp_path: Path, dataset: Path, phase: str
) -> None:
    killed: list[int] = []
    saved: list[int] = []

    def kill(event: Event) -> None:
        if isinstance(event, Saved):
            saved.append(event.step)
        if not killed and getattr(event, "phase", None) == phase:
            is_first = isinstance(event, TrainingProgress) and phase == "build"
            found = ranks("qlora_sweep.sweep.finetuning")
            if found and (is_first or saved):
                os.kill(found[0][1], signal.SIGKILL)
                killed.append(found[0][1])

    end = follow(job(tmp_path, dataset, epochs=100, **TOGETHER), observe=kill)
    assert isinstance(end, Crashed), end
    assert str(fault_of(end)) == "the process of GPU 1 ended with signal SIGKILL"
    assert checkpoints.steps_of(tmp_path) == sorted(saved, reverse=True)[:2]
    assert not ranks("qlora_sweep.sweep.finetuning")


def test_more_gpus_keep_the_effective_batch_where_it_is_a_multiple() -> None:
    accumulating = TrialConfig(micro_batch_size=2, effective_batch_size=8)
    plain = TrialConfig(micro_batch_size=2)
    assert on_devices(plain, None) is plain
    two = on_devices(accumulating, 2)
    assert (two.data_parallel, two.samples_per_step, two.accumulation_steps) == (2, 8, 2)
    two = on_devices(plain, 2)
    assert (two.data_parallel, two.samples_per_step, two.accumulation_steps) == (2, 4, 1)
    one = on_devices(TrialConfig(micro_batch_size=2, data_parallel=2), 1)
    assert (one.data_parallel, one.samples_per_step, one.accumulation_steps) == (1, 4, 2)
    with pytest.raises(InputError, match=r"--devices 3.*multiple of micro_batch_size times"):
        on_devices(accumulating, 3)


def refusal(tmp_path: Path, config: dict[str, Any], gpus: list[GpuInfo], **typed: Any) -> str:
    (tmp_path / "config.json").write_text(json.dumps({"upcast_fp32": False, **config}))

    def unread(*_: Any) -> Any:
        raise AssertionError("it is refused before that")

    asked = TrainingRequest(
        name=str(tmp_path / "config.json"),
        output=tmp_path / "out",
        dataset={},
        model="demo",
        **typed,
    )
    with pytest.raises(InputError) as refused:
        prepare_training(
            asked, read_study=unread, read_dataset=unread, read_gpus=lambda: gpus, warn=unread
        )
    return str(refused.value)


def test_what_cannot_be_trained_on_the_gpus_that_are_here_is_refused(tmp_path: Path) -> None:
    one = GpuInfo("NVIDIA A10", 24 * 2**30, 23 * 2**30, (8, 6), None, None)
    two = {"data_parallel": 2, "optimizer": "adamw_torch_fused"}
    words = refusal(tmp_path, two, [one])
    assert "trains on 2 GPUs together (data_parallel), and this machine has 1 GPU" in words
    assert "sharding fsdp" in refusal(tmp_path, {**two, "sharding": "fsdp"}, [one, one])
    assert "is for the CPU" in refusal(tmp_path, {}, [], devices=2)
