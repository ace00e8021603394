"""The child that merges: it has torch, and is gone when the merged model is written.

Run as ``python -P -m sweep.merging PARENT``.
"""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from sweep.subprocess_jobs import Say, serve_subprocess

_KIBIBYTE = 1024


def _merge(request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
    from sweep.training.libraries import OPTIONAL, lean_imports

    with lean_imports(*OPTIONAL):
        from sweep.merging.report import MergeDone, MergeOrder
        from sweep.merging.streaming import Sources, write_merged

    order = MergeOrder.model_validate(request)
    directory = Path(order.directory)
    began = time.perf_counter()
    shards = write_merged(
        order.pieces,
        Sources(Path(order.base), Path(order.weights)),
        directory,
        on_progress=lambda done, of: say({"merged": done, "of": of}),
    )
    seconds = time.perf_counter() - began
    comparison, reason = _compared(order, say) if order.rows else (None, "it was not asked for")
    done = MergeDone(
        shards=shards,
        merge_seconds=seconds,
        peak_host_bytes=resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIBIBYTE,
        comparison=comparison,
        not_compared=reason,
    )
    return done.model_dump(mode="json")


def _compared(order: Any, say: Say) -> tuple[Any, str | None]:
    """Return how near the merged model is, or why that cannot be told here."""
    import torch

    from sweep.merging.comparing import Models, compare

    models = Models(
        base=Path(order.base),
        adapter=Path(order.adapter),
        merged=Path(order.directory),
        dtype={"bf16": torch.bfloat16, "fp16": torch.float16}[order.dtype],
        nbytes=sum(piece.nbytes for piece in order.pieces),
    )
    if models.device.type == "cpu" and (short := _lacking_bytes(models.nbytes)):
        return None, f"this machine's memory lacks {short / 2**30:.1f} GiB for it"
    try:
        return compare(
            models, rows=order.rows, on_step=lambda done, of: say({"compared": done, "of": of})
        ), None
    except torch.OutOfMemoryError:
        return None, "the GPU's memory ran out"


def _lacking_bytes(nbytes: int) -> int:
    """Return how much memory is missing to load so many bytes of weights; 0 where none is."""
    for line in Path("/proc/meminfo").read_text(encoding="ascii").splitlines():
        if line.startswith("MemAvailable:"):
            return max(0, int(1.1 * nbytes) - int(line.split()[1]) * _KIBIBYTE)
    return 0


if __name__ == "__main__":
    serve_subprocess(_merge)
