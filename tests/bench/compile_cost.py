"""Measure what compiling the layers costs and gains: shapes dynamic or static, reset or kept.

Every way starts with an empty compiler cache and then trains the shapes in order, each as a trial
of its own. Writes one JSON document.

    python tests/bench/compile_cost.py OUT.json [--model mistral-7b-v0.3] [--only static,reset]
"""

from __future__ import annotations

import argparse
import contextlib
import json
import statistics
import tempfile
import time
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from torch._inductor.utils import fresh_cache

from search_spaces.config import parse_config
from search_spaces.models import load_model_spec
from sweep.training.adapters import attached
from sweep.training.device import Device, open_device
from sweep.training.model import BaseModel, build_base
from sweep.training.step import TrainingLoop
from tests.bench.stamp import stamp

RECIPE = {"kernels": "fused-loss", "upcast_fp32": False, "checkpoint_fraction": 0.0}
STEPS = 10


@dataclass(frozen=True)
class Way:
    """How layers are compiled."""

    is_compiled: bool
    dynamic: bool
    is_reset: bool
    shapes: tuple[tuple[int, int], ...]


WAYS = {
    "eager": Way(False, False, False, ((8, 512), (10, 512))),
    "static, reset": Way(True, False, True, ((8, 512), (10, 512), (4, 1024), (8, 512))),
    "static, kept": Way(True, False, False, ((8, 512), (10, 512), (4, 1024), (8, 512))),
    "dynamic, reset": Way(True, True, True, ((8, 512), (10, 512))),
}


@contextlib.contextmanager
def compiled(layers: list[torch.nn.Module], way: Way) -> Iterator[None]:
    """Compile the layers this way; on exit they are as they were."""
    if not way.is_compiled:
        yield
        return
    if way.is_reset:
        torch._dynamo.reset()
    torch._dynamo.utils.counters.clear()
    for layer in layers:
        layer.compile(dynamic=way.dynamic)
    try:
        yield
    finally:
        for layer in layers:
            layer._compiled_call_impl = None


def trial(base: BaseModel, shape: tuple[int, int], way: Way, device: Device) -> dict[str, Any]:
    """Return the first step's seconds, the steady rate and the peaks of one shape."""
    batch, length = shape
    config = parse_config({**RECIPE, "micro_batch_size": batch, "seq_len": length})
    device.release()
    device.reset_peak()
    begun = time.perf_counter()
    with attached(base, config) as attachment, compiled(attachment.layers, way):
        loop = TrainingLoop(attachment, config, seed=0)
        times = []
        for _ in range(3 + STEPS):
            start = time.perf_counter()
            loop.step()
            device.synchronize()
            times.append(time.perf_counter() - start)
        counters = torch._dynamo.utils.counters
        stats = {
            "graphs": counters["stats"].get("unique_graphs", 0),
            "graph_breaks": len(counters["graph_break"]),
            "cache_hits": counters["inductor"].get("fxgraph_cache_hit", 0),
            "cache_misses": counters["inductor"].get("fxgraph_cache_miss", 0),
        }
    steady = statistics.median(times[3:])
    row = {
        "shape": f"{batch} x {length}",
        "first_steps": [round(t, 3) for t in times[:3]],
        "compile_seconds": round(sum(times[:3]) - 3 * steady, 2),
        "tokens_per_second": round(config.tokens_per_step / steady),
        "peak_allocated_bytes": device.memory().peak_allocated_bytes,
        "peak_reserved_bytes": device.memory().peak_reserved_bytes,
        "whole_seconds": round(time.perf_counter() - begun, 1),
        **stats,
    }
    device.release()
    return row


def main() -> None:
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--model", default="mistral-7b-v0.3")
    arguments.add_argument("--only", choices=WAYS, action="append")
    options = arguments.parse_args()
    device = open_device("cuda" if torch.cuda.is_available() else "cpu")
    device.warm_up()
    base = build_base(
        parse_config(RECIPE),
        spec=load_model_spec(options.model),
        weights="random",
        device=device.torch_device,
        seed=0,
    )
    rows = []
    for name in options.only or WAYS:
        torch._dynamo.reset()
        with tempfile.TemporaryDirectory() as empty, fresh_cache(dir=empty):
            for shape in WAYS[name].shapes:
                rows.append({"way": name, **trial(base, shape, WAYS[name], device)})
                print(rows[-1], flush=True)
                document = {**stamp(), "model": options.model, "recipe": RECIPE, "rows": rows}
                options.out.write_text(json.dumps(document, indent=1) + "\n", encoding="utf-8")


if __name__ == "__main__":
    main()
