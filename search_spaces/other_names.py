"""What settings are called by other trainers, for who types such a name here."""

from __future__ import annotations

from collections.abc import Collection, Mapping

from qlora_sweep.search_spaces.errors import did_you_mean

_SAME = {
    "lora_rank": "r rank lora_r",
    "lora_alpha": "alpha",
    "lora_dropout": "dropout",
    "target_modules": "lora_target lora_target_modules lora_target_linear",
    "micro_batch_size": "batch_size per_device_train_batch_size per_device_batch_size",
    "effective_batch_size": "global_batch_size total_batch_size",
    "seq_len": """
        max_seq_length max_length max_seq_len sequence_len sequence_length cutoff_len block_size
        context_length
    """,
    "quantization": "bnb_4bit_quant_type",
    "double_quant": "bnb_4bit_use_double_quant use_double_quant",
    "compute_dtype": "dtype torch_dtype bnb_4bit_compute_dtype",
    "optimizer": "optim",
    "compile": "torch_compile",
    "attention": "attn_implementation",
    "learning_rate": "lr",
}
"""By setting: of transformers, PEFT, TRL, axolotl, LLaMA-Factory, Unsloth and torchtune."""
_ALIKE = {
    "effective_batch_size": "gradient_accumulation_steps gradient_accumulation grad_accum",
    "quantization": "load_in_4bit load_in_8bit quantization_bit",
    "compute_dtype": "bf16 fp16",
    "checkpoint_fraction": """
        gradient_checkpointing use_gradient_checkpointing activation_checkpointing
    """,
    "offload_fraction": "cpu_offload offload",
    "checkpoint_offload": "activation_offloading gradient_checkpointing_offload",
    "attention": "flash_attn flash_attention use_flash_attention_2",
    "kernels": "use_liger_kernel use_liger liger_kernel",
    "packing": "sample_packing padding_free",
}
"""What says the like in other values."""


def _by_name(names: Mapping[str, str]) -> Mapping[str, str]:
    return {other: name for name, others in names.items() for other in others.split()}


SAME = _by_name(_SAME)
ALIKE = _by_name(_ALIKE)


def meant(word: str, known: Collection[str], *, lists: str) -> str:
    """Return how a setting is called here that was typed by another trainer's name, or which one
    says the like; else the nearest known word, as `did_you_mean` does.

    Args:
        word: that was typed.
        known: names that may be typed.
        lists: what lists them.
    """
    typed = word.strip().lower()
    name = SAME.get(typed)
    if name in known:
        return f"; here it is called '{name}'"
    name = ALIKE.get(typed)
    if name in known:
        return f"; here it is a matter of '{name}', whose values are others"
    return did_you_mean(word, known, lists=lists)
