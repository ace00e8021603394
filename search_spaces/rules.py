"""What is forbidden before anything runs: rules between a configuration, a model and a GPU.

Each rule is a small function with its reason. What does not fit is no rule's business. That one
dtype should rule outside and inside (a model loaded in float16 under bfloat16 compute silently
trains float16 adapters) needs no rule: a configuration has only one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from search_spaces.config import EIGHT_BIT, TrialConfig
from search_spaces.errors import did_you_mean
from search_spaces.linears import (
    known_linear_modules,
    linear_shapes,
    target_sets,
    types,
    unquantized,
)
from search_spaces.models import ModelSpec

LIGER_MODEL_TYPES = types(
    """
    deepseek_v2 deepseek_v3 exaone4 falcon_h1 gemma gemma2 gemma3_text glm4 gpt_oss
    hunyuan_v1_dense hunyuan_v1_moe llama llama4_text ministral mistral mixtral nemotron olmo2 olmo3
    phi3 qwen2 qwen3 qwen3_moe smollm3
    """
)
"""Text decoders that liger-kernel 0.8.5 patches, fused loss included (its `monkey_patch` table)."""
WITHOUT_SDPA = types(
    """
    bloom codegen deepseek_v4 falcon_mamba gpt_neo gpt_oss gptj granite_swa granitemoe_swa hy_v4
    mamba mamba2 mimo_v2_flash mpt rwkv xglm
    """
)
"""Decoders that transformers 5.17 runs with eager attention, and not with torch's."""
WITHOUT_CHECKPOINTING = types("cpmant ctrl gpt_neox_japanese jetmoe openai-gpt xlm xlnet")
"""Decoders whose layers transformers 5.17 cannot checkpoint."""

AMPERE = (8, 0)
TURING = (7, 5)
VOLTA = (7, 0)
EIGHT_BIT_SINCE = {"fp8": (8, 9), "int8": TURING}
"""Compute capability from which matrix units multiply the type."""
EIGHT_BIT_MULTIPLE = 16
"""Both widths of a matrix are multiples of it (cuBLASLt: 16 bytes)."""
INT8_ROWS = 16
"""`torch._int_mm` takes more rows than these."""


@dataclass(frozen=True)
class Violation:
    """A configuration that cannot be run as it says, and why."""

    rule: str
    """Name of the rule."""
    reason: str
    """One sentence for a person."""


@dataclass(frozen=True)
class Setting:
    """What a configuration would run on."""

    model: ModelSpec
    device: Literal["cuda", "cpu"]
    compute_capability: tuple[int, int] | None
    """Of the GPU; None on a CPU, or where it is not known."""
    has_texts: bool = False
    """Whether it would train on a dataset; on full-length random sequences elsewhere."""

    def older_than(self, capability: tuple[int, int]) -> bool:
        """Whether the GPU is known to be older than ``capability``."""
        return self.compute_capability is not None and self.compute_capability < capability

    def lacks(self, since: tuple[int, int], what: str, instead: str) -> str | None:
        """Return that ``what`` needs a newer GPU, where this one is known to be older."""
        if self.compute_capability is None or not self.older_than(since):
            return None
        needed, has = (".".join(map(str, each)) for each in (since, self.compute_capability))
        return f"{what} needs compute capability {needed}, this GPU has {has}: use {instead}"


Rule = Callable[[TrialConfig, Setting], str | None]
"""Returns why the configuration is forbidden, or None."""


def violation(
    config: TrialConfig,
    *,
    model: ModelSpec,
    compute_capability: tuple[int, int] | None,
    device: Literal["cuda", "cpu"],
    has_texts: bool = False,
) -> Violation | None:
    """Return the first rule that forbids ``config`` on this model and device, or None.

    Args:
        config: the candidate.
        model: what would be trained.
        compute_capability: of the GPU; None on a CPU, or where it is not known.
        device: where it would run.
        has_texts: whether it would train on a dataset, and not on full-length random sequences.
    """
    setting = Setting(model, device, compute_capability, has_texts)
    for name, rule in RULES.items():
        reason = rule(config, setting)
        if reason is not None:
            return Violation(name, reason)
    return None


def _bf16(config: TrialConfig, setting: Setting) -> str | None:
    if config.compute_dtype != "bf16":
        return None
    return setting.lacks(AMPERE, "bf16", "compute_dtype fp16")


def _adapters(config: TrialConfig, setting: Setting) -> str | None:
    if config.adapter_dtype != "bf16":
        return None
    if config.compute_dtype == "fp16":
        return "fp16 scales the loss, and torch cannot unscale gradients in bf16: use adapters fp32"
    return setting.lacks(AMPERE, "adapter_dtype bf16", "adapter_dtype fp32")


def _eight_bit(config: TrialConfig, setting: Setting) -> str | None:
    """Return why 8-bit storage or compute is not to be had."""
    compute, base = config.compute_dtype, config.quantization
    half = "fp16" if setting.older_than(AMPERE) else "bf16"
    int8 = "" if setting.older_than(TURING) else "int8 or "
    for key, kind, other in (("compute_dtype", compute, half), ("quantization", base, "nf4")):
        since = EIGHT_BIT_SINCE.get(kind)
        if since and (reason := setting.lacks(since, f"{key} {kind}", f"{int8}{other}")):
            return reason
    if compute in EIGHT_BIT and base in EIGHT_BIT and compute != base:
        return f"a base in {base} computes in {base} or in 16 bits: use compute_dtype {base}"
    if compute in EIGHT_BIT and not config.is_quantized:
        return f"{compute} multiplies by weights of 4 or 8 bits: use quantization {compute} or nf4"
    if (compute in EIGHT_BIT or base in EIGHT_BIT) and config.quantized_fraction < 1:
        return "every layer is in 8 bits or none is: use quantized_fraction 1"
    return _odd_shape(config, setting.model) if compute in EIGHT_BIT else None


def _odd_shape(config: TrialConfig, model: ModelSpec) -> str | None:
    for name, shape in (linear_shapes(model) or {}).items():
        if any(width % EIGHT_BIT_MULTIPLE for width in shape):
            return (
                f"8-bit products need widths that are multiples of {EIGHT_BIT_MULTIPLE}, and "
                f"'{name}' of {model.name} is {shape[0]} x {shape[1]}: use bf16"
            )
    if config.compute_dtype == "int8" and config.tokens_per_micro_batch <= INT8_ROWS:
        return f"int8 needs more than {INT8_ROWS} tokens in a micro-batch: use a larger one"
    return None


def _fp16(config: TrialConfig, setting: Setting) -> str | None:
    if config.compute_dtype == "fp16" and setting.device == "cpu":
        return "fp16 training is not supported on a CPU: use compute_dtype bf16 or fp32"
    return None


def _triton(config: TrialConfig, setting: Setting) -> str | None:
    if config.kernels == "hf":
        return None
    if setting.device == "cpu":
        return f"kernels {config.kernels} are Triton kernels and need CUDA: use kernels hf"
    return setting.lacks(VOLTA, "Triton", "kernels hf")


def _liger_model(config: TrialConfig, setting: Setting) -> str | None:
    kind = setting.model.model_type
    if config.kernels != "hf" and kind not in LIGER_MODEL_TYPES:
        return f"Liger has no kernels for model type '{kind}': use kernels hf"
    if config.kernels == "liger" and unquantized(setting.model) is not None:
        return f"Liger's kernel for the experts of '{kind}' is not known: use kernels fused-loss"
    return None


def _compile(config: TrialConfig, setting: Setting) -> str | None:
    if not config.compile:
        return None
    if setting.device == "cpu":
        return "compile is not supported on a CPU: it needs a C++ compiler on the machine"
    return setting.lacks(VOLTA, "Triton", "compile false")


def _compiled_liger(config: TrialConfig, _: Setting) -> str | None:
    if config.compile and config.kernels == "liger":
        return "torch's compiler breaks on Liger's layer kernels: use kernels fused-loss"
    return None


def _flash(config: TrialConfig, setting: Setting) -> str | None:
    if config.attention != "flash_attention_2":
        return None
    if setting.device == "cpu":
        return "FlashAttention-2 needs CUDA: use attention sdpa"
    if config.compute_dtype == "fp32" and not setting.older_than(AMPERE):
        return "FlashAttention-2 has no fp32 kernels: use compute_dtype bf16 or attention sdpa"
    return setting.lacks(AMPERE, "FlashAttention-2", "attention sdpa")


def _paged(config: TrialConfig, setting: Setting) -> str | None:
    if config.is_paged and setting.device == "cpu":
        return "a paged optimizer pages between CUDA and host memory: use adamw_8bit on a CPU"
    return None


def _segments(config: TrialConfig, setting: Setting) -> str | None:
    if config.expandable_segments and setting.device == "cpu":
        return "expandable_segments is of CUDA's allocator: use expandable_segments false on a CPU"
    return None


def _positions(config: TrialConfig, setting: Setting) -> str | None:
    positions, name = setting.model.max_positions, setting.model.name
    if positions is None or config.seq_len <= positions:
        return None
    beyond = f"seq_len {config.seq_len} is beyond the {positions} positions of {name}"
    return f"{beyond} (max_position_embeddings)"


def _loss(config: TrialConfig, _: Setting) -> str | None:
    if config.seq_len < 2:
        return "seq_len 1 has no next token to predict, so no token carries a loss"
    return None


def _targets(config: TrialConfig, setting: Setting) -> str | None:
    wanted, kind = config.target_modules, setting.model.model_type
    sets, modules = target_sets(setting.model), known_linear_modules(setting.model)
    possible = f"target_modules can be {' or '.join(sets)}"
    if wanted == "all-linear" and wanted not in sets:
        return f"adapters cannot go on every linear layer of model type '{kind}': {possible}"
    missing = ""
    if isinstance(wanted, str):
        missing = "" if wanted in sets else "q_proj"
    elif modules is not None:
        ends = {name.rpartition(".")[2] for name in modules}
        missing = next((name for name in wanted if name.rpartition(".")[2] not in ends), "")
    if not missing:
        return None
    meant = did_you_mean(missing, modules or sets["attention"])
    none = f"the decoder layers of model type '{kind}' have no linear module '{missing}'"
    return f"{none}{meant} ({possible} here)"


def _quantized(config: TrialConfig, setting: Setting) -> str | None:
    left = unquantized(setting.model) if config.is_quantized else None
    if left is None:
        return None
    return (
        f"quantization {config.quantization} would leave most of model type "
        f"'{setting.model.model_type}' in 16 bits, as it replaces linear layers only: {left}. "
        "Use quantization none, or a model without such weights"
    )


def _no_layer(config: TrialConfig, setting: Setting) -> str | None:
    layers = setting.model.hidden_layers
    if not config.is_quantized or config.quantized_count(layers):
        return None
    held = f"holds none of {layers} layers in {config.weight_bits} bits"
    return f"quantized_fraction {config.quantized_fraction:g} {held}: use quantization none"


def _attention(config: TrialConfig, setting: Setting) -> str | None:
    kind = setting.model.model_type
    if config.attention == "sdpa" and kind in WITHOUT_SDPA:
        return f"transformers has no sdpa attention for model type '{kind}': use attention eager"
    return None


def _checkpoints(config: TrialConfig, setting: Setting) -> str | None:
    kind = setting.model.model_type
    if config.checkpoint_fraction > 0 and kind in WITHOUT_CHECKPOINTING:
        return f"transformers cannot checkpoint model type '{kind}': use checkpoint_fraction 0"
    return None


def _packing(config: TrialConfig, setting: Setting) -> str | None:
    if config.packing == "none" or setting.has_texts:
        return None
    needs = f"packing {config.packing} needs a dataset, as random sequences are full already"
    return f"{needs}: name yours with --data, or use packing none"


def _data_of_many(config: TrialConfig, setting: Setting) -> str | None:
    if config.data_parallel == 1 or not setting.has_texts:
        return None
    return (
        "several GPUs are measured on full-length random sequences alone, as a dataset is not "
        "dealt out to them here: use data_parallel 1, or leave the dataset out"
    )


def _sharded(config: TrialConfig, _: Setting) -> str | None:
    if not config.is_sharded:
        return None
    if config.data_parallel == 1:
        return "sharding fsdp splits the model among GPUs: use data_parallel 2 or more, or none"
    if config.upcast_fp32:
        return "sharding fsdp moves a layer's weights together, in one type: use upcast_fp32 false"
    if config.optimizer != "adamw_torch_fused":
        return f"{config.optimizer} cannot update a share of a tensor: use adamw_torch_fused"
    if config.compile:
        return (
            "a layer that is gathered when it is called is more than one graph: use compile false"
        )
    if config.compute_dtype != "bf16":
        return f"sharding fsdp is tried in bf16 alone, not {config.compute_dtype}: use bf16"
    if config.quantization in EIGHT_BIT:
        return "sharding fsdp is tried with 4-bit and 16-bit bases alone: use quantization nf4"
    if config.quantized_fraction < 1 and config.is_quantized:
        return "sharding fsdp is tried with layers of one kind alone: use quantized_fraction 1"
    if config.adapter_dtype != "fp32" and config.is_quantized:
        return "FSDP gathers bf16 adapters with the 4-bit weights and damages those: use fp32"
    return None


RULES: dict[str, Rule] = {
    "bf16-needs-ampere": _bf16,
    "eight-bit": _eight_bit,
    "fp16-needs-cuda": _fp16,
    "bf16-adapters": _adapters,
    "kernels-need-triton": _triton,
    "kernels-need-liger-model": _liger_model,
    "compile-needs-triton": _compile,
    "compile-breaks-on-liger": _compiled_liger,
    "flash-attention-2": _flash,
    "paged-optimizer-needs-cuda": _paged,
    "expandable-segments-need-cuda": _segments,
    "seq-len-beyond-positions": _positions,
    "seq-len-without-loss": _loss,
    "unknown-target-module": _targets,
    "quantization-leaves-weights": _quantized,
    "quantized-fraction-of-no-layer": _no_layer,
    "attention-not-in-model": _attention,
    "checkpointing-not-in-model": _checkpoints,
    "packing-needs-texts": _packing,
    "data-parallel-on-texts": _data_of_many,
    "sharding": _sharded,
}
"""Every rule by name, in the order they are asked."""
