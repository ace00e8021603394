"""Measure peak memory and step time of many configurations on the GPU that is here.

Writes one JSON document per line: model, configuration, bytes after build and after attaching, peak
bytes by stage of
the step, peaks over all steps, step times, and the host's pace in launching kernels.
``tests/data/measurements_*.jsonl`` were made by it. Exits 75 when its seconds were used up before
its table.

    python tests/bench/measure_table.py OUT.jsonl [--seconds 480] [--known OLD.jsonl]
        [--snapshots BLOCKS.jsonl] [--held-out tests/data/models]
"""

from __future__ import annotations

import argparse
import collections
import json
import statistics
import sys
import time
from collections.abc import Callable, Iterator
from functools import partial
from pathlib import Path
from random import Random
from typing import Any

import torch

from search_spaces.config import TrialConfig, parse_config
from search_spaces.models import load_model_spec
from sweep.training.adapters import attached
from sweep.training.device import CudaDevice
from sweep.training.model import BaseModel, build_base
from sweep.training.step import TrainingLoop
from tests.bench.pace import launch_microseconds
from tests.bench.stamp import OUT_OF_TIME

LEAN = {"upcast_fp32": False, "kernels": "liger"}


def _sized(batch: int, length: int, **knobs: Any) -> dict[str, Any]:
    return {"micro_batch_size": batch, "seq_len": length, **knobs}


def mistral() -> list[dict[str, Any]]:
    """Return the configurations tried on Mistral-7B: every value of every setting at least once."""
    published = [
        _sized(8, 512),
        _sized(4, 2048),
        _sized(32, 512),
        _sized(4, 512, checkpoint_fraction=0.0),
        _sized(8, 512, checkpoint_fraction=0.0),
    ]
    lean = [
        _sized(8, 512, **LEAN),
        _sized(64, 512, **LEAN),
        _sized(10, 512, checkpoint_fraction=0.0, **LEAN),
        _sized(20, 512, checkpoint_fraction=0.0, **LEAN),
        _sized(16, 512, checkpoint_fraction=0.5, **LEAN),
        _sized(4, 2048, **LEAN),
        _sized(1, 8192, **LEAN),
        _sized(2, 1024, lora_rank=64, target_modules="all-linear", checkpoint_fraction=0.0, **LEAN),
        _sized(8, 512, lora_rank=8, target_modules="qv", checkpoint_fraction=0.25, **LEAN),
        _sized(8, 512, lora_dropout=0.05, checkpoint_fraction=0.0, **LEAN),
    ]
    knobs = [
        _sized(1, 128),
        _sized(1, 512),
        _sized(2, 512),
        _sized(1, 4096),
        _sized(8, 512, lora_rank=8, target_modules="qv"),
        _sized(8, 512, lora_rank=64, target_modules="all-linear"),
        _sized(4, 512, lora_rank=128, target_modules="all-linear", checkpoint_fraction=0.0),
        _sized(4, 1024, lora_rank=32, target_modules=["gate_proj", "up_proj", "down_proj"]),
        _sized(8, 512, lora_dropout=0.05),
        _sized(4, 512, lora_dropout=0.1, checkpoint_fraction=0.0),
        _sized(8, 512, checkpoint_fraction=0.5),
        _sized(8, 512, checkpoint_fraction=0.25),
        _sized(8, 512, checkpoint_fraction=0.75),
        _sized(4, 512, effective_batch_size=16),
        _sized(8, 512, optimizer="adamw_torch_fused", lora_rank=64, target_modules="all-linear"),
        _sized(8, 512, quantization="fp4"),
        _sized(8, 512, double_quant=False),
        _sized(8, 512, attention="eager"),
        _sized(4, 512, attention="eager", checkpoint_fraction=0.0),
        _sized(8, 512, upcast_fp32=False),
        _sized(8, 512, upcast_fp32=False, checkpoint_fraction=0.0),
        _sized(8, 512, kernels="fused-loss"),
        _sized(8, 512, kernels="fused-loss", checkpoint_fraction=0.0),
        _sized(8, 512, kernels="fused-loss", upcast_fp32=False),
        _sized(8, 512, kernels="fused-loss", upcast_fp32=False, checkpoint_fraction=0.0),
        _sized(8, 512, kernels="liger"),
        _sized(8, 512, kernels="liger", checkpoint_fraction=0.0),
        _sized(8, 512, compute_dtype="fp16"),
        _sized(8, 512, compute_dtype="fp16", **LEAN),
        _sized(2, 512, compute_dtype="fp32"),
        _sized(8, 512, quantization="none", double_quant=False, upcast_fp32=False),
        _sized(4, 512, quantization="none", double_quant=False, checkpoint_fraction=0.0, **LEAN),
        _sized(
            10, 512, kernels="fused-loss", upcast_fp32=False, checkpoint_fraction=0.0, compile=True
        ),
        _sized(8, 512, compile=True),
        _sized(8, 512, optimizer="paged_adamw_8bit"),
    ]
    return published + lean + knobs


def others() -> list[dict[str, Any]]:
    """Return the configurations tried on every other architecture."""
    return [
        _sized(4, 512),
        _sized(2, 2048),
        _sized(2, 512, checkpoint_fraction=0.0),
        _sized(4, 1024, lora_rank=64, target_modules="all-linear", **LEAN),
        _sized(4, 512, lora_rank=8, target_modules="qv", checkpoint_fraction=0.0, **LEAN),
        _sized(8, 512, upcast_fp32=False, checkpoint_fraction=0.5),
        _sized(4, 512, kernels="fused-loss", lora_dropout=0.05, target_modules="all-linear"),
        _sized(1, 1024, lora_rank=128, kernels="liger", checkpoint_fraction=0.75),
        _sized(16, 256, target_modules="qv", upcast_fp32=False, optimizer="adamw_torch_fused"),
    ]


DRAWS: dict[str, tuple[Any, ...]] = {
    "lora_rank": (8, 16, 32, 64, 128),
    "target_modules": ("qv", "attention", "all-linear"),
    "micro_batch_size": (1, 2, 3, 4, 6, 8),
    "seq_len": (256, 384, 512, 1000, 1024, 2048),
    "compute_dtype": ("bf16", "bf16", "bf16", "fp16"),
    "checkpoint_fraction": (0.0, 0.25, 0.5, 0.75, 1.0, 1.0),
    "upcast_fp32": (True, False),
    "kernels": ("hf", "fused-loss", "liger"),
    "lora_dropout": (0.0, 0.05),
    "optimizer": ("adamw_8bit", "adamw_8bit", "adamw_torch_fused"),
    "quantization": ("nf4", "nf4", "fp4", "none"),
    "attention": ("sdpa", "sdpa", "sdpa", "eager"),
}
COMPILED = [
    _sized(8, 512, compile=True, checkpoint_fraction=0.0, upcast_fp32=False, kernels="fused-loss"),
    _sized(4, 512, compile=True, checkpoint_fraction=0.5),
    _sized(4, 1024, compile=True, target_modules="all-linear", lora_rank=64, **LEAN),
]


def drawn(seed: int, count: int) -> list[dict[str, Any]]:
    """Return configurations drawn at random: what a predictor must not have been made for."""
    random = Random(seed)
    return [{key: random.choice(values) for key, values in DRAWS.items()} for _ in range(count)]


def held_out(models: Path) -> dict[str, Callable[[], list[dict[str, Any]]]]:
    """Return random configurations for models of the table and for others."""
    names = [*TABLE, *sorted(str(path) for path in models.iterdir())]
    tables = {name: partial(drawn, seed, 6) for seed, name in enumerate(names)}
    return {**tables, "mistral-7b-v0.3": lambda: [*drawn(0, 6), *COMPILED]}


TABLE: dict[str, Callable[[], list[dict[str, Any]]]] = {
    "mistral-7b-v0.3": mistral,
    "llama-3.1-8b": others,
    "qwen2.5-7b": others,
    "qwen3-8b": others,
    "tinyllama-1.1b": others,
    "llama-2-13b": others,
}
SNAPSHOTS = (0, 3, 5, 7, 9, 20, 23, 24, 26, 32, 34, 35, 37, 39, 43, 45)


class StagedLoop(TrainingLoop):
    """A loop that keeps the peak of every stage, waiting for the GPU at each while watched."""

    is_watched = True

    @property
    def stage(self) -> str:
        return self._stage

    @stage.setter
    def stage(self, value: str) -> None:
        if not hasattr(self, "peaks"):
            self.peaks: dict[str, int] = collections.defaultdict(int)
            self.reserved = 0
        elif self.is_watched:
            self.note()
        self._stage = value

    def note(self) -> None:
        torch.cuda.synchronize()
        self.peaks[self._stage] = max(self.peaks[self._stage], torch.cuda.max_memory_allocated())
        self.reserved = max(self.reserved, torch.cuda.max_memory_reserved())
        torch.cuda.reset_peak_memory_stats()


def measure(base: BaseModel, config: TrialConfig, *, device: CudaDevice) -> dict[str, Any]:
    """Return the figures of one configuration."""
    base_bytes = torch.cuda.memory_allocated()
    device.reset_peak()
    with attached(base, config) as attachment:
        attached_bytes = torch.cuda.memory_allocated()
        loop = StagedLoop(attachment, config, seed=0)
        for _ in range(3):
            loop.step()
        loop.note()
        # A step that is timed is not made to wait: on a slow host that would be its whole time.
        loop.is_watched = False
        times = _times(loop)
        return {
            "base_bytes": base_bytes,
            "attached_bytes": attached_bytes,
            "stage_peaks": dict(loop.peaks),
            "peak_allocated_bytes": max(*loop.peaks.values(), device.memory().peak_allocated_bytes),
            "peak_reserved_bytes": max(loop.reserved, device.memory().peak_reserved_bytes or 0),
            "trainable_parameters": sum(p.numel() for p in attachment.trainable_parameters()),
            "step_seconds": statistics.median(times),
            "step_times": [round(t, 5) for t in times],
        }


def _times(loop: TrainingLoop) -> list[float]:
    """Return the seconds of five to nine steps."""
    times: list[float] = []
    begun = time.perf_counter()
    while len(times) < 5 or (time.perf_counter() - begun < 1.0 and len(times) < 9):
        torch.cuda.synchronize()
        start = time.perf_counter()
        loop.step()
        torch.cuda.synchronize()
        times.append(time.perf_counter() - start)
    return times


def snapshot(base: BaseModel, config: TrialConfig) -> list[dict[str, Any]]:
    """Return the blocks alive at the peak of the first two steps, grouped by size and origin."""
    before = torch.cuda.memory_allocated()
    torch.cuda.memory._record_memory_history(
        max_entries=2_000_000, context="alloc", stacks="python"
    )
    with attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        for _ in range(2):
            loop.step()
        torch.cuda.synchronize()
        trace = torch.cuda.memory._snapshot()["device_traces"][0]
    torch.cuda.memory._record_memory_history(enabled=None)
    return [
        {"size": 0, "count": 1, "stack": f"allocated before attaching: {before}"},
        *_at_peak(trace),
    ]


def _at_peak(trace: list[dict[str, Any]]) -> list[dict[str, Any]]:
    total = highest = when = 0
    for index, event in enumerate(trace):
        if event["action"] == "alloc":
            total += event["size"]
        elif event["action"] == "free_completed":
            total -= event["size"]
        if total > highest:
            highest, when = total, index
    live: dict[int, dict[str, Any]] = {}
    for event in trace[: when + 1]:
        if event["action"] == "alloc":
            live[event["addr"]] = event
        elif event["action"] == "free_completed":
            live.pop(event["addr"], None)
    groups = collections.Counter((event["size"], _origin(event)) for event in live.values())
    rows = [{"size": s, "count": n, "stack": origin} for (s, origin), n in groups.items()]
    return sorted(rows, key=lambda row: -row["size"] * row["count"])


def _origin(event: dict[str, Any]) -> str:
    frames = [
        f"{Path(f['filename']).name}:{f['line']}:{f['name']}"
        for f in event.get("frames", [])
        if not f["filename"].endswith(("module.py", "_compile.py", "eval_frame.py"))
    ]
    return " < ".join(frames[:7])


class Resident:
    """The base that is on the GPU, changed only where the next configuration needs another."""

    def __init__(self, device: CudaDevice) -> None:
        self._device = device
        self._base: BaseModel | None = None
        self._model = ""

    def of(self, model: str, config: TrialConfig) -> BaseModel:
        """Return the base of a model for a configuration."""
        if self._base is not None and (self._model, self._base.config) == (model, config.base()):
            return self._base
        if self._base is not None:
            self._base.close()
            self._base = None
        self._device.release()
        start = time.perf_counter()
        self._base = build_base(
            config,
            spec=load_model_spec(model),
            weights="random",
            device=self._device.torch_device,
            seed=0,
        )
        self._model = model
        torch.cuda.synchronize()
        print(f"build {model} {time.perf_counter() - start:.2f} s", flush=True)
        return self._base


def measured_row(
    resident: Resident, model: str, config: TrialConfig, *, device: CudaDevice
) -> dict[str, Any]:
    """Return a configuration's row: its figures, or why it has none."""
    row: dict[str, Any] = {"model": Path(model).name, "config": config.model_dump(mode="json")}
    start = time.perf_counter()
    failure = None
    try:
        row |= measure(resident.of(model, config), config, device=device)
    except Exception as error:  # noqa: BLE001 - a row says why it has no figures
        failure = f"{type(error).__name__}: {error}"[:300]
        row |= {"oom": device.ran_out(error), "failure": failure}
    # Outside the except block: a caught exception keeps the tensors alive.
    device.release()
    row["launch_microseconds"] = round(launch_microseconds(device), 2)
    row["wall_seconds"] = round(time.perf_counter() - start, 3)
    return row


def to_measure(
    tables: dict[str, Callable[[], list[dict[str, Any]]]], known: set[tuple[str, str]]
) -> Iterator[tuple[str, int, TrialConfig]]:
    """Yield model, place in its table and configuration of what is not known, base by base."""
    for model, table in tables.items():
        configs = enumerate(parse_config(values) for values in table())
        new = [(i, c) for i, c in configs if (Path(model).name, c.key()) not in known]
        yield from ((model, index, config) for index, config in sorted(new, key=_by_base))


def add_snapshot(base: BaseModel, config: TrialConfig, path: Path) -> None:
    """Append the blocks at a configuration's peak."""
    blocks = {"config": config.model_dump(mode="json"), "blocks": snapshot(base, config)[:300]}
    with path.open("a", encoding="utf-8") as file:
        file.write(json.dumps(blocks) + "\n")


def parsed() -> argparse.Namespace:
    """Return the command's options."""
    arguments = argparse.ArgumentParser()
    arguments.add_argument("out", type=Path)
    arguments.add_argument("--seconds", type=float, default=480.0)
    arguments.add_argument("--known", type=Path, help="rows of an earlier run are not repeated")
    arguments.add_argument("--snapshots", type=Path)
    arguments.add_argument(
        "--held-out", type=Path, metavar="MODELS", help="random configurations, these models too"
    )
    return arguments.parse_args()


def main() -> None:
    options = parsed()
    begun = time.perf_counter()
    device = CudaDevice()
    device.warm_up()
    resident = Resident(device)
    tables = TABLE if options.held_out is None else held_out(options.held_out)
    known = _known(options.known)
    with options.out.open("a", encoding="utf-8") as out:
        for model, index, config in to_measure(tables, known):
            if time.perf_counter() - begun > options.seconds:
                sys.exit(OUT_OF_TIME)
            row = measured_row(resident, model, config, device=device)
            out.write(json.dumps(row) + "\n")
            out.flush()
            print(model, config.changes_from(TrialConfig()), _summary(row), flush=True)
            if options.snapshots and model.startswith("mistral") and index in SNAPSHOTS:
                add_snapshot(resident.of(model, config), config, options.snapshots)
                device.release()


def _by_base(pair: tuple[int, TrialConfig]) -> tuple[bool, str]:
    """Order configurations by their base model, the ones that compile last."""
    return pair[1].compile, pair[1].base().key()


def _known(path: Path | None) -> set[tuple[str, str]]:
    is_there = path is not None and path.exists()
    lines = path.read_text(encoding="utf-8").splitlines() if path and is_there else []
    rows = [json.loads(line) for line in lines]
    return {(row["model"], parse_config(row["config"]).key()) for row in rows}


def _summary(row: dict[str, Any]) -> str:
    if "failure" in row:
        return row["failure"]
    config = parse_config(row["config"])
    gib = row["peak_allocated_bytes"] / 2**30
    rate = config.tokens_per_step / row["step_seconds"]
    return (
        f"{gib:.3f} GiB {row['step_seconds']:.4f} s {rate:.0f} tok/s wall {row['wall_seconds']:.1f}"
    )


if __name__ == "__main__":
    main()
