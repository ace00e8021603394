"""What is known of each value of a setting that is one of a few words: each is declared here, once.

A value is a word of a ``Literal`` and a record in the table of its kind; everything else looks up
what the record says. `tests/search_spaces/test_declared_kinds.py` refuses a word without a record.
A table has what needs least memory first.
"""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field
from typing import Any, Literal

ComputeDtype = Literal["bf16", "fp16", "fp32", "fp8", "int8"]
Quantization = Literal["nf4", "fp4", "fp8", "int8", "none"]
Numerics = Literal["16-bit", "fp8", "int8"]
Kernels = Literal["hf", "fused-loss", "liger"]
OptimizerName = Literal["adamw_8bit", "paged_adamw_8bit", "adamw_torch_fused"]
Method = Literal["sft", "dpo", "grpo"]
DeviceName = Literal["cuda", "cpu"]
TrainerName = Literal["sweep", "trl", "axolotl", "llama-factory", "unsloth"]

AMPERE = (8, 0)
ADA = (8, 9)
TURING = (7, 5)
VOLTA = (7, 0)
"""Compute capabilities of NVIDIA's GPUs."""
HOST_SLOTS = 2
"""Layers that have a place on the GPU, of those whose experts, or inputs, lie on the host
(`sweep.training.offload`, `recomputing`)."""


@dataclass(frozen=True)
class OptimizerKind:
    """An optimizer of the adapters, under the name that transformers, TRL, axolotl and
    LLaMA-Factory have for it."""

    built_by: str
    """Its class, as `pkgutil.resolve_name` finds it."""
    launches: float
    """Operations that an update takes per adapter matrix."""
    arguments: Mapping[str, Any] = field(default_factory=dict)
    """What its class is told beside parameters and learning rate: all in which its defaults are
    not what exported files say, weight decay and betas among them."""
    moments: int = 2
    """Numbers that it keeps of each parameter."""
    has_8_bit_moments: bool = False
    """Whether moments have a byte each and a scale for each block, as bitsandbytes keeps them; they
    are of the parameter's own type elsewhere."""
    counts_on_gpu: bool = False
    """Whether the number of updates of each tensor is kept on the GPU, in fp32."""
    updates_shards: bool = False
    """Whether it can update a share of a tensor (it has operators for DTensor)."""
    unpaged: OptimizerName | None = None
    """The same optimizer with its moments on the GPU, where this one's are in memory that
    bitsandbytes pages between host and GPU; None where they are on the GPU."""

    @property
    def library(self) -> str:
        """The package that it is from."""
        return self.built_by.partition(".")[0]


OPTIMIZERS: Mapping[OptimizerName, OptimizerKind] = {
    "paged_adamw_8bit": OptimizerKind(
        "bitsandbytes.optim:PagedAdamW8bit",
        launches=5.0,
        has_8_bit_moments=True,
        unpaged="adamw_8bit",
    ),
    "adamw_8bit": OptimizerKind(
        "bitsandbytes.optim:AdamW8bit", launches=3.0, has_8_bit_moments=True
    ),
    "adamw_torch_fused": OptimizerKind(
        "torch.optim:AdamW",
        # bitsandbytes updates one matrix at a time, torch many at once.
        launches=0.1,
        arguments={"fused": True},
        counts_on_gpu=True,
        updates_shards=True,
    ),
}


SHARDED_OPTIMIZER = next(name for name, kind in OPTIMIZERS.items() if kind.updates_shards)
"""The optimizer to take where each GPU has a share of every tensor."""


@dataclass(frozen=True)
class QuantizationKind:
    """What the weights of the frozen linear layers are stored in."""

    bits: Literal[4, 8, 16]
    """Of a weight, scales not counted. bitsandbytes' layers hold 4 bits, ours 8, torch's 16."""
    words: str
    """A base of this kind, in words that stand alone."""
    since: tuple[int, int] | None = None
    """Compute capability from which matrix units multiply it; None where they need not, as it is
    expanded first."""
    traced_as: Quantization | None = None
    """The kind that has the same tensors and stands for it where they are counted; None for
    itself."""
    sharded: Literal["measured", "tried", "untried"] = "untried"
    """What is known of it under FSDP2."""
    nats_over_16_bits: Mapping[Numerics, float] = field(default_factory=dict)
    """Held-out loss in nats a token over that of a 16-bit base with 16-bit compute, by the class of
    numerics of the products (one H200, 2026-11-28; `python -m tests.bench.eight_bit_cost` makes
    them)."""


QUANTIZATIONS: Mapping[Quantization, QuantizationKind] = {
    "nf4": QuantizationKind(
        4,
        "nf4 base",
        sharded="measured",
        nats_over_16_bits={"16-bit": 0.046, "fp8": 0.054, "int8": 0.05},
    ),
    # The two 4-bit types differ in what sixteen values they tell apart, and in no tensor.
    "fp4": QuantizationKind(4, "fp4 base", traced_as="nf4", sharded="tried"),
    "fp8": QuantizationKind(
        8, "fp8 base", since=ADA, nats_over_16_bits={"16-bit": 0.003, "fp8": 0.009}
    ),
    "int8": QuantizationKind(
        8, "int8 base", since=TURING, nats_over_16_bits={"16-bit": 0.001, "int8": 0.005}
    ),
    "none": QuantizationKind(
        16, "16-bit base", sharded="measured", nats_over_16_bits={"16-bit": 0.0}
    ),
}


@dataclass(frozen=True)
class ComputeKind:
    """What the frozen layers' matrix products multiply."""

    bits: Literal[8, 16, 32]
    torch_name: str
    """The type's name in torch."""
    plainness: int
    """Its place where configurations are equally fast, the plainest first."""
    numerics: Numerics = "16-bit"
    """The class of numerics of the products."""
    since: tuple[int, int] | None = None
    """Compute capability from which matrix units multiply it; None where all do, or none."""
    scales_loss: bool = False
    """Whether the loss is scaled, so that small gradients do not vanish: after each step the host
    waits to hear whether one overflowed."""
    too_few_rows: int = 0
    """Rows of a matrix that its product takes more of."""
    needs_gpu: bool = False
    """Whether nothing trains in it on a CPU."""

    def runs_on(self, capability: tuple[int, int]) -> bool:
        """Whether a GPU of a compute capability multiplies it."""
        return self.since is None or capability >= self.since


COMPUTE_DTYPES: Mapping[ComputeDtype, ComputeKind] = {
    "bf16": ComputeKind(16, "bfloat16", plainness=0, since=AMPERE),
    "fp16": ComputeKind(16, "float16", plainness=1, scales_loss=True, needs_gpu=True),
    "fp32": ComputeKind(32, "float32", plainness=2),
    "fp8": ComputeKind(8, "float8_e4m3fn", plainness=3, numerics="fp8", since=ADA),
    "int8": ComputeKind(
        8,
        "int8",
        plainness=3,
        numerics="int8",
        since=TURING,
        # `torch._int_mm` refuses so few.
        too_few_rows=16,
    ),
}


@dataclass(frozen=True)
class MethodKind:
    """What is trained on, and which part of it a step computes."""

    words: str
    generates: bool = False
    """Whether the model generates the completions that it is trained on. Nothing here does: such a
    method is planned alone, as TRL trains it."""
    is_on_pairs: bool = False
    """Whether each sample is a chosen and a rejected completion, of a row each."""
    is_on_completions: bool = True
    """Whether the loss is of completions' log-probabilities, without logits as a whole."""

    @property
    def rows_per_sample(self) -> int:
        """Sequences of a sample."""
        if self.is_on_pairs:
            return 2
        return 1


METHODS: Mapping[str, MethodKind] = {
    "sft": MethodKind("supervised", is_on_completions=False),
    "dpo": MethodKind("DPO", is_on_pairs=True),
    "grpo": MethodKind("GRPO", generates=True),
}


@dataclass(frozen=True)
class KernelsKind:
    """Whose kernels the layers run."""

    words: str
    fuses_loss: bool
    """Whether Liger's fused loss is among them, which never holds the logits."""
    fuses_layers: bool
    """Whether Liger's norms, activations and rotary embeddings are among them."""

    @property
    def in_liger(self) -> dict[str, bool] | None:
        """Which of Liger's kernels they are, by Liger's names; None for none."""
        if not self.fuses_loss:
            return None
        return {
            "fused_linear_cross_entropy": True,
            "cross_entropy": False,
            "rms_norm": self.fuses_layers,
            # Of the two activations a model has one; the other's switch does nothing.
            "swiglu": self.fuses_layers,
            "geglu": self.fuses_layers,
            "rope": self.fuses_layers,
        }


KERNELS: Mapping[Kernels, KernelsKind] = {
    "liger": KernelsKind("Liger kernels", fuses_loss=True, fuses_layers=True),
    "fused-loss": KernelsKind("fused-loss kernels", fuses_loss=True, fuses_layers=False),
    "hf": KernelsKind("standard kernels", fuses_loss=False, fuses_layers=False),
}


@dataclass(frozen=True)
class DeviceKind:
    """What a process trains on; `sweep.training.device` drives it."""

    is_gpu: bool
    """Whether it has memory of its own, which a trial is given a budget of."""
    process_group: str
    """What torch's process group of several of them sends by."""


DEVICES: Mapping[str, DeviceKind] = {
    "cuda": DeviceKind(is_gpu=True, process_group="nccl"),
    "cpu": DeviceKind(is_gpu=False, process_group="gloo"),
}

TRAINER_LABELS: Mapping[TrainerName, str] = {
    "sweep": "sweep",
    "trl": "TRL",
    "axolotl": "axolotl",
    "llama-factory": "LLaMA-Factory",
    "unsloth": "Unsloth",
}
"""What the trainers are called; what each can do says `search_spaces.trainers`."""

EIGHT_BIT = tuple(name for name, kind in COMPUTE_DTYPES.items() if kind.bits == 8)
"""What a matrix product of 8 bits multiplies."""


def lean_first(kinds: Mapping[str, Any]) -> tuple[str, ...]:
    """Return the words of a table that need less memory than the last one, the least first."""
    return tuple(kinds)[:-1]


def in_words(
    kinds: Mapping[Any, MethodKind | QuantizationKind | KernelsKind],
) -> Mapping[str, str]:
    """Return each value of a table in words that stand alone."""
    return {name: kind.words for name, kind in kinds.items()}
