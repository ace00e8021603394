"""Configurations drawn over all settings, for what must hold of each of them."""

from __future__ import annotations

import random
from typing import Any

import yaml

from qlora_sweep.search_spaces.config import TrialConfig

MIXED: dict[str, tuple[Any, ...]] = yaml.safe_load(
    """
lora_rank: [4, 8, 16, 24, 64, 128, 500]
lora_dropout: [0.0, 0.0, 0.05]
target_modules: [qv, attention, all-linear, [q_proj, down_proj]]
micro_batch_size: [1, 2, 3, 5, 8, 10, 16, 31]
seq_len: [128, 300, 512, 1000, 2048, 4096]
compute_dtype: [bf16, fp16, fp32]
quantization: [nf4, fp4, none]
double_quant: [true, false]
adapter_dtype: [fp32, bf16]
checkpoint_fraction: [0.0, 0.3, 0.5, 0.75, 1.0]
upcast_fp32: [true, false]
kernels: [hf, fused-loss, liger]
attention: [sdpa, flash_attention_2, eager]
optimizer: [adamw_8bit, paged_adamw_8bit, adamw_torch_fused]
compile: [false, false, true]
"""
)


def mixed_configs(count: int, *, seed: int = 0, **held: Any) -> list[TrialConfig]:
    """So many configurations, the same ones for the same seed; a third of them accumulate."""
    draw = random.Random(seed)
    configs = []
    for _ in range(count):
        keys = {key: draw.choice(values) for key, values in MIXED.items()} | held
        times = draw.choice((None, None, 3))
        whole = None if times is None else times * keys["micro_batch_size"]
        configs.append(TrialConfig(**{**keys, "effective_batch_size": whole}))
    return configs
