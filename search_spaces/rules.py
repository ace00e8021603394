"""Owns what is forbidden before anything runs: rules between a configuration, a model and a GPU.

Each rule is a small function with its reason. Knows nothing of memory: what does not fit is no
rule's business. That one dtype should rule outside and inside (a model loaded in float16 under
bfloat16 compute silently trains float16 adapters) needs no rule: a configuration has only one.
"""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from search_spaces.config import EIGHT_BIT, TrialConfig
from search_spaces.errors import did_you_mean, in_percent
from search_spaces.linears import (
    LEAST_QUANTIZED_SHARE,
    Unquantized,
    known_linear_modules,
    linear_shapes,
    target_sets,
    unquantized,
)
from search_spaces.models import ModelSpec

LIGER_MODEL_TYPES = frozenset(
    {
        "deepseek_v2",
        "deepseek_v3",
        "exaone4",
        "falcon_h1",
        "gemma",
        "gemma2",
        "gemma3_text",
        "glm4",
        "gpt_oss",
        "hunyuan_v1_dense",
        "hunyuan_v1_moe",
        "llama",
        "llama4_text",
        "ministral",
        "mistral",
        "mixtral",
        "nemotron",
        "olmo2",
        "olmo3",
        "phi3",
        "qwen2",
        "qwen3",
        "qwen3_moe",
        "smollm3",
    }
)
"""Text decoders that liger-kernel 0.8.5 patches, fused loss included (its `monkey_patch` table)."""

WITHOUT_SDPA = frozenset(
    {
        "bloom",
        "codegen",
        "deepseek_v4",
        "falcon_mamba",
        "gpt_neo",
        "gpt_oss",
        "gptj",
        "granite_swa",
        "granitemoe_swa",
        "hy_v4",
        "mamba",
        "mamba2",
        "mimo_v2_flash",
        "mpt",
        "rwkv",
        "xglm",
    }
)
"""Decoders that transformers 5.17 runs with eager attention, and not with torch's."""
WITHOUT_CHECKPOINTING = frozenset(
    {"cpmant", "ctrl", "gpt_neox_japanese", "jetmoe", "openai-gpt", "xlm", "xlnet"}
)
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
    """Whether it would train on texts; on full-length random rows elsewhere."""

    def older_than(self, capability: tuple[int, int]) -> bool:
        """Whether the GPU is known to be older than ``capability``."""
        return self.compute_capability is not None and self.compute_capability < capability

    @property
    def capability(self) -> str:
        """Compute capability as it is written: ``7.5``."""
        return ".".join(map(str, self.compute_capability or ()))


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
        has_texts: whether it would train on texts, and not on full-length random rows.
    """
    setting = Setting(model, device, compute_capability, has_texts)
    for name, rule in RULES.items():
        reason = rule(config, setting)
        if reason is not None:
            return Violation(name, reason)
    return None


def _bf16(config: TrialConfig, setting: Setting) -> str | None:
    if config.compute_dtype == "bf16" and setting.older_than(AMPERE):
        return (
            f"bf16 needs compute capability 8.0 (Ampere), this GPU has {setting.capability}: "
            "use compute_dtype fp16"
        )
    return None


def _adapters(config: TrialConfig, setting: Setting) -> str | None:
    if config.adapter_dtype != "bf16":
        return None
    if config.compute_dtype == "fp16":
        return (
            "fp16 scales the loss, and torch cannot unscale gradients in bf16: use adapter_dtype "
            "fp32 or compute_dtype bf16"
        )
    if setting.older_than(AMPERE):
        return (
            f"bf16 needs compute capability 8.0 (Ampere), this GPU has {setting.capability}: "
            "use adapter_dtype fp32"
        )
    return None


def _eight_bit(config: TrialConfig, setting: Setting) -> str | None:
    """Return why 8-bit storage or compute is not to be had."""
    compute, base = config.compute_dtype, config.quantization
    asked = {"compute_dtype": compute, "quantization": base}
    found = [(key, kind) for key, kind in asked.items() if kind in EIGHT_BIT]
    for key, kind in found:
        least = EIGHT_BIT_SINCE[kind]
        if setting.older_than(least):
            half = "fp16" if setting.older_than(AMPERE) else "bf16"
            instead = half if key == "compute_dtype" else "nf4"
            int8 = "" if setting.older_than(EIGHT_BIT_SINCE["int8"]) else "int8 or "
            return (
                f"{key} {kind} needs compute capability {least[0]}.{least[1]}, this GPU has "
                f"{setting.capability}: use {int8}{instead}"
            )
    if len({kind for _, kind in found}) > 1:
        return f"a base in {base} computes in {base} or in 16 bits: use compute_dtype {base}"
    if config.is_8bit_compute and not config.is_quantized:
        return (
            f"compute_dtype {compute} multiplies by weights that are held in 4 or 8 bits: use "
            f"quantization {compute} or nf4"
        )
    if found and config.quantized_fraction < 1:
        return "every layer is in 8 bits or none is: use quantized_fraction 1"
    return _odd_shape(config, setting) if config.is_8bit_compute else None


def _odd_shape(config: TrialConfig, setting: Setting) -> str | None:
    for name, shape in (linear_shapes(setting.model) or {}).items():
        if any(width % EIGHT_BIT_MULTIPLE for width in shape):
            return (
                f"8-bit products need widths that are multiples of {EIGHT_BIT_MULTIPLE}, and "
                f"'{name}' of {setting.model.name} is {shape[0]} x {shape[1]}: use bf16"
            )
    if config.compute_dtype == "int8" and config.tokens_per_micro_batch <= INT8_ROWS:
        return (
            f"int8 products need more than {INT8_ROWS} tokens in a micro-batch: use a larger "
            "micro_batch_size"
        )
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
    if setting.older_than(VOLTA):
        return f"Triton needs compute capability 7.0, this GPU has {setting.capability}"
    return None


def _liger_model(config: TrialConfig, setting: Setting) -> str | None:
    if config.kernels != "hf" and setting.model.model_type not in LIGER_MODEL_TYPES:
        return f"Liger has no kernels for model type '{setting.model.model_type}': use kernels hf"
    if config.kernels == "liger" and unquantized(setting.model) is not None:
        return (
            f"what Liger's kernel for the experts of model type '{setting.model.model_type}' keeps "
            "and takes is not known: use kernels fused-loss or hf"
        )
    return None


def _compile(config: TrialConfig, setting: Setting) -> str | None:
    if not config.compile:
        return None
    if setting.device == "cpu":
        return "compile is not supported on a CPU: it needs a C++ compiler on the machine"
    if setting.older_than(VOLTA):
        return f"Triton needs compute capability 7.0, this GPU has {setting.capability}"
    return None


def _compiled_liger(config: TrialConfig, _: Setting) -> str | None:
    if config.compile and config.kernels == "liger":
        return (
            "torch's compiler breaks on Liger's layer kernels, so the layers would stay eager: "
            "use kernels fused-loss"
        )
    return None


def _flash(config: TrialConfig, setting: Setting) -> str | None:
    if config.attention != "flash_attention_2":
        return None
    if setting.device == "cpu":
        return "FlashAttention-2 needs CUDA: use attention sdpa"
    if setting.older_than(AMPERE):
        return (
            f"FlashAttention-2 needs compute capability 8.0 (Ampere), this GPU has "
            f"{setting.capability}: use attention sdpa"
        )
    if config.compute_dtype == "fp32":
        return "FlashAttention-2 has no fp32 kernels: use compute_dtype bf16 or attention sdpa"
    return None


def _paged(config: TrialConfig, setting: Setting) -> str | None:
    if config.is_paged and setting.device == "cpu":
        return "a paged optimizer pages between CUDA and host memory: use adamw_8bit on a CPU"
    return None


def _segments(config: TrialConfig, setting: Setting) -> str | None:
    if config.expandable_segments and setting.device == "cpu":
        return "expandable_segments is of CUDA's allocator: use expandable_segments false on a CPU"
    return None


def _positions(config: TrialConfig, setting: Setting) -> str | None:
    positions = setting.model.max_positions
    if positions is not None and config.seq_len > positions:
        return (
            f"seq_len {config.seq_len} is beyond the {positions} positions of "
            f"{setting.model.name} (max_position_embeddings)"
        )
    return None


def _loss(config: TrialConfig, _: Setting) -> str | None:
    if config.seq_len < 2:
        return "seq_len 1 has no next token to predict, so no token carries a loss"
    return None


def _targets(config: TrialConfig, setting: Setting) -> str | None:
    wanted, model = config.target_modules, setting.model
    sets = target_sets(model)
    known = known_linear_modules(model) or sets["attention"]
    if wanted == "all-linear" and wanted not in sets:
        return (
            f"adapters cannot go on every linear layer of model type '{model.model_type}': "
            f"target_modules can be {' or '.join(sets)}"
        )
    if isinstance(wanted, str) and wanted not in sets:
        missing = "q_proj"
    elif known_linear_modules(model) is not None:
        ends = {name.rpartition(".")[2] for name in known}
        names = [] if isinstance(wanted, str) else list(wanted)
        missing = next((n for n in names if n.rpartition(".")[2] not in ends), "")
    else:
        missing = ""
    if not missing:
        return None
    return (
        f"the decoder layers of model type '{model.model_type}' have no linear module '{missing}'"
        f"{did_you_mean(missing, known)} (target_modules can be {' or '.join(sets)} here)"
    )


def _quantized(config: TrialConfig, setting: Setting) -> str | None:
    if not config.is_quantized:
        return None
    left = unquantized(setting.model)
    if left is None or (left.share is not None and left.share >= LEAST_QUANTIZED_SHARE):
        return None
    return (
        f"quantization {config.quantization} would hold {_portion(left)} of the matrices of model "
        f"type '{setting.model.model_type}' in {config.weight_bits} bits: it "
        f"replaces linear layers only, and {left.what}{_size(left)}. Use "
        "quantization none, which is what this would be, or a model without such weights"
    )


def _no_layer(config: TrialConfig, setting: Setting) -> str | None:
    if not config.is_quantized or config.quantized_count(setting.model.hidden_layers):
        return None
    return (
        f"quantized_fraction {config.quantized_fraction:g} holds none of "
        f"{setting.model.hidden_layers} layers in {config.weight_bits} bits: use quantization "
        "none"
    )


def _portion(left: Unquantized) -> str:
    if left.share is None:
        return "only a small part"
    return f"only {in_percent(left.share)}" if left.share else "none"


def _size(left: Unquantized) -> str:
    if left.weights is None:
        return ""
    count = 2 * left.weights
    size = f"{count / 2**30:.3g} GiB" if count >= 2**30 // 10 else f"{count / 2**20:.3g} MiB"
    return f"; they stay in 16 bits and take {size}"


def _attention(config: TrialConfig, setting: Setting) -> str | None:
    kind = setting.model.model_type
    if config.attention == "sdpa" and kind in WITHOUT_SDPA:
        return f"transformers has no sdpa attention for model type '{kind}': use attention eager"
    return None


def _checkpoints(config: TrialConfig, setting: Setting) -> str | None:
    kind = setting.model.model_type
    if config.checkpoint_fraction > 0 and kind in WITHOUT_CHECKPOINTING:
        return (
            f"transformers cannot checkpoint the layers of model type '{kind}': "
            "use checkpoint_fraction 0"
        )
    return None


def _packing(config: TrialConfig, setting: Setting) -> str | None:
    if config.packing == "none" or setting.has_texts:
        return None
    return (
        f"packing {config.packing} is of texts, and without them every row is full already: name "
        "yours with --data, or use packing none"
    )


def _rows_of_many(config: TrialConfig, setting: Setting) -> str | None:
    if config.data_parallel == 1 or not setting.has_texts:
        return None
    return (
        "rows of texts are not dealt out to several GPUs here, so several of them are measured on "
        "full-length random rows alone: use data_parallel 1, or leave the texts out"
    )


def _sharded(config: TrialConfig, _: Setting) -> str | None:
    if not config.is_sharded:
        return None
    if config.data_parallel == 1:
        return "sharding fsdp splits the model among GPUs: use data_parallel 2 or more, or none"
    if config.upcast_fp32:
        return "sharding fsdp moves a layer's weights together, in one type: use upcast_fp32 false"
    if config.optimizer != "adamw_torch_fused":
        return (
            f"bitsandbytes' {config.optimizer} cannot update a share of a tensor (it has no "
            "operators for DTensor): use optimizer adamw_torch_fused with sharding fsdp"
        )
    return _unsharded_kernels(config)


def _unsharded_kernels(config: TrialConfig) -> str | None:
    if config.compile:
        return (
            "a layer that is gathered when it is called is more than one graph: use compile false "
            "with sharding fsdp"
        )
    if config.compute_dtype != "bf16":
        return f"sharding fsdp is tried in bf16 alone, not {config.compute_dtype}: use bf16"
    if config.quantization in EIGHT_BIT:
        return "sharding fsdp is tried with 4-bit and 16-bit bases alone: use quantization nf4"
    if config.quantized_fraction < 1 and config.is_quantized:
        return "sharding fsdp is tried with layers of one kind alone: use quantized_fraction 1"
    if config.adapter_dtype != "fp32" and config.is_quantized:
        return (
            "what FSDP gathers of one type it copies as numbers, which damages packed 4-bit "
            "weights: use adapter_dtype fp32 with sharding fsdp"
        )
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
    "data-parallel-on-texts": _rows_of_many,
    "sharding": _sharded,
}
"""Every rule by name, in the order they are asked."""
