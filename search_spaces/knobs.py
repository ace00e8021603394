"""Owns every setting of a QLoRA training, each declared once, as a field of `Knobs`.

A declaration holds what a setting's values are and mean, what people call them, its option on the
command line, how memory depends on it, what has to be rebuilt when it changes, and how each trainer
spells it. A new setting is a field here. Beside that it needs its implementation and its proof of
effect in `sweep.training`, its lines in the training script of `sweep.export`, where it changes
more than a traced training shows its prediction in `sweep.predict`, and where it does not go with
everything a rule in `rules`. Knows nothing of spaces, GPUs or studies.
"""

from __future__ import annotations

import json
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    model_validator,
)

from search_spaces import trainers
from search_spaces.errors import listed, quote
from search_spaces.trainers import TRAINERS, Trainer

ComputeDtype = Literal["bf16", "fp16", "fp32", "fp8", "int8"]
Quantization = Literal["nf4", "fp4", "fp8", "int8", "none"]
Numerics = Literal["16-bit", "fp8", "int8"]
AdapterDtype = Literal["fp32", "bf16"]
Kernels = Literal["hf", "fused-loss", "liger"]
Attention = Literal["sdpa", "flash_attention_2", "eager"]
Packing = Literal["none", "packed", "grouped"]
OptimizerName = Literal["adamw_8bit", "paged_adamw_8bit", "adamw_torch_fused"]
Sharding = Literal["none", "fsdp"]
EIGHT_BIT = ("fp8", "int8")
"""What a matrix product of 8 bits multiplies, and what a base of 8 bits is held in."""
FOUR_BIT = ("nf4", "fp4")
TARGET_SETS = ("qv", "attention", "all-linear")

SIZE_KEYS = ("micro_batch_size", "seq_len")
"""Settings of which more is more work in one launch, and nothing else."""
BATCH_KEYS = ("micro_batch_size", "data_parallel", "effective_batch_size")
"""Settings of which the first two together must go into the third."""
OPTION_KEYS = (
    "lora_rank",
    "target_modules",
    "micro_batch_size",
    "seq_len",
    "compute_dtype",
    "quantization",
)
"""Settings that have an option of their own on the command line; the others are typed by --set."""
CAPACITY_KEYS = ("lora_rank", "target_modules")
"""Settings that decide how much an adapter can learn: speeds compare within one choice of them."""
MICRO_BATCH_MAX = 65_536
"""No configuration has a larger micro-batch."""
CARDS_MAX = 64
"""Nor more GPUs of one host."""


def _same(value: Any) -> Any:
    return value


Kind = type[int] | type[float] | type[bool] | type[str]


@dataclass(frozen=True)
class Knob:
    """What is said of a setting beside the values it takes."""

    label: str
    """What people call it."""
    phrase: Callable[[Any], str]
    """A value in words that stand alone: ``rank 16``."""
    help: str = ""
    """Of its option on the command line; the words that it takes, where nothing else is said."""
    typed: Callable[[Any], Any] = _same
    """What a value typed as its option means."""
    kind: Kind = str
    """What its values are when they are typed: numbers, truth values or words. It is derived."""
    resolved: Callable[[Knobs], Any] | None = None
    """What a configuration's value comes to; None where that is the value itself.

    Two configurations that come to the same in every setting train the same way.
    """
    applies: Callable[[Knobs], bool] | None = None
    """Whether it means anything in a configuration, and is worth a word; None where always."""

    memory: Literal["grows", "shrinks", "untouched", "unknown"] = "unknown"
    """Whether peak memory can only grow with it, only shrink with it, has nothing to do with it, or
    may go either way, all else being equal.

    The first two are claimed only where they hold by construction, on every model and GPU: a
    configuration may be refused by them.
    """
    survives_compiler: bool = False
    """Whether that holds under ``compile`` too.

    A compiler decides for itself what each graph keeps: only the shapes that go through may differ.
    """
    lean_first: tuple[Any, ...] = ()
    """Words and truth values that need less memory than those not listed, the least of all first.

    For a setting whose ``memory`` grows that is certain; for another it is the rule.
    """
    shapes_base: bool = False
    """Whether the frozen base has to be built anew when it changes.

    All else is attached, compiled or drawn for each trial on the base that is there.
    """
    traced: Callable[[Any], Any] | None = None
    """The value that stands for a value when tensors are counted; None where every value has the
    same tensors, perhaps of other sizes.
    """
    tried: tuple[Any, ...] = ()
    """Values that are worth a look where nobody names a space: of settings that change speed and
    memory, and leave the trained model what it is.
    """

    options: Mapping[Trainer, str | trainers.Options] = field(default_factory=dict)
    """What each trainer calls it: the option that takes the value, or what to write instead."""
    lost: Mapping[Trainer, trainers.Lost] = field(default_factory=dict)
    """What a trainer cannot express of it, and what its file does instead; None where nothing."""
    environment: Mapping[Trainer, trainers.Options] = field(default_factory=dict)
    """Variables that a trainer has to be started with, for what is decided before its file is
    read."""


def _number(value: object) -> object:
    """Accept what YAML reads as a number or as its text (``1e-4``), and never a truth value."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {quote(value)}")
    if isinstance(value, float) and not math.isfinite(value):
        raise ValueError(f"must be a finite number, got {quote(value)}")
    return value


def _target_modules(value: object) -> object:
    if isinstance(value, str):
        if value not in TARGET_SETS:
            raise ValueError(
                f"must be one of {', '.join(TARGET_SETS)} or a list of module names, "
                f"got {quote(value)}"
            )
        return value
    if isinstance(value, list | tuple):
        if not value or not all(isinstance(name, str) and name for name in value):
            raise ValueError(f"must list at least one module name, none empty, got {quote(value)}")
        return tuple(sorted(set(value)))
    raise ValueError(f"must be a name or a list of module names, got {quote(value)}")


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
TargetModules = Annotated[str | tuple[str, ...], BeforeValidator(_target_modules)]


def targets_in_words(value: str | Sequence[str]) -> str:
    """Return the layers that get an adapter: ``q,k,v,o`` for ``attention``."""
    named = {"qv": "q,v", "attention": "q,k,v,o", "all-linear": "all linear layers"}
    return named.get(value, value) if isinstance(value, str) else ", ".join(value)


def _named_modules(text: str) -> str | list[str]:
    """Return the modules that a text names; a word that is no name may be a set misspelt."""
    if text in TARGET_SETS or not ("," in text or "_" in text):
        return text
    return [name.strip() for name in text.strip().removesuffix(",").split(",")]


def _checkpointing_in_words(value: float) -> str:
    named = {0.0: "no checkpointing", 1.0: "full checkpointing"}
    return named.get(float(value), f"{100 * value:.0f} % checkpointed")


def _quantized_in_words(value: float) -> str:
    return "all layers quantized" if value == 1 else f"{100 * value:.0f} % of layers quantized"


def _packing_in_words(value: str) -> str:
    return {"none": "rows not packed", "packed": "packed rows"}.get(value, "rows grouped by length")


class Knobs(BaseModel):
    """Every setting with its default: the standard published QLoRA recipe."""

    model_config = ConfigDict(frozen=True, extra="forbid")

    lora_rank: Annotated[
        StrictInt,
        Knob(
            label="LoRA rank",
            phrase=lambda value: f"rank {value}",
            help="Rank of the adapters.",
            memory="grows",
            options={"trl": "lora_r", "axolotl": "lora_r", "llama-factory": "lora_rank"},
        ),
    ] = Field(default=16, ge=1, le=65_536)
    """Rank r of every adapter pair."""

    lora_alpha: Annotated[
        Number | None,
        Knob(
            label="LoRA alpha",
            phrase=lambda value: "alpha 2 x rank" if value is None else f"alpha {value:g}",
            help="Scale of the adapters; twice the rank.",
            resolved=lambda config: config.alpha,
            memory="untouched",
            options=dict.fromkeys(TRAINERS, trainers.whole_alpha),
            lost=dict.fromkeys(TRAINERS, trainers.lost_alpha),
        ),
    ] = Field(default=None, gt=0, le=1e6)
    """LoRA scale numerator; null means twice the rank."""

    lora_dropout: Annotated[
        Number,
        Knob(
            label="LoRA dropout",
            phrase=lambda value: f"dropout {value:g}" if value else "no dropout",
            help="Dropout of the adapters' input.",
            # A dropout keeps a masked copy of each adapter's input, however much it drops.
            memory="grows",
            traced=lambda value: 0.1 if value else 0.0,
            options=dict.fromkeys(TRAINERS, "lora_dropout"),
        ),
    ] = Field(default=0.0, ge=0.0, le=1.0)
    """Probability of dropping an adapter's input element."""

    target_modules: Annotated[
        TargetModules,
        Knob(
            label="target modules",
            phrase=lambda value: f"adapters on {targets_in_words(value)}",
            help="qv, attention, all-linear, or names with commas.",
            typed=_named_modules,
            memory="grows",
            lean_first=("qv", "attention"),
            traced=_same,
            options={
                "trl": trainers.trl_targets,
                "axolotl": trainers.axolotl_targets,
                "llama-factory": trainers.llama_factory_targets,
            },
        ),
    ] = "attention"
    """Linear layers with an adapter: ``qv``, ``attention`` (q,k,v,o), ``all-linear`` or names."""

    micro_batch_size: Annotated[
        StrictInt,
        Knob(
            label="micro-batch",
            phrase=lambda value: f"micro-batch {value}",
            help="Sequences in one pass of one GPU.",
            memory="grows",
            survives_compiler=True,
            options={
                "trl": "per_device_train_batch_size",
                "axolotl": "micro_batch_size",
                "llama-factory": "per_device_train_batch_size",
            },
        ),
    ] = Field(default=4, ge=1, le=MICRO_BATCH_MAX)
    """Sequences in one forward and backward pass, of one GPU."""

    seq_len: Annotated[
        StrictInt,
        Knob(
            label="sequence length",
            phrase=lambda value: f"length {value}",
            help="Tokens in a sequence.",
            memory="grows",
            survives_compiler=True,
            options={"trl": "max_length", "axolotl": "sequence_len", "llama-factory": "cutoff_len"},
        ),
    ] = Field(default=512, ge=1, le=10_000_000)
    """Tokens in every sequence."""

    effective_batch_size: Annotated[
        StrictInt | None,
        Knob(
            label="effective batch",
            phrase=lambda value: f"effective batch {value}" if value else "no accumulation",
            help="Sequences per optimizer step.",
            resolved=lambda config: config.samples_per_step,
            # The gradients of one micro-batch live through the forward pass of the next.
            memory="grows",
            survives_compiler=True,
            options=dict.fromkeys(TRAINERS, trainers.accumulation),
        ),
    ] = Field(default=None, ge=1, le=1_000_000)
    """Sequences per optimizer step, of all GPUs together; null means one micro-batch on each.
    Accumulation follows from it."""

    compute_dtype: Annotated[
        ComputeDtype,
        Knob(
            label="compute dtype",
            phrase=lambda value: f"{value} compute",
            shapes_base=True,
            traced=_same,
            options={
                "trl": trainers.trl_precision,
                "axolotl": trainers.mixed_precision,
                "llama-factory": trainers.mixed_precision,
            },
            lost={
                **dict.fromkeys(TRAINERS, trainers.lost_8bit_compute),
                "llama-factory": trainers.llama_factory_lost_precision,
                "unsloth": trainers.lost_8bit_compute,
            },
        ),
    ] = "bf16"
    """Type of the matrix products. ``fp8`` and ``int8`` are those of the frozen layers, forward and
    for their input's gradient, inputs and gradients rounded row by row; all else is in 16 bits."""

    quantization: Annotated[
        Quantization,
        Knob(
            label="quantization",
            phrase=lambda value: "16-bit base" if value == "none" else f"{value} base",
            lean_first=("nf4", "fp4", "fp8", "int8"),
            shapes_base=True,
            # The two 4-bit types differ in what sixteen values they tell apart, and in no tensor.
            traced=lambda value: "nf4" if value in FOUR_BIT else value,
            options={
                "trl": trainers.trl_quantization,
                "axolotl": trainers.axolotl_quantization,
                "llama-factory": trainers.llama_factory_quantization,
            },
            lost={
                **dict.fromkeys(TRAINERS, trainers.lost_8bit_base),
                "unsloth": trainers.unsloth_lost_quantization,
            },
        ),
    ] = "nf4"
    """Storage of the frozen base: 4-bit NormalFloat, 4-bit float, 8 bits with a scale an output
    feature (``fp8``: e4m3; ``int8``), or ``none`` (16-bit)."""

    double_quant: Annotated[
        StrictBool,
        Knob(
            label="double quantization",
            phrase=lambda value: "double quantization" if value else "single quantization",
            help="Quantize the quantization constants too.",
            # Of 4-bit types alone.
            resolved=lambda config: config.double_quant and config.is_4bit,
            applies=lambda config: config.is_4bit,
            lean_first=(True,),
            shapes_base=True,
            traced=_same,
            # Trainers are told with the quantization.
        ),
    ] = True
    """Whether the quantization constants are quantized themselves."""

    quantized_fraction: Annotated[
        Number,
        Knob(
            label="quantized layers",
            phrase=_quantized_in_words,
            help="Share of layers that are quantized, 0 to 1.",
            # Without quantization there are none.
            resolved=lambda config: config.quantized_fraction if config.is_quantized else 1.0,
            applies=lambda config: config.is_quantized,
            shapes_base=True,
            # Its structures are put together from those of quantized layers and of 16-bit ones.
            traced=_same,
            lost=dict.fromkeys((*TRAINERS, "unsloth"), trainers.lost_quantized_layers),
        ),
    ] = Field(default=1.0, ge=0.0, le=1.0)
    """Share of decoder layers that are quantized; the others are in 16 bits."""

    adapter_dtype: Annotated[
        AdapterDtype,
        Knob(
            label="adapter dtype",
            phrase=lambda value: f"{value} adapters",
            # Parameters, gradients and unquantized optimizer states are of this type. That decides
            # nothing for sure: a bf16 adapter keeps a copy of its input where that is fp32.
            lean_first=("bf16",),
            traced=_same,
            options={"axolotl": trainers.axolotl_adapter_dtype},
            lost={
                "trl": trainers.trl_lost_adapter_dtype,
                "axolotl": trainers.axolotl_lost_adapter_dtype,
                "llama-factory": trainers.lost_bf16_adapters,
                "unsloth": trainers.lost_bf16_adapters,
            },
        ),
    ] = "fp32"
    """Type of the adapters, of their gradients and of the optimizer states that are not 8-bit."""

    checkpoint_fraction: Annotated[
        Number,
        Knob(
            label="checkpointing",
            phrase=_checkpointing_in_words,
            help="Share of layers recomputed, 0 to 1.",
            memory="shrinks",
            tried=(0.0, 0.5, 1.0),
            options={
                "trl": trainers.trl_recomputation,
                "axolotl": trainers.recomputation,
                "llama-factory": trainers.llama_factory_recomputation,
            },
            lost={
                **dict.fromkeys((*TRAINERS, "unsloth"), trainers.lost_layers),
                "trl": trainers.trl_lost_layers,
            },
        ),
    ] = Field(default=1.0, ge=0.0, le=1.0)
    """Share of decoder layers whose activations are recomputed in the backward pass."""

    upcast_fp32: Annotated[
        StrictBool,
        Knob(
            label="fp32 upcast",
            phrase=lambda value: "fp32 upcast" if value else "no fp32 upcast",
            help="Keep norms, embeddings and head in fp32.",
            memory="grows",
            lean_first=(False,),
            shapes_base=True,
            traced=_same,
            tried=(True, False),
            options={"llama-factory": "upcast_layernorm"},
            lost={
                **dict.fromkeys(("trl", "axolotl", "unsloth"), trainers.lost_upcast),
                "llama-factory": trainers.llama_factory_lost_upcast,
            },
        ),
    ] = True
    """Keep norms, embeddings and head in fp32, as PEFT's `prepare_model_for_kbit_training` does."""

    kernels: Annotated[
        Kernels,
        Knob(
            label="kernels",
            phrase=lambda value: (
                {"hf": "standard", "liger": "Liger"}.get(value, value) + " kernels"
            ),
            lean_first=("liger", "fused-loss"),
            shapes_base=True,
            traced=_same,
            tried=get_args(Kernels),
            options={
                "trl": trainers.trl_kernels,
                "axolotl": trainers.axolotl_kernels,
                "llama-factory": trainers.llama_factory_kernels,
            },
            lost={
                "trl": trainers.trl_lost_kernels,
                "llama-factory": trainers.llama_factory_lost_kernels,
                "unsloth": trainers.unsloth_lost_kernels,
            },
        ),
    ] = "hf"
    """Layer kernels: transformers' own, Liger's fused loss alone, or the whole Liger set."""

    attention: Annotated[
        Attention,
        Knob(
            label="attention",
            phrase=lambda value: f"{value} attention",
            lean_first=("sdpa", "flash_attention_2"),
            shapes_base=True,
            traced=_same,
            options={
                "trl": "attn_implementation",
                "axolotl": "attn_implementation",
                "llama-factory": trainers.llama_factory_attention,
            },
        ),
    ] = "sdpa"
    """Attention implementation."""

    optimizer: Annotated[
        OptimizerName,
        Knob(
            label="optimizer",
            phrase=str,
            lean_first=("paged_adamw_8bit", "adamw_8bit"),
            options={"trl": "optim", "axolotl": "optimizer", "llama-factory": "optim"},
        ),
    ] = "adamw_8bit"
    """Optimizer of the adapters."""

    compile: Annotated[
        StrictBool,
        Knob(
            label="compile",
            phrase=lambda value: "compiled layers" if value else "not compiled",
            help="Compile each decoder layer.",
            lean_first=(False,),
            traced=_same,
            tried=(False, True),
            lost=dict.fromkeys(TRAINERS, trainers.lost_compile),
        ),
    ] = False
    """Whether each decoder layer is compiled with `torch.compile`, shapes static."""

    expandable_segments: Annotated[
        StrictBool,
        Knob(
            label="expandable segments",
            phrase=lambda value: f"{'expandable' if value else 'fixed'} segments",
            help="Let the allocator's segments grow, so that memory does not fragment.",
            lean_first=(True,),
            # Weights that lie in segments of the other kind would stay there.
            shapes_base=True,
            environment={
                "trl": trainers.allocator_environment,
                "axolotl": trainers.axolotl_allocator_environment,
                "llama-factory": trainers.allocator_environment,
            },
        ),
    ] = False
    """Whether torch's allocator grows its segments (``expandable_segments``)."""

    packing: Annotated[
        Packing,
        Knob(
            label="packing",
            phrase=_packing_in_words,
            help="Rows of your texts: none (padded), grouped (by length) or packed; with --data.",
            lean_first=("none", "grouped"),
            # A mask keeps packed texts apart; grouped rows are rows like any other.
            traced=lambda value: "packed" if value == "packed" else "none",
            options={
                "trl": trainers.trl_packing,
                "axolotl": trainers.axolotl_packing,
                "llama-factory": trainers.llama_factory_packing,
            },
            lost={
                "trl": trainers.trl_lost_packing,
                "axolotl": trainers.axolotl_lost_packing,
                "llama-factory": trainers.llama_factory_lost_packing,
            },
        ),
    ] = "none"
    """What a row of a micro-batch holds: one text, ``none`` and ``grouped`` (texts of like length
    in one micro-batch), or as many as fit, ``packed``; the last two only with texts."""

    learning_rate: Annotated[
        Number,
        Knob(
            label="learning rate",
            phrase=lambda value: f"learning rate {value:g}",
            help="Highest of the schedule; speed and memory do not depend on it.",
            memory="untouched",
            options=dict.fromkeys(TRAINERS, "learning_rate"),
        ),
    ] = Field(default=2e-4, ge=1e-7, le=1.0)
    """Highest learning rate of the schedule. Neither speed nor memory depends on it."""

    data_parallel: Annotated[
        StrictInt,
        Knob(
            label="GPUs",
            phrase=lambda value: "one GPU" if value == 1 else f"{value} GPUs",
            help="GPUs that train one configuration together, each on rows of its own.",
            options=dict.fromkeys(TRAINERS, trainers.parallel),
            environment={"llama-factory": trainers.llama_factory_processes},
        ),
    ] = Field(default=1, ge=1, le=CARDS_MAX)
    """GPUs that train one configuration together, each on rows of its own (DDP); every optimizer
    step is one of all of them."""

    sharding: Annotated[
        Sharding,
        Knob(
            label="sharding",
            phrase=lambda value: "whole model on each GPU" if value == "none" else "sharded (FSDP)",
            help="What several GPUs hold: none (each the whole model) or fsdp (each its share).",
            applies=lambda config: config.data_parallel > 1,
            lean_first=("fsdp",),
            # What is sharded is stored in another type, and stays sharded.
            shapes_base=True,
            lost=dict.fromkeys((*TRAINERS, "unsloth"), trainers.lost_sharding),
        ),
    ] = "none"
    """What each of several GPUs holds: the whole model, or its share of every layer (``fsdp``:
    FSDP2, with 4-bit weights stored in the compute dtype)."""

    @model_validator(mode="after")
    def _accumulation_is_whole(self) -> Self:
        effective, cards = self.effective_batch_size, self.data_parallel
        if effective is None or not effective % (self.micro_batch_size * cards):
            return self
        if cards == 1:
            raise ValueError(
                f"effective_batch_size must be a multiple of micro_batch_size, got {effective} and "
                f"{self.micro_batch_size}"
            )
        raise ValueError(
            "effective_batch_size must be a multiple of micro_batch_size times data_parallel, got "
            f"{effective}, {self.micro_batch_size} and {cards}"
        )

    @property
    def alpha(self) -> float:
        """LoRA scale numerator with its default resolved."""
        return self.lora_alpha if self.lora_alpha is not None else 2.0 * self.lora_rank

    @property
    def samples_per_step(self) -> int:
        """Sequences per optimizer step, of all GPUs together."""
        return self.effective_batch_size or self.micro_batch_size * self.data_parallel

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen base is held in 4 or 8 bits."""
        return self.quantization != "none"

    @property
    def is_4bit(self) -> bool:
        """Whether the frozen base is held in 4 bits."""
        return self.quantization in FOUR_BIT

    @property
    def weight_bits(self) -> int:
        """Bits of a frozen weight, scales not counted."""
        return 4 if self.is_4bit else 8 if self.is_quantized else 16

    @property
    def numerics(self) -> Numerics:
        """The class of numerics of the frozen layers' products."""
        match self.compute_dtype:
            case "fp8" | "int8" as eight_bit:
                return eight_bit
            case _:
                return "16-bit"

    @property
    def is_8bit_compute(self) -> bool:
        """Whether the frozen layers multiply in 8 bits."""
        return self.numerics != "16-bit"

    @property
    def is_paged(self) -> bool:
        """Whether the optimizer's states are in memory that bitsandbytes pages."""
        return self.optimizer.startswith("paged")

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step, of each GPU."""
        return self.samples_per_step // (self.micro_batch_size * self.data_parallel)

    @property
    def is_sharded(self) -> bool:
        """Whether each GPU holds a share of the model, and not all of it."""
        return self.sharding != "none"


def _declared() -> Iterator[tuple[str, Knob]]:
    for key, declared in Knobs.model_fields.items():
        (knob,) = (known for known in declared.metadata if isinstance(known, Knob))
        words = knob.help or f"{listed(get_args(declared.annotation))}."
        yield key, replace(knob, kind=_kind(declared.annotation), help=words)


def _kind(annotation: Any) -> Kind:
    if annotation in (int, float, bool):
        kind: Kind = annotation
        return kind
    kinds = map(_kind, get_args(annotation))
    return next((kind for kind in kinds if kind is not str), str)


KNOBS: Mapping[str, Knob] = dict(_declared())
"""What is declared of each setting, by its key."""


NEEDED: Mapping[tuple[str, Any], Mapping[str, Any]] = {
    ("sharding", "fsdp"): {"optimizer": "adamw_torch_fused", "upcast_fp32": False}
}
"""What a setting's value needs of others: who asks for it and says nothing of them means these."""


def as_options(values: Mapping[str, Any]) -> list[str]:
    """Return values by their keys as they are typed on the command line."""
    words: list[str] = []
    for key, value in values.items():
        if key in KNOBS and key not in OPTION_KEYS:
            words += ["--set", f"{key}={_as_typed(value)}"]
        elif value is True:
            words.append(f"--{key.replace('_', '-')}")
        else:
            words += [f"--{key.replace('_', '-')}", _as_typed(value)]
    return words


def _as_typed(value: Any) -> str:
    if isinstance(value, list | tuple):
        return ",".join(value)
    return json.dumps(value) if value is None or isinstance(value, bool) else str(value)
