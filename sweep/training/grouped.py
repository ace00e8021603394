"""Products of rows that are sorted by group, as tokens are by expert, and sums of what they make.

On a GPU of compute capability 9 and up torch has a kernel for them in bf16. Elsewhere torch and
transformers multiply by one group's matrix after another, and the host waits to learn how many rows
each has; where groups are many and small, a kernel of Triton takes all at once here. An exported
script carries this file beside it: it needs torch and transformers alone.
"""

from __future__ import annotations

import torch
import transformers.integrations.moe  # noqa: F401 - has the operator of `_one_by_one`
from torch.nn.functional import grouped_mm

try:
    import triton
    import triton.language as tl
except ImportError:  # as where torch was built for CPUs alone
    triton = None

_HOPPER = (9, 0)
_AMPERE = (8, 0)
_ROWS_OF_A_LOOP = 9
"""Times the groups, rows a group from which a loop is faster. Of 45 sizes of products on an H200
(`tests/bench/results/grouped_products_h200.jsonl`) a loop took 0.4 to 0.8 times as long as the
kernel where rows were more, and 0.7 to 7.8 times, 2.4 in the middle, where they were fewer."""
_FEW_ROWS = 64
"""Rows a group on average, up to which a kernel works on so many at once, and not on twice as
many."""
_COLUMNS = 128
_WIDTH = 32
"""Of what the kernel works on at once."""


def product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return rows (rows, in) times the matrix (in, out) of each one's group; without gradients.

    Args:
        rows: sorted by group, of any floating type.
        weight: (groups, in, out), of the same.
        ends: how many rows are of a group or one before it (groups,), int32.
    """
    if rows.is_cuda and not _has_torchs_kernel(rows):
        if triton is not None and _is_for_ours(rows, groups=len(weight)):
            return _product_at_once(rows, weight, ends)
        return _one_by_one(rows, weight, ends)
    return grouped_mm(rows, weight, offs=ends)


def trained_product(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the same with gradients of both."""
    if rows.is_cuda and not _has_torchs_kernel(rows):
        return _one_by_one(rows, weight, ends)
    return grouped_mm(rows, weight, offs=ends)


def _has_torchs_kernel(rows: torch.Tensor) -> bool:
    is_hopper = torch.cuda.get_device_capability(rows.device) >= _HOPPER
    return is_hopper and rows.dtype == torch.bfloat16


def _is_for_ours(rows: torch.Tensor, groups: int) -> bool:
    is_ampere = torch.cuda.get_device_capability(rows.device) >= _AMPERE
    is_half = rows.dtype in (torch.bfloat16, torch.float16)
    return is_ampere and is_half and len(rows) < _ROWS_OF_A_LOOP * groups**2


def _one_by_one(rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor) -> torch.Tensor:
    """Return the product by transformers' loop over the groups."""
    result: torch.Tensor = torch.ops.transformers.grouped_mm_fallback(rows, weight, ends)
    return result


def summed(rows: torch.Tensor, place: torch.Tensor, chosen: int) -> torch.Tensor:
    """Return by token the sum (tokens, width) of its rows, which lie at places (tokens * chosen,)
    among all (tokens * chosen, width); without gradients."""
    if rows.is_cuda:
        return _summed_at_once(rows, place, chosen)
    return rows[place].view(-1, chosen, rows.shape[-1]).sum(1)


if triton is not None:

    @triton.jit
    def _multiply(  # type: ignore[no-untyped-def]
        rows, weight, out, tile_groups, tile_rows, ends,
        width: tl.constexpr, columns: tl.constexpr,
        weight_group, weight_row, weight_column,
        of_rows: tl.constexpr, of_columns: tl.constexpr, of_width: tl.constexpr,
    ):  # fmt: skip
        tile = tl.program_id(1)
        group = tl.load(tile_groups + tile).to(tl.int64)
        first = tl.load(tile_rows + tile)
        if first < 0:
            return
        row = first + tl.arange(0, of_rows)
        is_row = row < tl.load(ends + group)
        column = tl.program_id(0) * of_columns + tl.arange(0, of_columns)
        is_column = column < columns
        at = tl.arange(0, of_width)
        left = rows + row.to(tl.int64)[:, None] * width + at[None, :]
        right = weight + group * weight_group
        right += at[:, None] * weight_row + column[None, :] * weight_column
        total = tl.zeros((of_rows, of_columns), tl.float32)
        for start in range(0, width, of_width):
            is_in = at < width - start
            one = tl.load(left, mask=is_row[:, None] & is_in[None, :], other=0.0)
            other = tl.load(right, mask=is_in[:, None] & is_column[None, :], other=0.0)
            total = tl.dot(one, other, total)
            left += of_width
            right += of_width * weight_row
        place = out + row.to(tl.int64)[:, None] * columns + column[None, :]
        is_in_out = is_row[:, None] & is_column[None, :]
        tl.store(place, total.to(out.dtype.element_ty), mask=is_in_out)

    @torch.library.triton_op("sweep::grouped_product", mutates_args=())
    def _product_at_once(
        rows: torch.Tensor, weight: torch.Tensor, ends: torch.Tensor
    ) -> torch.Tensor:
        """Return what `product` does, by one kernel."""
        rows = rows.contiguous()
        groups, width, columns = weight.shape
        of_rows = _FEW_ROWS
        if len(rows) > groups * _FEW_ROWS:
            of_rows = 2 * _FEW_ROWS
        # The host does not know how many rows a group has: there are tiles for the most that could
        # be needed, and those beyond have no row.
        counts = torch.diff(ends, prepend=ends.new_zeros(1))  # (groups,)
        tiles_of_group = (counts + of_rows - 1) // of_rows
        tile_ends = tiles_of_group.cumsum(0)
        most = -(-len(rows) // of_rows) + groups
        tile = torch.arange(most, device=rows.device)
        group = torch.searchsorted(tile_ends, tile, right=True).clamp(max=groups - 1)
        before = tile - (tile_ends - tiles_of_group)[group]
        first = (ends - counts)[group] + before * of_rows
        first = torch.where(tile < tile_ends[-1], first, -1)
        out = rows.new_empty(len(rows), columns)
        torch.library.wrap_triton(_multiply)[(-(-columns // _COLUMNS), most)](
            rows, weight, out, group.int(), first.int(), ends, width, columns, *weight.stride(),
            of_rows=of_rows, of_columns=_COLUMNS, of_width=_WIDTH,
            num_warps=of_rows // 16, num_stages=3,
        )  # fmt: skip
        return out

    @triton.jit
    def _sum_rows(  # type: ignore[no-untyped-def]
        rows, place, out, width, chosen: tl.constexpr, size: tl.constexpr
    ):
        token = tl.program_id(0).to(tl.int64)
        column = tl.arange(0, size)
        is_in = column < width
        total = tl.zeros((size,), tl.float32)
        for index in tl.static_range(chosen):
            row = tl.load(place + token * chosen + index)
            total += tl.load(rows + row * width + column, mask=is_in, other=0.0).to(tl.float32)
        tl.store(out + token * width + column, total.to(out.dtype.element_ty), mask=is_in)

    @torch.library.triton_op("sweep::summed", mutates_args=())
    def _summed_at_once(rows: torch.Tensor, place: torch.Tensor, chosen: int) -> torch.Tensor:
        """Return what `summed` does, by one kernel."""
        rows = rows.contiguous()
        width = rows.shape[-1]
        tokens = len(place) // chosen
        out = rows.new_empty(tokens, width)
        size = triton.next_power_of_2(width)
        torch.library.wrap_triton(_sum_rows)[(tokens,)](
            rows, place, out, width, chosen=chosen, size=size
        )
        return out
