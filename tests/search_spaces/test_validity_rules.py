"""Rules between configuration, model and GPU, and what follows from a model's config."""

from __future__ import annotations

from dataclasses import dataclass, field
from itertools import product
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import parse_config
from qlora_sweep.search_spaces.linears import (
    known_linear_modules,
    linear_shapes,
    lora_parameters,
    parameters,
    resolve_targets,
)
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from tests.search_spaces.small import broken, small_model

MISTRAL = load_model_spec("mistral-7b-v0.3")
PHI3 = small_model("phi3")
UNKNOWN = small_model("brand_new")
QWEN3_30B = small_model(
    "qwen3_moe",
    hidden_size=2048,
    num_hidden_layers=48,
    num_attention_heads=32,
    num_key_value_heads=4,
    head_dim=128,
    num_experts=128,
    moe_intermediate_size=768,
)

TURING, AMPERE, PASCAL, HOPPER = (7, 5), (8, 0), (6, 0), (9, 0)
GRPO = {"method": "grpo", "upcast_fp32": False}
FSDP = {
    "data_parallel": 2,
    "sharding": "fsdp",
    "upcast_fp32": False,
    "optimizer": "adamw_torch_fused",
}


FA2 = {"attention": "flash_attention_2"}
FP16 = {"compute_dtype": "fp16"}
INT8 = {"compute_dtype": "int8"}
LIGER = {"kernels": "liger"}
COMPILED = {"compile": True}
BF16_ADAPTERS = {"adapter_dtype": "bf16"}
QV = {"target_modules": "qv"}
CAPPED = small_model("gemma2", final_logit_softcapping=30.0)


@dataclass(frozen=True)
class Case:
    """A configuration that a rule forbids, and what the reason must name."""

    rule: str
    words: str
    values: dict[str, Any] = field(default_factory=dict)
    model: ModelSpec = MISTRAL
    gpu: tuple[int, int] | None = AMPERE


FORBIDDEN = [
    Case("bf16-needs-ampere", "has 7.5: use compute_dtype fp16", gpu=TURING),
    Case("eight-bit", "8.0: use int8 or bf16", {"compute_dtype": "fp8"}),
    Case("eight-bit", "8.0: use int8 or nf4", {"quantization": "fp8"}),
    Case("eight-bit", "7.5, this GPU has 6.0", {"compute_dtype": "int8"}, gpu=PASCAL),
    Case("eight-bit", "int8 or nf4", {**INT8, "quantization": "none"}),
    Case("eight-bit", "in fp8 or in 16 bits", {**INT8, "quantization": "fp8"}, gpu=HOPPER),
    Case("eight-bit", "fraction 1", {"quantization": "int8", "quantized_fraction": 0.5}),
    Case("eight-bit", "16 t", {**INT8, "micro_batch_size": 1, "seq_len": 16}),
    Case("fp16-needs-cuda", "bf16 or fp32", FP16, gpu=None),
    Case("kernels-need-triton", "use kernels hf", LIGER, gpu=None),
    Case("kernels-need-triton", "7.0, this GPU has", {**FP16, **LIGER}, gpu=PASCAL),
    Case("kernels-need-liger-model", "'brand_new'", LIGER, UNKNOWN),
    Case("kernels-need-liger-model", "fused-loss", {**LIGER, "quantization": "none"}, QWEN3_30B),
    Case("compile-needs-triton", "not supported on a CPU", COMPILED, gpu=None),
    Case("compile-needs-triton", "has 6.0", {**COMPILED, **FP16}, gpu=PASCAL),
    Case("compile-breaks-on-liger", "use kernels fused-loss", {**COMPILED, **LIGER}),
    Case("bf16-adapters", "gradients in bf16", {**BF16_ADAPTERS, **FP16}),
    Case("bf16-adapters", "8.0 (Ampere)", {**BF16_ADAPTERS, "compute_dtype": "fp32"}, gpu=TURING),
    Case("bf16-adapters", "use quantization none", {**GRPO, **BF16_ADAPTERS, **FP16}, gpu=TURING),
    Case("quantized-fraction-of-no-layer", "quantization none", {"quantized_fraction": 0.01}),
    Case("expandable-segments-need-cuda", "on a CPU", {"expandable_segments": True}, gpu=None),
    Case("flash-attention-2", "needs CUDA", FA2, gpu=None),
    Case("flash-attention-2", "8.0 (Ampere), this GPU has 7.5", {**FA2, **FP16}, gpu=TURING),
    Case("flash-attention-2", "no fp32 kernels", {**FA2, "compute_dtype": "fp32"}),
    Case("paged-optimizer-needs-cuda", "adamw_8bit", {"optimizer": "paged_adamw_8bit"}, gpu=None),
    Case("seq-len-beyond-positions", "32768 positions of mistral-7b-v0.3", {"seq_len": 32769}),
    Case("seq-len-without-loss", "no next token", {"seq_len": 1}),
    Case("unknown-target-module", "did you mean 'q_proj'?", {"target_modules": ["q_porj"]}),
    Case("unknown-target-module", "did you mean 'qkv_proj'?", QV, PHI3),
    Case("unknown-target-module", "be attention or all-linear here)", QV, small_model("gpt_neox")),
    Case("unknown-target-module", "or all-linear", QV, small_model("deepseek_v3", q_lora_rank=64)),
    Case(
        "unknown-target-module",
        "can be qv or attention",
        {"target_modules": "all-linear", "quantization": "none"},
        small_model("phimoe"),
    ),
    Case("quantization-leaves-weights", "'qwen3_moe' in 16 bits", model=QWEN3_30B),
    Case("quantization-leaves-weights", "54 GiB", {"quantization": "fp4"}, QWEN3_30B, None),
    Case("quantization-leaves-weights", "of a class of their own", model=small_model("falcon")),
    Case("quantization-leaves-weights", "one tensor a layer", model=small_model("jamba")),
    Case("attention-not-in-model", "use attention eager", model=small_model("bloom")),
    Case("checkpointing-not-in-model", "use checkpoint_fraction 0", model=small_model("ctrl")),
    Case("packing-needs-texts", "yours with --data", {"packing": "grouped"}),
    Case("pairs", "sharding none", {"method": "dpo", **FSDP}),
    Case("pairs", "softcapping", {"method": "dpo", "attention": "eager"}, CAPPED),
    Case("grpo", "use upcast_fp32 false", {**GRPO, "upcast_fp32": True}),
    Case("grpo", "use compute_dtype bf16 or fp16", {**GRPO, **INT8}),
    Case("grpo", "use checkpoint_fraction 0 or 1", {**GRPO, "checkpoint_fraction": 0.5}),
    Case("grpo", "use adapter_dtype bf16", {**GRPO, "adapter_dtype": "fp32"}),
    Case("trainer", "use compile false", {"trainer": "trl", **COMPILED}),
    Case("trainer", "compute_dtype bf16", {"trainer": "axolotl", **INT8}),
    Case("trainer", "0 or 1", {"trainer": "llama-factory", "checkpoint_fraction": 0.5}),
    Case("trainer", "use method sft", {"trainer": "unsloth", "method": "grpo"}),
    Case(
        "not-predicted",
        "nothing else is measured",
        {"trainer": "unsloth", **FP16, "checkpoint_fraction": 0.0},
    ),
    Case("not-predicted", "model type 'gemma'", {"trainer": "unsloth"}, small_model("gemma")),
    Case("sharding", "use data_parallel 2 or more", {"sharding": "fsdp"}),
    Case("sharding", "use upcast_fp32 false", {**FSDP, "upcast_fp32": True}),
    Case("sharding", "adamw_torch_fused", {**FSDP, "optimizer": "adamw_8bit"}),
    Case("sharding", "use bf16", {**FSDP, **FP16}),
    Case("sharding", "quantized_fraction 1", {**FSDP, "quantized_fraction": 0.5}),
]


@pytest.mark.parametrize("case", FORBIDDEN, ids=lambda case: f"{case.rule}: {case.words}")
def test_what_cannot_run_is_forbidden_with_a_reason(case: Case) -> None:
    found = broken(case.values, case.model, case.gpu)
    assert found is not None
    assert found.rule == case.rule
    assert case.words in found.reason


@pytest.mark.parametrize(
    ("model", "values"),
    [
        (MISTRAL, {}),
        (MISTRAL, {"kernels": "fused-loss", "compile": True}),
        (MISTRAL, {**FSDP, "kernels": "fused-loss", "compile": True}),
        (MISTRAL, FA2),
        (MISTRAL, {"seq_len": 32768}),
        (UNKNOWN, {"seq_len": 10_000_000}),
        (UNKNOWN, {"target_modules": ["anything"]}),
        (PHI3, {"target_modules": "attention"}),
        (MISTRAL, {"quantization": "none", "double_quant": False}),
        (QWEN3_30B, {"quantization": "none", "kernels": "fused-loss"}),
        (small_model("granitemoehybrid", num_local_experts=0), {}),
        (small_model("gemma4_text", num_experts=None), {}),
        (small_model("bloom"), {"attention": "eager"}),
        (small_model("ctrl"), {"checkpoint_fraction": 0.0}),
        (small_model("gpt2"), {"target_modules": ["attn.c_proj"]}),
    ],
)
def test_what_can_run_is_let_through(model: ModelSpec, values: dict[str, Any]) -> None:
    assert broken(values, model) is None


def test_a_cpu_and_an_older_gpu_run_what_they_have_types_for() -> None:
    assert broken({}, MISTRAL, None) is None
    assert broken(FP16, MISTRAL, TURING) is None


def test_a_dataset_may_be_packed_in_any_way_on_any_number_of_gpus() -> None:
    for packing, gpus in product(("none", "grouped", "packed"), (1, 2)):
        values = {"packing": packing, "data_parallel": gpus, "micro_batch_size": 3 - gpus}
        assert broken(values, MISTRAL, has_dataset=True) is None


def test_nothing_is_grouped_where_each_micro_batch_has_one_row() -> None:
    found = broken({"packing": "grouped", "micro_batch_size": 1}, MISTRAL, has_dataset=True)
    assert found is not None
    assert found.rule == "grouped-needs-rows"


def test_an_unknown_gpu_is_not_held_against_a_configuration() -> None:
    assert broken({}, MISTRAL, None, device="cuda") is None


@pytest.mark.parametrize(
    ("targets", "model", "modules"),
    [
        ("qv", MISTRAL, ("q_proj", "v_proj")),
        ("all-linear", MISTRAL, known_linear_modules(MISTRAL)),
        (["v_proj", "q_proj"], MISTRAL, ("q_proj", "v_proj")),
        ("attention", PHI3, ("qkv_proj", "o_proj")),
        ("all-linear", PHI3, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("all-linear", UNKNOWN, ("all-linear",)),
        ("attention", small_model("gpt_neox"), ("query_key_value", "dense")),
        ("attention", small_model("phi"), ("q_proj", "k_proj", "v_proj", "dense")),
        # The name alone would be the feed-forward block's output as well.
        ("attention", small_model("gpt2"), ("c_attn", "attn.c_proj")),
        ("attention", small_model("mpt"), ("Wqkv", "out_proj")),
        (
            "attention",
            small_model("deepseek_v3"),
            ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        ),
        (
            "attention",
            small_model("deepseek_v2", q_lora_rank=None),
            ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        ),
    ],
)
def test_target_sets_become_module_names(
    targets: Any, model: ModelSpec, modules: tuple[str, ...]
) -> None:
    assert resolve_targets(parse_config({"target_modules": targets}), model) == modules


def test_what_is_not_known_is_not_guessed() -> None:
    assert known_linear_modules(UNKNOWN) is None
    assert linear_shapes(UNKNOWN) is None
    assert parameters(UNKNOWN) is None
    granite = ModelSpec("g", "directory", {**MISTRAL.config, "model_type": "granite"})
    assert linear_shapes(granite) is not None
    assert parameters(granite) is None
    assert lora_parameters(parse_config({}), UNKNOWN) is None
    assert lora_parameters(parse_config({"target_modules": ["lm_head"]}), MISTRAL) is None
    qwen = load_model_spec("qwen3-8b").config
    for key in ("intermediate_size", "num_key_value_heads", "head_dim"):
        left = ModelSpec("q", "directory", {k: v for k, v in qwen.items() if k != key})
        assert lora_parameters(parse_config({}), left) is None
