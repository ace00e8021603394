"""Owns what is decided by device: autocast's policy, the kernels of dropout, softmax and attention.

The tensors are on torch's meta device, whose operators follow the same derivative formulas as
CUDA's, so that autograd keeps the same tensors for the backward pass. What would differ is decided
as on a card here, on the way from Python into torch. The meta device has no autocast, and a cast is
a tensor to be kept like any other: its policy is applied here, by the lists of torch's
``aten/src/ATen/autocast_mode.h``. Knows nothing of models.
"""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Iterator
from typing import Any

import torch
import torch.nn.functional as functional
from torch.overrides import TorchFunctionMode

from sweep.predict.memory.tracing.attention import scaled_dot_product_attention

Policy = str

_LOWER = """
conv1d conv2d conv3d conv_transpose1d conv_transpose2d conv_transpose3d prelu addmm addmv addr
matmul einsum mm mv linear addbmm baddbmm bmm chain_matmul scaled_dot_product_attention __matmul__
__rmatmul__
"""
_FP32 = """
acos asin cosh erfinv exp expm1 log log10 log2 log1p reciprocal rsqrt sinh tan pow __pow__ __rpow__
softplus layer_norm rms_norm group_norm cosine_similarity nll_loss cross_entropy kl_div l1_loss
smooth_l1_loss huber_loss mse_loss binary_cross_entropy_with_logits logsumexp cdist
"""
_FP32_RESULT = "prod softmax log_softmax cumprod cumsum sum norm"
_WIDEST = "addcdiv addcmul atan2 bilinear cross dot vdot index_put tensordot scatter_add"
_NAMESPACES = (torch, torch.Tensor, functional)


def _as_on_cuda(ask: Callable[..., Any]) -> Callable[..., Any]:
    """Return what asks of autocast, with the device that stands for the card answered for it."""

    @functools.wraps(ask)
    def asked(device: str = "cuda") -> Any:
        return ask("cuda" if device == "meta" else device)

    return asked


torch.get_autocast_dtype = _as_on_cuda(torch.get_autocast_dtype)


def _policies() -> dict[Callable[..., Any], Policy]:
    table = {}
    lists = {"lower": _LOWER, "fp32": _FP32, "fp32_result": _FP32_RESULT, "widest": _WIDEST}
    for policy, names in lists.items():
        for name in names.split():
            for namespace in _NAMESPACES:
                if hasattr(namespace, name):
                    table[getattr(namespace, name)] = policy
    return table


_POLICIES = _policies()
_HALF = (torch.float16, torch.bfloat16)
_SOFTMAXES = frozenset({functional.softmax, torch.softmax, torch.Tensor.softmax})
_BF16_ONLY = frozenset({torch._grouped_mm, functional.grouped_mm})


class Cuda(TorchFunctionMode):
    """Makes operators on tensors without data choose as they would on a card.

    Enter `region` where the real program enters autocast: around the forward pass and around each
    recomputation.

    Args:
        autocast_dtype: the lower precision; None where the training does without autocast.
        padded_length: what stands for a sequence padded to the attention kernel's blocks.
        has_flash: whether the card has flash attention.

    Attributes:
        tells_halves_apart: whether anything was run that does another thing in fp16 than in bf16.
    """

    def __init__(
        self, autocast_dtype: torch.dtype | None, *, padded_length: int, has_flash: bool
    ) -> None:
        super().__init__()
        self._dtype = autocast_dtype
        self._attention = functools.partial(
            scaled_dot_product_attention, padded_length=padded_length, has_flash=has_flash
        )
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
            return self._attention(*args, **kwargs)
        if func is functional.dropout:
            return _dropout(*args, **kwargs)
        if func in _SOFTMAXES:
            self.tells_halves_apart |= args[0].dtype in _HALF
            if _is_fused_softmax(args, kwargs):
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
    return value.float() if _is_float(value) else value


def _is_float(value: Any) -> bool:
    return (
        isinstance(value, torch.Tensor)
        and value.is_floating_point()
        and value.dtype != torch.float64
    )


def _is_fused_softmax(args: tuple[Any, ...], kwargs: dict[str, Any]) -> bool:
    """CUDA widens fp16 (and only that) inside the softmax kernel, without a copy of its input."""
    return args[0].dtype == torch.float16 and kwargs.get("dtype") == torch.float32


def _dropout(
    tensor: torch.Tensor, p: float = 0.5, training: bool = True, inplace: bool = False
) -> torch.Tensor:
    """CUDA's fused dropout keeps a mask of one byte an element."""
    if not training or p == 0.0:
        return tensor
    return torch.native_dropout(tensor, p, True)[0]
