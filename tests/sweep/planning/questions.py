"""Thirty questions as people ask them, and the best answer that a person could type to each.

    python -m tests.sweep.planning.questions --cache DIRECTORY [-o FILE.md] [NUMBER ...]

prints a table: what a plan recommends, the best by hand, and their ratio. By hand is asking the
same forecaster about every micro-batch, share of recomputed layers, kernel, base and 16-bit type,
at the length and the capacity that were asked for, in the class of numerics of the answer.
"""

from __future__ import annotations

import argparse
import itertools
import time
from collections.abc import Iterator, Sequence
from contextlib import closing
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

import numpy as np

from qlora_sweep.search_spaces.config import TrialConfig
from qlora_sweep.search_spaces.gpus import find_gpu
from qlora_sweep.search_spaces.kinds import EIGHT_BIT
from qlora_sweep.search_spaces.loading import parse_space, preset_name, with_fixed
from qlora_sweep.search_spaces.models import load_model_spec
from qlora_sweep.search_spaces.presets import preset_space, starting_text
from qlora_sweep.search_spaces.sizes import with_offered_batches
from qlora_sweep.search_spaces.space import SearchSpace
from qlora_sweep.sweep.planning.survey import Survey, survey
from qlora_sweep.sweep.predict.forecast import Forecast, Forecaster
from qlora_sweep.sweep.predict.memory.prediction import Fit
from qlora_sweep.sweep.predict.memory.predictor import MemoryPredictor, TracingPredictor
from qlora_sweep.sweep.predict.memory.profile_store import Tracer, TracingChildren
from qlora_sweep.sweep.predict.on_dataset import ShapesOnDataset
from tests.sweep.predict.forecasters import forecaster_on

BASES = ("nf4", "none", "int8", "fp8")
SHARES = tuple(eighth / 8 for eighth in range(9))
KERNELS = (
    ("hf", False),
    ("hf", True),
    ("fused-loss", False),
    ("fused-loss", True),
    ("liger", False),
)
WITHIN = 0.98
"""Of the best by hand."""


@dataclass(frozen=True)
class Asked:
    """A question of `sweep plan`."""

    gpu: str
    model: str
    seq_len: int
    fixed: dict[str, Any] = field(default_factory=dict)

    def __str__(self) -> str:
        more = "".join(f" --set {key}={value}" for key, value in self.fixed.items())
        return f"{self.gpu} --model {self.model} --seq-len {self.seq_len}{more}"


QUESTIONS = (
    # Those that were wrong.
    Asked("a100-80gb", "qwen3-32b", 4096),
    Asked("h100-80gb", "qwen3-32b", 4096),
    Asked("a100-80gb", "llama-3.1-70b", 2048),
    Asked("h100-80gb", "llama-3.1-8b", 16384),
    Asked("a100-40gb", "qwen3-14b", 8192),
    Asked("a100-80gb", "llama-3.1-8b", 32768),
    # Other sizes of models, lengths and GPUs.
    Asked("a10", "qwen3-8b", 2048),
    Asked("a10", "qwen3-0.6b", 512),
    Asked("a10", "llama-3.2-1b", 8192),
    Asked("a100-40gb", "mistral-7b-v0.3", 512),
    Asked("a100-40gb", "phi-4", 1024),
    Asked("a100-80gb", "qwen3-4b", 1024),
    Asked("h100-80gb", "qwen3-1.7b", 4096),
    Asked("h200", "llama-3.1-70b", 4096),
    Asked("h200", "qwen3-0.6b", 512),
    Asked("h200", "mistral-small-24b", 8192),
    Asked("rtx-4090", "llama-3.1-8b", 8192),
    Asked("rtx-4090", "gemma-3-12b", 2048),
    Asked("rtx-3090", "mistral-7b-v0.3", 1024),
    Asked("rtx-5090", "qwen3-14b", 2048),
    Asked("l4", "qwen2.5-7b", 1024),
    Asked("l40s", "llama-2-13b", 2048),
    Asked("t4", "llama-3.2-3b", 1024),
    Asked("v100-16gb", "tinyllama-1.1b", 2048),
    Asked("rtx-3060", "llama-3.1-8b", 2048),
    Asked("rtx-4060-ti-16gb", "qwen3-8b", 2048),
    # On two GPUs.
    Asked("a100-40gb", "llama-3.1-8b", 2048, {"data_parallel": 2}),
    Asked("rtx-3090", "qwen3-32b", 1024, {"data_parallel": 2, "sharding": "fsdp"}),
    # Mixtures of experts.
    Asked("h200", "qwen3-30b-a3b", 2048),
    Asked("h100-80gb", "gpt-oss-20b", 1024),
)


def space_of(asked: Asked) -> SearchSpace:
    """What `sweep plan` searches for a question."""
    gpu, model = find_gpu(asked.gpu), load_model_spec(asked.model)
    if preset_name(asked.gpu) is None:
        space = parse_space(starting_text(asked.gpu, asked.model), label=asked.gpu)
    else:
        space = preset_space(asked.gpu, model=asked.model)
    fixed = with_fixed(space, {"seq_len": asked.seq_len, **asked.fixed})
    assert isinstance(fixed, SearchSpace)
    return with_offered_batches(fixed, model, gpu.budget_bytes)


def forecaster_of(
    asked: Asked, *, cache: Path, tracer: Tracer, shapes: ShapesOnDataset | None = None
) -> Forecaster:
    gpu, model = find_gpu(asked.gpu), load_model_spec(asked.model)
    predictor: MemoryPredictor = TracingPredictor(
        model, cache_dir=cache, compute_capability=gpu.compute_capability, tracer=tracer
    )
    return forecaster_on(gpu.name, model, predictor=predictor, shapes=shapes)


def typed(answer: TrialConfig, batches: Sequence[int]) -> Iterator[list[TrialConfig]]:
    """Yield what a person could type instead of an answer, by its type, base and kernels."""
    dtypes = [answer.compute_dtype]
    if answer.compute_dtype not in EIGHT_BIT:
        dtypes = ["bf16", "fp16"]
    for dtype, base, (kernels, is_compiled) in itertools.product(dtypes, BASES, KERNELS):
        yield [
            answer.changed(
                compute_dtype=dtype,
                quantization=base,
                quantized_fraction=1.0,
                kernels=kernels,
                compile=is_compiled,
                checkpoint_fraction=share,
                micro_batch_size=batch,
            )
            for share in SHARES
            for batch in batches
        ]


def best_by_hand(forecaster: Forecaster, answer: TrialConfig, batches: Sequence[int]) -> Forecast:
    """The fastest that surely fits of all that a person could type."""
    best = forecaster.expect(answer)
    for configs in typed(answer, batches):
        valid = [config for config in configs if forecaster.is_valid(config)]
        forecasts = forecaster.forecast(valid)
        speeds = forecasts.tokens_per_second
        for at in np.argsort(-speeds).tolist():
            if speeds[at] <= (best.tokens_per_second or 0.0):
                break
            if forecasts.fit(at) is Fit.YES:
                best = forecasts[at]
                break
    return best


def batches_by_hand(space: SearchSpace) -> list[int]:
    """Every micro-batch up to 32, and sixteen for each doubling from there on."""
    offered = space.values_of("micro_batch_size")
    return [n for n in offered if n <= 32 or n % (1 << (n.bit_length() - 5)) == 0]


def compared(asked: Asked, forecaster: Forecaster) -> tuple[Survey, Forecast | None]:
    """What a plan finds, and the best by hand."""
    space = space_of(asked)
    found = survey(space, forecaster)
    answer = found.recommended
    if answer is None:
        return found, None
    return found, best_by_hand(forecaster, answer.config, batches_by_hand(space))


def _words(forecast: Forecast) -> str:
    config = forecast.config
    base = config.quantization if config.is_quantized else "16-bit base"
    if config.quantized_fraction < 1:
        base += f" on {config.quantized_fraction:.0%}"
    compiled = " compiled" if config.compile else ""
    return (
        f"{config.micro_batch_size} x {config.seq_len}, {config.compute_dtype}, {base}, "
        f"{config.kernels}{compiled}, {config.checkpoint_fraction:.0%} recomputed"
    )


def main() -> None:
    """Print the table."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("numbers", nargs="*", type=int)
    parser.add_argument("--cache", type=Path, required=True)
    parser.add_argument("-o", "--output", type=Path)
    options = parser.parse_args()
    lines = [
        "| `sweep plan` | recommended | tokens/s | GiB of GiB | best by hand | tokens/s | ratio |",
        "|---|---|---|---|---|---|---|",
    ]
    with closing(TracingChildren(outlive=True)) as children:
        for number in options.numbers or range(len(QUESTIONS)):
            asked = QUESTIONS[number]
            began = time.process_time()
            forecaster = forecaster_of(asked, cache=options.cache, tracer=children)
            found, best = compared(asked, forecaster)
            lines.append(_line(asked, found, best))
            print(lines[-1], f"{time.process_time() - began:.1f} s", flush=True)
    if options.output is not None:
        options.output.write_text("\n".join(lines) + "\n", encoding="utf-8")


def _line(asked: Asked, found: Survey, best: Forecast | None) -> str:
    answer = found.recommended
    if answer is None or best is None:
        return f"| `{asked}` | nothing fits | | | | | |"
    speed, most = answer.tokens_per_second or 0.0, best.tokens_per_second or 0.0
    ratio = f"{speed / most:.3f}" if most else "unknown"
    peak = (answer.peak_allocated_bytes or 0) / 2**30
    budget = found.forecaster.budget_bytes / 2**30
    return (
        f"| `{asked}` | {_words(answer)} | {speed:,.0f} | {peak:.2f} of {budget:.2f} "
        f"| {_words(best)} | {most:,.0f} | {ratio} |"
    )


if __name__ == "__main__":
    main()
