"""What the child does that `job` starts: merge, or compare what was merged."""

from __future__ import annotations

import resource
import time
from collections.abc import Mapping
from pathlib import Path
from typing import Any

from qlora_sweep.sweep.json_child import Say
from qlora_sweep.sweep.merging.comparing import compare_if_there_is_room
from qlora_sweep.sweep.merging.merged import Merge


def merge_or_compare(order: Mapping[str, Any], say: Say) -> dict[str, Any]:
    """Do one of the two, and return what the report says of it."""
    if order["task"] == "compare":
        return compare_if_there_is_room(order, say) | {"peak_host_bytes": _peak_bytes()}
    began = time.perf_counter()
    merge = Merge(Path(order["adapter"]), Path(order["base"]), dtype=order["dtype"])
    nbytes = merge.write(Path(order["directory"]), say)
    return {
        "dtype": merge.dtype,
        "form": merge.form_index,
        "notes": merge.notes,
        "weights_merged": len(merge.targets),
        "weights_replaced": len(merge.replaced),
        "shards": len(merge.checkpoint.files),
        "weights_bytes": nbytes,
        "merge_seconds": time.perf_counter() - began,
        "peak_host_bytes": _peak_bytes(),
    }


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024
