"""Shorter imports of torch and transformers in a child, and whether torch and bitsandbytes work.

Used before any of them is imported; imports nothing itself. Optional packages look as if they were
not installed, and a compiler comes when it is used. The doctor, which never imports either, runs
``python -P -m qlora_sweep.sweep.training.libraries``: the answer is one line of JSON.
"""

from __future__ import annotations

import contextlib
import functools
import gc
import json
import sys
from collections.abc import Callable, Iterator
from typing import Any

OPTIONAL = ("scipy", "sklearn", "torchvision", "PIL")
"""transformers imports these where they are installed, for losses and images of no decoder; they
take from half a second to several."""


@contextlib.contextmanager
def lean_imports(*absent: str) -> Iterator[None]:
    """Import inside the ``with``; ``absent`` packages then look as if they were not installed.

    They do afterwards, too, so this is for a process of one's own.
    """
    for name in absent:
        sys.modules.setdefault(name, None)  # type: ignore[arg-type]
    # Imports make millions of objects that stay; a search for garbage there takes half a second.
    gc.disable()
    try:
        yield
    finally:
        gc.freeze()
        gc.enable()


@contextlib.contextmanager
def compiling_later() -> Iterator[None]:
    """Let what is decorated with ``torch.compile`` inside be compiled when it is first called.

    bitsandbytes decorates CPU code so, for which torch imports its whole compiler: a second and
    more, on a GPU for nothing.
    """
    import torch

    compile_now = torch.compile

    def compile_later(function: Callable[..., Any] | None = None, **options: Any) -> Any:
        if function is None:
            return functools.partial(compile_later, **options)
        compiled = functools.cache(lambda: compile_now(function, **options))
        return functools.wraps(function)(lambda *args, **kwargs: compiled()(*args, **kwargs))

    torch.compile = compile_later  # type: ignore[assignment]
    try:
        yield
    finally:
        torch.compile = compile_now


def probe() -> dict[str, Any]:
    """Return versions, whether CUDA is there, and what went wrong, by library."""
    from qlora_sweep.search_spaces.errors import words_of

    answer: dict[str, Any] = {"torch": None, "cuda": None, "has_cuda": False, "errors": {}}
    answer["architectures"] = []
    try:
        import torch

        answer["torch"] = torch.__version__
        answer["cuda"] = torch.version.cuda
        answer["has_cuda"] = torch.cuda.is_available()
        answer["architectures"] = torch.cuda.get_arch_list()
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
