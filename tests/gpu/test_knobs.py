"""Every value of every setting is trained for real, proves its effect, and leaves no byte."""

from __future__ import annotations

import importlib.util
import math
from typing import Any

import pytest
import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.linears import lora_parameters
from qlora_sweep.storage.records import Ineffective, Measured
from qlora_sweep.sweep.training.model import build_base
from qlora_sweep.sweep.training.proof import KernelWatch, StepEvidence, ineffective
from tests.gpu.cases import CASES, WITHOUT
from tests.gpu.rig import SMALL, Rig, small_config

pytestmark = [
    pytest.mark.gpu,
    # What libraries warn of depends on the GPU.
    pytest.mark.filterwarnings("default"),
]


WIDE = {"lora_rank": 64, "target_modules": "all-linear"}


def described(settings: dict[str, Any]) -> str:
    return ",".join(f"{key}={value}" for key, value in settings.items())


# The default is a value of every setting, and trained once; bases are built once each.
UNEQUAL = {small_config(**settings).key(): settings for settings in reversed(CASES)}.values()


@pytest.mark.parametrize(
    "settings", sorted(UNEQUAL, key=lambda k: small_config(**k).base().key()), ids=described
)
def test_every_value_of_every_setting_takes_effect_and_leaves_no_byte(
    rig: Rig, settings: dict[str, Any]
) -> None:
    config = small_config(**settings)
    rig.settle(config)
    if config.is_8bit_compute:
        # The first product in 8 bits takes a workspace of 2 MiB, for good.
        rig.measure(config)
    before = rig.settle(config)
    measurement = rig.measure(config)
    assert rig.allocated_bytes() == before
    assert measurement.trainable_parameters == lora_parameters(config, SMALL)
    assert measurement.peak_allocated_bytes > before
    if config.method == "dpo":
        # Adapters begin at zero, where the model is its own reference, and learn.
        assert 0 < measurement.final_loss < 1.01 * math.log(2)
    else:
        # Random tokens under a random head: the loss is near that of a uniform guess.
        assert measurement.final_loss == pytest.approx(10.6, abs=1.0)


def test_flash_attention_is_flash_attns_own_or_a_verdict_with_the_reason(rig: Rig) -> None:
    config = small_config(attention="flash_attention_2")
    if importlib.util.find_spec("flash_attn") is not None:
        assert rig.measure(config).tokens_per_second > 0
        return
    outcome = rig.run(config)
    assert isinstance(outcome, Ineffective)
    assert outcome.setting == "attention"
    assert "FlashAttention2" in outcome.detail
    rig.measure(small_config())


@pytest.mark.parametrize(
    ("ran", "asked", "setting"),
    [
        ({}, {"attention": "eager"}, "attention"),
        ({}, {"attention": "flash_attention_2"}, "attention"),
        ({"attention": "eager"}, {}, "attention"),
        ({}, {"compute_dtype": "fp16"}, "compute_dtype"),
        ({"compute_dtype": "fp32"}, {"compute_dtype": "bf16"}, "compute_dtype"),
        ({}, {"quantization": "fp4"}, "quantization"),
        ({}, {"double_quant": False}, "double_quant"),
        (WITHOUT, {}, "quantization"),
        ({}, {"kernels": "liger"}, "kernels"),
        ({"kernels": "fused-loss"}, {"kernels": "liger"}, "kernels"),
        ({"kernels": "liger"}, {"kernels": "fused-loss"}, "kernels"),
        ({"kernels": "liger"}, {}, "kernels"),
        ({}, {"optimizer": "adamw_torch_fused"}, "optimizer"),
        ({"optimizer": "adamw_torch_fused"}, {}, "optimizer"),
        (WIDE, {**WIDE, "optimizer": "paged_adamw_8bit"}, "optimizer"),
        ({}, {"compile": True}, "compile"),
        ({}, {"expandable_segments": True}, "expandable_segments"),
        ({"expandable_segments": True}, {}, "expandable_segments"),
    ],
)
def test_a_run_that_is_not_what_was_asked_is_found_out(
    rig: Rig, ran: dict[str, Any], asked: dict[str, Any], setting: str
) -> None:
    """Settings whose proof sees other kernels than a CPU's."""
    config = small_config(micro_batch_size=1, **ran)
    rig.settle(config)
    with rig.training(config) as loop:
        with KernelWatch() as watch:
            loop.step()
        wanted = small_config(micro_batch_size=1, **asked)
        fault = ineffective(wanted, StepEvidence(loop, watch))
        honest = ineffective(config, StepEvidence(loop, watch))
    assert isinstance(fault, Ineffective)
    assert fault.setting == setting
    assert honest is None


def test_a_compiled_layer_leaves_nothing_that_changes_the_next_trial(rig: Rig) -> None:
    plain = small_config(upcast_fp32=False, checkpoint_fraction=0.0)
    before = rig.settle(plain)
    reference = rig.measure(plain).peak_allocated_bytes
    for batch in (4, 5):
        compiled = plain.model_copy(update={"compile": True, "micro_batch_size": batch})
        assert rig.measure(compiled).compile_seconds
        assert rig.allocated_bytes() == before
        # What was compiled stays, and holds no memory of the GPU.
        assert rig.measure(compiled).compile_seconds == 0.0
        assert rig.allocated_bytes() == before
    assert rig.measure(plain).peak_allocated_bytes == reference
    modules = rig.base.model.modules()
    assert all(module._compiled_call_impl is None for module in modules)


def test_what_was_compiled_outlives_its_base_and_its_process(rig: Rig) -> None:
    from torch._dynamo.utils import counters

    from qlora_sweep.sweep.training.adapters import forget_compiled

    plain = small_config(upcast_fp32=False, checkpoint_fraction=0.0, compile=True)
    one, other = (
        plain.model_copy(update={"quantization": base, "compute_dtype": "int8"})
        for base in ("nf4", "int8")
    )
    rig.worker._resident.drop()
    before = rig.allocated_bytes()
    assert all(rig.measure(config).compile_seconds for config in (one, other))
    assert [rig.measure(config).compile_seconds for config in (one, other, one)] == [0.0] * 3
    rig.worker._resident.drop()
    assert rig.allocated_bytes() == before
    # As a new process finds it, on the disk.
    forget_compiled()
    counters["aot_autograd"].clear()
    rig.measure(one)
    found = counters["aot_autograd"]
    assert found["autograd_cache_hit"] > 0 == found["autograd_cache_bypass"]


@pytest.mark.parametrize("fraction", [0.0, 0.5])
def test_a_compiled_peak_is_the_same_whether_it_was_compiled_now_or_before(
    rig: Rig, fraction: float
) -> None:
    config = small_config(compile=True, upcast_fp32=False, checkpoint_fraction=fraction)
    rig.settle(config)
    peaks = {rig.measure(config).peak_allocated_bytes for _ in range(3)}
    assert len(peaks) == 1


def test_a_change_of_segments_rebuilds_the_base_in_segments_of_the_other_kind(rig: Rig) -> None:
    peaks = []
    for is_expandable in (False, True, False, True):
        config = small_config(expandable_segments=is_expandable)
        before = rig.settle(config)
        # Its own proof says where the weights lie.
        measurement = rig.measure(config)
        peaks.append(measurement.peak_allocated_bytes)
        assert rig.allocated_bytes() == before
    assert peaks[0] == peaks[2]
    assert peaks[1] == peaks[3]
    # A growing segment cuts every block to its request.
    assert peaks[1] <= peaks[0]


def test_a_standard_run_after_liger_is_a_standard_run(rig: Rig) -> None:
    """Liger patches the modelling module for the whole process; its base takes that back."""
    standard, liger, again = (_fingerprint(rig, kernels) for kernels in ("hf", "liger", "hf"))
    assert standard == again
    assert standard[1] != liger[1]


def _fingerprint(rig: Rig, kernels: str) -> tuple[int, dict[str, int], int]:
    """Return the base's bytes, how often a step calls each operator, and the peak."""
    config = small_config(kernels=kernels)
    before = rig.settle(config)
    operators = _operators(rig, config)
    rig.device.release()
    assert rig.allocated_bytes() == before
    return before, operators, rig.measure(config).peak_allocated_bytes


def _operators(rig: Rig, config: TrialConfig) -> dict[str, int]:
    with rig.training(config) as loop, _Operators() as operators:
        loop.step()
    return operators.counts


def test_liger_layers_are_compiled_or_said_not_to_be(rig: Rig) -> None:
    """liger-kernel 0.8.5 keeps its dispatch out of graphs; its fused loss is outside the layers."""
    config = small_config(kernels="liger", upcast_fp32=False, compile=True)
    before = rig.settle(config)
    outcome = rig.run(config)
    assert isinstance(outcome, Measured | Ineffective)
    if isinstance(outcome, Ineffective):
        assert outcome.setting == "compile"
    assert rig.allocated_bytes() == before


class _Operators(torch.utils._python_dispatch.TorchDispatchMode):
    def __init__(self) -> None:
        super().__init__()
        self.counts: dict[str, int] = {}

    def __torch_dispatch__(self, func, types, args=(), kwargs=None):  # type: ignore[no-untyped-def]
        self.counts[func.name()] = self.counts.get(func.name(), 0) + 1
        return func(*args, **(kwargs or {}))


def test_a_base_is_the_same_to_the_byte_however_often_it_is_built(rig: Rig) -> None:
    key = small_config()
    sizes = set()
    for _ in range(3):
        rig.settle(small_config(upcast_fp32=False))
        before = rig.settle(small_config())
        sizes.add(before)
        assert rig.base.config == key.base()
    assert len(sizes) == 1


def test_a_base_that_is_closed_leaves_nothing(rig: Rig) -> None:
    before = rig.allocated_bytes()
    base = build_base(
        small_config(kernels="liger"),
        spec=SMALL,
        weights="random",
        device=rig.device.torch_device,
        seed=0,
    )
    base.close()
    del base
    rig.device.release()
    assert rig.allocated_bytes() == before
