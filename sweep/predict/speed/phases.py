"""Owns how long a card and its host take over the work of steps, before any of it is measured.

A few fractions, the same for every card, of the rates in the card's catalogue entry, and what its
host needs to launch one operation. Knows nothing of measured trials.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec
from search_spaces.models import ModelSpec
from sweep.predict.speed.between import waiting_seconds
from sweep.predict.speed.kernels import Amount
from sweep.predict.speed.layout import Layout, Sizes
from sweep.predict.speed.work import TERMS, Work, step_work

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
BACKWARD_SHARE = 0.5
"""Of a micro-batch, at least the backward pass: one product for each of the forward's, and more
where layers are recomputed."""
OVERLAP_EXPONENT = 4.0
"""Sharpness of the maximum of host and card: either has stretches in which the other waits."""


_LAUNCH, _OVERHEAD = len(TERMS), len(TERMS) + 1
"""Where the host's part and the fixed part are in what has a column for each factor."""
_STRETCHES = 2


@dataclass(frozen=True, eq=False)
class StepPhases:
    """Optimizer steps as two stretches that follow one another, and a fixed part. Seconds.

    Within a stretch host and card run side by side. Of most steps the second is empty. Rows are
    configurations; not a number where a configuration has no prediction.
    """

    compute: NDArray[np.float64]
    """What the matrix units need, by configuration, stretch and term."""
    memory: NDArray[np.float64]
    """What the memory needs, alike."""
    launch: NDArray[np.float64]
    """What the host needs to launch it all, by configuration and stretch."""
    model_flops: Sizes
    """FLOPs the model needs per optimizer step, recomputation not counted."""
    peak_flops: Sizes
    """The card's dense peak for the compute type."""
    between: Sizes
    """What each step waits for other cards that take it too."""

    @classmethod
    def of(cls, configs: Sequence[TrialConfig], *, model: ModelSpec, gpu: GpuSpec) -> StepPhases:
        """Return the steps of configurations on a card."""
        try:
            layout = Layout.of(configs, model)
        except InputError:
            return cls._unknown(len(configs))
        work = step_work(layout)
        # The gradient scaler reads back whether one overflowed before the optimizer may step.
        waits = layout.are(lambda config: config.compute_dtype == "fp16")
        update = work.update["optimizer"]
        stretches: list[Work] = [
            {**work.micro_batches, "optimizer": update * ~waits},
            {"optimizer": update * waits},
        ]
        rates = _Rates.of(gpu, layout, stream_bytes=work.stream_bytes)
        seconds = [rates.seconds(stretch) for stretch in stretches]
        compute, memory, launch = (np.stack(parts, axis=1) for parts in zip(*seconds, strict=True))
        peak = layout.sizes(lambda config: gpu.peak_flops.get(config.compute_dtype) or np.nan)
        phases = cls(compute, memory, launch, work.model_flops, peak, np.zeros(len(configs)))
        if (layout.cards == 1).all():
            return phases
        alone = phases.seconds(np.ones(_OVERHEAD + 1)) - OVERHEAD_SECONDS
        backward = BACKWARD_SHARE * alone / np.maximum(1.0, layout.micro_batches)
        return replace(phases, between=waiting_seconds(layout, gpu, backward=backward))

    @classmethod
    def _unknown(cls, count: int) -> StepPhases:
        stretches = (count, _STRETCHES)
        terms = (*stretches, len(TERMS))
        shapes = (terms, terms, stretches, count, count, count)
        return cls(*[np.full(shape, np.nan) for shape in shapes])

    @cached_property
    def device(self) -> NDArray[np.float64]:
        """What the card needs, by configuration, stretch and term."""
        return self.compute + self.memory

    def seconds(self, factors: NDArray[np.float64]) -> Sizes:
        """Return the seconds of each step.

        Args:
            factors: by which each term, the launches and the overhead differ from prediction.
        """
        whole = overlapped(self.device @ factors[:_LAUNCH], self.launch * factors[_LAUNCH])
        return np.asarray(whole.sum(axis=1) + self.fixed * factors[_OVERHEAD])

    @property
    def fixed(self) -> Sizes:
        """What a step takes beside its stretches."""
        return OVERHEAD_SECONDS + self.between

    def slopes(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return seconds per unit of each factor, by configuration and factor.

        A step's time is homogeneous in the factors, so these times the factors are the step itself.
        """
        card, host = self.device @ factors[:_LAUNCH], self.launch * factors[_LAUNCH]
        whole = overlapped(card, host)
        card, host = (
            np.divide(part, whole, out=np.zeros_like(whole), where=whole != 0.0)
            ** (OVERLAP_EXPONENT - 1.0)
            for part in (card, host)
        )
        return np.column_stack(
            [
                np.einsum("npt,np->nt", self.device, card),
                (self.launch * host).sum(axis=1),
                # Of a step that has no prediction the fixed part is none either.
                np.where(np.isnan(whole.sum(axis=1)), np.nan, self.fixed),
            ]
        )


def refusal(config: TrialConfig, *, model: ModelSpec, gpu: GpuSpec) -> str | None:
    """Return why the step of a configuration has no prediction; None where it has one."""
    dtype = config.compute_dtype
    if gpu.peak_flops.get(dtype) is None or gpu.matrix_rate(dtype) is None:
        return f"{gpu.name} has no matrix rate for {dtype}: it has {', '.join(gpu.peak_flops)}"
    try:
        Layout.of([config], model)
    except InputError as error:
        return str(error)
    return None


def overlapped(device: NDArray[np.float64], launch: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds of stretches that keep the card and the host busy for so long."""
    longest = np.maximum(device, launch)
    shorter = np.divide(
        np.minimum(device, launch), longest, out=np.zeros_like(longest), where=longest != 0.0
    )
    return np.asarray(longest * (1.0 + shorter**OVERLAP_EXPONENT) ** (1.0 / OVERLAP_EXPONENT))


@dataclass(frozen=True, eq=False)
class _Rates:
    """What a card sustains for each step's work, per second, and what its host takes to launch."""

    matrix_flops: Sizes
    """Of 16-bit and wider products; not a number where the GPU has no rate for the compute type."""
    eight_bit_flops: Sizes
    """Of those in 8 bits, where there are any."""
    memory_bytes: float
    """Of tensors that come from the card's memory."""
    elementwise_bytes: Sizes
    """Of a micro-batch's activations, part of which a large cache may hold."""
    launch_seconds: float

    @classmethod
    def of(cls, gpu: GpuSpec, layout: Layout, *, stream_bytes: Sizes) -> _Rates:
        """Return the rates of ``gpu`` for micro-batches whose residual streams are that large."""
        memory = gpu.copy_rate * ELEMENTWISE_EFFICIENCY
        elementwise = np.full_like(stream_bytes, memory)
        if gpu.cache is not None:
            # A kernel reads such a tensor and writes another; some of it stays in the cache.
            held = np.clip(2.0 - 2 * stream_bytes / gpu.cache.bytes / CACHE_HOLDS, 0.0, 1.0)
            in_cache = max(memory, gpu.cache.bandwidth_bytes_per_second)
            elementwise = 1.0 / (held / in_cache + (1.0 - held) / memory)
        own = layout.sizes(lambda config: gpu.matrix_rate(config.compute_dtype) or np.nan)
        around = np.where(layout.is_8bit_compute, gpu.matrix_rate(gpu.half) or np.nan, own)
        return cls(around, own, memory, elementwise, gpu.launch_seconds.typical)

    def seconds(self, work: Work) -> tuple[NDArray[np.float64], ...]:
        """Return the seconds of the matrix units and of the memory, by configuration and term, and
        those of the host.
        """
        compute, memory = np.zeros((2, len(self.matrix_flops), len(TERMS)))
        launches = np.zeros(len(self.matrix_flops))
        for column, term in enumerate(TERMS):
            amount = work.get(term, Amount())
            share = ATTENTION_EFFICIENCY if term == "attention" else MATMUL_EFFICIENCY
            flops = self.eight_bit_flops if term == "eight_bit" else self.matrix_flops
            compute[:, column] = amount.flops / (flops * share)
            is_elementwise = term in ("elementwise", "lora")
            rate = self.elementwise_bytes if is_elementwise else self.memory_bytes
            memory[:, column] = amount.bytes / rate
            launches += amount.launches
        return compute, memory, launches * self.launch_seconds
