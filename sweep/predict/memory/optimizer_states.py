"""Owns what an optimizer keeps on the card for a trained tensor. Knows nothing of models."""

from __future__ import annotations

from search_spaces.config import TrialConfig

FP32_BYTES = 4
ADAPTER_BYTES = {"fp32": FP32_BYTES, "bf16": 2}
"""Bytes of an element of an adapter, and of its gradient."""

_MIN_8BIT_ELEMENTS = 4096
"""bitsandbytes keeps the states of smaller tensors in fp32."""
_MIN_PAGED_ELEMENTS = 100_000
"""bitsandbytes keeps smaller states on the card; larger ones are in memory no counter sees."""
_BLOCK_ELEMENTS = 256
"""Elements that share a scale."""


def state_bytes(config: TrialConfig, elements: int) -> tuple[int, ...]:
    """Return the bytes of each tensor that is kept on the card for a trained one."""
    optimizer = config.optimizer
    if optimizer == "adamw_torch_fused":
        # Moments of the parameter's own type; the step count is on the card too, always in fp32.
        moment = elements * ADAPTER_BYTES[config.adapter_dtype]
        return (FP32_BYTES, moment, moment)
    if elements < _MIN_8BIT_ELEMENTS:
        return (elements * FP32_BYTES,) * 2
    scales = -(-elements // _BLOCK_ELEMENTS) * FP32_BYTES
    if optimizer == "paged_adamw_8bit" and elements >= _MIN_PAGED_ELEMENTS:
        return (scales, scales)
    return (elements, elements, scales, scales)
