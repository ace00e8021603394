"""Which of configurations that are equally fast is recommended: the plainer one.

Plans, studies and reports decide a tie here. Within one class of numerics two speeds tie within
`TIE`; between classes they do where the interval of their ratio holds 1.
"""

from __future__ import annotations

import math

from qlora_sweep.search_spaces.config import (
    BATCH_KEYS,
    CAPACITY_KEYS,
    SETTINGS,
    TrialConfig,
    canonical,
)

TIE = 0.02
"""Relative difference in speed, within one class of numerics, that does not matter."""
ALIKE_MEMORY = 0.1
"""Steps of the logarithm of a peak, within which it is about the same."""
_STANDARD = canonical(TrialConfig())
_TASK_KEYS = frozenset(
    {*BATCH_KEYS, *CAPACITY_KEYS, "seq_len", "lora_alpha", "lora_dropout", "learning_rate"}
)
"""Settings that say what is trained, or how much at a time: no value of these is unusual."""
_OF_4_BITS = frozenset({"double_quant", "quantized_fraction"})
"""Settings of a base in 4 bits."""


def unusual_settings(config: TrialConfig) -> int:
    """Return how many settings differ from the standard recipe, the task's own apart, and those
    that a base of another type does not have."""
    resolved = canonical(config)
    counted = SETTINGS.keys() - _TASK_KEYS
    if not config.is_4bit:
        counted -= _OF_4_BITS
    return sum(getattr(resolved, key) != getattr(_STANDARD, key) for key in counted)


def compute_order(config: TrialConfig) -> int:
    """Return how plain a configuration's compute dtype is, the plainest first: all that multiplies
    in 8 bits is alike."""
    return config.compute_kind.plainness


def plainness(config: TrialConfig, peak_bytes: int) -> tuple[int, float, bool, int, int, int]:
    """Return what sorts configurations that tie in speed, the one to recommend first.

    16-bit compute comes before 8 bits, bf16 before fp16, experts and checkpoints on the GPU before
    those on the host, which has to have room for them, and less memory before more. Of about as
    much memory the one with fewer settings that are not the standard recipe's comes first.

    Args:
        config: the configuration.
        peak_bytes: its peak allocated memory, measured or predicted.
    """
    memory = round(math.log(max(1, peak_bytes)) / ALIKE_MEMORY)
    compute, settings = compute_order(config), unusual_settings(config)
    return compute, config.offload_fraction, config.waits_on_host, memory, settings, peak_bytes
