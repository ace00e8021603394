"""Owns how long a card and its host take over the work of a step, before any of it is measured.

A few fractions of what a card's data sheet promises, the same for every card, and what the host
needs to launch one operation. Knows nothing of measured trials.
"""

from __future__ import annotations

from dataclasses import dataclass

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError, did_you_mean
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from sweep.predict.kernels import Amount
from sweep.predict.work import TERMS, Term, Work, step_work

MATMUL_EFFICIENCY = 0.75
"""Share of the dense peak that large matrix products keep up, their memory traffic aside.

A single 8192-cube on an H200 runs at 0.80 of 989 TFLOP/s on random data; over seconds of steps
the card's power limit takes some of that back.
"""
ATTENTION_EFFICIENCY = 0.45
"""Share of the dense peak that a causal flash kernel reaches, forward and backward together."""
BANDWIDTH_EFFICIENCY = 0.80
"""Share of the data sheet's bandwidth for elementwise kernels; a plain copy on an H200 gets 0.9."""
LAUNCH_SECONDS = 33e-6
"""Host time per eager operation: Python, PEFT's and bitsandbytes' wrappers, autograd, launch.

From steps of few tokens on an H200's host, which take as long whatever their size. It is the
host's figure rather than the card's, and the first that measured trials correct.
"""
OVERHEAD_SECONDS = 5e-3
"""Per optimizer step: the batch's way to the card, schedule, and reading the loss back."""
OVERLAP_EXPONENT = 4.0
"""Sharpness of the maximum of host and card: either has stretches in which the other waits."""


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
    if peak is None:
        known = did_you_mean(config.compute_dtype, gpu.peak_flops)
        raise InputError(f"{gpu.name} has no matrix rate for {config.compute_dtype}{known}")
    work = step_work(config, model)
    micro_batches = {term: a * work.micro_batches for term, a in work.micro_batch.items()}
    stretches = [micro_batches | work.update]
    if config.compute_dtype == "fp16":
        # The gradient scaler reads back whether one overflowed before the optimizer may step.
        stretches = [micro_batches, work.update]
    return StepPhases(
        phases=tuple(_phase(stretch, peak=peak, gpu=gpu) for stretch in stretches),
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


def _phase(work: Work, *, peak: float, gpu: GpuSpec) -> Phase:
    bandwidth = gpu.bandwidth_bytes_per_second * BANDWIDTH_EFFICIENCY
    amounts = {term: work.get(term, Amount()) for term in TERMS}
    return Phase(
        compute={t: a.flops / (peak * _efficiency(t)) for t, a in amounts.items()},
        memory={t: a.bytes / bandwidth for t, a in amounts.items()},
        launch=sum(a.launches for a in amounts.values()) * LAUNCH_SECONDS,
    )


def _efficiency(term: Term) -> float:
    return ATTENTION_EFFICIENCY if term == "attention" else MATMUL_EFFICIENCY
