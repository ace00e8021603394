"""Owns the question whether torch and bitsandbytes work here; the answer is one line of JSON.

Run as ``python -P -m sweep.training.probe`` by the doctor, which never imports either. Knows
nothing of studies.
"""

from __future__ import annotations

import json
import sys
from typing import Any

from search_spaces.errors import words_of


def probe() -> dict[str, Any]:
    """Return versions, whether CUDA is there, and what went wrong, by library."""
    answer: dict[str, Any] = {"torch": None, "cuda": None, "has_cuda": False, "errors": {}}
    try:
        import torch

        answer["torch"] = torch.__version__
        answer["cuda"] = torch.version.cuda
        answer["has_cuda"] = torch.cuda.is_available()
        _multiply(torch.device("cuda" if answer["has_cuda"] else "cpu"))
    except Exception as error:  # noqa: BLE001 - whatever a broken library raises is the answer
        answer["errors"]["torch"] = words_of(error)
        return answer
    try:
        _quantize(torch.device("cuda" if answer["has_cuda"] else "cpu"))
    except Exception as error:  # noqa: BLE001 - as above
        answer["errors"]["bitsandbytes"] = words_of(error)
    return answer


def _multiply(device: Any) -> None:
    import torch

    ones = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
    if float((ones @ ones).sum()) != 16.0**3:
        raise RuntimeError("a matrix product came out wrong")


def _quantize(device: Any) -> None:
    """Take a tensor to NF4 and back, as every trial does."""
    import bitsandbytes.functional as bnb
    import torch

    values = torch.linspace(-1, 1, 4096, device=device).reshape(64, 64)
    packed, state = bnb.quantize_4bit(values, quant_type="nf4")
    error = (bnb.dequantize_4bit(packed, state) - values).abs().max()
    if float(error) > 0.2:
        raise RuntimeError(f"4-bit quantization is off by {float(error):.2f}")


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
