"""Traces structures into a user's cache while something else is going on.

Run as ``python -P -m qlora_sweep.sweep.predict.memory.retracing PARENT`` by `ProfileStore.retrace`.
"""

from __future__ import annotations

import json
import os
import sys
from pathlib import Path

from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.predict.memory.profile_store import ProfileStore, TracingChildren
from qlora_sweep.sweep.predict.memory.profiles import Structure
from qlora_sweep.sweep.predict.memory.shipped import NOTHING, ShippedProfiles
from qlora_sweep.sweep.processes import bind_to_parent

_LEAST_URGENT = 19


def main() -> None:
    """Trace what standard input asks for, in one child: trials need the other processors."""
    bind_to_parent(int(sys.argv[1]))
    os.nice(_LEAST_URGENT)
    asked = json.load(sys.stdin)
    model = ModelSpec.from_json(asked["model"])
    cache, shipped = Path(asked["cache_dir"]), ShippedProfiles(model, NOTHING)
    store = ProfileStore(model, cache_dir=cache, tracer=TracingChildren(1), shipped=shipped)
    store.fetch(map(Structure.from_json, asked["structures"]))


if __name__ == "__main__":
    main()
