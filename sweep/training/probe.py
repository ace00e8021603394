"""Whether torch and bitsandbytes work here; the answer is one line of JSON.

Run as ``python -P -m sweep.training.probe`` by the doctor, which never imports either.
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
        device = torch.device("cuda" if answer["has_cuda"] else "cpu")
        ones = torch.ones(16, 16, device=device, dtype=torch.bfloat16)
        if float((ones @ ones).sum()) != 16.0**3:
            raise RuntimeError("a matrix product came out wrong")
    except Exception as error:  # noqa: BLE001 - whatever a broken library raises is the answer
        answer["errors"]["torch"] = words_of(error)
        return answer
    try:
        import bitsandbytes.functional as bnb

        # To NF4 and back, as every trial does.
        values = torch.linspace(-1, 1, 4096, device=device).reshape(64, 64)
        worst = (bnb.dequantize_4bit(*bnb.quantize_4bit(values, quant_type="nf4")) - values).abs()
        if float(worst.max()) > 0.2:
            raise RuntimeError(f"4-bit quantization is off by {float(worst.max()):.2f}")
    except Exception as error:  # noqa: BLE001 - as above
        answer["errors"]["bitsandbytes"] = words_of(error)
    return answer


if __name__ == "__main__":
    sys.stdout.write(json.dumps(probe()) + "\n")
