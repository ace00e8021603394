"""Owns what each part of a decoder layer asks of a card: FLOPs, bytes moved, operations launched.

The counts for eager kernels were read off the operations that transformers, PEFT and bitsandbytes
really dispatch, tensor by tensor; those for Liger and for a compiled layer follow from what their
kernels read and write. Knows nothing of how fast a card does any of it.
"""

from __future__ import annotations

from dataclasses import dataclass

from sweep.predict.speed.layout import FP32_BYTES, Layout

PACKED_BYTES = 0.5
"""A 4-bit weight."""
SCALE_BYTES = 4 / 64
"""Plain constants: one fp32 for 64 weights."""
DOUBLE_SCALE_BYTES = (1 + 4 + 8 + 4) / 64
"""Double-quantized ones: read as a byte, expanded, offset in place, and read again."""


@dataclass(frozen=True)
class Amount:
    """Work for a card; amounts add up."""

    flops: float = 0.0
    """Matrix FLOPs."""
    bytes: float = 0.0
    """Bytes read and written in the card's memory."""
    launches: float = 0.0
    """Operations that the host has to launch."""

    def __add__(self, other: Amount) -> Amount:
        return Amount(
            self.flops + other.flops, self.bytes + other.bytes, self.launches + other.launches
        )

    def __mul__(self, times: float) -> Amount:
        return Amount(self.flops * times, self.bytes * times, self.launches * times)


Pair = tuple[Amount, Amount]
"""Forward and backward."""


def product(layout: Layout, rows: int, columns: int) -> Amount:
    """One product of the tokens with a frozen matrix; its input's gradient is such another."""
    tokens = layout.tokens
    moved = tokens * rows + rows * columns + tokens * columns
    return Amount(2.0 * tokens * rows * columns, layout.compute * moved, 1)


def dequantization(layout: Layout, rows: int, columns: int) -> Amount:
    """One expansion of a 4-bit matrix, which every pass over it needs."""
    if not layout.is_quantized:
        return Amount()
    is_double = layout.config.double_quant
    scales = DOUBLE_SCALE_BYTES if is_double else SCALE_BYTES
    moved = rows * columns * (PACKED_BYTES + scales + layout.compute)
    return Amount(bytes=moved, launches=3 if is_double else 1)


def linear_casts(layout: Layout, name: str) -> Pair:
    """Casts of a linear layer's input and output to and from the compute type."""
    if layout.fusion == "compiled":
        return Amount(), Amount()
    rows, columns = layout.linears[name]
    cast = _cast(layout, rows, layout.input_bytes(name))
    back = _cast(layout, columns, layout.output_bytes(name))
    return cast + back, cast + back


def adapter_products(layout: Layout, name: str) -> Pair:
    """An adapter's two thin products forward; their inputs' and their own gradients backward."""
    rows, columns = layout.linears[name]
    rank, tokens = layout.config.lora_rank, layout.tokens
    flops = 2.0 * tokens * rank * (rows + columns)
    moved = layout.compute * tokens * (rows + columns + 2 * rank)
    return Amount(flops, moved, 2), Amount(2 * flops, 2 * moved, 4)


def adapter_elementwise(layout: Layout, name: str) -> Pair:
    """What PEFT does around those products: copy, cast, dropout, scale, add."""
    rows, columns = layout.linears[name]
    tokens, c = layout.tokens, layout.compute
    given, returned = layout.input_bytes(name), layout.output_bytes(name)
    if layout.fusion == "compiled":
        # The sum is one kernel; going back, scaling and summing the input's gradients are two more.
        forward = Amount(bytes=tokens * 3 * c * columns, launches=2)
        return forward, Amount(bytes=tokens * (2 * c * columns + 3 * c * rows), launches=4)
    scale = Amount(bytes=tokens * 2 * c * columns, launches=1)
    add = Amount(bytes=tokens * (2 * returned + c) * columns, launches=1)
    merge = Amount(bytes=tokens * 3 * given * rows, launches=1)
    # Adapters of another type than the products: cast each time, and their gradients back.
    weights = Amount(launches=2 if c != layout.trained else 0)
    entry = _adapter_input(layout, rows, given)
    forward = entry + weights + scale + add
    if layout.is_quantized:
        # PEFT copies what a 4-bit layer returns before it adds to it.
        forward += Amount(bytes=tokens * 2 * returned * columns, launches=1)
    backward = entry + weights + scale + merge + _cast(layout, columns, returned)
    return forward, backward + Amount(launches=2)


def _adapter_input(layout: Layout, width: int, given: int) -> Amount:
    """Dropout and casts of an adapter's input; beside a 16-bit layer PEFT casts it first."""
    taken = given if layout.is_quantized else layout.trained
    entry = _cast(layout, width, taken)
    if taken != given:
        entry += Amount(bytes=layout.tokens * width * (given + taken), launches=1)
    if layout.config.lora_dropout:
        entry += Amount(bytes=layout.tokens * width * (2 * taken + 1), launches=1)
    return entry


def _cast(layout: Layout, width: int, element: int) -> Amount:
    """A cast between ``element`` bytes and the compute type; nothing where they are the same."""
    if element == layout.compute:
        return Amount()
    return Amount(bytes=layout.tokens * width * (element + layout.compute), launches=1)


def norm(layout: Layout, width: int) -> Pair:
    """A root-mean-square norm; transformers' own is a chain of fp32 operations."""
    s, c = layout.stream, layout.compute
    elements = layout.tokens * width
    match layout.fusion:
        case "compiled":
            return Amount(bytes=elements * (s + c), launches=1), Amount(
                bytes=elements * (2 * s + c), launches=1
            )
        case "liger":
            return Amount(bytes=elements * 2 * s, launches=1), Amount(
                bytes=elements * 3 * s, launches=3
            )
    casts, extra = (0, 0) if s == FP32_BYTES else (2 * (s + FP32_BYTES), 2)
    forward = Amount(bytes=elements * (20 + 2 * s + casts), launches=6 + extra)
    return forward, Amount(bytes=elements * (72 + 2 * s + casts), launches=12 + extra)


def rotation(layout: Layout) -> Pair:
    """Rotary positions of queries and keys."""
    moved = layout.tokens * (layout.queries + layout.keys) * layout.projected
    match layout.fusion:
        case "compiled":
            return Amount(bytes=2 * moved, launches=1), Amount(bytes=2 * moved, launches=1)
        case "liger":
            return Amount(bytes=2 * moved, launches=3), Amount(bytes=2 * moved, launches=3)
    return Amount(bytes=10 * moved, launches=10), Amount(bytes=16 * moved, launches=20)


def attention(layout: Layout) -> Pair:
    """The attention itself: a causal flash kernel, or scores that are written out."""
    config, c = layout.config, layout.compute
    products = 4.0 * layout.tokens * config.seq_len * layout.queries
    moved = c * layout.tokens * 2 * (layout.queries + layout.keys)
    if config.attention != "eager":
        # A flash kernel skips what the causal mask hides, and forms the scores again going back.
        return Amount(products / 2, moved, 1), Amount(products / 2 * 2.5, 2 * moved, 3)
    scores = layout.tokens * config.seq_len * int(layout.model.config["num_attention_heads"])
    return Amount(products, moved + 32 * scores, 9), Amount(
        2 * products, 2 * moved + 36 * scores, 12
    )


def attention_casts(layout: Layout) -> Pair:
    """Autocast brings queries, keys and values to the compute type, and their gradients back."""
    if layout.fusion == "compiled":
        return Amount(), Amount()
    width = layout.queries + 2 * layout.keys
    cast = _cast(layout, width, layout.projected)
    cast = Amount(bytes=cast.bytes, launches=3 * cast.launches)
    return cast, cast


def activation(layout: Layout) -> Pair:
    """The gate of the feed-forward part."""
    elements = layout.tokens * layout.inner
    y, c = layout.projected, layout.compute
    match layout.fusion:
        case "compiled":
            return Amount(bytes=elements * 3 * c, launches=1), Amount(
                bytes=elements * 5 * c, launches=1
            )
        case "liger":
            return Amount(bytes=elements * 3 * y, launches=1), Amount(
                bytes=elements * 5 * y, launches=1
            )
    return Amount(bytes=elements * 5 * y, launches=2), Amount(bytes=elements * 9 * y, launches=3)


def residual(layout: Layout) -> Pair:
    """Two sums into the stream; backward also the sums over what reads one norm's output."""
    elements, s = layout.tokens * layout.hidden, layout.stream
    if layout.fusion == "compiled":
        return Amount(bytes=elements * 4 * s, launches=0), Amount(
            bytes=elements * 6 * s, launches=1
        )
    return Amount(bytes=elements * 6 * s, launches=2), Amount(bytes=elements * 15 * s, launches=5)
