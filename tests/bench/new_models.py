"""Train every shipped model shortly from random weights, and hold each run against its prediction.

    python -m tests.bench.new_models -o OUT.jsonl [--seconds 230] [--only gemma-3-4b]...

One JSON line for each configuration: what was predicted, what was measured. What an earlier call
measured is kept; it exits with `OUT_OF_TIME` where some are left. Without a GPU it trains on the
CPU what can be trained there, which says that the script works and nothing else.
"""

from __future__ import annotations

import argparse
import json
import sys
import time
from collections.abc import Iterator, Sequence
from contextlib import ExitStack
from pathlib import Path
from typing import Any, Literal

from search_spaces.config import TrialConfig, parse_config
from search_spaces.errors import InputError
from search_spaces.gpus import GIB, GpuSpec, match_product
from search_spaces.linears import unquantized
from search_spaces.models import ModelSpec, load_model_spec
from search_spaces.rules import WITHOUT_SDPA, violation
from storage.definition import Target
from storage.records import Measured, Outcome, OutOfMemory
from sweep.paths import cache_directory
from sweep.predict.memory.predictor import TracingPredictor
from sweep.predict.memory.profile_store import TracingChildren
from sweep.predict.memory.profiles import Untraceable
from sweep.running.device_info import read_card
from sweep.running.supervisor import SupervisedRunner
from sweep.running.wire import TrialRequest
from tests.bench.record_surface import STEPS
from tests.bench.stamp import OUT_OF_TIME
from tests.sweep.predict.predicted_steps import predict_step

MODELS = (
    "gemma-3-4b",
    "gpt-oss-20b",
    "smollm3-3b",
    "phi-4-mini",
    "qwen3-30b-a3b",
    "gemma-3-1b",
    "llama-3.2-3b",
    "qwen3-4b",
    "mistral-small-24b",
    "phi-4",
    "gemma-3-12b",
    "qwen3-0.6b",
    "llama-3.2-1b",
    "qwen3-14b",
    "gemma-3-27b",
    "qwen3-1.7b",
    "qwen3-32b",
)
"""First what differs most from what was measured before: a run may be cut short."""
NUMBERS = (
    "peak_allocated_bytes",
    "peak_reserved_bytes",
    "step_seconds",
    "step_seconds_ci95",
    "tokens_per_second",
    "trainable_parameters",
)
CPU_BUDGET_BYTES = 4 * GIB
WORKERS_AHEAD = 2
"""Workers that import their libraries while another one measures: that takes longer than a model.
"""

Row = dict[str, Any]
SMALL: Row = {"micro_batch_size": 2, "seq_len": 512}
LARGE: Row = {
    "micro_batch_size": 8,
    "seq_len": 512,
    "checkpoint_fraction": 0.0,
    "kernels": "fused-loss",
    "upcast_fp32": False,
}
LONG: Row = {
    "micro_batch_size": 2,
    "seq_len": 2048,
    "checkpoint_fraction": 0.5,
    "kernels": "liger",
    "upcast_fp32": False,
    "target_modules": "all-linear",
}
"""Longer than the window of every model that has one."""


def configurations(model: ModelSpec, *, device: Literal["cuda", "cpu"]) -> list[TrialConfig]:
    """Return what is tried on a model: small as published, large without checkpoints, long rows."""
    changes: Row = {}
    if unquantized(model) is not None:
        changes |= {"quantization": "none", "target_modules": "attention"}
    if model.model_type in WITHOUT_SDPA:
        changes |= {"attention": "eager"}
    found: dict[str, TrialConfig] = {}
    for values in (SMALL, LARGE, LONG):
        for kernels in (values.get("kernels", "hf"), "fused-loss", "hf"):
            config = parse_config({**values, **changes, "kernels": kernels})
            if violation(config, model=model, compute_capability=None, device=device) is None:
                found[config.key()] = config
                break
    return list(found.values())


def predicted(
    config: TrialConfig, *, memory: TracingPredictor, model: ModelSpec, gpu: GpuSpec | None
) -> Row:
    """Return what is said before it runs; ``memory`` or ``speed`` says why something is not."""
    said: Row = {}
    try:
        peak = memory.predict(config)
        said |= {
            "peak_allocated_bytes": peak.peak_allocated_bytes,
            "peak_reserved_bytes": peak.peak_reserved_bytes,
            "uncertainty": peak.uncertainty,
            "reserved_uncertainty": peak.reserved_uncertainty,
        }
    except Untraceable as reason:
        said["memory"] = str(reason)
    try:
        if gpu is not None:
            said["step_seconds"] = predict_step(config, model=model, gpu=gpu).step_seconds
    except InputError as reason:
        said["speed"] = str(reason)
    return said


def measured(outcome: Outcome) -> Row:
    """Return what was seen: numbers, or what became of it."""
    match outcome:
        case Measured(measurement=m):
            numbers = {key: getattr(m, key) for key in NUMBERS}
            return {"verdict": "fits", **numbers, "flags": list(m.flags)}
        case OutOfMemory():
            return {"verdict": "oom"}
        case _:
            return {"verdict": type(outcome).__name__.lower(), "failure": str(outcome)[-600:]}


def in_words(row: Row) -> str:
    """Return a line for whoever watches: measured over predicted."""
    said = row["predicted"]
    ratios = [
        f"{key} {row[key] / said[key]:.4f}"
        for key in ("peak_allocated_bytes", "peak_reserved_bytes", "step_seconds")
        if row.get(key) and said.get(key)
    ]
    return f"{row['model']} {row['verdict']}: {', '.join(ratios) or row.get('failure', said)}"


def read(path: Path) -> list[Row]:
    """Return a file's rows; none where it is not there."""
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines]


class Bench:
    """The GPU, the tracer, and a worker for each model, the next ones started ahead."""

    def __init__(
        self, models: Sequence[ModelSpec], *, log: Path, deadline: float, stack: ExitStack
    ) -> None:
        card = read_card()
        self.device: Literal["cuda", "cpu"] = "cpu" if card is None else "cuda"
        self.gpu = None if card is None else match_product(card.product)
        product = "cpu" if card is None else card.product
        budget = CPU_BUDGET_BYTES if card is None else card.memory_bytes
        self._target = Target(gpu=product, device=self.device, budget_bytes=budget)
        self._models, self._log, self._stack = list(models), log, stack
        self._deadline = deadline
        self._tracer = TracingChildren(1, outlive=True)
        stack.callback(self._tracer.close)
        self._runners: dict[str, SupervisedRunner] = {}

    def _is_late(self, _: object = None) -> bool:
        return time.monotonic() > self._deadline

    def runner(self, model: ModelSpec) -> SupervisedRunner:
        """Return a model's runner, and start those of the next models."""
        at = self._models.index(model)
        for coming in self._models[at : at + 1 + WORKERS_AHEAD]:
            if coming.name not in self._runners:
                runner = SupervisedRunner(coming, target=self._target, log_path=self._log)
                self._stack.callback(runner.close)
                runner.start()
                self._runners[coming.name] = runner
        return self._runners[model.name]

    def rows(self, model: ModelSpec, known: set[str]) -> Iterator[Row]:
        """Yield a row for each configuration of a model that is not known yet."""
        runner = self.runner(model)
        memory = TracingPredictor(
            model, cache_dir=cache_directory() / "memory", tracer=self._tracer
        )
        for config in configurations(model, device=self.device):
            if config.key() in known:
                continue
            said = predicted(config, memory=memory, model=model, gpu=self.gpu)
            seen = measured(
                runner.run(TrialRequest(config=config, steps=STEPS), observe=self._is_late)
            )
            if self._is_late():
                return
            row = {"model": model.name, "config": config.model_dump(mode="json")}
            yield {**row, **seen, "predicted": said}
        runner.close()


def main() -> int:
    """Measure what is not there yet; return the exit status."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("-o", "--output", type=Path, required=True)
    parser.add_argument("--seconds", type=float, default=230.0)
    parser.add_argument("--only", action="append", metavar="MODEL")
    options = parser.parse_args()
    deadline = time.monotonic() + options.seconds
    models = [load_model_spec(name) for name in options.only or MODELS]
    known = [(row["model"], parse_config(row["config"]).key()) for row in read(options.output)]
    log = options.output.with_suffix(".log")
    with ExitStack() as stack, options.output.open("a", encoding="utf-8") as file:
        bench = Bench(models, log=log, deadline=deadline, stack=stack)
        for model in models:
            of_model = {key for name, key in known if name == model.name}
            for row in bench.rows(model, of_model):
                print(json.dumps(row), file=file, flush=True)
                print(f"{deadline - time.monotonic():5.0f} s left; {in_words(row)}", flush=True)
            if time.monotonic() > deadline:
                return OUT_OF_TIME
    return 0


if __name__ == "__main__":
    sys.exit(main())
