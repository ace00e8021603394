"""Measure attention under the mask that keeps packed texts apart, beside the causal kernel without.

    python -m tests.bench.masked_attention OUT.json

As transformers calls it: keys and values repeated where there is a mask, grouped where there is
none. ``slowness`` is the masked kernel's time for all products over twice the causal one's, which
does half of them: `sweep.predict.speed.kernels.MASKED_SLOWNESS` and reading the mask together.
"""

from __future__ import annotations

import argparse
import json
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import torch
from transformers.integrations.sdpa_attention import sdpa_attention_forward
from triton.testing import do_bench

from tests.bench.stamp import stamp

HEADS = {"mistral-7b-v0.3": (32, 8, 128), "tinyllama-1.1b": (32, 4, 64), "gemma-3-4b": (8, 4, 256)}
"""Heads, those of keys and values, and the width of each."""
SHAPES = ((8, 512), (4, 1024), (2, 2048), (1, 4096))
TEXTS_IN_ROW = 3


def mask_of(rows: int, length: int) -> torch.Tensor:
    """Return which token sees which, (rows, 1, length, length): those before it of its own text."""
    text = torch.arange(length, device="cuda") * TEXTS_IN_ROW // length
    apart = (text[:, None] == text[None, :]).tril()
    return apart.expand(rows, 1, length, length).contiguous()


def seconds(model: str, rows: int, length: int, *, is_masked: bool) -> dict[str, float]:
    """Return what a layer's attention takes forward, and forward and back."""
    heads, key_heads, width = HEADS[model]
    module: Any = SimpleNamespace(num_key_value_groups=heads // key_heads, is_causal=True)

    def drawn(count: int) -> torch.Tensor:
        shape = (rows, count, length, width)
        return torch.randn(shape, device="cuda", dtype=torch.bfloat16, requires_grad=True)

    query, key, value = drawn(heads), drawn(key_heads), drawn(key_heads)
    mask = mask_of(rows, length) if is_masked else None

    def forward() -> torch.Tensor:
        output, _ = sdpa_attention_forward(module, query, key, value, mask)
        return output

    gradient = torch.randn_like(forward())

    def both() -> None:
        torch.autograd.grad(forward(), (query, key, value), gradient)

    return {"forward": do_bench(forward) / 1e3, "both": do_bench(both) / 1e3}


def main() -> None:
    parser = argparse.ArgumentParser()
    parser.add_argument("out", type=Path)
    options = parser.parse_args()
    rows = []
    for model in HEADS:
        for batch, length in SHAPES:
            plain, masked = (
                seconds(model, batch, length, is_masked=is_masked) for is_masked in (False, True)
            )
            slowness = masked["both"] / plain["both"] / 2
            row = {"model": model, "rows": batch, "length": length, "slowness": slowness}
            rows.append({**row, "plain": plain, "masked": masked})
            print(json.dumps(rows[-1]), flush=True)
    document = {"stamp": stamp(), "rows": rows}
    options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
