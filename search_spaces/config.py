"""Every setting of a QLoRA training, each declared once, as a field of `TrialConfig`.

A declaration holds a setting's values, default and meaning, what people call it, how memory depends
on it and what has to be rebuilt when it changes. A new setting is a field here. Beside that it
needs its implementation and its proof of effect in `sweep.training`, its lines in the training
script and its spelling for other trainers in `sweep.export`, where it changes more than a traced
training shows its prediction in `sweep.predict`, and where it does not go with everything a rule in
`rules`.
"""

from __future__ import annotations

import json
import math
import re
from collections.abc import Callable, Iterator, Mapping, Sequence
from dataclasses import dataclass
from functools import lru_cache
from typing import Annotated, Any, Literal, Self, get_args

from pydantic import (
    BaseModel,
    BeforeValidator,
    ConfigDict,
    Field,
    StrictBool,
    StrictInt,
    WithJsonSchema,
    model_validator,
)

from qlora_sweep.search_spaces.documents import Document, validate
from qlora_sweep.search_spaces.errors import quote
from qlora_sweep.search_spaces.kinds import (
    COMPUTE_DTYPES,
    KERNELS,
    METHODS,
    OPTIMIZERS,
    QUANTIZATIONS,
    SHARDED_OPTIMIZER,
    TRAINER_LABELS,
    ComputeDtype,
    ComputeKind,
    Kernels,
    KernelsKind,
    Method,
    MethodKind,
    Numerics,
    OptimizerKind,
    OptimizerName,
    Quantization,
    QuantizationKind,
    TrainerName,
    in_words,
    lean_first,
)

AdapterDtype = Literal["fp32", "bf16"]
Attention = Literal["sdpa", "flash_attention_2", "eager"]
Packing = Literal["none", "packed", "grouped"]
PairLoss = Literal[
    "sigmoid",
    "sigmoid_norm",
    "hinge",
    "ipo",
    "nca_pair",
    "bco_pair",
    "sppo_hard",
    "apo_zero",
    "apo_down",
]
Reference = Literal["adapter_off", "precomputed"]
Sharding = Literal["none", "fsdp"]
ADAPTERS_IN_TRL: Mapping[bool, AdapterDtype] = {True: "bf16", False: "fp32"}
"""Type in which TRL has the adapters of a quantized base (True), and of one in 16 bits."""
TARGET_SETS = ("qv", "attention", "all-linear")

SIZE_KEYS = ("micro_batch_size", "seq_len")
"""Settings of which more is more work in one launch, and nothing else."""
BATCH_KEYS = ("micro_batch_size", "data_parallel", "effective_batch_size")
"""Settings of which the first two together must go into the third."""
MAX_GRAD_NORM = 1.0
WEIGHT_DECAY = 0.01
SCHEDULE = "linear"
SCHEDULE_WARMUP_STEPS = 0
"""Of the learning rate, to 0 at the end, in Trainer's words: of `sweep train`, of what is exported
and of a training for its quality. None of the four changes memory or speed."""
OPTION_KEYS = {
    "method": "--method",
    "lora_rank": "--rank",
    "target_modules": "--target-modules",
    "micro_batch_size": "--micro-batch-size",
    "seq_len": "--seq-len",
    "image_size": "--image-size",
    "compute_dtype": "--compute-dtype",
    "quantization": "--quantization",
    "trainer": "--for",
}
"""Settings that have an option of their own on the command line; the others are typed by --set."""
CAPACITY_KEYS = ("lora_rank", "target_modules")
"""Settings that decide how much an adapter can learn: speeds compare within one choice of them."""
LOGITS_AT_ONCE = 2**25
"""Tokens times vocabulary whose logits are there together where pairs are trained on: in 16 bits
64 MiB, in fp32 with their gradient four times that."""
TRL_TILE = (4096, 32_768)
"""Tokens and vocabulary, at most, of the logits that TRL 1.16's own head has at once."""
MICRO_BATCH_MAX = 65_536
SEQ_LEN_MAX = 10_000_000
IMAGE_SIZE_MAX = 16_384
GPUS_MAX = 64
CONFIGS_KEPT = 2**15
"""Configurations whose canonical form is kept: a page of thousands of trials asks dozens of times
of each."""


def _same(value: Any) -> Any:
    return value


@dataclass(frozen=True)
class Declaration:
    """What is said of a setting beside the values it takes."""

    label: str
    """What people call it."""
    words: str | Mapping[Any, str] | Callable[[Any], str]
    """A value in words that stand alone, ``rank {}``; by value, where ``...`` is any other."""
    resolved: Callable[[TrialConfig], Any] | None = None
    """What a configuration's value comes to; None where that is the value itself.

    Two configurations that come to the same in every setting train the same way.
    """
    applies: Callable[[TrialConfig], bool] | None = None
    """Whether it means anything in a configuration, and is worth a word; None where always."""
    memory: Literal["grows", "shrinks", "untouched", "unknown"] = "unknown"
    """Whether peak memory can only grow with it, only shrink with it, has nothing to do with it, or
    may go either way, all else being equal.

    The first two are claimed only where they hold by construction, on every model and GPU: a
    configuration may be refused by them.
    """
    survives_compiler: bool = False
    """Whether that holds under ``compile`` too, where only the shapes that go through differ."""
    lean_first: tuple[Any, ...] = ()
    """Words and truth values that need less memory than those not listed, the least of all first.

    For a setting whose ``memory`` grows that is certain; for another it is the rule.
    """
    shapes_base: bool = False
    """Whether the frozen base has to be built anew when it changes."""
    traced: Callable[[Any], Any] | None = None
    """The value that stands for a value when tensors are counted; None where every value has the
    same tensors, perhaps of other sizes."""
    tried: tuple[Any, ...] = ()
    """Values that are worth a look where no space is named: of settings that change speed and
    memory, and leave the trained model what it is."""

    def phrase(self, value: Any) -> str:
        """Return a value in words that stand alone: ``rank 16``."""
        if callable(self.words):
            return self.words(value)
        form = self.words
        if not isinstance(form, str):
            key = value
            if value not in form:
                key = ...
            form = form[key]
        return form.format(value).replace("%", " %")


_NOT_FINITE = re.compile(r"\s*[+-]?(nan|inf|infinity)\s*", re.IGNORECASE)


def _number(value: object) -> object:
    """Accept what YAML reads as a number or as its text (``1e-4``), and never a truth value."""
    if isinstance(value, bool):
        raise ValueError(f"must be a number, got {quote(value)}")
    is_not_finite = isinstance(value, float) and not math.isfinite(value)
    if is_not_finite or (isinstance(value, str) and _NOT_FINITE.fullmatch(value)):
        raise ValueError(f"must be a finite number, got {quote(value)}")
    return value


def _target_modules(value: object) -> object:
    """Accept a target set, or module names in a list or with commas (``q_proj,v_proj``)."""
    if isinstance(value, str):
        if value in TARGET_SETS:
            return value
        if not ("," in value or "_" in value):
            known = f"{', '.join(TARGET_SETS)} or a list of module names"
            raise ValueError(f"must be one of {known}, got {quote(value)}")
        value = [name.strip() for name in value.strip().removesuffix(",").split(",")]
    if not isinstance(value, list | tuple):
        raise ValueError(f"must be a name or a list of module names, got {quote(value)}")
    if not value or not all(isinstance(name, str) and name for name in value):
        raise ValueError(f"must list at least one module name, none empty, got {quote(value)}")
    return tuple(sorted(set(value)))


Number = Annotated[float, BeforeValidator(_number), Field(allow_inf_nan=False)]
_LISTED = {"type": "array", "items": {"type": "string", "minLength": 1}, "minItems": 1}
TargetModules = Annotated[
    str | tuple[str, ...],
    BeforeValidator(_target_modules),
    WithJsonSchema({"anyOf": [{"enum": list(TARGET_SETS)}, _LISTED]}),
]


def targets_in_words(value: str | Sequence[str]) -> str:
    """Return the layers that get an adapter: ``q,k,v,o`` for ``attention``."""
    if not isinstance(value, str):
        return ", ".join(value)
    named = {"qv": "q,v", "attention": "q,k,v,o", "all-linear": "all linear layers"}
    return named.get(value, value)


class TrialConfig(BaseModel):
    """One QLoRA fine-tuning configuration; the defaults are the standard published recipe.

    Raises:
        pydantic.ValidationError: a value is out of range; `parse_config` makes it an `InputError`.
    """

    model_config = ConfigDict(frozen=True, extra="forbid", use_attribute_docstrings=True)

    method: Annotated[
        Method,
        Declaration(
            "method",
            in_words(METHODS),
            applies=lambda config: config.is_on_completions,
            traced=_same,
        ),
    ] = "sft"
    """What is trained on: texts (``sft``), pairs of a chosen and a rejected completion (``dpo``),
    or completions that the model generates (``grpo``, which is only planned). All configurations of
    a study have the same."""

    loss_type: Annotated[
        PairLoss,
        Declaration(
            "loss of a pair",
            "{} loss",
            resolved=lambda config: config.loss_type if config.is_on_pairs else "sigmoid",
            applies=lambda config: config.is_on_pairs,
            memory="untouched",
        ),
    ] = "sigmoid"
    """Loss of a pair under ``dpo``, in TRL's words."""

    dpo_beta: Annotated[
        Annotated[Number, Field(gt=0, le=1e3)],
        Declaration(
            "DPO beta",
            "beta {:g}",
            resolved=lambda config: config.dpo_beta if config.is_on_pairs else 0.1,
            applies=lambda config: config.is_on_pairs,
            memory="untouched",
        ),
    ] = 0.1
    """How far ``dpo`` holds the model to its reference."""

    reference: Annotated[
        Reference,
        Declaration(
            "reference",
            {"adapter_off": "reference in each step", ...: "reference precomputed"},
            resolved=lambda config: config.reference if config.is_on_pairs else "adapter_off",
            applies=lambda config: config.is_on_pairs,
            traced=_same,
        ),
    ] = "adapter_off"
    """What ``dpo`` compares with: the base, in a pass with adapters off in each step, or its
    log-probabilities, computed once before the first step (``precomputed``)."""

    lora_rank: Annotated[StrictInt, Declaration("LoRA rank", "rank {}", memory="grows")] = Field(
        default=16, ge=1, le=65_536
    )
    """Rank r of every adapter pair."""

    lora_alpha: Annotated[
        Annotated[Number, Field(gt=0, le=1e6)] | None,
        Declaration(
            "LoRA alpha",
            {None: "alpha 2 x rank", ...: "alpha {:g}"},
            resolved=lambda config: config.alpha,
            memory="untouched",
        ),
    ] = None
    """LoRA scale numerator; null means twice the rank."""

    lora_dropout: Annotated[
        Number,
        # A dropout keeps a masked copy of each adapter's input, however much it drops.
        Declaration(
            "LoRA dropout",
            {0: "no dropout", ...: "dropout {:g}"},
            memory="grows",
            traced=lambda value: 0.1 if value else 0.0,
        ),
    ] = Field(default=0.0, ge=0.0, le=1.0)
    """Probability of dropping an adapter's input element."""

    target_modules: Annotated[
        TargetModules,
        Declaration(
            "target modules",
            lambda value: f"adapters on {targets_in_words(value)}",
            memory="grows",
            lean_first=("qv", "attention"),
            traced=_same,
        ),
    ] = "attention"
    """Linear layers with an adapter: ``qv``, ``attention`` (q,k,v,o), ``all-linear`` or names."""

    micro_batch_size: Annotated[
        StrictInt,
        Declaration("micro-batch", "micro-batch {}", memory="grows", survives_compiler=True),
    ] = Field(default=4, ge=1, le=MICRO_BATCH_MAX)
    """Sequences in one forward and backward pass, of one GPU; under ``dpo`` pairs of them."""

    seq_len: Annotated[
        StrictInt,
        Declaration("sequence length", "length {}", memory="grows", survives_compiler=True),
    ] = Field(default=512, ge=1, le=SEQ_LEN_MAX)
    """Tokens in every sequence."""

    image_size: Annotated[
        Annotated[StrictInt, Field(ge=1, le=IMAGE_SIZE_MAX)] | None,
        Declaration(
            "image size",
            {None: "no images", ...: "images of {:,} px"},
            applies=lambda config: config.image_size is not None,
            # The tower is a part of the base.
            shapes_base=True,
            traced=_same,
        ),
    ] = None
    """Pixels on each side of the square image in every sequence, which a frozen vision tower sees;
    null means that sequences are text alone."""

    effective_batch_size: Annotated[
        Annotated[StrictInt, Field(ge=1, le=1_000_000)] | None,
        # The gradients of one micro-batch live through the forward pass of the next.
        Declaration(
            "effective batch",
            {None: "no accumulation", ...: "effective batch {}"},
            resolved=lambda config: config.samples_per_step,
            memory="grows",
            survives_compiler=True,
        ),
    ] = None
    """Sequences, or pairs, per optimizer step, of all GPUs together; null means one micro-batch on
    each. Accumulation follows from it."""

    compute_dtype: Annotated[
        ComputeDtype, Declaration("compute dtype", "{} compute", shapes_base=True, traced=_same)
    ] = "bf16"
    """Type of the matrix products. With ``fp8`` and ``int8`` the frozen layers multiply in 8 bits,
    forward and for their input's gradient, with a scale per token; the rest is in 16 bits."""

    quantization: Annotated[
        Quantization,
        Declaration(
            "quantization",
            in_words(QUANTIZATIONS),
            lean_first=lean_first(QUANTIZATIONS),
            shapes_base=True,
            traced=lambda value: QUANTIZATIONS[value].traced_as or value,
        ),
    ] = "nf4"
    """Storage of the frozen base: 4-bit NormalFloat, 4-bit float, 8 bits with a scale per output
    feature (``fp8``: e4m3; ``int8``), or ``none`` (16-bit)."""

    double_quant: Annotated[
        StrictBool,
        # Of 4-bit types alone.
        Declaration(
            "double quantization",
            {True: "double quantization", False: "single quantization"},
            resolved=lambda config: config.double_quant and config.is_4bit,
            applies=lambda config: config.is_4bit,
            lean_first=(True,),
            shapes_base=True,
            traced=_same,
        ),
    ] = True
    """Whether the quantization constants are quantized too."""

    quantized_fraction: Annotated[
        Number,
        # Its structures are put together from those of quantized layers and of 16-bit ones.
        Declaration(
            "quantized layers",
            {1: "all layers quantized", ...: "{:.0%} of layers quantized"},
            resolved=lambda config: config.quantized_fraction if config.is_quantized else 1.0,
            applies=lambda config: config.is_quantized,
            shapes_base=True,
            traced=_same,
        ),
    ] = Field(default=1.0, ge=0.0, le=1.0)
    """Share of decoder layers that are quantized; the others are in 16 bits."""

    offload_fraction: Annotated[
        Number,
        # Layers' experts are of one size, and at most two of those on the host have a place here.
        Declaration(
            "offloaded experts",
            {
                0: "no offload",
                1: "all experts on the host",
                ...: "experts of {:.0%} of layers on the host",
            },
            applies=lambda config: config.offload_fraction > 0,
            memory="shrinks",
            survives_compiler=True,
            shapes_base=True,
        ),
    ] = Field(default=0.0, ge=0.0, le=1.0)
    """Share of the decoder layers with experts whose weights lie in the host's memory, and come to
    the GPU a layer ahead."""

    adapter_dtype: Annotated[
        AdapterDtype,
        # Parameters, gradients and unquantized optimizer states are of this type. That decides
        # nothing for sure: a bf16 adapter keeps a copy of its input where that is fp32.
        Declaration("adapter dtype", "{} adapters", lean_first=("bf16",), traced=_same),
    ] = "fp32"
    """Type of the adapters, of their gradients and of the optimizer states that are not 8-bit."""

    checkpoint_fraction: Annotated[
        Number,
        Declaration(
            "checkpointing",
            {0: "no checkpointing", 1: "full checkpointing", ...: "{:.0%} checkpointed"},
            memory="shrinks",
            tried=(0.0, 0.5, 1.0),
        ),
    ] = Field(default=1.0, ge=0.0, le=1.0)
    """Share of decoder layers whose activations are recomputed in the backward pass."""

    checkpoint_offload: Annotated[
        StrictBool,
        # At most two of those inputs have a place on the GPU, whatever is recomputed.
        Declaration(
            "checkpoints on the host",
            {True: "checkpoints on the host", False: "checkpoints on the GPU"},
            resolved=lambda config: config.waits_on_host,
            applies=lambda config: config.checkpoint_fraction > 0,
            lean_first=(True,),
            memory="shrinks",
            survives_compiler=True,
            traced=_same,
        ),
    ] = False
    """Whether the inputs of recomputed layers wait in the host's memory, and come back a layer
    ahead."""

    upcast_fp32: Annotated[
        StrictBool,
        Declaration(
            "fp32 upcast",
            {True: "fp32 upcast", False: "no fp32 upcast"},
            memory="grows",
            lean_first=(False,),
            shapes_base=True,
            traced=_same,
            tried=(True, False),
        ),
    ] = True
    """Keep norms, embeddings and head in fp32, as PEFT's `prepare_model_for_kbit_training` does."""

    kernels: Annotated[
        Kernels,
        Declaration(
            "kernels",
            in_words(KERNELS),
            resolved=lambda config: config.kernels_that_matter,
            lean_first=lean_first(KERNELS),
            shapes_base=True,
            traced=_same,
            tried=get_args(Kernels),
        ),
    ] = "hf"
    """Layer kernels: transformers' own, only Liger's fused loss, or all of Liger's. Under ``dpo``
    and ``grpo`` the loss never holds the logits, so that the first two are the same."""

    attention: Annotated[
        Attention,
        Declaration(
            "attention",
            "{} attention",
            lean_first=("sdpa", "flash_attention_2"),
            shapes_base=True,
            traced=_same,
        ),
    ] = "sdpa"
    """Attention implementation."""

    optimizer: Annotated[
        OptimizerName, Declaration("optimizer", "{}", lean_first=lean_first(OPTIMIZERS))
    ] = "adamw_8bit"
    """Optimizer of the adapters."""

    compile: Annotated[
        StrictBool,
        Declaration(
            "compile",
            {True: "compiled layers", False: "not compiled"},
            lean_first=(False,),
            traced=_same,
            tried=(False, True),
        ),
    ] = False
    """Whether each decoder layer is compiled with `torch.compile`, shapes static."""

    expandable_segments: Annotated[
        StrictBool,
        # Weights that lie in segments of the other kind would stay there.
        Declaration(
            "expandable segments",
            {True: "expandable segments", False: "fixed segments"},
            lean_first=(True,),
            shapes_base=True,
        ),
    ] = False
    """Whether torch's allocator grows its segments (``expandable_segments``)."""

    packing: Annotated[
        Packing,
        # A mask keeps packed examples apart; grouped sequences are like any other.
        Declaration(
            "packing",
            {"none": "rows not packed", "packed": "packed rows", ...: "rows grouped by length"},
            lean_first=("none", "grouped"),
            traced=lambda value: "packed" if value == "packed" else "none",
        ),
    ] = "none"
    """How examples become sequences: one each (``none``), one each with examples of similar length
    in a micro-batch (``grouped``), or as many as fit (``packed``); the last two need a dataset."""

    learning_rate: Annotated[
        Annotated[Number, Field(ge=1e-7, le=1.0)] | None,
        Declaration(
            "learning rate",
            {None: "learning rate by the rule", ...: "learning rate {:g}"},
            memory="untouched",
        ),
    ] = None
    """Highest learning rate of the schedule; null means the one that follows from the rest of the
    configuration and the model (`docs/learning_rates.md`). Neither speed nor memory depends on
    it."""

    data_parallel: Annotated[StrictInt, Declaration("GPUs", {1: "one GPU", ...: "{} GPUs"})] = (
        Field(default=1, ge=1, le=GPUS_MAX)
    )
    """GPUs that train one configuration together (DDP), each on different sequences; an optimizer
    step covers all of them."""

    sharding: Annotated[
        Sharding,
        # What is sharded is stored in another type, and stays sharded.
        Declaration(
            "sharding",
            {"none": "whole model on each GPU", "fsdp": "sharded (FSDP)"},
            applies=lambda config: config.data_parallel > 1,
            lean_first=("fsdp",),
            shapes_base=True,
        ),
    ] = "none"
    """What each of several GPUs stores: the whole model, or its share of every layer (``fsdp``:
    FSDP2, with 4-bit weights stored in the compute dtype)."""

    trainer: Annotated[
        TrainerName,
        # Of the others' tensors nothing is known that a setting does not say.
        Declaration(
            "trainer",
            {name: f"for {label}" for name, label in TRAINER_LABELS.items()},
            applies=lambda config: config.trainer != "sweep",
            shapes_base=True,
            traced=lambda value: "trl" if value == "trl" else "sweep",
        ),
    ] = "sweep"
    """What trains the configuration: `sweep train` and the exported script (``sweep``), or a
    program of others, which cannot do everything. All configurations of a study have the same."""

    @model_validator(mode="before")
    @classmethod
    def _of_trainer(cls, values: Any) -> Any:
        """Let what is not named be what the trainer does."""
        if not isinstance(values, dict):
            return values
        trainer = values.get("trainer", "sweep")
        method = values.get("method", "sft")
        if trainer == "sweep" and method != "grpo":
            return values
        own: dict[str, Any] = {"upcast_fp32": False}
        if trainer == "trl" or (trainer == "sweep" and method == "grpo"):
            is_quantized = values.get("quantization", "nf4") != "none"
            own["adapter_dtype"] = ADAPTERS_IN_TRL[is_quantized]
        return {**own, **values}

    @model_validator(mode="after")
    def _accumulation_is_whole(self) -> Self:
        micro = self.micro_batch_size
        gpus = self.data_parallel
        effective = self.samples_per_step
        if effective % (micro * gpus):
            times = ""
            got = f"{effective} and {micro}"
            if gpus > 1:
                times = " times data_parallel"
                got = f"{effective}, {micro} and {gpus}"
            raise ValueError(
                f"effective_batch_size must be a multiple of micro_batch_size{times}, got {got}"
            )
        return self

    @property
    def alpha(self) -> float:
        """LoRA scale numerator with its default resolved."""
        if self.lora_alpha is not None:
            return self.lora_alpha
        return 2.0 * self.lora_rank

    @property
    def method_kind(self) -> MethodKind:
        """What is known of its method."""
        return METHODS[self.method]

    @property
    def base_kind(self) -> QuantizationKind:
        """What is known of what its frozen base is stored in."""
        return QUANTIZATIONS[self.quantization]

    @property
    def compute_kind(self) -> ComputeKind:
        """What is known of what its matrix products multiply."""
        return COMPUTE_DTYPES[self.compute_dtype]

    @property
    def optimizer_kind(self) -> OptimizerKind:
        """What is known of its optimizer."""
        return OPTIMIZERS[self.optimizer]

    @property
    def kernels_kind(self) -> KernelsKind:
        """What is known of its layer kernels."""
        return KERNELS[self.kernels]

    @property
    def is_on_pairs(self) -> bool:
        """Whether it trains on pairs of completions."""
        return self.method_kind.is_on_pairs

    @property
    def is_on_completions(self) -> bool:
        """Whether its loss is of completions' log-probabilities, without logits as a whole."""
        return self.method_kind.is_on_completions

    @property
    def kernels_that_matter(self) -> Kernels:
        """Its layer kernels; without a fused loss where no loss takes the logits as a whole."""
        if self.is_on_completions and not self.kernels_kind.fuses_layers:
            return "hf"
        return self.kernels

    @property
    def is_in_trl(self) -> bool:
        """Whether one of TRL's trainers trains it; of completions nothing else does."""
        if self.trainer == "sweep":
            return self.method_kind.generates
        return self.trainer == "trl"

    @property
    def has_head_of_trl(self) -> bool:
        """Whether TRL's own head computes the loss, from a tile of logits at a time."""
        return self.is_in_trl and not self.is_on_pairs

    @property
    def masks_padding(self) -> bool:
        """Whether its trainer passes an attention mask with padded rows."""
        return self.trainer in ("trl", "axolotl", "llama-factory")

    @property
    def rows_per_sample(self) -> int:
        """Sequences of a sample: a pair has two."""
        return self.method_kind.rows_per_sample

    @property
    def references(self) -> int:
        """Passes through the base alone, in each micro-batch."""
        return int(self.is_on_pairs and self.reference == "adapter_off")

    @property
    def samples_per_step(self) -> int:
        """Sequences, or pairs, per optimizer step, of all GPUs together."""
        return self.effective_batch_size or self.micro_batch_size * self.data_parallel

    @property
    def accumulation_steps(self) -> int:
        """Micro-batches per optimizer step, of each GPU."""
        return self.samples_per_step // (self.micro_batch_size * self.data_parallel)

    @property
    def micro_batches_per_step(self) -> int:
        """Micro-batches per optimizer step, of all GPUs together."""
        return self.samples_per_step // self.micro_batch_size

    @property
    def tokens_per_micro_batch(self) -> int:
        """Tokens in one forward pass of one GPU."""
        return self.micro_batch_size * self.rows_per_sample * self.seq_len

    @property
    def waits_on_host(self) -> bool:
        """Whether there are inputs of recomputed layers that wait on the host."""
        return self.checkpoint_offload and self.checkpoint_fraction > 0

    @property
    def recomputes_as_nodes(self) -> bool:
        """Whether each recomputed layer is one node of the graph, which saves its input alone."""
        if not self.checkpoint_fraction:
            return False
        return self.waits_on_host or (self.compile and self.data_parallel == 1)

    @property
    def hidden_value_bytes(self) -> int:
        """Bytes of a value of the hidden states that layers hand on."""
        is_wide = self.upcast_fp32 or self.compute_dtype == "fp32"
        return 4 if is_wide else 2

    def hidden_bytes(self, width: int) -> int:
        """Return the bytes that a layer of some width hands on, of a micro-batch."""
        return self.tokens_per_micro_batch * width * self.hidden_value_bytes

    @property
    def tokens_per_step(self) -> int:
        """Tokens per optimizer step, of all GPUs together."""
        return self.samples_per_step * self.rows_per_sample * self.seq_len

    @property
    def is_quantized(self) -> bool:
        """Whether the frozen base is held in 4 or 8 bits."""
        return self.weight_bits < 16

    @property
    def is_4bit(self) -> bool:
        """Whether the frozen base is held in 4 bits."""
        return self.weight_bits == 4

    @property
    def weight_bits(self) -> int:
        """Bits of a frozen weight, scales not counted."""
        return self.base_kind.bits

    @property
    def numerics(self) -> Numerics:
        """The class of numerics of the frozen layers' products."""
        return self.compute_kind.numerics

    @property
    def is_8bit_compute(self) -> bool:
        """Whether the frozen layers multiply in 8 bits."""
        return self.compute_kind.bits == 8

    @property
    def is_paged(self) -> bool:
        """Whether the optimizer's states are in memory that bitsandbytes pages."""
        return self.optimizer_kind.unpaged is not None

    @property
    def is_sharded(self) -> bool:
        """Whether each GPU holds a share of the model, and not all of it."""
        return self.sharding != "none"

    def checkpointed_count(self, layers: int) -> int:
        """Return how many of so many decoder layers are recomputed."""
        return round(self.checkpoint_fraction * layers)

    def checkpointed_layers(self, layers: int) -> frozenset[int]:
        """Return which of so many decoder layers are recomputed: a share of them, evenly spread."""
        return _spread(self.checkpointed_count(layers), layers)

    def quantized_count(self, layers: int) -> int:
        """Return how many of so many decoder layers are quantized."""
        if not self.is_quantized:
            return 0
        return round(self.quantized_fraction * layers)

    def quantized_layers(self, layers: int) -> frozenset[int]:
        """Return which of so many decoder layers are quantized, evenly spread."""
        return _spread(self.quantized_count(layers), layers)

    def offloaded_layers(self, layers: int) -> frozenset[int]:
        """Return of which of so many layers with experts the weights lie on the host, evenly
        spread."""
        return _spread(round(self.offload_fraction * layers), layers)

    def changed(self, **changes: Any) -> TrialConfig:
        """Return the configuration with other values of some settings.

        Raises:
            pydantic.ValidationError: it is none, as at construction; `takes_micro_batch` asks first
                of what most often is.
        """
        values = {**self.__dict__, **changes}
        if "quantization" in changes and "adapter_dtype" not in changes and self.is_in_trl:
            # The base decides it, and the base is another one.
            del values["adapter_dtype"]
        return TrialConfig.model_validate(values)

    def takes_micro_batch(self, size: int) -> bool:
        """Whether a micro-batch of that size on each of its GPUs goes into its effective batch."""
        samples = self.effective_batch_size
        return samples is None or samples % (size * self.data_parallel) == 0

    def base(self) -> TrialConfig:
        """Return the settings that shape the frozen base; equal ones share one base."""
        resolved = canonical(self)
        shaping = {
            key: getattr(resolved, key) for key, setting in SETTINGS.items() if setting.shapes_base
        }
        return TrialConfig(**shaping)

    def capacity(self) -> dict[str, Any]:
        """Return what decides how much its adapters can learn, in plain JSON values."""
        return self.model_dump(mode="json", include=set(CAPACITY_KEYS))

    def key(self) -> str:
        """Return the canonical JSON text; equal for equal configurations."""
        return json.dumps(self.model_dump(mode="json"), sort_keys=True)

    def changes_from(self, other: TrialConfig) -> dict[str, Any]:
        """Return the keys whose values differ from ``other``, with this configuration's values."""
        changed = {key for key in CONFIG_KEYS if getattr(self, key) != getattr(other, key)}
        return self.model_dump(mode="json", include=changed)


def _spread(count: int, layers: int) -> frozenset[int]:
    """Return so many of the layers, evenly spread, the first among them."""
    return frozenset(index * layers // count for index in range(count))


CONFIG_KEYS = tuple(TrialConfig.model_fields)
SETTINGS: Mapping[str, Declaration] = {
    key: next(one for one in field.metadata if isinstance(one, Declaration))
    for key, field in TrialConfig.model_fields.items()
}
"""What is declared of each setting, by its key."""
_RESOLVED = {
    key: setting.resolved for key, setting in SETTINGS.items() if setting.resolved is not None
}

NEEDED: Mapping[tuple[str, Any], Mapping[str, Any]] = {
    ("sharding", "fsdp"): {"optimizer": SHARDED_OPTIMIZER, "upcast_fp32": False},
    ("method", "grpo"): {"upcast_fp32": False},
}
"""What a setting's value needs of others: who asks for it and says nothing of them means these."""


def needed_by(values: Mapping[str, Any]) -> dict[str, Any]:
    """Return what values of settings need of others."""
    needed: dict[str, Any] = {}
    for key, value in values.items():
        if isinstance(value, str | int):
            needed |= NEEDED.get((key, value), {})
    return needed


def number_kind(key: str) -> type[int] | type[float] | None:
    """Return what a setting's values are; None where they are words or truth values."""
    kinds = set(_kinds(TrialConfig.model_fields[key].annotation))
    for kind in (int, float):
        if kind in kinds:
            return kind
    return None


def _kinds(annotation: Any) -> Iterator[type]:
    if isinstance(annotation, type):
        yield annotation
    for part in get_args(annotation):
        yield from _kinds(part)


def parse_config(values: Mapping[str, Any], *, where: str = "configuration") -> TrialConfig:
    """Build a configuration from plain values; missing keys take the defaults.

    Args:
        values: plain values as JSON or YAML read them.
        where: what the values came from (``configs.jsonl: line 3``), for the message.

    Raises:
        InputError: an unknown key or a value out of range; the message names ``where``, key, value.
    """
    return validate(TrialConfig, dict(values), Document(where))


@lru_cache(maxsize=CONFIGS_KEPT)
def canonical(config: TrialConfig) -> TrialConfig:
    """Return the configuration that trains the same way, with every default written out.

    Two configurations with the same canonical form are one run: alpha left out is twice the rank,
    for one.
    """
    return config.changed(**{key: value(config) for key, value in _RESOLVED.items()})


def as_typed(value: Any) -> str:
    """Return a setting's value as it is typed on the command line."""
    if isinstance(value, list | tuple):
        return ",".join(value)
    if isinstance(value, str):
        return value
    return json.dumps(value)


def as_options(values: Mapping[str, Any]) -> list[str]:
    """Return values by their keys as they are typed on the command line."""
    words: list[str] = []
    for key, value in values.items():
        text = as_typed(value)
        if key in OPTION_KEYS:
            words += [OPTION_KEYS[key], text]
        elif key in SETTINGS or key == "numerics" or "." in key:
            words += ["--set", f"{key}={text}"]
        else:
            words += [f"--{key.replace('_', '-')}", text]
    return words


def allocator_settings(is_expandable: bool) -> dict[str, str]:
    """Return the variables that torch reads its allocator's settings from, when it is imported."""
    return {"PYTORCH_ALLOC_CONF": f"expandable_segments:{is_expandable}"}
