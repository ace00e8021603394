"""What each trainer can do: the one record of a program that trains what a search finds.

Rules, spaces, predictions, studies and exports ask here. What was read of the programs, and in
which versions, stands at the head of ``sweep/export/trainers.yaml``, which holds how their files
spell a setting.
"""

from __future__ import annotations

from collections.abc import Callable, Iterator, Mapping
from dataclasses import dataclass, field, replace
from functools import lru_cache
from typing import Any, Literal

from qlora_sweep.search_spaces.config import (
    ADAPTERS_IN_TRL,
    SETTINGS,
    AdapterDtype,
    TrialConfig,
    as_typed,
)
from qlora_sweep.search_spaces.kinds import (
    COMPUTE_DTYPES,
    METHODS,
    QUANTIZATIONS,
    TRAINER_LABELS,
    ComputeDtype,
    TrainerName,
)
from qlora_sweep.search_spaces.linears import has_experts
from qlora_sweep.search_spaces.models import ModelSpec

Recomputing = Literal["any share", "each n-th", "all or none"]
"""Which decoder layers can be recomputed: any of them, each n-th from the first on, or all."""


@dataclass(frozen=True)
class Trainer:
    """A program that trains, and what it can do."""

    label: str
    """What people call it."""
    does: str = ""
    """What its step does otherwise than ours, as a clause."""
    evidence: str = ""
    """What is known of predictions of its step, as a clause."""
    runs: Mapping[str, tuple[Any, ...]] = field(default_factory=dict)
    """By setting, the values that it runs as they are, the plainest first; a setting that is not
    named takes any value."""
    instead: Mapping[str, Mapping[Any, Any]] = field(default_factory=dict)
    """By setting and value, what its file does in place of that value, where that is not the first
    value of ``runs``."""
    adapter_dtypes: Mapping[bool, tuple[AdapterDtype, ...]] = field(
        default_factory=lambda: dict.fromkeys((True, False), ("fp32", "bf16"))
    )
    """Types of the adapters of a quantized base (True), and of one in 16 bits. Where it is the same
    one for both, and not fp32, ``runs`` names it too: a space's own is fp32."""
    recomputes: Recomputing = "any share"
    masks_full_rows: Literal["never", "sometimes", "always"] = "never"
    """Whether a micro-batch comes with an attention mask where rows are full: sometimes in TRL, as
    the last row of each thousand examples is shorter; always in axolotl, which packs examples."""
    joins_packed_rows: bool = False
    """Whether the packed rows of a micro-batch become one long row, each of whose tokens is masked
    from the others' examples."""
    has_measured_peaks: bool = False
    """Whether predictions of its memory were held to measured peaks of its steps, or it is our own
    step; others' are said to be far less sure."""
    measured: Mapping[str, Callable[[TrialConfig], bool]] | None = None
    """Where its kernels are its own: what was measured, in words, and whether a configuration is of
    that; None where our own steps stand for its."""
    measured_types: tuple[str, ...] = ()
    """Model types whose layers are those that were measured."""

    def unmeasured(self, config: TrialConfig, model_type: str, *, has_dataset: bool) -> str | None:
        """Return why neither memory nor speed of a configuration is predicted, as nothing is
        measured that is like it; None where they are.

        Args:
            config: the configuration.
            model_type: of the model.
            has_dataset: whether it would train on a dataset.
        """
        if self.measured is None:
            return None
        what = None
        if has_dataset:
            what = "a dataset"
        elif model_type not in self.measured_types:
            what = f"model type '{model_type}'"
        elif not any(holds(config) for holds in self.measured.values()):
            known = " or ".join(self.measured)
            return f"{self.label} is not predicted but with {known}: nothing else is measured"
        return what and f"{self.label} on {what} is not predicted: nothing of it is measured"

    @property
    def about(self) -> str | None:
        """What predictions of its step are of, and what is known of them, as a sentence; None where
        nothing is otherwise than ours."""
        if not self.does:
            return None
        return f"memory and speed are of {self.label}: {self.does}; {self.evidence}"

    @property
    def runs_everything(self) -> bool:
        """Whether there is no setting that it cannot run."""
        return not self.runs

    @property
    def decides_adapter_dtype(self) -> bool:
        """Whether the base alone decides in which type it has the adapters."""
        narrow, wide = self.adapter_dtypes[True], self.adapter_dtypes[False]
        return len(narrow) == len(wide) == 1 and narrow != wide

    def allowed(self, key: str, config: TrialConfig) -> tuple[Any, ...] | None:
        """Return the values of a setting that it runs beside the others of a configuration; None
        where it runs any."""
        if key == "adapter_dtype":
            return self.adapter_dtypes[config.is_quantized]
        return self.runs.get(key)

    def widens_experts(self, config: TrialConfig, model: ModelSpec) -> bool:
        """Whether it keeps experts in 16 bits that a configuration has in 4 or 8."""
        return not self.runs_everything and config.is_quantized and has_experts(model)

    def recomputable(self, share: float, layers: int) -> bool:
        """Whether it can recompute a share of so many decoder layers."""
        if self.recomputes == "any share" or round(share * layers) in (0, layers):
            return True
        return self.recomputes == "each n-th" and every_nth(share, layers) is not None

    def lacks(self, config: TrialConfig, model: ModelSpec) -> Iterator[tuple[str, str]]:
        """Yield each setting of a configuration whose value it cannot run, and what it can run.

        Args:
            config: the configuration.
            model: which it trains.
        """
        for key in (*self.runs, "adapter_dtype"):
            allowed = self.allowed(key, config)
            if allowed is not None and getattr(config, key) not in allowed and applies(key, config):
                yield key, f"use {key} {' or '.join(map(as_typed, allowed))}"
        if self.widens_experts(config, model):
            yield "quantization", "use quantization none, as experts stay in 16 bits there"
        if not self.recomputable(config.checkpoint_fraction, model.hidden_layers):
            yield "checkpoint_fraction", f"use checkpoint_fraction {self.shares_in_words}"

    @property
    def shares_in_words(self) -> str:
        """The shares of recomputed layers that it can run."""
        each_nth = ", or a share that is each n-th layer, as 0.5"
        return f"0 or 1{each_nth if self.recomputes == 'each n-th' else ''}"

    def as_run(self, config: TrialConfig, *, model: ModelSpec, half: ComputeDtype) -> TrialConfig:
        """Return the configuration that its file trains in place of one that it cannot run.

        A base in 8 bits is one of bitsandbytes' `LLM.int8`, for which an int8 base of ours with
        16-bit products stands; one whose experts stay in 16 bits is nearly all in 16.

        Args:
            config: the configuration.
            model: which it trains.
            half: the 16-bit type of the GPU, in place of 8-bit products.
        """
        changes: dict[str, Any] = {}
        for key, allowed in self.runs.items():
            value = getattr(config, key)
            if value not in allowed:
                changes[key] = self.instead.get(key, {}).get(value, allowed[0])
        if config.is_8bit_compute and "compute_dtype" in changes:
            changes["compute_dtype"] = half
        if config.weight_bits == 8 and "quantization" in changes:
            changes["quantization"] = "int8"
        if self.widens_experts(config, model):
            changes["quantization"] = "none"
        if not self.recomputable(config.checkpoint_fraction, model.hidden_layers):
            changes["checkpoint_fraction"] = 1.0
        changed = config.changed(**changes)
        types = self.adapter_dtypes[changed.is_quantized]
        if changed.adapter_dtype not in types:
            changed = changed.changed(adapter_dtype=types[0])
        return changed


def applies(key: str, config: TrialConfig) -> bool:
    """Whether a setting means anything in a configuration."""
    condition = SETTINGS[key].applies
    return condition is None or condition(config)


@lru_cache(maxsize=1024)
def every_nth(share: float, layers: int) -> int | None:
    """Return n where a share of so many layers is each n-th, the first included; None elsewhere."""
    recomputed = sorted(TrialConfig(checkpoint_fraction=share).checkpointed_layers(layers))
    for step in range(2, layers + 1):
        if recomputed == list(range(0, layers, step)):
            return step
    return None


SHARES = (0.0, 0.125, 0.25, 0.5, 1.0)
"""Shares of recomputed layers that a trainer may take, of a range that has no steps."""
_OF_LIBRARIES: Mapping[str, tuple[Any, ...]] = {
    "method": ("sft",),
    "compute_dtype": tuple(name for name, kind in COMPUTE_DTYPES.items() if kind.bits != 8),
    # bitsandbytes' 8-bit layers are not what a trial measures.
    "quantization": tuple(name for name, kind in QUANTIZATIONS.items() if kind.bits != 8),
    "quantized_fraction": (1.0,),
    "offload_fraction": (0.0,),
    "checkpoint_offload": (False,),
    "upcast_fp32": (False,),
    "compile": (False,),
    "sharding": ("none",),
}
"""What programs can do that put transformers, PEFT and bitsandbytes together."""

_NOT_MEASURED = "derived from its code, and no step of it was measured on a GPU"

TRAINERS: Mapping[TrainerName, Trainer] = {
    "sweep": Trainer(TRAINER_LABELS["sweep"], has_measured_peaks=True),
    "trl": Trainer(
        TRAINER_LABELS["trl"],
        does="its own head computes the loss of texts, adapters are bf16 on a quantized base and "
        "fp32 on a 16-bit one, and a row that is shorter than others brings an attention mask",
        evidence="of three steps of TRL 1.16.0's SFTTrainer on an H200 peaks were within 0.3 % and "
        "speeds 6 % below to 4 % above what is predicted, peaks of ten of its GRPOTrainer were "
        "within 1.8 %",
        runs={
            **_OF_LIBRARIES,
            "method": tuple(METHODS),
            # Of either its own head computes the loss in chunks; it refuses Liger's fused loss.
            "kernels": ("hf", "liger"),
        },
        adapter_dtypes={kind: (dtype,) for kind, dtype in ADAPTERS_IN_TRL.items()},
        recomputes="each n-th",
        masks_full_rows="sometimes",
        joins_packed_rows=True,
        has_measured_peaks=True,
    ),
    "axolotl": Trainer(
        TRAINER_LABELS["axolotl"],
        does="rows bring an attention mask, and nothing is compiled",
        evidence=_NOT_MEASURED,
        runs=_OF_LIBRARIES,
        adapter_dtypes={True: ("fp32",), False: ("fp32", "bf16")},
        recomputes="all or none",
        masks_full_rows="always",
    ),
    "llama-factory": Trainer(
        TRAINER_LABELS["llama-factory"],
        does="padded rows bring an attention mask, and nothing is compiled",
        evidence=_NOT_MEASURED,
        runs={
            **_OF_LIBRARIES,
            "compute_dtype": ("bf16", "fp16"),
            "kernels": ("hf", "liger"),
        },
        instead={"kernels": {"fused-loss": "liger"}},
        adapter_dtypes=dict.fromkeys((True, False), ("fp32",)),
        recomputes="all or none",
    ),
    "unsloth": Trainer(
        TRAINER_LABELS["unsloth"],
        does="its kernels are its own",
        evidence="factors over our own step, of two rows each, measured on an H200 with Mistral-7B "
        "at 512 tokens",
        runs={
            **_OF_LIBRARIES,
            "compute_dtype": ("bf16", "fp16"),
            "quantization": ("nf4", "none"),
            "double_quant": (True,),
            # It has kernels of its own, and takes the attention that is installed.
            "kernels": ("hf",),
            "attention": ("sdpa",),
            "lora_dropout": (0.0,),
            "packing": ("none",),
            "data_parallel": (1,),
        },
        adapter_dtypes=dict.fromkeys((True, False), ("fp32",)),
        recomputes="all or none",
        measured={
            "an nf4 base in bf16": lambda c: c.quantization == "nf4" and c.compute_dtype == "bf16",
            "a 16-bit base in bf16 without recomputed layers": lambda c: (
                c.quantization == "none"
                and c.compute_dtype == "bf16"
                and c.checkpoint_fraction == 0
            ),
        },
        measured_types=("mistral", "llama", "qwen2", "qwen3"),
    ),
}
"""By the name that ``--for`` takes."""

GRPO = replace(
    TRAINERS["trl"],
    runs={**TRAINERS["trl"].runs, "method": ("grpo",), "packing": ("none",)},
    recomputes="all or none",
)
"""TRL's GRPOTrainer: nothing else trains by that method."""


def trainer_of(config: TrialConfig) -> Trainer:
    """Return what trains a configuration."""
    return trainer_named(config.trainer, config.method)


def trainer_named(name: TrainerName, method: str) -> Trainer:
    """Return the trainer of a name, as it trains by a method."""
    if METHODS[method].generates and name in ("sweep", "trl"):
        return GRPO
    return TRAINERS[name]
