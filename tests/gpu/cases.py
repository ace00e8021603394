"""Every value of every setting, and which combinations of them are trained on a GPU."""

from __future__ import annotations

from typing import Any, get_args

from qlora_sweep.search_spaces.config import (
    TARGET_SETS,
    AdapterDtype,
    ComputeDtype,
    Kernels,
    OptimizerName,
    Quantization,
    Reference,
)

LEAN = {"kernels": "liger", "upcast_fp32": False}
WITHOUT = {"quantization": "none", "double_quant": False}
VALUES: dict[str, tuple[Any, ...]] = {
    "method": ("sft", "dpo"),
    "reference": get_args(Reference),
    "compute_dtype": get_args(ComputeDtype),
    "quantization": get_args(Quantization),
    "double_quant": (True, False),
    "quantized_fraction": (1.0, 0.5),
    "adapter_dtype": get_args(AdapterDtype),
    "checkpoint_fraction": (0.0, 0.5, 1.0),
    "checkpoint_offload": (False, True),
    "upcast_fp32": (True, False),
    "kernels": get_args(Kernels),
    "attention": ("sdpa", "eager"),
    "optimizer": get_args(OptimizerName),
    "compile": (False, True),
    "expandable_segments": (False, True),
    "lora_rank": (8, 64),
    "lora_alpha": (8.0, None),
    "lora_dropout": (0.0, 0.1, 1.0),
    "target_modules": (*TARGET_SETS, ("down_proj", "q_proj")),
    "effective_batch_size": (None, 8),
    "micro_batch_size": (1, 7),
    "seq_len": (128, 1000),
    "packing": ("none",),
    "learning_rate": (1e-5, 1e-3),
    "data_parallel": (1,),
    "sharding": ("none",),
    # The others beside it train the standard recipe's step, but for TRL's.
    "trainer": ("sweep", "trl", "axolotl", "llama-factory"),
}
"""What one GPU trains on random sequences, a setting at a time; all others have their defaults."""
ELSEWHERE: dict[str, str] = {
    "method=grpo": "sweep/export/test_grpo.py",
    "loss_type": "sweep/training/test_preference.py",
    "dpo_beta": "sweep/training/test_preference.py",
    "image_size": "gpu/test_images_on_a_gpu.py",
    "offload_fraction": "gpu/test_experts_on_a_gpu.py",
    "attention=flash_attention_2": "gpu/test_knobs.py",
    "packing=packed": "gpu/test_texts_on_a_gpu.py",
    "packing=grouped": "gpu/test_texts_on_a_gpu.py",
    "data_parallel=2": "gpu/test_two_gpus.py",
    "sharding=fsdp": "gpu/test_two_gpus.py",
    "trainer=unsloth": "bench/unsloth_beside.py",
}
"""What is tried in another file: a value, or all of a setting whose values no kernel sees."""
ON_PAIRS = {"method": "dpo", "micro_batch_size": 2}
"""A pair is two sequences."""


def _each() -> list[dict[str, Any]]:
    cases = []
    for name, values in VALUES.items():
        for value in values:
            is_of_pairs = (name, value) == ("method", "dpo") or name == "reference"
            shared = ON_PAIRS if is_of_pairs else {}
            cases.append({**shared, name: value})
    return cases


CASES: list[dict[str, Any]] = [
    *_each(),
    {**WITHOUT, "upcast_fp32": False},
    {**WITHOUT, **LEAN, "checkpoint_fraction": 0.0},
    {**LEAN, "compute_dtype": "fp16"},
    {"kernels": "fused-loss", "compile": True, "checkpoint_fraction": 0.5},
    {"kernels": "fused-loss", "upcast_fp32": False, "compile": True, "checkpoint_fraction": 0.0},
    {"optimizer": "paged_adamw_8bit", "lora_rank": 64, "target_modules": "all-linear"},
    {"adapter_dtype": "bf16", "optimizer": "adamw_torch_fused", "effective_batch_size": 8},
    {"adapter_dtype": "bf16", **WITHOUT, **LEAN},
    {"adapter_dtype": "bf16", "compute_dtype": "fp32"},
    {"adapter_dtype": "bf16", "compile": True, "lora_dropout": 0.1},
    {"quantized_fraction": 0.5, "upcast_fp32": False, "compile": True, "kernels": "fused-loss"},
    {"quantized_fraction": 0.5, **LEAN, "checkpoint_fraction": 0.5},
    {"checkpoint_offload": True, "compile": True, "kernels": "fused-loss"},
    {"checkpoint_offload": True, "checkpoint_fraction": 0.5, "lora_dropout": 0.1, "compile": True},
    {"checkpoint_offload": True, "compute_dtype": "fp8", "compile": True, "upcast_fp32": False},
]
