"""Stand-ins of what a GPU decides and of bitsandbytes.

By device are decided: autocast's policy, the kernels of dropout, softmax, attention and
convolution.
The tensors are on torch's meta device, whose operators follow the same derivative formulas as
CUDA's, so that autograd keeps the same tensors for the backward pass. What would differ is decided
as on a GPU here, on the way from Python into torch. The meta device has no autocast, and a cast is
a tensor to be kept like any other: its policy is applied here, by the lists of torch's
``aten/src/ATen/autocast_mode.h``.

On the meta device `scaled_dot_product_attention` writes its scores out, length by length, as no
fused kernel is there to be chosen. Here the choice is CUDA's (torch's ``sdp_utils.cpp``), and each
kernel allocates what the real one does (``attention.cu``, ``attention_backward.cu``). Nothing is
computed: a tensor of the right size, born and let go of at the right moment, is all that a count of
memory needs.

Of the bitsandbytes package there is its 4-bit layer, with the real one's tensors.
The real layer's packed parameter cannot be built from tensors without data, and the package takes
most of a second to import. What is copied from bitsandbytes 0.50: the input is cast to the compute
dtype; forward and backward each dequantize the whole weight to a temporary (and, with double
quantization, its constants); nothing but the weight is kept for the backward pass; the output is
cast back to the input's dtype, so that fp32 activations stay fp32 around every layer; a bias is
cast to the compute dtype for good. Small matrix products, which bitsandbytes does without the
temporary in the forward pass, are not told apart: the backward pass has it anyway.
"""

from __future__ import annotations

import contextlib
import functools
import importlib.machinery
import sys
import types
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch.overrides import TorchFunctionMode

Policy = str
OnAttention = Callable[..., contextlib.AbstractContextManager[None]]

_LOWER = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm addmv addr
matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul scaled_dot_product_attention __matmul__
__rmatmul__
"""
_FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__
square
softplus layer_norm rms_norm group_norm cosine_similarity nll_loss cross_entropy kl_div l1_loss
smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits logsumexp cdist
"""
_FP32_RESULT = "prod softmax log_softmax cumprod cumsum sum norm"
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add"
_NAMESPACES = (torch, torch.Tensor, functional)


_autocast_dtype = torch.get_autocast_dtype


def _dtype_of_autocast(device_type: str = "cuda") -> torch.dtype:
    """Return it for the device that stands for the GPU, too."""
    return _autocast_dtype("cuda" if device_type == "meta" else device_type)


torch.get_autocast_dtype = _dtype_of_autocast

_POLICIES: dict[Callable[..., Any], Policy] = {
    getattr(namespace, name): policy
    for policy, names in (
        ("lower", _LOWER),
        ("fp32", _FP32),
        ("fp32_result", _FP32_RESULT),
        ("widest", _WIDEST),
    )
    for name in names.split()
    for namespace in _NAMESPACES
    if hasattr(namespace, name)
}
_HALF = (torch.float16, torch.bfloat16)
_SOFTMAXES = frozenset({functional.softmax, torch.softmax, torch.Tensor.softmax})
_BF16_ONLY = frozenset({torch._grouped_mm, functional.grouped_mm})


class Cuda(TorchFunctionMode):
    """Makes operators on tensors without data choose as they would on a GPU.

    Enter `region` where the real program enters autocast: around the forward pass and around each
    recomputation.

    Args:
        autocast_dtype: the lower precision; None where the training does without autocast.
        padded_length: what stands for a sequence padded to the attention kernel's blocks.
        has_flash: whether the GPU has flash attention.
        on_attention: entered around each fused attention, with its queries, keys and values.

    Attributes:
        tells_halves_apart: whether anything was run that does another thing in fp16 than in bf16.
    """

    def __init__(
        self,
        autocast_dtype: torch.dtype | None,
        *,
        padded_length: int,
        has_flash: bool,
        on_attention: OnAttention = lambda *_: contextlib.nullcontext(),
    ) -> None:
        super().__init__()
        self._dtype = autocast_dtype
        self._attention = functools.partial(
            scaled_dot_product_attention, padded_length=padded_length, has_flash=has_flash
        )
        self._on_attention = on_attention
        self._casts: dict[int, torch.Tensor] = {}
        self._depth = 0
        self.tells_halves_apart = False

    @contextlib.contextmanager
    def region(self) -> Iterator[None]:
        """Autocast is on inside; casts of trained weights live until the outermost region ends."""
        before = torch.is_autocast_enabled("cuda")
        # PEFT asks this flag whether it must convert by itself.
        torch.set_autocast_enabled("cuda", self._dtype is not None)
        if self._dtype is not None:
            torch.set_autocast_dtype("cuda", self._dtype)
        self._depth += 1
        try:
            with self:
                yield
        finally:
            self._depth -= 1
            torch.set_autocast_enabled("cuda", before)
            # torch clears its cache of casts where the nesting ends (``amp/autocast_mode.py``), and
            # not before: a recomputation inside the backward pass has casts of its own.
            if not self._depth:
                self._casts.clear()

    @contextlib.contextmanager
    def maybe_autocast(
        self,
        device_type: str,
        dtype: torch.dtype | None = None,
        enabled: bool = True,
        cache_enabled: bool | None = None,
    ) -> Iterator[None]:
        """Leave out autocast inside, where a layer asks for it: as transformers' function of that
        name does on a GPU, which on the meta device does nothing."""
        if enabled:
            yield
            return
        dtype, self._dtype = self._dtype, None
        was_enabled = torch.is_autocast_enabled("cuda")
        torch.set_autocast_enabled("cuda", False)
        try:
            yield
        finally:
            self._dtype = dtype
            torch.set_autocast_enabled("cuda", was_enabled)

    def __torch_function__(
        self,
        func: Any,
        types: Any,
        args: tuple[Any, ...] = (),
        kwargs: dict[str, Any] | None = None,
    ) -> Any:
        """Cast the arguments by policy, then run the function or what CUDA has in its place."""
        kwargs = dict(kwargs or {})
        if self._dtype is not None and func in _POLICIES:
            args, kwargs = self._cast(_POLICIES[func], args, kwargs)
        if func is functional.scaled_dot_product_attention:
            names = ("query", "key", "value")
            given = dict(zip(names, args, strict=False)) | kwargs
            with self._on_attention(*(given[name] for name in names)):
                return self._attention(*args, **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        if func is functional.conv1d:
            return conv1d(*args, **kwargs)
        if func in _SOFTMAXES:
            self.tells_halves_apart |= args[0].dtype in _HALF
            # CUDA widens fp16 (and only that) inside the kernel, without a copy of its input.
            if args[0].dtype == torch.float16 and kwargs.get("dtype") == torch.float32:
                return torch.ops.aten._softmax(args[0], kwargs.get("dim", -1), True)
        self.tells_halves_apart |= func in _BF16_ONLY
        return func(*args, **kwargs)

    def _cast(
        self, policy: Policy, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> tuple[tuple[Any, ...], dict[str, Any]]:
        if policy == "fp32_result":
            if kwargs.get("dtype") is None and _is_float(args[0]):
                kwargs["dtype"] = torch.float32
            return args, kwargs
        cast = self._lower if policy == "lower" else _to_fp32
        if policy == "widest" and not any(
            isinstance(a, torch.Tensor) and a.dtype == torch.float32 for a in args
        ):
            cast = self._lower
        return tuple(map(cast, args)), {name: cast(a) for name, a in kwargs.items()}

    def _lower(self, value: Any) -> Any:
        if isinstance(value, list | tuple):
            return type(value)(self._lower(item) for item in value)
        if not _is_float(value) or value.dtype == self._dtype:
            return value
        assert self._dtype is not None
        # `cached_cast`: only a leaf in fp32 that wants a gradient is cast once and kept. Frozen
        # weights are cast anew each time, which is why those in fp32 cost a temporary at every use.
        is_weight = value.requires_grad and value.is_leaf and not value._is_view()
        if not is_weight or value.dtype != torch.float32:
            return value.to(self._dtype)
        if id(value) not in self._casts:
            self._casts[id(value)] = value.to(self._dtype)
        return self._casts[id(value)]


def _to_fp32(value: Any) -> Any:
    if isinstance(value, list | tuple):
        return type(value)(_to_fp32(item) for item in value)
    if _is_float(value):
        return value.float()
    return value


def _is_float(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _dropout(
    tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """CUDA's fused dropout keeps a mask of one byte an element."""
    if not training or not p:
        return tensor
    return torch.native_dropout(tensor, p, True)[0]


class _Depthwise(torch.autograd.Function):
    """A convolution of each channel with a frozen kernel.

    In both directions CUDA first makes the input contiguous (torch's ``Convolution.cpp``), and what
    is kept for the backward pass is what was given.
    """

    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, weight: torch.Tensor, bias: torch.Tensor | None, padding: int
    ) -> torch.Tensor:
        ctx.save_for_backward(x, weight)
        _copy = x.contiguous()
        batch, channels, length = x.shape
        # Zeros are written: what is counted of a step's traffic is what operators write.
        return x.new_zeros(batch, channels, length + 2 * padding - weight.shape[-1] + 1)

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        x = ctx.saved_tensors[0]
        _copy = x.contiguous()
        _grad = grads[0].contiguous()
        return x.new_zeros(x.shape), None, None, None


def conv1d(
    x: torch.Tensor,
    weight: torch.Tensor,
    bias: torch.Tensor | None = None,
    stride: int | tuple[int] = 1,
    padding: int | tuple[int] | str = 0,
    dilation: int | tuple[int] = 1,
    groups: int = 1,
) -> torch.Tensor:
    """Return the result of a convolution: as CUDA allocates it, where each channel has a frozen
    kernel of its own.

    Args:
        x: the input. (batch, channels, length)
        weight: a kernel for each channel. (channels, 1, width)
        bias: of each channel; None for none.
        stride: as torch has it, like the rest.
        padding: at each end.
        dilation: of the kernels.
        groups: of channels.
    """
    is_plain = {stride, dilation} <= {1, (1,)} and not weight.requires_grad
    if not is_plain or groups != x.shape[1] or isinstance(padding, str):
        return functional.conv1d(x, weight, bias, stride, padding, dilation, groups)
    if isinstance(padding, tuple):
        padding = padding[0]
    return _Depthwise.apply(x, weight, bias, padding)


_FLASH_HEAD_MAX = 256
"""Larger heads than this have no flash kernel."""
_HEAD_MULTIPLE = 8
"""A head is padded to this; the padded copies of q, k and v are what is kept."""


class FlashAttention(torch.autograd.Function):
    """Keeps q, k, v, the output and an fp32 a row and head; sums dq in fp32 on the way back.

    The scores are formed again going back, from q, k and each row's log-sum-exp, and so are never
    kept. Many blocks of keys add to the same row of dq, which is why it is summed in fp32, over
    rows that are padded to whole blocks.
    """

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, padded_length: int
    ) -> torch.Tensor:
        """Return the output, laid out as the queries are."""
        batch, heads, length, _ = q.shape
        out = torch.empty_like(q)
        log_sum = q.new_empty(batch, heads, length, dtype=torch.float32)
        seed = q.new_empty(2, dtype=torch.int64)
        ctx.save_for_backward(q, k, v, out, log_sum, seed)
        ctx.padded_length = padded_length
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of q, k and v."""
        q, k, v, _, _, _ = ctx.saved_tensors
        batch, heads, _, size = q.shape
        rows = ctx.padded_length
        keep = grads[0].contiguous()
        row_sums = q.new_empty(batch, heads, rows, dtype=torch.float32)
        dq_sum = q.new_empty(batch, heads, rows, size, dtype=torch.float32)
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        if k.shape[1] != heads:
            # Grouped heads: the kernel writes dk and dv for each query head, then sums each group.
            wide = [q.new_empty(batch, k.shape[2], heads, size) for _ in range(2)]
            del wide
        # All of it is the kernel's own, and gone before autograd sees a gradient.
        del keep, row_sums, dq_sum
        return dq, dk, dv, None


class EfficientAttention(torch.autograd.Function):
    """As `FlashAttention`, with an additive mask of the inputs' dtype that is kept as well."""

    @staticmethod
    def forward(
        ctx: Any, q: torch.Tensor, k: torch.Tensor, v: torch.Tensor, bias: torch.Tensor | None
    ) -> torch.Tensor:
        """Return the output, laid out as (batch, length, heads, head size) underneath."""
        batch, heads, length, _ = q.shape
        out = q.new_empty(batch, length, heads, v.shape[-1]).transpose(1, 2)
        log_sum = q.new_empty(batch, heads, length, dtype=torch.float32)
        seed = q.new_empty(2, dtype=torch.int64)
        ctx.save_for_backward(q, k, v, out, log_sum, seed, *([] if bias is None else [bias]))
        return out

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of q, k and v."""
        q, k, v = ctx.saved_tensors[:3]
        batch, heads, length, size = q.shape
        row_sums = q.new_empty(batch, heads, length, dtype=torch.float32)
        sums = q.new_empty(batch, heads, length, size, dtype=torch.float32)
        dq = torch.empty_like(q)
        dk = torch.empty_like(k)
        dv = torch.empty_like(v)
        del row_sums, sums
        return dq, dk, dv, None


def scaled_dot_product_attention(
    query: torch.Tensor,
    key: torch.Tensor,
    value: torch.Tensor,
    attn_mask: torch.Tensor | None = None,
    dropout_p: float = 0.0,
    is_causal: bool = False,
    scale: float | None = None,
    enable_gqa: bool = False,
    *,
    padded_length: int,
    has_flash: bool,
) -> torch.Tensor:
    """Return the output of the kernel that CUDA would pick: flash, memory-efficient, or none."""
    _, heads, _, size = query.shape
    groups = key.shape[1]
    if heads % groups or key.shape[:3] != value.shape[:3] or size != key.shape[-1]:
        raise RuntimeError(
            f"attention cannot combine shapes {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )
    is_small = size == value.shape[-1] <= _FLASH_HEAD_MAX
    if has_flash and attn_mask is None and query.dtype in _HALF and is_small:
        if missing := -size % _HEAD_MULTIPLE:
            query, key, value = (functional.pad(t, (0, missing)) for t in (query, key, value))
        return FlashAttention.apply(query, key, value, padded_length)[..., :size]
    if heads == groups:
        # CUDA turns a mask of truth values into one that is added to the scores.
        if attn_mask is not None and attn_mask.dtype == torch.bool:
            attn_mask = attn_mask.to(query.dtype)
        return EfficientAttention.apply(query, key, value, attn_mask)
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


_BLOCK_WEIGHTS = 64
"""Weights that share a scale."""
_BLOCK_SCALES = 256
"""Scales that share a second-level scale under double quantization."""
_CODE_BYTES = 16 * 4
_SECOND_CODE_BYTES = 256 * 4
_OFFSET_BYTES = 4


class Params4bit(torch.nn.Parameter):
    """Packed weights: two in a byte. PEFT knows the real class by its name."""

    compress_statistics: bool
    quant_type: str
    quant_state: types.SimpleNamespace
    """The shape of what they are of."""

    def __new__(
        cls,
        data: torch.Tensor,
        requires_grad: bool = False,
        *,
        compress_statistics: bool,
        quant_type: str,
    ) -> Params4bit:
        """Return the packed form of weights."""
        packed = torch.empty((data.numel() + 1) // 2, 1, dtype=torch.uint8, device="meta")
        self = torch.Tensor._make_subclass(cls, packed, requires_grad)
        self.compress_statistics = compress_statistics
        self.quant_type = quant_type
        self.quant_state = types.SimpleNamespace(shape=data.shape)
        return self

    @property
    def weights(self) -> int:
        """How many there are."""
        return int(self.quant_state.shape.numel())

    @property
    def scales(self) -> int:
        """Number of scales, one a block of weights."""
        return -(-self.weights // _BLOCK_WEIGHTS)

    def constant_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each tensor that describes the packed weights, in building order."""
        if not self.compress_statistics:
            return (self.scales * 4, _CODE_BYTES)
        second = -(-self.scales // _BLOCK_SCALES) * 4
        return (_CODE_BYTES, _OFFSET_BYTES, second, self.scales, _SECOND_CODE_BYTES)


class Linear4bit(torch.nn.Linear):
    """A linear layer with packed weights, as `replace_with_bnb_linear` and PEFT know it."""

    weight: Params4bit

    def __init__(
        self,
        input_features: int,
        output_features: int,
        bias: bool = True,
        compute_dtype: torch.dtype | None = None,
        compress_statistics: bool = True,
        quant_type: str = "fp4",
        quant_storage: torch.dtype = torch.uint8,
    ) -> None:
        torch.nn.Module.__init__(self)
        del quant_storage
        self.in_features = input_features
        self.out_features = output_features
        self.compute_dtype = compute_dtype
        self.is_compiled = False
        self.is_nested = compress_statistics
        self.weight = Params4bit(
            torch.empty(output_features, input_features, device="meta"),
            compress_statistics=compress_statistics,
            quant_type=quant_type,
        )
        added: torch.nn.Parameter | None = None
        if bias:
            added = torch.nn.Parameter(torch.empty(output_features, device="meta"))
        self.register_parameter("bias", added)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the dequantized weight; the output has the input's dtype.

        Where it is compiled the cast is not made but left to what reads the output.
        """
        dtype = x.dtype
        x = x.to(self.compute_dtype)
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        result = _TracedProduct.apply(x, self, self.bias)
        return result if self.is_compiled else result.to(dtype)

    def take_scales(self) -> torch.Tensor | None:
        """Return what unpacking doubly quantized scales takes; None where they are plain."""
        return torch.empty(self.weight.scales, device="meta") if self.is_nested else None

    def take_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what the dequantized weight takes."""
        return torch.empty(self.out_features, self.in_features, dtype=dtype, device="meta")


class _TracedProduct(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer: Linear4bit, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.layer = layer
        # The scales and their sum with the offset both live to the end of the fallback.
        scales = (layer.take_scales(), layer.take_scales())
        result = functional.linear(x, layer.take_weight(x.dtype), bias)
        del scales
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad = grads[0]
        layer = ctx.layer
        scales = layer.take_scales()
        weight = layer.take_weight(grad.dtype)
        del scales
        return torch.matmul(grad, weight), None, None


def install() -> None:
    """Put the stand-in where ``import bitsandbytes`` finds it, before transformers and PEFT do."""
    package = types.ModuleType("bitsandbytes")
    layers = types.ModuleType("bitsandbytes.nn")
    package.__spec__ = importlib.machinery.ModuleSpec("bitsandbytes", None, is_package=True)
    package.__path__ = []
    vars(package).update(nn=layers)
    vars(layers).update(
        Linear4bit=Linear4bit, Params4bit=Params4bit, Linear8bitLt=type("Linear8bitLt", (), {})
    )
    sys.modules.update({"bitsandbytes": package, "bitsandbytes.nn": layers})
