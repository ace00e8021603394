"""How fast torch multiplies rows by the matrices of experts, and how long decoding these takes.

    python -m tests.bench.grouped_products [-o OUT.jsonl]

A row a size: the seconds of one product of so many tokens, each sent to some experts at random, by
bf16 matrices (experts, out, in), as torch multiplies on this GPU, as the kernel of GPUs below
compute capability 9 does, and as a loop over the experts; and of decoding the matrices from NF4
with quantized scales.
"""

from __future__ import annotations

import statistics
import time
from collections.abc import Callable

import bitsandbytes as bnb
import torch

from qlora_sweep.sweep.training import grouped
from qlora_sweep.sweep.training.eight_bit import widened
from qlora_sweep.sweep.training.experts import _parts
from tests.bench.harness import asked, write

SHAPES = (
    *((128, 8, width, columns) for width, columns in ((2048, 1536), (768, 2048), (1536, 2048))),
    *((32, 4, width, columns) for width, columns in ((2880, 5760), (2880, 2880))),
    *((8, 2, width, columns) for width, columns in ((4096, 28672), (14336, 4096))),
    (64, 6, 2048, 2816),
    (256, 8, 2048, 1024),
)
"""Experts, how many of them a token is sent to, and the product's two widths."""
WAYS: dict[str, Callable[..., object]] = {
    "seconds": grouped.product,
    "our_seconds": grouped._product_at_once,
    "loop_seconds": grouped._one_by_one,
}
TOKENS = (512, 2048, 4096, 8192, 16384)


def seconds(work: Callable[[], object], repeats: int = 15) -> float:
    """Return the median seconds of a piece of work on the GPU."""
    found = []
    for _ in range(repeats):
        torch.cuda.synchronize()
        began = time.perf_counter()
        work()
        torch.cuda.synchronize()
        found.append(time.perf_counter() - began)
    return statistics.median(found)


def main() -> None:
    """Measure, and print a row each."""
    output = asked(__doc__).output
    for experts, chosen, width, columns in SHAPES:
        shape = experts, columns, width
        weight = torch.randn(shape, device="cuda", dtype=torch.bfloat16)
        packed = bnb.nn.Params4bit(weight, requires_grad=False, quant_type="nf4").to("cuda")
        decoding = seconds(lambda packed=packed: widened(_parts(packed), torch.bfloat16))
        every = torch.arange(experts, device="cuda")
        for tokens in TOKENS:
            scores = torch.rand(tokens, experts, device="cuda")
            sent = scores.topk(chosen, dim=1).indices.flatten().sort().values  # (rows,)
            ends = torch.searchsorted(sent, every, right=True, out_int32=True)
            rows = torch.randn(len(sent), width, device="cuda", dtype=torch.bfloat16)
            given = rows, weight.transpose(-2, -1), ends
            taken = {
                name: seconds(lambda multiply=multiply, given=given: multiply(*given))
                for name, multiply in WAYS.items()
            }
            about = {"experts": experts, "tokens": tokens, "rows": len(sent)}
            of_product = {"in": width, "out": columns, "decoding_seconds": decoding}
            write(about | of_product | taken, output)


if __name__ == "__main__":
    main()
