"""How other trainers spell a setting, where that is more than one option that takes its value.

`search_spaces.knobs` says which of this belongs to which setting. Option names and what they do
were read in TRL's configuration classes and its SFTTrainer, in axolotl's configuration schema and
loaders, in LLaMA-Factory's argument classes and loaders, and in Unsloth's loaders.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol

Trainer = Literal["trl", "axolotl", "llama-factory", "unsloth"]
TRAINERS: tuple[Trainer, ...] = ("trl", "axolotl", "llama-factory")
"""Those that read options from a file; Unsloth is called by a script."""


class Trained(Protocol):
    """A configuration on its model, as a trainer's file has to say it."""

    @property
    def config(self) -> Any:
        """What was measured: a value for each setting, by its key."""

    @property
    def dtype(self) -> str:
        """Of matrix products, where none is in 8 bits; beside 8-bit ones, of all else."""

    @property
    def model_type(self) -> str:
        """What transformers calls the architecture."""

    @property
    def layers(self) -> int:
        """Number of decoder layers."""

    @property
    def target_modules(self) -> tuple[str, ...] | None:
        """Names of the layers with an adapter; None for every linear layer of a model type whose
        layers' names nobody knows."""

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Decoder layers whose activations are recomputed, in order."""

    @property
    def texts_kind(self) -> str | None:
        """What the rows of the texts are; None where full random rows were trained on."""


Options = Callable[[Trained], Mapping[str, Any]]
"""What to write of a setting: options of the trainer by name."""
Lost = Callable[[Trained], str | None]
"""What of a setting a trainer cannot express, and what its file does instead; None: nothing."""


def _says(sentence: str, **values: Any) -> Lost:
    """Return what says ``sentence`` of configurations with these values."""
    wanted = values.items()
    return lambda trained: (
        sentence if all(getattr(trained.config, key) == value for key, value in wanted) else None
    )


# Adapters


def whole_alpha(trained: Trained) -> dict[str, int]:
    """Every trainer takes whole numbers alone."""
    return {"lora_alpha": max(1, round(trained.config.alpha))}


def lost_alpha(trained: Trained) -> str | None:
    """Say so where the scale is no whole number."""
    asked, (written,) = trained.config.alpha, whole_alpha(trained).values()
    if written == asked:
        return None
    return (
        f"lora_alpha {asked:g}: it takes whole numbers only, so {written} here. Neither memory nor "
        "speed depends on it."
    )


def trl_targets(trained: Trained) -> dict[str, Any]:
    """PEFT finds the layers where their names are not known.

    Of a list of one TRL makes a text, which PEFT takes for a pattern of the whole path.
    """
    names = trained.target_modules
    if names is None:
        return {"lora_target_modules": ["all-linear"]}
    if len(names) == 1:
        return {"lora_target_modules": [rf"(.*\.)?{re.escape(names[0])}"]}
    return {"lora_target_modules": list(names)}


def axolotl_targets(trained: Trained) -> dict[str, Any]:
    """Every linear layer of an unknown model has an option of its own."""
    names = trained.target_modules
    return {"lora_target_linear": True} if names is None else {"lora_target_modules": list(names)}


def llama_factory_targets(trained: Trained) -> dict[str, Any]:
    """Names are one text."""
    names = trained.target_modules
    return {"lora_target": "all" if names is None else ",".join(names)}


def axolotl_adapter_dtype(trained: Trained) -> dict[str, Any]:
    """PEFT leaves the adapters of a quantized base in fp32, whatever it is asked."""
    if trained.config.adapter_dtype == "fp32" or trained.config.is_quantized:
        return {}
    return {"peft_autocast_adapter_dtype": False}


def trl_lost_adapter_dtype(trained: Trained) -> str | None:
    """TRL casts the adapters of a quantized base to bf16; PEFT widens those of a 16-bit one."""
    measured, is_quantized = trained.config.adapter_dtype, trained.config.is_quantized
    kept = "bf16" if is_quantized else "fp32"
    if measured == kept:
        return None
    base = "quantized" if is_quantized else "16-bit"
    return f"Adapters: on a {base} base it keeps them in {kept}; they were measured in {measured}."


axolotl_lost_adapter_dtype = _says(
    "adapter_dtype bf16: on a quantized base it keeps them in fp32: more memory than measured.",
    adapter_dtype="bf16",
    is_quantized=True,
)
lost_bf16_adapters = _says(
    "adapter_dtype bf16: with mixed precision it keeps them in fp32: more memory than measured.",
    adapter_dtype="bf16",
)


# The base


def mixed_precision(trained: Trained) -> dict[str, Any]:
    """Trainer, and all that build on it, share two switches."""
    return {"bf16": trained.dtype == "bf16", "fp16": trained.dtype == "fp16"}


TORCH_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What torch calls a dtype."""


def trl_precision(trained: Trained) -> dict[str, Any]:
    """The dtype in which the base is loaded is an option beside the two switches."""
    return {"dtype": TORCH_DTYPES[trained.dtype], **mixed_precision(trained)}


lost_8bit_compute = _says(
    "compute_dtype: it has no 8-bit products forward and backward, so it is slower than measured "
    "and rounds otherwise. Format script computes as measured.",
    is_8bit_compute=True,
)


def llama_factory_lost_precision(trained: Trained) -> str | None:
    """It has no option for fp32."""
    if trained.config.compute_dtype != "fp32":
        return lost_8bit_compute(trained)
    return (
        "compute_dtype fp32: it cannot be asked for. Without bf16 and fp16 it infers a dtype from "
        "the checkpoint and the GPU."
    )


lost_8bit_base = _says(
    "quantization: it has bitsandbytes' LLM.int8() in place of the measured 8 bits: weights in "
    "int8, as many bytes, products in int8 forward, with outliers apart, and in 16 bits backward: "
    "other rounding, and another speed. Format script does as measured.",
    weight_bits=8,
)


def trl_quantization(trained: Trained) -> dict[str, Any]:
    """TRL hands its own names to bitsandbytes."""
    if not trained.config.is_4bit:
        return {"load_in_4bit": False, "load_in_8bit": trained.config.is_quantized}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": trained.config.quantization,
        "use_bnb_nested_quant": trained.config.double_quant,
    }


def axolotl_quantization(trained: Trained) -> dict[str, Any]:
    """QLoRA is a kind of adapter, and what bitsandbytes is told a dictionary."""
    if not trained.config.is_4bit:
        is_8bit = trained.config.is_quantized
        return {"adapter": "lora", "load_in_4bit": False, "load_in_8bit": is_8bit}
    details = {
        "bnb_4bit_quant_type": trained.config.quantization,
        "bnb_4bit_use_double_quant": trained.config.double_quant,
    }
    return {"adapter": "qlora", "load_in_4bit": True, "bnb_config_kwargs": details}


def llama_factory_quantization(trained: Trained) -> dict[str, Any]:
    """An option that is left out means a 16-bit base."""
    if not trained.config.is_quantized:
        return {}
    if not trained.config.is_4bit:
        return {"quantization_method": "bnb", "quantization_bit": 8}
    return {
        "quantization_method": "bnb",
        "quantization_bit": 4,
        "quantization_type": trained.config.quantization,
        "double_quantization": trained.config.double_quant,
    }


def lost_quantized_layers(trained: Trained) -> str | None:
    """bitsandbytes can be told of modules to leave alone; no trainer's file passes that on."""
    config, layers = trained.config, trained.layers
    if not config.is_quantized or config.quantized_count(layers) == layers:
        return None
    return (
        f"quantized_fraction {config.quantized_fraction:g}: it quantizes every layer or none, so "
        "every one here: less memory than measured, and slower. Format script does as measured."
    )


lost_upcast = _says(
    "upcast_fp32 true: norms, embeddings and head are in the compute dtype: less memory than "
    "measured, and faster.",
    upcast_fp32=True,
)
llama_factory_lost_upcast = _says(
    "upcast_fp32 true: it puts the norms in fp32 and leaves embeddings and head in the compute "
    "dtype: memory and speed differ from what was measured.",
    upcast_fp32=True,
)


# The step


def accumulation(trained: Trained) -> dict[str, Any]:
    """Trainers count micro-batches, not sequences."""
    return {"gradient_accumulation_steps": trained.config.accumulation_steps}


def recomputation(trained: Trained) -> dict[str, Any]:
    """All layers or none."""
    if not trained.recomputed:
        return {"gradient_checkpointing": False}
    return {
        "gradient_checkpointing": True,
        "gradient_checkpointing_kwargs": {"use_reentrant": False},
    }


def trl_recomputation(trained: Trained) -> dict[str, Any]:
    """Each n-th layer can be recomputed too."""
    options, every = recomputation(trained), _every_nth(trained)
    if every is not None:
        options["gradient_checkpointing_kwargs"]["every_n_layers"] = every
    return options


def _every_nth(trained: Trained) -> int | None:
    """Return n where some layers are recomputed: each n-th, the first included. None elsewhere."""
    layers = trained.layers
    steps = range(2, layers + 1)
    return next((n for n in steps if trained.recomputed == tuple(range(0, layers, n))), None)


def llama_factory_recomputation(trained: Trained) -> dict[str, Any]:
    """All layers or none, and the switch is the other way round."""
    return {"disable_gradient_checkpointing": not trained.recomputed, "use_reentrant_gc": False}


def lost_layers(trained: Trained) -> str | None:
    """See `recomputation`."""
    if not 0 < len(trained.recomputed) < trained.layers:
        return None
    return (
        f"checkpoint_fraction {trained.config.checkpoint_fraction:g}: it recomputes all layers or "
        "none, so all here: less memory than measured, and slower."
    )


def trl_lost_layers(trained: Trained) -> str | None:
    """See `trl_recomputation`."""
    if _every_nth(trained) is None:
        return lost_layers(trained)
    return "every_n_layers: transformers 5.17 knows it; older releases may not."


def liger_kernels(kernels: str) -> dict[str, bool] | None:
    """Return which of Liger's kernels were measured, by Liger's names; None where none were."""
    if kernels == "hf":
        return None
    everything = kernels == "liger"
    return {
        "fused_linear_cross_entropy": True,
        "cross_entropy": False,
        "rms_norm": everything,
        # Of the two activations a model has one; the other's switch does nothing.
        "swiglu": everything,
        "geglu": everything,
        "rope": everything,
    }


def trl_kernels(trained: Trained) -> dict[str, Any]:
    """Its own head computes the loss in chunks, and it refuses Liger's; of that only the layers'
    kernels are left."""
    measured = liger_kernels(trained.config.kernels)
    if measured is None or trained.config.kernels == "fused-loss":
        return {}
    layers = {**measured, "fused_linear_cross_entropy": False}
    return {"use_liger_kernel": True, "liger_kernel_config": layers}


_AXOLOTL_LIGER = {
    "fused_linear_cross_entropy": "liger_fused_linear_cross_entropy",
    "rms_norm": "liger_rms_norm",
    "swiglu": "liger_glu_activation",
    "rope": "liger_rope",
}


def axolotl_kernels(trained: Trained) -> dict[str, Any]:
    """A plugin with an option for each kernel."""
    measured = liger_kernels(trained.config.kernels)
    if measured is None:
        return {}
    switches = {option: measured[name] for name, option in _AXOLOTL_LIGER.items()}
    return {"plugins": ["axolotl.integrations.liger.LigerPlugin"], **switches}


def llama_factory_kernels(trained: Trained) -> dict[str, Any]:
    """The whole set or none."""
    return {"enable_liger_kernel": trained.config.kernels != "hf"}


_TRL_LOST_KERNELS = {
    "hf": "kernels hf: TRL 1.15 and later compute the loss in chunks by a head of their own, "
    "whatever loss_type says: less memory than measured, and another speed.",
    "fused-loss": "kernels fused-loss: it refuses Liger's, and its own head computes the loss in "
    "chunks in its place: memory and speed differ a little from what was measured.",
    "liger": "kernels liger: it refuses Liger's fused loss, so Liger's layers and its own head, "
    "which computes the loss in chunks: memory and speed differ a little from what was measured.",
}


def trl_lost_kernels(trained: Trained) -> str:
    """See `trl_kernels`."""
    return _TRL_LOST_KERNELS[trained.config.kernels]


llama_factory_lost_kernels = _says(
    "kernels fused-loss: it has Liger's whole set or none, so the whole set here: fused loss, "
    "RMSNorm, SwiGLU and RoPE.",
    kernels="fused-loss",
)


_LLAMA_FACTORY_ATTENTION = {"sdpa": "sdpa", "flash_attention_2": "fa2", "eager": "disabled"}


def llama_factory_attention(trained: Trained) -> dict[str, Any]:
    """It has names of its own."""
    return {"flash_attn": _LLAMA_FACTORY_ATTENTION[trained.config.attention]}


lost_compile = _says(
    "compile true: each decoder layer was compiled by itself, and it compiles the model as a whole "
    "or not at all. Not at all here, so a step takes longer and needs MORE memory than measured: "
    "it may not fit. Format script compiles as measured.",
    compile=True,
)


# The rows


def trl_packing(trained: Trained) -> dict[str, Any]:
    """Texts joined and cut at max_length make full rows, in which every token carries loss; ``bfd``
    keeps each text whole and apart."""
    if trained.texts_kind is None:
        return {"packing": True, "packing_strategy": "wrapped"}
    match trained.config.packing:
        case "packed":
            return {"packing": True, "packing_strategy": "bfd"}
        case "grouped":
            return {"packing": False, "train_sampling_strategy": "group_by_length"}
        case _:
            return {"packing": False}


def axolotl_packing(trained: Trained) -> dict[str, Any]:
    """It has no full rows of joined texts: packed, with texts kept apart, are the nearest."""
    packs = trained.texts_kind is None or trained.config.packing == "packed"
    options: dict[str, Any] = {"sample_packing": packs, "pad_to_sequence_len": packs}
    if trained.config.packing == "grouped":
        options["group_by_length"] = True
    return options


def llama_factory_packing(trained: Trained) -> dict[str, Any]:
    """Stage pt joins texts where nothing is said, and makes rows a token shorter where it is told
    to; in the other stage `neat_packing` keeps texts apart."""
    if trained.texts_kind is None:
        return {}
    match trained.config.packing:
        case "packed" if trained.texts_kind == "text":
            return {}
        case "packed":
            return {"packing": True, "neat_packing": True}
        case "grouped":
            return {"packing": False, "train_sampling_strategy": "group_by_length"}
        case _:
            return {"packing": False}


def _padded(trained: Trained) -> bool:
    return trained.texts_kind is not None and trained.config.packing != "packed"


_MASKED = (
    "Padded rows: it passes a mask with them, so attention may be slower than measured, which was "
    "without one."
)


def trl_lost_packing(trained: Trained) -> str | None:
    """Its padding-free batches are one long row."""
    if _padded(trained):
        return _MASKED
    if trained.texts_kind is None or trained.config.attention == "flash_attention_2":
        return None
    if trained.config.micro_batch_size == 1:
        return None
    return (
        "packing packed: it joins the rows of a micro-batch to one long row, for which attention "
        f"{trained.config.attention} masks texts from one another in a matrix of all its tokens: "
        "more memory than measured, and slower."
    )


def axolotl_lost_packing(trained: Trained) -> str | None:
    """Its packing is called multipack."""
    if _padded(trained):
        return _MASKED
    if trained.texts_kind is None:
        rows = (
            "Rows: it packs texts with attention kept inside each of them; measured were full rows "
            "with attention over the whole row."
        )
    else:
        rows = "packing packed: it fills rows by another rule than the one measured."
    config = trained.config
    if config.attention != "sdpa" or trained.dtype != "bf16":
        return rows
    return f"{rows} On GPUs before Hopper it warns that sdpa in bf16 may then give a loss of 0."


def llama_factory_lost_packing(trained: Trained) -> str | None:
    """See `llama_factory_packing`."""
    if trained.texts_kind is None:
        return None
    match trained.config.packing:
        case "packed" if trained.texts_kind == "text":
            return (
                "packing packed: of plain texts it makes full rows in which they see one another; "
                "measured were whole texts, kept apart."
            )
        case "packed":
            return (
                "packing packed: it fills rows by another rule than the one measured, and leaves "
                "out what is longer than one."
            )
        case "grouped":
            return f"{_MASKED} transformers 4 has group_by_length in place of the option below."
        case _:
            return _MASKED


# The GPUs


def parallel(trained: Trained) -> dict[str, Any]:
    """Trainer looks for parameters without a gradient, and sends buffers that never change, where
    nobody tells it that there is no need."""
    if trained.config.data_parallel == 1:
        return {}
    return {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}


def llama_factory_processes(trained: Trained) -> dict[str, str]:
    """It takes every GPU in sight, one process each, where it is not told how many."""
    cards = trained.config.data_parallel
    return {} if cards == 1 else {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(cards)}


def lost_sharding(trained: Trained) -> str | None:
    """A file would have to name wrapping policies and state dicts, which nobody has tried here."""
    if trained.config.sharding == "none":
        return None
    return (
        "sharding fsdp: the file does not ask for it, so every GPU holds the whole model: far "
        "more memory than measured, and it may not fit. Add fsdp_version 2 with 4-bit weights "
        "stored in the compute dtype (bnb_4bit_quant_storage), as bitsandbytes documents it."
    )


# Unsloth


def unsloth_loading(trained: Trained) -> dict[str, bool]:
    """It has a switch for each kind of base, and takes 4 bits where they are not switched off."""
    kinds = {"none": "load_in_16bit", "fp8": "load_in_fp8", "int8": "load_in_8bit"}
    chosen = kinds.get(trained.config.quantization, "load_in_4bit")
    # It makes FP8 only where a name may also stand for a copy of its own.
    return {"load_in_4bit": False, chosen: True, "use_exact_model_name": chosen != "load_in_fp8"}


def unsloth_lost_quantization(trained: Trained) -> str | None:
    """It has nf4 with double quantization, FP8 by torchao, and LLM.int8()."""
    config = trained.config
    if config.quantization == "fp8":
        return (
            "quantization fp8: its FP8 is for the forward pass, and for the gradient it decodes "
            "the weights. It needs torchao 0.15 and compute capability 9.0, and of a hub id it may "
            "take an FP8 copy of its own: name a directory."
        )
    if not config.is_4bit or (config.quantization == "nf4" and config.double_quant):
        return lost_8bit_base(trained)
    return "4 bits: it has nf4 with double quantization alone, so that here."


def unsloth_lost_kernels(trained: Trained) -> str:
    """It patches a model when it loads it."""
    config = trained.config
    return (
        f"kernels {config.kernels}, attention {config.attention}, compile {config.compile}: it has "
        "kernels of its own, takes the attention that is installed, compiles what it chooses, and "
        "joins padded rows without their padding: memory and speed differ from what was measured."
    )


# The process


def allocator_settings(is_expandable: bool) -> dict[str, str]:
    """Return the variables that torch reads its allocator's settings from, when it is imported."""
    return {"PYTORCH_ALLOC_CONF": f"expandable_segments:{is_expandable}"}


def allocator_environment(trained: Trained) -> dict[str, str]:
    """Fixed segments are what torch has when nothing is said."""
    is_expandable: bool = trained.config.expandable_segments
    return allocator_settings(is_expandable) if is_expandable else {}


def axolotl_allocator_environment(trained: Trained) -> dict[str, str]:
    """It sets expandable segments itself where the variable is not there."""
    return allocator_settings(trained.config.expandable_segments)
