"""What each part of a decoder layer asks of a GPU: FLOPs, bytes moved, operations launched.

The counts for eager kernels were read off the operations that transformers, PEFT and bitsandbytes
really dispatch, tensor by tensor; those for Liger and for a compiled layer follow from what their
kernels read and write.
"""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from functools import cached_property
from typing import Any

import numpy as np
from numpy.typing import NDArray

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.errors import InputError
from qlora_sweep.search_spaces.linears import resolve_targets
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.search_spaces.vision import tower_of
from qlora_sweep.sweep.predict.speed.layers import DeltaRule, Layers, Product, layers_of

FP32_BYTES = 4.0
HALF_BYTES = 2.0

Sizes = NDArray[np.float64]
"""One number for each configuration."""
Mask = NDArray[np.bool_]
"""Whether something holds, for each configuration."""
PACKED_BYTES = 0.5
"""A 4-bit weight."""
BYTE = 1.0
"""An 8-bit weight, input or gradient."""
SUM_BYTES = 8.0
"""A sum of products of 8-bit integers, written in 32 bits and read, as torch's kernel has it; no
step was measured yet with the kernel that scales its sums, which may be chosen instead
(`sweep.training.int8_products`)."""
EAGER_SUM_BYTES = 32.0
"""The same where nothing is fused: made a float, multiplied twice by scales, and narrowed."""
EAGER_LAUNCHES = 10.0
"""Operations that the host takes as long over as over an 8-bit product that is not compiled; of one
step of an H200, 4 x 512 in FP8."""
UNPACKING_LAUNCHES = 2.0
"""Operations that the host takes as long over as over what bitsandbytes does in Python around each
expansion of 4-bit weights. One row of 256 tokens through Llama 2 takes an A100's host 40 ms longer
with such a base (optimum-benchmark): 90 microseconds an expansion."""
FUSED_READ = 0.5
"""Share of an 8-bit product's input that a compiled layer reads to round it: the kernel that makes
the input often rounds it too. About half; not measured apart."""
SCALE_BYTES = 4 / 64
"""Plain constants: one fp32 for 64 weights."""
DOUBLE_SCALE_BYTES = (1 + 4 + 8 + 4) / 64
"""Double-quantized ones: read as a byte, expanded, offset in place, and read again."""


MASKED_SLOWNESS = 1.2
"""How many times as long the memory-efficient kernel takes over a product as a flash kernel, beside
reading the mask: at 4,096 tokens 0.8 to 1.5 in three models on an H200, by the ratio of both
(tests/bench/results/masked_attention.json); where rows are short the host's launches hide it."""
MASKED_DOUBT = 0.3
"""How far attention under the mask may be off, relative: 27 % at worst in those models, which the
slowness was taken from."""

CHUNK = 64
"""Tokens that the kernels of linear attention take together."""
DELTA_RULE_DOUBT = 3.0
"""How much longer they may take than what is counted of them at the GPU's rates, relative: nine in
ten within four times, as no step with them was measured here, and within a chunk one product waits
for another."""

_AFTER_ATTENTION = frozenset({"o_proj", "out_proj", "dense"})
"""Linear layers that take what attention returns."""
_AFTER_ACTIVATION = frozenset({"down_proj", "c_proj", "dense_4h_to_h", "fc2", "fc_out"})
"""Those that take what an activation returns."""
_FULL_TILES = 108
"""Tiles of `_SMALL_TILE` squared that keep an A100 busy, one for each multiprocessor."""
_SMALL_TILE = 64
COMPILED_LAUNCH = 0.4
"""A compiled layer launches from generated code, which costs less than an eager operation; so does
a loop within torch, of one product for each expert."""
_AS_WALKED = TrialConfig(
    quantization="none", double_quant=False, upcast_fp32=False, checkpoint_fraction=0.0
)
"""How layers are walked that are not known by their type."""

Work = NDArray[np.float64]
"""What is asked of a GPU: a row each of `FLOPS`, `BYTES` and `LAUNCHES`, a column a configuration.

With an axis in front, forward and backward; with another one, by term.
"""
FLOPS, BYTES, LAUNCHES = range(3)
"""Matrix FLOPs; bytes read and written in the GPU's memory; operations that the host launches."""
Passes = tuple[tuple[Any, Any], tuple[Any, Any]]
"""Bytes and launches, forward and backward."""


class KernelShapes:
    """Configurations on a model. Widths are features per token, sizes bytes of an element."""

    def __init__(
        self,
        configs: Sequence[TrialConfig],
        model: ModelSpec,
        *,
        kinds: Sequence[Layers] | None = None,
        at: int = 0,
        is_grouped: Mask | bool = True,
    ) -> None:
        self.configs = configs
        self.model = model
        known = layers_of(model) if kinds is None else kinds
        assert not isinstance(known, InputError), "a step is only of layers that are known"
        self.kinds = known
        """All kinds of decoder layers that the model has."""
        self.at = at
        self.kind = known[at]
        """The one that is looked at."""
        self.linears = self.kind.linears
        """Input and output features of such a layer's linear layers, by name."""
        self.layers: int = model.hidden_layers
        self.hidden: int = model.hidden_size
        """Width of the residual stream."""
        self.queries = self.kind.queries
        """Width of all heads' queries."""
        self.keys = self.kind.keys
        """Width of the keys, and of the values."""
        self.inner = self.kind.inner
        """Width between the two halves of the feed-forward part."""
        self.is_grouped = is_grouped
        """Whether one kernel multiplies by the matrices of all experts."""
        self._tell_kinds_apart()
        self._count()
        self._weigh()

    def sizes(self, value: Callable[[TrialConfig], float]) -> Sizes:
        """Return a value of each configuration."""
        return np.array([value(config) for config in self.configs], np.float64)

    def are(self, holds: Callable[[TrialConfig], bool]) -> Mask:
        """Return whether something holds of each configuration."""
        return np.array([holds(config) for config in self.configs], np.bool_)

    def _tell_kinds_apart(self) -> None:
        self.is_quantized = self.are(lambda config: config.is_quantized)
        """Whether the base is held in 4 or 8 bits."""
        self.is_4bit = self.are(lambda config: config.is_4bit)
        """Whether bitsandbytes' layers hold the base in 4 bits."""
        self.is_doubly_quantized = self.are(lambda config: config.double_quant)
        """Whether its constants are quantized as well, where they are at all."""
        self.is_8bit_compute = self.are(lambda config: config.is_8bit_compute)
        """Whether the frozen layers multiply in 8 bits."""
        self.is_int8_compute = self.are(lambda config: config.numerics == "int8")
        """Whether they multiply integers, whose products are sums of 32 bits."""
        self.is_compiled = self.are(lambda config: config.compile)
        """Whether the compiler fuses the elementwise operations of a layer."""
        of_liger = self.are(lambda config: config.kernels_kind.fuses_layers)
        self.is_liger = of_liger & ~self.is_compiled
        """Whether Liger's kernels do."""
        self.is_eager_attention = self.are(lambda config: config.attention == "eager")
        self.is_masked = self.are(lambda c: c.packing == "packed" and c.attention == "sdpa")
        """Whether sdpa has to go by a mask that keeps packed examples apart."""
        self.is_on_completions = self.are(lambda config: config.is_on_completions)
        """Whether the head works on a chunk of tokens at a time, in three passes."""
        self.has_dropout = self.are(lambda config: config.lora_dropout > 0)
        """Whether adapters drop part of their input."""
        self.is_sharded = self.are(lambda config: config.is_sharded)
        """Whether each of several GPUs holds a share of every layer alone."""

    def _count(self) -> None:
        self.seq_len = self.sizes(lambda config: config.seq_len)
        self.rank = self.sizes(lambda config: config.lora_rank)
        self.tokens = self.sizes(lambda config: config.tokens_per_micro_batch)
        """Tokens of a micro-batch."""
        self.references = self.sizes(lambda config: config.references)
        """Passes through the base alone, of a micro-batch."""
        self.micro_batches = self.sizes(lambda config: config.accumulation_steps)
        """Micro-batches of an optimizer step, of one GPU."""
        self.gpus = self.sizes(lambda config: config.data_parallel)
        """GPUs that take a step together; all else is of each of them."""
        self.recomputed = self.sizes(lambda config: config.checkpointed_count(self.layers))
        """Decoder layers that are recomputed."""
        packed = self.sizes(lambda config: config.quantized_count(self.layers))
        self.packed_share = np.where(self.is_quantized, packed / self.layers, 1.0)
        """Share of the decoder layers that are quantized, where the base is."""
        self.adapted = self._adapted(self.kind)
        """For each linear layer, whether it carries an adapter."""
        self.adapter_parameters = np.zeros(len(self.configs))
        """Of all adapters on the decoder layers."""
        self.adapters = np.zeros(len(self.configs))
        """How many of them there are."""
        for kind in self.kinds:
            adapted = self._adapted(kind)
            of_each = [is_on * float(sum(kind.linears[name])) for name, is_on in adapted.items()]
            self.adapter_parameters += kind.count * self.rank * sum(of_each, np.zeros(1))
            self.adapters += kind.count * sum(adapted.values(), np.zeros(1))

    @cached_property
    def before(self) -> Sizes:
        """How many of the layers that are looked at come before the first adapter, so that they
        have no backward pass."""
        first = np.full(len(self.configs), np.inf)
        for kind in self.kinds:
            for adapted in self._adapted(kind).values():
                start = min(kind.places, default=0)
                first = np.where(adapted, np.minimum(first, start), first)
        places = np.array(self.kind.places)
        return np.asarray((places[:, None] < first).sum(axis=0).astype(np.float64))

    def _adapted(self, kind: Layers) -> Mapping[str, Mask]:
        said = {config.target_modules: config for config in self.configs}
        targets = {key: resolve_targets(one, self.model) for key, one in said.items()}
        return {
            name: np.array(
                [kind.carries(name, targets[c.target_modules]) for c in self.configs], np.bool_
            )
            for name in kind.linears
        }

    def _weigh(self) -> None:
        is_fp32 = self.are(lambda config: config.compute_kind.bits == 32)
        self.compute = np.where(is_fp32, FP32_BYTES, HALF_BYTES)
        """Of the matrix products; around 8-bit ones, of the 16-bit type."""
        is_upcast = self.are(lambda config: config.upcast_fp32)
        self.stream = np.where(is_upcast, FP32_BYTES, self.compute)
        """Of the residual stream: norms and embeddings in fp32 make it fp32."""
        self.projected = np.where(self.is_4bit, self.stream, self.compute)
        """Of what a linear layer returns: bitsandbytes casts back to its input's type."""
        self.stream_bytes = self.tokens * self.hidden * self.stream
        """A micro-batch's residual stream: the tensor that most elementwise kernels see."""
        is_trained_fp32 = self.are(lambda config: config.adapter_dtype == "fp32")
        self.trained = np.where(is_trained_fp32, FP32_BYTES, HALF_BYTES)
        """Of an adapter, and of its gradient."""

    def unquantized(self) -> KernelShapes:
        """Return the same configurations with 16-bit layers."""
        wide = [config.changed(quantization="none") for config in self.configs]
        return self.of(wide)

    def of(self, configs: Sequence[TrialConfig]) -> KernelShapes:
        """Return other configurations on the same layers."""
        kinds = self.kinds
        at = self.at
        return KernelShapes(configs, self.model, kinds=kinds, at=at, is_grouped=self.is_grouped)

    def input_bytes(self, name: str) -> Sizes:
        """Bytes of an element of a linear layer's input."""
        end = name.rpartition(".")[2]
        if end in _AFTER_ATTENTION:
            return self.compute
        return self.projected if end in _AFTER_ACTIVATION else self.stream

    def output_bytes(self, name: str) -> Sizes:
        """Bytes of an element of what a linear layer returns."""
        return np.where(self.is_4bit, self.input_bytes(name), self.compute)


def asked(layout: KernelShapes, flops: Any = 0.0, *, moved: Any = 0.0, launches: Any = 0.0) -> Work:
    """Return work, from numbers for all configurations or arrays with one for each."""
    work = np.empty((3, len(layout.configs)))
    work[FLOPS] = flops
    work[BYTES] = moved
    work[LAUNCHES] = launches
    return work


def _fused(layout: KernelShapes, *, eager: Passes, liger: Passes, compiled: Passes) -> Work:
    """Return what the kernels of each configuration do: as written, Liger's, or the compiler's."""
    work = np.zeros((2, 3, len(layout.configs)))
    is_eager = ~(layout.is_liger | layout.is_compiled)
    whose = ((eager, is_eager), (liger, layout.is_liger), (compiled, layout.is_compiled))
    for passes, mask in whose:
        if mask.any():
            work += np.stack([asked(layout, moved=b, launches=n) for b, n in passes]) * mask
    return work


def product(layout: KernelShapes, rows: int, columns: int) -> Work:
    """One product of the tokens with a frozen matrix; its input's gradient is such another."""
    tokens = layout.tokens
    moved = tokens * rows + rows * columns + tokens * columns
    return asked(layout, 2.0 * tokens * rows * columns, moved=layout.compute * moved, launches=1)


def shared_product(layout: KernelShapes, of: Product) -> Work:
    """A product with frozen matrices that share the rows, forward or for the rows' gradient.

    Where each row is sent to one of the matrices, as a token is to experts, there is a kernel for
    all of them: 45 sizes of such products took an H200 0.99 times this on average, 16 % apart
    (`tests/bench/results/grouped_products_h200.jsonl`). Where there is none, torch multiplies by
    one matrix after another, and the host waits to learn how many rows each has
    (`_grouped_mm_fallback` of torch 2.13).
    """
    rows = layout.tokens * of.rows_per_token
    flops = 2.0 * rows * of.rows * of.columns
    if not of.is_routed:
        moved = rows * (of.rows + of.columns) + of.groups * of.rows * of.columns
        return asked(layout, flops, moved=layout.compute * moved, launches=1)
    # Of matrices that rows are sent to at random, so many get one.
    used = of.groups * -np.expm1(rows * np.log1p(-1.0 / of.groups))
    moved = rows * (of.rows + of.columns) + used * of.rows * of.columns
    tiles = np.maximum(1.0, rows / used / _SMALL_TILE) * of.columns / _SMALL_TILE
    by_itself = np.maximum(1.0, _FULL_TILES / tiles)
    return asked(
        layout,
        flops * np.where(layout.is_grouped, 1.0, by_itself),
        moved=layout.compute * moved,
        launches=np.where(layout.is_grouped, 1.0, used * COMPILED_LAUNCH),
    )


def eight_bit_product(layout: KernelShapes, rows: int, columns: int) -> Work:
    """The same in 8 bits, where that is asked for: the input is rounded row by row, and sums of
    integers are brought back to 16 bits.

    What is kept of a gated MLP in 8 bits is written a byte more and read a byte less.
    """
    tokens = layout.tokens
    is_int8 = layout.is_int8_compute
    is_fused = layout.is_compiled
    read = layout.compute * np.where(is_fused, FUSED_READ, 1.0)
    made = layout.compute + np.where(is_fused, SUM_BYTES, EAGER_SUM_BYTES) * is_int8
    moved = tokens * (rows * (read + 2 * BYTE) + columns * made) + rows * columns * BYTE
    launches = np.where(is_fused, 2.0, EAGER_LAUNCHES) + is_int8
    flops = 2.0 * tokens * rows * columns
    return asked(layout, flops, moved=moved, launches=launches) * layout.is_8bit_compute


def dequantization(layout: KernelShapes, rows: int, columns: int) -> Work:
    """One expansion of a quantized matrix, which every pass over it needs.

    8-bit weights multiply as they are; going back a copy of them is transposed.
    """
    is_packed = layout.is_4bit
    is_rounded = layout.is_8bit_compute
    is_double = layout.is_doubly_quantized & is_packed
    scales = np.where(is_double, DOUBLE_SCALE_BYTES, SCALE_BYTES)
    stored = np.where(is_packed, PACKED_BYTES + scales, BYTE)
    moved = rows * columns * (stored + np.where(is_rounded, BYTE, layout.compute))
    # 8-bit compute has a decoder of its own, in one kernel.
    is_unpacked = is_packed & ~is_rounded
    launches = np.where(is_double & is_unpacked, 3.0, 1.0) + UNPACKING_LAUNCHES * is_unpacked
    once = asked(layout, moved=moved, launches=launches) * layout.is_quantized
    return np.stack([once * ~(is_rounded & ~is_packed), once])


def expert_dequantization(layout: KernelShapes, of: Product) -> Work:
    """One expansion of the matrices of all experts, by one kernel that expands scales too."""
    scales = np.where(layout.is_doubly_quantized, SCALE_BYTES / FP32_BYTES, SCALE_BYTES)
    stored = np.where(layout.is_4bit, PACKED_BYTES + scales, BYTE)
    moved = of.groups * of.rows * of.columns * (stored + layout.compute)
    return asked(layout, moved=moved, launches=1) * (layout.is_quantized & of.is_routed)


def linear_casts(layout: KernelShapes, name: str) -> Work:
    """Casts of a linear layer's input and output to and from the compute type, in each pass."""
    rows, columns = layout.linears[name]
    cast = _cast(layout, rows, layout.input_bytes(name))
    back = _cast(layout, columns, layout.output_bytes(name))
    return (cast + back) * ~layout.is_compiled


def adapter_products(layout: KernelShapes, name: str) -> Work:
    """An adapter's two thin products forward; their inputs' and their own gradients backward."""
    rows, columns = layout.linears[name]
    rank = layout.rank
    tokens = layout.tokens
    flops = 2.0 * tokens * rank * (rows + columns)
    moved = layout.compute * tokens * (rows + columns + 2 * rank)
    forward = asked(layout, flops, moved=moved, launches=2)
    return np.stack([forward, 2 * forward])


def adapter_elementwise(layout: KernelShapes, name: str) -> Work:
    """What PEFT does around those products: copy, cast, dropout, scale, add."""
    rows, columns = layout.linears[name]
    tokens = layout.tokens
    c = layout.compute
    is_compiled = layout.is_compiled
    given = layout.input_bytes(name)
    returned = layout.output_bytes(name)
    scale = asked(layout, moved=tokens * 2 * c * columns, launches=1)
    add = asked(layout, moved=tokens * (2 * returned + c) * columns, launches=1)
    merge = asked(layout, moved=tokens * 3 * given * rows, launches=1)
    # Adapters of another type than the products: cast each time, and their gradients back.
    is_other: Mask = c != layout.trained
    weights = asked(layout, launches=2) * is_other
    entry = _adapter_input(layout, rows, given)
    # PEFT copies what a 4-bit layer returns before it adds to it.
    copy = asked(layout, moved=tokens * 2 * returned * columns, launches=1) * layout.is_4bit
    forward = entry + weights + scale + add + copy
    backward = entry + weights + scale + merge + _cast(layout, columns, returned)
    eager = np.stack([forward, backward + asked(layout, launches=2)])
    # The sum is one kernel; going back, scaling and summing the input's gradients are two more.
    summed = asked(layout, moved=tokens * 3 * c * columns, launches=2)
    scaled = asked(layout, moved=tokens * (2 * c * columns + 3 * c * rows), launches=4)
    return eager * ~is_compiled + np.stack([summed, scaled]) * is_compiled


def _adapter_input(layout: KernelShapes, width: int, given: Sizes) -> Work:
    """Dropout and casts of an adapter's input; PEFT casts it first, but beside a 4-bit layer."""
    elements = layout.tokens * width
    taken = np.where(layout.is_4bit, given, layout.trained)
    is_other: Mask = taken != given
    cast = asked(layout, moved=elements * (given + taken), launches=1) * is_other
    dropped = asked(layout, moved=elements * (2 * taken + 1), launches=1) * layout.has_dropout
    return _cast(layout, width, taken) + cast + dropped


def walked_over_known(layout: KernelShapes) -> Work:
    """Return how many times as much of what is elementwise the operators of a layer were seen to do
    as those of a layer of a known type as wide would; 1 where the type is known.

    By that factor it differs in other types, and with other kernels, too.
    """
    times = np.ones((2, 3, 1))
    walked = layout.kind.walked
    if walked is not None:
        plain = layout.of([_AS_WALKED])
        usual = rotation(plain) + activation(plain) + residual(plain)
        for width in layout.kind.norms:
            usual = usual + norm(plain, width)
        times[:, BYTES, 0] = np.array(walked.bytes_per_token) * plain.tokens / usual[:, BYTES, 0]
        times[:, LAUNCHES, 0] = np.array(walked.launches) / usual[:, LAUNCHES, 0]
    return times


def _cast(layout: KernelShapes, width: int, element: Sizes) -> Work:
    """A cast between ``element`` bytes and the compute type; nothing where they are the same."""
    moved = layout.tokens * width * (element + layout.compute)
    is_other: Mask = element != layout.compute
    return asked(layout, moved=moved, launches=1) * is_other


def norm(layout: KernelShapes, width: int) -> Work:
    """A root-mean-square norm; transformers' own is a chain of fp32 operations."""
    s = layout.stream
    c = layout.compute
    elements = layout.tokens * width
    casts = 2.0 * (s != FP32_BYTES)
    cast_bytes = casts * (s + FP32_BYTES)
    return _fused(
        layout,
        eager=(
            (elements * (20 + 2 * s + cast_bytes), 6 + casts),
            (elements * (72 + 2 * s + cast_bytes), 12 + casts),
        ),
        liger=((elements * 2 * s, 1), (elements * 3 * s, 3)),
        compiled=((elements * (s + c), 1), (elements * (2 * s + c), 1)),
    )


def rotation(layout: KernelShapes) -> Work:
    """Rotary positions of queries and keys."""
    moved = layout.tokens * (layout.queries + layout.keys) * layout.projected
    return _fused(
        layout,
        eager=((10 * moved, 10), (16 * moved, 20)),
        liger=((2 * moved, 3), (2 * moved, 3)),
        compiled=((2 * moved, 1), (2 * moved, 1)),
    )


def attention(layout: KernelShapes) -> Work:
    """The attention itself: a causal flash kernel, or scores that are written out."""
    rows = layout.tokens * layout.seq_len
    products = 4.0 * rows * layout.queries
    moved = layout.compute * layout.tokens * 2 * (layout.queries + layout.keys)
    scores = rows * layout.kind.heads
    # A flash kernel skips what the causal mask hides, and forms the scores again going back.
    flash = (
        asked(layout, products / 2, moved=moved, launches=1),
        asked(layout, products / 2 * 2.5, moved=2 * moved, launches=3),
    )
    score_bytes = (32 * scores, 36 * scores)
    score_launches = (9.0, 12.0)
    walked = layout.kind.walked
    if walked is not None and walked.score_bytes and walked.score_launches:
        score_bytes = rows * walked.score_bytes[0], rows * walked.score_bytes[1]
        score_launches = walked.score_launches
    written = (
        asked(layout, products, moved=moved + score_bytes[0], launches=score_launches[0]),
        asked(layout, 2 * products, moved=2 * moved + score_bytes[1], launches=score_launches[1]),
    )
    # sdpa under the mask that keeps packed examples apart: the memory-efficient kernel over all
    # scores, which reads the mask for each head; keys and values repeated for grouped heads; truth
    # values become what is added to the scores.
    c = layout.compute
    flops = products * MASKED_SLOWNESS
    more = 2 * c * layout.tokens * (layout.queries + layout.keys)
    mask = c * scores
    added = rows * (1 + c)
    masked = (
        asked(layout, flops, moved=moved + more + mask + added, launches=6),
        asked(layout, flops * 2.5, moved=2 * moved + more + mask, launches=5),
    )
    is_eager = layout.is_eager_attention
    is_masked = layout.is_masked
    return np.asarray(
        np.stack(written) * is_eager
        + np.stack(masked) * is_masked
        + np.stack(flash) * ~(is_eager | is_masked)
    )


def delta_rule(layout: KernelShapes, of: DeltaRule) -> Work:
    """Linear attention by flash-linear-attention's kernels, which take a chunk of tokens at once.

    Counted of each kernel of version 0.6.0 are its products, the whole of each chunk's, and the
    tensors that it reads and writes; what normalizes queries and keys is one of them. None of them
    was timed here.
    """
    keys = of.keys
    values = of.values
    state = keys * values
    rows = layout.tokens * of.heads
    # Of a token and head: products with the state, with the keys of a chunk, and with its values.
    forward_flops = 6 * state + 2 * CHUNK * (3 * keys + 2 * values)
    backward_flops = 16 * state + 2 * CHUNK * (10 * keys + 5 * values) + 4 * CHUNK**2
    forward_elements = 11 * keys + 6 * values + 2 * CHUNK + 2 * state / CHUNK
    backward_elements = 26 * keys + 15 * values + 2 * CHUNK + 4 * state / CHUNK
    width = rows * layout.projected
    forward = asked(layout, rows * forward_flops, moved=width * forward_elements, launches=8)
    backward = asked(layout, rows * backward_flops, moved=width * backward_elements, launches=13)
    return np.stack([forward, backward])


def attention_casts(layout: KernelShapes) -> Work:
    """Autocast brings queries, keys and values to the compute type, and their gradients back."""
    cast = _cast(layout, layout.queries + 2 * layout.keys, layout.projected)
    cast[LAUNCHES] *= 3
    return cast * ~layout.is_compiled


_PATCH_BYTES = 60
_INNER_BYTES = 10
"""Read and written for each feature of a patch by a block of a vision tower beside its products:
two norms in fp32, queries and keys turned, two residuals; an activation of the wider features."""
_BLOCK_LAUNCHES = 45
_ATTENTION_LAUNCHES = 4
"""Operations of such a block, and those of them that come once for each image."""


def tower(layout: KernelShapes) -> tuple[Work, Work, Work]:
    """The forward pass of a frozen vision tower: its products, its attention, and all else."""
    work = np.zeros((3, 3, len(layout.configs)))
    for column, config in enumerate(layout.configs):
        found = tower_of(config, layout.model)
        if found is None:
            continue
        sizes, image = found
        images = config.micro_batch_size
        features = _PATCH_BYTES * sizes.width + _INNER_BYTES * sizes.inner
        work[0, FLOPS, column] = images * sizes.product_flops(image)
        work[1, FLOPS, column] = images * sizes.attention_flops(image)
        work[2, BYTES, column] = images * image.patches * sizes.blocks * features
        launches = _BLOCK_LAUNCHES + images * _ATTENTION_LAUNCHES
        work[2, LAUNCHES, column] = sizes.blocks * launches
    return work[0], work[1], work[2]


def activation(layout: KernelShapes) -> Work:
    """The gate of the feed-forward part."""
    elements = layout.tokens * layout.inner
    y = elements * layout.projected
    c = elements * layout.compute
    return _fused(
        layout,
        eager=((5 * y, 2), (9 * y, 3)),
        liger=((3 * y, 1), (5 * y, 1)),
        compiled=((3 * c, 1), (5 * c, 1)),
    )


def residual(layout: KernelShapes) -> Work:
    """Two sums into the stream; backward also the sums over what reads one norm's output."""
    moved = layout.stream_bytes
    written = (6 * moved, 2), (15 * moved, 5)
    compiled = (4 * moved, 0), (6 * moved, 1)
    return _fused(layout, eager=written, liger=written, compiled=compiled)
