"""The child that merges: it has torch, and ends once the merged model is written.

Run as ``python -P -m qlora_sweep.sweep.merging PARENT``.
"""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from qlora_sweep.sweep.json_child import Say
from qlora_sweep.sweep.subprocess_jobs import serve_subprocess


def _merge(request: Mapping[str, Any], say: Say) -> Mapping[str, Any]:
    from qlora_sweep.sweep.training.libraries import OPTIONAL, compiling_later, lean_imports

    with lean_imports(*OPTIONAL), compiling_later():
        from qlora_sweep.sweep.merging.child import merge_or_compare
    return merge_or_compare(request, say)


if __name__ == "__main__":
    serve_subprocess(_merge)
