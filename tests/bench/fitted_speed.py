"""What fitting 8-bit products to the weights costs a compiled step, and what layers that stay in 16
bits cost it.

    python -m tests.bench.fitted_speed [--model mistral-7b-v0.3] [--batch 10] -o OUT.jsonl

Each base and compute has a process of its own, one after the other. It compiles every variant, and
times them in turns: products as they are (`plain`),
fitted (`fitted`), and fitted with every fourth ``down_proj`` in 16 bits (`kept`). Weights are
random: speed does not depend on them. A row also has the seconds and the memory that fitting took.
"""

from __future__ import annotations

import contextlib
import statistics
import time
from concurrent.futures import ProcessPoolExecutor
from multiprocessing import get_context
from typing import Any

import torch

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.sweep.training.adapters import attached
from qlora_sweep.sweep.training.eight_bit import changed
from qlora_sweep.sweep.training.faithfulness import products_of
from qlora_sweep.sweep.training.fitting import _narrow_layers
from qlora_sweep.sweep.training.model import build_base
from qlora_sweep.sweep.training.step import TrainingLoop
from tests.bench.harness import Row, asked, write
from tests.bench.unsloth_beside import FAST

NUMERICS = (("fp8", "fp8"), ("int8", "int8"), ("nf4", "fp8"), ("nf4", "int8"))
COMMON: Row = FAST | {"expandable_segments": False}
TURNS, STEPS, WARMUP_STEPS = 4, 8, 3
KEPT_EVERY = 4
"""Of the decoder layers, one in so many keeps its ``down_proj`` in 16 bits."""


def plain(layers: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Let layers round their inputs as if nothing had been fitted."""
    names = ("input_scales", "input_mean", "mean_product")
    return changed((layer, name, None) for layer in layers.values() for name in names)


def kept(layers: dict[str, Any]) -> contextlib.AbstractContextManager[None]:
    """Let every fourth ``down_proj`` multiply in 16 bits."""
    chosen = [layer for name, layer in layers.items() if "down_proj" in name][::KEPT_EVERY]
    return changed((layer, "products", None) for layer in chosen)


def seconds_of_steps(loop: TrainingLoop, steps: int) -> float:
    """Return the seconds that a step takes, as a mean of some."""
    torch.cuda.synchronize()
    began = time.perf_counter()
    for _ in range(steps):
        loop.step()
    torch.cuda.synchronize()
    return (time.perf_counter() - began) / steps


def fitting(loop: TrainingLoop) -> Row:
    """Fit, and return what it took and found."""
    torch.cuda.reset_peak_memory_stats()
    began = time.perf_counter()
    fitted = loop.fit_8_bits()
    torch.cuda.synchronize()
    return {
        "fit_seconds": time.perf_counter() - began,
        "fit_peak_allocated_bytes": torch.cuda.max_memory_allocated(),
        "layers_over_the_bounds": len(fitted.kept_in_16_bits),
        "errors": [error.model_dump(mode="json") for error in products_of(fitted).errors],
    }


def measured(config: TrialConfig, model: str) -> Row:
    """Return a row of one base and compute."""
    device = torch.device("cuda")
    spec = load_model_spec(model)
    about: Row = {"config": config.changes_from(TrialConfig()), "model": model}
    base = build_base(config, spec=spec, weights="random", device=device, seed=0)
    with attached(base, config) as attachment:
        loop = TrainingLoop(attachment, config, seed=0)
        layers = _narrow_layers(attachment.model)
        seconds_of_steps(loop, WARMUP_STEPS)
        torch.cuda.reset_peak_memory_stats()
        seconds_of_steps(loop, 1)
        row = about | {"step_peak_allocated_bytes": torch.cuda.max_memory_allocated()}
        row |= fitting(loop)
        for layer in layers.values():
            layer.products = config.compute_dtype
        variants = {"plain": plain, "fitted": lambda _: contextlib.nullcontext(), "kept": kept}
        for variant in variants.values():
            with variant(layers):
                seconds_of_steps(loop, WARMUP_STEPS)
        return row | timed(loop, layers, variants)


def timed(loop: TrainingLoop, layers: dict[str, Any], variants: dict[str, Any]) -> Row:
    """Return the seconds of a step of each variant, turn by turn, and how they compare."""
    seconds: dict[str, list[float]] = {name: [] for name in variants}
    for _ in range(TURNS):
        for name, variant in variants.items():
            with variant(layers):
                seconds[name].append(seconds_of_steps(loop, STEPS))
    middles = {name: statistics.median(values) for name, values in seconds.items()}
    return {
        "seconds_per_step": seconds,
        "fitted_over_plain": middles["fitted"] / middles["plain"],
        "kept_over_fitted": middles["kept"] / middles["fitted"],
        "share_kept": share_kept(layers),
    }


def share_kept(layers: dict[str, Any]) -> float:
    """Return the share of the frozen layers' weights that `kept` keeps in 16 bits."""
    sizes = {name: layer.in_features * layer.out_features for name, layer in layers.items()}
    chosen = [name for name in layers if "down_proj" in name][::KEPT_EVERY]
    return sum(sizes[name] for name in chosen) / sum(sizes.values())


def main() -> None:
    """Print a row for each base and compute."""
    typed = asked(__doc__, model="mistral-7b-v0.3", batch=10)
    with ProcessPoolExecutor(1, get_context("spawn"), max_tasks_per_child=1) as processes:
        for quantization, compute_dtype in NUMERICS:
            numerics = {"quantization": quantization, "compute_dtype": compute_dtype}
            config = TrialConfig(**COMMON, **numerics, micro_batch_size=typed.batch)
            write(processes.submit(measured, config, typed.model).result(), typed.output)


if __name__ == "__main__":
    main()
