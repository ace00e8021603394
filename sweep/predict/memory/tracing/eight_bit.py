"""Stand-ins for what layers in 8 bits do on a GPU: the tensors that their kernels take and return.

The autograd functions around them are the ones that train (`sweep.training.eight_bit`).
"""

from __future__ import annotations

from contextlib import AbstractContextManager
from typing import Any

import torch

from sweep.training import eight_bit
from sweep.training.attributes import changed
from sweep.training.eight_bit import TYPES, Parts


def standing_in(*, is_compiled: bool) -> AbstractContextManager[None]:
    """Put the stand-ins in the kernels' places.

    Args:
        is_compiled: whether the compiler fuses what surrounds the products.
    """
    own: dict[str, Any] = {
        "rounded": _rounded,
        "_in_8_bits": _in_8_bits,
        "_become_eight_bit": _become_eight_bit,
        "_multiplied": _multiplied,
    }
    if is_compiled:
        own |= {"_multiplied": _multiplied_when_compiled, "_widened": _widened_when_compiled}
    return changed((eight_bit, name, value) for name, value in own.items())


def _rounded(
    values: torch.Tensor, kind: str, times: torch.Tensor | None = None
) -> tuple[torch.Tensor, torch.Tensor]:
    values = values.reshape(-1, values.shape[-1]).contiguous()
    narrow = torch.empty(values.shape, dtype=TYPES[kind], device="meta")
    return narrow, torch.empty(len(values), 1, device="meta")


def _multiplied(
    left: torch.Tensor, left_scales: torch.Tensor, right: torch.Tensor, scales: torch.Tensor
) -> torch.Tensor:
    shape = len(left), len(right)
    if left.dtype != torch.int8:
        return torch.empty(shape, dtype=torch.bfloat16, device="meta")
    return torch.empty(shape, dtype=torch.int32, device="meta").float() * left_scales * scales


def _multiplied_when_compiled(
    left: torch.Tensor, _: object, right: torch.Tensor, __: object
) -> torch.Tensor:
    """What reads a product of `torch._int_mm` scales it too, so that its 32 bits live till then."""
    rows, columns = len(left), len(right)
    held = 2 * columns if left.dtype == torch.int8 else columns
    return torch.empty(rows, held, dtype=torch.bfloat16, device="meta")[:, :columns]


def _widened_when_compiled(
    weight: torch.Tensor, _: torch.Tensor, dtype: torch.dtype, **__: object
) -> torch.Tensor:
    return torch.empty(weight.shape, dtype=dtype, device="meta")


def _in_8_bits(
    parts: Parts, scales: torch.Tensor, kind: str, columns: int, *, is_transposed: bool
) -> torch.Tensor:
    def of(*shape: int) -> torch.Tensor:
        return torch.empty(shape, dtype=TYPES[kind], device="meta")

    weight = parts[0] if len(parts) == 1 else of(len(scales), columns)
    return of(columns, len(scales)) if is_transposed else weight


def _become_eight_bit(layer: Any, kind: str, _: str) -> None:
    """Let the stand-in of bitsandbytes' layer multiply in 8 bits."""
    layer.products = kind
    layer.register_buffer("row_scales", torch.empty(layer.out_features, device="meta"))
    # Two parts, as one alone would be a weight in 8 bits.
    parts = [layer.weight.data, layer.weight.data]
    layer.forward = lambda x: eight_bit._forward(layer, x, parts)
