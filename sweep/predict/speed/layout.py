"""Owns a configuration on a model as the work counts need it: widths, element sizes, what fuses.

Knows nothing of cards.
"""

from __future__ import annotations

from dataclasses import dataclass
from functools import cached_property
from typing import Literal, Self

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.linears import linear_shapes, resolve_targets
from search_spaces.models import ModelSpec

FP32_BYTES = 4
HALF_BYTES = 2


@dataclass(frozen=True)
class Layout:
    """A configuration on a model, as the counts below need it. Widths are features per token."""

    config: TrialConfig
    model: ModelSpec
    linears: dict[str, tuple[int, int]]
    """Input and output features by name, of one decoder layer."""
    adapted: frozenset[str]
    """The linear layers that carry an adapter."""

    @classmethod
    def of(cls, config: TrialConfig, model: ModelSpec) -> Self:
        """Return the layout.

        Raises:
            InputError: the architecture's linear layers are not known.
        """
        linears = linear_shapes(model)
        if linears is None:
            raise InputError(
                f"model '{model.name}': the linear layers of model type '{model.model_type}' "
                "are not known, so its speed cannot be predicted"
            )
        adapted = set(linears) & set(resolve_targets(config, model))
        return cls(config, model, linears, frozenset(adapted))

    @cached_property
    def tokens(self) -> int:
        """Tokens of a micro-batch."""
        return self.config.tokens_per_micro_batch

    @cached_property
    def hidden(self) -> int:
        """Width of the residual stream."""
        return self.model.hidden_size

    @cached_property
    def queries(self) -> int:
        """Width of all heads' queries."""
        return self.linears["o_proj"][0]

    @cached_property
    def keys(self) -> int:
        """Width of the keys, and of the values."""
        if "k_proj" in self.linears:
            return self.linears["k_proj"][1]
        return (self.linears["qkv_proj"][1] - self.queries) // 2

    @cached_property
    def inner(self) -> int:
        """Width between the two halves of the feed-forward part."""
        return self.linears["down_proj"][0]

    @cached_property
    def compute(self) -> int:
        """Bytes of an element of the matrix products."""
        return FP32_BYTES if self.config.compute_dtype == "fp32" else HALF_BYTES

    @cached_property
    def stream(self) -> int:
        """Bytes of an element of the residual stream: norms and embeddings in fp32 make it fp32."""
        return FP32_BYTES if self.config.upcast_fp32 else self.compute

    @cached_property
    def projected(self) -> int:
        """Bytes of what a linear layer returns: bitsandbytes casts back to its input's type."""
        return self.stream if self.is_quantized else self.compute

    @cached_property
    def trained(self) -> int:
        """Bytes of an element of an adapter, and of its gradient."""
        return FP32_BYTES if self.config.adapter_dtype == "fp32" else HALF_BYTES

    @cached_property
    def is_quantized(self) -> bool:
        """Whether the base is held in 4 bits."""
        return self.config.is_quantized

    @cached_property
    def fusion(self) -> Literal["eager", "liger", "compiled"]:
        """Who fuses the elementwise operations of a layer."""
        if self.config.compile:
            return "compiled"
        return "liger" if self.config.kernels == "liger" else "eager"

    def input_bytes(self, name: str) -> int:
        """Bytes of an element of a linear layer's input."""
        return {"o_proj": self.compute, "down_proj": self.projected}.get(name, self.stream)

    def output_bytes(self, name: str) -> int:
        """Bytes of an element of what a linear layer returns."""
        return self.input_bytes(name) if self.is_quantized else self.compute
