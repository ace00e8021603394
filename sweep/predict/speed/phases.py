"""Owns how long a card and its host take over the work of a step, before any of it is measured.

A few fractions, the same for every card, of the rates in the card's catalogue entry, and what its
host needs to launch one operation. Knows nothing of measured trials.
"""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, did_you_mean
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from sweep.predict.speed.kernels import Amount
from sweep.predict.speed.work import TERMS, Term, Work, step_work

MATMUL_EFFICIENCY = 0.88
"""Share of a card's measured matrix rate that a model's products keep up, memory traffic apart.

A profiled step on an H200 makes 677 TFLOP/s in its products, 0.86 of what square ones were measured
at there, with their traffic in it; the rest goes to shapes that fit less well and to the card's
power limit.
"""
ATTENTION_EFFICIENCY = 0.65
"""Share of the measured matrix rate that a causal flash kernel reaches, forward and backward
together: FlashAttention-2 on an A100, cuDNN's on an H200."""
ELEMENTWISE_EFFICIENCY = 0.89
"""Share of a large copy's rate that elementwise kernels reach."""
CACHE_HOLDS = 2 / 3
"""Share of a cache up to which a kernel's tensors stay in it; at twice that none of them do.

Published for a norm on an RTX 5090: full speed at two thirds, hardly any gain at four thirds.
"""
OVERHEAD_SECONDS = 5e-3
"""Per optimizer step: the batch's way to the card, schedule, and reading the loss back."""
OVERLAP_EXPONENT = 4.0
"""Sharpness of the maximum of host and card: either has stretches in which the other waits."""


@dataclass(frozen=True)
class Rates:
    """What a card sustains for a step's work, per second, and what its host needs to launch it."""

    matrix_flops: float
    memory_bytes: float
    """Of tensors that come from the card's memory."""
    elementwise_bytes: float
    """Of a micro-batch's activations, part of which a large cache may hold."""
    launch_seconds: float

    @classmethod
    def of(cls, gpu: GpuSpec, *, matrix_rate: float, stream_bytes: int) -> Rates:
        """Return the rates of ``gpu`` for a micro-batch whose residual stream is that large."""
        memory = gpu.copy_rate * ELEMENTWISE_EFFICIENCY
        elementwise = memory
        if gpu.cache is not None:
            # A kernel reads such a tensor and writes another.
            held = _held_by_cache(2 * stream_bytes / gpu.cache.bytes)
            in_cache = max(memory, gpu.cache.bandwidth_bytes_per_second)
            elementwise = 1.0 / (held / in_cache + (1.0 - held) / memory)
        return cls(matrix_rate, memory, elementwise, gpu.launch_seconds.typical)

    def compute_seconds(self, term: Term, amount: Amount) -> float:
        """Return what the matrix units need for an amount of a term."""
        share = ATTENTION_EFFICIENCY if term == "attention" else MATMUL_EFFICIENCY
        return amount.flops / (self.matrix_flops * share)

    def memory_seconds(self, term: Term, amount: Amount) -> float:
        """Return what the memory needs for an amount of a term."""
        is_elementwise = term in ("elementwise", "lora")
        return amount.bytes / (self.elementwise_bytes if is_elementwise else self.memory_bytes)


def _held_by_cache(fill: float) -> float:
    """Return the share of tensors that stay in a cache they take up ``fill`` times."""
    return min(1.0, max(0.0, 2.0 - fill / CACHE_HOLDS))


@dataclass(frozen=True)
class Phase:
    """A stretch of a step in which host and card run side by side. Seconds."""

    compute: dict[Term, float]
    """What the matrix units need, by term."""
    memory: dict[Term, float]
    """What the memory needs, by term."""
    launch: float
    """What the host needs to launch it all."""

    def device(self, term: Term) -> float:
        """Seconds of the card for a term."""
        return self.compute.get(term, 0.0) + self.memory.get(term, 0.0)


@dataclass(frozen=True)
class StepPhases:
    """An optimizer step as stretches that follow one another, and its fixed part."""

    phases: tuple[Phase, ...]
    overhead: float
    """Seconds that neither shortens nor hides."""
    model_flops: float
    """FLOPs the model needs per optimizer step, recomputation not counted."""
    peak_flops: float
    """The card's dense peak for the compute type."""


def step_phases(config: TrialConfig, *, model: ModelSpec, gpu: GpuSpec) -> StepPhases:
    """Return the stretches of one optimizer step of ``config`` on ``gpu``.

    Raises:
        InputError: the architecture is not known, or the card has no rate for the compute type.
    """
    peak = gpu.peak_flops.get(config.compute_dtype)
    matrix_rate = gpu.matrix_rate(config.compute_dtype)
    if peak is None or matrix_rate is None:
        known = did_you_mean(config.compute_dtype, gpu.peak_flops)
        raise InputError(f"{gpu.name} has no matrix rate for {config.compute_dtype}{known}")
    work = step_work(config, model)
    rates = Rates.of(gpu, matrix_rate=matrix_rate, stream_bytes=work.stream_bytes)
    micro_batches = {term: a * work.micro_batches for term, a in work.micro_batch.items()}
    stretches = [micro_batches | work.update]
    if config.compute_dtype == "fp16":
        # The gradient scaler reads back whether one overflowed before the optimizer may step.
        stretches = [micro_batches, work.update]
    return StepPhases(
        phases=tuple(_phase(stretch, rates) for stretch in stretches),
        overhead=OVERHEAD_SECONDS,
        model_flops=work.model_flops,
        peak_flops=peak,
    )


def overlapped(device: float, launch: float) -> float:
    """Return the seconds of a stretch that keeps the card and the host busy for so long."""
    longest = max(device, launch)
    if longest <= 0.0:
        return 0.0
    shares = (device / longest) ** OVERLAP_EXPONENT + (launch / longest) ** OVERLAP_EXPONENT
    return float(longest * shares ** (1.0 / OVERLAP_EXPONENT))


def _phase(work: Work, rates: Rates) -> Phase:
    amounts = {term: work.get(term, Amount()) for term in TERMS}
    return Phase(
        compute={term: rates.compute_seconds(term, amount) for term, amount in amounts.items()},
        memory={term: rates.memory_seconds(term, amount) for term, amount in amounts.items()},
        launch=sum(amount.launches for amount in amounts.values()) * rates.launch_seconds,
    )
