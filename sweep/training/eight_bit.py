"""Frozen linear layers that multiply in 8 bits (FP8 e4m3 or INT8), forward and for the gradient of
their input.

Inputs and gradients are rounded row by row on the way, weights once, with a scale an output
feature, or they are decoded from 4 bits in each pass. On a GPU the products are `torch._scaled_mm`
and those of `int8_products`; elsewhere they are done in float. An exported script carries this file
beside it: it needs torch, bitsandbytes and `int8_products` alone.
"""

from __future__ import annotations

import contextlib
import inspect
import math
from collections.abc import Callable, Collection, Iterable, Iterator
from types import MethodType
from typing import Any

import bitsandbytes as bnb
import torch
from torch.nn.functional import linear, silu

from qlora_sweep.sweep.training import int8_products

try:
    import triton
    import triton.language as tl
except ImportError:  # as where torch was built for CPUs alone
    triton = None

TYPES = {"fp8": torch.float8_e4m3fn, "int8": torch.int8}
_LARGEST = {"fp8": 448.0, "int8": 127.0}
_SHARED_OUT = 0.35
"""Power of an input feature's size by which INT8 divides it. SmolLM2-135M before it is trained,
held-out nats a token over bf16, inputs of the frozen layers rounded: 0.024 with 0, 0.0053 with
0.25, 0.0030 with 0.35, 0.0066 with 0.5, 0.0099 with 0.6 (one H200, 2026-11-28): a larger power
costs the weights more than it saves the inputs."""
_LEAST_SPREAD = 1e-3
"""Of an input feature, relative to the widest: one that is hardly used keeps a scale."""
_TINY = 1e-30
"""The least that a row's largest value is taken for, so that one of zeros stays zeros."""
_INT8_ROWS = 16
"""`torch._int_mm` takes more rows than these."""
_WIDTH = 16
"""Of which the features on both sides of a GPU's product in 8 bits are multiples."""
_BLOCK = 64
"""4-bit weights that share a scale."""
_SCALES_BLOCK = 256
"""Scales that share a scale of their own, where they are quantized too."""
_GATED = "self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))"

Parts = list[torch.Tensor]
"""A weight as it is held: in 8 bits one tensor (out, in); in 4 bits what is packed, its scales and
its code, and of scales that are quantized their code, their scales and their mean."""


class UnfitWeightError(ValueError):
    """A weight has infinities, or values that are no numbers."""


def half_dtype() -> torch.dtype:
    """Return the type of all that is not multiplied in 8 bits: bf16 where the GPU has units."""
    has_gpu = torch.cuda.is_available()
    is_old = has_gpu and not torch.cuda.is_bf16_supported(including_emulation=False)
    if is_old:
        return torch.float16
    return torch.bfloat16


def rounded(
    values: torch.Tensor,
    kind: str,
    times: torch.Tensor | None = None,
    less: torch.Tensor | None = None,
) -> tuple[torch.Tensor, torch.Tensor]:
    """Return values (..., columns) in 8 bits (rows, columns), and scales (rows, 1) in fp32.

    Args:
        values: of any floating type.
        kind: ``fp8`` or ``int8``.
        times: by which each column (columns,) is multiplied before it is rounded.
        less: what is taken from each column (columns,) before that.
    """
    values = values.reshape(-1, values.shape[-1])
    if values.is_cuda and not torch.compiler.is_compiling():
        return _rounded_at_once(values, kind, times, less)
    values = values.float()
    if less is not None:
        values = values - less
    if times is not None:
        values = values * times
    scales = values.abs().amax(1, keepdim=True).clamp(min=_TINY) / _LARGEST[kind]
    # By the reciprocal: the kernels that do this are bound by arithmetic.
    values = values * scales.reciprocal()
    if kind == "int8":
        # The compiler may take the scale from values before they are cast to 16 bits, and round
        # those after it. Less a mean these may be some percent larger: 129 would become -127.
        values = values.round().clamp(-_LARGEST[kind], _LARGEST[kind])
    return values.to(TYPES[kind]), scales


def _multiplied(
    left: torch.Tensor,
    left_scales: torch.Tensor,
    right: torch.Tensor,
    scales: torch.Tensor,
    added: torch.Tensor | None,
    dtype: torch.dtype,
) -> torch.Tensor:
    """Return ``left`` (m, k) times the transpose of ``right`` (n, k), times the scales of both:
    (m, 1) and (n,), with what is added to each row (n,)."""
    is_int8 = left.dtype == torch.int8
    if left.is_cuda and is_int8 and triton is not None:
        return int8_products.product(left, right, left_scales, scales, added, dtype)
    if left.is_cuda and not is_int8:
        scaling: dict[str, Any] = {
            "scale_a": left_scales,
            "scale_b": scales[None],
            "out_dtype": torch.bfloat16,
        }
        product = torch._scaled_mm(left, right.t(), **scaling, use_fast_accum=True)
    elif left.is_cuda and len(left) > _INT8_ROWS:
        product = torch._int_mm(left, right.t()).float() * left_scales * scales
    else:
        with torch.autocast(left.device.type, enabled=False):
            product = left.float() @ right.float().t() * left_scales * scales
    if added is not None:
        product = product + added
    return product.to(dtype)


class _EightBitProduct(torch.autograd.Function):
    """x W^T and, going back, dy W: the weight's scales go into the gradient before it is rounded,
    as a sum over output features cannot take them out again. Without a kind it is in 16 bits, by a
    weight that is held in 8.

    Of an input whose features have a mean m and scales s, (x - m) / s is rounded and multiplied by
    W s, and m W^T is added (`adapt`).
    """

    @staticmethod
    def forward(
        ctx: Any,
        x: torch.Tensor,
        kind: str | None,
        scales: torch.Tensor,
        input_scales: torch.Tensor | None,
        input_mean: torch.Tensor | None,
        mean_product: torch.Tensor | None,
        *parts: torch.Tensor,
    ) -> torch.Tensor:
        ctx.save_for_backward(scales, input_scales, *parts)
        ctx.kind = kind
        ctx.columns = x.shape[-1]
        if kind is None:
            return linear(x, _widened(parts[0], scales, x.dtype, input_scales))
        times = None
        if input_scales is not None:
            times = input_scales.reciprocal()
        narrow, row_scales = rounded(x, kind, times, input_mean)
        weight = _in_8_bits(
            list(parts), scales, kind, ctx.columns, input_scales, is_transposed=False
        )
        product = _multiplied(narrow, row_scales, weight, scales, mean_product, x.dtype)
        return product.reshape(*x.shape[:-1], len(scales))

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        scales, input_scales, *parts = ctx.saved_tensors
        gradient = gradients[0]
        # By other operators than forward, or the compiler keeps what those decoded.
        if ctx.kind is None:
            weight = _widened(parts[0], scales, gradient.dtype, input_scales, is_again=True)
            of_input = gradient @ weight
        else:
            narrow, row_scales = rounded(gradient, ctx.kind, scales)
            weight = _in_8_bits(
                parts, scales, ctx.kind, ctx.columns, input_scales, is_transposed=True
            )
            if input_scales is None:
                column_scales = scales.new_ones(ctx.columns)
            else:
                column_scales = input_scales.reciprocal()
            product = _multiplied(narrow, row_scales, weight, column_scales, None, gradient.dtype)
            of_input = product.reshape(*gradient.shape[:-1], ctx.columns)
        nothing = (None,) * (5 + len(parts))
        return of_input, *nothing


def _widened(
    weight: torch.Tensor,
    scales: torch.Tensor,
    dtype: torch.dtype,
    input_scales: torch.Tensor | None = None,
    *,
    is_again: bool = False,
) -> torch.Tensor:
    wide = weight.float()
    scales = scales[:, None]
    wide = scales * wide if is_again else wide * scales
    if input_scales is not None:
        wide = wide / input_scales
    return wide.to(dtype)


class _Gate(torch.autograd.Function):
    """silu(gate) * up, of which both are kept in 8 bits for the way back."""

    @staticmethod
    def forward(ctx: Any, gate: torch.Tensor, up: torch.Tensor, kind: str) -> torch.Tensor:
        ctx.save_for_backward(*rounded(gate, kind), *rounded(up, kind))
        return silu(gate) * up

    @staticmethod
    def backward(ctx: Any, *gradients: torch.Tensor) -> Any:
        narrow_gate, gate_scales, narrow_up, up_scales = ctx.saved_tensors
        shape = gradients[0].shape
        dtype = gradients[0].dtype
        gate = narrow_gate.to(dtype) * gate_scales.to(dtype)
        up = narrow_up.to(dtype) * up_scales.to(dtype)
        share = torch.sigmoid(gate)
        gradient = gradients[0].reshape(gate.shape)
        of_gate = gradient * up * share * (1 + gate * (1 - share))
        return of_gate.reshape(shape), (gradient * gate * share).reshape(shape), None


def _gated(self: Any, x: torch.Tensor) -> torch.Tensor:
    # Nothing here refers to the products while the last layer runs.
    if self.products not in TYPES:
        return self.down_proj(self.act_fn(self.gate_proj(x)) * self.up_proj(x))
    return self.down_proj(_Gate.apply(self.gate_proj(x), self.up_proj(x), self.products))


class RoundedInputs:
    """How a frozen layer rounds what goes in, once that was looked at (`adapt`); before, as it is.

    Attributes:
        input_scales: by which an input's features (in,) are divided and the weight's columns
            multiplied before both are rounded; None for 1.
        input_mean: of an input's features (in,), which is not rounded; None for 0.
        mean_product: of that and the weight (out,).
    """

    input_scales: torch.Tensor | None = None
    input_mean: torch.Tensor | None = None
    mean_product: torch.Tensor | None = None


class EightBitLinear(RoundedInputs, torch.nn.Linear):
    """A frozen linear layer whose weight is held in 8 bits, with a scale an output feature.

    Attributes:
        kind: ``fp8`` or ``int8``: what the weight's bytes are.
        products: what it multiplies in: the same, or None for the input's 16-bit type.
        compute_dtype: of what goes in and comes out.
        row_scales: of the weight's rows (out,).
    """

    def __init__(self, wide: torch.nn.Linear, kind: str) -> None:
        torch.nn.Module.__init__(self)
        self.in_features = wide.in_features
        self.out_features = wide.out_features
        self.kind = kind
        self.compute_dtype = wide.weight.dtype
        self.products: str | None = None
        # As bytes, which is no type that adapters or norms could have.
        held = torch.empty(wide.weight.shape, dtype=torch.int8, device=wide.weight.device)
        self.weight = torch.nn.Parameter(held, requires_grad=False)
        self.register_parameter("bias", wide.bias)
        scales = torch.empty(wide.out_features, device=wide.weight.device)
        self.register_buffer("row_scales", scales)

    def hold(self, weight: torch.Tensor, name: str = "a weight") -> None:
        """Take the values of a weight (out, in), on whatever device it is, called so in an error.

        Raises:
            UnfitWeightError: 8 bits cannot hold it.
        """
        narrow, scales = rounded(weight, self.kind)
        check_finite(scales, name)
        self.weight = torch.nn.Parameter(narrow.view(torch.int8), requires_grad=False)
        self.row_scales = scales[:, 0]

    def scale_inputs(self, input_scales: torch.Tensor) -> None:
        """Divide the input's features by scales (in,) before they are rounded, and multiply the
        weight's columns by them."""
        scaled = self.dequantized().float() * input_scales
        self.hold(scaled)
        self.input_scales = input_scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product (..., out) of an input (..., in)."""
        return _forward(self, x, [self.weight.view(TYPES[self.kind])])

    def dequantized(self) -> torch.Tensor:
        """Return the weight (out, in) in 16 bits."""
        weight = self.weight.view(TYPES[self.kind])
        return _widened(weight, self.row_scales, self.compute_dtype, self.input_scales)


class FourBitLinear(RoundedInputs, bnb.nn.Linear4bit):
    """bitsandbytes' layer that multiplies in 8 bits, with `products`, `compute_dtype` and
    `row_scales` as `EightBitLinear` has them. Layers become one, none is made."""

    def scale_inputs(self, input_scales: torch.Tensor) -> None:
        """Divide the input's features by scales (in,) before they are rounded, and multiply the
        weight's columns by them where it is decoded."""
        scaled = self.dequantized() * input_scales
        self.row_scales = _largest_of_rows(scaled) / _LARGEST[self.products]
        self.input_scales = input_scales

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Return the product (..., out) of an input (..., in)."""
        if self.products is None:
            return super().forward(x)
        return _forward(self, x, [getattr(self, f"part_{i}") for i in range(self.parts)])

    def dequantized(self) -> torch.Tensor:
        """Return the weight (out, in) in 16 bits."""
        state = self.weight.quant_state
        return bnb.functional.dequantize_4bit(self.weight.data, state).to(self.compute_dtype)


def _forward(layer: Any, x: torch.Tensor, parts: Parts) -> torch.Tensor:
    x = x.to(layer.compute_dtype)
    if layer.products == "nf4":
        product = linear(x, _rounded_to_nf4(layer.dequantized()))
    else:
        product = _EightBitProduct.apply(
            x,
            layer.products,
            layer.row_scales,
            layer.input_scales,
            layer.input_mean,
            layer.mean_product,
            *parts,
        )
    if layer.bias is not None:
        product = product + layer.bias.to(product.dtype)
    return product


def _rounded_to_nf4(weight: torch.Tensor) -> torch.Tensor:
    # By columns, so that what is in NF4 already is rounded once more too.
    packed, state = bnb.functional.quantize_4bit(weight.t().contiguous(), quant_type="nf4")
    return bnb.functional.dequantize_4bit(packed, state).t()


def to_8_bits(
    model: torch.nn.Module,
    kind: str,
    *,
    left: Collection[str] = (),
    device: torch.device | None = None,
) -> None:
    """Hold the linear layers of a model in 8 bits, one after the other.

    Args:
        model: its weights in 16 bits, wherever they are; on the meta device they get no values.
        kind: ``fp8`` or ``int8``.
        left: names of layers that stay as they are, such as the head.
        device: where the model is put, these weights one at a time; None for where it is.

    Raises:
        UnfitWeightError: a weight that 8 bits cannot hold.
    """
    for name, wide in list(model.named_modules()):
        if type(wide) is not torch.nn.Linear or name in left:
            continue
        layer = EightBitLinear(wide, kind)
        if wide.weight.device.type != "meta":
            layer.hold(wide.weight.data.to(device), name)
        model.set_submodule(name, layer)
    if device is not None:
        model.to(device)


def fits_products(layer: Any) -> bool:
    """Whether a GPU multiplies by a linear layer in 8 bits. Linear attention has layers of as many
    features as there are heads, for which it may not."""
    return layer.in_features % _WIDTH == 0 and layer.out_features % _WIDTH == 0


def narrow_layers(model: torch.nn.Module) -> dict[str, Any]:
    """Return the layers that hold what 8-bit products need, by name."""
    return {
        name: module
        for name, module in model.named_modules()
        if hasattr(module, "row_scales") and fits_products(module)
    }


def compute_in_8_bits(model: torch.nn.Module, kind: str) -> None:
    """Let the layers of a model that are held in 4 or 8 bits multiply in 8, where a GPU can, and
    its gated MLPs keep their products in 8 bits for the way back.

    Args:
        model: without adapters, on its device.
        kind: ``fp8`` or ``int8``; what layers that are held in 8 bits are held in.

    Raises:
        UnfitWeightError: a weight that 8 bits cannot hold.
    """
    module: Any
    for name, module in model.named_modules():
        if isinstance(module, bnb.nn.Linear4bit | EightBitLinear) and not fits_products(module):
            continue
        if isinstance(module, bnb.nn.Linear4bit):
            _become_eight_bit(module, kind, name)
        elif isinstance(module, EightBitLinear):
            module.products = kind
        elif _is_gated(module):
            module.products = kind
            module.forward = MethodType(_gated, module)


def tune_products(
    model: torch.nn.Module, *, rows: int, on_timed: Callable[[], object] = lambda: None
) -> bool:
    """Choose the kernels of a model's INT8 products, before memory is full and layers are compiled.
    Return whether any was timed: not on a CPU, nor where all were before.

    Args:
        model: on its device, with adapters or without.
        rows: tokens of a micro-batch.
        on_timed: called after each kernel that was timed.
    """
    shapes: dict[tuple[torch.device, torch.dtype], set[int8_products.Shape]] = {}
    for layer in narrow_layers(model).values():
        if layer.products != "int8":
            continue
        of_layers = shapes.setdefault((layer.row_scales.device, layer.compute_dtype), set())
        of_layers.add(int8_products.Shape(rows, layer.out_features, layer.in_features))
        of_layers.add(int8_products.Shape(rows, layer.in_features, layer.out_features))
    is_any_timed = False
    for (device, dtype), of_layers in shapes.items():
        if int8_products.tune(of_layers, dtype=dtype, device=device, on_timed=on_timed):
            is_any_timed = True
    return is_any_timed


def _is_gated(module: torch.nn.Module) -> bool:
    """Whether a module does exactly what `_gated` does, with SiLU."""
    if not type(getattr(module, "act_fn", None)).__name__.startswith("SiLU"):
        return False
    return _GATED in inspect.getsource(type(module).forward)


def _become_eight_bit(layer: Any, kind: str, name: str) -> None:
    state = layer.weight.quant_state
    parts = [layer.weight.data.reshape(-1), state.absmax, state.code]
    assert state.blocksize == _BLOCK, "4-bit blocks have bitsandbytes' default size"
    if state.nested:
        parts += [state.state2.code, state.state2.absmax, state.offset]
        assert state.state2.blocksize == _SCALES_BLOCK, "so have those of their scales"
    wide = bnb.functional.dequantize_4bit(layer.weight.data, state)
    largest = _largest_of_rows(wide)
    check_finite(largest, name)
    for index, part in enumerate(parts):
        layer.register_buffer(f"part_{index}", part, persistent=False)
    layer.register_buffer("row_scales", largest / _LARGEST[kind], persistent=False)
    layer.__class__ = FourBitLinear
    layer.products = kind
    layer.parts = len(parts)


def _largest_of_rows(weight: torch.Tensor) -> torch.Tensor:
    """Return the largest value of each row (out,) of a weight (out, in), in fp32."""
    return torch.linalg.vector_norm(weight, torch.inf, dim=1).float().clamp(min=_TINY)


def adapt(model: torch.nn.Module, show: Callable[[], object]) -> None:
    """Let the layers that multiply in 8 bits round as suits what a trained model gives them.

    A few features of such an input are much larger than the others, and most of what they are is
    their mean. FP8 rounds each value in proportion to itself, INT8 all of a row in proportion to
    its largest: either way these few decide how far a product is off. So the mean is taken out
    before rounding and its product added in full; for INT8 each feature is divided by a power of
    its size as well, and the weight's column multiplied by it (arXiv 2211.10438).

    Args:
        model: on its device, adapters on it or not; adapted once.
        show: passes some examples through it, without gradients; layers then multiply in 16 bits.
    """
    layers = [layer for layer in narrow_layers(model).values() if layer.products in TYPES]
    with _observed(layers) as seen:
        show()
    before: Any = None
    for layer in layers:
        if layer not in seen:
            continue
        count, total, squares = seen[layer]
        # Such as q, k and v: what they round is the same, and the compiler rounds it once.
        is_alike = before is not None and total.equal(seen[before][1])
        if is_alike:
            mean = before.input_mean
        else:
            mean = total / count
        layer.mean_product = layer.dequantized().float() @ mean
        layer.input_mean = mean
        if layer.products == "int8":
            if is_alike:
                scales = before.input_scales
            else:
                scales = _shared_out(squares / count)
            layer.scale_inputs(scales)
        before = layer


def _shared_out(mean_square: torch.Tensor) -> torch.Tensor:
    """Return by what INT8 divides features (in,), from their mean square."""
    size = mean_square.sqrt()
    size = size.clamp(min=_LEAST_SPREAD * size.amax().clamp(min=_TINY))
    return (size / size.mean()) ** _SHARED_OUT


@contextlib.contextmanager
def _observed(layers: list[Any]) -> Iterator[dict[Any, tuple[int, torch.Tensor, torch.Tensor]]]:
    """Let layers multiply in 16 bits; yield by layer how many inputs went in, and their sum and
    that of their squares (in,) by feature."""
    seen: dict[Any, tuple[int, torch.Tensor, torch.Tensor]] = {}

    def note(layer: Any, inputs: tuple[torch.Tensor, ...]) -> None:
        x = inputs[0].detach().reshape(-1, layer.in_features).float()
        count, total, squares = seen.get(layer, (0, 0.0, 0.0))
        seen[layer] = (count + len(x), total + x.sum(0), squares + x.square().sum(0))

    hooks = [layer.register_forward_pre_hook(note) for layer in layers]
    try:
        with changed((layer, "products", None) for layer in layers):
            yield seen
    finally:
        for hook in hooks:
            hook.remove()


@contextlib.contextmanager
def changed(changes: Iterable[tuple[Any, str, Any]]) -> Iterator[None]:
    """Set attributes of objects; on exit they are as they were.

    Args:
        changes: objects, names of attributes that they have, and values.
    """
    with contextlib.ExitStack() as undo:
        for thing, name, value in list(changes):
            undo.callback(setattr, thing, name, getattr(thing, name))
            setattr(thing, name, value)
        yield


def check_finite(scales: torch.Tensor, name: str) -> None:
    """See that a weight's scales are numbers.

    Raises:
        UnfitWeightError: they are not, as the weight's values are none.
    """
    if not bool(scales.isfinite().all()):
        raise UnfitWeightError(
            f"{name} has values that are infinite or no numbers, which 8 bits cannot hold"
        )


def _in_8_bits(
    parts: Parts,
    scales: torch.Tensor,
    kind: str,
    columns: int,
    input_scales: torch.Tensor | None,
    *,
    is_transposed: bool,
) -> torch.Tensor:
    """Return a weight (out, in), or its transpose (in, out), row-major, without its scales."""
    weight = parts[0]
    if len(parts) > 1:
        if weight.is_cuda:
            return _decoded(parts, scales, input_scales, kind, columns, is_transposed)
        values = _unpacked(parts).reshape(-1, columns)
        if input_scales is not None:
            values = values * input_scales
        values = values / scales[:, None]
        if kind == "int8":
            values = values.round()
        weight = values.to(TYPES[kind])
    if weight.is_cuda and is_transposed:
        return _transposed(weight.view(torch.int8)).view(TYPES[kind])
    if is_transposed:
        return weight.t().contiguous()
    return weight


def widened(parts: Parts, dtype: torch.dtype, *, is_again: bool = False) -> torch.Tensor:
    """Return the values of a packed weight, in one row.

    Args:
        parts: as `Parts` says.
        dtype: of the values.
        is_again: whether it is on the way back: by another operator, or the compiler keeps what the
            first one decoded.
    """
    if parts[0].is_cuda:
        return _widened_at_once(parts, dtype, is_again)
    return _unpacked(parts).to(dtype)


def widened_rows(
    weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, *, is_again: bool = False
) -> torch.Tensor:
    """Return the values of matrices (groups, rows, columns) that are held in 8 bits.

    Args:
        weight: in FP8 or INT8.
        scales: of the rows (groups, rows, 1) or of the columns (groups, 1, columns), in fp32.
        dtype: of the values.
        is_again: see `widened`.
    """
    if weight.is_cuda:
        return _rows_at_once(weight, scales, dtype, is_again)
    return (weight.float() * scales).to(dtype)


def _unpacked(parts: Parts) -> torch.Tensor:
    """Return the values of a packed weight, in fp32 and one row; the kernels' reference."""
    packed, scales, code, *outer = parts
    if outer:
        of_scales, outer_scales, mean = outer
        wide = outer_scales.repeat_interleave(_SCALES_BLOCK)[: len(scales)]
        scales = of_scales[scales.int()] * wide + mean
    values = code[torch.stack([packed >> 4, packed & 15], dim=1).reshape(-1).int()]
    return values * scales.repeat_interleave(_BLOCK)[: len(values)]


if triton is not None:

    @triton.jit
    def _narrow(values, dtype: tl.constexpr):  # type: ignore[no-untyped-def]
        if dtype == tl.int8:
            values = tl.extra.cuda.libdevice.rint(values)
        return values.to(dtype)

    @triton.jit
    def _decode(  # type: ignore[no-untyped-def]
        packed, scales, code, of_scales, outer_scales, mean, row_scales, input_scales, out,
        columns: tl.constexpr, is_nested: tl.constexpr, has_row_scales: tl.constexpr,
        has_input_scales: tl.constexpr, size: tl.constexpr, reader: tl.constexpr,
    ):  # fmt: skip
        first = tl.program_id(0).to(tl.int64) * size
        at = first + tl.arange(0, size)
        byte = tl.load(packed + at).to(tl.int32)
        factor = tl.load(scales + at // 32)
        if is_nested:
            outer = tl.load(outer_scales + at // 32 // 256)
            factor = tl.load(of_scales + factor.to(tl.int32)) * outer + tl.load(mean)
        if has_row_scales:
            factor /= tl.load(row_scales + 2 * at // columns)
        high = tl.load(code + (byte >> 4))
        low = tl.load(code + (byte & 15))
        values = tl.interleave(high * factor, low * factor)
        if has_input_scales:
            column = (2 * first + tl.arange(0, 2 * size)) % columns
            values *= tl.load(input_scales + column)
        values = _narrow(values, out.dtype.element_ty)
        tl.store(out + 2 * first + tl.arange(0, 2 * size), values)

    @triton.jit
    def _widen_rows(  # type: ignore[no-untyped-def]
        weight, scales, out, columns, matrix,
        is_of_columns: tl.constexpr, size: tl.constexpr, reader: tl.constexpr,
    ):  # fmt: skip
        at = tl.program_id(0).to(tl.int64) * size + tl.arange(0, size)
        row = at // columns
        if is_of_columns:
            row = at // matrix * columns + at % columns
        values = tl.load(weight + at).to(tl.float32) * tl.load(scales + row)
        tl.store(out + at, values.to(out.dtype.element_ty))

    @triton.jit
    def _transpose(  # type: ignore[no-untyped-def]
        values, out, rows, columns, of_rows: tl.constexpr, of_columns: tl.constexpr
    ):
        row = tl.program_id(0).to(tl.int64) * of_rows + tl.arange(0, of_rows)
        column = tl.program_id(1).to(tl.int64) * of_columns + tl.arange(0, of_columns)
        tile = tl.load(values + row[:, None] * columns + column[None, :])
        tl.store(out + column[:, None] * rows + row[None, :], tl.trans(tile))

    @triton.jit
    def _round(  # type: ignore[no-untyped-def]
        values, times, less, out, scales, columns,
        has_times: tl.constexpr, has_less: tl.constexpr, largest: tl.constexpr,
        size: tl.constexpr,
    ):  # fmt: skip
        row = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, size)
        is_in = column < columns
        wide = tl.load(values + row * columns + column, mask=is_in, other=0.0).to(tl.float32)
        if has_less:
            wide -= tl.load(less + column, mask=is_in, other=0.0)
        if has_times:
            wide *= tl.load(times + column, mask=is_in, other=0.0)
        # The largest of values and no number would be a value.
        size_of = tl.where(wide == wide, tl.abs(wide), float("inf"))
        scale = tl.maximum(tl.max(size_of), 1e-30) / largest
        narrow = _narrow(wide * (1.0 / scale), out.dtype.element_ty)
        tl.store(out + row * columns + column, narrow, mask=is_in)
        tl.store(scales + row, scale)

    def _decode_into(
        out: torch.Tensor,
        parts: Parts,
        row_scales: torch.Tensor | None,
        input_scales: torch.Tensor | None,
        *,
        reader: int,
    ) -> None:
        """Write a packed weight into ``out`` (out, in); the compiler takes decodings by readers of
        one number for one, and keeps what the first decoded."""
        packed, scales, code, *outer = parts
        outer = outer or [code, code, code]
        size = math.gcd(packed.numel(), 4096)
        torch.library.wrap_triton(_decode)[(packed.numel() // size,)](
            packed, scales, code, *outer,
            scales if row_scales is None else row_scales,
            scales if input_scales is None else input_scales, out,
            columns=out.shape[-1], is_nested=len(parts) > 3,
            has_row_scales=row_scales is not None, has_input_scales=input_scales is not None,
            size=size, reader=reader,
        )  # fmt: skip

    @torch.library.triton_op("sweep::decoded", mutates_args=())
    def _decoded(
        parts: list[torch.Tensor],
        row_scales: torch.Tensor,
        input_scales: torch.Tensor | None,
        kind: str,
        columns: int,
        is_transposed: bool,
    ) -> torch.Tensor:
        """Return a packed weight in 8 bits, as it is or transposed."""
        out = parts[0].new_empty(len(row_scales), columns, dtype=TYPES[kind])
        _decode_into(out, parts, row_scales, input_scales, reader=int(is_transposed))
        if is_transposed:
            return _turned(out)
        return out

    @torch.library.triton_op("sweep::widened", mutates_args=())
    def _widened_at_once(
        parts: list[torch.Tensor], dtype: torch.dtype, is_again: bool
    ) -> torch.Tensor:
        """Return what `widened` does, by one kernel."""
        out = parts[0].new_empty(2 * parts[0].numel(), dtype=dtype)
        _decode_into(out, parts, None, None, reader=int(is_again))
        return out

    @torch.library.triton_op("sweep::widened_rows", mutates_args=())
    def _rows_at_once(
        weight: torch.Tensor, scales: torch.Tensor, dtype: torch.dtype, is_again: bool
    ) -> torch.Tensor:
        """Return what `widened_rows` does, by one kernel."""
        out = torch.empty_like(weight, dtype=dtype)
        _, rows, columns = weight.shape
        size = math.gcd(weight.numel(), 4096)
        torch.library.wrap_triton(_widen_rows)[(weight.numel() // size,)](
            weight, scales, out, columns, rows * columns,
            is_of_columns=scales.shape[1] == 1, size=size, reader=int(is_again),
        )  # fmt: skip
        return out

    def _turned(values: torch.Tensor) -> torch.Tensor:
        rows, columns = values.shape
        out = values.new_empty(columns, rows)
        of_rows = math.gcd(rows, 64)
        of_columns = math.gcd(columns, 64)
        torch.library.wrap_triton(_transpose)[(rows // of_rows, columns // of_columns)](
            values, out, rows, columns, of_rows=of_rows, of_columns=of_columns
        )
        return out

    @torch.library.triton_op("sweep::transposed", mutates_args=())
    def _transposed(values: torch.Tensor) -> torch.Tensor:
        """Return bytes (rows, columns) as (columns, rows), row-major."""
        return _turned(values)

    def _rounded_at_once(
        values: torch.Tensor, kind: str, times: torch.Tensor | None, less: torch.Tensor | None
    ) -> tuple[torch.Tensor, torch.Tensor]:
        """Return what `rounded` does, by one kernel."""
        values = values.contiguous()
        rows, columns = values.shape
        out = values.new_empty(rows, columns, dtype=TYPES[kind])
        scales = values.new_empty(rows, 1, dtype=torch.float32)
        _round[(rows,)](
            values, values if times is None else times, values if less is None else less,
            out, scales, columns,
            has_times=times is not None, has_less=less is not None, largest=_LARGEST[kind],
            size=triton.next_power_of_2(columns), num_warps=8,
        )  # fmt: skip
        return out, scales
