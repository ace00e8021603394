"""A stand-in of the bitsandbytes package: its 4-bit layer, with the real one's tensors.

The real layer's packed parameter cannot be built from tensors without data, and the package takes
most of a second to import. What is copied from bitsandbytes 0.50: the input is cast to the compute
dtype; forward and backward each dequantize the whole weight to a temporary (and, with double
quantization, its constants); nothing but the weight is kept for the backward pass; the output is
cast back to the input's dtype, so that fp32 activations stay fp32 around every layer; a bias is
cast to the compute dtype for good. Small matrix products, which bitsandbytes does without the
temporary in the forward pass, are not told apart: the backward pass has it anyway.
"""

from __future__ import annotations

import importlib.machinery
import sys
import types
from typing import Any

import torch
from torch.nn.functional import linear

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

    def __new__(cls, weights: int, *, compress_statistics: bool, quant_type: str) -> Params4bit:
        """Return the packed form of so many weights."""
        packed = torch.empty((weights + 1) // 2, 1, dtype=torch.uint8, device="meta")
        self = torch.Tensor._make_subclass(cls, packed, False)
        self.compress_statistics = compress_statistics
        self.quant_type = quant_type
        return self


class Linear4bit(torch.nn.Linear):
    """A linear layer with packed weights, as `replace_with_bnb_linear` and PEFT know it."""

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
        self.in_features, self.out_features = input_features, output_features
        self.compute_dtype = compute_dtype
        self.is_compiled = False
        self.is_nested = compress_statistics
        self.weight = Params4bit(
            input_features * output_features,
            compress_statistics=compress_statistics,
            quant_type=quant_type,
        )
        empty = torch.empty(output_features, device="meta") if bias else None
        self.register_parameter("bias", None if empty is None else torch.nn.Parameter(empty))

    @property
    def scales(self) -> int:
        """Number of scales, one a block of weights."""
        return -(-self.in_features * self.out_features // _BLOCK_WEIGHTS)

    def constant_bytes(self) -> tuple[int, ...]:
        """Return the bytes of each tensor that describes the packed weights, in building order."""
        if not self.is_nested:
            return (self.scales * 4, _CODE_BYTES)
        second = -(-self.scales // _BLOCK_SCALES) * 4
        return (_CODE_BYTES, _OFFSET_BYTES, second, self.scales, _SECOND_CODE_BYTES)

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        """Multiply by the dequantized weight; the output has the input's dtype.

        Where it is compiled the cast is not made but left to what reads the output.
        """
        dtype = x.dtype
        x = x.to(self.compute_dtype)
        if self.bias is not None and self.bias.dtype != x.dtype:
            self.bias.data = self.bias.data.to(x.dtype)
        result = _Product.apply(x, self, self.bias)
        return result if self.is_compiled else result.to(dtype)

    def take_scales(self) -> torch.Tensor | None:
        """Return what unpacking doubly quantized scales takes; None where they are plain."""
        return torch.empty(self.scales, device="meta") if self.is_nested else None

    def take_weight(self, dtype: torch.dtype) -> torch.Tensor:
        """Return what the dequantized weight takes."""
        return torch.empty(self.out_features, self.in_features, dtype=dtype, device="meta")


class _Product(torch.autograd.Function):
    @staticmethod
    def forward(
        ctx: Any, x: torch.Tensor, layer: Linear4bit, bias: torch.Tensor | None
    ) -> torch.Tensor:
        ctx.layer = layer
        # The scales and their sum with the offset both live to the end of the fallback.
        scales = (layer.take_scales(), layer.take_scales())
        result = linear(x, layer.take_weight(x.dtype), bias)
        del scales
        return result

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        grad, layer = grads[0], ctx.layer
        scales = layer.take_scales()
        weight = layer.take_weight(grad.dtype)
        del scales
        return torch.matmul(grad, weight), None, None


def compile_layers(model: torch.nn.Module) -> None:
    """Let every layer of a model behave as under ``torch.compile``: casts are recomputed."""
    for module in model.modules():
        if isinstance(module, Linear4bit):
            module.is_compiled = True


def install() -> None:
    """Put the stand-in where ``import bitsandbytes`` finds it, before transformers and PEFT do."""
    package, layers = types.ModuleType("bitsandbytes"), types.ModuleType("bitsandbytes.nn")
    package.__spec__ = importlib.machinery.ModuleSpec("bitsandbytes", None, is_package=True)
    package.__path__ = []
    vars(package).update(nn=layers)
    vars(layers).update(
        Linear4bit=Linear4bit, Params4bit=Params4bit, Linear8bitLt=type("Linear8bitLt", (), {})
    )
    sys.modules.update({"bitsandbytes": package, "bitsandbytes.nn": layers})
