"""On a GPU a soak evaluates and saves within the budget, and the energy of a token is told."""

from __future__ import annotations

import time

import pytest

from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.records import Measured
from qlora_sweep.sweep.nvml import visible_gpus
from tests.gpu.rig import Rig, small_config

pytestmark = [
    pytest.mark.gpu,
    # What libraries warn of depends on the GPU.
    pytest.mark.filterwarnings("default"),
]
LEAN = {"kernels": "liger", "upcast_fp32": False, "checkpoint_fraction": 0.0}
SOAK = StepBudget(warmup_min=2, warmup_max=6, measured_min=6, measured_max=500, seconds_max=10)


@pytest.mark.parametrize("settings", [{}, LEAN, {**LEAN, "compile": True, "kernels": "fused-loss"}])
def test_a_soak_evaluates_saves_and_trains_on_and_leaves_no_byte(
    rig: Rig, settings: dict[str, object]
) -> None:
    config = small_config(**settings)
    before = rig.settle(config)
    outcome = rig.run(config, steps=SOAK, is_soak=True)
    assert isinstance(outcome, Measured), outcome
    soak = outcome.measurement.soak
    assert soak is not None
    assert soak.steps >= 100 or soak.seconds >= 10
    assert 0 < soak.evaluation_loss < 13
    assert soak.checkpoint_bytes > 4 * outcome.measurement.trainable_parameters
    rig.device.release()
    assert rig.allocated_bytes() == before
    # Trained on as before: the evaluation left nothing in another mode.
    short = rig.measure(config)
    assert outcome.measurement.step_seconds == pytest.approx(short.step_seconds, rel=0.3)


def test_an_evaluation_with_the_fused_loss_needs_no_more_than_a_step(rig: Rig) -> None:
    """Liger holds the logits in evaluation mode, unless it is told not to."""
    lean = {**LEAN, "kernels": "fused-loss", "checkpoint_fraction": 1.0}
    config = small_config(**lean, micro_batch_size=8, seq_len=1024)
    trained = rig.measure(config).peak_allocated_bytes
    with rig.held_to(trained + 2**26):
        soaked = rig.run(config, steps=SOAK, is_soak=True)
    assert isinstance(soaked, Measured), soaked


def test_the_energy_of_a_token_is_that_of_the_power_that_the_gpu_draws(rig: Rig) -> None:
    config = small_config(**LEAN)
    with visible_gpus(most=1) as (gpu,):
        assert gpu is not None
        started, before = time.perf_counter(), gpu.energy_joules()
        if before is None:
            pytest.skip("this GPU's driver does not count energy")
        outcome = rig.run(config, steps=SOAK, is_soak=True)
        after, seconds = gpu.energy_joules(), time.perf_counter() - started
    assert isinstance(outcome, Measured)
    measured = outcome.measurement
    assert measured.joules_per_token is not None
    assert after is not None
    drawn = measured.joules_per_token * measured.tokens_per_second
    average = (after - before) / seconds
    # While it trains it draws more than on average over set-up, evaluation and checkpoint too.
    assert 0.9 * average <= drawn <= 2.0 * average
    assert 50 < drawn < 1500
