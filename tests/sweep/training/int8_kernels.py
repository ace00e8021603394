"""Run by `test_int8_products` in a process of its own, as Triton reads how it is to run once.

    python -m tests.sweep.training.int8_kernels interpreted
    python -m tests.sweep.training.int8_kernels compiled MAJOR MINOR

The first compares the kernels with products in 32 bits on this CPU; the second prints the PTX
instructions that multiply and the shared memory of the kernel in each of a GPU's tiles.
"""

from __future__ import annotations

import re
import sys
from dataclasses import asdict

import torch
import triton
from triton.backends.compiler import GPUTarget
from triton.compiler import ASTSource

from qlora_sweep.sweep.training import int8_products
from qlora_sweep.sweep.training.int8_products import Tiles, candidates

SHAPES = [(1, 32, 48), (17, 48, 4096 + 16), (150, 160, 128)]
TILES = [[64, 64, 64, 2, 4], [32, 64, 128, 2, 4]]
ALIGNED = ("left", "right", "row_scales", "column_scales", "added", "out", "n", "k")
SIGNATURE = {
    "left": "*i8",
    "right": "*i8",
    "row_scales": "*fp32",
    "column_scales": "*fp32",
    "added": "*fp32",
    "out": "*bf16",
    "m": "i32",
    "n": "i32",
    "k": "i32",
}


def interpreted() -> None:
    """Compare each of the kernels with the reference."""
    for m, n, k in SHAPES:
        torch.manual_seed(m)
        left = torch.randint(-127, 128, (m, k), dtype=torch.int8)
        right = torch.randint(-127, 128, (n, k), dtype=torch.int8)
        row_scales = torch.rand(m, 1) / k
        column_scales = torch.rand(n)
        added = torch.randn(n)
        operands = (left, right, row_scales, column_scales)
        sums = left.int() @ right.int().T
        plain = sums.float() * row_scales * column_scales
        for more, expected in ((None, plain), (added, plain + added)):
            wanted = expected.half()
            for tiles in TILES:
                found = int8_products._in_tiles(*operands, more, torch.float16, tiles)
                assert torch.equal(found, wanted), (m, n, k, tiles)
            scaled = torch.empty_like(wanted)
            int8_products._scale_sums[(m, triton.cdiv(n, 64))](
                sums, row_scales, column_scales, column_scales if more is None else more,
                scaled, m, n, has_added=more is not None, size=64,
            )  # fmt: skip
            assert torch.equal(scaled, wanted), (m, n, k)


def compiled(major: int, minor: int) -> None:
    """Print of each of a GPU's tiles shared memory and the instructions."""
    for tiles in candidates((major, minor)):
        if tiles is None:
            continue
        for is_even in (True, False):
            kernel = _compiled(tiles, 10 * major + minor, is_even=is_even)
            found = re.findall(r"(?:wgmma|mma)[\w.]*\.s8\.s8[\w.]*", kernel.asm["ptx"])
            print(kernel.metadata.shared, *sorted(set(found)))


def _compiled(tiles: Tiles, capability: int, *, is_even: bool):  # type: ignore[no-untyped-def]
    kernel = int8_products._int8_product
    fields = asdict(tiles)
    constants = {
        "of_rows": fields["rows"],
        "of_columns": fields["columns"],
        "depth": fields["depth"],
        "stages": fields["stages"],
        "warps": fields["warps"],
        "group": 8,
        "is_even": is_even,
        "has_added": not is_even,
    }
    source = ASTSource(
        kernel,
        signature=SIGNATURE | dict.fromkeys(constants, "constexpr"),
        constexprs=constants,
        attrs={(kernel.arg_names.index(name),): [["tt.divisibility", 16]] for name in ALIGNED},
    )
    options = {"num_warps": tiles.warps, "num_stages": tiles.stages}
    return triton.compile(source, target=GPUTarget("cuda", capability, 32), options=options)


if __name__ == "__main__":
    if sys.argv[1] == "interpreted":
        interpreted()
    else:
        compiled(*map(int, sys.argv[2:]))
