"""What micro-batches and optimizer updates ask of a GPU, by term."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from search_spaces.linears import training_flops_per_token
from sweep.predict.speed import kernels
from sweep.predict.speed.kernels import LAUNCHES, Work, asked
from sweep.predict.speed.layout import FP32_BYTES, Layout, Mask, Sizes

HEAD_NORM_TYPES = frozenset({"qwen3", "gemma3_text", "olmo2"})
"""Model types that normalize queries and keys."""
FOUR_NORM_TYPES = frozenset({"gemma2", "gemma3_text"})
"""Model types with a norm after each half of a layer as well as before it."""

Term = Literal[
    "matmul", "eight_bit", "lora", "attention", "dequant", "elementwise", "loss", "optimizer"
]
TERMS: tuple[Term, ...] = get_args(Term)
COMPILED_LAUNCH = 0.4
"""A compiled layer launches from generated code, which costs less than an eager operation."""
OPTIMIZER_LAUNCHES = {"adamw_8bit": 3.0, "paged_adamw_8bit": 5.0, "adamw_torch_fused": 0.1}
"""Operations per adapter matrix: bitsandbytes updates one at a time, torch many at once."""
GATHER_LAUNCHES = 290.0
"""What the host does to gather a layer in both passes of a micro-batch and to give it up again, as
so many operations: FSDP2 goes through each of its tensors in Python. Trials of Mistral-7B and of
Llama-3.1-70B at 4 x 512, on hosts with two H200, come to 230 to 390
(`tests/data/several_cards_h200.jsonl`)."""
MOMENTS_MOVED = 4
"""Elements of an optimizer's state that an update reads and writes per adapter parameter."""
WEIGHTS_MOVED = 6
"""Elements of the adapters' own type that an update moves per parameter: the weight read and
written, the gradient read for its norm, read and written to be scaled, and read for the update.
"""


@dataclass(frozen=True, eq=False)
class StepWork:
    """What one optimizer step of each configuration of a layout asks of a GPU."""

    micro_batches: Work
    """Forward and backward of all micro-batches, by term."""
    update: Work
    """Clipping and optimizer."""
    model_flops: Sizes
    """FLOPs that the model needs per optimizer step; what is recomputed is not counted."""
    stream_bytes: Sizes
    """One micro-batch's residual stream: the size of tensor that most elementwise kernels see."""


def step_work(layout: Layout) -> StepWork:
    """Return what one optimizer step asks of a GPU."""
    work, packed = _layers(layout), layout.packed_share
    if (packed < 1).any():
        # Which of them are recomputed has nothing to do with which are in 4 bits: both are spread.
        work = work * packed + _layers(layout.unquantized()) * (1 - packed)
    work[:, LAUNCHES] *= np.where(layout.is_compiled, COMPILED_LAUNCH, 1.0)
    work[TERMS.index("elementwise"), LAUNCHES] += (
        GATHER_LAUNCHES * layout.layers * layout.is_sharded
    )
    return StepWork(
        micro_batches=(work + _ends(layout)) * layout.micro_batches,
        update=_update(layout),
        model_flops=_model_flops(layout) * layout.micro_batches,
        stream_bytes=layout.tokens * layout.hidden * layout.stream,
    )


def _layers(layout: Layout) -> Work:
    """Return what all decoder layers ask, as if all were alike."""
    forward, backward = _layer(layout)
    # Recomputation stops at the last tensor that backward needs. Without an adapter on it the last
    # linear layer keeps nothing, so it is not done again, unless the layer is one compiled graph.
    is_skipped = ~(layout.is_compiled | layout.adapted["down_proj"])
    again = forward - _by_term(layout, _frozen(layout, "down_proj"))[0] * is_skipped
    return np.asarray(
        forward * layout.layers + again * layout.recomputed + backward * layout.layers
    )


def _by_term(layout: Layout, parts: Sequence[tuple[Term, Work]]) -> Work:
    """Return the sums of what passes ask, by pass and term."""
    work = np.zeros((2, len(TERMS), 3, len(layout.configs)))
    for term, part in parts:
        work[:, TERMS.index(term)] += part
    return work


def _layer(layout: Layout) -> Work:
    """Return forward and backward of one decoder layer."""
    norms = 4 if layout.model.model_type in FOUR_NORM_TYPES else 2
    parts: list[tuple[Term, Work]] = [
        ("elementwise", kernels.norm(layout, layout.hidden) * norms),
        ("elementwise", kernels.rotation(layout)),
        ("elementwise", kernels.attention_casts(layout)),
        ("attention", kernels.attention(layout)),
        ("elementwise", kernels.activation(layout)),
        ("elementwise", kernels.residual(layout)),
    ]
    if layout.model.model_type in HEAD_NORM_TYPES:
        parts.append(("elementwise", kernels.norm(layout, layout.queries + layout.keys)))
    for name in layout.linears:
        parts += _frozen(layout, name)
        adapted = layout.adapted[name]
        if adapted.any():
            parts.append(("lora", kernels.adapter_products(layout, name) * adapted))
            parts.append(("elementwise", kernels.adapter_elementwise(layout, name) * adapted))
    return _by_term(layout, parts)


def _frozen(layout: Layout, name: str) -> list[tuple[Term, Work]]:
    """Return both passes through a frozen linear layer."""
    rows, columns = layout.linears[name]
    narrow = [kernels.eight_bit_product(layout, *w) for w in ((rows, columns), (columns, rows))]
    return [
        ("matmul", kernels.product(layout, rows, columns) * ~layout.is_8bit_compute),
        ("eight_bit", np.stack(narrow)),
        ("dequant", kernels.dequantization(layout, rows, columns)),
        ("elementwise", kernels.linear_casts(layout, name)),
    ]


def _ends(layout: Layout) -> Work:
    """Return embedding, last norm, head and loss, forward and backward, by term."""
    stream = layout.tokens * layout.hidden * layout.stream
    forward, backward = kernels.norm(layout, layout.hidden)
    embedding = asked(layout, moved=2 * stream, launches=10)
    is_fused = layout.are(lambda config: config.kernels != "hf")
    ends = np.zeros((len(TERMS), 3, len(layout.configs)))
    product = kernels.product(layout, layout.hidden, layout.model.vocab_size)
    ends[TERMS.index("matmul")] = product * 2
    ends[TERMS.index("elementwise")] = forward + backward + embedding
    ends[TERMS.index("loss")] = _fused_loss(layout) * is_fused + _written_loss(layout) * ~is_fused
    return ends


def _written_loss(layout: Layout) -> Work:
    """Logits written out: cast to fp32, log-softmax, and both gradients of the same size."""
    logits = layout.tokens * layout.model.vocab_size
    casts = 2 * (layout.compute + FP32_BYTES) * (layout.compute != FP32_BYTES)
    return _head_cast(layout) + asked(layout, moved=logits * (casts + 24), launches=15)


def _fused_loss(layout: Layout) -> Work:
    """Logits by chunks of about the hidden states' size; the gradient takes the logits' place."""
    tokens, vocabulary = layout.tokens, layout.model.vocab_size
    chunks = np.minimum(tokens, math.ceil(vocabulary / layout.hidden))
    # The frozen head is cast for each of a chunk's two products.
    casts: Work = _head_cast(layout) * (2 * chunks)
    logits = tokens * vocabulary * 4 * layout.compute
    return casts + asked(layout, moved=logits, launches=12 * chunks)


def _head_cast(layout: Layout) -> Work:
    weights = layout.hidden * layout.model.vocab_size
    moved = weights * (layout.stream + layout.compute)
    is_other: Mask = layout.stream != layout.compute
    return asked(layout, moved=moved, launches=1) * is_other


def _update(layout: Layout) -> Work:
    """Return clipping and the optimizer's step over the adapters."""
    matrices = 2 * layout.layers * sum(layout.adapted.values(), np.zeros(1))
    per_matrix = layout.sizes(lambda config: OPTIMIZER_LAUNCHES[config.optimizer])
    is_unquantized = layout.are(lambda config: config.optimizer == "adamw_torch_fused")
    moment = np.where(is_unquantized, layout.trained, 1.0)
    # Where several GPUs train, each gradient is copied into the bucket in which it is sent.
    is_sent = layout.gpus > 1
    moved = WEIGHTS_MOVED * layout.trained + MOMENTS_MOVED * moment + 2 * layout.trained * is_sent
    launches = 20 + matrices * (per_matrix + is_sent)
    return asked(layout, moved=layout.adapter_parameters * moved, launches=launches)


def _model_flops(layout: Layout) -> Sizes:
    """Return the FLOPs that the model needs for a micro-batch."""
    linears = layout.linears
    per_rank = sum(layout.adapted[name] * float(sum(linears[name])) for name in linears)
    per_token = training_flops_per_token(
        frozen=layout.layers * sum(rows * columns for rows, columns in linears.values())
        + layout.hidden * layout.model.vocab_size,
        adapters=layout.layers * layout.rank * per_rank,
        layers=layout.layers,
        attention_width=layout.queries,
        seq_len=layout.seq_len,
    )
    return layout.tokens * per_token
