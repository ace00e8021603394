"""Configurations on a model as the work counts need them: widths, element sizes, what is fused."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from typing import Any

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


def known_linears(model: ModelSpec) -> dict[str, tuple[int, int]]:
    """Return input and output features by name, of one decoder layer.

    Raises:
        InputError: the architecture's linear layers are not known.
    """
    linears = linear_shapes(model)
    if linears is None:
        raise InputError(
            f"model '{model.name}': the linear layers of model type '{model.model_type}' "
            "are not known, so its speed cannot be predicted"
        )
    return linears


class Layout:
    """Configurations on a model. Widths are features per token, sizes bytes of an element.

    Raises:
        InputError: the architecture's linear layers are not known.
    """

    def __init__(self, configs: Sequence[TrialConfig], model: ModelSpec) -> None:
        self.configs, self.model = configs, model
        self.linears = linears = known_linears(model)
        self.layers: int = model.hidden_layers
        self.hidden: int = model.hidden_size
        """Width of the residual stream."""
        self.queries = linears["o_proj"][0]
        """Width of all heads' queries."""
        self.keys = (
            linears["k_proj"][1]
            if "k_proj" in linears
            else (linears["qkv_proj"][1] - self.queries) // 2
        )
        """Width of the keys, and of the values."""
        self.inner = linears["down_proj"][0]
        """Width between the two halves of the feed-forward part."""
        self._tell_kinds_apart()
        self._count()
        self._weigh()

    def sizes(self, value: Callable[[TrialConfig], float]) -> Sizes:
        """Return a value of each configuration."""
        return np.array([value(config) for config in self.configs], np.float64)

    def are(self, holds: Callable[[TrialConfig], bool]) -> Mask:
        """Return whether something holds of each configuration."""
        return np.array([holds(config) for config in self.configs], np.bool_)

    def _tell_kinds_apart(self) -> None:
        self.is_quantized = self.are(lambda config: config.is_quantized)
        """Whether the base is held in 4 or 8 bits."""
        self.is_4bit = self.are(lambda config: config.is_4bit)
        """Whether bitsandbytes' layers hold the base in 4 bits."""
        self.is_doubly_quantized = self.are(lambda config: config.double_quant)
        """Whether its constants are quantized as well, where they are at all."""
        self.is_8bit_compute = self.are(lambda config: config.is_8bit_compute)
        """Whether the frozen layers multiply in 8 bits."""
        self.is_int8_compute = self.are(lambda config: config.numerics == "int8")
        """Whether they multiply integers, whose products are sums of 32 bits."""
        self.is_compiled = self.are(lambda config: config.compile)
        """Whether the compiler fuses the elementwise operations of a layer."""
        self.is_liger = self.are(lambda config: config.kernels == "liger") & ~self.is_compiled
        """Whether Liger's kernels do."""
        self.is_eager_attention = self.are(lambda config: config.attention == "eager")
        self.is_masked = self.are(lambda c: c.packing == "packed" and c.attention == "sdpa")
        """Whether sdpa has to go by a mask that keeps packed examples apart."""
        self.has_dropout = self.are(lambda config: config.lora_dropout > 0)
        """Whether adapters drop part of their input."""
        self.is_sharded = self.are(lambda config: config.is_sharded)
        """Whether each of several GPUs holds a share of every layer alone."""

    def _count(self) -> None:
        self.seq_len = self.sizes(lambda config: config.seq_len)
        self.rank = self.sizes(lambda config: config.lora_rank)
        self.tokens = self.sizes(lambda config: config.micro_batch_size) * self.seq_len
        """Tokens of a micro-batch."""
        self.micro_batches = self.sizes(lambda config: config.accumulation_steps)
        """Micro-batches of an optimizer step, of one GPU."""
        self.gpus = self.sizes(lambda config: config.data_parallel)
        """GPUs that take a step together; all else is of each of them."""
        self.recomputed = self.sizes(lambda config: config.checkpointed_count(self.layers))
        """Decoder layers that are recomputed."""
        packed = self.sizes(lambda config: config.quantized_count(self.layers))
        self.packed_share = np.where(self.is_quantized, packed / self.layers, 1.0)
        """Share of the decoder layers that are quantized, where the base is."""
        said = {config.target_modules: config for config in self.configs}
        targets = {key: set(resolve_targets(one, self.model)) for key, one in said.items()}
        self.adapted: Mapping[str, Mask] = {
            name: np.array([name in targets[c.target_modules] for c in self.configs], np.bool_)
            for name in self.linears
        }
        """For each linear layer, whether it carries an adapter."""
        widths: dict[Any, int] = {
            key: sum(map(sum, map(self.linears.__getitem__, names)))
            for key, names in targets.items()
            if names <= set(self.linears)
        }
        of_each = self.sizes(lambda config: widths.get(config.target_modules, 0))
        self.adapter_parameters = self.layers * self.rank * of_each
        """Of all adapters; none where some module is not of the decoder layer's."""

    def _weigh(self) -> None:
        is_fp32 = self.are(lambda config: config.compute_dtype == "fp32")
        self.compute = np.where(is_fp32, FP32_BYTES, HALF_BYTES)
        """Of the matrix products; around 8-bit ones, of the 16-bit type."""
        is_upcast = self.are(lambda config: config.upcast_fp32)
        self.stream = np.where(is_upcast, FP32_BYTES, self.compute)
        """Of the residual stream: norms and embeddings in fp32 make it fp32."""
        self.projected = np.where(self.is_4bit, self.stream, self.compute)
        """Of what a linear layer returns: bitsandbytes casts back to its input's type."""
        is_trained_fp32 = self.are(lambda config: config.adapter_dtype == "fp32")
        self.trained = np.where(is_trained_fp32, FP32_BYTES, HALF_BYTES)
        """Of an adapter, and of its gradient."""

    def unquantized(self) -> Layout:
        """Return the same configurations with 16-bit layers."""
        wide = [config.model_copy(update={"quantization": "none"}) for config in self.configs]
        return Layout(wide, self.model)

    def input_bytes(self, name: str) -> Sizes:
        """Bytes of an element of a linear layer's input."""
        return {"o_proj": self.compute, "down_proj": self.projected}.get(name, self.stream)

    def output_bytes(self, name: str) -> Sizes:
        """Bytes of an element of what a linear layer returns."""
        return np.where(self.is_4bit, self.input_bytes(name), self.compute)
