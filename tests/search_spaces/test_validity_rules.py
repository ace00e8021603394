"""Rules between configuration, model and GPU, and what follows from a model's config."""

from __future__ import annotations

from itertools import product
from typing import Any

import pytest

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.linears import (
    known_linear_modules,
    linear_shapes,
    lora_parameters,
    parameters,
    resolve_targets,
)
from qlora_sweep.search_spaces.models import ModelSpec, load_model_spec
from qlora_sweep.search_spaces.rules import Setting, broken_rules
from tests.search_spaces.small import broken, small_model
from tests.tables import cases

MISTRAL = load_model_spec("mistral-7b-v0.3")
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

GPUS = {None: (8, 0), "turing": (7, 5), "pascal": (6, 0), "hopper": (9, 0), "cpu": None}
FSDP = {
    "data_parallel": 2,
    "sharding": "fsdp",
    "upcast_fp32": False,
    "optimizer": "adamw_torch_fused",
}


def model_of(cell: Any) -> ModelSpec:
    """Return Mistral where a cell is empty, else a small model of a type, or of a whole config."""
    if cell is None:
        return MISTRAL
    if cell == "qwen3-30b":
        return QWEN3_30B
    if isinstance(cell, str):
        return small_model(cell)
    return small_model(**cell)


FORBIDDEN = """
# Rule, what the reason names, settings, model, GPU.
bf16-needs-ampere | "has 7.5: use compute_dtype fp16" | {} | | turing
eight-bit | "8.0: use int8 or bf16" | {compute_dtype: fp8}
eight-bit | "8.0: use int8 or nf4" | {quantization: fp8}
eight-bit | 7.5, this GPU has 6.0 | {compute_dtype: int8} | | pascal
eight-bit | int8 or nf4 | {compute_dtype: int8, quantization: none}
eight-bit | in fp8 or in 16 bits | {compute_dtype: int8, quantization: fp8} | | hopper
eight-bit | fraction 1 | {quantization: int8, quantized_fraction: 0.5}
eight-bit | 16 t | {compute_dtype: int8, micro_batch_size: 1, seq_len: 16}
fp16-needs-cuda | bf16 or fp32 | {compute_dtype: fp16} | | cpu
kernels-need-triton | use kernels hf | {kernels: liger} | | cpu
kernels-need-triton | 7.0, this GPU has | {compute_dtype: fp16, kernels: liger} | | pascal
eight-bit | in place | {compute_dtype: int8, quantization: int8} | gemma3n_text
kernels-need-liger-model | brand_new | {kernels: liger} | brand_new
kernels-need-liger-model | fused-loss | {kernels: liger, quantization: none} | qwen3-30b
compile-needs-triton | not supported on a CPU | {compile: true} | | cpu
compile-needs-triton | has 6 | {compile: true, compute_dtype: fp16} | | pascal
kernels-need-liger-model | fused-loss | {kernels: liger} | qwen3_5_text
compile-breaks-on-liger | use kernels fused-loss | {compile: true, kernels: liger}
compile-breaks-on-linear-attention | flash-linear-attention | {compile: true} | qwen3_5_text
bf16-adapters | gradients in bf16 | {adapter_dtype: bf16, compute_dtype: fp16}
bf16-adapters | 8.0 (Ampere) | {adapter_dtype: bf16, compute_dtype: fp32} | | turing
bf16-adapters | quantization | {method: grpo, adapter_dtype: bf16, compute_dtype: fp16} | | turing
quantized-fraction-of-no-layer | quantization none | {quantized_fraction: 0.01}
expandable-segments-need-cuda | on a CPU | {expandable_segments: true} | | cpu
flash-attention-2 | needs CUDA | {attention: flash_attention_2} | | cpu
flash-attention-2 | GPU has 7.5 | {attention: flash_attention_2, compute_dtype: fp16} | | turing
flash-attention-2 | no fp32 kernels | {attention: flash_attention_2, compute_dtype: fp32}
paged-optimizer-needs-cuda | adamw_8bit | {optimizer: paged_adamw_8bit} | | cpu
seq-len-beyond-positions | 32768 positions of mistral-7b-v0.3 | {seq_len: 32769}
seq-len-without-loss | no next token | {seq_len: 1}
unknown-target-module | did you mean 'q_proj'? | {target_modules: [q_porj]}
unknown-target-module | did you mean 'qkv_proj'? | {target_modules: qv} | phi3
unknown-target-module | or all-linear | {target_modules: qv} | deepseek_v3
unknown-target-module | be attention or all-linear here) | {target_modules: qv} | gpt_neox
unknown-target-module | qv or attention | {target_modules: all-linear, quantization: none} | phimoe
quantization-leaves-weights | of a class of their own | {} | falcon
quantization-leaves-weights | "one tensor a layer. Use quantization none" | {} | dbrx
quantization-leaves-weights | reads the weights of its linear layers | {} | jamba
experts | use lora_dropout 0 | {target_modules: all-linear, lora_dropout: 0.1} | qwen3-30b
experts | use compile | {target_modules: all-linear, compile: true} | qwen3-30b
experts | use sharding none | {sharding: fsdp} | qwen3-30b
experts | use sharding none | {sharding: fsdp, quantization: int8} | qwen3-30b
experts | use compute_dtype bf16 or fp16 | {compute_dtype: int8} | qwen3-30b
offload | no experts | {offload_fraction: 1.0}
offload | in 4 bits alone | {offload_fraction: 1.0, quantization: int8} | qwen3-30b
offload | in 4 bits alone | {offload_fraction: 1.0, quantized_fraction: 0.5} | qwen3-30b
offload | one GPU alone | {offload_fraction: 1.0, data_parallel: 2} | qwen3-30b
offload | none of 48 layers | {offload_fraction: 0.01, quantization: int8} | qwen3-30b
attention-not-in-model | use attention eager | {} | bloom
checkpointing-not-in-model | use checkpoint_fraction 0 | {} | ctrl
packing-needs-texts | yours with --data | {packing: grouped}
pairs | softcapping | {method: dpo, attention: eager} | {final_logit_softcapping: 30}
grpo | use upcast_fp32 false | {method: grpo, upcast_fp32: true}
grpo | use compute_dtype bf16 or fp16 | {method: grpo, compute_dtype: int8}
grpo | checkpoint_fraction 0 or 1 | {method: grpo, checkpoint_fraction: 0.5}
grpo | use adapter_dtype bf16 | {method: grpo, adapter_dtype: fp32}
trainer | use compile false | {trainer: trl, compile: true}
trainer | compute_dtype bf16 | {trainer: axolotl, compute_dtype: int8}
trainer | 0 or 1 | {trainer: llama-factory, checkpoint_fraction: 0.5}
trainer | use method sft | {trainer: unsloth, method: grpo}
not-predicted | nothing else | {trainer: unsloth, compute_dtype: fp16, checkpoint_fraction: 0.0}
not-predicted | model type 'gemma' | {trainer: unsloth} | gemma
# In a sharded model.
pairs | sharding | {method: dpo}
sharding | use data_parallel 2 or more | {data_parallel: 1}
sharding | use upcast_fp32 false | {upcast_fp32: true}
sharding | adamw_torch_fused | {optimizer: adamw_8bit}
sharding | use bf16 | {compute_dtype: fp16}
sharding | quantized_fraction 1 | {quantized_fraction: 0.5}
"""


@pytest.mark.parametrize(("rule", "words", "values", "model", "gpu"), cases(FORBIDDEN))
def test_what_cannot_run_is_forbidden_with_a_reason(
    rule: str, words: Any, values: dict[str, Any], model: Any, gpu: str | None
) -> None:
    if "sharding" in (rule, words, *values):
        values = {**FSDP, **values}
    if rule != "trainer" and values.get("method") == "grpo":
        values = {"upcast_fp32": False, **values}
    found = broken(values, model_of(model), GPUS[gpu])
    assert found is not None
    assert found.rule == rule
    assert str(words) in found.reason


LET_THROUGH = """
{}
{kernels: fused-loss, compile: true}
{attention: flash_attention_2}
{seq_len: 32768}
{seq_len: 10000000} | brand_new
{target_modules: [anything]} | brand_new
{target_modules: attention} | phi3
{quantization: none, double_quant: false}
{quantization: none, kernels: fused-loss} | qwen3-30b
{} | {model_type: granitemoehybrid, num_local_experts: 0}
{} | {model_type: gemma4_text, num_experts: null}
{attention: eager} | bloom
{kernels: fused-loss} | qwen3_5_text
{compile: true} | lfm2
{checkpoint_fraction: 0.0} | ctrl
{target_modules: [attn.c_proj]} | gpt2
# On a GPU of its own, or none.
{} | | cpu
{compute_dtype: fp16} | | turing
"""


@pytest.mark.parametrize(("values", "model", "gpu"), cases(LET_THROUGH))
def test_what_can_run_is_let_through(values: dict[str, Any], model: Any, gpu: str | None) -> None:
    assert broken(values, model_of(model), GPUS[gpu]) is None
    shared = {**FSDP, "kernels": "fused-loss", "compile": True}
    assert broken(shared, MISTRAL) is None


@pytest.mark.parametrize("kind", ["qwen3_5_text", "lfm2", "granitemoehybrid", "minimax"])
def test_examples_are_not_packed_where_layers_carry_a_state(kind: str) -> None:
    found = {}
    for packing in ("none", "grouped", "packed"):
        config = TrialConfig(packing=packing, quantization="none", double_quant=False)
        setting = Setting(small_model(kind), "cuda", (8, 0), has_dataset=True)
        found[packing] = dict(broken_rules(config, setting))
    assert not found["none"]
    assert not found["grouped"]
    assert "use packing grouped" in found["packed"]["packing-leaks-state"]


def test_a_hybrid_whose_layers_all_attend_packs_like_any_other() -> None:
    setting = Setting(load_model_spec("granite-4.0-micro"), "cuda", (8, 0), has_dataset=True)
    assert not dict(broken_rules(TrialConfig(packing="packed"), setting))


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


TARGETS = """
# Targets, their modules, model.
qv | [q_proj, v_proj]
all-linear | [q_proj, k_proj, v_proj, o_proj, gate_proj, up_proj, down_proj]
[v_proj, q_proj] | [q_proj, v_proj]
attention | [qkv_proj, o_proj] | phi3
all-linear | [qkv_proj, o_proj, gate_up_proj, down_proj] | phi3
all-linear | [all-linear] | brand_new
attention | [query_key_value, dense] | gpt_neox
attention | [q_proj, k_proj, v_proj, dense] | phi
# The name alone would be the feed-forward block's output as well.
attention | [c_attn, attn.c_proj] | gpt2
attention | [Wqkv, out_proj] | mpt
# A convolution has one of that name, too.
attention | [q_proj, k_proj, v_proj, self_attn.out_proj] | lfm2
attention | [q_a_proj, q_b_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj] | deepseek_v3
attention | [q_proj, kv_a_proj_with_mqa, kv_b_proj, o_proj]
    | {model_type: deepseek_v2, q_lora_rank: null}
"""


@pytest.mark.parametrize(("targets", "modules", "model"), cases(TARGETS))
def test_target_sets_become_module_names(targets: Any, modules: list[str], model: Any) -> None:
    config = parse_config({"target_modules": targets})
    assert resolve_targets(config, model_of(model)) == tuple(modules)


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
