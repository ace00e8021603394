"""What optimizer steps ask of a GPU and its host, and how long that takes before any is measured.

A few fractions, the same for every GPU, of the rates in its catalogue entry, what its host needs to
launch one operation, and what GPUs that train together send each other. Two H200 joined by NVLink
made 1.88 to 1.96 times the tokens of one (Mistral-7B, 8 x 512, Liger, no recomputation), and 1.62
times once; eight trials of models that they shared took 0.87 to 1.19 times what is predicted. Of no
other GPU was anything measured, nor of PCIe.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass, fields, replace
from functools import cached_property
from typing import Literal, get_args

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import LOGITS_AT_ONCE, TRL_TILE, TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.gpus import GpuSpec, Interconnect
from qlora_sweep.search_spaces.kinds import HOST_SLOTS
from qlora_sweep.search_spaces.linears import (
    EXPERT_WEIGHTS,
    resolve_targets,
    training_flops_per_token,
)
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.vision import tower_flops
from qlora_sweep.sweep.predict.speed import kernels
from qlora_sweep.sweep.predict.speed.kernels import (
    BYTES,
    COMPILED_LAUNCH,
    FLOPS,
    FP32_BYTES,
    LAUNCHES,
    KernelShapes,
    Mask,
    Sizes,
    Work,
    asked,
)
from qlora_sweep.sweep.predict.speed.layers import layers_of

Term = Literal[
    "matmul", "eight_bit", "lora", "attention", "dequant", "elementwise", "loss", "optimizer"
]
TERMS: tuple[Term, ...] = get_args(Term)
GATHER_LAUNCHES = 320.0
"""What the host does to gather a layer in both passes of a micro-batch and to give it up again, as
so many operations: FSDP2 goes through each of its tensors in Python. Trials of Mistral-7B and of
Llama-3.1-70B at 4 x 512, on hosts with two H200, come to 250 to 430
(`tests/data/several_gpus_h200.jsonl`)."""
WEIGHTS_MOVED = 6
"""Elements of the adapters' own type that an update moves per parameter: the weight read and
written, the gradient read for its norm, read and written to be scaled, and read for the update.
"""
MATMUL_EFFICIENCY = 0.88
"""Share of a GPU's measured matrix rate that a model's products keep up, memory traffic apart.

A profiled step on an H200 makes 677 TFLOP/s in its products, 0.86 of what square ones were measured
at there, with their traffic in it; the rest goes to shapes that fit less well and to the GPU's
power limit.
"""
GEFORCE_MATMUL_EFFICIENCY = 1.0
"""The same of GeForce GPUs, whose matrix units add up in fp32 at half their rate, so that power
limits them less. With it steps of three frameworks on an RTX 4090 and of one on RTX 3090s take 0.92
of the prediction in the median, and with the other 0.84."""
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
COMPILED_ROUTED = 2.1
RECOMPUTED_ROUTED = 4.7
"""Times as long as counted, the host takes over a compiled layer whose tokens go to experts, and
over recomputing one, whose every kept tensor goes through Python. Nine steps of Qwen3-30B-A3B on
three H200 hosts, with few tokens, took 0.19 s without recomputing and 0.46 to 0.80 with it, where
0.08 and 0.10 to 0.14 were counted; eager steps say how slow each host was
(`tests/bench/results/experts_h200.jsonl`)."""
HOST_SHARE = 0.8
"""Of the link to the host, what a copy of pinned memory reaches."""
UNKNOWN_LINK = Interconnect(kind="pcie", bytes_per_second=15.75e9)
"""PCIe of the third generation, for a GPU whose link is not known."""
BUCKET_BYTES = 25 * 2**20
"""Of gradients that are sent together (DistributedDataParallel's ``bucket_cap_mb``)."""
COLLECTIVE_SECONDS = 50e-6
"""For which a collective takes its time however little it sends."""
GROUPED_KERNEL = (9, 10)
"""Major compute capabilities that have a kernel for grouped products (`_grouped_mm_cuda` of torch
2.13); others multiply by one expert's matrix after another."""
Rows = NDArray[np.intp] | slice
_LAUNCH = len(TERMS)
_OVERHEAD = len(TERMS) + 1
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
    """What each step waits for other GPUs that take it too, and for weights from the host."""

    @classmethod
    def of(cls, configs: Sequence[TrialConfig], *, model: ModelSpec, gpu: GpuSpec) -> StepPhases:
        """Return the steps of configurations on a GPU."""
        count = len(configs)
        kinds = layers_of(model)
        if isinstance(kinds, InputError):
            terms = (count, _STRETCHES, len(TERMS))
            shapes = (terms, terms, (count, _STRETCHES), count, count, count)
            return cls(*[np.full(shape, np.nan) for shape in shapes])
        is_grouped = np.array([has_grouped_kernel(config, gpu) for config in configs], np.bool_)
        layouts = [
            KernelShapes(configs, model, kinds=kinds, at=at, is_grouped=is_grouped)
            for at in range(len(kinds))
        ]
        layout = layouts[0]
        work = micro_batches(layouts)
        stretches = np.stack([work, np.zeros_like(work)])
        # The gradient scaler reads back whether one overflowed before the optimizer may step.
        waits = layout.are(lambda config: config.compute_kind.scales_loss)
        last = update(layout)
        stretches[:, TERMS.index("optimizer")] = last * ~waits, last * waits
        peak = layout.sizes(lambda config: gpu.peak_flops.get(config.compute_dtype) or np.nan)
        timed = _seconds(stretches, layout, gpu)
        is_told = layout.are(lambda config: layers_refusal(config, model) is None)
        for part in timed:
            part[~is_told] = np.nan
        phases = cls(*timed, model_flops(layout), peak, np.zeros(count))
        is_offloaded = layout.are(lambda config: config.offload_fraction > 0)
        if (layout.gpus == 1).all() and not is_offloaded.any():
            return phases
        whole = phases.seconds(np.ones(_OVERHEAD + 1)) - OVERHEAD_SECONDS
        alone = whole / np.maximum(1.0, layout.micro_batches)
        waiting = _waiting_seconds(layout, gpu, backward=BACKWARD_SHARE * alone)
        waiting += _fetching_seconds(layout, gpu, alone=alone)
        return replace(phases, between=waiting)

    def unknown(self) -> StepPhases:
        """Return as many steps that have no prediction."""
        parts = {field.name: getattr(self, field.name) * np.nan for field in fields(self)}
        return replace(self, **parts)

    def of_rows(self, rows: Rows) -> StepPhases:
        """Return the steps of some of the configurations."""
        parts = {field.name: getattr(self, field.name)[rows] for field in fields(self)}
        return replace(self, **parts)

    @cached_property
    def device(self) -> NDArray[np.float64]:
        """What the GPU needs, by configuration, stretch and term."""
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
        gpu = self.device @ factors[:_LAUNCH]
        host = self.launch * factors[_LAUNCH]
        whole = overlapped(gpu, host)
        gpu, host = (
            np.divide(part, whole, out=np.zeros_like(whole), where=whole != 0.0)
            ** (OVERLAP_EXPONENT - 1.0)
            for part in (gpu, host)
        )
        return np.column_stack(
            [
                np.einsum("npt,np->nt", self.device, gpu),
                (self.launch * host).sum(axis=1),
                # Of a step that has no prediction the fixed part is none either.
                np.where(np.isnan(whole.sum(axis=1)), np.nan, self.fixed),
            ]
        )

    def log_slopes(self, factors: NDArray[np.float64]) -> NDArray[np.float64]:
        """Return by how much log seconds rise with the logarithm of each factor, alike."""
        return np.asarray(self.slopes(factors) * factors / self.seconds(factors)[:, None])


def refusal(config: TrialConfig, *, model: ModelSpec, gpu: GpuSpec) -> str | None:
    """Return why the step of a configuration has no prediction; None where it has one."""
    dtype = config.compute_dtype
    if gpu.peak_flops.get(dtype) is None or gpu.matrix_rate(dtype) is None:
        return f"{gpu.name} has no matrix rate for {dtype}: it has {', '.join(gpu.peak_flops)}"
    return layers_refusal(config, model)


def layers_refusal(config: TrialConfig, model: ModelSpec) -> str | None:
    """Return why nothing is known of what a configuration's layers do; None where it is."""
    kinds = layers_of(model)
    if isinstance(kinds, InputError):
        return f"the layers of model type '{model.model_type}' are not known: {kinds}"
    targets = set(resolve_targets(config, model))
    has_routed = any(product.is_routed for kind in kinds for product in kind.products)
    is_on_experts = has_routed and targets & EXPERT_WEIGHTS
    if is_on_experts or ("all-linear" in targets and not kinds[0].has_all_linear):
        return "the speed of adapters on experts is not predicted"
    return None


def has_grouped_kernel(config: TrialConfig, gpu: GpuSpec) -> bool:
    """Whether one kernel multiplies by the matrices of all experts."""
    return config.compute_dtype == "bf16" and gpu.compute_capability[0] in GROUPED_KERNEL


def overlapped(device: NDArray[np.float64], launch: NDArray[np.float64]) -> NDArray[np.float64]:
    """Return the seconds of stretches that keep the GPU and the host busy for so long."""
    longest = np.maximum(device, launch)
    shorter = np.divide(
        np.minimum(device, launch), longest, out=np.zeros_like(longest), where=longest != 0.0
    )
    return np.asarray(longest * (1.0 + shorter**OVERLAP_EXPONENT) ** (1.0 / OVERLAP_EXPONENT))


def _seconds(
    stretches: Work, layout: KernelShapes, gpu: GpuSpec
) -> tuple[NDArray[np.float64], NDArray[np.float64], NDArray[np.float64]]:
    """Return the seconds of the matrix units and of the memory, by configuration, stretch and term,
    and those of the host, by configuration and stretch.

    Args:
        stretches: work by stretch and term.
        layout: the configurations.
        gpu: what does it.
    """
    memory = np.full_like(layout.tokens, gpu.copy_rate * ELEMENTWISE_EFFICIENCY)
    elementwise = memory
    if gpu.cache is not None:
        # A kernel reads such a tensor and writes another; some of it stays in the cache.
        held = np.clip(2.0 - 2 * layout.stream_bytes / gpu.cache.bytes / CACHE_HOLDS, 0.0, 1.0)
        in_cache = np.maximum(memory, gpu.cache.bandwidth_bytes_per_second)
        elementwise = 1.0 / (held / in_cache + (1.0 - held) / memory)
    own = layout.sizes(lambda config: gpu.matrix_rate(config.compute_dtype) or np.nan)
    # Around 8-bit products all else is in 16 bits.
    around = np.where(layout.is_8bit_compute, gpu.matrix_rate(gpu.half) or np.nan, own)
    products, moving = np.empty((2, len(TERMS), len(own)))
    kept = GEFORCE_MATMUL_EFFICIENCY if gpu.is_geforce else MATMUL_EFFICIENCY
    for row, term in enumerate(TERMS):
        share = ATTENTION_EFFICIENCY if term == "attention" else kept
        products[row] = (own if term == "eight_bit" else around) * share
        moving[row] = elementwise if term in ("elementwise", "lora") else memory
    # What steps that were measured on the GPU say of its rates.
    longer = math.exp(gpu.speed.shift)
    # Configurations come first from here on.
    compute = (stretches[:, :, FLOPS] * longer / products).transpose(2, 0, 1).copy()
    moved = (stretches[:, :, BYTES] * longer / moving).transpose(2, 0, 1).copy()
    launches = stretches[:, :, LAUNCHES].sum(axis=1)
    return compute, moved, (launches * gpu.launch_seconds).T.copy()


def link_of(gpu: GpuSpec) -> Interconnect:
    """Return what a host's GPUs of this kind are taken to send each other through."""
    return gpu.interconnect or UNKNOWN_LINK


def _waiting_seconds(layout: KernelShapes, gpu: GpuSpec, *, backward: Sizes) -> Sizes:
    """Return how long each configuration's step waits for what GPUs send each other.

    Gradients are sent in buckets while the last micro-batch's backward pass goes on; the last
    bucket has nothing to hide behind.

    Args:
        layout: the configurations.
        gpu: of which there are as many as each of them says.
        backward: seconds of a micro-batch's backward pass.
    """
    gpus = layout.gpus
    link = link_of(gpu)
    rate = link.bytes_per_second * LINK_SHARES[link.kind]
    sent = 2.0 * (gpus - 1.0) / gpus * layout.adapter_parameters * layout.trained
    buckets = np.ceil(np.maximum(sent, 1.0) / BUCKET_BYTES)
    whole = sent / rate + buckets * COLLECTIVE_SECONDS
    last = whole / buckets
    waited = last + np.maximum(0.0, whole - last - backward)
    gathered = _gathering_seconds(layout, rate, backward=backward)
    return np.where(layout.is_sharded, gathered, np.where(gpus > 1, waited, 0.0))


def _fetching_seconds(layout: KernelShapes, gpu: GpuSpec, *, alone: Sizes) -> Sizes:
    """Return how long each configuration's step waits for experts' weights from the host.

    They come while other layers compute, so that a micro-batch takes as long as the slower of the
    two; at either end of it the last layers are there from the pass before.

    Args:
        layout: the configurations.
        gpu: which the host sends them.
        alone: seconds of a micro-batch that has all weights on the GPU.
    """
    layers = 0
    weights = 0.0
    for kind in layout.kinds:
        of_layer = sum(p.groups * p.rows * p.columns for p in kind.products if p.is_routed)
        layers += kind.count * (of_layer > 0)
        weights += kind.count * of_layer
    if layers == 0:
        return np.zeros_like(alone)
    scales = np.where(
        layout.is_doubly_quantized, kernels.SCALE_BYTES / FP32_BYTES, kernels.SCALE_BYTES
    )
    layer = weights / layers * (kernels.PACKED_BYTES + scales)
    there = layout.sizes(lambda config: len(config.offloaded_layers(layers)))
    copies = (2 + layout.references) * np.maximum(0.0, there - HOST_SLOTS)
    sent = copies * layer / (gpu.host_bytes_per_second * HOST_SHARE)
    return np.asarray(layout.micro_batches * (overlapped(alone, sent) - alone))


def _gathering_seconds(layout: KernelShapes, rate: float, *, backward: Sizes) -> Sizes:
    """Return how long steps wait for layers to be gathered, in both passes of each micro-batch.

    While a layer computes the next one is on its way, so that a pass takes as long as the slower of
    the two; the first layer's way, and the head's and the embedding's, hide behind nothing.
    """
    gpus = layout.gpus
    layers = layout.layers
    missing = (gpus - 1.0) / gpus / rate
    weights = sum(kind.count * kind.weights for kind in layout.kinds) / layers
    layer = weights * np.where(layout.is_4bit, 0.5, layout.compute) * missing
    layer = layer + COLLECTIVE_SECONDS
    ends = layout.hidden * layout.model.vocab_size * layout.compute * missing
    waited = layer + np.maximum(0.0, layers * layer - backward)
    return np.asarray(layout.micro_batches * (2.0 * waited + 2.0 * (ends + COLLECTIVE_SECONDS)))


def micro_batches(layouts: Sequence[KernelShapes]) -> Work:
    """Return what forward and backward of all micro-batches of a step ask, by term.

    Args:
        layouts: of each kind of layer.
    """
    layout = layouts[0]
    packed = layout.packed_share
    work = np.zeros((len(TERMS), 3, len(layout.configs)))
    for kind in layouts:
        of_kind = _layers(kind)
        if (packed < 1).any():
            # Which of them are recomputed has nothing to do with which are in 4 bits: both are
            # spread.
            of_kind = of_kind * packed + _layers(kind.unquantized()) * (1 - packed)
        work += of_kind
    work[:, LAUNCHES] *= np.where(layout.is_compiled, COMPILED_LAUNCH, 1.0)
    work[TERMS.index("elementwise"), LAUNCHES] += (
        GATHER_LAUNCHES * layout.layers * layout.is_sharded
    )
    return np.asarray((work + _ends(layout)) * layout.micro_batches)


def _layers(layout: KernelShapes) -> Work:
    """Return what all decoder layers of a kind ask."""
    count = layout.kind.count
    last = layout.kind.last
    (reference, _), (forward, backward) = _layer(layout)
    # Recomputation stops at the last tensor that backward needs. Without an adapter on it the last
    # linear layer keeps nothing, so it is not done again, unless the layer is one compiled graph or
    # one node.
    again = forward
    if last is not None:
        is_whole = layout.are(lambda config: config.recomputes_as_nodes)
        is_skipped = ~(layout.is_compiled | is_whole | layout.adapted[last])
        again = forward - _by_term(layout, _frozen(layout, last))[0] * is_skipped
    if any(product.is_routed for product in layout.kind.products):
        forward, backward, again = (work.copy() for work in (forward, backward, again))
        forward[:, LAUNCHES] *= np.where(layout.is_compiled, COMPILED_ROUTED, 1.0)
        backward[:, LAUNCHES] *= np.where(layout.is_compiled, COMPILED_ROUTED, 1.0)
        again[:, LAUNCHES] *= np.where(layout.is_compiled, RECOMPUTED_ROUTED, 1.0)
    # What is recomputed is spread over the layers, whatever their kinds.
    trained = count - layout.before
    recomputed = layout.recomputed * (trained / layout.layers)
    return np.asarray(
        (forward + reference * layout.references) * count + backward * trained + again * recomputed
    )


def _by_term(layout: KernelShapes, parts: Sequence[tuple[Term, Work]]) -> Work:
    """Return the sums of what passes ask, by pass and term."""
    work = np.zeros((2, len(TERMS), 3, len(layout.configs)))
    for term, part in parts:
        work[:, TERMS.index(term)] += part
    return work


def _layer(layout: KernelShapes) -> tuple[Work, Work]:
    """Return forward and backward of one decoder layer, without its adapters and with them."""
    times = kernels.walked_over_known(layout)
    parts: list[tuple[Term, Work]] = [
        *(("elementwise", kernels.norm(layout, width) * times) for width in layout.kind.norms),
        ("elementwise", kernels.rotation(layout) * times),
        ("elementwise", kernels.attention_casts(layout)),
        ("attention", kernels.attention(layout)),
        ("elementwise", kernels.activation(layout) * times),
        ("elementwise", kernels.residual(layout) * times),
    ]
    for each in layout.kind.recurrent:
        parts.append(("attention", kernels.delta_rule(layout, each)))
    for name in layout.linears:
        parts += _frozen(layout, name)
    for product in layout.kind.products:
        back = replace(product, rows=product.columns, columns=product.rows)
        passes = [kernels.shared_product(layout, each) for each in (product, back)]
        parts.append(("matmul", np.stack(passes)))
        once = kernels.expert_dequantization(layout, product)
        parts.append(("dequant", np.stack([once, once])))
    bare = _by_term(layout, parts)
    parts = []
    for name, adapted in layout.adapted.items():
        if adapted.any():
            parts.append(("lora", kernels.adapter_products(layout, name) * adapted))
            parts.append(("elementwise", kernels.adapter_elementwise(layout, name) * adapted))
    return bare, bare + _by_term(layout, parts)


def _frozen(layout: KernelShapes, name: str) -> list[tuple[Term, Work]]:
    """Return both passes through a frozen linear layer."""
    rows, columns = layout.linears[name]
    narrow = [kernels.eight_bit_product(layout, *w) for w in ((rows, columns), (columns, rows))]
    return [
        ("matmul", kernels.product(layout, rows, columns) * ~layout.is_8bit_compute),
        ("eight_bit", np.stack(narrow)),
        ("dequant", kernels.dequantization(layout, rows, columns)),
        ("elementwise", kernels.linear_casts(layout, name)),
    ]


def _ends(layout: KernelShapes) -> Work:
    """Return embedding, last norm, head and loss, forward and backward, by term."""
    forward, backward = kernels.norm(layout, layout.hidden)
    embedding = asked(layout, moved=2 * layout.stream_bytes, launches=10)
    is_fused = layout.are(lambda config: config.kernels_kind.fuses_loss)
    loss = _fused_loss(layout) * is_fused + _written_loss(layout) * ~is_fused
    ends = np.zeros((len(TERMS), 3, len(layout.configs)))
    in_tiles = layout.are(lambda config: config.has_head_of_trl)
    in_chunks = layout.is_on_completions & ~in_tiles
    product = kernels.product(layout, layout.hidden, layout.model.vocab_size)
    ends[TERMS.index("matmul")] = product * (2 + (in_tiles | in_chunks) + layout.references)
    ends[TERMS.index("elementwise")] = (
        forward + backward + embedding + (forward + embedding / 2) * layout.references
    )
    loss = np.where(in_chunks, _loss_in_chunks(layout), loss)
    ends[TERMS.index("loss")] = np.where(in_tiles, _loss_in_tiles(layout), loss)
    of_tower: tuple[Term, ...] = ("matmul", "attention", "elementwise")
    for term, work in zip(of_tower, kernels.tower(layout), strict=True):
        ends[TERMS.index(term)] += work
    return ends


def _loss_in_tiles(layout: KernelShapes) -> Work:
    """Logits by TRL's tiles: written and read once forward, and going back written, made their own
    gradient in place, and read."""
    vocabulary = layout.model.vocab_size
    logits = layout.tokens * vocabulary
    tiles = np.ceil(layout.tokens / TRL_TILE[0]) * math.ceil(vocabulary / TRL_TILE[1])
    return _head_cast(layout) * 2 + asked(
        layout, moved=logits * layout.compute * 6, launches=20 + 5 * tiles
    )


def _loss_in_chunks(layout: KernelShapes) -> Work:
    """Logits by chunks: once forward, once more going back, and once for each reference."""
    logits = layout.tokens * layout.model.vocab_size
    cast = (layout.compute + FP32_BYTES) * (layout.compute != FP32_BYTES)
    chunks = np.ceil(logits / LOGITS_AT_ONCE)
    passes = 3 + layout.references
    # The head is cast once in each pass, and its second one going back is not another.
    casts: Work = _head_cast(layout) * (passes - 1)
    return casts + asked(layout, moved=logits * (cast + 12) * passes, launches=7 * chunks * passes)


def _written_loss(layout: KernelShapes) -> Work:
    """Logits written out: cast to fp32, log-softmax, and both gradients of the same size."""
    logits = layout.tokens * layout.model.vocab_size
    casts = 2 * (layout.compute + FP32_BYTES) * (layout.compute != FP32_BYTES)
    return _head_cast(layout) + asked(layout, moved=logits * (casts + 24), launches=15)


def _fused_loss(layout: KernelShapes) -> Work:
    """Logits by chunks of about the hidden states' size; the gradient takes the logits' place."""
    tokens = layout.tokens
    vocabulary = layout.model.vocab_size
    chunks = np.minimum(tokens, math.ceil(vocabulary / layout.hidden))
    # The frozen head is cast for each of a chunk's two products.
    casts: Work = _head_cast(layout) * (2 * chunks)
    logits = tokens * vocabulary * 4 * layout.compute
    return casts + asked(layout, moved=logits, launches=12 * chunks)


def _head_cast(layout: KernelShapes) -> Work:
    weights = layout.hidden * layout.model.vocab_size
    moved = weights * (layout.stream + layout.compute)
    is_other: Mask = layout.stream != layout.compute
    return asked(layout, moved=moved, launches=1) * is_other


def update(layout: KernelShapes) -> Work:
    """Return clipping and the optimizer's step over the adapters."""
    matrices = 2 * layout.adapters
    per_matrix = layout.sizes(lambda config: config.optimizer_kind.launches)
    has_8_bits = layout.are(lambda config: config.optimizer_kind.has_8_bit_moments)
    # Each moment is read and written.
    moments = 2 * layout.sizes(lambda config: config.optimizer_kind.moments)
    moment = np.where(has_8_bits, 1.0, layout.trained)
    # Where several GPUs train, each gradient is copied into the bucket in which it is sent.
    is_sent = layout.gpus > 1
    moved = WEIGHTS_MOVED * layout.trained + moments * moment + 2 * layout.trained * is_sent
    launches = 20 + matrices * (per_matrix + is_sent)
    return asked(layout, moved=layout.adapter_parameters * moved, launches=launches)


def model_flops(layout: KernelShapes) -> Sizes:
    """Return the FLOPs that the model needs for a step; what is recomputed is not counted."""
    scored = sum(kind.count * kind.queries for kind in layout.kinds) / layout.layers
    per_token = training_flops_per_token(
        frozen=sum(kind.count * kind.frozen_weights for kind in layout.kinds)
        + layout.hidden * layout.model.vocab_size,
        adapters=layout.adapter_parameters,
        layers=layout.layers,
        attention_width=scored,
        seq_len=layout.seq_len,
        references=layout.references,
    )
    of_row = layout.sizes(lambda config: tower_flops(config, layout.model))
    rows = layout.tokens / layout.seq_len
    return layout.micro_batches * (layout.tokens * per_token + rows * of_row)
