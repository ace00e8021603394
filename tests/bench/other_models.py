"""What steps take and need of model types whose layers are read off a walk: predicted and measured.

    python -m tests.bench.other_models [--model NAME] [--whole] [--budget GIB] [-o OUT.jsonl]
        [--in-4-bits | --in-8-bits | --offloaded | --on-experts | --in-16-bits]

A row a configuration, each model in a worker of its own from random weights. Of most models some
of the layers are trained, which each row says: a step's parts keep their proportions. `--whole`
trains all of them, where the GPU has room. Of mixtures the base is in 16 bits, or in 8 or 4, with
adapters on attention or on experts too, or in the host's memory; or the configurations of 4 bits
are trained in 16. Every row has both numbers of a step's seconds and of its peak, their ratios, and
whether the measured seconds are in the stated interval; the last has the ratios' spread by model.
"""

from __future__ import annotations

import argparse
import math
import statistics
import tempfile
from collections import defaultdict
from collections.abc import Sequence
from pathlib import Path
from typing import Any

from qlora_sweep.search_spaces.config import TrialConfig, parse_config
from qlora_sweep.search_spaces.errors import SweepError
from qlora_sweep.search_spaces.gpus import GIB, GpuSpec, find_gpu, match_product
from qlora_sweep.search_spaces.linears import has_experts
from qlora_sweep.search_spaces.models import ModelSpec, checked_config, load_model_spec
from qlora_sweep.search_spaces.rules import attention_of
from qlora_sweep.search_spaces.space import StepBudget
from qlora_sweep.storage.definition import Target
from qlora_sweep.storage.records import Measured
from qlora_sweep.sweep.paths import cache_directory
from qlora_sweep.sweep.predict.memory.predictor import TracingPredictor
from qlora_sweep.sweep.predict.speed.predictor import StepTimes
from qlora_sweep.sweep.running.device_info import read_gpu
from qlora_sweep.sweep.running.supervisor import SupervisedRunner
from qlora_sweep.sweep.running.wire import TrialRequest
from tests.bench.harness import Row, stamp, write

GLM4: dict[str, Any] = {
    "model_type": "glm4",
    "vocab_size": 151_552,
    "hidden_size": 4096,
    "intermediate_size": 13_696,
    "num_hidden_layers": 40,
    "num_attention_heads": 32,
    "num_key_value_heads": 2,
    "head_dim": 128,
    "max_position_embeddings": 32_768,
    "pad_token_id": 151_329,
    "eos_token_id": 151_329,
}
PHI: dict[str, Any] = {
    "model_type": "phi",
    "vocab_size": 51_200,
    "hidden_size": 2560,
    "intermediate_size": 10_240,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "max_position_embeddings": 2048,
    "partial_rotary_factor": 0.4,
}
MIXTRAL: dict[str, Any] = {
    "model_type": "mixtral",
    "vocab_size": 32_000,
    "hidden_size": 4096,
    "intermediate_size": 14_336,
    "num_hidden_layers": 32,
    "num_attention_heads": 32,
    "num_key_value_heads": 8,
    "num_local_experts": 8,
    "num_experts_per_tok": 2,
    "max_position_embeddings": 32_768,
}
MODELS: dict[str, tuple[dict[str, Any] | str, int]] = {
    "glm4-9b": (GLM4, 20),
    "qwen3-30b-a3b": ("qwen3-30b-a3b", 12),
    "gpt-oss-20b": ("gpt-oss-20b", 12),
    "phi-2": (PHI, 32),
    "mixtral-8x7b": (MIXTRAL, 4),
}
"""A config or the name of a shipped one, and how many layers are trained."""

LEAN: dict[str, Any] = {"upcast_fp32": False, "optimizer": "adamw_torch_fused"}
PLAIN: dict[str, Any] = {**LEAN, "quantization": "none", "double_quant": False}
OF_EXPERTS: Sequence[dict[str, Any]] = (
    {**PLAIN, "micro_batch_size": 2, "seq_len": 512},
    {**PLAIN, "micro_batch_size": 8, "seq_len": 512, "checkpoint_fraction": 0.0},
    {**PLAIN, "micro_batch_size": 4, "seq_len": 2048},
    {**PLAIN, "micro_batch_size": 8, "seq_len": 2048, "kernels": "fused-loss"},
    {**PLAIN, "micro_batch_size": 8, "seq_len": 1024, "compile": True},
)
IN_4_BITS: Sequence[dict[str, Any]] = (
    {**LEAN, "micro_batch_size": 1, "seq_len": 512},
    {**LEAN, "micro_batch_size": 8, "seq_len": 512, "kernels": "fused-loss"},
    {**LEAN, "micro_batch_size": 8, "seq_len": 512, "kernels": "fused-loss", "compile": True},
    {**LEAN, "micro_batch_size": 2, "seq_len": 2048, "kernels": "fused-loss", "compile": True},
    {**LEAN, "micro_batch_size": 1, "seq_len": 8192, "kernels": "fused-loss", "compile": True},
    {**LEAN, "micro_batch_size": 1, "seq_len": 1024, "checkpoint_fraction": 0.5},
    {"micro_batch_size": 2, "seq_len": 1024, "double_quant": False, "lora_rank": 64},
    {**LEAN, "micro_batch_size": 2, "seq_len": 768, "target_modules": "qv", "lora_rank": 8},
    {**LEAN, "micro_batch_size": 16, "seq_len": 512, "kernels": "fused-loss", "compile": True},
    {**LEAN, "micro_batch_size": 32, "seq_len": 512, "kernels": "fused-loss", "compile": True},
    {**LEAN, "micro_batch_size": 4, "seq_len": 512, "checkpoint_fraction": 0.0, "compile": True},
)
_FAST: dict[str, Any] = {**LEAN, "kernels": "fused-loss", "compile": True}
OFFLOADED: Sequence[dict[str, Any]] = (
    {**_FAST, "micro_batch_size": 16, "seq_len": 512},
    {**_FAST, "micro_batch_size": 16, "seq_len": 512, "offload_fraction": 0.5},
    {**_FAST, "micro_batch_size": 16, "seq_len": 512, "offload_fraction": 1.0},
    {**_FAST, "micro_batch_size": 32, "seq_len": 512, "offload_fraction": 1.0},
    {**_FAST, "micro_batch_size": 1, "seq_len": 8192, "offload_fraction": 1.0},
    {**_FAST, "micro_batch_size": 4, "seq_len": 512, "offload_fraction": 1.0},
    {**LEAN, "micro_batch_size": 8, "seq_len": 512, "offload_fraction": 1.0},
    {**LEAN, "micro_batch_size": 4, "seq_len": 512, "offload_fraction": 0.25, "lora_rank": 64},
    {"micro_batch_size": 2, "seq_len": 1024, "double_quant": False, "offload_fraction": 1.0},
    {
        **LEAN,
        "micro_batch_size": 2,
        "seq_len": 512,
        "checkpoint_fraction": 0.5,
        "offload_fraction": 1.0,
    },
)
IN_8_BITS: Sequence[dict[str, Any]] = (
    {**_FAST, "micro_batch_size": 16, "seq_len": 512, "quantization": "int8"},
    {**_FAST, "micro_batch_size": 1, "seq_len": 8192, "quantization": "int8"},
    {**LEAN, "micro_batch_size": 8, "seq_len": 512, "quantization": "int8"},
    {**_FAST, "micro_batch_size": 16, "seq_len": 512, "quantization": "fp8"},
    {**LEAN, "micro_batch_size": 4, "seq_len": 512, "quantization": "fp8", "lora_rank": 64},
)
ON_EXPERTS: Sequence[dict[str, Any]] = (
    {**LEAN, "micro_batch_size": 2, "seq_len": 512, "lora_rank": 4},
    {**LEAN, "micro_batch_size": 4, "seq_len": 512, "lora_rank": 8, "checkpoint_fraction": 0.5},
    {**LEAN, "micro_batch_size": 8, "seq_len": 512, "lora_rank": 4, "compile": True},
)
OTHERS: Sequence[dict[str, Any]] = (
    {"micro_batch_size": 4, "seq_len": 512},
    {**LEAN, "micro_batch_size": 8, "seq_len": 1024},
    {**PLAIN, "micro_batch_size": 8, "seq_len": 1024, "checkpoint_fraction": 0.0},
    {**PLAIN, "micro_batch_size": 4, "seq_len": 2048, "target_modules": "all-linear"},
    {**LEAN, "micro_batch_size": 8, "seq_len": 1024, "compile": True},
)
STEPS = StepBudget(warmup_min=2, warmup_max=4, measured_min=4, measured_max=16, seconds_max=5)


def model_of(name: str, *, is_whole: bool) -> ModelSpec:
    """Return a model of the table, whole or with as many layers as it says."""
    config, layers = MODELS[name]
    known = load_model_spec(config).config if isinstance(config, str) else config
    if not is_whole:
        known = {**known, "num_hidden_layers": layers}
        kinds = known.get("layer_types")
        if isinstance(kinds, list):
            known["layer_types"] = kinds[:layers]
    return ModelSpec(name, "directory", checked_config(known, label=name))


def asked_of(model: ModelSpec, wanted: str | None) -> list[TrialConfig]:
    """Return what is trained of a model."""
    settings = OTHERS
    if wanted == "in-4-bits":
        settings = IN_4_BITS
    elif wanted == "in-8-bits":
        settings = IN_8_BITS
    elif wanted == "offloaded":
        settings = OFFLOADED
    elif wanted == "on-experts":
        settings = [{**each, "target_modules": "all-linear"} for each in ON_EXPERTS]
    elif wanted == "in-16-bits":
        settings = [{**each, **PLAIN} for each in IN_4_BITS]
    elif has_experts(model):
        settings = OF_EXPERTS
    return [parse_config({"attention": attention_of(model), **each}) for each in settings]


def peak_of(config: TrialConfig, memory: TracingPredictor) -> Row:
    """Return what is predicted of a step's peak, and how far it may be off."""
    try:
        found = memory.predict(config)
    except SweepError as error:
        return {"no_peak": str(error)}
    return {"peak_bytes": found.peak_allocated_bytes, "peak_within": found.uncertainty}


def predicted(config: TrialConfig, model: ModelSpec, gpu: GpuSpec) -> Row:
    """Return what is predicted of a step's seconds."""
    found = StepTimes([config], model=model, gpu=gpu, evidence=None).prediction(0)
    if isinstance(found, Exception):
        return {"unknown": str(found)}
    terms = {term: round(seconds, 4) for term, seconds in found.terms.items()}
    low, high = found.step_estimate.ends
    about = {"seconds": found.step_seconds, "low": low, "high": high, "terms": terms}
    return {"predicted": about, "bottleneck": found.bottleneck}


def measured(runner: SupervisedRunner, config: TrialConfig) -> Row:
    """Return what a trial measured, or why it did not."""
    outcome = runner.run(TrialRequest(config=config, steps=STEPS))
    if not isinstance(outcome, Measured):
        return {"failure": str(outcome)[:500]}
    found = outcome.measurement
    kept = ("step_seconds", "step_seconds_ci95", "tokens_per_second", "peak_allocated_bytes")
    return {**{name: getattr(found, name) for name in kept}, "flags": found.flags}


def compared(row: Row) -> Row:
    """Return the ratios of both, measured over predicted; nothing where one is missing."""
    found: Row = {}
    if "step_seconds" in row and "peak_bytes" in row:
        found["peak_ratio"] = round(row["peak_allocated_bytes"] / row["peak_bytes"], 4)
    if "step_seconds" in row and "predicted" in row:
        seconds, known = row["step_seconds"], row["predicted"]
        found["ratio"] = round(seconds / known["seconds"], 3)
        found["is_inside"] = known["low"] <= seconds <= known["high"]
    return found


def main() -> None:
    """Predict and measure, and print a row each."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--model", choices=MODELS)
    parser.add_argument("--whole", action="store_true", help="train all layers")
    for wanted in ("in-4-bits", "in-8-bits", "offloaded", "on-experts", "in-16-bits"):
        parser.add_argument(f"--{wanted}", dest="wanted", action="store_const", const=wanted)
    parser.add_argument("--budget", type=float, help="GiB that a training may take")
    parser.add_argument("-o", "--output", type=Path)
    asked = parser.parse_args()
    write(stamp(), asked.output)
    gpu_here = read_gpu()
    assert gpu_here is not None, "there is no GPU here"
    gpu = match_product(gpu_here.product) or find_gpu("h200")
    budget = int(0.97 * gpu_here.memory_bytes)
    if asked.budget is not None:
        budget = int(asked.budget * GIB)
    target = Target(gpu=gpu.name, device="cuda", budget_bytes=budget)
    logs: dict[str, list[float]] = defaultdict(list)
    with tempfile.TemporaryDirectory() as directory:
        for name in MODELS if asked.model is None else [asked.model]:
            model = model_of(name, is_whole=asked.whole)
            log = Path(directory, f"{name}.log")
            memory = TracingPredictor(model, cache_dir=cache_directory(), compute_capability=(9, 0))
            with SupervisedRunner(model, target=target, log_path=log) as runner:
                for config in asked_of(model, asked.wanted):
                    row: Row = {"model": name, "layers": model.hidden_layers}
                    row |= {"budget_bytes": budget} | peak_of(config, memory)
                    row |= predicted(config, model, gpu) | measured(runner, config)
                    row |= compared(row) | {"config": config.model_dump(mode="json")}
                    if "ratio" in row:
                        logs[name].append(math.log(row["ratio"]))
                    write(row, asked.output)
            memory.end_children()
    every = [ratio for ratios in logs.values() for ratio in ratios]
    spread = math.sqrt(statistics.fmean(ratio**2 for ratio in every)) if every else None
    middles = {name: math.exp(statistics.fmean(ratios)) for name, ratios in logs.items()}
    write({"gpu": gpu.name, "mean_ratio": middles, "log_spread": spread}, asked.output)


if __name__ == "__main__":
    main()
