"""How other trainers spell each setting of a configuration, and what of it they cannot express.

Option names and what they do were read in TRL's configuration classes and its SFTTrainer, in
axolotl's configuration schema and loaders, in LLaMA-Factory's argument classes and loaders, and in
Unsloth's loaders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Iterator, Mapping
from typing import Any, Literal

from search_spaces.config import TORCH_DTYPES, allocator_settings, liger_kernels
from sweep.export.record import Record

Trainer = Literal["trl", "axolotl", "llama-factory", "unsloth"]
TRAINERS: tuple[Trainer, ...] = ("trl", "axolotl", "llama-factory")
"""Those that read options from a file; Unsloth is called by a script."""

Spelled = str | Callable[[Record], Mapping[str, Any]]
"""The option that takes a setting's value, or what returns the options to write instead."""


def _trl_targets(recipe: Record) -> dict[str, Any]:
    """Of a list of one TRL makes a text, which PEFT takes for a pattern of the whole path."""
    names = recipe.target_modules
    if names is None:
        return {"lora_target_modules": ["all-linear"]}
    one = len(names) == 1
    return {"lora_target_modules": [rf"(.*\.)?{re.escape(names[0])}"] if one else list(names)}


def _mixed_precision(recipe: Record) -> dict[str, Any]:
    """Trainer, and all that build on it, share two switches."""
    return {"bf16": recipe.dtype == "bf16", "fp16": recipe.dtype == "fp16"}


def _trl_quantization(recipe: Record) -> dict[str, Any]:
    config = recipe.config
    if not config.is_4bit:
        return {"load_in_4bit": False, "load_in_8bit": config.is_quantized}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": config.quantization,
        "use_bnb_nested_quant": config.double_quant,
    }


def _axolotl_quantization(recipe: Record) -> dict[str, Any]:
    config = recipe.config
    if not config.is_4bit:
        return {"adapter": "lora", "load_in_4bit": False, "load_in_8bit": config.is_quantized}
    details = {
        "bnb_4bit_quant_type": config.quantization,
        "bnb_4bit_use_double_quant": config.double_quant,
    }
    return {"adapter": "qlora", "load_in_4bit": True, "bnb_config_kwargs": details}


def _llama_factory_quantization(recipe: Record) -> dict[str, Any]:
    config = recipe.config
    if not config.is_quantized:
        return {}
    if not config.is_4bit:
        return {"quantization_method": "bnb", "quantization_bit": 8}
    return {
        "quantization_method": "bnb",
        "quantization_bit": 4,
        "quantization_type": config.quantization,
        "double_quantization": config.double_quant,
    }


def _every_nth(recipe: Record) -> int | None:
    """Return n where each n-th layer is recomputed, the first included; None elsewhere."""
    layers = recipe.layers
    steps = range(2, layers + 1)
    return next((n for n in steps if recipe.recomputed == tuple(range(0, layers, n))), None)


def _checkpointing(recipe: Record, *, every: int | None = None) -> dict[str, Any]:
    """All layers or none; TRL can recompute each n-th too."""
    if not recipe.recomputed:
        return {"gradient_checkpointing": False}
    kwargs = {"use_reentrant": False} | ({} if every is None else {"every_n_layers": every})
    return {"gradient_checkpointing": True, "gradient_checkpointing_kwargs": kwargs}


def _trl_kernels(recipe: Record) -> dict[str, Any]:
    """Its own head computes the loss in chunks, and it refuses Liger's."""
    if recipe.config.kernels != "liger":
        return {}
    layers = {**(liger_kernels("liger") or {}), "fused_linear_cross_entropy": False}
    return {"use_liger_kernel": True, "liger_kernel_config": layers}


def _axolotl_kernels(recipe: Record) -> dict[str, Any]:
    measured = liger_kernels(recipe.config.kernels)
    if measured is None:
        return {}
    return {
        "plugins": ["axolotl.integrations.liger.LigerPlugin"],
        "liger_fused_linear_cross_entropy": measured["fused_linear_cross_entropy"],
        "liger_rms_norm": measured["rms_norm"],
        "liger_glu_activation": measured["swiglu"],
        "liger_rope": measured["rope"],
    }


def _trl_packing(recipe: Record) -> dict[str, Any]:
    """``wrapped`` joins texts and cuts them at max_length, so that rows are full and every token
    carries loss; ``bfd`` keeps each example whole and apart."""
    if recipe.texts_kind is None:
        return {"packing": True, "packing_strategy": "wrapped"}
    known: Mapping[str, dict[str, Any]] = {
        "packed": {"packing": True, "packing_strategy": "bfd"},
        "grouped": {"packing": False, "train_sampling_strategy": "group_by_length"},
    }
    return known.get(recipe.config.packing, {"packing": False})


def _axolotl_packing(recipe: Record) -> dict[str, Any]:
    """It has no full rows of joined texts: packed, with texts kept apart, are the nearest."""
    packs = recipe.texts_kind is None or recipe.config.packing == "packed"
    by_length = {"group_by_length": True} if recipe.config.packing == "grouped" else {}
    return {"sample_packing": packs, "pad_to_sequence_len": packs, **by_length}


def _llama_factory_packing(recipe: Record) -> dict[str, Any]:
    """Stage pt joins texts where nothing is said, and makes rows a token shorter where it is told
    to; in the other stage `neat_packing` keeps texts apart."""
    packing = recipe.config.packing
    if recipe.texts_kind is None or (packing == "packed" and recipe.texts_kind == "text"):
        return {}
    if packing == "packed":
        return {"packing": True, "neat_packing": True}
    return _trl_packing(recipe)


def _parallel(recipe: Record) -> dict[str, Any]:
    """Trainer looks for parameters without a gradient, and sends buffers that never change, where
    nobody tells it that there is no need."""
    if recipe.config.data_parallel == 1:
        return {}
    return {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}


# What all three read alike. Trainers take a whole alpha alone, and count micro-batches.
_ALIKE: Mapping[str, Spelled] = {
    "lora_alpha": lambda recipe: {"lora_alpha": max(1, round(recipe.config.alpha))},
    "lora_dropout": "lora_dropout",
    "effective_batch_size": lambda recipe: {
        "gradient_accumulation_steps": recipe.config.accumulation_steps
    },
    "learning_rate": "learning_rate",
    "data_parallel": _parallel,
}
SPELLED: Mapping[Trainer, Mapping[str, Spelled]] = {
    "trl": {
        **_ALIKE,
        "lora_rank": "lora_r",
        "target_modules": _trl_targets,
        "micro_batch_size": "per_device_train_batch_size",
        "seq_len": "max_length",
        "compute_dtype": lambda recipe: {
            "dtype": TORCH_DTYPES[recipe.dtype],
            **_mixed_precision(recipe),
        },
        "quantization": _trl_quantization,
        "checkpoint_fraction": lambda recipe: _checkpointing(recipe, every=_every_nth(recipe)),
        "kernels": _trl_kernels,
        "attention": "attn_implementation",
        "optimizer": "optim",
        "packing": _trl_packing,
    },
    "axolotl": {
        **_ALIKE,
        "lora_rank": "lora_r",
        "target_modules": lambda recipe: (
            {"lora_target_linear": True}
            if recipe.target_modules is None
            else {"lora_target_modules": list(recipe.target_modules)}
        ),
        "micro_batch_size": "micro_batch_size",
        "seq_len": "sequence_len",
        "compute_dtype": _mixed_precision,
        "quantization": _axolotl_quantization,
        # PEFT leaves the adapters of a quantized base in fp32, whatever it is asked.
        "adapter_dtype": lambda recipe: (
            {}
            if recipe.config.adapter_dtype == "fp32" or recipe.config.is_quantized
            else {"peft_autocast_adapter_dtype": False}
        ),
        "checkpoint_fraction": _checkpointing,
        "kernels": _axolotl_kernels,
        "attention": "attn_implementation",
        "optimizer": "optimizer",
        "packing": _axolotl_packing,
    },
    "llama-factory": {
        **_ALIKE,
        "lora_rank": "lora_rank",
        "target_modules": lambda recipe: {
            "lora_target": ",".join(recipe.target_modules or ["all"])
        },
        "micro_batch_size": "per_device_train_batch_size",
        "seq_len": "cutoff_len",
        "compute_dtype": _mixed_precision,
        "quantization": _llama_factory_quantization,
        "checkpoint_fraction": lambda recipe: {
            "disable_gradient_checkpointing": not recipe.recomputed,
            "use_reentrant_gc": False,
        },
        "upcast_fp32": "upcast_layernorm",
        "kernels": lambda recipe: {"enable_liger_kernel": recipe.config.kernels != "hf"},
        "attention": lambda recipe: {
            "flash_attn": {"flash_attention_2": "fa2", "eager": "disabled"}.get(
                recipe.config.attention, "sdpa"
            )
        },
        "optimizer": "optim",
        "packing": _llama_factory_packing,
    },
}
"""Of each trainer that reads a file: a setting's option or options, by the setting's key."""


def variables(recipe: Record, trainer: Trainer) -> dict[str, str]:
    """Return the variables that a trainer has to be started with.

    Fixed segments are what torch has where nothing is said; axolotl sets expandable ones itself.
    LLaMA-Factory takes every GPU in sight, a process each, where it is not told how many.
    """
    config = recipe.config
    found: dict[str, str] = {}
    if trainer == "axolotl" or config.expandable_segments:
        found |= allocator_settings(config.expandable_segments)
    if trainer == "llama-factory" and config.data_parallel > 1:
        found |= {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(config.data_parallel)}
    return found


def unsloth_loading(recipe: Record) -> dict[str, bool]:
    """It has a switch for each kind of base, and takes 4 bits where they are not switched off."""
    kinds = {"none": "load_in_16bit", "fp8": "load_in_fp8", "int8": "load_in_8bit"}
    chosen = kinds.get(recipe.config.quantization, "load_in_4bit")
    # It makes FP8 only where a name may also stand for a copy of its own.
    return {"load_in_4bit": False, chosen: True, "use_exact_model_name": chosen != "load_in_fp8"}


# What is lost


def lost_settings(recipe: Record, trainer: Trainer) -> Iterator[tuple[str, str]]:
    """Yield settings of which a trainer cannot express what was measured, in order, each with what
    it cannot and what its file does instead."""
    for key, lost in _LOST.items():
        if (sentence := lost(recipe, trainer)) is not None:
            yield key, sentence


def _lost_alpha(recipe: Record, trainer: Trainer) -> str | None:
    alpha = recipe.config.alpha
    whole = max(1, round(alpha))
    if trainer == "unsloth" or whole == alpha:
        return None
    return (
        f"lora_alpha {alpha:g}: it takes whole numbers only, so {whole} here. Neither memory nor "
        "speed depends on it."
    )


def _lost_precision(recipe: Record, trainer: Trainer) -> str | None:
    if trainer == "llama-factory" and recipe.config.compute_dtype == "fp32":
        return (
            "compute_dtype fp32: it cannot be asked for. Without bf16 and fp16 it infers a dtype "
            "from the checkpoint and the GPU."
        )
    if not recipe.config.is_8bit_compute:
        return None
    return (
        "compute_dtype: it has no 8-bit products forward and backward, so it is slower than "
        "measured and rounds otherwise. Format script computes as measured."
    )


def _lost_quantization(recipe: Record, trainer: Trainer) -> str | None:
    config = recipe.config
    if trainer == "unsloth" and config.quantization == "fp8":
        return (
            "quantization fp8: its FP8 is for the forward pass, and for the gradient it decodes "
            "the weights. It needs torchao 0.15 and compute capability 9.0, and of a hub id it may "
            "take an FP8 copy of its own: name a directory."
        )
    if config.weight_bits == 8:
        return (
            "quantization: it has bitsandbytes' LLM.int8() in place of the measured 8 bits: "
            "weights in int8, as many bytes, products in int8 forward, with outliers apart, and in "
            "16 bits backward: other rounding, and another speed. Format script does as measured."
        )
    is_its_own = config.quantization == "nf4" and config.double_quant
    if trainer == "unsloth" and config.is_4bit and not is_its_own:
        return "4 bits: it has nf4 with double quantization alone, so that here."
    return None


def _lost_quantized_layers(recipe: Record, _: Trainer) -> str | None:
    config, layers = recipe.config, recipe.layers
    if not config.is_quantized or config.quantized_count(layers) == layers:
        return None
    return (
        f"quantized_fraction {config.quantized_fraction:g}: it quantizes every layer or none, so "
        "every one here: less memory than measured, and slower. Format script does as measured."
    )


def lost_adapters(recipe: Record, trainer: Trainer) -> str | None:
    """Return in which type a trainer holds adapters that were measured in another."""
    measured, is_quantized = recipe.config.adapter_dtype, recipe.config.is_quantized
    if trainer == "trl":
        # It casts the adapters of a quantized base to bf16; PEFT widens those of a 16-bit one.
        kept, base = ("bf16", "quantized") if is_quantized else ("fp32", "16-bit")
        if measured == kept:
            return None
        return (
            f"Adapters: on a {base} base it keeps them in {kept}; they were measured in {measured}."
        )
    if measured == "fp32" or (trainer == "axolotl" and not is_quantized):
        return None
    where = "on a quantized base" if trainer == "axolotl" else "with mixed precision"
    return f"adapter_dtype bf16: {where} it keeps them in fp32: more memory than measured."


def _lost_layers(recipe: Record, trainer: Trainer) -> str | None:
    if trainer == "trl" and _every_nth(recipe) is not None:
        return "every_n_layers: transformers 5.17 knows it; older releases may not."
    if not 0 < len(recipe.recomputed) < recipe.layers:
        return None
    return (
        f"checkpoint_fraction {recipe.config.checkpoint_fraction:g}: it recomputes all layers or "
        "none, so all here: less memory than measured, and slower."
    )


def _lost_upcast(recipe: Record, trainer: Trainer) -> str | None:
    if not recipe.config.upcast_fp32:
        return None
    if trainer == "llama-factory":
        return (
            "upcast_fp32 true: it puts the norms in fp32 and leaves embeddings and head in the "
            "compute dtype: memory and speed differ from what was measured."
        )
    return (
        "upcast_fp32 true: norms, embeddings and head are in the compute dtype: less memory than "
        "measured, and faster."
    )


_TRL_LOST_KERNELS = {
    "hf": "kernels hf: TRL 1.15 and later compute the loss in chunks by a head of their own, "
    "whatever loss_type says: less memory than measured, and another speed.",
    "fused-loss": "kernels fused-loss: it refuses Liger's, and its own head computes the loss in "
    "chunks in its place: memory and speed differ a little from what was measured.",
    "liger": "kernels liger: it refuses Liger's fused loss, so Liger's layers and its own head, "
    "which computes the loss in chunks: memory and speed differ a little from what was measured.",
}


def _lost_kernels(recipe: Record, trainer: Trainer) -> str | None:
    config = recipe.config
    if trainer == "trl":
        return _TRL_LOST_KERNELS[config.kernels]
    if trainer == "llama-factory" and config.kernels == "fused-loss":
        return (
            "kernels fused-loss: it has Liger's whole set or none, so the whole set here: fused "
            "loss, RMSNorm, SwiGLU and RoPE."
        )
    if trainer == "unsloth":
        return (
            f"kernels {config.kernels}, attention {config.attention}, compile {config.compile}: it "
            "has kernels of its own, takes the attention that is installed, compiles what it "
            "chooses, and joins padded rows without their padding: memory and speed differ from "
            "what was measured."
        )
    return None


def _lost_compile(recipe: Record, trainer: Trainer) -> str | None:
    if trainer == "unsloth" or not recipe.config.compile:
        return None
    return (
        "compile true: each decoder layer was compiled by itself, and it compiles the model as a "
        "whole or not at all. Not at all here, so a step takes longer and needs MORE memory than "
        "measured: it may not fit. Format script compiles as measured."
    )


_MASKED = (
    "Padded rows: it passes a mask with them, so attention may be slower than measured, which was "
    "without one."
)


def _lost_packing(recipe: Record, trainer: Trainer) -> str | None:
    config, kind = recipe.config, recipe.texts_kind
    if trainer == "unsloth":
        return None
    if kind is not None and config.packing != "packed":
        older = " transformers 4 has group_by_length in place of the option below."
        is_named = trainer == "llama-factory" and config.packing == "grouped"
        return _MASKED + (older if is_named else "")
    if trainer == "axolotl":
        rows = (
            "packing packed: it fills rows by another rule than the one measured."
            if kind
            else "Rows: it packs texts with attention kept inside each of them; measured were full "
            "rows with attention over the whole row."
        )
        if config.attention != "sdpa" or recipe.dtype != "bf16":
            return rows
        return f"{rows} On GPUs before Hopper it warns that sdpa in bf16 may then give a loss of 0."
    if kind is None:
        return None
    if trainer == "llama-factory":
        return (
            "packing packed: of plain texts it makes full rows in which they see one another; "
            "measured were whole texts, kept apart."
            if kind == "text"
            else "packing packed: it fills rows by another rule than the one measured, and leaves "
            "out what is longer than one."
        )
    if config.attention == "flash_attention_2" or config.micro_batch_size == 1:
        return None
    return (
        "packing packed: it joins the rows of a micro-batch to one long row, for which attention "
        f"{config.attention} masks texts from one another in a matrix of all its tokens: more "
        "memory than measured, and slower."
    )


def lost_sharding(recipe: Record, _: Trainer | None = None) -> str | None:
    """Return what a file does not say of FSDP: it would have to name wrapping policies and state
    dicts, which nobody has tried here."""
    if not recipe.config.is_sharded:
        return None
    return (
        "sharding fsdp: the file does not ask for it, so every GPU holds the whole model: far more "
        "memory than measured, and it may not fit. Add fsdp_version 2 with 4-bit weights stored in "
        "the compute dtype (bnb_4bit_quant_storage), as bitsandbytes documents it."
    )


_LOST: Mapping[str, Callable[[Record, Trainer], str | None]] = {
    "lora_alpha": _lost_alpha,
    "compute_dtype": _lost_precision,
    "quantization": _lost_quantization,
    "quantized_fraction": _lost_quantized_layers,
    "adapter_dtype": lost_adapters,
    "checkpoint_fraction": _lost_layers,
    "upcast_fp32": _lost_upcast,
    "kernels": _lost_kernels,
    "compile": _lost_compile,
    "packing": _lost_packing,
    "sharding": lost_sharding,
}
