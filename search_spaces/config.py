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
    ValidationError,
    model_validator,
)

from search_spaces.errors import InputError, did_you_mean, shown

ComputeDtype = Literal["bf16", "fp16", "fp32"]
Quantization = Literal["nf4", "fp4", "none"]
Kernels = Literal["hf", "fused-loss", "liger"]
Attention = Literal["sdpa", "flash_attention_2", "eager"]
OptimizerName = Literal["adamw_8bit", "paged_adamw_8bit", "adamw_torch_fused"]
TARGET_SETS = ("qv", "attention", "all-linear")


def _number(value: object) -> object:
    """Accept what YAML reads as a number or as its text (``1e-4``), and never a truth value."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {shown(value)}")
    return value


def _target_modules(value: object) -> object:
    if isinstance(value, str):
        if value not in TARGET_SETS:
            raise ValueError(
                f"must be one of {', '.join(TARGET_SETS)} or a list of module names, "
                f"got {shown(value)}"
            )
        return value
    if isinstance(value, list | tuple):
        if not value or not all(isinstance(name, str) and name for name in value):
            raise ValueError(f"must list at least one module name, got {shown(value)}")
        return tuple(sorted(set(value)))
    raise ValueError(f"must be a name or a list of module names, got {shown(value)}")


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
    """Whether the quantisation constants are quantised themselves."""
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
    for key in values:
        if key not in CONFIG_KEYS:
            raise InputError(f"{where}: unknown key '{key}'{did_you_mean(str(key), CONFIG_KEYS)}")
    try:
        return TrialConfig.model_validate(dict(values))
    except ValidationError as error:
        raise InputError(f"{where}: {explain_validation(error)}") from error


_MESSAGES = {
    "greater_than_equal": "must be at least {ge}",
    "greater_than": "must be greater than {gt}",
    "less_than_equal": "must be at most {le}",
    "less_than": "must be less than {lt}",
    "literal_error": "must be one of {expected}",
    "int_type": "must be a whole number",
    "bool_type": "must be true or false",
    "float_parsing": "must be a number",
    "float_type": "must be a number",
    "finite_number": "must be a finite number",
    "string_type": "must be text",
    "date_type": "must be a date like 2026-11-21",
    "date_parsing": "must be a date like 2026-11-21",
    "date_from_datetime_parsing": "must be a date like 2026-11-21",
    "date_from_datetime_inexact": "must be a date like 2026-11-21",
    "string_pattern_mismatch": "must be letters, digits, '.', '_' and '-', at most 64",
    "tuple_type": "must be a list",
    "too_short": "must not be empty",
    "dict_type": "must map keys to values",
    "model_type": "must map keys to values",
    "missing": "is missing",
    "extra_forbidden": "is not a known key",
}


def explain_validation(error: ValidationError) -> str:
    """Return one line for the first fault of a pydantic error: key, rule, and what broke it."""
    first = error.errors()[0]
    key = ".".join(str(part) for part in first["loc"] if not str(part).startswith("function-"))
    kind = first["type"]
    if kind == "value_error":
        return f"{key} {first['msg'].removeprefix('Value error, ')}".strip()
    rule = _MESSAGES[kind].format(**first.get("ctx", {})) if kind in _MESSAGES else first["msg"]
    quoted = "" if kind in ("missing", "extra_forbidden") else f", got {shown(first['input'])}"
    return f"{key} {rule}{quoted}".strip()
