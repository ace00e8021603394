"""The budget is enforced for real; running out at any stage is told as that stage and harms nothing
after it.
"""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.records import Measured, OutOfMemory
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import TrialRequest
from tests.gpu.rig import QUICK, SMALL, small_config

pytestmark = pytest.mark.gpu
BUDGET_BYTES = 1_550_000_000
REFERENCE = small_config(micro_batch_size=2, seq_len=256)
TOO_LARGE: dict[str, dict[str, Any]] = {
    # 1.6 GB of weights.
    "load": {"quantization": "none", "double_quant": False, "compute_dtype": "fp32"},
    "forward": {"micro_batch_size": 16, "checkpoint_fraction": 0.0},
    # Recomputed with gradients, a layer needs twice what it needs forward.
    "backward": {"micro_batch_size": 9, "kernels": "fused-loss"},
    # The two moments in fp32 are twice the adapters.
    "optimizer": {
        "micro_batch_size": 1,
        "seq_len": 16,
        "lora_rank": 384,
        "target_modules": "all-linear",
        "optimizer": "adamw_torch_fused",
    },
}


@pytest.fixture(scope="module")
def runner(tmp_path_factory: pytest.TempPathFactory) -> Iterator[SupervisedRunner]:
    log: Path = tmp_path_factory.mktemp("worker") / "worker.log"
    target = Target(gpu="small", device="cuda", budget_bytes=BUDGET_BYTES)
    with SupervisedRunner(SMALL, target=target, log_path=log) as child:
        yield child


def reference_peak(runner: SupervisedRunner) -> int:
    outcome = runner.run(TrialRequest(config=REFERENCE, steps=QUICK))
    assert isinstance(outcome, Measured), outcome
    reserved = outcome.measurement.peak_reserved_bytes
    assert reserved is not None
    assert reserved <= BUDGET_BYTES
    return outcome.measurement.peak_allocated_bytes


@pytest.mark.parametrize("stage", TOO_LARGE)
def test_running_out_of_memory_is_told_by_stage_and_leaves_the_reference_to_the_byte(
    runner: SupervisedRunner, stage: str
) -> None:
    before = reference_peak(runner)
    outcome = runner.run(TrialRequest(config=small_config(**TOO_LARGE[stage]), steps=QUICK))
    assert isinstance(outcome, OutOfMemory), outcome
    assert outcome.stage == stage, outcome
    assert outcome.requested_bytes
    assert outcome.peak_allocated_bytes is not None
    assert outcome.peak_allocated_bytes <= BUDGET_BYTES
    assert reference_peak(runner) == before
