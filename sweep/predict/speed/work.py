"""Owns the sum of what micro-batches and optimizer updates ask of a card, by term.

Knows nothing of a card's rates or of measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal, get_args

import numpy as np

from search_spaces.linears import training_flops_per_token
from sweep.predict.speed import kernels
from sweep.predict.speed.kernels import Amount, Pair
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

Work = dict[Term, Amount]


@dataclass(frozen=True, eq=False)
class StepWork:
    """What one optimizer step of each configuration of a layout asks of a card."""

    micro_batches: Work
    """Forward and backward of all micro-batches."""
    update: Work
    """Clipping and optimizer."""
    model_flops: Sizes
    """FLOPs that the model needs per optimizer step; what is recomputed is not counted."""
    stream_bytes: Sizes
    """One micro-batch's residual stream: the size of tensor that most elementwise kernels see."""


def step_work(layout: Layout) -> StepWork:
    """Return what one optimizer step asks of a card."""
    work, packed = _layers(layout), layout.packed_share
    if (packed < 1).any():
        # Which of them are recomputed has nothing to do with which are in 4 bits: both are spread.
        wide = _layers(layout.unquantized())
        work = _sum([_times(work, packed), _times(wide, 1 - packed)])
    pace = np.where(layout.is_compiled, COMPILED_LAUNCH, 1.0)
    work = {term: Amount(a.flops, a.bytes, a.launches * pace) for term, a in work.items()}
    gathering = Amount(launches=GATHER_LAUNCHES * layout.model.hidden_layers) * layout.is_sharded
    around: Work = {"elementwise": gathering}
    return StepWork(
        micro_batches=_times(_sum([work, around, _ends(layout)]), layout.micro_batches),
        update=_update(layout),
        model_flops=_model_flops(layout) * layout.micro_batches,
        stream_bytes=layout.tokens * layout.hidden * layout.stream,
    )


def _layers(layout: Layout) -> Work:
    """Return what all decoder layers ask, as if all were alike."""
    layers = layout.model.hidden_layers
    forward, backward = _layer(layout)
    return _sum(
        [
            _times(forward, layers),
            _times(_recomputation(layout, forward), layout.recomputed),
            _times(backward, layers),
        ]
    )


def _layer(layout: Layout) -> tuple[Work, Work]:
    """Return forward and backward of one decoder layer."""
    norms = 4 if layout.model.model_type in FOUR_NORM_TYPES else 2
    norm, casts = kernels.norm(layout, layout.hidden), kernels.attention_casts(layout)
    pairs: list[tuple[Term, Pair]] = [
        ("elementwise", (norm[0] * norms, norm[1] * norms)),
        ("elementwise", kernels.rotation(layout)),
        ("elementwise", (casts, casts)),
        ("attention", kernels.attention(layout)),
        ("elementwise", kernels.activation(layout)),
        ("elementwise", kernels.residual(layout)),
    ]
    if layout.model.model_type in HEAD_NORM_TYPES:
        pairs.append(("elementwise", kernels.norm(layout, layout.queries + layout.keys)))
    for name in layout.linears:
        pairs += _linear(layout, name)
    return _collect((t, p[0]) for t, p in pairs), _collect((t, p[1]) for t, p in pairs)


def _linear(layout: Layout, name: str) -> list[tuple[Term, Pair]]:
    """Return a linear layer's forward and backward, and its adapter's where it carries one."""
    pairs, adapted = _frozen(layout, name), layout.adapted[name]
    if adapted.any():
        forward, backward = kernels.adapter_products(layout, name)
        pairs.append(("lora", (forward * adapted, backward * adapted)))
        forward, backward = kernels.adapter_elementwise(layout, name)
        pairs.append(("elementwise", (forward * adapted, backward * adapted)))
    return pairs


def _frozen(layout: Layout, name: str) -> list[tuple[Term, Pair]]:
    """Return both passes through a frozen linear layer."""
    rows, columns = layout.linears[name]
    wide = kernels.product(layout, rows, columns) * ~layout.is_8bit_compute
    narrow, back = (
        kernels.eight_bit_product(layout, *widths) for widths in ((rows, columns), (columns, rows))
    )
    casts = kernels.linear_casts(layout, name)
    return [
        ("matmul", (wide, wide)),
        ("eight_bit", (narrow, back)),
        ("dequant", kernels.dequantization(layout, rows, columns)),
        ("elementwise", (casts, casts)),
    ]


def _recomputation(layout: Layout, forward: Work) -> Work:
    """Return what a checkpointed layer does again.

    Recomputation stops at the last tensor that backward needs. Without an adapter on it the last
    linear layer keeps nothing, so it is not done again, unless the layer is one compiled graph.
    """
    is_skipped = ~(layout.is_compiled | layout.adapted["down_proj"])
    last = _collect((term, forward) for term, (forward, _) in _frozen(layout, "down_proj"))
    skipped = _times(last, is_skipped)
    return _sum([forward, _times(skipped, -1.0)])


def _ends(layout: Layout) -> Work:
    """Return embedding, last norm, head and loss, forward and backward."""
    norm = kernels.norm(layout, layout.hidden)
    stream = layout.tokens * layout.hidden * layout.stream
    embedding = Amount(bytes=2 * stream, launches=10)
    product = kernels.product(layout, layout.hidden, layout.model.vocab_size)
    is_fused = layout.are(lambda config: config.kernels != "hf")
    return {
        "matmul": product * 2,
        "elementwise": norm[0] + norm[1] + embedding,
        "loss": _fused_loss(layout) * is_fused + _written_loss(layout) * ~is_fused,
    }


def _written_loss(layout: Layout) -> Amount:
    """Logits written out: cast to fp32, log-softmax, and both gradients of the same size."""
    logits = layout.tokens * layout.model.vocab_size
    casts = 2 * (layout.compute + FP32_BYTES) * (layout.compute != FP32_BYTES)
    return _head_cast(layout) + Amount(bytes=logits * (casts + 24), launches=15)


def _fused_loss(layout: Layout) -> Amount:
    """Logits by chunks of about the hidden states' size; the gradient takes the logits' place."""
    tokens, vocabulary = layout.tokens, layout.model.vocab_size
    chunks = np.minimum(tokens, math.ceil(vocabulary / layout.hidden))
    # The frozen head is cast for each of a chunk's two products.
    casts = _head_cast(layout) * (2 * chunks)
    return casts + Amount(bytes=tokens * vocabulary * 4 * layout.compute, launches=12 * chunks)


def _head_cast(layout: Layout) -> Amount:
    weights = layout.hidden * layout.model.vocab_size
    cast = Amount(bytes=weights * (layout.stream + layout.compute), launches=1)
    is_other: Mask = layout.stream != layout.compute
    return cast * is_other


def _update(layout: Layout) -> Work:
    """Return clipping and the optimizer's step over the adapters."""
    matrices = 2 * layout.model.hidden_layers * sum(layout.adapted.values(), np.zeros(1))
    per_matrix = layout.sizes(lambda config: OPTIMIZER_LAUNCHES[config.optimizer])
    is_unquantized = layout.are(lambda config: config.optimizer == "adamw_torch_fused")
    moment = np.where(is_unquantized, layout.trained, 1.0)
    # Where several cards train, each gradient is copied into the bucket in which it is sent.
    is_sent = layout.cards > 1
    moved = WEIGHTS_MOVED * layout.trained + MOMENTS_MOVED * moment + 2 * layout.trained * is_sent
    launches = 20 + matrices * (per_matrix + is_sent)
    return {"optimizer": Amount(bytes=layout.adapter_parameters * moved, launches=launches)}


def _model_flops(layout: Layout) -> Sizes:
    """Return the FLOPs that the model needs for a micro-batch."""
    layers, linears = layout.model.hidden_layers, layout.linears
    per_rank = sum(layout.adapted[name] * float(sum(linears[name])) for name in linears)
    per_token = training_flops_per_token(
        frozen=layers * sum(rows * columns for rows, columns in linears.values())
        + layout.hidden * layout.model.vocab_size,
        adapters=layers * layout.rank * per_rank,
        layers=layers,
        attention_width=layout.queries,
        seq_len=layout.seq_len,
    )
    return layout.tokens * per_token


def _collect(parts: Iterable[tuple[Term, Amount]]) -> Work:
    work: Work = {}
    for term, amount in parts:
        work[term] = work[term] + amount if term in work else amount
    return work


def _sum(works: Iterable[Work]) -> Work:
    return _collect(part for work in works for part in work.items())


def _times(work: Work, times: float | Sizes | Mask) -> Work:
    return {term: amount * times for term, amount in work.items()}
