"""Shorter imports of torch and transformers in a child: what they need not bring along.

Used before any of them is imported; imports nothing itself. Optional packages look as if they were
not installed, and a compiler comes when it is used.
"""

from __future__ import annotations

import contextlib
import functools
import gc
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
