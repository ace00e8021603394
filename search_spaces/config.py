"""Owns one candidate: a frozen QLoRA configuration that validates itself.

Knows nothing of models, GPUs, Optuna or files. Rules that need a model or a GPU are in `rules`.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from typing import Annotated, Any, Literal

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from search_spaces.documents import Document
from search_spaces.errors import quote
from search_spaces.validation import validate

ComputeDtype = Literal["bf16", "fp16", "fp32"]
Quantization = Literal["nf4", "fp4", "none"]
Kernels = Literal["hf", "fused-loss", "liger"]
Attention = Literal["sdpa", "flash_attention_2", "eager"]
OptimizerName = Literal["adamw_8bit", "paged_adamw_8bit", "adamw_torch_fused"]
TARGET_SETS = ("qv", "attention", "all-linear")


def _number(value: object) -> object:
    """Accept what YAML reads as a number or as its text (``1e-4``), and never a truth value."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {quote(value)}")
    return value


def _target_modules(value: object) -> object:
    if isinstance(value, str):
        if value not in TARGET_SETS:
            raise ValueError(
                f"must be one of {', '.join(TARGET_SETS)} or a list of module names, "
                f"got {quote(value)}"
            )
        return value
    if isinstance(value, list | tuple):
        if not value or not all(isinstance(name, str) and name for name in value):
            raise ValueError(f"must list at least one module name, got {quote(value)}")
        return tuple(sorted(set(value)))
    raise ValueError(f"must be a name or a list of module names, got {quote(value)}")


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
TargetModules = Annotated[str | tuple[str, ...], BeforeValidator(_target_modules)]


class TrialConfig(BaseModel):
    """One QLoRA fine-tuning configuration; the defaults are the standard published recipe.

    Raises:
        pydantic.ValidationError: a value is out of range; `parse_config` makes it an `InputError`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid")

    lora_rank: StrictInt = Field(default=16, ge=1, le=65_536)
    """Rank r of every adapter pair."""
    lora_alpha: Number | None = Field(default=None, gt=0, le=1e6)
    """LoRA scale numerator; null means twice the rank."""
    lora_dropout: Number = Field(default=0.0, ge=0.0, le=1.0)
    """Probability of dropping an adapter's input element."""
    target_modules: TargetModules = "attention"
    """Linear layers with an adapter: ``qv``, ``attention`` (q,k,v,o), ``all-linear`` or names."""
    micro_batch_size: StrictInt = Field(default=4, ge=1, le=65_536)
    """Sequences in one forward and backward pass."""
    seq_len: StrictInt = Field(default=512, ge=1, le=10_000_000)
    """Tokens in every sequence."""
    effective_batch_size: StrictInt | None = Field(default=None, ge=1, le=1_000_000)
    """Sequences per optimizer step; null means one micro-batch. Accumulation follows from it."""
    compute_dtype: ComputeDtype = "bf16"
    """Type of the matrix products."""
    quantization: Quantization = "nf4"
    """Storage of the frozen base: 4-bit NormalFloat, 4-bit float, or ``none`` (16-bit)."""
    double_quant: StrictBool = True
    """Whether the quantization constants are quantized themselves."""
    checkpoint_fraction: Number = Field(default=1.0, ge=0.0, le=1.0)
    """Share of decoder layers whose activations are recomputed in the backward pass."""
    upcast_fp32: StrictBool = True
    """Keep norms, embeddings and head in fp32, as PEFT's `prepare_model_for_kbit_training` does."""
    kernels: Kernels = "hf"
    """Layer kernels: transformers' own, Liger's fused loss alone, or the whole Liger set."""
    attention: Attention = "sdpa"
    """Attention implementation."""
    optimizer: OptimizerName = "adamw_8bit"
    """Optimizer of the adapters."""
    compile: StrictBool = False
    """Whether each decoder layer is compiled with `torch.compile`, shapes static."""

    @model_validator(mode="after")
    def _accumulation_is_whole(self) -> TrialConfig:
        if (
            self.effective_batch_size is not None
            and self.effective_batch_size % self.micro_batch_size
        ):
            raise ValueError(
                f"effective_batch_size must be a multiple of micro_batch_size, got "
                f"{self.effective_batch_size} and {self.micro_batch_size}"
            )
        return self

    @property
    def alpha(self) -> float:
        """LoRA scale numerator with its default resolved."""
        return self.lora_alpha if self.lora_alpha is not None else 2.0 * self.lora_rank

    @property
    def samples_per_step(self) -> int:
        """Sequences per optimizer step."""
        return self.effective_batch_size or self.micro_batch_size

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step."""
        return self.samples_per_step // self.micro_batch_size

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens in one forward pass."""
        return self.micro_batch_size * self.seq_len

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step."""
        return self.samples_per_step * self.seq_len

    def checkpointed_layers(self, layers: int) -> frozenset[int]:
        """Return which of so many decoder layers are recomputed: a share of them, evenly spread."""
        count = round(self.checkpoint_fraction * layers)
        return frozenset(index * layers // count for index in range(count))

    def key(self) -> str:
        """Return the canonical JSON text; equal for equal configurations."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    def changes_from(self, other: TrialConfig) -> dict[str, Any]:
        """Return the keys whose values differ from ``other``, with this configuration's values."""
        mine, theirs = self.model_dump(mode="json"), other.model_dump(mode="json")
        return {key: value for key, value in mine.items() if theirs[key] != value}


CONFIG_KEYS = tuple(TrialConfig.model_fields)


def parse_config(values: Mapping[str, Any], *, where: str = "configuration") -> TrialConfig:
    """Build a configuration from plain values; missing keys take the defaults.

    Args:
        values: plain values as JSON or YAML read them.
        where: what the values came from (``configs.jsonl: line 3``), for the message.

    Raises:
        InputError: an unknown key or a value out of range; the message names ``where``, key, value.
    """
    return validate(TrialConfig, dict(values), Document(where))


def canonical(config: TrialConfig) -> TrialConfig:
    """Return the configuration that trains the same way, with every default written out.

    Two configurations with the same canonical form are one run: alpha left out is twice the rank,
    an effective batch left out is one micro-batch, and without quantization there are no
    quantization constants that ``double_quant`` could quantize.
    """
    return config.model_copy(
        update={
            "lora_alpha": config.alpha,
            "effective_batch_size": config.samples_per_step,
            "double_quant": config.double_quant and config.quantization != "none",
        }
    )
