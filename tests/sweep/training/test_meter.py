"""From step times to a measurement."""

from __future__ import annotations

import os
from typing import Any

import numpy as np
import pytest

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.nvml import device_at
from tests.lazy import lazily
from tests.sweep.pretend_nvml import PretendNvml, memory, processes
from tests.sweep.training.tiny import LAYERS, TINY, tiny_base, tiny_config, tiny_loop
from tests.tables import cases

meter = lazily("qlora_sweep.sweep.training.meter")


def test_the_intervals_of_all_counts_hold_the_median_in_95_of_100_trials() -> None:
    """So they do whenever measuring ends."""
    draws = np.random.default_rng(0).lognormal(sigma=1.0, size=(1500, 40))
    missed = 0
    for row in draws.tolist():
        intervals = [meter.median_interval(row[:count]) for count in range(6, 41)]
        missed += not all(low <= 1.0 <= high for low, high in intervals)
    assert 0.03 < missed / 1500 <= 0.055


def reader(**answers: Any) -> tuple[Any, PretendNvml]:
    nvml = PretendNvml(**answers)
    return meter.GpuReader(device_at("0000:01:00.0", nvml)), nvml


@pytest.mark.parametrize(
    ("before", "now", "is_neighbour"),
    [([7], [7, os.getpid()], False), ([7], [7, 8], True), ([7], [8], True)],
)
def test_who_was_there_before_is_no_neighbour_and_who_comes_is(
    before: list[int], now: list[int], is_neighbour: bool
) -> None:
    gpu, nvml = reader(nvmlDeviceGetComputeRunningProcesses=processes(*before))
    nvml.answers["nvmlDeviceGetComputeRunningProcesses"] = processes(*now)
    assert gpu.read().has_neighbour is is_neighbour
    # In a container this process has the host's number: what begins with it is itself.
    gpu.remember()
    assert not gpu.read().has_neighbour


def test_the_energy_of_a_token_is_what_the_gpu_used_while_it_counted() -> None:
    gpu, nvml = reader()
    count = meter.EnergyCount(gpu)
    for begun, ended in ((5_000, 305_000), (900_000, 1_000_000)):
        nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] = begun
        count.begin()
        nvml.answers["nvmlDeviceGetTotalEnergyConsumption"] = ended
        count.end()
    assert count.per_token(1_000) is None, "too short for its counter"
    count.seconds = 2.0
    assert count.per_token(1_000) == pytest.approx(0.4)


def test_what_a_driver_or_a_machine_without_one_does_not_tell_is_empty() -> None:
    reading = reader(nvmlDeviceGetMemoryInfo=memory(24, 20))[0].read()
    assert (reading.has_neighbour, reading.used_bytes, reading.sm_clock_mhz) == (False, 4, None)
    untold = meter.GpuReader(None)
    assert (untold.read().used_bytes, untold.read().throttle_reasons) == (None, ())
    count = meter.EnergyCount(untold)
    count.begin()
    count.end()
    count.seconds = 9.0
    assert count.per_token(1_000) is None


@pytest.mark.parametrize(
    ("ended", "gradients", "micro_steps", "seconds"),
    cases(
        """
        [1.0] | [] | 1 | 1.0
        # The micro-step with the optimizer is counted once.
        [1.0, 2.0, 3.5] | [] | 16 | 16.5
        # Two steps of two micro-batches of 1, 3, 2 and 4 seconds, half a second for the optimizer.
        [1.0, 4.5, 6.5, 11.0] | [4.0, 10.5] | 2 | 5.5
        # A long accumulation of uneven micro-batches has their mean and one update.
        [1.0, 4.5, 6.5, 11.0] | [4.0, 10.5] | 8 | 20.5
        """
    ),
)
def test_a_step_is_made_of_the_micro_steps_that_were_run(
    ended: list[float], gradients: list[float], micro_steps: int, seconds: float
) -> None:
    found = meter.mean_step_seconds(ended, gradients, micro_steps=micro_steps)
    assert found == pytest.approx(seconds)


# The FLOPs of a step, counted from the config alone and on the model that is there.

adapters = lazily("qlora_sweep.sweep.training.adapters")
SEQ_LEN, HIDDEN, INNER, VOCABULARY = 32, 128, 256, 512
PLAIN = tiny_config(
    seq_len=SEQ_LEN, lora_rank=4, quantization="none", double_quant=False, effective_batch_size=4
)


def a_model(model_type: str, **values: Any) -> ModelSpec:
    known = {**TINY.config, "pad_token_id": 0, "model_type": model_type}
    return ModelSpec("tiny", "directory", {**known, **values})


def counted(model: ModelSpec, config: TrialConfig = PLAIN) -> float | None:
    """Return the FLOPs of a token, as they are counted on the model that is there."""
    with tiny_loop(config, spec=model) as loop:
        found = meter.flops_per_token(loop.attached, loop.attached.model.config, SEQ_LEN)
    return None if found is None else float(found)


@pytest.mark.parametrize(
    ("architecture", "targets"),
    cases(
        """
        {model_type: llama, head_dim: 64} | all-linear
        {model_type: llama, tie_word_embeddings: true} | [down_proj]
        {model_type: qwen3, head_dim: 64} | attention
        {model_type: phi3} | all-linear
        """
    ),
    ids=str,
)
def test_both_counts_of_a_steps_flops_are_the_same(
    architecture: dict[str, Any], targets: str | tuple[str, ...]
) -> None:
    from qlora_sweep.sweep.predict.speed.kernels import KernelShapes
    from qlora_sweep.sweep.predict.speed.steps import model_flops

    model = a_model(**architecture)
    config = PLAIN.changed(target_modules=targets)
    flops = model_flops(KernelShapes([config], model))
    assert flops == counted(model, config) * config.tokens_per_step  # type: ignore[operator]


ATTENTION = 2 * HIDDEN * HIDDEN + 2 * HIDDEN * HIDDEN // 2
"""Weights of queries and output, and of keys and values of half as many heads."""
ADAPTERS = LAYERS * 4 * (2 * 2 * HIDDEN + 2 * (HIDDEN + HIDDEN // 2))
SHARED_EXPERT = {
    "num_experts": 4,
    "num_experts_per_tok": 2,
    "moe_intermediate_size": 32,
    "shared_expert_intermediate_size": 48,
    "decoder_sparse_step": 1,
}
ROUTED = {"num_local_experts": 4, "num_experts_per_tok": 2}
GPT2 = {
    "n_embd": HIDDEN,
    "n_layer": LAYERS,
    "n_head": 4,
    "n_positions": 64,
    "intermediate_size": None,
}


@pytest.mark.filterwarnings("ignore:fan_in_fan_out")
@pytest.mark.parametrize(
    ("model", "per_layer", "trained"),
    [
        (a_model("llama"), ATTENTION + 3 * HIDDEN * INNER, ADAPTERS),
        # A token multiplies with the experts that it is sent to, and with the router.
        (
            a_model("mixtral", **ROUTED),
            ATTENTION + 4 * HIDDEN + 2 * 3 * HIDDEN * INNER,
            ADAPTERS,
        ),
        # A shared expert is every token's, and has a gate of its own.
        (
            a_model("qwen2_moe", **SHARED_EXPERT),
            ATTENTION + 4 * HIDDEN + 2 * 3 * HIDDEN * 32 + 3 * HIDDEN * 48 + HIDDEN,
            ADAPTERS,
        ),
        # Linear layers of GPT-2's own class count.
        (a_model("gpt2", **GPT2), 12 * HIDDEN * HIDDEN, LAYERS * 4 * 6 * HIDDEN),
    ],
    ids=["llama", "mixtral", "qwen2_moe", "gpt2"],
)
def test_four_per_frozen_and_six_per_trained_weight_that_a_token_is_multiplied_with(
    model: ModelSpec, per_layer: int, trained: int
) -> None:
    frozen = LAYERS * per_layer + VOCABULARY * HIDDEN
    scores = 6 * LAYERS * SEQ_LEN * HIDDEN
    assert counted(model) == pytest.approx(4 * frozen + 6 * trained + scores)


def test_heads_of_latent_attention_are_as_wide_as_their_queries_and_their_values() -> None:
    """And not as what is rotated of them, which transformers calls their width."""
    from tests.families import spec_of

    spec = spec_of("deepseek_v3")
    widths = spec.config["qk_nope_head_dim"] + spec.config["qk_rope_head_dim"]
    of_scores = (widths + spec.config["v_head_dim"]) / 2 * spec.config["num_attention_heads"]
    length = SEQ_LEN
    with tiny_loop(PLAIN, spec=spec) as loop:
        of_length = [
            meter.flops_per_token(loop.attached, loop.attached.model.config, each)
            for each in (length, 2 * length)
        ]
    short, long = of_length
    assert short is not None
    assert long - short == 6 * spec.hidden_layers * length * of_scores


def test_of_experts_in_a_list_those_count_that_a_token_is_sent_to() -> None:
    import torch

    with tiny_base(PLAIN) as base:
        text = base.model.config

        def of_a_token() -> Any:
            with adapters.attached(base, PLAIN) as attachment:
                return meter.flops_per_token(attachment, text, SEQ_LEN)

        before = of_a_token()
        linears = [torch.nn.Linear(8, 16, bias=False) for _ in range(4)]
        base.model.model.layers[0].mlp.experts = torch.nn.ModuleList(linears)
        assert of_a_token() is None
        text.num_local_experts, text.num_experts_per_tok = 4, 2
        assert of_a_token() == before + 4 * 2 * 8 * 16


def test_work_that_no_module_tells_is_not_shown() -> None:
    """A state space's convolution is no product of each token with a matrix."""
    from tests.families import spec_of

    config = tiny_config(attention="eager", quantization="none", double_quant=False)
    assert counted(spec_of("jamba"), config) is None


# What an exception means; the messages are those of torch, cuBLAS, cuDNN, Triton and glibc.

torch = lazily("torch")
exceptions = lazily("qlora_sweep.sweep.training.exceptions")
SHARED_MEMORY = "out of resource: shared memory, Required: 147456, Hardware limit: 101376."
NO_GPU_MEMORY = "CUDA out of memory. Tried to allocate 2.00 GiB"
NO_HOST_MEMORY = (
    "[enforce fail at alloc_cpu.cpp:127] err == 0. DefaultCPUAllocator: can't allocate memory: "
    "you tried to allocate 2147483648 bytes. Error code 12 (Cannot allocate memory)"
)


class OutOfResources(Exception):  # noqa: N818 - Triton's name
    """As triton.runtime.errors has it: the message is made by `__str__`."""

    def __str__(self) -> str:
        return f"{SHARED_MEMORY} Reducing block sizes or `num_stages` may help."


def after_out_of_memory() -> Exception:
    """An error that was handled is not the cause of the next."""
    error = ValueError("the next thing went wrong")
    error.__context__ = torch.OutOfMemoryError(NO_GPU_MEMORY)
    return error


def wrapped(error: Exception) -> Exception:
    """Return what dynamo raises where the backend raised ``error``."""
    from torch._dynamo.exc import BackendCompilerFailed

    try:
        raise BackendCompilerFailed(lambda: None, error, None) from error
    except BackendCompilerFailed as outer:
        return outer


CUDA = {
    "gpu": (
        "CUDA error: out of memory",
        "CUDA driver error: out of memory",
        "Triton Error [CUDA]: out of memory",
        "CUDA error: CUBLAS_STATUS_ALLOC_FAILED when calling `cublasCreate`",
        "cuDNN error: CUDNN_STATUS_ALLOC_FAILED",
        "No valid triton configs. OutOfMemoryError: CUDA out of memory.",
    ),
    "host": (NO_HOST_MEMORY, "std::bad_alloc"),
    "kernel": (
        f"No valid triton configs. OutOfResources: {SHARED_MEMORY}",
        "CUDA error: too many resources requested for launch",
        "Triton Error [CUDA]: too many resources requested for launch",
    ),
    "neither": (
        "CUDA error: an illegal memory access was encountered",
        "CUDA error: CUBLAS_STATUS_NOT_INITIALIZED",
        "DataLoader worker is killed: out of shared memory",
    ),
}
"""What a RuntimeError says, by its kind."""
OTHERS: list[tuple[str, Any]] = [
    ("gpu", lambda: wrapped(torch.OutOfMemoryError(NO_GPU_MEMORY))),
    ("host", MemoryError),
    ("host", lambda: OSError(12, "Cannot allocate memory")),
    ("kernel", lambda: wrapped(OutOfResources())),
    ("neither", after_out_of_memory),
    ("neither", lambda: ValueError("Unrecognized model in out of memory lane")),
    ("neither", lambda: OSError(28, "No space left on device")),
]


@pytest.mark.parametrize(
    ("kind", "made"), [*((kind, said) for kind, words in CUDA.items() for said in words), *OTHERS]
)
def test_every_failure_is_of_one_kind(kind: str, made: Any) -> None:
    error = RuntimeError(made) if isinstance(made, str) else made()
    assert exceptions.is_gpu_out_of_memory(error) is (kind == "gpu")
    assert exceptions.lacks_kernel_resources(error) is (kind == "kernel")
    # A process on the CPU has no GPU, so what a GPU says is never asked about there.
    assert kind == "gpu" or exceptions.is_host_out_of_memory(error) is (kind == "host")


@pytest.mark.parametrize(
    ("source", "settings", "setting"),
    cases(
        """
        liger_kernel/ops/rope.py | {kernels: liger, compile: true} | kernels
        torchinductor_root/ab/cab.py | {compile: true} | compile
        flash_attn/flash_attn_interface.py | {kernels: liger} | attention
        somewhere.py | {kernels: liger} | kernels
        somewhere.py | {compile: true} | compile
        torch/_dynamo/eval_frame.py | {kernels: hf} | attention
        """
    ),
)
def test_a_kernel_that_does_not_fit_is_laid_to_the_setting_that_brought_it(
    source: str, settings: dict[str, object], setting: str
) -> None:
    with pytest.raises(OutOfResources) as raised:
        exec(compile("raise error", f"/lib/{source}", "exec"), {"error": OutOfResources()})
    assert exceptions.setting_at_fault(raised.value, tiny_config(**settings)) == setting


def test_the_size_that_failed_is_read_from_the_message() -> None:
    assert exceptions.requested_bytes(RuntimeError(NO_GPU_MEMORY)) == 2**31
    assert exceptions.requested_bytes(RuntimeError("ALLOC_FAILED")) is None
