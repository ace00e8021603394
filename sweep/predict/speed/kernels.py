"""Owns what each part of a decoder layer asks of a card: FLOPs, bytes moved, operations launched.

The counts for eager kernels were read off the operations that transformers, PEFT and bitsandbytes
really dispatch, tensor by tensor; those for Liger and for a compiled layer follow from what their
kernels read and write. Knows nothing of how fast a card does any of it.
"""

from __future__ import annotations

from dataclasses import dataclass

import numpy as np

from sweep.predict.speed.layout import FP32_BYTES, Layout, Mask, Sizes

PACKED_BYTES = 0.5
"""A 4-bit weight."""
BYTE = 1.0
"""An 8-bit weight, input or gradient."""
SUM_BYTES = 8.0
"""A sum of products of 8-bit integers, written in 32 bits and read."""
EAGER_SUM_BYTES = 32.0
"""The same where nothing is fused: made a float, multiplied twice by scales, and narrowed."""
EAGER_LAUNCHES = 8.0
"""Operations that the host takes as long over as over an 8-bit product that is not compiled; of one
step of an H200, 4 x 512 in FP8."""
FUSED_READ = 0.5
"""Share of an 8-bit product's input that a compiled layer reads to round it: the kernel that makes
the input often rounds it too. About half; not measured apart."""
SCALE_BYTES = 4 / 64
"""Plain constants: one fp32 for 64 weights."""
DOUBLE_SCALE_BYTES = (1 + 4 + 8 + 4) / 64
"""Double-quantized ones: read as a byte, expanded, offset in place, and read again."""


@dataclass(frozen=True, eq=False)
class Amount:
    """Work for a card, of each configuration of a layout or of all alike; amounts add up."""

    flops: float | Sizes = 0.0
    """Matrix FLOPs."""
    bytes: float | Sizes = 0.0
    """Bytes read and written in the card's memory."""
    launches: float | Sizes = 0.0
    """Operations that the host has to launch."""

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.flops + other.flops, self.bytes + other.bytes, self.launches + other.launches
        )

    def __mul__(self, times: float | Sizes | Mask) -> Amount:
        """Return it so often; with a mask, where that holds, and none elsewhere."""
        often: float | Sizes = times if isinstance(times, float | int) else times.astype(float)
        return Amount(self.flops * often, self.bytes * often, self.launches * often)


MASKED_SLOWNESS = 1.2
"""How many times as long the memory-efficient kernel takes over a product as a flash kernel, beside
reading the mask: at 4,096 tokens 0.8 to 1.5 in three models on an H200, by the ratio of both
(tests/bench/results/masked_attention.json); where rows are short the host's launches hide it."""
MASKED_DOUBT = 0.3
"""How far attention under the mask may be off, relative: 27 % at worst in those models, which the
slowness was taken from."""

Pair = tuple[Amount, Amount]
"""Forward and backward."""


def _fused(layout: Layout, *, eager: Pair, liger: Pair, compiled: Pair) -> Pair:
    """Return what the kernels of each configuration do: as written, Liger's, or the compiler's."""
    is_eager = ~(layout.is_liger | layout.is_compiled)
    whose = ((eager, is_eager), (liger, layout.is_liger), (compiled, layout.is_compiled))
    parts = [(pair, mask) for pair, mask in whose if mask.any()]
    if len(parts) == 1:
        return parts[0][0]
    forward, backward = Amount(), Amount()
    for pair, mask in parts:
        forward, backward = forward + pair[0] * mask, backward + pair[1] * mask
    return forward, backward


def product(layout: Layout, rows: int, columns: int) -> Amount:
    """One product of the tokens with a frozen matrix; its input's gradient is such another."""
    tokens = layout.tokens
    moved = tokens * rows + rows * columns + tokens * columns
    return Amount(2.0 * tokens * rows * columns, layout.compute * moved, 1)


def eight_bit_product(layout: Layout, rows: int, columns: int) -> Amount:
    """The same in 8 bits, where that is asked for: the input is rounded row by row, and sums of
    integers are brought back to 16 bits.

    What is kept of a gated MLP in 8 bits is written a byte more and read a byte less.
    """
    tokens, is_int8, is_fused = layout.tokens, layout.is_int8_compute, layout.is_compiled
    read = layout.compute * np.where(is_fused, FUSED_READ, 1.0)
    made = layout.compute + np.where(is_fused, SUM_BYTES, EAGER_SUM_BYTES) * is_int8
    moved = tokens * (rows * (read + 2 * BYTE) + columns * made) + rows * columns * BYTE
    launches = np.where(is_fused, 2.0, EAGER_LAUNCHES) + is_int8
    return Amount(2.0 * tokens * rows * columns, moved, launches) * layout.is_8bit_compute


def dequantization(layout: Layout, rows: int, columns: int) -> Pair:
    """One expansion of a quantized matrix, which every pass over it needs.

    8-bit weights multiply as they are; going back a copy of them is transposed.
    """
    is_packed, is_rounded = layout.is_4bit, layout.is_8bit_compute
    is_double = layout.is_doubly_quantized & is_packed
    scales = np.where(is_double, DOUBLE_SCALE_BYTES, SCALE_BYTES)
    stored = np.where(is_packed, PACKED_BYTES + scales, BYTE)
    moved = rows * columns * (stored + np.where(is_rounded, BYTE, layout.compute))
    # 8-bit compute has a decoder of its own, in one kernel.
    launches = np.where(is_double & ~is_rounded, 3.0, 1.0)
    once = Amount(bytes=moved, launches=launches) * layout.is_quantized
    return once * ~(is_rounded & ~is_packed), once


def linear_casts(layout: Layout, name: str) -> Amount:
    """Casts of a linear layer's input and output to and from the compute type, in each pass."""
    rows, columns = layout.linears[name]
    cast = _cast(layout, rows, layout.input_bytes(name))
    back = _cast(layout, columns, layout.output_bytes(name))
    return (cast + back) * ~layout.is_compiled


def adapter_products(layout: Layout, name: str) -> Pair:
    """An adapter's two thin products forward; their inputs' and their own gradients backward."""
    rows, columns = layout.linears[name]
    rank, tokens = layout.rank, layout.tokens
    flops = 2.0 * tokens * rank * (rows + columns)
    moved = layout.compute * tokens * (rows + columns + 2 * rank)
    return Amount(flops, moved, 2), Amount(2 * flops, 2 * moved, 4)


def adapter_elementwise(layout: Layout, name: str) -> Pair:
    """What PEFT does around those products: copy, cast, dropout, scale, add."""
    rows, columns = layout.linears[name]
    tokens, c = layout.tokens, layout.compute
    # The sum is one kernel; going back, scaling and summing the input's gradients are two more.
    compiled = (
        Amount(bytes=tokens * 3 * c * columns, launches=2),
        Amount(bytes=tokens * (2 * c * columns + 3 * c * rows), launches=4),
    )
    eager = _eager_adapter(layout, name)
    return _fused(layout, eager=eager, liger=eager, compiled=compiled)


def _eager_adapter(layout: Layout, name: str) -> Pair:
    rows, columns = layout.linears[name]
    tokens, c = layout.tokens, layout.compute
    given, returned = layout.input_bytes(name), layout.output_bytes(name)
    scale = Amount(bytes=tokens * 2 * c * columns, launches=1)
    add = Amount(bytes=tokens * (2 * returned + c) * columns, launches=1)
    merge = Amount(bytes=tokens * 3 * given * rows, launches=1)
    # Adapters of another type than the products: cast each time, and their gradients back.
    weights = Amount(launches=2) * (c != layout.trained)
    entry = _adapter_input(layout, rows, given)
    # PEFT copies what a 4-bit layer returns before it adds to it.
    copy = Amount(bytes=tokens * 2 * returned * columns, launches=1) * layout.is_4bit
    backward = entry + weights + scale + merge + _cast(layout, columns, returned)
    return entry + weights + scale + add + copy, backward + Amount(launches=2)


def _adapter_input(layout: Layout, width: int, given: Sizes) -> Amount:
    """Dropout and casts of an adapter's input; PEFT casts it first, but beside a 4-bit layer."""
    elements = layout.tokens * width
    taken = np.where(layout.is_4bit, given, layout.trained)
    is_other: Mask = taken != given
    cast = Amount(bytes=elements * (given + taken), launches=1) * is_other
    dropped = Amount(bytes=elements * (2 * taken + 1), launches=1) * layout.has_dropout
    return _cast(layout, width, taken) + cast + dropped


def _cast(layout: Layout, width: int, element: Sizes) -> Amount:
    """A cast between ``element`` bytes and the compute type; nothing where they are the same."""
    moved = layout.tokens * width * (element + layout.compute)
    is_other: Mask = element != layout.compute
    return Amount(bytes=moved, launches=1) * is_other


def norm(layout: Layout, width: int) -> Pair:
    """A root-mean-square norm; transformers' own is a chain of fp32 operations."""
    s, c = layout.stream, layout.compute
    elements = layout.tokens * width
    is_narrow = s != FP32_BYTES
    casts = 2 * (s + FP32_BYTES) * is_narrow
    return _fused(
        layout,
        eager=(
            Amount(bytes=elements * (20 + 2 * s + casts), launches=6 + 2.0 * is_narrow),
            Amount(bytes=elements * (72 + 2 * s + casts), launches=12 + 2.0 * is_narrow),
        ),
        liger=(
            Amount(bytes=elements * 2 * s, launches=1),
            Amount(bytes=elements * 3 * s, launches=3),
        ),
        compiled=(
            Amount(bytes=elements * (s + c), launches=1),
            Amount(bytes=elements * (2 * s + c), launches=1),
        ),
    )


def rotation(layout: Layout) -> Pair:
    """Rotary positions of queries and keys."""
    moved = layout.tokens * (layout.queries + layout.keys) * layout.projected
    return _fused(
        layout,
        eager=(Amount(bytes=10 * moved, launches=10), Amount(bytes=16 * moved, launches=20)),
        liger=(Amount(bytes=2 * moved, launches=3), Amount(bytes=2 * moved, launches=3)),
        compiled=(Amount(bytes=2 * moved, launches=1), Amount(bytes=2 * moved, launches=1)),
    )


def attention(layout: Layout) -> Pair:
    """The attention itself: a causal flash kernel, or scores that are written out."""
    is_eager = layout.are(lambda config: config.attention == "eager")
    rows = layout.tokens * layout.seq_len
    products = 4.0 * rows * layout.queries
    moved = layout.compute * layout.tokens * 2 * (layout.queries + layout.keys)
    # A flash kernel skips what the causal mask hides, and forms the scores again going back.
    flash = Amount(products / 2, moved, 1), Amount(products / 2 * 2.5, 2 * moved, 3)
    scores = rows * int(layout.model.config["num_attention_heads"])
    written = (
        Amount(products, moved + 32 * scores, 9),
        Amount(2 * products, 2 * moved + 36 * scores, 12),
    )
    is_masked = layout.is_masked
    masked = _masked_attention(layout, products=products, moved=moved)
    forward, backward = (
        w * is_eager + m * is_masked + f * ~(is_eager | is_masked)
        for w, m, f in zip(written, masked, flash, strict=True)
    )
    return forward, backward


def _masked_attention(layout: Layout, *, products: Sizes, moved: Sizes) -> Pair:
    """sdpa under the mask that keeps packed texts apart: the memory-efficient kernel over all
    scores, which reads the mask for each head; keys and values repeated for grouped heads."""
    rows = layout.tokens * layout.seq_len
    c = layout.compute
    repeated = 2 * c * layout.tokens * (layout.queries + layout.keys)
    mask = c * rows * int(layout.model.config["num_attention_heads"])
    # Truth values become what is added to the scores.
    added = rows * (1 + c)
    flops = products * MASKED_SLOWNESS
    return (
        Amount(flops, moved + repeated + mask + added, 6),
        Amount(flops * 2.5, 2 * moved + repeated + mask, 5),
    )


def attention_casts(layout: Layout) -> Amount:
    """Autocast brings queries, keys and values to the compute type, and their gradients back."""
    width = layout.queries + 2 * layout.keys
    cast = _cast(layout, width, layout.projected)
    return Amount(bytes=cast.bytes, launches=3 * cast.launches) * ~layout.is_compiled


def activation(layout: Layout) -> Pair:
    """The gate of the feed-forward part."""
    elements = layout.tokens * layout.inner
    y, c = layout.projected, layout.compute
    return _fused(
        layout,
        eager=(
            Amount(bytes=elements * 5 * y, launches=2),
            Amount(bytes=elements * 9 * y, launches=3),
        ),
        liger=(
            Amount(bytes=elements * 3 * y, launches=1),
            Amount(bytes=elements * 5 * y, launches=1),
        ),
        compiled=(
            Amount(bytes=elements * 3 * c, launches=1),
            Amount(bytes=elements * 5 * c, launches=1),
        ),
    )


def residual(layout: Layout) -> Pair:
    """Two sums into the stream; backward also the sums over what reads one norm's output."""
    elements, s = layout.tokens * layout.hidden, layout.stream
    written = (
        Amount(bytes=elements * 6 * s, launches=2),
        Amount(bytes=elements * 15 * s, launches=5),
    )
    compiled = Amount(bytes=elements * 4 * s), Amount(bytes=elements * 6 * s, launches=1)
    return _fused(layout, eager=written, liger=written, compiled=compiled)
