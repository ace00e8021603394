"""One real training trial on the CPU."""

from __future__ import annotations

import pytest
import torch

from search_spaces.config import TrialConfig
from search_spaces.space import StepBudget
from storage.records import Diverged, Ineffective, Invalid, Measured, OutOfMemory, PrunedSlow
from sweep.training.adapters import Attached, attached
from sweep.training.device import CpuDevice
from sweep.training.model import BaseModel
from sweep.training.proof import ineffective
from sweep.training.step import TrainingLoop
from sweep.training.trial import Beat, flops_per_token
from tests.sweep.training.tiny import tiny_base, tiny_config, trial_on


def measured(config: TrialConfig) -> Measured:
    with tiny_base(config) as base:
        outcome = trial_on(base, config).run()
    assert isinstance(outcome, Measured)
    return outcome


@pytest.mark.parametrize(
    "knobs",
    [
        {},
        {"checkpoint_fraction": 0.0},
        {"checkpoint_fraction": 0.5},
        {"upcast_fp32": False},
        {"quantization": "fp4", "double_quant": False},
        {"quantization": "none", "double_quant": False},
        {"compute_dtype": "fp32"},
        {"attention": "eager"},
        {"optimizer": "adamw_torch_fused"},
        {"lora_dropout": 0.1, "target_modules": "all-linear"},
        {"effective_batch_size": 8},
    ],
    ids=lambda knobs: ",".join(f"{key}={value}" for key, value in knobs.items()) or "recipe",
)
def test_every_knob_the_cpu_has_is_trained_for_real(knobs: dict[str, object]) -> None:
    config = tiny_config(**knobs)
    measurement = measured(config).measurement
    rate = config.tokens_per_step / measurement.step_seconds
    assert measurement.tokens_per_second == pytest.approx(rate)
    assert measurement.steps_measured == 6
    assert measurement.peak_allocated_bytes > 0
    # Random tokens under a random head: the loss is near that of a uniform guess.
    assert measurement.final_loss == pytest.approx(6.24, abs=0.5)


def test_the_same_configuration_peaks_at_the_same_byte_every_time() -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        peaks = {_peak(base, config), _peak(base, config)}
        larger = _peak(base, tiny_config(micro_batch_size=8))
        peaks.add(_peak(base, config))
    assert len(peaks) == 1
    assert larger > peaks.pop()


def _peak(base: BaseModel, config: TrialConfig) -> int:
    outcome = trial_on(base, config).run()
    assert isinstance(outcome, Measured)
    return outcome.measurement.peak_allocated_bytes


def test_peak_memory_is_linear_in_the_micro_batch() -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        sizes = [_peak(base, tiny_config(micro_batch_size=size)) for size in (8, 16, 24)]
    assert sizes[2] - sizes[1] == pytest.approx(sizes[1] - sizes[0], rel=0.01)


def test_checkpointing_trades_memory() -> None:
    fractions = (0.0, 0.5, 1.0)
    with tiny_base(tiny_config()) as base:
        peaks = [
            _peak(base, tiny_config(micro_batch_size=16, seq_len=64, checkpoint_fraction=f))
            for f in fractions
        ]
    assert peaks[0] > peaks[1] > peaks[2]


def test_a_trial_that_is_told_to_stop_keeps_what_it_measured() -> None:
    config = tiny_config()
    beats: list[Beat] = []

    def stop_at_third(beat: Beat) -> bool:
        beats.append(beat)
        return beat.phase == "measure" and beat.median_seconds is not None and beat.step == 3

    with tiny_base(config) as base:
        outcome = trial_on(base, config, report=stop_at_third).run()
    assert isinstance(outcome, PrunedSlow)
    assert outcome.measurement.steps_measured == 3
    assert {beat.phase for beat in beats} == {"warmup", "measure"}


def test_a_loss_that_is_not_finite_is_diverged_and_never_fast() -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        base.model.model.norm.weight.data.fill_(float("nan"))
        outcome = trial_on(base, config).run()
    assert isinstance(outcome, Diverged)
    assert outcome.step == 0


def test_targets_the_architecture_lacks_are_invalid() -> None:
    config = tiny_config(target_modules=["c_attn"])
    with tiny_base(config) as base:
        outcome = trial_on(base, config).run()
    assert isinstance(outcome, Invalid)
    assert "c_attn" in outcome.detail


class _Failing(CpuDevice):
    """A device whose memory ends at a chosen synchronisation."""

    def __init__(self, error: Exception, *, at: int) -> None:
        super().__init__()
        self._error, self._left = error, at

    def synchronize(self) -> None:
        self._left -= 1
        if self._left == 0:
            raise self._error


@pytest.mark.parametrize(
    "error",
    [
        torch.OutOfMemoryError("CUDA out of memory. Tried to allocate 2.00 GiB"),
        RuntimeError("CUDA error: out of memory"),
        RuntimeError("CUBLAS_STATUS_ALLOC_FAILED when calling cublasCreate"),
        MemoryError(),
    ],
    ids=["allocator", "driver", "cublas", "python"],
)
def test_every_way_of_running_out_of_memory_is_a_result(error: Exception) -> None:
    config = tiny_config()
    with tiny_base(config) as base:
        outcome = trial_on(base, config, device=_Failing(error, at=4)).run()
        again = trial_on(base, config).run()
    assert isinstance(outcome, OutOfMemory)
    assert outcome.stage == "optimizer"
    assert outcome.requested_bytes in (None, 2 * 2**30)
    assert isinstance(again, Measured)


def test_an_error_that_is_not_memory_is_not_called_memory() -> None:
    config = tiny_config()
    device = _Failing(RuntimeError("CUDA error: an illegal memory access"), at=3)
    with tiny_base(config) as base, pytest.raises(RuntimeError, match="illegal"):
        trial_on(base, config, device=device).run()


@pytest.mark.parametrize(
    ("compiled", "expected"), [(True, Ineffective), (False, None)], ids=["compiled", "eager"]
)
def test_a_compiler_that_gives_up_is_not_a_crash(
    compiled: bool, expected: type[Ineffective] | None
) -> None:
    error = AssertionError("\n\nfrom user code:\n   File modeling.py, line 222")
    config = tiny_config(compile=compiled)
    with tiny_base(config) as base:
        trial = trial_on(base, config, device=_Failing(error, at=3))
        if expected is None:
            with pytest.raises(AssertionError):
                trial.run()
        else:
            assert isinstance(trial.run(), expected)


def test_measuring_stops_at_the_step_budget_and_says_that_it_is_noisy() -> None:
    config = tiny_config()
    steps = StepBudget(
        warmup_min=1, warmup_max=1, measured_min=6, measured_max=7, relative_interval=1e-9
    )
    with tiny_base(config) as base:
        outcome = trial_on(base, config, steps=steps).run()
    assert isinstance(outcome, Measured)
    assert outcome.measurement.steps_measured == 7
    assert "noisy" in outcome.measurement.flags


def test_a_knob_that_did_nothing_is_found_out() -> None:
    config = tiny_config(checkpoint_fraction=1.0)
    with tiny_base(config) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, vocab_size=512, seed=0)
        for layer in attachment.layers[:2]:
            layer.gradient_checkpointing = False
        loop.step()
        fault = ineffective(config, attached=attachment, loop=loop, watch=None)
    assert isinstance(fault, Ineffective)
    assert fault.knob == "checkpoint_fraction"
    assert fault.detail == "2 of 4 layers were recomputed"


@pytest.mark.parametrize(
    ("ran", "asked", "knob"),
    [
        ({}, {"quantization": "fp4"}, "quantization"),
        ({}, {"double_quant": False}, "double_quant"),
        ({}, {"kernels": "liger"}, "kernels"),
        ({}, {"compile": True}, "compile"),
        ({"quantization": "none", "double_quant": False}, {}, "quantization"),
        ({"optimizer": "adamw_torch_fused", "lora_rank": 64}, {"lora_rank": 64}, "optimizer"),
    ],
)
def test_a_run_that_is_not_what_was_asked_is_ineffective(
    ran: dict[str, object], asked: dict[str, object], knob: str
) -> None:
    config = tiny_config(**ran)
    with tiny_base(config) as base, attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, vocab_size=512, seed=0)
        loop.step()
        fault = ineffective(tiny_config(**asked), attached=attachment, loop=loop, watch=None)
        honest = ineffective(config, attached=attachment, loop=loop, watch=None)
    assert isinstance(fault, Ineffective)
    assert fault.knob == knob
    assert honest is None


def test_model_flops_are_four_per_frozen_and_six_per_adapter_weight() -> None:
    config = tiny_config(lora_rank=8, target_modules=["q_proj"])
    with tiny_base(config) as base, attached(base, config) as attachment:
        assert isinstance(attachment, Attached)
        flops = flops_per_token(attachment, base.model.config, seq_len=32)
    matrices = 4 * (128 * 128 * 2 + 128 * 64 * 2 + 3 * 128 * 256) + 512 * 128
    adapters = 4 * 8 * 256
    assert flops == 4 * matrices + 6 * adapters + 6 * 4 * 32 * 128
