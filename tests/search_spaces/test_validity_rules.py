"""Rules between configuration, model and GPU, and what follows from a model's config."""

from __future__ import annotations

from itertools import product
from typing import Any, Literal

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
from qlora_sweep.search_spaces.rules import Violation, violation

MISTRAL = load_model_spec("mistral-7b-v0.3")
PHI3 = ModelSpec(
    "phi",
    "directory",
    {
        "model_type": "phi3",
        "hidden_size": 64,
        "intermediate_size": 128,
        "num_hidden_layers": 2,
        "num_attention_heads": 4,
        "num_key_value_heads": 2,
        "vocab_size": 100,
    },
)
UNKNOWN = ModelSpec("new", "directory", {**PHI3.config, "model_type": "brand_new"})


def of_type(kind: str, **changes: Any) -> ModelSpec:
    return ModelSpec(kind, "directory", {**PHI3.config, "model_type": kind, **changes})


QWEN3_30B = of_type(
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
FORBIDDEN: dict[str, list[tuple[dict[str, Any], ModelSpec, tuple[int, int] | None, str]]] = {
    "bf16-needs-ampere": [({}, MISTRAL, TURING, "this GPU has 7.5: use compute_dtype fp16")],
    "eight-bit": [
        ({"compute_dtype": "fp8"}, MISTRAL, AMPERE, "8.0: use int8 or bf16"),
        ({"compute_dtype": "fp8"}, MISTRAL, TURING, "7.5: use int8 or fp16"),
        ({"quantization": "fp8"}, MISTRAL, AMPERE, "8.0: use int8 or nf4"),
        ({"compute_dtype": "int8"}, MISTRAL, PASCAL, "7.5, this GPU has 6.0"),
        ({"compute_dtype": "int8", "quantization": "none"}, MISTRAL, AMPERE, "int8 or nf4"),
        ({"compute_dtype": "int8", "quantization": "fp8"}, MISTRAL, HOPPER, "in fp8 or in 16 bits"),
        ({"quantization": "int8", "quantized_fraction": 0.5}, MISTRAL, AMPERE, "fraction 1"),
        ({"compute_dtype": "int8", "micro_batch_size": 1, "seq_len": 16}, MISTRAL, AMPERE, "16 t"),
    ],
    "fp16-needs-cuda": [({"compute_dtype": "fp16"}, MISTRAL, None, "bf16 or fp32")],
    "kernels-need-triton": [
        ({"kernels": "liger"}, MISTRAL, None, "use kernels hf"),
        ({"kernels": "fused-loss", "compute_dtype": "fp16"}, MISTRAL, PASCAL, "7.0, this GPU has"),
    ],
    "kernels-need-liger-model": [
        ({"kernels": "liger"}, UNKNOWN, AMPERE, "'brand_new'"),
        ({"kernels": "liger", "quantization": "none"}, QWEN3_30B, AMPERE, "use kernels fused-loss"),
    ],
    "compile-needs-triton": [
        ({"compile": True}, MISTRAL, None, "not supported on a CPU"),
        ({"compile": True, "compute_dtype": "fp16"}, MISTRAL, PASCAL, "has 6.0"),
    ],
    "compile-breaks-on-liger": [
        ({"compile": True, "kernels": "liger"}, MISTRAL, AMPERE, "use kernels fused-loss")
    ],
    "bf16-adapters": [
        ({"adapter_dtype": "bf16", "compute_dtype": "fp16"}, MISTRAL, AMPERE, "gradients in bf16"),
        ({"adapter_dtype": "bf16", "compute_dtype": "fp32"}, MISTRAL, TURING, "8.0 (Ampere), this"),
        (
            {**GRPO, "adapter_dtype": "bf16", "compute_dtype": "fp16"},
            MISTRAL,
            TURING,
            "use quantization none or compute_dtype bf16",
        ),
    ],
    "quantized-fraction-of-no-layer": [
        ({"quantized_fraction": 0.01}, MISTRAL, AMPERE, "layers in 4 bits: use quantization none")
    ],
    "expandable-segments-need-cuda": [({"expandable_segments": True}, MISTRAL, None, "on a CPU")],
    "flash-attention-2": [
        (FA2, MISTRAL, None, "needs CUDA"),
        (FA2 | {"compute_dtype": "fp16"}, MISTRAL, TURING, "8.0 (Ampere), this GPU has 7.5"),
        (FA2 | {"compute_dtype": "fp32"}, MISTRAL, AMPERE, "no fp32 kernels"),
    ],
    "paged-optimizer-needs-cuda": [
        ({"optimizer": "paged_adamw_8bit"}, MISTRAL, None, "adamw_8bit")
    ],
    "seq-len-beyond-positions": [
        ({"seq_len": 32769}, MISTRAL, AMPERE, "is beyond the 32768 positions of mistral-7b-v0.3")
    ],
    "seq-len-without-loss": [({"seq_len": 1}, MISTRAL, AMPERE, "no next token")],
    "unknown-target-module": [
        ({"target_modules": ["q_porj"]}, MISTRAL, AMPERE, "'q_porj'; did you mean 'q_proj'?"),
        ({"target_modules": "qv"}, PHI3, AMPERE, "module 'q_proj'; did you mean 'qkv_proj'?"),
        ({"target_modules": "qv"}, of_type("gpt_neox"), AMPERE, "be attention or all-linear here)"),
        ({"target_modules": "qv"}, of_type("deepseek_v3", q_lora_rank=64), AMPERE, "or all-linear"),
        (
            {"target_modules": "all-linear", "quantization": "none"},
            of_type("phimoe"),
            AMPERE,
            "can be qv or attention",
        ),
    ],
    "quantization-leaves-weights": [
        ({}, QWEN3_30B, AMPERE, "nf4 would leave most of model type 'qwen3_moe' in 16 bits"),
        ({"quantization": "fp4"}, QWEN3_30B, None, "tensor a layer, 54 GiB. Use quantization none"),
        ({}, of_type("falcon"), AMPERE, "of a class of their own"),
        ({}, of_type("jamba"), AMPERE, "one tensor a layer. Use"),
    ],
    "attention-not-in-model": [({}, of_type("bloom"), AMPERE, "use attention eager")],
    "checkpointing-not-in-model": [({}, of_type("ctrl"), AMPERE, "use checkpoint_fraction 0")],
    "packing-needs-texts": [({"packing": "grouped"}, MISTRAL, None, "yours with --data")],
    "pairs": [
        ({"method": "dpo", **FSDP}, MISTRAL, AMPERE, "sharding none"),
        (
            {"method": "dpo", "attention": "eager"},
            of_type("gemma2", final_logit_softcapping=30.0),
            AMPERE,
            "softcapping",
        ),
    ],
    "grpo": [
        ({"method": "grpo", "upcast_fp32": True}, MISTRAL, AMPERE, "use upcast_fp32 false"),
        ({**GRPO, "compute_dtype": "int8"}, MISTRAL, AMPERE, "use compute_dtype bf16 or fp16"),
        ({**GRPO, "checkpoint_fraction": 0.5}, MISTRAL, AMPERE, "use checkpoint_fraction 0 or 1"),
        ({**GRPO, "compile": True}, MISTRAL, AMPERE, "use compile false"),
        ({**GRPO, "adapter_dtype": "fp32"}, MISTRAL, AMPERE, "use adapter_dtype bf16"),
    ],
    "trainer": [
        ({"trainer": "trl", "compile": True}, MISTRAL, AMPERE, "use compile false"),
        ({"trainer": "trl", "adapter_dtype": "fp32"}, MISTRAL, AMPERE, "adapter_dtype bf16"),
        ({"trainer": "axolotl", "compute_dtype": "int8"}, MISTRAL, AMPERE, "compute_dtype bf16"),
        ({"trainer": "llama-factory", "checkpoint_fraction": 0.5}, MISTRAL, AMPERE, "0 or 1"),
        ({"trainer": "unsloth", "method": "grpo"}, MISTRAL, AMPERE, "use method sft"),
    ],
    "not-predicted": [
        (
            {"trainer": "unsloth", "compute_dtype": "fp16", "checkpoint_fraction": 0.0},
            MISTRAL,
            AMPERE,
            "nothing else is measured",
        ),
        ({"trainer": "unsloth"}, of_type("gemma"), AMPERE, "model type 'gemma'"),
    ],
    "sharding": [
        ({"sharding": "fsdp"}, MISTRAL, AMPERE, "use data_parallel 2 or more"),
        ({**FSDP, "upcast_fp32": True}, MISTRAL, AMPERE, "use upcast_fp32 false"),
        ({**FSDP, "optimizer": "adamw_8bit"}, MISTRAL, AMPERE, "adamw_torch_fused"),
        ({**FSDP, "compute_dtype": "fp16"}, MISTRAL, AMPERE, "use bf16"),
        ({**FSDP, "quantized_fraction": 0.5}, MISTRAL, AMPERE, "quantized_fraction 1"),
    ],
}


def broken(
    values: dict[str, Any],
    model: ModelSpec = MISTRAL,
    gpu: tuple[int, int] | None = AMPERE,
    **more: Any,
) -> Violation | None:
    device: Literal["cuda", "cpu"] = "cpu" if gpu is None else "cuda"
    options = {"compute_capability": gpu, "device": device} | more
    return violation(parse_config(values), model=model, **options)


@pytest.mark.parametrize(
    ("rule", "values", "model", "gpu", "words"),
    [(rule, *case) for rule, cases in FORBIDDEN.items() for case in cases],
)
def test_what_cannot_run_is_forbidden_with_a_reason(
    values: dict[str, Any], model: ModelSpec, gpu: tuple[int, int] | None, rule: str, words: str
) -> None:
    found = broken(values, model, gpu)
    assert found is not None
    assert found.rule == rule
    assert words in found.reason


@pytest.mark.parametrize(
    ("values", "model", "gpu"),
    [
        ({}, MISTRAL, AMPERE),
        ({}, MISTRAL, None),
        ({"compute_dtype": "fp16"}, MISTRAL, TURING),
        ({"kernels": "fused-loss", "compile": True}, MISTRAL, AMPERE),
        ({**FSDP, "kernels": "fused-loss", "compile": True}, MISTRAL, AMPERE),
        (FA2, MISTRAL, AMPERE),
        ({"seq_len": 32768}, MISTRAL, AMPERE),
        ({"seq_len": 10_000_000}, UNKNOWN, AMPERE),
        ({"target_modules": ["anything"]}, UNKNOWN, AMPERE),
        ({"target_modules": "attention"}, PHI3, AMPERE),
        ({"quantization": "none", "double_quant": False}, MISTRAL, AMPERE),
        ({"quantization": "none", "kernels": "fused-loss"}, QWEN3_30B, AMPERE),
        ({}, of_type("granitemoehybrid", num_local_experts=0), AMPERE),
        ({}, of_type("gemma4_text", num_experts=None), AMPERE),
        ({"attention": "eager"}, of_type("bloom"), AMPERE),
        ({"checkpoint_fraction": 0.0}, of_type("ctrl"), AMPERE),
        ({"target_modules": ["attn.c_proj"]}, of_type("gpt2"), AMPERE),
    ],
)
def test_what_can_run_is_let_through(
    values: dict[str, Any], model: ModelSpec, gpu: tuple[int, int] | None
) -> None:
    assert broken(values, model, gpu) is None


def test_a_dataset_may_be_packed_in_any_way_on_any_number_of_gpus() -> None:
    for packing, gpus in product(("none", "grouped", "packed"), (1, 2)):
        values = {"packing": packing, "data_parallel": gpus, "micro_batch_size": 3 - gpus}
        assert broken(values, has_dataset=True) is None


def test_nothing_is_grouped_where_each_micro_batch_has_one_row() -> None:
    found = broken({"packing": "grouped", "micro_batch_size": 1}, has_dataset=True)
    assert found is not None
    assert found.rule == "grouped-needs-rows"


def test_an_unknown_gpu_is_not_held_against_a_configuration() -> None:
    assert broken({}, gpu=None, device="cuda") is None


@pytest.mark.parametrize(
    ("targets", "model", "modules"),
    [
        ("qv", MISTRAL, ("q_proj", "v_proj")),
        ("attention", MISTRAL, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("all-linear", MISTRAL, known_linear_modules(MISTRAL)),
        (["v_proj", "q_proj"], MISTRAL, ("q_proj", "v_proj")),
        ("attention", PHI3, ("qkv_proj", "o_proj")),
        ("all-linear", PHI3, ("qkv_proj", "o_proj", "gate_up_proj", "down_proj")),
        ("attention", UNKNOWN, ("q_proj", "k_proj", "v_proj", "o_proj")),
        ("all-linear", UNKNOWN, ("all-linear",)),
        ("attention", of_type("gpt_neox"), ("query_key_value", "dense")),
        ("attention", of_type("falcon"), ("query_key_value", "dense")),
        ("attention", of_type("bloom"), ("query_key_value", "dense")),
        ("attention", of_type("phi"), ("q_proj", "k_proj", "v_proj", "dense")),
        ("attention", of_type("opt"), ("q_proj", "k_proj", "v_proj", "out_proj")),
        ("attention", of_type("gptj"), ("q_proj", "k_proj", "v_proj", "out_proj")),
        # The name alone would be the feed-forward block's output as well.
        ("attention", of_type("gpt2"), ("c_attn", "attn.c_proj")),
        ("attention", of_type("mpt"), ("Wqkv", "out_proj")),
        ("qv", of_type("phi"), ("q_proj", "v_proj")),
        ("qv", of_type("opt"), ("q_proj", "v_proj")),
        (
            "attention",
            of_type("deepseek_v3"),
            ("q_a_proj", "q_b_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        ),
        (
            "attention",
            of_type("deepseek_v2", q_lora_rank=None),
            ("q_proj", "kv_a_proj_with_mqa", "kv_b_proj", "o_proj"),
        ),
    ],
)
def test_target_sets_become_module_names(
    targets: Any, model: ModelSpec, modules: tuple[str, ...]
) -> None:
    assert resolve_targets(parse_config({"target_modules": targets}), model) == modules


@pytest.mark.parametrize(
    ("model", "rank", "targets", "count"),
    [
        # Published as 13,631,488: right.
        ("mistral-7b-v0.3", 16, "attention", 13_631_488),
        # Published as 4,194,304, which forgets that values have fewer heads: no such count.
        ("llama-3.1-8b", 16, "qv", 6_815_744),
        # Published as 67.2 million, as if keys and values had 32 heads.
        ("mistral-7b-v0.3", 64, "attention", 54_525_952),
        # Published as 33,554,432: a fifth of what it is.
        ("mistral-7b-v0.3", 64, "all-linear", 167_772_160),
        ("llama-2-13b", 16, "qv", 13_107_200),
    ],
)
def test_trainable_parameters_follow_from_the_config(
    model: str, rank: int, targets: str, count: int
) -> None:
    config = parse_config({"lora_rank": rank, "target_modules": targets})
    assert lora_parameters(config, load_model_spec(model)) == count


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
