"""Stand-ins of flash-linear-attention's kernels, which cannot be traced.

What is copied from flash-linear-attention 0.6.0 (`fla/ops/gated_delta_rule/chunk.py` and
`fla/ops/kda/chunk.py`, Triton, no other backend) is what each kernel keeps, takes and returns:

- every input is made contiguous, and such a copy lives as long as the pass does;
- queries and keys are normalized in the kernel: the normalized ones are kept, with an fp32 a row,
  and not those that were given;
- the log decays are summed within a chunk, in fp32; the sums are kept;
- a chunk's tokens are taken together by a matrix that is kept, of 64 numbers a token and head, in
  the keys' type;
- ``w``, ``u``, the states at the beginning of each chunk and what changes them are there till the
  pass is done, and are not kept: the backward pass works them out again.

Where each channel of a key decays by itself (Kimi's delta attention) the decays are as wide as the
keys and kept as they were given, too; queries and keys of a chunk have a second matrix; and what
gradients are worked out of is in fp32.

States are as many as the chunks of a sequence, of which the last may not be full.
"""

from __future__ import annotations

import contextlib
import sys
from collections.abc import Callable, Iterator
from typing import Any

import torch

from qlora_sweep.search_spaces.recurrent import KIMI_DELTA_ATTENTION, RecurrentKind
from qlora_sweep.sweep.training.eight_bit import changed

CHUNK = 64
"""Tokens that the kernels take together."""
OnCall = Callable[[torch.Tensor, torch.Tensor], contextlib.AbstractContextManager[None]]
"""Entered around each call of a recurrent layer's kernels, with its keys and values."""


class GatedDeltaRule(torch.autograd.Function):
    """`ChunkGatedDeltaRuleFunction` of flash-linear-attention."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        is_normalized: bool,
        chunks: int,
    ) -> torch.Tensor:
        """Return the output.

        Args:
            ctx: of autograd.
            q: queries. (batch, length, heads, key width)
            k: keys, alike.
            v: values. (batch, length, value heads, value width)
            g: log decays. (batch, length, value heads)
            beta: how much of a value is written, alike.
            is_normalized: whether queries and keys are to be normalized.
            chunks: of a sequence.
        """
        given = [tensor.contiguous() for tensor in (q, k, v, g, beta)]
        q, k, v, g, beta = given
        batch, length, heads = v.shape[:3]
        rows: list[torch.Tensor] = []
        if is_normalized:
            q = _normalized(q, rows)
            k = _normalized(k, rows)
        sums = torch.empty_like(g, dtype=torch.float32)
        within = k.new_empty(batch, length, heads, CHUNK)
        _w = k.new_empty(batch, length, heads, k.shape[-1])
        u = torch.empty_like(v)
        _states = k.new_empty(batch, chunks, heads, k.shape[-1], v.shape[-1])
        written = torch.empty_like(u)
        output = torch.empty_like(written)
        ctx.save_for_backward(q, k, v, sums, beta, within, *rows)
        ctx.chunks = chunks
        ctx.is_normalized = is_normalized
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of what was given."""
        q, k, v, sums, beta, *_ = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv, dbeta, dg = _gradients(q, k, v, sums, beta, grad, ctx.chunks)
        if ctx.is_normalized:
            dq = torch.empty_like(q)
            dk = torch.empty_like(k)
        return dq, dk, dv, dg, dbeta, None, None


def _normalized(tensor: torch.Tensor, rows: list[torch.Tensor]) -> torch.Tensor:
    """Return what a kernel makes of queries or keys, and add what it keeps of each row."""
    result = torch.empty_like(tensor)
    rows.append(tensor.new_empty(tensor.shape[:-1], dtype=torch.float32))
    return result


def _gradients(
    q: torch.Tensor,
    k: torch.Tensor,
    v: torch.Tensor,
    sums: torch.Tensor,
    beta: torch.Tensor,
    grad: torch.Tensor,
    chunks: int,
) -> tuple[torch.Tensor, ...]:
    """Return gradients of queries, keys, values, ``beta`` and decays, as
    `chunk_gated_delta_rule_bwd` does; what it works out on the way dies as it returns."""
    batch, length, heads = v.shape[:3]
    keys = (batch, length, heads, k.shape[-1])
    states = (batch, chunks, heads, k.shape[-1], v.shape[-1])
    w = k.new_empty(keys)
    u = torch.empty_like(v)
    _h = k.new_empty(states)
    _written = torch.empty_like(u)
    dv = torch.empty_like(grad)
    _dh = q.new_empty(states)
    dv = torch.empty_like(dv)
    dq = q.new_empty(keys)
    dk = k.new_empty(keys)
    dg = sums.new_empty(1, *sums.shape)
    _dw = torch.empty_like(w)
    if k.shape[2] != heads:
        dq = dq.view(*k.shape[:3], -1, k.shape[-1]).sum(3)
        dk = dk.view(*k.shape[:3], -1, k.shape[-1]).sum(3)
    dg = dg.sum(0)
    more = k.new_empty(keys)
    dv_of_w_and_u = torch.empty_like(v)
    _dg = torch.empty_like(sums)
    dbeta = torch.empty_like(beta)
    if k.shape[2] != heads:
        more = more.view(*k.shape[:3], -1, k.shape[-1]).sum(3)
    dv = dv_of_w_and_u
    dg = torch.empty_like(dg)
    return dq, dk, dv, dbeta, dg


class KimiDeltaAttention(torch.autograd.Function):
    """`ChunkKDAFunction` of flash-linear-attention: decays are as wide as the keys."""

    @staticmethod
    def forward(
        ctx: Any,
        q: torch.Tensor,
        k: torch.Tensor,
        v: torch.Tensor,
        g: torch.Tensor,
        beta: torch.Tensor,
        is_normalized: bool,
        chunks: int,
    ) -> torch.Tensor:
        """Return the output; see `GatedDeltaRule.forward`."""
        given = [tensor.contiguous() for tensor in (q, k, v, g, beta)]
        q, k, v, g, beta = given
        batch, length, heads, width = k.shape
        rows: list[torch.Tensor] = []
        if is_normalized:
            q = _normalized(q, rows)
            k = _normalized(k, rows)
        sums = torch.empty_like(g, dtype=torch.float32)
        scores = k.new_empty(batch, length, heads, CHUNK)
        within = k.new_empty(batch, length, heads, CHUNK)
        diagonal = k.new_empty(batch, length, heads, _SUB_CHUNK, dtype=torch.float32)
        _w = k.new_empty(k.shape)
        u = torch.empty_like(v)
        _decayed_keys = k.new_empty(k.shape)
        del diagonal
        _states = k.new_empty(batch, chunks, heads, width, v.shape[-1])
        written = torch.empty_like(u)
        output = torch.empty_like(written)
        ctx.save_for_backward(q, k, v, sums, g, beta, scores, within, *rows)
        ctx.chunks = chunks
        ctx.is_normalized = is_normalized
        return output

    @staticmethod
    def backward(ctx: Any, *grads: torch.Tensor) -> Any:
        """Return the gradients of what was given."""
        q, k, v, sums, g, beta, scores, within, *_ = ctx.saved_tensors
        grad = grads[0].contiguous()
        dq, dk, dv, dbeta, dg = _gradients_by_channel(
            k, v, sums, beta, scores, within, grad, ctx.chunks
        )
        if ctx.is_normalized:
            dq = torch.empty_like(q)
            dk = torch.empty_like(k)
        return dq.to(q), dk.to(k), dv, dg.to(g), dbeta.to(beta), None, None


_SUB_CHUNK = 16
"""Tokens of a block of a chunk."""
_CHANNELS = 32
"""Of a key, that a kernel of the backward pass takes together."""


def _gradients_by_channel(
    k: torch.Tensor,
    v: torch.Tensor,
    sums: torch.Tensor,
    beta: torch.Tensor,
    scores: torch.Tensor,
    within: torch.Tensor,
    grad: torch.Tensor,
    chunks: int,
) -> tuple[torch.Tensor, ...]:
    """Return gradients of queries, keys, values, ``beta`` and decays, as `chunk_kda_bwd` does."""
    batch, _, heads, width = k.shape
    states = (batch, chunks, heads, width, v.shape[-1])
    _w = k.new_empty(k.shape)
    u = torch.empty_like(v)
    _decayed_queries = k.new_empty(k.shape)
    _decayed_keys = k.new_empty(k.shape)
    _h = k.new_empty(states)
    _written = torch.empty_like(u)
    _dscores = torch.empty_like(scores, dtype=torch.float32)
    dv = torch.empty_like(grad)
    _dh = k.new_empty(states)
    dv = torch.empty_like(dv)
    dq = torch.empty_like(k, dtype=torch.float32)
    dk = torch.empty_like(k, dtype=torch.float32)
    dv_of_w_and_u = torch.empty_like(v)
    dg = torch.empty_like(sums)
    dbeta = torch.empty_like(beta, dtype=torch.float32)
    _dwithin = torch.empty_like(within, dtype=torch.float32)
    dv = dv_of_w_and_u
    more = [torch.empty_like(dq), torch.empty_like(dk)]
    parts = beta.new_empty(-(-width // _CHANNELS), *beta.shape, dtype=torch.float32)
    more.append(torch.empty_like(dg))
    dbeta = parts.sum(0)
    del parts
    dq, dk, dg = more
    del more
    dg = torch.empty_like(dg)
    return dq, dk, dv, dbeta, dg


@contextlib.contextmanager
def _unwatched(*_: torch.Tensor) -> Iterator[None]:
    yield


def kernels(
    model: Any, kind: RecurrentKind | None, *, chunks: int, on_call: OnCall = _unwatched
) -> contextlib.AbstractContextManager[None]:
    """Put the stand-in where transformers calls the kernels of a kind of recurrent layer.

    Args:
        model: whose modelling code is changed.
        kind: of its recurrent layers; None where it has none.
        chunks: what stands for the chunks of a sequence.
        on_call: entered around each call.
    """

    rule: Any = GatedDeltaRule
    if kind is KIMI_DELTA_ATTENTION:
        rule = KimiDeltaAttention

    def delta_rule(
        query: torch.Tensor,
        key: torch.Tensor,
        value: torch.Tensor,
        *,
        g: torch.Tensor,
        beta: torch.Tensor,
        use_qk_l2norm_in_kernel: bool = False,
        **_: Any,
    ) -> tuple[torch.Tensor, None]:
        with on_call(key, value):
            given = (query, key, value, g, beta)
            return rule.apply(*given, use_qk_l2norm_in_kernel, chunks), None

    places: list[tuple[Any, str, Any]] = []
    if kind is not None and kind.function:
        for name in {type(module).__module__ for module in model.modules()}:
            if hasattr(sys.modules[name], kind.function):
                places.append((sys.modules[name], kind.function, delta_rule))
    return changed(places)
