"""Owns how other trainers spell a knob, where that is more than one option that takes its value.

`search_spaces.knobs` says which of this belongs to which knob. Option names and what they do were
read in TRL's configuration classes and its SFTTrainer, in axolotl's configuration schema and
loaders, and in LLaMA-Factory's argument classes and loaders. Knows nothing of files.
"""

from __future__ import annotations

import re
from collections.abc import Callable, Mapping
from typing import Any, Literal, Protocol, get_args

Trainer = Literal["trl", "axolotl", "llama-factory"]
TRAINERS: tuple[Trainer, ...] = get_args(Trainer)


class Trained(Protocol):
    """A configuration on its model, as a trainer's file has to say it."""

    @property
    def config(self) -> Any:
        """What was measured: a value for each knob, by its key."""
        ...

    @property
    def model_type(self) -> str:
        """What transformers calls the architecture."""
        ...

    @property
    def layers(self) -> int:
        """Number of decoder layers."""
        ...

    @property
    def target_modules(self) -> tuple[str, ...] | None:
        """Names of the layers with an adapter; None for every linear layer of a model type whose
        layers' names nobody knows."""
        ...

    @property
    def recomputed(self) -> tuple[int, ...]:
        """Decoder layers whose activations are recomputed, in order."""
        ...

    @property
    def texts_kind(self) -> str | None:
        """What the rows of the texts are; None where full random rows were trained on."""
        ...


Options = Callable[[Trained], Mapping[str, Any]]
"""What to write of a knob: options of the trainer by name."""
Lost = Callable[[Trained], str | None]
"""What of a knob the trainer cannot express, and what its file does instead; None where nothing."""


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
    """PEFT leaves the adapters of a 4-bit base in fp32, whatever it is asked."""
    if trained.config.adapter_dtype == "fp32" or trained.config.is_quantized:
        return {}
    return {"peft_autocast_adapter_dtype": False}


def trl_lost_adapter_dtype(trained: Trained) -> str | None:
    """TRL casts the adapters of a 4-bit base to bf16; PEFT widens those of a 16-bit one."""
    match trained.config.adapter_dtype:
        case "fp32" if trained.config.is_quantized:
            return (
                "Adapters: on a 4-bit base it keeps them in bf16; they were measured in fp32: less "
                "memory than measured, and coarser updates."
            )
        case "bf16" if not trained.config.is_quantized:
            return "Adapters: on a 16-bit base it keeps them in fp32; they were measured in bf16."
        case _:
            return None


def axolotl_lost_adapter_dtype(trained: Trained) -> str | None:
    """See `axolotl_adapter_dtype`."""
    if trained.config.adapter_dtype == "fp32" or not trained.config.is_quantized:
        return None
    return "adapter_dtype bf16: on a 4-bit base it keeps them in fp32: more memory than measured."


llama_factory_lost_adapter_dtype = _says(
    "adapter_dtype bf16: with mixed precision it keeps them in fp32: more memory than measured.",
    adapter_dtype="bf16",
)


# The base


def mixed_precision(trained: Trained) -> dict[str, Any]:
    """Trainer, and all that build on it, share two switches."""
    dtype = trained.config.compute_dtype
    return {"bf16": dtype == "bf16", "fp16": dtype == "fp16"}


TORCH_DTYPES: Mapping[str, str] = {"bf16": "bfloat16", "fp16": "float16", "fp32": "float32"}
"""What torch calls a dtype."""


def trl_precision(trained: Trained) -> dict[str, Any]:
    """The dtype in which the base is loaded is an option beside the two switches."""
    return {"dtype": TORCH_DTYPES[trained.config.compute_dtype], **mixed_precision(trained)}


llama_factory_lost_precision = _says(
    "compute_dtype fp32: it cannot be asked for. Without bf16 and fp16 it infers a dtype from the "
    "checkpoint and the card.",
    compute_dtype="fp32",
)


def trl_quantization(trained: Trained) -> dict[str, Any]:
    """TRL hands its own names to bitsandbytes."""
    if not trained.config.is_quantized:
        return {"load_in_4bit": False}
    return {
        "load_in_4bit": True,
        "bnb_4bit_quant_type": trained.config.quantization,
        "use_bnb_nested_quant": trained.config.double_quant,
    }


def axolotl_quantization(trained: Trained) -> dict[str, Any]:
    """QLoRA is a kind of adapter, and what bitsandbytes is told a dictionary."""
    if not trained.config.is_quantized:
        return {"adapter": "lora", "load_in_4bit": False}
    details = {
        "bnb_4bit_quant_type": trained.config.quantization,
        "bnb_4bit_use_double_quant": trained.config.double_quant,
    }
    return {"adapter": "qlora", "load_in_4bit": True, "bnb_config_kwargs": details}


def llama_factory_quantization(trained: Trained) -> dict[str, Any]:
    """An option that is left out means a 16-bit base."""
    if not trained.config.is_quantized:
        return {}
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


trl_lost_upcast = _says(
    "upcast_fp32 true: it has no such step, so norms, embeddings and head stay in the compute "
    "dtype: less memory than measured, and faster.",
    upcast_fp32=True,
)
axolotl_lost_upcast = _says(
    "upcast_fp32 true: it puts norms, embeddings and head back to the compute dtype: less memory "
    "than measured, and faster.",
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
    if config.attention != "sdpa" or config.compute_dtype != "bf16":
        return rows
    return f"{rows} On cards before Hopper it warns that sdpa in bf16 may then give a loss of 0."


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


# The cards


def parallel(trained: Trained) -> dict[str, Any]:
    """Trainer looks for parameters without a gradient, and sends buffers that never change, where
    nobody tells it that there is no need."""
    if trained.config.data_parallel == 1:
        return {}
    return {"ddp_find_unused_parameters": False, "ddp_broadcast_buffers": False}


def llama_factory_processes(trained: Trained) -> dict[str, str]:
    """It takes every card in sight, one process each, where it is not told how many."""
    cards = trained.config.data_parallel
    return {} if cards == 1 else {"FORCE_TORCHRUN": "1", "NPROC_PER_NODE": str(cards)}


def lost_sharding(trained: Trained) -> str | None:
    """A file would have to name wrapping policies and state dicts, which nobody has tried here."""
    if trained.config.sharding == "none":
        return None
    return (
        "sharding fsdp: the file does not ask for it, so every card holds the whole model: far "
        "more memory than measured, and it may not fit. Add fsdp_version 2 with 4-bit weights "
        "stored in the compute dtype (bnb_4bit_quant_storage), as bitsandbytes documents it."
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
