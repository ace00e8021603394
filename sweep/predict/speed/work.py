"""Owns the sum of what one micro-batch and one optimizer update ask of a card, by term.

Knows nothing of a card's rates or of measurements.
"""

from __future__ import annotations

import math
from collections.abc import Iterable
from dataclasses import dataclass
from typing import Literal

from search_spaces.config import TrialConfig
from search_spaces.linears import lora_parameters, training_flops_per_token
from search_spaces.models import ModelSpec
from sweep.predict.speed import kernels
from sweep.predict.speed.kernels import Amount, Pair
from sweep.predict.speed.layout import FP32_BYTES, Layout

HEAD_NORM_TYPES = frozenset({"qwen3", "gemma3_text", "olmo2"})
"""Model types that normalize queries and keys."""
FOUR_NORM_TYPES = frozenset({"gemma2", "gemma3_text"})
"""Model types with a norm after each half of a layer as well as before it."""

Term = Literal["matmul", "lora", "attention", "dequant", "elementwise", "loss", "optimizer"]
TERMS: tuple[Term, ...] = (
    "matmul",
    "lora",
    "attention",
    "dequant",
    "elementwise",
    "loss",
    "optimizer",
)
COMPILED_LAUNCH = 0.4
"""A compiled layer launches from generated code, which costs less than an eager operation."""
OPTIMIZER_LAUNCHES = {"adamw_8bit": 3.0, "paged_adamw_8bit": 5.0, "adamw_torch_fused": 0.1}
"""Operations per adapter matrix: bitsandbytes updates one at a time, torch many at once."""
MOMENTS_MOVED = 4
"""Elements of an optimizer's state that an update reads and writes per adapter parameter."""
WEIGHTS_MOVED = 6
"""Elements of the adapters' own type that an update moves per parameter: the weight read and
written, the gradient read for its norm, read and written to be scaled, and read for the update.
"""

Work = dict[Term, Amount]


@dataclass(frozen=True)
class StepWork:
    """What one optimizer step asks of a card."""

    micro_batch: Work
    """Forward and backward of one micro-batch."""
    update: Work
    """Clipping and optimizer."""
    micro_batches: int
    model_flops: float
    """FLOPs that the model needs per optimizer step; what is recomputed is not counted."""
    stream_bytes: int
    """One micro-batch's residual stream: the size of tensor that most elementwise kernels see."""


def step_work(config: TrialConfig, model: ModelSpec) -> StepWork:
    """Return what one optimizer step of ``config`` asks of a card.

    Raises:
        InputError: the architecture is not known.
    """
    layout = Layout.of(config, model)
    layers = model.hidden_layers
    recomputed = config.checkpointed_count(layers)
    forward, backward = _layer(layout)
    work = _sum(
        [
            _times(forward, layers),
            _times(_recomputation(layout, forward), recomputed),
            _times(backward, layers),
        ]
    )
    if config.compile:
        work = {
            term: Amount(a.flops, a.bytes, a.launches * COMPILED_LAUNCH) for term, a in work.items()
        }
    return StepWork(
        micro_batch=_sum([work, _ends(layout)]),
        update=_update(layout),
        micro_batches=config.accumulation_steps,
        model_flops=_model_flops(layout) * config.accumulation_steps,
        stream_bytes=layout.tokens * layout.hidden * layout.stream,
    )


def _layer(layout: Layout) -> tuple[Work, Work]:
    """Return forward and backward of one decoder layer."""
    norms = 4 if layout.model.model_type in FOUR_NORM_TYPES else 2
    norm: tuple[Term, Pair] = ("elementwise", kernels.norm(layout, layout.hidden))
    pairs: list[tuple[Term, Pair]] = [
        *[norm] * norms,
        ("elementwise", kernels.rotation(layout)),
        ("elementwise", kernels.attention_casts(layout)),
        ("attention", kernels.attention(layout)),
        ("elementwise", kernels.activation(layout)),
        ("elementwise", kernels.residual(layout)),
    ]
    if layout.model.model_type in HEAD_NORM_TYPES:
        pairs.append(("elementwise", kernels.norm(layout, layout.queries + layout.keys)))
    for name, (rows, columns) in layout.linears.items():
        product = kernels.product(layout, rows, columns)
        expansion = kernels.dequantization(layout, rows, columns)
        pairs += [
            ("matmul", (product, product)),
            ("dequant", (expansion, expansion)),
            ("elementwise", kernels.linear_casts(layout, name)),
        ]
        if name in layout.adapted:
            pairs.append(("lora", kernels.adapter_products(layout, name)))
            pairs.append(("elementwise", kernels.adapter_elementwise(layout, name)))
    return _collect((t, p[0]) for t, p in pairs), _collect((t, p[1]) for t, p in pairs)


def _recomputation(layout: Layout, forward: Work) -> Work:
    """Return what a checkpointed layer does again.

    Recomputation stops at the last tensor that backward needs. Without an adapter on it the last
    linear layer keeps nothing, so it is not done again, unless the layer is one compiled graph.
    """
    if layout.config.compile or "down_proj" in layout.adapted:
        return forward
    rows, columns = layout.linears["down_proj"]
    skipped: Work = {
        "matmul": kernels.product(layout, rows, columns),
        "dequant": kernels.dequantization(layout, rows, columns),
        "elementwise": kernels.linear_casts(layout, "down_proj")[0],
    }
    return _sum([forward, _times(skipped, -1)])


def _ends(layout: Layout) -> Work:
    """Return embedding, last norm, head and loss, forward and backward."""
    norm = kernels.norm(layout, layout.hidden)
    stream = layout.tokens * layout.hidden * layout.stream
    embedding = Amount(bytes=2 * stream, launches=10)
    product = kernels.product(layout, layout.hidden, layout.model.vocab_size)
    loss = _fused_loss(layout) if layout.config.kernels != "hf" else _written_loss(layout)
    return {
        "matmul": product * 2,
        "elementwise": norm[0] + norm[1] + embedding,
        "loss": loss,
    }


def _written_loss(layout: Layout) -> Amount:
    """Logits written out: cast to fp32, log-softmax, and both gradients of the same size."""
    logits = layout.tokens * layout.model.vocab_size
    casts = 0 if layout.compute == FP32_BYTES else 2 * (layout.compute + FP32_BYTES)
    return _head_cast(layout) + Amount(bytes=logits * (casts + 24), launches=15)


def _fused_loss(layout: Layout) -> Amount:
    """Logits by chunks of about the hidden states' size; the gradient takes the logits' place."""
    tokens, vocabulary = layout.tokens, layout.model.vocab_size
    chunks = min(tokens, math.ceil(vocabulary / layout.hidden))
    # The frozen head is cast for each of a chunk's two products.
    casts = _head_cast(layout) * (2 * chunks)
    return casts + Amount(bytes=tokens * vocabulary * 4 * layout.compute, launches=12 * chunks)


def _head_cast(layout: Layout) -> Amount:
    if layout.stream == layout.compute:
        return Amount()
    weights = layout.hidden * layout.model.vocab_size
    return Amount(bytes=weights * (layout.stream + layout.compute), launches=1)


def _update(layout: Layout) -> Work:
    """Return clipping and the optimizer's step over the adapters."""
    config = layout.config
    parameters = lora_parameters(config, layout.model) or 0
    matrices = 2 * len(layout.adapted) * layout.model.hidden_layers
    launches = 20 + matrices * OPTIMIZER_LAUNCHES[config.optimizer]
    moment = layout.trained if config.optimizer == "adamw_torch_fused" else 1
    moved = parameters * (WEIGHTS_MOVED * layout.trained + MOMENTS_MOVED * moment)
    return {"optimizer": Amount(bytes=moved, launches=launches)}


def _model_flops(layout: Layout) -> float:
    """Return the FLOPs that the model needs for a micro-batch."""
    layers = layout.model.hidden_layers
    linears = sum(rows * columns for rows, columns in layout.linears.values())
    adapted = sum(sum(layout.linears[name]) for name in layout.adapted)
    per_token = training_flops_per_token(
        frozen=layers * linears + layout.hidden * layout.model.vocab_size,
        adapters=layers * layout.config.lora_rank * adapted,
        layers=layers,
        attention_width=layout.queries,
        seq_len=layout.config.seq_len,
    )
    return layout.tokens * per_token


def _collect(parts: Iterable[tuple[Term, Amount]]) -> Work:
    work: Work = {}
    for term, amount in parts:
        work[term] = work.get(term, Amount()) + amount
    return work


def _sum(works: Iterable[Work]) -> Work:
    return _collect(part for work in works for part in work.items())


def _times(work: Work, times: float) -> Work:
    return {term: amount * times for term, amount in work.items()}
