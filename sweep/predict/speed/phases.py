"""How long a GPU and its host take over the work of steps, before any of it is measured.

A few fractions, the same for every GPU, of the rates in its catalogue entry, what its host needs to
launch one operation, and what GPUs that train together send each other. Two H200 joined by NVLink
made 1.88 to 1.96 times the tokens of one (Mistral-7B, 8 x 512, Liger, no recomputation), and 1.62
times once; eight trials of models that they shared took 0.87 to 1.19 times what is predicted. Of no
other GPU was anything measured, nor of PCIe.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace
from functools import cached_property

import numpy as np
from numpy.typing import NDArray

from search_spaces.config import TrialConfig
from search_spaces.errors import InputError
from search_spaces.gpus import GpuSpec, Interconnect
from search_spaces.models import ModelSpec
from sweep.predict.speed.kernels import BYTES, FLOPS, LAUNCHES, Work
from sweep.predict.speed.layout import Layout, Sizes, known_linears
from sweep.predict.speed.work import TERMS, step_work

MATMUL_EFFICIENCY = 0.88
"""Share of a GPU's measured matrix rate that a model's products keep up, memory traffic apart.

A profiled step on an H200 makes 677 TFLOP/s in its products, 0.86 of what square ones were measured
at there, with their traffic in it; the rest goes to shapes that fit less well and to the GPU's
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
"""Per optimizer step: the batch's way to the GPU, schedule, and reading the loss back."""
BACKWARD_SHARE = 0.5
"""Of a micro-batch, at least the backward pass: one product for each of the forward's, and more
where layers are recomputed."""
OVERLAP_EXPONENT = 4.0
"""Sharpness of the maximum of host and GPU: either has stretches in which the other waits."""
LINK_SHARES = {"nvlink": 0.75, "pcie": 0.5}
"""Of a link's rate, what a collective of large tensors reaches. A share of NVLink as collectives
commonly report it; through PCIe most hosts copy by way of their own memory, so half."""
UNKNOWN_LINK = Interconnect(kind="pcie", bytes_per_second=15.75e9)
"""PCIe of the third generation, for a GPU whose link is not known."""
BUCKET_BYTES = 25 * 2**20
"""Of gradients that are sent together (DistributedDataParallel's ``bucket_cap_mb``)."""
COLLECTIVE_SECONDS = 50e-6
"""For which a collective takes its time however little it sends."""
_LAUNCH, _OVERHEAD = len(TERMS), len(TERMS) + 1
"""Where the host's part and the fixed part are in what has a column for each factor."""
_STRETCHES = 2


@dataclass(frozen=True, eq=False)
class StepPhases:
    """Optimizer steps as two stretches that follow one another, and a fixed part. Seconds.

    Within a stretch host and GPU run side by side. Of most steps the second is empty. Rows are
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
    """The GPU's dense peak for the compute type."""
    between: Sizes
    """What each step waits for other GPUs that take it too."""

    @classmethod
    def of(cls, configs: Sequence[TrialConfig], *, model: ModelSpec, gpu: GpuSpec) -> StepPhases:
        """Return the steps of configurations on a GPU."""
        try:
            layout = Layout(configs, model)
        except InputError:
            return cls._unknown(len(configs))
        work = step_work(layout)
        stretches = np.stack([work.micro_batches, np.zeros_like(work.micro_batches)])
        # The gradient scaler reads back whether one overflowed before the optimizer may step.
        waits = layout.are(lambda config: config.compute_dtype == "fp16")
        stretches[:, TERMS.index("optimizer")] = work.update * ~waits, work.update * waits
        compute, memory, launch = _seconds(stretches, layout, gpu, stream_bytes=work.stream_bytes)
        peak = layout.sizes(lambda config: gpu.peak_flops.get(config.compute_dtype) or np.nan)
        phases = cls(compute, memory, launch, work.model_flops, peak, np.zeros(len(configs)))
        if (layout.gpus == 1).all():
            return phases
        alone = phases.seconds(np.ones(_OVERHEAD + 1)) - OVERHEAD_SECONDS
        backward = BACKWARD_SHARE * alone / np.maximum(1.0, layout.micro_batches)
        return replace(phases, between=_waiting_seconds(layout, gpu, backward=backward))

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
        known_linears(model)
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


def _seconds(
    stretches: Work, layout: Layout, gpu: GpuSpec, *, stream_bytes: Sizes
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds of the matrix units and of the memory, by configuration, stretch and term,
    and those of the host, by configuration and stretch.

    Args:
        stretches: work by stretch and term.
        layout: the configurations.
        gpu: what does it.
        stream_bytes: the size of each micro-batch's residual stream, of which a large cache may
            hold a part.
    """
    memory = gpu.copy_rate * ELEMENTWISE_EFFICIENCY
    elementwise = np.full_like(stream_bytes, memory)
    if gpu.cache is not None:
        # A kernel reads such a tensor and writes another; some of it stays in the cache.
        held = np.clip(2.0 - 2 * stream_bytes / gpu.cache.bytes / CACHE_HOLDS, 0.0, 1.0)
        in_cache = max(memory, gpu.cache.bandwidth_bytes_per_second)
        elementwise = 1.0 / (held / in_cache + (1.0 - held) / memory)
    own = layout.sizes(lambda config: gpu.matrix_rate(config.compute_dtype) or np.nan)
    # Around 8-bit products all else is in 16 bits.
    around = np.where(layout.is_8bit_compute, gpu.matrix_rate(gpu.half) or np.nan, own)
    products, moving = np.empty((2, len(TERMS), len(own)))
    for row, term in enumerate(TERMS):
        share = ATTENTION_EFFICIENCY if term == "attention" else MATMUL_EFFICIENCY
        products[row] = (own if term == "eight_bit" else around) * share
        moving[row] = elementwise if term in ("elementwise", "lora") else memory
    # Configurations come first from here on.
    compute = (stretches[:, :, FLOPS] / products).transpose(2, 0, 1).copy()
    moved = (stretches[:, :, BYTES] / moving).transpose(2, 0, 1).copy()
    launches = sum(stretches[:, :, LAUNCHES].swapaxes(0, 1), np.zeros(1))
    return compute, moved, (launches * gpu.launch_seconds.typical).T.copy()


def _waiting_seconds(layout: Layout, gpu: GpuSpec, *, backward: Sizes) -> Sizes:
    """Return how long each configuration's step waits for what GPUs send each other.

    Gradients are sent in buckets while the last micro-batch's backward pass goes on; the last
    bucket has nothing to hide behind.

    Args:
        layout: the configurations.
        gpu: of which there are as many as each of them says.
        backward: seconds of a micro-batch's backward pass.
    """
    gpus = layout.gpus
    rate = _link_rate(gpu)
    sent = 2.0 * (gpus - 1.0) / gpus * layout.adapter_parameters * layout.trained
    buckets = np.ceil(np.maximum(sent, 1.0) / BUCKET_BYTES)
    whole = sent / rate + buckets * COLLECTIVE_SECONDS
    last = whole / buckets
    waited = last + np.maximum(0.0, whole - last - backward)
    gathered = _gathering_seconds(layout, gpu, backward=backward)
    return np.where(layout.is_sharded, gathered, np.where(gpus > 1, waited, 0.0))


def _gathering_seconds(layout: Layout, gpu: GpuSpec, *, backward: Sizes) -> Sizes:
    """Return how long steps wait for layers to be gathered, in both passes of each micro-batch.

    While a layer computes the next one is on its way, so that a pass takes as long as the slower of
    the two; the first layer's way, and the head's and the embedding's, hide behind nothing.
    """
    gpus, layers = layout.gpus, layout.layers
    missing = (gpus - 1.0) / gpus / _link_rate(gpu)
    weights = sum(rows * columns for rows, columns in layout.linears.values())
    layer = weights * np.where(layout.is_4bit, 0.5, layout.compute) * missing
    layer = layer + COLLECTIVE_SECONDS
    ends = layout.hidden * layout.model.vocab_size * layout.compute * missing
    waited = layer + np.maximum(0.0, layers * layer - backward)
    return np.asarray(layout.micro_batches * (2.0 * waited + 2.0 * (ends + COLLECTIVE_SECONDS)))


def _link_rate(gpu: GpuSpec) -> float:
    """Return the bytes per second, each way, that a GPU's collectives reach."""
    link = gpu.interconnect or UNKNOWN_LINK
    return link.bytes_per_second * LINK_SHARES[link.kind]
