"""Owns configurations on a model as the work counts need them: widths, element sizes, what fuses.

What configurations differ in is an array with one number for each of them. Knows nothing of cards.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from functools import cached_property
from typing import Any, Self

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.linears import linear_shapes, resolve_targets
from search_spaces.models import ModelSpec

FP32_BYTES = 4.0
HALF_BYTES = 2.0

Sizes = NDArray[np.float64]
"""One number for each configuration."""
Mask = NDArray[np.bool_]
"""Whether something holds, for each configuration."""


@dataclass(frozen=True, eq=False)
class Layout:
    """Configurations on a model, as the counts below need them. Widths are features per token."""

    configs: Sequence[TrialConfig]
    model: ModelSpec
    linears: Mapping[str, tuple[int, int]]
    """Input and output features by name, of one decoder layer."""

    @classmethod
    def of(cls, configs: Sequence[TrialConfig], model: ModelSpec) -> Self:
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
        return cls(configs, model, linears)

    def sizes(self, value: Callable[[TrialConfig], float]) -> Sizes:
        """Return a value of each configuration."""
        return np.array([value(config) for config in self.configs], np.float64)

    def are(self, holds: Callable[[TrialConfig], bool]) -> Mask:
        """Return whether something holds of each configuration."""
        return np.array([holds(config) for config in self.configs], np.bool_)

    @cached_property
    def adapted(self) -> Mapping[str, Mask]:
        """For each linear layer, whether it carries an adapter."""
        chosen = [self._targets[config.target_modules] for config in self.configs]
        return {
            name: np.array([name in targets for targets in chosen], np.bool_)
            for name in self.linears
        }

    @cached_property
    def _targets(self) -> Mapping[Any, frozenset[str]]:
        """The modules that each way to say so means."""
        said = {config.target_modules: config for config in self.configs}
        return {key: frozenset(resolve_targets(one, self.model)) for key, one in said.items()}

    @cached_property
    def adapter_parameters(self) -> Sizes:
        """Parameters of all adapters; none where some module is not of the decoder layer's."""
        per_layer = {
            key: sum(sum(self.linears[name]) for name in targets)
            if targets <= set(self.linears)
            else 0
            for key, targets in self._targets.items()
        }
        of_each = self.sizes(lambda config: per_layer[config.target_modules])
        return self.model.hidden_layers * self.rank * of_each

    @cached_property
    def tokens(self) -> Sizes:
        """Tokens of a micro-batch."""
        return self.sizes(lambda config: config.micro_batch_size) * self.seq_len

    @cached_property
    def seq_len(self) -> Sizes:
        """Tokens of a row."""
        return self.sizes(lambda config: config.seq_len)

    @cached_property
    def rank(self) -> Sizes:
        """Of the adapters."""
        return self.sizes(lambda config: config.lora_rank)

    @cached_property
    def recomputed(self) -> Sizes:
        """Decoder layers that are recomputed."""
        layers = self.model.hidden_layers
        return self.sizes(lambda config: config.checkpointed_count(layers))

    @cached_property
    def micro_batches(self) -> Sizes:
        """Micro-batches of an optimizer step, of one card."""
        return self.sizes(lambda config: config.accumulation_steps)

    @cached_property
    def cards(self) -> Sizes:
        """Cards that take a step together; all else is of each of them."""
        return self.sizes(lambda config: config.data_parallel)

    @cached_property
    def is_sharded(self) -> Mask:
        """Whether each of them holds a share of every layer alone."""
        return self.are(lambda config: config.is_sharded)

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
    def compute(self) -> Sizes:
        """Bytes of an element of the matrix products; around 8-bit ones, of the 16-bit type."""
        return np.where(self.are(lambda c: c.compute_dtype == "fp32"), FP32_BYTES, HALF_BYTES)

    @cached_property
    def stream(self) -> Sizes:
        """Bytes of an element of the residual stream: norms and embeddings in fp32 make it fp32."""
        return np.where(self.are(lambda config: config.upcast_fp32), FP32_BYTES, self.compute)

    @cached_property
    def projected(self) -> Sizes:
        """Bytes of what a linear layer returns: bitsandbytes casts back to its input's type."""
        return np.where(self.is_4bit, self.stream, self.compute)

    @cached_property
    def trained(self) -> Sizes:
        """Bytes of an element of an adapter, and of its gradient."""
        return np.where(self.are(lambda c: c.adapter_dtype == "fp32"), FP32_BYTES, HALF_BYTES)

    @cached_property
    def is_quantized(self) -> Mask:
        """Whether the base is held in 4 or 8 bits."""
        return self.are(lambda config: config.is_quantized)

    @cached_property
    def is_4bit(self) -> Mask:
        """Whether bitsandbytes' layers hold the base in 4 bits."""
        return self.are(lambda config: config.is_4bit)

    @cached_property
    def is_8bit_compute(self) -> Mask:
        """Whether the frozen layers multiply in 8 bits."""
        return self.are(lambda config: config.is_8bit_compute)

    @cached_property
    def is_int8_compute(self) -> Mask:
        """Whether they multiply integers, whose products are sums of 32 bits."""
        return self.are(lambda config: config.numerics == "int8")

    @cached_property
    def packed_share(self) -> Sizes:
        """Share of the decoder layers that are quantized, where the base is."""
        layers = self.model.hidden_layers
        counts = self.sizes(lambda config: config.quantized_count(layers))
        return np.where(self.is_quantized, counts / layers, 1.0)

    def unquantized(self) -> Layout:
        """Return the same configurations with 16-bit layers."""
        return replace(
            self, configs=[c.model_copy(update={"quantization": "none"}) for c in self.configs]
        )

    @cached_property
    def is_doubly_quantized(self) -> Mask:
        """Whether its constants are quantized as well, where they are at all."""
        return self.are(lambda config: config.double_quant)

    @cached_property
    def is_compiled(self) -> Mask:
        """Whether the compiler fuses the elementwise operations of a layer."""
        return self.are(lambda config: config.compile)

    @cached_property
    def is_masked(self) -> Mask:
        """Whether sdpa has to go by a mask that keeps packed texts apart."""
        return self.are(lambda config: config.packing == "packed" and config.attention == "sdpa")

    @cached_property
    def is_liger(self) -> Mask:
        """Whether Liger's kernels do."""
        return self.are(lambda config: config.kernels == "liger") & ~self.is_compiled

    @cached_property
    def has_dropout(self) -> Mask:
        """Whether adapters drop part of their input."""
        return self.are(lambda config: config.lora_dropout > 0)

    def input_bytes(self, name: str) -> Sizes:
        """Bytes of an element of a linear layer's input."""
        return {"o_proj": self.compute, "down_proj": self.projected}.get(name, self.stream)

    def output_bytes(self, name: str) -> Sizes:
        """Bytes of an element of what a linear layer returns."""
        return np.where(self.is_4bit, self.input_bytes(name), self.compute)
