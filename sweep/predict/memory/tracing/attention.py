"""Owns stand-ins of CUDA's attention kernels: what each keeps, and what it takes while it runs.

On the meta device `scaled_dot_product_attention` writes its scores out, length by length, as no
fused kernel is there to be chosen. Here the choice is CUDA's (torch's ``sdp_utils.cpp``), and each
kernel allocates what the real one does (``attention.cu``, ``attention_backward.cu``). Nothing is
computed: a tensor of the right size, born and let go of at the right moment, is all that a count of
memory needs. Knows nothing of autocast or models.
"""

from __future__ import annotations

from typing import Any

import torch
import torch.nn.functional as functional

_HALF = (torch.float16, torch.bfloat16)
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
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
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
        dq, dk, dv = torch.empty_like(q), torch.empty_like(k), torch.empty_like(v)
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
    _check(query, key, value)
    is_small = query.shape[-1] == value.shape[-1] <= _FLASH_HEAD_MAX
    if has_flash and attn_mask is None and query.dtype in _HALF and is_small:
        return _flash(query, key, value, padded_length)
    if query.shape[1] == key.shape[1]:
        return EfficientAttention.apply(query, key, value, _additive(attn_mask, query.dtype))
    return functional.scaled_dot_product_attention(
        query, key, value, attn_mask, dropout_p, is_causal, scale=scale, enable_gqa=enable_gqa
    )


def _check(query: torch.Tensor, key: torch.Tensor, value: torch.Tensor) -> None:
    heads, groups = query.shape[1], key.shape[1]
    if heads % groups or key.shape[:3] != value.shape[:3] or query.shape[-1] != key.shape[-1]:
        raise RuntimeError(
            f"attention cannot combine shapes {tuple(query.shape)}, {tuple(key.shape)} and "
            f"{tuple(value.shape)}"
        )


def _flash(
    query: torch.Tensor, key: torch.Tensor, value: torch.Tensor, padded_length: int
) -> torch.Tensor:
    size = query.shape[-1]
    missing = -size % _HEAD_MULTIPLE
    if missing:
        query, key, value = (functional.pad(t, (0, missing)) for t in (query, key, value))
    return FlashAttention.apply(query, key, value, padded_length)[..., :size]


def _additive(mask: torch.Tensor | None, dtype: torch.dtype) -> torch.Tensor | None:
    """CUDA turns a mask of truth values into one that is added to the scores."""
    return mask.to(dtype) if mask is not None and mask.dtype == torch.bool else mask
