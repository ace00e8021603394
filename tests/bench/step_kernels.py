"""Where a step goes on a GPU: by group of kernels, and the time in which none runs.

    python -m tests.bench.step_kernels [--model NAME] [--layers N] [--config JSON ...]
        [--inductor JSON] [-o OUT.jsonl]

A row a configuration, of steps in the tool's own training loop: milliseconds a step by the clock,
of each group and of the longest kernels; `gaps` are the stretches without a kernel, the short
ones, in which the next is launched already, and the long ones, in which the GPU waits for its host,
with the kernels that came after those.
"""

from __future__ import annotations

import argparse
import collections
import json
import time
from collections.abc import Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import torch

from qlora_sweep.search_spaces.config import parse_config
from qlora_sweep.search_spaces.models import ModelSpec
from qlora_sweep.sweep.training.adapters import attached
from qlora_sweep.sweep.training.eight_bit import tune_products
from qlora_sweep.sweep.training.model import build_base
from qlora_sweep.sweep.training.step import TrainingLoop
from tests.bench.harness import Row, stamp, write
from tests.bench.unsloth_beside import FAST, model_of

STEPS_WARMUP, STEPS, STEPS_PROFILED = 4, 12, 2
LONG_GAP_US = 10.0
"""A gap that the launch of a kernel that waits already does not explain."""
_PRODUCTS = ("gemm", "nvjet", "cutlass", "xmma", "triton_tem", "splitk", "cublas", "_mm")
GROUPS: tuple[tuple[str, tuple[str, ...]], ...] = (
    ("attention", ("flash", "fmha", "sdpa", "attention", "cudnn_generated")),
    ("optimizer", ("multi_tensor", "optimizer", "adam", "lpnorm", "foreach")),
    ("products", (*_PRODUCTS, "int8_product")),
    ("transposes", ("_transpose",)),
    ("decoding", ("_decode", "dequantize", "_widen")),
    ("copies", ("memcpy", "memset")),
    ("fused", ("triton_",)),
)
"""Groups of kernels by parts of their names, the first that fits."""


def group_of(kernel: str) -> str:
    """Return the group of a kernel by its name."""
    name = kernel.lower()
    for group, parts in GROUPS:
        if any(part in name for part in parts):
            return group
    return "other"


def gaps(kernels: Sequence[tuple[float, float, str]]) -> Row:
    """Return the stretches without a kernel.

    Args:
        kernels: when each began and ended (microseconds), and its name.
    """
    short = collections.Counter[str]()
    before_long = collections.Counter[str]()
    end = None
    for began, ended, name in sorted(kernels):
        if end is not None and began > end:
            gap = began - end
            if gap < LONG_GAP_US:
                short["ms"] += gap / 1e3
                short["count"] += 1
            else:
                before_long[name[:60]] += gap / 1e3
        end = max(ended, end or ended)
    return {
        "short_ms": short["ms"],
        "short_count": short["count"],
        "long_ms": sum(before_long.values()),
        "before_long_ms": dict(before_long.most_common(8)),
    }


def profiled(loop: TrainingLoop) -> Row:
    """Return milliseconds of groups, of the longest kernels and of gaps, a step."""
    activity = torch.profiler.ProfilerActivity.CUDA
    with torch.profiler.profile(activities=[activity]) as profile:
        for _ in range(STEPS_PROFILED):
            loop.step()
        torch.cuda.synchronize()
    kernels = []
    for event in profile.events() or ():
        if event.device_type == torch.autograd.DeviceType.CUDA:
            kernels.append((event.time_range.start, event.time_range.end, event.name))
    of_groups = collections.Counter[str]()
    of_kernels = collections.Counter[str]()
    calls = collections.Counter[str]()
    for began, ended, name in kernels:
        ms = (ended - began) / 1e3 / STEPS_PROFILED
        of_groups[group_of(name)] += ms
        of_kernels[name[:90]] += ms
        calls[name[:90]] += 1
    longest = {
        name: [round(ms, 2), calls[name] // STEPS_PROFILED]
        for name, ms in of_kernels.most_common(24)
    }
    return {
        "groups_ms": {group: round(ms, 2) for group, ms in of_groups.most_common()},
        "kernels": len(kernels) // STEPS_PROFILED,
        "gaps": {
            key: value / STEPS_PROFILED if isinstance(value, float | int) else value
            for key, value in gaps(kernels).items()
        },
        "longest_ms_and_calls": longest,
    }


def measured(spec: ModelSpec, asked: Row) -> Row:
    """Return the row of a configuration."""
    config = parse_config(FAST | asked)
    device = torch.device("cuda")
    base = build_base(config, spec=spec, weights="random", device=device, seed=0)
    with attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        began = time.perf_counter()
        tune_products(attachment.model, rows=config.micro_batch_size * config.seq_len)
        tuning = time.perf_counter() - began
        began = time.perf_counter()
        loop.step()
        torch.cuda.synchronize()
        first = time.perf_counter() - began
        for _ in range(STEPS_WARMUP):
            loop.step()
        torch.cuda.reset_peak_memory_stats()
        torch.cuda.synchronize()
        seconds = []
        for _ in range(3):
            began = time.perf_counter()
            for _ in range(STEPS):
                loop.step()
            queued = time.perf_counter() - began
            torch.cuda.synchronize()
            seconds.append((time.perf_counter() - began) / STEPS)
        row = {
            "asked": asked,
            "tuning_seconds": tuning,
            "first_step_seconds": first,
            "step_ms": [round(s * 1e3, 2) for s in seconds],
            "host_ms": round(queued / STEPS * 1e3, 2),
            "tokens_per_second": config.tokens_per_step / min(seconds),
            "peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        }
        return row | profiled(loop)


def main() -> None:
    """Measure what was asked for, one configuration after the other."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", default="mistral-7b-v0.3")
    parser.add_argument("--layers", type=int, help="how many of its layers")
    parser.add_argument("--config", type=json.loads, action="append", default=[])
    parser.add_argument("--inductor", type=json.loads, default={}, help="its settings, as JSON")
    parser.add_argument("-o", "--output", type=Path)
    typed = parser.parse_args()
    spec = model_of(typed.model, typed.layers)
    about: Row = {"model": typed.model, "layers": typed.layers, "inductor": typed.inductor}
    write(stamp() | about, typed.output)
    with ExitStack() as undo:
        if typed.inductor:
            import torch._inductor.config as inductor

            patched: Any = inductor.patch(typed.inductor)
            undo.enter_context(patched)
        for asked in typed.config:
            write(measured(spec, asked), typed.output)
            torch.cuda.empty_cache()


if __name__ == "__main__":
    main()
